"""Whether the kernels of passes over prompts are right under any schedule: what `cheetah check` does beside the step's.

The launches are the runtime's own: a prompt in two passes, with a second one beside its end, then the head over the
last tokens of both. Their cached keys and values, and those tokens' logits, are compared over all schedules, and with
float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError, compile_program, explore
from cheetah.generate import choose_plan, describe_kernel, describe_pass, generate_head, generate_pass
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, Rounding, exact, round_to_bf16, round_to_e4m3
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.prompt import PassPlan, default_pass_plan, short_pass_plans
from cheetah.runtime.assembly.buffers import allocate_buffers
from cheetah.runtime.device.emulator import EmulatorDevice, EmulatorKernel
from cheetah.runtime.engine.flights import Part
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.tools.check import RACE_GPU, Progress, Scheduled, Subject, Verdict
from cheetah.tools.course import LEAST_TOLERANCE, TOLERANCE_FACTOR, Agreement, fixed_buffers, relative_errors

FIRST, REST, SECOND = 13, 26, 13
"""Tokens of the first prompt's two passes, and of the second prompt. In the first some blocks multiply nothing."""
JUDGED = 2
"""Last tokens of each prompt whose logits are looked at."""
PASS_TOKENS = 64
SCHEDULES_SHARE = 4
"""One of so many schedules of the step's is spent on passes."""

Bits = NDArray[Any]


def check_passes(
    subject: Subject,
    gpu: str,
    seeds: int,
    schedulers: Sequence[str],
    sanitizer: bool,
    *,
    stop_after: int | None = None,
    progress: Progress = lambda line: None,
) -> Iterator[tuple[Subject, Verdict]]:
    """The verdict on passes over the subject's prompts, from a quarter of the `seeds` schedules of each scheduler, and
    with `sanitizer` one run under the race detector; then on those that have phases in which parts of products are
    added, from as many schedules, if there are such. Nothing where there are no passes over such weights. stop_after:
    schedules that failed."""
    plan, machine = {"batch": 2, **subject.plan}, gpu_named(gpu)
    whole, cut = default_pass_plan(machine, PASS_TOKENS), short_pass_plans(machine)[0]
    named = Subject("passes over its prompts", subject.config, subject.tensors, plan)
    try:
        course = PassCourse(named, gpu, whole)
    except PlanError:
        return
    verdict = _explored(course, seeds, schedulers, stop_after, progress)
    if sanitizer:
        progress("passes, race detector")
        verdict = replace(verdict, sanitized=True, race=PassCourse(named, RACE_GPU, whole, sanitize=True).race())
    yield named, verdict
    if describe_pass(subject.config, machine, course.plan, cut, "", "").phases != course.manifest.phases:
        named = Subject("passes over few tokens, whose products are cut", subject.config, subject.tensors, plan)
        yield named, _explored(PassCourse(named, gpu, cut), seeds, schedulers, stop_after, progress)


