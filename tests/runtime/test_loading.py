"""Opening a folder: what is whole is read exactly, and everything that lies is refused by name."""

import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from written_checkpoints import BF16, CONFIG, EMBEDDING, HEAD, Q, random_values, refusal, write_config, write_model

from cheetah.runtime.checkpoint.loading import open_checkpoint


def test_tensors_are_mapped_as_stored(tmp_path):
    values = random_values()
    checkpoint = open_checkpoint(write_model(tmp_path, values))
    assert checkpoint.config == CONFIG and checkpoint.notes == ()
    for name, value in values.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.uint16 and np.array_equal(found, value.view(np.uint16))
        with pytest.raises(ValueError):
            found[0] = 0
        if found.ndim == 2:
            assert np.array_equal(checkpoint.rows(name)[1:9], found[1:9])


@pytest.mark.parametrize(("dtype", "stored"), [(np.float16, "F16"), (np.float32, "F32")])
def test_other_floats_are_rounded_to_nearest_even_with_one_note(tmp_path, dtype, stored):
    values = random_values(dtype=dtype)
    checkpoint = open_checkpoint(write_model(tmp_path, values))
    assert len(checkpoint.notes) == 1 and f"stored as {stored} are rounded" in checkpoint.notes[0]
    for name, value in values.items():
        rounded = value.astype(np.float32).astype(BF16).view(np.uint16)
        assert np.array_equal(checkpoint.tensor(name), rounded)
        if value.ndim == 2:
            assert checkpoint.rows(name).shape == value.shape
            assert np.array_equal(checkpoint.rows(name)[1:9], rounded[1:9])


def test_the_trained_checkpoint_opens():
    models = Path(os.environ.get("CHEETAH_TEST_MODELS", Path(__file__).resolve().parents[3] / "shared" / "models"))
    folder = models / "stories260K-hd64-bf16"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} (set CHEETAH_TEST_MODELS to the folder that holds it)")
    checkpoint = open_checkpoint(folder)
    (note,) = checkpoint.notes  # its heads of 8 dims are padded to 64 with zeros
    assert "many weights of qkv seem to be zero" in note
    assert checkpoint.eos_token_id == 2 and checkpoint.bos_token_id == 1
    assert set(checkpoint.files) == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert checkpoint.generation_config["do_sample"] is False
    stored = load_file(folder / "model.safetensors")
    assert np.array_equal(checkpoint.tensor(HEAD), stored[HEAD].view(np.uint16))


def test_tied_head_is_optional_and_must_be_the_embedding(tmp_path):
    tied = replace(CONFIG, tied_embeddings=True)
    values = random_values(tied)
    assert open_checkpoint(write_model(tmp_path, values, tied)).config.tied_embeddings
    write_model(tmp_path, {**values, HEAD: values[EMBEDDING]}, tied)
    open_checkpoint(tmp_path)
    other = values[EMBEDDING].copy()
    other[-1, -1] += BF16(1)
    write_model(tmp_path, {**values, HEAD: other}, tied)
    assert "tie_word_embeddings is true, but lm_head.weight differs" in refusal(tmp_path)
    assert np.array_equal(open_checkpoint(tmp_path, tie_word_embeddings=False).tensor(HEAD), other.view(np.uint16))


def test_missing_head_names_the_override(tmp_path):
    values = random_values()
    del values[HEAD]
    write_model(tmp_path, values)
    assert "open with tie_word_embeddings=True" in refusal(tmp_path)
    assert open_checkpoint(tmp_path, tie_word_embeddings=True).config.tied_embeddings


def test_missing_misshapen_and_extra_tensors_are_listed(tmp_path):
    values = random_values()
    del values["model.norm.weight"]
    values[Q] = values[Q][:, :32].copy()
    values["model.layers.0.self_attn.q_norm.weight"] = np.ones(64, BF16)
    message = refusal(write_model(tmp_path, values))
    assert "missing: model.norm.weight [48]" in message
    assert f"{Q} is [256, 32], expected [256, 48] = [num_attention_heads * head_dim, hidden_size]" in message
    assert "extra: model.layers.0.self_attn.q_norm.weight [64]" in message


