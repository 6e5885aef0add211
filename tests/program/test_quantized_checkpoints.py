"""Quantised checkpoints from the folder to the logits, in the emulator: what is loaded is what the files stand for."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cheetah import LLM, SamplingParams
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.family import ReadTensor
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, round_to_e4m3
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.safetensors_files import read_header
from cheetah.tools.quantize import SCALES, quantization_job
from cheetah.tools.sparsify import sparse_copy
from tests.program.rig import relative_error
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = pytest.mark.compiler

SCALED_LOGITS = 0.06  # seen: 0.016
PAGE = 16
IDS = [0, 17, 300, 45, 45, 511, 2, 9]


def written(model: str, out: Path, format: str) -> Path:
    quantization_job(model, scheme_of_name(format, SCALES), clip=False).write(out, lambda nbytes: None)
    return out


def check_logits(model: str, ids: list[int], sparse: str | None = None) -> None:
    checkpoint = open_checkpoint(model, sparse=sparse)
    reference = family_of(checkpoint.config).reference(checkpoint.config, checkpoint.tensor)
    options = {"gpu": "emulator-2", "quiet": True, "tokenizer": False, "prompt_tokens": 0, "sparse": sparse}
    with LLM(model, device="emulator", **options) as llm:
        found = llm.score(ids)
    assert relative_error(found, reference.forward(ids)) < LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("format", tiered(["int4-g64", "fp8"], ["fp8"]))
def test_the_demo_model_quantised(tmp_path: Path, format: str) -> None:
    model = str(written("demo", tmp_path / "model", format))
    check_logits(model, IDS)
    check_shared_beginnings(model, [*IDS, *IDS, *IDS])


@pytest.mark.slow
@pytest.mark.parametrize("sparse", tiered(["auto", "off"], ["off"]))
def test_the_demo_model_with_two_of_four_weights(tmp_path: Path, sparse: str) -> None:
    """The kernel that keeps two of four, and the dense one, both against the reference of the same numbers."""
    sparse_copy("demo", "2:4", "plain").write(tmp_path / "model", lambda nbytes: None)
    assert bool(open_checkpoint(tmp_path / "model", sparse=sparse).config.weight_formats) == (sparse == "auto")
    check_logits(str(tmp_path / "model"), IDS, sparse)


def check_shared_beginnings(model: str, ids: list[int]) -> None:
    """A prompt that begins like an earlier one finds its page in the prefix cache, and goes on as the reference."""
    checkpoint = open_checkpoint(model)
    with LLM(model, device="emulator", gpu="emulator-2", quiet=True, tokenizer=False, prompt_tokens=0) as llm:
        for cached, prompt in ((0, ids), (PAGE, [*ids[: PAGE + 1], 5, 9])):
            output = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            reference = family_of(checkpoint.config).reference(checkpoint.config, checkpoint.tensor)
            assert output.timings.cached_tokens == cached
            assert list(output.token_ids) == list(reference.generate(prompt, 4))


@pytest.mark.slow
def test_scales_of_keys_and_values_are_used(tmp_path: Path) -> None:
    """Codes have a sign, an exponent and few bits, so that only scales far off matter: here some numbers are too large
    for the codes and some too small. With 1, exchanged, or another layer's scales the error is 0.28 or more."""
    folder = written("demo", tmp_path / "model", "fp8")
    scales = np.array([[50, 0.0005], [0.001, 30], [0.2, 0.2]], np.float32)
    add_scales(folder, scales)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kv_scales is not None
    assert np.array_equal(checkpoint.kv_scales, np.repeat(scales[:, :, None], checkpoint.config.kv_heads, 2))
    reference = scaled_reference(checkpoint.config, checkpoint.tensor, scales)
    options = {"device": "emulator", "gpu": "emulator-2", "quiet": True, "tokenizer": False, "prompt_tokens": 0}
    with LLM(str(folder), kv_dtype="e4m3", **options) as llm:
        found = llm.score(IDS)
    assert relative_error(found, reference.forward(IDS)) < SCALED_LOGITS


def add_scales(folder: Path, scales: F32) -> None:
    """`scales` [layers, 2] into the checkpoint's file, as vLLM and compressed-tensors name them."""
    import ml_dtypes
    from safetensors.numpy import save_file

    stored = read_header(folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "np") as file:
        names = [name for name in file.keys() if stored[name].dtype != "F8_E4M3"]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    for name, tensor in stored.items():
        if tensor.dtype == "F8_E4M3":
            tensors[name] = tensor.mapped().view(ml_dtypes.float8_e4m3fn)
    for layer, (key, value) in enumerate(scales):
        attention = f"model.layers.{layer}.self_attn"
        tensors |= {f"{attention}.k_scale": np.array([key]), f"{attention}.v_scale": np.array([value])}
    save_file(tensors, folder / "model.safetensors")


def scaled_reference(config: ModelConfig, tensor: ReadTensor, scales: F32) -> Reference:
    """The float32 reference with keys and values rounded to codes of these scales; it asks for both, layer by layer."""
    turn = cycle(scales.reshape(-1))

    def rounded(values: F32) -> F32:
        scale = next(turn)
        return np.asarray(round_to_e4m3(values / scale) * scale)

    return family_of(config).reference(config, tensor, cached=rounded)
