"""How much device memory a model needs, told before any is taken.

The sizes are those of a manifest's buffers. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cheetah.errors import CheetahError
from cheetah.manifest import Buffer
from cheetah.models.config import ModelConfig
from cheetah.plan.delta import state_slots

# Buffers of a manifest that have a line of their own; the others together are the workspace.
LABELS = {
    "weights": "weights",
    "embedding": "embedding",
    "norms": "norms",
    "head_norms": "norms",
    "norms_behind": "norms",
    "rope": "rotary table",
    "kv": "keys and values",
    "states": "states",
    "features": "keys and values",
    "known_rows": "keys and values",
    "logits": "logits",
}
WORKSPACE = "workspace"
BY_PAGES = ("features", "known_rows")
"""Of what drafts, by pages as keys."""
DRAFT_MODEL = "draft model"


class MemoryShortage(CheetahError):
    """A device without enough free memory for what was asked."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of device memory by part, in the order of the table. `kv_tokens` is how many tokens the cache holds, of
    `batch` sequences together; `states` is how many of those there is room for, if there are some."""

    parts: tuple[tuple[str, int], ...]
    kv_tokens: int
    kv_bytes_per_token: int
    batch: int = 1
    states: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    def beside(self, drafts: MemoryEstimate) -> MemoryEstimate:
        """With a model that drafts, whose pages are those of the same tokens."""
        pool = LABELS["kv"]
        cached = drafts.bytes_of(pool)
        parts = [(label, size + cached if label == pool else size) for label, size in self.parts]
        return replace(
            self,
            parts=(*parts, (DRAFT_MODEL, drafts.total_bytes - cached)),
            kv_bytes_per_token=self.kv_bytes_per_token + drafts.kv_bytes_per_token,
        )

    def bytes_of(self, label: str) -> int:
        """Bytes of one part, 0 if there is none of that label."""
        return dict(self.parts).get(label, 0)

    def table(self) -> str:
        """A line for each part, and the total."""
        per_token = f"{self.kv_tokens} tokens of {size_text(self.kv_bytes_per_token)}"
        remarks = {LABELS["kv"]: f"  ({per_token})"}
        if self.states:
            own, each = state_slots(self.batch), size_text(self.bytes_of(LABELS["states"]) // self.states)
            remarks[LABELS["states"]] = f"  ({own} of {each}, and {self.states - own} for prompts that begin alike)"
        rows = [(label, size, remarks.get(label, "")) for label, size in self.parts if size]
        rows.append(("total", self.total_bytes, ""))
        return "\n".join(f"{label:<16}{size_text(size):>12}{remark}" for label, size, remark in rows)

    def check(self, free_bytes: int, place: str) -> None:
        """MemoryShortage, with the table and what would fit, if more is needed than is free on `place`."""
        if self.total_bytes <= free_bytes:
            return
        raise MemoryShortage(
            f"{place} has {size_text(free_bytes)} free, {size_text(self.total_bytes)} are needed: "
            f"{self._advice(free_bytes)}\n{self.table()}"
        )

    def _advice(self, free_bytes: int) -> str:
        left = free_bytes - (self.total_bytes - self.bytes_of(LABELS["kv"]))
        tokens = left // self.kv_bytes_per_token // 16 * 16
        if tokens < 16:
            return "the weights alone do not fit, use a smaller model or a larger GPU"
        each = max(16, tokens // self.batch // 16 * 16)
        or_less = "or less" if self.batch == 1 else f"or less, or a batch below {self.batch}"
        return f"the cache could hold about {tokens} tokens, use max_context={each} {or_less}"


def memory_of_buffers(config: ModelConfig, buffers: Iterable[Buffer], batch: int = 1) -> MemoryEstimate:
    """The memory that a manifest's buffers take, for `batch` sequences."""
    sizes, buffers = dict.fromkeys([*LABELS.values(), WORKSPACE], 0), [*buffers]
    per_token = config.kv_bytes_per_token  # of bf16, and of all heads
    for buffer in buffers:
        sizes[LABELS.get(buffer.name, WORKSPACE)] += buffer.bytes
        if buffer.name == "kv":
            _, pages, *_, page_size, _ = buffer.shape
            per_token = buffer.bytes // (pages * page_size)
    given = [buffer for buffer in buffers if buffer.name in BY_PAGES]
    per_token += sum(one.bytes // (one.shape[0] * one.shape[1]) for one in given)
    states = next((buffer.shape[0] for buffer in buffers if buffer.name == "states"), 0)
    return MemoryEstimate(tuple(sizes.items()), sizes[LABELS["kv"]] // per_token, per_token, batch, states)


def size_text(size: int) -> str:
    """Bytes for people: B, KB, MB or GB of powers of 1024."""
    value, unit = float(size), "B"
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024 or unit == "GB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
