"""Servers on several GPUs or machines by Ray Serve: `serve run examples.ray_serve:app`, or `:demo` without a GPU.

Each replica is one model on one GPU with the same application as `cheetah serve`; Ray starts and ends them, shares the
requests out and replaces a replica whose engine hangs. Needs `pip install 'ray[serve]'` beside the extra `serve`.
"""

from typing import Any

from fastapi import FastAPI
from ray import serve

from cheetah import LLM
from cheetah.serve.app import asgi
from cheetah.serve.service import Options

TOGETHER = 8  # completions that an engine decodes together; as many may wait behind them


class Engine:
    """One replica. The application is made on it, behind the model."""

    def __init__(self, model: str, name: str, **options: Any):
        self.llm = LLM(model, batch=TOGETHER, **options)
        self.name = name

    async def __serve_build_asgi_app__(self) -> FastAPI:
        self.application = asgi(self.llm, Options((self.name,), most_waiting=TOGETHER))
        return self.application

    def check_health(self) -> None:
        """Raises if the engine's steps do not end: Ray then replaces the replica."""
        self.application.state.service.driver.check()


def deployment(model: str, name: str, gpus: int = 1, **options: Any) -> serve.Application:
    """From one to four replicas, as requests come."""
    scaling = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": TOGETHER}
    replica = serve.deployment(
        serve.ingress()(Engine),
        ray_actor_options={"num_gpus": gpus},
        max_ongoing_requests=2 * TOGETHER,
        autoscaling_config=scaling,
    )
    return replica.bind(model, name, **options)


app = deployment("meta-llama/Llama-3.1-8B-Instruct", "llama")
demo = deployment("demo", "demo", gpus=0, device="emulator")
