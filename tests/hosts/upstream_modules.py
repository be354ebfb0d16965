"""Run one test module of a host in its own process.

The process is a fork of one that has already imported what nearly all modules import, which is
fast. A module that fails there may only depend on the order of imports, so it is also run in a
fresh interpreter. Every test is recorded when it ends, so a module that hangs or dies still tells
what had passed.
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
class ModuleRun:
    """The result of one run of a module."""

    module: str
    hooks: bool
    way: str
    ended: str
    """`done`, `timed out` or `died (code)`."""
    seconds: float
    passed: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)
    """Tests that failed, raised an error or were skipped, and which of these."""

    @property
    def all_passed(self) -> bool:
        failed = any(kind != "skipped" for kind in self.others.values())
        return self.ended == "done" and not failed and bool(self.passed or self.others)

    def line(self, stamp: str) -> str:
        return json.dumps({"stamp": stamp, **asdict(self)})


class _RecordingResult(unittest.TextTestResult):
    """Writes the result of each test to a file as soon as it ends."""

    records: TextIO

    def _record(self, kind: str, test: object) -> None:
        name = test.id() if isinstance(test, unittest.TestCase) else str(test)
        self.records.write(json.dumps([kind, name]) + "\n")
        self.records.flush()

    def addSuccess(self, test):  # noqa: N802
        super().addSuccess(test)
        self._record("passed", test)

    def addExpectedFailure(self, test, err):  # noqa: N802
        super().addExpectedFailure(test, err)
        self._record("passed", test)

    def addUnexpectedSuccess(self, test):  # noqa: N802
        super().addUnexpectedSuccess(test)
        self._record("failed", test)

    def addError(self, test, err):  # noqa: N802
        super().addError(test, err)
        self._record("error", test)

    def addFailure(self, test, err):  # noqa: N802
        super().addFailure(test, err)
        self._record("failed", test)

    def addSkip(self, test, reason):  # noqa: N802
        super().addSkip(test, reason)
        self._record("skipped", test)

    def addSubTest(self, test, subtest, err):  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._record("failed", subtest)


def run_here(module: str, records: Path, hook: Callable[[], None] | None) -> None:
    """Run a module's tests in this process: those of unittest, and plain test functions."""
    if hook is not None:
        hook()
    with records.open("w") as file:
        recording = type("Recording", (_RecordingResult,), {"records": file})
        suite = unittest.defaultTestLoader.loadTestsFromName(f"tests.{module}")
        loaded = sys.modules.get(
            f"tests.{module}"
        )  # None if it cannot be imported; the suite reports why
        suite.addTests([] if loaded is None else _functions(vars(loaded)))
        unittest.TextTestRunner(verbosity=2, resultclass=recording).run(suite)


def _functions(names: dict[str, object]) -> list[unittest.TestCase]:
    """Return the test functions, which unittest does not find itself."""
    return [
        unittest.FunctionTestCase(each)
        for name, each in names.items()
        if name.startswith("test_")
        and isinstance(each, FunctionType)
        and each.__module__ == names["__name__"]
    ]


@dataclass(frozen=True)
class Runner:
    """Runs modules of `folder`, each with its own temporary HOME and TMPDIR."""

    folder: Path
    logs: Path
    hook: Callable[[], None]
    fresh: Callable[[str, Path, bool], list[str]]
    """The command that runs a module in a fresh interpreter."""

    def run(self, module: str, hooks: bool, way: str, limit_s: float) -> ModuleRun:
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{module}.{way}.{'with' if hooks else 'without'}.log"
        scratch = Path(tempfile.mkdtemp(prefix="upstream-"))
        try:
            records, began = scratch / "records", time.monotonic()
            start = self._fork if way == FORK else self._start
            child = start(module, hooks, scratch, log)
            ended = self._wait(child, began + limit_s)
            passed, others = _read(records)
            seconds = round(time.monotonic() - began, 1)
            return ModuleRun(module, hooks, way, ended, seconds, passed, others)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fork(self, module: str, hooks: bool, scratch: Path, log: Path) -> int:
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
            os.environ.update(_places(scratch))
            tempfile.tempdir = None
            os.chdir(self.folder)
            run_here(module, scratch / "records", self.hook if hooks else None)
            code = 0
        except BaseException:  # noqa: BLE001  the child ends here, whatever a test module raises
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _start(self, module: str, hooks: bool, scratch: Path, log: Path) -> int:
        with log.open("w") as file:
            return subprocess.Popen(
                self.fresh(module, scratch / "records", hooks),
                cwd=self.folder,
                env=os.environ | _places(scratch),
                stdout=file,
                stderr=file,
                start_new_session=True,
            ).pid

    def _wait(self, child: int, end: float) -> str:
        """Wait for a module, then kill its session: some start servers and workers."""
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


def _places(scratch: Path) -> dict[str, str]:
    folders = {"HOME": scratch / "home", "TMPDIR": scratch / "tmp"}
    for path in folders.values():
        path.mkdir()
    return {name: str(path) for name, path in folders.items()}


def _read(records: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    if not records.exists():
        return (), {}
    pairs = [json.loads(line) for line in records.read_text().splitlines()]
    others = {name: kind for kind, name in pairs if kind != "passed"}
    return tuple(sorted({name for kind, name in pairs if kind == "passed"} - {*others})), others


def import_all(modules: list[str]) -> None:
    """Import modules once, for all children to inherit."""
    for module in modules:
        import_module(module)
