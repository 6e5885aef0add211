"""Structured output: what may be asked for, and that whatever is sampled by the masks is what was asked for."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.runtime import SamplingParams, StructuredOutputsParams
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.sampling import stop_ids
from cheetah.runtime.structured_outputs import GrammarError
from cheetah.runtime.text.grammars import Grammars, GrammarWatcher
from cheetah.runtime.text.prompts import Prompts
from cheetah.runtime.text.tokenizer import Tokenizer

END = 1
VOCAB = 512
KITE: dict[str, Any] = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
KITE["additionalProperties"] = False
TAG = {"triggers": ["<k"], "structures": [{"begin": "<kite>", "schema": KITE, "end": "</kite>"}]}


@cache
def tokenizer() -> Tokenizer:
    found = Prompts.of(open_checkpoint("demo")).tokenizer
    assert found is not None
    return found


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCAB)


def watcher(**wanted: Any) -> GrammarWatcher:
    return grammars().watcher(StructuredOutputsParams(**wanted), (END,))()


def allowed(watcher: GrammarWatcher) -> list[int]:
    assert watcher.mask.shape == (VOCAB // 32,) and watcher.mask.dtype == np.uint32
    return np.flatnonzero(np.unpackbits(watcher.mask.view(np.uint8), bitorder="little")).tolist()


def walk(watcher: GrammarWatcher, draw: random.Random, late: bool = False) -> str:
    """A text of tokens drawn from the masks, up to an end; `late`: from the mask before each."""
    made: list[int] = []
    choices = allowed(watcher)
    for _ in range(2000):
        # Where the text may end it mostly does, else texts grow without end.
        token = END if END in choices and (len(choices) == 1 or draw.random() < 0.7) else draw.choice(choices)
        if token == END:
            break
        made.append(token)
        before = choices
        watcher.after(token)
        choices = before if late else allowed(watcher)
    return tokenizer().decode(made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing is asked for: give one of json, regex, choice, grammar, json_object"),
        ({"json": {}, "regex": "a"}, "json and regex are given"),
        ({"json": "{"}, "json: cannot be read as JSON"),
        ({"json": "[]"}, "json: holds a JSON list, expected an object"),
        ({"json": 3}, "json: 3: expected a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json: is no JSON schema: Object of type set"),
        ({"json": {"enum": ["x" * 200_000]}}, "json has 200014 bytes, at most 128000 are read"),
        ({"regex": 3}, "regex: 3 is no text"),
        ({"choice": "yes"}, "choice: 'yes' is no list of texts"),
        ({"choice": []}, "there are no texts to choose from"),
        ({"choice": ["a", ""]}, "choice: '' is not a text of at least one character"),
        ({"fantasy": "x"}, "fantasy is not supported: there are json, regex"),
        ({"structural_tag": 3}, "structural_tag: 3: expected an object"),
        ({"structural_tag": {"format": {}}}, "structural_tag: triggers: None: expected a list of texts"),
        ({"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<a>"}]}}, "expected begin and end"),
        ({"structural_tag": {**TAG, "triggers": ["["]}}, "'<kite>' begins like none of the triggers ['[']"),
    ],
)
def test_each_mistake_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match="^structured_outputs: ") as refusal:
        SamplingParams(structured_outputs=given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"type": "foo"}}, "structured_outputs: json: Invalid type: foo"),
        ({"json": {"$ref": "#/$defs/x"}}, "json: Pointer '/$defs/x' does not exist"),
        ({"json": {"$ref": "#"}}, "json: no text fits it"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'json: Unimplemented keys: ["uniqueItems"]'),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": "root ::= (" * 5000}, "grammar: Failed to convert the grammar from GBNF"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused_in_its_readers_words(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError) as refusal:
        watcher(**given)
    assert message in str(refusal.value)


def test_a_text_is_free_but_for_what_a_trigger_begins() -> None:
    free = watcher(structural_tag=json.dumps({"type": "structural_tag", **TAG}), disable_any_whitespace=True)
    for token in tokenizer().encode("Mia has a <k", add_special_tokens=False):
        assert len(allowed(free)) > VOCAB / 2
        free.after(token)
    forced = walk(free, random.Random(3))
    assert re.match(r'ite>{"red":(true|false)}</kite>', forced)


def test_a_grammar_that_breaks_its_reader_breaks_nothing_here() -> None:
    """Rules that name each other 3000 deep overflow the library's stack."""
    chain = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'])
    with pytest.raises(GrammarError, match="ended its process"):
        watcher(grammar=chain)
    assert walk(watcher(choice=["yes"]), random.Random(0)) == "yes"


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_to_read_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"takes more than 1\.\d+ s of processor time"):
        watcher(regex="(.*)*" * 20_000)


def test_a_grammar_that_cannot_be_followed_any_further_says_so() -> None:
    hard = watcher(grammar='start: x\nx: "a" | x x | x x x |')
    with pytest.raises(GrammarError, match="structured_outputs: the grammar cannot be followed any further: Parser"):
        for _ in range(1000):
            hard.after(allowed(hard)[0])


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheetahError, match=r"pip install '\.\[structured\]' in Cheetah's checkout"):
        watcher(regex="a")


