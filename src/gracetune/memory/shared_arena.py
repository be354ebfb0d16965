"""Host memory for many byte strings, which every process of a machine can map.

It is made of anonymous files (memfd): they have no names, so nothing is left when the last process
ends, however that ends. Bytes are written, never copied through a mapping, so no page faults and
none is zeroed first; each writer has a segment of its own, because the kernel lets one in at a
time. Once sealed an arena cannot be changed by anyone, and is read in place.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import threading
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gracetune.atomic_files import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""How a file system says that the kernel cannot copy from it directly."""
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
"""How it says that no more can be written: memory is full, or files may not grow so large."""
_COPY_NBYTES = 512 * 1024
"""The buffer where it cannot: large enough for a disk, small enough for a core's cache."""
OFFSET_BITS = 44
"""A place is the number of a segment and an offset of so many bits: segments of up to 16 TiB."""
OFFSET_MASK = (1 << OFFSET_BITS) - 1


class ArenaFullError(Exception):
    """The machine has no memory left; who fills the arena tells the user what to do."""


class ArenaWriter:
    """An arena while it is filled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hands: list[SegmentWriter] = []
        self._free: list[SegmentWriter] = []

    @contextmanager
    def segment_writer(self) -> Iterator[SegmentWriter]:
        """A way in that no one else uses meanwhile; there are as many as were needed at once."""
        with self._lock:
            if self._free:
                hand = self._free.pop()
            else:
                hand = SegmentWriter(len(self._hands))
                self._hands.append(hand)
        try:
            yield hand
        finally:
            with self._lock:
                self._free.append(hand)

    def seal(self) -> Arena:
        """The finished arena. Nothing can write to it from here on, not even another process."""
        return Arena([hand.seal() for hand in self._hands])


class SegmentWriter:
    """Fills one segment from its start, without gaps."""

    def __init__(self, number: int) -> None:
        self._fd = os.memfd_create("gracetune-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._base = number << OFFSET_BITS
        self._end = 0

    def write(self, data: bytes | memoryview) -> int:
        """Put `data` behind all else; its place."""
        place = self._base + self._end
        left = memoryview(data)
        try:
            while left:
                done = os.write(self._fd, left)
                left = left[done:]
                self._end += done
        except OSError as error:
            raise ArenaFullError(error.strerror) from error
        return place

    def write_with(self, write: Callable[[int], int]) -> int:
        """Let `write` put bytes behind all else, through the descriptor that it is given; their
        place. It tells how many they were; what it raises is that there was no room for them."""
        place = self._base + self._end
        try:
            self._end += write(self._fd)
        except OSError as error:
            raise ArenaFullError(error.strerror) from error
        return place

    def copy_from(
        self, source_fd: int, offset: int, nbytes: int, likely: int = -1
    ) -> tuple[int, int]:
        """Bring bytes of an open file here inside the kernel; their place and number.

        There are fewer than asked for where the file ends before. Where `likely` bytes have come,
        nobody asks whether there are more. OSError: it cannot be read.
        """
        done = 0
        while done < nbytes:
            try:
                sent = os.sendfile(self._fd, source_fd, offset + done, nbytes - done)
            except OSError as error:
                os.lseek(self._fd, self._end, os.SEEK_SET)  # what came is written over
                if error.errno in _NO_ROOM:
                    raise ArenaFullError(error.strerror) from error
                if done or error.errno not in _NO_SENDFILE:
                    raise
                return self._copy_through_a_buffer(source_fd, offset, nbytes)
            done += sent
            if sent == 0 or done == likely:
                break
        place = self._base + self._end
        self._end += done
        return place, done

    def seal(self) -> int:
        """Give the segment up for a descriptor that can only be read."""
        os.ftruncate(self._fd, self._end)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        descriptor = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._close()
        return descriptor

    def _copy_through_a_buffer(self, source_fd: int, offset: int, nbytes: int) -> tuple[int, int]:
        place = self._base + self._end
        done = 0
        while done < nbytes:
            data = os.pread(source_fd, min(_COPY_NBYTES, nbytes - done), offset + done)
            if not data:
                break
            self.write(data)
            done += len(data)
        return place, done


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """Where another process of this machine finds an arena, as long as its holder lives."""

    pid: int
    segments: tuple[tuple[int, int, int], ...]
    """Descriptor, device and inode of each: processes and descriptors are numbered again."""


class Arena:
    """Sealed segments, mapped for reading. A fork inherits them; others come with a ticket."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Takes over descriptors that were opened for reading."""
        self._fds = tuple(descriptors)
        for descriptor in self._fds:
            weakref.finalize(self, os.close, descriptor)
        self.segments = tuple(_map(descriptor) for descriptor in self._fds)
        """Everything, in place; slices cost nothing and keep the mapping alive."""

    @classmethod
    def attach(cls, ticket: ArenaHandle) -> Arena:
        """Map what another process holds; OSError where it is gone or not ours to see."""
        opened: list[int] = []
        try:
            for descriptor, *identity in ticket.segments:
                opened.append(_open_again(f"/proc/{ticket.pid}/fd/{descriptor}", tuple(identity)))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return cls(opened)

    def view(self, place: int, nbytes: int) -> memoryview:
        """What `write` or `copy_from` put at a place."""
        offset = place & OFFSET_MASK
        return self.segments[place >> OFFSET_BITS][offset : offset + nbytes]

    @property
    def handle(self) -> ArenaHandle:
        """For a process that is neither this one nor its fork."""
        return ArenaHandle(os.getpid(), tuple((fd, *_identity(os.fstat(fd))) for fd in self._fds))

    @property
    def resident_nbytes(self) -> int:
        """What the machine spends on it, however many processes map it."""
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._fds)


