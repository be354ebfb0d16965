"""Compare the ways to train a run on several GPUs, and recommend one.

Each strategy is planned by the same search (plan/search.py), from one traced model, with the memory
and the links that it leaves:

    one GPU            weights and optimizer state may be in host memory; the other GPUs are idle
    planned ranks      the same plan on every rank; gradients are added up (`replicate`)
    FSDP2              shards over all ranks
    HSDP               shards within groups of ranks, and several copies of the model
    hybrid             FSDP2, with optimizer state in host memory (unified memory on a GH200)
    FSDP2 + offload    shards and optimizer state in host memory; the CPU runs the optimizer
    context parallel   FSDP2, and several ranks divide the tokens of each sample

Speeds of links between GPUs are published or assumed figures (`machines.CLUSTERS`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

from gracetune.config.checks import check_sharding
from gracetune.memory.platform import Link
from gracetune.models.context_parallel import has_token_plan
from gracetune.plan.machines import NETWORK_CONSTANTS
from gracetune.plan.planner_input import STATE_SHARES
from gracetune.plan.search import (
    PlanError,
    find_best_plan,
    required_device_nbytes,
    smallest_candidate,
)
from gracetune.plan.sharding import ModelDivision, Network, ShardingChoice, measure_shards
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from gracetune.config.schema import RunFile
    from gracetune.plan.cost import CostModel
    from gracetune.plan.machines import ClusterSpec
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.result import Plan
    from gracetune.plan.search import Constraints, PlanBudget

Limit = Literal["compute", "link", "network", "host memory", "CPU", "staging", "memory"]
"""The slowest part of a step: `link` is that between host and device, `host memory` its bandwidth
when the CPU runs the optimizer, `CPU` the launching of kernels. `memory`: nothing fits."""

NOTICEABLE_WAIT = 0.05
"""Share of a step from which a wait is named as the limit."""
SIMPLER_MARGIN = 0.03
"""A strategy that is listed earlier, hence simpler, is recommended if it is slower by at most this
share."""
LONG_SAMPLE = 16384
"""Number of tokens from which context parallel is considered."""
STAGING_SHARE = 0.1
"""Share of a run's time from which staging is named as the limit."""
CROWDED = 0.8
"""Share of host memory from which its users are said to compete."""


