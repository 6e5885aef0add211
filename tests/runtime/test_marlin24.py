"""`marlin-24` of compressed-tensors: codes of which two of four are there, in the order of its kernel."""

from zlib import crc32

import numpy as np
import pytest
from quantized_checkpoints import compressed_config
from safetensors.numpy import save_file
from test_sparse_checkpoints import is_layer_matrix, load_all
from written_checkpoints import random_values, refusal, write_model

from cheetah.models.formats.quantized import QuantizationScheme
from cheetah.models.llama import LlamaConfig
from cheetah.models.quantization import Storage
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.quantized_checks import open_matrix
from cheetah.runtime.checkpoint.safetensors_files import read_header

CONFIG = LlamaConfig(256, 320, 2, 4, 2, 64, 50)
Q = "model.layers.1.self_attn.q_proj"
LIBRARY = {
    (4, 128): [3865962221, 1435936298, 2975953154],
    (4, None): [3865962221, 4157015939, 2975953154],
    (8, 128): [2366820016, 1435936298, 1969022449],
}
"""What compressed-tensors 0.11.0 writes of `drawn` (128, 512): the crc32 of its three tensors, one by one."""


def drawn(rows, columns, bits=4, group=128, seed=0):
    """Values of which two of four are not zero, or fewer, and scales."""
    draw, middle = np.random.default_rng(seed), 1 << bits - 1
    values = draw.integers(-middle, middle, (rows, columns))
    kept = np.argsort(np.argsort(draw.random((rows, columns // 4, 4)), axis=2), axis=2) < 2
    scales = draw.random((rows, 1 if group is None else columns // group)) + 0.5
    return np.where(kept.reshape(rows, columns), values, 0), scales.astype(np.float16)


def marlin24(values, scales, bits=4, group=128):
    """As the format is described: the largest two places of four go to words, codes to tiles."""
    (rows, columns), middle = values.shape, 1 << bits - 1
    fours = values.reshape(rows, -1, 4)
    there = fours != 0
    # What stands for a missing one, as the library chooses it.
    first = np.where(there[..., 0] & there[..., 1], 0, np.where(~there[..., 0] & there[..., 1], 1, 0))
    first = np.where(~there[..., 0] & ~there[..., 1], 2, first)
    second = np.where(there[..., 0] & there[..., 1] | ~there[..., 0] & ~there[..., 1] | there[..., 3], 1, 0)
    second += 2 * (~there[..., 0] & there[..., 1] | ~there[..., 1])
    kept = np.stack([np.take_along_axis(fours, one[..., None], 2)[..., 0] for one in (first, second)], -1)
    kept = kept.reshape(rows, columns // 2).T + middle
    nibbles = (first | second << 2).reshape(rows, -1, 4)
    words = (nibbles << np.arange(0, 16, 4)).sum(axis=2).astype(np.uint16)
    meta = np.zeros(words.size, np.uint16)
    for row in range(rows):
        for word in range(words.shape[1]):
            to = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
            shift = int(to % 2 == 0 and word % 2 == 1) - int(to % 2 == 1 and word % 2 == 0)
            meta[(word - shift) // 2 * rows * 2 + (to + shift) * 2 + (word - shift) % 2] = words[row, word]
    order = []
    for lane in range(32):
        for inner in range(4):
            for block in range(2):
                for number in (0, 1, 8, 9):
                    row, column = 2 * (lane % 4) + number, lane // 4
                    order.append(16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * block + inner)
    interleaved = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    order = np.array(order).reshape(-1, len(interleaved))[:, interleaved].reshape(-1)
    tiles = kept.reshape(columns // 32, 16, rows // 16, 16).transpose(0, 2, 1, 3).reshape(-1, 1024)[:, order]
    codes = tiles.reshape(columns // 32, -1, 32 // bits).astype(np.uint32)
    packed = (codes << np.arange(0, 32, bits, dtype=np.uint32)).sum(axis=2, dtype=np.uint32).view(np.int32)
    turned = np.ascontiguousarray(scales.T)
    if group is not None and group < columns // 2:
        eights = [8 * eight + place for eight in range(8) for place in (0, 4, 1, 5, 2, 6, 3, 7)]
        turned = turned.reshape(-1, 64)[:, eights].reshape(turned.shape)
    return {
        "weight_packed": packed,
        "scale_packed": np.ascontiguousarray(turned),
        "meta": meta.view(np.int16).reshape(columns // 32, 2 * rows),
    }


def stated(bits=4, group=128, **changes):
    weights = {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group}
    return compressed_config("marlin-24", weights=weights, **changes)


def written(folder, bits=4, group=128, change=lambda tensors: None):
    """A model in that layout; gives what each weight is."""
    tensors, wanted = random_values(CONFIG), {}
    for seed, name in enumerate([name for name, value in tensors.items() if is_layer_matrix(name, value)]):
        shape = tensors.pop(name).shape
        values, scales = drawn(*shape, bits, group if shape[1] % 128 == 0 else None, seed)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": one for suffix, one in marlin24(values, scales, bits, group).items()}
        wanted[name] = values * np.repeat(scales.astype(np.float32), shape[1] // scales.shape[1], axis=1)
    change(tensors)
    write_model(folder, tensors, CONFIG, quantization_config=stated(bits, group))
    return wanted


@pytest.mark.parametrize(("bits", "group"), LIBRARY)
def test_the_layout_is_the_librarys_and_is_read_back(tmp_path, bits, group):
    values, scales = drawn(128, 512, bits, group)
    tensors = marlin24(values, scales, bits, group)
    assert [crc32(one.tobytes()) for one in tensors.values()] == LIBRARY[bits, group]
    save_file({f"m.{suffix}": one for suffix, one in tensors.items()}, tmp_path / "file.safetensors")
    storage = Storage("marlin24", QuantizationScheme(f"int{bits}", group))
    matrix = open_matrix("m", storage, (128, 512), read_header(tmp_path / "file.safetensors"))
    wanted = values * np.repeat(scales.astype(np.float32), 512 // scales.shape[1], axis=1)
    for part in (slice(0, 128), slice(5, 40), slice(60, 70)):
        np.testing.assert_array_equal(matrix[part].dequantized(), wanted[part])


@pytest.mark.parametrize(("bits", "format"), [(4, "2of4-int4"), (8, "int8")])
def test_a_model_is_read_and_packed(tmp_path, bits, format):
    wanted = written(tmp_path / "model", bits, None)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), format)
    for name, values in wanted.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values.astype(np.float32))
    load_all(tmp_path / "model")
    assert dict(open_checkpoint(tmp_path / "model", sparse="off").config.weight_formats)["o"] == f"int{bits}"


def damaged(tensors):
    tensors[f"{Q}.meta"][0, 0] = 0x1111


def short(tensors):
    tensors[f"{Q}.meta"] = tensors[f"{Q}.meta"][:-1].copy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damaged, f"tensor {Q}.meta: row 0, columns 0 to 3: places 1 and 0 are not in order"),
        (short, f"misshapen: {Q}.meta is [7, 512], expected [8, 512]"),
        (lambda tensors: tensors.pop(f"{Q}.scale_packed"), f"missing: {Q}.scale_packed [1, 256]"),
    ],
)
def test_malformed_files_are_refused_with_the_tensors_name(tmp_path, change, message):
    written(tmp_path / "model", 4, None, change)
    with pytest.raises(Exception) as raised:
        load_all(tmp_path / "model")
    assert message in str(raised.value)


def test_other_groups_are_refused(tmp_path):
    write_model(tmp_path / "model", random_values(CONFIG), CONFIG, quantization_config=stated(group=64))
    assert "group_size = 64 of marlin-24 is not supported" in refusal(tmp_path / "model")
