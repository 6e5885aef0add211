"""Opening checkpoints: what is whole is read exactly, and everything that lies is refused by name."""

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cheetah.errors import CheetahError
from cheetah.models.llama.config import PRESETS, LlamaConfig
from cheetah.models.llama.weights import tensor_shapes
from cheetah.runtime.loading import open_checkpoint

CONFIG = LlamaConfig(
    hidden_size=48, intermediate_size=40, layers=2, query_heads=4, kv_heads=2, head_dim=64, vocab_size=50
)
BF16 = ml_dtypes.bfloat16
Q = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def random_values(config=CONFIG, dtype=BF16):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in tensor_shapes(config).items()}


def write_config(folder, config=CONFIG, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **changes}))


def write_model(folder, tensors=None, config=CONFIG, **changes):
    write_config(folder, config, **changes)
    save_file(random_values(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, tensors=None, total_size=None, count=3):
    """A sharded model; gives the weight map, which the caller may falsify and write with `write_index`."""
    write_config(folder)
    tensors = random_values() if tensors is None else tensors
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map, sum(value.nbytes for value in tensors.values()))
    return weight_map


def write_index(folder, weight_map, total_size):
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(*arguments, **named):
    with pytest.raises(CheetahError) as raised:
        open_checkpoint(*arguments, **named)
    return str(raised.value)


def test_tensors_are_mapped_as_stored(tmp_path):
    values = random_values()
    checkpoint = open_checkpoint(write_model(tmp_path, values))
    assert checkpoint.config == CONFIG and checkpoint.notes == ()
    for name, value in values.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.uint16 and np.array_equal(found, value.view(np.uint16))
        with pytest.raises(ValueError):
            found[0] = 0


@pytest.mark.parametrize(("dtype", "stored"), [(np.float16, "F16"), (np.float32, "F32")])
def test_other_floats_are_rounded_to_nearest_even_with_one_note(tmp_path, dtype, stored):
    values = random_values(dtype=dtype)
    checkpoint = open_checkpoint(write_model(tmp_path, values))
    assert len(checkpoint.notes) == 1 and f"stored as {stored} are rounded" in checkpoint.notes[0]
    for name, value in values.items():
        assert np.array_equal(checkpoint.tensor(name), value.astype(np.float32).astype(BF16).view(np.uint16))


def test_shards(tmp_path):
    values = random_values()
    write_shards(tmp_path, values)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    for name, value in values.items():
        assert np.array_equal(checkpoint.tensor(name), value.view(np.uint16))


def test_a_single_file_comes_before_an_index(tmp_path):
    write_shards(tmp_path, {name: value * 2 for name, value in random_values().items()})
    write_model(tmp_path)
    assert np.array_equal(open_checkpoint(tmp_path).tensor(Q), random_values()[Q].view(np.uint16))


def test_the_trained_checkpoint_opens():
    models = Path(os.environ.get("CHEETAH_TEST_MODELS", Path(__file__).resolve().parents[3] / "shared" / "models"))
    folder = models / "stories260K-hd64-bf16"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} (set CHEETAH_TEST_MODELS to the folder that holds it)")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == () and checkpoint.eos_token_id == 2 and checkpoint.bos_token_id == 1
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
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
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


@pytest.mark.parametrize(("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_legacy_quantisation_files_are_refused(tmp_path, file, method):
    (write_model(tmp_path) / file).write_text('{"bits": 4}')
    assert f"{file}: the weights are quantised ({method})" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "a Python pickle"),
        ("consolidated.00.pth", "Meta's own layout"),
        ("model.gguf", "the format of llama.cpp"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, file, message):
    write_config(tmp_path)
    (tmp_path / file).write_bytes(b"")
    assert file in refusal(tmp_path) and message in refusal(tmp_path)


def test_no_weights_and_no_config(tmp_path):
    assert "has no config.json" in refusal(tmp_path)
    write_config(tmp_path)
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)


def test_missing_shard(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: is missing, but model.safetensors.index.json names it" in refusal(
        tmp_path
    )


