"""Work in a process of its own: every limit is one error, and the next question is answered as if nothing had been."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.runtime.text.chat import TEMPLATE_BYTES, ChatTemplates
from cheetah.runtime.text.guarded_process import GuardedProcess, GuardError, Limits

LIMITS = Limits(cpu_s=1.0, memory_bytes=64_000_000, answer_bytes=100_000)
"""A second, so that a process still starts in time where the machine is busy."""


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedProcess]:
    process = GuardedProcess("chat template", {"work": "templates"}, LIMITS)
    yield process
    process.close()


def rendered(guarded: GuardedProcess, source: str, **variables: Any) -> Any:
    return guarded.ask({"source": source, "now": "2024-07-26", "variables": variables})


LOOP = "{% for a in range(99999) %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOOP * 3 + "{% endfor %}" * 3, "takes more than 1 s of processor time"),
        pytest.param("{{ lipsum(n=1000000) }}", "takes more than 1 s of processor time", marks=pytest.mark.exhaustive),
        ("{{ 'x' * 10**9 }}", "needs more than 64 MB of memory"),
        ("{{ 'x' | center(10**10) }}", "needs more than 64 MB of memory"),
        ("{{ '%1000000000d' % 1 }}", "needs more than 64 MB of memory"),
        ("{{ '{:>1000000000}'.format(1) }}", "needs more than 64 MB of memory"),
        ("{{ ('a' * 10000) | replace('', 'b' * 100000) }}", "needs more than 64 MB of memory"),
        ("{{ strftime_now('%Y' * 10**8) }}", "needs more than 64 MB of memory"),
        (LOOP + "{{ 'x' * 1000 }}{% endfor %}", "gives more than 0.102 MB"),
        ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "nested too deeply"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "nested too deeply"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
    ids=lambda text: text[:24],
)
def test_a_template_without_measure_is_one_error(guarded: GuardedProcess, source: str, message: str) -> None:
    with pytest.raises(GuardError) as raised:
        rendered(guarded, source)
    assert str(raised.value).startswith("chat template: ") and message in str(raised.value)
    assert rendered(guarded, "{{ a }}", a="still here") == "still here"


def test_what_a_template_raises_is_short_and_printable(guarded: GuardedProcess) -> None:
    with pytest.raises(GuardError) as raised:
        rendered(guarded, r"{{ raise_exception('\x1b[2J' * 100000) }}")
    assert str(raised.value).startswith(r"chat template: \x1b[2J") and len(str(raised.value)) < 20_000


def test_the_limits_grow_with_the_question(guarded: GuardedProcess) -> None:
    text = "long " * 100_000
    assert rendered(guarded, "{{ text }}", text=text) == text


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, lambda: None])
def test_what_is_no_json_is_refused(guarded: GuardedProcess, value: object) -> None:
    with pytest.raises(GuardError, match="chat template: what it is given must be JSON values: .* is no JSON value"):
        rendered(guarded, "", value=value)


def test_a_process_that_was_ended_is_started_anew(guarded: GuardedProcess) -> None:
    before = guarded.start()
    process = guarded._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert rendered(guarded, "x") == "x" and guarded._process is not process and before == guarded.start()
    with pytest.raises(GuardError, match=r"ended its process \(SIGABRT\)"):
        os.kill(guarded._process.pid, signal.SIGSTOP)  # so that it cannot answer before it is ended
        guarded._answer = _after_kill(guarded, signal.SIGABRT)  # type: ignore[method-assign]
        rendered(guarded, "x")
    del guarded._answer
    assert rendered(guarded, "x") == "x"


def _after_kill(guarded: GuardedProcess, number: signal.Signals) -> Any:
    """The process is ended while it is asked."""
    answer = guarded._answer

    def killed(data: bytes, limits: Limits) -> dict[str, Any]:
        assert guarded._process is not None
        os.kill(guarded._process.pid, number)
        os.kill(guarded._process.pid, signal.SIGCONT)
        return answer(data, limits)

    return killed


def test_an_interrupted_question_leaves_no_answer_behind(
    guarded: GuardedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(guarded, "_read", interrupted)
        rendered(guarded, "the first answer")
    assert rendered(guarded, "the second answer") == "the second answer"


def test_a_process_with_many_open_files_is_answered(guarded: GuardedProcess) -> None:
    """Files beyond the 1024th have numbers that `select` refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this host allows a process fewer than 2048 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY)]
    try:
        files += [os.dup(files[0]) for _ in range(1024)]
        guarded.close()  # so that its pipes are opened behind those
        assert rendered(guarded, "{{ a }}", a="beyond") == "beyond"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rendered(guarded, "{{ a }}", a="and again") == "and again"


def test_several_threads_get_their_own_answers(guarded: GuardedProcess) -> None:
    answers: dict[int, list[str]] = {}

    def ask(thread: int) -> None:
        answers[thread] = [rendered(guarded, "{{ a }}", a=f"{thread}.{turn}") for turn in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {thread: [f"{thread}.{turn}" for turn in range(20)] for thread in range(4)}


def test_a_forked_process_asks_one_of_its_own(guarded: GuardedProcess) -> None:
    assert rendered(guarded, "parent") == "parent"
    process = guarded._process
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        own = False
        try:
            own = rendered(guarded, "child") == "child" and guarded._process is not process
            guarded.close()
        finally:
            os._exit(0 if own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert rendered(guarded, "parent") == "parent" and guarded._process is process


def test_a_template_of_many_bytes_is_not_even_parsed() -> None:
    with pytest.raises(CheetahError, match="has 1000001 characters, at most 1000000 are taken"):
        ChatTemplates({"default": "x" * (TEMPLATE_BYTES + 1)}).render([{"role": "user", "content": "hi"}])
