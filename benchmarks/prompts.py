"""Prompts on one GPU in one run: the time to the first token beside transformers, and passes beside cuBLAS' products.

    python -m benchmarks.prompts random:llama-3.1-8b --prompts 128,512,2048,8192 --json prompts-of-today.jsonl
    python -m benchmarks.prompts random:llama-3.1-8b --attention 8192 --json prompts-of-today.jsonl

Systems take turns, in an order that alternates, each after the same rest: what has just worked hard has a lower clock.
Prompts and weights are random. With --attention, attention alone, from time stamps of the passes over a prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cheetah.cli.configs import named_config
from cheetah.models.config import ModelConfig
from cheetah.plan.prompt import PASS_TOKENS
from cheetah.runtime.device import open_device
from cheetah.runtime.engine.launches import Part
from cheetah.tools.bench import EMULATED
from cheetah.tools.circumstances import clocks, commit, now
from cheetah.tools.pass_bench import open_pass_bench
from cheetah.tools.prompt_bench import PromptBench, open_prompt_bench, parsed_prompts
from cheetah.tools.timeline import kind_of, spans_of, summarise

DENSE_PEAK_TFLOPS = 989.0
"""NVIDIA's number for bf16 on an H100 SXM and an H200."""
REST_S = 0.1
SEED = 5

Work = Callable[[], float]
"""Does something once and gives its milliseconds."""


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a line a record, append the records."""
    options = parser().parse_args(arguments)
    named = named_config(options.model)
    with open_device(options.device) as device:
        info = device.describe()
        about = {
            "commit": commit(),
            "measured": now(),
            "gpu": info.name,
            "driver": info.driver,
            "backend": info.backend,
        }
        about |= {"model": named.canonical, "weights": f"{named.config.formats_in_words} random"}
        measure = attention_records if options.attention else prompt_records
        for record in measure(named.config, device, options):
            whole = {**about, **record, **({"note": EMULATED} if info.backend == "emulator" else {})}
            print(line_of(whole), flush=True)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(whole) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.prompts", description=(__doc__ or "").splitlines()[0])
    made.add_argument("model", help="random:PRESET; the weights are random always")
    made.add_argument("--prompts", type=parsed_prompts, default=(128, 512, 2048), help="tokens of each, A,B,...")
    made.add_argument("--attention", type=int, metavar="TOKENS", help="instead: attention over a prompt of so many")
    made.add_argument("--alone", action="store_true", help="without transformers and cuBLAS, which need torch")
    made.add_argument("--repetitions", type=int, default=5, help="timed turns")
    made.add_argument("--warmup", type=int, default=2, help="turns before those")
    made.add_argument("--rest", type=float, default=REST_S, help="seconds before everything that is timed")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it: no speeds")
    return made


# -- prompts ------------------------------------------------------------------------------------------------------


def prompt_records(config: ModelConfig, device: Any, options: argparse.Namespace) -> Any:
    """Of each length: ours and transformers' to the first token; a pass and cuBLAS' products where one reads it all."""
    with open_prompt_bench(config, None, device, max(options.prompts)) as ready:
        others = None if options.alone else _Torch(config)
        for tokens in options.prompts:
            works: dict[str, Work] = {"cheetah": partial(first_token_ms, ready, tokens)}
            in_one_pass = bool(ready.assembly.passes) and tokens <= ready.assembly.passes[-1].tokens
            if in_one_pass:
                works["cheetah, a pass"] = partial(pass_ms, ready, tokens)
            if others is not None:
                works["transformers"] = partial(others.first_token_ms, tokens)
            if others is not None and in_one_pass:
                works["cuBLAS, products alone"] = partial(others.products_ms, tokens)
            samples = in_turns(works, options)
            state = clocks() if device.describe().backend != "emulator" else {}
            flops = product_flops(config, tokens)
            for system, found in samples.items():
                yield {"system": system, "prompt_tokens": tokens, "clocks": state, **timed(system, found, flops)}


def timed(system: str, samples: list[float], flops: float) -> dict[str, Any]:
    """The fields of a record that say how long it took."""
    name = "first_token_ms" if system in ("cheetah", "transformers") else "pass_ms"
    rate = flops / median(samples) / 1e9
    found = {name: digits(median(samples)), f"{name}_samples": [digits(one) for one in samples]}
    return {**found, "product_tflops": digits(rate), "share_of_peak": digits(rate / DENSE_PEAK_TFLOPS)}


def in_turns(works: Mapping[str, Work], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each work, `repetitions` times, each after a rest."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(options.warmup + options.repetitions):
        for name in works if turn % 2 else reversed([*works]):
            time.sleep(options.rest)
            milliseconds = works[name]()
            if turn >= options.warmup:
                samples[name].append(milliseconds)
    return samples


def first_token_ms(ready: PromptBench, tokens: int) -> float:
    """From the request to the token, by the host's clock."""
    return ready.first_token(tokens, SEED)[0]


