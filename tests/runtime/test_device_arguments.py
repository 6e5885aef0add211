"""Arguments against the manifest, progress in words, whether a launch fits a machine: plain functions, no device."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest

from cheetah.manifest import Launch, Manifest, Parameter
from cheetah.runtime.device.arguments import as_ctypes, check_arguments, required_bytes
from cheetah.runtime.device.interface import ArgumentError, DeviceError, DeviceInfo
from cheetah.runtime.device.progress import NOT_STARTED, describe_progress
from cheetah.runtime.device.residency import check_machine, check_occupancy
from tests.runtime.manifests import manifest_of

H200 = DeviceInfo("cuda", "NVIDIA H200", "sm_90", 132, 232448, 141 << 30, 140 << 30, "CUDA 13.0")


WHOLE_GPU = Launch(132, 544, 232448)


def manifest(launch: Launch = WHOLE_GPU, **changes: Any) -> Manifest:
    return manifest_of(
        *("", "decode", launch),
        Parameter("weights", "const uint8_t*", "pointer", "u8", False, (4096,), "packed weights"),
        Parameter("logits", "float*", "pointer", "f32", True, ("steps", 8), "logits", nullable=True),
        Parameter("steps", "uint32_t", "scalar", "u32", False, None, "steps of this launch"),
        Parameter("shift", "int32_t", "scalar", "i32", False, None, "a signed number"),
        Parameter("temperature", "float", "scalar", "f32", False, None, "0 is greedy"),
        Parameter("seed", "uint64_t", "scalar", "u64", False, None, "of the noise"),
        **changes,
    )


@dataclasses.dataclass
class FakeBuffer:
    nbytes: int
    address: int = 0x1000

    def upload(self, array: Any, offset: int = 0) -> None: ...


def arguments(**changes: Any) -> dict[str, Any]:
    usual = dict(weights=FakeBuffer(4096), logits=None, steps=2, shift=-1, temperature=0.5, seed=2**64 - 1)
    return {name: value for name, value in {**usual, **changes}.items() if value is not ...}


def test_arguments_come_back_in_the_order_of_the_signature() -> None:
    given = dict(reversed(arguments().items()))
    checked = check_arguments(manifest(), given)
    assert [argument.parameter.name for argument in checked] == [p.name for p in manifest().parameters]
    assert [argument.value for argument in checked][1:] == [None, 2, -1, 0.5, 2**64 - 1]


def test_numpy_numbers_are_numbers() -> None:
    given = arguments(steps=np.int64(3), temperature=np.float32(0.25), seed=np.uint64(7))
    values = [argument.value for argument in check_arguments(manifest(), given)]
    assert values[2:] == [3, -1, 0.25, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": ...}, "launch of decode: no argument for 'weights' (const uint8_t*: packed weights)"),
        ({"weigths": 1}, "no parameter is called 'weigths'"),
        ({"steps": ..., "step": 1}, "no parameter is called 'step' (meant 'steps'?)"),
        ({"weights": None}, "'weights' (const uint8_t*: packed weights) needs a buffer, not None"),
        ({"weights": 4096}, "takes a device's buffer, not a int"),
        ({"weights": np.zeros(4096, np.uint8)}, "takes a device's buffer, not a ndarray"),
        ({"weights": FakeBuffer(4095)}, "the buffer has 4095 bytes; u8[4096] needs 4096"),
        ({"logits": FakeBuffer(63)}, "the buffer has 63 bytes; f32[steps, 8] needs 64"),
        ({"steps": 1.0}, "'steps' (uint32_t: steps of this launch) takes an integer, not a float"),
        ({"steps": None}, "takes an integer, not None"),
        ({"steps": -1}, "-1 is outside u32 (0 to 4294967295)"),
        ({"shift": 2**31}, "2147483648 is outside i32 (-2147483648 to 2147483647)"),
        ({"seed": 2**64}, "is outside u64"),
        ({"temperature": "warm"}, "'temperature' (float: 0 is greedy) takes a number, not a str"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_arguments(manifest(), arguments(**changes))
    assert message in str(caught.value)


def test_all_misnamed_arguments_are_told_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_arguments(manifest(), arguments(seed=..., shift=...))
    assert "'seed'" in str(caught.value) and "'shift'" in str(caught.value)


def test_a_size_that_depends_on_the_launch_is_checked_with_its_scalars() -> None:
    check_arguments(manifest(), arguments(logits=FakeBuffer(96), steps=3))
    with pytest.raises(ArgumentError, match="needs 128"):
        check_arguments(manifest(), arguments(logits=FakeBuffer(96), steps=4))


def test_unknown_shapes_are_not_checked() -> None:
    unknown = Parameter("x", "float*", "pointer", "f32", True, ("nobody", 8), "")
    assert required_bytes(unknown, {"steps": 2}) is None
    assert required_bytes(dataclasses.replace(unknown, shape=None), {}) is None
    assert required_bytes(dataclasses.replace(unknown, shape=()), {}) == 4


def test_packed_arguments_have_the_sizes_and_values_of_the_signature() -> None:
    packed = as_ctypes(check_arguments(manifest(), arguments(logits=FakeBuffer(64, address=0x7F0000000100))))
    assert [ctypes.sizeof(value) for value in packed] == [8, 8, 4, 4, 4, 8]
    assert [value.value for value in packed] == [0x1000, 0x7F0000000100, 2, -1, 0.5, 2**64 - 1]
    assert as_ctypes(check_arguments(manifest(), arguments()))[1].value is None


def test_progress_names_step_and_phase_of_each_group() -> None:
    phases = ("qkv", "attention", "lm_head")
    assert describe_progress([3 * 3 + 1] * 131 + [3 * 3], phases) == (
        "blocks 0-130: step 3, phase attention; block 131: step 3, phase qkv"
    )


def test_progress_puts_the_furthest_first_and_joins_runs() -> None:
    assert describe_progress([0, 5, 0, 0, 5, 5, 2], ("a", "b")) == (
        "blocks 1,4-5: step 2, phase b; block 6: step 1, phase a; blocks 0,2-3: step 0, phase a"
    )


def test_progress_of_blocks_that_never_started() -> None:
    assert describe_progress([1, NOT_STARTED], ("a", "b")) == "block 0: step 0, phase b; block 1: not started"
    assert describe_progress([], ("a",)) == "no block has reported"
    assert describe_progress([7], ()) == "block 0: position 7"


def test_many_positions_keep_both_ends() -> None:
    text = describe_progress(list(range(40)), ("a",))
    assert text.startswith("block 39: step 39") and text.endswith("block 0: step 0, phase a")
    assert "(28 positions between)" in text


def test_a_launch_that_fits_is_let_through() -> None:
    check_machine(manifest(), H200)
    check_occupancy(manifest(), H200, 1)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"arch": "sm_80", "name": "A100"}, "made for sm_90a (compute capability 9.0), but A100 is sm_80: it needs"),
        ({"arch": "sm_100", "name": "B200"}, "but B200 is sm_100"),
        (
            {"blocks": 114, "name": "H100 PCIe"},
            "needs 132 blocks running at once, one an SM, but H100 PCIe has 114 SMs",
        ),
        (
            {"shared_bytes": 101376},
            "needs 232448 bytes of shared memory a block, but a block has 101376 on NVIDIA H200",
        ),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_in_one_sentence(info: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError) as caught:
        check_machine(manifest(), dataclasses.replace(H200, **info))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_block_that_does_not_fit_an_sm_is_told() -> None:
    with pytest.raises(DeviceError, match="does not fit an SM of NVIDIA H200: 544 threads"):
        check_occupancy(manifest(), H200, 0)
    with pytest.raises(DeviceError, match="needs 300 blocks at once; NVIDIA H200 holds 2 x 132 = 264"):
        check_occupancy(manifest(launch=Launch(300, 64, 0)), H200, 2)
