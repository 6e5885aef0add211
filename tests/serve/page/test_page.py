"""The page at `/` as a person uses it: talks, what is refused and stopped, settings, keys, what it looks like."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.serve.page.browsing import Keys, Page, Script, SteppedDevice
from tests.serve.serving import GatedDevice, Served, quick_llm, served, wait_until
from tests.serve.test_tools import CALL, TEMPLATE, TOOLS

KEY = "sesame"

pytestmark = pytest.mark.slow

# Talks.


def test_a_talk_with_a_key(chromium: Any) -> None:
    """A key is asked for where the server wants one, and only there; a wrong one is told."""
    with quick_llm(chat_template=TEMPLATE) as llm, served(llm, api_keys=(KEY,)) as server:
        page = Page(chromium, server.address)
        chromium.get(f"{server.address}/")
        wait_until(lambda: page.find("#key-wanted").is_displayed())
        page.find("#key").send_keys("open", Keys.ENTER)
        wait_until(lambda: "does not take this key" in page.find("#key-problem").text)
        page.find("#key").clear()
        page.find("#key").send_keys(KEY, Keys.ENTER)
        wait_until(lambda: "demo" in page.find("#model").text)
        assert not page.find("#key-wanted").is_displayed()
        page.say("One morning,")
        assert len(page.all(".assistant")) == 1
        page.open()
        assert "demo" in page.find("#model").text and not page.find("#key-wanted").is_displayed()


def test_two_turns_and_their_speed(page: Page) -> None:
    assert not page.find("#key-wanted").is_displayed()
    page.say("One morning,")
    page.say("the cat")
    assert page.texts(".bubble") == ["One morning,", "the cat"]
    answers = page.texts(".assistant .markdown:not(.thoughts *)")
    assert len(answers) == 2 and all(answers)
    speed = r"first token [\d.]+ m?s · \d+ tokens?( · [\d.]+ tokens/s)?"
    assert all(re.fullmatch(speed, line) for line in page.texts(".stats"))
    assert re.match(r"\d+ of 96 tokens", page.find("#room").text)
    (talk,) = page.kept()
    assert [message["role"] for message in talk["messages"]] == ["user", "assistant"] * 2
    page.click("#model")
    wait_until(lambda: "weights" in page.find("#facts").text)
    assert "96 tokens" in page.find("#facts").text
    page.press(Keys.ESCAPE)
    page.click("#new")
    assert page.all(".message") == [] and page.texts("#talks .name") == ["One morning,"]


def test_thoughts_are_folded_away(page: Page) -> None:
    page.set(stop=".END")
    page.open()
    Script.text = "<think>\nLet me **see**.\n</think>\n\nIt *rains*. <b>x</b>"
    page.say("One morning,")
    assert page.texts(".assistant > .markdown") == ["It rains. <b>x</b>"] and page.texts(".markdown em") == ["rains"]
    assert page.find(".thoughts").get_attribute("open") is None
    page.find(".thoughts summary").click()
    assert page.texts(".thoughts .markdown") == ["Let me see."] and page.texts(".thoughts strong") == ["see"]
    page.watch_requests()
    Script.text = "A template opened\nthis thought.\n</think>\n\nIt rains."  # which the server does not know of
    page.say("And?")
    assert page.last_request()["messages"][1] == {"role": "assistant", "content": "It *rains*. <b>x</b>"}
    assert page.texts(".assistant > .markdown")[1] == "It rains." and len(page.all(".thoughts:not([hidden])")) == 2
    page.say("And?")
    assert page.last_request()["messages"][3] == {"role": "assistant", "content": "It rains."}


def test_calls_of_tools_are_shown_and_answered(page: Page) -> None:
    page.set(stop=".END", tools=json.dumps(TOOLS))
    page.open()
    page.watch_requests()
    Script.text = f"Let me see.\n{CALL}"
    page.say("One morning,")
    assert page.last_request()["tools"] == TOOLS
    assert page.texts(".call-head code") == ["weather"] and '"city": "Köln"' in page.find(".call pre").text
    Script.text = "It rains."
    page.find(".results textarea").send_keys("rain")
    page.find(".results button").click()
    page.wait()
    asked, called, gave = page.last_request()["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "weather" and called["content"] == "Let me see."
    assert gave == {"role": "tool", "content": "rain", "tool_call_id": called["tool_calls"][0]["id"]}
    assert page.texts(".call pre")[1:] == ["rain"] and page.texts(".assistant > .markdown")[-1] == "It rains."
    assert page.all(".results") == []


def test_what_is_refused_stays_in_the_field(page: Page) -> None:
    page.say("One morning,")
    long = "a b " * 100
    page.say(long)
    assert "context of 96" in page.find("#notice").text and page.field == long.strip()
    assert len(page.all(".message")) == 2 and len(page.kept()[0]["messages"]) == 2
    page.find("#text").clear()
    page.say("the cat")
    assert page.find("#notice").text == "" and len(page.all(".message")) == 4


def test_stopping(page: Page, device: SteppedDevice) -> None:
    """Before the first token nothing is kept and the message goes back; behind it what was said stays and can go on."""
    device.gate.clear()
    page.say("One morning,", waits=False)
    wait_until(lambda: page.is_busy)
    assert page.find(".waiting").is_displayed()
    page.press(Keys.ESCAPE)
    page.wait()
    assert page.field == "One morning," and page.all(".message") == [] and page.kept() == []
    device.gate.set()
    page.press(Keys.ENTER)
    page.wait()

    answers = lambda: page.texts(".assistant > .markdown")  # noqa: E731
    with device.stepwise() as steps:
        page.say("the cat", waits=False)
        steps.release()  # its first token comes of one launch, the others of later ones
        wait_until(lambda: len(answers()) == 2 and bool(answers()[-1]))
        assert page.all(".message:last-child .actions button") == []
        page.find("#send").click()
        page.wait()
    before = answers()[-1]
    assert before and page.texts(".end")[-1] == "Stopped."
    page.watch_requests()
    page.click(".message:last-child [class=actions] button")
    page.wait()
    after = answers()[-1]
    assert page.last_request()["continue_final_message"] is True
    assert after.startswith(before) and len(after) > len(before)


def test_a_page_that_is_closed_amid_an_answer(page: Page, running: Served, device: SteppedDevice) -> None:
    """What had come is there again and can go on; a message without any answer can be answered."""
    answers = lambda: page.texts(".assistant > .markdown")  # noqa: E731
    with device.stepwise() as steps:
        page.say("One morning,", waits=False)
        wait_until(lambda: page.is_busy)
        page.browser.refresh()
        wait_until(lambda: page.texts(".bubble") == ["One morning,"])
        assert answers() == []
        steps.release()
        wait_until(lambda: running.llm.engine.engine.is_idle)
        page.click(".user .actions button")
        steps.release()
        wait_until(lambda: any(answers()))
        page.browser.refresh()
        wait_until(lambda: any(answers()))
    assert page.texts(".end")[0].startswith("Cut: the page was closed") and not page.is_busy
    before = answers()[0]
    page.click(".assistant .actions button")
    page.wait()
    assert answers()[0].startswith(before) and page.texts(".bubble") == ["One morning,"]


BEGUN = 'data: {"choices": [{"delta": {"content": "It began"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
BROKEN = {
    "fault": (f'{BEGUN}\n\ndata: {{"error": {{"message": "the engine failed"}}}}\n\n', "the engine failed"),
    "end": (f"{BEGUN}\n\n", "The server ended before the answer did."),
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_answer_that_breaks_off(page: Page, how: str) -> None:
    """What came of it stays, with what went wrong; a message that nothing was answered to goes back."""
    body, told = BROKEN[how]
    stub = "const [body] = arguments; window.fetch = async (path) => new Response(path.includes('chat') ? body : '')"
    page.js(stub, body)
    page.say("One morning,")
    assert page.texts(".assistant > .markdown") == ["It began"] and page.texts(".end.bad") == [told]
    assert [message["role"] for message in page.kept()[0]["messages"]] == ["user", "assistant"]
    for answer, said in (
        ("Promise.reject(new TypeError())", "does not answer"),
        ("new Response('', {status: 502})", "502"),
    ):
        page.js(f"window.fetch = async () => {answer}")
        page.find("#text").clear()
        page.say("the cat")
        assert said in page.find("#notice").text and page.field == "the cat" and len(page.all(".message")) == 2


def test_the_share_of_the_ceiling(page: Page) -> None:
    """Told beside an answer, of its own steps, and beside the model where the server measures it; else left out."""
    page.js(
        "window.counted = {};"
        "const send = window.fetch; const text = () => Object.entries(window.counted)"
        '  .map(([name, value]) => `cheetah:${name}{engine="0"} ${value}`).join(String.fromCharCode(10));'
        "window.fetch = async (path, given) => path === 'metrics' ? new Response(text()) : send(path, given)"
    )
    page.say("One morning,")
    assert "ceiling" not in page.find(".stats").text + page.find("#model").text
    page.js(
        "Object.assign(window.counted, {decode_gb_per_second: 4000, read_ceiling_gb_per_second: 4400,"
        "  decode_bytes_total: 9e12, decode_seconds_total: 3});"
    )
    page.say("the cat")
    wait_until(lambda: page.texts(".stats")[1].endswith(" · 91 % of the read ceiling"))
    assert page.find("#model").text.endswith("91 % of the read ceiling")
    page.js("window.counted.decode_bytes_total += 4.4e12; window.counted.decode_seconds_total += 2")
    page.say("again")
    wait_until(lambda: page.texts(".stats")[2].endswith(" · 50 % of the read ceiling"))


def test_a_browser_without_room(page: Page) -> None:
    page.js("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') }")
    page.say("One morning,")
    assert "no room" in page.find("#notice").text and len(page.all(".message")) == 2


def test_edit_and_make_again(page: Page) -> None:
    page.set(temperature=0.5, seed=7, system="Be kind.", stop=".END")
    page.open()
    page.watch_requests()
    Script.text = "one"
    page.say("One morning,")
    body = page.last_request()
    assert (body["temperature"], body["seed"], body["stop"]) == (0.5, 7, [".END"])
    assert body["messages"][0] == {"role": "system", "content": "Be kind."} and "Be kind." in page.find(".system").text
    Script.text = "two"
    page.click(".assistant [aria-label='Make another answer']")
    page.wait()
    answer = lambda: page.texts(".assistant > .markdown")  # noqa: E731
    assert answer() == ["two"] and page.texts(".assistant .versions") == ["2/2"]
    page.click("[aria-label='The version before']")
    assert answer() == ["one"]

    page.find("#text").send_keys(Keys.UP)
    assert page.field == "One morning," and page.find("#editing").is_displayed()
    page.press(Keys.ESCAPE)
    assert page.field == "" and not page.find("#editing").is_displayed()
    page.find("#text").send_keys(Keys.UP)
    Script.text = "three"
    page.press(" early", Keys.ENTER)
    page.wait()
    assert page.texts(".bubble") == ["One morning, early"] and answer() == ["three"]
    assert [message["role"] for message in page.last_request()["messages"]] == ["system", "user"]
    page.click(".user [aria-label='The version before']")
    assert page.texts(".bubble") == ["One morning,"] and answer() == ["two"]

    page.click("[aria-label='Edit the message']")
    page.press(" a b" * 100, Keys.ENTER)
    page.wait()
    assert page.field.startswith("One morning, a b") and page.find("#editing").is_displayed()
    assert page.texts(".bubble") == ["One morning,"] and answer() == ["two"]


def test_settings_are_checked_and_kept(page: Page) -> None:
    page.find("#open-settings").click()
    page.find("#set-temperature").send_keys("0.25")
    page.find("#set-top_p").send_keys("3")
    page.find("#set-tools").send_keys("{")
    assert page.texts(".problem")[3] == "From 0 to 1." and "no JSON" in page.find("#set-tools-problem").text
    page.find("#set-theme").send_keys("dark")
    page.press(Keys.ESCAPE)
    assert page.js("return localStorage.getItem('cheetah.settings')") == '{"max_tokens":20,"temperature":0.25}'
    page.open()
    assert page.js("return getComputedStyle(document.documentElement).colorScheme") == "dark"
    page.watch_requests()
    page.say("One morning,")
    assert page.last_request()["temperature"] == 0.25 and "top_p" not in page.last_request()


def test_talks_are_kept_renamed_and_deleted(page: Page) -> None:
    for text in ("One morning,", "the cat"):
        page.say(text)
        page.click("#new")
    page.browser.refresh()
    wait_until(lambda: page.texts("#talks .name") == ["the cat", "One morning,"])
    page.find("#talks .name").click()
    assert page.texts(".bubble") == ["the cat"] and len(page.all(".assistant")) == 1
    page.browser.refresh()  # the address says which talk is open
    wait_until(lambda: page.texts(".bubble") == ["the cat"])

    page.find("#talks .name").send_keys(Keys.DOWN)
    page.press(Keys.ENTER)
    wait_until(lambda: page.texts(".bubble") == ["One morning,"])
    page.click("#talks .open [title=Rename]")
    page.press(Keys.CONTROL + "a", Keys.RELEASED, "<b>Tom</b>", Keys.ENTER)
    assert page.find("#title").text == "<b>Tom</b>" and page.texts("#talks .name")[1] == "<b>Tom</b>"
    page.click("#talks .open [title=Delete]")
    assert page.texts("#talks .name") == ["the cat"] and len(page.kept()) == 1 and page.all(".message") == []
    page.find("#toast button").click()
    assert page.texts("#talks .name") == ["the cat", "<b>Tom</b>"] and len(page.kept()) == 2
    page.browser.back()


def test_a_talk_that_is_deleted_while_it_is_answered(page: Page, device: GatedDevice) -> None:
    page.say("One morning,")
    device.gate.clear()
    page.say("the cat", waits=False)
    wait_until(lambda: page.is_busy)
    page.click("#talks .open [title=Delete]")
    device.gate.set()
    page.say("the dog")
    assert [talk["title"] for talk in page.kept()] == ["the dog"] and page.texts("#talks .name") == ["the dog"]


def test_another_tab_is_followed(page: Page) -> None:
    page.say("One morning,")
    first = page.browser.current_window_handle
    address = page.browser.current_url
    page.browser.switch_to.new_window("tab")
    try:
        page.browser.get(address)
        wait_until(lambda: page.texts(".bubble") == ["One morning,"])
        page.say("the cat")
        page.browser.switch_to.window(first)
        wait_until(lambda: page.texts(".bubble") == ["One morning,", "the cat"])
    finally:
        (other,) = {*page.browser.window_handles} - {first}
        page.browser.switch_to.window(other)
        page.browser.close()
        page.browser.switch_to.window(first)


# What it looks like, and who can use it.

LAYOUTS = [(1280, 800), (500, 360), (340, 640)]


def test_it_fits_the_window_in_both_themes(page: Page) -> None:
    """The field is in reach, the talk scrolls and nothing else does, and every text has the contrast of WCAG's AA."""
    page.set(stop=".END")
    page.open()
    Script.text = (
        "<think>Well</think># Title\n\nText `code` [link](https://a.example)\n\n> quote\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```py\ndef f(x):  # " + "long " * 30 + '\n    return "s" + 1\n```\n\n- [x] done\n\n' + "word" * 40
    )
    page.say("One morning,")
    seen = set()
    try:
        for width, height in LAYOUTS:
            for theme in ("light", "dark"):
                page.look(width, height, theme)
                box = page.js("return document.getElementById('ask').getBoundingClientRect().toJSON()")
                assert 0 <= box["left"] and box["right"] <= width and box["bottom"] <= height, (width, height)
                root = page.js("const e = document.scrollingElement; return [e.scrollWidth, e.scrollHeight]")
                assert root == [width, height]
                wide = page.js("const e = document.getElementById('scroll'); return e.scrollWidth - e.clientWidth")
                assert wide == 0 and page.js("return document.getElementById('scroll').scrollHeight > 200")
                assert page.check("faint", 4.5) == [], (width, theme)
                seen.add(page.js("return getComputedStyle(document.body).backgroundColor"))
        assert len(seen) == 2
    finally:
        page.look_as_before()


