"""What an engine tells of itself in numbers, by vLLM's names: for `LLM.get_metrics` and for a server's /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from cheetah.runtime.engine.requests import Load


@dataclass(frozen=True)
class Metric:
    """A number now. kind: "gauge", or "counter" for one that only grows. about: what it is, in words."""

    name: str
    kind: str
    value: float
    about: str


def engine_metrics(load: Load) -> list[Metric]:
    """The state of an engine, and what it has counted."""
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
