"""What README.md, CHANGELOG.md and the pages of docs/ say exists, exists: files, commands, options, code, numbers."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from cheetah.cli import app
from cheetah.extras import installing
from cheetah.generate import choose_plan
from cheetah.models.registry import FAMILIES, PRESETS, SEEING, preset, resolve_config
from cheetah.plan import gpu_named, shared_map
from cheetah.runtime.assembly.kernels import Kernels, KernelsAsked
from cheetah.runtime.assembly.options import AssemblyOptions

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CHANGELOG.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "benchmarks").glob("**/*.md"))]
"""The pages, and those that tell of measurements: what these name may be gone, where they link to is not."""
FOLDERS = {"cheetah", "models", "runtime", "tests", "benchmarks", "docs", "examples", "kernels_generated"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


README = text_of("README.md")
MEMORY = text_of("docs/memory.md")


def blocks_of(page: str, language: str) -> list[str]:
    """The contents of the page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)


def code_spans(page: str) -> list[str]:
    """What stands in single backticks, outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def typed_commands(page: str) -> Iterator[list[str]]:
    """Every command that a reader could type, as words: lines of shell blocks, and code spans that begin like one."""
    lines = [line for block in blocks_of(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    spans = [span for span in code_spans(page) if re.match(r"(cheetah|make) \w", span)]
    for line in [*lines, *spans]:
        if words := shlex.split(line, comments=True):
            yield words


def cheetah_command() -> TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def refusal_of(arguments: list[str]) -> str:
    """What the command line would refuse in `cheetah ARGUMENTS`, or ""; nothing is run."""
    name, *rest = arguments
    command = cheetah_command().commands.get(name)
    if command is None:
        return f"no command {name}"
    if not rest:  # a name alone speaks of the command, it does not call it
        return ""
    try:
        command.make_context(name, rest)
    except Exception as refusal:  # click's own class, of which typer may carry a copy
        return str(refusal) or type(refusal).__name__
    return ""


def makefile_targets() -> set[str]:
    return set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str) -> list[str]:
    """The targets of a page's links that lead to no file, or to no heading of it."""
    here = ROOT / page
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        file = (here.parent / path).resolve() if path else here
        if "://" not in target and (not file.exists() or anchor and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `word`\n[a](page.md#one-word) [b](#one-word) [c](gone.md) [d](#two) [e](https://x.org/#two)\n"
    )
    assert broken_links(str(page)) == ["gone.md", "#two"]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = [span for span in code_spans(page) if re.fullmatch(r"[\w.-]+(/[\w.-]*)+", span)]
    ours = [span for span in named if span.split("/")[0] in FOLDERS]
    assert [span for span in ours if not (ROOT / span).exists()] == []


def test_pages_are_found_from_the_readme() -> None:
    """Every page of docs/ is linked from the README or from the first page of docs/internals/."""
    overview = "docs/internals/overview.md"
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README)}
    linked |= {(ROOT / overview).parent / target for target in re.findall(r"\]\(([\w.]+)\)", text_of(overview))}
    assert [page for page in PAGES if (ROOT / page) not in linked] == ["README.md"]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readme_shows_the_kernel() -> None:
    """Its loop over steps stands in the generated kernel as it stands here: copy it from there if it does not."""
    (shown,) = blocks_of("README.md", "cuda")
    kernel = (ROOT / "kernels_generated" / "llama-3.1-8b-h200.cu").read_text(encoding="utf-8")
    lines = [line.strip() for line in kernel.splitlines()]
    wanted = [line.strip() for line in shown.splitlines()]
    assert wanted[0].startswith("for (uint32_t step") and "\n".join(wanted) in "\n".join(lines)


