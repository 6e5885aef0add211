"""The layer that lies beside a model to draft for it: read, also where it is quantised, and means what transformers'
own parts compute, put together as its files want it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cheetah.errors import CheetahError
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.registry import PRESETS, drafter_beside, family_of
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime.checkpoint.drafters import open_mtp
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.tools.quantize import quantization_job
from tests.models.goldens.mtp import DRAFTS, LOGITS, MTP, OF_MODEL, TARGETS, features_of, tokens_of, weights_of
from tests.models.meaning_of_heads import MtpReference

ROUNDING = 1e-5
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model", "mtp.fc"]}
"""Of the layer alone."""


def written(folder: Path, layer: dict[str, NDArray[Any]], name: str = MTP, **stated: Any) -> Checkpoint:
    """The model whose file has such tensors beside it."""
    config = TARGETS[name]
    of_model = random_tensors(config)
    names = [name for name in family_of(config).tensor_shapes(config) if name not in OF_MODEL]
    stored = {name: of_model(name).view(ml_dtypes.bfloat16) for name in names}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | stated))
    save_file({**stored, **layer}, folder / "model.safetensors")
    return open_checkpoint(folder)


def in_bf16(name: str = MTP) -> dict[str, NDArray[Any]]:
    return {name: one.astype(ml_dtypes.bfloat16) for name, one in weights_of(name).items()}


@pytest.mark.parametrize("name", TARGETS)
def test_it_means_what_transformers_computes(tmp_path: Path, name: str) -> None:
    model, wanted = written(tmp_path, in_bf16(name), name), load_file(LOGITS)[name]
    opened = open_mtp(model)
    reference = MtpReference(opened.config, opened.tensor)
    reference.head = weights_of(name)["lm_head.weight"]  # not the copy, which is rounded
    found = reference.forward(tokens_of(), features_of())
    drafted = reference.draft(DRAFTS, found[-1])
    assert drafted == wanted[-DRAFTS:].argmax(1).tolist()
    reference.forward(tokens_of(), features_of())
    found = np.stack([*found, *(reference.step(token) for token in drafted[:-1])])
    assert np.linalg.norm(found - wanted) < ROUNDING * np.linalg.norm(wanted)


def test_what_it_has_in_8_bits_stays_so_and_its_head_is_a_copy_in_4(tmp_path: Path) -> None:
    layer, scheme, wanted = in_bf16(), scheme_of_name("fp8-block128", "f32"), dict[str, Any]()
    for name, one in weights_of().items():
        if name.endswith("_proj.weight"):
            rows = nearest_rows(one, scheme, block_rows=128)
            layer[name] = np.ascontiguousarray(rows.codes).view(ml_dtypes.float8_e4m3fn)
            layer[f"{name}_scale_inv"] = np.ascontiguousarray(rows.scales[::128], np.float32)
            wanted[name.replace("mtp.", "model.")] = rows.dequantized()
    opened = open_mtp(written(tmp_path, layer, quantization_config=BLOCKS))
    quantised = dict.fromkeys(("qkv", "o", "gate_up", "down"), "fp8-block128")
    assert dict(opened.config.weight_formats) == {**quantised, "lm_head": "int4-g128"}
    for name, values in wanted.items():
        assert np.array_equal(opened.tensor(name), values), name
    assert opened.tensor("fc.weight").dtype == np.uint16
    head = nearest_rows(weights_of()["lm_head.weight"], scheme_of_name("int4-g128", "bf16")).dequantized()
    assert np.array_equal(opened.tensor("lm_head.weight"), head)


def test_what_a_file_says_is_quantised_and_is_not_is_read_as_it_is(tmp_path: Path) -> None:
    opened = open_mtp(written(tmp_path, in_bf16(), quantization_config=BLOCKS))
    assert dict(opened.config.weight_formats) == {"lm_head": "int4-g128"}
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(
        opened.tensor(name).view(ml_dtypes.bfloat16).astype(np.float32),
        round_to_bf16(weights_of()["mtp.layers.0.mlp.up_proj.weight"]),
    )


def test_a_quantised_copy_has_the_layer_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    written(tmp_path / "source", in_bf16())
    job = quantization_job(str(tmp_path / "source"), scheme_of_name("int8", "bf16"), clip=False)
    job.write(tmp_path / "out", lambda done: None, 1)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert r"re:mtp\..*" in stated["ignore"]
    opened, original = open_mtp(open_checkpoint(tmp_path / "out")), open_mtp(open_checkpoint(tmp_path / "source"))
    assert opened.config == original.config
    for name in family_of(opened.config).tensor_shapes(opened.config):
        assert np.array_equal(opened.tensor(name), original.tensor(name)), name


def test_models_without_such_a_layer_are_refused_by_name() -> None:
    with pytest.raises(CheetahError, match="Qwen3 has no layer that drafts which is read here"):
        drafter_beside(PRESETS["qwen3-8b"])
