"""The matrices of a step in the order in which the weights buffer holds them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cheetah.plan.errors import PlanError
from cheetah.plan.formats import M_TILE_ROWS, BlockRows
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.narrow import start_of_others, tile_rows
from cheetah.plan.plan import Plan
from cheetah.plan.products import IN_PROJ, IN_PROJ_BA, Experts, Product, StepTable
from cheetah.plan.sections import Sections
from cheetah.plan.shape import ModelShape
from cheetah.plan.shares import rows_of_rank

DELTA_ONLY = (IN_PROJ, IN_PROJ_BA)
"""The matrices that layers of Gated DeltaNet alone have."""


@dataclass(frozen=True)
class StepMatrices:
    """`weights` is the matrices `of_layer` of layer 0, those of layer 1, ... and the head's; `offset` of a layout is
    that of layer 0. In the `delta_layers` those of DELTA_ONLY stand in the place of `heads`, which the others have:
    layers are equally long, `layer_stride` bytes."""

    of_layer: tuple[MatrixLayout, ...]
    head: MatrixLayout
    layers: int
    layer_stride: int
    heads: str
    delta_layers: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[MatrixLayout]:
        return iter((*self.of_layer, self.head))

    def __getitem__(self, product: Product) -> MatrixLayout:
        return self.named(product.name)

    def named(self, name: str) -> MatrixLayout:
        """The layout of that name; PlanError lists the names there are."""
        for layout in self:
            if layout.name == name:
                return layout
        raise PlanError(f"there is no matrix {name!r}: there are {', '.join(layout.name for layout in self)}")

    @property
    def ranks(self) -> int:
        """GPUs that have a part of each."""
        return self.head.ranks

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights buffer; every step reads each once, but for those of experts that nobody chose."""
        return self.head.offset + self.head.total_bytes

    def read_bytes(self, experts: Experts | None, tokens: int) -> int:
        """Bytes that a step of so many tokens reads of it: of experts as many as are expected to be chosen, where each
        is as likely as any other."""
        return sum(round(self.copies(one) * one.expert_bytes * read_of(one, experts, tokens)) for one in self)

    def offset(self, name: str, layer: int = 0, expert: int = 0) -> int:
        """First byte of a matrix in the weights buffer, or that of an expert; the head has no layers."""
        layout = self.named(name)
        count = 1 if layout.is_once else self.layers
        if not 0 <= layer < count:
            raise PlanError(f"matrix {name!r}: layer {layer} does not exist: there are layers 0 to {count - 1}")
        if not self.has(layout, layer):
            raise PlanError(f"matrix {name!r}: layer {layer} has none")
        if not 0 <= expert < layout.experts:
            raise PlanError(f"matrix {name!r}: expert {expert} does not exist: there are 0 to {layout.experts - 1}")
        return layout.offset + layer * self.layer_stride + expert * layout.expert_bytes

    def copies(self, layout: MatrixLayout) -> int:
        """How many of this matrix a step reads: one a layer that has it, one head."""
        return len(self.layers_of(layout))

    def layers_of(self, layout: MatrixLayout) -> tuple[int, ...]:
        """The layers that have this matrix; (0,) of the head's."""
        return (0,) if layout.is_once else tuple(layer for layer in range(self.layers) if self.has(layout, layer))

    def has(self, layout: MatrixLayout, layer: int) -> bool:
        """Whether a layer has this matrix."""
        if not self.delta_layers or layout.name not in (self.heads, *DELTA_ONLY):
            return True
        return (layout.name in DELTA_ONLY) == (layer in self.delta_layers)

    def describe(self) -> tuple[dict[str, int | str], ...]:
        """One plain entry a matrix: name, rows, columns, format, offset, layer_stride, layers, start; tile_rows of
        narrow M-tiles; experts, and expert_stride from one to the next; ranks, where several share the M-tiles, of
        which rows and bytes are one's; chunks_at_once of small M-tiles, see `MatrixLayout`."""
        return tuple(self._describe(layout) for layout in self)

    def _describe(self, layout: MatrixLayout) -> dict[str, int | str]:
        layers = self.copies(layout)
        return {
            "name": layout.name,
            "rows": layout.rows,
            "columns": layout.columns,
            "format": layout.format.name,
            "offset": layout.offset,
            "layer_stride": 0 if layout.is_once else self.layer_stride,
            "layers": layers,
            "start": layout.start,
            **({"tile_rows": layout.tile_rows} if layout.is_narrow else {}),
            **({"experts": layout.experts, "expert_stride": layout.expert_bytes} if layout.experts > 1 else {}),
            **({"ranks": layout.ranks} if layout.ranks > 1 else {}),
            **({"chunks_at_once": layout.chunks_at_once} if layout.chunks_at_once > 1 else {}),
        }


