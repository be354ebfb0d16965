"""An arena: host memory that is filled once, then mapped read-only by all processes of a machine.

An arena consists of anonymous files (memfd). They have no names, so the kernel frees them when the
last process that maps them ends, even if it was killed. Data is written with `write` or `sendfile`,
never through a mapping: that avoids page faults and zeroing. The kernel serializes writes to one
file, so each writer thread gets a segment of its own. A sealed arena cannot be changed by anyone.

`share_arena` gives all processes of a machine the same arena. They meet in a folder:

    lock NAME.lock
        NAME.json names a live arena  -> map it through /proc/PID/fd/FD
        otherwise                     -> build the arena, then write NAME.json
    unlock                               (the kernel unlocks if the process dies)

The folder is private: whoever can write to it decides which memory other processes map. So the
folder and its files must belong to this user, and no other user may write to them.

Other modules that manage host memory, and how they differ:

- hosts/shared_tensor_cache.py also keeps one copy per machine, but of a growing set of tensors
  that every process adds to and evicts. Both use `pid_namespace_id`, `exclusive_lock` and
  `open_process_file` below.
- cache/memory_tier.py `SlabAllocator`: private memory, allocated and freed entry by entry.
- cache/batch_transfer.py `PinnedStaging`: a few pinned slots that batches pass through.
- offload/host_weights.py: pinned memory for frozen weights, filled once, read by copy engines. The
  ranks of a machine share it: one rank creates files with `create_anonymous_files`, and the others
  open them with `open_shared_files`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
import threading
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NamedTuple

from gracetune.errors import UnsafeFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


OFFSET_BITS = 44
"""Number of low bits of an arena address that are the offset in a segment.

The bits above are the number of the segment, one of the anonymous files of the arena.
"""
OFFSET_MASK = (1 << OFFSET_BITS) - 1
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error codes of `sendfile` on file systems that it cannot read from."""
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
"""Error codes when memory is full or a file size limit is reached."""
_COPY_NBYTES = 512 * 1024
"""Buffer size in bytes for copies without `sendfile`; fits into a core's L2 cache."""


class ArenaFullError(Exception):
    """Raised if there is no memory left for an arena (shared, read-only host memory)."""


class ArenaWriter:
    """Fills a new arena (host memory that processes share), from any number of threads.

    `seal` then makes it immutable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: list[SegmentWriter] = []
        self._free: list[SegmentWriter] = []

    @contextmanager
    def segment_writer(self) -> Iterator[SegmentWriter]:
        """Yield a writer for one of the arena's files (segments).

        No other thread uses that file inside the `with` block.
        """
        with self._lock:
            if self._free:
                writer = self._free.pop()
            else:
                writer = SegmentWriter(len(self._writers))
                self._writers.append(writer)
        try:
            yield writer
        finally:
            with self._lock:
                self._free.append(writer)

    def seal(self) -> Arena:
        """Make the written data immutable for every process, and return it as an `Arena`."""
        return Arena([writer.seal() for writer in self._writers])


class SegmentWriter:
    """Appends data to one of an arena's anonymous files (segments).

    Its methods return the address at which `Arena.view` finds the data.
    """

    def __init__(self, number: int) -> None:
        self._fd = os.memfd_create("gracetune-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._base = number << OFFSET_BITS
        self._end = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append `data` to the file; return its address in the arena, for `Arena.view`."""
        address = self._base + self._end
        left = memoryview(data)
        try:
            while left:
                done = os.write(self._fd, left)
                left = left[done:]
                self._end += done
        except OSError as error:
            raise ArenaFullError(error.strerror) from error
        return address

    def write_with(self, write: Callable[[int], int]) -> int:
        """Append data by calling `write`; return the address of the data in the arena.

        `write` gets the descriptor of the segment's file and returns the number of bytes that it
        wrote. An OSError from it means that there was no memory left.
        """
        address = self._base + self._end
        try:
            self._end += write(self._fd)
        except OSError as error:
            raise ArenaFullError(error.strerror) from error
        return address

    def copy_from(
        self, source_fd: int, offset: int, nbytes: int, expected_nbytes: int = -1
    ) -> tuple[int, int]:
        """Append bytes of an open file, copied by the kernel; return their arena address and count.

        The count is below `nbytes` if the file ends earlier. If the caller knows the file's end,
        passing `expected_nbytes` saves the system call that would detect it. Raises OSError if the
        file cannot be read.
        """
        done = 0
        while done < nbytes:
            try:
                sent = os.sendfile(self._fd, source_fd, offset + done, nbytes - done)
            except OSError as error:
                os.lseek(self._fd, self._end, os.SEEK_SET)  # discard a partial copy
                if error.errno in _NO_SPACE:
                    raise ArenaFullError(error.strerror) from error
                if done or error.errno not in _NO_SENDFILE:
                    raise
                return self._copy_through_buffer(source_fd, offset, nbytes)
            done += sent
            if sent == 0 or done == expected_nbytes:
                break
        address = self._base + self._end
        self._end += done
        return address, done

    def seal(self) -> int:
        """Make this file of the arena immutable, and return a descriptor for reading it."""
        os.ftruncate(self._fd, self._end)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        descriptor = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._close()
        return descriptor

    def _copy_through_buffer(self, source_fd: int, offset: int, nbytes: int) -> tuple[int, int]:
        address = self._base + self._end
        done = 0
        while done < nbytes:
            data = os.pread(source_fd, min(_COPY_NBYTES, nbytes - done), offset + done)
            if not data:
                break
            self.write(data)
            done += len(data)
        return address, done


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """Process ID and anonymous files, such as those of an arena, for other processes to map them.

    It is valid as long as the process that created it lives and has not closed the files.
    """

    pid: int
    segments: tuple[tuple[int, int, int], ...]
    """File descriptor, device number and inode of each file (segment).

    Device and inode detect a process ID or a descriptor that was reused for something else.
    """


