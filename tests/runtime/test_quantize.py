"""Quantised copies of checkpoints in several files, of other dtypes, and what is left when writing fails."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from written_checkpoints import CONFIG, HEAD, random_values, write_config, write_model, write_shards

from cheetah.errors import CheetahError
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools import rewriting
from cheetah.tools.quantize import quantization_job

Q = "model.layers.1.self_attn.q_proj"
SCHEME = scheme_of_name("int4-asym", "bf16")


def written(source: Path, out: Path, scheme=SCHEME):
    done = []
    quantization_job(str(source), scheme, clip=False).write(out, done.append, threads=2)
    return sum(done)


def test_shards_stay_shards(tmp_path):
    weight_map = write_shards(tmp_path / "source")
    read = written(tmp_path / "source", tmp_path / "out")
    assert read == sum(value.nbytes for value in random_values().values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(weight_map.values())
    assert index["weight_map"][f"{Q}.weight_packed"] == weight_map[f"{Q}.weight"]
    found = 0
    for file in sorted(set(weight_map.values())):
        with safe_open(tmp_path / "out" / file, "np") as shard:  # as the format's own library sees it
            assert shard.metadata() == {"format": "pt"}
            found += sum(1 for name in shard.keys() if index["weight_map"][name] == file)  # noqa: SIM118
    assert found == len(index["weight_map"])
    checkpoint, values = open_checkpoint(tmp_path / "out"), random_values()
    assert checkpoint.notes == ()
    wanted = nearest_rows(values[f"{Q}.weight"].astype(np.float32), SCHEME).dequantized()
    assert np.array_equal(checkpoint.tensor(f"{Q}.weight"), wanted)
    assert np.array_equal(checkpoint.tensor(HEAD), values[HEAD].view(np.uint16))


def test_weights_of_32_bits_are_rounded_once(tmp_path):
    values = random_values(dtype=np.float32)
    written(write_model(tmp_path / "source", values), tmp_path / "out")
    wanted = nearest_rows(values[f"{Q}.weight"], SCHEME).dequantized()
    assert np.array_equal(open_checkpoint(tmp_path / "out").tensor(f"{Q}.weight"), wanted)


def test_a_weight_that_is_no_number_is_named_and_leaves_nothing(tmp_path):
    values = random_values()
    values[f"{Q}.weight"][255, 3] = np.nan
    write_model(tmp_path / "source", values)
    with pytest.raises(CheetahError, match=rf"tensor {Q}.weight, rows from 0 on: row 255, column 3 is nan"):
        written(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    write_model(tmp_path / "source")
    monkeypatch.setattr(rewriting, "copy_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_and_large_files_are_not_copied(tmp_path):
    source = write_model(tmp_path / "source")
    (source / "chat_templates").mkdir()
    for name in ("pytorch_model.bin", "tokenizer.model", "chat_template.jinja", "chat_templates/tool.jinja"):
        (source / name).write_text(name)
    written(source, tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {
        *("config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja", "chat_templates/tool.jinja")
    }


def test_columns_that_are_no_whole_groups_are_refused_before_anything_is_written(tmp_path):
    write_config(tmp_path / "source", CONFIG)
    write_model(tmp_path / "source")
    with pytest.raises(CheetahError, match="48 columns are no whole groups of 128: use int4"):
        quantization_job(str(tmp_path / "source"), scheme_of_name("int4-g128"), clip=False)
