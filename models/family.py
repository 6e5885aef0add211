"""What a family of models gives to the generator, the runtime, the tools and the command line.

They know a model as a `ModelConfig` and ask everything else of its family (`cheetah.models.registry.family_of`): which
tensors a checkpoint has, how they become the kernel's buffers, the kernel itself, and its meaning in float32. Dense
decoders share one implementation, `cheetah.models.dense.family`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.exchanged import ExchangedVector
from cheetah.models.formats.lists import ListedRows
from cheetah.models.formats.quantized import Order, QuantizationScheme, QuantizedRows
from cheetah.models.repacking import Repacker
from cheetah.models.rounding import F32, Bits, Bytes, Rounding, exact
from cheetah.piece_ring import Lend, ordinary_memory
from cheetah.plan import Gpu, Plan, SharedMap, StepMatrices
from cheetah.plan.products import ROUTER
from cheetah.plan.prompt import PassPlan
from cheetah.stopwatch import Stopwatch


@dataclass(frozen=True)
class Merged:
    """A tensor of a file in which others lie one behind the other. shape: its own; parts: their names and shapes.
    is_transposed: each lies there with rows and columns exchanged."""

    shape: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]
    is_transposed: bool = False


class PhaseRow(NamedTuple):
    """A phase of a kernel as people read it. when: in which layers it comes, or "once"; waits, makes: vectors that all
    blocks make and all need; matrix: whose product it is, with its rows, columns and format."""

    when: str
    name: str
    waits: str
    matrix: str
    makes: str
    about: str


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


class StepProgram(Protocol):
    """The module with a family's decode step: what the generator makes a kernel's text and manifest of."""

    KERNEL_NAME: str

    def build_kernel(self, config: ModelConfig, gpu: Gpu, plan: Plan, traced: bool = False) -> Any:
        """The kernel, a `cheetah.lang.Kernel`. traced: with time stamps of every block and phase, in a timeline."""

    def kernel_parameters(
        self, config: ModelConfig, plan: Plan, traced: bool = False, ranks: int = 1
    ) -> Mapping[str, Any]:
        """Its parameters by name, each a `cheetah.package.KernelParameter`."""

    def sizes(self, config: ModelConfig, gpu: Gpu, plan: Plan) -> dict[str, int]:
        """The sizes that the parameters' shapes name."""

    def phase_names(self, config: ModelConfig, plan: Plan) -> tuple[str, ...]:
        """The phases of a step, as the kernel counts them for reports."""

    def phase_rows(self, config: ModelConfig, plan: Plan) -> tuple[PhaseRow, ...]:
        """The same, as people read them."""

    def exchanged_vectors(self, config: ModelConfig, gpu: Gpu, plan: Plan) -> tuple[ExchangedVector, ...]:
        """What the phases of a layer publish, in their order, and where that lies in the kernel's buffer `exchange`."""


class HeadProgram(Protocol):
    """The module with a family's head by itself, over `rows` hidden states that passes over prompts leave: the steps of
    `plan` without the layers."""

    KERNEL_NAME: str

    def build_kernel(self, config: ModelConfig, gpu: Gpu, plan: Plan, rows: int) -> Any:
        """The kernel, a `cheetah.lang.Kernel`."""

    def kernel_parameters(self, config: ModelConfig, plan: Plan, ranks: int = 1) -> Mapping[str, Any]:
        """Its parameters by name, each a `cheetah.package.KernelParameter`."""

    def sizes(self, config: ModelConfig, gpu: Gpu, plan: Plan, rows: int) -> dict[str, int]:
        """The sizes that the parameters' shapes name."""

    def phase_names(self, config: ModelConfig, plan: Plan) -> tuple[str, ...]:
        """The phases of a step, as the kernel counts them for reports."""


