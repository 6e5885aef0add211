"""The arrows between the parts point one way: read from the imports of every module, also those inside functions."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODELS = "cheetah.models"
DENSE = f"{MODELS}.dense"
FAMILIES = tuple(
    f"{MODELS}.{name}"
    for name in (
        *("llama", "qwen3", "qwen2", "mistral", "ministral3", "smollm3", "phi3", "granite", "olmo", "gemma"),
        *("exaone4", "cwm", "seed_oss", "renamed", "arcee", "qwen3_5", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"),
    )
)
DRAFTERS = (f"{MODELS}.eagle3", f"{MODELS}.block_drafter", f"{MODELS}.mtp")
# What the generator, the runtime, tools and commands know of models: numbers, arrays, and a family to ask.
MODEL = (MODELS, f"{MODELS}.registry")
DATA = (*MODEL, "cheetah.manifest", "cheetah.plan")

# What a decode step is written with.
KERNEL = (MODELS, "cheetah.blocks", "cheetah.lang", "cheetah.plan")

# What each part may import of ours, besides itself and FOUNDATION. The longest name that fits a module is its part.
# Of FOUNDATION each may import those before it.
FOUNDATION = tuple(
    f"cheetah.{name}"
    for name in "version extras caches printable errors untrusted records stopwatch piece_ring options".split()
)
MAY_IMPORT: dict[str, set[str]] = {
    **{part: set() for part in FOUNDATION},
    "cheetah.lang": set(),
    "cheetah.plan": set(),
    "cheetah.manifest": set(),
    "cheetah.package": {"cheetah.lang", "cheetah.manifest", "cheetah.plan"},
    "cheetah.blocks": {"cheetah.lang", "cheetah.plan"},
    # The stand-alone attention: of models it needs none.
    "cheetah.attention": {
        *("cheetah.blocks", "cheetah.lang", "cheetah.manifest", "cheetah.package", "cheetah.plan"),
        "cheetah.runtime.device",
    },
    "cheetah.emulator": {"cheetah.lang", "cheetah.manifest"},
    MODELS: {"cheetah.plan"},  # what every family stands on: numbers and arrays only
    f"{MODELS}.registry": {MODELS, f"{DENSE}.family", *FAMILIES, *DRAFTERS},
    DENSE: {MODELS, "cheetah.plan"},
    f"{DENSE}.family": {
        *(MODELS, DENSE, "cheetah.plan"),
        *(f"{DENSE}.program", f"{DENSE}.prompt", f"{DENSE}.head"),
    },
    **{family: {MODELS, f"{DENSE}.family"} for family in FAMILIES},
    **{head: {MODELS, DENSE, f"{DENSE}.family", "cheetah.plan"} for head in DRAFTERS},
    f"{DENSE}.page": {MODELS, "cheetah.plan"},
    f"{DENSE}.launch": {MODELS, "cheetah.blocks", "cheetah.lang", "cheetah.package", "cheetah.plan"},
    f"{DENSE}.step_sizes": {*KERNEL, f"{DENSE}.page"},
    f"{DENSE}.head_parts": {*KERNEL, f"{DENSE}.launch", f"{DENSE}.page", f"{DENSE}.step_sizes"},
    f"{DENSE}.step": {*KERNEL, *(f"{DENSE}.{one}" for one in ("launch", "page", "step_sizes", "head_parts"))},
    f"{DENSE}.drafting_step": {*KERNEL, *(f"{DENSE}.{one}" for one in ("launch", "page", "step"))},
    f"{DENSE}.exchanged": {*KERNEL, f"{DENSE}.step_sizes"},
    f"{DENSE}.program": {
        *KERNEL,
        *(f"{DENSE}.{one}" for one in ("launch", "page", "step_sizes", "step", "drafting_step", "exchanged")),
    },
    f"{DENSE}.head": {
        *(*KERNEL, "cheetah.package"),
        *(f"{DENSE}.{one}" for one in ("launch", "page", "step_sizes", "head_parts")),
    },
    f"{DENSE}.pass_sizes": {MODELS, f"{DENSE}.page", "cheetah.plan"},
    f"{DENSE}.pass_exchanged": {MODELS, f"{DENSE}.pass_sizes", "cheetah.plan"},
    f"{DENSE}.pass_launch": {*KERNEL, f"{DENSE}.launch", "cheetah.package"},
    f"{DENSE}.pass_parts": {*KERNEL, *(f"{DENSE}.{one}" for one in ("page", "pass_launch", "pass_sizes"))},
    f"{DENSE}.pass_experts": {*KERNEL, *(f"{DENSE}.{one}" for one in ("launch", "page", "pass_parts", "pass_sizes"))},
    f"{DENSE}.prompt": {
        *(*KERNEL, f"{DENSE}.launch", f"{DENSE}.page", f"{DENSE}.program"),
        *(f"{DENSE}.pass_{one}" for one in ("launch", "parts", "experts", "exchanged", "sizes")),
    },
    f"{MODELS}.demo": {*MODEL, f"{MODELS}.llama"},
    "cheetah.generate": {
        *(*DATA, "cheetah.blocks", "cheetah.lang", "cheetah.package"),
        *(f"{DENSE}.{one}" for one in ("program", "prompt", "head")),
    },
    "cheetah.tools.ceiling": {"cheetah.lang", "cheetah.manifest", "cheetah.package", "cheetah.plan"},
    "cheetah.runtime": {*DATA, "cheetah.runtime.assembly.kernels", "cheetah.runtime.device"},
    # The one place where the runtime asks the generator, and only for a text and its manifest.
    "cheetah.runtime.assembly.kernels": {*DATA, "cheetah.generate", "cheetah.runtime", "cheetah.runtime.device"},
    "cheetah.runtime.device": {"cheetah.manifest", "cheetah.emulator", "cheetah.runtime"},
    "cheetah.serve": {"cheetah.runtime"},
}
# What has no longer name above: the command line and its helpers. They may import everything but families, and no part
# imports them.
FRONT = "cheetah"
OF_MODELS_ALONE = (DENSE, *FAMILIES, *DRAFTERS)
# But what is the same for all families: the kernels and their meaning.
OF_ALL_FAMILIES = tuple(f"{DENSE}.{one}" for one in ("program", "prompt", "head", "reference"))


def module_files() -> dict[str, Path]:
    """Every module's name and file, each once: the links models and runtime are followed by hand."""
    folders = {"cheetah": ROOT / "cheetah", "cheetah.models": ROOT / "models", "cheetah.runtime": ROOT / "runtime"}
    found: dict[str, Path] = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if package != "cheetah" or relative.parts[0] not in ("models", "runtime"):
                found[".".join([package, *relative.with_suffix("").parts])] = path
    return found


