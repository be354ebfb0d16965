"""Reserve a run's folder, and send requests (validate, save, stop, log) to the run in it.

A process that writes to the folder holds a lock on the file `.lock` in it (`reserve_folder`), so
that two runs never share a folder. The kernel releases the lock when the process ends, even if it
is killed.

The run writes `now/listening.json` with its process id. A request is a JSON file in `now/requests`
with a name of its own, `ID.json`: `{"request": "validate", "arguments": {...}, "source": "me"}`. An
empty file `now/<verb>` is a request without arguments (`touch now/save`). The run deletes the file
when it takes the request, between two steps, so that each is taken once, and logs the answer as an
event `request_taken` with the id. Files need no network port, work on the shared disk of a cluster,
and survive a lost terminal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gracetune.atomic_files import write_text
from gracetune.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

VERBS = ("validate", "save", "stop", "log")
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_REQUEST_NBYTES = 1 << 20
"""Size above which a request is refused unread."""
MAX_DEPTH = 8
"""Levels of lists and objects in the arguments of a request."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save a checkpoint and stop: from a user or launcher (SIGINT, SIGTERM),
a terminal that closes (SIGHUP), or a cluster whose time limit is near (SIGUSR1, SIGUSR2)."""
LOCK_FILE = ".lock"
REQUESTS_FOLDER = "requests"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of file systems that do not support locks."""
_OWNER_WAIT_S = 2.0
"""Seconds to wait until the owner of a lock has written its process id."""


