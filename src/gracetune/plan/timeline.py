"""A discrete-event model of a step: computing, copies both ways, and the host that queues it all.

Tasks of a lane run one after the other; a task begins when its lane is free and all that it waits
for is done. Copies in one direction share the link, and both directions at once slow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

Lane = Literal["compute", "weights_in", "activations_in", "activations_out", "host"]
LANES: tuple[Lane, ...] = get_args(Lane)
INWARD = (LANES.index("weights_in"), LANES.index("activations_in"))
OUTWARD = LANES.index("activations_out")
COMPUTE = LANES.index("compute")
HOST = LANES.index("host")


@dataclass(frozen=True, slots=True)
class Task:
    """Work of so many seconds, were it alone."""

    lane: int
    seconds: float
    after: tuple[int, ...] = ()
    """Numbers of tasks that must be done first; each is smaller than this task's own."""


@dataclass(frozen=True, slots=True)
class Times:
    """When each task began and ended."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]


def simulate(tasks: Sequence[Task], both_ways_share: float) -> Times:
    """Run the tasks in order of events."""
    queues: list[list[int]] = [[] for _ in LANES]
    for number, task in enumerate(tasks):
        assert all(other < number for other in task.after), f"task {number} waits for later ones"
        queues[task.lane].append(number)
    heads = [0] * len(LANES)
    left = [-1.0] * len(LANES)
    """Seconds of work left of each lane's running task; below zero: none runs."""
    begins = [0.0] * len(tasks)
    ends = [-1.0] * len(tasks)
    now = 0.0
    done = 0
    while done < len(tasks):
        for lane, queue in enumerate(queues):
            if left[lane] < 0 and heads[lane] < len(queue):
                number = queue[heads[lane]]
                if all(ends[other] >= 0 for other in tasks[number].after):
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
    return Times(tuple(begins), tuple(ends))


def _rates(left: Sequence[float], both_ways_share: float) -> list[float]:
    """How fast each lane's task goes, of its speed alone; 0 where none runs."""
    rates = [0.0 if seconds < 0 else 1.0 for seconds in left]
    inward = sum(rates[lane] for lane in INWARD)
    share = both_ways_share if inward and rates[OUTWARD] else 1.0
    for lane in INWARD:
        rates[lane] *= share / max(inward, 1.0)
    rates[OUTWARD] *= share
    return rates
