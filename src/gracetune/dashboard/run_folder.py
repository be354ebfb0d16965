"""Find the files of a run, and tell whether the run is alive.

Files are opened part by part below the run's folder without following links, so that a link in it
cannot lead elsewhere. Samples are served by an index of the files that the run's own validations
have written.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import REDACTED, SECRET_NAME, ConfigError, hide_path, redact_urls
from gracetune.events.run_control import LOCK_FILE, process_start_time, read_listener
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gracetune.dashboard.run_state import RunState
    from gracetune.events.run_control import Listener

LOG_NAME = "events.jsonl"
VALIDATION_FOLDER = "validation"
REQUESTED_FOLDER = "requested"
"""Folder in `validation/` with the samples of prompts that came with a request."""
SAMPLES_FILE = "samples.json"
SAMPLE_SETTINGS = (
    *("negative_prompt", "seed", "steps", "guidance", "width", "height", "frames", "seconds"),
    "problem",
)
"""Keys of a sample in that file that the page shows."""
SETTING_WITH_SECRET = re.compile(
    r"token(?!i)|secret|passw|passphrase|(api|access|private|account|auth)[_-]?key|credential"
    r"|authorization|bearer|cookie|webhook",
    re.IGNORECASE,
)
"""Matches names of settings that may be credentials, wherever they are in a run file; not as many
as `SECRET_NAME`, which matches `text_encoder` too."""
LAST_SEEN_FILE = "last_seen.json"
CRASH_FILE = "crash.txt"
SAMPLE_NAME = re.compile(r"\d{3,6}\.(png|mp4|wav)")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
MAX_JSON_NBYTES = 4 * 1024 * 1024
MAX_FILES_PER_SET = 4096
QUIET_S = 120.0
"""A run on another machine that has written nothing for this long may be dead."""
NEARLY_FULL = 0.92
"""Share of a memory limit above which a run was probably killed for it."""


def open_inside(folder: Path, *names: str) -> int | None:
    """Open a plain file below a folder for reading; return its descriptor, or None.

    Links are not followed, and pipes and devices are refused.
    """
    return _open_below(folder, names, stat.S_ISREG)


def _open_below(folder: Path, names: Sequence[str], accepts: Callable[[int], bool]) -> int | None:
    """Open a path part by part, so that no part can become a link meanwhile."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags)
        for name in names:
            if name in ("", "..") or "/" in name:
                os.close(descriptor)
                return None
            try:
                below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = below
    except (OSError, ValueError):  # ValueError: a name with a null character
        return None
    if not accepts(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


def read_json(folder: Path, *names: str) -> object | None:
    """Return the contents of a JSON file below a folder; None if it is missing or damaged."""
    descriptor = open_inside(folder, *names)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_JSON_NBYTES + 1)
    if len(data) > MAX_JSON_NBYTES:
        return None
    try:
        found: object = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_settings(folder: Path) -> object | None:
    """Return the settings that a run has written, without credentials.

    A run writes none, but earlier versions did, and a `run.json` may be the user's own.
    """
    for name in ("run.resolved.json", "run.json"):
        found = read_json(folder, name)
        if found is not None:
            try:
                return _redacted(found)
            except RecursionError:  # nested so deeply that it is no run file
                return None
    return None


