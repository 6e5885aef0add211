"""`cheetah generate`: what it writes, under which names, and that the command in the header writes it again."""

import json
import shlex
from pathlib import Path

import huggingface_hub
import pytest
from commands import cheetah, refused

from cheetah.manifest import Manifest
from cheetah.models.registry import DEMO_FOLDER, preset
from cheetah.runtime.assembly.compile import CompileError
from cheetah.runtime.assembly.cubin import Cubin, ResourceReport

made_once = pytest.mark.usefixtures("kernels_made_once")


def generate(folder: Path, *arguments: str | Path) -> dict[str, Path]:
    """Runs the command without compiling; the files it wrote, by ending."""
    result = cheetah("generate", *arguments, "-o", folder, "--no-compile")
    assert result.exit_code == 0, result.output
    return {path.suffix: path for path in folder.iterdir()}


def header_command(text: str) -> str:
    return next(line.partition(": ")[2] for line in text.splitlines() if "Regenerate with" in line)


@made_once
@pytest.mark.slow
def test_writes_a_kernel_and_its_manifest(tmp_path: Path) -> None:
    files = generate(tmp_path, "demo")
    assert {path.name for path in files.values()} == {"demo-h200.cu", "demo-h200.json"}
    manifest = Manifest.read(files[".json"])
    manifest.check_text(files[".cu"].read_text())
    assert manifest.command == "cheetah generate demo"
    assert header_command(files[".cu"].read_text()) == manifest.command


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--gpu emulator-8 --line-marks",
        "--sync barrier --page-size 64 --consumer-warps 4 --stages 6 --in-flight 2 --stage-bytes 32768 "
        "--max-context 128 --max-steps 16 --kv-chunk 128",
        "--prompt-pass 256 --batch 4",
    ],
)
def test_the_command_in_the_header_writes_the_same_text(tmp_path: Path, options: str) -> None:
    first = generate(tmp_path / "first", "demo", *options.split())
    command = header_command(first[".cu"].read_text())
    program, subcommand, *arguments = shlex.split(command)
    assert (program, subcommand) == ("cheetah", "generate")
    again = generate(tmp_path / "again", *arguments)
    assert [path.name for path in again.values()] == [path.name for path in first.values()]
    assert again[".cu"].read_bytes() == first[".cu"].read_bytes()
    assert again[".json"].read_bytes() == first[".json"].read_bytes()


@pytest.mark.slow
def test_options_that_say_what_the_rule_says_change_nothing(tmp_path: Path) -> None:
    plain = generate(tmp_path / "plain", "demo")
    chosen = generate(tmp_path / "chosen", "demo", "--sync", "flags", "--page-size", "16", "--gpu", "h200")
    assert chosen[".cu"].name == plain[".cu"].name
    assert chosen[".cu"].read_bytes() == plain[".cu"].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--consumer-warps", "6", "--stage-bytes", "24576"), " --consumer-warps 6"),  # what the rule makes of 6 warps
        (("--consumer-warps", "8", "--stage-bytes", "32768"), " --stage-bytes 32768"),  # 8 warps are the rule
    ],
)
def test_only_options_that_change_something_are_in_the_command(
    tmp_path: Path, options: tuple[str, ...], kept: str
) -> None:
    assert Manifest.read(generate(tmp_path, "demo", *options)[".json"]).command == "cheetah generate demo" + kept


@pytest.mark.slow
def test_a_folder_is_named_without_its_path(tmp_path: Path) -> None:
    model = tmp_path / "somewhere" / "My-Model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(preset("demo").to_dict()))
    for name in (model, model / "config.json"):
        files = generate(tmp_path / f"out-{len(str(name))}", name)
        assert files[".cu"].name == "my-model-h200.cu"
        assert str(tmp_path) not in files[".cu"].read_text() + files[".json"].read_text()
        assert Manifest.read(files[".json"]).command == "cheetah generate My-Model"


@made_once
@pytest.mark.slow
def test_of_a_hub_id_the_configuration_alone_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def download(repository: str, file: str, **_: object) -> str:
        fetched.append((repository, file))
        return str(DEMO_FOLDER / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    files = generate(tmp_path, "someone/Their-Model")
    assert fetched == [("someone/Their-Model", "config.json")]
    assert files[".cu"].name == "their-model-h200.cu"
    assert Manifest.read(files[".json"]).command == "cheetah generate someone/Their-Model"


def test_a_hub_id_that_cannot_be_fetched_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert "someone/their-model: its config.json cannot be fetched: no route to host" in refused(
        "generate", "someone/their-model"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--sync", "hope"), "sync is 'hope': choose one of flags, barrier"),
        (("demo", "--gpu", "a100"), "gpu 'a100' is not known"),
        (("demo", "--stages", "40"), "use fewer or smaller stages"),
    ],
)
def test_what_cannot_be_generated_is_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("generate", *arguments, "-o", tmp_path)
    assert not list(tmp_path.iterdir())


