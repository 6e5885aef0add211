"""Tiny tokenizers of the kinds that Llama checkpoints have, built on the spot, as the text of tokenizer.json."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cheetah.runtime.text.token_bytes import byte_level_alphabet

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level() -> str:
    """Like Llama 3: 256 bytes, a few merges (one of half a character), specials above, BOS by the post-processor."""
    from tokenizers import Regex

    vocabulary = {character: byte for character, byte in byte_level_alphabet().items()}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ġt", "he"), ("Ã", "©"), ("ð", "Ł")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    vocabulary["lex"] = len(vocabulary)  # whole word without merges: found only with ignore_merges
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|begin|>", "<|end|>", "<|turn|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)]
    )
    return str(tokenizer.to_str())


def byte_fallback() -> str:
    """Like Llama 2: SentencePiece BPE with <0xNN> tokens, spaces as U+2581, a leading space stripped in decoding."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("\u2581", "a", "b", "c", "t", "h", "e", "th", "the", "\u2581the", "é", "\u2581\u2581", "ab"):
        vocabulary[piece] = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return str(tokenizer.to_str())


def metaspace() -> str:
    """Words marked by U+2581, decoded by the Metaspace decoder; no byte tokens, no special tokens."""
    pieces = ["<unk>", "\u2581", "\u2581a", "b", "\u2581cat", "s", "\u2581\u2581"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return str(tokenizer.to_str())


def whole_words() -> str:
    """A word a token, no decoder: decoding puts spaces between them."""
    words = ["<unk>", "the", "cat", "sat", "."]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return str(tokenizer.to_str())


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "whole_words": whole_words}
