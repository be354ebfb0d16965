"""Plan a run whose ranks divide the weights among them (`distributed.strategy` fsdp2 or hsdp).

The plan decides what each block keeps for backward (`keep`, `lean` or `recompute`), whether blocks
are compiled, and how much optimizer state is in host memory, with the device memory that sharding
leaves. Weights are not streamed and activations are not offloaded: gathered weights come and go
anyway, and their memory belongs to `fully_shard`.

`fully_shard` swaps the parameters of a block in hooks around its forward, and in backward before
the block's outputs get their gradients. `wrap_blocks` replaces the forward inside of these hooks,
so recomputation finds gathered weights, and no mode saves one: `lean` and `recompute` save outputs
of matmuls and attention only, and what autograd saves of a weight in mode `keep` is the parameter
itself, whose memory `fully_shard` frees and fills again.

Not the divided model is traced, whose hooks would gather weights, but a copy without weights that
`planner_input.copy_for_tracing` has made before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gracetune.distributed.sharding import local_nbytes
from gracetune.events.types import Notice
from gracetune.memory.platform import Link
from gracetune.models.family import transformers_of
from gracetune.optim.build import state_nbytes_per_element_of
from gracetune.optim.offloaded_state import StateOffloadSettings
from gracetune.plan.apply import apply_checkpointing
from gracetune.plan.compile_cache import compile_cache_of
from gracetune.plan.controller import CudaMemoryMeter, NullMemoryMeter, PlanController
from gracetune.plan.machines import CLUSTERS, FITTED_CONSTANTS, THIS_CLUSTER
from gracetune.plan.memory import FixedMemory
from gracetune.plan.planner import (
    agreed_plan,
    describe_shapes,
    device_nbytes_for,
    free_host_nbytes,
    layout_of,
    lowest_rates,
    measure_rates,
    ranks_on_device,
    without_failed_compilation,
)
from gracetune.plan.planner_input import (
    PlanProblem,
    build_cost_model,
    constraints_of,
    family_trace_target,
    plan_settings,
)
from gracetune.plan.report import describe, describe_speed
from gracetune.plan.search import PlanBudget
from gracetune.plan.sharding import ModelDivision, ShardingChoice, measure_shards
from gracetune.plan.strategies import build_cluster, sharded_constraints
from gracetune.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from gracetune.config.schema import RunFile
    from gracetune.events.types import Event
    from gracetune.memory.oversubscription import GcFreeze
    from gracetune.models.family import Family
    from gracetune.optim.offloaded_state import OptimizerStepper
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.controller import MemoryMeter
    from gracetune.plan.cost import CostModel
    from gracetune.plan.planner import PlannerInputs
    from gracetune.plan.result import Plan

    Emit = Callable[[Event], None]


def plan_sharded_run(
    run: RunFile,
    family: Family,
    inputs: PlannerInputs,
    stepper: OptimizerStepper,
    link: Link,
    device: torch.device,
    gc_freeze: GcFreeze,
    emit: Emit,
) -> PlanController:
    """Plan a divided run for the memory that is free now, apply the plan, return its controller.

    All ranks must call this at the same time. The main rank plans for the smallest memory and the
    lowest rates, and all ranks apply its plan.
    """
    layout, ranks, traced = inputs.layout, inputs.layout.ranks, inputs.traced
    assert traced is not None, "copy_for_tracing was not called before the weights were divided"
    stored = local_nbytes(
        p for p in family.transformer.parameters() if p.device.type == device.type
    )
    meter: MemoryMeter = NullMemoryMeter()
    if device.type == "cuda":
        meter = CudaMemoryMeter(device, gc_freeze, counted_nbytes=stored)
    num_sharing = ranks_on_device(ranks, device)
    one_memory = link is Link.INTEGRATED
    device_nbytes = device_nbytes_for(run, family, device, one_memory, num_sharing, stored)
    device_nbytes = min(ranks.gather(device_nbytes))
    largest = inputs.load_largest()
    latent_shape, text = largest.latents.shape[1:], largest.text
    ranks.wait()  # so that all measure at the same time
    rates = lowest_rates(measure_rates(device, run.model.family, emit), ranks)
    inputs.timer.end("measuring")
    target = replace(
        family_trace_target(family, latent_shape, text),
        model=traced.transformer,
        blocks=traced.blocks,
        compute_dtype=traced.compute_dtype,
    )
    may_compile = True in constraints_of(run).compile
    model = build_cost_model(target, rates, may_compile=may_compile)
    inputs.timer.end("tracing")
    problem = replace(
        build_sharded_problem(run, family, inputs, model, link, device_nbytes),
        shapes=inputs.shapes,
        compile_cache=compile_cache_of(device),
    )
    problem, saved = without_failed_compilation(problem, inputs.saved_plan, emit)
    plan, was_checked = agreed_plan(problem, saved, ranks, emit)
    inputs.timer.end("searching")
    emit(Notice(f"plan: {layout.describe()}; {describe(plan)}"))
    emit(Notice(f"plan: expect {describe_speed(plan)}"))
    emit(
        Notice(
            f"plan: weights are not streamed and activations are not offloaded with "
            f"distributed.strategy {run.distributed.strategy}; rates of the network are assumed"
        )
    )
    emit(Notice(describe_shapes(problem, plan)))

    def apply(plan: Plan, _: int) -> AppliedPlan:
        if not run.distributed.cpu_offload:
            stepper.set_host_share(plan.host_state)
        return apply_checkpointing(family.blocks(), layout_of(plan, problem), emit)

    return PlanController(
        problem, plan, apply, meter, latent_shape.numel(), emit, was_checked, ranks
    )


def build_sharded_problem(
    run: RunFile,
    family: Family,
    inputs: PlannerInputs,
    model: CostModel,
    link: Link,
    device_nbytes: int,
) -> PlanProblem:
    """Return the inputs of the plan search for a divided run and a device memory budget.

    All ranks must call this at the same time.
    """
    layout, settings = inputs.layout, run.distributed
    ranks = layout.ranks
    compute_dtype = None if inputs.traced is None else inputs.traced.compute_dtype
    choice = ShardingChoice(
        num_shards=layout.shard_size,
        num_replicas=layout.num_replicas,
        context_size=layout.context_size,
        reshard=settings.reshard_after_forward,
        prefetch_blocks=settings.prefetch_blocks,
        cpu_offload=settings.cpu_offload,
        compute_nbytes=None if compute_dtype is None else compute_dtype.itemsize,
        reduce_nbytes=4 if settings.reduce_dtype == "float32" else 2,
    )
    transformers = list(transformers_of(family.transformer).values())
    inside = set(transformers[0].modules())
    blocks = [block for block in family.blocks() if block in inside]
    sizes = measure_shards(transformers[0], blocks, choice)
    trained = [p for p in family.transformer.parameters() if p.requires_grad]
    each = state_nbytes_per_element_of(run.optimizer, trained)
    numel = len(transformers) * sizes.trained_numel
    local = max(ranks.gather(ranks.local_world_size))
    cluster = build_cluster(
        CLUSTERS["gh200-96"] if link is Link.COHERENT else THIS_CLUSTER,
        ranks.world_size,
        link,
        fault_rate=0.0,
        gpus_per_machine=local,
    )
    division = ModelDivision(
        sizes,
        cluster.network,
        cpu_rate=cluster.cpu_rate / local,
        state_nbytes=int(sizes.trained_numel * each),
    )
    limit = plan_settings(run).host_memory
    free = min(ranks.gather(free_host_nbytes(ranks)))
    constraints = constraints_of(run)
    host_state = (0.0,) if settings.cpu_offload else constraints.host_state
    return PlanProblem(
        model.divided(division),
        FixedMemory(
            optimizer_nbytes=int(numel * each),
            num_transformers=len(transformers),
            library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
            averages_nbytes=4 * numel if run.train.ema_decay else 0,
            state_slots_nbytes=StateOffloadSettings().slots_nbytes([sizes.trained_numel], each),
            batches_ahead=inputs.batches_ahead,
        ),
        PlanBudget(
            device_nbytes,
            free if limit is None else min(free, parse_bytes(limit)),
            FITTED_CONSTANTS["fragmentation"].value,
            link is Link.INTEGRATED,
            local,
            shares_weights=False,
        ),
        replace(sharded_constraints(constraints, host_state), batches=(run.train.batch_size,)),
        run.train.max_train_steps * run.train.gradient_accumulation_steps,
    )
