"""`cheetah run` with the demo model in the emulator."""

import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from commands import cheetah, refused

from cheetah.cli import app
from cheetah.cli.options import SAMPLING_OPTIONS
from cheetah.cli.run import MOST_TOGETHER, _one_after_another, _reading
from cheetah.options import about, options_of
from cheetah.plan.plan import DEFAULT_CONTEXT, MAX_BATCH
from cheetah.runtime import LLM, SamplingParams, StreamPiece
from cheetah.runtime.checked_options import DEFAULT_BATCH
from cheetah.runtime.engine.requests import Decoded
from cheetah.runtime.options import LoadOptions

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels_made_once")]
PROMPT = "One morning,"
EMULATOR = ("--device", "emulator", "--max-context", "96")


@pytest.fixture(scope="module")
def completion(kernels_made_once: None) -> str:
    with LLM("demo", device="emulator", max_context=96, batch=1, quiet=True) as llm:
        text = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0)).text
    assert text
    return text


@pytest.mark.slow
def test_writes_the_completion_to_stdout_and_timings_to_stderr(completion: str) -> None:
    result = cheetah("run", "demo", PROMPT, "--max-tokens", "12", "--temperature", "0", *EMULATOR)
    assert result.exit_code == 0 and result.stdout == completion + "\n"
    assert "12 tokens (length)" in result.stderr and "emulated: not a speed" in result.stderr
    assert "batch 1" in result.stderr and "bf16" in result.stderr


def test_the_limits_that_the_help_names_are_the_plan_s() -> None:
    """Help is printed without loading the plan, so its numbers stand there once more."""
    helps = {name: about(one).help for name, one in options_of(LoadOptions).items()}
    assert f"at most {DEFAULT_CONTEXT}." in helps["max_context"]
    assert MOST_TOGETHER == MAX_BATCH == DEFAULT_BATCH and f"1 to {MAX_BATCH}; by default {MAX_BATCH}" in helps["batch"]


def test_options_that_open_a_model_are_those_of_the_class_in_every_command() -> None:
    """Name, type and help are written once; the class says them too."""
    options, named = options_of(LoadOptions), inspect.signature(LLM).parameters
    assert {"model", *options} == {*named} and named["batch"].default is None and named["prefix_cache"].default is True
    text = " ".join((LLM.__doc__ or "").split())
    for name, one in options.items():
        assert f"{name}" in text and about(one).help in text
    commands = typer.main.get_command(app)
    for command in ("run", "serve", "chat", "batch"):
        flags = {flag for one in commands.commands[command].params for flag in one.opts}  # type: ignore[attr-defined]
        assert {"--device", "--gpu", "--max-context", "--kv-dtype", "--revision", "--verbose"} <= flags
        assert {"--max-model-len", "--kv-cache-dtype", "--gpu-memory-utilization", "--lora"} <= flags, "vLLM's names"


@pytest.mark.slow
def test_reads_the_prompt_from_stdin(completion: str) -> None:
    result = cheetah("run", "demo", "-", "--max-tokens", "12", "--temperature", "0", *EMULATOR, stdin=PROMPT + "\n")
    assert result.stdout == completion + "\n"


@pytest.mark.slow
def test_a_stop_text_ends_it(completion: str) -> None:
    stop = completion.split()[2]
    result = cheetah("run", "demo", PROMPT, "--max-tokens", "12", "--temperature", "0", "--stop", stop, *EMULATOR)
    assert result.stdout == completion.partition(stop)[0] + "\n" and "(stop)" in result.stderr


@pytest.mark.slow
def test_options_of_sampling_are_those_of_the_parameters(completion: str) -> None:
    assert {*SAMPLING_OPTIONS} < {*SamplingParams.__dataclass_fields__}
    word = completion.split()[2]
    options = ("--bad-words", word, "--bad-words", "x", "--top-k", "1", "--no-skip-special-tokens", "--min-tokens", "4")
    result = cheetah("run", "demo", PROMPT, "--max-tokens", "12", "--temperature", "1", *options, *EMULATOR)
    with LLM("demo", device="emulator", max_context=96, batch=1, quiet=True) as llm:
        params = {"bad_words": [word, "x"], "top_k": 1, "skip_special_tokens": False, "min_tokens": 4}
        wanted = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1, seed=0, **params)).text or ""
    assert result.stdout == wanted + "\n" != completion + "\n"
    assert "top_p=2.0: expected" in refused("run", "demo", PROMPT, "--top-p", "2", *EMULATOR)


