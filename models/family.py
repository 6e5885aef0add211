"""What passes between a family of models (`cheetah.models.dense.family`) and who asks it: weights as they are read and
packed, and phases as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from cheetah.models.formats.lists import ListedRows
from cheetah.models.formats.quantized import Order, QuantizationScheme, QuantizedRows
from cheetah.models.repacking import Repacker
from cheetah.models.rounding import Bits, Bytes
from cheetah.piece_ring import Lend, ordinary_memory
from cheetah.stopwatch import Stopwatch


@dataclass(frozen=True)
class Merged:
    """A tensor of a file in which others lie one behind the other. shape: its own; parts: their names and shapes.
    is_transposed: each lies there with rows and columns exchanged."""

    shape: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]
    is_transposed: bool = False


SHOWN_RUNS = 4
"""So many runs of layers are written out."""


class PhaseRow(NamedTuple):
    """A phase of a kernel as people read it. when: in which layers it comes, or "once"; waits, makes: vectors that all
    blocks make and all need; matrix: whose product it is, with its rows, columns and format."""

    when: str
    name: str
    waits: str
    matrix: str
    makes: str
    about: str


def layers_text(layers: Sequence[int]) -> str:
    """What a phase says of the layers that have it, in rising order: of many runs the first two and the last."""
    ends = [place for place, one in enumerate(layers) if place + 1 == len(layers) or layers[place + 1] != one + 1]
    runs = [(layers[begin], layers[end]) for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    texts = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs]
    return "layers " + ", ".join(texts if len(texts) <= SHOWN_RUNS else [*texts[:2], "...", texts[-1]])


def lines_of(rows: Iterable[PhaseRow]) -> Iterator[str]:
    """Phases with their columns below one another, under the names of the columns."""
    whole = [PhaseRow(*PhaseRow._fields), *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*whole, strict=True)]
    for row in whole:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


class MatrixRows(Protocol):
    """A matrix that is read in parts, as bf16 bits: an array, or what reads or makes its rows when they are asked for.

    What it gives may be overwritten when the same thread asks for other rows, of this or another matrix. One that lies
    in a file says so as `stored`, a `cheetah.models.repacking.StoredMatrix`.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, part: slice) -> Bits: ...


class QuantizedMatrix(Protocol):
    """As `MatrixRows`, a matrix whose rows are quantised. order: of its columns, where groups that lie side by side are
    of columns that do not; None: it is that of the module."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def scheme(self) -> QuantizationScheme: ...

    @property
    def order(self) -> Order | None: ...

    def __getitem__(self, part: slice) -> QuantizedRows | ListedRows: ...


ReadTensor = Callable[[str], NDArray[Any]]
"""A tensor's name -> its bf16 bits, uint16; of a quantised matrix what it stands for, float32."""
ReadRows = Callable[[str], MatrixRows | QuantizedMatrix]
WriteBytes = Callable[[str, int, Bytes], None]
Progress = Callable[[int], None]
Tensors = Mapping[str, NDArray[Any]] | Callable[[str], NDArray[Any]]


@dataclass(frozen=True)
class Packing:
    """Where weights come from, and where their packed bytes go: `write(buffer, byte offset, uint8 [n])`.

    The array given to `write` is valid only until it returns: its memory is used again. rows: gives a matrix that is
    read in parts, in several threads; by default `tensor` does. rank: of the GPUs that have a part of each matrix, the
    one whose parts are packed. is_fused: whether the rows of fused routers are wanted (`Plan.fused_router`). progress:
    gets the bytes just written. threads: by default one a processor, at most 8. lend: where the memory for pieces comes
    from. repacker: packs what lies in files as it can be packed there, if it has room for what goes up. watch: takes
    the seconds of all threads that read and that pack, and those of the calling one that waits for them and that
    uploads.
    """

    tensor: ReadTensor
    write: WriteBytes
    progress: Progress = lambda nbytes: None
    rows: ReadRows | None = None
    rank: int = 0
    is_fused: bool = False
    threads: int | None = None
    lend: Lend = ordinary_memory
    repacker: Repacker | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
