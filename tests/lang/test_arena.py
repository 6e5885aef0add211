"""Shared memory from one arena: offsets, alignment, types, the table."""

from __future__ import annotations

import pytest

from cheetah import lang as ch
from cheetah.lang import ty


def test_regions_are_aligned_and_do_not_overlap() -> None:
    pair = ty.struct("Pair", low=ty.u8, high=ty.u64)
    arena = ch.Arena.of([("bytes", ty.u8, 3), ("vector", ty.f32, 5), ("pairs", pair, 3), ("quad", ty.u32x4, 2)])
    arena.add("ring", ty.u8, 2048, align=1024)
    arena.add("flag", ty.u32)
    assert {name: region.offset for name, region in arena.regions.items()} == {
        "bytes": 0, "vector": 16, "pairs": 48, "quad": 96, "ring": 1024, "flag": 3072,
    }  # fmt: skip
    assert arena.total_bytes == 3076
    regions = list(arena.regions.values())
    assert all(before.end <= after.offset for before, after in zip(regions, regions[1:], strict=False))
    assert arena.offset("quad") == 96


def test_declare_gives_typed_pointers_by_name() -> None:
    pair = ty.struct("Pair", low=ty.u8, high=ty.u64)
    arena = ch.Arena(4096)
    arena.add("stage", ty.u8, 1024, align=128)
    arena.add("pairs", pair, 2)
    arena.add("sums", ty.f32, 8, over="stage")

    @ch.kernel(ch.Params(pairs=ty.ptr(ty.u32)))
    def kernel(pairs):
        shared = arena.declare()
        shared.pairs[0].high = ty.u64(pairs[0])
        shared.sums[1] = 2
        shared.stage[0] = ty.u8(1)

    assert ch.render(kernel).splitlines()[1:-1] == [
        "  uint8_t* shared = shared_arena();",
        "  uint8_t* stage = shared;",
        "  Pair* pairs_2 = (Pair*)(shared + 1024);",
        "  float* sums = (float*)(shared);",
        "  pairs_2[0].high = (uint64_t)(pairs[0]);",
        "  sums[1] = 2.0f;",
        "  stage[0] = 1;",
    ]


def test_the_table() -> None:
    arena = ch.Arena(2048)
    arena.add("stage", ty.u8, 1024)
    arena.add("sums", ty.f32, 8, over="stage")
    assert arena.table().splitlines() == [
        "  offset    bytes  region",
        "       0     1024  stage (uint8_t x 1024)",
        "       0       32  sums (float x 8, over stage)",
        "             1024  total",
        "             2048  a block has: 1024 free",
    ]


def test_misuse() -> None:
    arena = ch.Arena()
    arena.add("stage", ty.u8, 1024)
    for wrong, kind, message in (
        (lambda: arena.add("stage", ty.u8), ch.LangError, "the arena has a region `stage` already"),
        (lambda: arena.add("none", ty.u8, 0), ch.RangeError, "shared region `none` has 0 elements"),
        (lambda: arena.add("odd", ty.u8, 1, align=24), ch.RangeError, "alignment 24 is no power of two up to 1024."),
        (lambda: arena.add("far", ty.u8, 1, align=2048), ch.RangeError, "alignment 2048 is no power of two"),
        (lambda: arena.add("big", ty.u8, 2000, over="stage"), ch.RangeError, "does not fit over `stage`"),
        (lambda: arena.add("ghost", ty.u8, 1, over="gone"), ch.LangError, "the arena has no region `gone`"),
        (lambda: arena.offset("gone"), ch.LangError, "the arena has no region `gone`; it has stage."),
        (lambda: arena.declare(), ch.NoKernelError, "outside of a kernel"),
    ):
        with pytest.raises(kind) as caught:
            wrong()
        assert message in str(caught.value)
    assert ch.Arena().total_bytes == 0


def test_a_region_that_is_not_there() -> None:
    arena = ch.Arena.of([("stage", ty.u8, 16)])
    with pytest.raises(AttributeError, match="the arena has no region `stages`; it has stage"):

        @ch.kernel(ch.Params())
        def kernel():
            arena.declare().stages[0] = 1
