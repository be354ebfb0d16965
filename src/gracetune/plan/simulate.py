"""Predict the time of one step by simulating its CUDA streams.

A candidate plan becomes a list of tasks. Each belongs to a stream and has a duration and a list of
tasks that must end before it starts. The streams are:

    host              launches the kernels of each pass, at most LAUNCH_QUEUE_DEPTH entries ahead
    compute           runs the passes: forward of each block, loss, backward of each block, update
    weights_in        copies streamed weights to the device, by the ring's own policy
    activations_out   copies offloaded activations to the host after (eager: during) a block
    activations_in    copies them back before the block's backward
    collectives       gathers a block's weights from other ranks, and reduces its gradients
    all_reduce        adds up gradients over replicas, if other links do this than the gathering

Example: three blocks whose weights are streamed through two slots. W is a fetch of weights, F a
forward, B a backward, and dots are time in which compute waits:

    weights_in   W0----- W1----- W2-----                    W0-----
    compute      ....... F0----. F1----. F2---- loss B2---- B1----. B0---- update

W2 overwrites the slot of block 0, so it starts after F0; the second W0 starts after B2.

Tasks of one stream run in order. Copies in the same direction share the link's bandwidth. While
copies run in both directions, each gets only `both_ways_share` of its bandwidth. The step takes

    step = end of the last compute task - start of the step,

and the gaps between compute tasks are attributed to the stream that compute was waiting for.

Several steps are simulated and the last one is timed, because the ring fetches the first blocks of
a step while the previous step still computes. Two steps are enough, unless the second one runs
kernels that the host had queued in advance during the first, which hides a slow host; then eight
are simulated.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, get_args

from gracetune.offload.ring import prefetches, slot_to_refill
from gracetune.plan.result import ACTIVATION_PREFETCH, MAX_BLOCKS_IN_FLIGHT, Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.memory.managed_roles import ManagedRole
    from gracetune.plan.cost import ModeCosts, ModelCosts, PassSeconds
    from gracetune.plan.machines import EffectiveRates
    from gracetune.plan.result import BlockPlan, Plan
    from gracetune.plan.sharding import UnitTraffic


Stream = Literal[
    "compute",
    "weights_in",
    "activations_in",
    "activations_out",
    "host",
    "collectives",
    "all_reduce",
]
STREAMS: tuple[Stream, ...] = get_args(Stream)
COMPUTE, WEIGHTS_IN, ACTIVATIONS_IN, ACTIVATIONS_OUT, HOST, COLLECTIVES, ALL_REDUCE = range(
    len(STREAMS)
)
INWARD = (WEIGHTS_IN, ACTIVATIONS_IN)

NUM_STEPS, MORE_STEPS = 2, 8
"""Number of steps to simulate first, and number if that was too few: when the last step is shorter
than its kernel launches, it ran kernels queued in the step before."""
ROUNDING_S = 1e-9
ROOT = -1
"""Stands for everything outside of blocks, in place of a block's index."""
LAUNCH_QUEUE_DEPTH = 1021
"""Maximum number of entries in the driver's queue: kernels that are launched but not yet started,
memsets and operations on events. One more blocks the host. Counted on an H200 with CUDA 13, with
kernels alone; it is the same for all kernels."""
LAUNCHES_PER_EAGER_KERNEL = 1.31
"""Kernels and memsets that an eager pass launches per kernel that the trace counts. Libraries clear
workspaces, and split a matmul or attention into several kernels. Counted in one step of Flux
(`flux_eager_24` in benchmarks/results/step_trace.json): 11,865 kernels and 1,867 memsets, where the
trace has 10,502. It is not known for compiled passes, whose kernels count as one entry each."""
EVENTS_PER_COPY = 4
"""Operations on events that a copy between host and device adds to the queue of the compute stream:
one when it is queued, three when its result is awaited (`CudaCopyEngine`)."""
EAGER_COPY_PARTS = 8
"""Number of copies in which the simulation moves an eager block's activations, each way. In a real
run every saved tensor is copied separately, as soon as it exists."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """The decisions of a plan, before its memory and time are predicted."""

    blocks: tuple[BlockPlan, ...]
    batch: int
    """Samples per micro-batch."""
    accumulation: int
    """Micro-batches per optimizer step."""
    slots: int
    """Number of slots of the weight ring (device buffers for one streamed block each)."""
    compiled: bool
    host_state: float = 0.0
    """Share of the optimizer's state that lives in host memory, 0 to 1."""
    activation_prefetch: int = ACTIVATION_PREFETCH
    """Number of blocks whose offloaded activations are fetched before backward reaches them."""
    managed: tuple[ManagedRole, ...] = ()
    """Roles that are kept in managed memory."""

    @property
    def streamed(self) -> tuple[int, ...]:
        """The indices of the blocks whose weights are streamed."""
        return tuple(i for i, block in enumerate(self.blocks) if block.weights == "streamed")


