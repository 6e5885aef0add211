"""The numbers of a model that the plan needs; nothing of where they come from."""

from dataclasses import dataclass

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import BF16, M_TILE_ROWS, VECTOR_COLUMNS, TileFormat, tile_format
from cheetah.plan.index import ceil_div

MATRICES = ("qkv", "o", "gate_up", "down", "lm_head")
"""The matrices of a step that have a weight format each."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder, in elements: `heads` query heads share `kv_heads` KV heads of `head_dim`.

    formats: (matrix, weight format) of the matrices that are not bf16.
    """

    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    formats: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        require_positive("ModelShape", **{name: value for name, value in vars(self).items() if name != "formats"})
        for matrix, _ in self.formats:
            self.format_of(matrix)
        if self.heads % self.kv_heads:
            raise PlanError(
                f"ModelShape: {self.heads} heads on {self.kv_heads} KV heads: heads must be a multiple of kv_heads"
            )
        if self.head_dim % M_TILE_ROWS:
            raise PlanError(
                f"ModelShape: head_dim is {self.head_dim}: give a multiple of {M_TILE_ROWS} (whole M-tiles a head)"
            )

    def format_of(self, matrix: str) -> TileFormat:
        """The weight format of a matrix."""
        return tile_format(dict(self.formats).get(matrix, BF16.name))

    @property
    def tile_formats(self) -> tuple[TileFormat, ...]:
        """The weight formats of the matrices, each once."""
        named = dict(self.formats)
        return tuple(dict.fromkeys(tile_format(named.get(matrix, BF16.name)) for matrix in MATRICES))

    def describe(self) -> dict[str, int | str]:
        """The sizes by name, and the formats of matrices that are not bf16."""
        sizes = {name: value for name, value in vars(self).items() if name != "formats"}
        return {**sizes, **{f"{matrix} in": name for matrix, name in self.formats}}

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def query_rows(self) -> int:
        """Width of the attention output: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the joined query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def padded_hidden(self) -> int:
        """`hidden` rounded up to whole K-tiles: the row length of norms and embedding."""
        return _padded(self.hidden)

    @property
    def padded_query_rows(self) -> int:
        return _padded(self.query_rows)

    @property
    def padded_ffn(self) -> int:
        return _padded(self.ffn)

    @property
    def widest_vector(self) -> int:
        """Elements of the longest input of a matrix, padded."""
        return max(self.padded_hidden, self.padded_query_rows, self.padded_ffn)


def _padded(columns: int) -> int:
    return ceil_div(columns, VECTOR_COLUMNS) * VECTOR_COLUMNS
