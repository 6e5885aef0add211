"""`LLM` end to end on the device that runs the reference: text, ids, chat, streams, scores, stops, limits, closing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_kernel import FakeDevice, generate_kernel
from tiny_models import TinyWeights, tiny_config, tiny_weights, write_checkpoint
from tiny_tokenizers import byte_fallback, byte_level

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime import LLM, RequestOutput, SamplingParams, StreamPiece
from cheetah.runtime.sampling import seed_of

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
TOKENIZER_FILES = {
    "tokenizer.json": byte_level(),
    "tokenizer_config.json": {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a Llama-3-like tokenizer and no end token."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_weights(), TOKENIZER_FILES)


def opened(model: Path | str, device: FakeDevice | None = None, **options: Any) -> LLM:
    options = {"quiet": True, "generate_kernel": generate_kernel, "device": device or FakeDevice()} | options
    return LLM(model, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return opened(folder)


def reference_ids(prompt: tuple[int, ...], count: int, weights: TinyWeights | None = None, **how: Any) -> list[int]:
    weights = weights or tiny_weights()
    return Reference(weights.config, weights.tensors, round_to_bf16).generate(prompt, count, **how)


def joined(pieces: list[StreamPiece]) -> tuple[str, tuple[int, ...]]:
    return "".join(piece.text or "" for piece in pieces), tuple(token for piece in pieces for token in piece.token_ids)


def test_text_in_text_out(llm: LLM) -> None:
    output = llm.generate("hello there", SamplingParams(max_tokens=20))
    assert llm.tokenizer is not None
    assert output.prompt == "hello there" and output.prompt_token_ids[0] == llm.tokenizer.bos_id
    assert list(output.token_ids) == reference_ids(output.prompt_token_ids, 20)
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.timings.prompt_tokens == len(output.prompt_token_ids) and output.timings.completion_tokens == 20


def test_verbose_tells_the_seconds_of_each_stage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(folder).close()
    assert capsys.readouterr().err == ""
    opened(folder, verbose=True).close()
    lines = [line.partition(" s  ") for line in capsys.readouterr().err.splitlines()]
    seconds = {stage: float(number) for number, _, stage in lines}
    wanted = ["open the checkpoint", "tokenizer", "open the device", "write the kernels", "upload", "weights"]
    assert [stage for stage in seconds if stage in wanted] == wanted
    before, whole = seconds["Python and what was done before"], seconds["all, since the process began"]
    assert 0 < before <= whole


def test_ids_in_are_used_as_they_are(llm: LLM) -> None:
    for ids in ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7])):
        output = llm.generate(ids, SamplingParams(max_tokens=3))
        assert output.prompt is None and output.prompt_token_ids == (5, 6, 7)
        assert list(output.token_ids) == reference_ids((5, 6, 7), 3)


def test_several_prompts_give_several_outputs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=9)
    several = llm.generate(["he", "the"], params)
    assert [output.text for output in several] == [llm.generate("he", params).text, llm.generate("the", params).text]
    assert [output.prompt_token_ids for output in llm.generate([[1], [2, 3]], params)] == [(1,), (2, 3)]


def test_a_list_is_checked_before_its_first_prompt_runs(folder: Path) -> None:
    device = FakeDevice()
    with pytest.raises(CheetahError, match="id 300 at position 0"):
        opened(folder, device).generate([[1], [300]], SamplingParams(max_tokens=1))
    assert device.launches == []


def test_seeds_decide_and_repeat(folder: Path, llm: LLM) -> None:
    def ids(llm: LLM, **params: Any) -> tuple[int, ...]:
        return llm.generate([1, 2, 3], SamplingParams(max_tokens=12, **params)).token_ids

    assert ids(llm, temperature=1.5, seed=1) == ids(llm, temperature=1.5, seed=1)
    assert ids(llm, temperature=1.5, seed=1) != ids(llm, temperature=1.5, seed=2)
    assert ids(llm, temperature=1.5) == ids(llm, temperature=1.5, seed=0)
    other = opened(folder, seed=5)
    assert ids(other, temperature=1.5) == ids(llm, temperature=1.5, seed=5)
    assert ids(other, temperature=1.5, seed=0) == ids(llm, temperature=1.5, seed=0)
    assert ids(llm) == ids(llm, temperature=0.0, seed=77), "greedy is the default, and no seed matters to it"


@pytest.mark.parametrize("launch_steps", [1, 3, 64])
def test_streamed_pieces_are_the_output(folder: Path, llm: LLM, launch_steps: int) -> None:
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=4)
    pieces = list(opened(folder, launch_steps=launch_steps).stream("hello", params))
    whole = llm.generate("hello", params)
    assert joined(pieces) == (whole.text, whole.token_ids)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish_reason == "length" and pieces[-1].timings is not None


def test_a_stop_string_is_cut_and_never_shown(folder: Path, llm: LLM) -> None:
    plain = llm.generate("hello", SamplingParams(max_tokens=40))
    assert plain.text is not None
    stop = plain.text[10:13]
    expected = plain.text[: plain.text.index(stop)]
    for launch_steps in (1, 64):
        other = opened(folder, launch_steps=launch_steps)
        output = other.generate("hello", SamplingParams(max_tokens=40, stop=[stop, "never there"]))
        assert (output.text, output.finish_reason, output.stop_reason) == (expected, "stop", stop)
        assert output.token_ids == plain.token_ids[: len(output.token_ids)]
        assert output.timings.completion_tokens == len(output.token_ids) < 40
    kept = llm.generate("hello", SamplingParams(max_tokens=40, stop=stop, include_stop_str_in_output=True))
    assert kept.text == expected + stop


def test_min_tokens_holds_for_stop_strings_too(llm: LLM) -> None:
    plain = llm.generate("hello", SamplingParams(max_tokens=12))
    assert plain.text is not None
    output = llm.generate("hello", SamplingParams(max_tokens=12, stop=list(set(plain.text)), min_tokens=9))
    assert 9 <= len(output.token_ids) < 12 and output.finish_reason == "stop"  # the ninth may be half a character
    assert len(llm.generate("hello", SamplingParams(max_tokens=12, stop=list(set(plain.text)))).token_ids) < 9


@pytest.mark.parametrize("where", ["generation_config", "config", "list", "caller"])
def test_end_tokens_of_every_source_stop_and_are_not_text(tmp_path: Path, llm: LLM, where: str) -> None:
    plain = llm.generate([1, 2, 3], SamplingParams(max_tokens=20))
    end = plain.token_ids[6]
    files: dict[str, Any] = dict(TOKENIZER_FILES)
    if where in ("generation_config", "list"):
        files["generation_config.json"] = {"eos_token_id": end if where == "generation_config" else [299, end]}
    config = {"eos_token_id": end} if where == "config" else {}
    other = opened(write_checkpoint(tmp_path, tiny_weights(), files, **config))
    params = SamplingParams(max_tokens=20, stop_token_ids=[end] if where == "caller" else [])
    output = other.generate([1, 2, 3], params)
    first = plain.token_ids.index(end)
    assert output.token_ids == plain.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", end)
    assert other.tokenizer is not None and output.text == other.tokenizer.decode(output.token_ids[:-1], after=(1, 2, 3))
    ignoring = other.generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    assert ignoring.token_ids == plain.token_ids


def test_defaults_of_the_checkpoint_are_used(tmp_path: Path, llm: LLM) -> None:
    files = TOKENIZER_FILES | {"generation_config.json": {"do_sample": True, "temperature": 1.7}}
    other = opened(write_checkpoint(tmp_path, tiny_weights(), files))
    sampled = other.generate([1, 2], SamplingParams(max_tokens=9)).token_ids
    assert sampled == llm.generate([1, 2], SamplingParams(max_tokens=9, temperature=1.7)).token_ids
    assert other.generate([1, 2], SamplingParams(max_tokens=9, temperature=0)).token_ids != sampled


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = tiny_weights(tied=True)
    output = opened(write_checkpoint(tmp_path, weights)).generate([1, 2, 3], SamplingParams(max_tokens=9))
    assert list(output.token_ids) == reference_ids((1, 2, 3), 9, weights)


def test_without_a_tokenizer_ids_work_and_text_is_refused(tmp_path: Path, folder: Path) -> None:
    for bare in (opened(write_checkpoint(tmp_path, tiny_weights())), opened(folder, tokenizer=False)):
        output = bare.generate([1, 2, 3], SamplingParams(max_tokens=5))
        assert output.text is None and len(output.token_ids) == 5
        assert [piece.text for piece in bare.stream([1, 2], SamplingParams(max_tokens=2))] == [None, None]
        for refused in (
            lambda llm: llm.generate("text"),
            lambda llm: llm.chat([{"role": "user", "content": "x"}]),
            lambda llm: llm.generate([1], SamplingParams(stop="x")),
        ):
            with pytest.raises(CheetahError, match="needs a tokenizer, and there is none"):
                refused(bare)


def test_a_llama_2_continuation_keeps_its_space(tmp_path: Path) -> None:
    files = {"tokenizer.json": byte_fallback(), "tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": True}}
    other = opened(write_checkpoint(tmp_path, tiny_weights(), files))
    output = other.generate("the", SamplingParams(max_tokens=30, temperature=3.0))
    assert other.tokenizer is not None
    assert output.text == other.tokenizer.decode(output.token_ids, after=output.prompt_token_ids)


def test_chat_renders_without_a_second_bos(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    output = llm.chat(messages, SamplingParams(max_tokens=6))
    assert output.prompt == "<|begin|><|turn|>hello:"
    assert llm.tokenizer is not None and output.prompt_token_ids.count(llm.tokenizer.bos_id) == 1
    assert joined(list(llm.stream_chat(messages, SamplingParams(max_tokens=6)))) == (output.text, output.token_ids)
    one = SamplingParams(max_tokens=1)
    assert llm.chat(messages, one, add_generation_prompt=False).prompt == "<|begin|><|turn|>hello"
    assert llm.chat(messages, one, chat_template="{{ messages[0].role }}").prompt == "user"


def test_scores_are_float32_logits_of_every_position(llm: LLM) -> None:
    ids = tuple(range(0, 300, 4))
    scores = llm.score(ids)
    assert scores.dtype == np.float32 and scores.shape == (75, 300)
    wanted = Reference(tiny_config(), tiny_weights().tensors, round_to_bf16).forward(ids)
    np.testing.assert_array_equal(scores, wanted)
    assert llm.score([5])[0].argmax() == llm.generate([5], SamplingParams(max_tokens=1)).token_ids[0]


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "has no tokens"),
        ([300], {}, r"id 300 at position 0 is outside the vocabulary 0\.\.299"),
        ([-1], {}, "id -1"),
        ([1.5, 2], {}, "neither text nor a sequence of integer"),
        (3, {}, "neither text nor a sequence of integer"),
        ([1], {"stop_token_ids": [300]}, "stop_token_ids: id 300"),
        ([1], {"max_tokens": 201}, r"201 tokens do not fit the context of 200"),
        ([1] * 201, {}, "201 tokens do not fit"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    folder: Path, prompt: Any, params: dict[str, Any], message: str
) -> None:
    device = FakeDevice()
    llm = opened(folder, device)
    with pytest.raises(CheetahError, match=message):
        llm.generate(prompt, SamplingParams(**params))
    with pytest.raises(CheetahError, match=message):
        llm.stream(prompt, SamplingParams(**params))
    assert device.launches == []


def test_no_max_tokens_fills_the_context(folder: Path) -> None:
    output = opened(folder, max_context=30).generate([1, 2, 3, 4])
    assert len(output.token_ids) == 27 and output.finish_reason == "length"
    assert list(output.token_ids) == reference_ids((1, 2, 3, 4), 27)


@pytest.mark.parametrize("asked, message", [(0, "max_context=0"), (201, "max_position_embeddings, 200"), ("x", "'x'")])
def test_a_context_the_model_does_not_have_is_refused(folder: Path, asked: Any, message: str) -> None:
    with pytest.raises(CheetahError, match=message):
        opened(folder, max_context=asked)


def test_plan_choices_reach_the_generator_and_change_no_token(folder: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8)
    choices = {"page_size": 64, "max_steps": 5}
    other = opened(folder, FakeDevice("emulator-8"), gpu="emulator-8", sync="barrier", plan=choices)
    assert other.manifest.plan["page_size"] == 64 and other.manifest.plan["sync"] == "barrier"
    assert other.manifest.launch.blocks == 8
    assert other.generate("he", params).token_ids == llm.generate("he", params).token_ids


def test_an_overtaken_stream_says_so(folder: Path) -> None:
    llm = opened(folder, launch_steps=1, batch=1)
    for overtake in (lambda: llm.generate([1], SamplingParams(max_tokens=1)), lambda: llm.score([1])):
        stream = llm.stream("hello", SamplingParams(max_tokens=9))
        next(stream)
        overtake()
        with pytest.raises(CheetahError, match="another request began"):
            next(stream)


@pytest.fixture(scope="module")
def batch_llm(folder: Path) -> LLM:
    return opened(folder, batch=4)


@pytest.mark.slow
def test_a_list_runs_together_and_comes_back_in_order(folder: Path, llm: LLM) -> None:
    prompts: list[Any] = ["hello", [1, 2, 3], "the quick brown fox jumped", [7], "x", [5] * 40]
    params = SamplingParams(max_tokens=15, temperature=1.1, seed=3)
    device = FakeDevice()
    together = opened(folder, device, batch=4).generate(prompts, params)
    assert max(len(launch["sequences"]) for launch in device.launches) == 4
    for output, prompt in zip(together, prompts, strict=True):
        one = llm.generate(prompt, params)
        assert (output.text, output.token_ids, output.prompt) == (one.text, one.token_ids, one.prompt)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_several_completions_draw_with_seeds_of_their_own(folder: Path, llm: LLM, batch: int) -> None:
    params = SamplingParams(n=4, max_tokens=12, temperature=1.4, seed=11)
    output = opened(folder, batch=batch).generate("hello there", params)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    for one in output.outputs:
        seed = seed_of(11, one.index)
        alone = llm.generate("hello there", SamplingParams(max_tokens=12, temperature=1.4, seed=seed))
        assert (one.text, one.token_ids, one.finish_reason) == (alone.text, alone.token_ids, "length")
    assert len({one.token_ids for one in output.outputs}) == 4
    assert (output.text, output.token_ids) == (output.outputs[0].text, output.outputs[0].token_ids)


def test_several_greedy_completions_are_the_same(batch_llm: LLM) -> None:
    output = batch_llm.generate([1, 2, 3], SamplingParams(n=3, max_tokens=9))
    assert {one.token_ids for one in output.outputs} == {tuple(reference_ids((1, 2, 3), 9))}


def test_a_list_of_prompts_with_several_completions_each(batch_llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=6, temperature=1.4)
    outputs = batch_llm.generate([[1, 2], [3]], params)
    assert [one.token_ids for output in outputs for one in output.outputs] == [
        tuple(reference_ids(prompt, 6, temperature=1.4, seed=seed_of(0, i)))
        for prompt in ((1, 2), (3,))
        for i in range(3)
    ]


def test_a_stream_of_several_completions_gives_their_pieces_in_turns(folder: Path) -> None:
    llm = opened(folder, batch=3, launch_steps=2)
    params = SamplingParams(n=3, max_tokens=9, temperature=1.4)
    pieces = list(llm.stream("hello", params))
    assert {piece.index for piece in pieces[:3]} == {0, 1, 2}
    for one in llm.generate("hello", params).outputs:
        own = [piece for piece in pieces if piece.index == one.index]
        assert joined(own) == (one.text, one.token_ids) and [piece.finished for piece in own].count(True) == 1


def test_stop_strings_end_completions_of_a_list_as_they_come(folder: Path, llm: LLM) -> None:
    plain = llm.generate("hello", SamplingParams(max_tokens=40))
    assert plain.text is not None
    device = FakeDevice()
    params = SamplingParams(max_tokens=40, stop=plain.text[10:13])
    outputs = opened(folder, device, batch=2, launch_steps=4).generate(["hello", "hello"], params)
    assert [output.text for output in outputs] == [llm.generate("hello", params).text] * 2
    assert sum(launch["steps"] for launch in device.launches[2:]) < 39, "nobody noticed the stop string"


def test_streams_of_one_model_go_on_side_by_side(folder: Path, llm: LLM) -> None:
    other = opened(folder, batch=2, launch_steps=3)
    params = [SamplingParams(max_tokens=10, temperature=1.0, seed=seed) for seed in (1, 2)]
    streams = [other.stream("hello", one) for one in params]
    pieces = [[next(stream)] for stream in streams]
    for mine, stream in zip(pieces, streams, strict=True):
        mine += stream
    for mine, one in zip(pieces, params, strict=True):
        whole = llm.generate("hello", one)
        assert joined(mine) == (whole.text, whole.token_ids)


def test_an_abandoned_stream_frees_its_pages(folder: Path) -> None:
    llm = opened(folder, batch=2, launch_steps=1, prefix_cache=False)
    pool = llm.engine.engine.launcher.cache.pool
    stream = llm.stream([1] * 40, SamplingParams(max_tokens=30))
    next(stream)
    assert pool.free_pages < pool.pages
    del stream
    assert pool.free_pages == pool.pages


def test_an_abandoned_stream_of_several_leaves_nobody_in_line(folder: Path) -> None:
    llm = opened(folder, batch=2, launch_steps=1, prefix_cache=False)
    stream = llm.stream([1] * 40, SamplingParams(max_tokens=30, n=5))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    engine = llm.engine.engine
    assert engine.is_idle
    assert engine.launcher.cache.pool.free_pages == engine.launcher.cache.pool.pages


def test_a_prompt_that_is_known_is_not_read_again(folder: Path, llm: LLM) -> None:
    device = FakeDevice()
    other = opened(folder, device)
    ids = list(range(50))
    first = other.generate(ids, SamplingParams(max_tokens=20))
    assert first.timings.cached_tokens == 0
    longer = [*ids, *first.token_ids, 9]
    again = other.generate(longer, SamplingParams(max_tokens=5))
    assert (
        again.timings.cached_tokens == 64
        and again.token_ids == llm.generate(longer, SamplingParams(max_tokens=5)).token_ids
    )
    assert other.prefix_cache is not None and other.prefix_cache.hits == 1
    without = opened(folder, prefix_cache=False)
    for _ in range(2):
        assert without.generate(ids, SamplingParams(max_tokens=1)).timings.cached_tokens == 0


@pytest.mark.parametrize("batch", [0, 9, True, "2"])
def test_a_batch_that_no_kernel_has_is_refused(folder: Path, batch: Any) -> None:
    with pytest.raises(CheetahError, match=f"batch={batch!r}: expected an integer from 1 to 8"):
        opened(folder, batch=batch)


def test_options_of_the_cache_reach_the_plan(folder: Path) -> None:
    llm = opened(folder, batch=3, kv_chunk=32)
    assert (llm.manifest.plan["batch"], llm.manifest.plan["kv_chunk"]) == (3, 32)
    assert llm.memory.kv_tokens == 3 * 208
    assert llm.generate([1], SamplingParams(max_tokens=3)).token_ids == tuple(reference_ids((1,), 3))


def test_a_second_kernel_reads_prompts_where_steps_take_fewer_tokens(folder: Path, llm: LLM) -> None:
    device = FakeDevice()
    other = opened(folder, device, batch=2, prompt_tokens=8)
    ids = list(range(50))
    assert other.generate(ids, SamplingParams(max_tokens=5)).token_ids == tuple(reference_ids(tuple(ids), 5))
    assert [launch["column_count"] for launch in device.launches][:2] == [8, 1]
    assert other.manifest.plan["tokens"] == 2 and device.launches[0]["steps"] == 7
    np.testing.assert_array_equal(other.score(ids), llm.score(ids))
    other.close()
    assert all(buffer.data is None for buffer in device.buffers)


def test_closing_frees_everything_and_ends_use(folder: Path) -> None:
    device = FakeDevice()
    with opened(folder, device, launch_steps=1) as llm:
        llm.score([1])
        stream = llm.stream([1], SamplingParams(max_tokens=5))
        next(stream)
    llm.close()
    assert all(buffer.data is None for buffer in device.buffers)
    assert not device.closed, "the caller's device stays open"
    for use in (lambda: next(stream), lambda: llm.generate([1]), lambda: llm.score([1]), lambda: llm.stream([1])):
        with pytest.raises(CheetahError, match="this LLM is closed"):
            use()


def test_notes_are_one_line_each_on_stderr_unless_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = {"do_sample": True, "typical_p": 0.9, "eos_token_id": 7}
    model = write_checkpoint(tmp_path, tiny_weights(), {"generation_config.json": generation}, eos_token_id=8)
    opened(model)
    assert capsys.readouterr() == ("", "")
    opened(model, quiet=False)
    out, err = capsys.readouterr()
    assert out == "" and "typical_p=0.9" in err and "end-of-text ids [7, 8]" in err and "no tokenizer" in err


def test_importing_is_quick_and_loads_no_device_library() -> None:
    code = (
        "import sys; from cheetah.runtime import LLM, SamplingParams; "
        "print([n for n in ('cuda', 'pycuda', 'jinja2', 'rich', 'huggingface_hub') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert found.stdout.strip() == "[]"


def test_outputs_are_plain_values(llm: LLM) -> None:
    output = llm.generate([1], SamplingParams(max_tokens=2))
    assert isinstance(output, RequestOutput) and "token_ids=" in repr(output)
    with pytest.raises(AttributeError):
        output.text = "x"  # type: ignore[misc]
