"""The manifest survives its JSON, is stable, and refuses what does not fit together."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.manifest import Buffer, Launch, Manifest, ManifestError, Parameter, sha256_of_text

TEXT = 'extern "C" __global__ void scale(const uint8_t* weights, float* logits, uint32_t steps) {}\n'


def example(**changes: Any) -> Manifest:
    fields: dict[str, Any] = dict(
        kernel="scale",
        text_sha256=sha256_of_text(TEXT),
        generator="0.1.0",
        command="cheetah generate demo",
        gpu={"name": "h200", "arch": "sm_90a", "blocks": 132},
        config={"hidden": 64, "rope": {"theta": 500000.0, "factor": None}, "stop": (1, 2)},
        plan={"sync": "flags", "stages": 3},
        launch=Launch(blocks=132, threads=544, shared_bytes=232448),
        parameters=(
            Parameter("weights", "const uint8_t*", "pointer", "u8", False, (4096,), "packed weights"),
            Parameter("logits", "float*", "pointer", "f32", True, ("steps", 256), "logits", nullable=True),
            Parameter("steps", "uint32_t", "scalar", "u32", False, None, "steps of this launch"),
        ),
        matrices=({"name": "qkv", "rows": 96, "columns": 64, "offset": 0, "layer_stride": 0, "layers": 1, "start": 0},),
        layer_stride=4096,
        weight_bytes=4096,
        buffers=(Buffer("weights", "u8", (4096,), 4096, "host"), Buffer("logits", "f32", (4, 256), 4096, "poison")),
        phases=("qkv", "attention"),
        step_bytes={"weights": 4096},
    )
    return Manifest(**{**fields, **changes})


def test_json_gives_the_same_manifest_back() -> None:
    manifest = example()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.config["stop"] == [1, 2]


def test_json_does_not_depend_on_the_order_of_dicts() -> None:
    one, other = example(plan={"sync": "flags", "stages": 3}), example(plan={"stages": 3, "sync": "flags"})
    assert one.to_json() == other.to_json()


def test_json_lists_fields_in_declared_order_and_one_parameter_a_line() -> None:
    lines = example().to_json().splitlines()
    assert lines[:3] == ["{", '  "format": 1,', '  "kernel": "scale",']
    assert sum('"name": "logits", "ctype"' in line for line in lines) == 1
    assert max(len(line) for line in lines) < 300
    assert json.loads(example().to_json())["launch"]["cooperative"] is True


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kernel.json"
    example().write(path)
    assert Manifest.read(path) == example()
    assert [entry.name for entry in path.parent.iterdir()] == ["kernel.json"]


@pytest.mark.slow
def test_readers_never_see_half_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "kernel.json"
    example().write(path)
    done = threading.Event()

    def write_often() -> None:
        for count in range(200):
            example(plan={"stages": count, "padding": "x" * 20000}).write(path)
        done.set()

    writer = threading.Thread(target=write_often)
    writer.start()
    while not done.is_set():
        assert Manifest.read(path).kernel == "scale"
    writer.join()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel.json"
    example().write(path)

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        example(layer_stride=1).write(path)
    assert Manifest.read(path) == example()
    assert [entry.name for entry in tmp_path.iterdir()] == ["kernel.json"]


def changed(path: str, value: object) -> str:
    """The example's JSON with one value replaced, or removed where `value` is ..."""
    data = json.loads(example().to_json())
    *outer, last = path.split(".")
    target = data
    for key in outer:
        target = target[int(key)] if key.isdigit() else target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "manifest: cannot be read as JSON: "),
        ("[]", "manifest: holds a JSON list, expected an object"),
        (changed("format", 7), "manifest has format 7; this version of Cheetah reads format 1"),
        (changed("format", ...), "manifest has format None"),
        (changed("kernel", ...), "manifest: missing field kernel"),
        (changed("extra", 1), "manifest: unknown field extra"),
        (changed("launch.blocks", "132"), "manifest.launch.blocks must be of type int, not str"),
        (changed("launch.blocks", True), "manifest.launch.blocks must be of type int, not bool"),
        (changed("launch.threads", 2000), "launch: threads must be 1 to 1024, not 2000"),
        (changed("launch", 3), "manifest.launch must be an object, not int"),
        (changed("parameters.0.shape", 3), "manifest.parameters[0].shape must be a list, not int"),
        (changed("parameters.0.shape", [1.5]), "manifest.parameters[0].shape[0] has the wrong type float"),
        (changed("parameters.0.kind", "array"), "parameter 'weights': kind 'array' is neither"),
        (changed("parameters.0.dtype", "f16"), "parameter 'weights': dtype 'f16' is not one of u8, u16, u32, u64, i32"),
        (changed("parameters.0.mutable", True), "parameter 'weights': mutable=True contradicts C type 'const"),
        (changed("parameters.2.ctype", "uint32_t*"), "parameter 'steps': C type 'uint32_t*' is not a scalar"),
        (changed("parameters.2.nullable", True), "parameter 'steps': a scalar is neither mutable nor nullable"),
        (changed("parameters.1.name", "weights"), "manifest: parameter named twice: weights"),
        (changed("buffers.1.name", "weights"), "manifest: buffer named twice: weights"),
        (changed("phases", ["qkv", "qkv"]), "manifest: phase named twice: qkv"),
        (changed("buffers.1.fill", "random"), "buffer 'logits': fill 'random' is not one of zero, poison, host"),
        (changed("buffers.1.bytes", 100), "buffer 'logits': 100 bytes, but f32 (4, 256) needs 4096"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json(text)
    assert message in str(caught.value)


def test_errors_of_files_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheetahError, match="missing.json: cannot be read: No such file"):
        Manifest.read(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(CheetahError, match="bad.json: manifest has format None"):
        Manifest.read(tmp_path / "bad.json")


def test_values_that_json_cannot_hold_are_refused_where_they_stand() -> None:
    with pytest.raises(ManifestError, match=r"plan\.sizes\[1\] is a object"):
        example(plan={"sizes": [1, object()]})
    with pytest.raises(ManifestError, match=r"gpu\.speed is inf"):
        example(gpu={"speed": float("inf")})


def test_text_is_checked_by_its_hash() -> None:
    example().check_text(TEXT)
    with pytest.raises(ManifestError, match="regenerate both with: cheetah generate demo"):
        example().check_text(TEXT + " ")


def test_lookup_by_name() -> None:
    assert example().parameter("steps").kind == "scalar"
    assert example().buffer("logits").bytes == 4096
    with pytest.raises(ManifestError, match="no parameter 'step'; it has: weights, logits, steps"):
        example().parameter("step")


def test_manifests_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().kernel = "other"  # type: ignore[misc]


def test_a_kernel_of_three_gpus_is_refused() -> None:
    values = json.loads(example().to_json())
    assert values["world_size"] == 1
    with pytest.raises(ManifestError, match="world_size is 3: kernels run on 1, 2, 4, 8 GPUs"):
        Manifest.from_json(json.dumps({**values, "world_size": 3}))
