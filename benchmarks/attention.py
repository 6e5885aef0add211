"""The attention core alone: microseconds a launch and share of the read ceiling, measured in the same run.

    python benchmarks/attention.py --json results.jsonl

Each case is batch x keys of random numbers in shuffled pages; a sample is the mean of 10 launches one after another by
device events, so a launch's beginning and end are in it. They come from a CUDA graph, as in an engine's decode step, or
one by one from the host (`from_host`, 2 us more a launch). GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from cheetah.attention import BatchAttention
from cheetah.attention.outputs import DeviceArray
from cheetah.plan import gpu_named
from cheetah.runtime.device import open_device
from cheetah.tools.circumstances import commit
from cheetah.tools.measured_ceiling import ReadCeiling
from cheetah.tools.random_buffers import fill_with, random_bits

LAUNCHES, SAMPLES, WARMUP = 10, 15, 3
GPU_TIMEOUT_S = 10.0
CEILING_BYTES = 4 << 30


@dataclass(frozen=True)
class Case:
    """`batch` requests of `keys` keys each; heads are query heads."""

    batch: int = 8
    keys: int = 8192
    page_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: str = "bf16"


CASES = (
    Case(),
    Case(page_size=64),
    Case(page_size=8192),
    Case(kv_dtype="e4m3"),
    Case(head_dim=64),
    Case(batch=1, keys=65536),
    Case(batch=4, keys=2048),
)


def measure(device: Any, case: Case, ceiling: ReadCeiling) -> dict[str, Any]:
    """One record."""
    pages = -(-case.keys // case.page_size)
    attention = BatchAttention(
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        kv_dtype=case.kv_dtype,
        batch=case.batch,
        max_keys=case.keys,
        device=device,
    )
    order = np.random.default_rng(0).permutation(case.batch * pages).astype(np.int32)
    last = np.full(case.batch, case.keys - (pages - 1) * case.page_size, np.int32)
    attention.plan(np.arange(case.batch + 1, dtype=np.int32) * pages, order, last)
    shape = (case.batch * pages, 2, case.kv_heads, case.page_size, case.head_dim)
    coded = case.kv_dtype == "e4m3"
    pool = device.allocate(int(np.prod(shape)) * (1 if coded else 2))
    try:
        if coded:
            pool.fill(0x38)  # 1.0: speed does not depend on values
        else:
            fill_with(pool, random_bits(1.0))
        queries = random_bits(1.0)[: case.batch * case.heads * case.head_dim].view(ml_dtypes.bfloat16)
        attention.run(
            queries.reshape(case.batch, case.heads, case.head_dim), DeviceArray(pool, shape, "|u1" if coded else "<u2")
        )
        before = ceiling.gb_per_s()
        from_host = [attention.time_ms(LAUNCHES) for _ in range(WARMUP + SAMPLES)][WARMUP:]
        samples = graph_ms(device, attention)
        ceilings = before, ceiling.gb_per_s()
    finally:
        pool.free()
    rate = attention.kv_bytes / median(samples) / 1e6
    return {
        "system": "cheetah.attention",
        **asdict(case),
        "ms_per_launch": median(samples),
        "ms_per_launch_samples": samples,
        "ms_from_host_samples": from_host,
        "kv_bytes": attention.kv_bytes,
        "gb_per_s": rate,
        "ceiling_gb_per_s": sum(ceilings) / 2,
        "share": rate / (sum(ceilings) / 2),
    }


def graph_ms(device: Any, attention: BatchAttention) -> list[float]:
    """Milliseconds a launch, of launches in a CUDA graph."""

    def launches() -> None:
        for _ in range(LAUNCHES):
            attention.launch()

    graph = device.capture(launches)
    samples = []
    for _ in range(WARMUP + SAMPLES):
        before = device.record()
        graph.launch()
        after = device.record()
        device.synchronize(GPU_TIMEOUT_S)
        samples.append(device.elapsed_ms(before, after) / LAUNCHES)
    return samples[WARMUP:]


def main() -> None:
    """Measure every case, print a table, append records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append a JSON line a case")
    options = parser.parse_args()
    device = open_device("cuda")
    ceiling = ReadCeiling(device, gpu_named("h200"), device.allocate(CEILING_BYTES))
    info = device.describe()
    about = {"commit": commit(), "gpu": info.name, "driver": info.driver, "backend": info.backend}
    for case in CASES:
        record = {**about, **measure(device, case, ceiling)}
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        print(
            f"{case.batch} x {case.keys}, pages of {case.page_size}, {case.heads}/{case.kv_heads} heads of "
            f"{case.head_dim}, {case.kv_dtype}: {1e3 * record['ms_per_launch']:.1f} us "
            f"({1e3 * median(record['ms_from_host_samples']):.1f} from the host), {record['gb_per_s']:.0f} GB/s, "
            f"{record['share']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