class Arena:
    """Host memory that several processes map read-only; its contents cannot change any more.

    Forked children inherit it; other processes map it with `attach`.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Map the files (segments) with these descriptors, which are closed with the arena."""
        self._fds = tuple(descriptors)
        for descriptor in self._fds:
            weakref.finalize(self, os.close, descriptor)
        self.segments = tuple(_map(descriptor) for descriptor in self._fds)
        """The mapped files (segments). A slice of one is no copy and keeps the mapping alive."""

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Map the arena of another process; raise OSError if it is gone or access is denied."""
        return cls(open_shared_files(handle))

    def view(self, address: int, nbytes: int) -> memoryview:
        """Return the bytes at an address that a `SegmentWriter` returned, without a copy."""
        offset = address & OFFSET_MASK
        return self.segments[address >> OFFSET_BITS][offset : offset + nbytes]

    @property
    def handle(self) -> ArenaHandle:
        """A handle with which another process can map the arena (`attach`)."""
        return handle_of(self._fds)

    @property
    def resident_nbytes(self) -> int:
        """Host memory that the arena takes in bytes, however many processes map it."""
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._fds)


class SharedArena(NamedTuple):
    """An arena (shared, read-only host memory), and which process built it."""

    arena: Arena
    owner_pid: int
    """ID of the process that built the arena."""
    share_error: str | None
    """Why the arena is not shared: another process's could not be mapped, or this one not offered.
    None if it is."""

    @property
    def is_owner(self) -> bool:
        """True if this process built the arena."""
        return self.owner_pid == os.getpid()


def share_arena(
    folder: Path,
    name: str,
    build: Callable[[], Arena],
    on_wait: Callable[[], None],
    proc: Path = Path("/proc"),
) -> SharedArena:
    """Map the arena that another process shares as `name`; if there is none, build and share it.

    `name` must identify everything that the contents depend on. `on_wait` is called if another
    process is building the arena, before waiting for it. The folder is created if it is missing;
    raises UnsafeFileError if another user could change it. If the folder's file system has no locks
    or cannot be written to, the arena is built for this process alone.
    """
    base = folder / f"{name}-{pid_namespace_id(proc)}"
    with ExitStack() as stack:
        try:
            owner = open_private_folder(folder)
            lock = exclusive_lock(base.with_name(f"{base.name}.lock"), owner, on_wait)
            stack.enter_context(lock)
        except OSError as error:
            return SharedArena(build(), os.getpid(), str(error))
        offer = base.with_name(f"{base.name}.json")
        share_error = None
        handle = _read_handle(offer, owner)
        # A process that asks a second time wants the present contents, not those it built before.
        if handle is not None and handle.pid != os.getpid():
            try:
                return SharedArena(Arena.attach(handle), handle.pid, None)
            except (FileNotFoundError, ProcessLookupError):
                pass  # its process ended, or the process ID was reused
            except PermissionError as error:
                share_error = str(error)
        arena = build()
        # Renamed when it is complete, so that a process which is killed leaves no partial file.
        partial = offer.with_suffix(".new")
        try:
            partial.unlink(missing_ok=True)
            opened = open_private_file(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, owner)
            with os.fdopen(opened, "w") as file:
                file.write(json.dumps(asdict(arena.handle)))
            partial.replace(offer)
        except OSError as error:
            share_error = str(error)
        return SharedArena(arena, os.getpid(), share_error)


# Anonymous files, and how other processes open them


def create_anonymous_files(sizes: Iterable[int]) -> list[int]:
    """Create anonymous files of these sizes in bytes, and return their descriptors.

    A page of a file takes memory once it is written to. The kernel frees a file when the last
    process that maps it ends, even if it was killed. Raises OSError if a limit is reached.
    """
    created: list[int] = []
    try:
        for nbytes in sizes:
            created.append(os.memfd_create("gracetune-shared", os.MFD_CLOEXEC))
            os.ftruncate(created[-1], nbytes)
    except OSError:
        close_files(created)
        raise
    return created


def handle_of(descriptors: Iterable[int]) -> ArenaHandle:
    """Return a handle with which other processes can open these files of this process."""
    return ArenaHandle(os.getpid(), tuple((fd, *_identity(os.fstat(fd))) for fd in descriptors))


def open_shared_files(handle: ArenaHandle, flags: int = os.O_RDONLY) -> list[int]:
    """Open files of another process; raise OSError if it has ended or access is denied."""
    opened: list[int] = []
    try:
        for descriptor, *identity in handle.segments:
            opened.append(open_process_file(handle.pid, descriptor, tuple(identity), flags=flags))
    except OSError:
        close_files(opened)
        raise
    return opened


def close_files(descriptors: Iterable[int]) -> None:
    """Close file descriptors. Mappings of the files stay valid."""
    for descriptor in descriptors:
        os.close(descriptor)


# The folder in which processes meet


def user_shared_folder() -> Path:
    """Return the folder in which all processes of this user on this machine meet.

    It does not depend on TMPDIR and other variables, which can differ between ranks.
    """
    return Path(f"/tmp/gracetune-{os.geteuid()}")


def open_private_folder(folder: Path) -> int:
    """Create a folder that only this user can use, and return the owner of files in it.

    Raises UnsafeFileError if another user can use it, too.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        kind = ", but a link" if folder.is_symlink() else ""
        raise UnsafeFileError(f"{folder} is not a folder{kind}. Remove it: gracetune creates it.")
    if status.st_uid != os.geteuid():
        # A network file system may show another owner, but then also for a new file.
        try:
            with TemporaryFile(dir=folder) as file:
                is_ours = os.fstat(file.fileno()).st_uid == status.st_uid
        except OSError:
            is_ours = False
        if not is_ours:
            raise _foreign(folder, status)
    if status.st_mode & 0o002:
        raise _too_open(folder, status)
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return status.st_uid


