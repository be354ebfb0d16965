"""Plan a run on the machine at hand, after its model and data are loaded, and apply the plan.

The plan is for the memory that is free at this moment, without the caches and encoders that are
already loaded. The micro-batch size stays as in the run file: noise is drawn per micro-batch, so
another size would change the results of the run. `gracetune plan` names a faster size if there is
one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.compute.fp8_linear import check_fp8_support
from gracetune.distributed.layout import SINGLE_LAYOUT
from gracetune.distributed.ranks import SINGLE
from gracetune.events.phase_timer import PhaseTimer
from gracetune.events.types import Notice
from gracetune.memory.platform import Link, anonymous_nbytes, read_this_host
from gracetune.models.family import transformers_of
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.offload.host_weights import map_shared_memory
from gracetune.optim.build import state_nbytes_per_element_of
from gracetune.optim.offloaded_state import StateOffloadSettings
from gracetune.plan.apply import PlanLayout, apply_plan, fuse_operations
from gracetune.plan.bucket_seconds import planned_seconds
from gracetune.plan.compile_cache import compile_cache_of
from gracetune.plan.controller import CudaMemoryMeter, NullMemoryMeter, PlanController
from gracetune.plan.device_benchmark import free_nbytes, measure_device, measure_gpu
from gracetune.plan.machines import FITTED_CONSTANTS
from gracetune.plan.managed import describe_other_access
from gracetune.plan.memory import FixedMemory
from gracetune.plan.planner_input import (
    COMPILE_FAILURE,
    BatchShapes,
    CompileFailure,
    PlanProblem,
    build_cost_model,
    constraints_of,
    copy_for_tracing,
    family_trace_target,
    plan_settings,
)
from gracetune.plan.report import describe, describe_speed
from gracetune.plan.result import BlockPlan
from gracetune.plan.search import PlanBudget, fits, predict
from gracetune.plan.simulate import PlanCandidate, candidate_of
from gracetune.plan.trace import convert_for_tracing
from gracetune.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Batch, Shape
    from gracetune.distributed.layout import Layout
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.types import Event
    from gracetune.memory.oversubscription import GcFreeze
    from gracetune.models.family import Family
    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.optim.offloaded_state import OptimizerStepper
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.controller import MemoryMeter
    from gracetune.plan.cost import CostModel
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.managed import ManagedPlacer
    from gracetune.plan.planner_input import TracedCopy
    from gracetune.plan.result import Plan
    from gracetune.plan.trace import TraceTarget

    Emit = Callable[[Event], None]

HOST_RESERVE_SHARE = 0.05
"""Share of the free host memory that is left to other processes."""
SAVED_PLAN_TOLERANCE = 0.01
"""Share of the device memory by which a checkpoint's plan may exceed what is free now."""
CPU_EDGE, CPU_COPY = 512, 1 << 22
"""Size of the measured matmul (rows and columns) and of the measured copies (bytes) on a CPU. They
are small, because plans for a CPU are only made for rehearsals."""


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """Inputs of the planner that the data pipeline and the trainer provide."""

    load_largest: Callable[[], Batch]
    """Function that loads one sample of the largest bucket (sample size)."""
    batches_ahead: int
    """Number of batches that are prefetched to the device besides the one in use."""
    convert_to_fp8: Callable[[], None]
    """Function that converts the frozen layers to fp8; called if `model.frozen_compute` is fp8."""
    managed: ManagedPlacer
    """Moves roles to managed memory, if the run has any."""
    saved_plan: Mapping[str, Any] | None = None
    """The plan in the checkpoint that the run resumes from, as `PlanController.record` returned it.
    It is used again if it can be, because another plan may round differently."""
    ranks: RankGroup = SINGLE
    """The ranks of the run. Those of one machine share its host memory, and stream from one copy of
    the weights."""
    layout: Layout = SINGLE_LAYOUT
    """How the ranks divide the model and the samples."""
    traced: TracedCopy | None = None
    """The model to trace if ranks divide the weights; made before they do."""
    load_sizes: Callable[[], Mapping[Shape, Batch]] = dict
    """Function that loads one sample of each size whose time is needed to divide batches among
    ranks (`bucket_seconds.sizes_to_trace`)."""
    shapes: BatchShapes = field(default_factory=BatchShapes)
    """The shapes of the batches that the run meets."""
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    """Measures the phases of the run's start."""


