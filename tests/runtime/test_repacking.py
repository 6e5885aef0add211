"""Packing by a device, in the emulator: the same bytes as packing by the host makes, from the files of every format."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from quantized_checkpoints import (
    CONFIG,
    DOWN,
    act_order_tensors,
    awq,
    awq_config,
    compressed,
    compressed_config,
    drawn,
    drawn_float8,
    float8_config,
    gptq,
    gptq_config,
    quantized_tensors,
    write_quantized,
)
from written_checkpoints import EMBEDDING, Q, random_values, write_model
from written_experts import CONFIGS, merged

from benchmarks.loading import write_checkpoint
from cheetah.models.dense import repacked
from cheetah.models.formats import WEIGHT_FORMATS, PackingError
from cheetah.models.llama import LlamaConfig
from cheetah.models.phi3 import Phi3Config
from cheetah.models.repacking import StoredCodes
from cheetah.models.rope import Rope
from cheetah.models.rounding import round_f16
from cheetah.plan import gpu_named
from cheetah.runtime.assembly.repacking import Spare
from cheetah.runtime.checkpoint.loading import LoadingError, open_checkpoint
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.device.interface import DeviceError
from tests.repacked_weights import packed

GPU = gpu_named("emulator-2")
GROUP = 32


def check_alike(folder, works):
    checkpoint = open_checkpoint(folder)
    with EmulatorDevice() as device:
        wanted, _, _ = packed(checkpoint, device, GPU, by_device=False)
        found, done, _ = packed(checkpoint, device, GPU, by_device=True)
    for name, expected in wanted.items():
        assert np.array_equal(found[name], expected), name
    assert done == works


def of_integers(write, **drawing):
    return quantized_tensors(lambda shape, seed: (write(drawn(shape, group=GROUP, seed=seed, **drawing)), None))[0]


def of_float8(scale_shape, suffix):
    def make(shape, seed):
        codes, scales = drawn_float8(shape, scale_shape(shape), seed=seed)
        return {"weight": codes, suffix: scales}, None

    return quantized_tensors(make)[0]


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 128]}
WHOLE = {"strategy": "channel", "group_size": None}
SMALL = {
    "gptq": lambda: (of_integers(lambda m: gptq(m, g_idx=False)), gptq_config(group_size=GROUP)),
    "gptq, 8 bits, asymmetric": lambda: (
        of_integers(lambda m: gptq(m, 8, g_idx=False), bits=8, asymmetric=True),
        gptq_config(bits=8, sym=False, group_size=GROUP),
    ),
    "awq": lambda: (of_integers(awq, asymmetric=True), awq_config(group_size=GROUP)),
    "packed": lambda: (of_integers(compressed), compressed_config(weights={"group_size": GROUP})),
    "packed, 8 bits, a scale a row": lambda: (
        quantized_tensors(
            lambda shape, seed: (
                compressed(drawn(shape, 8, group=0, scales=ml_dtypes.bfloat16, seed=seed), 8),
                None,
            )
        )[0],
        compressed_config(weights={"num_bits": 8, **WHOLE}),
    ),
    "fp8, a scale a row": lambda: (
        of_float8(lambda shape: (shape[0], 1), "weight_scale"),
        float8_config(strategy="channel"),
    ),
    "fp8 in blocks": lambda: (
        of_float8(lambda shape: (-(-shape[0] // 16), -(-shape[1] // 128)), "weight_scale_inv"),
        BLOCKS,
    ),
    "gptq in act-order": lambda: (
        act_order_tensors(gptq, group=GROUP)[0],
        gptq_config(desc_act=True, group_size=GROUP),
    ),
    "packed in act-order, 8 bits": lambda: (
        act_order_tensors(lambda m, groups: compressed(m, 8, groups=groups), group=GROUP, bits=8)[0],
        compressed_config(weights={"num_bits": 8, "group_size": GROUP, "actorder": "group"}),
    ),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", SMALL)
def test_every_way_of_storing_codes(tmp_path, name):
    """Rows and columns that fill no tile."""
    tensors, stated = SMALL[name]()
    check_alike(write_quantized(tmp_path, tensors, stated), works=4 * CONFIG.layers + 1)


# Waves of several M-tiles a block, several chunks an M-tile, the last of both not full.
LARGE = LlamaConfig(256, 2432, 1, 2, 1, 128, 200, max_position_embeddings=128)
NARROW = replace(LARGE, hidden_size=272)
"""o and down have M-tiles of 8 rows in bf16."""
FUSED = Phi3Config(256, 2432, 1, 2, 1, 128, 200, max_position_embeddings=128, rope=Rope(partial_rotary_factor=0.5))


IN_PARTS = {
    "gptq": (LARGE, "gptq", 5),
    "gptq-order": (LARGE, "gptq-order", 5),
    "awq": (LARGE, "awq", 5),
    "packed": (LARGE, "packed", 9),
    "fp8-blocks": (LARGE, "fp8-blocks", 14),
    "bf16": (LARGE, "bf16", 25),
    "narrow M-tiles": (NARROW, "bf16", 26),
    "fused tensors": (FUSED, "bf16", 25),
    "fused tensors, packed": (FUSED, "packed", 9),
    "fused tensors, gptq": (FUSED, "gptq", 5),
}
"""Model, form of its files, and in how many parts they go up."""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("case", IN_PARTS)
def test_many_chunks_and_waves(tmp_path, case, monkeypatch):
    """In parts, where a matrix may go up so, of pieces that end anywhere."""
    monkeypatch.setattr("cheetah.models.dense.repacked.PART_BYTES", 200_000)
    monkeypatch.setattr("cheetah.models.dense.repacked.PIECE_BYTES", 50_001)
    monkeypatch.setattr("cheetah.models.dense.repacked.BLOCK_BYTES", 7_001)
    config, form, works = IN_PARTS[case]
    write_checkpoint(tmp_path, config, form)
    check_alike(tmp_path, works)


def spoilt(tensors, name, change):
    """The tensors with one of them changed in place."""
    tensors[name] = tensors[name].copy()
    change(tensors[name])
    return tensors


FAULTS = {
    "a scale": (
        "awq",
        f"{DOWN}.scales",
        lambda one: one.__setitem__((1, 5), np.inf),
        "the scale of row 5, group 1 is inf",
    ),
    "a zero point": (
        "gptq",
        f"{DOWN}.qzeros",
        lambda one: one.__setitem__((0, 0), 0),
        "the zero point of row 0, group 0",
    ),
    "a byte of e4m3": (
        "fp8, a scale a row",
        f"{DOWN}.weight",
        lambda one: one.view(np.uint8).__setitem__((47, 39), 0xFF),
        f"tensor {DOWN}.weight: row 47, column 39 is 0xff, which is not a number in e4m3",
    ),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("by_device", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_numbers_that_are_refused(tmp_path, name, by_device):
    """By the same words, whoever packs."""
    form, tensor, change, message = FAULTS[name]
    tensors, stated = SMALL[form]()
    checkpoint = open_checkpoint(write_quantized(tmp_path, spoilt(tensors, tensor, change), stated))
    with EmulatorDevice() as device, pytest.raises(LoadingError, match=re.escape(message)):
        packed(checkpoint, device, GPU, by_device)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("by_device", [False, True])
def test_scales_that_a_tile_has_no_room_for(tmp_path, by_device):
    tensors = of_integers(compressed, scales=np.float32)
    folder = write_quantized(tmp_path, tensors, compressed_config(weights={"group_size": GROUP}))
    with EmulatorDevice() as device, pytest.raises(PackingError) as raised:
        packed(open_checkpoint(folder), device, GPU, by_device)
    assert "q_proj.weight or model.layers.0.self_attn.k_proj.weight" in str(raised.value)
    assert "is no f16 number times a power of two" in str(raised.value)


class Full(EmulatorDevice):
    """Has no room for what is not poisoned: the staging memory."""

    def allocate(self, nbytes, fill=None):
        if fill is None:
            raise DeviceError("no room for staging")
        return super().allocate(nbytes, fill)


def test_a_device_without_room_has_the_host_pack(tmp_path):
    tensors, stated = SMALL["packed"]()
    checkpoint = open_checkpoint(write_quantized(tmp_path, tensors, stated))
    with EmulatorDevice() as device, Full() as full:
        wanted, _, _ = packed(checkpoint, device, GPU, by_device=False)
        found, works, said = packed(checkpoint, full, GPU, by_device=True)
    assert works == 0 and all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert said == ["weights are packed by the host, which takes longer: no room for staging"]


@pytest.mark.slow
@pytest.mark.compiler
def test_a_device_without_room_packs_in_what_is_spare(tmp_path):
    """And leaves it as it was."""
    tensors, stated = SMALL["packed"]()
    checkpoint = open_checkpoint(write_quantized(tmp_path, tensors, stated))
    with EmulatorDevice() as device, Full() as full:
        spare = Spare(full.allocate(300_000, 0x77), 0x77)
        wanted, _, _ = packed(checkpoint, device, GPU, by_device=False)
        found, works, said = packed(checkpoint, full, GPU, True, spare)
        too_small = Spare(full.allocate(1000, 0x77), 0x77)
        _, no_works, _ = packed(checkpoint, full, GPU, True, too_small)
        assert np.all(spare.buffer.download(np.uint8, 300_000) == 0x77)
    assert works == 4 * CONFIG.layers + 1 and not said and no_works == 0
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_numbers_that_have_to_be_rounded(tmp_path, dtype):
    """The smallest, ties and the largest too."""
    tensors = random_values(dtype=dtype)
    for name in (f"{DOWN}.weight", EMBEDDING):
        tensors[name][0, :6] = [6e-8, -3e-6, 1 + 2**-8, -1 - 3 * 2**-8, 65504, -np.inf]
    check_alike(write_model(tmp_path, tensors), works=4 * CONFIG.layers + 1)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_matrix_of_two_dtypes_is_packed_by_the_host(tmp_path):
    tensors = random_values()
    tensors[Q] = tensors[Q].astype(np.float16)
    check_alike(write_model(tmp_path, tensors), works=4 * CONFIG.layers)


def test_every_f16_is_rounded_as_numpy_does():
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        wanted = bits.view(np.float16).astype(np.float32).astype(ml_dtypes.bfloat16)
    found = np.empty_like(bits)
    round_f16(bits, found)
    is_number = ~np.isnan(wanted)
    assert np.array_equal(found[is_number], wanted.view(np.uint16)[is_number])
    assert np.all(np.isnan(found.view(ml_dtypes.bfloat16)[~is_number]))


@pytest.mark.parametrize("name", [name for name, one in WEIGHT_FORMATS.items() if one.code_bits])
def test_the_order_of_codes_has_each_once(name):
    one = WEIGHT_FORMATS[name]
    rows, columns = one.code_order() >> 16, one.code_order() & 0xFFFF
    places = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert len(places) == len(rows) == 16 * one.code_columns == one.code_bytes * 8 // one.code_bits
    assert rows.max() == 15 and columns.max() == one.code_columns - 1


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("is_merged", [False, True])
def test_experts_one_by_one_and_merged(tmp_path, is_merged, monkeypatch):
    """Each expert's two matrices by themselves, beside q, k and v, o and the router of a layer, and the head; tables go
    up once for all experts of a layer."""
    config, tables, make = CONFIGS["qwen3_moe"], [], repacked._Part._tables_piece
    monkeypatch.setattr(repacked._Part, "_tables_piece", lambda part: (tables.append(part), make(part))[1])
    values = merged("qwen3_moe") if is_merged else random_values(config)
    check_alike(write_model(tmp_path, values, config), works=2 * (3 + 2 * 5) + 1)
    assert len(tables) == 2 * (3 + 2) + 1


@pytest.mark.parametrize(
    "other",
    [{"bits": 4}, {"nbytes": 90}, {"row_bytes": None}, {"row_offsets": [8, 0, 4]}, {"column_offsets": [0, 1, 3, 2]}],
)
def test_tables_are_of_codes_that_lie_as_others_do(other):
    def codes(bits=8, nbytes=96, row_offsets=(0, 4, 8), column_offsets=(0, 1, 2, 3), row_bytes=4):
        return StoredCodes(bits, nbytes, np.array(row_offsets), np.array(column_offsets), row_bytes, lambda: None)

    assert codes().lies_like(codes())
    assert not codes().lies_like(codes(**other)) and not codes(**other).lies_like(codes())
