"""What an engine tells of itself in numbers, by vLLM's names: for `LLM.get_metrics` and for a server's /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cheetah.runtime.engine.drafting import Drafted
from cheetah.runtime.engine.requests import Load


@dataclass(frozen=True)
class Metric:
    """A number now. kind: "gauge", or "counter" for one that only grows. about: what it is, in words. labels: which of
    several of its name."""

    name: str
    kind: str
    value: float
    about: str
    labels: Mapping[str, str] = field(default_factory=dict)


def engine_metrics(load: Load, read_ceiling: float | None = None) -> list[Metric]:
    """The state of an engine, and what it has counted. read_ceiling: GB/s that its GPU reads at most, if that was
    measured; without it no speed is told, as on the emulator."""
    return [*_of_requests(load), *_of_drafts(load.decoded.drafted), *_of_reading(load, read_ceiling)]


def _of_drafts(drafted: Drafted) -> list[Metric]:
    """What came of drafts. A step makes one token more than were accepted in it."""
    name, about = "vllm:spec_decode_num", "Drafted tokens that were right"
    return [
        Metric(f"{name}_drafts", "counter", drafted.steps, "Steps of a completion in which tokens were drafted."),
        Metric(f"{name}_draft_tokens", "counter", drafted.tokens, "Tokens drafted."),
        Metric(f"{name}_accepted_tokens", "counter", drafted.accepted, f"{about}."),
        *(
            Metric(f"{name}_accepted_tokens_per_pos", "counter", count, f"{about}, by place.", {"position": str(place)})
            for place, count in enumerate(drafted.right)
        ),
    ]


def _of_reading(load: Load, ceiling: float | None) -> list[Metric]:
    """What decoding reads of the device's memory."""
    decoded, latest = load.decoded, load.latest
    found = [
        Metric("cheetah:decode_steps", "counter", decoded.steps, "Steps in which completions were decoded."),
        Metric("cheetah:decode_seconds", "counter", decoded.seconds, "Seconds of those, by the host's clock."),
        Metric("cheetah:decode_bytes", "counter", decoded.nbytes, "Bytes of memory that those read."),
        Metric("cheetah:decode_bytes_per_step", "gauge", latest.bytes_per_step, "Of the last launch that decoded."),
    ]
    if ceiling is not None:
        share = latest.gb_per_s / ceiling
        found += [
            Metric("cheetah:decode_gb_per_second", "gauge", latest.gb_per_s, "Read by the last launch that decoded."),
            Metric("cheetah:read_ceiling_gb_per_second", "gauge", ceiling, "That this GPU reads at most, as measured."),
            Metric("cheetah:read_ceiling_share", "gauge", share, "Of it that the last launch reached, 0 to 1."),
        ]
    return found


def _of_requests(load: Load) -> list[Metric]:
    pages = "Share of the cache's pages that completions hold, 0 to 1."
    return [
        Metric("vllm:num_requests_running", "gauge", load.running, "Completions that have begun."),
        Metric("vllm:num_requests_waiting", "gauge", load.waiting, "Completions in line."),
        Metric("vllm:kv_cache_usage_perc", "gauge", load.pages_used, pages),
        Metric("vllm:gpu_cache_usage_perc", "gauge", load.pages_used, pages),  # what older routers read
        Metric("vllm:prefix_cache_queries", "counter", load.tokens_looked_up, "Tokens of prompts that were looked up."),
        Metric("vllm:prefix_cache_hits", "counter", load.tokens_found, "Tokens of prompts that were cached."),
        Metric("vllm:num_preemptions", "counter", load.preemptions, "Completions whose pages others needed."),
    ]
