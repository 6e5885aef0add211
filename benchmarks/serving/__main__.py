"""python -m benchmarks.serving load|intrusion|soak URL ...: one line of JSON a measurement."""

from __future__ import annotations

import argparse
import asyncio
import json
import os

from benchmarks.serving.load import Load, measure, measure_intrusion
from benchmarks.serving.soak import Soak


def main() -> None:
    options = _arguments()
    key = os.environ.get("CHEETAH_API_KEY")
    if options.work == "soak":
        how = {"longest": options.longest, "hostile": options.hostile, "seed": options.seed, "api_key": key}
        soak = Soak(options.url, options.vocab, options.requests, **how)
        record = asyncio.run(soak.run())
    else:
        load = Load(options.clients, options.prompt_tokens, options.tokens, options.requests)
        if options.work == "load":
            record = asyncio.run(measure(options.url, load, options.vocab, options.seed, key))
        else:
            record = asyncio.run(
                measure_intrusion(options.url, load, options.long_prompt, options.vocab, options.seed, key)
            )
    print(json.dumps(record))


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    works = made.add_subparsers(dest="work", required=True)
    load = works.add_parser("load", help="clients that ask one request after the other")
    intrusion = works.add_parser("intrusion", help="a long prompt arrives while others stream")
    intrusion.add_argument("--long-prompt", type=int, default=16384)
    soak = works.add_parser("soak", help="random requests; start the server with --kv-chunk")
    soak.add_argument("--longest", type=int, default=40, help="tokens of a prompt, and of an answer, are fewer")
    soak.add_argument("--hostile", type=float, default=0.0, help="share of requests that mean harm")
    for work, requests in ((load, 3), (intrusion, 3), (soak, 10_000)):
        work.add_argument("url", help="of the server, without /v1")
        work.add_argument("--vocab", type=int, default=1000, help="prompts have ids below it")
        work.add_argument("--seed", type=int, default=0)
        work.add_argument("--requests", type=int, default=requests)
    for work, clients in ((load, 1), (intrusion, 7)):
        work.add_argument("--clients", type=int, default=clients)
        work.add_argument("--prompt-tokens", type=int, default=128)
        work.add_argument("--tokens", type=int, default=256)
    return made.parse_args()


if __name__ == "__main__":
    main()