@cache
def imports_of(module: str, source: str) -> list[tuple[int, str]]:
    """Line and full name of everything a module imports; `from a import b` gives a.b, which may be a module or not."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    return found


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def is_in_one(name: str, parts: tuple[str, ...]) -> bool:
    return any(is_within(name, part) for part in parts)


def part_of(name: str) -> str | None:
    """The part that a module or a name in it belongs to; None if it is not ours."""
    return max((part for part in (*MAY_IMPORT, FRONT) if is_within(name, part)), key=len, default=None)


def _foundation_of(part: str) -> tuple[str, ...]:
    """All of FOUNDATION; for a part of it, what stands before it."""
    return FOUNDATION[: FOUNDATION.index(part)] if part in FOUNDATION else FOUNDATION


def backward_imports(module: str, source: str) -> list[str]:
    """A line for each import that this module must not have."""
    lines = []
    part = part_of(module)
    for line, name in imports_of(module, source):
        imported = part_of(name)
        if name.split(".")[0] in ("models", "runtime"):
            lines.append(f"{module}:{line}: {name} would be a second copy of the modules: import cheetah.{name}")
        elif part == FRONT and is_in_one(name, OF_MODELS_ALONE) and not is_in_one(name, OF_ALL_FAMILIES):
            lines.append(f"{module}:{line}: names {name}: ask cheetah.models.registry for the family")
        elif part in MAY_IMPORT and imported not in (None, part, *_foundation_of(part), *MAY_IMPORT[part]):
            lines.append(f"{module}:{line}: {part} must not import {name}; it may import {sorted(MAY_IMPORT[part])}")
    return lines


def test_no_arrow_runs_backwards() -> None:
    problems = [line for module, path in module_files().items() for line in backward_imports(module, path.read_text())]
    assert not problems, "\n".join(problems)


def test_every_part_has_modules() -> None:
    parts = {part_of(module) for module in module_files()}
    assert parts == {*MAY_IMPORT, FRONT}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cheetah.lang.types", "from cheetah.plan import Plan"),
        ("cheetah.plan.split", "def f():\n    import cheetah.lang as ch"),
        ("cheetah.blocks.norm", "from cheetah import runtime"),
        ("cheetah.blocks.norm", "from ..models.llama import LlamaConfig"),
        ("cheetah.models.config", "from cheetah.models.dense import weights"),
        ("cheetah.models.dense.weights", "from cheetah.models.dense.program import build_kernel"),
        ("cheetah.models.dense.weights", "from cheetah.models.registry import family_of"),
        ("cheetah.attention.program", "from cheetah.models.config import ModelConfig"),
        ("cheetah.attention.batch", "from cheetah.models.registry import family_of"),
        ("cheetah.runtime.loop", "from cheetah.models.llama import LlamaConfig"),
        ("cheetah.runtime.loop", "from cheetah.models.dense import reference"),
        ("cheetah.generate", "from cheetah.models.dense.step import StepParts"),
        ("cheetah.cli.run", "from cheetah.models.llama import LlamaConfig"),
        ("cheetah.tools.check", "from cheetah.models.dense.weights import tensor_shapes"),
        ("cheetah.runtime.loop", "from cheetah.generate import generate_kernel"),
        ("cheetah.runtime.loop", "from cheetah.emulator import build"),
        ("cheetah.runtime.loop", "from cheetah import cli"),
        ("cheetah.cli", "from runtime import LLM"),
        ("tests.anything", "import models.llama"),
    ],
)
def test_a_backward_import_is_seen(module: str, source: str) -> None:
    assert len(backward_imports(module, source)) == 1


@pytest.mark.slow
def test_tests_and_benchmarks_import_no_second_copy() -> None:
    files = {str(path): path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    problems = [line for name, path in files.items() for line in backward_imports(name, path.read_text())]
    assert not problems, "\n".join(problems)