@pytest.mark.slow
def test_a_seed_gives_the_same_text_again() -> None:
    options = ("--max-tokens", "12", "--temperature", "1.2", *EMULATOR)
    texts = [cheetah("run", "demo", PROMPT, "--seed", seed, *options).stdout for seed in ("5", "5", "6")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_random_weights_take_and_give_ids() -> None:
    """A preset has no tokenizer; a model this small has the same shape of output."""
    options = ("--sync", "barrier", "--verbose", *EMULATOR)
    result = cheetah("run", "random:demo", "--ids", "1,2,3", "--max-tokens", "5", *options)
    assert result.exit_code == 0 and "3 prompt tokens" in result.stderr
    read = re.search(r"^decode read 1\.\d MB a step, in (\d+) steps; the emulator has no speed", result.stderr, re.M)
    assert read and int(read[1]) >= 4
    assert "random numbers" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo",), "no prompt"),
        (("demo", "text", "--ids", "1"), "--ids takes the place of PROMPT"),
        (("demo", "--ids", "1,x"), "--ids 1,x: expected token ids"),
        (("random:llama-3.1-8b", "text"), "random:llama-3.1-8b has no tokenizer: give token ids"),
        (("llama-3.1-8b", "text"), "a preset has no weights: use random:llama-3.1-8b"),
        (("demo", "text", "--device", "tpu"), "unknown device 'tpu'"),
        (("demo", "text", "--temperature", "-1"), "temperature"),
        (("demo", "text", "--lora", "one", "--lora", "two"), "several at a time are not supported"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused("run", *arguments)


def test_chat_uses_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(LLM, "stream_chat", lambda llm, messages, params: seen.append(messages) or iter(()))
    assert cheetah("run", "demo", "Hello", "--chat", *EMULATOR).exit_code == 0
    assert seen == [[{"role": "user", "content": "Hello"}]]


@pytest.mark.slow
def test_the_kernel_is_the_one_that_generate_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(LLM, "stream", lambda llm, ids, params: seen.append(llm.manifest) or iter(()))
    assert cheetah("run", "demo", "--ids", "1", "--sync", "barrier", *EMULATOR).exit_code == 0
    options = "--gpu emulator --max-context 96 --sync barrier"
    assert seen[0].command == f"cheetah generate demo {options}"


@pytest.mark.slow
def test_several_completions_are_written_one_after_another() -> None:
    options = ("--max-tokens", "6", "--temperature", "1.2", "--seed", "5", *EMULATOR)
    result = cheetah("run", "demo", PROMPT, "-n", "2", *options)
    first, second = re.findall(r"--- completion \d of 2\n(.*?)\n(?=---|\Z)", result.stdout, re.DOTALL)
    assert first + "\n" == cheetah("run", "demo", PROMPT, *options).stdout and first != second
    assert result.stderr.count("tokens/s each (batch 2") == 2


def test_pieces_of_several_completions_are_sorted_and_the_first_is_not_held_back() -> None:
    taken: list[StreamPiece] = []

    def source() -> Iterator[StreamPiece]:
        for piece, index in (("a", 0), ("p", 1), ("b", 0), ("Q", 1), ("X", 2), ("C", 0)):
            taken.append(StreamPiece(piece, (), piece.isupper(), index=index))
            yield taken[-1]

    sorted_pieces = _one_after_another(source())
    assert [next(sorted_pieces).text, next(sorted_pieces).text, len(taken)] == ["a", "b", 3]
    assert "".join(piece.text or "" for piece in sorted_pieces) == "CpQX"


def test_help_says_what_is_by_default() -> None:
    assert re.search(r"default: 128", cheetah("run", "--help").stdout)


def test_verbose_tells_the_share_of_the_read_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cheetah.tools.kept_ceiling.read_ceiling", lambda llm: 4400.0)
    load = SimpleNamespace(decoded=Decoded(steps=100, seconds=0.4, nbytes=1_600_000_000_000))
    llm: Any = SimpleNamespace(engine=SimpleNamespace(engine=SimpleNamespace(load=lambda: load)))
    assert _reading(llm) == (
        "decode read 16000.0 MB a step, in 100 steps: 4000 GB/s by the host's clock, 90.9% of the read ceiling, "
        "4400 GB/s (measured once a machine)"
    )