def _redacted(
    value: object, names: re.Pattern[str] = SETTING_WITH_SECRET, is_secret: bool = False
) -> object:
    if isinstance(value, str):
        if not is_secret:
            return redact_urls(value)
        return hide_path(value) if "://" in value else REDACTED
    if isinstance(value, list):
        return [_redacted(item, names, is_secret) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        # Options of a remote store have any names, so that more of them may be credentials.
        key: _redacted(
            item,
            SECRET_NAME if key == "options" else names,
            is_secret or names.search(key) is not None,
        )
        for key, item in value.items()
    }


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among `paths` and directly below them, without duplicates.

    A folder is a run if it has a log. A path without a run in it is returned as it is, because a
    run may start there later.
    """
    found: dict[Path, None] = {}
    for path in paths:
        below = sorted(log.parent for log in path.glob(f"*/{LOG_NAME}"))
        if (path / LOG_NAME).exists() or not below:
            below = [path]
        found |= dict.fromkeys(folder.resolve() for folder in below)
    return list(found)


# Samples


@dataclass(frozen=True, slots=True)
class SampleItem:
    """The sample of one prompt: the names of its files."""

    prompt: str
    image: str | None
    video: str | None
    audio: str | None
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SampleSet:
    """The samples of one validation."""

    name: str
    """The name of the folder in `validation/` or `validation/requested/`."""
    step: int
    time: float
    requested: bool
    """True if somebody asked for this validation, perhaps with other prompts."""
    items: tuple[SampleItem, ...]

    def to_json(self) -> dict[str, object]:
        """Return the fields as a dictionary for JSON."""
        return asdict(self)


class SampleIndex:
    """The sample files of a run, as far as its log names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sets: dict[str, SampleSet] = {}
        self._files: dict[tuple[str, str], tuple[str, ...]] = {}

    def clear(self) -> None:
        """Forget all samples, because the log was replaced."""
        self._sets.clear()
        self._files.clear()

    def add(self, record: Mapping[str, object]) -> SampleSet | None:
        """Add the files of one validation event; return None if it has no files."""
        grid, step, time_ = record.get("grid"), record.get("step"), record.get("time")
        if not isinstance(grid, str) or not isinstance(step, int):
            return None
        name = Path(grid).stem
        if not SET_NAME.fullmatch(name):
            return None
        parts: tuple[str, ...] = (VALIDATION_FOLDER, name)
        if Path(grid).parent.name == REQUESTED_FOLDER:
            parts = (VALIDATION_FOLDER, REQUESTED_FOLDER, name)
        files, settings = self._list_files(parts), self._read_settings(parts)
        numbers = sorted({int(file.partition(".")[0]) for file in files})
        prompts = record.get("prompts")
        texts = [str(text) for text in prompts] if isinstance(prompts, list) else []
        by_number = {(int(file.partition(".")[0]), file.partition(".")[2]): file for file in files}
        items = tuple(
            SampleItem(
                prompt=texts[number] if number < len(texts) else f"sample {number}",
                image=by_number.get((number, "png")),
                video=by_number.get((number, "mp4")),
                audio=by_number.get((number, "wav")),
                settings=settings.get(number, {}),
            )
            for number in numbers
        )
        if not items:
            return None
        seconds = float(time_) if isinstance(time_, float | int) else 0.0
        is_requested = bool(record.get("request"))
        found = SampleSet(name, step, seconds, is_requested, items)
        self._sets[name] = found
        self._files |= {(name, file): (*parts, file) for file in files}
        return found

    def _list_files(self, parts: Sequence[str]) -> list[str]:
        folder = _open_below(self._folder, parts, stat.S_ISDIR)
        if folder is None:
            return []
        try:
            with os.scandir(folder) as entries:
                return sorted(
                    entry.name
                    for entry, _ in zip(entries, range(MAX_FILES_PER_SET), strict=False)
                    if SAMPLE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                )
        except OSError:
            return []
        finally:
            os.close(folder)

    def _read_settings(self, parts: Sequence[str]) -> dict[int, Mapping[str, object]]:
        """Return seed, steps, size and so on of each sample, by its number."""
        found = read_json(self._folder, *parts, SAMPLES_FILE)
        samples = found.get("samples") if isinstance(found, dict) else None
        return {
            _integer(one.get("number")): {
                key: value for key, value in one.items() if key in SAMPLE_SETTINGS and value != ""
            }
            for one in (samples if isinstance(samples, list) else [])
            if isinstance(one, dict)
        }

    @property
    def sets(self) -> list[SampleSet]:
        """All validations with samples, by step."""
        return sorted(self._sets.values(), key=lambda one: (one.step, one.time))

    def time_of(self, name: str) -> float:
        """Return the time of a validation; a repeated one has another."""
        found = self._sets.get(name)
        return 0.0 if found is None else found.time

    def open(self, name: str, file: str) -> int | None:
        """Return a descriptor of a sample file; None if it is not in the index, or gone."""
        parts = self._files.get((name, file))
        return None if parts is None else open_inside(self._folder, *parts)


# Alive or dead


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run in one word, and in a sentence."""

    state: str
    """`waiting`, `starting`, `running`, `quiet`, `done`, `interrupted`, `failed`, `killed`, or
    `unreadable` if its files are damaged in a way that nobody has thought of."""
    text: str
    step: int
    total_steps: int
    pid: int | None = None
    verbs: tuple[str, ...] = ()
    """The requests that the run accepts."""


def run_status(folder: Path, state: RunState, now: float | None = None) -> RunStatus:
    """Tell whether the process of a run is alive, and how its last one ended.

    The run removes `now/listening.json` when it ends, unless it is killed, and the kernel releases
    the lock on the folder in any case.
    """
    now = time.time() if now is None else now
    step, total = _progress(state)
    listener, problem = _listener(folder)
    ended = state.records["run_ended"][-1] if state.records["run_ended"] else None
    if listener is not None:
        return _with_listener(listener, folder, state, now)
    if problem:
        return RunStatus("quiet", problem, step, total)
    if not state.num_events:
        return RunStatus("waiting", f"{folder} has no log yet.", 0, 0)
    if ended is not None and _seconds(ended.get("time")) >= state.last_time:
        return _ended(ended, total)
    if _is_recorded_alive(folder) or is_locked(folder):
        return RunStatus("starting", "The run prepares its data and its model.", step, total)
    return RunStatus("killed", _last_seen(folder, state, "The run"), step, total)


def _progress(state: RunState) -> tuple[int, int]:
    """Return the number of steps done, and of all steps; 0 if it is not known yet."""
    step = int(state.tables["step_done"].steps[-1]) if "step_done" in state.tables else 0
    started = state.records["run_started"]
    return step, _integer(started[-1].get("total_steps")) if started else 0


def _is_recorded_alive(folder: Path) -> bool:
    """Return True if the process in the run's own record is on this machine and alive."""
    record = read_json(folder, LAST_SEEN_FILE)
    if not isinstance(record, dict) or record.get("host") != socket.gethostname():
        return False
    pid, birth = record.get("pid"), record.get("birth")
    return isinstance(pid, int) and birth is not None and process_start_time(pid) == birth


