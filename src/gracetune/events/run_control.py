"""What a running run can be asked from outside, through small files in its folder.

The run writes `now/listening.json`; `ask` drops `now/<verb>` beside it; the run takes it away.
Files need no port, work on a cluster's shared disk and outlive a lost terminal.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gracetune.atomic_files import write_text
from gracetune.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VERBS = ("validate", "save", "stop")


@dataclass(frozen=True, slots=True)
class Listener:
    """The run that listens in a folder."""

    pid: int
    host: str
    birth: int
    """When that process began: the same pid with another birth is another process."""
    verbs: tuple[str, ...]
    """What it answers to."""

    def is_local(self) -> bool:
        """Whether it runs on this machine, so that its process can be looked up."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether its process still runs; of another machine we can only believe it."""
        return not self.is_local() or _process_start_time(self.pid) == self.birth


class RunControl:
    """The run's end: open once, take between steps, close at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "now"
        # As strings, because `take` is called after every step.
        self._asked = {verb: os.fspath(self._folder / verb) for verb in VERBS}
        self._open = False

    def open(self, pid: int, verbs: Iterable[str] = VERBS) -> None:
        """Begin to listen; what was asked of an earlier run is forgotten."""
        birth = _process_start_time(pid)
        assert birth is not None, f"no process {pid} to listen"
        listener = Listener(pid, socket.gethostname(), birth, tuple(verbs))
        self._folder.mkdir(parents=True, exist_ok=True)
        other = _read_listener(self._folder)
        if other is not None and other.pid != pid and other.is_local() and other.is_alive():
            raise ConfigError(
                f"output_dir {self._folder.parent} is in use by process {other.pid}; two runs "
                "cannot share one folder. Choose another output_dir, or end that run with: "
                f"gracetune now stop {self._folder.parent}"
            )
        self.take_requests()
        write_text(self._folder / "listening.json", json.dumps(asdict(listener)))
        self._open = True

    @contextmanager
    def listening(self, verbs: Iterable[str], is_main: bool = True) -> Iterator[Self]:
        """Listen while the block runs; of several ranks one does."""
        if is_main:
            self.open(os.getpid(), verbs)
        try:
            yield self
        finally:
            if is_main:
                self.close()

    def take_requests(self) -> set[str]:
        """What was asked since the last call; each request is answered once."""
        taken = set()
        for verb, path in self._asked.items():
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            taken.add(verb)
        return taken

    def close(self) -> None:
        """Stop listening; what nobody will answer any more goes too.

        Without an `open` that went well it does nothing: the folder may be another run's.
        """
        if not self._open:
            return
        self._open = False
        (self._folder / "listening.json").unlink(missing_ok=True)
        self.take_requests()


def send_request(folder: Path, verb: str) -> Listener:
    """Ask the run in `folder` to do something soon; says who will."""
    if verb not in VERBS:
        raise ConfigError(f"{verb!r} cannot be asked of a run. Known: {', '.join(VERBS)}.")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Name the output_dir of a run.")
    listener = _read_listener(folder / "now")
    if listener is None:
        raise RunFailedError(
            f"No run is listening in {folder}: it has not begun to train, or it has ended. "
            "Nothing was asked."
        )
    if not listener.is_alive():
        raise RunFailedError(
            f"The run in {folder} is gone: process {listener.pid} ended without a goodbye. "
            "Nothing was asked; train again to resume it from its newest checkpoint."
        )
    if verb not in listener.verbs:
        way_out = "Set validation.enable_manual_validation: true." if verb == "validate" else ""
        raise ConfigError(
            f"The run in {folder} does not answer to {verb!r}, only to "
            f"{', '.join(listener.verbs)}. {way_out}".rstrip()
        )
    write_text(folder / "now" / verb, "")
    return listener


def _process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a running process: no change of clock moves them."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in brackets and may hold anything; what follows is plain.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _read_listener(folder: Path) -> Listener | None:
    path = folder / "listening.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return Listener(said["pid"], said["host"], said["birth"], tuple(said["verbs"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say which process listens. Remove it if no run is using the folder."
        ) from error
