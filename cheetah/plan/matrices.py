"""The five matrices of a step in the order in which the weights buffer holds them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cheetah.plan.errors import PlanError
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.narrow import RESIDUAL_MATRICES, residual_tile_rows
from cheetah.plan.plan import Plan
from cheetah.plan.shape import ModelShape

GATE_UP_ROWS = M_TILE_ROWS // 2
"""Gate rows of an M-tile; their up rows are its other half, so that SwiGLU is local to a lane."""


@dataclass(frozen=True)
class StepMatrices:
    """`weights` is [layer 0: qkv, o, gate_up, down] [layer 1] ... [lm_head]; `offset` of a layout is that of layer
    0."""

    qkv: MatrixLayout
    o: MatrixLayout
    gate_up: MatrixLayout
    down: MatrixLayout
    lm_head: MatrixLayout
    layers: int

    def __iter__(self) -> Iterator[MatrixLayout]:
        return iter((*self.of_layer, self.lm_head))

    @property
    def of_layer(self) -> tuple[MatrixLayout, ...]:
        """The matrices of every layer, in the order in which they are read."""
        return self.qkv, self.o, self.gate_up, self.down

    def named(self, name: str) -> MatrixLayout:
        """The layout of that name; PlanError lists the names there are."""
        for layout in self:
            if layout.name == name:
                return layout
        raise PlanError(f"there is no matrix {name!r}: there are {', '.join(layout.name for layout in self)}")

    @property
    def layer_stride(self) -> int:
        """Bytes from a matrix of one layer to the same matrix of the next."""
        return sum(layout.total_bytes for layout in self.of_layer)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights buffer; every step reads each once."""
        return self.lm_head.offset + self.lm_head.total_bytes

    def offset(self, name: str, layer: int = 0) -> int:
        """First byte of a matrix in the weights buffer; the lm_head has no layers."""
        layout = self.named(name)
        count = self.copies(layout)
        if not 0 <= layer < count:
            raise PlanError(f"matrix {name!r}: layer {layer} does not exist: there are layers 0 to {count - 1}")
        return layout.offset + layer * self.layer_stride

    def copies(self, layout: MatrixLayout) -> int:
        """How many of this matrix a step reads: one a layer, one lm_head."""
        return 1 if layout.name == self.lm_head.name else self.layers

    def describe(self) -> tuple[dict[str, int | str], ...]:
        """One plain entry a matrix: name, rows, columns, format, offset, layer_stride, layers, start; tile_rows of
        narrow M-tiles."""
        return tuple(self._describe(layout) for layout in self)

    def _describe(self, layout: MatrixLayout) -> dict[str, int | str]:
        layers = self.copies(layout)
        return {
            "name": layout.name,
            "rows": layout.rows,
            "columns": layout.columns,
            "format": layout.format.name,
            "offset": layout.offset,
            "layer_stride": 0 if layout.name == self.lm_head.name else self.layer_stride,
            "layers": layers,
            "start": layout.start,
            **({"tile_rows": layout.tile_rows} if layout.is_narrow else {}),
        }


def step_matrices(shape: ModelShape, plan: Plan, gpu: Gpu) -> StepMatrices:
    """The layouts of a model's matrices under a plan. o and down share a start: a residual row's owner is one block."""
    plan.check(shape, gpu)
    residual_rows = residual_tile_rows(shape, gpu)

    def layout(name: str, rows: int, columns: int, start: int, slices: int = 1) -> MatrixLayout:
        format = shape.format_of(name)
        chunk_bytes = format.chunk_bytes(plan.stage_bytes, plan.consumer_warps)
        return MatrixLayout(
            *(name, rows, columns, gpu.blocks, chunk_bytes, start),
            slices=slices,
            format=format,
            tile_rows=residual_rows if name in RESIDUAL_MATRICES else M_TILE_ROWS,
        )

    gate_up_rows = ceil_div(shape.ffn, GATE_UP_ROWS) * M_TILE_ROWS
    qkv, o, gate_up, down = _placed(
        layout("qkv", shape.qkv_rows, shape.hidden, plan.start_qkv),
        layout("o", shape.hidden, shape.query_rows, plan.start_residual),
        layout("gate_up", gate_up_rows, shape.hidden, plan.start_gate_up),
        layout("down", shape.hidden, shape.ffn, plan.start_residual, plan.down_slices),
    )
    lm_head = layout("lm_head", shape.vocab, shape.hidden, plan.start_head)
    stride = down.offset + down.total_bytes
    return StepMatrices(qkv, o, gate_up, down, replace(lm_head, offset=shape.layers * stride), shape.layers)


def _placed(*layouts: MatrixLayout) -> list[MatrixLayout]:
    placed: list[MatrixLayout] = []
    offset = 0
    for layout in layouts:
        placed.append(replace(layout, offset=offset))
        offset += layout.total_bytes
    return placed
