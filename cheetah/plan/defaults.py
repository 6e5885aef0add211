"""The plan by rule: what a field is for a model and a machine unless it is given.

What was measured for each rule stands in docs/internals/decisions.md.
"""

from dataclasses import replace
from math import lcm
from typing import Any

from cheetah.plan.errors import require_positive
from cheetah.plan.formats import BF16, KV_TILE_TOKENS, M_TILE_ROWS, QuantizedTiles, SparseQuantizedTiles
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.narrow import residual_tile_rows
from cheetah.plan.plan import DEFAULT_CONTEXT, MAX_BATCH, STEP_TOKENS, Plan
from cheetah.plan.regions import Reserve, comes_ahead, kernel_regions, longest_input_bytes, shared_map, sliced_bytes
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import BULK_ALIGNMENT, stages_that_fit
from cheetah.plan.world import world_of

BARRIER_TOKENS, QUANTIZED_BARRIER_TOKENS, SPARSE_BARRIER_TOKENS = 16, 8, 4
"""From so many tokens on, blocks exchange vectors by the grid barrier unless told otherwise."""
MOST_SLICES = 8
"""Of what an expert makes of several tokens."""
SMALL_LAYER_BYTES = 1_200_000
"""Weights of a layer that each block reads: below this, waiting weighs more than reading."""
TINY_LAYER_BYTES = 500_000
"""Below this, waiting is most of a step: as few requests as keep the memory busy at all."""
EMULATOR_STAGES = 8
"""Most ring stages on the emulator, so that the ring wraps round even for small models."""


def default_context(positions: int) -> int:
    """`max_context` by rule for a model with so many positions."""
    return min(positions, DEFAULT_CONTEXT)


