"""Putting a model on a device: which machine, what is refused, what is given back when it fails."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_kernel import FakeBuffer, FakeDevice, FakeKernel, Generated, generate_kernel
from tiny_models import tiny_config, tiny_weights

from cheetah.errors import CheetahError
from cheetah.generate import choose_plan
from cheetah.manifest import Manifest
from cheetah.models.llama import LlamaConfig
from cheetah.plan import Plan, PlanError, gpu_named
from cheetah.plan.defaults import default_plan
from cheetah.runtime.assembly.assemble import assemble
from cheetah.runtime.assembly.kernels import KernelsAsked, choose_gpu, keeping, shared_buffers
from cheetah.runtime.assembly.options import AssemblyOptions
from cheetah.runtime.assembly.texts import KeptText, KeptTexts
from cheetah.runtime.background import Started, started
from cheetah.runtime.device.interface import DeviceError, DeviceInfo
from cheetah.runtime.engine.launcher import Part, Sampling


def info(name: str, blocks: int = 132, backend: str = "cuda") -> DeviceInfo:
    return DeviceInfo(backend, name, "sm_90", blocks, 232448, 2**37, 2**37, "driver")


@pytest.mark.parametrize(
    "device, expected",
    [
        (info("NVIDIA H200"), "h200"),
        (info("NVIDIA H100 80GB HBM3"), "h100"),
        (info("whatever", 4, "emulator"), "emulator"),
    ],
)
def test_the_machine_follows_the_device(device: DeviceInfo, expected: str) -> None:
    assert choose_gpu(device).name == expected


@pytest.mark.parametrize(
    "device, wanted, message",
    [
        (info("NVIDIA A100-SXM4-80GB", 108), None, "NVIDIA A100-SXM4-80GB .* kernels are made for H200, H100"),
        (info("NVIDIA H100 PCIe", 114), None, "has 114 SMs, a kernel for h100 needs 132"),
        (info("NVIDIA H200"), "emulator", "does not go with device 'cuda'"),
        (info("emulator", 4, "emulator"), "h200", "does not go with device 'emulator'"),
        (info("emulator", 4, "emulator"), "h300", "h300"),
    ],
)
def test_other_machines_are_refused(device: DeviceInfo, wanted: str | None, message: str) -> None:
    with pytest.raises(CheetahError, match=message):
        choose_gpu(device, wanted)


def assembled(device: FakeDevice, generate: Any = generate_kernel) -> None:
    assemble(tiny_weights(), device=device, generate_kernel=generate, quiet=True)


@pytest.mark.slow
def test_a_kernel_beside_the_first_is_waited_for_when_it_is_launched_first() -> None:
    compiled = threading.Event()

    class Slow(FakeDevice):
        def prepare(self, text: str, manifest: Manifest) -> Started[FakeKernel]:
            kernel, is_first = self.load(text, manifest), Plan.from_dict(manifest.plan).tokens == 1
            return started(lambda: kernel if is_first or compiled.wait(10) else None)

    device = Slow()
    options: dict[str, Any] = {"quiet": True, "prompt_tokens": 8, "timeout_s": 0.2}
    made = assemble(tiny_weights(), device=device, generate_kernel=generate_kernel, **options)
    made.launcher.launch([1], 1, Sampling())
    assert made.prompts is not None and not compiled.is_set()
    ended: list[float] = []
    threading.Timer(0.4, lambda: (ended.append(time.perf_counter()), compiled.set())).start()
    launch = made.prompts.prepare([Part(made.prompts.cache, [2, 3, 4, 0], 3, Sampling(), 8)])
    assert compiled.is_set() and launch.started >= ended[0], "the wait for the compiler counts as a launch's"
    made.prompts.start(launch)
    made.prompts.finish(launch)
    assert len(device.launches) == 2


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched() -> None:
    class Failing(FakeDevice):
        def prepare(self, text: str, manifest: Manifest) -> Started[FakeKernel]:
            if Plan.from_dict(manifest.plan).tokens == 1:
                return super().prepare(text, manifest)
            return started(self.fail).then(lambda never: never)

        def fail(self) -> FakeKernel:
            failing.wait(10)
            raise CheetahError("no such instruction")

    failing = threading.Event()
    made = assemble(tiny_weights(), device=Failing(), generate_kernel=generate_kernel, quiet=True, prompt_tokens=8)
    failing.set()
    assert made.prompts is not None
    for _ in range(2):
        with pytest.raises(CheetahError, match="no such instruction"):
            made.prompts.launch([2, 3, 4, 0], 3, Sampling(), 8)
    made.launcher.launch([1], 1, Sampling())  # nothing of the device is lost


@pytest.mark.slow
def test_a_gpu_s_kernels_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHEETAH_CACHE", str(tmp_path))
    written: list[str] = []

    class Counting:
        identity = "tiny"

        def __call__(self, *arguments: Any, **plan: Any) -> Generated:
            written.append(self.identity)
            return generate_kernel(*arguments, **plan)

    def kernels(generate: Any) -> str:
        device, options = FakeDevice(info=info("NVIDIA H200")), {"solo": True, "prompt_passes": False, "quiet": True}
        return assemble(tiny_weights(), device=device, generate_kernel=generate, **options).manifest.text_sha256

    first = kernels(Counting())
    count = len(written)
    assert count > 0
    assert kernels(Counting()) == first and len(written) == count
    monkeypatch.setattr(Counting, "identity", "other")
    kernels(Counting())
    assert len(written) == 2 * count
    kernels(lambda *arguments, **plan: Counting()(*arguments, **plan))
    assert len(written) == 3 * count, "a generator without a name of its own is always asked"


@pytest.mark.parametrize(
    ("formats", "plan", "is_alike"),
    [
        ((), {"tokens": 8}, True),
        ((), {"tokens": 8, "kv_chunk": 512}, True),
        ((), {"tokens": 32, "kv_chunk": 512}, False),
        (("int8",), {"tokens": 8, "kv_chunk": 512}, True),
        (("int4-g128",), {"tokens": 8}, True),
        (("int4-g128",), {"tokens": 8, "kv_chunk": 512}, False),
        (("int4-g128", "fp8"), {"tokens": 8, "kv_chunk": 512, "by_numbers": 1}, True),
        (("int8",), {"tokens": 16, "kv_chunk": 512, "by_numbers": 1}, False),
        (("int4", "mxfp4"), {"tokens": 8, "kv_chunk": 512, "by_numbers": 1}, False),
        (("2of4-fp8",), {"tokens": 8, "kv_chunk": 512, "by_numbers": 1}, False),
    ],
)
def test_another_kernel_decodes_who_is_alone_if_it_has_the_same_bits(
    formats: tuple[str, ...], plan: dict[str, Any], is_alike: bool
) -> None:
    """With items of a fixed length, which promise them."""
    config = dataclasses.replace(tiny_config(), weight_formats=tuple(zip(("o", "down"), formats, strict=False)))
    asked = KernelsAsked(config, gpu_named("h200"), 10**10, AssemblyOptions())
    assert asked._is_alike_alone(default_plan(gpu_named("h200"), tiny_config().shape, batch=1, **plan)) == is_alike


@pytest.mark.parametrize("changed", [{"weight_formats": (("o", "int8"),)}, {"rms_norm_eps": 1e-3}, {"layers": 3}])
def test_a_kept_text_is_of_its_configuration_alone(tmp_path: Path, changed: dict[str, Any]) -> None:
    class Named:
        identity = "tiny"

        def __call__(self, *arguments: Any, **plan: Any) -> Generated:
            return generate_kernel(*arguments, **plan)

    kept, config = keeping(KeptTexts(tmp_path), Named()), tiny_config()
    first = kept(config, "emulator")
    assert kept(config, "emulator") == KeptText(first.text, first.manifest)
    assert isinstance(kept(dataclasses.replace(config, **changed), "emulator"), type(first)), "written anew"
    assert len(list(tmp_path.glob("*.cu"))) == 2


def test_too_little_memory_is_refused_before_anything_is_allocated() -> None:
    device = FakeDevice(free_bytes=1000)
    with pytest.raises(CheetahError, match="fake has 1000 B free"):
        assembled(device)
    assert device.buffers == []


def test_where_memory_is_short_the_cache_has_fewer_pages_and_each_kernel_is_written_once() -> None:
    written: list[dict[str, Any]] = []

    def noting(config: LlamaConfig, gpu: str, **plan: Any) -> Generated:
        written.append(plan)
        return generate_kernel(config, gpu, **plan)

    options: dict[str, Any] = {"overrides": {"batch": 4}, "prompt_tokens": 8, "generate_kernel": noting, "quiet": True}
    whole = assemble(tiny_weights(), device=FakeDevice(), **options)
    pages, page_bytes = Plan.from_dict(whole.manifest.plan).kv_pages, whole.memory.bytes_of("keys and values")
    before = list(written)
    written.clear()
    device = FakeDevice(free_bytes=whole.memory.total_bytes - page_bytes // pages)
    made = assemble(tiny_weights(), device=device, pool_follows_memory=True, **options)
    assert made.launcher.cache.pool.pages == pages - 1 and made.memory.total_bytes <= device.describe().free_bytes
    assert made.buffers["kv"].nbytes == page_bytes // pages * (pages - 1)
    assert written == before and [plan.get("tokens") for plan in written] == [None, 8]
    with pytest.raises(CheetahError, match="are needed"):
        assemble(tiny_weights(), device=device, **options)


def test_a_pool_may_be_chosen_and_has_room_for_one_sequence() -> None:
    options: dict[str, Any] = {"overrides": {"batch": 4}, "generate_kernel": generate_kernel, "quiet": True}
    least = choose_plan(tiny_config(), choose_gpu(FakeDevice().describe()), batch=4).pages_per_sequence
    made = assemble(tiny_weights(), device=FakeDevice(), pool_pages=least + 1, **options)
    assert made.launcher.cache.pool.pages == made.manifest.buffer("kv").shape[1] == least + 1
    with pytest.raises(PlanError, match=f"pool_pages is {least - 1}: .* needs {least}: give as many"):
        assemble(tiny_weights(), device=FakeDevice(), pool_pages=least - 1, **options)


def test_a_kernel_that_packs_otherwise_is_refused_before_anything_is_allocated() -> None:
    def other(config: LlamaConfig, gpu: str, **overrides: Any) -> Generated:
        made = generate_kernel(config, gpu, **overrides)
        moved = tuple({**entry, "offset": entry["offset"] + 1} for entry in made.manifest.matrices)
        return Generated(made.text, dataclasses.replace(made.manifest, matrices=moved))

    device = FakeDevice()
    with pytest.raises(CheetahError, match=r"matrices\[qkv\].offset is 1, expected 0"):
        assembled(device, other)
    assert device.buffers == []


def test_what_was_allocated_is_freed_when_the_next_buffer_cannot_be() -> None:
    class Full(FakeDevice):
        def allocate(self, nbytes: int, fill: int | None = None) -> FakeBuffer:
            if len(self.buffers) == 5:
                raise DeviceError("out of memory")
            return super().allocate(nbytes, fill)

    device = Full()
    with pytest.raises(DeviceError, match="out of memory"):
        assembled(device)
    assert len(device.buffers) == 5 and all(buffer.data is None for buffer in device.buffers)


def test_a_kernel_whose_plans_do_not_fit_is_refused() -> None:
    def small(config: LlamaConfig, gpu: str, **overrides: Any) -> Generated:
        made = generate_kernel(config, gpu, **overrides)
        buffers = tuple(
            dataclasses.replace(buffer, shape=(1, buffer.shape[1])) if buffer.name == "kv_plans" else buffer
            for buffer in made.manifest.buffers
        )
        return Generated(made.text, dataclasses.replace(made.manifest, buffers=buffers))

    with pytest.raises(CheetahError, match=r"buffers\[kv_plans\].shape\[0\] is 1, expected"):
        assembled(FakeDevice(), small)


def test_a_second_kernel_shares_the_model_and_the_cache_and_nothing_else() -> None:
    device = FakeDevice()
    made = assemble(tiny_weights(), device=device, generate_kernel=generate_kernel, quiet=True, prompt_tokens=8)
    assert made.prompts is not None and (made.launcher.tokens, made.prompts.tokens) == (1, 8)
    mine, others = made.launcher._buffers, made.prompts._buffers
    assert {name for name in mine if mine[name] is others.get(name)} == {*shared_buffers(tiny_config())} & {*mine}
    needed = sum(buffer.nbytes for buffer in device.buffers) + 64 * tiny_config().vocab_size * 4
    assert made.memory.total_bytes == needed, "memory is told with both kernels' buffers"
    made.close()
    assert all(buffer.data is None for buffer in device.buffers)


def test_no_second_kernel_where_steps_take_as_many_tokens_or_on_the_emulator() -> None:
    for options in ({"overrides": {"batch": 8}, "prompt_tokens": 8}, {}, {"prompt_tokens": 1}):
        made = assemble(tiny_weights(), device=FakeDevice(), generate_kernel=generate_kernel, quiet=True, **options)
        assert made.prompts is None


def test_a_second_kernel_that_packs_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any, **overrides: Any) -> Plan:
        return choose_plan(*arguments, **overrides, page_size=4 if "tokens" in overrides else 8)

    monkeypatch.setattr("cheetah.generate.choose_plan", other)
    device = FakeDevice()
    with pytest.raises(CheetahError, match="lays out kv otherwise than the kernel that decodes"):
        assemble(tiny_weights(), device=device, generate_kernel=generate_kernel, quiet=True, prompt_tokens=8)
    assert device.buffers == []


def test_the_fakes_manifest_survives_json() -> None:
    manifest = generate_kernel(tiny_config(), "emulator").manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