def candidate_of(plan: Plan) -> PlanCandidate:
    """Return a plan's decisions without its predicted memory and time."""
    return PlanCandidate(
        plan.blocks,
        plan.batch,
        plan.accumulation,
        plan.slots,
        plan.compiled,
        plan.host_state,
        managed=plan.managed,
    )


def predict_seconds(
    costs: ModelCosts, candidate: PlanCandidate, rates: EffectiveRates, optimizer_nbytes: int
) -> Seconds:
    """Simulate steps and return the time of one micro-batch.

    It includes the micro-batch's share of the optimizer step. Replicas add up their gradients in
    the last micro-batch of a step only.
    """
    last = _micro_batch_seconds(costs, candidate, rates, optimizer_nbytes, is_last=True)
    num_others = candidate.accumulation - 1
    if costs.division is None or not num_others or not costs.division.all_reduce_nbytes:
        return last
    other = _micro_batch_seconds(costs, candidate, rates, optimizer_nbytes, is_last=False)
    return Seconds(
        **{
            name: (getattr(last, name) + num_others * getattr(other, name)) / candidate.accumulation
            for name in (field.name for field in fields(Seconds))
        }
    )


def _micro_batch_seconds(
    costs: ModelCosts,
    candidate: PlanCandidate,
    rates: EffectiveRates,
    optimizer_nbytes: int,
    is_last: bool,
) -> Seconds:
    for num_steps in (NUM_STEPS, MORE_STEPS):
        script = _StepTasks(costs, candidate, rates, optimizer_nbytes, num_steps, is_last)
        for _ in range(num_steps):
            script.write_step()
        times = simulate(script.tasks, rates.both_ways_share)
        first = script.first_of_last_step
        start = times.ends[first - 1] if first else 0.0
        step = times.ends[script.last_compute] - start
        # A steady step cannot be shorter than its launches. If this one is, it ran kernels that
        # were queued during an earlier step.
        shortfall = script.seconds_of(HOST) - step
        if shortfall < ROUNDING_S:
            break
    waits = dict.fromkeys(range(len(STREAMS)), 0.0) | {HOST: max(0.0, shortfall)}
    step += waits[HOST]
    idle_from = start
    for number, task in enumerate(script.tasks):
        if task.stream != COMPUTE or number < first:
            continue
        if times.starts[number] > idle_from:
            latest = max(task.dependencies, key=lambda other: times.ends[other])
            waits[script.tasks[latest].stream] += times.starts[number] - idle_from
        idle_from = times.ends[number]
    kept = _kept_seconds(costs, candidate)
    return Seconds(
        step=step,
        gemm=kept.gemm,
        attention=kept.attention,
        elementwise=kept.elementwise,
        recompute=_recompute_seconds(costs, candidate),
        overhead=kept.gaps + script.outside_s,
        wait_weights=waits[WEIGHTS_IN],
        wait_activations=waits[ACTIVATIONS_IN] + waits[ACTIVATIONS_OUT],
        link_in=script.seconds_of(WEIGHTS_IN, ACTIVATIONS_IN) + script.state_in_s,
        link_out=script.seconds_of(ACTIVATIONS_OUT) + script.state_out_s,
        wait_state=script.wait_state_s,
        wait_host=waits[HOST],
        wait_network=waits[COLLECTIVES] + waits[ALL_REDUCE] + script.exchange_s,
        network=script.seconds_of(COLLECTIVES, ALL_REDUCE) + script.exchange_s,
    )


