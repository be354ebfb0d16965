"""Simulated time: a clock of the host, and queues that work waits in.

Each stream, each direction of a link and the kernels of a device are queues. Work starts when the
host has issued it and everything it needs is free.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple


class Queue(NamedTuple):
    """Something that does one thing at a time: a stream, a copy direction, a device's kernels."""

    kind: str
    number: int


class Timeline:
    """When everything is free again; `now_s` is the host's own time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_at: dict[Queue, float] = defaultdict(float)

    def run(self, queues: tuple[Queue, ...], seconds: float) -> None:
        """Work that holds all of these queues for a time."""
        start = max(self.now_s, *(self._free_at[queue] for queue in queues))
        for queue in queues:
            self._free_at[queue] = start + seconds

    def transfer(
        self, queues: tuple[Queue, ...], opposite: Queue, seconds: float, share: float
    ) -> float:
        """A copy of so many seconds, `share` as fast while the opposite direction is busy too."""
        start = max(self.now_s, *(self._free_at[queue] for queue in queues))
        crowded = max(0.0, self._free_at[opposite] - start)
        if opposite not in queues and crowded > 0:
            seconds += min(crowded, seconds / share) * (1 - share)
        for queue in queues:
            self._free_at[queue] = start + seconds
        return seconds

    def wait(self, waiting: Queue, other: Queue) -> None:
        """One queue does nothing until the other has done what it has now (an event)."""
        self._free_at[waiting] = max(self._free_at[waiting], self._free_at[other])

    def synchronize(self, queue: Queue | None) -> float:
        """The host waits for one queue, or for all; its time afterwards."""
        ends = self._free_at.values() if queue is None else (self._free_at[queue],)
        self.now_s = max(self.now_s, *ends, 0.0)
        return self.now_s
