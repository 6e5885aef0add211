"""Random weights: the same for the same name, well scaled, of any shape."""

import numpy as np
import pytest
from written_checkpoints import BF16, CONFIG, EMBEDDING, Q, write_config

from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.formats.two_of_four import is_two_of_four
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import PRESETS, resolve_config
from cheetah.models.rounding import widen
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.random_weights import LARGE_BLOCK, SMALL_BLOCK, random_tensors
from tests.tiers import tiered


@pytest.mark.slow
def test_random_weights_depend_on_name_and_seed_alone():
    first, second = open_checkpoint("random:llama-3.2-1b"), open_checkpoint("random:llama-3.2-1b")
    names = ["model.layers.3.self_attn.k_proj.weight", "model.layers.2.input_layernorm.weight"]
    values = [first.tensor(name) for name in names]
    for name, value in zip(reversed(names), reversed(values), strict=True):
        assert np.array_equal(second.tensor(name), value)
    assert not np.array_equal(first.tensor(names[0].replace("3", "4")), values[0])
    assert not np.array_equal(open_checkpoint("random:llama-3.2-1b", seed=1).tensor(names[0]), values[0])
    assert first.config == PRESETS["llama-3.2-1b"] and "random" in first.notes[0]


@pytest.mark.slow
def test_random_weights_are_scaled_by_their_inputs():
    checkpoint = open_checkpoint("random:llama-3.2-1b")
    for name, shape in list(tensor_shapes(checkpoint.config).items())[1:10]:  # the first is the embedding: 0.5 GB
        value = checkpoint.tensor(name)
        assert value.shape == shape and value.dtype == np.uint16
        part = value[:4096].view(BF16).astype(np.float32)
        mean, spread = (1, 0.1) if len(shape) == 1 else (0, shape[1] ** -0.5)
        assert abs(part.mean() - mean) < 0.1 * spread and part.std() == pytest.approx(spread, rel=0.05)


SMALL = LlamaConfig(256, 5000, 2, 4, 2, 64, 12000)
"""Of which the embedding and the matrices of feed-forward are longer than what is repeated in a model of its size."""
OF_SIZES = tiered([SMALL, PRESETS["llama-3.2-1b"]], [PRESETS["llama-3.2-1b"]])


@pytest.mark.slow
@pytest.mark.parametrize("config", OF_SIZES, ids=lambda config: str(config.hidden_size))
def test_no_two_rows_of_random_weights_are_the_same(config):
    rows = random_tensors(config)(EMBEDDING)[:, :8]
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("config", OF_SIZES, ids=lambda config: str(config.hidden_size))
def test_rows_that_are_read_in_parts_are_those_of_the_whole(config, name):
    """The matrices are longer than what is repeated, so that some rows meet its end."""
    tensors = random_tensors(config)
    whole, rows = tensors(name), tensors.rows(name)
    assert whole.size > (LARGE_BLOCK if config.parameter_count > LARGE_BLOCK else SMALL_BLOCK)
    assert rows.shape == whole.shape
    for first, stop in ((0, 7), (100, len(whole) - 3), (len(whole) - 1, len(whole))):
        assert np.array_equal(rows[first:stop], whole[first:stop])


@pytest.mark.parametrize("format", ["int4-g128", "int4-g64-asym", "int8", "fp8", "fp8-block128"])
def test_random_weights_of_a_quantised_model(format):
    checkpoint = open_checkpoint(f"random:demo@{format}")
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), format)
    name = "model.layers.1.mlp.gate_proj.weight"
    matrix, values = checkpoint.rows(name), checkpoint.tensor(name)
    assert matrix.scheme.name == format and matrix.shape == values.shape == (320, 128)
    assert np.array_equal(matrix[100:300].dequantized(), values[100:300])
    assert values.std() == pytest.approx(128**-0.5, rel=0.15) and abs(values.mean()) < 0.5 * values.std()
    rows = matrix[:]
    assert len(np.unique(rows.codes, axis=0)) == 320 and len(np.unique(rows.scales)) > 1
    assert (rows.zero_points is not None) == format.endswith("asym")
    assert checkpoint.tensor(EMBEDDING).dtype == np.uint16


def test_random_weights_of_a_folder_bring_its_tokenizer(tmp_path):
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for source in (tmp_path, tmp_path / "config.json"):
        checkpoint = open_checkpoint(f"random:{source}")
        assert checkpoint.config == CONFIG and set(checkpoint.files) == {"tokenizer.json"}
        assert checkpoint.tensor(Q).shape == (256, 48)


def test_two_of_four_columns_are_there_in_a_format_that_keeps_two():
    config = resolve_config("demo@2of4")
    tensors = random_tensors(config, 3)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = tensors(name)
    assert is_two_of_four(whole) and np.count_nonzero(widen(whole)) == whole.size // 2
    np.testing.assert_array_equal(tensors.rows(name)[5:9], whole[5:9])
    dense = random_tensors(resolve_config("demo"), 3)(name)
    np.testing.assert_array_equal(whole[whole != 0], dense[whole != 0])
    assert not is_two_of_four(tensors("model.embed_tokens.weight"))
