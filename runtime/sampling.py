"""How a completion is sampled and when it ends: `SamplingParams`, as a client writes it, and what a checkpoint brings
for what it leaves open; both become a `Sampling`, as launches take it.

The kernel samples on the device: greedy (temperature 0), or by temperature with Gumbel noise from a counter-based
generator keyed by the seed, from what masks, biases, penalties and filters leave. A draw depends on (seed, token
position, token id) alone, so the same call gives the same tokens whatever the device, the timing or the grouping into
launches. Knows nothing of devices or text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from cheetah.errors import CheetahError
from cheetah.models.logprobs import MOST_LOGPROBS as MOST_LOGPROBS
from cheetah.models.plausible import LARGEST_ID
from cheetah.models.sampling import Filters, Penalties
from cheetah.printable import shown
from cheetah.runtime.engine.launch_tables import Sampling
from cheetah.runtime.structured_outputs import StructuredOutputsParams

UNSUPPORTED = (
    "best_of detokenize do_sample extra_args flat_logprobs guided_decoding length_penalty logits_processors "
    "max_new_tokens no_repeat_ngram_size num_beams output_kind spaces_between_special_tokens top_a "
    "top_n_sigma typical_p use_beam_search"
).split()
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "detokenize": (True,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "length_penalty": (1.0,),
    "logits_processors": (None, []),
    "spaces_between_special_tokens": (True, False),
    "use_beam_search": (False,),
}
"""Of vLLM's names those that may be given, with the values that ask for nothing here: no decoder puts spaces between
special tokens."""
INSTEAD = {
    "bad_words_ids": "write bad_words",
    "best_of": "write n, and choose by cumulative_logprob (with logprobs=0)",
    "detokenize": "open the LLM with tokenizer=False for ids alone",
    "do_sample": "write temperature=0 for greedy, temperature > 0 to sample",
    "eos_token_id": "write stop_token_ids",
    "guided_decoding": "write structured_outputs=StructuredOutputsParams(json=...)",
    "logits_processors": "write logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "max_completion_tokens": "write max_tokens",
    "max_new_tokens": "write max_tokens",
    "min_new_tokens": "write min_tokens",
    "num_return_sequences": "write n",
    "output_kind": "LLM.stream gives pieces, LLM.generate all at once",
    "stop_strings": "write stop",
    "top_logprobs": "write logprobs",
}
IGNORED_DEFAULTS = {"typical_p": 1.0}
"""Entries of generation_config.json that are not supported, with the value that changes nothing."""

SMALLEST_TEMPERATURE = 1e-6
LARGEST_TEMPERATURE = 1e6
"""Logits differ by less than 1000: beyond this every token is as likely as any other."""
LARGEST_BIAS = 1e4
COUNTS: Mapping[str, tuple[int, float, str]] = {
    "n": (1, math.inf, "an integer >= 1"),
    "max_tokens": (1, math.inf, "an integer >= 1, or None for no limit"),
    "min_tokens": (0, math.inf, "an integer >= 0"),
    "seed": (0, 2**64 - 1, "an integer from 0 to 2**64-1"),
    "top_k": (-1, LARGEST_ID, "an integer >= 1, or 0 or -1 for all tokens"),
    "truncate_prompt_tokens": (1, math.inf, "an integer >= 1"),
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs"), (0, MOST_LOGPROBS, f"an integer from 0 to {MOST_LOGPROBS}, or None")
    ),
}
"""Fields that are integers: least, most, and both in words. One that is not None by default may not be."""
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculation")
RANGES = {
    "top_p": (1e-9, 1.0, "a number above 0, up to 1"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "repetition_penalty": (1e-3, 1e3, "a number from 0.001 to 1000"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
}
"""Fields that are numbers: least, most, and both in words."""


class _FamiliarNames(type):
    """Constructors that take other libraries' names where these ask for nothing, and refuse the others by name."""

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        if positional:
            raise CheetahError("SamplingParams takes names: SamplingParams(temperature=0.8, max_tokens=128)")
        supported = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for name, value in [*named.items()]:
            if name not in supported and value in NEUTRAL.get(name, ()):
                del named[name]
            elif name not in supported:
                known = "is not supported" if name in UNSUPPORTED else "is not a sampling parameter"
                hint = INSTEAD.get(name, f"supported are {', '.join(supported)}")
                raise CheetahError(f"SamplingParams: {name} {known}: {hint}")
        return super().__call__(**named)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(metaclass=_FamiliarNames):
    """One request's sampling and stopping.

    temperature: 0 is greedy (the highest logit, lowest id on ties); None takes the checkpoint's, else 0.
    max_tokens: most tokens to make; None goes on until a stop or until the context is full.
    seed: 0 .. 2**64-1; None takes the LLM's. Matters for temperature > 0 only.
    n: completions of the prompt, which is read once for all. Completion i draws with `seed_of(seed, i)`, the first with
    the seed itself; greedy ones are all the same.
    stop: text (one or several) that ends the completion; cut off unless `include_stop_str_in_output`.
    stop_token_ids: ids that end the completion, besides the checkpoint's end-of-text ids.
    ignore_eos: the checkpoint's end-of-text ids do not end it (for benchmarks); stop and stop_token_ids still do.
    min_tokens: none of so many first tokens ends the completion: end tokens are not sampled, stop strings passed over.

    Names and meanings of what follows are vLLM's; `cheetah.models.sampling` says exactly what is computed. First
    logit_bias and the bans, then penalties, temperature, top_k, top_p and min_p. None takes the checkpoint's, else what
    changes nothing. With temperature 0 top_k, top_p and min_p change nothing.

    top_k: only the so many likeliest tokens (0 or -1: all). top_p: of these only the likeliest that together reach this
    share of the probability. min_p: only tokens at least so many times as likely as the likeliest. repetition_penalty:
    logits of tokens of prompt or completion are divided by it (multiplied where negative). presence_penalty,
    frequency_penalty: taken from the logits of tokens that the completion has, once or each time. logit_bias: {token
    id: what is added to its logit}. allowed_token_ids: no others are sampled. bad_words: what is not written, by
    the ids that the tokenizer has for it; one of several tokens slows its request, and those that are decoded with it.
    truncate_prompt_tokens: of a longer prompt only so many last tokens are used. skip_special_tokens: they have no text
    in the output. logprobs, prompt_logprobs: with each token that is made, or of the prompt, its logprob and those of
    the so many likeliest, up to 20, of the logits as the model makes them, before all of the above. For prompt_logprobs
    all of the prompt is read, also what is cached. structured_outputs: what the text shall be,
    `StructuredOutputsParams` or a mapping with its fields; its end ends the completion, whatever `ignore_eos` and
    `min_tokens` say. speculation: False has no tokens drafted where the LLM does that; they are the same either way.
    prediction: what most of the completion is thought to be, text or ids: drafts are looked up there first."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    speculation: bool = True
    prediction: str | Sequence[int] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop, "a text, or a list of texts")
        object.__setattr__(self, "stop", stop)
        ids = _listed("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(map(_plain_id, ids)))
        self._check_temperature()
        self._check_numbers()
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise CheetahError(f"stop: {text!r} is not a text of at least one character")
        for token in self.stop_token_ids:
            if token < 0:
                raise CheetahError(f"stop_token_ids: {token} is not a token id")
        self._check_tokens()
        if not isinstance(self.prediction, str):
            ids = _listed("prediction", self.prediction, "a text, or a list of token ids")
            if not all(_is_int(token, 0, LARGEST_ID) for token in ids):
                raise CheetahError(f"prediction={shown(ids)}: expected a text, or token ids")
            object.__setattr__(self, "prediction", ids)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))

    def _check_temperature(self) -> None:
        value = self.temperature
        if value is None:
            return
        if not _is_temperature(value):
            raise CheetahError(f"temperature={shown(value)}: expected a number from 0 (greedy) to 1e6")
        if 0 < value < SMALLEST_TEMPERATURE:
            raise CheetahError(f"temperature={value!r} would overflow float32 logits: write 0 for greedy")

    def _check_numbers(self) -> None:
        for table, is_one in ((COUNTS, _is_int), (RANGES, _is_number)):
            for name, (least, most, what) in table.items():
                value = getattr(self, name)
                may_be_none = getattr(SamplingParams, name) is None
                if not is_one(value, least, most) and not (value is None and may_be_none):
                    raise CheetahError(f"{name}={shown(value)}: expected {what}")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise CheetahError(f"{name}={shown(getattr(self, name))}: expected True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise CheetahError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")

    def _check_tokens(self) -> None:
        """Makes tuples of the lists, and a plain dict of the biases."""
        given = self.bad_words
        words = (given,) if isinstance(given, str) else _listed("bad_words", given, "a list of words")
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise CheetahError(f"bad_words: {shown(word)} is not a word")
        object.__setattr__(self, "bad_words", words)
        if self.allowed_token_ids is not None:
            allowed = _listed("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            if not allowed or not all(_is_int(token, 0, LARGEST_ID) for token in allowed):
                raise CheetahError(f"allowed_token_ids={shown(allowed)}: expected at least one token id")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))


def sampling_of_checkpoint(
    generation_config: Mapping[str, Any] | None, config_eos: Any = None, seed: int = 0
) -> tuple[Sampling, tuple[str, ...]]:
    """What a request asks for that leaves everything open, and a line for each guess that was made.

    End ids: those of generation_config.json and of config.json together. Temperature: generation_config's if it says
    do_sample (1.0 if it then gives none), else 0. top_k, top_p, min_p and repetition_penalty: those of
    generation_config.json."""
    generation = generation_config or {}
    ours, other = _token_ids(generation.get("eos_token_id")), _token_ids(config_eos)
    notes = []
    if ours and other and set(ours) != set(other):
        union = sorted({*ours, *other})
        notes.append(f"end-of-text ids {union}: generation_config.json has {ours}, config.json {other}")
    temperature = _default_temperature(generation)
    if temperature > 0:
        notes += _ignored_defaults(generation)
    filters = Filters(
        max(0, _default(generation, "top_k", 0)),
        float(_default(generation, "top_p", 1.0)),
        float(_default(generation, "min_p", 0.0)),
    )
    penalties = Penalties(repetition=float(_default(generation, "repetition_penalty", 1.0)))
    return Sampling(temperature, seed, tuple(sorted({*ours, *other})), filters, penalties), tuple(notes)


def stop_ids(params: SamplingParams, defaults: Sampling) -> tuple[int, ...]:
    """The ids that end a completion: the checkpoint's (unless ignored) and the caller's, ascending."""
    is_ignored = params.ignore_eos and params.structured_outputs is None
    return tuple(sorted({*(() if is_ignored else defaults.stop_ids), *params.stop_token_ids}))


def sampling_of(params: SamplingParams, defaults: Sampling, vocab: int, banned: Sequence[int] = ()) -> Sampling:
    """What a launch needs to know of a request; `defaults` has what it leaves open. banned: ids that are not sampled.
    CheetahError for token ids outside the vocabulary."""
    named = {"logit_bias": params.logit_bias or (), "allowed_token_ids": params.allowed_token_ids or ()}
    for name, tokens in named.items():
        for token in tokens:
            if token >= vocab:
                raise CheetahError(f"{name}: id {token} is outside the vocabulary 0..{vocab - 1}")
    theirs = defaults.filters
    top_k, top_p = _either(params.top_k, theirs.top_k), _either(params.top_p, theirs.top_p)
    min_p = _either(params.min_p, theirs.min_p)
    repetition = _either(params.repetition_penalty, defaults.penalties.repetition)
    return Sampling(
        temperature=_either(params.temperature, defaults.temperature),
        seed=_either(params.seed, defaults.seed),
        stop_ids=stop_ids(params, defaults),
        filters=Filters(max(0, top_k) if top_k < vocab else 0, top_p, min_p),
        penalties=Penalties(repetition, params.presence_penalty, params.frequency_penalty),
        bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed=None if params.allowed_token_ids is None else tuple(sorted({*params.allowed_token_ids})),
        banned=tuple(sorted({*banned})),
    )


def _either(asked: Any, default: Any) -> Any:
    return default if asked is None else asked


def seed_of(seed: int, index: int) -> int:
    """The seed of completion `index` of a request, 0 .. 2**64-1: the seed itself for the first, for the others the
    output of SplitMix64 (Steele, Lea, Flood, 2014) that follows `seed` by `index` places."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def _default_temperature(generation: Mapping[str, Any]) -> float:
    if not generation.get("do_sample"):
        return 0.0
    value = generation.get("temperature", 1.0)
    if not _is_temperature(value):
        raise CheetahError(f"generation_config.json: temperature {shown(value)} is not a number from 0 to 1e6")
    return float(value) if value == 0 or value >= SMALLEST_TEMPERATURE else 0.0


