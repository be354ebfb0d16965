"""The seconds of one step for one choice: its tasks, run through the timeline.

Some steps are run and the last is timed: the ring brings the first blocks of a step while the one
before still computes. Two will do, unless the host got ahead in the first and the second lived on
that, which steps in a row cannot.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from gracetune.offload.ring import prefetches, slot_to_refill
from gracetune.plan.result import ACTIVATION_PREFETCH, MAX_BLOCKS_IN_FLIGHT, Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.cost import ModeCosts, ModelCosts, PassSeconds
    from gracetune.plan.machines import EffectiveRates
    from gracetune.plan.result import BlockPlan


Stream = Literal["compute", "weights_in", "activations_in", "activations_out", "host"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
INWARD = (STREAMS.index("weights_in"), STREAMS.index("activations_in"))
OUTWARD = STREAMS.index("activations_out")
COMPUTE = STREAMS.index("compute")
HOST = STREAMS.index("host")


@dataclass(frozen=True, slots=True)
class Task:
    """Work of so many seconds, were it alone."""

    stream: int
    seconds: float
    dependencies: tuple[int, ...] = ()
    """Numbers of tasks that must be done first; each is smaller than this task's own."""


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """When each task began and ended."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]


def simulate(tasks: Sequence[Task], both_ways_share: float) -> TaskTimes:
    """Run the tasks in order of events."""
    queues: list[list[int]] = [[] for _ in STREAMS]
    for number, task in enumerate(tasks):
        assert all(other < number for other in task.dependencies), (
            f"task {number} waits for later ones"
        )
        queues[task.stream].append(number)
    heads = [0] * len(STREAMS)
    left = [-1.0] * len(STREAMS)
    """Seconds of work left of each lane's running task; below zero: none runs."""
    begins = [0.0] * len(tasks)
    ends = [-1.0] * len(tasks)
    now = 0.0
    done = 0
    while done < len(tasks):
        for lane, queue in enumerate(queues):
            if left[lane] < 0 and heads[lane] < len(queue):
                number = queue[heads[lane]]
                if all(ends[other] >= 0 for other in tasks[number].dependencies):
                    left[lane] = tasks[number].seconds
                    begins[number] = now
        rates = _rates(left, both_ways_share)
        running = [lane for lane, rate in enumerate(rates) if rate > 0]
        assert running, "tasks wait for each other"
        step = min(left[lane] / rates[lane] for lane in running)
        now += step
        for lane in running:
            left[lane] -= step * rates[lane]
            if left[lane] <= 1e-12:
                left[lane] = -1.0
                ends[queues[lane][heads[lane]]] = now
                heads[lane] += 1
                done += 1
    return TaskTimes(tuple(begins), tuple(ends))


def _rates(left: Sequence[float], both_ways_share: float) -> list[float]:
    """How fast each lane's task goes, of its speed alone; 0 where none runs."""
    rates = [0.0 if seconds < 0 else 1.0 for seconds in left]
    inward = sum(rates[lane] for lane in INWARD)
    share = both_ways_share if inward and rates[OUTWARD] else 1.0
    for lane in INWARD:
        rates[lane] *= share / max(inward, 1.0)
    rates[OUTWARD] *= share
    return rates


# ------------------------------------------------------------------------------------------
# The seconds of one step for one choice: its tasks, run through the timeline.
#
# Some steps are run and the last is timed: the ring brings the first blocks of a step while the one
# before still computes. Two will do, unless the host got ahead in the first and the second lived on
# that, which steps in a row cannot.


WEIGHTS_IN = STREAMS.index("weights_in")
ACTIVATIONS_IN = STREAMS.index("activations_in")
ACTIVATIONS_OUT = STREAMS.index("activations_out")
STEPS, MORE_STEPS = 2, 8
ROUNDING_S = 1e-9
QUEUE = 1021
"""Kernels that the host may have queued and the device not begun; whoever queues more has to wait.
Counted on an H200 with CUDA 13, whatever the kernels: as many as a channel of the driver takes."""
PARTS = 8
"""In which activations leave an eager block as they come to be, and come back as they are read: in
truth one tensor at a time."""


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """What is decided before anything is predicted."""

    blocks: tuple[BlockPlan, ...]
    batch: int
    accumulation: int
    slots: int
    compiled: bool
    host_state: float = 0.0
    """Share of the optimizer's state that lives in host memory."""
    activation_prefetch: int = ACTIVATION_PREFETCH
    """Blocks whose offloaded activations are brought back before backward reaches them."""

    @property
    def streamed(self) -> tuple[int, ...]:
        """Blocks that pass through the ring."""
        return tuple(i for i, block in enumerate(self.blocks) if block.weights == "streamed")


