"""Forked processes: checks that change their process for good, and commands that start fast."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_NOBODY = 65534
_PR_SET_DUMPABLE = 4


def is_true_in_fork(claim: Callable[[], bool], *, as_nobody: bool = False) -> bool:
    """Return whether `claim()` is true in a forked child.

    With `as_nobody`, a child of root first becomes the user nobody, because file permissions do not
    apply to root.
    """
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about forking with threads; this child takes no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 2
        try:
            if as_nobody and os.geteuid() == 0:
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            code = 0 if claim() else 1
        finally:
            if code == 2:
                traceback.print_exc()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


@contextmanager
def undumpable_process() -> Iterator[None]:
    """Keep other processes, also of the same user, from opening this one's file descriptors."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_DUMPABLE, 1)


class PythonProcess:
    """A Python command line, such as `-m gracetune train run.json`, in a forked process.

    Importing torch and diffusers takes longer than most runs of the tests. The fork server of
    `multiprocessing` imports them once; then each command is a process with its own signals,
    environment, working directory, output and exit code. The methods are those of
    `subprocess.Popen`. The start and the exit of an interpreter, and code that runs before torch
    is imported, need `subprocess` itself: a forked process ends with `os._exit`, without `atexit`
    functions and destructors, so that a crash in them is not seen.
    """

    def __init__(
        self, *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.args = [str(word) for word in words]
        folder = Path(tempfile.mkdtemp(prefix="gracetune-output-"))
        weakref.finalize(self, shutil.rmtree, folder)
        self._outputs = (folder / "stdout", folder / "stderr")
        for file in self._outputs:
            file.touch()
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(_PRELOADED)
        self._process = server.Process(
            target=_run_python,
            args=(
                self.args,
                self._outputs,
                cwd or Path.cwd(),
                dict(os.environ if env is None else env),
            ),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, the negative number of the signal that ended the process, or None."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the process and return its standard output and standard error."""
        self.wait(timeout)
        out, err = (file.read_text() for file in self._outputs)
        return out, err


def run_python(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a Python command line to its end, as `subprocess.run` does, in a `PythonProcess`."""
    (done,) = _finish([PythonProcess(*words, cwd=cwd, env=env)], timeout)
    return done


def run_ranks(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    count: int = 2,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a Python command line to its end on several ranks, without a launcher."""
    ranks = rank_environments(os.environ if env is None else env, count)
    return _finish([PythonProcess(*words, cwd=cwd, env=each) for each in ranks], timeout)


def rank_environments(env: Mapping[str, str], count: int = 2) -> list[dict[str, str]]:
    """Return the environments of ranks on this machine, with the variables of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = map(str, range(count))
    return [{**env, **group, **sizes, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def _finish(
    processes: list[PythonProcess], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    try:
        outputs = [process.communicate(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.wait(), *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


_PRELOADED = [
    "gracetune.cli.train",
    "gracetune.train.run",
    "gracetune.models.flux",
    "gracetune.models.qwen_image",
    "gracetune.models.stable_audio",
    "gracetune.models.tiny",
    "gracetune.models.wan22",
]


def _run_python(
    words: list[str], outputs: tuple[Path, Path], cwd: Path, env: dict[str, str]
) -> None:
    """Do in this process what `python WORDS` does after the interpreter has started."""
    import torch

    for stream, file in zip((sys.stdout, sys.stderr), outputs, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    threads = int(env.get("OMP_NUM_THREADS", torch.get_num_threads()))
    if threads != torch.get_num_threads():  # OpenMP has read the variable of the server
        torch.set_num_threads(threads)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