def _map(descriptor: int) -> memoryview:
    if os.fstat(descriptor).st_size == 0:
        return memoryview(b"")  # nothing cannot be mapped
    return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))


def _open_again(path: str, identity: tuple[int, ...]) -> int:
    # Looked at before it is opened: what a number leads to by now may be a pipe or a device.
    if _identity(os.stat(path)) == identity:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if _identity(os.fstat(descriptor)) == identity:
            return descriptor
        os.close(descriptor)
    raise FileNotFoundError(f"{path} is no longer the arena it was")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# ------------------------------------------------------------------------------------------
# One copy a machine: of all processes that want the same arena, one makes it, the others map it.
#
# They meet in a folder. Whoever gets the lock looks for an offer; without one it makes the arena
# and
# leaves an offer. The kernel releases the lock of a process that dies, so the next one takes over.


class SharedArena(NamedTuple):
    """An arena, and how this process came by it."""

    arena: Arena
    owner_pid: int
    """The process that filled it."""
    attach_error: str | None
    """Why an arena that is there could not be mapped; none: it was, or there was none."""

    @property
    def is_owner(self) -> bool:
        """Whether this process made it."""
        return self.owner_pid == os.getpid()


def share_arena(
    folder: Path,
    name: str,
    make: Callable[[], Arena],
    waiting: Callable[[], None],
    proc: Path = Path("/proc"),
) -> SharedArena:
    """Map what another process of this machine offers under `name`, or make and offer it.

    `waiting` is called once where another process is at it. `name` must say all that the contents
    depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}-{pid_namespace_id(proc)}"
    with _alone(place.with_name(f"{place.name}.lock"), waiting):
        offer = place.with_name(f"{place.name}.json")
        refused = None
        ticket = _read(offer)
        # Who asks a second time wants what is there now, not what it made before.
        if ticket is not None and ticket.pid != os.getpid():
            try:
                return SharedArena(Arena.attach(ticket), ticket.pid, None)
            except FileNotFoundError:
                pass  # the number belongs to another process by now
            except PermissionError as error:
                refused = str(error)
        arena = make()
        write_text(offer, json.dumps(asdict(arena.handle)))
        return SharedArena(arena, os.getpid(), refused)


def pid_namespace_id(proc: Path) -> str:
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


def _read(offer: Path) -> ArenaHandle | None:
    """Offers are written whole, so one that does not read is not one of ours."""
    try:
        found = json.loads(offer.read_text(encoding="utf-8"))
        return ArenaHandle(int(found["pid"]), tuple((a, b, c) for a, b, c in found["segments"]))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