def _default(generation: Mapping[str, Any], name: str, neutral: Any) -> Any:
    """An entry of generation_config.json, checked as a request's would be; `neutral` where it has none."""
    value = generation.get(name)
    if value is None:
        return neutral
    try:
        SamplingParams(**{name: value})
    except CheetahError as error:
        raise CheetahError(f"generation_config.json: {error}") from None
    return value


def _biases(given: Any) -> dict[int, float]:
    """Token ids and numbers, from a mapping whose keys may be integers as text, as in JSON."""
    if not isinstance(given, Mapping):
        raise CheetahError(f"logit_bias={shown(given)}: expected a mapping from token ids to numbers")
    found = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        if not _is_int(token, 0, LARGEST_ID):
            raise CheetahError(f"logit_bias: {shown(key)} is not a token id")
        if not (_is_number(value, -LARGEST_BIAS, LARGEST_BIAS) or value == -math.inf):
            raise CheetahError(f"logit_bias: {shown(value)} of token {token} is not a number from -1e4 to 1e4")
        found[token] = float(value)
    return found


def _ignored_defaults(generation: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name}={shown(generation[name])}"
        for name, neutral in IGNORED_DEFAULTS.items()
        if generation.get(name) is not None and generation[name] != neutral
    ]
    return [f"generation_config.json: {', '.join(found)} not supported, sampling by temperature alone"] if found else []


