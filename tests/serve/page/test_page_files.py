"""What the page is made of: files of this server alone, which a browser may do nothing else with."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cheetah.serve.gates import OPEN_TO_ALL
from cheetah.serve.page import HEADERS, MEDIA_TYPES, PATHS, add_page

TEXTS = {path: files("cheetah.serve.page").joinpath(name).read_text("utf-8") for path, (name, _) in PATHS.items()}
SCRIPTS = [path for path in PATHS if path.endswith(".js")]


def test_every_file_is_served_without_a_key() -> None:
    app = FastAPI()
    add_page(app)
    with TestClient(app) as client:
        for path, (_, media_type) in PATHS.items():
            answer = client.get(path)
            assert answer.text == TEXTS[path] and answer.headers["content-type"].startswith(media_type), path
            assert HEADERS.items() <= dict(answer.headers).items()
            assert client.post(path).status_code == 405
        assert client.get("/page/__init__.py").status_code == 404
        assert client.get("/page/../app.py").status_code == 404
    assert PATHS.keys() <= set(OPEN_TO_ALL)


def test_what_is_asked_for_is_there() -> None:
    """Every file that another names; and nothing but these is ever needed."""
    named = {f"/{path}" for path in re.findall(r'(?:href|src)="(page/[^"]+)"', TEXTS["/"])}
    for script in SCRIPTS:
        named |= {f"/page/{name}" for name in re.findall(r'^import .* from "\./([^"]+)";$', TEXTS[script], re.M)}
    assert named | {"/"} == PATHS.keys()


def test_the_policy_lets_nothing_in() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'none'", "'self'"} and policy["default-src"] == "'none'"
    assert {name for name, value in policy.items() if value == "'self'"} == {
        "script-src",
        "style-src",
        "img-src",
        "connect-src",
    }


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_inline_or_from_elsewhere(path: str) -> None:
    text = re.sub(r'xmlns="[^"]*"|"http://www\.w3\.org/[^"]*"', "", TEXTS[path])
    assert not re.search(r"""["'(]\s*(?:https?:)?//\w""", text), "an address elsewhere"
    if path == "/":
        assert not re.search(r"<[^>]+\s(?:on\w+|style)\s*=", text) and not re.search(r"<script(?![^>]* src=)", text)
    if path.endswith(".js"):
        sinks = r"\b(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
        assert not re.search(sinks, text)


def test_every_kind_of_file_has_a_media_type() -> None:
    names = [entry.name for entry in files("cheetah.serve.page").iterdir() if "." in entry.name]
    assert {name[name.rfind(".") :] for name in names} - {".py"} == MEDIA_TYPES.keys()
