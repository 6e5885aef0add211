"""`cheetah chat`: what is said stays said, commands are no messages, and Ctrl-C ends an answer alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from commands import cheetah

from cheetah.cli.chat import Conversation
from cheetah.errors import CheetahError
from cheetah.runtime import LLM, SamplingParams, StreamPiece
from cheetah.runtime.outputs import Timings


class Talker:
    """Stands for an `LLM` that says how many messages it was given."""

    def __init__(self) -> None:
        self.heard: list[list[dict[str, str]]] = []
        self.fault: BaseException | None = None
        self.thoughts: list[str] = []
        self.said: str | None = None

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[StreamPiece]:
        self.heard.append([*messages])
        for thought in self.thoughts:
            yield StreamPiece("", (1,), reasoning=thought)
        yield StreamPiece(f"{len(messages)} " if self.said is None else self.said, (1,))
        if self.fault is not None:
            raise self.fault
        yield StreamPiece("messages", (2, 3), True, "stop", 3, Timings(5, 3, 0.5, 0.25, 2))


def conversation(system: str | None = None) -> tuple[Conversation, Talker]:
    talker: Any = Talker()
    return Conversation(talker, SamplingParams(), system), talker


def test_what_was_said_is_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    talk, talker = conversation("Be brief.")
    assert talk.take("Hello") and talk.take("  ") and talk.take("Again")
    roles = ["system", "user", "assistant", "user"]
    assert [message["role"] for message in talker.heard[-1]] == roles
    assert talker.heard[-1][2]["content"] == "2 messages"
    out, err = capsys.readouterr()
    assert out == "2 messages\n4 messages\n"
    assert err.count("[5 tokens read in 0.500 s, 3 made at 8.0 tokens/s]") == 2


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    talk, talker = conversation("Be brief.")
    talk.take("Hello")
    talk.take("/reset")
    assert [message["role"] for message in talk.messages] == ["system"]
    talk.take("/system  Be long.")
    assert talk.messages == [{"role": "system", "content": "Be long."}]
    talk.take("/system")
    assert talk.messages == [] and len(talker.heard) == 1
    talk.take("/help")
    talk.take("/nonsense")
    assert "/reset" in capsys.readouterr().err and not talk.take("/exit")


def test_an_answer_that_is_stopped_stays_and_one_that_fails_was_not_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk, talker = conversation()
    talker.fault = KeyboardInterrupt()
    assert talk.take("Hello")
    assert talk.messages[-1] == {"role": "assistant", "content": "1 "} and "stopped" in capsys.readouterr().err
    talker.fault = CheetahError("the context is full")
    assert talk.take("More")
    assert len(talk.messages) == 2 and "/reset" in capsys.readouterr().err


def test_thoughts_are_shown_beside_the_answer_and_are_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    talk, talker = conversation()
    talker.thoughts = ["Two", " words."]
    assert talk.take("Hello")
    assert talk.messages[-1] == {"role": "assistant", "content": "1 messages"}
    out, err = capsys.readouterr()
    assert out == "1 messages\n" and err.startswith("Two words.\n[5 tokens read")
    talker.fault = KeyboardInterrupt()
    talker.said = ""
    assert talk.take("More") and len(talk.messages) == 2, "who is stopped before the answer has not answered"
    assert capsys.readouterr().err == "Two words.\nstopped\n"


def test_who_is_refused_hears_how_to_take_the_system_message_back(capsys: pytest.CaptureFixture[str]) -> None:
    """A template without a system role refuses everything that is said behind one, also after /reset."""
    talk, talker = conversation("Be kind.")
    talker.fault = CheetahError("chat template: only the roles user and assistant")
    for _ in range(2):
        assert talk.take("Hello") and "/system alone takes the system message back" in capsys.readouterr().err
        talk.take("/reset")
    talk.take("/system")
    talk.take("Hello")
    assert "/system" not in capsys.readouterr().err


@pytest.mark.compiler
@pytest.mark.slow
def test_a_talk_with_the_demo_model() -> None:
    question = "Mia has a red kite. What does Mia have?"
    options = ("--device", "emulator", "--gpu", "emulator-2", "--max-context", "96", "--temperature", "0")
    result = cheetah("chat", "demo", *options, stdin=f"{question}\n/reset\n{question}\n")
    with LLM("demo", device="emulator", gpu="emulator-2", max_context=96, batch=1, quiet=True) as llm:
        wanted = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0)).text
    assert result.exit_code == 0 and result.stdout.count(f"> {wanted}\n") == 2
    assert result.stderr.count("tokens/s]") == 2