def lower_bound_seconds(
    costs: ModelCosts, candidate: PlanCandidate, rates: EffectiveRates
) -> float:
    """Return a cheap lower bound, in seconds, of the time that `predict_seconds` would simulate.

    It is the longest of the compute time, the launch time, and the copy time in each direction.
    """
    compute = _kept_seconds(costs, candidate).total + _recompute_seconds(costs, candidate)
    compute += costs.outside.forward.total + costs.outside.backward.total
    return max(
        compute,
        _min_launch_seconds(costs, candidate),
        _min_incoming_nbytes(costs, candidate) / rates.link_in,
        _offloaded_nbytes(costs, candidate, except_last=MAX_BLOCKS_IN_FLIGHT) / rates.link_out,
    )


def _min_launch_seconds(costs: ModelCosts, candidate: PlanCandidate) -> float:
    """Return the CPU time to launch the kernels of all blocks, without the time of hooks."""
    modes = (
        block.costs_of(plan.activations, candidate.compiled)
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
    )
    return sum(mode.forward_host_s + mode.backward_host_s for mode in modes)


def _min_incoming_nbytes(costs: ModelCosts, candidate: PlanCandidate) -> float:
    """Return the bytes that a step must at least copy to the device.

    These are streamed weights, except those still on the device from an earlier use, and offloaded
    activations.
    """
    weights = sorted(2 * [costs.blocks[index].frozen_nbytes for index in candidate.streamed])
    fetches = max(0, 2 * (len(candidate.streamed) - candidate.slots))
    never_left = min(MAX_BLOCKS_IN_FLIGHT, 1 + candidate.activation_prefetch)
    return sum(weights[:fetches]) + _offloaded_nbytes(costs, candidate, except_last=never_left)


def _offloaded_nbytes(costs: ModelCosts, candidate: PlanCandidate, except_last: int) -> float:
    """Return the bytes of activations that all blocks except the last `except_last` offload.

    Backward reaches the last blocks so soon that their activations may never leave the device.
    """
    count = len(candidate.blocks) - except_last
    return sum(
        block.offloaded_nbytes(plan, candidate.compiled)
        for block, plan in zip(costs.blocks[:count], candidate.blocks[:count], strict=True)
    )


def _kept_seconds(costs: ModelCosts, candidate: PlanCandidate) -> PassSeconds:
    """Return the compute time of all blocks if nothing were recomputed."""
    total = None
    for block in costs.blocks:
        mode = block.costs_of("keep", candidate.compiled)
        both = mode.forward + mode.backward
        total = both if total is None else total + both
    assert total is not None, "a model without blocks"
    return total


def _recompute_seconds(costs: ModelCosts, candidate: PlanCandidate) -> float:
    return sum(
        block.recompute_seconds(plan.activations, candidate.compiled)
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
    )


# Tasks and the event simulation


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work on one simulated stream: a pass over a block, a copy, or kernel launches."""

    stream: int
    seconds: float
    """Duration in seconds if no other stream slows the task down."""
    dependencies: tuple[int, ...] = ()
    """Indices of the tasks that must end before this one starts. They precede it in the list."""


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """The start and end of each task, in seconds since the start of the simulation."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]


def simulate(tasks: Sequence[Task], both_ways_share: float) -> TaskTimes:
    """Simulate the tasks and return when each starts and ends.

    The clock jumps to the next moment at which any running task ends. Between two such moments
    every stream has a constant speed (`_stream_speeds`).
    """
    queues: list[list[int]] = [[] for _ in STREAMS]
    for number, task in enumerate(tasks):
        assert all(other < number for other in task.dependencies), (
            f"task {number} waits for later ones"
        )
        queues[task.stream].append(number)
    heads = [0] * len(STREAMS)
    left = [-1.0] * len(STREAMS)
    """Remaining seconds of the task that each stream runs; negative if it runs none."""
    starts = [0.0] * len(tasks)
    ends = [-1.0] * len(tasks)
    now = 0.0
    done = 0
    while done < len(tasks):
        for stream, queue in enumerate(queues):
            if left[stream] < 0 and heads[stream] < len(queue):
                number = queue[heads[stream]]
                if all(ends[other] >= 0 for other in tasks[number].dependencies):
                    left[stream] = tasks[number].seconds
                    starts[number] = now
        speeds = _stream_speeds(left, both_ways_share)
        running = [stream for stream, speed in enumerate(speeds) if speed > 0]
        assert running, "tasks wait for each other"
        elapsed = min(left[stream] / speeds[stream] for stream in running)
        now += elapsed
        for stream in running:
            left[stream] -= elapsed * speeds[stream]
            if left[stream] <= 1e-12:
                left[stream] = -1.0
                ends[queues[stream][heads[stream]]] = now
                heads[stream] += 1
                done += 1
    return TaskTimes(tuple(starts), tuple(ends))


