"""The kernels that users get, compiled for sm_90a: those of one token keep everything in registers, those of several
all but a few words.

What spilled once were addresses, kept from layer to layer: 412 + 716 bytes a thread where a step reads 16 tokens.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from cheetah.cli.configs import named_config
from cheetah.generate import choose_plan, generate_head, generate_pass
from cheetah.manifest import Manifest
from cheetah.models.llama import LlamaConfig
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.registry import PRESETS, preset
from cheetah.package import Generated
from cheetah.plan import Plan, gpu_named
from cheetah.plan.prompt import pass_plan_for
from cheetah.runtime.assembly.compile import CompileError, compile_cubin, find_compiler
from cheetah.runtime.assembly.kernels import PROMPTS, KernelsAsked
from cheetah.runtime.assembly.options import AssemblyOptions
from cheetah.tools.regenerate import DEFAULT_GPU, generate_named
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
REGISTERS = 65536  # of an SM
MOST_STACK_BYTES = 24  # six words, of those that are read once a phase or an M-tile, of steps with several tokens

OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.2-3b", {"batch": 4}),
    ("qwen3-4b", {"batch": 4}),
    ("llama-3.1-70b", {"batch": 2}),
    ("llama-3.1-70b", {"batch": 4}),
    ("llama-3.2-1b", {"sync": "barrier"}),
    ("llama-3.1-8b", {"sync": "barrier"}),
    ("llama-3.1-8b", {"tokens": 8}),
    ("llama-3.1-8b@fp8", {"batch": 8}),
    ("llama-3.1-70b@fp8", {"batch": 8}),
    ("llama-3.1-70b@int4-g128", {"batch": 8}),
]
"""Options that a user may give."""

MORE_STACK_BYTES: dict[tuple[str, int], int] = {
    ("llama-3.2-3b", 8): 32,
    ("qwen3-0.6b", 8): 32,
    ("qwen3-4b", 8): 48,
    ("qwen3-14b", 8): 48,
    ("qwen3-32b", 8): 64,
    ("mistral-small-24b", 8): 40,
    ("mistral-small-3.2-24b", 8): 40,
    ("ministral-3-3b", 8): 40,
    ("ministral-3-14b", 8): 40,
    ("phi-4-mini", 8): 32,
    ("phi-4", 8): 40,
    ("smollm3-3b", 8): 32,
    ("gemma-2-2b", 1): 8,
    ("gemma-3-270m", 1): 8,
    ("gemma-3-1b", 1): 40,
    ("gemma-3-1b", 8): 72,
    ("gemma-3-4b", 1): 8,
    ("gemma-3-12b", 1): 8,
    ("exaone-4.0-32b", 1): 8,
    ("qwen3.5-0.8b", 1): 8,
    ("qwen3.5-2b", 1): 8,
    ("qwen3.5-4b", 1): 24,
    ("qwen3.5-9b", 1): 40,
    ("qwen3.5-27b", 1): 24,
    ("qwen3.5-35b-a3b", 1): 16,
    ("qwen3-next-80b-a3b", 1): 24,
}
"""By model and batch: mostly of narrow M-tiles. What is laid aside are addresses, taken up again once a phase or an
item of attention; none is touched in a loop over chunks or keys, but for three words of qwen3-0.6b. Of one token two
words in five models, ten of Gemma 3 1B, and two to ten beside Gated DeltaNet."""
MORE_STACK_BYTES_OF_PROMPTS = {
    "llama-3.2-3b": 48,
    "llama-3.1-8b": 72,
    "qwen3-0.6b": 64,
    "qwen3-1.7b": 48,
    "qwen3-4b": 56,
    "qwen3-8b": 80,
    "qwen3-14b": 32,
    "qwen3-32b": 64,
    "qwen2.5-7b": 80,
    "mistral-7b-v0.3": 72,
    "mistral-small-24b": 48,
    "mistral-small-3.2-24b": 48,
}
"""Of steps that read 16 tokens (or 8) of a prompt, which a pass does where there is one."""

FEWER_PROMPT_TOKENS = {"llama-3.1-70b": 8, "qwen3-32b": 8}
"""Where the vectors of 16 tokens have no place beside a ring."""


LOOKED_AT = [
    name for name, config in PRESETS.items() if type(config) in (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig)
]
"""The presets that are held to this: those of the families that have been measured."""

OF_ONE_TOKEN = [name for name in PRESETS if name not in LOOKED_AT]
OF_EIGHT_TOKENS = (
    *("ministral-3-3b", "ministral-3-8b", "ministral-3-14b", "smollm3-3b", "phi-4-mini", "phi-4", "granite-3.3-2b"),
    *("granite-3.3-8b", "granite-4.0-micro", "olmo-2-1b", "olmo-3-7b", "gemma-2-2b", "gemma-3-1b", "internlm3-8b"),
)
"""Presets of other families: of all the step of one token, of some that of 8."""


def committed() -> list[tuple[str, str]]:
    """(model, batch or pass-TOKENS) of the kernels that `make kernels` writes."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (configs,) = re.findall(r"^KERNEL_CONFIGS := (.*)$", makefile, re.MULTILINE)
    return [(model, of) for model, _, of in (config.partition(":") for config in configs.split())]


ALWAYS = [("llama-3.1-8b", {"batch": 1})]
"""What most users run, beside which one pass and one head are looked at below; to compile all takes five minutes of a
processor."""


