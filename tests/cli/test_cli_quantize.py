"""`cheetah quantize`: what it writes is read back exactly, and nothing is left of what fails."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.registry import DEMO_FOLDER
from cheetah.models.rounding import widen
from cheetah.runtime.checkpoint.loading import open_checkpoint
from tests.cli.commands import cheetah, refused
from tests.tiers import tiered

FORMATS = ["int4-g64", "int4-g32-asym", "int4", "int8", "int8-g64-asym", "fp8", "fp8-block128"]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("format", FORMATS)
def test_the_demo_model_is_read_back_exactly(tmp_path: Path, format: str) -> None:
    out = tmp_path / "quantised"
    result = cheetah("quantize", "demo", "-o", out, "--format", format)
    assert result.exit_code == 0 and f"in {format}" in result.stdout, result.output
    checkpoint, original = open_checkpoint(out), open_checkpoint("demo")
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), format)
    values = widen(original.tensor(DOWN))
    block = 128 if "block" in format else None
    rows = nearest_rows(values, scheme_of_name(format, "bf16"), block_rows=block)
    stored = checkpoint.rows(DOWN)[:]
    for found, wanted in zip((stored.codes, stored.scales), (rows.codes, rows.scales), strict=True):
        assert np.array_equal(found, wanted)
    assert np.array_equal(checkpoint.tensor(DOWN), rows.dequantized())
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert np.array_equal(checkpoint.tensor(name), original.tensor(name))
    assert set(checkpoint.files) == set(original.files) and checkpoint.notes == ()
    assert sorted(os.listdir(tmp_path)) == ["quantised"]


def test_what_is_written_beside_the_weights(tmp_path: Path) -> None:
    cheetah("quantize", "demo", "-o", tmp_path / "out", "--format", "int4-g64", "--clip", "mse")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = values.pop("quantization_config")
    assert values == json.loads((DEMO_FOLDER / "config.json").read_text())
    weights = stated["config_groups"]["group_0"]["weights"]
    assert (stated["format"], weights["group_size"], weights["observer"]) == ("pack-quantized", 64, "mse")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (DEMO_FOLDER / name).read_bytes()


def test_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for format, other in (("int4-g128", "int4"), ("int4-g128-asym", "int4-asym")):
        assert refused("quantize", "demo", "-o", out, "--format", format).endswith(
            f"320 columns are no whole groups of 128: use groups of 32 or 64, or {other}\n"
        )
    assert "there is no quantisation 'int3'" in refused("quantize", "demo", "-o", out, "--format", "int3")
    assert "no weight format 'int4-g320'" in refused("quantize", "demo", "-o", out, "--format", "int4-g320")
    assert "--clip best: there are none, mse" in refused("quantize", "demo", "-o", out, "--clip", "best")
    assert "random:demo: has no files: give a folder" in refused("quantize", "random:demo", "-o", out)
    assert not any(tmp_path.iterdir())
    cheetah("quantize", "demo", "-o", out, "--format", "int8")
    assert "exists already" in refused("quantize", "demo", "-o", out, "--format", "int8")
    assert "is quantised already" in refused("quantize", out, "-o", tmp_path / "again", "--format", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


EMULATED = ("--device", "emulator", "--gpu", "emulator-2")
ONCE = ("--steps", 2, "--repetitions", 1, "--warmup", 0)
# what is asked of a quantised checkpoint, and what is told
COMMANDS = {
    "run": (("Once upon a time", "--max-tokens", 4, *EMULATED), "int4-g64"),
    "inspect": ((), "int4-g64"),
    "generate": (("--gpu", "h200", "--no-compile"), "wrote "),
    "bench": (("--contexts", 16, *ONCE, *EMULATED), "emulated: not a speed"),
    "trace": (("--context", 16, *ONCE, *EMULATED), "counts of the scheduler's switches"),
    "check": (("--seeds", 1, "--schedulers", "random", "--no-sanitizer"), "verdict: nothing found"),
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "int4"
    assert cheetah("quantize", "demo", "-o", out, "--format", "int4-g64", "--clip", "mse").exit_code == 0
    return out


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("command", tiered(COMMANDS, ["bench", "trace", "check"]))
def test_commands_take_the_copy(command: str, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, told = COMMANDS[command]
    result = cheetah(command, quantised, *map(str, options))
    assert result.exit_code == 0 and told in result.output, result.output
