"""Interrupts itself by SIGINT at many offsets into requests on the emulator; prints how many hit one.

Run as a program: batch, sync. Ends with an error if anything is not as it was after an interrupt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from cheetah.runtime import LLM, SamplingParams

OFFSETS = 8
PROMPTS = ["One morning, the fox", "The owl"]


def interrupted_after(llm: LLM, seconds: float, params: SamplingParams) -> float | None:
    """How many seconds the requests took, where the interrupt came behind their end."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    ended, started = None, time.monotonic()
    try:
        timer.start()
        llm.generate(PROMPTS, params)
        ended = time.monotonic() - started
        timer.join()
        time.sleep(0.01)  # the signal is on its way
    except KeyboardInterrupt:
        pass  # in the middle, or behind the last token
    return ended


def main(batch: int, sync: str) -> None:
    with LLM("demo", device="emulator", gpu="emulator-2", batch=batch, sync=sync, quiet=True, max_context=64) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.8, seed=3)
        llm.generate(PROMPTS, params)
        started = time.monotonic()
        wanted = [output.token_ids for output in llm.generate(PROMPTS, params)]
        whole = time.monotonic() - started
        pool = llm.engine.engine.launcher.cache.pool
        hits = 0
        for number in range(OFFSETS):
            ended: float | None = whole
            with suppress(KeyboardInterrupt):  # after the last token
                ended = interrupted_after(llm, whole * 1.1 * number / OFFSETS, params)
            hits += ended is None
            whole = whole if ended is None else min(whole, ended)  # it was slower when others had the processor
            assert llm.generate(PROMPTS[1], params).token_ids == wanted[1], number
            assert pool.available_pages == pool.pages, (number, pool.available_pages, pool.pages)
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == wanted
    print(hits, "of", OFFSETS)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
