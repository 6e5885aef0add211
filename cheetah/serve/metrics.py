"""Numbers about the server for Prometheus, by vLLM's names, so that routers and dashboards made for it work.

Those that are a state of the engine, or of the process, are read when they are asked for; the others are counted as
pieces pass by.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cheetah.runtime.assembly.memory import MemoryEstimate
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.metrics import engine_metrics
from cheetah.runtime.outputs import StreamPiece

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """What is counted for one model. `engine` is asked for its state at each scrape; `memory` is what was taken.
    read_ceiling: see `engine_metrics`."""

    def __init__(self, model: str, engine: Engine, memory: MemoryEstimate, read_ceiling: float | None = None):
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._registry.register(_EngineState(engine, self._labels, read_ceiling))
        ProcessCollector(registry=self._registry)
        held = Gauge(
            "cheetah:device_memory_bytes", "By what it holds.", [*self._labels, "part"], registry=self._registry
        )
        for part, size in memory.parts:
            held.labels(**self._labels, part=part).set(size)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, cached ones included.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens made.")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", FIRST_TOKEN_S
        )
        self.token_s = self._histogram("inter_token_latency_seconds", "Between tokens, averaged over a piece.", TOKEN_S)
        self.request_s = self._histogram("e2e_request_latency_seconds", "From request to last token.", REQUEST_S)
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.lengths = self._histogram("request_generation_tokens", "Tokens of a completion.", TOKENS)
        names = [*self._labels, "finished_reason"]
        self._finished = Counter(
            "vllm:request_success", "Completions by how they ended.", names, registry=self._registry
        )

    def finished(self, reason: str) -> None:
        """Counts a completion: stop, length, or abort."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        counter = Counter(f"vllm:{name}", what, [*self._labels], registry=self._registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, what: str, bounds: Iterable[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", what, [*self._labels], buckets=tuple(bounds), registry=self._registry)
        return histogram.labels(**self._labels)


class RequestMetrics:
    """Watches the pieces of one HTTP request's completions."""

    def __init__(self, metrics: Metrics, completions: int):
        self._metrics = metrics
        self._unfinished = set(range(completions))
        self._began = time.monotonic()
        self._last: dict[int, float] = {}

    def observe(self, number: int, piece: StreamPiece) -> None:
        metrics, now = self._metrics, time.monotonic()
        tokens = len(piece.token_ids)
        metrics.generation_tokens.inc(tokens)
        if number not in self._last:
            metrics.first_token_s.observe(now - self._began)
        elif tokens:
            metrics.token_s.observe((now - self._last[number]) / tokens)
        self._last[number] = now
        if piece.finished and piece.timings is not None:
            self._unfinished.discard(number)
            metrics.finished(piece.finish_reason or "stop")
            metrics.request_s.observe(now - self._began)
            metrics.lengths.observe(piece.timings.completion_tokens)
            if piece.index == 0:
                metrics.prompt_tokens.inc(piece.timings.prompt_tokens)
                metrics.prompt_lengths.observe(piece.timings.prompt_tokens)

    def close(self) -> None:
        """What is unfinished by now was given up."""
        while self._unfinished:
            self._unfinished.pop()
            self._metrics.finished("abort")


class _EngineState(Collector):
    def __init__(self, engine: Engine, labels: dict[str, str], read_ceiling: float | None):
        self._engine, self._labels, self._read_ceiling = engine, labels, read_ceiling

    def collect(self) -> Iterable[Metric]:
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for one in engine_metrics(self._engine.load(), self._read_ceiling):
            labels = {**self._labels, **one.labels}
            family = families.setdefault(one.name, kinds[one.kind](one.name, one.about, labels=list(labels)))
            family.add_metric(list(labels.values()), one.value)
        yield from families.values()
