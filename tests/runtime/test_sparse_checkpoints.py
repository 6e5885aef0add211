"""Checkpoints of whose weights two of four, or any, are there: masked files, plain ones, what is said and refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from quantized_checkpoints import float8_config
from safetensors.numpy import load_file, save_file
from written_checkpoints import BF16, CONFIG, random_values, refusal, write_model

from cheetah.errors import CheetahError
from cheetah.generate import choose_plan
from cheetah.models.family import Packing
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.formats.two_of_four import is_two_of_four
from cheetah.models.registry import family_of
from cheetah.plan import gpu_named, step_matrices
from cheetah.plan.report import inspect_plan
from cheetah.runtime.checkpoint.block_bytes import m_tile_bytes
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.masked import with_masked
from cheetah.runtime.checkpoint.safetensors_files import find_tensors
from cheetah.tools.quantize import quantization_job
from cheetah.tools.sparse_patterns import largest_of_four
from cheetah.tools.sparsify import sparse_copy

Q = "model.layers.1.self_attn.q_proj"
LAYERS = tuple((matrix, "2of4") for matrix in ("qkv", "o", "gate_up", "down"))
STATED = {
    "quant_method": "compressed-tensors",
    "sparsity_config": {"format": "sparse-24-bitmask", "ignore": ["lm_head"]},
}
ANY = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask", "ignore": ["lm_head"]}}


def load_all(folder, **options):
    """Opens a checkpoint and packs it, as loading does."""
    checkpoint = open_checkpoint(folder, **options)
    family, gpu = family_of(checkpoint.config), gpu_named("emulator-2")
    matrices = step_matrices(checkpoint.config.shape, choose_plan(checkpoint.config, gpu), gpu)
    packing = Packing(checkpoint.tensor, lambda *written: None, rows=checkpoint.rows, threads=1)
    family.pack_weights(checkpoint.config, matrices, packing)


def is_layer_matrix(name, value):
    return ".layers." in name and value.ndim == 2


def two_of_four_values(dtype=BF16):
    """With rows of zeros, and fours with fewer than two."""
    values = random_values(dtype=dtype)
    for name, value in values.items():
        if is_layer_matrix(name, value):
            value[~largest_of_four(value.astype(np.float32))] = 0
            value[3], value[:, 5] = 0, 0
    return values


def masked(values, is_any=False):
    """As compressed-tensors stores them, by its description: two of four with the largest magnitudes, or those that are
    not zero."""
    tensors = {}
    for name, value in values.items():
        if not is_layer_matrix(name, value):
            tensors[name] = value
            continue
        module, numbers = name.removesuffix(".weight"), value.astype(np.float32)
        kept = numbers != 0 if is_any else largest_of_four(numbers)
        counts = kept.sum(axis=1)
        tensors[f"{module}.compressed"] = value[kept] if is_any else value[kept].reshape(len(value), -1)
        tensors[f"{module}.bitmask"] = np.packbits(kept, axis=1, bitorder="little")
        tensors[f"{module}.shape"] = np.array(value.shape, np.int64).reshape(2, 1)
        if is_any:
            tensors[f"{module}.row_offsets"] = np.append(0, np.cumsum(counts)[:-1]).astype(np.int64)
    return tensors


def check_values(folder, values, **options):
    checkpoint = open_checkpoint(folder, **options)
    for name, value in values.items():
        wanted = value.astype(BF16).view(np.uint16)
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted)
        if value.ndim == 2:
            np.testing.assert_array_equal(checkpoint.rows(name)[5:9], wanted[5:9])
    return checkpoint


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_masked_weights_are_read_and_kept_as_two_of_four(tmp_path, dtype):
    values = two_of_four_values(dtype)
    folder = write_model(tmp_path / "model", masked(values), quantization_config=STATED)
    checkpoint = check_values(folder, values)
    assert checkpoint.config.weight_formats == LAYERS
    load_all(folder)
    assert check_values(folder, values, sparse="off").config.weight_formats == ()


def thinned(part):
    """Values of which this part is there."""
    values = random_values()
    for name, value in values.items():
        if is_layer_matrix(name, value):
            value[np.random.default_rng(1).random(value.shape) >= part] = 0
    return values


def test_any_mask_is_kept_as_two_of_four_and_lists(tmp_path):
    values = thinned(0.4)
    folder = write_model(tmp_path / "model", masked(values, is_any=True), quantization_config=ANY)
    checkpoint = check_values(folder, values)
    assert all(re.fullmatch(r"2of4\+list\d", name) for _, name in checkpoint.config.weight_formats)
    assert len(checkpoint.config.weight_formats) == 4 and not checkpoint.notes
    load_all(folder)
    assert check_values(folder, values, sparse="off").config.weight_formats == ()


def test_lists_as_long_as_the_longest_of_all_layers(tmp_path):
    """Counted as the rows are packed: those of q are rotated, gate's and up's lie by eights in turn."""
    values = thinned(0.4)
    name = "model.layers.1.mlp.up_proj.weight"
    values[name][17, :24] = 1  # 12 in lists, and some of gate's row 17
    folder = write_model(tmp_path / "model", masked(values, is_any=True), quantization_config=ANY)
    checkpoint = check_values(folder, values)
    gate = values["model.layers.1.mlp.gate_proj.weight"][17].reshape(-1, 4)
    rest = values[name][17, 24:].reshape(-1, 4)
    count = 12 + sum(np.maximum(np.count_nonzero(one, axis=1) - 2, 0).sum() for one in (gate, rest))
    assert dict(checkpoint.config.weight_formats)["gate_up"] == f"2of4+list{-(-count // 4)}"
    load_all(folder)


def test_dense_rows_that_would_take_more_bytes_in_lists(tmp_path):
    values = thinned(1.0)
    folder = write_model(tmp_path / "model", masked(values, is_any=True), quantization_config=ANY)
    checkpoint = check_values(folder, values)
    assert checkpoint.config.weight_formats == () and "kept as dense matrices" in checkpoint.notes[0]


def test_plain_weights_that_are_thin_are_offered_and_taken(tmp_path):
    values = thinned(0.4)
    folder = write_model(tmp_path / "model", values)
    assert "--sparse auto keeps the others in lists" in open_checkpoint(folder).notes[-1]
    checkpoint = check_values(folder, values, sparse="auto")
    assert len(checkpoint.config.weight_formats) == 4 and not checkpoint.notes


def test_the_bits_are_those_of_compressed_tensors(tmp_path):
    """A row by hand."""
    row = [0, 1, 2, 0, 3, 0, 0, 4]
    values = random_values()
    tensors = masked(two_of_four_values())
    values[f"{Q}.weight"][:] = np.tile(np.array(row, BF16), 6)
    stated = {
        f"{Q}.compressed": np.tile(np.array([1, 2, 3, 4], BF16), (256, 6)),
        f"{Q}.bitmask": np.full((256, 6), 0b10010110, np.uint8),
    }
    folder = write_model(tmp_path / "model", {**tensors, **stated}, quantization_config=STATED)
    np.testing.assert_array_equal(open_checkpoint(folder).tensor(f"{Q}.weight").view(BF16), values[f"{Q}.weight"])


@pytest.mark.parametrize("layout", ["sparse-bitmask", "sparse-24-bitmask"])
def test_what_the_formats_own_compressor_wrote(tmp_path, layout):
    golden = json.loads((Path(__file__).parent / "goldens" / "sparse_masks.json").read_text())[layout]
    dtypes = {"compressed": np.uint16, "bitmask": np.uint8, "shape": np.int64, "row_offsets": np.int64}
    tensors = {name: np.array(values, dtypes[name]) for name, values in golden.items()}
    rows, columns = tensors["shape"]
    place = np.arange(rows * columns).reshape(rows, columns)
    wanted = np.where(place * 13 % 7 < 3, 0, (place * 37 % 29 - 14) / 8)
    wanted[2], wanted[3] = 0, np.where(wanted[3] == 0, 1, wanted[3])
    tensors["compressed"] = tensors["compressed"].view(BF16)
    tensors["bitmask"] = tensors["bitmask"].reshape(rows, -1)
    if layout == "sparse-24-bitmask":
        tensors["compressed"] = tensors["compressed"].reshape(rows, -1)
    save_file({f"P.{name}": one for name, one in tensors.items()}, tmp_path / "model.safetensors")
    found = with_masked(find_tensors(tmp_path).tensors, "")["P.weight"].rows()[:]
    found = found.view(BF16).astype(np.float32)
    if layout == "sparse-24-bitmask":  # of equal magnitudes it keeps whichever it likes
        largest = np.where(largest_of_four(wanted.astype(np.float32)), wanted, 0)
        sizes = [np.sort(np.abs(values).reshape(-1, 4), axis=1) for values in (found, largest)]
        np.testing.assert_array_equal(*sizes)
        wanted = np.where(found, wanted, 0)
    np.testing.assert_array_equal(found, wanted)


def test_plain_weights_are_offered_and_taken(tmp_path):
    values = two_of_four_values()
    folder = write_model(tmp_path / "model", values)
    plain = check_values(folder, values)
    assert plain.config.weight_formats == () and "--sparse auto" in plain.notes[-1]
    for wanted in ("auto", "2:4"):
        checkpoint = check_values(folder, values, sparse=wanted)
        assert checkpoint.config.weight_formats == LAYERS and not checkpoint.notes
    assert open_checkpoint(folder, sparse="off").notes == ()
    assert "there are auto, 2:4, off" in refusal(folder, sparse="yes")


def test_matrices_that_have_more_stay_dense(tmp_path):
    values = two_of_four_values()
    values[f"{Q}.weight"][0, :3] = 1
    folder = write_model(tmp_path / "model", values)
    formats = (("qkv", "2of4+list1"), *LAYERS[1:])
    assert sorted(open_checkpoint(folder, sparse="auto").config.weight_formats) == sorted(formats)
    assert f"{Q}.weight has three weights of some four neighbours" in refusal(folder, sparse="2:4")


@pytest.mark.parametrize(("sparse", "stated"), [("2:4", None), (None, STATED)])
def test_a_row_that_was_not_looked_at_is_refused_when_it_is_packed(tmp_path, sparse, stated):
    """Also where a label says what is not so."""
    values = two_of_four_values()
    values[f"{Q}.weight"][1, 8:12] = 1
    folder = write_model(tmp_path / "model", values, **({"quantization_config": stated} if stated else {}))
    with pytest.raises(CheetahError, match=rf"{Q}.weight.*columns 8 to 11 of row \d+ have 4 weights"):
        load_all(folder, sparse=sparse)


def set_bits(name, row, byte, value):
    def change(tensors):
        tensors[f"{Q}.{name}"][row, byte] = value

    return change


def replaced(name, made):
    return lambda tensors: tensors.update({f"{Q}.{name}": made(tensors[f"{Q}.{name}"])})


HOSTILE = {
    "three of four": (False, set_bits("bitmask", 7, 2, 0x37), f"{Q}.bitmask: row 7, columns 16 to 23: keeps other"),
    "one of four": (False, set_bits("bitmask", 7, 2, 0x31), "keeps other than two of every four: 0x31"),
    "no kept values": (False, lambda tensors: tensors.pop(f"{Q}.compressed"), f"{Q}.compressed is missing"),
    "no shape": (False, lambda tensors: tensors.pop(f"{Q}.shape"), f"{Q}.shape is missing"),
    "a mask of other columns": (
        *(False, replaced("bitmask", lambda mask: mask[:, :-1].copy())),
        f"{Q}.bitmask: U8 [256, 5]: expected U8 [256, 6]",
    ),
    "too few values": (
        *(False, replaced("compressed", lambda kept: kept[:, 1:].copy())),
        f"{Q}.compressed: BF16 [256, 23]: expected",
    ),
    "another shape": (False, replaced("shape", lambda shape: shape * 2), f"{Q}.bitmask: U8 [256, 6]: expected U8 [512"),
    "a shape of nothing": (False, replaced("shape", lambda shape: shape * 0), "says [0, 0], which are no rows"),
    "a shape of floats": (False, replaced("shape", lambda shape: shape.astype(np.float64)), f"{Q}.shape: F64 [2, 1]"),
    "twice": (
        *(False, lambda tensors: tensors.update({f"{Q}.weight": np.zeros((256, 48), BF16)})),
        f"{Q}.weight stands there twice",
    ),
    "offsets that fall": (
        *(True, replaced("row_offsets", lambda offsets: np.where(np.arange(256) == 9, 0, offsets))),
        f"{Q}.row_offsets: row 8 begins at",
    ),
    "offsets beyond the values": (
        *(True, replaced("row_offsets", lambda offsets: np.where(np.arange(256) == 255, 2**40, offsets))),
        f"{Q}.row_offsets: row 255 begins at 1099511627776",
    ),
    "offsets that do not begin at 0": (True, replaced("row_offsets", lambda offsets: offsets + 1), "row 0 begins at 1"),
    "other counts than the mask": (
        *(True, replaced("row_offsets", lambda offsets: np.where(np.arange(256) == 9, offsets + 1, offsets))),
        f"{Q}.bitmask: row 8 keeps",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_the_tensors_name(tmp_path, case):
    is_any, change, message = HOSTILE[case]
    tensors = masked(two_of_four_values(), is_any)
    change(tensors)
    folder = write_model(tmp_path / "model", tensors, quantization_config=ANY if is_any else STATED)
    with pytest.raises(CheetahError) as raised:
        load_all(folder)
    assert message in str(raised.value)


def test_columns_that_fill_no_byte_of_the_mask(tmp_path):
    config = replace(CONFIG, intermediate_size=36)
    values, name = random_values(config), "model.layers.0.mlp.down_proj"
    values[f"{name}.weight"][~largest_of_four(values[f"{name}.weight"].astype(np.float32))] = 0
    tensors = {**values, **masked({f"{name}.weight": values[f"{name}.weight"]})}
    del tensors[f"{name}.weight"]
    stated = {**STATED, "sparsity_config": {**STATED["sparsity_config"], "ignore": ["lm_head", "re:.*"]}}
    check_values(write_model(tmp_path / "right", tensors, config, quantization_config=stated), values)
    for row, bits, message in ((7, 0x10, "bits behind column 35"), (8, 0x0F, "row 8, columns 32 to 35: keeps other")):
        wrong = {**tensors, f"{name}.bitmask": tensors[f"{name}.bitmask"].copy()}
        wrong[f"{name}.bitmask"][row, -1] |= bits
        folder = write_model(tmp_path / f"{row}", wrong, config, quantization_config=stated)
        with pytest.raises(CheetahError, match=f"{name}.bitmask: row {row}.*{message[6:]}"):
            open_checkpoint(folder).tensor(f"{name}.weight")


@pytest.mark.parametrize("layout", ["plain", "bitmask"])
def test_sparsify_keeps_the_largest_two_of_four(tmp_path, layout):
    values = random_values()
    source = write_model(tmp_path / "source", values)
    sparse_copy(str(source), "2:4", layout).write(tmp_path / "out", lambda nbytes: None, threads=2)
    for name, value in values.items():
        if is_layer_matrix(name, value):
            value[~largest_of_four(value.astype(np.float32))] = 0
    checkpoint = check_values(tmp_path / "out", values, sparse="auto")
    assert checkpoint.config.weight_formats == LAYERS
    assert is_two_of_four(checkpoint.tensor(f"{Q}.weight"))
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert (f"{Q}.bitmask" in names) == (layout == "bitmask") == (f"{Q}.weight" not in names)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in stated) == (layout == "bitmask")


@pytest.mark.parametrize("layout", ["plain", "bitmask"])
def test_sparsify_keeps_a_part_of_every_row(tmp_path, layout):
    values = random_values()
    source = write_model(tmp_path / "source", values)
    sparse_copy(str(source), "0.4", layout).write(tmp_path / "out", lambda nbytes: None, threads=2)
    for name, value in values.items():
        if is_layer_matrix(name, value):
            kept = round(0.4 * value.shape[1])
            sizes = np.abs(value.astype(np.float64)) - 1e-9 * np.arange(value.shape[1])  # of equal ones the first
            value[sizes < np.sort(sizes, axis=1)[:, -kept, None]] = 0
    checkpoint = check_values(tmp_path / "out", values, sparse="auto")
    assert all(name.startswith("2of4+list") for _, name in checkpoint.config.weight_formats)
    stated = json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization_config", {})
    assert stated.get("sparsity_config", {}).get("format") == ("sparse-bitmask" if layout == "bitmask" else None)


@pytest.mark.parametrize("layout", ["plain", "bitmask"])
def test_sparsify_keeps_whole_blocks_of_m_tiles(tmp_path, layout):
    """Gate and up lie by eight rows in turn in M-tiles, and rows of heads as they are rotated."""
    config = replace(CONFIG, hidden_size=256, intermediate_size=128)
    source = write_model(tmp_path / "source", random_values(config), config)
    sparse_copy(str(source), "blocks:2:4", layout).write(tmp_path / "out", lambda nbytes: None, threads=2)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out", sparse="auto")
    assert dict(after.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), "blocks-2of4")
    load_all(tmp_path / "out", sparse="auto")
    gate, up = (f"model.layers.1.mlp.{one}_proj.weight" for one in ("gate", "up"))
    kept = {name: after.tensor(name) & 0x7FFF != 0 for name in (gate, up)}
    for name, there in kept.items():
        np.testing.assert_array_equal(after.tensor(name)[there], before.tensor(name)[there])
    blocks = {name: there[8:16, :128].reshape(8, 4, 32).any(axis=(0, 2)) for name, there in kept.items()}
    np.testing.assert_array_equal(blocks[gate], blocks[up])
    both = np.concatenate([before.tensor(name)[8:16, :128].view(BF16) for name in (gate, up)]).astype(np.float32)
    sizes = np.square(both).reshape(16, 4, 32).sum(axis=(0, 2))
    assert set(np.flatnonzero(blocks[gate])) == set(np.argsort(-sizes)[:2])


@pytest.mark.parametrize("layout", ["plain", "bitmask"])
def test_sparsify_keeps_the_largest_blocks_of_a_matrix(tmp_path, layout):
    """Wherever they are: M-tiles have different numbers of them, and a row of blocks has none."""
    config = replace(CONFIG, hidden_size=160, intermediate_size=120)
    values = random_values(config)
    for name in (name for name, value in values.items() if is_layer_matrix(name, value)):
        scaled = values[name].astype(np.float32) * np.exp2(np.arange(len(values[name])) // 16 % 5)[:, None]
        values[name] = scaled.astype(BF16)
    source = write_model(tmp_path / "source", values, config)
    sparse_copy(str(source), "blocks:0.4", layout).write(tmp_path / "out", lambda nbytes: None, threads=2)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out", sparse="auto")
    formats = dict(after.config.weight_formats)
    assert set(formats) == {"qkv", "o", "gate_up", "down"}
    assert all(re.fullmatch(r"blocks-\d+of1024", name) for name in formats.values())
    load_all(tmp_path / "out", sparse="auto")
    name = "model.layers.1.self_attn.o_proj.weight"
    kept = after.tensor(name) & 0x7FFF != 0
    np.testing.assert_array_equal(after.tensor(name)[kept], before.tensor(name)[kept])
    sizes = np.square(before.tensor(name).view(BF16).astype(np.float32)).reshape(10, 16, -1, 32).sum(axis=(1, 3))
    least = np.sort(sizes, axis=None)[-round(0.4 * sizes.size)]
    np.testing.assert_array_equal(kept.reshape(10, 16, -1, 32).any(axis=(1, 3)), sizes >= least)
    found = m_tile_bytes(after)
    np.testing.assert_array_equal(found["o"][1], 128 + 1024 * (sizes >= least).sum(axis=1))
    gpu = gpu_named("emulator")
    report = inspect_plan(after.config.shape, choose_plan(after.config, gpu), gpu, 16, found)
    share = next(phase for phase in report.phases if phase.name == "o")
    shares = np.stack([found["o"][:, block :: gpu.blocks].sum(axis=1) for block in range(gpu.blocks)], axis=1)
    assert share.total_bytes == pytest.approx(shares.mean(axis=0).sum(), abs=gpu.blocks)
    assert share.largest_bytes == pytest.approx(shares.max(axis=1).mean(), abs=1)
    assert share.imbalance_percent > 10


def test_of_equal_magnitudes_the_first_are_kept():
    found = largest_of_four(np.array([[1, -1, 1, 1, 0, 0, 0, 0, -3, 2, 4, -3]], np.float32))
    np.testing.assert_array_equal(found, [[1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0]])


def test_what_sparsify_does_not_do(tmp_path):
    values = random_values()
    values[f"{Q}.weight"][2, 3] = ml_dtypes.bfloat16(np.inf)
    source = str(write_model(tmp_path / "source", values))
    for pattern, layout, message in (
        ("1:4", "plain", "--pattern 1:4: there are 2:4, parts"),
        ("1.5", "plain", "--pattern 1.5"),
        ("2:4", "x", "--layout x"),
    ):
        with pytest.raises(CheetahError, match=message):
            sparse_copy(source, pattern, layout)
    with pytest.raises(CheetahError, match=f"tensor {Q}.weight, row 2: only numbers can be compared"):
        sparse_copy(source, "2:4", "plain").write(tmp_path / "out", lambda nbytes: None)
    assert not (tmp_path / "out").exists() and CONFIG.hidden_size % 4 == 0


@pytest.mark.parametrize(
    ("format", "kept"), [("int4", "2of4-int4"), ("fp8", "2of4-fp8"), ("int4-asym", None), ("int8", None)]
)
def test_codes_of_sparse_weights_are_kept_so_where_there_is_a_format(tmp_path, format, kept):
    """Those of zero stay such codes when weights are rounded."""
    source = write_model(tmp_path / "source", two_of_four_values())
    quantization_job(str(source), scheme_of_name(format, "bf16"), clip=False).write(
        tmp_path / "out", lambda nbytes: None
    )
    dense = open_checkpoint(tmp_path / "out")
    assert ("--sparse auto" in " ".join(dense.notes)) == (kept is not None)
    checkpoint = open_checkpoint(tmp_path / "out", sparse="auto")
    assert dict(checkpoint.config.weight_formats)["down"] == kept or kept is None
    assert kept is not None or checkpoint.config == dense.config
    np.testing.assert_array_equal(checkpoint.tensor(f"{Q}.weight"), dense.tensor(f"{Q}.weight"))
    load_all(tmp_path / "out", sparse="auto")


def test_masked_codes_of_e4m3(tmp_path):
    """As float-quantized beside sparse-24-bitmask has them."""
    values, tensors, wanted = two_of_four_values(), {}, {}
    for name, value in values.items():
        if not is_layer_matrix(name, value):
            tensors[name] = value
            continue
        codes = value.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        module, numbers = name.removesuffix(".weight"), codes.astype(np.float32)
        kept = largest_of_four(numbers)
        tensors[f"{module}.compressed"] = codes[kept].reshape(len(value), -1)
        tensors[f"{module}.bitmask"] = np.packbits(kept, axis=1, bitorder="little")
        tensors[f"{module}.shape"] = np.array(value.shape, np.int64).reshape(2, 1)
        tensors[f"{module}.weight_scale"] = np.full((len(value), 1), 0.5, np.float32)
        wanted[name] = numbers * 0.5
    stated = float8_config(strategy="channel")
    stated["sparsity_config"] = STATED["sparsity_config"]
    folder = write_model(tmp_path / "model", tensors, quantization_config=stated)
    checkpoint = open_checkpoint(folder)
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), "2of4-fp8")
    for name, numbers in wanted.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), numbers)
    load_all(folder)
    load_all(folder, sparse="off")
