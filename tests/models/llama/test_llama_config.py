"""Configurations: presets, both spellings of config.json, and every refusal with its message."""

import json

import pytest

from cheetah.models.config_json import ConfigError, load_json
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import PRESETS, preset, resolve_config
from cheetah.models.rope import Rope

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def read(notes=None, without=(), **changes):
    values = {name: value for name, value in {**SMALL, **changes}.items() if name not in without}
    return LlamaConfig.from_json(values, notes)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_parameter_counts(name, parameters):
    assert preset(name).parameter_count == parameters


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS.keys())
def test_to_dict_reads_back_without_a_note(config):
    notes = []
    assert LlamaConfig.from_json(json.loads(json.dumps(config.to_dict())), notes) == config
    assert notes == []


def test_derived_values():
    config = PRESETS["llama-3.1-8b"]
    assert (config.group, config.query_rows, config.kv_rows, config.qkv_rows) == (4, 4096, 1024, 6144)
    assert config.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert read(hidden_size=250).padded_hidden == 256


def test_defaults_of_absent_fields_are_those_of_transformers():
    notes = []
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    config = read(notes, without=absent, hidden_size=512)
    assert (config.kv_heads, config.head_dim, config.max_position_embeddings) == (8, 64, 2048)
    assert config.rms_norm_eps == 1e-6 and not config.tied_embeddings
    assert config.rope == Rope(10000.0)
    assert len(notes) == 1 and "rms_norm_eps is absent" in notes[0]


def test_head_dim_may_differ_from_hidden_over_heads():
    assert read(head_dim=128).query_rows == 1024


def test_null_counts_as_absent():
    assert read(rope_scaling=None, head_dim=None, hidden_size=512, sliding_window=None).head_dim == 64


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_rope_of_transformers_4_and_5_are_the_same():
    wanted = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert read(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3}).rope == wanted
    assert read(rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3}).rope == wanted
    assert read(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}).rope == wanted


def test_rope_precedence():
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert read(rope_scaling=scaled, rope_parameters={"rope_theta": 7.0}).rope == Rope(10000.0, "linear", 2.0)
    assert read(rope_scaling={}, rope_parameters={"rope_theta": 7.0}).rope == Rope(7.0)
    assert read(rope_theta=5.0, rope_parameters={"rope_theta": 7.0}).rope == Rope(7.0)
    inner = {**LLAMA3, "rope_type": "llama3"}
    assert read(rope_scaling=inner, original_max_position_embeddings=4096).rope.original_max_position_embeddings == 4096
    del inner["original_max_position_embeddings"]
    assert read(rope_scaling=inner).rope.original_max_position_embeddings == 512


def test_yarn_is_read():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}
    assert read(rope_scaling=yarn).rope == Rope(
        10000.0, "yarn", 4.0, original_max_position_embeddings=128, truncate=False
    )


REFUSED = [
    ({"model_type": "mistral"}, "model_type is 'mistral', supported is 'llama'"),
    ({"model_type": None}, "model_type is missing"),
    ({"architectures": ["LlamaModel"]}, "architectures is ['LlamaModel']"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"intermediate_size": None}, "intermediate_size is missing"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"num_attention_heads": None}, "num_attention_heads is missing"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"vocab_size": -1}, "vocab_size = -1: must be a positive integer"),
    ({"hidden_size": 256.0}, "hidden_size = 256.0: must be a positive integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True: must be a positive integer"),
    ({"num_key_value_heads": 3}, "num_attention_heads = 8 is not a multiple of num_key_value_heads = 3"),
    ({"num_attention_heads": 32}, "32 / 2 = 16: at most 8 query heads"),
    ({"head_dim": 96}, "head_dim = 96: kernels exist for head_dim 64 and 128 only"),
    ({"head_dim": None, "hidden_size": 257}, "257 / 8 is no integer"),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0.0: must be positive"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5': must be a number"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
    ({"attention_bias": True}, "attention_bias = True is not supported; supported: False or absent"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"sliding_window": 4096}, "sliding_window = 4096 is not supported; supported: absent"),
    ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
    ({"quantization_config": {"quant_method": "awq", "version": "gemm"}}, "(awq, gemm)"),
    ({"quantization_config": {}}, "method not named"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope type 'llama3' needs low_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope factor = '2': must be a number"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "rope factor = -2.0: must be positive"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_parameters differs from layer to layer"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"rope_theta": 0}, "rope rope_theta = 0.0: must be greater than 1"),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear': must be an object"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "greater than low_freq_factor = 1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(changes, message):
    with pytest.raises(ConfigError) as raised:
        read(**changes)
    assert message in str(raised.value)
    assert str(raised.value).startswith("config: ")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"vocab_size": 128256}, "rope_theta = 10000 with the vocabulary of Llama 3"),
        ({"rope_theta": 5e5, "max_position_embeddings": 131072}, "without llama3 scaling"),
        ({"surprise": 1, "use_cache": True}, "ignored, not part of LlamaForCausalLM: surprise"),
        ({"rope_parameters": {"rope_theta": 5e5, "factor": 2.0}}, "rope type 'default' does not use factor"),
    ],
)
def test_suspicious_values_are_noted(changes, note):
    notes = []
    read(notes, **changes)
    assert len(notes) == 1 and note in notes[0]


def test_duplicate_keys_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"rope": {"a": 1, "a": 2}}')
    with pytest.raises(ConfigError, match="config.json: key 'a' stands twice"):
        load_json(path)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": NaN}', "\xff"])
def test_broken_json_is_refused_with_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="config.json: "):
        load_json(path)


def test_resolve_takes_presets_folders_and_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert resolve_config("llama-3.1-8b") == PRESETS["llama-3.1-8b"]
    assert resolve_config(tmp_path) == resolve_config(str(tmp_path / "config.json")) == read()
    with pytest.raises(ConfigError, match="neither a preset .*llama-3.1-8b.* nor a folder"):
        resolve_config(tmp_path / "absent")


def test_messages_name_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "head_dim": 80}))
    with pytest.raises(ConfigError, match=r"config\.json: head_dim = 80"):
        resolve_config(tmp_path)
