"""What a checkpoint's configuration says of its quantised modules: which they are, and how each is stored.

A *module* is a linear layer by its name ("model.layers.0.mlp.down_proj"). Tensors are not known here; what they have
to be for each `Storage` stands in `cheetah.runtime.checkpoint.quantized`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cheetah.models.config_json import ConfigError
from cheetah.models.formats import sparse_name
from cheetah.models.formats.quantized import QuantizationScheme
from cheetah.printable import shown

LINEAR = "Linear"
"""The class of every matrix of a decoder, as compressed-tensors names targets."""
EXPRESSION = "re:"
MOST_CHARACTERS = 200
MOST_REPETITIONS = 4
"""Repetitions of a regular expression, none of them of a group: what matching may cost is bounded by it."""


@dataclass(frozen=True)
class Storage:
    """How one module's weights lie in tensors, and what they mean.

    layout: "gptq" (words along the inputs, matrix transposed), "awq" (words along the outputs, transposed), "packed"
    (compressed-tensors' words along the inputs), "outliers" (those, and single weights beside them), "marlin24" (its
    two of four in a kernel's order), "float8" (bytes of e4m3), "mxfp4", "nvfp4" (ModelOpt's) or "nvfp4-packed"
    (compressed-tensors': two codes a byte). scheme: kind, groups and
    symmetry; the scales' dtype is the tensor's, whatever stands here. zero_offset: what is added to a stored zero
    point (1 in files of the first GPTQ format). block_rows: rows that share their scales, where blocks do.
    act_order: groups are said to be of columns that do not lie side by side; the indices of groups beside the weights
    have the last word.
    """

    layout: str
    scheme: QuantizationScheme
    zero_offset: int = 0
    block_rows: int | None = None
    act_order: bool = False


class Patterns:
    """Names of modules as the formats list them: a whole name, neighbouring parts of one ("mlp.down_proj",
    "model.layers.0"), a name with `*`, `re:` with a regular expression for the beginning, or the class `Linear`."""

    def __init__(self, patterns: Sequence[str], place: str) -> None:
        self._patterns, self._place = tuple(patterns), place
        others = {one for one in patterns if one == LINEAR or "*" in one or one.startswith(EXPRESSION)}
        self._others, self._names = others, frozenset(patterns) - others
        self._expressions = {
            pattern: _expression(pattern, place) for pattern in patterns if pattern.startswith(EXPRESSION)
        }

    def with_names(self, names: Iterable[str]) -> Patterns:
        """These and others."""
        return Patterns((*self._patterns, *names), self._place)

    def match(self, module: str) -> bool:
        """Whether one of them means the module."""
        if any(self._means(pattern, module) for pattern in self._others):
            return True
        parts = module.split(".")  # of names there may be thousands, and of modules too
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[first:end]) in self._names for end in ends for first in range(end))

    def _means(self, pattern: str, module: str) -> bool:
        """Whether one that is no name does."""
        if pattern in self._expressions:
            return self._expressions[pattern].match(module) is not None
        return pattern == LINEAR or fnmatch.fnmatchcase(module, pattern)


def _expression(pattern: str, place: str) -> re.Pattern[str]:
    """A pattern that others wrote: only such as are matched in little time."""
    text = pattern.removeprefix(EXPRESSION)
    bare = re.sub(r"\\.", "x", text)
    repeats = len(re.findall(r"[*+?{]", bare))
    if len(text) > MOST_CHARACTERS or repeats > MOST_REPETITIONS or re.search(r"\)[*+?{]|\(\?", bare):
        raise ConfigError(
            f"{place}: the pattern {shown(pattern)} is not supported: at most {MOST_CHARACTERS} characters and "
            f"{MOST_REPETITIONS} repetitions, none of a group"
        )
    try:
        return re.compile(text)
    except re.error as problem:
        raise ConfigError(f"{place}: the pattern {shown(pattern)} is no regular expression: {problem}") from problem


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's statement. place: where it stands, for messages. method: its name, with its format. sparse: the
    modules of whose weights two of every four are kept, and those of them that are left out; none: of no module."""

    place: str
    method: str
    groups: tuple[tuple[Patterns, Storage], ...]
    ignored: Patterns
    notes: tuple[str, ...] = ()
    sparse: tuple[Patterns, Patterns] | None = None

    def storage_of(self, module: str) -> Storage | None:
        """How a module is stored; None if it is not quantised."""
        if self.ignored.match(module):
            return None
        return next((storage for targets, storage in self.groups if targets.match(module)), None)

    def leaving(self, names: Iterable[str]) -> Quantization:
        """The same without the modules that these patterns mean."""
        return replace(self, ignored=self.ignored.with_names(names))

    @property
    def act_order(self) -> bool:
        """Whether any group of modules is said to be in act-order."""
        return any(storage.act_order for _, storage in self.groups)

    def matrix_formats(
        self, matrices: Mapping[str, Sequence[str]], names_of: Callable[[str], Iterable[str]]
    ) -> tuple[tuple[str, str], ...]:
        """(matrix, format) of the quantised and sparse matrices, which are made of modules. names_of: the modules that
        each of those names stands for, of all layers and experts. ConfigError unless all modules of a matrix are in
        one format."""
        formats = ((matrix, self._format_of(matrix, modules, names_of)) for matrix, modules in matrices.items())
        return tuple((matrix, name) for matrix, name in formats if name is not None)

    def _format_of(self, matrix: str, modules: Sequence[str], names_of: Callable[[str], Iterable[str]]) -> str | None:
        found: dict[str | None, str] = {}
        is_sparse = self.sparse is not None and bool(modules)
        for module in (one for name in modules for one in names_of(name)):
            storage = self.storage_of(module)
            found.setdefault(storage.scheme.name if storage else None, module)
            is_sparse = is_sparse and self._is_sparse(module)
        if len(found) > 1:
            parts = "; ".join(f"{module} is {name or 'not quantised'}" for name, module in found.items())
            raise ConfigError(
                f"{self.place}: the kernel keeps matrix {matrix!r} in one format in all layers, but {parts}: "
                "quantise all of these modules alike, or none"
            )
        name = next(iter(found), None)
        return sparse_name(name) if is_sparse else name

    def _is_sparse(self, module: str) -> bool:
        """Whether two of every four of a module's weights are kept."""
        if self.sparse is None:
            return False
        targets, ignored = self.sparse
        return targets.match(module) and not ignored.match(module)
