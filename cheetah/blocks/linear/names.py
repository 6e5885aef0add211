"""The matrices of a kernel with their sizes under names in its text."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from cheetah import lang as ch
from cheetah.blocks.linear.formats.names import format_with_names
from cheetah.plan import MatrixLayout, StepMatrices


def with_names(matrices: StepMatrices, stage_bytes: int) -> StepMatrices:
    """The matrices with their sizes under names in the text; stage_bytes: of most chunks."""
    listed = [_with_names(layout, stage_bytes) for layout in matrices]
    return replace(matrices, of_layer=tuple(listed[:-1]), head=listed[-1])


def _with_names(layout: MatrixLayout, stage_bytes: int) -> MatrixLayout:
    name = layout.name.upper()
    is_usual = layout.stage_bytes == stage_bytes
    chunk_bytes = stage_bytes if is_usual else ch.named(f"{name}_CHUNK_BYTES", layout.stage_bytes)
    rows, start = ch.named(f"{name}_ROWS", layout.rows), ch.named(f"{name}_START", layout.start)
    return replace(layout, rows=rows, start=start, stage_bytes=chunk_bytes, format=format_with_names(layout.format))


def with_all_names(matrices: StepMatrices, stage_bytes: int) -> StepMatrices:
    """The same with names for what follows from those sizes too; for kernels that have no records of matrices."""
    named = with_names(matrices, ch.named("CHUNK_BYTES", stage_bytes))
    listed = [NamedLayout.of(layout) for layout in named]
    return replace(named, of_layer=tuple(listed[:-1]), head=listed[-1])


@dataclass(frozen=True)
class NamedLayout(MatrixLayout):
    """A `MatrixLayout` whose derived sizes have names."""

    @classmethod
    def of(cls, layout: MatrixLayout) -> NamedLayout:
        sizes = {one.name: getattr(layout, one.name) for one in fields(layout)}
        return cls(**{**sizes, "blocks": ch.named("BLOCKS", layout.blocks)})

    def called(self, what: str, size: int) -> int:
        """A size of it, under a name."""
        return ch.named(f"{self.name.upper()}_{what}", size)

    @property
    def k_tiles(self) -> int:
        return self.called("K_TILES", super().k_tiles)

    @property
    def padded_columns(self) -> int:
        return self.called("COLUMNS", super().padded_columns)

    @property
    def m_tile_bytes(self) -> int:
        return self.called("M_TILE_BYTES", super().m_tile_bytes)

    @property
    def last_chunk_bytes(self) -> int:
        return self.called("LAST_CHUNK_BYTES", super().last_chunk_bytes)

    @property
    def last_wave_width(self) -> int:
        return self.called("LAST_WAVE_WIDTH", super().last_wave_width)

    @property
    def last_chunk_tiles(self) -> int:
        return int(super().last_chunk_tiles)