def test_the_talk_is_followed_unless_one_reads(page: Page) -> None:
    page.set(stop=".END")
    page.open()
    below = "const e = document.getElementById('scroll'); return e.scrollHeight - e.scrollTop - e.clientHeight"
    Script.text = "line\n\n" * 60
    page.say("One morning,")
    wait_until(lambda: page.js(below) < 2)
    assert not page.find("#latest").is_displayed()
    page.js("document.getElementById('scroll').scrollTop = 0")
    wait_until(lambda: page.find("#latest").is_displayed())
    page.js("document.querySelector('.assistant > .markdown').append('more')")
    assert page.js("return document.getElementById('scroll').scrollTop") == 0
    page.find("#latest").click()
    wait_until(lambda: page.js(below) < 2)


def test_keys_and_names(page: Page) -> None:
    """Everything that can be pressed has a name, in an order that makes sense; what is said is told once."""
    page.set(stop=".END")
    page.open()
    Script.text = "First.\n\n```py\nx = 1\ny = 2\n```\n\nLast."
    page.say("One morning,")
    told = page.js("return [...document.querySelectorAll('#said p')].map((line) => line.textContent)")
    assert told == ["The model answers.", "First.", "code in py, 2 lines", "Last.", "The answer is whole."]
    for found in page.all("button, input:not([hidden]), textarea, select, summary, [tabindex]"):
        if found.is_displayed():
            assert found.accessible_name, found.get_attribute("outerHTML")
    page.find("#new").send_keys(Keys.TAB)
    order = []
    for _ in range(16):
        focused = page.browser.switch_to.active_element
        order.append(focused.get_attribute("id") or focused.get_attribute("title") or focused.tag_name)
        page.press(Keys.TAB)
    names = ["Rename", "Delete", "model", "open-settings", "scroll", "Copy the message", "Edit the message"]
    names += ["Copy the answer", "Make another answer", "text"]
    assert [name for name in order if name in names] == names
    page.look(400, 700, "light")
    try:
        page.find("#open-side").click()
        assert page.find("main").get_property("inert") is True
        page.press(Keys.ESCAPE)
        assert page.find("main").get_property("inert") is False
        assert page.browser.switch_to.active_element.get_attribute("id") == "open-side"
        page.find("#open-side").click()
        wait_until(lambda: page.find("#talks .name").is_displayed())
        page.click("#talks .name")
        assert page.find("main").get_property("inert") is False and page.all(".listing") == []
        page.find("#open-side").click()
        page.look(1280, 800, "light")
        wait_until(lambda: page.find("main").get_property("inert") is False)
    finally:
        page.look_as_before()


def test_copying(page: Page) -> None:
    """The code as it was written; also where the browser has no clipboard for pages that came by plain HTTP."""
    page.set(stop=".END")
    page.open()
    Script.text = "```py\nif a < b:\n\tx = '&'\n```"
    page.say("One morning,")
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": page.address}
    page.browser.execute_cdp_cmd("Browser.grantPermissions", grant)
    read = "navigator.clipboard.readText().then(arguments[0], (problem) => arguments[0](String(problem)))"
    write = "navigator.clipboard.writeText('what was copied before').then(arguments[0], arguments[0])"
    for way in ("", "navigator.clipboard.writeText = () => Promise.reject(new Error())"):
        page.browser.execute_async_script(write)
        page.js(way)
        page.click(".code button")
        wait_until(lambda: bool(page.all(".code button.done")))
        assert page.browser.execute_async_script(read) == "if a < b:\n\tx = '&'"
        page.js("document.querySelector('.code button').classList.remove('done')")
