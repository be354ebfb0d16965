"""How much a staged data set may take: the user's limit, and always what the host can spare."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import DataError
from gracetune.memory.host import read_host
from gracetune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.memory.arena import ArenaFullError

RESERVE_NBYTES = 4 * GIB
RESERVE_SHARE = 0.1
"""What staging leaves to everyone else: this much, or this share of a small machine."""
WATCH_NBYTES = 256 * MIB
"""Stored bytes between two looks at the host: others take memory while we read."""


def host_room(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Bytes that could be staged now; negative where the reserve is gone already."""
    host = read_host(proc, sys, os.sysconf("SC_PAGE_SIZE"))
    return host.room_bytes() - min(RESERVE_NBYTES, int(RESERVE_SHARE * host.size_bytes()))


class StagingBudget:
    """The tighter of both limits, and the error that says what would fit."""

    def __init__(
        self,
        limit_gib: float | None,
        raw_nbytes: int,
        num_files: int,
        setting: str,
        room: Callable[[], int],
    ) -> None:
        """`raw_nbytes` and `num_files` are the whole data set, as far as it can be foretold."""
        self._limit_gib = limit_gib
        self._raw_total = raw_nbytes
        self._num_files = num_files
        self._setting = setting
        self._room = room
        self._lock = threading.Lock()
        self._raw = self._stored = self._watched = 0
        room_now = room()
        asked = None if limit_gib is None else int(limit_gib * GIB)
        self._is_the_users = asked is not None and asked <= room_now
        self.nbytes = asked if asked is not None and self._is_the_users else max(0, room_now)
        """The most that may be stored."""

    def check(self, least: int) -> None:
        """Before reading: `least` bytes are sure to be stored."""
        if least > self.nbytes:
            raise self._exceeded(least)

    def take(self, raw: int, stored: int) -> None:
        """While reading, from any thread: one more file of `raw` bytes takes `stored` bytes."""
        with self._lock:
            self._raw += raw
            self._stored += stored
            if self._stored > self.nbytes:
                raise self._exceeded(max(self._stored, self._stored * self._raw_total // self._raw))
            if self._stored - self._watched < WATCH_NBYTES:
                return
            self._watched = self._stored
        if self._room() < 0:
            raise self.out_of_memory("others have taken what the host must keep free")

    def out_of_memory(self, reason: str | None) -> DataError:
        """The error where the host itself ends before the limit does."""
        return DataError(
            f"{self._setting}: the host ran out of memory after {format_bytes(self._stored)} of "
            f"the data set were staged ({reason}). End what else runs on it, or read from disk "
            "with type: local."
        )

    def no_room(self, error: ArenaFullError) -> DataError:
        """The error where the kernel takes no more, for a reason that it gives."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EFBIG:
            return self.out_of_memory(str(error))
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = "" if most == resource.RLIM_INFINITY else f" of {format_bytes(most)}"
        return DataError(
            f"{self._setting}: a limit{limit} on the size of files (ulimit -f) ended staging after "
            f"{format_bytes(self._stored)} of the data set; what is staged lies in files in memory "
            f"({error}). Raise that limit, or read from disk with type: local."
        )

    def _exceeded(self, need: int) -> DataError:
        fitting = min(self._num_files - 1, self._num_files * self.nbytes // need)
        limit = (
            f"{self._setting}.in_memory.memory_limit_gb is {self._limit_gib:g}"
            if self._is_the_users
            else f"{self._setting}: this machine has {format_bytes(self.nbytes)} to spare for data"
        )
        raise_it = "Raise the limit" if self._is_the_users else "Free memory on this machine"
        return DataError(
            f"{limit}; the data set needs about {need / GIB:.3g} GiB, so about {fitting:,} of its "
            f"{self._num_files:,} files would fit. {raise_it}, set in_memory.compression: zstd "
            "where the files are not compressed already, or read from disk with type: local."
        )
