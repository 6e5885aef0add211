"""Two servers behind vllm-router (docs/serving.md), by turns: where it is installed (`pip install vllm-router`)."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.serve.serving import Served, quick_llm, served, wait_until

ROUTER = shutil.which("vllm-router")
pytestmark = pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed")


@contextmanager
def routed(*servers: Served) -> Iterator[str]:
    """The address of a router over these."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    urls = [server.address for server in servers]
    how = ["--policy", "round_robin", "--host", "127.0.0.1", "--port", port]
    router = subprocess.Popen([str(ROUTER), "--worker-urls", *urls, *how], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: router.poll() is not None or is_well(address))
        yield address
    finally:
        router.terminate()
        router.wait()


def is_well(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_two_servers_behind_one_address() -> None:
    with quick_llm(kv_chunk=64) as first, quick_llm(kv_chunk=64) as second:
        with served(first, names=("demo",)) as one, served(second, names=("demo",)) as two, routed(one, two) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            how = {"model": "demo", "max_tokens": 6, "temperature": 0}
            prompts = ["One morning,", "Mia has a red kite.", "A green boat", "The fox"] * 3
            for prompt in prompts:
                whole = client.completions.create(prompt=prompt, **how).choices[0].text
                stream = client.completions.create(prompt=prompt, stream=True, **how)
                assert "".join(chunk.choices[0].text for chunk in stream) == whole
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.completions.create(**{**how, "prompt": "x", "temperature": -1})
            looked_up = [server.llm.engine.engine.load().tokens_looked_up for server in (one, two)]
            assert all(looked_up), "each has had its turns"