def _explored(
    course: PassCourse, seeds: int, schedulers: Sequence[str], stop_after: int | None, progress: Progress
) -> Verdict:
    found: list[Bits] = []

    def run(scheduler: str, seed: int) -> list[Bits]:
        progress(f"passes, {scheduler}, seed {seed}")
        outputs = course.run(scheduler, seed)
        found[:] = found or outputs
        return outputs

    exploration = explore(run, range(max(1, seeds // SCHEDULES_SHARE)), schedulers, stop_after=stop_after)
    return Verdict(exploration, course.agreement(found) if found else None)


class PassCourse:
    """Two passes over two prompts, in the pages of a shuffled pool: the first of one prompt alone, the second of its
    rest and of the other one. PlanError where the model has no passes."""

    def __init__(self, subject: Subject, gpu: str, pass_plan: PassPlan, *, sanitize: bool = False) -> None:
        config = self.config = subject.config
        machine = gpu_named(gpu)
        self.plan = choose_plan(config, machine, **subject.plan)
        passes = generate_pass(config, machine, self.plan, pass_plan)
        self.manifest, self.decoding = passes.manifest, describe_kernel(config, machine, self.plan, "", "")
        parameters = [(parameter.name, parameter.ctype) for parameter in self.manifest.parameters]
        self.program = compile_program(
            passes.text, self.manifest.kernel, parameters, sanitize=sanitize, watched=not sanitize
        )
        head = generate_head(config, machine, self.plan, PASS_TOKENS)
        self.head_manifest = head.manifest
        parameters = [(parameter.name, parameter.ctype) for parameter in head.manifest.parameters]
        self.head_program = compile_program(
            head.text, head.manifest.kernel, parameters, sanitize=sanitize, watched=not sanitize
        )
        tensors = subject.tensors
        self._read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        draw = np.random.default_rng(0)
        lengths = (FIRST + REST, SECOND)
        self.prompts = [tuple(map(int, draw.integers(0, config.vocab_size, length))) for length in lengths]
        self.page_order = [int(page) for page in draw.permutation(self.plan.kv_pages)]
        self._fixed = fixed_buffers(self.decoding, config, tensors)

    def run(self, scheduler: str, seed: int) -> list[Bits]:
        """The cached keys and values of both prompts, as they are stored, and the logits after their last tokens.
        EmulatorError where a launch fails."""
        device = EmulatorDevice()
        of_head: dict[str, Any] = dict(self._fixed)
        allocate_buffers(device, self.head_manifest, of_head)
        buffers: dict[str, Any] = {**self._fixed, "hidden_states": of_head["hidden_states"]}
        allocate_buffers(device, self.manifest, buffers)
        kernel = EmulatorKernel(self.head_manifest, Scheduled(self.head_program, scheduler, seed))
        head = HeadLauncher(device, kernel, self.head_manifest, self.config, of_head)
        kernel = EmulatorKernel(self.manifest, Scheduled(self.program, scheduler, seed))
        launcher = PassLauncher(device, kernel, self.manifest, self.config, buffers, head=head)
        pool = PagePool(self.plan.kv_pages, self.page_order)
        first, second = (CachedSequence(pool, self.plan.page_size, self.plan.max_context) for _ in self.prompts)
        launcher.launch_together([self._part(first, 0, FIRST)])
        launcher.launch_together([self._part(first, 0, REST), self._part(second, 1, SECOND)])
        rows = len(self.prompts) * JUDGED
        room = device.allocate(4 * head.max_steps * head.tokens * head.vocab_size, 0xFF)
        logits = np.concatenate([*head.score(first, range(rows), room)])
        return [*(self._cached(buffers, cache) for cache in (first, second)), logits.view(np.uint32)]

    def race(self) -> str:
        """What the race detector says of a run, or how that failed; "" if it found nothing."""
        try:
            self.run("random", 0)
        except EmulatorError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _part(self, cache: CachedSequence, prompt: int, tokens: int) -> Part:
        ids = self.prompts[prompt][cache.length : cache.length + tokens + 1]
        return Part(cache, ids, tokens, wanted=JUDGED if len(ids) == tokens else 0)

    def _cached(self, buffers: Mapping[str, Any], cache: CachedSequence) -> Bits:
        """[layers, keys or values, KV heads, tokens, head_dim]."""
        buffer = self.manifest.buffer("kv")
        layers, _, _, kv_heads, _, head_dim = buffer.shape
        stored = np.uint8 if buffer.dtype == "u8" else np.uint16
        pages = buffers["kv"].download(stored, buffer.shape)[:, cache.pages].transpose(0, 2, 3, 1, 4, 5)
        return np.ascontiguousarray(pages.reshape(layers, 2, kv_heads, -1, head_dim)[:, :, :, : cache.length])

    def agreement(self, found: Sequence[Bits]) -> Agreement:
        """The cached keys and values, and the logits, against the reference's."""
        numbers = [np.asarray(self._numbers(bits), np.float32) for bits in found]
        wanted, rounded = (self._wanted(rounding) for rounding in (exact, round_to_bf16))
        errors, own = (
            np.concatenate([relative_errors(_rows(one), _rows(other)) for one, other in zip(part, wanted, strict=True)])
            for part in (numbers, rounded)
        )
        tolerance = max(LEAST_TOLERANCE, TOLERANCE_FACTOR * float(own.max()))
        worst = float(np.where(np.isnan(errors), np.inf, errors).max())
        problem = f"a cached key or value, or logits, are {worst:.2e} from float32, allowed is {tolerance:.2e}"
        problems = () if worst <= tolerance else (problem,)
        return Agreement(len(errors), worst, tolerance, problems, "cached heads of keys and values, and logits")

    def _numbers(self, bits: Bits) -> Any:
        types = {np.dtype(np.uint8): ml_dtypes.float8_e4m3fn, np.dtype(np.uint16): ml_dtypes.bfloat16}
        return bits.view(types.get(bits.dtype, np.float32))

    def _wanted(self, rounding: Rounding) -> list[F32]:
        cached = round_to_e4m3 if self.plan.kv_dtype == "e4m3" else None
        reference = family_of(self.config).reference(self.config, self._read, rounding, cached=cached)
        found, logits = [], []
        for prompt in self.prompts:
            reference.reset()
            logits.append(reference.forward(prompt)[-JUDGED:])
            found.append(np.stack([reference.keys, reference.values], axis=1)[:, :, :, : len(prompt)])
        return [*found, np.concatenate(logits)]


def _rows(array: F32) -> F32:
    return array.reshape(-1, array.shape[-1])