def _listener(folder: Path) -> tuple[Listener | None, str]:
    try:
        return (None if (folder / "now").is_symlink() else read_listener(folder / "now")), ""
    except ConfigError as error:
        return None, str(error)


def _with_listener(listener: Listener, folder: Path, state: RunState, now: float) -> RunStatus:
    step, total = _progress(state)
    silent_s = now - state.last_time
    if not listener.is_alive():
        text = _last_seen(folder, state, f"Process {listener.pid}")
        return RunStatus("killed", text, step, total, listener.pid)
    if not listener.is_local() and silent_s > QUIET_S:
        text = (
            f"Process {listener.pid} on {listener.host} cannot be checked from here. Its last "
            f"event is {format_seconds(silent_s)} old."
        )
        return RunStatus("quiet", text, step, total, listener.pid, listener.verbs)
    text = f"Process {listener.pid} on {listener.host} trains."
    return RunStatus("running", text, step, total, listener.pid, listener.verbs)


def _ended(ended: Mapping[str, object], total: int) -> RunStatus:
    status, step = str(ended.get("status")), _integer(ended.get("step"))
    took = format_seconds(_seconds(ended.get("seconds")))
    message = str(ended.get("message") or "")
    if status == "done":
        return RunStatus("done", f"All {step} steps are done, in {took}.", step, total)
    if status == "interrupted":
        text = f"Stopped after step {step}. {message}".rstrip()
        return RunStatus("interrupted", text, step, total)
    return RunStatus("failed", f"Failed after step {step}: {message}", step, total)


def _last_seen(folder: Path, state: RunState, who: str) -> str:
    """Describe what was last known of a run that ended without a word.

    The run's own record is newer than its log, if there is one.
    """
    record = read_json(folder, LAST_SEEN_FILE)
    seen = record if isinstance(record, dict) else {}
    step, total = _progress(state)
    step = max(step, _integer(seen.get("step")))
    at = max(state.last_time, _seconds(seen.get("time")))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    facts = [f"step {step} of {total}" if total else f"step {step}"]
    phase = seen.get("phase")
    if isinstance(phase, str) and phase:
        facts.append(phase)
    host = _integer(seen.get("rss")) or _integer(state.last_value("memory_used", "host"))
    if host:
        facts.append(f"{format_bytes(host)} of host memory in use")
    device = _integer(state.last_value("memory_used", "device"))
    if device:
        facts.append(f"{format_bytes(device)} of device memory in use")
    text = (
        f"{who} ended without a last message: it was killed, or the machine went down. "
        f"Last seen at {when}: {', '.join(facts)}."
    )
    text = f"{text} {_memory_advice(state, seen)}"
    if (folder / CRASH_FILE).is_file() and (folder / CRASH_FILE).stat().st_size:
        text += f"{CRASH_FILE} has the Python stack of a crash. "
    return f"{text}Run the same command again to resume."


def _memory_advice(state: RunState, seen: Mapping[str, object]) -> str:
    def sensor(name: str) -> int:
        return _integer(seen.get(name)) or _integer(
            state.last_value("device_sensors", f"host/{name}")
        )

    used, limit = sensor("cgroup_used"), sensor("cgroup_limit")
    if limit and used / limit > NEARLY_FULL:
        return (
            f"Its container had used {format_bytes(used)} of {format_bytes(limit)}: it was "
            "probably killed for lack of memory. "
        )
    free, total = sensor("memory_available"), sensor("memory_total")
    if free and total and free / total < 1 - NEARLY_FULL:
        return (
            f"The machine had only {format_bytes(free)} of {format_bytes(total)} of memory left: "
            "the run was probably killed for lack of memory. "
        )
    return ""


def is_locked(folder: Path) -> bool:
    """Return True if a process on this machine holds the lock of a run folder.

    Reads `/proc/locks`: taking the lock, even for a moment, could stop a run that starts. The file
    systems of containers may have other numbers there, so a lock also counts if its process is the
    one that the file names, and has the file open.
    """
    path = folder / LOCK_FILE
    owner = read_json(folder, LOCK_FILE)
    pid = str(owner[0]) if isinstance(owner, list) and owner else ""
    try:
        inode = str(path.stat().st_ino)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    # As in `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`.
    locks = [line.split() for line in lines if " FLOCK " in line]
    if any(lock[-3].rpartition(":")[2] == inode for lock in locks):
        return True
    return any(pid == lock[-4] for lock in locks) and _has_open(pid, path)


def _has_open(pid: str, path: Path) -> bool:
    """Return True if a process has this file open; False if that cannot be read."""
    try:
        return any(path.samefile(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _integer(value: object) -> int:
    """Return a number of a log; 0 if it is damaged."""
    return int(_seconds(value))


def _seconds(value: object) -> float:
    """Return a number of a log; 0 if it is damaged, or too large for any of its numbers."""
    return float(value) if isinstance(value, int | float) and abs(value) < 2**53 else 0.0
