"""What a plan comes to, in numbers: shares and imbalance by phase, shared memory, exchanges, bytes and the ceiling.

Plain rows only; how they are shown is the command line's business. kB, MB and GB are powers of 1000 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cheetah.extras import installing
from cheetah.plan import dealing
from cheetah.plan.errors import PlanError
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.gpu import Gpu
from cheetah.plan.kv import Scheduling, kv_plan
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.matrices import StepMatrices, read_of, step_matrices
from cheetah.plan.plan import Plan
from cheetah.plan.products import STEP_EXCHANGES, ChoicePhase, DeltaPhase, NormPhase, Phase, Product
from cheetah.plan.regions import shared_map
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import SharedMap
from cheetah.plan.split import Split

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class PhaseShare:
    """What each block reads in one phase, or, where layers differ, on average of them. `runs` is how often a step goes
    through it. most_bytes: where layers differ, what the block reads that has most of a layer, on average of them."""

    name: str
    block_bytes: tuple[int, ...]
    runs: int
    most_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that all blocks read in one run."""
        return sum(self.block_bytes)

    @property
    def step_bytes(self) -> int:
        return self.total_bytes * self.runs

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / len(self.block_bytes)

    @property
    def largest_bytes(self) -> int:
        return max(self.block_bytes) if self.most_bytes is None else self.most_bytes

    @property
    def smallest_bytes(self) -> int:
        return min(self.block_bytes)

    @property
    def imbalance_percent(self) -> float:
        """How far the largest share lies above the mean, in percent of the mean."""
        return 100.0 * (self.largest_bytes / self.mean_bytes - 1.0) if self.total_bytes else 0.0


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step must read from memory at a context, each once."""

    weights: int
    kv: int
    norms: int
    embedding: int
    rope: int
    states: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.norms + self.embedding + self.rope + self.states

    @property
    def gigabytes(self) -> float:
        return self.total / 1e9


@dataclass(frozen=True)
class Report:
    """A model on a machine under a plan, each sequence of the batch holding `context` tokens, its new one included.
    m_tile_bytes: of matrices whose M-tiles differ, [layers, M-tiles]; without, all have the mean."""

    shape: ModelShape
    plan: Plan
    gpu: Gpu
    context: int
    shared: SharedMap
    m_tile_bytes: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @cached_property
    def matrices(self) -> StepMatrices:
        return step_matrices(self.shape, self.plan, self.gpu)

    @cached_property
    def phases(self) -> tuple[PhaseShare, ...]:
        """qkv, attention, o, gate_up, down, lm_head: in the order of a step; those of Gated DeltaNet first."""
        table = self.shape.table
        phases = (
            phase
            for phase in (*table.delta, *([table.beside] if table.beside else []), *table.layer, table.head)
            if not isinstance(phase, (NormPhase, ChoicePhase))
        )
        return tuple(self._share(phase) for phase in phases)

    def _share(self, phase: Phase) -> PhaseShare:
        if isinstance(phase, DeltaPhase):
            return self._delta_share(phase)
        if not isinstance(phase, Product):
            return self._attention_share(phase)
        layout = self.matrices[phase]
        return self._matrix_share(layout) if phase.experts is None else self._experts_share(layout, phase)

    @cached_property
    def step_share(self) -> PhaseShare:
        """All phases of a step together, each as often as it runs."""
        columns = zip(*(phase.block_bytes for phase in self.phases), strict=True)
        runs = [phase.runs for phase in self.phases]
        whole = (sum(count * nbytes for count, nbytes in zip(runs, column, strict=True)) for column in columns)
        return PhaseShare("step", tuple(whole), 1)

    @property
    def exchanges_per_step(self) -> int:
        """Vectors that all blocks make and all need, each time that they do; those of filters too."""
        table = self.shape.table
        counts = self.shape.attention_layers, self.shape.layers - self.shape.attention_layers
        exchanged = (table.exchanges_of(kind) for kind in table.kinds)
        of_layers = sum(count * len(names) for count, names in zip(counts, exchanged, strict=False))
        return len(table.heads.input.names) + of_layers + len(STEP_EXCHANGES)

    @property
    def step_bytes(self) -> StepBytes:
        plan, rank = self.plan, self.shape.of_rank(self.gpu.ranks)
        weights = self.matrices.read_bytes(self.shape.experts, plan.batch)
        return step_bytes(rank, weights, self.context, plan.batch, plan.kv_element_bytes)

    @property
    def ceiling_ms(self) -> float:
        """Milliseconds a step at the machine's read rate, nothing else counted: no step can be faster."""
        return self.step_bytes.total / (self.gpu.read_gb_per_s * 1e6)

    @property
    def ceiling_tokens_per_s(self) -> float:
        """Tokens a second of all sequences together at the ceiling."""
        return 1e3 * self.plan.batch / self.ceiling_ms

    def summary(self) -> tuple[tuple[str, str], ...]:
        """(what, value) rows, with units."""
        nbytes, plan = self.step_bytes, self.plan
        return (
            ("machine", f"{self.gpu.name}: {self.gpu.blocks} blocks, {self.gpu.read_gb_per_s:g} GB/s{self._of_each}"),
            ("read rate", self.gpu.rate_source),
            ("context", f"{self.context} tokens, batch {plan.batch}"),
            (
                "columns",
                f"{plan.tokens} tokens a step at most; attention tiles of {plan.tile_columns(self.shape)}",
            ),
            (
                f"slices of {self.shape.table.sliced.name}",
                f"its input in {plan.down_slices} parts" if plan.down_slices > 1 else "its input whole",
            ),
            ("ring", f"{plan.stages} stages of {plan.stage_bytes} bytes, {plan.in_flight} in flight"),
            *self._narrow_tiles(),
            ("consumer warps", str(plan.consumer_warps)),
            ("exchanges a step", f"{self.exchanges_per_step} ({plan.sync})"),
            ("weights a step", f"{nbytes.weights / 1e9:.3f} GB ({self._bytes_by_format()})"),
            ("KV a step", f"{nbytes.kv / 1e9:.3f} GB ({plan.kv_dtype})"),
            *([("states a step", f"{nbytes.states / 1e9:.3f} GB, and as much is written")] if nbytes.states else []),
            ("bytes a step", f"{nbytes.gigabytes:.3f} GB"),
            ("step at the ceiling", f"{self.ceiling_ms:.3f} ms"),
            ("tokens/s at the ceiling", f"{self.ceiling_tokens_per_s:.0f}"),
        )

    @property
    def _of_each(self) -> str:
        """All sizes are those of one of several GPUs."""
        return "" if self.gpu.ranks == 1 else f"; this and all below of each of {self.gpu.ranks} GPUs"

    def _narrow_tiles(self) -> tuple[tuple[str, str], ...]:
        narrow = [layout for layout in self.matrices if layout.is_narrow]
        if not narrow:
            return ()
        names = ", ".join(layout.name for layout in narrow)
        return ((f"M-tiles of {names}", f"narrow: {narrow[0].tile_rows} rows, {narrow[0].waves} a block at most"),)

    def _bytes_by_format(self) -> str:
        sizes: dict[str, int] = {}
        for layout in self.matrices:
            read = read_of(layout, self.shape.experts, self.plan.batch)
            nbytes = round(layout.expert_bytes * self.matrices.copies(layout) * read)
            sizes[layout.format.name] = sizes.get(layout.format.name, 0) + nbytes
        if len(sizes) == 1:
            return next(iter(sizes))
        return ", ".join(f"{name} {nbytes / 1e9:.3f} GB" for name, nbytes in sizes.items())

    def _matrix_share(self, layout: MatrixLayout) -> PhaseShare:
        found = self.m_tile_bytes.get(layout.name)
        if found is not None:
            if layout.is_dealt:
                found = np.stack([of_layer[dealing.dealt(of_layer.tolist(), layout.blocks)] for of_layer in found])
            owned = [list(layout.split.owned(block)) for block in range(self.gpu.blocks)]
            of_layers = np.stack([found[:, m_tiles].sum(axis=1) for m_tiles in owned], axis=1)
            means = tuple(int(size) for size in of_layers.mean(axis=0).round())
            return PhaseShare(layout.name, means, len(found), round(float(of_layers.max(axis=1).mean())))
        shares = tuple(layout.block_bytes(block) for block in range(self.gpu.blocks))
        return PhaseShare(layout.name, shares, self.matrices.copies(layout))

    def _experts_share(self, layout: MatrixLayout, product: Product) -> PhaseShare:
        """Of as many experts as are expected: what is added has its rows with their blocks, all else is dealt."""
        taken = round(read_of(layout, product.experts, self.plan.batch))
        dealt = Split(taken * layout.m_tiles, self.gpu.blocks, layout.start)
        counts = (taken * layout.split.count(one) if product.adds else dealt.count(one) for one in range(dealt.blocks))
        shares = tuple(count * layout.m_tile_bytes for count in counts)
        return PhaseShare(layout.name, shares, self.matrices.copies(layout))

    def _attention_share(self, phase: Phase) -> PhaseShare:
        """K and V read by each block, from the schedule of this context clipped to the keys there are."""
        shape, plan = self.shape, self.plan
        lengths = [self.context] * plan.batch
        rank = shape.of_rank(self.gpu.ranks)
        sizes = (rank.kv_heads, self.gpu.blocks, KV_TILE_TOKENS, self.gpu.kv_chunk_min)
        schedule = kv_plan(lengths, rank.group, Scheduling(*sizes, chunk=plan.kv_chunk))
        token_bytes = 2 * plan.kv_element_bytes * shape.head_dim
        shares = []
        for block in range(self.gpu.blocks):
            queue = schedule.queue(block)
            tokens = np.minimum(queue[:, 4], self.context) - queue[:, 3]
            shares.append(int(tokens.sum()) * token_bytes)
        return PhaseShare(phase.name, tuple(shares), shape.attention_layers)

    def _delta_share(self, phase: DeltaPhase) -> PhaseShare:
        """What each block reads of the sequences' states."""
        heads = phase.heads.of_rank(self.gpu.ranks)
        split = Split(heads.shares, self.gpu.blocks)
        share_bytes = heads.share_words * 4 * self.plan.batch
        shares = tuple(split.count(block) * share_bytes for block in range(self.gpu.blocks))
        return PhaseShare(phase.name, shares, len(heads.layers))


