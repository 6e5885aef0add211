"""The bodies of requests: OpenAI's fields and vLLM's beside them, checked when they are read.

A field that is null counts as absent; one that nobody knows is refused by name, unless it is false or empty, and one
that asks for what cannot be done is refused where it is used. What changes nothing (`user`, `metadata`, ...) is read
and forgotten.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cheetah.printable import shown, shown_name
from cheetah.runtime.sampling import SamplingParams
from cheetah.serve.errors import ApiError, refused

Entry = TypeVar("Entry")
Several = Annotated[list[Entry], Field(fail_fast=True)]
"""A list, of which only the first wrong entry is told: there may be a hundred thousand."""
MOST_WORDS, MOST_CHARACTERS = 1000, 50_000


def _of_few_characters(words: list[str]) -> list[str]:
    if sum(map(len, words)) > MOST_CHARACTERS:
        raise PydanticCustomError("characters", f"expected at most {MOST_CHARACTERS} characters in all")
    return words


Words = Annotated[list[str], Field(fail_fast=True, max_length=MOST_WORDS), AfterValidator(_of_few_characters)]
"""Texts that are looked for behind each token."""
Messages = Several[dict[str, Any]]


def _said_as(expected: str) -> WrapValidator:
    """One message for a field that may be of several kinds."""

    def validate(value: Any, of_kinds: ValidatorFunctionWrapHandler) -> Any:
        try:
            return of_kinds(value)
        except ValidationError:
            raise PydanticCustomError("kind", "expected {expected}", {"expected": expected}) from None

    return WrapValidator(validate)


Prompts = Annotated[
    str | Several[int] | Several[str] | Several[Several[int]],
    _said_as("text, token ids, a list of texts, or a list of lists of token ids"),
]
Stops = Annotated[
    str | Words,
    _said_as(f"a string, or a list of at most {MOST_WORDS} strings, of {MOST_CHARACTERS} characters in all"),
]


class Body(BaseModel):
    """JSON with exactly these fields, each of exactly its type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, value: Any) -> Any:
        """Routers send every field that they know: one that is false or empty and not known here asks for nothing."""
        if not isinstance(value, dict):
            return value
        found = {name: entry for name, entry in value.items() if entry is not None}
        for name in found.keys() - cls.model_fields.keys():
            entry = found.pop(name)
            if entry is not False and entry not in ("", [], {}):
                place = shown_name(name)
                raise ApiError(400, f"{place} is not a field that this server knows: leave it out", place)
        return found


GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names of what structured_outputs holds."""
STRUCTURE_FIELDS = ("response_format", "structured_outputs", *GUIDED_FIELDS)


class Forgotten(Body):
    """What clients send that changes nothing here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    include_reasoning: bool | None = None  # these three vllm-router adds
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None


class Sampled(Forgotten):
    """How to sample and when to end, by the names of `SamplingParams`."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # JSON has no other keys; the numbers `SamplingParams` checks
    allowed_token_ids: Several[int] | None = None
    bad_words: Words | None = None
    seed: int | None = None
    n: int | None = None
    stop: Stops | None = None
    stop_token_ids: Several[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    speculation: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Several[str] | None = None
    guided_grammar: str | None = None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk, so far; where include_usage is given too
    include_obfuscation: bool = False  # OpenAI's padding against eavesdroppers: never added


class Streamed(Sampled):
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def told(self) -> StreamOptions:
        """What is told in streams beside their text."""
        return self.stream_options or StreamOptions()


class CompletionBody(Streamed):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int = 16
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    return_token_ids: bool = False


class TemplateOptions(Body):
    """What of a chat template is told by the request."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Messages | None = None
    chat_template: str | None = None


class PredictedPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """What most of an answer is thought to be; it changes none."""

    type: Literal["content"]
    content: Annotated[str | list[PredictedPart], _said_as("text, or a list of parts with text")]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(TemplateOptions, Streamed):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Messages = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    modalities: Several[str] = Field(default_factory=lambda: ["text"])


class ResponseBody(Forgotten):
    """POST /v1/responses: text in, text out."""

    model: str | None = None
    input: Annotated[str | Messages, _said_as("text, or a list of messages")]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Messages = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool = False
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: Several[str] = Field(default_factory=list)
    truncation: str = "disabled"


class TokenizeBody(TemplateOptions):
    """POST /tokenize, of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Several[int]


SEEDS = 2**64


def sampling_params(body: Sampled, max_tokens: int | None, seed: int, **read: Any) -> SamplingParams:
    """What a body asks for. `seed`: if it gives none; a negative one is taken as unsigned. read: parameters that follow
    from other fields: logprobs of what is made, and of the prompt if the body does not say; structured_outputs.
    CheetahError for what `SamplingParams` refuses."""
    read_elsewhere = {*Forgotten.model_fields, *STRUCTURE_FIELDS, "model"}
    given = {name: getattr(body, name) for name in Sampled.model_fields if name not in read_elsewhere}
    given = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {_token_id(token): bias for token, bias in given["logit_bias"].items()}
    wanted = given.pop("seed", seed)
    is_signed = -SEEDS // 2 <= wanted < 0
    seed = wanted + SEEDS if is_signed else wanted
    return SamplingParams(**read | given, max_tokens=max_tokens, seed=seed)


def _token_id(written: str) -> int:
    if not written.isascii() or not written.isdigit() or len(written) > 10:
        raise refused("logit_bias", f"{shown(written)} is no token id")
    return int(written)