ONE_PROCESS = ShardingChoice()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs of a run: their number, their machines and the links between them."""

    num_gpus: int
    gpus_per_machine: int
    network: Network
    link: Link
    cpu_rate: float
    """Bytes per second with which the CPUs of a machine read and write host memory."""
    fault_rate: float
    """Bytes per second at which page faults move managed memory to a GPU; 0 if unknown."""
    storage_rate: float
    """Bytes per second that a machine reads from storage."""
    all_storage_rate: float
    """Bytes per second that all machines together read from storage."""

    @property
    def num_machines(self) -> int:
        """Number of machines."""
        return ceil(self.num_gpus / self.gpus_per_machine)

    @property
    def ranks_per_machine(self) -> int:
        """Number of GPUs in use on each machine."""
        return min(self.num_gpus, self.gpus_per_machine)

    def staging_seconds(self, nbytes: int) -> float:
        """Return the time in which every machine reads `nbytes` from storage."""
        return max(nbytes / self.storage_rate, nbytes * self.num_machines / self.all_storage_rate)


def build_cluster(
    spec: ClusterSpec,
    num_gpus: int,
    link: Link,
    fault_rate: float,
    *,
    gpus_per_machine: int | None = None,
    network: float | None = None,
) -> Cluster:
    """Return a cluster of machines of one kind; the arguments replace figures of the profile.

    `network` is the rate between machines for each GPU and direction, in bytes per second.
    """
    per_machine = gpus_per_machine or int(spec.gpus_per_machine.value)
    # A domain of NVLink is at least a machine.
    domain = per_machine if spec.nvlink_gpus is None else int(spec.nvlink_gpus.value)
    share = {name: figure.value for name, figure in NETWORK_CONSTANTS.items()}
    return Cluster(
        num_gpus=num_gpus,
        gpus_per_machine=per_machine,
        network=Network(
            nvlink=spec.nvlink.value * share["nvlink_share"],
            network=(network or spec.network.value) * share["network_share"],
            nvlink_gpus=max(domain, per_machine),
        ),
        link=link,
        # Superchips bring their own memory, so the rate grows with the GPUs of a machine.
        cpu_rate=spec.cpu_memory.value
        * (per_machine / spec.gpus_per_machine.value if link is Link.COHERENT else 1),
        fault_rate=fault_rate,
        storage_rate=spec.storage.value,
        all_storage_rate=spec.all_storage.value,
    )


@dataclass(frozen=True)
class StrategyInputs:
    """A run that is to be planned with each strategy."""

    run: RunFile
    model: CostModel
    """The cost model of one process."""
    transformer: nn.Module
    """The transformer with its adapter, usually on the meta device."""
    blocks: Sequence[nn.Module]
    fixed: FixedMemory
    """Memory of one process that has the whole model."""
    budget: PlanBudget
    """Memory of a machine and of its GPUs."""
    constraints: Constraints
    cluster: Cluster
    compute_nbytes: int
    """Bytes per element of the weights that blocks compute with."""
    weights_nbytes: int
    """Bytes of the weights of all transformers, in their files."""
    data_nbytes: int
    """Bytes of the encoded data set, if its size is known."""
    simulated: bool = True

    @property
    def staged_nbytes(self) -> int:
        """Bytes of weights and data that each machine reads at the start."""
        return self.weights_nbytes + self.data_nbytes


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to train a run on several GPUs, with its predicted speed and memory."""

    name: str
    settings: dict[str, object]
    """Settings of the run file that select it."""
    num_gpus: int
    """Number of GPUs that it uses."""
    plan: Plan | None
    """The fastest plan of a rank; None: it does not fit."""
    why_not: str = ""
    """Reason why it does not fit; empty if it does."""
    refused: str = ""
    """Reason why `gracetune train` refuses it for this run; empty if it does not."""
    choice: ShardingChoice = ONE_PROCESS
    step_s: float = 0.0
    """Seconds of an optimizer step."""
    samples_per_second: float = 0.0
    """Speed of all GPUs together."""
    host_nbytes: int = 0
    """Host memory of each machine."""
    network_nbytes: int = 0
    """Bytes that each GPU receives from others in an optimizer step."""
    link_nbytes: int = 0
    """Bytes that cross the link between host and device in an optimizer step, for each GPU."""
    limit: Limit = "memory"
    detail: str = ""
    """What is particular about the plan, such as the shard size, in a few words."""


@dataclass(frozen=True, slots=True)
class StrategyAdvice:
    """The strategies of a run, the recommended one, and warnings."""

    strategies: tuple[Strategy, ...]
    recommended: Strategy | None
    """None: nothing fits."""
    reason: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    staging_s: float
    """Seconds in which every machine reads the weights and the data."""


def advise(inputs: StrategyInputs) -> StrategyAdvice:
    """Plan a run with each strategy, and recommend the fastest one that fits."""
    strategies = tuple(_strategies(inputs))
    recommended = _recommended(strategies)
    return StrategyAdvice(
        strategies,
        recommended,
        _reason(strategies, recommended),
        tuple(_warnings(inputs, strategies)),
        tuple(_notes(inputs)),
        inputs.cluster.staging_seconds(inputs.staged_nbytes),
    )


