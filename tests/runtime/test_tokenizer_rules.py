"""A tokenizer.json may say anything: usual rules run here, others in a guarded process, and none hangs or ends us."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import KINDS, byte_level

from cheetah.errors import CheetahError
from cheetah.models.registry import DEMO_FOLDER
from cheetah.runtime.text import encoders
from cheetah.runtime.text.encoders import GuardedEncoder, LibraryEncoder
from cheetah.runtime.text.guarded_process import Limits
from cheetah.runtime.text.tokenizer import Tokenizer
from cheetah.runtime.text.tokenizer_rules import SPLITS, unusual_rule

Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> str:
    description = json.loads(byte_level())
    change(description)
    return json.dumps(description)


def replace(found: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": found}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def chain(part: str, rules: list[dict[str, Any]]) -> Change:
    below = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[part]
    return lambda description: description.update({part: {"type": "Sequence", below: rules}})


def added(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 5000, "content": content, "normalized": True, **flags}


def exploding_added_token(description: dict[str, Any]) -> None:
    chain("normalizer", [replace("h", "hhhh")] * 16)(description)
    description["added_tokens"].append(added("hhh"))


USUAL: list[str] = [*(make() for make in KINDS.values()), (DEMO_FOLDER / "tokenizer.json").read_text()]
UNUSUAL: dict[str, Change] = {
    "normalizer {'normalizers'": chain("normalizer", [replace("h", "hh")]),
    "normalizer {'content'": lambda description: description.update(normalizer=replace("", "hh")),
    "pre_tokenizer {'pretok": chain("pre_tokenizer", [split("(a+)+$")]),
    "pre_tokenizer {'type'": lambda description: description.update(pre_tokenizer={"type": "Novelty"}),
    "pre_tokenizer [": lambda description: description.update(pre_tokenizer=[]),
    "post_processor {'type'": lambda description: description.update(post_processor={"type": "RobertaProcessing"}),
    "model {'type'": lambda description: description.update(model={"type": "Unigram"}),
    "model with end_of_word_suffix 'xxx": lambda description: description["model"].update(end_of_word_suffix="x" * 100),
    "model with continuing_subword_prefix 1": lambda description: description["model"].update(
        continuing_subword_prefix=1
    ),
    "added_tokens 1": lambda description: description.update(added_tokens=1),
    "added_tokens: 4 of 520": lambda description: description.update(added_tokens=[added("x" * 130_000)] * 4),
}


@pytest.mark.parametrize("text", USUAL, ids=[*KINDS, "demo"])
def test_the_rules_of_published_models_are_usual(text: str) -> None:
    assert unusual_rule(json.loads(text)) is None


@pytest.mark.parametrize("pattern", SPLITS.values(), ids=SPLITS)
def test_known_splits_are_usual_and_compile(pattern: str) -> None:
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    text = changed(chain("pre_tokenizer", [split(pattern), to_bytes]))
    assert unusual_rule(json.loads(text)) is None
    assert Tokenizer(text).decode(Tokenizer(text).encode("It's 12 déjà\n vu")) == "It's 12 déjà\n vu"


@pytest.mark.parametrize(("what", "change"), UNUSUAL.items(), ids=UNUSUAL)
def test_other_rules_are_unusual(what: str, change: Change) -> None:
    found = unusual_rule(json.loads(changed(change)))
    assert found is not None and found.startswith(what)


def test_a_guarded_encoder_gives_what_the_library_gives() -> None:
    text = changed(chain("normalizer", [replace("the", "hello")]))
    guarded, library = GuardedEncoder(text), LibraryEncoder(text)
    assert (guarded.size, guarded.special_ids) == (library.size, library.special_ids)
    for token_id in (*range(-1, library.size + 2), 10**30):
        assert guarded.token_of(token_id) == library.token_of(token_id)
    for prompt in ("", "the cat", "é <think>", "<|begin|>a"):
        for special in (True, False):
            assert guarded.encode(prompt, special) == library.encode(prompt, special)
    assert [guarded.id_of(token) for token in ("he", "absent")] == [library.id_of(token) for token in ("he", "absent")]


HOSTILE: list[tuple[str, Change]] = [  # the message, as far as it is not the library's own
    ("MB of memory, or break what reads it", chain("normalizer", [replace("h", "hhhh")] * 16)),
    ("ended its process (SIGABRT)", exploding_added_token),
    ("", lambda description: description.update(normalizer=replace("", "hh"))),
    ("", lambda description: description.update(pre_tokenizer=split("(.+)+$(?<!.)"))),
    (
        "",
        lambda description: description.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}),
    ),
    (
        "",
        lambda description: description.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    ),
    (
        "",
        lambda description: description.update(model={"type": "WordLevel", "unk_token": "q", "vocab": {"a": 0}}),
    ),
    (
        "model.vocab is empty",  # also where there are special tokens
        lambda description: description.update(model={"type": "BPE", "vocab": {}, "merges": []}),
    ),
    ("its ids end at 4294967295", lambda description: description["model"]["vocab"].update(hel=2**32 - 1)),
    ("cannot read it", lambda description: description["model"]["vocab"].update(hel=2**64)),
    ("its decoder has more than 16 rules", chain("decoder", [replace("a", "aa")] * 40)),
    ("characters of one token: at most 4096", chain("decoder", [replace("l", "l" * 4000)] * 3)),
    ("puts in 5000 characters", chain("decoder", [replace("l", "l" * 5000)])),
]


@pytest.mark.parametrize(("message", "change"), HOSTILE)
def test_a_tokenizer_without_measure_is_one_error(
    monkeypatch: pytest.MonkeyPatch, message: str, change: Change
) -> None:
    monkeypatch.setattr(encoders, "LIMITS", Limits(2.0, 64_000_000, 1_000_000))
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    with pytest.raises(CheetahError) as raised:
        tokenizer = Tokenizer(changed(change))
        tokenizer.decode(tokenizer.encode("hello the world, " * 2))
    assert message in str(raised.value) and str(raised.value).startswith("tokenizer.json: ")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b"\xff{}", "is not UTF-8 text: byte 0 is 0xff"),
        ("tokenizer.json", b"[" * 100_000, "nested too deeply"),
        ("tokenizer_config.json", b"[" * 10_000_000, "nested too deeply"),
        ("tokenizer_config.json", b"\xff", "is not UTF-8 text"),
        ("special_tokens_map.json", b"[]", "holds a JSON list, expected an object"),
    ],
)
def test_files_that_are_no_json_are_one_error(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    files = {"tokenizer.json": byte_level().encode(), name: data}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CheetahError) as raised:
        Tokenizer.from_files({file: tmp_path / file for file in files})
    assert message in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("bos", [10**30, 2**31, -1])
def test_a_beginning_that_is_no_id_is_refused(bos: int) -> None:
    with pytest.raises(CheetahError, match=f"bos_token_id = {bos}: must be from 0 to 2147483647"):
        Tokenizer(byte_level(), bos_token_id=bos)


def test_a_special_token_with_a_lone_surrogate_is_refused_by_name() -> None:
    with pytest.raises(CheetahError, match="bos_token of tokenizer_config.json or .* has a lone surrogate"):
        Tokenizer(byte_level(), {"bos_token": "<\ud800"})
