"""Every edit of a manifest is refused with its place, or changes nothing that the runtime or the kernel goes by."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from fake_kernel import TEXT, generate_kernel

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.registry import preset
from cheetah.runtime.assembly.kernels import check_manifest
from tests.tiers import tiered

CONFIG = preset("demo")
MANIFEST = generate_kernel(CONFIG, "emulator").manifest
WORDS = {"command", "generator"}
"""Fields that are for people."""

VALUES: tuple[Any, ...] = (None, True, -1, 10**30, 0.5, "\x1b[2J", [[0]], {"\x1b[2J": 1})
Path = tuple[str | int, ...]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every entry of every object, and the first and the last of every list."""
    keys: list[str | int] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = sorted({0, len(value) - 1}) if value else []
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def edits(data: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """The object with one entry removed, renamed, doubled (in a list), or with each of VALUES in its place."""
    *outer, last = path

    def edited() -> tuple[dict[str, Any], Any]:
        changed = copy.deepcopy(data)
        target: Any = changed
        for key in outer:
            target = target[key]
        return changed, target

    for value in VALUES:
        changed, target = edited()
        target[last] = value
        yield changed
    changed, target = edited()
    removed = target.pop(last)
    yield changed
    changed, target = edited()
    if isinstance(last, str):
        target[f"{last}_"] = target.pop(last)
    else:
        target.insert(last, removed)
    yield changed


def outcome(text: str) -> Manifest | str:
    """The manifest, if everything takes it, or the message."""
    try:
        manifest = Manifest.from_json(text)
        manifest.check_text(TEXT)
        check_manifest(manifest, MANIFEST)
        return manifest
    except CheetahError as error:
        return str(error)


def test_the_manifest_as_it_is_written_is_taken() -> None:
    assert outcome(MANIFEST.to_json()) == MANIFEST


PLACES = sorted(places(json.loads(MANIFEST.to_json())), key=str)


@pytest.mark.slow
@pytest.mark.parametrize("share", tiered([4, 1], [1]))
@pytest.mark.parametrize("first", sorted({str(path[0]) for path in PLACES}))
def test_an_edit_is_refused_or_changes_nothing(first: str, share: int) -> None:
    """Anything that escapes but a CheetahError fails here; so does a change that nobody notices."""
    data, wanted = json.loads(MANIFEST.to_json()), asdict(MANIFEST)
    for path in [path for path in PLACES if path[0] == first][::share]:
        for changed in edits(data, path):
            found = outcome(json.dumps(changed))
            if isinstance(found, str):
                assert found.replace("\n", "").isprintable() and len(found) < 2500, path
            else:
                differing = {name for name, value in asdict(found).items() if value != wanted[name]}
                assert differing <= WORDS, path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": {**MANIFEST.plan, "max_steps": [0]}}, "plan.max_steps is [0], expected 64"),
        ({"gpu": {**MANIFEST.gpu, "name": ["h200"]}}, "gpu.name is ['h200'], expected 'emulator'"),
        ({"gpu": {}}, "gpu.arch is missing"),
        ({"config": {**MANIFEST.config, "rms_norm_eps": 1e-3}}, "config.rms_norm_eps is 0.001, expected 1e-05"),
        ({"kernel": "../../escape"}, "manifest: kernel '../../escape' is no name of a function"),
        ({"phases": ["qkv"] * 100_000}, "manifest: phase named twice: qkv"),
        ({"weight_bytes": 0}, "weight_bytes is 0, expected "),
    ],
)
def test_a_refusal_names_place_value_and_what_is_expected(changes: dict[str, Any], message: str) -> None:
    assert message in str(outcome(json.dumps({**json.loads(MANIFEST.to_json()), **changes})))


def test_a_renamed_or_missing_buffer_is_refused_by_name() -> None:
    data = json.loads(MANIFEST.to_json())
    data["buffers"][4]["name"] = "cache"
    assert "buffers[kv].name is 'cache', expected 'kv': generate text and manifest again with" in str(
        outcome(json.dumps(data))
    )
    del data["buffers"][4:]
    assert "buffers has 4 entries, expected " in str(outcome(json.dumps(data)))
    data["buffers"][0]["shape"] = [10**18] * 100_000
    assert "buffer 'weights': shape (" in str(outcome(json.dumps(data)))