def test_index_that_places_a_tensor_wrongly(tmp_path):
    weight_map = write_shards(tmp_path)
    right = weight_map[Q]
    wrong = next(file for file in weight_map.values() if file != right)
    write_index(tmp_path, {**weight_map, Q: wrong}, None)
    assert f"{right}: holds tensor {Q}, which model.safetensors.index.json places in {wrong}" in refusal(tmp_path)
    write_index(tmp_path, {**weight_map, "model.more": right}, None)
    assert f"{right}: tensor model.more is missing" in refusal(tmp_path)
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != Q}, None)
    assert f"holds tensor {Q}, which model.safetensors.index.json places in nowhere" in refusal(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    weight_map = write_shards(tmp_path)
    other = sorted(set(weight_map.values()) - {weight_map[Q]})[-1]
    part = load_file(tmp_path / other)
    save_file({**part, Q: random_values()[Q]}, tmp_path / other)
    message = refusal(tmp_path)
    assert Q in message and ("stands in two files" in message or "places in" in message)


@pytest.mark.parametrize("shard", ["../other.safetensors", "model.bin", 7])
def test_index_may_name_only_safetensors_beside_it(tmp_path, shard):
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, Q: shard}, None)
    assert f"places {Q} in {shard!r}: expected a .safetensors file beside it" in refusal(tmp_path)


def test_total_size_that_lies_is_noted(tmp_path):
    write_index(tmp_path, write_shards(tmp_path), 17)
    notes = open_checkpoint(tmp_path).notes
    assert len(notes) == 1 and "total_size is 17" in notes[0]


def raw_file(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin, end, shape=(2,), dtype="BF16"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry(0, 4)}, 3, "cut short"),
        ({"a": entry(0, 4)}, 5, "followed by unknown bytes"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "tensor b overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 10)}, 10, "tensor b leaves a hole"),
        ({"a": entry(0, 6)}, 6, "tensor a: 6 bytes, but BF16 [2] needs 4"),
        ({"a": entry(0, 4, dtype="Q4")}, 4, "tensor a: dtype 'Q4' is not known"),
        ({"a": entry(0, 4, shape=(-2,))}, 4, "are not lists of sizes"),
        ({"a": {"dtype": "BF16"}}, 0, "must hold dtype, shape and data_offsets"),
        (b'{"a": 1, "a": 2}', 0, "key 'a' stands twice"),
        (b"[", 0, "cannot be read as JSON"),
    ],
)
def test_broken_files_are_refused(tmp_path, header, size, message):
    write_config(tmp_path)
    raw_file(tmp_path / "model.safetensors", header, bytes(size))
    assert message in refusal(tmp_path) and "model.safetensors: " in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 1000) + b"{}"])
def test_truncated_headers_are_refused(tmp_path, content):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "not a whole safetensors file" in refusal(tmp_path)


def test_trailing_spaces_and_metadata_in_the_header_are_legal(tmp_path):
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = {"__metadata__": {"format": "pt"}, **json.loads(content[8 : 8 + length])}
    raw_file(path, json.dumps(header).encode() + b"   ", content[8 + length :])
    assert np.array_equal(open_checkpoint(tmp_path).tensor(Q), random_values()[Q].view(np.uint16))


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


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache, and no network: a call to the hub's library fails the test."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("cheetah.runtime.hub.fetched_folder", lambda *_: pytest.fail("the network was asked"))
    return tmp_path / "cache" / "huggingface" / "hub"


def cached_model(cache, commit="abc123", branch="main"):
    repository = cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    (repository / "snapshots").mkdir(exist_ok=True)
    return write_model(repository / "snapshots" / commit)


def test_offline_hub_ids_come_from_the_cache(hub_cache):
    folder = cached_model(hub_cache)
    for revision in (None, "main", "abc123"):
        assert open_checkpoint("someone/tiny", revision).folder == folder


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_cache_variables(hub_cache, tmp_path, monkeypatch, variable):
    folder = cached_model(tmp_path / "elsewhere")
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert open_checkpoint("someone/tiny").folder == folder


