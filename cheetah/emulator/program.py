"""A compiled kernel text in this process, and launching it: checks the arguments, calls the C interface, reports.

The C side is `runtime/launch.h`; `_Launch` and `_Buffer` are its structures, field by field.
"""

import ctypes
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cheetah.emulator.errors import Deadlock, EmulatorError, Misuse, SwitchLimit, TimeLimit
from cheetah.errors import CheetahError
from cheetah.manifest import of_peer

SCHEDULERS = ("round_robin", "random", "priority")

Argument = np.ndarray | int | float | None
Extent = int | tuple[int, ...]

_OUTCOMES: dict[int, type[EmulatorError]] = {1: Deadlock, 2: Misuse, 3: SwitchLimit, 4: TimeLimit}
_REPORT_BYTES = 1 << 16
_SCALARS: "dict[str, type[ctypes._SimpleCData[Any]]]" = {
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


OVERWRITTEN = np.dtype([("buffer", np.uint32), ("word", np.uint32), ("before", np.uint32)])
"""The number of an array, of a word in it, and the word."""


@dataclass(frozen=True)
class LaunchStats:
    """What a launch did: fibre switches, rendezvous of warps, bulk copies and their bytes, wall-clock seconds.

    most_chunks: the most chunks that one block had under way at once (what `bulk_copy` brings to an mbarrier).
    overwritten: of each rank's array that was noted, the 4-byte words that were stored to, in their order, and what
    they held before: records (OVERWRITTEN).
    """

    switches: int
    collectives: int
    copies: int
    copied_bytes: int
    most_chunks: int
    seconds: float
    overwritten: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its name and its C type, such as "const uint8_t*" or "uint32_t"."""

    name: str
    ctype: str

    @property
    def is_pointer(self) -> bool:
        return "*" in self.ctype

    @property
    def is_const(self) -> bool:
        return self.ctype.split("*")[0].split().count("const") > 0


@dataclass(frozen=True)
class LaunchShape:
    """Grid and block in three dimensions, the schedule, and what is forbidden, all checked."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    scheduler: int
    seed: int
    switch_limit: int
    chunk_limit: int
    poisoned: Mapping[str, int]
    noted: str = ""


class Program(ABC):
    """A kernel compiled for the emulator. `launch` may be called any number of times."""

    def __init__(self, kernel: str, parameters: Sequence[tuple[str, str]], path: Path) -> None:
        self.kernel = kernel
        self.parameters = tuple(Parameter(name, ctype) for name, ctype in parameters)
        self.path = path

    def launch(
        self, grid: Extent, block: Extent, shared_bytes: int, arguments: Sequence[Argument], **how: Any
    ) -> LaunchStats:
        """`launch_together` on one GPU."""
        return self.launch_together(grid, block, shared_bytes, [arguments], **how)

    def launch_together(
        self,
        grid: Extent,
        block: Extent,
        shared_bytes: int,
        arguments: Sequence[Sequence[Argument]],
        *,
        scheduler: str = "round_robin",
        seed: int = 0,
        switch_limit: int | None = None,
        chunk_limit: int | None = None,
        poisoned: Mapping[str, int] | None = None,
        noted: str = "",
        timeout_s: float | None = None,
        watch: Callable[[], None] | None = None,
    ) -> LaunchStats:
        """Runs the kernel to its end on some GPUs (ranks) at once, of each of which this is the grid; arrays are read
        and written in place.

        `arguments` has a list for each rank that follows the parameters: an array or None (null) for a pointer, a
        number for a scalar. Arrays are C-contiguous; addresses are theirs, so `allocate` gives arrays aligned as a GPU
        allocation is. An array that a `peer_parameter` of the manifest names is another rank's, to which words may be
        published; they land later, in any order but each word's own. One that several ranks are given is everybody's.
        `scheduler` is one of SCHEDULERS; equal seeds give equal schedules. `switch_limit` bounds fibre switches,
        `chunk_limit` the chunks that a block has under way. `poisoned`: by parameter, the word (u32) that stands in
        the array where nobody may read with `load_constant_u32`. `noted`: the parameter of an array of which each store
        is noted (of watched programs), see `LaunchStats.overwritten`.
        Raises Deadlock, Misuse, Race, SwitchLimit or TimeLimit with a report, CheetahError for wrong arguments. `watch`
        is called every few milliseconds (not of a sanitized program); what it raises, and KeyboardInterrupt, ends the
        launch where it is. The next one starts afresh, whatever this one left in the arrays.
        """
        _check_shape(block, shared_bytes, scheduler)
        shape = LaunchShape(
            *(
                _three("grid", grid),
                _three("block", block),
                shared_bytes,
                SCHEDULERS.index(scheduler),
                seed % (1 << 64),
            ),
            *(switch_limit or 0, chunk_limit or 0, poisoned or {}, noted),
        )
        for of_rank in arguments:
            if len(of_rank) != len(self.parameters):
                wanted = ", ".join(p.name for p in self.parameters)
                raise CheetahError(
                    f"kernel {self.kernel} takes {len(self.parameters)} arguments ({wanted}), got {len(of_rank)}"
                )
            for parameter, argument in zip(self.parameters, of_rank, strict=True):
                _check(self.kernel, parameter, argument)
        return self._run(shape, arguments, timeout_s, watch)

    @abstractmethod
    def _run(
        self,
        shape: LaunchShape,
        arguments: Sequence[Sequence[Argument]],
        timeout_s: float | None,
        watch: Callable[[], None] | None,
    ) -> LaunchStats: ...


_one_launch = threading.Lock()
"""Held by the launch that runs: the handlers of faults are the process's, the stacks a library's."""


class LoadedProgram(Program):
    """A program loaded into this process. Launches in one process run one after the other, from whatever thread."""

    def __init__(self, kernel: str, parameters: Sequence[tuple[str, str]], path: Path) -> None:
        super().__init__(kernel, parameters, path)
        self._library = ctypes.CDLL(str(path))
        self._library.cheetah_emulator_launch.argtypes = [ctypes.POINTER(_Launch)]
        self._library.cheetah_emulator_launch.restype = None
        weakref.finalize(self, _release, self._library)

    def _run(
        self,
        shape: LaunchShape,
        arguments: Sequence[Sequence[Argument]],
        timeout_s: float | None,
        watch: Callable[[], None] | None,
    ) -> LaunchStats:
        pairs = [list(zip(self.parameters, of_rank, strict=True)) for of_rank in arguments]
        values = [_value(parameter, argument) for of_rank in pairs for parameter, argument in of_rank]
        arrays = _arrays(pairs)
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        with _one_launch:
            poll = _Poll(timeout_s, watch)  # waiting for one's turn takes nothing of the time limit
            launch = _launch_structure(shape, values, arrays, poll, report, len(arguments))
            started = time.perf_counter()
            self._library.cheetah_emulator_launch(ctypes.byref(launch))
            seconds = time.perf_counter() - started
            overwritten = _overwritten(launch, shape, arrays)
        if poll.interruption is not None:
            raise poll.interruption
        raise_for_outcome(launch.outcome, report.value.decode(errors="replace"))
        counts = (launch.switches, launch.collectives, launch.copies, launch.copied_bytes, launch.most_chunks)
        return LaunchStats(*counts, seconds, overwritten)


def _overwritten(launch: "_Launch", shape: LaunchShape, arrays: "Sequence[_Array]") -> dict[int, np.ndarray]:
    """Of every rank, while nobody else launches."""
    if not shape.noted:
        return {}
    nbytes = launch.overwritten_count * OVERWRITTEN.itemsize
    records = np.frombuffer(ctypes.string_at(launch.overwritten, nbytes), OVERWRITTEN)
    numbers = {one.rank: number for number, one in enumerate(arrays) if one.name == shape.noted}
    return {rank: records[records["buffer"] == number] for rank, number in numbers.items()}


def _release(library: ctypes.CDLL) -> None:
    """Gives the memory of a library's stacks back, unless a launch runs: a program may be collected in the middle of
    one, by the very thread that launched it, and its library may be another program's too."""
    if _one_launch.acquire(blocking=False):
        try:
            library.cheetah_emulator_release()
        finally:
            _one_launch.release()


def allocate(shape: Extent, dtype: object, fill: int = 0xFF) -> np.ndarray:
    """A new array, 256-byte aligned as a GPU allocation is, each byte `fill` (0xFF: NaN in bf16 and float)."""
    wanted = np.dtype(dtype)  # type: ignore[call-overload]
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    memory = np.full(count * wanted.itemsize + 256, fill, dtype=np.uint8)
    start = -memory.ctypes.data % 256
    array: np.ndarray = memory[start : start + count * wanted.itemsize].view(wanted).reshape(shape)
    return array


def scalar_bytes(parameter: Parameter, value: int | float) -> bytes:
    """The eight bytes in which a scalar argument travels, zero-padded."""
    return bytes(_scalar(parameter, value)).ljust(8, b"\0")


def raise_for_outcome(outcome: int, report: str) -> None:
    """Raises the error that an outcome of the C side stands for; returns when it is "done"."""
    if outcome:
        raise _OUTCOMES[outcome](f"{_OPENINGS[outcome]}{report.strip()}")


_OPENINGS = {
    1: "deadlock: no thread can go on\n",
    2: "",
    3: "the switch limit is reached\n",
    4: "the time limit is reached\n",
}


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("poison", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("has_peers", ctypes.c_uint32),
        ("is_noted", ctypes.c_uint64),
    ]


_POLL = ctypes.CFUNCTYPE(ctypes.c_int)


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("scheduler", ctypes.c_uint32),
        ("buffer_count", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("switch_limit", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("poll", _POLL),
        ("outcome", ctypes.c_uint32),
        ("chunk_limit", ctypes.c_uint32),
        ("most_chunks", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("switches", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("copied_bytes", ctypes.c_uint64),
        ("report", ctypes.c_void_p),
        ("report_bytes", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64),
        ("overwritten", ctypes.c_void_p),
        ("overwritten_count", ctypes.c_uint64),
    ]


class _Poll:
    """Looks every few milliseconds whether the time is over, or the caller or Ctrl-C wants the launch to end."""

    def __init__(self, timeout_s: float | None, watch: Callable[[], None] | None) -> None:
        self.interruption: BaseException | None = None
        self._watch = watch
        self._deadline = None if timeout_s is None else time.perf_counter() + timeout_s
        self.callback: Callable[[], int] = _POLL(self._poll)

    def _poll(self) -> int:
        try:
            if self._watch is not None:
                self._watch()
            return int(self._deadline is not None and time.perf_counter() > self._deadline)
        except BaseException as interruption:
            self.interruption = interruption
            return 1


def _launch_structure(
    shape: LaunchShape,
    values: "Sequence[ctypes._SimpleCData[Any]]",
    arrays: "Sequence[_Array]",
    poll: _Poll,
    report: ctypes.Array[ctypes.c_char],
    ranks: int,
) -> _Launch:
    """The C structure; it keeps what it points to alive, but for the arrays and the report."""
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    buffers = (_Buffer * max(1, len(arrays)))(
        *(
            _Buffer(
                *(one.array.ctypes.data, one.array.nbytes, one.name.encode(), _poison(shape, one.name)),
                *(one.rank, one.has_peers, one.name == shape.noted),
            )
            for one in arrays
        )
    )
    return _Launch(
        grid=shape.grid,
        block=shape.block,
        shared_bytes=shape.shared_bytes,
        scheduler=shape.scheduler,
        buffer_count=len(arrays),
        seed=shape.seed,
        switch_limit=shape.switch_limit,
        chunk_limit=shape.chunk_limit,
        arguments=pointers,
        buffers=buffers,
        poll=poll.callback,
        report=ctypes.addressof(report),
        report_bytes=len(report),
        ranks=ranks,
        parameters=len(values) // ranks,
    )


EVERY_RANK = 2**32 - 1


@dataclass
class _Array:
    """An array of a launch: whose it is, and whether other ranks have its address."""

    name: str
    array: np.ndarray
    rank: int
    has_peers: bool = False


def _arrays(arguments: "Sequence[Sequence[tuple[Parameter, Argument]]]") -> list[_Array]:
    """Each array once. One that several ranks are given, and not as that of a peer, is everybody's."""
    own: dict[int, _Array] = {}
    peers = set[int]()
    for rank, pairs in enumerate(arguments):
        for parameter, argument in pairs:
            if not isinstance(argument, np.ndarray):
                continue
            address = argument.ctypes.data
            if of_peer(parameter.name) is not None:
                peers.add(address)
                continue
            known = own.get(address) if len(arguments) > 1 else None
            if known is None or known.array.nbytes != argument.nbytes:
                own[address if len(arguments) > 1 else len(own)] = _Array(parameter.name, argument, rank)
            elif known.rank != rank:
                known.rank = EVERY_RANK
    for address, one in own.items():
        one.has_peers = address in peers
    return list(own.values())


def _poison(shape: LaunchShape, name: str) -> int:
    """The poisoned word with a bit above it, or 0 where the array has none."""
    return shape.poisoned[name] & 0xFFFFFFFF | 1 << 32 if name in shape.poisoned else 0


def _value(parameter: Parameter, argument: Argument) -> "ctypes._SimpleCData[Any]":
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if argument is None:
        return ctypes.c_void_p(None)
    return _scalar(parameter, argument)


def _scalar(parameter: Parameter, value: int | float) -> "ctypes._SimpleCData[Any]":
    ctype = _SCALARS[parameter.ctype.replace("const ", "").strip()]
    return ctype(float(value) if ctype in (ctypes.c_float, ctypes.c_double) else int(value))


def _check(kernel: str, parameter: Parameter, argument: Argument) -> None:
    place = f"kernel {kernel}, parameter {parameter.name} ({parameter.ctype})"
    if not parameter.is_pointer:
        _check_scalar(place, parameter, argument)
    elif isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise CheetahError(f"{place}: the array is not C-contiguous; pass np.ascontiguousarray of it")
        if not (parameter.is_const or argument.flags.writeable):
            raise CheetahError(f"{place}: the array is read-only, but the kernel may write it; pass a copy")
    elif argument is not None:
        raise CheetahError(f"{place}: wants an array or None, got {type(argument).__name__}")


def _check_scalar(place: str, parameter: Parameter, argument: Argument) -> None:
    if parameter.ctype.replace("const ", "").strip() not in _SCALARS:
        raise CheetahError(f"{place}: scalars of this type cannot be passed; use one of {', '.join(_SCALARS)}")
    if argument is None or isinstance(argument, np.ndarray):
        raise CheetahError(f"{place}: wants a number, got {type(argument).__name__}")


def _check_shape(block: Extent, shared_bytes: int, scheduler: str) -> None:
    if scheduler not in SCHEDULERS:
        raise CheetahError(f"no scheduler {scheduler!r}; there are {', '.join(SCHEDULERS)}")
    threads = math.prod(_three("block", block))
    if threads > 1024:
        raise CheetahError(f"{threads} threads in a block; a block has at most 1024")
    if shared_bytes < 0:
        raise CheetahError(f"{shared_bytes} bytes of shared memory")


def _three(what: str, extent: Extent) -> tuple[int, int, int]:
    sizes = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise CheetahError(f"{what} {extent}: wants one to three positive sizes")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