def _token_ids(entry: Any) -> list[int]:
    """An eos_token_id entry, which may be absent, an integer or a list of them."""
    if entry is None:
        return []
    entries = entry if isinstance(entry, list | tuple) else [entry]
    for token in entries:
        if not _is_int(token, 0, LARGEST_ID):
            raise CheetahError(f"eos_token_id: {shown(token)} is not a token id: expected an integer below 2**31")
    return list(dict.fromkeys(entries))


def _listed(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """The members of a list, none of None. CheetahError for what has none."""
    if value is None or isinstance(value, Iterable):
        return tuple(value or ())
    raise CheetahError(f"{name}={shown(value)}: expected {what}")


def _plain_integer(token: Any) -> int:
    """An integer of any kind. TypeError for all else, True and False among it."""
    if isinstance(token, bool):
        raise TypeError
    return index(token)


def _plain_id(token: Any) -> int:
    try:
        return _plain_integer(token)
    except TypeError:
        hint = ": texts go into stop" if isinstance(token, str) else ""
        raise CheetahError(f"stop_token_ids: {shown(token)} is not a token id{hint}") from None


def _is_temperature(value: Any) -> bool:
    return _is_number(value, 0, LARGEST_TEMPERATURE)


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_int(value: Any, least: float, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def as_token_ids(ids: Iterable[Any], vocab_size: int, what: str = "prompt") -> tuple[int, ...]:
    """Token ids as plain integers, refused unless each is in 0 .. vocab_size-1 and there is at least one."""
    try:
        if isinstance(ids, bytes | bytearray | memoryview):
            raise TypeError
        found = tuple(map(_plain_integer, ids))
    except TypeError:
        raise CheetahError(f"the {what} is neither text nor a sequence of integer token ids") from None
    if not found:
        raise CheetahError(f"the {what} has no tokens: the kernel needs at least one to start from")
    for position, token in enumerate(found):
        if not 0 <= token < vocab_size:
            place = f"{what}: id {token} at position {position}"
            raise CheetahError(f"{place} is outside the vocabulary 0..{vocab_size - 1}")
    return found
