"""A server and a browser for the tests of the page, where chromium and selenium (extra `browser`) are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.page.browsing import Page, Script, SteppedDevice, ToldPrompts
from tests.serve.serving import Served, quick_llm, served
from tests.serve.test_tools import TEMPLATE

QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,900"
)
EXPECTED = ("status of 401", "status of 400", "requires 'TrustedHTML'")
"""What Chromium writes of what a test asks for."""


@pytest.fixture(scope="session")
def device() -> SteppedDevice:
    return SteppedDevice()


@pytest.fixture(scope="session")
def running(device: SteppedDevice) -> Iterator[Served]:
    with quick_llm(device, chat_template=TEMPLATE) as llm:
        llm.prompts = ToldPrompts(**vars(llm.prompts))
        with served(llm, reasoning_parser="qwen3") as server:
            yield server


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra `browser`)")
    binary, driver_binary = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver_binary):
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (*QUIET.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_binary))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(chromium: Any, running: Served, device: SteppedDevice) -> Iterator[Page]:
    """The page of a browser that has never seen it; behind the test nothing has failed or come from elsewhere."""
    Script.text = None
    device.gate.set()
    made = Page(chromium, running.address)
    chromium.get(f"{running.address}/")
    made.js("localStorage.clear(); sessionStorage.clear()")
    made.set()
    made.open()
    yield made
    device.gate.set()
    faults = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    assert [fault for fault in faults if not any(expected in fault for expected in EXPECTED)] == []
    loaded = made.js("return performance.getEntriesByType('resource').map(({name}) => name)")
    assert all(name.startswith(running.address) for name in loaded)
