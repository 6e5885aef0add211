"""From a request's body to completions in the engine: prompts, parameters, limits. Knows nothing of HTTP's ways."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cheetah.errors import CheetahError
from cheetah.printable import shown
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.outputs import StreamPiece
from cheetah.runtime.sampling import MOST_LOGPROBS, as_token_ids
from cheetah.runtime.structured_outputs import GrammarError
from cheetah.runtime.text.harmony import Harmony
from cheetah.runtime.text.long_texts import TooLongError
from cheetah.runtime.text.pieces import joined
from cheetah.runtime.text.prompts import Prompt
from cheetah.serve.answers import Answer, ChatAnswer, CompletionAnswer, Usage
from cheetah.serve.driver import Answers, Driver, QueueFull
from cheetah.serve.embeddings import EmbeddingBody, embeddings
from cheetah.serve.errors import ApiError, of_mistake, refused
from cheetah.serve.logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from cheetah.serve.metrics import Metrics, RequestMetrics
from cheetah.serve.reading import Reading
from cheetah.serve.reasoning import HARMONY_REASONING, REASONING_PARSERS, Reasoning
from cheetah.serve.records import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Messages,
    ResponseBody,
    Sampled,
    TemplateOptions,
    TokenizeBody,
    sampling_params,
)
from cheetah.serve.responses import ResponseAnswer, messages_of
from cheetah.serve.structure import (
    Structure,
    function_of,
    of_grammar,
    structure_of,
    structure_of_calls,
    structure_of_text,
)
from cheetah.serve.tools import HARMONY, PARSERS, NoTools, ToolParser, parser_of_template

TOO_LONG = "context_length_exceeded"
"""The code of what does not fit, which OpenAI's clients know."""

LOGPROBS_OF_TEXT = "message.output_text.logprobs"
"""What /v1/responses may be asked to include."""

VALUES = 400_000
"""Of a body at most, as `parse_json` counts them, beside two for each token of the context."""
TOKENIZED = 100_000
"""Tokens of a text that /tokenize tells, or the context's if these are more."""