def default_plan(gpu: Gpu, shape: ModelShape, *, reserve: Reserve = kernel_regions, **overrides: Any) -> Plan:
    """The plan by rule for a model on `gpu`; `overrides` are fields of `Plan`, None means by rule.

    `reserve` gives the shared memory beside the ring; the stages are what then fits. PlanError where it fails.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    chosen: dict[str, Any] = {**_machine_defaults(gpu), **given}
    used_here = ("consumer_warps", "batch", "tokens", "stages")
    require_positive("Plan", **{name: chosen[name] for name in used_here if name in chosen})
    chosen.setdefault("tokens", next((size for size in STEP_TOKENS if size >= chosen.get("batch", 1)), MAX_BATCH))
    chosen.setdefault("adding_warps", default_adding_warps(chosen["tokens"]))
    chosen.setdefault("sync", default_sync(shape, chosen["tokens"], gpu))
    chosen.setdefault("stage_bytes", _default_stage_bytes(shape, gpu, chosen["consumer_warps"]))
    draft = Plan.from_dict({**chosen, "stages": 2, "in_flight": 1, "in_flight_waiting": 0})
    draft = replace(draft, down_slices=chosen.get("down_slices", default_down_slices(shape, draft, gpu)))
    draft.check(shape, gpu)
    stages = chosen["stages"] if "stages" in chosen else _default_stages(shape, draft, gpu, reserve)
    in_flight = chosen.get("in_flight", max(1, min(_default_in_flight(shape, gpu, draft), stages - 1)))
    waiting = chosen.get("in_flight_waiting", _default_waiting(shape, gpu, in_flight, chosen["tokens"]))
    plan = replace(draft, stages=stages, in_flight=in_flight, in_flight_waiting=waiting)
    shared_map(shape, plan, gpu, reserve)
    return plan


def _machine_defaults(gpu: Gpu) -> dict[str, Any]:
    """Eight consumer warps: 16 have too few registers and spill."""
    return {"consumer_warps": 4, "adding_warps": 2} if gpu.emulated else {"consumer_warps": 8}


def _default_stage_bytes(shape: ModelShape, gpu: Gpu, consumer_warps: int) -> int:
    """About 16 KB, or 4 on the emulator: whole K-tiles for each warp, whole tiles of keys; where formats differ, room
    for the largest."""
    least = 4096 if gpu.emulated else 16384
    whole = round_up(least, lcm(consumer_warps * BF16.tile_bytes, KV_TILE_TOKENS * 2 * 2 * shape.head_dim))
    others = (one.stage_bytes(least, consumer_warps) for one in shape.tile_formats if one is not BF16)
    return round_up(max(whole, *others, 0), BULK_ALIGNMENT)


def _default_stages(shape: ModelShape, draft: Plan, gpu: Gpu, reserve: Reserve) -> int:
    fit = stages_that_fit(gpu.shared_bytes, draft.stage_bytes, reserve(shape, draft, gpu))
    return min(fit, EMULATOR_STAGES) if gpu.emulated else fit


def _default_in_flight(shape: ModelShape, gpu: Gpu, draft: Plan) -> int:
    """64 KB; 48 KB for a small model, which waits more than it reads, and for several tokens, whose exchanges are then
    faster; 32 KB where layers are tiny. On the emulator, 3 small chunks."""
    if gpu.emulated:
        return 3
    if _has_tiny_layers(shape, gpu, draft.tokens):
        return max(2, round(32 * 1024 / draft.stage_bytes))
    kilobytes = 48 if draft.tokens > 1 or _layer_bytes(shape, gpu) < SMALL_LAYER_BYTES else 64
    return max(2, round(kilobytes * 1024 / draft.stage_bytes))


def _has_tiny_layers(shape: ModelShape, gpu: Gpu, tokens: int) -> bool:
    """Measured with bf16 weights and a single token a step."""
    few = _layer_bytes(shape, gpu) < TINY_LAYER_BYTES
    return few and tokens == 1 and not shape.formats and not gpu.emulated


def _default_waiting(shape: ModelShape, gpu: Gpu, in_flight: int, tokens: int) -> int:
    """One chunk fewer while the block waits, if that leaves two. Two beside quantised weights, which are read faster
    than vectors come. A single one beside tiny layers."""
    if _has_tiny_layers(shape, gpu, tokens):
        return 1
    return min(in_flight, 2 if shape.formats else max(2, in_flight - 1))


def _layer_bytes(shape: ModelShape, gpu: Gpu) -> int:
    """Weights of a layer that each block reads for one token, if they are bf16."""
    elements = sum(
        source.rows * product.columns * (1 if product.experts is None else product.experts.chosen)
        for product in shape.table.products
        for source in product.sources
    )
    return 2 * elements // world_of(gpu).blocks


def default_down_slices(shape: ModelShape, draft: Plan, gpu: Gpu) -> int:
    """Where parts come ahead, as many as let two of them lie where the other vectors do: only the first is waited for.

    Else each part costs quantised weights more than it hides, but so does a ring that is too short. Beside 4 bits the
    vectors come in parts of two fifths of the memory, a single one of a quarter; beside 8 bits in two parts of half of
    it at most. bf16, a single token: two, so that the first half is multiplied before the second one exists, but one
    where layers are tiny and the second half is there before the first is multiplied; several: as many as let the
    vectors fit where the others do."""
    if shape.experts is not None:
        return _parts_of_experts(shape, draft, gpu)
    product, tokens = shape.table.sliced, draft.tokens
    down = product.format
    if comes_ahead(shape, draft):
        return _parts_that_come_ahead(shape, draft, gpu)
    if isinstance(down, QuantizedTiles):
        vectors = product.tiles * product.vector_bytes(draft)
        if down.bits == 4:
            return ceil_div(vectors, gpu.shared_bytes // 4 if tokens == 1 else gpu.shared_bytes * 2 // 5)
        return max(1 if gpu.emulated else 2, ceil_div(vectors, gpu.shared_bytes // 2))
    if _has_tiny_layers(shape, gpu, tokens):
        return 1
    if tokens > 1:
        return ceil_div(product.input.padded, max(one.input.padded for one in shape.table.whole))
    return 1 if gpu.emulated else 2


def _parts_of_experts(shape: ModelShape, draft: Plan, gpu: Gpu) -> int:
    """As many as it takes to let what experts make of several tokens fit into half of the memory."""
    chosen, parts = shape.table.chosen, 1
    while draft.tokens > 1 and sliced_bytes(shape, replace(draft, down_slices=parts), gpu) > gpu.shared_bytes // 2:
        parts += 1 if parts < chosen else chosen
        if parts > chosen * MOST_SLICES:
            break
    return parts


def _parts_that_come_ahead(shape: ModelShape, draft: Plan, gpu: Gpu) -> int:
    product, halves = shape.table.sliced, M_TILE_ROWS // residual_tile_rows(shape, gpu)
    down = product.format
    chunk_columns = down.chunk_bytes(draft.stage_bytes, draft.consumer_warps) // down.tile_bytes * down.columns * halves
    if not chunk_columns:
        return 1  # a stage that holds no chunk is refused by the plan's checks
    chunks = ceil_div(product.columns, chunk_columns)
    room = longest_input_bytes(shape, draft)
    chunk_bytes = chunk_columns // down.columns * product.vector_bytes(draft)
    if chunks * chunk_bytes <= room:
        return 1
    return ceil_div(chunks, max(1, room // 2 // chunk_bytes))


def default_sync(shape: ModelShape, tokens: int, gpu: Gpu) -> str:
    """Words that are polled come sooner than the grid barrier's trips end, but have to pass through registers: with
    quantised weights and 8 tokens that takes longer. The barrier is one GPU's."""
    least = QUANTIZED_BARRIER_TOKENS if shape.formats else BARRIER_TOKENS
    if any(isinstance(one, SparseQuantizedTiles) and one.bits == 4 for one in shape.tile_formats):
        least = SPARSE_BARRIER_TOKENS
    return "barrier" if tokens >= least and not gpu.emulated and gpu.ranks == 1 else "flags"


def default_adding_warps(tokens: int) -> int:
    """One for each pair of columns, up to 4, since all wait for the last M-tile of a phase. A single pair is finished
    by three warps in turn."""
    return 3 if tokens <= 2 else min(tokens // 2, 4)
