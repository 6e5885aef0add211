"""Packing on the device: every code of some M-tiles from where a file has it to its place in a K-tile.

The tables say everything (`cheetah.plan.repacking` has them); here they are followed, a word of a tile by a thread.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.repacking import NOTHING, PLACE_BYTES, Repacking

KERNEL_NAME = "repack"
NUMBERS = {field.name: ty.u64 if field.name == "target" else ty.u32 for field in fields(Repacking)}
PARAMETERS: dict[str, ty.Type] = {"staging": ty.ptr(ty.u8), "weights": ty.ptr_mut(ty.u8), **NUMBERS}
MEANINGS = {
    "staging": "tables, scales and codes",
    "weights": "packed weights",
    **{name: f"Repacking.{name}" for name in NUMBERS},
}


def build_repack(threads: int, team_threads: int) -> ch.Kernel:
    """The kernel. A block is teams of `team_threads`, each of which takes a tile in its turn."""

    @ch.kernel(ch.Params(**PARAMETERS), name=KERNEL_NAME, max_threads=threads)
    def repack(**given: Any) -> None:
        _emit(SimpleNamespace(**given), threads // team_threads, team_threads)

    return repack


@ch.inline
def _emit(given: Any, teams: int, team_threads: int) -> None:
    order = _table(given, given.order_at)
    rows = _table(given, given.rows_at)
    columns = _table(given, given.columns_at)
    places = _table(given, given.places_at)
    codes = given.staging + given.codes_at
    scale_bytes = given.k_tiles * given.behind_bytes + given.factor_bytes
    codes_of_word = 32 // given.code_bits
    in_byte = 8 // given.code_bits - 1  # 1 where a byte has two codes, else 0
    mask = (ty.u32(1) << given.code_bits) - 1
    chunks = (given.k_tiles + given.tiles_per_chunk - 1) // given.tiles_per_chunk
    thread = ch.thread_idx_x() % team_threads
    team = ch.block_idx_x() * teams + ch.thread_idx_x() // team_threads
    with ch.for_(team, given.m_tiles * given.k_tiles, ch.grid_dim_x() * teams) as tile:
        # Teams side by side take M-tiles side by side: where rows lie among one another they read the same lines.
        m_tile = tile % given.m_tiles
        k_tile = tile // given.m_tiles
        chunk = k_tile // given.tiles_per_chunk
        place = ty.u64(places[m_tile * chunks + chunk]) * PLACE_BYTES
        in_chunk = k_tile % given.tiles_per_chunk * given.tile_bytes
        words = ch.reinterpret(ty.ptr_mut(ty.u32), given.weights + (given.target + place) + in_chunk)
        with ch.for_(thread, given.code_bytes // 4, team_threads) as word:
            packed = ch.var(ty.u32, 0)
            with ch.for_(codes_of_word) as number:
                belongs = order[word * codes_of_word + number]
                row = (m_tile * M_TILE_ROWS + (belongs >> 16)) * 2
                column = k_tile * given.code_columns + (belongs & 0xFFFF)
                of_row = rows[row]
                with ch.if_(of_row != NOTHING):
                    of_column = columns[rows[row + 1] + column]
                    with ch.if_(of_column != NOTHING):
                        code = of_row + of_column
                        byte = ty.u32(codes[code >> in_byte])
                        bits = byte >> ((code & in_byte) * given.code_bits) & mask
                        packed |= bits << (number * given.code_bits)
            with ch.if_(given.is_f16 != 0):
                packed.set(prim.pack_bf16x2(prim.f16x2_low(packed), prim.f16x2_high(packed)))
            words[word] = packed
        scales = ch.reinterpret(ty.ptr(ty.u32), given.staging + (given.scales_at + m_tile * scale_bytes))
        with ch.for_(thread, given.behind_bytes // 4, team_threads) as word:
            words[given.code_bytes // 4 + word] = scales[k_tile * (given.behind_bytes // 4) + word]
        with ch.if_(k_tile == given.k_tiles - 1), ch.for_(thread, given.factor_bytes // 4, team_threads) as word:
            words[given.tile_bytes // 4 + word] = scales[given.k_tiles * (given.behind_bytes // 4) + word]


def _table(given: Any, offset: ch.Expr) -> ch.Expr:
    return ch.reinterpret(ty.ptr(ty.u32), given.staging + offset)