def read_of(layout: MatrixLayout, experts: Experts | None, tokens: int) -> float:
    """How many of a matrix' experts a step of so many tokens is expected to read; 1 of a matrix that is no expert's."""
    return 1.0 if layout.experts == 1 or experts is None else experts.expected(tokens)


def step_matrices(shape: ModelShape, plan: Plan, gpu: Gpu) -> StepMatrices:
    """The layouts under a plan of what each rank has of a model's matrices. PlanError where ranks cannot share them."""
    plan.check(shape, gpu)
    table, start = shape.table, start_of_others(shape, gpu)
    layouts = [_layout(product, shape, plan, gpu, _start(product, table, gpu, start)) for product in table.products]
    delta_layers = () if shape.delta is None else shape.delta.layers
    of_delta = {layout.name: layout.total_bytes for layout in layouts if layout.name in DELTA_ONLY}
    heads = table.heads.name
    in_turn = (of_delta, {one.name: one.total_bytes for one in layouts if of_delta and one.name == heads})
    places = [Sections(sizes) for sizes in in_turn]
    behind = {one.name: one.total_bytes for one in layouts if not (of_delta and one.name in (heads, *of_delta))}
    rest = Sections(behind, start=max(place.end for place in places))
    offsets = rest.offsets | places[0].offsets | places[1].offsets
    of_layer = tuple(replace(layout, offset=offsets[layout.name]) for layout in layouts)
    head = replace(_layout(table.head, shape, plan, gpu, start), offset=shape.layers * rest.end)
    return StepMatrices(of_layer, head, shape.layers, rest.end, heads, delta_layers)


def _start(product: Product, table: StepTable, gpu: Gpu, start: int) -> int:
    """Of a product beside another the first M-tiles go to the blocks that the other's last wave leaves out."""
    if product != table.beside:
        return start
    return (start - ceil_div(table.products[0].rows, M_TILE_ROWS)) % gpu.blocks


def _layout(product: Product, shape: ModelShape, plan: Plan, gpu: Gpu, start: int) -> MatrixLayout:
    """start: of all but those that are added to the residual. They share theirs, so that a row of it lies with one
    block, and their height."""
    chunk_bytes = product.format.chunk_bytes(plan.stage_bytes, plan.consumer_warps)
    height = tile_rows(product, shape, gpu)
    return MatrixLayout(
        product.name,
        rows_of_rank(product, shape, height, gpu.ranks),
        product.columns,
        gpu.blocks,
        chunk_bytes,
        0 if product.adds else start,
        slices=product.in_turn(plan.down_slices)[1] if product.is_sliced else 1,
        experts=1 if product.experts is None else product.experts.count,
        format=product.format,
        tile_rows=height,
        is_brief=product.is_brief,
        is_once=product.is_once,
        ranks=1 if product.is_own else gpu.ranks,
        by_numbers=product.by_numbers(plan),
        is_dealt=isinstance(product.format, BlockRows) and not product.adds and not product.is_once,
    )
