from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from gracetune.data.prefetch import Prefetch, prefetched, worker_threads
from gracetune.errors import DataError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS = Prefetch(num_workers=3, depth=5, timeout_s=20)
PROCESSES = THREADS._replace(num_workers=2, processes=True)
WAYS = [Prefetch(), THREADS, PROCESSES]
IDS = ["inline", "threads", "processes"]


def double(task: int) -> int:
    time.sleep(0.003 * (task % 3))
    return 2 * task


def fail_at_seven(task: int) -> int:
    if task == 7:
        raise ValueError("seven is not to be had")
    return task


def refuse_seven(task: int) -> int:
    if task == 7:
        raise DataError("seven is broken.")
    return task


def exit_at_seven(task: int) -> int:
    if task == 7:
        os._exit(3)
    return task


def killed_at_seven(task: int) -> int:
    if task == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def hang_at_seven(task: int) -> int:
    if task == 7:
        time.sleep(3600)
    return task


def stop_in_the_middle_of_an_answer(task: int) -> bytes:
    """A large answer blocks in the pipe; the process stops before it is all through."""
    if task == 7:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return bytes(1 << 30)
    return b""


def name(task: int) -> str:
    return f"sample {task}"


def take_until_it_ends(work: object, settings: Prefetch) -> tuple[list[object], str, float]:
    """What was delivered, the error, and how long its taker waited for it."""
    taken: list[object] = []
    start = time.monotonic()
    with pytest.raises(RunFailedError) as caught:
        for result in prefetched(range(20), work, name, settings):
            taken.append(result)
            start = time.monotonic()
    return taken, str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("settings", WAYS, ids=IDS)
def test_results_come_in_order(settings: Prefetch) -> None:
    assert list(prefetched(range(40), double, name, settings)) == [2 * n for n in range(40)]
    assert list(prefetched([], double, name, settings)) == []


@pytest.mark.parametrize("settings", WAYS, ids=IDS)
def test_a_worker_that_raises_ends_the_run_by_name(settings: Prefetch) -> None:
    taken, message, _ = take_until_it_ends(fail_at_seven, settings)
    assert taken == list(range(7))
    assert message.startswith("sample 7 cannot be loaded: ")
    assert "ValueError: seven is not to be had. Fix" in message


@pytest.mark.parametrize("settings", WAYS[:2], ids=IDS[:2])
def test_our_own_errors_keep_their_words(settings: Prefetch) -> None:
    _, message, _ = take_until_it_ends(refuse_seven, settings)
    assert message == "sample 7 cannot be loaded: seven is broken. Fix or remove it."


@pytest.mark.parametrize(("work", "code"), [(exit_at_seven, 3), (killed_at_seven, -signal.SIGKILL)])
def test_a_process_that_dies_ends_the_run_by_name(work: object, code: int) -> None:
    taken, message, waited = take_until_it_ends(work, PROCESSES)
    assert taken == list(range(7))
    assert message.startswith(
        f"sample 7 cannot be loaded: its worker process died with exit code {code}."
    )
    assert waited < PROCESSES.timeout_s / 2


@pytest.mark.parametrize("settings", [THREADS, PROCESSES], ids=IDS[1:])
def test_a_worker_that_hangs_ends_the_run_in_time(settings: Prefetch) -> None:
    # processes take a while to start, which counts as waiting for their first result
    taken, message, waited = take_until_it_ends(hang_at_seven, settings._replace(timeout_s=4))
    assert taken == list(range(7))
    assert message.startswith("sample 7: loading it took longer than timeout_s (4")
    assert 3.9 < waited < 6


def test_a_process_that_stops_while_answering_ends_the_run_in_time() -> None:
    settings = PROCESSES._replace(timeout_s=4)
    taken, message, waited = take_until_it_ends(stop_in_the_middle_of_an_answer, settings)
    assert len(taken) == 7
    assert message.startswith("sample 7: loading it took longer than")
    assert waited < 6


def test_a_hanging_thread_does_not_keep_python_from_ending() -> None:
    program = (
        "import time; from gracetune.data.prefetch import *\n"
        "list(prefetched([1], lambda _: time.sleep(3600), str, Prefetch(2, 2, 0.2)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.returncode == 1
    assert "1: loading it took longer than timeout_s (0.2 s)" in run.stderr


def test_no_more_than_depth_is_done_ahead() -> None:
    started: list[int] = []
    results = prefetched(range(100), started.append, name, THREADS)
    for taken in range(1, 30):
        next(results)
        time.sleep(0.002)
        assert len(started) <= taken + THREADS.depth
    results.close()  # type: ignore[attr-defined]


def test_tasks_are_handed_out_by_the_taker_alone() -> None:
    """An order that keeps an epoch is no thread's to call."""
    handed: set[str] = set()

    def tasks() -> Iterator[int]:
        for number in range(30):
            handed.add(threading.current_thread().name)
            yield number

    list(prefetched(tasks(), double, name, THREADS))
    assert handed == {threading.current_thread().name}


def test_whoever_leaves_early_leaves_nothing_behind() -> None:
    before = {child.pid for child in psutil.Process().children()}
    threads = set(threading.enumerate())
    for settings in (THREADS, PROCESSES):
        results = prefetched(range(1000), double, name, settings)
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
    left = {child.pid for child in psutil.Process().children()} - before
    assert left == set()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_children_end_with_a_parent_that_is_killed(tmp_path: object) -> None:
    program = (
        "import sys, time; from gracetune.data.prefetch import *; import psutil\n"
        "if __name__ == '__main__':\n"
        "    it = prefetched(range(9), abs, str, Prefetch(2, 4, 30, processes=True)); next(it)\n"
        "    print(*[c.pid for c in psutil.Process().children()], flush=True); time.sleep(60)\n"
    )
    path = tmp_path / "parent.py"  # type: ignore[operator]
    path.write_text(program)
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) >= 2
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_workers_default_to_the_cpus() -> None:
    assert worker_threads(None, 4, 9.0).num_workers == len(os.sched_getaffinity(0))
    assert worker_threads(3, 4, 9.0) == Prefetch(3, 4, 9.0)
