"""POST /v1/embeddings: the fields that are read, and the answer in OpenAI's shape."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

from cheetah.runtime.outputs import EmbeddingRequestOutput
from cheetah.serve.records import Forgotten, Prompts


class EmbeddingBody(Forgotten):
    """Texts or token ids. pooling, normalize: as those of `LLM.embed`."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True


def embeddings(outputs: Sequence[EmbeddingRequestOutput], name: str, encoding_format: str) -> dict[str, Any]:
    """The answer. base64: of little-endian float32, as OpenAI's client asks for by itself."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(output, encoding_format)}
        for index, output in enumerate(outputs)
    ]
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def _encoded(output: EmbeddingRequestOutput, encoding_format: str) -> str | list[float]:
    vector = output.outputs.embedding
    if encoding_format == "float":
        return [float(number) for number in vector]
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
