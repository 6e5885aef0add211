"""The safetensors files of a folder: shards, index and headers, and what is refused of them."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from written_checkpoints import Q, random_values, refusal, write_config, write_index, write_model, write_shards

from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.safetensors_files import read_header


def test_shards(tmp_path):
    values = random_values()
    write_shards(tmp_path, values)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    for name, value in values.items():
        assert np.array_equal(checkpoint.tensor(name), value.view(np.uint16))


def test_a_file_is_opened_once_for_all_its_tensors(tmp_path):
    """Whatever is kept of it, and another that takes its name is another file."""

    def opened():
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if os.path.islink(link))

    values = random_values()
    write_model(tmp_path, values)
    path = tmp_path / "model.safetensors"
    tensors = read_header(path)
    kept = {name: (tensor.mapped_bytes(), tensor.stored_rows()) for name, tensor in tensors.items()}
    assert len(kept) > 10 and 1 <= opened() <= 2
    save_file({name: value * 2 for name, value in values.items()}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert np.array_equal(read_header(path)[Q].bf16_bits(), (values[Q] * 2).view(np.uint16))
    memory = np.empty(tensors[Q].nbytes, np.uint8)
    kept[Q][1].read(0, memory)
    assert np.array_equal(memory, kept[Q][0]) and np.array_equal(memory, values[Q].view(np.uint8).reshape(-1))
    del kept
    assert opened() == 0


def test_a_single_file_comes_before_an_index(tmp_path):
    write_shards(tmp_path, {name: value * 2 for name, value in random_values().items()})
    write_model(tmp_path)
    assert np.array_equal(open_checkpoint(tmp_path).tensor(Q), random_values()[Q].view(np.uint16))


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


@pytest.mark.parametrize("shard", ["../other.safetensors", "model.bin", 7, "a\0.safetensors"])
def test_index_may_name_only_safetensors_beside_it(tmp_path, shard):
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, Q: shard}, None)
    assert f"places {Q} in {shard!r}: expected a .safetensors file beside it" in refusal(tmp_path)


def test_index_may_name_only_files_that_can_be(tmp_path):
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, Q: "x" * 5000 + ".safetensors"}, None)
    assert "expected a .safetensors file beside it" in refusal(tmp_path)


def test_a_layer_number_that_no_model_has(tmp_path):
    name = f"model.layers.{'9' * 5000}.self_attn.q_proj.weight"
    write_model(tmp_path, {**random_values(), name: random_values()[Q]})
    assert "extra: model.layers.9999" in refusal(tmp_path) and len(refusal(tmp_path)) < 1000


def test_a_bias_without_elements_is_a_bias_of_zeros(tmp_path):
    write_model(tmp_path, {**random_values(), "a.bias": np.zeros((0, 2**40), np.float32)})
    assert open_checkpoint(tmp_path).notes[0] == "1 biases are all zero and are left out"


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
        ({"a": entry(0, 4, shape=(-2,))}, 4, "are not lists of at most 64 sizes below 2**63"),
        ({"a": entry(0, 4, shape=[10**300] * 100_000)}, 4, "are not lists of at most 64 sizes"),
        ({"a": entry(0, 4, shape=[2**63])}, 4, "are not lists of at most 64 sizes"),
        ({"a": entry(0, 4, shape=[2**62] * 64)}, 4, "needs an integer of about"),
        ({"\x1b[2J": entry(0, 6)}, 6, "tensor \\x1b[2J: 6 bytes"),
        (b"[" * 1_000_000, 0, "its brackets are nested too deeply"),
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
