"""Files of others are read with bounds, and nothing that they hold is printed as it is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cheetah.errors import CheetahError
from cheetah.printable import MESSAGE_CHARACTERS, printable, shown
from cheetah.runtime.device import say_to_stderr
from cheetah.untrusted import UnreadableError, parse_json, read_bytes, read_json, read_text

ESCAPE = "\x1b]0;owned\x07\x9b31m\r\u202e\ud800"


def test_only_what_does_no_harm_is_printed() -> None:
    assert printable(ESCAPE) == "\\x1b]0;owned\\x07\\x9b31m\\r\\u202e\\ud800"
    assert printable("two lines\n\tof Größe 12 µs, 文字 🐆") == "two lines\n\tof Größe 12 µs, 文字 🐆"
    assert printable("x" * 50, 10) == "x" * 10 + "... (40 more characters)"


def test_errors_and_notes_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(CheetahError(f"{ESCAPE}: wrong")).startswith("\\x1b]0;owned\\x07")
    assert len(str(CheetahError("x" * 10**6))) < MESSAGE_CHARACTERS + 100
    say_to_stderr(f"note: {ESCAPE}")
    assert capsys.readouterr().err == f"note: {printable(ESCAPE)}\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**30, "1" + "0" * 30),
        (-(10**9999), "an integer of about 10000 digits"),
        ("\x1b[2J", "'\\x1b[2J'"),
        ([1, "a", None], "[1, 'a', None]"),
        (list(range(10**5)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
    ],
    ids=lambda value: "",
)
def test_values_are_shown_on_a_short_line(value: object, text: str) -> None:
    assert shown(value) == text
    assert len(shown({"a" * 10**6: [[[[[["b" * 10**6]]]]]] * 100})) < 450


def nested_in(folder: Path, data: bytes) -> Path:
    path = folder / "file.json"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 1_000_000, "its brackets are nested too deeply"),
        (b'{"a":' * 100_000, "its brackets are nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON: Exceeds the limit (4300 digits)"),
        (b'{"a": "\xff"}', "is not UTF-8 text: byte 7 is 0xff"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "key 'a' stands twice in one object: keep one of them"),
        (b'["a"]', "holds a JSON list, expected an object"),
        (b"", "cannot be read as JSON: Expecting value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_that_cannot_be_read_is_one_error(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UnreadableError) as raised:
        read_json(nested_in(tmp_path, data))
    assert str(raised.value).startswith(f"{tmp_path}/file.json: ") and message in str(raised.value)


def test_numbers_that_no_float_holds_are_left_to_who_knows_their_name() -> None:
    assert parse_json(b'{"a": 1' + b"0" * 400 + b"}", "text")["a"] == 10**400


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(UnreadableError, match="cannot be read: it is no regular file"):
            read_bytes(path)
    for path, reason in ((tmp_path / "absent", "No such file"), (tmp_path / ("x" * 300), "too long")):
        with pytest.raises(UnreadableError, match=f"cannot be read: .*{reason}"):
            read_bytes(path)
    with pytest.raises(UnreadableError, match="null"):
        read_bytes(tmp_path / "a\0b")
    with pytest.raises(UnreadableError, match="has 11 bytes, at most 10 are read"):
        read_text(nested_in(tmp_path, b"01234567890"), 10)
    assert read_text(nested_in(tmp_path, b"0123456789"), 10) == "0123456789"


json_values = st.recursive(
    st.none() | st.integers() | st.text(',:[{"\\\\a', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(',:[{"\\\\', max_size=3), inner, max_size=4),
    max_leaves=8,
)


def count_of(value: Any) -> int:
    """As `parse_json` counts: what stands between values, and four for each list, object and name."""
    if isinstance(value, dict):
        return 4 + 4 * len(value) + max(0, len(value) - 1) + sum(map(count_of, value.values()))
    return 4 + max(0, len(value) - 1) + sum(map(count_of, value)) if isinstance(value, list) else 0


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4), st.booleans())
def test_json_with_too_many_values_is_refused_before_it_is_read(value: dict[str, Any], is_long: bool) -> None:
    """Whatever stands in its texts; `is_long`: a text reaches over the pieces that are looked at."""
    value = {**value, "long": '[,\\"' * 9000} if is_long else value
    data = json.dumps(value).encode()
    assert parse_json(data, "here", most_values=count_of(value)) == value
    with pytest.raises(UnreadableError, match="has more than"):
        parse_json(data, "here", most_values=count_of(value) - 1)
    with pytest.raises(UnreadableError, match="has more than 9 values"):  # and not that it is no JSON
        parse_json(data[:-1] + b"," * 10, "here", most_values=9)