def plan_run(
    run: RunFile,
    family: Family,
    inputs: PlannerInputs,
    stepper: OptimizerStepper,
    link: Link,
    device: torch.device,
    gc_freeze: GcFreeze,
    emit: Emit,
) -> PlanController:
    """Plan a run for the memory that is free now, apply the plan, and return its controller.

    All ranks of `inputs.ranks` must call this at the same time. Each measures its machine, at the
    same time as the others, because they share the link to host memory. The main rank plans for the
    smallest memory and the lowest rates, and all ranks apply its plan.
    """
    # The meter's baseline must not include the workspaces that libraries allocate while rates are
    # measured: the plan counts those itself.
    is_cuda = device.type == "cuda"
    meter: MemoryMeter = CudaMemoryMeter(device, gc_freeze) if is_cuda else NullMemoryMeter()
    one_memory = link is Link.INTEGRATED
    if one_memory:
        emit(Notice("host and device share one memory, so nothing is streamed or offloaded"))
    ranks = inputs.ranks
    device_nbytes, preferred_nbytes = _agreed_device_nbytes(run, family, inputs, device, one_memory)
    largest, samples = inputs.load_largest(), inputs.load_sizes()
    latent_shape, text = largest.latents.shape[1:], largest.text
    ranks.wait()  # so that all measure at the same time
    rates = lowest_rates(measure_rates(device, run.model.family, emit), ranks)
    inputs.timer.end("measuring")
    with ExitStack() as undo:
        family.to(torch.device("cpu"))  # the tracer's fake tensors are on the CPU
        as_computed = _traced_as_computed(run, family, latent_shape, text, undo)
        may_compile = True in constraints_of(run).compile

        def cost_model(latent_shape: torch.Size, text: Mapping[str, torch.Tensor]) -> CostModel:
            target = as_computed(family_trace_target(family, latent_shape, text))
            compute = run.model.frozen_compute
            return build_cost_model(target, rates, compute, may_compile=may_compile)

        model = cost_model(latent_shape, text)
        size_models = {
            size: cost_model(sample.latents.shape[1:], sample.text)
            for size, sample in samples.items()
        }
        family.to(device)
    inputs.timer.end("tracing")
    del largest, samples, text
    sharing_ranks = _ranks_sharing_weights(run, ranks, emit)
    problem = build_problem(
        run,
        family,
        model,
        device_nbytes,
        inputs.batches_ahead,
        one_memory=one_memory,
        ranks=ranks,
        shares_weights=sharing_ranks is ranks,
    )
    budget = replace(problem.budget, managed_nbytes=min(ranks.gather(inputs.managed.free_bytes)))
    cache = compile_cache_of(device)
    problem = replace(problem, budget=budget, shapes=inputs.shapes, compile_cache=cache)
    problem = problem.with_device_nbytes(preferred_nbytes)
    problem, saved = without_failed_compilation(problem, inputs.saved_plan, emit)
    plan, was_checked = agreed_plan(problem, saved, ranks, emit)
    inputs.timer.end("searching")
    _report_plan(run, problem, plan, inputs.layout, emit)
    if run.model.frozen_compute == "fp8":
        check_fp8_support(device)
        inputs.convert_to_fp8()  # after tracing, so that a plan that does not fit fails early
        meter.clear()
    fuse_family(family)

    def apply(plan: Plan, spare_nbytes: int) -> AppliedPlan:
        inputs.managed.place_planned(plan)
        stepper.set_host_share(plan.host_state)
        engine = inputs.managed.wrap_engine(open_copy_engine(device, link))
        applied = apply_to_family(plan, family, engine, emit, spare_nbytes, sharing_ranks, problem)
        inputs.managed.free_unused()
        return applied

    controller = PlanController(
        problem, plan, apply, meter, latent_shape.numel(), emit, was_checked, ranks
    )
    inputs.timer.end("placing")
    controller.size_seconds = {
        size: planned_seconds(size_model, plan) for size, size_model in size_models.items()
    }
    return controller


