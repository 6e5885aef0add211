"""Checkpoints of models of experts: experts one by one, or in the tensors that transformers 5 makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_checkpoints import random_values, refusal, write_model
from written_experts import CONFIGS, MERGED, merged

from cheetah.models.dense.reference import Reference
from cheetah.runtime import LLM
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.lora import with_adapter
from cheetah.runtime.checkpoint.safetensors_files import LoadingError
from tests.tolerances import LOGITS

MOE = CONFIGS["qwen3_moe"]
EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_one_by_one_or_in_one_tensor_are_the_same(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]
    single = open_checkpoint(write_model(tmp_path / "single", config=config))
    together = open_checkpoint(write_model(tmp_path / "merged", merged(family), config))
    assert single.config == together.config == config
    for name, value in random_values(config).items():
        np.testing.assert_array_equal(single.tensor(name), value.view(np.uint16))
        np.testing.assert_array_equal(together.tensor(name), value.view(np.uint16))
        if value.ndim == 2:
            np.testing.assert_array_equal(together.rows(name)[3:9], value.view(np.uint16)[3:9])


def test_what_lies_in_a_merged_tensor_is_checked(tmp_path: Path) -> None:
    values = merged("qwen3_moe")
    gate_up = MERGED.format(1, "gate_up")
    message = refusal(write_model(tmp_path, values | {gate_up: values[gate_up][:4]}, MOE))
    assert f"misshapen: {gate_up} is [4, 64, 48], expected [5, 64, 48]" in message
    message = refusal(write_model(tmp_path, values | {gate_up: values[gate_up].swapaxes(1, 2).copy()}, MOE))
    assert f"misshapen: {gate_up} is [5, 48, 64], expected [5, 64, 48]" in message
    twice = {EXPERT: random_values(MOE)[EXPERT]}
    assert f"{EXPERT} stands by itself and in {gate_up}" in refusal(write_model(tmp_path, values | twice, MOE))
    del values[gate_up]
    assert "missing: model.layers.1.mlp.experts.0.gate_proj.weight [32, 48]" in refusal(
        write_model(tmp_path, values, MOE)
    )


def test_an_expert_that_is_missing_too_many_or_misshapen_is_refused(tmp_path: Path) -> None:
    values = random_values(MOE)
    less = {name: value for name, value in values.items() if name != EXPERT}
    assert f"missing: {EXPERT} [32, 48]" in refusal(write_model(tmp_path, less, MOE))
    another = EXPERT.replace("experts.4", "experts.5")
    assert f"extra: {another} [32, 48]" in refusal(write_model(tmp_path, values | {another: values[EXPERT]}, MOE))
    message = refusal(write_model(tmp_path, values | {EXPERT: values[EXPERT].T.copy()}, MOE))
    assert f"misshapen: {EXPERT} is [48, 32], expected [32, 48]" in message
    router = "model.layers.0.mlp.gate.weight"
    message = refusal(write_model(tmp_path, values | {router: values[router][:3]}, MOE))
    assert f"misshapen: {router} is [3, 48], expected [5, 48] = [num_experts, hidden_size]" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6: there are num_experts = 5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0: must be a positive integer"),
        ({"num_experts": 2**31}, "num_experts = 2147483648: must be from 1 to 1024"),
        ({"num_experts": 5, "num_local_experts": 6}, "num_experts = 5 and num_local_experts = 6 contradict each other"),
        ({"moe_intermediate_size": 40}, "the width of an expert is 40: supported are multiples of 32"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': must be true or false"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not supported; supported: []"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported; supported: 1"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}},
            "columns in the order of their groups (act-order) are not supported with experts",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["experts.3.up_proj"]}},
            "model.layers.0.mlp.experts.3.up_proj is not quantised",
        ),
    ],
)
def test_configurations_that_lie_or_ask_for_more_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(write_model(tmp_path, config=MOE, **changes))


def test_clipped_queries_of_olmoe_are_refused(tmp_path: Path) -> None:
    assert "clip_qkv = 8.0 is not supported" in refusal(write_model(tmp_path, config=CONFIGS["olmoe"], clip_qkv=8.0))


def test_there_are_no_adapters(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, config=MOE))
    with pytest.raises(LoadingError, match="a model of experts: adapters are merged into dense models alone"):
        with_adapter(checkpoint, tmp_path)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_merged_checkpoint_runs(tmp_path: Path) -> None:
    """Through the whole product: scores of a text by the kernel, in the emulator, near those of the reference."""
    config, ids = CONFIGS["mixtral"], [3, 1, 40, 7, 7, 22, 13]
    folder = write_model(tmp_path, merged("mixtral"), config)
    values = {name: value.view(np.uint16) for name, value in random_values(config).items()}
    with LLM(folder, device="emulator", gpu="emulator-2", max_context=32, quiet=True) as llm:
        found = np.array(llm.score(ids))
    wanted = Reference(config, values).forward(ids)
    error = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert np.median(error) < LOGITS  # a choice that is near may turn out otherwise
