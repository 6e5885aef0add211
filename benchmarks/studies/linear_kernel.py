"""A deep linear network, y = W[n-1] ... W[1] W[0] x, of square bf16 matrices, written with the building blocks.

Activations are bf16 between layers, sums f32. One kernel runs all layers and passes the vector through an exchange
(fused), or one layer (unfused: the vectors lie in plain memory, and the launches' order is their order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.studies.kernels import finish_kernel
from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.exchange_kinds import make_exchange
from cheetah.blocks.linear.epilogue import pair_of_rows
from cheetah.blocks.linear.interface import Prologue, Rows
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.parts import Arrival, Part
from cheetah.blocks.linear.prologue import Slices, Units
from cheetah.blocks.linear.share import Share
from cheetah.blocks.machine import Machine, emit_roles, start_machine
from cheetah.blocks.ring import Ring
from cheetah.lang import prim, ty
from cheetah.package import Generated
from cheetah.plan import M_TILE_ROWS, Gpu, MatrixLayout, ModelShape, default_plan, shared_map

FUSED_PARAMETERS = ch.Params(
    weights=ty.ptr(ty.u8),
    x=ty.ptr(ty.bf16),
    y=ty.ptr_mut(ty.u32),
    exchange=ty.ptr_mut(ty.u8),
    epochs=ty.ptr_mut(ty.u32),
    first_layer=ty.u32,
    layers=ty.u32,
)
UNFUSED_PARAMETERS = ch.Params(weights=ty.ptr(ty.u8), x=ty.ptr(ty.bf16), y=ty.ptr_mut(ty.u32), first_layer=ty.u32)


@dataclass(frozen=True)
class Variant:
    """overlap: the producer warp runs ahead of the exchange; else it waits for a layer's input before it fetches
    weights.

    sync: how blocks exchange the vector (see `cheetah.plan`)."""

    name: str
    fused: bool = True
    overlap: bool = True
    sync: str = "flags"


VARIANTS = (
    Variant("unfused", fused=False),
    Variant("fused", overlap=False),
    Variant("fused, overlap"),
    Variant("fused, grid barrier", overlap=False, sync="barrier"),
    Variant("fused, overlap, grid barrier", sync="barrier"),
)


@dataclass(frozen=True)
class LinearKernel:
    """A kernel of one variant, and where the weights of a layer lie: layer l begins at byte l * layout.total_bytes.

    Parameters: weights; x, y bf16 [size]; first_layer, the number of the chain's first layer in `weights`; of the
    fused kernel alone: layers, exchange (zeroed once) and epochs u32 [blocks], all 1 before the first launch.
    """

    variant: Variant
    layout: MatrixLayout
    exchange_bytes: int
    text: Generated


def linear_kernel(size: int, gpu: Gpu, variant: Variant, **plan_fields: Any) -> LinearKernel:
    """The kernel for matrices [size, size] (a multiple of 32). Any number of layers runs with it."""
    assert size % 32 == 0, size
    shape = ModelShape(size, size, M_TILE_ROWS, 1, 1, 64, 1)
    plan = default_plan(gpu, shape, sync=variant.sync, **plan_fields)
    layout = MatrixLayout("w", size, size, gpu.blocks, plan.stage_bytes)
    parameters = FUSED_PARAMETERS if variant.fused else UNFUSED_PARAMETERS
    shared = shared_map(shape, plan, gpu)
    exchange_bytes = 0

    @ch.kernel(parameters, name="deep_linear", max_threads=plan.threads)
    def deep_linear(**arguments: Any) -> None:
        nonlocal exchange_bytes
        machine = start_machine(shape, plan, gpu, shared)
        network = DeepLinear(machine, layout, variant, SimpleNamespace(**arguments))
        exchange_bytes = network.exchange_bytes
        network.emit()

    text = finish_kernel(deep_linear, gpu, plan, shared.total_bytes, cooperative=variant.fused)
    return LinearKernel(variant, layout, exchange_bytes, text)


@dataclass(frozen=True, eq=False)
class Told(Prologue):
    """A prologue after which `who` arrives at a barrier."""

    slices: Slices
    who: ch.Expr
    barrier: ch.Expr

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        self.slices.begin(matrix, arrival)
        with ch.if_(self.who):
            prim.mbarrier_arrive(self.barrier)

    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        return self.slices.parts(matrix, arrival)


class DeepLinear:
    """The program of a launch. `launch` has the kernel's parameters by name."""

    def __init__(self, machine: Machine, layout: MatrixLayout, variant: Variant, launch: SimpleNamespace) -> None:
        self.machine, self.layout, self.variant, self.launch = machine, layout, variant, launch
        self.share = Share(machine, layout)
        self.ring = Ring(machine)
        # One column, of which no record is asked.
        self.columns = Columns(machine, ty.u32(1), launch.weights, launch.weights)
        self.matvec = Matvec(self.columns, self.ring, launch.weights)
        # Layers take turns with two halves. Who publishes a layer's rows has all rows of the layer before, so all
        # blocks have read the half that is written now.
        sizes = {"vector": layout.padded_columns}
        self.exchange = make_exchange(machine, launch.exchange, sizes) if variant.fused else None
        self.exchange_bytes = 0 if self.exchange is None else type(self.exchange).size_bytes(sizes)

    @ch.inline
    def emit(self) -> None:
        """Set up, then the layers."""
        machine, launch = self.machine, self.launch
        epoch = ch.const(ty.u32, launch.epochs[machine.block] if self.exchange else 0)
        self._set_up()
        if self.exchange is None:
            self._copy(launch.first_layer)
            with machine.consumer:
                self._multiply(self._read_input)
            with machine.adding():
                self._finish(self._store)
        else:
            with machine.consumer:
                self.exchange.start()
            with ch.roles_for(machine.roles, launch.layers, name="layer") as layer:
                self._fused_layer(layer, epoch)
            with machine.consumer:
                # Every thread has read the epoch, before the barrier at the start.
                with ch.if_(machine.thread == 0):
                    launch.epochs[machine.block] = epoch + launch.layers
        emit_roles(machine)

    @ch.inline
    def _set_up(self) -> None:
        input_there = self.machine.region("step_done", ty.u64)
        self.input_there = input_there
        with ch.if_(self.machine.thread == 0):
            self.ring.initialise()
            self.matvec.initialise()
            prim.mbarrier_init(input_there, 1)
            prim.mbarrier_fence_init()
        prim.block_barrier()  # orders the barriers' initialisation before their first use by either role
        self.ring.start()

    @ch.inline
    def _fused_layer(self, layer: Any, epoch: Any) -> None:
        machine, exchange = self.machine, self.exchange
        assert exchange is not None
        with machine.producer:
            if not self.variant.overlap:
                ch.comment("no weights are fetched before their input is there")
                with ch.if_((layer > 0) & self._owns_rows()):
                    prim.mbarrier_wait(self.input_there, (layer + 1) % 2)
        self._copy(self.launch.first_layer + layer)
        with machine.consumer:
            words = self.layout.padded_columns // 2
            threads = machine.consumer_threads

            def read(data: Any, unit: Any, count: int) -> None:
                with ch.if_(layer == 0):
                    self._read_input(data, unit, count)
                with ch.else_():
                    first = (layer + 1) % 2 * (words // 4) + unit
                    exchange.read_units("vector", data, first, threads, count, epoch + layer - 1)

            self._multiply(read, layer)
            exchange.meet()

        def publish(rows: Rows, pair: Any) -> None:
            with ch.if_(layer + 1 == self.launch.layers):
                self._store(rows, pair)
            with ch.else_():
                place = layer % 2 * (self.layout.padded_columns // 2) + self._word_of(rows)
                exchange.publish("vector", place, pair, epoch + layer)

        with machine.adding():
            self._finish(publish)

    @ch.inline
    def _copy(self, layer: Any) -> None:
        with self.machine.producer:
            self.matvec.begin_layer(layer, self.layout.total_bytes)
            self.matvec.copy(self.share)

    @ch.inline
    def _multiply(self, read: Any, layer: Any = None) -> None:
        """One layer's product."""
        whole = Slices(self.columns, Units(read), self.layout.padded_columns)
        self.matvec.multiply(self.share, self._told(whole, layer))

    @ch.inline
    def _finish(self, publish: Any) -> None:
        """Its rows: `publish(rows, pair)` gets a bf16 pair on each even lane of the first 16."""

        def finish(rows: Rows) -> None:
            pair = pair_of_rows(rows.sum())
            with ch.if_(rows.is_own & (rows.row % 2 == 0)):
                publish(rows, pair)

        self.matvec.adding.finish(self.share, finish)

    def _told(self, slices: Slices, layer: Any) -> Prologue:
        """The same, but where copies do not overlap the producer lane is told that the input is there."""
        if layer is None or self.variant.overlap:
            return slices
        return Told(slices, (self.machine.thread == 0) & (layer > 0), self.input_there)

    def _owns_rows(self) -> Any:
        return self.layout.position(self.machine.block) < self.layout.m_tiles

    def _read_input(self, data: Any, unit: Any, count: int) -> None:
        """Units of the launch's input, which nobody writes meanwhile."""
        with ch.for_(count, unroll=True, name="number") as number:
            place = (unit + number * self.machine.consumer_threads) * UNIT
            data[number] = prim.load_constant_u32x4(self.launch.x + place)

    @staticmethod
    def _word_of(rows: Rows) -> Any:
        return (rows.m_tile * M_TILE_ROWS + rows.row) // 2

    def _store(self, rows: Rows, pair: Any) -> None:
        self.launch.y[self._word_of(rows)] = pair