@contextmanager
def reserve_folder(folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Lock an output folder for this process while the `with` block runs.

    Raises if another process has locked it. The same folder under another path is the same lock.
    """
    path = folder / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    held = [descriptor]

    def release() -> None:
        while held:
            os.close(held.pop())

    # A forked child shares the lock, and would keep it if this process is killed.
    os.register_at_fork(after_in_child=release)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output_dir is {str(folder)!r}, which is in use by {_owner(descriptor)}, and two "
                "processes cannot write to one folder. Choose another output_dir, or stop that "
                f"run: gracetune now stop {folder}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warn(
                f"output_dir is {str(folder)!r}, on a file system without locks ({error.strerror})."
                " Two runs that are started there at the same moment are not detected."
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps([os.getpid(), socket.gethostname()]).encode(), 0)
        yield
    finally:
        release()


def _owner(descriptor: int) -> str:
    """Return the process that holds the lock of a folder, in words.

    The file may still name an earlier owner, so a local process that no longer runs is not the
    owner.
    """
    deadline = time.monotonic() + _OWNER_WAIT_S
    while True:
        try:
            pid, host = json.loads(os.pread(descriptor, 1024, 0))
        except (ValueError, TypeError):
            pid, host = None, ""
        is_local = host == socket.gethostname()
        if isinstance(pid, int) and (not is_local or process_start_time(pid) is not None):
            return f"process {pid} on {host}"
        if time.monotonic() > deadline:
            return "another process"
        time.sleep(0.01)


def _lock_owner(folder: Path) -> int | None:
    """Return the process id in the lock file of a folder; None without a file, 0 if unreadable."""
    try:
        pid, _ = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return 0
    return pid if isinstance(pid, int) else 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a run, as it was read from its file."""

    verb: str
    id: str = ""
    """The name of the file without its suffix; empty for a request without arguments."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    source: str = ""
    """Who sent it, such as `gracetune now`."""
    problem: str = ""
    """Why it cannot be carried out; empty if it can."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The process of a training run that accepts requests to validate, save or stop.

    Field names are keys of `listening.json`.
    """

    pid: int
    host: str
    birth: int
    """Start time of the process, in clock ticks since boot; differs if the pid was reused."""
    verbs: tuple[str, ...]
    """The requests that the process accepts: some of `VERBS`."""

    def is_local(self) -> bool:
        """Return True if the process was started on this machine."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Return True if the process still runs, or is on another machine and cannot be checked."""
        return not self.is_local() or process_start_time(self.pid) == self.birth


class RunControl:
    """Receives requests to validate, save or stop, as files in the run's output folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "now"
        # Strings instead of Path objects: `take_requests` runs after every step.
        self._paths = {verb: os.fspath(self._folder / verb) for verb in VERBS}
        self._requests = os.fspath(self._folder / REQUESTS_FOLDER)
        self._verbs: tuple[str, ...] = VERBS
        self._open = False
        self._is_reserved = False
        """True if this process had reserved the output folder when `open` was called."""
        self._stuck: set[str] = set()
        """Paths that cannot be read or deleted; each is refused once, not after every step."""

    def open(self, pid: int, verbs: Iterable[str] = VERBS) -> None:
        """Start to accept requests to process `pid`; delete requests to an earlier run."""
        birth = process_start_time(pid)
        assert birth is not None, f"there is no process {pid}"
        self._verbs = tuple(verbs)
        listener = Listener(pid, socket.gethostname(), birth, self._verbs)
        (self._folder / REQUESTS_FOLDER).mkdir(parents=True, exist_ok=True)
        other = read_listener(self._folder)
        if other is not None and other.pid != pid and other.is_local() and other.is_alive():
            raise ConfigError(
                f"output_dir is {self._folder.parent}, which is in use by process {other.pid}, and "
                "two runs cannot share a folder. Choose another output_dir, or stop that run: "
                f"gracetune now stop {self._folder.parent}"
            )
        self.take_requests()
        write_text(self._folder / "listening.json", json.dumps(asdict(listener)))
        self._open = True
        self._is_reserved = _lock_owner(self._folder.parent) == pid

    def has_lost_folder(self) -> bool:
        """Return True if the output folder was moved or deleted after `open`.

        Raises if another process has reserved a folder in its place.
        """
        folder = self._folder.parent
        owner = _lock_owner(folder) if self._is_reserved else 0
        if owner in (None, 0, os.getpid()):
            return owner is None
        self._open = False  # the files in it belong to the other process
        raise RunFailedError(
            f"output_dir is {str(folder)!r}, which was moved or deleted while this run trained, "
            f"and process {owner} has started another run in its place. This run ends without "
            "writing to it. Its earlier checkpoints are in the folder that was moved: move it to "
            "an output_dir of its own, and start the run again to continue."
        )

    @contextmanager
    def listening(self, verbs: Iterable[str], is_main: bool = True) -> Iterator[Self]:
        """Accept requests while the `with` block runs; only on the main rank."""
        if is_main:
            self.open(os.getpid(), verbs)
        try:
            yield self
        finally:
            if is_main:
                self.close()

    def take_requests(self) -> list[Request]:
        """Return the requests that arrived since the last call, oldest first; delete their files.

        A request that this run does not accept, or whose file is not one, has a `problem`.
        """
        taken = [self._take_empty(verb, path) for verb, path in self._paths.items()]
        try:
            # Files below an open folder: a link in its place leads nowhere.
            folder = os.open(self._requests, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
                # Hidden files are still being written.
                taken += [self._take_file(folder, name) for name in names if name[0] != "."]
            finally:
                os.close(folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            taken.append(self._refuse(Request(""), self._requests, error))
        return [self._checked(request) for request in taken if request is not None]

    def _take_empty(self, verb: str, path: str) -> Request | None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            self._stuck.discard(path)
            return None
        except OSError as error:  # a folder, or one that this process may not write to
            return self._refuse(Request(verb), path, error)
        return Request(verb)

    def _take_file(self, folder: int, name: str) -> Request | None:
        """Read and delete a request's file; None for a file that is gone or is not a plain one."""
        number, problem = name.removesuffix(".json"), ""
        if not REQUEST_ID.fullmatch(number):
            number, problem = "", "its file name may have only letters, digits, '-' and '_'"
        try:
            if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
                return None
            text = _read_plain(name, folder)
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            # Not deleted, so that it would be carried out again after every step.
            return self._refuse(Request("", number), os.path.join(self._requests, name), error)
        if len(text) > MAX_REQUEST_NBYTES:
            problem = f"it is larger than {MAX_REQUEST_NBYTES:,} bytes"
        return Request("", number, problem=problem) if problem else parse_request(text, number)

    def _refuse(self, request: Request, path: str, error: OSError) -> Request | None:
        if path in self._stuck:
            return None
        self._stuck.add(path)
        problem = f"{path!r} cannot be read and deleted: {error.strerror}. Remove it yourself"
        return replace(request, problem=problem)

    def _checked(self, request: Request) -> Request:
        if request.problem or request.verb in self._verbs:
            return request
        known = ", ".join(self._verbs)
        problem = f"this run does not accept {request.verb!r}, only {known}"
        if request.verb == "validate":
            problem += "; set validation.enable_manual_validation: true"
        # An unknown verb is any text, which must not reach a terminal.
        return replace(request, verb=request.verb if request.verb in VERBS else "", problem=problem)

    def close(self) -> None:
        """Stop accepting requests and delete pending ones.

        Does nothing if `open` failed, because the folder may belong to another run.
        """
        if not self._open:
            return
        self._open = False
        with suppress(OSError):  # the run has ended; a listener that is dead accepts nothing
            (self._folder / "listening.json").unlink()
        self.take_requests()
        with suppress(OSError):  # something that is not a request is in it
            (self._folder / REQUESTS_FOLDER).rmdir()


def parse_request(text: bytes, number: str) -> Request:
    """Read the contents of a request's file; `number` is its id."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Request("", number, problem="it is not JSON")
    if not isinstance(found, dict) or not isinstance(found.get("request"), str):
        return Request("", number, problem='it is not an object with the entry "request"')
    arguments, source = found.get("arguments", {}), found.get("source", "")
    if not isinstance(arguments, dict) or not isinstance(source, str):
        return Request("", number, problem='"arguments" must be an object and "source" a text')
    if _is_deep(arguments):
        return Request("", number, problem='"arguments" is nested too deeply')
    return Request(found["request"], number, arguments, source)


def _is_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(item, levels - 1) for item in items)


def send_request(
    folder: Path,
    verb: str,
    arguments: Mapping[str, object] | None = None,
    source: str = "gracetune now",
    request_id: str | None = None,
) -> Listener:
    """Write a request for the run in `folder`; return who carries it out: PID and host name.

    `request_id` is the id by which the answer can be found, from `new_request_id`.
    """
    if verb not in VERBS:
        raise ConfigError(f"{verb!r} is not a request. Use one of: {', '.join(VERBS)}.")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Name the output_dir of a run.")
    listener = read_listener(folder / "now")
    if listener is None:
        raise RunFailedError(
            f"no run accepts requests in {folder}: it has not started to train yet, or it has "
            "ended. Check the folder, and try again once the run prints its first step."
        )
    if not listener.is_alive():
        raise RunFailedError(
            f"the run in {folder} was killed: process {listener.pid} no longer exists. Run "
            "`gracetune train` again to resume it from its newest checkpoint."
        )
    if verb not in listener.verbs:
        fix = "Set validation.enable_manual_validation: true." if verb == "validate" else ""
        raise ConfigError(
            f"the run in {folder} does not accept {verb!r}, only "
            f"{', '.join(listener.verbs)}. {fix}".rstrip()
        )
    requests = folder / "now" / REQUESTS_FOLDER
    if requests.resolve() != folder.resolve() / "now" / REQUESTS_FOLDER:
        raise ConfigError(f"{requests} is a link, or in one. Remove it, and start the run again.")
    number = request_id or new_request_id()
    request = {"request": verb, "arguments": dict(arguments or {}), "source": source}
    write_text(requests / f"{number}.json", json.dumps(request))
    return listener


def new_request_id() -> str:
    """Return an id for a request; ids sort by time, so that requests are taken in their order."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def process_start_time(pid: int) -> int | None:
    """Return clock ticks from boot to the start of a process; None if it does not run.

    Ticks since boot do not change when the system clock is set.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # there is none, or it ended while its file was read
        return None
    # The command's name is in brackets and may contain anything, so parse what follows it.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def read_listener(folder: Path) -> Listener | None:
    """Return the process that accepts requests in the folder `now` of a run, or None."""
    path = folder / "listening.json"
    try:
        found = json.loads(_read_plain(path))
        listener = Listener(found["pid"], found["host"], found["birth"], tuple(found["verbs"]))
        texts = (listener.host, *listener.verbs)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names must be texts")
        if not (isinstance(listener.pid, int) and isinstance(listener.birth, int)):
            raise TypeError("process ids must be numbers")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged: it does not name a process. Remove it if no run uses the folder."
        ) from error
    return listener


def _read_plain(path: Path | str, folder: int | None = None) -> bytes:
    """Return the contents of a plain file, below an open folder if there is one.

    Links are not followed, and a pipe is not waited for. One byte more than the limit of a request
    is read at most.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))
        return file.read(MAX_REQUEST_NBYTES + 1)