Ids = tuple[int, ...]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """How a server is set up.

    names: what clients may call the model; the first is what answers say. api_keys: if any, requests need one of them.
    hosts: if any, requests must name one of them as their Host.
    most_waiting: completions that may wait in line before further ones are refused. body_bytes: of a request at most.
    stuck_after_s: a step of the engine that takes longer makes /health fail. tool_parser: a name of
    `serve.tools.PARSERS` or HARMONY; None for what the chat template tells. reasoning_parser: a name of
    `serve.reasoning.REASONING_PARSERS`; None leaves thoughts in the text, but those of HARMONY. seed: of requests
    without one; None for a new one each. read_ceiling: GB/s that the GPU reads at most, as it was measured.
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    most_waiting: int = 256
    body_bytes: int = 8_000_000
    stuck_after_s: float = 60.0
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    seed: int | None = None
    read_ceiling: float | None = None

    def __post_init__(self) -> None:
        if self.tool_parser not in (None, *PARSERS, HARMONY):
            raise CheetahError(f"tool_parser={self.tool_parser!r}: choose one of {', '.join((*PARSERS, HARMONY))}")
        if self.reasoning_parser not in (None, *REASONING_PARSERS, HARMONY_REASONING):
            known = ", ".join((*REASONING_PARSERS, HARMONY_REASONING))
            raise CheetahError(f"reasoning_parser={self.reasoning_parser!r}: choose one of {known}")


@dataclass
class Answering:
    """Completions that are being made, and how they are told. Close it when its client wants no more."""

    answers: Answers
    answer: Answer
    streams: bool
    metrics: RequestMetrics

    async def whole(self) -> Callable[[], dict[str, Any]]:
        """What makes the answer, once all of it is there: long ones take a while."""
        pieces: dict[int, list[StreamPiece]] = {}
        async for number, piece in self.answers.pieces():
            self.answer.usage.take(piece)
            pieces.setdefault(number, []).append(piece)
        return lambda: self.answer.whole([joined(pieces[number]) for number in sorted(pieces)])

    def close(self) -> None:
        self.answers.close()
        self.metrics.close()


@dataclass(frozen=True)
class Prepared:
    """What a body asks the engine for, read and checked. requests: None where a grammar has to be read first, for which
    others may be waited: then `ask` makes them."""

    requests: Sequence[Request] | None
    ask: Callable[[], Sequence[Request]]
    answer: Answer
    streams: bool


class Service:
    """What the routes ask: the methods that take a body run in the threads of `reading`, the others in the event loop.
    Every one raises ApiError for what the client has to change."""

    def __init__(self, llm: LLM, options: Options, on_fault: Callable[[], None] = lambda: None):
        self.options = options
        self.context, self._began = llm.max_context, int(time.time())
        self._llm, self._prompts = llm, llm.prompts
        self.metrics = Metrics(options.names[0], llm.engine.engine, llm.memory, options.read_ceiling)
        self.driver = Driver(llm.engine, llm.prompts, options.most_waiting, options.stuck_after_s, on_fault)
        self.reading = Reading(options.body_bytes, VALUES + 2 * self.context)
        name = options.tool_parser or parser_of_template(llm.prompts.default_template)
        self._has_channels = name == HARMONY or options.reasoning_parser == HARMONY_REASONING
        self._parser: Callable[[], ToolParser] | None = Harmony if self._has_channels else PARSERS.get(name or "")

    def completion(self, body: CompletionBody) -> Prepared:
        self._check_model(body.model)
        if body.suffix:
            raise refused("suffix", "is not supported: put what comes behind into the prompt")
        if body.best_of not in (None, body.n or 1):
            raise refused("best_of", f"is {body.best_of}: leave it out, or give the value of n")
        prompts = _several(body.prompt)
        of_prompt, structure = body.logprobs if body.echo else None, structure_of(body)
        logprobs = {"logprobs": body.logprobs, "prompt_logprobs": of_prompt}
        is_echo = body.echo and body.max_tokens == 0  # how evaluations ask for the prompt's logprobs alone
        params = self._params(body, 1 if is_echo else body.max_tokens, len(prompts), structure, **logprobs)
        ids = [self._encode(prompt, body.add_special_tokens, params) for prompt in prompts]
        if body.stream and body.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "is not told in streams: leave out stream, or write echo and logprobs")
        answer = CompletionAnswer(
            self._name,
            Usage(is_echo=is_echo),
            [self._text_of(prompt) for prompt in prompts for _ in range(params.n)] if body.echo else None,
            body.told,
            body.return_token_ids,
            [self._logprobs_behind(own, params) for own in ids for _ in range(params.n)],
        )
        return self._prepared(ids, params, answer, body.stream, "prompt", structure)

    def chat(self, body: ChatBody) -> Prepared:
        self._check_model(body.model)
        if body.modalities != ["text"]:
            raise refused("modalities", 'only ["text"] can be made')
        new_parser = self._parser_for(body)
        variables: dict[str, Any] = {"tools": body.tools or None} if body.tool_choice != "none" else {}
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        structure = self._calls_that_must_be(body) or structure_of(body)
        most = body.max_completion_tokens or body.max_tokens
        params = self._params(body, most, structure=structure, logprobs=_top_of(body))
        if body.prediction is not None:
            params = replace(params, prediction=self._encode(body.prediction.text, False, param="prediction"))
        ids = self._render(body.messages, body, variables, params)
        if body.stream and body.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "is not told in streams: leave out stream")
        logprobs = ChatLogprobs(TokenTexts(self._prompts.tokenizer), params.logprobs or 0)
        if structure is None:  # else all of the text is the answer
            new_parser, params = self._behind_thoughts(new_parser), self._with_channels(params)
        elif self._has_channels:
            new_parser = NoTools
        answer = ChatAnswer(self._name, Usage(), new_parser, not body.parallel_tool_calls, body.told, logprobs)
        return self._prepared([ids], params, answer, body.stream, "messages", structure)

    def response(self, body: ResponseBody) -> Prepared:
        self._check_model(body.model)
        _refuse_what_text_has_not(body)
        structure = structure_of_text(body.text)
        sampled = Sampled(temperature=body.temperature, top_p=body.top_p)
        params = self._params(sampled, body.max_output_tokens, structure=structure, logprobs=_top_of_response(body))
        ids = self._render(messages_of(body), TemplateOptions(), {}, params, "input")
        logprobs = ChatLogprobs(TokenTexts(self._prompts.tokenizer), params.logprobs or 0)
        parser: ToolParser = NoTools()
        if structure is None and self._has_channels:
            parser, params = Harmony(has_tools=False), self._with_channels(params)
        answer = ResponseAnswer(self._name, Usage(), body, logprobs, parser)
        return self._prepared([ids], params, answer, body.stream, "input", structure)

    def embeddings(self, body: EmbeddingBody) -> Callable[[], dict[str, Any]]:
        """What makes the answer, in a thread that waits for the engine."""
        self._check_model(body.model)
        if body.dimensions not in (None, self._llm.config.hidden_size):
            raise refused("dimensions", f"is {body.dimensions}: vectors have {self._llm.config.hidden_size} numbers")
        if "" in (several := _several(body.input, "input")):
            raise refused("input", "has an empty text: there is nothing to embed")
        prompts: list[Prompt] = [self._encode(one, body.add_special_tokens, param="input") for one in several]

        def embed() -> dict[str, Any]:
            with _named("input"):
                found = self._llm.embed(prompts, pooling=body.pooling, normalize=body.normalize)
            return embeddings(found, self._name, body.encoding_format)

        return embed

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise refused("prompt", "give either a prompt or messages")
        most = max(TOKENIZED, self.context)
        if body.messages is not None:
            ids = self._render(body.messages, body, {"tools": body.tools or None}, most=most)
        else:
            ids = self._encode(body.prompt or "", body.add_special_tokens is not False, most=most)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": self.context, "tokens": ids}
        return {**found, "token_strs": [self._text_of([id]) for id in ids]} if body.return_token_strs else found

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        self._check_model(body.model)
        with _named("tokens"):
            ids = as_token_ids(body.tokens, self._prompts.vocab_size, "tokens") if body.tokens else ()
        return {"prompt": self._text_of(ids)}

    async def begin(self, prepared: Prepared) -> Answering:
        """Puts the requests in line."""
        requests = await self.reading.grammar(prepared.ask) if prepared.requests is None else prepared.requests
        metrics = RequestMetrics(self.metrics, sum(one.count for one in requests))
        prepared.answer.usage.prompt_tokens = sum(len(one.prompt_ids) for one in requests)
        try:
            answers = self.driver.submit(requests, metrics.observe)
        except QueueFull:
            raise ApiError(429, f"{self.driver.most} completions run or wait already: try again later") from None
        return Answering(answers, prepared.answer, prepared.streams, metrics)

    def models(self) -> dict[str, Any]:
        entries = [
            {
                "id": name,
                "object": "model",
                "created": self._began,
                "owned_by": "cheetah",
                "root": self._name,
                "parent": None,
                "max_model_len": self.context,
            }
            for name in self.options.names
        ]
        return {"object": "list", "data": entries}

    def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return next(entry for entry in self.models()["data"] if entry["id"] == name)

    @property
    def _name(self) -> str:
        return self.options.names[0]

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.names:
            known = ", ".join(self.options.names)
            raise ApiError(404, f"model {shown(name)} is not served here: use {known}", "model", "model_not_found")

    def _params(
        self,
        body: Sampled,
        max_tokens: int | None,
        prompts: int = 1,
        structure: Structure | None = None,
        **logprobs: int | None,
    ) -> SamplingParams:
        """The parameters for each of so many prompts, which together are no more than may ever be in line."""
        seed = secrets.randbits(63) if self.options.seed is None else self.options.seed
        wanted = None if structure is None else structure.wanted
        params = _or_refused(lambda: sampling_params(body, max_tokens, seed, structured_outputs=wanted, **logprobs))
        if (count := prompts * params.n) > self.driver.most:
            raise refused("n", f"{count} completions are asked for, this server takes {self.driver.most} at most")
        return params

    def _parser_for(self, body: ChatBody) -> Callable[[], ToolParser]:
        """What looks for calls in the answers to a body."""
        choice = body.tool_choice or ("auto" if body.tools else "none")
        if choice == "none" or not body.tools:
            if choice != "none" and body.tool_choice is not None:
                raise refused("tool_choice", "there are no tools to choose from: give tools, or leave it out")
            return partial(Harmony, has_tools=False) if self._has_channels else NoTools
        if self._parser is None:
            known = " or ".join(PARSERS)
            raise refused(
                "tools", f"the chat template has no known way of calls: start with --tool-call-parser {known}"
            )
        for tool in body.tools:
            function_of(tool)
        return self._parser

    def _behind_thoughts(self, new_parser: Callable[[], ToolParser]) -> Callable[[], ToolParser]:
        """The parser for what follows the thoughts, if these are told apart."""
        if (name := self.options.reasoning_parser) is None or self._has_channels:
            return new_parser
        return lambda: Reasoning(new_parser(), REASONING_PARSERS[name])

    def _with_channels(self, params: SamplingParams) -> SamplingParams:
        """Where answers have channels, these are told by special tokens."""
        return replace(params, skip_special_tokens=False) if self._has_channels else params

    def _calls_that_must_be(self, body: ChatBody) -> Structure | None:
        """What the text is where the request does not leave it to the model whether it calls a tool."""
        choice, form = body.tool_choice, self._parser_for(body)().form
        if choice in (None, "auto", "none"):
            return None
        if form is None:
            raise refused("tool_choice", "answers of several channels cannot be held to calls: leave it out")
        name = None if choice == "required" else _chosen_function(choice)
        return structure_of_calls(form, body.tools, name, one=name is not None or not body.parallel_tool_calls)

    def _encode(
        self,
        prompt: Prompt,
        add_special_tokens: bool,
        params: SamplingParams | None = None,
        param: str = "prompt",
        most: int | None = None,
    ) -> Ids:
        with _named(param):
            return self._prompts.encode(prompt, add_special_tokens, *self._bounds(params, most))

    def _bounds(self, params: SamplingParams | None, most: int | None) -> tuple[int | None, int | None]:
        """(most, last): what of a long text is encoded, as `Tokenizer.encode` has them."""
        last = None if params is None else params.truncate_prompt_tokens
        return (None, last) if last is not None and last <= self.context else (most or self.context, None)

    def _render(
        self,
        messages: Messages,
        options: TemplateOptions,
        variables: dict[str, Any],
        params: SamplingParams | None = None,
        param: str = "messages",
        most: int | None = None,
    ) -> Ids:
        if options.chat_template is not None:
            raise refused("chat_template", "is not taken from requests: start the server with --chat-template")
        if options.documents:
            variables["documents"] = options.documents
        variables |= {
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
            "continue_final_message": options.continue_final_message,
        }
        ours = {"messages", "marks", "chat_template", "template", *variables}
        if clash := sorted(ours & options.chat_template_kwargs.keys()):
            raise refused("chat_template_kwargs", f"{clash[0]} is no variable of a template: give it beside them")
        known = [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]
        with _named(param):
            bounds = self._bounds(params, most)
            return self._prompts.render(known, *bounds, **options.chat_template_kwargs, **variables)[1]

    def _logprobs_behind(self, prompt_ids: Ids, params: SamplingParams) -> CompletionLogprobs:
        """What tells the logprobs of a completion of this prompt, as far as it is read."""
        read = prompt_ids[-(params.truncate_prompt_tokens or 0) :]
        return CompletionLogprobs(TokenTexts(self._prompts.tokenizer, params.skip_special_tokens), read[0])

    def _text_of(self, prompt: Prompt) -> str:
        tokenizer = self._prompts.tokenizer
        return prompt if isinstance(prompt, str) else "" if tokenizer is None else tokenizer.decode(prompt)

    def _prepared(
        self,
        prompts: Sequence[Ids],
        params: SamplingParams,
        answer: Answer,
        streams: bool,
        param: str,
        structure: Structure | None,
    ) -> Prepared:
        for ids in prompts:
            self._check_length(min(len(ids), params.truncate_prompt_tokens or len(ids)), params.max_tokens, param)

        def ask() -> list[Request]:
            return [self._ask(ids, params, structure) for ids in prompts]

        return Prepared(ask() if structure is None else None, ask, answer, streams)

    def _ask(self, ids: Ids, params: SamplingParams, structure: Structure | None) -> Request:
        try:
            return self._llm.ask(ids, params)
        except GrammarError as problem:
            assert structure is not None
            raise of_grammar(structure, problem) from None
        except CheetahError as problem:
            raise of_mistake(problem) from None

    def _check_length(self, tokens: int, max_tokens: int | None, param: str) -> None:
        room = self.context - tokens
        if room < 1:
            message = f"{param}: {tokens} tokens leave no room in the context of {self.context}"
            raise ApiError(400, message, param, TOO_LONG)
        if max_tokens is not None and max_tokens > room + 1:
            message = f"max_tokens: {max_tokens} with {tokens} of the prompt do not fit the context of {self.context}"
            raise ApiError(400, message, "max_tokens", TOO_LONG)


@contextmanager
def _named(param: str) -> Iterator[None]:
    """Makes of a mistake in here one of the field `param`."""
    try:
        yield
    except TooLongError as problem:
        raise ApiError(400, f"{param}: {problem}", param, TOO_LONG) from None
    except CheetahError as problem:
        raise ApiError(400, str(problem), param) from None


def _or_refused(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except CheetahError as problem:
        raise of_mistake(problem) from None


def _chosen_function(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(
            "tool_choice", 'expected "auto", "none", "required" or {"type": "function", "function": {"name"}}'
        )
    return str(function["name"])


def _several(prompt: str | list[int] | list[str] | list[list[int]], param: str = "prompt") -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused(param, "is empty: give text, token ids, or a list of them")
    if [] in prompt:
        raise refused(param, "has an empty list in it: every prompt needs a token to start from")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _top_of(body: ChatBody) -> int | None:
    """How many logprobs are wanted beside that of each token; None for none at all."""
    return _checked_top(body.top_logprobs, body.logprobs, "logprobs: true")


def _top_of_response(body: ResponseBody) -> int | None:
    """As `_top_of`, where what is beside a text is asked for by a list of names."""
    if others := [name for name in body.include if name != LOGPROBS_OF_TEXT]:
        raise refused("include", f"{shown(others[0])} is not supported: only {LOGPROBS_OF_TEXT} is")
    return _checked_top(body.top_logprobs, bool(body.include), f'include: ["{LOGPROBS_OF_TEXT}"]')


def _checked_top(top: int | None, are_wanted: bool, by: str) -> int | None:
    if top and not are_wanted:
        raise refused("top_logprobs", f"is given without {by}")
    if not 0 <= (top or 0) <= MOST_LOGPROBS:
        raise refused("top_logprobs", f"is {top}: expected an integer from 0 to {MOST_LOGPROBS}")
    return top or 0 if are_wanted else None


def _refuse_what_text_has_not(body: ResponseBody) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "tools": ([],),
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (False,),
        "truncation": ("disabled",),
    }
    for name, neutral in allowed.items():
        if getattr(body, name) not in neutral:
            raise refused(name, "is not supported by this server, which makes text of text and stores nothing")
