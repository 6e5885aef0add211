"""The program of a guarded process: answers questions about one piece of work, each within limits.

Run by its path, by `guarded_process.py`, and never imported: it knows nothing of the rest of Cheetah, and loads only
the library that its work needs. Frames: 8 bytes of length (big-endian), then UTF-8 JSON; a question's begins with a
line of limits, [seconds of processor time, bytes of memory, bytes of answer].
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

MESSAGE_CHARACTERS = 2000
JINJA2_MINIMUM = (3, 1, 6)
Work = Callable[[dict[str, Any], int], Any]
"""Takes a question and the most bytes of its answer."""


class Failure(Exception):
    """The message that the asker shall see, after the name of the work."""


class TooLong(Exception):
    """An answer that passes its limit."""


def main() -> None:
    """Answer what comes on stdin until it ends; the first question sets the work up."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # nobody else reads or writes there
        os.dup2(nothing, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the end of processor time ends the process, wherever it is
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    work: Work = _set_up
    while frame := _read_frame(questions):
        granted, _, data = frame.partition(b"\n")
        question = json.loads(data)
        data = _answer(work, question, *json.loads(granted))
        if work is _set_up:
            work = WORKS[question["work"]].ask
        answers.write(len(data).to_bytes(8, "big") + data)
        answers.flush()


def _read_frame(file: BinaryIO) -> bytes:
    return file.read(int.from_bytes(file.read(8), "big"))


def _answer(work: Work, question: dict[str, Any], cpu_s: float, memory_bytes: int, answer_bytes: int) -> bytes:
    """The frame's content; ends the process when the time is over."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    granted = _memory_in_use() + memory_bytes
    try:
        with contextlib.suppress(ValueError, OSError):  # some systems have no such limit: the time's then has to do
            resource.setrlimit(resource.RLIMIT_AS, (granted if hard < 0 else min(granted, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        data = json.dumps({"answer": work(question, answer_bytes)}).encode()
        return data if len(data) <= answer_bytes else b'{"limit": "answer"}'
    except MemoryError:
        return b'{"limit": "memory"}'
    except TooLong:
        return b'{"limit": "answer"}'
    except Failure as problem:
        return json.dumps({"error": str(problem)[:MESSAGE_CHARACTERS]}).encode()
    except BaseException as problem:  # a template can fail in as many ways as a program, Rust's panics are no Exception
        message = f": {type(problem).__name__}: {_text_of(problem)}"
        return json.dumps({"error": message[:MESSAGE_CHARACTERS]}).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _memory_in_use() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 29


def _text_of(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception:
        return "it cannot say what"


def _set_up(question: dict[str, Any], answer_bytes: int) -> Any:
    sys.path[:] = question["path"]
    work = WORKS[question["work"]]
    return work.set_up(question)


class Templates:
    """Chat templates: Jinja in its immutable sandbox, set up as Hugging Face does, and with nothing else."""

    KEPT = 16
    _now = datetime.min

    def set_up(self, question: dict[str, Any]) -> None:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < JINJA2_MINIMUM:
            raise Failure(f": jinja2 {jinja2.__version__} has escapes from its sandbox: install jinja2 >= 3.1.6")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now.strftime(form)
        self._environment, self._syntax_error = environment, jinja2.TemplateSyntaxError
        self._compiled: dict[str, Any] = {}

    def ask(self, question: dict[str, Any], answer_bytes: int) -> str:
        """question: source, now (ISO 8601) and variables; the rendered text."""
        self._now = datetime.fromisoformat(question["now"])
        pieces, length = [], 0
        for piece in self._template(question["source"]).generate(**question["variables"]):
            length += len(piece)
            if length > answer_bytes:
                raise TooLong
            pieces.append(piece)
        return "".join(pieces)

    def _template(self, source: str) -> Any:
        if source not in self._compiled:
            if len(self._compiled) == self.KEPT:
                self._compiled.clear()
            try:
                self._compiled[source] = self._environment.from_string(source)
            except self._syntax_error as error:
                raise Failure(f", line {error.lineno}: {error.message}") from None
            except RecursionError:
                raise Failure(": its statements are nested too deeply") from None
        return self._compiled[source]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps without jinja2's escaping of <, >, & and '."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise Failure(f": {message}")


class TokenizerRules:
    """A tokenizer.json in the `tokenizers` library."""

    def set_up(self, question: dict[str, Any]) -> dict[str, Any]:
        """The ids by token, and those of special tokens."""
        import tokenizers

        self._library = tokenizers.Tokenizer.from_str(question["description"])
        self._library.no_truncation()
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder()
        special = [token_id for token_id, token in added.items() if token.special]
        return {"ids": self._library.get_vocab(with_added_tokens=True), "special": special}

    def ask(self, question: dict[str, Any], answer_bytes: int) -> list[int]:
        """question: text, add_special_tokens and is_plain; the ids."""
        self._library.encode_special_tokens = question["is_plain"]
        ids: list[int] = self._library.encode(question["text"], add_special_tokens=question["add_special_tokens"]).ids
        return ids


class Grammars:
    """Grammars in llguidance, over the 256 bytes. Who may read one here may read it elsewhere with this stack or more:
    the library calls itself as deep as a grammar's rules name each other."""

    STACK_BYTES = 2_000_000

    def set_up(self, question: dict[str, Any]) -> None:
        """question: limits, of each step, by llguidance's names."""
        import llguidance

        self._library: Any = llguidance
        self._limits = llguidance.LLParserLimits(**question["limits"])
        self._tokenizer = llguidance.LLTokenizer("byte")
        threading.stack_size(self.STACK_BYTES)

    def ask(self, question: dict[str, Any], answer_bytes: int) -> str:
        """question: kind, as StructuredOutputsParams has them, source, and whitespace, what may
        stand between parts of JSON (null for nothing); the grammar as llguidance takes it."""
        found: list[str | Failure] = []
        thread = threading.Thread(target=lambda: found.append(self._read(question)))
        thread.start()
        thread.join()
        if isinstance(found[0], Failure):
            raise found[0]
        return found[0]

    def _read(self, question: dict[str, Any]) -> str | Failure:
        kind = question["kind"]
        try:
            grammar = self._grammar(kind, question["source"], question["whitespace"])
        except BaseException as problem:  # the library has no class of its own for them, and panics
            return Failure(f": {kind}: {_text_of(problem)}")
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        wrong = matcher.get_error().removesuffix("<non-verbose/>").strip()
        wrong = "no text fits it" if wrong.startswith("NoExtension") else wrong
        return Failure(f": {kind}: {wrong}") if wrong else grammar

    def _grammar(self, kind: str, source: str, whitespace: str | None) -> str:
        no_space, some = {"whitespace_flexible": False}, {"whitespace_pattern": whitespace}
        options = no_space if whitespace is None else some
        if kind in ("json", "json_object"):
            return str(self._library.LLMatcher.grammar_from_json_schema(source, overrides=options))
        if kind == "structural_tag":
            tags = [
                self._library.StructTag(grammar={**tag.pop("schema"), "x-guidance": options}, **tag)
                for tag in json.loads(source)
            ]
            return str(self._library.StructTag.to_grammar(tags, assume_special=False))
        return str(self._library.grammar_from(kind, source))


WORKS: dict[str, Any] = {"templates": Templates(), "tokenizer": TokenizerRules(), "grammars": Grammars()}

if __name__ == "__main__":
    main()
