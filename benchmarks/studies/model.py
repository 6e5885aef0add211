"""Study: the whole decode step, our kernel against its own phases launched as separate kernels from a CUDA graph.

The unfused step samples too. It makes the same token at the same place each time (positions are arguments, which a
graph keeps); the fused kernel makes a few tokens a launch, as it does in use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.decode_state import TINY, DecodeState, decode_state
from benchmarks.studies.measuring import Launch, Study, StudyError, Variant, in_graph, require_close
from benchmarks.studies.step_kernels import MODEL
from benchmarks.studies.unfused import Unfused
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.registry import preset
from cheetah.package import Generated
from cheetah.plan.kv.tables import epochs_of_step
from cheetah.tools.bench import FIRST_TOKEN

PRESETS = {"llama-3.1-8b": (128, 1024, 3072, 6144), "llama-3.2-1b": (32, 1024, 8000)}
STEPS, TINY_STEPS = 8, 2


def run(study: Study) -> None:
    """Measure every model at every context."""
    models = {"tiny": TINY} if study.tiny else {name: preset(name) for name in PRESETS}
    for name, config in models.items():
        generated = generate_kernel(config, study.gpu)
        with decode_state(study.device, config, generated.manifest) as state:
            both = BothSteps(study, name, state, generated)
            for context in PRESETS.get(name, (3, 70)):
                both.measure(context)


class Fused:
    """The generated kernel of the whole step on the device, with exchange and tokens of its own."""

    def __init__(self, state: DecodeState, config: ModelConfig, generated: Generated, name: str = "fused") -> None:
        self.state, self.manifest, self.head_dim = state, generated.manifest, config.head_dim
        self.loaded = state.device.load(generated.text, generated.manifest)
        self.exchange = state.add(f"{name} exchange", generated.manifest.buffer("exchange").bytes)
        self.tokens = state.add(f"{name} tokens", generated.manifest.buffer("tokens").bytes)
        self.tokens.upload(np.array([FIRST_TOKEN], np.int32))
        self.epochs_per_step = epochs_of_step(config.layers)
        self.epoch = 1

    @property
    def about(self) -> dict[str, Any]:
        """What a record says of the kernel."""
        return {"kernel": self.manifest.text_sha256[:16], "kernels": 1, "plan": self.manifest.plan}

    def launch(self, arguments: dict[str, Any]) -> None:
        """As many steps as the arguments say; epochs go on from launch to launch."""
        given = {**arguments, "exchange": self.exchange, "tokens": self.tokens, "epoch": self.epoch}
        self.epoch += arguments["steps"] * self.epochs_per_step
        self.state.device.launch(self.loaded, given)


class BothSteps:
    """Both variants of one model."""

    def __init__(self, study: Study, name: str, state: DecodeState, generated: Generated) -> None:
        self.study, self.name, self.state = study, name, state
        self.fused = Fused(state, state.config, generated)
        self.unfused = Unfused(state, study.gpu, (*MODEL, "lm_head", "sampling"))

    def measure(self, context: int) -> None:
        """Both at one context, the logits of the first step compared before."""
        steps = TINY_STEPS if self.study.tiny else STEPS
        error = self._check(context)
        # The plans of several steps begin with that of the first: both find what they need in what is uploaded last.
        one, several = self.state.arguments(context, 1), self.state.arguments(context, steps)
        bytes_per_step = self.fused.manifest.step_bytes["weights"] + context * self.state.config.kv_bytes_per_token
        graph = in_graph(self.study.device, lambda: self.unfused.launch(one, self.state.config.layers))

        def unfused() -> None:
            for _ in range(steps):
                graph()

        launches = {
            "unfused": (Launch(unfused, graph.from_graph), self.unfused.about),
            "fused, overlap": (Launch(lambda: self.fused.launch(several), from_graph=False), self.fused.about),
        }
        variants = {
            name: Variant(launch, steps, bytes_per_step, error, about) for name, (launch, about) in launches.items()
        }
        case = {"model": self.name, "context": context}
        self.study.compare(case, variants, self.state.buffers["weights"])

    def _check(self, context: int) -> float:
        """The error of the unfused logits against the fused kernel's, which the project's tests hold to float32."""
        vocab = self.state.config.vocab_size
        given = {**self.state.arguments(context, 1), "logits": self.state.add("study logits", vocab * 4, 0xFF)}
        self.fused.launch(given)
        fused, fused_token = self._result(given, self.fused.tokens)
        given["logits"].fill(0xFF)
        self.unfused.launch(given, self.state.config.layers)
        unfused, token = self._result(given, given["tokens"])
        what = f"unfused {self.name} at context {context}"
        if token != fused_token:
            raise StudyError(f"{what}: token {token}, the fused kernel makes {fused_token}")
        return require_close(what, unfused, fused)

    def _result(self, given: dict[str, Any], tokens: Any) -> tuple[Any, int]:
        self.study.wait()
        return given["logits"].download(np.float32, self.state.config.vocab_size), int(tokens.download(np.int32, 2)[1])
