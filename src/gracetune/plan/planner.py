"""How a run uses its machine: planned once, when model and data are there, and then applied.

The micro-batch stays what the run file says, since noise is drawn by micro-batches and a run must
repeat; a faster one is only named. What is already in memory when a plan is made, such as caches
and encoders, is not counted again: the plan is for what is left.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.compute.fused_lora import check_fp8
from gracetune.cache.prefetch import FIRST_DEPTH
from gracetune.events.types import Notice
from gracetune.memory.platform import Link, private_nbytes, read_this_host
from gracetune.models.family import transformers_of
from gracetune.offload.copies import open_copy_engine
from gracetune.optim.build import nbytes_each
from gracetune.optim.update import Travel
from gracetune.plan.apply import Layout, compute_faster, place
from gracetune.plan.controller import COMPILING_S, CudaMeter, NoMeter, Settled, choice_of
from gracetune.plan.device_benchmark import free_nbytes, measure, measure_gpu
from gracetune.plan.fp8_calibration import freeze
from gracetune.plan.machines import FITTED
from gracetune.plan.memory import Fixed
from gracetune.plan.problem import family_subject, settings_of, traced, wishes_of
from gracetune.plan.report import describe, speed
from gracetune.plan.search import PlanBudget, PlanError, choose, device_need
from gracetune.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.config.schema import RunFile
    from gracetune.data.pipeline import DataPipeline
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.optim.update import Update
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.controller import Meter
    from gracetune.plan.cost import CostModel
    from gracetune.plan.machines import Basics
    from gracetune.plan.result import Plan
    from gracetune.plan.search import Constraints

    Emit = Callable[[Event], None]

HOST_RESERVE_SHARE = 0.05
"""Of host memory that is free now, left to others."""
CPU_EDGE, CPU_COPY = 512, 1 << 22
"""A CPU is only planned for in a rehearsal: its rates need not be good ones."""


def settle(
    run: RunFile,
    family: Family,
    feed: DataPipeline,
    update: Update,
    link: Link,
    device: torch.device,
    emit: Emit,
) -> Settled:
    """Plan for what is free now, tell it, and bring the transformer where it belongs."""
    # Before anything is measured: libraries keep work space from then on, which the plan counts.
    meter: Meter = CudaMeter(device) if device.type == "cuda" else NoMeter()
    one_memory = link is Link.INTEGRATED
    if one_memory:
        emit(Notice("host and device are one memory: nothing is streamed or offloaded"))
    device_nbytes = _device_nbytes(run, family, device, one_memory)
    largest = feed.load(feed.order.largest())
    shape, text = largest.latents.shape[1:], largest.text
    rates = _rates(device, run.model.family, emit)
    with ExitStack() as undo:
        _fuse(family, undo)  # the planner looks at what will run
        family.to(torch.device("cpu"))  # where the tracer's stand-ins are
        model = traced(family_subject(family, shape, text), rates, run.model.frozen_compute)
        family.to(device)
    del largest, text
    ask = question(run, family, model, device_nbytes, one_memory=one_memory)
    plan = ask.answer(ask.budget)
    emit(Notice(f"plan: {describe(plan)}"))
    emit(Notice(f"predicted: {speed(plan)}"))
    if run.model.frozen_compute == "fp8":
        check_fp8(device)
        freeze(run, family, feed, device, emit)  # after the plan: it knows what rounding gives
        meter.clear()
    _fuse(family)

    def placed(plan: Plan, spare_nbytes: int) -> AppliedPlan:
        update.place(plan.host_state)
        return apply(plan, family, link, device, emit, spare_nbytes)

    return Settled(ask, plan, placed, meter, shape.numel(), emit)


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """What the planner is asked, and may be asked again with less memory."""

    model: CostModel
    fixed: Fixed
    budget: PlanBudget
    wishes: Constraints
    micro_batches: int
    """Of the whole run: compiling must pay for itself."""

    def answer(self, budget: PlanBudget) -> Plan:
        """The plan with which the run is done first; compiling is part of the run."""
        plans = []
        for compiled in self.wishes.compile:
            wishes = replace(self.wishes, compile=(compiled,))
            with suppress(PlanError):
                plans.append(choose(self.model, self.fixed, budget, wishes, simulated=False).best)
        if not plans:
            return choose(self.model, self.fixed, budget, self.wishes, simulated=False).best
        return min(plans, key=self._seconds)

    def fits(self, plan: Plan) -> bool:
        """Whether the device has room for it."""
        return self.spare(plan) >= 0

    def spare(self, plan: Plan, peak_nbytes: int | None = None) -> int:
        """Device memory within the budget that a plan leaves; `peak_nbytes`: what it took."""
        need = device_need(self.model, choice_of(plan), self.fixed, self.budget)
        more = 0 if peak_nbytes is None else peak_nbytes - plan.device.total
        return self.budget.device_nbytes - need - more

    def _seconds(self, plan: Plan) -> float:
        return self.micro_batches * plan.seconds.step + (COMPILING_S if plan.compiled else 0.0)


def question(
    run: RunFile, family: Family, model: CostModel, device_nbytes: int, one_memory: bool = False
) -> PlanProblem:
    """For the largest bucket of a run, in so much device memory and what the host has free."""
    transformers = transformers_of(family.transformer)
    parameters = [p for p in family.transformer.parameters() if p.requires_grad]
    counts = [p.numel() for p in parameters]
    trained, each = sum(counts), nbytes_each(run.optimizer, parameters)
    depth = run.cache_config.prefetch_depth
    return PlanProblem(
        model,
        Fixed(
            optimizer_nbytes=int(trained * each),
            experts=len(transformers),
            library_nbytes=int(FITTED["library_nbytes"].value),
            averages_nbytes=4 * trained if run.train.ema_decay else 0,
            state_slots_nbytes=Travel().slots_nbytes(counts, each),
            batches_ahead=FIRST_DEPTH if depth == "auto" else depth,
        ),
        PlanBudget(
            device_nbytes, _host_nbytes(run, family), FITTED["fragmentation"].value, one_memory
        ),
        replace(wishes_of(run), batches=(run.train.batch_size,)),
        run.train.max_train_steps * run.train.gradient_accumulation_steps,
    )


def apply(
    plan: Plan,
    family: Family,
    link: Link,
    device: torch.device,
    emit: Emit,
    spare_nbytes: int = 0,
) -> AppliedPlan:
    """The transformer as planned; of two experts, both alike through one ring."""
    blocks = family.blocks()
    transformers = list(transformers_of(family.transformer).values())
    size = len(blocks) // len(transformers)
    parts = {
        transformer: blocks[number * size : (number + 1) * size]
        for number, transformer in enumerate(transformers)
    }
    layout = Layout(plan.blocks, plan.compiled, plan.slots, spare_nbytes=max(0, spare_nbytes))
    return place(family.transformer, parts, layout, open_copy_engine(device, link), emit)


def _fuse(family: Family, undo: ExitStack | None = None) -> None:
    for transformer in transformers_of(family.transformer).values():
        compute_faster(transformer, undo)


def _rates(device: torch.device, family: str, emit: Emit) -> Basics:
    if device.type == "cuda":
        return measure_gpu(device, family, emit)
    return measure(device, lambda: None, CPU_EDGE, CPU_COPY)  # nobody waits for it to queue


def _device_nbytes(run: RunFile, family: Family, device: torch.device, one_memory: bool) -> int:
    asked = settings_of(run).device_memory
    if device.type != "cuda":
        assert asked is not None, "a rehearsal without its memory"
        return parse_bytes(asked)
    # Of one memory the host can give more than the driver counts; caches are in it by now.
    free = free_nbytes(device, _host_free_nbytes(family) if one_memory else None)
    taken = torch.cuda.memory_allocated(device)
    return free if asked is None else min(free, parse_bytes(asked) - taken)


def _leaving_nbytes(family: Family) -> int:
    """What frozen weights take of host memory now: wherever a plan has them, they leave that."""
    frozen = [p for p in family.transformer.parameters() if not p.requires_grad]
    spans = [(p.data_ptr(), p.nbytes) for p in frozen if p.device.type == "cpu"]
    return private_nbytes(Path("/proc"), spans)


def _host_nbytes(run: RunFile, family: Family) -> int:
    asked = settings_of(run).host_memory
    free = _host_free_nbytes(family)
    return free if asked is None else min(free, parse_bytes(asked))


def _host_free_nbytes(family: Family) -> int:
    free = int(read_this_host().room_bytes() * (1 - HOST_RESERVE_SHARE))
    return free + _leaving_nbytes(family)
