"""A compiled kernel as data, and its place in the cache on disk. Knows nothing of compilers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cheetah import caches
from cheetah.manifest import write_atomically
from cheetah.records import record_from_json
from cheetah.untrusted import UnreadableError, read_bytes, read_json

REPORT_BYTES, CUBIN_BYTES = 100_000, 100_000_000
"""Most bytes of an entry's two files: a report has 1000, the largest cubin 300,000."""


@dataclass(frozen=True)
class ResourceReport:
    """What one thread or block of a kernel needs, as ptxas counted it; bytes are per thread but for shared_bytes.

    shared_bytes: static shared memory of a block (the launch adds its dynamic part).
    stack_bytes: local memory of the kernel and what it calls; 0 means every value lives in a register.
    in_series: whether ptxas lets no two `wgmma` be under way together (C7512, C7513), for want of registers or since it
    cannot follow those that they read: a pass over prompts waits for each of its products then.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    in_series: bool = False

    @property
    def uses_local_memory(self) -> bool:
        """True if any value of a thread lies in local memory: a spill, or an array that is indexed at run time."""
        return self.stack_bytes + self.spill_store_bytes + self.spill_load_bytes > 0

    def __str__(self) -> str:
        spills = f"{self.spill_store_bytes} + {self.spill_load_bytes} bytes spilled (stores + loads)"
        local = (
            f"{self.stack_bytes} bytes of stack, {spills}" if self.uses_local_memory else "no spills, no local memory"
        )
        series = ", products one by one (wgmma in series)" if self.in_series else ""
        return f"{self.registers} registers, {self.shared_bytes} bytes of static shared memory, {local}{series}"


@dataclass(frozen=True)
class CubinReport:
    """What the cache keeps beside a cubin."""

    kernel: str
    compiler: str
    flags: tuple[str, ...]
    seconds: float
    resources: ResourceReport
    cubin_sha256: str


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel. path: where the cache holds it, or None where the cache could not be written."""

    kernel: str
    image: bytes
    compiler: str
    flags: tuple[str, ...]
    resources: ResourceReport
    seconds: float
    cached: bool
    path: Path | None


@dataclass(frozen=True)
class CacheEntry:
    """One kernel's place in the cache: NAME-KEY.cubin, and NAME-KEY.json that tells its hash, compiler and resources.

    A cubin counts only with a JSON that has its hash, and the JSON is written last: half an entry is no entry.
    """

    folder: Path
    stem: str
    kernel: str

    @classmethod
    def of(cls, cache: Path, text: str, kernel: str, flags: Sequence[str], version: str) -> CacheEntry:
        """The entry for these inputs: any change of text, kernel, flags or compiler version is another entry."""
        key = hashlib.sha256(json.dumps([text, kernel, list(flags), version]).encode()).hexdigest()
        return cls(cache / "cubin", f"{kernel[:60]}-{key[:32]}", kernel)

    @property
    def cubin_path(self) -> Path:
        return self.folder / f"{self.stem}.cubin"

    @property
    def report_path(self) -> Path:
        return self.folder / f"{self.stem}.json"

    def load(self, say: Callable[[str], None] = lambda line: None) -> Cubin | None:
        """The cached cubin, or None where there is none, or it is damaged: that is said, and it is compiled again."""
        if not os.path.lexists(self.report_path):
            return None
        try:
            data = read_json(self.report_path, REPORT_BYTES)
            report = record_from_json(CubinReport, data, str(self.report_path), UnreadableError)
            image = read_bytes(self.cubin_path, CUBIN_BYTES)
            if hashlib.sha256(image).hexdigest() != report.cubin_sha256:
                raise UnreadableError(f"{self.cubin_path}: is not the cubin that {self.report_path.name} describes")
        except UnreadableError as problem:
            say(f"{self.kernel}: what the cache holds is not used: {problem}")
            return None
        resources, flags = report.resources, report.flags
        return Cubin(self.kernel, image, report.compiler, flags, resources, report.seconds, True, self.cubin_path)

    def store(self, cubin: Cubin) -> None:
        """Keep `cubin`; OSError if the folder cannot be written."""
        sha256 = hashlib.sha256(cubin.image).hexdigest()
        seconds = round(cubin.seconds, 3)
        report = CubinReport(cubin.kernel, cubin.compiler, cubin.flags, seconds, cubin.resources, sha256)
        write_atomically(self.cubin_path, cubin.image)
        write_atomically(self.report_path, (json.dumps(dataclasses.asdict(report), indent=2) + "\n").encode())

    def lock(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Hold this entry against other processes, see `caches.held`."""
        return caches.held(self.folder / f"{self.stem}.lock", on_wait)
