"""How the demo model sees text: its marks, its chat template, how its tokenizer splits words; and its model card."""

from collections.abc import Mapping

from cheetah.models.demo.grammar import Turn
from cheetah.models.llama import LlamaConfig

BEGIN, END, USER, ASSISTANT = SPECIALS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")  # ids 0 to 3

# How Llama 3 cuts a text into words before byte-pair merging.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<|user|>' + message['content'] | trim }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('the demo model knows the roles user and assistant, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def marked(document: str | list[Turn]) -> str:
    """A story or a talk with its marks, as the model was trained on it; a talk just as the chat template writes it."""
    if isinstance(document, str):
        return BEGIN + document + END
    parts = (USER + turn.text if turn.role == "user" else ASSISTANT + turn.text + END for turn in document)
    return BEGIN + "".join(parts)


CARD = """\
---
license: apache-2.0
language: en
library_name: cheetah-megakernel
---
# Cheetah's demo model

A Llama of {parameters:,} parameters ({layers} layers, hidden {hidden}, feed-forward {ffn}, {heads} query and {kv_heads}
key/value heads of {head_dim}, vocabulary {vocab}, tied embeddings, llama3 rope scaling, context {context}) in bfloat16.
It writes short stories in simple English, and answers questions about what it was just told. It exists to be run: it is
small enough for an emulated GPU.

It was trained on nothing but text that `models/demo/grammar.py` generates, so its weights fall under the
project's own licence and owe nothing to anybody. To make it again: `python -m cheetah.models.demo.train` (with
the extra `train`; the bits depend on the build of torch and on the processor). These files: {steps} steps of
{step_tokens} tokens.

| measured when these files were written, with the stored weights in float32 arithmetic | |
|---|---|
{metrics}

Greedily, from "One morning,":

> {sample}

For a talk, `cheetah run demo --chat "Mia has a red kite. What does Mia have?"`.
"""


def model_card(config: LlamaConfig, steps: int, step_tokens: int, metrics: Mapping[str, float], sample: str) -> str:
    """The folder's README.md; `metrics` are shares of 0..1."""
    return CARD.format(
        parameters=config.parameter_count,
        layers=config.layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        steps=steps,
        step_tokens=step_tokens,
        metrics="\n".join(f"| {name} | {share:.1%} |" for name, share in metrics.items()),
        sample=sample,
    )
