"""Named dimensions: every layout exhausted with ints, and the device's arithmetic compared with Python's."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheetah import lang as ch
from cheetah.lang import ty
from cheetah.lang.index import Position
from cheetah.lang.nodes import Name
from tests.lang.compilers import run_cpp
from tests.lang.test_errors import refused

LAYOUTS = {
    "C order": ch.Layout(head=3, token=4, dim=8),
    "strided": ch.Layout.strided(token=(4, 40), dim=(8, 2)),
    "transposed": ch.Layout.strided(row=(5, 1), column=(7, 5)),
    "tiled": ch.Layout(row=8, column=12).tile(row=4, column=2),
    "tiled one way": ch.Layout(row=6, column=5, part=2).tile(row=3),
    "one element": ch.Layout(only=1),
}


def every_index(layout: ch.Layout) -> list[dict[str, int]]:
    ranges = [range(size) for size in layout.sizes.values()]
    return [dict(zip(layout.sizes, values, strict=True)) for values in itertools.product(*ranges)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_no_two_elements_share_a_place(layout: ch.Layout) -> None:
    offsets = [layout.offset(**at) for at in every_index(layout)]
    assert len(set(offsets)) == layout.count == len(offsets)
    assert min(offsets) == 0 and max(offsets) == layout.span - 1


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_c_order_is_numpys(sizes: list[int]) -> None:
    layout = ch.Layout(**{f"d{number}": size for number, size in enumerate(sizes)})
    flat = np.arange(layout.count).reshape(sizes)
    for number, at in enumerate(every_index(layout)):
        assert layout.offset(**at) == flat[tuple(at.values())] == number
        assert layout.indices(number) == at


def test_tiles_are_contiguous_and_in_order() -> None:
    layout = ch.Layout(row=8, column=12).tile(row=4, column=2)
    tiled = np.arange(96).reshape(2, 6, 4, 2).transpose(0, 2, 1, 3).reshape(8, 12)
    for at in every_index(layout):
        assert layout.offset(**at) == tiled[at["row"], at["column"]]


def test_slices_are_views_of_the_same_memory() -> None:
    head, token, dim = ch.Index("head", 3), ch.Index("token", 4), ch.Index("dim", 8)
    numbers = list(range(96))
    view = ch.View(numbers, ch.Layout(head, token, dim))
    for h, t, d in itertools.product(range(3), range(4), range(8)):
        expected = numbers[(h * 4 + t) * 8 + d]
        assert view.at(head=h, token=t, dim=d) == view[token(t), dim(d), head(h)] == expected
        assert view.slice(token=t).slice(head(h)).at(dim=d) == expected
        assert view.slice(head=h, dim=d)[token(t)] == expected
    view[head(1), token(2), dim(3)] = -1
    view.set(-2, head=0, token=0, dim=0)
    assert (numbers[51], numbers[0]) == (-1, -2)


def row_offset(layout: ch.Layout, flat: Position) -> Position:
    """Index arithmetic written once: the place of element number `flat`."""
    return layout.offset(**layout.indices(flat))


@pytest.mark.compiler
def test_device_expressions_compute_what_ints_do(tmp_path: Path) -> None:
    """Every element of every layout, by the printed arithmetic."""
    lines = ["#include <cstdint>", "#include <cstdio>", "int main() {"]
    for layout in LAYOUTS.values():
        place = row_offset(layout, Name(ty.u32, "n", ()))
        lines.append(f'  for (uint32_t n = 0; n < {layout.count}; ++n) {{ uint32_t o = {place}; printf("%u\\n", o); }}')
    printed = [int(line) for line in run_cpp("\n".join([*lines, "}"]), tmp_path).split()]
    assert printed == [row_offset(layout, n) for layout in LAYOUTS.values() for n in range(layout.count)]


def test_how_a_view_reads_in_a_kernel() -> None:
    @ch.kernel(ch.Params(k=ty.ptr_mut(ty.f32), h=ty.u32))
    def kernel(k, h):
        keys = ch.View(k, ch.Layout(head=8, token=64, dim=128))
        row = keys.slice(head=h)
        row.set(1, token=3, dim=0)
        row.set(row.at(token=4, dim=h), token=0, dim=1)
        pointer = row.slice(token=2).pointer
        pointer[0] = 2

    assert ch.render(kernel).splitlines()[1:-1] == [
        "  k[h * 8192 + 384] = 1.0f;",
        "  k[h * 8192 + 1] = k[h * 8192 + (h + 512)];",
        "  float* pointer = k + (h * 8192 + 256);",
        "  pointer[0] = 2.0f;",
    ]


def test_a_view_of_a_const_pointer_cannot_be_stored_to() -> None:
    with refused(ch.ConstStoreError, "store to `k[0]` through const float*"):

        @ch.kernel(ch.Params(k=ty.ptr(ty.f32)))
        def kernel(k):
            ch.View(k, ch.Layout(a=2)).set(1, a=0)  # wrong


n = Name(ty.u32, "n", ())
LAYOUT = ch.Layout(row=4, column=8)


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda: LAYOUT.offset(row=4, column=0), ch.RangeError, "index 4 of `row`, which has 4 positions (0 to 3)."),
        (lambda: LAYOUT.offset(row=0, column=-1), ch.RangeError, "index -1 of `column`"),
        (lambda: LAYOUT.offset(row=ty.u32(9), column=0), ch.RangeError, "index 9 of `row`"),
        (lambda: ch.Index("row", 4)(4), ch.RangeError, "index 4 of `row`"),
        (lambda: LAYOUT.indices(32), ch.RangeError, "index 32 of `element number`, which has 32 positions"),
        (lambda: LAYOUT.offset(row=n), ch.IndexNameError, "no index for `column`; Layout(row=4, column=8) needs each"),
        (lambda: LAYOUT.offset(row=n, col=n), ch.IndexNameError, "has no dimension `col`; it has row, column."),
        (lambda: LAYOUT.offset(ch.Index("row", 4)(1), row=n, column=0), ch.IndexNameError, "`row` is given twice"),
        (lambda: LAYOUT.slice(height=n), ch.IndexNameError, "has no dimension `height`"),
        (lambda: LAYOUT.offset(row=0.5, column=0), ch.TypeMixError, "`row` is given 0.5; an index is an integer."),
        (lambda: LAYOUT.offset(row=n == 1, column=0), ch.TypeMixError, "`row` is given `n == 1` of type bool"),
        (lambda: ch.Layout(ch.Index("a", 2), ch.Index("a", 3)), ch.IndexNameError, "are called `a`"),
        (lambda: ch.Layout(row=0), ch.RangeError, "dimension `row` has size 0; it is at least 1."),
        (lambda: LAYOUT.tile(row=3), ch.RangeError, "which tiles of 3 do not divide; pad it to 6."),
        (lambda: LAYOUT.tile(row=2).tile(row=2), ch.RangeError, "dimension `row` is tiled already."),
        (lambda: ch.Layout.strided(row=(4, -1)), ch.RangeError, "dimension `row` has stride -1"),
        (lambda: ch.View(n, LAYOUT), ch.TypeMixError, "a View needs a pointer or an array, not `n` of type uint32_t."),
        (lambda: ch.View([0], LAYOUT)[3], ch.IndexNameError, "is indexed by named positions, not by 3"),
        (lambda: ch.View([0], LAYOUT).pointer, ch.TypeMixError, "a View over a list has no device address."),
        (
            lambda: ch.Layout(row=2**20, column=2**13).offset(row=n, column=0),
            ch.RangeError,
            "spans 8589934592 elements, more than the uint32_t `n` can count: write `row=ty.u64(n)`.",
        ),
    ],
)
def test_misuse(use: object, kind: type[ch.LangError], message: str) -> None:
    with pytest.raises(kind) as caught:
        use()  # type: ignore[operator]
    assert message in str(caught.value)
    assert f"\n  at {__file__}:" in str(caught.value)