def _traced_as_computed(
    run: RunFile,
    family: Family,
    latent_shape: torch.Size,
    text: Mapping[str, torch.Tensor],
    undo: ExitStack,
) -> Callable[[TraceTarget], TraceTarget]:
    """Fuse operations as in a step, and return a function that makes trace targets do so.

    The model itself is traced, or a copy without weights whose frozen layers compute in fp8.
    """
    if run.model.frozen_compute != "fp8":
        fuse_family(family, undo)
        return lambda target: target
    traced = copy_for_tracing(family, compute_dtype=None)

    def of_copy(target: TraceTarget) -> TraceTarget:
        return replace(target, model=traced.transformer, blocks=traced.blocks)

    convert_for_tracing(of_copy(family_trace_target(family, latent_shape, text)))
    fuse_operations(traced.transformer)
    return of_copy


def _report_plan(
    run: RunFile, problem: PlanProblem, plan: Plan, layout: Layout, emit: Emit
) -> None:
    """Emit the decisions of a plan, the expected speed, and what that speed does not contain."""
    emit(Notice(f"plan: {describe(plan)}"))
    emit(Notice(f"plan: expect {describe_speed(plan)}"))
    other_access = describe_other_access(run, plan.managed)
    if other_access and plan.seconds.wait_managed > 0:
        emit(Notice(f"plan: {other_access}", level="warning"))
    emit(Notice(describe_shapes(problem, plan)))
    num_ranks = layout.ranks.world_size
    if num_ranks > 1:
        together = num_ranks // layout.context_size * plan.samples_per_second
        emit(
            Notice(
                f"plan: the same on each of {num_ranks} ranks, together {together:.3f} "
                "samples/s if none waits for another"
            )
        )


def describe_shapes(problem: PlanProblem, plan: Plan) -> str:
    """Return a notice with the shapes of the run's batches, and the graphs compiled for them."""
    text = f"shapes: {problem.shapes.describe()}"
    if not plan.compiled:
        return text
    seconds = format_seconds(problem.compile_seconds(plan))
    return f"{text}; {problem.num_graphs(plan)} graphs to compile, in about {seconds}"


def lowest_rates(rates: MachineRates, ranks: RankGroup) -> MachineRates:
    """Return the rates with which a plan holds on every rank: the lowest that any has measured."""
    names = ("flops", "memory", "link_in", "link_out", "both_ways_share")
    measured = ranks.gather([getattr(rates, name) for name in names])
    return replace(rates, **dict(zip(names, map(min, zip(*measured, strict=True)), strict=True)))


