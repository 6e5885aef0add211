"""Files of requests: every request has one answer, wherever the program was ended before."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cheetah.cli.batch import _answer_all
from cheetah.errors import CheetahError
from cheetah.runtime import LLM
from cheetah.serve.batch import BatchFile, answers, finished_ids
from cheetah.serve.service import Options, Service
from tests.serve.serving import quick_llm

CHAT = [{"role": "user", "content": "Mia has a red kite. What does Mia have?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with quick_llm() as opened:
        yield opened


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"prompt": "One morning,", "max_tokens": number % 4 + 1, "temperature": 0, **body}
    return {"custom_id": f"request {number}", "method": "POST", "url": url, "body": given}


def work_on(llm: LLM, file: BatchFile, target: Path, most: int | None = None) -> None:
    """Goes on with a batch, for `most` answers."""

    async def work() -> None:
        service = Service(llm, Options(("demo",), most_waiting=100))
        service.driver.start()
        finished = finished_ids(target)
        wanted = (line for line in file.lines() if line.custom_id not in finished)
        try:
            left = most
            async for line in answers(service, wanted, 3):
                if left == 0:
                    return
                with target.open("ab") as out:
                    out.write(line)
                left = None if left is None else left - 1
        finally:
            await service.driver.stop()

    asyncio.run(work())


def read(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["custom_id"] for answer in found}) == len(found), "one was answered twice"
    return {answer["custom_id"]: answer for answer in found}


@pytest.mark.slow
def test_what_was_ended_anywhere_goes_on_and_loses_and_repeats_nothing(llm: LLM, tmp_path: Path) -> None:
    draw = random.Random(1)
    file = BatchFile.checked(written(tmp_path / "in.jsonl", *map(request, range(12))))
    work_on(llm, file, tmp_path / "whole.jsonl")
    whole = {name: answer["response"]["body"]["choices"] for name, answer in read(tmp_path / "whole.jsonl").items()}
    assert list(sorted(whole)) == sorted(f"request {number}" for number in range(12))

    target = tmp_path / "out.jsonl"
    while not target.exists() or len(finished_ids(target)) < 12:
        work_on(llm, file, target, draw.randrange(4))
        if target.exists():
            data = target.read_bytes()
            target.write_bytes(data[: len(data) - draw.choice([0, 0, 1, 30])])  # killed in the middle of a line
    assert {name: answer["response"]["body"]["choices"] for name, answer in read(target).items()} == whole


def test_answers_of_all_kinds(llm: LLM, tmp_path: Path) -> None:
    lines = [
        request(0, "/v1/chat/completions", messages=CHAT, prompt=None),
        request(1, temperature=-1),
        request(2, stream=True),
        request(3, "/v1/embeddings"),
        request(4, model="gpt"),
    ]
    del lines[0]["body"]["prompt"]
    target = tmp_path / "out.jsonl"
    work_on(llm, BatchFile.checked(written(tmp_path / "in.jsonl", *lines)), target)
    found = {name: answer["response"] for name, answer in read(target).items()}
    assert [found[f"request {number}"]["status_code"] for number in range(5)] == [200, 400, 400, 404, 404]
    assert found["request 0"]["body"]["object"] == "chat.completion"
    assert found["request 1"]["body"]["error"]["param"] == "temperature"
    assert all(answer["error"] is None and answer["id"] for answer in read(target).values())


def test_a_full_disk_is_one_message(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    lines = BatchFile.checked(written(tmp_path / "requests", request(1))).lines()
    with pytest.raises(CheetahError, match="answers: cannot be written: No space left on device"):
        asyncio.run(_answer_all(llm, ("demo",), None, lines, tmp_path / "answers"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheetahError, match="line 2: custom_id 'request 1' stands there twice"):
        BatchFile.checked(written(tmp_path / "in.jsonl", request(1), request(1)))
    with pytest.raises(CheetahError, match=r"line 1: url: Field required"):
        BatchFile.checked(written(tmp_path / "in.jsonl", {"custom_id": "a", "body": {}}))
    with pytest.raises(CheetahError, match="No such file"):
        BatchFile.checked(tmp_path / "none.jsonl")
    with pytest.raises(CheetahError, match="line 1: no answer of a batch"):
        finished_ids(written(tmp_path / "out.jsonl", [1], [2]))
    with pytest.raises(CheetahError, match="is no ordinary file"):
        finished_ids(tmp_path)
    asked = json.dumps(request(1))
    for text in ("what somebody else wrote, without a line's end", asked, f"{asked}\n"):
        other = tmp_path / "other"
        other.write_text(text)
        with pytest.raises(CheetahError, match="line 1: no answer of a batch"):
            finished_ids(other)
        assert other.read_text() == text, "nothing of it is taken for an answer that was cut"