def test_the_table_of_layers_names_every_part() -> None:
    overview = text_of("docs/internals/overview.md")
    table = overview[overview.index("| part | responsible for") :].split("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines()]
    named = {span for cell in first_cells for span in re.findall(r"`([^`]+)`", cell)}
    parts = {
        path.relative_to(ROOT).as_posix()
        for path in [*(ROOT / "cheetah").iterdir(), ROOT / "models", ROOT / "runtime"]
        if not path.is_symlink() and path.name[0] not in "_." and path.suffix in ("", ".py")
    }
    assert named >= parts and all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.slow
def test_commands_can_be_typed(page: str) -> None:
    problems = []
    for program, *arguments in typed_commands(page):
        if program == "cheetah":
            if refusal := refusal_of(arguments):
                problems.append(f"cheetah {shlex.join(arguments)}: {refusal}")
        elif program == "make":
            problems += [f"make {name}" for name in arguments if name not in makefile_targets()]
    assert problems == []


def test_a_command_that_does_not_exist_is_seen() -> None:
    for arguments in (["brew", "tea"], ["run", "demo", "--no-such-option"], ["inspect", "demo", "--context", "many"]):
        assert refusal_of(arguments)


def test_options_that_are_named_exist() -> None:
    group = cheetah_command()
    commands = [group, *group.commands.values()]
    known = {name for command in commands for parameter in command.params for name in parameter.opts} | {"--help"}
    named = {span.split()[0] for page in PAGES for span in code_spans(page) if span.startswith("--")}
    others = {"--balance-abs-threshold": "vllm-router's", "--sanitize": "of the programs in examples/"}
    assert named and named - known == others.keys()


def test_every_command_has_a_row() -> None:
    rows = set(re.findall(r"^\| `cheetah (\w+) ", text_of("docs/cli.md"), re.MULTILINE))
    assert rows == set(cheetah_command().commands)


def test_the_first_commands_are_targets_of_the_makefile() -> None:
    first = [words for words in typed_commands("README.md")][:2]
    assert first == [["make", "demo"], ["make", "test"]]
    recipe = re.search(r"^demo:.*\n\t\$\(BIN\)/cheetah (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert refusal_of(shlex.split(recipe.group(1))) == ""


def test_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = re.findall(r"pip install '\S*\[(\w+)\]'", README)
    assert asked and set(asked) <= set(project["optional-dependencies"])


def test_extras_that_errors_name_are_those_of_the_readme() -> None:
    """`installing` says what the README says, and every extra that it is asked for exists."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folders = ("cheetah", "runtime", "models")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\binstalling\([\"'](\w+)[\"']\)", source)}
    assert named == {"cuda", "pycuda", "serve", "structured", "plot"} and named <= set(known)
    assert installing("cuda").partition(" in ")[0] in text_of("README.md")
    assert not any("cheetah-megakernel[" in source for source in sources), "no package index has it"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/language.md"])
def test_python_compiles(page: str) -> None:
    """But for the language's page, whose fragments `tests/lang/test_document.py` looks for in the examples."""
    for number, block in enumerate(blocks_of(page, "python")):
        compile(block, f"{page}, block {number}", "exec")


@pytest.mark.slow
@pytest.mark.compiler
def test_the_python_of_the_pages_runs() -> None:
    """That of the README and of docs/python.md, in one process: to begin takes as long as to run."""
    (short,), (long,) = blocks_of("README.md", "python"), blocks_of("docs/python.md", "python")
    done = subprocess.run([sys.executable, "-c", short + long], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "red kite" in done.stdout and "keys and values" in done.stdout


@cache
def described(model: str) -> Kernels:
    """The kernels of a model: two, of which one reads prompts."""
    two = AssemblyOptions(solo=False, prompt_passes=False)
    return KernelsAsked(resolve_config(model), gpu_named("h200"), 0, two).described()


def test_the_page_of_models_names_families_and_presets() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    named = [name for row in rows if (names := row.split("|")[-2].strip()) for name in names.split(", ")]
    assert sorted(named) == sorted(PRESETS)
    assert {f"`{name}`" for name in (*FAMILIES, *SEEING)} == {
        name for row in rows for name in row.split("|")[2].strip().split(", ")
    }


IN_MEMORY = [model for model in PRESETS if f"| {model} |" in MEMORY]
"""The presets of the table of memory."""


@pytest.mark.slow
@pytest.mark.parametrize("model", IN_MEMORY)
def test_memory_of_presets(model: str) -> None:
    row = re.findall(r"([\d.]+) [GK]B", MEMORY[MEMORY.index(f"| {model} |") :].splitlines()[0])
    estimate = described(model).memory()
    parts = [estimate.bytes_of(label) / 2**30 for label in ("weights", "embedding", "keys and values")]
    counted = [*parts[:2], estimate.kv_bytes_per_token / 2**10, parts[2], estimate.total_bytes / 2**30]
    assert [float(figure) for figure in row] == pytest.approx(counted, rel=0.01)


def in_formats() -> list[Any]:
    """The rows of the table of memory in 4 and 8 bits: of each, its models and its figures."""
    table = MEMORY[MEMORY.index("In 4 and 8 bits, with") :].split("\n\n")[1]
    rows = [row.split("|")[1:-1] for row in table.splitlines()[2:]]
    return [pytest.param(names.strip(), figures, id=names.strip()) for names, *figures in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "figures"), in_formats())
def test_memory_in_formats(names: str, figures: list[str]) -> None:
    model, *formats = names.split("@")
    for name in [f"{model}@{format.strip(', ')}" for format in formats] or [model]:
        kernels = described(name)
        estimate, step_bytes = kernels.memory(), kernels.specs[0].manifest.step_bytes
        read = step_bytes["weights"] + 1024 * step_bytes["kv_per_token"]
        counted = [size / 2**30 for size in (estimate.bytes_of("weights"), estimate.total_bytes, read)]
        assert [float(figure.replace(" GB", "")) for figure in figures] == pytest.approx(counted, rel=0.004)


@pytest.mark.parametrize("label", ["logits", "workspace"])
def test_ranges_of_memory(label: str) -> None:
    sizes = [described(model).memory().bytes_of(label) / 2**20 for model in IN_MEMORY]
    (words,) = re.findall(rf"{label}[^.;]*?(\d+ to \d+) MB", MEMORY)
    assert [int(number) for number in words.split(" to ")] == [math.floor(min(sizes)), math.ceil(max(sizes))]


def test_shared_memory_of_a_block() -> None:
    config, gpu = preset("llama-3.1-8b"), gpu_named("h200")
    shared = shared_map(config.shape, choose_plan(config, gpu), gpu)
    sizes = {region.name: region.nbytes for region in shared.regions if region.over is None}
    kernel = text_of("docs/internals/kernel.md")
    table = kernel[kernel.index("| region | bytes |") :].split("\n\n")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \| (\d+) \|", table, re.MULTILINE)
    named = {name: int(size) for names, size in rows for name in [names]}
    assert {names: sum(sizes.pop(name) for name in names.split(", ")) for names in named} == named
    assert not sizes, "regions that the page does not name"


def table_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


def written_rows(page: str) -> list[str]:
    """The rows of a page's table of speeds, without its two lines of head."""
    text = text_of(page)
    return text[text.index("<!-- speeds") : text.index("<!-- end of speeds -->")].splitlines()[3:]


def test_speeds_are_those_of_records() -> None:
    table = table_module()
    allowed = {table.speed_row(record) for record in table.read_records(RECORDS)}
    written = written_rows("benchmarks/RESULTS.md")
    assert len(written) >= 6
    assert [row for row in written if row not in allowed] == []


def test_speeds_of_the_readme_are_of_the_last_run_that_has_them_all() -> None:
    """And the README names its commit; `python benchmarks/table.py --readme benchmarks/results/*.jsonl` prints them."""
    table = table_module()
    ours = table.read_records(RECORDS)
    assert written_rows("README.md") == table.readme_rows(ours, table.read_all(RECORDS))
    (commit,) = {record["commit"] for record in table.last_full_run(ours).values()}
    assert f"commit {commit[:7]}" in README


def test_tables_are_written_from_records(tmp_path: Path) -> None:
    """As they stand where nothing new was measured; a new run of all works changes the README's rows and its commit."""
    table = table_module()
    (tmp_path / "benchmarks").mkdir()
    pages = ("README.md", "benchmarks/RESULTS.md")
    for page in pages:
        (tmp_path / page).write_text(text_of(page), encoding="utf-8")
    table.write_tables(tmp_path, RECORDS)
    assert [(tmp_path / page).read_text(encoding="utf-8") for page in pages] == [text_of(page) for page in pages]
    run = table.last_full_run(table.read_records(RECORDS))
    later = {"commit": "abcdef012345", "measured": "2999", "tokens_per_s": 77777.0}
    (tmp_path / "later.jsonl").write_text("\n".join(json.dumps({**run[work], **later}) for work in table.README_WORKS))
    table.write_tables(tmp_path, [*RECORDS, tmp_path / "later.jsonl"])
    readme, results = ((tmp_path / page).read_text(encoding="utf-8") for page in pages)
    assert readme.count("| 77777 |") == len(table.README_WORKS) == results.count("| 77777 |")
    assert "commit abcdef0." in readme


def test_the_readme_takes_one_run_and_other_systems_beside_it() -> None:
    table = table_module()
    figures = {"tokens_per_s": 100.0, "ms_per_step": 10.0, "share": 0.5}
    works = [
        (model, {"contexts": [int(work.split(" x ")[-1])] * (8 if " x " in work else 1)})
        for model, work in table.README_WORKS
    ]
    full = [{"model": model, "commit": "a", "measured": "1", **work, **figures} for model, work in works]
    later = [{**record, "commit": "b", "measured": "2", "tokens_per_s": 200.0} for record in full]
    others = [{**full[0], "system": system} for system in ("gpt-fast", "transformers static cache", "plain")]
    first, *_ = table.readme_rows([*full, *later[:-1]], others)
    assert first == f"| {works[0][0]} | 128 | 100 | 10.000 | 50.0 % | 100 | 100 |"
    rows = table.readme_rows([*full, *later], others[:1])
    assert rows[0].endswith("| 200 | 10.000 | 50.0 % | | 100 |") and rows[1].endswith("| 200 | 10.000 | 50.0 % | | |")


def test_a_record_makes_a_row() -> None:
    record = {"system": "cheetah", "model": "m", "context": 128, "tokens_per_s": 281.44, "ms_per_step": 3.5532}
    record |= {"gb_per_s": 4229.0, "ceiling_gb_per_s": 4719.6, "share": 0.89606}
    assert table_module().speed_rows([record]) == ["| m | 128 | 281 | 3.553 | 4229 | 4720 | 89.6 % |"]


def test_rows_are_of_launches_without_rests_and_the_latest_one_counts(tmp_path: Path) -> None:
    record = {"system": "cheetah", "model": "m", "context": 128, "tokens_per_s": 800.0, "ms_per_step": 10.0}
    record |= {"gb_per_s": 1000.0, "ceiling_gb_per_s": 4000.0, "share": 0.25}
    times = [{"measured": "2026-11-22T21:50:07Z", "tokens_per_s": 802.0}, {"measured": "2026-11-22T20:50:07Z"}, {}]
    left_out = [{"rest_s": 0.1}, {"held_s": 10.0}, {"share": None}, {"system": "other"}]
    for name, changes in {"a": times, "b": [{**one, "model": "left out"} for one in left_out]}.items():
        (tmp_path / name).write_text("\n".join(json.dumps({**record, "rest_s": 0.0, **one}) for one in changes))
    records = table_module().read_records([tmp_path / "a", tmp_path / "b"])
    assert [one.get("measured", "")[11:13] for one in records] == ["", "20", "21"]
    assert table_module().speed_rows(records) == ["| m | 128 | 802 | 10.000 | 1000 | 4000 | 25.0 % |"]


def test_a_row_says_what_was_cached_and_the_last_record_of_a_work_counts() -> None:
    record = {"system": "cheetah", "model": "m", "context": 128, "tokens_per_s": 800.0, "ms_per_step": 10.0}
    record |= {"gb_per_s": 1000.0, "ceiling_gb_per_s": 4000.0, "share": 0.25}
    works = [
        {"batch": 8},  # as records said it before they had `contexts`
        {"batch": 8, "contexts": [128] * 8, "shared": 0, "per_step": 1, "tokens_per_s": 801.0},
        {"batch": 8, "contexts": [128] * 8, "shared": 64, "per_step": 1},
        {"batch": 2, "contexts": [128, 500], "shared": 0, "per_step": 1},
        {"batch": 1, "contexts": [128], "shared": 0, "per_step": 32},
        {"plan": {"kv_dtype": "e4m3"}},
        {"plan": {"kv_dtype": "bf16"}},
    ]
    rows = table_module().speed_rows([{**record, **work} for work in works])
    assert [row.split("|")[2:4] for row in rows] == [
        [" 8 x 128 ", " 801 "],
        [" 8 x 128, 64 shared ", " 800 "],
        [" 128+500 ", " 800 "],
        [" 128, 32 a step ", " 800 "],
        [" 128, e4m3 ", " 800 "],
        [" 128 ", " 800 "],
    ]
