"""The page at `/` in a real browser: headless Chromium, where it and selenium are installed (extra `browser`)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import GatedDevice, Served, quick_llm, served, wait_until

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra `browser`)")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
KEY = "sesame"
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]


@pytest.fixture
def device() -> GatedDevice:
    return GatedDevice()


@pytest.fixture
def running(device: GatedDevice) -> Iterator[Served]:
    with quick_llm(device, chat_template="{{ messages[-1].content }}") as llm:
        with served(llm, api_keys=(KEY,)) as server:
            yield server


@pytest.fixture
def browser(running: Served, tmp_path: Path) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*QUIET.split(), f"--user-data-dir={tmp_path}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(running.address)
        yield driver
        faults = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert [fault for fault in faults if "401" not in fault] == []
    finally:
        driver.quit()


def test_a_talk(browser: Any, device: GatedDevice) -> None:
    """Without a key it is refused in words; with it two turns are answered, one is stopped, and a new chat is empty."""
    find = lambda name: browser.find_element("id", name)  # noqa: E731
    boxes = lambda kind: [box.text for box in browser.find_elements("class name", kind)]  # noqa: E731

    def say(text: str) -> None:
        find("text").send_keys(text)
        find("send").click()

    say("One morning")
    wait_until(lambda: bool(boxes("failed")))
    assert "API key" in boxes("failed")[0]
    find("key").send_keys(KEY)
    say("One morning")
    wait_until(lambda: bool(boxes("speed")))
    say("the cat")
    wait_until(lambda: len(boxes("speed")) == 2)
    assert boxes("user") == ["One morning", "One morning", "the cat"]
    assert len(boxes("assistant")) == 2 and all(boxes("assistant"))
    assert all(
        re.fullmatch(r"first token after \d+ ms, \d+ tokens(, [\d.]+ tokens/s)?", line) for line in boxes("speed")
    )

    device.gate.clear()
    say("and then")
    wait_until(lambda: find("send").text == "Stop")
    find("send").click()
    wait_until(lambda: find("send").text == "Send")
    device.gate.set()
    find("reset").click()
    assert boxes("said") == []
