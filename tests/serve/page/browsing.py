"""What the tests of the page do with a browser, and how the model says what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cheetah.runtime import SamplingParams
from cheetah.runtime.text.pieces import Pieces
from cheetah.runtime.text.prompts import Prompts
from cheetah.runtime.text.stream import TextStream
from tests.serve.serving import PATIENCE_S, GatedDevice, wait_until
from tests.serve.test_tools import ScriptDecoder

FOLDER = Path(__file__).parent
CHECKS = (FOLDER / "checks.js").read_text("utf-8")
WATCH = """
const send = window.fetch;
window.sent = [];
window.fetch = (path, given) => {
  if (given.body) window.sent.push(JSON.parse(given.body));
  return send(path, given);
};
"""


class Keys:
    """WebDriver's codes."""

    RELEASED, TAB, ENTER, CONTROL, ESCAPE, UP, DOWN = "\ue000\ue004\ue007\ue009\ue00c\ue013\ue015"


class Script:
    """What the model says from now on, 24 characters a token; None for what it says itself."""

    text: str | None = None


class ToldPrompts(Prompts):
    def pieces(self, prompt_ids: Sequence[int], params: SamplingParams, index: int) -> Pieces:
        if Script.text is None:
            return super().pieces(prompt_ids, params, index)
        return Pieces(TextStream(ScriptDecoder(Script.text + ".END", 24), params.stop), index)


class SteppedDevice(GatedDevice):
    """While `steps` is there, each launch waits for one of it."""

    steps: threading.Semaphore | None = None

    def synchronize(self, timeout_s: float | None = None, progress: object = None) -> None:
        if self.steps is not None:
            assert self.steps.acquire(timeout=PATIENCE_S)
        super().synchronize(timeout_s, progress)

    @contextmanager
    def stepwise(self) -> Iterator[threading.Semaphore]:
        """To be released once for each launch that is to end; behind the block all do."""
        steps = self.steps = threading.Semaphore(0)
        try:
            yield steps
        finally:
            self.steps = None
            steps.release(1000)


class Page:
    """What a person sees and does."""

    def __init__(self, browser: Any, address: str):
        self.browser, self.address = browser, address

    def open(self) -> None:
        self.browser.get(f"{self.address}/")
        wait_until(lambda: "no server" not in self.find("#model").text and self.find("#model").text != "…")

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [found.text for found in self.all(selector)]

    def js(self, script: str, *given: Any) -> Any:
        return self.browser.execute_script(script, *given)

    def press(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def click(self, selector: str) -> None:
        self.js("arguments[0].click()", self.find(selector))  # some are shown only under the pointer

    @property
    def field(self) -> str:
        return str(self.find("#text").get_property("value"))

    @property
    def is_busy(self) -> bool:
        return self.find("#send").get_attribute("aria-label") == "Stop"

    def say(self, text: str, *, waits: bool = True) -> None:
        self.find("#text").send_keys(text, Keys.ENTER)
        if waits:
            self.wait()

    def wait(self) -> None:
        wait_until(lambda: not self.is_busy)

    def set(self, **settings: Any) -> None:
        """As settings of talks that begin now; shown after `open`."""
        self.js("localStorage.setItem('cheetah.settings', arguments[0])", json.dumps({"max_tokens": 20, **settings}))

    def kept(self) -> list[dict[str, Any]]:
        """The talks in the browser's storage."""
        stored = self.js("return Object.entries(localStorage)")
        return [json.loads(text) for key, text in stored if key.startswith("cheetah.talk.")]

    def watch_requests(self) -> None:
        self.js(WATCH)

    def look(self, width: int, height: int, theme: str) -> None:
        """As on such a screen, until `look_as_before`."""
        given = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", given)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
        wait_until(lambda: self.js("return innerWidth") == width)

    def look_as_before(self) -> None:
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {})

    def check(self, call: str, *given: Any) -> Any:
        """What a function of checks.js gives."""
        script = f"{CHECKS}\nconst done = arguments[{len(given)}];"
        script += f"Promise.resolve({call}(...[...arguments].slice(0, -1))).then(done, (wrong) => done(String(wrong)));"
        return self.browser.execute_async_script(script, *given)

    def last_request(self) -> dict[str, Any]:
        return dict(self.js("return window.sent.at(-1)"))
