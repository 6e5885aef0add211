"""The port, bounds on connections, the Host that requests name, and Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from cheetah.cli import app
from cheetah.cli.serve import _allowed
from cheetah.errors import CheetahError
from cheetah.runtime import LLM
from cheetah.serve import listening as listening_module
from cheetah.serve.listening import SPARE_DESCRIPTORS, Bounds, Connection, enough_descriptors, listening
from tests.serve.serving import GatedDevice, Served, connected, quick_llm, served

QUICK = Bounds(most=4, header_s=0.2, body_s=0.2, write_s=0.02)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with quick_llm() as llm:
        yield llm


@pytest.fixture
def running(llm: LLM) -> Iterator[Served]:
    bounds = Bounds(QUICK.most, QUICK.header_s, QUICK.body_s, QUICK.write_s)
    with served(llm, bounds, hosts=_allowed("127.0.0.1", ["my.server"])) as running:
        yield running


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to the log, whatever its level."""
    found: list[str] = []
    log = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(log, "handle", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(log, "isEnabledFor", lambda level: level >= logging.WARNING)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Once the server has closed it; TimeoutError if it does not."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def test_only_hosts_that_are_its_own_are_answered(running: Served) -> None:
    """A page whose name was made to mean 127.0.0.1 has its own name in Host."""
    port = running.address.rpartition(":")[2]
    hosts = {
        200: ("localhost", "LOCALHOST.", f"127.0.0.1:{port}", f"[::1]:{port}", "my.server", "My.Server:1"),
        403: ("evil.com", f"evil.com:{port}", "localhost.evil.com", "127.0.0.1.evil.com", "[::2]", ""),
    }
    with httpx.Client(base_url=running.address) as http:
        for status, names in hosts.items():
            for name in names:
                for path in ("/version", "/", "/health"):
                    assert http.get(path, headers={"host": name}).status_code == status, name
        refusal = http.post("/v1/completions", json={"prompt": "x"}, headers={"host": "evil.com"})
        assert "--allowed-hosts" in refusal.json()["error"]["message"]
    with connected(running, b"GET /version HTTP/1.0\r\n\r\n") as old:
        assert old.recv(99).startswith(b"HTTP/1.1 200"), "without a Host: no browser"


def test_hosts_follow_from_where_it_listens() -> None:
    assert set(_allowed("127.0.0.1", [])) == {"localhost", "127.0.0.1", "[::1]"}
    assert "[::1]" in _allowed("::1", []) and "127.8.8.8" in _allowed("127.8.8.8", [])
    assert _allowed("0.0.0.0", []) == _allowed("127.0.0.1", ["*"]) == () and "a.b" in _allowed("0.0.0.0", ["a.b"])


@pytest.mark.slow
def test_a_connection_without_a_whole_request_is_closed(running: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    unfinished = (b"", b"GET / HT", head, head + b"content-length: 9\r\n\r\n{", head + b"x: y\r\n" * 3)
    for data in unfinished:
        assert is_closed(connected(running, data)), data
    with connected(running, head + b"content-length: 2\r\n\r\n{}") as whole:
        assert whole.recv(12) == b"HTTP/1.1 400"
        assert httpx.get(f"{running.address}/health").status_code == 200


@pytest.mark.slow
def test_too_many_connections_cost_the_oldest_silent_one(llm: LLM, said: list[str]) -> None:
    with served(llm, Bounds(most=4)) as running:
        silent = [connected(running) for _ in range(4)]
        for _ in range(3):
            with httpx.Client(base_url=running.address) as http:
                assert http.get("/health").status_code == 200
        assert all(map(is_closed, silent[:1]))
        silent[1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert silent[1].recv(12) == b"HTTP/1.1 200", "who is not needed stays"
        for one in silent[1:]:
            one.close()
    assert [line.partition(":")[0] for line in said] == ["more than 4 connections"]


@pytest.mark.slow
def test_where_all_connections_are_at_work_a_new_one_is_told_so() -> None:
    device = GatedDevice()
    with quick_llm(device) as llm, served(llm, Bounds(most=1)) as running:
        device.gate.clear()
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        stream = client.completions.create(model="demo", prompt="x", max_tokens=3, stream=True)
        with pytest.raises(openai.InternalServerError, match="too many connections"):
            openai.OpenAI(base_url=running.url, api_key="none", max_retries=0).models.list()
        device.gate.set()
        assert list(stream)


def test_who_takes_nothing_of_an_answer_is_closed() -> None:
    class Transport(asyncio.Transport):
        ended = 0

        def abort(self) -> None:
            self.ended += 1

    async def stalled(resumes: bool) -> int:
        import uvicorn
        from uvicorn.server import ServerState

        given = {"config": uvicorn.Config("none", interface="asgi3"), "server_state": ServerState(), "app_state": {}}
        given["config"].loaded, given["config"].loaded_app, given["config"].ws_protocol_class = True, None, None
        one, transport = Connection(QUICK, **given), Transport()
        one.connection_made(transport)
        one.pause_writing()
        if resumes:
            one.resume_writing()
        await asyncio.sleep(0.06)
        ended = transport.ended
        one.connection_lost(ConnectionResetError())
        return ended

    assert asyncio.run(stalled(False)) == 1 and asyncio.run(stalled(True)) == 0


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 300]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: limits.__setitem__(slice(None), wanted))
    found = enough_descriptors(1024)
    assert limits == [300, 300] and 1 <= found < 300 - SPARE_DESCRIPTORS
    assert enough_descriptors(10) == 10 or found < 10


def test_a_process_without_descriptors_says_so_once(running: Served, said: list[str]) -> None:
    loop = asyncio.new_event_loop()
    none_left = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "none")}
    for _ in range(1000):
        running.server._take_problem(loop, none_left)
    loop.close()
    assert len(said) == 1 and "ulimit -n" in said[0]


def test_a_port_in_use_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any, **named: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("cheetah.runtime.LLM", load)
    monkeypatch.setattr(listening_module, "enough_descriptors", lambda wanted: wanted)
    with listening("127.0.0.1", 0) as taken:
        taken.listen()
        result = CliRunner().invoke(app, ["serve", "demo", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2 and "already in use" in result.output and result.output.count("error:") == 1
    result = CliRunner().invoke(app, ["serve", "demo", "--log-level", "loud"])
    assert result.exit_code == 2 and "choose one of critical" in result.output
    with pytest.raises(CheetahError, match="cannot listen at no.such.host.invalid:80"):
        listening("no.such.host.invalid", 80)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_streams_with_an_error(said: list[str]) -> None:
    device = GatedDevice(seconds=0.02)
    with quick_llm(device, launch_steps=2) as llm, served(llm) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        extra = {"ignore_eos": True}
        stream = client.completions.create(model="demo", prompt="x", max_tokens=90, stream=True, extra_body=extra)
        next(stream)
        for _ in range(2):
            running.server.handle_exit(signal.SIGINT, None)
        with pytest.raises(openai.APIError, match="the server was stopped"):
            list(stream)
    assert not said, "no traceback"
