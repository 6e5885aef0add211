"""How the producer lane finds an M-tile's lots of blocks: by the matrix' index, of which it reads ahead.

See `cheetah.models.formats.block_rows`. A run needs four words: where the M-tile's lots begin, how many blocks it has,
and how many of them lie before the run's first window and before its end. They are asked for when the run before is
copied, so only a matrix' first run waits for memory.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.share import Run, Share
from cheetah.blocks.ring import Ring
from cheetah.lang import prim, ty
from cheetah.plan.formats import BF16, LOT_BLOCKS, LOT_LINE_BYTES

LINES_OF_LOT = 1 + LOT_BLOCKS * BF16.tile_bytes // LOT_LINE_BYTES


class LotWalk:
    """Over the lots of a block's M-tiles of a matrix (a `MatrixLayout`, or one of which the device knows the sizes)
    whose first byte is `first_byte`. in_flight: see `Ring.fill`."""

    def __init__(self, matrix: Any, first_byte: ch.Expr, ring: Ring, in_flight: int) -> None:
        self.matrix, self.first_byte, self.ring, self.in_flight = matrix, first_byte, ring, in_flight

    @ch.inline
    def copy(self, share: Share, position: ch.Expr) -> None:
        """In the producer role: all runs of the share, in order."""
        matrix = self.matrix
        first_end = ch.minimum(matrix.slice_chunks, matrix.chunks)
        words = self._words(ch.minimum(position, matrix.m_tiles - 1), ty.u32(0), first_end)
        known = [ch.var(ty.u32, word, name=name) for name, word in words.items()]
        for run in share.runs(position):
            begin, total, before, behind = (ch.const(ty.u32, one, name="of_run") for one in known)
            following = self._words(*self._behind(run))
            self._copy_run(begin, total, before, behind, run.first < run.end)
            for one, word in zip(known, following.values(), strict=True):
                one.set(word)

    def _behind(self, run: Run) -> tuple[ch.Expr, ch.Expr, ch.Expr]:
        """The M-tile and windows [first, end) of the run behind this one; behind the last any."""
        matrix = self.matrix
        m_tile = ch.const(ty.u32, run.m_tile + matrix.blocks, name="next_tile")
        is_same = ch.const(ty.boolean, m_tile < matrix.m_tiles, name="is_same_slice")
        end = ch.minimum(ty.u32(run.end) + matrix.slice_chunks, matrix.chunks)
        windows = ch.select(is_same, ty.u32(run.first), ty.u32(run.end)), ch.select(is_same, ty.u32(run.end), end)
        return ch.select(is_same, m_tile, run.position), *windows

    def _words(self, m_tile: ch.Expr, first: ch.Expr, end: ch.Expr) -> dict[str, ch.Expr]:
        """What the index says of a run; each is a load."""
        chunks = self.matrix.chunks
        index = ch.reinterpret(ty.ptr(ty.u32), self.first_byte) + self.matrix.m_tiles * 2
        entries = index + m_tile * (chunks + 1)
        places = {"begin": 0, "total": chunks, "before": first, "behind": end}
        words = {
            name: ch.const(ty.u32, prim.load_constant_u32(entries + place), name=f"next_{name}")
            for name, place in places.items()
        }
        return {**words, "before": ch.select(first == 0, ty.u32(0), words["before"])}

    def _copy_run(self, begin: ch.Expr, total: ch.Expr, before: ch.Expr, behind: ch.Expr, is_some: ch.Value) -> None:
        """The lots that have blocks `before` to `behind` of an M-tile's `total`; one at least, unless rounding left the
        slice no windows."""
        lots = ch.const(ty.u32, ch.maximum((total + (LOT_BLOCKS - 1)) // LOT_BLOCKS, 1), name="lots")
        first = ch.const(ty.u32, ch.minimum(before // LOT_BLOCKS, lots - 1), name="first_lot")
        end = ch.select(is_some, ch.maximum((behind + (LOT_BLOCKS - 1)) // LOT_BLOCKS, first + 1), first)
        with ch.for_(first, end, unroll=1, name="lot") as lot:
            blocks = ch.minimum(total - lot * LOT_BLOCKS, LOT_BLOCKS)
            size = ch.const(ty.u32, blocks * BF16.tile_bytes + LOT_LINE_BYTES, name="size")
            source = self.first_byte + ty.u64(begin + lot * LINES_OF_LOT) * LOT_LINE_BYTES
            with self.ring.fill(size, 1, self.in_flight) as (destination, barrier):
                prim.bulk_copy(destination, source, size, barrier)