@made_once
@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    assert f"cannot write to {folder}: Not a directory" in refused("generate", "demo", "-o", folder)


@made_once
@pytest.mark.slow
def test_prints_each_choice_and_each_file(tmp_path: Path) -> None:
    text = cheetah("generate", "demo", "-o", tmp_path, "--no-compile").stdout
    for field, value in Manifest.read(tmp_path / "demo-h200.json").plan.items():
        assert any(line.split()[:2] == [field, str(value)] for line in text.splitlines()), field
    assert f"wrote {tmp_path / 'demo-h200.cu'}" in text and f"wrote {tmp_path / 'demo-h200.json'}" in text


@made_once
@pytest.mark.slow
def test_writes_the_cubin_with_its_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = ResourceReport(99, 16, 0, 0, 0)
    cubin = Cubin("decode_step", b"code", "NVRTC 1", (), resources, 0.1, cached=False, path=None)

    class Compiler:
        version = "NVRTC 1"

    monkeypatch.setattr("cheetah.runtime.assembly.compile.find_compiler", lambda name: Compiler())
    monkeypatch.setattr("cheetah.runtime.assembly.compile.compile_cubin", lambda *_, **__: cubin)
    text = cheetah("generate", "demo", "-o", tmp_path).stdout
    assert (tmp_path / "demo-h200.cubin").read_bytes() == b"code"
    shared = Manifest.read(tmp_path / "demo-h200.json").launch.shared_bytes
    assert "99 registers" in text and "no spills" in text and f"{shared + 16} bytes of shared memory" in text


@made_once
@pytest.mark.slow
def test_without_a_compiler_there_is_no_cubin_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cheetah.runtime.assembly.compile.shutil.which", lambda name: None)
    result = cheetah("generate", "demo", "-o", tmp_path, "--compiler", "nvcc")
    assert result.exit_code == 0 and "no cubin: nvcc is neither" in result.stdout
    assert not (tmp_path / "demo-h200.cubin").exists()


@made_once
@pytest.mark.slow
def test_what_to_install_is_printed_as_it_is_to_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets are nothing special in a message."""

    def absent(name: str) -> None:
        raise CompileError(f"no {name}: pip install '.[cuda]'")

    monkeypatch.setattr("cheetah.runtime.assembly.compile.find_compiler", absent)
    text = cheetah("generate", "demo", "-o", tmp_path).stdout
    assert "no cubin: no nvrtc: pip install '.[cuda]'; with a CUDA toolkit: --compiler nvcc" in text


@pytest.mark.slow
def test_a_batch_is_in_the_file_name_and_the_command_and_the_tokens_follow_by_rule(tmp_path: Path) -> None:
    text = cheetah("generate", "demo", "-o", tmp_path, "--batch", "3", "--tokens", "4", "--no-compile").stdout
    manifest = Manifest.read(tmp_path / "demo-h200-batch-3.json")
    assert manifest.command == "cheetah generate demo --batch 3"
    assert (manifest.plan["batch"], manifest.plan["tokens"]) == (3, 4)
    assert [line.split()[1] for line in text.splitlines() if line.startswith(("batch ", "tokens "))] == ["3", "4"]
    shapes = {buffer.name: buffer.shape for buffer in manifest.buffers}
    assert (shapes["sequences"][0], shapes["columns"][0], shapes["tokens"]) == (3, 4, (3, 4 * 64 + 1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch", "9"), "batch is 9: at most 8 sequences share one step"),
        (("--batch", "4", "--tokens", "2"), "tokens is 2 with batch 4: each sequence has one at least"),
        (("--tokens", "3"), "tokens is 3: a step takes 1, 2, 4, 8, 16, 32, 64 together"),
        (("--kv-chunk", "100"), "kv_chunk 100 is no multiple of 16"),
        (("--kv-dtype", "int4"), "kv_dtype is 'int4': choose one of bf16, e4m3"),
    ],
)
def test_a_step_that_cannot_be_is_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("generate", "demo", "-o", tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
