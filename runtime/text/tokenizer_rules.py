"""Whether the rules of a tokenizer.json are of the kinds that published models have, which can do no harm.

The `tokenizers` library runs whatever the file says: a chain of replacements doubles a text again and again, a regular
expression backtracks for hours, a table that is cut short ends the process. Rules are *usual* here if what they make of
a text is bounded by a small multiple of its length, and their regular expressions are those of known models. Other
rules belong into a guarded process. Knows nothing of ids or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cheetah.printable import shown

CHAIN = 4
"""Most rules after each other: each of them makes at most four characters of one, but for NFKC and NFKD (18, once)."""
AFFIX_CHARACTERS = 16
ADDED_TOKENS = 10_000
ADDED_CHARACTERS = 500_000

SPLITS = {
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Regular expressions by which known models split a text: at worst they take the square of a run of spaces."""

_Check = Callable[[Mapping[str, Any]], bool]


def _always(rule: Mapping[str, Any]) -> bool:
    return True


def _is_short_prefix(rule: Mapping[str, Any]) -> bool:
    return rule.get("prepend") is not None and _is_short(rule["prepend"])


def _lengthens_nothing(rule: Mapping[str, Any]) -> bool:
    """A plain text in place of one at least as long."""
    replaced = rule["pattern"].get("String") if isinstance(rule.get("pattern"), Mapping) else None
    content = rule.get("content")
    return isinstance(replaced, str) and isinstance(content, str) and 0 < len(replaced) >= len(content)


def _splits_as_known(rule: Mapping[str, Any]) -> bool:
    pattern = rule.get("pattern")
    if not isinstance(pattern, Mapping):
        return False
    plain = pattern.get("String")
    return bool(pattern.get("Regex") in SPLITS.values() or (isinstance(plain, str) and plain))


_CHAINS: dict[str, tuple[str, dict[str, _Check]]] = {
    "normalizer": (
        "normalizers",
        {
            **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt"), _always),
            "Prepend": _is_short_prefix,
            "Replace": _lengthens_nothing,
        },
    ),
    "pre_tokenizer": (
        "pretokenizers",
        {
            **dict.fromkeys(("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits"), _always),
            **dict.fromkeys(("BertPreTokenizer", "Punctuation"), _always),
            "Split": _splits_as_known,
        },
    ),
    "post_processor": ("processors", dict.fromkeys(("ByteLevel", "TemplateProcessing"), _always)),
}
"""Part of tokenizer.json -> where a Sequence of its kind has its rules, and what makes one usual, by type."""


def unusual_rule(description: Mapping[str, Any]) -> str | None:
    """The first part of a tokenizer.json whose rules are not usual, with what it says; None if all are."""
    for part in _CHAINS:
        if not _is_usual_chain(part, description.get(part)):
            return f"{part} {shown(description.get(part))}"
    model = description.get("model")
    if not isinstance(model, Mapping) or model.get("type") not in ("BPE", "WordLevel") or model.get("dropout"):
        return f"model {shown(model)}"
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if not _is_short(model.get(affix)):
            return f"model with {affix} {shown(model[affix])}"
    return _unusual_added_tokens(description.get("added_tokens"))


def _is_short(affix: object) -> bool:
    return affix is None or (isinstance(affix, str) and len(affix) <= AFFIX_CHARACTERS)


def _is_usual_chain(part: str, chain: Any) -> bool:
    below, checks = _CHAINS[part]
    rules = chain.get(below) if isinstance(chain, Mapping) and chain.get("type") == "Sequence" else [chain]
    if not isinstance(rules, list) or len(rules) > CHAIN:
        return False
    return all(rule is None or _is_usual(rule, checks) for rule in rules)


def _is_usual(rule: Any, checks: Mapping[str, _Check]) -> bool:
    if not isinstance(rule, Mapping) or not isinstance(rule.get("type"), str):
        return False
    return rule["type"] in checks and checks[rule["type"]](rule)


def _unusual_added_tokens(tokens: Any) -> str | None:
    if not isinstance(tokens, list | None):
        return f"added_tokens {shown(tokens)}"
    contents = [token.get("content") for token in tokens or () if isinstance(token, Mapping)]
    characters = sum(len(content) for content in contents if isinstance(content, str))
    if len(contents) > ADDED_TOKENS or characters > ADDED_CHARACTERS:
        return f"added_tokens: {len(contents)} of {characters} characters"
    return None