def predict_seconds(
    costs: ModelCosts, choice: PlanCandidate, speeds: EffectiveRates, optimizer_nbytes: int
) -> Seconds:
    """How long a micro-batch takes, its share of the optimizer's update included."""
    for num_steps in (STEPS, MORE_STEPS):
        script = _Script(costs, choice, speeds, optimizer_nbytes, num_steps)
        for _ in range(num_steps):
            script.write_step()
        times = simulate(script.tasks, speeds.both_ways_share)
        first = script.first_of_last_step
        began = times.ends[first - 1] if first else 0.0
        step = times.ends[script.last_compute] - began
        short = script.seconds_of(HOST) - step
        if short < ROUNDING_S:
            break
    waits = {WEIGHTS_IN: 0.0, ACTIVATIONS_IN: 0.0, ACTIVATIONS_OUT: 0.0, HOST: max(0.0, short)}
    step += waits[HOST]
    free = began
    for number, task in enumerate(script.tasks):
        if task.stream != COMPUTE or number < first:
            continue
        if times.starts[number] > free:
            latest = max(task.dependencies, key=lambda other: times.ends[other])
            waits[script.tasks[latest].stream] += times.starts[number] - free
        free = times.ends[number]
    parts = _parts(costs, choice)
    return Seconds(
        step=step,
        gemm=parts.gemm,
        attention=parts.attention,
        elementwise=parts.elementwise,
        recompute=_recomputed(costs, choice),
        overhead=parts.gaps + script.outside_s,
        wait_weights=waits[WEIGHTS_IN],
        wait_activations=waits[ACTIVATIONS_IN] + waits[ACTIVATIONS_OUT],
        link_in=script.seconds_of(WEIGHTS_IN, ACTIVATIONS_IN) + script.state_in_s,
        link_out=script.seconds_of(ACTIVATIONS_OUT) + script.state_out_s,
        wait_state=script.wait_state_s,
        wait_host=waits[HOST],
    )


def lower_bound_seconds(costs: ModelCosts, choice: PlanCandidate, speeds: EffectiveRates) -> float:
    """What no order of events can beat: computing, queueing, or a direction of the link, alone."""
    computing = _parts(costs, choice).total + _recomputed(costs, choice)
    computing += costs.outside.forward.total + costs.outside.backward.total
    return max(
        computing,
        _least_queueing(costs, choice),
        _least_incoming(costs, choice) / speeds.link_in,
        _sent_before(costs, choice, MAX_BLOCKS_IN_FLIGHT) / speeds.link_out,
    )


def _least_queueing(costs: ModelCosts, choice: PlanCandidate) -> float:
    """The host's seconds for blocks."""
    ways = (
        block.costs_of(plan.activations, choice.compiled)
        for block, plan in zip(costs.blocks, choice.blocks, strict=True)
    )
    return sum(way.forward_host_s + way.backward_host_s for way in ways)


def _least_incoming(costs: ModelCosts, choice: PlanCandidate) -> float:
    """Bytes: weights that no slot has kept, and activations that have left."""
    weights = sorted(2 * [costs.blocks[index].frozen_nbytes for index in choice.streamed])
    uses = max(0, 2 * (len(choice.streamed) - choice.slots))
    return sum(weights[:uses]) + _sent_before(
        costs, choice, min(MAX_BLOCKS_IN_FLIGHT, 1 + choice.activation_prefetch)
    )


def _sent_before(costs: ModelCosts, choice: PlanCandidate, last: int) -> float:
    """Bytes that blocks send to host memory, all but the last ones, whose copies may not end."""
    first = len(choice.blocks) - last
    return sum(
        block.offloaded_nbytes(plan, choice.compiled)
        for block, plan in zip(costs.blocks[:first], choice.blocks[:first], strict=True)
    )


def _parts(costs: ModelCosts, choice: PlanCandidate) -> PassSeconds:
    total = None
    for block in costs.blocks:
        way = block.costs_of("keep", choice.compiled)
        both = way.forward + way.backward
        total = both if total is None else total + both
    assert total is not None, "a model without blocks"
    return total


