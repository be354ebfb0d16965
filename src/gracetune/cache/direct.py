"""Reads past the page cache, many at once and without threads: the kernel's queue (Linux AIO).

A disk is as fast as its queue is long, and a thread that waits for each read takes more of the
CPU's time than the read does. Here a batch is one call to ask for it and one to wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from gracetune.cache.packing import Bytes

DEPTH = 128
"""Reads that the kernel has at once; more wait here."""
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""The numbers of io_setup, io_destroy, io_getevents and io_submit."""
_REQUEST = np.dtype(
    [
        ("ticket", "u8"),
        ("key_and_flags", "u8"),
        ("opcode_and_priority", "u4"),
        ("descriptor", "u4"),
        ("address", "u8"),
        ("nbytes", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags_and_event", "u8"),
    ]
)
"""`struct iocb`; all that is left at zero asks for a plain read."""
_EVENT = np.dtype([("ticket", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
"""`struct io_event`."""


class Wanted(NamedTuple):
    """So many bytes of an open file, for this memory: both and the offset in whole pages."""

    descriptor: int
    offset: int
    room: Bytes


class DirectQueue:
    """Reads that were begun, and what became of them; any thread."""

    def __init__(self, machine: str = os.uname().machine) -> None:
        self._numbers = _CALLS.get(machine)
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(0)
        self._tickets = count(1)
        self._begun: dict[int, Bytes] = {}
        """Memory that the disk writes to lives until it has."""
        self._done: dict[int, int] = {}
        self._state, self._reaping = threading.Lock(), threading.Lock()
        self.refusal = "" if self._numbers else f"none is known for {machine}"
        """Why the kernel has no queue for us; empty where it has, or was not asked."""

    def begin(self, wanted: Sequence[Wanted]) -> list[int] | None:
        """Ask for all; a ticket for each. None where the kernel has no queue for us."""
        requests = np.zeros(len(wanted), _REQUEST)
        requests["ticket"] = tickets = [next(self._tickets) for _ in wanted]
        requests["descriptor"] = [one.descriptor for one in wanted]
        requests["address"] = [one.room.ctypes.data for one in wanted]
        requests["nbytes"] = [one.room.nbytes for one in wanted]
        requests["offset"] = [one.offset for one in wanted]
        size = _REQUEST.itemsize
        places = np.arange(len(wanted), dtype=np.uint64) * size + requests.ctypes.data
        asked = 0
        try:
            while asked < len(wanted):
                with self._state:
                    if not self._is_open():
                        return None
                    taken = self._submit(places[asked:])
                    for place in range(asked, asked + taken):
                        self._begun[tickets[place]] = wanted[place].room
                asked += taken
                if not taken:
                    self._reap()
        except OSError:
            self.settle(tickets[:asked])
            raise
        return tickets

    def wait(self, ticket: int) -> int:
        """How many bytes came, once all that will come have."""
        while ticket not in self._done:
            assert ticket in self._begun or ticket in self._done, f"no read {ticket}"
            self._reap(ticket)
        result = self._done.pop(ticket)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def settle(self, tickets: Iterable[int]) -> None:
        """Wait until the disk writes nothing more for these, whatever became of them."""
        for ticket in tickets:
            while ticket in self._begun:
                self._reap(ticket)
            self._done.pop(ticket, None)

    def close(self) -> None:
        """Give the queue back when everything has come; who asks again gets another."""
        while self._begun:
            self._reap()
        with self._state:
            if self._context.value and not self._begun:
                self._release()
                self._context = ctypes.c_ulong(0)

    def _is_open(self) -> bool:
        """Whether there is a queue, and one is made where it was not asked for yet."""
        if self._context.value or self._numbers is None or self.refusal:
            return bool(self._context.value)
        setup, destroy, *_ = self._numbers
        context = ctypes.c_ulong(0)
        if self._call(setup, DEPTH, ctypes.byref(context)):
            self.refusal = os.strerror(ctypes.get_errno())
            return False
        self._context = context
        self._release = weakref.finalize(
            self, _destroy, self._call, destroy, context.value, os.getpid()
        )
        self._release.atexit = False
        return True

    def _submit(self, places: NDArray[np.uint64]) -> int:
        """How many the kernel took: none while it has as many as it may have."""
        assert self._numbers is not None
        submit, pointer = self._numbers[3], ctypes.c_void_p(places.ctypes.data)
        taken: int = self._call(submit, self._context, ctypes.c_long(len(places)), pointer)
        if taken < 0 and ctypes.get_errno() != errno.EAGAIN:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return max(0, taken)

    def _reap(self, ticket: int = 0) -> None:
        """Wait until something has come, unless nothing is on its way or this one is there."""
        with self._reaping:
            if not self._begun or ticket in self._done:
                return
            assert self._numbers is not None
            get, events = self._numbers[2], np.zeros(DEPTH, _EVENT)
            pointer, most = ctypes.c_void_p(events.ctypes.data), ctypes.c_long(DEPTH)
            came = self._call(get, self._context, ctypes.c_long(1), most, pointer, None)
            if came < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with self._state:
                for event in events[: max(0, came)].tolist():
                    self._done[event[0]] = event[2]
                    del self._begun[event[0]]


def _destroy(call: Callable[..., int], number: int, context: int, process: int) -> None:
    """A forked child may have a queue of its own by the same name."""
    if os.getpid() == process:
        call(number, ctypes.c_ulong(context))
