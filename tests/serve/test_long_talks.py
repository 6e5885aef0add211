"""A server of a model that remembers, with long talks side by side: each turn goes on from what is kept of the last."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import openai
import pytest
from safetensors.numpy import save_file

from cheetah.models.registry import DEMO_FOLDER
from cheetah.runtime import LLM
from tests.program.test_hybrids import hybrid, weights
from tests.serve.serving import served

TURNS = 4
NAMES = ("Mia", "Tom", "Anna")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.compiler
def test_turns_hit_what_is_kept_of_the_one_before(tmp_path: Path) -> None:
    """Of three talks at a time by two places, with answers of prompts that are read whole."""
    config = replace(hybrid(1, 2, (0, 1, 2), layers=4, heads=2, dims=128), vocab_size=512)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "tokenizer.json").write_bytes((DEMO_FOLDER / "tokenizer.json").read_bytes())
    tensors = weights(config).tensors
    stored = {name: one.view(ml_dtypes.bfloat16) if one.itemsize == 2 else one for name, one in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    options = {"device": "emulator", "gpu": "emulator-2", "batch": 2, "max_context": 192, "kv_chunk": 32}

    def talks(prefix_cache: bool) -> tuple[list[list[str]], dict[str, int]]:
        """What each talk's turns were answered, and how many tokens of prompts were asked for and found."""
        llm = LLM(tmp_path, quiet=True, prompt_tokens=4, prefix_cache=prefix_cache, **options)
        with llm, served(llm, names=("it",)) as server:
            client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)

            def talk(name: str) -> list[str]:
                text, answers = f"{name} has a red kite. The kite is in the tree.", []
                for turn in range(TURNS):
                    made = client.completions.create(model="it", prompt=text, max_tokens=6, seed=turn, temperature=0.8)
                    answers.append(made.choices[0].text)
                    text = f"{text} {name} is sad. Her dad can get the kite down {turn}."  # and not what it was told
                return answers

            with ThreadPoolExecutor(len(NAMES)) as pool:
                found = [*pool.map(talk, NAMES)]
            metrics = urllib.request.urlopen(f"{server.address}/metrics").read().decode()
        counts = re.findall(r"^vllm:prefix_cache_(queries|hits)(?:_total)?(?:{[^}]*})? (\d+)", metrics, re.M)
        return found, {name: int(count) for name, count in counts}

    (whole, without), (kept, counted) = talks(False), talks(True)
    assert kept == whole and without["hits"] == 0
    assert counted["hits"] > counted["queries"] / 3, counted
