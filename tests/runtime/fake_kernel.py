"""A device whose launches do what the Llama kernel's parameters say, in float32 numpy by `models.llama.reference`.

It reads nothing but the buffers and scalars of the launch: packed weights, norms, embedding, rope table, KV pages by
the page table, KV plans, tokens, stop ids, epoch. So the whole runtime is tested end to end without the kernel, and
what the kernel may rely on is checked here: plans that cover every key, epochs that never repeat, pages in range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cheetah.manifest import Buffer as BufferSpec
from cheetah.manifest import Launch, Manifest, Parameter, sha256_of_text
from cheetah.models.llama.config import LlamaConfig
from cheetah.models.llama.reference import Reference, round_to_bf16
from cheetah.models.llama.sampling import sample
from cheetah.models.llama.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    buffer_bytes,
    logical_matrix,
    matrix_tensors,
    model_shape,
    tensor_shapes,
    unpack_matrix,
)
from cheetah.plan import GPUS, Gpu, Plan, default_plan, gpu_named, step_matrices
from cheetah.plan.kv import KvPlanLayout, max_plans
from cheetah.runtime.device.arguments import check_arguments
from cheetah.runtime.device.interface import DeviceInfo, LaunchTimeout

TEXT = "// stands for the generated kernel\n"
EXCHANGE_BYTES = 64
PHASES = ("embed", "qkv", "attention", "o", "gate_up", "down", "head")


@dataclass(frozen=True)
class Generated:
    text: str
    manifest: Manifest


def generate_kernel(config: LlamaConfig, gpu_name: str, **overrides: Any) -> Generated:
    """Stands for `cheetah.generate.generate_kernel`: the same manifest, no kernel."""
    gpu = gpu_named(gpu_name)
    shape = model_shape(config)
    plan = default_plan(gpu, **dataclasses.asdict(shape), **overrides)
    matrices = step_matrices(shape, plan, gpu)
    manifest = Manifest(
        kernel="fake_llama",
        text_sha256=sha256_of_text(TEXT),
        generator="test",
        command="none",
        gpu=dataclasses.asdict(gpu),
        config=config.to_dict(),
        plan=plan.to_dict(),
        launch=Launch(gpu.blocks, plan.threads, 1024),
        parameters=_parameters(config),
        matrices=matrices.describe(),
        layer_stride=matrices.layer_stride,
        weight_bytes=matrices.weight_bytes,
        buffers=_buffers(config, plan, gpu),
        phases=PHASES,
        step_bytes={"weights": matrices.weight_bytes},
    )
    return Generated(TEXT, manifest)


def _parameters(config: LlamaConfig) -> tuple[Parameter, ...]:
    pointers = [
        ("weights", "const uint8_t*", "u8", None), ("norms", "const bf16*", "bf16", None),
        ("embedding", "const bf16*", "bf16", None), ("rope", "const float*", "f32", None),
        ("kv", "bf16*", "bf16", None),
        ("page_table", "const int32_t*", "i32", None), ("kv_plans", "const int32_t*", "i32", None),
        ("exchange", "uint8_t*", "u8", None), ("tokens", "int32_t*", "i32", None),
        ("stop_ids", "const int32_t*", "i32", ("stop_count",)),
        ("logits", "float*", "f32", ("steps", config.vocab_size)),
        ("progress", "uint32_t*", "u32", None), ("status", "int32_t*", "i32", (8,)),
    ]  # fmt: skip
    scalars = [(name, "uint32_t", "u32") for name in ("length", "given", "steps", "plan_count", "stop_count", "epoch")]
    scalars += [("temperature", "float", "f32"), ("seed", "uint64_t", "u64")]
    return (
        *(
            Parameter(name, ctype, "pointer", dtype, not ctype.startswith("const"), shape, "", name == "logits")
            for name, ctype, dtype, shape in pointers
        ),
        *(Parameter(name, ctype, "scalar", dtype, False, None, "") for name, ctype, dtype in scalars),
    )


def _buffers(config: LlamaConfig, plan: Plan, gpu: Gpu) -> tuple[BufferSpec, ...]:
    weights = buffer_bytes(config, step_matrices(model_shape(config), plan, gpu))
    words = KvPlanLayout(gpu.blocks, config.kv_heads, plan.batch).plan_words
    kv_shape = (config.layers, plan.kv_pages, 2, config.kv_heads, plan.page_size, config.head_dim)
    shapes: list[tuple[str, str, tuple[int, ...], str]] = [
        ("weights", "u8", (weights["weights"],), "host"),
        ("norms", "bf16", (2 * config.layers + 1, config.padded_hidden), "host"),
        ("embedding", "bf16", (config.vocab_size, config.padded_hidden), "host"),
        ("rope", "f32", (plan.max_context, config.head_dim // 2, 2), "host"),
        ("kv", "bf16", kv_shape, "poison"),
        ("page_table", "i32", (plan.pages_per_sequence,), "host"),
        ("kv_plans", "i32", (max_plans(plan.max_steps, plan.kv_align), words), "host"),
        ("exchange", "u8", (EXCHANGE_BYTES,), "zero"),
        ("tokens", "i32", (plan.max_steps + 1,), "poison"),
        ("progress", "u32", (gpu.blocks,), "poison"),
        ("status", "i32", (8,), "poison"),
    ]
    sizes = {"u8": 1, "bf16": 2, "f32": 4, "i32": 4, "u32": 4}
    return tuple(
        BufferSpec(name, dtype, shape, int(np.prod(shape)) * sizes[dtype], fill) for name, dtype, shape, fill in shapes
    )


class FakeBuffer:
    """Host bytes with a device buffer's manners; poisoned unless filled."""

    def __init__(self, nbytes: int, fill: int | None):
        self.nbytes = nbytes
        self.data: NDArray[np.uint8] | None = np.full(nbytes, 0xFF if fill is None else fill, np.uint8)

    @property
    def address(self) -> int:
        return self._live().ctypes.data

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        assert 0 <= offset and offset + flat.nbytes <= self.nbytes, "upload outside the buffer"
        self._live()[offset : offset + flat.nbytes] = flat

    def download(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        return self.view(dtype, shape, offset).copy()

    def view(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._live()[offset : offset + count].view(dtype).reshape(shape)

    def fill(self, byte: int) -> None:
        self._live()[:] = byte

    def free(self) -> None:
        self.data = None

    def _live(self) -> NDArray[np.uint8]:
        assert self.data is not None, "the buffer was freed"
        return self.data


@dataclass
class FakeKernel:
    manifest: Manifest
    text: str


class FakeDevice:
    """Pretends to be `gpu`. `launches` keeps the scalars of every launch; `hang` makes synchronize time out."""

    name = "fake"

    def __init__(self, gpu: str = "emulator", free_bytes: int = 2**40, info: DeviceInfo | None = None):
        shape = GPUS[gpu]
        self.info = info or DeviceInfo(
            "emulator", "fake", "sm_90", shape.blocks, shape.shared_bytes, 2**40, free_bytes, "none"
        )
        self.launches: list[dict[str, Any]] = []
        self.buffers: list[FakeBuffer] = []
        self.hang = False
        self.closed = False
        self._model: Reference | None = None

    def describe(self) -> DeviceInfo:
        return self.info

    def load(self, text: str, manifest: Manifest) -> FakeKernel:
        manifest.check_text(text)
        return FakeKernel(manifest, text)

    def allocate(self, nbytes: int, fill: int | None = None) -> FakeBuffer:
        self.buffers.append(FakeBuffer(nbytes, fill))
        return self.buffers[-1]

    def launch(self, kernel: FakeKernel, arguments: Mapping[str, Any]) -> None:
        check_arguments(kernel.manifest, arguments)
        self.launches.append({name: value for name, value in arguments.items() if not isinstance(value, FakeBuffer)})
        if self._model is None:
            self._model = model_in_buffers(kernel.manifest, arguments)
        run_kernel(kernel.manifest, self._model, arguments)

    def synchronize(self, timeout_s: float | None = None, progress: object = None) -> None:
        if self.hang:
            raise LaunchTimeout(f"the launch did not finish in {timeout_s} s")

    def record(self) -> object:
        return None

    def elapsed_ms(self, start: object, end: object) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def model_in_buffers(manifest: Manifest, buffers: Mapping[str, Any]) -> Reference:
    """The reference, with its weights unpacked from the device's buffers, rounding where bf16 must round."""
    config = dataclasses.replace(LlamaConfig.from_json(manifest.config), tied_embeddings=False)
    gpu = gpu_named(manifest.gpu["name"])
    matrices = step_matrices(model_shape(config), Plan.from_dict(manifest.plan), gpu)
    hidden, padded = config.hidden_size, config.padded_hidden
    norms = buffers["norms"].view(np.uint16, (2 * config.layers + 1, padded))[:, :hidden]
    tensors = {
        EMBEDDING: buffers["embedding"].view(np.uint16, (config.vocab_size, padded))[:, :hidden],
        FINAL_NORM: norms[-1],
    }
    packed = buffers["weights"].view(np.uint8, buffers["weights"].nbytes)
    for layout in matrices:
        for layer in range(matrices.copies(layout)):
            offset = matrices.offset(layout.name, layer)
            rows = unpack_matrix(layout, packed[offset : offset + layout.total_bytes])
            tensors |= _split(config, layout.name, layer, rows)
    for layer in range(config.layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = norms[2 * layer]
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = norms[2 * layer + 1]
    assert HEAD in tensors
    return Reference(config, tensors, round_to_bf16)


def _split(config: LlamaConfig, matrix: str, layer: int, rows: NDArray[np.uint16]) -> dict[str, NDArray[np.uint16]]:
    """A matrix in strip order back into its tensors: where each row went is found by packing row numbers."""
    names, shapes = matrix_tensors(config, matrix, layer), tensor_shapes(config)
    counts = [shapes[name][0] for name in names]
    numbers = np.arange(1, sum(counts) + 1, dtype=np.uint16)[:, None]
    order = logical_matrix(config, matrix, tuple(np.split(numbers, np.cumsum(counts)[:-1])))[:, 0]
    natural = np.empty((sum(counts), rows.shape[1]), np.uint16)
    natural[order[order > 0] - 1] = rows[order > 0]
    return dict(zip(names, np.split(natural, np.cumsum(counts)[:-1]), strict=True))


def run_kernel(manifest: Manifest, model: Reference, arguments: Mapping[str, Any]) -> None:
    """One launch, step by step, as the manifest's parameters say."""
    config, plan = model.config, Plan.from_dict(manifest.plan)
    length, given, steps = (int(arguments[name]) for name in ("length", "given", "steps"))
    assert 1 <= given <= steps + 1 <= plan.max_steps + 1
    _use_epochs(arguments, steps * (config.layers + 1))
    tokens = arguments["tokens"].view(np.int32, (plan.max_steps + 1,))
    stops = set(arguments["stop_ids"].view(np.int32, (int(arguments["stop_count"]),)).tolist())
    status = arguments["status"].view(np.int32, (8,))
    model.table = arguments["rope"].view(np.float32, (plan.max_context, config.head_dim // 2, 2))
    done = 0
    for step in range(steps):
        _check_plan(manifest, config, arguments, step, length + step + 1)
        logits = _cached_step(config, plan, model, arguments, length + step, int(tokens[step]))
        done = step + 1
        if arguments["logits"] is not None:
            arguments["logits"].view(np.float32, (steps, config.vocab_size))[step] = logits
        if step + 1 >= given:
            position = length + step + 1
            tokens[step + 1] = sample(logits, float(arguments["temperature"]), int(arguments["seed"]), position)
            if int(tokens[step + 1]) in stops:
                break
    status[0] = done
    arguments["progress"].view(np.uint32, (manifest.launch.blocks,))[:] = done * len(PHASES)


def _use_epochs(arguments: Mapping[str, Any], count: int) -> None:
    """A launch uses epochs above all those used since the exchange was zeroed; the last one is kept in it."""
    used = arguments["exchange"].view(np.uint64, (1,))
    first = int(arguments["epoch"])
    assert first > int(used[0]), f"epoch {first} was used before (up to {used[0]})"
    assert first + count <= 2**32, "epochs beyond 32 bits"
    used[0] = first + count - 1


def _check_plan(manifest: Manifest, config: LlamaConfig, arguments: Mapping[str, Any], step: int, keys: int) -> None:
    """The plan of this step covers each key of each head exactly once, and no block of keys beyond them."""
    layout = KvPlanLayout(manifest.launch.blocks, config.kv_heads, 1)
    plans = arguments["kv_plans"].view(np.int32, (int(arguments["plan_count"]), layout.plan_words))
    assert plans[0, 0] == 0 and (np.diff(plans[:, 0]) > 0).all()
    words = plans[np.flatnonzero(plans[:, 0] <= step)[-1]]
    items = words[layout.offsets["items"] :][: int(words[1]) * 8].reshape(-1, 8)
    align = int(manifest.plan["kv_align"])
    covered = np.zeros((config.kv_heads, int(items[:, 4].max()) + keys), int)
    for _, _, head, begin, end, *_ in items.tolist():
        covered[head, begin:end] += 1
    rounded = -(-keys // align) * align
    exactly = (covered[:, :rounded] == 1).all() and not covered[:, rounded:].any()
    assert exactly, f"step {step}: the plan does not cover {keys} keys once"


def _cached_step(
    config: LlamaConfig, plan: Plan, model: Reference, arguments: Mapping[str, Any], position: int, token: int
) -> NDArray[np.float32]:
    """One step over the paged cache; only pages and slots that hold tokens are read."""
    shape = (config.layers, plan.kv_pages, 2, config.kv_heads, plan.page_size, config.head_dim)
    pool = arguments["kv"].view(ml_dtypes.bfloat16, shape)
    table = arguments["page_table"].view(np.int32, (plan.pages_per_sequence,))
    where = np.arange(position + 1)
    pages, slots = table[where // plan.page_size], where % plan.page_size
    assert ((pages >= 0) & (pages < plan.kv_pages)).all(), "page outside the pool"
    cached = pool[:, pages, :, :, slots].astype(np.float32)  # [tokens, layers, 2, heads, head_dim]
    model.length = position
    model.keys, model.values = (np.ascontiguousarray(cached[:, :, part].transpose(1, 2, 0, 3)) for part in (0, 1))
    logits = model.step(token)
    pool[:, pages[-1], 0, :, slots[-1]] = model.keys[:, :, position]
    pool[:, pages[-1], 1, :, slots[-1]] = model.values[:, :, position]
    return logits
