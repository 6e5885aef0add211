"""`cheetah calibrate`: the scales that it writes are those of the text, and serve a cache of e4m3."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cheetah import LLM
from cheetah.errors import CheetahError
from cheetah.models.registry import family_of
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.calibrate import largest_cached, pieces_of, scales_for
from tests.cli.commands import cheetah, refused
from tests.program.rig import as_bf16, relative_error
from tests.program.test_quantized_checkpoints import SCALED_LOGITS, scaled_reference

TEXT = "Three small dogs ran to the river. The old man gave them bread and sang a song about the sea."
EMULATED = ("--device", "emulator", "--gpu", "emulator-2")
WINDOW = 16


def text_file(folder: Path, text: str = TEXT) -> Path:
    file = folder / "text.txt"
    file.write_text(text)
    return file


def scales_of_text(model: str, per_head: bool) -> np.ndarray:
    """By the float32 reference, which reads the text in the same parts."""
    checkpoint = open_checkpoint(model)
    with LLM(model, device="emulator", gpu="emulator-2", quiet=True, prompt_tokens=0) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
    largest = 0
    for first in range(0, len(ids), WINDOW):
        reference = family_of(checkpoint.config).reference(checkpoint.config, checkpoint.tensor)
        part = ids[first : first + WINDOW]
        reference.forward(part)
        cached = np.stack([reference.keys[:, :, : len(part)], reference.values[:, :, : len(part)]], axis=1)
        largest = np.maximum(largest, np.abs(cached).max(axis=(3, 4)))
    return (largest if per_head else largest.max(axis=2, keepdims=True)) / 448


@pytest.mark.slow
@pytest.mark.compiler
def test_the_demo_model_from_a_text(tmp_path: Path) -> None:
    out = tmp_path / "scaled"
    options = ("--text", text_file(tmp_path), "-o", out, "--context", WINDOW, *EMULATED)
    result = cheetah("calibrate", "demo", *options)
    assert result.exit_code == 0 and "scales of" in result.stdout, result.output
    checkpoint, original = open_checkpoint(out), open_checkpoint("demo")
    wanted = scales_of_text("demo", per_head=False)
    assert checkpoint.kv_scales is not None and np.ptp(checkpoint.kv_scales, axis=2).max() == 0
    np.testing.assert_allclose(checkpoint.kv_scales[:, :, :1], wanted, rtol=0.02)
    assert np.array_equal(checkpoint.tensor("model.norm.weight"), original.tensor("model.norm.weight"))
    assert checkpoint.config == original.config and set(checkpoint.files) == set(original.files)
    ids = [0, 17, 300, 45, 45, 511, 2, 9]
    where = {"device": "emulator", "gpu": "emulator-2", "quiet": True, "tokenizer": False, "prompt_tokens": 0}
    with LLM(str(out), kv_dtype="e4m3", **where) as llm:
        found = llm.score(ids)
    scaled = scaled_reference(original.config, original.tensor, checkpoint.kv_scales[:, :, 0])
    assert relative_error(found, scaled.forward(ids)) < SCALED_LOGITS
    assert "has scales of keys and values already" in refused("calibrate", out, *options[:2], "-o", tmp_path / "more")


@pytest.mark.exhaustive
@pytest.mark.compiler
def test_a_scale_a_head_beside_quantised_weights(tmp_path: Path) -> None:
    quantised, out = tmp_path / "int4", tmp_path / "scaled"
    cheetah("quantize", "demo", "-o", quantised, "--format", "int4-g64")
    options = ("--text", text_file(tmp_path), "-o", out, "--context", WINDOW, *EMULATED)
    result = cheetah("calibrate", quantised, *options, "--per-head")
    assert result.exit_code == 0, result.output
    checkpoint = open_checkpoint(out)
    assert checkpoint.kv_scales is not None
    np.testing.assert_allclose(checkpoint.kv_scales, scales_of_text(str(quantised), per_head=True), rtol=0.02)
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    assert stated["kv_cache_scheme"]["strategy"] == "attn_head" and stated["format"] == "pack-quantized"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert os.stat(out / "model-weights.safetensors").st_ino == os.stat(quantised / "model.safetensors").st_ino
    for file in set(index["weight_map"].values()):  # as the format's own library sees it
        with safe_open(out / file, "np") as shard:
            assert {name for name, where in index["weight_map"].items() if where == file} == set(shard.keys())
    assert sorted(os.listdir(tmp_path)) == ["int4", "scaled", "text.txt"]


def test_refused(tmp_path: Path) -> None:
    file, out = text_file(tmp_path), tmp_path / "out"
    assert "no such file: give --text" in refused("calibrate", "demo", "--text", tmp_path / "none", "-o", out)
    assert f"{os.devnull}: no ordinary file" in refused("calibrate", "demo", "--text", os.devnull, "-o", out)
    assert "random:demo: has no files" in refused("calibrate", "random:demo", "--text", file, "-o", out)
    assert "exists already" in refused("calibrate", "demo", "--text", file, "-o", tmp_path)
    assert "the text is empty" in refused("calibrate", "demo", "--text", text_file(tmp_path, " "), "-o", out)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8" in refused("calibrate", "demo", "--text", tmp_path / "bytes", "-o", out)
    assert sorted(os.listdir(tmp_path)) == ["bytes", "text.txt"]


def test_the_largest_of_a_pool() -> None:
    """Of both signs, without pages that nobody wrote; and none where a number is infinite."""
    pool = np.full((2, 3, 2, 2, 4, 64), 0xFFFF, np.uint16)
    pool[:, 1] = as_bf16(np.zeros((2, 2, 2, 4, 64)))
    pool[1, 1, 0, 1, 2, 5], pool[0, 1, 1, 0, 3, 63] = as_bf16([-7.0, 3.5])
    largest = largest_cached(pool)
    wanted = np.zeros((2, 2, 2))
    wanted[1, 0, 1], wanted[0, 1, 0] = 7.0, 3.5
    np.testing.assert_array_equal(largest, wanted)
    np.testing.assert_array_equal(scales_for(largest, True)[1, 0], np.float32([1, 7 / 448]))
    np.testing.assert_array_equal(scales_for(largest, False)[:, 1, 0], np.float32([3.5 / 448, 1]))
    pool[1, 1, 1, 0, 0, 0] = as_bf16(-np.inf)
    with pytest.raises(CheetahError, match="a value of layer 1, KV head 0 is infinite"):
        largest_cached(pool)


def test_parts_of_a_text() -> None:
    assert pieces_of(range(10), 7, 3) == [[0, 1, 2], [3, 4, 5], [6]] and pieces_of([], 7, 3) == []
