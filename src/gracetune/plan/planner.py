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

from gracetune.adapters.compute.fp8_linear import check_fp8_support
from gracetune.events.types import Notice
from gracetune.memory.platform import Link, anonymous_nbytes, read_this_host
from gracetune.models.family import transformers_of
from gracetune.offload.copies import open_copy_engine
from gracetune.optim.build import state_nbytes_per_element_of
from gracetune.optim.offloaded_state import StateOffloadSettings
from gracetune.plan.apply import PlanLayout, apply_plan, fuse_operations
from gracetune.plan.controller import (
    COMPILING_S,
    CudaMemoryMeter,
    NullMemoryMeter,
    PlanController,
    candidate_of,
)
from gracetune.plan.device_benchmark import free_nbytes, measure_device, measure_gpu
from gracetune.plan.machines import FITTED_CONSTANTS
from gracetune.plan.memory import FixedMemory
from gracetune.plan.problem import (
    build_cost_model,
    constraints_of,
    family_trace_target,
    plan_settings,
)
from gracetune.plan.report import describe, describe_speed
from gracetune.plan.search import PlanBudget, PlanError, find_best_plan, required_device_nbytes
from gracetune.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Batch
    from gracetune.events.types import Event
    from gracetune.memory.stages import GcFreeze
    from gracetune.models.family import Family
    from gracetune.optim.offloaded_state import OptimizerStepper
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.controller import MemoryMeter
    from gracetune.plan.cost import CostModel
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.result import Plan
    from gracetune.plan.search import Constraints

    Emit = Callable[[Event], None]

HOST_RESERVE_SHARE = 0.05
"""Of host memory that is free now, left to others."""
CPU_EDGE, CPU_COPY = 512, 1 << 22
"""Matmul edge and copied bytes by which a CPU is measured: small, since only rehearsals run on it."""


@dataclass(frozen=True, slots=True)
class PlannedData:
    """The part of the data pipeline that the planner needs."""

    load_largest: Callable[[], Batch]
    """Loads one sample of the largest bucket."""
    batches_ahead: int
    """Batches that are prefetched to the device beside the one in use."""


def plan_run(
    run: RunFile,
    family: Family,
    data: PlannedData,
    stepper: OptimizerStepper,
    link: Link,
    device: torch.device,
    convert_to_fp8: Callable[[], None],
    gc_freeze: GcFreeze,
    emit: Emit,
) -> PlanController:
    """Plan with the memory that is free now, apply the plan, and return its controller.

    `convert_to_fp8` converts the frozen layers, where `model.frozen_compute` is fp8.
    """
    # The meter's baseline must not include the workspaces that libraries allocate while rates are
    # measured: the plan counts those itself.
    is_cuda = device.type == "cuda"
    meter: MemoryMeter = CudaMemoryMeter(device, gc_freeze) if is_cuda else NullMemoryMeter()
    one_memory = link is Link.INTEGRATED
    if one_memory:
        emit(Notice("plan: host and device share one memory, so nothing is streamed or offloaded"))
    device_nbytes = _device_nbytes(run, family, device, one_memory)
    largest = data.load_largest()
    latent_shape, text = largest.latents.shape[1:], largest.text
    rates = _measure_rates(device, run.model.family, emit)
    with ExitStack() as undo:
        _fuse(family, undo)  # the tracer must see the operations that will run
        family.to(torch.device("cpu"))  # the tracer's fake tensors are on the CPU
        target = family_trace_target(family, latent_shape, text)
        model = build_cost_model(target, rates, run.model.frozen_compute)
        family.to(device)
    del largest, text
    problem = build_problem(
        run, family, model, device_nbytes, data.batches_ahead, one_memory=one_memory
    )
    plan = problem.solve(problem.budget)
    emit(Notice(f"plan: {describe(plan)}"))
    emit(Notice(f"expect {describe_speed(plan)}"))
    if run.model.frozen_compute == "fp8":
        check_fp8_support(device)
        convert_to_fp8()  # after tracing, which estimates fp8 from the bf16 layers
        meter.clear()
    _fuse(family)

    def apply(plan: Plan, spare_nbytes: int) -> AppliedPlan:
        stepper.set_host_share(plan.host_state)
        return apply_to_family(plan, family, link, device, emit, spare_nbytes)

    return PlanController(problem, plan, apply, meter, latent_shape.numel(), emit)


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """What the planner is asked, and may be asked again with less memory."""

    model: CostModel
    fixed: FixedMemory
    budget: PlanBudget
    constraints: Constraints
    micro_batches: int
    """Of the whole run: compiling must pay for itself."""

    def solve(self, budget: PlanBudget) -> Plan:
        """The plan with which the run is done first; compiling is part of the run."""
        plans = []
        for compiled in self.constraints.compile:
            wishes = replace(self.constraints, compile=(compiled,))
            with suppress(PlanError):
                plans.append(
                    find_best_plan(self.model, self.fixed, budget, wishes, simulated=False).best
                )
        if not plans:
            return find_best_plan(
                self.model, self.fixed, budget, self.constraints, simulated=False
            ).best
        return min(plans, key=self._seconds)

    def fits(self, plan: Plan) -> bool:
        """Whether the device has room for it."""
        return self.spare_nbytes(plan) >= 0

    def spare_nbytes(self, plan: Plan, peak_nbytes: int | None = None) -> int:
        """Device memory within the budget that a plan leaves; `peak_nbytes`: what it took."""
        need = required_device_nbytes(self.model, candidate_of(plan), self.fixed, self.budget)
        more = 0 if peak_nbytes is None else peak_nbytes - plan.device.total
        return self.budget.device_nbytes - need - more

    def _seconds(self, plan: Plan) -> float:
        return self.micro_batches * plan.seconds.step + (COMPILING_S if plan.compiled else 0.0)