def pass_ms(ready: PromptBench, tokens: int) -> float:
    """A pass over a whole prompt by device events, by the kernel with room for fewest tokens that has room for it."""
    passes = next(one for one in ready.assembly.passes if tokens <= one.tokens)
    device, cache = ready.assembly.device, ready.assembly.launcher.cache
    cache.clear()
    flight = passes.prepare([Part(cache, (*ready.prompt(tokens, SEED), 0), tokens)])
    begin = device.record()
    passes.start(flight)
    end = device.record()
    passes.finish(flight)
    cache.clear()
    return device.elapsed_ms(begin, end)


def product_flops(config: ModelConfig, tokens: int) -> float:
    """Of the products of all layers. A pass leaves out of the last layer what its keys and values do not need, and has
    attention and norms besides: what is given as its rate is that of the products of a prompt in its time."""
    return 2.0 * tokens * config.layers * sum(rows * columns for rows, columns in matrix_shapes(config).values())


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    products = config.table.products
    return {one.name: (sum(source.rows for source in one.sources), one.columns) for one in products}


class _Torch:
    """transformers' model in bf16 with its default attention (sdpa), and its layers' products as cuBLAS does them."""

    def __init__(self, config: ModelConfig) -> None:
        import torch

        from benchmarks.baselines.transformers_llama import build
        from benchmarks.baselines.weights import random_weights

        self._torch, self._config = torch, config
        self._model: Any = build(config, random_weights(config, "cuda"))
        shapes = matrix_shapes(config).values()
        self._weights = [
            [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[1] ** -0.5 for shape in shapes]
            for _ in range(min(config.layers, 4))  # more than L2 holds
        ]

    def first_token_ms(self, tokens: int) -> float:
        """From ids on the host to the likeliest next token there, by the host's clock."""
        torch = self._torch
        ids = torch.randint(0, self._config.vocab_size, (1, tokens))
        begin = time.perf_counter()
        with torch.no_grad():
            logits = self._model(ids.cuda(), use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
        return 1e3 * (time.perf_counter() - begin)

    def products_ms(self, tokens: int) -> float:
        """All layers' products one after the other, by device events."""
        torch = self._torch
        inputs = [torch.randn((tokens, of[1]), dtype=torch.bfloat16, device="cuda") for of in self._shapes()]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for layer in range(self._config.layers):
            for x, weight in zip(inputs, self._weights[layer % len(self._weights)], strict=True):
                x @ weight.T
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _shapes(self) -> list[tuple[int, int]]:
        return list(matrix_shapes(self._config).values())


# -- attention ----------------------------------------------------------------------------------------------------


def attention_records(config: ModelConfig, device: Any, options: argparse.Namespace) -> Any:
    """Causal attention of one layer over a whole prompt that is read in passes, in the time that the phase takes of the
    grid; and with what the phase before takes longer where keys are cached, since it lays them out for this one."""
    tokens, most = options.attention, max(PASS_TOKENS)
    attention_us, product_us = [], []
    for cached in range(0, tokens, most):
        room = {"traced": True, "max_context": tokens}
        with open_pass_bench(config, None, device, min(most, tokens - cached), cached, **room) as ready:
            traced = ready.trace(options.repetitions, options.warmup, options.rest)
            summary = summarise(spans_of(traced.stamps[0], ready.phases))
        a_layer = {kind.kind: kind.advance / kind.runs for kind in summary.kinds}
        attention_us.append(a_layer[kind_of("layer 0 attention")])
        product_us.append(a_layer[kind_of("layer 0 qkv")])
    flops = 4.0 * config.query_heads * config.head_dim * tokens * (tokens + 1) / 2
    laying_us = sum(one - product_us[0] for one in product_us)
    for system, microseconds in (
        ("cheetah, attention", sum(attention_us)),
        ("cheetah, attention and laying out keys", sum(attention_us) + laying_us),
    ):
        rate = flops / microseconds / 1e6
        yield {
            "system": system,
            "prompt_tokens": tokens,
            "us": digits(microseconds),
            "us_of_passes": [digits(one) for one in attention_us],
            "tflops": digits(rate),
            "share_of_peak": digits(rate / DENSE_PEAK_TFLOPS),
        }


# -- output -------------------------------------------------------------------------------------------------------


def line_of(record: Mapping[str, Any]) -> str:
    """A record for a person who waits."""
    name = next(name for name in ("first_token_ms", "pass_ms", "us") if name in record)
    rate = record.get("product_tflops", record.get("tflops"))
    return (
        f"{record['model']}, {record['prompt_tokens']} tokens, {record['system']}: {record[name]:.3f} "
        f"{name.rpartition('_')[2]}, {rate:.0f} TFLOP/s, {record['share_of_peak']:.1%} of the peak"
    )


def digits(value: float) -> float:
    """Six significant digits: more were never measured."""
    return float(f"{value:.6g}")


if __name__ == "__main__":
    main()
