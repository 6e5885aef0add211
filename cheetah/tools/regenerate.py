"""The command that writes a kernel's text again: it stands in the text's header and in the manifest.

It holds what differs from the rule and nothing of the machine it was run on, so that equal kernels have equal texts.
`python -m cheetah.tools.regenerate DIR MODEL:BATCH MODEL:pass-TOKENS ...` writes several kernels with their manifests,
each as `cheetah generate MODEL --batch BATCH`, or `--prompt-pass TOKENS`, does one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cheetah.generate import choose_plan, generate_kernel, generate_pass
from cheetah.models.config import ModelConfig
from cheetah.models.registry import resolve_config
from cheetah.package import Generated
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.prompt import pass_plan_for

DEFAULT_GPU = "h200"
PASS_PREFIX = "pass-"
"""Of what is written instead of a number of sequences: a kernel of passes."""


def generate_named(config: ModelConfig, name: str, gpu: str, plan: dict[str, Any], **how: bool) -> Generated:
    """The kernel of the model called `name`, with its command in the header. `plan`: overrides, of which some may be
    what the rule says anyway. how: `line_marks`, `traced`."""
    chosen = needed_options(config, gpu, plan)
    return generate_kernel(config, gpu, command=canonical_command(name, gpu, chosen, **how), **how, **chosen)


def generate_named_pass(
    config: ModelConfig, name: str, gpu: str, plan: dict[str, Any], tokens: int, **how: bool
) -> Generated:
    """The kernel that reads `tokens` tokens of a prompt in a pass, beside that of `generate_named`."""
    chosen, machine = needed_options(config, gpu, plan), gpu_named(gpu)
    command = f"{canonical_command(name, gpu, chosen, **how)} --prompt-pass {tokens}"
    decoding = choose_plan(config, machine, **chosen)
    pass_plan = pass_plan_for(machine, tokens, config.shape, cuts=not decoding.kv_chunk)
    return generate_pass(config, machine, decoding, pass_plan, command=command, **how)


def needed_options(config: ModelConfig, gpu: str, plan: dict[str, Any]) -> dict[str, Any]:
    """The overrides without those that the rule would have chosen beside the others."""
    machine = gpu_named(gpu)
    wanted, needed = choose_plan(config, machine, **plan), dict(plan)
    for name in plan:
        others = {other: value for other, value in needed.items() if other != name}
        try:
            same = choose_plan(config, machine, **others) == wanted
        except PlanError:
            same = False
        needed = others if same else needed
    return needed


def canonical_command(
    name: str, gpu: str, plan: dict[str, Any], *, line_marks: bool = False, traced: bool = False
) -> str:
    """`cheetah generate` with the options that are not the default."""
    machine = ["--gpu", gpu] if gpu != DEFAULT_GPU else []
    flags = [*(["--line-marks"] if line_marks else []), *(["--trace"] if traced else [])]
    options = (f"{flag_of(field)} {value}" for field, value in plan.items())
    return " ".join(["cheetah generate", name, *machine, *flags, *options])


def file_stem(
    name: str,
    gpu: str,
    plan: dict[str, Any],
    *,
    line_marks: bool = False,
    traced: bool = False,
    prompt_pass: int | None = None,
) -> str:
    """Model, GPU and what was chosen by hand, e.g. "llama-3.1-8b-h200-sync-barrier"."""
    flags = [*(["line-marks"] if line_marks else []), *(["trace"] if traced else [])]
    chosen = (f"{field}-{value}" for field, value in plan.items())
    passes = [] if prompt_pass is None else [f"prompt-pass-{prompt_pass}"]
    return "-".join([name, gpu, *flags, *(choice.replace("_", "-") for choice in chosen), *passes])


def flag_of(field: str) -> str:
    """The option of a plan field: "max_context" -> "--max-context"."""
    return "--" + field.replace("_", "-")


def write_kernels(folder: Path, kernels: Sequence[str]) -> None:
    """The kernel and the manifest of each "MODEL:BATCH", a preset and the sequences of a step, or "MODEL:pass-TOKENS",
    the tokens of a prompt's pass, for the default GPU."""
    for kernel in kernels:
        name, _, of = kernel.partition(":")
        config = resolve_config(name)
        if of.startswith(PASS_PREFIX):
            tokens = int(of.removeprefix(PASS_PREFIX))
            generated = generate_named_pass(config, name, DEFAULT_GPU, {}, tokens)
            generated.write(folder, file_stem(name, DEFAULT_GPU, {}, prompt_pass=tokens))
        else:
            plan = {"batch": int(of)}
            generated = generate_named(config, name, DEFAULT_GPU, plan)
            generated.write(folder, file_stem(name, DEFAULT_GPU, needed_options(config, DEFAULT_GPU, plan)))


if __name__ == "__main__":
    write_kernels(Path(sys.argv[1]), sys.argv[2:])
