"""One test module of a host's, in a process of its own that is made quickly: a fork of one that has
imported what nearly all of them import.

A module that does not wholly pass so may only dislike what was imported before it, and has a second
way: a fresh interpreter. Every test is written down as it ends, so that a module that hangs or dies
still says what it had passed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import TextIO

FORK, FRESH = "fork", "fresh"
TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Ran:
    """What one run of a module came to."""

    module: str
    hooks: bool
    way: str
    ended: str
    """`done`, `timed out`, `died (code)`."""
    seconds: float
    passed: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)
    """Tests that failed, erred or were skipped."""

    @property
    def wholly_passed(self) -> bool:
        failed = any(kind != "skipped" for kind in self.others.values())
        return self.ended == "done" and not failed and bool(self.passed or self.others)

    def line(self, stamp: str) -> str:
        return json.dumps({"stamp": stamp, **asdict(self)})


class _Noted(unittest.TextTestResult):
    """Writes each test's end at once."""

    notes: TextIO

    def _note(self, kind: str, test: object) -> None:
        name = test.id() if isinstance(test, unittest.TestCase) else str(test)
        self.notes.write(json.dumps([kind, name]) + "\n")
        self.notes.flush()

    def addSuccess(self, test):  # noqa: N802
        super().addSuccess(test)
        self._note("passed", test)

    def addExpectedFailure(self, test, err):  # noqa: N802
        super().addExpectedFailure(test, err)
        self._note("passed", test)

    def addUnexpectedSuccess(self, test):  # noqa: N802
        super().addUnexpectedSuccess(test)
        self._note("failed", test)

    def addError(self, test, err):  # noqa: N802
        super().addError(test, err)
        self._note("error", test)

    def addFailure(self, test, err):  # noqa: N802
        super().addFailure(test, err)
        self._note("failed", test)

    def addSkip(self, test, reason):  # noqa: N802
        super().addSkip(test, reason)
        self._note("skipped", test)

    def addSubTest(self, test, subtest, err):  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note("failed", subtest)


def run_here(module: str, notes: Path, hook: Callable[[], None] | None) -> None:
    """The module's tests in this process: as unittest finds them, and plain functions too."""
    if hook is not None:
        hook()
    with notes.open("w") as file:
        noted = type("Noted", (_Noted,), {"notes": file})
        suite = unittest.defaultTestLoader.loadTestsFromName(f"tests.{module}")
        loaded = sys.modules.get(f"tests.{module}")  # none: the suite has the reason for it
        suite.addTests([] if loaded is None else _functions(vars(loaded)))
        unittest.TextTestRunner(verbosity=2, resultclass=noted).run(suite)


def _functions(names: dict[str, object]) -> list[unittest.TestCase]:
    """What only pytest would find."""
    return [
        unittest.FunctionTestCase(each)
        for name, each in names.items()
        if name.startswith("test_")
        and isinstance(each, FunctionType)
        and each.__module__ == names["__name__"]
    ]


@dataclass(frozen=True)
class Runner:
    """Runs modules of `folder`, each in a home and a temporary folder that are thrown away."""

    folder: Path
    logs: Path
    hook: Callable[[], None]
    fresh: Callable[[str, Path, bool], list[str]]
    """The command that runs a module in a fresh interpreter."""

    def run(self, module: str, hooks: bool, way: str, limit_s: float) -> Ran:
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{module}.{way}.{'with' if hooks else 'without'}.log"
        room = Path(tempfile.mkdtemp(prefix="upstream-"))
        try:
            notes, began = room / "notes", time.monotonic()
            start = self._fork if way == FORK else self._start
            child = start(module, hooks, room, log)
            ended = self._wait(child, began + limit_s)
            passed, others = _read(notes)
            seconds = round(time.monotonic() - began, 1)
            return Ran(module, hooks, way, ended, seconds, passed, others)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _fork(self, module: str, hooks: bool, room: Path, log: Path) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            os.setsid()
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(target, number)
            os.environ.update(_places(room))
            tempfile.tempdir = None
            os.chdir(self.folder)
            run_here(module, room / "notes", self.hook if hooks else None)
            code = 0
        except BaseException:  # noqa: BLE001  a child ends here, whatever a test module throws
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _start(self, module: str, hooks: bool, room: Path, log: Path) -> int:
        with log.open("w") as file:
            return subprocess.Popen(
                self.fresh(module, room / "notes", hooks),
                cwd=self.folder,
                env=os.environ | _places(room),
                stdout=file,
                stderr=file,
                start_new_session=True,
            ).pid

    def _wait(self, child: int, end: float) -> str:
        """The module's whole session goes with it: some start servers and workers."""
        ended = TIMED_OUT
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                ended = "done" if code == 0 else f"died ({code})"
                break
            time.sleep(0.02)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            return ended
        if ended == TIMED_OUT:
            os.waitpid(child, 0)
        return ended


def _places(room: Path) -> dict[str, str]:
    made = {"HOME": room / "home", "TMPDIR": room / "tmp"}
    for path in made.values():
        path.mkdir()
    return {name: str(path) for name, path in made.items()}


def _read(notes: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    if not notes.exists():
        return (), {}
    pairs = [json.loads(line) for line in notes.read_text().splitlines()]
    others = {name: kind for kind, name in pairs if kind != "passed"}
    return tuple(sorted({name for kind, name in pairs if kind == "passed"} - {*others})), others


def warm(modules: list[str]) -> None:
    """Import once what every child would import again."""
    for module in modules:
        import_module(module)
