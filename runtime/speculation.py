"""`speculative_config`: how tokens are drafted, by vLLM's keys. What is not known, or not there, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cheetah.errors import CheetahError
from cheetah.plan.plan import VERIFIED_TOKENS
from cheetah.plan.regions import NGRAM_TOKENS
from cheetah.printable import shown
from cheetah.runtime.engine.drafting import Speculation

METHODS = ("ngram", "ngram_gpu")
"""The same here: drafts are looked up inside the kernel."""
OTHER_METHODS = (
    *("suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark"),
    "custom_class",
)
"""vLLM's, which are not there."""
DEFAULT_DRAFTS, DEFAULT_NGRAMS = 7, (2, 5)
"""Eight tokens share a step for a tenth more than one. vLLM looks up behind 5 and 5 tokens where neither is given."""
WITHOUT_MEANING = ("disable_padded_drafter_batch", "enforce_eager", "prompt_lookup_device")
"""Keys that change nothing here."""
KNOWN = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model", *WITHOUT_MEANING)


def speculation_of(config: Mapping[str, Any] | str) -> Speculation:
    """What a `speculative_config` asks for: a dict, or JSON text of one. CheetahError names what is wrong in it."""
    given = _parsed(config) if isinstance(config, str) else config
    if not isinstance(given, Mapping):
        raise CheetahError(f"speculative_config={shown(config)}: expected a dict, e.g. {{'method': 'ngram'}}")
    _check_keys(given)
    _check_method(given)
    drafts = _number(given, "num_speculative_tokens", DEFAULT_DRAFTS, VERIFIED_TOKENS - 1)
    fewest, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if fewest is None and most is None:
        return Speculation(drafts, DEFAULT_NGRAMS)
    longest = _number(given, "prompt_lookup_max" if most is not None else "prompt_lookup_min", None, NGRAM_TOKENS)
    shortest = longest if fewest is None else _number(given, "prompt_lookup_min", None, NGRAM_TOKENS)
    if shortest > longest:
        raise CheetahError(f"speculative_config: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return Speculation(drafts, (shortest, longest))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheetahError(f"speculative_config={shown(text)}: no JSON ({error})") from None


def _check_keys(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key == "rejection_sample_method" and value in (None, "standard"):
            continue
        if key == "rejection_sample_method":
            raise CheetahError(
                f"speculative_config: rejection_sample_method {shown(value)}: the tokens are those that are made "
                "without drafts, so nothing is rejected by chance: leave it out"
            )
        if key not in KNOWN:
            raise CheetahError(f"speculative_config: {shown(key)} is not supported: known are {', '.join(KNOWN)}")


def _check_method(given: Mapping[str, Any]) -> None:
    method, model = given.get("method"), given.get("model")
    if method in OTHER_METHODS or (method is None and model not in (None, "ngram", "[ngram]")):
        asked = shown(method) if method is not None else f"that of model {shown(model)}"
        raise CheetahError(f"speculative_config: method {asked} is not there: use one of {', '.join(METHODS)}")
    if method not in (None, *METHODS):
        raise CheetahError(f"speculative_config: method {shown(method)} is not known: use one of {', '.join(METHODS)}")
    if model not in (None, "ngram", "[ngram]"):
        raise CheetahError(f"speculative_config: model {shown(model)} with method {shown(method)}, which has none")


def _number(given: Mapping[str, Any], key: str, default: int | None, most: int) -> int:
    value = given.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheetahError(f"speculative_config: {key} is {shown(value)}: give 1 to {most}")
    return value