class PromptProgram(Protocol):
    """The module with a family's pass over prompts, which leaves their keys and values in the cache of a decode step's
    kernel, from the same weights: that kernel's plan is `plan`."""

    KERNEL_NAME: str

    def build_kernel(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan, traced: bool = False) -> Any:
        """The kernel, a `cheetah.lang.Kernel`. PlanError where there can be none, with the reason."""

    def pass_parameters(
        self, config: ModelConfig, plan: Plan, traced: bool = False, ranks: int = 1
    ) -> Mapping[str, Any]:
        """Its parameters by name, each a `cheetah.package.KernelParameter`. traced: with a timeline."""

    def sizes(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> dict[str, int]:
        """The sizes that the parameters' shapes name."""

    def shared(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> SharedMap:
        """The arena of a block."""

    def phase_names(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> tuple[str, ...]:
        """The phases of a launch: its blocks meet behind each."""

    def rows_of_keys(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> list[slice]:
        """The bytes of the workspace that hold keys, and those that hold values."""

    def exchanged_vectors(
        self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan
    ) -> tuple[ExchangedVector, ...]:
        """Where the vectors that phases hand on lie in the workspace, in the order of phases; of some phases none."""

    def cuts(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> dict[str, tuple[int | None, int]]:
        """How each product of a layer is cut, by its name: M-tiles of its tiles, None where they are as many as there
        is room for, and parts of k. PlanError where there can be no pass, with the reason."""

    def phase_rows(self, config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> tuple[PhaseRow, ...]:
        """The same, as people read them. PlanError where there can be no pass, with the reason."""


class ReferenceModel(Protocol):
    """A model's meaning: float32 numpy, one sequence with its cache."""

    keys: F32
    values: F32
    length: int
    nearness: list[float]
    """Of every token of late, how near another choice of experts was, in standard deviations of logits."""
    exchanged: list[dict[str, F32]]
    """Of the last token, not rounded, the vectors that phases exchange by name: of the embedding, of every layer."""
    left: list[F32]
    """Of the last token, not rounded, what each layer leaves of the residual stream [hidden]."""

    def reset(self) -> None: ...

    def step(self, token: int) -> F32: ...

    def forward(self, ids: Sequence[int]) -> F32: ...

    def generate(
        self,
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Iterable[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]: ...


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


class ModelFamily(ABC):
    """A family: its configurations, and what is made of one."""

    config_type: type[ModelConfig]
    presets: Mapping[str, ModelConfig]
    embedding_tensor: str
    head_tensor: str
    unread: tuple[str, ...] = ()
    """What names begin with of tensors that a file may have and nobody reads."""
    kept_exact: tuple[str, ...] = ()
    """What names end with of tensors whose numbers are taken as they are stored, while others are rounded to bf16."""

    @property
    def name(self) -> str:
        """model_type in config.json."""
        return self.config_type.dialect.model_type

    @abstractmethod
    def tensor_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint must hold, with its shape ([out, in], row-major). A tied head is not among them."""

    def merged_tensors(self, config: ModelConfig) -> dict[str, Merged]:
        """Tensors that a checkpoint may have in the place of those of `tensor_shapes`, or of their quantised parts."""
        return {}

    @abstractmethod
    def shape_meaning(self, tensor: str) -> str:
        """What of config.json makes a tensor's shape, for messages."""

    @abstractmethod
    def layer_of(self, tensor: str) -> int | None:
        """The layer that a tensor of this name would belong to; None for one of no layer."""

    @abstractmethod
    def matrix_modules(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """The linear layers that make each matrix, as checkpoints name them; `{layer}` stands for a layer's number,
        `{expert}` for an expert's. A tied head is no linear layer."""

    @abstractmethod
    def in_m_tile_order(
        self, config: ModelConfig, matrix: str, layer: int, read: Callable[[str], NDArray[Any]]
    ) -> NDArray[Any]:
        """Rows of a matrix that is no expert's as they are packed, up to whole M-tiles, with zeros behind the last; of
        what `read` gives of its weights: [rows, any columns]."""

    def routers(self, config: ModelConfig) -> tuple[str, ...]:
        """The linear layers that choose among experts, below a layer."""
        names = self.matrix_modules(config).get(ROUTER, ())
        return tuple(name.partition("{layer}.")[2] for name in names)

    @abstractmethod
    def matrices(self, config: ModelConfig, plan: Plan, gpu: Gpu) -> StepMatrices:
        """Where the matrices of a step lie in the buffer `weights`."""

    @abstractmethod
    def model_buffers(self, config: ModelConfig) -> tuple[str, ...]:
        """The kernel's buffers that hold the model: filled once, by `tables` and `pack_weights`, and never written."""

    @abstractmethod
    def tables(self, config: ModelConfig, plan: Plan) -> dict[str, NDArray[Any]]:
        """What the kernel reads beside the checkpoint's tensors, by buffer: the rotary table and the like."""

    @abstractmethod
    def pack_weights(self, config: ModelConfig, matrices: StepMatrices, packing: Packing) -> None:
        """Pack every tensor and hand the bytes out, in the calling thread."""

    @property
    @abstractmethod
    def program(self) -> StepProgram:
        """The decode step. The generator alone asks for it: the runtime works without the language."""

    @property
    @abstractmethod
    def prompt_program(self) -> PromptProgram:
        """The pass over prompts, asked for as `program` is."""

    @property
    @abstractmethod
    def head_program(self) -> HeadProgram:
        """The head by itself, asked for as `program` is."""

    @abstractmethod
    def reference(
        self,
        config: ModelConfig,
        tensors: Tensors,
        rounding: Rounding = exact,
        *,
        cached: Rounding | None = None,
        kv_scales: F32 | None = None,
    ) -> ReferenceModel:
        """The meaning. rounding: applied where a bf16 implementation must round; by default nowhere. cached: applied to
        keys and values in its place, over kv_scales (f32 [layers, 2, kv_heads])."""
