"""Quantised copies with outliers beside the codes: what is chosen, written, read again, kept and refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_sparse_checkpoints import load_all
from written_checkpoints import BF16, random_values, write_model

from cheetah.errors import CheetahError
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.outliers import outlier_count, outliers_of
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.quantize import quantization_job

Q = "model.layers.1.self_attn.q_proj"
SCHEME = scheme_of_name("int4", "bf16")
PART = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outliers")
    source = write_model(path / "source")
    quantization_job(str(source), SCHEME, clip=False, outliers=PART).write(path / "out", lambda nbytes: None, threads=2)
    return path / "out"


def test_each_row_has_its_share_of_every_window() -> None:
    values = np.random.default_rng(0).standard_normal((40, 2100)).astype(np.float32)
    chosen = outliers_of(values, 0.005)
    assert chosen.sum() == outlier_count(40, 2100, 0.005)
    for begin in range(0, 2048, 1024):
        of_window, sizes = chosen[:, begin : begin + 1024], np.abs(values[:, begin : begin + 1024])
        assert set(of_window.sum(axis=1)) == {5, 6}
        assert np.where(of_window, sizes, np.inf).min() > 3 * np.median(sizes)
        assert (np.where(of_window, sizes, np.inf).min(axis=1) >= np.where(of_window, 0, sizes).max(axis=1)).all()
    np.testing.assert_array_equal(chosen[7:], outliers_of(values[7:], 0.005, first_row=7))


def test_what_is_written_is_read_again(folder: Path) -> None:
    values = random_values()[f"{Q}.weight"].astype(np.float32)
    chosen = outliers_of(values, PART)
    wanted = nearest_rows(np.where(chosen, np.float32(0), values), SCHEME).dequantized()
    wanted[chosen] = values[chosen]
    checkpoint = open_checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensor(f"{Q}.weight"), wanted)
    np.testing.assert_array_equal(checkpoint.rows(f"{Q}.weight")[3:9].dequantized(), wanted[3:9])
    # 2 or 3 of the 48 columns of a row: up to 6 of a pair of rows are 2 units
    assert dict(checkpoint.config.weight_formats)["qkv"] == "int4+list2"
    load_all(folder)
    off = open_checkpoint(folder, sparse="off")
    assert off.config.weight_formats == checkpoint.config.weight_formats


def changed(name, made):
    return lambda tensors: tensors.update({f"{Q}.{name}": made(tensors[f"{Q}.{name}"].copy())})


def at(place, value):
    def change(tensor):
        tensor[place] = value
        return tensor

    return change


HOSTILE = {
    "a column behind the last": (
        changed("weight_outlier_columns", at(5, 48)),
        "weight_outlier_columns: row 2 has column 48",
    ),
    "a negative column": (changed("weight_outlier_columns", at(5, -1)), "weight_outlier_columns: row 2 has column -1"),
    "a column twice": (
        changed("weight_outlier_columns", lambda columns: at(1, columns[0])(columns)),
        "weight_outlier_columns: row 0 has column",
    ),
    "no number": (changed("weight_outlier_values", at(5, BF16(np.nan))), "weight_outlier_values: row 2, column"),
    "offsets that fall": (changed("weight_outlier_offsets", at(9, 3)), "weight_outlier_offsets: row 8 is 19 to 3 of"),
    "offsets beyond the numbers": (changed("weight_outlier_offsets", at(256, 2**40)), "row 255 is"),
    "offsets that do not begin at 0": (changed("weight_outlier_offsets", at(0, 1)), "row 0 is 1 to"),
    "offsets of other rows": (changed("weight_outlier_offsets", lambda ends: ends[:-1]), "is [256], expected [257]"),
    "fewer numbers": (changed("weight_outlier_values", lambda numbers: numbers[:-1]), "weight_outlier_values has"),
    "a code beside a number": (
        changed("weight_packed", lambda words: words ^ 0x33333333),
        "weight_outlier_columns: row 0, column",
    ),
    "no columns": (lambda tensors: tensors.pop(f"{Q}.weight_outlier_columns"), f"missing: {Q}.weight_outlier_columns"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_the_tensors_name(folder: Path, tmp_path: Path, case: str) -> None:
    change, message = HOSTILE[case]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheetahError) as raised:
        load_all(tmp_path)
    assert message in str(raised.value) and Q in str(raised.value)


def test_what_outliers_are_not_kept_beside(tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "source"))
    for scheme, part, message in (
        ("fp8", PART, "not beside fp8"),
        ("int4", 0.2, "20.000% of the weights: give at most 5%"),
    ):
        with pytest.raises(CheetahError, match=message):
            quantization_job(source, scheme_of_name(scheme, "bf16"), clip=False, outliers=part)