def kernels() -> list[Any]:
    """Those of the Makefile, of what `LLM` makes of the presets for one sequence and for 8, and others: each once.

    Those that are not `ALWAYS` looked at are exhaustive.
    """
    by_default = [(model, {"batch": batch}) for model in LOOKED_AT for batch in (1, 8)]
    by_default += [(model, {"batch": 1}) for model in OF_ONE_TOKEN]
    by_default += [(model, {"batch": 8}) for model in OF_EIGHT_TOKENS]
    first = [(model, {"batch": int(batch)}) for model, batch in committed() if batch.isdigit()]
    all_kernels = [*first, *(kernel for kernel in (*by_default, *OTHERS) if kernel not in first)]
    return tiered(all_kernels, [kernel for kernel in all_kernels if kernel not in ALWAYS])


STACK_BYTES_OF_PASSES = {"qwen3.5-35b-a3b": 8}
"""Of models whose pass has eight products or more in its loop."""


def passes() -> list[Any]:
    """Those of the Makefile, and of every other preset the one over most tokens."""
    of_makefile = [(model, int(of.partition("-")[2])) for model, of in committed() if not of.isdigit()]
    others = [(model, 2048) for model in (*LOOKED_AT, *STACK_BYTES_OF_PASSES) if (model, 2048) not in of_makefile]
    return tiered([*of_makefile, *others], [*of_makefile[1:], *others])


def has_nvrtc() -> bool:
    try:
        return bool(find_compiler("nvrtc").version)
    except CompileError:
        return False


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC")


@pytest.mark.slow
@pytest.mark.compiler
@needs_nvrtc
@pytest.mark.parametrize(("model", "options"), kernels())
def test_registers_are_enough(tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    most = MORE_STACK_BYTES.get((model, options.get("batch", 1)))
    require_registers(generate_named(named_config(model).config, model, DEFAULT_GPU, options), tmp_path, most)


@pytest.mark.exhaustive
@pytest.mark.compiler
@needs_nvrtc
@pytest.mark.parametrize("model", LOOKED_AT)
def test_registers_are_enough_for_prompts(tmp_path: Path, model: str) -> None:
    """The second kernel that `LLM` makes, and that it takes as many tokens a step as fit."""
    reading = prompt_kernel(model)
    require_registers(reading, tmp_path, MORE_STACK_BYTES_OF_PROMPTS.get(model))
    assert reading.manifest.plan["tokens"] == FEWER_PROMPT_TOKENS.get(model, 16)


@pytest.mark.slow
@pytest.mark.compiler
@needs_nvrtc
@pytest.mark.parametrize(("model", "tokens"), passes())
def test_registers_are_enough_for_passes(tmp_path: Path, model: str, tokens: int) -> None:
    """None spills, though a tile's sums take 128 of a thread's registers; nor are products made one by one."""
    config, gpu = named_config(model).config, gpu_named(DEFAULT_GPU)
    pass_plan = pass_plan_for(gpu, tokens, config.shape)
    generated = generate_pass(config, gpu, choose_plan(config, gpu, batch=8), pass_plan)
    cubin = compile_cubin(generated.text, generated.manifest.kernel, cache=tmp_path)
    assert cubin.resources.stack_bytes <= STACK_BYTES_OF_PASSES.get(model, 0), str(cubin.resources)
    assert not cubin.resources.in_series, str(cubin.resources)
    assert cubin.resources.registers * generated.manifest.launch.threads <= REGISTERS


@pytest.mark.slow
@pytest.mark.compiler
@needs_nvrtc
@pytest.mark.parametrize("model", tiered(LOOKED_AT, [model for model in LOOKED_AT if model != "llama-3.1-8b"]))
def test_registers_are_enough_for_the_head_by_itself(tmp_path: Path, model: str) -> None:
    """With as many columns as reading a prompt in steps has."""
    plan = Plan.from_dict(prompt_kernel(model).manifest.plan)
    require_registers(generate_head(preset(model), DEFAULT_GPU, plan, 2048), tmp_path)


def prompt_kernel(model: str) -> Generated:
    two = AssemblyOptions(solo=False, prompt_passes=False)
    reading = KernelsAsked(preset(model), gpu_named(DEFAULT_GPU), 0, two).described().named(PROMPTS)
    assert reading is not None
    return reading.written()


def require_registers(generated: Generated, cache: Path, most_stack_bytes: int | None = None) -> None:
    """most_stack_bytes: None for what is usual with so many tokens a step."""
    cubin = compile_cubin(generated.text, generated.manifest.kernel, cache=cache)
    if most_stack_bytes is None:
        most_stack_bytes = MOST_STACK_BYTES if int(generated.manifest.plan["tokens"]) > 1 else 0
    assert cubin.resources.stack_bytes <= most_stack_bytes, str(cubin.resources)
    assert cubin.resources.registers * generated.manifest.launch.threads <= REGISTERS


def test_the_folder_has_the_kernels_of_the_makefile_and_no_others() -> None:
    manifests = [Manifest.read(path) for path in sorted((ROOT / "kernels_generated").glob("*.json"))]
    assert sorted(map(as_committed, manifests)) == sorted(committed())


def as_committed(manifest: Manifest) -> tuple[str, str]:
    """As `committed` tells it."""
    is_pass = "decoding" in manifest.plan
    return manifest.command.split()[2], f"pass-{manifest.plan['tokens']}" if is_pass else str(manifest.plan["batch"])


def test_a_kernel_reads_every_parameter_that_it_has() -> None:
    for path in (ROOT / "kernels_generated").glob("*.json"):
        kernel = Manifest.read(path)
        text = re.sub(r"//.*", "", path.with_suffix(".cu").read_text())
        body = text.partition(f" {kernel.kernel}(")[2].partition("{")[2]
        unread = [one.name for one in kernel.parameters if not re.search(rf"\b{one.name}\b", body)]
        assert body and not unread, (path.name, unread)
