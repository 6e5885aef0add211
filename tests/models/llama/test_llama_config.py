"""Configurations: presets, both spellings of config.json, and every refusal with its message."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from cheetah.models.config_json import ConfigError
from cheetah.models.llama import LlamaConfig
from cheetah.models.plausible import RANGES
from cheetah.models.registry import PRESETS, preset, read_config, resolve_config
from cheetah.models.rope import FIELDS_OF_KIND, Rope, frequencies

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
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("mistral-small-24b", 23_572_403_200),
    ],
)
def test_presets_have_the_published_parameter_counts(name, parameters):
    assert preset(name).parameter_count == parameters


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS.keys())
def test_to_dict_reads_back_without_a_note(config):
    notes = []
    assert read_config(json.loads(json.dumps(config.to_dict())), notes) == config
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
    ({"num_attention_heads": 34}, "34 / 2 = 17: at most 16 query heads"),
    ({"head_dim": 80}, "head_dim = 80: kernels exist for head_dim 64, 96, 128 and 256 only"),
    ({"head_dim": None, "hidden_size": 257}, "257 / 8 is no integer"),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0: must be from 1e-37 to 0.1 (a part of"),
    ({"rms_norm_eps": 4}, "rms_norm_eps = 4: must be from 1e-37 to 0.1"),
    ({"rms_norm_eps": 1e18}, "rms_norm_eps = 1e+18: must be"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps = an integer of about 401 digits: must be from"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be from"),
    ({"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648: must be from 1 to 1024 (published models have"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers = 1000000000000000000000000000000: must be"),
    ({"num_hidden_layers": 10**999}, "num_hidden_layers = an integer of about 1000 digits: must be"),
    ({"hidden_size": 2**40}, "hidden_size = 1099511627776: must be from"),
    ({"intermediate_size": 10**9}, "intermediate_size = 1000000000: must be from"),
    ({"num_attention_heads": 2**20}, "num_attention_heads = 1048576: must be from"),
    ({"vocab_size": 10**30}, "vocab_size = 1000000000000000000000000000000: must be from 1 to 4194304"),
    ({"max_position_embeddings": 10**30}, "must be from 1 to 2147483647 (positions are 32-bit integers)"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5': must be a number"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
    ({"attention_bias": 1}, "attention_bias = 1: must be true or false"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"sliding_window": 4096}, "sliding_window = 4096 is not supported; supported: absent"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' needs short_factor"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope type 'llama3' needs low_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope factor = '2': must be a number"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "rope factor = -2: must be from 1 to 1000000"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope factor = 0.5: must be from 1"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "rope factor = an integer of about 401 digits"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 1e30}}, "2147483647"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": -1}}, "rope attention_factor = -1: must"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": -10}}, "rope mscale = -10: must be from 0"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1e300}}, "rope beta_fast = 1e+300: must"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_parameters differs from layer to layer"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"rope_theta": 0}, "rope_theta = 0: must be from 2 to 1e+20"),
    ({"rope_theta": 10**400}, "rope_theta = an integer of about 401 digits: must be"),
    ({"rope_theta": float("inf")}, "rope_theta = inf: must be"),
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


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", "[" * 100_000, '{"rope": {"a": 1, "a": 2}}'])
def test_broken_json_is_refused_with_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="config.json: "):
        resolve_config(path)


def test_resolve_takes_presets_folders_and_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert resolve_config("llama-3.1-8b") == PRESETS["llama-3.1-8b"]
    assert resolve_config(tmp_path) == resolve_config(str(tmp_path / "config.json")) == read()
    with pytest.raises(ConfigError, match="neither a preset .*llama-3.1-8b.* nor a folder"):
        resolve_config(tmp_path / "absent")
    for format in ("int3", "marlin", "int3-order"):
        with pytest.raises(
            ConfigError,
            match=f"llama-3.1-8b@{format}: there is no .*'{format[:4]}.*write int4, int8, fp8, mxfp4 or nvfp4",
        ):
            resolve_config(f"llama-3.1-8b@{format}")


def test_messages_name_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "head_dim": 80}))
    with pytest.raises(ConfigError, match=r"config\.json: head_dim = 80"):
        resolve_config(tmp_path)


def test_what_is_built_by_hand_is_bounded_too():
    values = {**asdict(PRESETS["llama-3.1-8b"]), "rope": Rope()}
    for changes in ({"layers": 10**30}, {"layers": 0}, {"rms_norm_eps": 4.0}, {"vocab_size": 2**31}):
        with pytest.raises(ConfigError, match="must be from"):
            LlamaConfig(**{**values, **changes})


def test_the_text_of_a_value_reaches_no_terminal_as_it_is():
    with pytest.raises(ConfigError) as raised:
        read(hidden_act="\x1b]0;owned\x07" + "\ud800" * 10_000)
    assert "\\x1b]0;owned" in str(raised.value) and len(str(raised.value)) < 600
    assert str(raised.value).isprintable()


def test_any_plausible_rope_gives_a_finite_table():
    """At the ends of every range, two fields at a time: no division by zero, no overflow, no NaN."""
    fields = FIELDS_OF_KIND["yarn"]
    ends = [(name, end) for name in fields if name in RANGES for end in (RANGES[name].least, RANGES[name].most)]
    for (one, first), (other, second) in itertools.combinations(ends, 2):
        for theta in (RANGES["rope_theta"].least, RANGES["rope_theta"].most):
            scaling = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}
            rope = read(rope_theta=theta, rope_scaling={**scaling, one: first, other: second}).rope
            assert np.isfinite(frequencies(rope, 64)).all() and math.isfinite(rope.attention_scale())