def step_bytes(
    shape: ModelShape, weight_bytes: int, context: int, batch: int = 1, kv_element_bytes: int = 2
) -> StepBytes:
    """Bytes a step must read: weights, K and V of `context` tokens a sequence, norms, embedding and rope rows."""
    return StepBytes(
        weights=weight_bytes,
        kv=2 * kv_element_bytes * shape.attention_layers * shape.kv_heads * shape.head_dim * context * batch,
        norms=2 * shape.table.norm_count * shape.padded_hidden,
        embedding=2 * shape.padded_hidden * batch,
        rope=4 * shape.head_dim * batch,
        states=0 if shape.delta is None else 4 * shape.delta.state_words * batch,
    )


def inspect_plan(
    shape: ModelShape,
    plan: Plan,
    gpu: Gpu,
    context: int = 1024,
    m_tile_bytes: Mapping[str, NDArray[np.int64]] | None = None,
) -> Report:
    """The report for `cheetah inspect`. PlanError if the context passes the plan's or the plan does not fit."""
    if not 1 <= context <= plan.max_context:
        raise PlanError(f"inspect: context is {context}: the plan holds 1 to {plan.max_context} tokens (max_context)")
    plan.check(shape, gpu)
    return Report(shape, plan, gpu, context, shared_map(shape, plan, gpu), m_tile_bytes or {})