def test_long_lists_are_cut(tmp_path):
    values = {EMBEDDING: random_values()[EMBEDDING], Q: random_values()[Q], HEAD: random_values()[HEAD]}
    assert "and 12 more" in refusal(write_model(tmp_path, values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "the tensors have 2 layers, config.json says num_hidden_layers = 3"),
        ({"num_hidden_layers": 1}, "the tensors have 2 layers, config.json says num_hidden_layers = 1"),
        ({"vocab_size": 51}, "model.embed_tokens.weight is [50, 48], expected [51, 48] = [vocab_size, hidden_size]"),
        ({"head_dim": 128}, "q_proj.weight is [256, 48], expected [512, 48]"),
        ({"num_key_value_heads": 1}, "k_proj.weight is [128, 48], expected [64, 48]"),
    ],
)
def test_configs_that_lie_are_refused(tmp_path, changes, message):
    assert message in refusal(write_model(tmp_path, **changes))


def test_constants_and_zero_biases_are_left_out(tmp_path):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32),
        "model.layers.0.self_attn.o_proj.bias": np.zeros(48, BF16),
        "model.layers.0.self_attn.q_proj.bias": -np.zeros(256, BF16),
    }
    checkpoint = open_checkpoint(write_model(tmp_path, {**random_values(), **extra}))
    assert any("2 biases are all zero" in note for note in checkpoint.notes)
    extra["model.layers.0.self_attn.o_proj.bias"][3] = 1
    message = refusal(write_model(tmp_path, {**random_values(), **extra}))
    assert "a bias that is not zero, which is not supported: model.layers.0.self_attn.o_proj.bias" in message


def test_quantised_tensors_without_a_config_are_refused(tmp_path):
    values = random_values()
    del values[Q]
    values[Q.replace("weight", "qweight")] = np.zeros((6, 256), np.int32)
    message = refusal(write_model(tmp_path, values))
    assert "q_proj.qweight (I32 [6, 256]) is part of a quantised weight, though config.json names no" in message
    values = {**random_values(), Q: np.zeros((256, 48), ml_dtypes.float8_e4m3fn)}
    assert f"{Q} (F8_E4M3 [256, 48]) is not a plain weight" in refusal(write_model(tmp_path, values))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "a Python pickle"),
        ("consolidated.00.pth", "Meta's own layout"),
        ("model.gguf", "the format of llama.cpp"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, file, message):
    (tmp_path / file).write_bytes(b"")
    assert message in refusal(tmp_path) and message in refusal(tmp_path / file)  # also without a config.json
    write_config(tmp_path)
    assert file in refusal(tmp_path) and message in refusal(tmp_path)


def test_no_weights_and_no_config(tmp_path):
    assert "has no config.json" in refusal(tmp_path)
    write_config(tmp_path)
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)


def test_files_beside_the_weights(tmp_path):
    write_model(tmp_path, eos_token_id=[2, 3])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "tool.jinja").write_text("")
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.eos_token_id, checkpoint.generation_config) == ([2, 3], {"eos_token_id": 2})
    assert set(checkpoint.files) == {"tokenizer.json", "chat_templates/tool.jinja"}
    assert checkpoint.files["tokenizer.json"] == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3.1-8b", "a preset has no weights: use random:llama-3.1-8b"),
        ("no/such/folder", "no such folder, and not a hub id"),
        ("tests/int8", "there is a folder tests, but no int8 in it"),
        ("./missing", "no such folder, and not a hub id"),
        ("random:llama-9", "random:llama-9: llama-9: neither a preset"),
    ],
)
def test_names_that_are_no_models(name, message):
    assert message in refusal(name)


def test_a_file_is_not_a_model(tmp_path):
    write_model(tmp_path)
    assert "is a file: give the folder" in refusal(tmp_path / "model.safetensors")
    assert "revision 'main' is for hub ids only" in refusal(tmp_path, revision="main")
