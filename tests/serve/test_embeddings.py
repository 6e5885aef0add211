"""/v1/embeddings by OpenAI's client, over the demo model in the emulator, beside a stream."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from cheetah.runtime import LLM
from tests.serve.serving import Served, served

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

TEXTS = ["One morning,", "Mia has a red kite.", "Tom had a kite. " * 8]


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    options = {"device": "emulator", "gpu": "emulator-2", "batch": 4, "max_context": 256, "prompt_passes": True}
    with LLM("demo", quiet=True, **options) as llm, served(llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding_format", [openai.omit, "base64"], ids=["numbers", "base64"])
def test_the_vectors_of_texts_are_those_of_llm_embed(
    running: Served, client: openai.OpenAI, encoding_format: Any
) -> None:
    stream = client.completions.create(model="demo", prompt=TEXTS[0], max_tokens=20, temperature=0, stream=True)
    first = next(iter(stream)).choices[0].text
    answer = client.embeddings.create(model="demo", input=TEXTS, encoding_format=encoding_format)
    beside = first + "".join(piece.choices[0].text for piece in stream)
    expected = running.llm.embed(TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, other in zip(answer.data, expected, strict=True):
        np.testing.assert_array_equal(_vector(one.embedding), other.outputs.embedding)
    assert answer.usage.prompt_tokens == sum(len(one.prompt_token_ids) for one in expected)
    alone = client.completions.create(model="demo", prompt=TEXTS[0], max_tokens=20, temperature=0)
    assert beside == alone.choices[0].text


def _vector(found: str | list[float]) -> Any:
    """As the client gives it: it decodes what it has asked for by itself, and no more."""
    return np.frombuffer(base64.b64decode(found), "<f4") if isinstance(found, str) else np.array(found, np.float32)


def test_fields_and_what_is_refused(running: Served, client: openai.OpenAI) -> None:
    ids = list(running.llm.prompts.encode(TEXTS[0]))
    mean = running.llm.embed(TEXTS[0], pooling="mean", normalize=False).outputs.embedding
    extra = {"pooling": "mean", "normalize": False}
    answer = client.embeddings.create(model="demo", input=ids, extra_body=extra)
    np.testing.assert_array_equal(np.array(answer.data[0].embedding, np.float32), mean)
    for fields, param in (
        ({"input": []}, "input"),
        ({"input": "x " * 400}, "input"),
        ({"input": "a", "dimensions": 7}, "dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.embeddings.create(model="demo", **fields)
        assert refusal.value.param == param
