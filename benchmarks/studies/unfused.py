"""The launches of the unfused step, or of an unfused stack: a kernel for every phase of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.studies.decode_state import DecodeState
from benchmarks.studies.step_kernels import EMBEDDING, StepKernel, phase_kernel, residual_words
from cheetah.plan import Gpu


class Unfused:
    """The kernels of the embedding and of `phases` on the device, with an exchange and a residual of their own."""

    def __init__(self, state: DecodeState, gpu: Gpu, phases: Sequence[str], stack: str | None = None) -> None:
        plan = replace(state.plan, sync="barrier")  # plain words; the kernels leave the barrier out
        self.state, self.phases = state, (EMBEDDING, *phases)
        kernels = {phase: phase_kernel(state.config, gpu, plan, phase, stack) for phase in self.phases}
        self.kernel: StepKernel = kernels[phases[0]]
        self.loaded = {
            phase: state.device.load(kernel.text.text, kernel.text.manifest) for phase, kernel in kernels.items()
        }
        self.exchange = state.add("unfused exchange", self.kernel.exchange_bytes)
        self.residual = state.add("unfused residual", 4 * residual_words(state.config, gpu, plan), 0xFF)

    @property
    def about(self) -> dict[str, Any]:
        """What a record says of the kernels: the hash of the first."""
        manifest = self.kernel.text.manifest
        return {"kernel": manifest.text_sha256[:16], "kernels": len(self.phases), "plan": manifest.plan}

    def launch(self, arguments: dict[str, Any], layers: int) -> None:
        """One pass: the embedding, the phases of every layer, then those that come once. `arguments` as of the fused
        step."""
        given = {**arguments, "exchange": self.exchange, "residual": self.residual}
        first, *phases = self.phases
        once = [phase for phase in phases if phase in ("lm_head", "sampling")]
        self.state.device.launch(self.loaded[first], {**given, "layer": 0})
        for layer in range(layers):
            for phase in phases:
                if phase not in once:
                    self.state.device.launch(self.loaded[phase], {**given, "layer": layer})
        for phase in once:
            self.state.device.launch(self.loaded[phase], {**given, "layer": layers})