def build_problem(
    run: RunFile,
    family: Family,
    model: CostModel,
    device_nbytes: int,
    batches_ahead: int,
    *,
    one_memory: bool = False,
) -> PlanProblem:
    """Return the problem of a loaded run: its largest bucket, within the memory that is free."""
    transformers = transformers_of(family.transformer)
    parameters = [p for p in family.transformer.parameters() if p.requires_grad]
    counts = [p.numel() for p in parameters]
    trained, each = sum(counts), state_nbytes_per_element_of(run.optimizer, parameters)
    return PlanProblem(
        model,
        FixedMemory(
            optimizer_nbytes=int(trained * each),
            experts=len(transformers),
            library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
            averages_nbytes=4 * trained if run.train.ema_decay else 0,
            state_slots_nbytes=StateOffloadSettings().slots_nbytes(counts, each),
            batches_ahead=batches_ahead,
        ),
        PlanBudget(
            device_nbytes,
            _host_nbytes(run, family),
            FITTED_CONSTANTS["fragmentation"].value,
            one_memory,
        ),
        replace(constraints_of(run), batches=(run.train.batch_size,)),
        run.train.max_train_steps * run.train.gradient_accumulation_steps,
    )


def apply_to_family(
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
    layout = PlanLayout(plan.blocks, plan.compiled, plan.slots, spare_nbytes=max(0, spare_nbytes))
    return apply_plan(family.transformer, parts, layout, open_copy_engine(device, link), emit)


def _fuse(family: Family, undo: ExitStack | None = None) -> None:
    for transformer in transformers_of(family.transformer).values():
        fuse_operations(transformer, undo)


def _measure_rates(device: torch.device, family: str, emit: Emit) -> MachineRates:
    if device.type == "cuda":
        return measure_gpu(device, family, emit)
    return measure_device(device, lambda: None, CPU_EDGE, CPU_COPY)  # nobody waits for it to queue


def _device_nbytes(run: RunFile, family: Family, device: torch.device, one_memory: bool) -> int:
    asked = plan_settings(run).device_memory
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
    return anonymous_nbytes(Path("/proc"), spans)


def _host_nbytes(run: RunFile, family: Family) -> int:
    asked = plan_settings(run).host_memory
    free = _host_free_nbytes(family)
    return free if asked is None else min(free, parse_bytes(asked))


def _host_free_nbytes(family: Family) -> int:
    free = int(read_this_host().usable_bytes() * (1 - HOST_RESERVE_SHARE))
    return free + _leaving_nbytes(family)