def test_without_a_tokenizer_or_an_end_token_it_is_refused() -> None:
    with pytest.raises(GrammarError, match="there is no tokenizer"):
        Grammars(None, VOCAB).watcher({"regex": "a"}, (END,))
    with pytest.raises(GrammarError, match="give stop_token_ids"):
        grammars().watcher({"regex": "a"}, ())


def test_end_tokens_are_allowed_where_the_text_may_end_and_alone_at_its_end() -> None:
    new = grammars().watcher({"regex": "xy?"}, (END, 3, VOCAB + 7))
    one, byte = new(), {text: tokenizer().encode(text, False)[0] for text in "xy"}
    assert not {END, 3} & set(allowed(one)) and byte["x"] in allowed(one)
    other = one.copy()
    one.after(byte["x"])
    assert allowed(one) == sorted([END, 3, byte["y"]])
    one.after(byte["y"])
    assert allowed(one) == [END, 3]
    assert byte["x"] in allowed(other), "completions share their place in the grammar"


def test_special_tokens_are_no_text_of_a_structure() -> None:
    """The demo's <|end|> fits into any string of JSON, and would end it there."""
    one = watcher(regex=".*[.]")
    assert len(allowed(one)) > VOCAB / 2 and not {0, 1, 2, 3} & set(allowed(one))


def test_by_default_a_blank_stands_between_parts_of_json() -> None:
    """Small models that may write many write little else."""
    one, other = watcher(json=KITE), watcher(json=KITE, whitespace_pattern="[ ]{0,2}")
    (brace,) = tokenizer().encode("{", False)
    (blank,) = tokenizer().encode(" ", False)
    for watched in (one, other):
        for token in (brace, blank):
            assert token in allowed(watched)
            watched.after(token)
    assert blank not in allowed(one) and blank in allowed(other)


def test_an_end_that_is_ignored_still_ends_a_structure() -> None:
    params = SamplingParams(ignore_eos=True, structured_outputs={"choice": ["a"]})
    assert stop_ids(params, Sampling(stop_ids=(END,))) == (END,)


@pytest.mark.parametrize("seed", range(3))
def test_other_kinds_than_json(seed: int) -> None:
    draw = random.Random(seed)
    assert walk(watcher(choice=['say "no"', "yes\n", "Köln"]), draw) in ('say "no"', "yes\n", "Köln")
    assert re.fullmatch(r"[a-z]{3,6}@[a-z]+\.(com|org)", walk(watcher(regex=r"[a-z]{3,6}@[a-z]{1,9}\.(com|org)"), draw))
    assert re.fullmatch("x(y|z)+[.]", walk(watcher(grammar='root ::= "x" ("y" | "z")+ "."'), draw))
    assert re.fullmatch("x[a-z]{4}[.]", walk(watcher(grammar='start: "x" /[a-z]{4}/ "."'), draw))
    assert isinstance(json.loads(walk(watcher(json_object=True), draw)), dict)


def schemas(draw: random.Random, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Random schemas whose texts are short."""
    while True:
        kind = draw.choice(
            ["string", "integer", "boolean", "null", "enum", *(["array", "object", "anyOf"] * (depth < 2))]
        )
        inner = schemas(draw, depth + 1)
        if kind == "string":
            yield draw.choice([{"maxLength": draw.randint(0, 6)}, {"pattern": "^[a-f]{2,4}$"}]) | {"type": "string"}
        elif kind == "integer":
            low = draw.randint(-50, 50)
            yield {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 999)}
        elif kind == "enum":
            yield {"enum": draw.sample(["a", "β", 3, 2.5, None, True, ["x"], {"k": 1}], draw.randint(1, 4))}
        elif kind == "array":
            least = draw.randint(0, 2)
            yield {"type": "array", "items": next(inner), "minItems": least, "maxItems": least + draw.randint(0, 2)}
        elif kind == "anyOf":
            yield {"anyOf": [next(inner), next(inner)]}
        elif kind == "object":
            names = draw.sample(["a", "b c", "名", "d"], draw.randint(1, 3))
            required = draw.sample(names, draw.randint(0, len(names)))
            properties = {name: next(inner) for name in names}
            closed = {"additionalProperties": False}
            yield {"type": "object", "properties": properties, "required": required, **closed}
        else:
            yield {"type": kind}


def fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.slow
def test_whatever_is_sampled_validates() -> None:
    draw = random.Random(20)
    drawn = schemas(draw)
    for number in range(40):
        schema = next(drawn)
        compact = bool(number % 2)
        for _ in range(3):
            text = walk(watcher(json=schema, disable_any_whitespace=compact), draw)
            assert fits(text, schema), (schema, text)


@pytest.mark.parametrize("encoded", [[], [3], [70, 71], [VOCAB + 1]])
def test_a_tokenizer_that_would_write_a_forced_text_otherwise_is_not_followed(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer(), "encode", lambda text, add_special_tokens: encoded)
    schema = {"type": "object", "properties": {"the name": {"enum": [1]}}, "required": ["the name"]}
    one = Grammars(tokenizer(), VOCAB).watcher({"json": schema, "disable_any_whitespace": True}, (END,))()
    assert fits(walk(one, random.Random(5)), schema)


def test_a_mask_that_comes_one_token_late_is_found() -> None:
    draw = random.Random(21)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    found = 0
    for _ in range(5):
        try:
            found += not fits(walk(watcher(json=schema), draw, late=True), schema)
        except GrammarError:  # the grammar is told a token that it does not allow
            found += 1
    assert found == 5
