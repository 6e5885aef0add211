"""Named dimensions: where an element lies, written once and evaluated on Python ints and on device expressions alike.

A `Layout` maps named indices to an element's position; a `View` is a layout over a pointer. Indices are only added,
multiplied, divided and reduced by static numbers and never asked for their truth value, so what a kernel computes can
be exhausted with ints. Static indices are checked against their dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from cheetah.lang import types as ty
from cheetah.lang.errors import IndexNameError, RangeError, TypeMixError
from cheetah.lang.nodes import Expr, Literal

Position: TypeAlias = int | Expr
"""An index or an offset: a Python int or an integer on the device; ints in give an int out."""


@dataclass(frozen=True)
class Index:
    """A named dimension of `size` positions; `token(t)` is position `t` of it, for use as `view[head(h), token(t)]`."""

    name: str
    size: int

    def __post_init__(self) -> None:
        _require_positive(self.name, "size", self.size)

    def __call__(self, value: Position) -> IndexAt:
        return IndexAt(self.name, check_position(self.name, self.size, value))


@dataclass(frozen=True)
class IndexAt:
    """A position within a named dimension."""

    name: str
    value: Position


@dataclass(frozen=True)
class Dimension:
    """A dimension as it lies in memory: `size` positions, `stride` elements apart.

    A tiled dimension repeats runs of `tile` positions: position i lies at (i // tile) * stride + (i % tile) *
    tile_stride. Without tiles `tile` is 1.
    """

    name: str
    size: int
    stride: int
    tile: int = 1
    tile_stride: int = 0

    def offset(self, value: Position) -> Position:
        """Elements from the dimension's start to position `value`."""
        if self.tile == 1:
            return value * self.stride
        return value // self.tile * self.stride + value % self.tile * self.tile_stride

    @property
    def last(self) -> int:
        """The largest offset of any position: not always that of the last one when the dimension is tiled."""
        ends = {self.size - 1, max(0, self.size // self.tile * self.tile - 1)}
        return max(_static(self.offset(end)) for end in ends)


class Layout:
    """Named dimensions and where their elements lie, the first one slowest.

    `Layout(head=8, token=64, dim=128)` or `Layout(head, token, dim)` with `Index` objects is in C order;
    `Layout.strided(token=(64, 128), dim=(128, 1))` gives sizes with strides in elements; `layout.tile(row=16,
    column=16)` stores tile after tile, each contiguous.
    """

    def __init__(self, *indices: Index, **sizes: int) -> None:
        dimensions = []
        stride = 1
        for index in reversed([*indices, *(Index(name, size) for name, size in sizes.items())]):
            dimensions.append(Dimension(index.name, index.size, stride))
            stride *= index.size
        self.dimensions: tuple[Dimension, ...] = _distinct(tuple(reversed(dimensions)))

    @staticmethod
    def strided(**dimensions: tuple[int, int]) -> Layout:
        """A layout of (size, stride in elements) by name; strides may leave gaps or, at 0, repeat."""
        for name, (size, stride) in dimensions.items():
            _require_positive(name, "size", size)
            if stride < 0:
                raise RangeError(f"dimension `{name}` has stride {stride}; a stride is at least 0.")
        return Layout._of(tuple(Dimension(name, size, stride) for name, (size, stride) in dimensions.items()))

    @staticmethod
    def _of(dimensions: tuple[Dimension, ...]) -> Layout:
        layout = Layout()
        layout.dimensions = _distinct(dimensions)
        return layout

    def tile(self, **tiles: int) -> Layout:
        """The same dimensions cut into tiles, stored one after the other in C order, each in C order inside."""
        self._require_known(tiles)
        inner = {d.name: tiles.get(d.name, 1) for d in self.dimensions}
        for dimension in self.dimensions:
            _require_tile(dimension, inner[dimension.name])
        inside = _c_strides(inner)
        between = _c_strides({d.name: d.size // inner[d.name] for d in self.dimensions})
        count = prod(inner.values())
        return Layout._of(
            tuple(
                Dimension(d.name, d.size, between[d.name] * count, inner[d.name], inside[d.name])
                if inner[d.name] > 1
                else Dimension(d.name, d.size, between[d.name] * count)
                for d in self.dimensions
            )
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Positions of each dimension."""
        return {dimension.name: dimension.size for dimension in self.dimensions}

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes.values())

    @property
    def span(self) -> int:
        """Elements of memory from the first to the last, gaps included."""
        return 1 + sum(dimension.last for dimension in self.dimensions)

    def offset(self, *at: IndexAt, **by_name: Position) -> Position:
        """The element's position in memory, in elements; every dimension is given exactly once."""
        values = self._values(at, by_name)
        missing = [d.name for d in self.dimensions if d.name not in values]
        if missing:
            raise IndexNameError(f"no index for `{missing[0]}`; {self} needs each of its dimensions.")
        return self._sum(values)

    def slice(self, *at: IndexAt, **by_name: Position) -> tuple[Position, Layout]:
        """The offset of the part at the given indices, and the layout of the dimensions that remain."""
        values = self._values(at, by_name)
        return self._sum(values), Layout._of(tuple(d for d in self.dimensions if d.name not in values))

    def indices(self, flat: Position) -> dict[str, Position]:
        """The named indices of element number `flat` in counting order (last dimension fastest), whatever the strides.

        A device expression must be unsigned.
        """
        flat = check_position("element number", self.count, flat)
        found: dict[str, Position] = {}
        for number, dimension in reversed(list(enumerate(self.dimensions))):
            found[dimension.name] = flat % dimension.size if number else flat
            flat = flat // dimension.size
        return {dimension.name: found[dimension.name] for dimension in self.dimensions}

    def _values(self, at: tuple[IndexAt, ...], by_name: Mapping[str, Position]) -> dict[str, Position]:
        values: dict[str, Position] = {}
        for name, value in [*((item.name, item.value) for item in at), *by_name.items()]:
            if name in values:
                raise IndexNameError(f"`{name}` is given twice to {self}.")
            values[name] = value
        self._require_known(values)
        return {name: check_position(name, self.sizes[name], value) for name, value in values.items()}

    def _require_known(self, names: Mapping[str, Any]) -> None:
        unknown = [name for name in names if name not in self.sizes]
        if unknown:
            raise IndexNameError(f"{self} has no dimension `{unknown[0]}`; it has {', '.join(self.sizes) or 'none'}.")

    def _sum(self, values: Mapping[str, Position]) -> Position:
        self._require_width(values)
        offsets = [d.offset(values[d.name]) for d in self.dimensions if d.name in values]
        total: Position = 0
        for offset in sorted(offsets, key=lambda offset: isinstance(offset, int)):  # the static part comes last
            total = total + offset
        return total

    def _require_width(self, values: Mapping[str, Position]) -> None:
        for name, value in values.items():
            if isinstance(value, Expr) and isinstance(value.type, ty.Scalar) and self.span > 2**value.type.bits:
                raise RangeError(
                    f"{self} spans {self.span} elements, more than the {value.type} `{value}` can count: "
                    f"write `{name}=ty.u64({value})`."
                )

    def __str__(self) -> str:
        return f"Layout({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


class View:
    """A layout over a pointer (or, for tests, any Python sequence), from element `start` on.

    `view.at(head=h, token=t, dim=d)` and `view[head(h), token(t), dim(d)]` are the element; `view[...] = value` stores
    to it; `view.slice(head=h)` is the smaller view.
    """

    def __init__(self, pointer: Any, layout: Layout, start: Position = 0) -> None:
        if isinstance(pointer, Expr) and not isinstance(pointer.type, (ty.Pointer, ty.Array)):
            raise TypeMixError(f"a View needs a pointer or an array, not `{pointer}` of type {pointer.type}.")
        self.base, self.layout, self.start = pointer, layout, start

    def at(self, **by_name: Position) -> Any:
        """The element at the named indices."""
        return self.base[self.start + self.layout.offset(**by_name)]

    def set(self, value: Any, **by_name: Position) -> None:
        """Store to the element at the named indices."""
        self.base[self.start + self.layout.offset(**by_name)] = value

    def slice(self, *at: IndexAt, **by_name: Position) -> View:
        """The view of what remains at the given indices."""
        offset, layout = self.layout.slice(*at, **by_name)
        return View(self.base, layout, self.start + offset)

    @property
    def pointer(self) -> Expr:
        """The address of the view's first element."""
        if not isinstance(self.base, Expr):
            raise TypeMixError(f"a View over a {type(self.base).__name__} has no device address.")
        pointer: Expr = self.base + self.start
        return pointer

    def __getitem__(self, at: IndexAt | tuple[IndexAt, ...]) -> Any:
        return self.base[self.start + self.layout.offset(*_as_tuple(at))]

    def __setitem__(self, at: IndexAt | tuple[IndexAt, ...], value: Any) -> None:
        self.base[self.start + self.layout.offset(*_as_tuple(at))] = value


def check_position(name: str, size: int, value: Position) -> Position:
    """`value`, refused where it is static and outside of 0 to size - 1, or no integer."""
    if isinstance(value, Expr):
        if not isinstance(value.type, ty.Scalar) or not value.type.is_integer:
            raise TypeMixError(f"`{name}` is given `{value}` of type {value.type}; an index is an integer.")
        static = value.value if isinstance(value, Literal) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        static = value
    else:
        raise TypeMixError(f"`{name}` is given {value!r}; an index is an integer.")
    if static is not None and not 0 <= static < size:
        raise RangeError(f"index {static} of `{name}`, which has {size} positions (0 to {size - 1}).")
    return value


def _as_tuple(at: IndexAt | tuple[IndexAt, ...]) -> tuple[IndexAt, ...]:
    items = at if isinstance(at, tuple) else (at,)
    for item in items:
        if not isinstance(item, IndexAt):
            raise IndexNameError(f"a View is indexed by named positions, not by {item}: write `view.at(dim=...)`.")
    return items


def _c_strides(sizes: Mapping[str, int]) -> dict[str, int]:
    """Strides of the named sizes in C order."""
    return {dimension.name: dimension.stride for dimension in Layout(**sizes).dimensions}


def _distinct(dimensions: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    names = [dimension.name for dimension in dimensions]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise IndexNameError(f"two dimensions of a layout are called `{twice[0]}`; give each its own name.")
    return dimensions


def _require_positive(name: str, what: str, number: int) -> None:
    if number < 1:
        raise RangeError(f"dimension `{name}` has {what} {number}; it is at least 1.")


def _require_tile(dimension: Dimension, tile: int) -> None:
    _require_positive(dimension.name, "tile", tile)
    if dimension.tile != 1:
        raise RangeError(f"dimension `{dimension.name}` is tiled already.")
    if dimension.size % tile:
        raise RangeError(
            f"dimension `{dimension.name}` has {dimension.size} positions, which tiles of {tile} do not divide; "
            f"pad it to {-(-dimension.size // tile) * tile}."
        )


def _static(value: Position) -> int:
    assert isinstance(value, int)
    return value
