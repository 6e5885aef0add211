"""`speculative_config`: how tokens are drafted, by vLLM's keys. What is not known, or not there, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cheetah.errors import CheetahError
from cheetah.plan.plan import VERIFIED_TOKENS
from cheetah.plan.regions import NGRAM_TOKENS
from cheetah.printable import shown
from cheetah.runtime.engine.drafting import Speculation

NGRAM, DRAFT_MODEL, EAGLE3, DFLASH, DSPARK, MTP = "ngram", "draft_model", "eagle3", "dflash", "dspark", "mtp"
BLOCK_METHODS = (DFLASH, DSPARK)
"""A drafter of blocks, without a Markov head or with one: see `cheetah.models.block`."""
BY_MODEL = (DRAFT_MODEL, EAGLE3, *BLOCK_METHODS, MTP)
METHODS = (NGRAM, "ngram_gpu", *BY_MODEL)
"""The first two are the same here: drafts are looked up inside the kernel."""
NAMES_OF_MTP = ("qwen3_5_mtp", "qwen3_next_mtp")
"""What vLLM has called it too."""
OTHER_METHODS = ("suffix", "eagle", "medusa", "mlp_speculator", "custom_class")
"""vLLM's, which are not there."""
OF_LOOKUP = ("ngram", "[ngram]")
"""What `model` is where there is none."""
DEFAULT_DRAFTS, DEFAULT_NGRAMS = 7, (2, 5)
"""Eight tokens share a step for a tenth more than one. vLLM looks up behind 5 and 5 tokens where neither is given."""
DEFAULT_DRAFTS_OF_MODEL = 4
"""Each costs a step of the other model."""
DEFAULT_DRAFTS_OF_MTP = 3
"""The layer was trained to draft one."""
USUAL_DRAFTS = {MTP: DEFAULT_DRAFTS_OF_MTP, **dict.fromkeys(BLOCK_METHODS, DEFAULT_DRAFTS)}
WITHOUT_MEANING = ("disable_padded_drafter_batch", "enforce_eager", "prompt_lookup_device")
"""Keys that change nothing here."""
OF_MODEL = ("model", "revision", "quantization", "draft_tensor_parallel_size")
OF_NGRAMS = ("prompt_lookup_min", "prompt_lookup_max")
KNOWN = ("method", "num_speculative_tokens", *OF_MODEL, *OF_NGRAMS, *WITHOUT_MEANING)
ALONE = {
    "rejection_sample_method": (
        "standard",
        "the tokens are those that are made without drafts, so nothing is rejected by chance",
    ),
    "draft_sample_method": ("probabilistic", "drafts are drawn with the request's own noise, so that more are right"),
}
"""Keys with the one value that there is here, and why."""


@dataclass(frozen=True)
class DraftModelAsked:
    """Which checkpoint drafts: as `LLM`'s own options say which one answers; None: the one that answers, by MTP.
    method: one of BY_MODEL; None: its config.json says which. tensor_parallel_size: as it was given, which is nothing
    or that of the model."""

    model: str | None
    revision: str | None = None
    quantization: str | None = None
    method: str | None = None
    tensor_parallel_size: object = None


def drafting_by(drafter: str | None) -> dict[str, Any]:
    """Keys of a `speculative_config` by what drafts: a model's name, or MTP; None where drafts are looked up."""
    if drafter is None:
        return {"method": NGRAM}
    return {"method": MTP} if drafter == MTP else {"model": drafter}


def draft_model_of(config: Mapping[str, Any] | str) -> DraftModelAsked | None:
    """The other model that a `speculative_config` names; None where drafts are looked up."""
    given = _given(config)
    if (method := _method(given)) not in BY_MODEL:
        return None
    model = given.get("model")
    if (model is None or not str(model)) and method != MTP:
        raise CheetahError(f"speculative_config: method {method} needs `model`: the checkpoint that drafts")
    own, stated = str(model or "") or None, method if given.get("method") else None
    texts = _text(given, "revision"), _text(given, "quantization")
    return DraftModelAsked(own, *texts, stated, given.get("draft_tensor_parallel_size"))


def speculation_of(config: Mapping[str, Any] | str) -> Speculation:
    """What a `speculative_config` asks for: a dict, or JSON text of one. CheetahError names what is wrong in it."""
    given = _given(config)
    if (method := _method(given)) in BY_MODEL:
        usual = USUAL_DRAFTS.get(method, DEFAULT_DRAFTS_OF_MODEL)
        return Speculation(_number(given, "num_speculative_tokens", usual, VERIFIED_TOKENS - 1))
    drafts = _number(given, "num_speculative_tokens", DEFAULT_DRAFTS, VERIFIED_TOKENS - 1)
    fewest, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if fewest is None and most is None:
        return Speculation(drafts, DEFAULT_NGRAMS)
    longest = _number(given, "prompt_lookup_max" if most is not None else "prompt_lookup_min", None, NGRAM_TOKENS)
    shortest = longest if fewest is None else _number(given, "prompt_lookup_min", None, NGRAM_TOKENS)
    if shortest > longest:
        raise CheetahError(f"speculative_config: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return Speculation(drafts, (shortest, longest))


def _given(config: Mapping[str, Any] | str) -> Mapping[str, Any]:
    given = _parsed(config) if isinstance(config, str) else config
    if not isinstance(given, Mapping):
        raise CheetahError(f"speculative_config={shown(config)}: expected a dict, e.g. {{'method': 'ngram'}}")
    _check_keys(given)
    return given


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheetahError(f"speculative_config={shown(text)}: no JSON ({error})") from None


def _check_keys(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in ALONE:
            allowed, reason = ALONE[key]
            if value is not None and value != allowed:
                raise CheetahError(f"speculative_config: {key} {shown(value)}: {reason}: leave it out")
        elif key not in KNOWN:
            raise CheetahError(f"speculative_config: {shown(key)} is not supported: known are {', '.join(KNOWN)}")


def _method(given: Mapping[str, Any]) -> str:
    """NGRAM or one of BY_MODEL: where it is not said, a model is a draft model."""
    method, model = given.get("method"), given.get("model")
    if method in NAMES_OF_MTP:
        method = MTP
    if method in OTHER_METHODS:
        raise CheetahError(f"speculative_config: method {shown(method)} is not there: use one of {', '.join(METHODS)}")
    if method not in (None, *METHODS):
        raise CheetahError(f"speculative_config: method {shown(method)} is not known: use one of {', '.join(METHODS)}")
    if method in BY_MODEL or (method is None and model not in (None, *OF_LOOKUP)):
        found = method or DRAFT_MODEL
        _refuse(given, OF_NGRAMS, f"of method {found}, which looks nothing up")
        if found in (*BLOCK_METHODS, MTP):
            _refuse(given, ("quantization",), f"of method {found}, which drafts in bf16")
        return str(found)
    others = OF_MODEL[1:] if model in OF_LOOKUP else OF_MODEL
    _refuse(given, others, f"with method {shown(method or NGRAM)}, which has no model")
    return NGRAM


def _refuse(given: Mapping[str, Any], keys: Sequence[str], reason: str) -> None:
    for key in keys:
        if given.get(key) is not None:
            raise CheetahError(f"speculative_config: {key} {shown(given[key])} {reason}: leave it out")


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise CheetahError(f"speculative_config: {key} is {shown(value)}: expected a text")
    return value


def _number(given: Mapping[str, Any], key: str, default: int | None, most: int) -> int:
    value = given.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheetahError(f"speculative_config: {key} is {shown(value)}: give 1 to {most}")
    return value
