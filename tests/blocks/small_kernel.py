"""A small kernel around some building blocks: sets the machine up, compiles for the emulator, launches on arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from cheetah import lang as ch
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.machine import Machine, emit_roles, start_machine
from cheetah.blocks.ring import Ring
from cheetah.emulator import Program, allocate, compile_program
from cheetah.lang import prim
from cheetah.plan import GPUS, Gpu, ModelShape, Plan, default_plan, shared_map
from tests.planted_text import planted
from tests.program.rig import emulated_gpu

Body = Callable[..., None]
"""Emits the roles of the kernel: (machine, ring, parameters by name)."""


def gpu_of(blocks: int) -> Gpu:
    return GPUS[emulated_gpu(blocks)]


def plan_of(shape: ModelShape, blocks: int, **fields: Any) -> Plan:
    """The plan by rule, with two consumer warps unless `fields` say otherwise."""
    return default_plan(gpu_of(blocks), shape, **{"consumer_warps": 2, "max_context": 512, **fields})


class SmallKernel:
    """`body(machine, ring, parameters)` emits the producer role and the consumer role; the ring is ready in both."""

    def __init__(
        self,
        shape: ModelShape,
        blocks: int,
        plan: Plan,
        parameters: ch.Params,
        body: Body,
        sanitize: bool = False,
        bug: tuple[str, str] | None = None,
        watched: bool = False,
    ) -> None:
        """bug: a piece of the text, and what stands there instead. watched: every load and store is looked at."""
        self.shape, self.blocks, self.plan, self.parameters = shape, blocks, plan, parameters
        gpu = gpu_of(blocks)
        shared = shared_map(shape, plan, gpu)
        self.shared_bytes = shared.total_bytes

        def small(**given: Any) -> None:
            machine = start_machine(shape, plan, gpu, shared)
            ring = start_ring(machine)
            body(machine, ring, given)
            emit_roles(machine)

        kernel = ch.kernel(parameters, name="small", max_threads=plan.threads)(small)
        self.text = ch.render_file(kernel)
        if bug is not None:
            self.text = planted(self.text, *bug)
        self._sanitize, self._watched = sanitize, watched

    @cached_property
    def program(self) -> Program:
        types = [(name, str(type_)) for name, type_ in self.parameters.items()]
        return compile_program(self.text, "small", types, sanitize=self._sanitize, watched=self._watched)

    def launch(self, arguments: Mapping[str, Any], scheduler: str = "round_robin", seed: int = 0) -> None:
        """One launch; arrays by parameter name are read and written in place."""
        values = [arguments[name] for name, _ in self.parameters.items()]
        self.program.launch(self.blocks, self.plan.threads, self.shared_bytes, values, scheduler=scheduler, seed=seed)


@ch.inline
def start_ring(machine: Machine) -> Ring:
    ring = Ring(machine)
    initialise(machine, ring)
    ring.start()
    return ring


@ch.inline
def initialise(machine: Machine, part: Ring | Matvec | Exchange) -> None:
    """Its mbarriers are ready."""
    with ch.if_(machine.thread == 0):
        part.initialise()
        prim.mbarrier_fence_init()
    prim.block_barrier()


def filled(array: Any) -> np.ndarray:
    """The array's values at an address as a GPU's allocation has it."""
    values = np.asarray(array)
    copy = allocate(values.shape, values.dtype)
    copy[...] = values
    return copy