def open_private_file(path: Path, flags: int, owner: int) -> int:
    """Open a file of mode 600 and return its descriptor; it is created if `flags` has O_CREAT.

    `owner` is what `open_private_folder` returned. Raises UnsafeFileError if the file is a link, or
    if another user can change it.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for another process.
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFileError(f"{path} is a link. Remove it, and start again.") from None
        if error.errno == errno.ENXIO:
            raise UnsafeFileError(f"{path} is not a regular file. Remove it.") from None
        raise
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFileError(f"{path} is not a regular file. Remove it, and start again.")
        if status.st_uid != owner:
            raise _foreign(path, status)
        if status.st_mode & 0o022:
            raise _too_open(path, status)
    except BaseException:  # whatever it is: the caller gets no descriptor to close
        os.close(opened)
        raise
    return opened


def _foreign(path: Path, status: os.stat_result) -> UnsafeFileError:
    return UnsafeFileError(
        f"{path} belongs to user {status.st_uid}, but processes of user {os.geteuid()} share "
        "memory there. Ask that user or an administrator to remove it, and start again."
    )


def _too_open(path: Path, status: os.stat_result) -> UnsafeFileError:
    return UnsafeFileError(
        f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so other users can change what "
        "processes share there. Remove it, and start again."
    )


def pid_namespace_id(proc: Path) -> str:
    """Return an id of this PID namespace: processes with the same id share process IDs.

    It consists of the boot id and the namespace's inode, so that containers which share a folder
    do not mix up their processes.
    """
    boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{(proc / 'self/ns/pid').stat().st_ino}"


def open_process_file(
    pid: int,
    descriptor: int,
    identity: tuple[int, ...],
    proc: Path = Path("/proc"),
    flags: int = os.O_RDONLY,
) -> int:
    """Open a file of another process, by default for reading, by the process's file descriptor.

    `identity` is the expected device and inode. Raises OSError if the descriptor is closed or now
    another file, if access is denied, or if the file belongs to another user.
    """
    path = proc / str(pid) / "fd" / str(descriptor)
    # Check before opening: a reused descriptor may be a pipe or a device, where open has effects.
    status = os.stat(path)
    if _identity(status) == identity:
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}")
        opened = os.open(path, flags | os.O_CLOEXEC)
        if _identity(os.fstat(opened)) == identity:
            return opened
        os.close(opened)
    raise FileNotFoundError(f"{path} is no longer the shared memory it was")


@contextmanager
def exclusive_lock(
    path: Path, owner: int, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on a private file; the kernel releases it if the process dies.

    `owner` is what `open_private_folder` returned for its folder. `on_wait` is called before
    waiting, if another process holds the lock.
    """
    descriptor = open_private_file(path, os.O_RDWR | os.O_CREAT, owner)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _map(descriptor: int) -> memoryview:
    if os.fstat(descriptor).st_size == 0:
        return memoryview(b"")  # mmap refuses an empty file
    return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _read_handle(path: Path, owner: int) -> ArenaHandle | None:
    """Read which process shares an arena; None if the JSON file is missing or invalid."""
    try:
        with os.fdopen(open_private_file(path, os.O_RDONLY, owner), encoding="utf-8") as file:
            found = json.load(file)
        segments = tuple((int(a), int(b), int(c)) for a, b, c in found["segments"])
        return ArenaHandle(int(found["pid"]), segments)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
