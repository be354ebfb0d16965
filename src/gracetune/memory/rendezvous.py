"""One copy a machine: of all processes that want the same arena, one makes it, the others map it.

They meet in a folder. Whoever gets the lock looks for an offer; without one it makes the arena and
leaves an offer. The kernel releases the lock of a process that dies, so the next one takes over.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gracetune.durable import write_text
from gracetune.memory.arena import Arena, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Shared(NamedTuple):
    """An arena, and how this process came by it."""

    arena: Arena
    made_by: int
    """The process that filled it."""
    refused: str | None
    """Why an arena that is there could not be mapped; none: it was, or there was none."""

    @property
    def is_ours(self) -> bool:
        """Whether this process made it."""
        return self.made_by == os.getpid()


def share(
    folder: Path,
    name: str,
    make: Callable[[], Arena],
    waiting: Callable[[], None],
    proc: Path = Path("/proc"),
) -> Shared:
    """Map what another process of this machine offers under `name`, or make and offer it.

    `waiting` is called once where another process is at it. `name` must say all that the contents
    depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}-{who_can_meet(proc)}"
    with _alone(place.with_name(f"{place.name}.lock"), waiting):
        offer = place.with_name(f"{place.name}.json")
        refused = None
        ticket = _read(offer)
        # Who asks a second time wants what is there now, not what it made before.
        if ticket is not None and ticket.pid != os.getpid():
            try:
                return Shared(Arena.attach(ticket), ticket.pid, None)
            except FileNotFoundError:
                pass  # the number belongs to another process by now
            except PermissionError as error:
                refused = str(error)
        arena = make()
        write_text(offer, json.dumps(asdict(arena.ticket)))
        return Shared(arena, os.getpid(), refused)


def who_can_meet(proc: Path) -> str:
    """The same text for processes that see each other's numbers: one boot, one pid namespace."""
    boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{(proc / 'self/ns/pid').stat().st_ino}"


@contextmanager
def _alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(offer: Path) -> Ticket | None:
    """Offers are written whole, so one that does not read is not one of ours."""
    try:
        found = json.loads(offer.read_text(encoding="utf-8"))
        return Ticket(int(found["pid"]), tuple((a, b, c) for a, b, c in found["segments"]))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