def ranks_on_device(ranks: RankGroup, device: torch.device) -> int:
    """Return the number of ranks that share this rank's device; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return ranks.gather(uuid).count(uuid)


def agreed_plan(
    problem: PlanProblem, saved: Mapping[str, Any] | None, ranks: RankGroup, emit: Emit
) -> tuple[Plan, bool]:
    """Return the main rank's plan, and True if it has been compared with its first steps already.

    Other ranks predict its time and memory themselves, from what they have measured.
    """
    found = None
    if ranks.is_main:
        plan, was_checked = _saved_or_best_plan(problem, saved, emit)
        found = candidate_of(plan), was_checked
    found = ranks.broadcast(found)
    assert found is not None, "the main rank has a plan"
    candidate, was_checked = found
    if not ranks.is_main:
        plan = predict(problem.model, candidate, problem.fixed, simulated=False)
    return plan, was_checked


def without_failed_compilation(
    problem: PlanProblem, saved: Mapping[str, Any] | None, emit: Emit
) -> tuple[PlanProblem, Mapping[str, Any] | None]:
    """Return the problem without compiled plans if compilation failed before the run was resumed.

    It would fail again, and take its time. Otherwise, with another `plan.compile` or version of
    torch, it is tried again, and the eager plan of the checkpoint is not used: returns None for it.
    """
    if saved is None or COMPILE_FAILURE not in saved:
        return problem, saved
    fields = saved[COMPILE_FAILURE]
    failure = CompileFailure(fields["reason"], tuple(fields["compile"]), fields["torch"])
    choices = problem.constraints.compile
    if True not in choices:
        return replace(problem, compile_failure=failure), saved
    text = f"compilation failed before the run was resumed ({failure.reason})"
    if (choices, torch.__version__) != (failure.compile, failure.torch):
        emit(Notice(f"plan: {text}. It may be tried again now, with other settings"))
        return problem, None
    other = "always" if False in choices else "auto"
    text = f"plan: blocks run eagerly, because {text}. To try again, set plan.compile: {other}, "
    emit(Notice(f"{text}or use another version of torch", level="warning", fallback=True))
    problem = replace(problem, compile_failure=failure)
    return problem.without_compilation(failure.reason), saved


def _saved_or_best_plan(
    problem: PlanProblem, saved: Mapping[str, Any] | None, emit: Emit
) -> tuple[Plan, bool]:
    """Return the plan of the checkpoint if it can be used here, else the best plan.

    The second value is True if the plan has been compared with its first steps already.
    """
    if saved is not None:
        candidate = _parse_candidate(saved)
        reason = (
            "it was saved by another version"
            if candidate is None
            else _reason_unusable(problem, candidate)
        )
        if candidate is not None and not reason:
            emit(Notice("plan: the plan of the checkpoint is used again"))
            plan = predict(problem.model, candidate, problem.fixed, simulated=False)
            return plan, bool(saved["was_checked"])
        emit(Notice(f"plan: the plan of the checkpoint cannot be used again: {reason}"))
    return problem.solve(problem.budget), False


def _parse_candidate(saved: Mapping[str, Any]) -> PlanCandidate | None:
    others = ("was_checked", COMPILE_FAILURE)
    fields = {key: value for key, value in saved.items() if key not in others}
    try:
        blocks = tuple(BlockPlan(**block) for block in fields.pop("blocks"))
        managed = tuple(fields.pop("managed", ()))
        return PlanCandidate(blocks=blocks, managed=managed, **fields)
    except (KeyError, TypeError):
        return None


def _reason_unusable(problem: PlanProblem, candidate: PlanCandidate) -> str:
    """Return why a plan cannot be used for this run on this machine; empty if it can."""
    allowed = problem.constraints.for_budget(problem.budget)
    modes = {block.activations for block in candidate.blocks}
    is_offloaded = "offload" in modes or any(block.offload_input for block in candidate.blocks)
    if len(candidate.blocks) != problem.model.num_blocks:
        return f"it has {len(candidate.blocks)} blocks, the model has {problem.model.num_blocks}"
    if candidate.compiled not in allowed.compile:
        return (
            f"it is {'compiled' if candidate.compiled else 'eager'}, and plan.compile excludes it"
        )
    if candidate.streamed and not allowed.stream:
        return "it streams weights, which is off or impossible here"
    if is_offloaded and not allowed.offload:
        return "it offloads activations, which is off or impossible here"
    if candidate.host_state not in allowed.host_state:
        return "optimizer.state excludes its placement of the optimizer state"
    if candidate.managed not in allowed.managed:
        roles = ", ".join(candidate.managed) or "nothing"
        return f"it has {roles} in managed memory, which the settings of this run exclude"
    # A little less memory may be free than at the first start. Plans leave some of it unused, and a
    # step that runs out of memory is repeated with a smaller plan.
    budget = problem.budget
    room = replace(budget, device_nbytes=int(budget.device_nbytes * (1 + SAVED_PLAN_TOLERANCE)))
    if not fits(problem.model, candidate, problem.fixed, room):
        plan = predict(problem.model, candidate, problem.fixed, simulated=False)
        host_nbytes = budget.machine_host_nbytes(plan.host)
        return (
            f"it needs {format_bytes(plan.device.total)} of device and "
            f"{format_bytes(host_nbytes)} of host memory, but "
            f"{format_bytes(budget.device_nbytes)} and {format_bytes(budget.host_nbytes)} are free"
        )
    return ""


def build_problem(
    run: RunFile,
    family: Family,
    model: CostModel,
    device_nbytes: int,
    batches_ahead: int,
    *,
    one_memory: bool = False,
    ranks: RankGroup = SINGLE,
    shares_weights: bool = True,
) -> PlanProblem:
    """Return the inputs of the plan search for a loaded run and a device memory budget.

    `model` is the cost model of the run's largest bucket (sample size). All `ranks` must call this
    at the same time; they get the same host memory budget. `shares_weights`: whether the ranks of a
    machine stream from one copy of the weights.
    """
    transformers = transformers_of(family.transformer)
    parameters = [p for p in family.transformer.parameters() if p.requires_grad]
    counts = [p.numel() for p in parameters]
    trained, each = sum(counts), state_nbytes_per_element_of(run.optimizer, parameters)
    return PlanProblem(
        model,
        FixedMemory(
            optimizer_nbytes=int(trained * each),
            num_transformers=len(transformers),
            library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
            averages_nbytes=4 * trained if run.train.ema_decay else 0,
            state_slots_nbytes=StateOffloadSettings().slots_nbytes(counts, each),
            batches_ahead=batches_ahead,
        ),
        PlanBudget(
            device_nbytes,
            _host_nbytes(run, family, ranks),
            FITTED_CONSTANTS["fragmentation"].value,
            one_memory,
            max(ranks.gather(ranks.local_world_size)),
            shares_weights,
        ),
        replace(constraints_of(run, ranks.world_size), batches=(run.train.batch_size,)),
        run.train.max_train_steps * run.train.gradient_accumulation_steps,
    )


def apply_to_family(
    plan: Plan,
    family: Family,
    copy_engine: CopyEngine,
    emit: Emit,
    spare_nbytes: int = 0,
    ranks: RankGroup = SINGLE,
    problem: PlanProblem | None = None,
) -> AppliedPlan:
    """Apply a plan to the family's transformers and return the object that can remove it.

    All `ranks` must call this at the same time, with the same plan. `problem` is the one that the
    plan solves; it has the shapes of the run's batches. None: blocks are compiled for any shapes.
    """
    layout = layout_of(plan, problem, spare_nbytes)
    return apply_layout(layout, family, copy_engine, emit, ranks)


def layout_of(plan: Plan, problem: PlanProblem | None, spare_nbytes: int = 0) -> PlanLayout:
    """Return a plan in the form that is applied; `apply_to_family` explains `problem`."""
    layout = PlanLayout(
        plan.blocks,
        plan.compiled,
        plan.slots,
        spare_nbytes=max(0, spare_nbytes),
        dynamic=problem is None or problem.shapes.dynamic,
        dynamic_batch=problem is None or problem.shapes.several_batches,
        num_graphs=0 if problem is None else problem.num_graphs(plan),
    )
    if problem is not None and plan.compiled:
        layout = replace(layout, eager_modes=problem.model.eager_modes(plan))
    return layout


def apply_layout(
    layout: PlanLayout,
    family: Family,
    copy_engine: CopyEngine,
    emit: Emit,
    ranks: RankGroup = SINGLE,
) -> AppliedPlan:
    """Apply a layout to the family's transformers and return the object that can remove it.

    The two transformers of Wan 2.2 (high noise and low noise) get the same layout and share a
    weight ring. All `ranks` must call this at the same time, with the same layout.
    """
    blocks = family.blocks()
    transformers = list(transformers_of(family.transformer).values())
    num_blocks = len(blocks) // len(transformers)
    blocks_of = {
        transformer: blocks[number * num_blocks : (number + 1) * num_blocks]
        for number, transformer in enumerate(transformers)
    }
    return apply_plan(family.transformer, blocks_of, layout, copy_engine, emit, ranks=ranks)


def fuse_family(family: Family, undo: ExitStack | None = None) -> None:
    """Fuse operations of all transformers of a family, as in a planned run."""
    for transformer in transformers_of(family.transformer).values():
        fuse_operations(transformer, undo)


def measure_rates(device: torch.device, family: str, emit: Emit) -> MachineRates:
    """Measure the rates of a device; on a CPU, quickly and roughly."""
    if device.type == "cuda":
        return measure_gpu(device, family, emit)
    return measure_device(device, lambda: None, CPU_EDGE, CPU_COPY)  # a CPU needs no synchronizing


def _agreed_device_nbytes(
    run: RunFile,
    family: Family,
    inputs: PlannerInputs,
    device: torch.device,
    one_memory: bool,
) -> tuple[int, int]:
    """Return the device memory to plan for on all ranks, and a smaller one that is preferred.

    The smaller one leaves space for managed pages.
    """
    ranks = inputs.ranks
    num_sharing = ranks_on_device(ranks, device)
    each = [
        device_nbytes_for(
            *(run, family, device, one_memory, num_sharing), reserve_nbytes=reserve // num_sharing
        )
        for reserve in (0, inputs.managed.reserve_nbytes)
    ]
    whole, preferred = (min(found) for found in zip(*ranks.gather(each), strict=True))
    return whole, preferred


def device_nbytes_for(
    run: RunFile,
    family: Family,
    device: torch.device,
    one_memory: bool,
    num_sharing: int = 1,
    counted_nbytes: int = 0,
    reserve_nbytes: int = 0,
) -> int:
    """Return the device memory to plan for, in bytes: what is free, up to `plan.device_memory`.

    `num_sharing` ranks share the device, and each plans for an equal part of what is free. The plan
    counts `counted_nbytes` that are allocated already, and leaves `reserve_nbytes` free.
    """
    limit = plan_settings(run).device_memory
    if device.type != "cuda":
        assert limit is not None, "a rehearsal on the CPU without plan.device_memory"
        return parse_bytes(limit)
    # Where host and device share one memory, the kernel can free more than the driver counts.
    loaded = _frozen_host_nbytes(family) if one_memory and not counted_nbytes else 0
    system_free = free_host_nbytes(loaded_nbytes=loaded) if one_memory else None
    free = free_nbytes(device, system_free, num_sharing) + counted_nbytes - reserve_nbytes
    allocated = torch.cuda.memory_allocated(device) - counted_nbytes
    return free if limit is None else min(free, parse_bytes(limit) - allocated)


def _ranks_sharing_weights(run: RunFile, ranks: RankGroup, emit: Emit) -> RankGroup:
    """Return `ranks` if those of a machine can share streamed weights, else `SINGLE`.

    A page of memory is shared to find out, so that the plan counts the weights correctly. Rank 0
    emits a warning if that fails.
    """
    has_neighbours = ranks.num_machines < ranks.world_size
    if has_neighbours and constraints_of(run).stream:
        return SINGLE if map_shared_memory([PAGESIZE], ranks, emit) is None else ranks
    return ranks


def _host_nbytes(run: RunFile, family: Family, ranks: RankGroup = SINGLE) -> int:
    """Return the host memory of a machine to plan for, in bytes, for all its ranks together.

    It is what is free on the machine that has least, up to `plan.host_memory`.
    """
    limit = plan_settings(run).host_memory
    free = min(ranks.gather(free_host_nbytes(ranks, _frozen_host_nbytes(family))))
    return free if limit is None else min(free, parse_bytes(limit))


def free_host_nbytes(ranks: RankGroup = SINGLE, loaded_nbytes: int = 0) -> int:
    """Return the free host memory of this machine in bytes, the same on all its ranks.

    Ranks look at different moments, so the smallest value counts. `loaded_nbytes` of weights that
    each rank has loaded will be freed.
    """
    seen = ranks.gather_local((read_this_host().usable_bytes(), loaded_nbytes))
    usable = min(usable for usable, _ in seen)
    return int(usable * (1 - HOST_RESERVE_SHARE)) + sum(loaded for _, loaded in seen)


def _frozen_host_nbytes(family: Family) -> int:
    """Return the bytes of host memory that the loaded frozen weights occupy.

    They count as free, because every plan moves these weights to the device or into host memory
    that the plan accounts for.
    """
    frozen = [p for p in family.transformer.parameters() if not p.requires_grad]
    spans = [(p.data_ptr(), p.nbytes) for p in frozen if p.device.type == "cpu"]
    return anonymous_nbytes(Path("/proc"), spans)