def _stream_speeds(left: Sequence[float], both_ways_share: float) -> list[float]:
    """Return each stream's speed relative to running alone; 0 if it has no running task.

    With n incoming copies at the same time (weights, activations), and copies in both directions:

        incoming copy = both_ways_share / n      outgoing copy = both_ways_share      others = 1
    """
    speeds = [0.0 if seconds < 0 else 1.0 for seconds in left]
    incoming = sum(speeds[stream] for stream in INWARD)
    share = both_ways_share if incoming and speeds[ACTIVATIONS_OUT] else 1.0
    for stream in INWARD:
        speeds[stream] *= share / max(incoming, 1.0)
    speeds[ACTIVATIONS_OUT] *= share
    return speeds


# From a candidate to tasks


@dataclass(frozen=True, slots=True)
class _Pass:
    """Time and launches of a forward or backward: of one block, or of all outside of blocks."""

    seconds: float
    launch_s: float
    """CPU seconds to launch the kernels of the pass."""
    queued: float = 0.0
    """Number of entries in the launch queue."""

    def part(self, count: int) -> _Pass:
        """Return one of `count` equal parts of the pass."""
        return _Pass(self.seconds / count, self.launch_s / count, self.queued / count)


def _passes(
    mode: ModeCosts, launch_s: tuple[float, float], compiled: bool = False
) -> tuple[_Pass, _Pass]:
    """Return the forward and the backward pass of a block, with their launches."""
    forward_s, backward_s = launch_s
    entries = 1.0 if compiled else LAUNCHES_PER_EAGER_KERNEL
    return (
        _Pass(mode.forward.total, forward_s, entries * mode.forward_kernels),
        _Pass(mode.backward.total, backward_s, entries * mode.backward_kernels),
    )


