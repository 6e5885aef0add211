"""config.json files as they are published, both spellings, and what of them is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from cheetah.models.config_json import ConfigError
from cheetah.models.registry import FAMILIES, PRESETS, read_config
from tests.models.spellings import spelled_for

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 32768,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.49.0.dev0",
    "use_cache": True,
    "vocab_size": 131072,
}
FILES = {"qwen3-8b": QWEN3_8B, "qwen2.5-7b": QWEN25_7B, "mistral-small-24b": MISTRAL_SMALL}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("version", [4, 5])
def test_a_published_file_is_its_preset(name: str, version: int) -> None:
    notes: list[str] = []
    values = spelled_for(version, FILES[name])
    assert ("rope_parameters" in values) == (version == 5) != ("rope_theta" in values)
    assert read_config(values, notes) == PRESETS[name]
    all_full = ["full_attention"] * values["num_hidden_layers"]  # which transformers 5 writes for some families
    assert read_config({**values, "layer_types": all_full}, notes) == PRESETS[name]
    assert notes == []


INTERNLM_20B: dict[str, Any] = {
    "architectures": ["InternLMForCausalLM"],
    "bias": False,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 13824,
    "max_position_embeddings": 4096,
    "model_type": "internlm",
    "num_attention_heads": 40,
    "num_hidden_layers": 60,
    "num_key_value_heads": 40,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 103168,
    "rotary": {"base": 10000, "type": "dynamic"},
}


def test_llama_under_another_name() -> None:
    notes: list[str] = []
    larger = read_config(INTERNLM_20B, notes)
    assert larger.parameter_count == 20088714240 and not larger.has_biases and notes == []
    smaller = read_config(without(INTERNLM_20B, "bias"))
    assert smaller.has_biases and smaller.has_out_biases
    assert read_config(smaller.to_dict()) == smaller and read_config(larger.to_dict()) == larger
    same = {**without(INTERNLM_20B, "bias", "rotary"), "rope_theta": 10000.0, "attention_bias": False}
    for family in ("internlm", "aquila", "xverse"):
        named = {"model_type": family, "architectures": [FAMILIES[family].config_type.dialect.architecture]}
        llama = read_config({**same, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        found = read_config({**same, **named, **({"bias": False} if family == "internlm" else {})})
        assert vars(found) == vars(llama) and found.layer_kinds == llama.layer_kinds


def test_a_head_size_need_not_be_hidden_by_heads() -> None:
    small = PRESETS["mistral-small-24b"]
    assert small.head_dim * small.query_heads == 4096 != small.hidden_size


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def test_fields_that_are_left_out_have_the_familys_values() -> None:
    absent = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    qwen3 = read_config({**without(QWEN3_8B, *absent), "hidden_size": 2048})
    assert (qwen3.kv_heads, qwen3.head_dim, qwen3.max_position_embeddings) == (32, 128, 32768)
    qwen2 = read_config({**without(QWEN25_7B, *absent), "num_attention_heads": 32, "hidden_size": 2048})
    assert (qwen2.kv_heads, qwen2.head_dim, qwen2.max_position_embeddings) == (32, 64, 32768)
    mistral = read_config({**without(MISTRAL_SMALL, *absent, "sliding_window"), "hidden_size": 4096})
    assert (mistral.kv_heads, mistral.head_dim, mistral.max_position_embeddings) == (8, 128, 131072)
    assert mistral.sliding_window == 4096


def test_a_window_is_read_where_the_family_has_one() -> None:
    windowed = read_config({**MISTRAL_SMALL, "sliding_window": 512})
    assert windowed.sliding_window == 512 and read_config(windowed.to_dict()) == windowed
    assert read_config(MISTRAL_SMALL).to_dict()["sliding_window"] is None
    assert read_config({**QWEN3_8B, "sliding_window": 512}).sliding_window is None, "use_sliding_window is false"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**QWEN3_8B, "use_sliding_window": True}, "use_sliding_window = True is not supported; supported: False or"),
        ({**QWEN25_7B, "use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({**QWEN3_8B, "attention_bias": True}, "attention_bias = True is not supported"),
        ({**INTERNLM_20B, "rotary": {"base": 10000, "type": "ntk"}}, "rotary = .* is not supported; supported: a base"),
        ({**QWEN3_8B, "head_dim": 96}, "head_dim = 96: not supported with norms of queries and keys"),
        ({**QWEN3_8B, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .* every layer 'full_"),
        ({**MISTRAL_SMALL, "sliding_window": 512, "layer_types": ["full_attention"] * 40}, "every layer 'sliding_att"),
        ({**MISTRAL_SMALL, "sliding_window": 0}, "sliding_window = 0: must be"),
        ({**MISTRAL_SMALL, "sliding_window": "all"}, "sliding_window = 'all': must be"),
        ({**QWEN3_8B, "num_key_value_heads": 1}, "at most 16 query heads may share a key/value head"),
        ({**QWEN3_8B, "model_type": "qwen2_moe"}, "model_type is 'qwen2_moe', supported: 'llama', 'qwen3'"),
        ({**MISTRAL_SMALL, "model_type": "ministral3"}, "architectures is \\['MistralForCausalLM'\\], supported is"),
    ],
)
def test_what_would_compute_otherwise_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(values)