def test_hf_home_and_transformers_offline(hub_cache, tmp_path, monkeypatch):
    folder = cached_model(tmp_path / "home" / "hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "true")
    assert open_checkpoint("someone/tiny").folder == folder


def test_local_files_only_needs_no_variable(hub_cache, monkeypatch):
    cached_model(hub_cache)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    open_checkpoint("someone/tiny", local_files_only=True)


def test_offline_and_not_in_the_cache(hub_cache):
    message = refusal("someone/other", "v2")
    assert "config.json of someone/other, revision v2, is not in the cache" in message and str(hub_cache) in message


def test_offline_and_a_file_missing_names_file_repository_and_revision(hub_cache):
    folder = cached_model(hub_cache)
    (folder / "model.safetensors").unlink()
    message = refusal("someone/tiny")
    assert (
        message.startswith("someone/tiny, revision main (offline, from the cache): ") and "model.safetensors" in message
    )
    write_shards(folder)
    (folder / "model-00001-of-00003.safetensors").unlink()
    assert "model-00001-of-00003.safetensors: is missing" in refusal("someone/tiny")


def test_a_folder_of_that_name_comes_before_the_hub(hub_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    write_model(tmp_path / "someone" / "tiny")
    assert open_checkpoint("someone/tiny").folder == Path("someone/tiny")


class FakeHub:
    """Stands for huggingface_hub: a repository in a folder, and a list of what was fetched."""

    def __init__(self, source, cache):
        self.source, self.target, self.fetched = source, cache / "snapshots" / "c0ffee", []

    def hf_hub_download(self, repository, file, revision, cache_dir):
        from huggingface_hub.errors import EntryNotFoundError

        if not (self.source / file).is_file():
            raise EntryNotFoundError(f"404: {file}")
        self.target.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.source / file, self.target / file)
        self.fetched.append(file)
        return str(self.target / file)

    def snapshot_download(self, repository, revision, cache_dir, allow_patterns, ignore_patterns=()):
        from huggingface_hub.utils import filter_repo_objects

        files = [path.relative_to(self.source).as_posix() for path in self.source.rglob("*") if path.is_file()]
        kept = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns or None)
        for file in sorted(kept):
            self.hf_hub_download(repository, file, revision, cache_dir)


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    import huggingface_hub

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeHub(tmp_path / "source", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_only_weights_and_text_files_are_fetched(fake_hub):
    write_shards(fake_hub.source)
    for name in ("tokenizer.json", "modeling.py", "pytorch_model.bin", "README.md", "chat_template.jinja"):
        (fake_hub.source / name).write_text("{}")
    (fake_hub.source / "original").mkdir()
    (fake_hub.source / "original" / "params.json").write_text("{}")
    checkpoint = open_checkpoint("someone/tiny")
    assert np.array_equal(checkpoint.tensor(Q), random_values()[Q].view(np.uint16))
    assert {Path(file).suffix for file in fake_hub.fetched} == {".json", ".jinja", ".safetensors"}
    assert not any("original" in file for file in fake_hub.fetched)


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(fake_hub):
    write_model(fake_hub.source, model_type="mistral")
    assert "model_type is 'mistral'" in refusal("someone/tiny")
    assert fake_hub.fetched == ["config.json"]


def test_a_repository_without_config_is_one_message(fake_hub):
    fake_hub.source.mkdir()
    assert "someone/tiny, revision main, cannot be fetched: 404: config.json" in refusal("someone/tiny")


def test_random_weights_depend_on_name_and_seed_alone():
    first, second = open_checkpoint("random:llama-3.2-1b"), open_checkpoint("random:llama-3.2-1b")
    names = ["model.layers.3.self_attn.k_proj.weight", "model.layers.2.input_layernorm.weight"]
    values = [first.tensor(name) for name in names]
    for name, value in zip(reversed(names), reversed(values), strict=True):
        assert np.array_equal(second.tensor(name), value)
    assert not np.array_equal(first.tensor(names[0].replace("3", "4")), values[0])
    assert not np.array_equal(open_checkpoint("random:llama-3.2-1b", seed=1).tensor(names[0]), values[0])
    assert first.config == PRESETS["llama-3.2-1b"] and "random" in first.notes[0]


def test_random_weights_are_scaled_by_their_inputs():
    checkpoint = open_checkpoint("random:llama-3.2-1b")
    for name, shape in list(tensor_shapes(checkpoint.config).items())[:10]:
        value = checkpoint.tensor(name)
        assert value.shape == shape and value.dtype == np.uint16
        part = value[:4096].view(BF16).astype(np.float32)
        mean, spread = (1, 0.1) if len(shape) == 1 else (0, shape[1] ** -0.5)
        assert abs(part.mean() - mean) < 0.1 * spread and part.std() == pytest.approx(spread, rel=0.05)


def test_no_two_rows_of_random_weights_are_the_same():
    rows = open_checkpoint("random:llama-3.2-1b").tensor(EMBEDDING)[:, :8]
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_random_weights_of_a_folder_bring_its_tokenizer(tmp_path):
    write_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for source in (tmp_path, tmp_path / "config.json"):
        checkpoint = open_checkpoint(f"random:{source}")
        assert checkpoint.config == CONFIG and set(checkpoint.files) == {"tokenizer.json"}
        assert checkpoint.tensor(Q).shape == (256, 48)
