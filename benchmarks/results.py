"""Parse the benchmarks' common arguments, and write and read their result files.

A result file has the date, the commit, the machine, the script and the measured figures.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

FOLDER = Path(__file__).parent / "results"


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the arguments that all benchmarks have, and parse the command line.

    `--rehearse` runs the whole script on the CPU in seconds, to test it: with tiny sizes, and
    without compiling. The figures mean nothing and are written to a temporary folder.
    """
    parser.add_argument(
        "--rehearse", action="store_true", help="test the script: tiny sizes on the CPU"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--commit", default="", help="commit to record if git is not available")
    arguments = parser.parse_args()
    if arguments.rehearse:
        torch.compiler.set_stance("force_eager")
        arguments.out = arguments.out or Path(tempfile.mkdtemp(prefix="rehearsal-"))
        print(f"rehearsal: compiled parts run eagerly; results go to {arguments.out}")
        if arguments.out.resolve() == FOLDER:
            parser.error(f"--out: a rehearsal does not write to {FOLDER}")
    arguments.out = arguments.out or FOLDER
    return arguments


def die_with_parent() -> None:
    """Let this process be killed when its parent ends, so that it keeps no GPU busy.

    A parent that is killed itself cannot end its child processes.
    """
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def dying_with_parent(command: Sequence[object]) -> list[str]:
    """Return a command that runs another one in a process that is killed when this one ends."""
    prepare = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    prepare += "os.execvp(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", prepare, *map(str, command)]


def start_forked(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Call a function in a forked process, which is killed when this one ends.

    It need not import torch again, which takes 8 to 10 seconds on some machines. If a fork of this
    process could fail, a new interpreter imports the running script, and is forked instead. If CUDA
    is initialized, an import may have done that, so each process is a new interpreter.
    """
    reason = why_not_to_fork()
    method = "fork" if not reason else "spawn" if cuda_is_initialized() else "forkserver"
    context = multiprocessing.get_context(method)
    if reason:
        print(f"forked from a new interpreter, because {reason}")
        context.set_forkserver_preload([Path(sys.argv[0]).stem])
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_call_alone, args=(function, *arguments))
    process.start()
    return process


def _call_alone(function: Callable[..., object], *arguments: object) -> None:
    die_with_parent()
    function(*arguments)


def why_not_to_fork() -> str:
    """Return why a fork of this process could hang or not use the GPU; empty if it can do both.

    A pool of threads (of OpenMP, or of Rust's rayon in blake3) is not forked, but awaited. NumPy
    has one as well, unless OPENBLAS_NUM_THREADS is 1.
    """
    for _ in range(100):  # threads that were joined may take a moment to end
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads == 1:
            break
        time.sleep(0.01)
    else:
        return f"this process has {threads} threads"
    return "CUDA is initialized" if cuda_is_initialized() else ""


def cuda_is_initialized() -> bool:
    """Return True if this process has initialized the CUDA driver, with torch or without."""
    not_initialized = 3  # CUDA_ERROR_NOT_INITIALIZED: the answer to any call before cuInit
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(
    name: str, figures: Mapping[str, object], folder: Path = FOLDER, commit: str = ""
) -> Path:
    """Write `results/NAME.json`; nested figures become dotted names."""
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or this_commit(),
        "machine": this_machine(),
        "script": f"benchmarks/{Path(sys.argv[0]).name}",
        "figures": dict(flatten(figures)),
    }
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(path)  # so that a script that is killed leaves the earlier figures
    return path


def read(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the figures of a result file; empty if there is no file."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def previous(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures that a measurement adds its own to: those in `--out`, else the committed.

    So a measurement on another machine, into an empty folder, loses no earlier ones. A rehearsal
    starts with none.
    """
    if arguments.rehearse:
        return {}
    return read(name, arguments.out) or read(name, FOLDER)


def flatten(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every figure with its dotted name."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def this_commit() -> str:
    """Return the commit of this repository, marked `-dirty` if it has uncommitted changes."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def this_machine() -> str:
    """Describe the kind of machine, without its host name."""
    gpu = f"{gpu_name()}, " if gpu_name() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{gpu}{platform.machine()} CPU, {versions}"


@functools.cache
def gpu_name() -> str:
    """Return the name of the GPU, or an empty string if there is none.

    This process then uses neither CUDA nor NVML, so that it can be forked.
    """
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.partition("\n")[0]
