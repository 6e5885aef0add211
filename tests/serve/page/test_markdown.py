"""What models write, as the page shows it: right Markdown and formulas, and nothing that a text could do beside."""

from __future__ import annotations

import re

import pytest

from tests.serve.page.browsing import FOLDER, Page

pytestmark = pytest.mark.slow


def cases(name: str) -> dict[str, str]:
    """Text -> HTML."""
    parts = (FOLDER / name).read_text("utf-8").removesuffix("\n").split("\n=====\n")
    return {text: html for text, html in (part.split("\n-->\n") for part in parts)}


LINKS = {
    '[a *b*](https://x.example/y_(z) "t")': ("https://x.example/y_(z)", "a b"),
    "see https://x.example/a_b_c?q=1, ok": ("https://x.example/a_b_c?q=1", "https://x.example/a_b_c?q=1"),
    "(https://x.example/a)": ("https://x.example/a", "https://x.example/a"),
    "<mailto:a@x.example>": ("mailto:a@x.example", "mailto:a@x.example"),
    "![a cat](https://x.example/cat.png)": ("https://x.example/cat.png", "image: a cat"),
}

HOSTILE = [
    "<img src=x onerror=hacked()><script>hacked()</script><svg onload=hacked()>",
    "[a](javascript:hacked()) [b](JaVaScRiPt:hacked()) [c](java\tscript:hacked()) [d](&#106;avascript:hacked())",
    "[e](data:text/html,<script>hacked()</script>) [f](vbscript:x) [g](file:///etc/passwd)",
    "[h](//x.example) [i](/v1/models) [j](?a) [k](#talk) [l](v1/models)",
    "<javascript:hacked()> <https://x.example/\"onclick=hacked()> <https://x.example/'><b>",
    '[j](https://x.example/"onmouseover="hacked()) [k](<https://x.example/ "> <b>) ![l](javascript:hacked())',
    "![m](https://x.example/pixel.png) ![n][o] [p]: javascript:hacked()",
    '```"><img onerror=hacked() src=x>\nx\n```\n\n```__proto__\nx\n```\n\n```constructor\nx\n```',
    "| <b>x</b> | y |\n|---|---|\n| <img src=x onerror=hacked()> | [z](javascript:hacked()) |",
    "$\\href{javascript:hacked()}{x}$ $\\text{<img src=x onerror=hacked()>}$",
    "$$\\class{x}{y}$$ $\\constructor$ $\\mathbb{__proto__}$ $\\begin{constructor}x\\end{constructor}$",
    "&lt;script&gt;hacked()&lt;/script&gt; &#x3c;img src=x onerror=hacked()&#x3e; &#0; &#1114112; &constructor;",
    "- [ ] <input onfocus=hacked() autofocus>\n> <iframe srcdoc='<script>hacked()</script>'>",
]

ENDLESS = [
    *(mark * 30_000 for mark in ("*", "_", "~", "`", "[", "![", "<", "$", "&", "\\", "> ", "- ", "1. ", "|", "#", "(")),
    *(mark * 8_000 for mark in ("*a ", "a*", "**a *b ", "*a_ ", "*a **b ", "[a](", "[a](b ", "![a]( ", "`` ` ")),
    *(mark * 8_000 for mark in ("$a ", "\\(a ", "$$ ", "a|", "a$", "h", "http", "https://a ", "<br", "&a")),
    *(f"{line}\n" * 8_000 for line in ("> a", "- a", "a|b", "$$", "$$ a", "a", "    - a", "```a", "1. a\n\n2. b")),
    "[" * 20_000 + "[a](b)" * 5_000,
    "https://x.example/" + ")" * 20_000 + "." * 20_000 + "x",
    "[a](" + " " * 30_000 + "b",
    "".join(f"{' ' * depth}- a\n" for depth in range(300)),
    "$" + "{" * 4_000 + "$ $" + "\\frac" * 900 + "$ $" + "\\left(" * 700 + "$",
    '```py\n' + '"""' * 10_000 + "\n```\n```js\n/*" + "`" * 20_000 + "\n```",
]  # fmt: skip


@pytest.mark.parametrize("name", ["markdown.txt", "formulas.txt"])
def test_as_it_is_meant(page: Page, name: str) -> None:
    wanted = cases(name)
    assert dict(zip(wanted, page.check("rendered", [*wanted]), strict=True)) == wanted


def test_links(page: Page) -> None:
    link = r'<a href="([^"]*)" title="[^"]*" target="_blank" rel="noopener noreferrer nofollow">(.*?)</a>'
    for html, (target, label) in zip(page.check("rendered", [*LINKS]), LINKS.values(), strict=True):
        (found,) = re.findall(link, html)
        assert (found[0], re.sub("<.*?>", "", found[1])) == (target, label)


def test_hostile_text_stays_text(page: Page) -> None:
    assert page.check("forbidden", HOSTILE) == []
    (shown,) = page.check("rendered", HOSTILE[:1])
    assert shown == f"<p>{HOSTILE[0].replace('<', '&lt;').replace('>', '&gt;')}</p>"
    slip = "try { document.body.innerHTML = '<b>x</b>'; return '' } catch (problem) { return problem.name }"
    assert page.js(slip) == "TypeError"  # what would slip through is refused by the policy, too


def test_endless_text_ends(page: Page) -> None:
    """Its time grows with its length, not with the square of it: else WebDriver's limit of 30 s ends this."""
    assert page.check("forbidden", ENDLESS) == []


def test_what_grows_looks_like_what_is_whole(page: Page) -> None:
    texts = [*cases("markdown.txt"), *cases("formulas.txt"), *LINKS, *HOSTILE]
    assert page.check("grownOtherwise", "\n\n".join(texts), 7) == []
