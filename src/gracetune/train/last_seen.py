"""Keep a small record of what a run was doing, and explain later how it ended.

A process that is killed, by the kernel for memory or with SIGKILL, writes nothing any more. So a
run keeps a file of fixed size up to date while it lives, `last_seen.json`: its step, its phase, and
the memory that was left. Writing it takes microseconds and no sync: the kernel keeps the contents
when the process dies. The next start reads it and says what was last seen and what to change.

A crash in native code (SIGSEGV, SIGBUS, SIGABRT) writes the Python stack to `crash.txt`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

import psutil

from gracetune.errors import GracetuneError, InterruptedRunError, redact_urls
from gracetune.events.run_control import process_start_time
from gracetune.events.types import HealthChanged
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from gracetune.memory.sensors import Sensors

LAST_SEEN_FILE = "last_seen.json"
CRASH_FILE = "crash.txt"
RECORD_NBYTES = 2048
MAX_MESSAGE = 300
"""Characters of an error message that are kept."""
READ_EVERY_S = 5.0
"""Seconds between two readings of the memory."""
KEPT = (
    "memory_available",
    "memory_total",
    "cgroup_used",
    "cgroup_limit",
    "oom_kills",
    "output_free",
)
"""Sensors of the host that are kept in the record."""
LOW_SHARE = 0.08
"""Share of free memory below which a killed process was probably killed for memory."""


class LastSeen:
    """The record of a running process, as a context manager; the main rank writes it.

    A thread reads the memory every few seconds, also while data are encoded or a step hangs.
    """

    def __init__(self, folder: Path, sensors: Sensors, every_s: float = READ_EVERY_S) -> None:
        self._file = os.open(folder / LAST_SEEN_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        self._sensors = sensors
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gracetune-last-seen", daemon=True)
        self._record: dict[str, object] = {
            "pid": os.getpid(),
            "birth": process_start_time(os.getpid()),
            "host": socket.gethostname(),
            "boot": boot_id(),
            "step": 0,
            "phase": "preparing",
            "ended": "",
        }

    def __enter__(self) -> Self:
        self.read_memory()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._stop.set()
        self._thread.join()
        stopped = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        status = "done" if kind is None else "interrupted" if stopped else "failed"
        message = "" if error is None else str(error) or type(error).__name__
        if isinstance(error, GracetuneError) and error.exit_code == 2 and not self._record["step"]:
            status = "refused"  # by a check of the settings or the data, before the first step
        self.update(ended=status, message=_cut(redact_urls(message), MAX_MESSAGE))
        os.close(self._file)

    def update(self, **values: object) -> None:
        """Change entries of the record and write it."""
        with self._lock:
            self._record.update(values, time=time.time())
            text = json.dumps(self._record).ljust(RECORD_NBYTES - 1) + "\n"
            # A full disk must not end the run here; the checkpoint will say so.
            with suppress(OSError):
                os.pwrite(self._file, text.encode(), 0)

    def read_memory(self) -> None:
        """Note the memory that is left, and that the process uses."""
        host = self._sensors.read().host
        found: dict[str, object] = {name: host[name] for name in KEPT if name in host}
        self.update(rss=psutil.Process().memory_info().rss, **found)

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.read_memory()


@contextmanager
def recording_crashes(folder: Path) -> Iterator[None]:
    """Write the Python stack to `crash.txt` if native code crashes; a debugger's own stays."""
    if faulthandler.is_enabled():
        yield
        return
    path = folder / CRASH_FILE
    with path.open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            if os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)  # the folder may have been moved


def explain_previous_end(
    folder: Path, step: int, oom_kills: float | None, resume: str
) -> HealthChanged | None:
    """Say how the previous process in a run's folder ended; None if it ended in order.

    `oom_kills` is the current count of processes that the kernel has killed for memory. `resume`
    says where this process continues.
    """
    seen = read_last_seen(folder)
    if seen is None or seen.get("ended") in ("done", "interrupted", "refused"):
        return None
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_number(seen, "time")))
    last = f"last seen at {when} in step {_number(seen, 'step'):.0f} ({seen.get('phase', '')})"
    crash = _crash_text(folder)
    memory = _memory_text(seen)
    values = {name: _number(seen, name) for name in (*KEPT, "rss", "step") if name in seen}
    if seen.get("ended") == "failed":
        cause = f"the previous process of this run failed: {seen.get('message', '')}"
        advice = "Do what the message says, if it was not done yet."
    elif seen.get("host") != socket.gethostname():
        cause = f"the previous process of this run, on {seen.get('host')}, did not end in order"
        advice = "See the log of that machine."
    elif seen.get("boot") != boot_id():
        cause = "the machine was restarted, or lost power, while this run was training"
        advice = "Nothing needs to change. Lower train.checkpoint_minutes to lose less work."
    elif crash:
        cause = f"the previous process of this run crashed in native code: {crash}"
        advice = f"The whole stack is in {folder / CRASH_FILE}; please report it."
    elif _was_killed_for_memory(seen, oom_kills):
        cause = f"the previous process of this run was killed because memory ran out: {memory}"
        advice = (
            "Lower cache_config.host_budget_gb, set cache_config.vae_cache_type: disk, or lower "
            "plan.host_memory; see also what else ran on the machine (dmesg names the process)."
        )
    else:
        cause = f"the previous process of this run was killed (SIGKILL): {memory}"
        advice = (
            "If nobody killed it, look for the end of a job's time or memory limit in the "
            "scheduler's log, and in dmesg."
        )
    return HealthChanged(step, "previous_run", "notice", f"{cause}; {last}", resume, advice, values)


def _cut(text: str, length: int) -> str:
    """Return a text of at most `length` characters, cut after a word and marked with dots."""
    if len(text) <= length:
        return text
    start = text[: length - 3]
    return f"{start.rpartition(' ')[0] or start}..."


def read_last_seen(folder: Path) -> dict[str, object] | None:
    """Return the record that the previous process left; None if there is none."""
    try:
        found = json.loads((folder / LAST_SEEN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def boot_id() -> str:
    """Return an id that changes when the machine restarts; empty if the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _was_killed_for_memory(seen: Mapping[str, object], oom_kills: float | None) -> bool:
    if oom_kills is not None and "oom_kills" in seen and oom_kills > _number(seen, "oom_kills"):
        return True
    total, limit = _number(seen, "memory_total"), _number(seen, "cgroup_limit")
    if total and _number(seen, "memory_available") < LOW_SHARE * total:
        return True
    return bool(limit) and _number(seen, "cgroup_used") > (1 - LOW_SHARE) * limit


def _memory_text(seen: Mapping[str, object]) -> str:
    left, total = _number(seen, "memory_available"), _number(seen, "memory_total")
    if not total:
        return "its memory is not known"
    text = f"{format_bytes(int(left))} of {format_bytes(int(total))} of host memory were left"
    if _number(seen, "rss"):
        text += f", and it used {format_bytes(int(_number(seen, 'rss')))}"
    return text


def _crash_text(folder: Path) -> str:
    """Return the first line and the innermost frame of `crash.txt`; empty if there is none."""
    try:
        lines = (folder / CRASH_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return ", ".join([*lines[:1], *frames[:1]])


def _number(seen: Mapping[str, object], name: str) -> float:
    value = seen.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