@dataclass
class _StepTasks:
    """Builds the list of tasks to simulate for a candidate plan's steps, in queueing order."""

    costs: ModelCosts
    candidate: PlanCandidate
    rates: EffectiveRates
    optimizer_nbytes: int
    num_steps: int
    adds_up: bool = True
    """True if replicas add up their gradients after these micro-batches."""
    tasks: list[Task] = field(default_factory=list)
    first_of_last_step: int = 0
    """Index of the first task of the last step."""
    last_compute: int = -1
    """Index of the last compute task so far."""

    def __post_init__(self) -> None:
        candidate, rates = self.candidate, self.rates
        streamed = candidate.streamed
        order = list(streamed) + list(streamed[-2::-1])
        # A block that is used twice in a row is fetched once: the last one of forward, and the
        # first one between two steps.
        uses = order + (order[1:] * (self.num_steps - 1) if len(streamed) > 1 else [])
        self._fetches = iter(fetches(uses, candidate.slots) if streamed else [])
        self._fetch_task: dict[int, int] = {}
        """For each streamed block, index of the latest task that fetches its weights."""
        self._block_in_use: int | None = None
        # An update reads and writes the weights, reads their gradients, and reads and writes the
        # optimizer's state. Its time is divided by the number of micro-batches.
        division = self.costs.division
        trained = self.costs.trained_nbytes
        if division is not None and division.sizes.choice.is_sharded:
            trained = division.sizes.trained_nbytes
        traffic = 3 * trained + 2 * self.optimizer_nbytes
        self._update_s = traffic / rates.memory / candidate.accumulation
        if "optimizer" in candidate.managed:  # its time over the link contains this
            self._update_s -= 2 * self.optimizer_nbytes / rates.memory / candidate.accumulation
        moved = candidate.host_state * self.optimizer_nbytes / candidate.accumulation
        self.state_in_s, self.state_out_s = (
            moved / rate for rate in (rates.link_in, rates.link_out)
        )
        # State moves in both directions while the update computes; the slowest of them decides.
        link_s = max(self.state_in_s, self.state_out_s) / rates.both_ways_share
        self.wait_state_s = max(0.0, link_s - self._update_s)
        self.exchange_s = 0.0
        """Seconds of the exchanges of tokens, which compute waits for."""
        self._gather_task: dict[int, int] = {}
        """For each gathered block, index of the task that gathers it. ROOT stands for everything
        outside of blocks."""
        self._reductions: list[int] = []
        """Indices of the last tasks of each unit that reduces its gradients in this step."""
        if division is not None:
            self.exchange_s = 2 * sum(unit.exchange_s for unit in division.blocks)
            if division.update_s:  # on the CPU, and the GPU waits
                self.wait_state_s, self._update_s = division.update_s / candidate.accumulation, 0.0
        outside = self.costs.outside
        self._outside_s = outside.forward.total, outside.backward.total
        self._offloaded = {
            index: nbytes
            for index, (block, plan) in enumerate(
                zip(self.costs.blocks, candidate.blocks, strict=True)
            )
            if (nbytes := block.offloaded_nbytes(plan, candidate.compiled))
        }
        """Bytes of offloaded activations by block index, for blocks that offload any."""
        self._launch_s = self._launch_seconds()
        outside_launch_s = outside.forward_host_s, outside.backward_host_s
        self._outside_launch_s = outside_launch_s if self._launch_s else (0.0, 0.0)
        self._compute_tasks: list[int] = []
        self._queued: list[float] = []
        """For each compute task, the number of entries in the launch queue up to its end, counted
        from the start of the simulation."""
        self._events = 0.0
        """Operations on events since the last compute task."""
        self._last_launch = -1

    def _launch_seconds(self) -> list[tuple[float, float]]:
        """Return the CPU seconds to launch each block's forward and backward.

        The list is empty if launching is faster than computing in every block: then the host is
        always ahead of the device and need not be simulated.
        """
        found, is_behind = [], False
        has_ring = bool(self.candidate.streamed)
        for index, plan in enumerate(self.candidate.blocks):
            mode = self.costs.blocks[index].costs_of(plan.activations, self.candidate.compiled)
            hooks = self.rates.host.hook_seconds(
                mode.num_saved if plan.activations in ("keep", "offload") else 0.0,
                streamed=plan.weights == "streamed",
                packed=has_ring,
                sent=index in self._offloaded,
            )
            forward_s = mode.forward_host_s + hooks[0]
            backward_s = mode.backward_host_s + hooks[1]
            found.append((forward_s, backward_s))
            is_behind |= forward_s > mode.forward.total or backward_s > mode.backward.total
        return found if is_behind else []

    @property
    def outside_s(self) -> float:
        """Compute time outside of blocks in seconds, including the optimizer's update."""
        return sum(self._outside_s) + self._update_s

    def seconds_of(self, *streams: int) -> float:
        """Return the total seconds of the last step's tasks on these streams."""
        last_step = self.tasks[self.first_of_last_step :]
        return sum(task.seconds for task in last_step if task.stream in streams)

    def write_step(self) -> None:
        """Add the tasks of one step: forward, loss, backward and the optimizer's update."""
        self.first_of_last_step = len(self.tasks)
        copies_out: dict[int, list[int]] = {}
        """For each block, indices of the tasks that copy its activations to the host."""
        outside_forward, outside_backward = _passes(self.costs.outside, self._outside_launch_s)
        self._gather_task, self._reductions = {}, []
        self._gather_ahead(ROOT, +1)
        self._compute(outside_forward, self._gathered(ROOT))
        for index, plan in enumerate(self.candidate.blocks):
            self._queue_fetches(index)
            self._gather_ahead(index, +1)
            dependencies = self._weights_of(index) + self._gathered(index)
            # Device memory of offloaded activations is freed once compute has waited for the copy.
            if index - MAX_BLOCKS_IN_FLIGHT in copies_out:
                dependencies.append(copies_out[index - MAX_BLOCKS_IN_FLIGHT][-1])
            forward, _ = self._passes_of(index)
            num_parts = self._num_parts(index, plan)
            for part in range(num_parts):
                self._compute(forward.part(num_parts), () if part else dependencies)
                if index in self._offloaded:
                    copies_out.setdefault(index, []).append(self._copy_out(index, num_parts))
        self._compute(outside_backward)
        self._write_backward(copies_out)
        launch_s = self.costs.optimizer_host_s / self.candidate.accumulation
        update_s = self._update_s + self.wait_state_s
        self._reduce(ROOT)
        self._compute(_Pass(update_s, launch_s if self._launch_s else 0.0), self._reductions)

    def _write_backward(self, copies_out: dict[int, list[int]]) -> None:
        last, distance = len(self.candidate.blocks) - 1, self.candidate.activation_prefetch
        # Blocks that backward needs while their copy is still in flight never left the device.
        never_left = last - min(MAX_BLOCKS_IN_FLIGHT, 1 + distance)
        copies_in = {index: [-1] for index in copies_out if index > never_left}
        division = self.costs.division
        if division is not None and division.sizes.choice.reshard:
            self._gather_task = {ROOT: -1}
        for index in range(last, -1, -1):
            for near in range(index, max(-1, index - 1 - distance), -1):
                if near in copies_out and near not in copies_in:
                    copies_in[near] = self._copy_in(near, copies_out[near])
            self._queue_fetches(index)
            self._gather_ahead(index, -1)
            dependencies = self._weights_of(index) + self._gathered(index)
            if len(self._reductions) > 1:  # at most one block's gradients are being reduced
                dependencies.append(self._reductions[-2])
            _, backward = self._passes_of(index)
            arrivals = copies_in.get(index, [-1])
            for part, arrival in enumerate(arrivals):
                self._compute(
                    backward.part(len(arrivals)), [arrival, *(() if part else dependencies)]
                )
            self._reduce(index)

    def _passes_of(self, index: int) -> tuple[_Pass, _Pass]:
        plan, block = self.candidate.blocks[index], self.costs.blocks[index]
        mode = block.costs_of(plan.activations, self.candidate.compiled)
        launch_s = self._launch_s[index] if self._launch_s else (0.0, 0.0)
        passes = _passes(mode, launch_s, self.candidate.compiled)
        if not self.exchange_s:
            return passes
        wait_s = self._traffic(index).exchange_s
        forward, backward = (replace(one, seconds=one.seconds + wait_s) for one in passes)
        return forward, backward

    def _traffic(self, index: int) -> UnitTraffic:
        division = self.costs.division
        assert division is not None, "no ranks to exchange anything with"
        return division.root if index == ROOT else division.blocks[index]

    def _gather_ahead(self, index: int, direction: int) -> None:
        """Add tasks that gather a unit and those that are prefetched with it.

        They start with the unit's own pass, because the pass before it frees the memory. The first
        block is gathered together with the root.
        """
        division = self.costs.division
        if division is None or not division.sizes.choice.is_sharded:
            return
        start = 0 if index == ROOT else index
        count = division.sizes.choice.prefetch_blocks + (index != ROOT)
        units = [start + direction * ahead for ahead in range(count)]
        wanted = [ROOT, *units] if index == ROOT else units
        for unit in wanted:
            if unit in self._gather_task or not ROOT <= unit < len(division.blocks):
                continue
            traffic, ready = self._traffic(unit), [self.last_compute, self._last_launch]
            if traffic.fetch_s:
                ready = [self._add(WEIGHTS_IN, traffic.fetch_s, ready)]
            self._gather_task[unit] = self._add(COLLECTIVES, traffic.gather_s, ready)

    def _gathered(self, index: int) -> list[int]:
        return [self._gather_task[index]] if index in self._gather_task else []

    def _reduce(self, index: int) -> None:
        """Add tasks that reduce a unit's gradients over ranks, after its backward."""
        if self.costs.division is None:
            return
        traffic, last = self._traffic(index), self.last_compute
        if traffic.reduce_s:
            last = self._add(COLLECTIVES, traffic.reduce_s, [last])
        if traffic.all_reduce_s and self.adds_up:
            stream = COLLECTIVES if self.costs.division.is_one_network else ALL_REDUCE
            last = self._add(stream, traffic.all_reduce_s, [last])
        if traffic.send_s:
            last = self._add(ACTIVATIONS_OUT, traffic.send_s, [last])
        if last != self.last_compute:
            self._reductions.append(last)

    def _num_parts(self, index: int, plan: BlockPlan) -> int:
        """Return the number of copies in which a block's activations are sent to the host.

        An eager block sends its activations while it runs. A compiled block returns all of them at
        its end, and an offloaded input is a single tensor.
        """
        leaves_early = plan.activations == "offload" and not self.candidate.compiled
        return EAGER_COPY_PARTS if index in self._offloaded and leaves_early else 1

    def _copies_in_part(self, index: int, num_parts: int) -> float:
        """Return the number of copies in a real run for each copy of the simulation."""
        if num_parts == 1:
            return 1.0
        mode = self.costs.blocks[index].costs_of("offload", self.candidate.compiled)
        return max(1.0, mode.num_saved / num_parts)

    def _copy_out(self, index: int, num_parts: int) -> int:
        """Add a task that copies a block's activations, or one part, to the host; return its index.

        It starts after the last compute task.
        """
        seconds = self._offloaded[index] / self.rates.link_out / num_parts
        self._events += EVENTS_PER_COPY * self._copies_in_part(index, num_parts)
        return self._add(ACTIVATIONS_OUT, seconds, [self.last_compute, self._last_launch])

    def _copy_in(self, index: int, copies_out: list[int]) -> list[int]:
        """Add tasks that copy a block's activations back to the device; return their indices.

        They start after the last compute task, which frees the memory that they need.
        """
        num_parts = len(copies_out)
        seconds = self._offloaded[index] / self.rates.link_in / num_parts
        self._events += EVENTS_PER_COPY * self._copies_in_part(index, num_parts) * num_parts
        dependencies = [copies_out[-1], self.last_compute, self._last_launch]
        return [self._add(ACTIVATIONS_IN, seconds, dependencies) for _ in copies_out]

    def _queue_fetches(self, index: int) -> None:
        """Add the copies that the weight ring starts when this block is about to be used."""
        is_streamed = self.candidate.blocks[index].weights == "streamed"
        if not is_streamed or index == self._block_in_use:
            return
        self._block_in_use = index
        for block in next(self._fetches):
            seconds = self.costs.blocks[block].frozen_nbytes / self.rates.link_in
            dependencies = [self.last_compute, self._last_launch]
            self._fetch_task[block] = self._add(WEIGHTS_IN, seconds, dependencies)
            self._events += EVENTS_PER_COPY

    def _weights_of(self, index: int) -> list[int]:
        return [self._fetch_task[index]] if index in self._fetch_task else []

    def _compute(self, work: _Pass, dependencies: Sequence[int] = ()) -> None:
        """Add a compute task for a pass, and a host task that launches its kernels.

        The pass starts once the kernels of the previous pass are launched; its own launches overlap
        with it. The host waits while the launch queue is full.
        """
        previous_launch = self._last_launch
        launched = self._queued[-1] if self._queued else 0.0
        if work.launch_s:
            queue_full: list[int] = []
            if launched > LAUNCH_QUEUE_DEPTH:
                place = bisect_left(self._queued, launched - LAUNCH_QUEUE_DEPTH)
                queue_full = [self._compute_tasks[place]]
            self._last_launch = self._add(HOST, work.launch_s, queue_full)
        self.last_compute = self._add(COMPUTE, work.seconds, [*dependencies, previous_launch])
        self._compute_tasks.append(self.last_compute)
        self._queued.append(launched + work.queued + self._events)
        self._events = 0.0

    def _add(self, stream: int, seconds: float, dependencies: list[int]) -> int:
        known = tuple(other for other in dependencies if other >= 0)
        self.tasks.append(Task(stream, seconds, known))
        return len(self.tasks) - 1