def _strategies(inputs: StrategyInputs) -> Iterator[Strategy]:
    """Yield the strategies, simplest first."""
    cluster, settings = inputs.cluster, inputs.run.distributed
    count = cluster.num_gpus
    yield _one_gpu(inputs)
    if count == 1:
        return
    replicas = ShardingChoice(
        num_replicas=count, compute_nbytes=inputs.compute_nbytes, reduce_nbytes=_grad_size(inputs)
    )
    yield _planned(inputs, "planned ranks", replicas, {"distributed.strategy": "replicate"})
    base = ShardingChoice(
        num_shards=count,
        reshard=settings.reshard_after_forward,
        prefetch_blocks=settings.prefetch_blocks,
        compute_nbytes=inputs.compute_nbytes,
        reduce_nbytes=4 if settings.reduce_dtype == "float32" else 2,
    )
    fsdp2: dict[str, object] = {"distributed.strategy": "fsdp2"}
    yield _planned(inputs, "FSDP2", base, fsdp2)
    hsdp = list(_hsdp(inputs, base))
    if hsdp:  # if none fits, the one that needs least
        yield max(hsdp, key=lambda one: (one.samples_per_second, one.choice.num_shards))
    if inputs.constraints.host_state != (0.0,):
        shares = tuple(share for share in STATE_SHARES if share)
        yield _planned(
            inputs, "hybrid", base, fsdp2 | {"optimizer.state": "host"}, host_state=shares
        )
    offload = replace(base, cpu_offload=True)
    yield _planned(inputs, "FSDP2 + offload", offload, fsdp2 | {"distributed.cpu_offload": True})
    parallel = list(_context_parallel(inputs, base))
    if parallel:
        yield max(parallel, key=lambda one: (one.samples_per_second, one.choice.context_size))


