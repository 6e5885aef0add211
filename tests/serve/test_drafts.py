"""A server whose answers another model drafts: the same answers, and what its usage and its metrics say."""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from cheetah.runtime import LLM
from tests.serve.serving import served


@pytest.mark.slow
@pytest.mark.compiler
def test_clients_get_the_same_answers_and_are_told_what_came_of_drafts() -> None:
    """Five at a time, more than have columns for drafts, three of which are streamed."""
    config = {"model": "demo", "num_speculative_tokens": 3}
    options = {"device": "emulator", "batch": 5, "max_context": 96, "speculative_config": config}
    prompts = [f"{name} has a red kite. The" for name in ("Mia", "Tom", "Anna", "Ben", "Zoe")]

    with LLM("demo", quiet=True, **options) as llm, served(llm, names=("demo",)) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)

        def asked(number: int, speculation: bool) -> tuple[str, int]:
            """The answer, and how many drafts of it were right."""
            how = {"model": "demo", "prompt": prompts[number], "max_tokens": 20, "seed": 3, "temperature": 0.8}
            more = {"speculation": speculation}
            if number < 3:
                found = [*client.completions.create(stream=True, extra_body=more, **how)]
                return "".join(one.choices[0].text for one in found if one.choices), 0
            answer = client.completions.create(extra_body=more, **how)
            assert answer.usage is not None and answer.usage.completion_tokens == 20
            details = answer.usage.completion_tokens_details
            return answer.choices[0].text, (details and details.accepted_prediction_tokens) or 0

        with ThreadPoolExecutor(5) as pool:
            plain = [*pool.map(lambda number: asked(number, False), range(5))]
            drafted = [*pool.map(lambda number: asked(number, True), range(5))]
        metrics = urllib.request.urlopen(f"{server.address}/metrics").read().decode()
    assert [text for text, _ in drafted] == [text for text, _ in plain]
    assert sum(right for _, right in plain) == 0 < sum(right for _, right in drafted)
    found = dict(re.findall(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:{[^}]*})? (\d+)", metrics, re.M))
    drafts, tokens, accepted = (int(found[name]) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert 0 < drafts <= tokens and 0.9 * tokens <= accepted <= tokens
