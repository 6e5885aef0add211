"""A server in a thread of this process, on a free port of 127.0.0.1, and devices that can be held up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah.runtime import LLM
from cheetah.serve.app import asgi
from cheetah.serve.listening import Bounds, Server, listening
from cheetah.serve.service import Options
from tests.runtime.fake_kernel import FakeDevice, generate_kernel

PATIENCE_S = 30.0


@dataclass
class Served:
    """A server that runs. `faults` counts calls of on_fault."""

    llm: LLM
    server: Server
    address: str
    faults: list[int]

    @property
    def url(self) -> str:
        return f"{self.address}/v1"


@contextmanager
def served(llm: LLM, bounds: Bounds | None = None, **options: Any) -> Iterator[Served]:
    """`llm` behind HTTP until the end of the block; requests under way are then ended."""
    faults: list[int] = []
    app = asgi(llm, Options(**{"names": (llm.name,), **options}), lambda: faults.append(1))
    at = listening("127.0.0.1", 0)
    server = Server(app, bounds or Bounds(), app.state.service.driver.hurry, 5, log_level="error")
    thread = threading.Thread(target=server.run, args=([at],))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield Served(llm, server, f"http://127.0.0.1:{at.getsockname()[1]}", faults)
    finally:
        server.should_exit = True
        thread.join()


def connected(running: Served, data: bytes = b"") -> socket.socket:
    """Who has sent so much of a request."""
    host, port = running.address.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    found.sendall(data)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


class GatedDevice(FakeDevice):
    """Its launches end while the gate is open; `seconds` is what each takes at least."""

    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = seconds

    def synchronize(self, timeout_s: float | None = None, progress: object = None) -> None:
        time.sleep(self.seconds)
        assert self.gate.wait(PATIENCE_S)
        super().synchronize(timeout_s, progress)


def quick_llm(device: FakeDevice | None = None, **options: Any) -> LLM:
    """The demo model on a device that runs the reference."""
    given = {"batch": 2, "max_context": 96, "quiet": True, **options}
    return LLM("demo", device=device or GatedDevice(), generate_kernel=generate_kernel, **given)
