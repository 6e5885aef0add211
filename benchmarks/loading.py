"""How fast checkpoints are read, packed and uploaded: GB of the file a second, and a second of the processor.

    python benchmarks/loading.py gptq awq packed --threads 1 8 --device cuda

Writes a checkpoint of random bits at the shapes of 8B in each format (fewer layers and a small vocabulary by default,
so that quantised matrices are nearly all of it), reads it once so that it lies in the page cache, and loads it, each
number of threads in turn. With a device, that packs, or the host does and uploads; without one the host does, and what
it made is dropped. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cheetah.generate import choose_plan, generate_repacking
from cheetah.models.config import ModelConfig
from cheetah.models.dense.weights import buffer_bytes
from cheetah.models.family import Packing
from cheetah.models.registry import family_of, resolve_config
from cheetah.piece_ring import ordinary_memory
from cheetah.plan import gpu_named, step_matrices
from cheetah.runtime.assembly.repacking import DeviceRepacker
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.checkpoint.safetensors_files import find_tensors
from cheetah.runtime.device import open_device
from cheetah.stopwatch import Stopwatch
from cheetah.tools.circumstances import commit

GROUP = 128
RANDOM_BYTES = 64 << 20
SCALE = 0x2000
"""Bits of 2**-7 in f16."""
FLOAT_SCALE = 0x3C000000
"""Of the same in f32."""
Parts = dict[str, tuple[str, tuple[int, ...], Any]]
"""Tensors of a module by suffix: dtype, shape, and what each of their elements is, or all are; None: random bits."""


def _gptq(rows: int, columns: int, bits: int = 4) -> Parts:
    per_word, groups = 32 // bits, columns // GROUP
    return {
        "qweight": ("I32", (columns // per_word, rows), None),
        "qzeros": ("I32", (groups, rows // per_word), 0x77777777 if bits == 4 else 0x7F7F7F7F),
        "scales": ("F16", (groups, rows), SCALE),
    }


def _gptq_in_order(rows: int, columns: int) -> Parts:
    """In act-order, the same for all matrices of as many columns."""
    groups = np.random.default_rng(columns).permutation(np.arange(columns) // GROUP)
    return {**_gptq(rows, columns), "g_idx": ("I32", (columns,), groups)}


def _awq(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {
        "qweight": ("I32", (columns, rows // 8), None),
        "qzeros": ("I32", (groups, rows // 8), None),
        "scales": ("F16", (groups, rows), SCALE),
    }


def _packed(rows: int, columns: int, bits: int = 4) -> Parts:
    return {
        "weight_packed": ("I32", (rows, columns * bits // 32), None),
        "weight_scale": ("F16", (rows, columns // GROUP), SCALE),
    }


def _fp8(rows: int, columns: int) -> Parts:
    return {"weight": ("F8_E4M3", (rows, columns), None), "weight_scale": ("F32", (rows, 1), FLOAT_SCALE)}


def _fp8_blocks(rows: int, columns: int) -> Parts:
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    return {"weight": ("F8_E4M3", (rows, columns), None), "weight_scale_inv": ("F32", blocks, FLOAT_SCALE)}


def _plain(dtype: str) -> Callable[[int, int], Parts]:
    return lambda rows, columns: {"weight": (dtype, (rows, columns), None)}


def _compressed(bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    group = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **weights}
    form = "float-quantized" if kind == "float" else "pack-quantized"
    return {
        **{"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
_GROUPS = {"strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[int, int], Parts], dict[str, Any] | None]] = {
    "gptq": (_gptq, {**_GPTQ, "bits": 4}),
    "gptq8": (lambda rows, columns: _gptq(rows, columns, 8), {**_GPTQ, "bits": 8}),
    "gptq-order": (_gptq_in_order, {**_GPTQ, "bits": 4, "desc_act": True}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "packed": (_packed, _compressed(4, "int", **_GROUPS)),
    "packed8": (lambda rows, columns: _packed(rows, columns, 8), _compressed(8, "int", **_GROUPS)),
    "fp8": (_fp8, _compressed(8, "float", strategy="channel", group_size=None)),
    "fp8-blocks": (
        _fp8_blocks,
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"},
    ),
    "bf16": (_plain("BF16"), None),
    "f16": (_plain("F16"), None),
}
"""By name: the tensors of a module, and what config.json says of them."""
DTYPE_BYTES = {"I32": 4, "F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1}


def write_checkpoint(folder: Path, config: ModelConfig, form: str, plain: str = "BF16") -> None:
    """A checkpoint of random bits, in one file. plain: dtype of what is not quantised, "BF16" or "F16"."""
    parts, stated = FORMATS[form]
    tensors: Parts = {}
    for name, shape in family_of(config).tensor_shapes(config).items():
        if len(shape) == 2 and ".layers." in name:
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": part for suffix, part in parts(*shape).items()}
        else:
            tensors[name] = (plain, shape, None)
    header, end = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    quantization = {} if stated is None else {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **quantization}))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for block in _contents(tensors):
            file.write(block.data)


def _contents(tensors: Parts) -> Iterator[np.ndarray[Any, Any]]:
    block = np.random.default_rng(0).integers(0, 256, RANDOM_BYTES, np.uint8)
    block &= 0xBF  # bytes of e4m3 and numbers of bf16 are finite
    for dtype, shape, value in tensors.values():
        count = int(np.prod(shape))
        if value is not None:
            yield np.broadcast_to(value, count).astype(f"<u{DTYPE_BYTES[dtype]}")
            continue
        nbytes = count * DTYPE_BYTES[dtype]
        for first in range(0, nbytes, RANDOM_BYTES):
            yield block[: nbytes - first]


def load(checkpoint: Checkpoint, threads: int, device: Any, packer: str) -> tuple[float, float, Stopwatch]:
    """Seconds, seconds of the processor, and of each stage. packer: "host" or "device"."""
    config, family, gpu = checkpoint.config, family_of(checkpoint.config), gpu_named("h200")
    matrices = step_matrices(config.shape, choose_plan(config, gpu), gpu)
    watch = Stopwatch()
    with ExitStack() as stack:
        buffers = {}
        for name, nbytes in buffer_bytes(config, matrices).items() if device is not None else ():
            buffers[name] = device.allocate(nbytes)
            stack.callback(buffers[name].free)
        write = (lambda name, offset, data: buffers[name].upload(data, offset)) if buffers else lambda *_: None
        lend = ordinary_memory if device is None else device.lend
        repacker = None
        if device is not None and packer == "device":
            repacker = DeviceRepacker(device, buffers["weights"], None, lambda: generate_repacking(gpu), print)
        started, worked = time.perf_counter(), time.process_time()
        packing = Packing(checkpoint.tensor, write, rows=checkpoint.rows, threads=threads, lend=lend)
        family.pack_weights(config, matrices, replace(packing, repacker=repacker, watch=watch))
        if device is not None:
            device.synchronize()
        return time.perf_counter() - started, time.process_time() - worked, watch


def measure(form: str, args: argparse.Namespace, device: Any, folder: Path) -> list[dict[str, Any]]:
    """A record for each number of threads and packer."""
    config = resolve_config(args.model, [])
    config = replace(config, layers=args.layers or config.layers, vocab_size=args.vocab or config.vocab_size)
    write_checkpoint(folder, config, form, args.plain)
    nbytes = sum(tensor.nbytes for tensor in find_tensors(folder).tensors.values())
    records = []
    for turn in range(-1, args.turns):  # the first is not counted: memory is new, and files may not be in memory
        for threads, packer in itertools.product(args.threads, args.packer if device else ["host"]):
            seconds, worked, watch = load(open_checkpoint(folder), threads, device, packer)
            if turn < 0:
                continue
            records.append(
                {
                    **{"commit": commit(), "gpu": device.describe().name if device else "none", "model": args.model},
                    **{"layers": config.layers, "format": form, "packer": packer, "threads": threads, "bytes": nbytes},
                    **{"seconds": seconds, "processor_s": worked},
                    "stages": {name: round(value, 3) for name, value in watch.seconds.items()},
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+", choices=FORMATS)
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset, whose shapes the matrices have")
    parser.add_argument("--layers", type=int, default=8, help="layers; 0: the model's")
    parser.add_argument("--vocab", type=int, default=4096, help="rows of embedding and head; 0: the model's")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--plain", choices=("BF16", "F16"), default="BF16", help="dtype of what is not quantised")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--packer", nargs="+", choices=("host", "device"), default=["device"])
    parser.add_argument("--device", help="where to upload, e.g. cuda")
    parser.add_argument("--json", type=Path, help="a file to which records are added")
    args = parser.parse_args()
    with ExitStack() as stack:
        device = stack.enter_context(open_device(args.device)) if args.device else None
        for form in args.formats:
            with tempfile.TemporaryDirectory() as folder:
                for record in measure(form, args, device, Path(folder)):
                    rate, of_core = (record["bytes"] / record[name] / 1e9 for name in ("seconds", "processor_s"))
                    what = f"{form:<11}{record['packer']:<7}{record['threads']:>3} threads"
                    print(
                        f"{what}{record['seconds']:>8.2f} s{rate:>7.2f} GB/s"
                        f"{of_core:>7.2f} GB/s of a core{record['processor_s'] / record['bytes'] * 1e9:>6.2f} ns a byte"
                        f"  {record['stages']}",
                        flush=True,
                    )
                    if args.json:
                        with args.json.open("a") as file:
                            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