def _recomputed(costs: ModelCosts, choice: PlanCandidate) -> float:
    return sum(
        block.recompute_seconds(plan.activations, choice.compiled)
        for block, plan in zip(costs.blocks, choice.blocks, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _BlockPass:
    """One way through a block, or through what is outside of them."""

    seconds: float
    queueing_s: float
    kernels: float = 0.0

    def part(self, of: int) -> _BlockPass:
        """One of so many equal ones."""
        return _BlockPass(self.seconds / of, self.queueing_s / of, self.kernels / of)


def _passes(way: ModeCosts, queueing_s: tuple[float, float]) -> tuple[_BlockPass, _BlockPass]:
    """There and back."""
    there, back = queueing_s
    return (
        _BlockPass(way.forward.total, there, way.forward_kernels),
        _BlockPass(way.backward.total, back, way.backward_kernels),
    )


@dataclass
class _Script:
    """Tasks in the order in which a step queues them."""

    costs: ModelCosts
    choice: PlanCandidate
    speeds: EffectiveRates
    optimizer_nbytes: int
    num_steps: int
    tasks: list[Task] = field(default_factory=list)
    first_of_last_step: int = 0
    last_compute: int = -1

    def __post_init__(self) -> None:
        streamed = self.choice.streamed
        order = list(streamed) + list(streamed[-2::-1])
        # What a turn uses twice in a row is one use, between steps too.
        uses = order + (order[1:] * (self.num_steps - 1) if len(streamed) > 1 else [])
        self._asked = iter(fetches(uses, self.choice.slots) if streamed else [])
        self._fetched: dict[int, int] = {}
        self._in_use: int | None = None
        outside = self.costs.outside
        traffic = 3 * self.costs.trained_nbytes + 2 * self.optimizer_nbytes
        self._update_s = traffic / self.speeds.memory / self.choice.accumulation
        moved = self.choice.host_state * self.optimizer_nbytes / self.choice.accumulation
        self.state_in_s, self.state_out_s = (
            moved / rate for rate in (self.speeds.link_in, self.speeds.link_out)
        )
        # Both ways at once, and kernels beside it: whatever is slowest is what the update takes.
        link_s = max(self.state_in_s, self.state_out_s) / self.speeds.both_ways_share
        self.wait_state_s = max(0.0, link_s - self._update_s)
        self._outside_s = outside.forward.total, outside.backward.total
        self._sent = {
            index: nbytes
            for index, (block, plan) in enumerate(
                zip(self.costs.blocks, self.choice.blocks, strict=True)
            )
            if (nbytes := block.offloaded_nbytes(plan, self.choice.compiled))
        }
        """What each block that sends anything sends."""
        self._queues = self._queueing()
        outside_s = outside.forward_host_s, outside.backward_host_s
        self._outside_queues = outside_s if self._queues else (0.0, 0.0)
        self._computed: list[int] = []
        self._kernels: list[float] = []
        """Of all passes up to each that is computed."""
        self._queued = -1

    def _queueing(self) -> list[tuple[float, float]]:
        """The host's seconds for each block, there and back; none where it is always ahead."""
        found, late = [], False
        rings = bool(self.choice.streamed)
        for index, plan in enumerate(self.choice.blocks):
            way = self.costs.blocks[index].costs_of(plan.activations, self.choice.compiled)
            hooks = self.speeds.host.hook_seconds(
                way.num_saved if plan.activations in ("keep", "offload") else 0.0,
                streamed=plan.weights == "streamed",
                packed=rings,
                sent=index in self._sent,
            )
            there, back = way.forward_host_s + hooks[0], way.backward_host_s + hooks[1]
            found.append((there, back))
            late |= there > way.forward.total or back > way.backward.total
        return found if late else []

    @property
    def outside_s(self) -> float:
        """What is spent outside of blocks."""
        return sum(self._outside_s) + self._update_s

    def seconds_of(self, *lanes: int) -> float:
        """How much work the last step gives to these lanes."""
        return sum(t.seconds for t in self.tasks[self.first_of_last_step :] if t.stream in lanes)

    def write_step(self) -> None:
        """Forward, backward, update."""
        self.first_of_last_step = len(self.tasks)
        out: dict[int, list[int]] = {}
        there, back = _passes(self.costs.outside, self._outside_queues)
        self._compute(there)
        for index, plan in enumerate(self.choice.blocks):
            self._use(index)
            after = list(self._weights(index))
            # Memory is only let go of when computing has waited for its copy.
            after += [out[i][-1] for i in (index - MAX_BLOCKS_IN_FLIGHT,) if i in out]
            forward, _ = self._passes_of(index)
            num_parts = self._num_parts(index, plan)
            for part in range(num_parts):
                self._compute(forward.part(num_parts), () if part else after)
                if index in self._sent:
                    out.setdefault(index, []).append(self._send(index, num_parts))
        self._compute(back)
        self._write_backward(out)
        queueing_s = self.costs.optimizer_host_s / self.choice.accumulation if self._queues else 0.0
        self._compute(_BlockPass(self._update_s + self.wait_state_s, queueing_s))

    def _write_backward(self, out: dict[int, list[int]]) -> None:
        last = len(self.choice.blocks) - 1
        # What is near when backward begins, and still on its way out, has never left.
        back = {
            i: [-1]
            for i in out
            if i > last - min(MAX_BLOCKS_IN_FLIGHT, 1 + self.choice.activation_prefetch)
        }
        for index in range(last, -1, -1):
            for near in range(index, max(-1, index - 1 - self.choice.activation_prefetch), -1):
                if near in out and near not in back:
                    back[near] = self._bring(near, out[near])
            self._use(index)
            after = list(self._weights(index))
            _, backward = self._passes_of(index)
            arrivals = back.get(index, [-1])
            for part, arrival in enumerate(arrivals):
                self._compute(backward.part(len(arrivals)), [arrival, *(() if part else after)])

    def _passes_of(self, index: int) -> tuple[_BlockPass, _BlockPass]:
        plan, block = self.choice.blocks[index], self.costs.blocks[index]
        way = block.costs_of(plan.activations, self.choice.compiled)
        return _passes(way, self._queues[index] if self._queues else (0.0, 0.0))

    def _num_parts(self, index: int, plan: BlockPlan) -> int:
        """A compiled block gives all at its end; of an input there is one."""
        comes_to_be = plan.activations == "offload" and not self.choice.compiled
        return PARTS if index in self._sent and comes_to_be else 1

    def _send(self, index: int, num_parts: int) -> int:
        """To host memory: what the last computation gave, when the host has got there."""
        seconds = self._sent[index] / self.speeds.link_out / num_parts
        return self._add(ACTIVATIONS_OUT, seconds, [self.last_compute, self._queued])

    def _bring(self, index: int, out: list[int]) -> list[int]:
        """Back to the device, into room that the last computation left."""
        seconds = self._sent[index] / self.speeds.link_in / len(out)
        after = [out[-1], self.last_compute, self._queued]
        return [self._add(ACTIVATIONS_IN, seconds, after) for _ in out]

    def _use(self, index: int) -> None:
        """Ask for weights ahead, as the ring does before a block runs."""
        if self.choice.blocks[index].weights != "streamed" or index == self._in_use:
            return
        self._in_use = index
        for block in next(self._asked):
            seconds = self.costs.blocks[block].frozen_nbytes / self.speeds.link_in
            after = [self.last_compute, self._queued]
            self._fetched[block] = self._add(WEIGHTS_IN, seconds, after)

    def _weights(self, index: int) -> tuple[int, ...]:
        return (self._fetched[index],) if index in self._fetched else ()

    def _compute(self, work: _BlockPass, after: Sequence[int] = ()) -> None:
        """A pass begins when the one before is queued, and the next when this one is."""
        before = self._queued
        sofar = self._kernels[-1] if self._kernels else 0.0
        if work.queueing_s:
            full = [] if sofar <= QUEUE else [self._computed[self._place(sofar - QUEUE)]]
            self._queued = self._add(HOST, work.queueing_s, full)
        self.last_compute = self._add(COMPUTE, work.seconds, [*after, before])
        self._computed.append(self.last_compute)
        self._kernels.append(sofar + work.kernels)

    def _place(self, kernels: float) -> int:
        """The pass with which so many kernels are done."""
        return bisect_left(self._kernels, kernels)

    def _add(self, lane: int, seconds: float, after: list[int]) -> int:
        known = tuple(other for other in after if other >= 0)
        self.tasks.append(Task(lane, seconds, known))
        return len(self.tasks) - 1


@dataclass(slots=True)
class _SimulatedSlot:
    """A slot of the ring without memory, for the ring's fetch policy."""

    block: int | None = None

    def held(self) -> bool:
        """Return False: in a simulated step no tensor outlives its block."""
        return False


def fetches(uses: Sequence[int], num_slots: int) -> list[list[int]]:
    """Return, for each use of a block, the blocks whose fetch the ring queues just before it."""
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
    """Return, for each use, the blocks used after it with their ranks, soonest first."""
    found: list[dict[int, int]] = []
    order: list[int] = []
    for block in reversed(uses):
        found.append({other: rank for rank, other in enumerate(order)})
        order = [block, *(other for other in order if other != block)]
    return found[::-1]