def plot_shares(report: Report, path: str | Path) -> None:
    """Draw the share of each block by phase, one panel a phase, into `path` (png, svg or pdf by its ending).

    PlanError where matplotlib (the extra `plot`) is absent or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(f"a plot needs matplotlib: {installing('plot')}") from None
    phases = (*report.phases, report.step_share)
    figure = Figure(figsize=(9, 1.5 * len(phases) + 0.8), layout="constrained")
    for axes, phase in zip(figure.subplots(len(phases), 1, sharex=True), phases, strict=True):
        _draw_share(axes, phase)
    axes.set_xlabel("block")
    figure.suptitle(f"Bytes each block reads ({report.gpu.name}, context {report.context}); dashed: the mean")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"the plot cannot be written to {path}: {error}") from error


def _draw_share(axes: "Axes", phase: PhaseShare) -> None:
    unit, size = ("MB", 1e6) if phase.largest_bytes >= 1e6 else ("kB", 1e3)
    blocks = range(len(phase.block_bytes))
    axes.bar(blocks, [nbytes / size for nbytes in phase.block_bytes], width=0.85, color="#3b6ea5")
    axes.axhline(phase.mean_bytes / size, color="#c0392b", linestyle="--", linewidth=1)
    often = "" if phase.runs == 1 else f", {phase.runs} times a step"
    axes.set_title(f"{phase.name}: imbalance {phase.imbalance_percent:.1f} %{often}", loc="left", fontsize=9)
    axes.set_ylabel(unit)
    axes.margins(x=0.01)