# The ring's fetches


@dataclass(slots=True)
class _SimulatedSlot:
    """A slot of the weight ring without memory, to simulate which block is fetched into it."""

    block: int | None = None

    def is_in_use(self) -> bool:
        """Return False: in the simulation no tensor outlives its block."""
        return False


def fetches(uses: Sequence[int], num_slots: int) -> list[list[int]]:
    """Simulate a weight ring: return, for each use of a block, which blocks are fetched before it.

    `uses` lists block indices in the order in which they are used.
    """
    slots = [_SimulatedSlot() for _ in range(num_slots)]
    queued: list[list[int]] = []
    for block, ranks in zip(uses, _upcoming(uses), strict=True):
        now: list[int] = []
        if all(slot.block != block for slot in slots):
            slot = slot_to_refill(slots, ranks, block)
            assert slot is not None, f"{num_slots} slots leave no room for block {block}"
            slot.block = block
            now.append(block)
        for other, slot in prefetches(slots, ranks, block):
            slot.block = other
            now.append(other)
        queued.append(now)
    return queued


def _upcoming(uses: Sequence[int]) -> list[dict[int, int]]:
    """Return, for each use of a block, the order in which blocks are used after it.

    Each dictionary maps a block to its position in that order; 0 is used next.
    """
    found: list[dict[int, int]] = []
    order: list[int] = []
    for block in reversed(uses):
        found.append({other: rank for rank, other in enumerate(order)})
        order = [block, *(other for other in order if other != block)]
    return found[::-1]