def _one_gpu(inputs: StrategyInputs) -> Strategy:
    budget = replace(inputs.budget, ranks=1)
    if inputs.cluster.link is Link.COHERENT:  # the memory of its own CPU
        budget = replace(budget, host_nbytes=budget.host_nbytes // inputs.budget.ranks)
    alone = replace(inputs, budget=budget, cluster=replace(inputs.cluster, num_gpus=1))
    return _strategy(alone, "one GPU", ONE_PROCESS, {}, inputs.model, inputs.fixed, 1)


def _hsdp(inputs: StrategyInputs, base: ShardingChoice) -> Iterator[Strategy]:
    """Yield HSDP with each possible number of shards."""
    count, settings = inputs.cluster.num_gpus, inputs.run.distributed
    for shards in range(2, count):
        is_asked = settings.strategy != "hsdp" or settings.shard_size in (None, shards)
        if count % shards or not is_asked:
            continue
        choice = replace(base, num_shards=shards, num_replicas=count // shards)
        names: dict[str, object] = {"distributed.strategy": "hsdp"}
        names["distributed.shard_size"] = shards
        yield _planned(inputs, "HSDP", choice, names)


def _context_parallel(inputs: StrategyInputs, base: ShardingChoice) -> Iterator[Strategy]:
    """Yield FSDP2 with each possible number of ranks per sample, if samples are long."""
    if not has_token_plan(inputs.transformer):
        return
    config: Mapping[str, Any] = inputs.transformer.config  # type: ignore[assignment]
    if "num_attention_heads" not in config:
        return
    heads = config["num_attention_heads"]
    width = heads * config["attention_head_dim"]
    tokens = inputs.model.at(1).blocks[0].input_nbytes / (width * inputs.compute_nbytes)
    if tokens < LONG_SAMPLE:
        return
    for size in range(2, inputs.cluster.num_gpus + 1):
        fits_domain = size <= inputs.cluster.network.nvlink_gpus
        if heads % size or inputs.cluster.num_gpus % size or not fits_domain:
            continue
        names: dict[str, object] = {"distributed.strategy": "fsdp2"}
        names["distributed.context_parallel"] = size
        yield _planned(inputs, "context parallel", replace(base, context_size=size), names)


def _planned(
    inputs: StrategyInputs,
    name: str,
    choice: ShardingChoice,
    settings: dict[str, object],
    host_state: tuple[float, ...] = (0.0,),
) -> Strategy:
    """Plan a strategy that uses all GPUs."""
    sizes = measure_shards(inputs.transformer, inputs.blocks, choice)
    fixed, constraints, budget = inputs.fixed, inputs.constraints, inputs.budget
    if choice.is_sharded:
        fixed = sharded_memory(fixed, choice, sizes.trained_numel, _trained_numel(inputs))
        constraints = sharded_constraints(constraints, host_state)
        budget = replace(budget, shares_weights=False)
    division = ModelDivision(
        sizes,
        inputs.cluster.network,
        cpu_rate=inputs.cluster.cpu_rate / inputs.cluster.ranks_per_machine,
        state_nbytes=fixed.optimizer_nbytes // fixed.num_transformers,
    )
    changed = replace(inputs, constraints=constraints, budget=budget)
    model = inputs.model.divided(division)
    found = _strategy(changed, name, choice, settings, model, fixed, choice.world_size)
    return replace(found, refused=_refusal(inputs.run)) if choice.is_sharded else found


def _refusal(run: RunFile) -> str:
    """Return why `gracetune train` refuses to divide this run's weights among ranks, or ''."""
    asked = run.distributed.model_copy(update={"strategy": "fsdp2"})
    run = run.model_copy(update={"distributed": asked})
    broken = next(check_sharding(run), None)
    return "" if broken is None else f"{broken.key} {broken.message.split('. ')[0]}"


def sharded_constraints(
    constraints: Constraints, host_state: tuple[float, ...] = (0.0,)
) -> Constraints:
    """Return the choices that sharding leaves: nothing is streamed, no activation is offloaded."""
    return replace(constraints, stream=False, offload=False, host_state=host_state)


def sharded_memory(
    fixed: FixedMemory, choice: ShardingChoice, shard_numel: int, whole_numel: int
) -> FixedMemory:
    """Return the fixed memory of a rank that has `shard_numel` of `whole_numel` trained weights."""
    share = shard_numel / whole_numel
    return replace(
        fixed,
        optimizer_nbytes=ceil(fixed.optimizer_nbytes * share),
        averages_nbytes=ceil(fixed.averages_nbytes * share),
        # The buffers are for pieces of the state, whose size depends on the largest parameter.
        state_slots_nbytes=ceil(fixed.state_slots_nbytes / choice.num_shards),
    )


def _strategy(
    inputs: StrategyInputs,
    name: str,
    choice: ShardingChoice,
    settings: dict[str, object],
    model: CostModel,
    fixed: FixedMemory,
    num_gpus: int,
) -> Strategy:
    groups = num_gpus // choice.context_size
    constraints = _with_samples(inputs, groups)
    try:
        found = find_best_plan(
            model, fixed, inputs.budget, constraints, inputs.simulated, only_best=True
        ).best
    except PlanError:
        why_not = _why_not(inputs, model, fixed, constraints)
        return Strategy(name, settings, num_gpus, None, why_not, choice=choice)
    seconds, rates = found.seconds, model.rates
    step_s = seconds.step * found.accumulation
    link = seconds.link_in * rates.link_in + seconds.link_out * rates.link_out
    division = model.at(found.batch).division
    return Strategy(
        name=name,
        settings=settings,
        num_gpus=num_gpus,
        plan=found,
        choice=choice,
        step_s=step_s,
        samples_per_second=groups * found.batch * found.accumulation / step_s,
        host_nbytes=inputs.budget.machine_host_nbytes(found.host),
        network_nbytes=0 if division is None else division.network_nbytes(found.accumulation),
        link_nbytes=int(link * found.accumulation),
        limit=_limit(inputs, found, choice, step_s),
        detail=_detail(found, choice),
    )


def _with_samples(inputs: StrategyInputs, num_groups: int) -> Constraints:
    """Return the constraints with the samples per step of one group of ranks."""
    train, constraints = inputs.run.train, inputs.constraints
    whole = train.effective_batch_size
    if whole is None:
        return constraints
    samples = max(train.batch_size, whole // num_groups // train.batch_size * train.batch_size)
    return replace(constraints, samples=samples)


def _grad_size(inputs: StrategyInputs) -> int:
    """Return the bytes per element of the gradients that ranks with whole models add up."""
    return next(p for p in inputs.transformer.parameters() if p.requires_grad).dtype.itemsize


def _trained_numel(inputs: StrategyInputs) -> int:
    return sum(p.numel() for p in inputs.transformer.parameters() if p.requires_grad)


def _why_not(
    inputs: StrategyInputs, model: CostModel, fixed: FixedMemory, constraints: Constraints
) -> str:
    """Return why nothing fits, and what it would cost to leave the overflow to page faults."""
    budget = inputs.budget
    constraints = constraints.for_budget(budget)
    smallest = smallest_candidate(model, fixed, budget, constraints)
    overflow = required_device_nbytes(model, smallest, fixed, budget) - budget.device_nbytes
    if overflow <= 0:
        return f"more host memory than the {format_bytes(budget.host_nbytes)} of a machine"
    text = f"{format_bytes(overflow)} of device memory too much"
    if inputs.cluster.fault_rate:
        # What does not fit leaves the device and comes back once per micro-batch.
        seconds = format_seconds(2 * overflow / inputs.cluster.fault_rate)
        text += f"; page faults would take {seconds} per micro-batch to move it"
    return text


def _limit(inputs: StrategyInputs, plan: Plan, choice: ShardingChoice, step_s: float) -> Limit:
    seconds = plan.seconds
    state: Limit = "host memory" if choice.cpu_offload else "link"
    waits: dict[Limit, float] = {"network": seconds.wait_network, "CPU": seconds.wait_host}
    waits["link"] = seconds.wait_weights + seconds.wait_activations
    waits[state] = waits.get(state, 0.0) + seconds.wait_state
    longest = max(waits, key=lambda name: waits[name])
    staging_s = inputs.cluster.staging_seconds(inputs.staged_nbytes)
    if staging_s > STAGING_SHARE * inputs.run.train.max_train_steps * step_s:
        return "staging"
    return longest if waits[longest] > NOTICEABLE_WAIT * seconds.step else "compute"


def _detail(plan: Plan, choice: ShardingChoice) -> str:
    parts = []
    if choice.num_replicas > 1 and choice.is_sharded:
        parts.append(f"{choice.num_replicas} copies in {choice.num_shards} shards")
    if choice.context_size > 1:
        parts.append(f"{choice.context_size} GPUs per sample")
    if plan.streamed:
        parts.append(f"{len(plan.streamed)} of {len(plan.blocks)} blocks streamed")
    if plan.host_state:
        parts.append(f"{plan.host_state:.0%} of the state in host memory")
    modes = [block.activations for block in plan.blocks]
    for mode, word in (("recompute", "recomputed"), ("lean", "lean"), ("offload", "offloaded")):
        if mode in modes:
            parts.append(f"{modes.count(mode)} {word}")
    return ", ".join(parts)


# The recommendation


def _recommended(strategies: Sequence[Strategy]) -> Strategy | None:
    fitting = _available(strategies)
    if not fitting:
        return None
    fastest = max(one.samples_per_second for one in fitting)
    return next(one for one in fitting if one.samples_per_second >= fastest * (1 - SIMPLER_MARGIN))


def _available(strategies: Sequence[Strategy]) -> list[Strategy]:
    return [one for one in strategies if one.plan is not None and not one.refused]


def _reason(strategies: Sequence[Strategy], chosen: Strategy | None) -> str:
    if chosen is None:
        return (
            "nothing fits. Use more GPUs, a machine with more memory, a lower resolution, "
            "model.dtype: bfloat16, or an adapter."
        )
    fitting = _available(strategies)
    fastest = max(one.samples_per_second for one in fitting)
    speed = f"{chosen.samples_per_second:.3g} samples/s"
    if len(fitting) == 1:
        text = f"it is the only one that fits ({speed})"
    elif chosen.samples_per_second == fastest:
        text = f"it is the fastest that fits ({speed})"
    else:
        lag = 1 - chosen.samples_per_second / fastest
        text = (
            f"it is the simplest within {SIMPLER_MARGIN:.0%} of the fastest ({speed}, -{lag:.1%})"
        )
    others = [
        f"{one.name} is {1 - one.samples_per_second / chosen.samples_per_second:.0%} slower"
        f"{_because(one)}"
        for one in fitting
        if one.num_gpus > 1 and one.samples_per_second < chosen.samples_per_second * 0.99
    ]
    missing = [
        f"{one.name} does not fit" for one in strategies if one.plan is None and not one.refused
    ]
    return "; ".join([text, *others, *missing])


def _because(strategy: Strategy) -> str:
    assert strategy.plan is not None
    seconds, limit = strategy.plan.seconds, strategy.limit
    waits = {
        "network": seconds.wait_network,
        "link": seconds.wait_weights + seconds.wait_activations + seconds.wait_state,
        "host memory": seconds.wait_state,
    }
    if limit in waits:
        return f" (it waits {waits[limit] / seconds.step:.0%} of the time for the {limit})"
    if seconds.recompute > NOTICEABLE_WAIT * seconds.step:
        return f" (it recomputes for {seconds.recompute / seconds.step:.0%} of the time)"
    return ""


# Warnings: mechanisms that compete for the same memory


def _warnings(inputs: StrategyInputs, strategies: Sequence[Strategy]) -> Iterator[str]:
    run, budget = inputs.run, inputs.budget
    is_sharded = run.distributed.strategy in ("fsdp2", "hsdp")
    caches = budget.ranks * inputs.fixed.host_caches_nbytes
    for one in strategies:
        if one.plan is None or one.host_nbytes <= max(caches, CROWDED * budget.host_nbytes):
            continue
        yield (
            f"{one.name}: {format_bytes(one.host_nbytes)} of {format_bytes(budget.host_nbytes)} of "
            f"a machine's host memory are in use, {format_bytes(caches)} of them by caches. Staged "
            "files, the page cache and pinned memory compete for the rest; set "
            "cache_config.vae_cache_type: disk, or limit cache_config.host_budget_gb."
        )
    loaded = budget.ranks * inputs.weights_nbytes
    if inputs.cluster.num_gpus > 1 and loaded > budget.host_nbytes:
        yield (
            f"every rank loads the whole model at its start: {format_bytes(loaded)} on each "
            f"machine, which has {format_bytes(budget.host_nbytes)} of host memory. Start fewer "
            "ranks on a machine."
        )
    if is_sharded and run.distributed.cpu_offload and run.optimizer.state == "host":
        yield (
            "distributed.cpu_offload and optimizer.state: host both keep the optimizer's state in "
            "host memory. cpu_offload runs the optimizer on the CPU, so optimizer.state has no "
            "effect; choose one."
        )
    asked = set() if isinstance(run.plan, str) else run.plan.model_fields_set
    if is_sharded and asked & {"stream", "offload"}:
        yield (
            "plan.stream and plan.offload have no effect with distributed.strategy: "
            f"{run.distributed.strategy}. Streamed weights and shards would be two copies of the "
            "same weights, in the same host or device memory."
        )
    unified = "unified_memory" in (
        run.cache_config.vae_cache_type,
        run.cache_config.text_cache_type,
    )
    fullest = [
        one
        for one in strategies
        if one.plan is not None and one.plan.device.total > 0.9 * budget.device_nbytes
    ]
    if unified and inputs.cluster.link is Link.COHERENT and fullest:
        left = budget.device_nbytes - max(
            one.plan.device.total for one in fullest if one.plan is not None
        )
        yield (
            "caches in unified memory may move to the device, where "
            f"{' and '.join(one.name for one in fullest)} leave {format_bytes(left)}. Managed "
            "memory then evicts what the plan needs, and page faults bring it back; set "
            "plan.device_memory lower, or cache_config.*_cache_type: memory."
        )


def _notes(inputs: StrategyInputs) -> Iterator[str]:
    cluster, network = inputs.cluster, inputs.cluster.network
    if cluster.num_gpus == 1:
        return
    machines = "1 machine" if cluster.num_machines == 1 else f"{cluster.num_machines} machines"
    yield (
        f"{cluster.num_gpus} GPUs in {machines}; collectives reach {network.nvlink / 1e9:.0f} GB/s "
        f"over NVLink and {network.network / 1e9:.0f} GB/s between machines, per GPU. These are "
        "published or assumed figures, not measured ones; --network and --gpus-per-machine replace "
        "them"
    )
    if cluster.num_gpus % cluster.ranks_per_machine:
        yield (
            f"{cluster.num_gpus} GPUs do not fill machines of {cluster.gpus_per_machine}; the last "
            "one is planned like the others"
        )
    if refusal := _refusal(inputs.run):
        yield f"strategies in brackets are for comparison only: {refusal}"
    if inputs.constraints.host_state == (0.0,):
        yield "no hybrid: an adapter's optimizer state is too small to be worth moving"
