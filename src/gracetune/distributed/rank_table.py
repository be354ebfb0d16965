"""The records that ranks publish about themselves, and the rules that tell which rank is lost.

`heartbeat.py` exchanges the heartbeats and applies the rules.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.distributed.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A record that a rank publishes about itself."""

    pid: int
    birth: int | None
    """Start time of the process, in clock ticks since boot; differs if the pid was reused."""
    count: int = 0
    """The number of heartbeats before this one."""
    state: Literal["running", "ended", "failed"] = "running"
    activity: str = "the start"
    """The newest sign of progress, such as `step 12`."""
    idle_s: float = 0.0
    """Seconds since that sign of progress."""
    error: str = ""
    """The error of a failed rank or, if it failed because of another rank, the text about that."""
    is_cause: bool = True
    """False if the rank failed because of another rank."""
    exit_code: int = 0
    has_seen_failure: bool = False
    """True if the rank knows that another rank has failed."""

    def encode(self) -> str:
        """Return the heartbeat as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that can no longer take part in the run."""

    rank: int
    text: str
    """The rank, its host and process, and what happened to it."""
    exit_code: int = 1


class RankTable:
    """The newest heartbeat of each rank, and the rules that tell which rank is lost.

    `now` arguments are seconds of this rank's own clock.
    """

    def __init__(
        self,
        group: RankGroup,
        beats: Sequence[Heartbeat],
        stall_timeout_s: float,
        is_alive: Callable[[Heartbeat], bool],
        now: float = 0.0,
    ) -> None:
        self.beats = list(beats)
        self._group = group
        self._stall_timeout_s = stall_timeout_s
        self._is_alive = is_alive
        self._heard_at = [now] * len(beats)
        self._read_at = now
        self._dead_since: dict[int, float] = {}

    def update(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Store the heartbeats that were read from the store."""
        for rank, beat in enumerate(beats):
            if beat.count != self.beats[rank].count:
                self._heard_at[rank] = now
        self.beats = list(beats)
        self._read_at = now

    def touch(self, now: float) -> None:
        """Remember that the store answered, and that no rank has ended or failed meanwhile."""
        self._read_at = now

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self._group.world_size) if rank != self._group.rank]

    @property
    def running(self) -> list[int]:
        """The other ranks that have neither ended nor failed."""
        return [rank for rank in self.others if self.beats[rank].state == "running"]

    def find_lost(self, now: float, store_error: str = "") -> LostRank | None:
        """Return the rank that is lost, or None; the most informative reason comes first.

        `store_error` is the error with which the connection to the store, on rank 0, has ended.
        """
        failed = [rank for rank in self.others if self.beats[rank].state == "failed"]
        for rank in failed:
            if self.beats[rank].is_cause:
                return self._failed(rank, now)
        for rank in self._find_dead(now, is_store_lost=bool(store_error) and 0 in self.running):
            return LostRank(
                rank,
                f"{self._name(rank, now)} has died without a message. It was killed, for example "
                "because the machine was out of memory, or it crashed",
            )
        for rank in failed:
            return LostRank(rank, self.beats[rank].error, self.beats[rank].exit_code)
        if 0 in self.running:
            silent = now - self._read_at
            if store_error:
                return LostRank(
                    0,
                    f"{self._name(0, now)} has closed its connections without a message "
                    f"({store_error}). It was killed, or it crashed",
                )
            if silent > self._stall_timeout_s:
                return self._stalled(0, silent)
        elif store_error:
            return None  # rank 0 has ended as it should, and its store with it
        late = {rank: now - self._heard_at[rank] for rank in self.running}
        stalled = [rank for rank, age in late.items() if age > self._stall_timeout_s]
        if stalled:
            rank = max(stalled, key=late.__getitem__)
            return self._stalled(rank, late[rank])
        return None

    def find_present(self, now: float, max_age_s: float) -> list[int]:
        """Return the other ranks that have neither ended nor failed nor disappeared."""
        return [
            rank
            for rank in self.running
            if now - self._heard_at[rank] <= max_age_s
            and (rank not in self._group.local_ranks or self._is_alive(self.beats[rank]))
        ]

    def most_behind(self, now: float, heartbeat_s: float, is_timeout: bool) -> LostRank | None:
        """Return the rank that probably is the reason for an error of torch.distributed, or None.

        That is a rank whose heartbeats are late; after a timeout, the rank that made no progress
        for the longest time.
        """
        late = {rank: now - self._heard_at[rank] for rank in self.running}
        rank = max(late, key=late.__getitem__, default=None)
        if rank is not None and late[rank] > 2 * heartbeat_s:
            return self._stalled(rank, late[rank])
        if not is_timeout:
            return None
        idle = {rank: self.beats[rank].idle_s + late[rank] for rank in late}
        rank = max(idle, key=idle.__getitem__, default=None)
        if rank is None:
            return None
        text = f"{self._name(rank, now)} has made no progress for {idle[rank]:.0f} s"
        return LostRank(rank, f"{text}, and the other ranks have waited for it too long")

    def _find_dead(self, now: float, *, is_store_lost: bool) -> list[int]:
        """Return ranks of this machine whose process has gone without saying that it ended.

        A rank publishes its end just before its process ends, so the store must have answered
        since the process was missed. A store that is lost will not answer; it is lost with rank 0,
        which waits for the others before it ends.
        """
        dead = []
        for rank in self.running:
            if rank not in self._group.local_ranks or self._is_alive(self.beats[rank]):
                continue
            since = self._dead_since.setdefault(rank, now)
            if self._read_at > since or is_store_lost:
                dead.append(rank)
        return dead

    def _failed(self, rank: int, now: float) -> LostRank:
        beat = self.beats[rank]
        return LostRank(rank, f"{self._name(rank, now)} has failed: {beat.error}", beat.exit_code)

    def _stalled(self, rank: int, seconds: float) -> LostRank:
        beat = self.beats[rank]
        return LostRank(
            rank,
            f"{self._group.name(rank)} (process {beat.pid}) has sent no heartbeat for "
            f"{seconds:.0f} s; the last one was at {beat.activity}. The process was stopped, or "
            "its machine or network is down",
        )

    def _name(self, rank: int, now: float) -> str:
        """Return the rank, its host and process, and its newest activity, for messages."""
        beat, age = self.beats[rank], now - self._heard_at[rank]
        return f"{self._group.name(rank)} (process {beat.pid}, {age:.0f} s ago at {beat.activity})"
