from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from gracetune.data import prefetch
from gracetune.data.prefetch import Prefetch, prefetched, worker_threads
from gracetune.errors import DataError, RunFailedError
from gracetune.events.run_control import STOP_SIGNALS

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


def stop_while_sending(task: int) -> bytes:
    """Send a large result, and stop the process while it blocks on the full pipe."""
    if task == 7:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return bytes(1 << 30)
    return b""


def name(task: int) -> str:
    return f"sample {task}"


@pytest.fixture
def timeouts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timeouts with which the consumer waited for results, one for each wait."""
    seconds: list[float] = []
    wait_for = prefetch._wait_for

    def record(slot: object, name: object, timeout_s: float) -> object:
        seconds.append(timeout_s)
        return wait_for(slot, name, timeout_s)

    monkeypatch.setattr(prefetch, "_wait_for", record)
    return seconds


def take_until_error(work: object, settings: Prefetch) -> tuple[list[object], str]:
    """Return the results before the error, and the error's message; no process is left."""
    taken: list[object] = []
    with pytest.raises(RunFailedError) as caught:
        for result in prefetched(range(20), work, name, settings):
            taken.append(result)
    assert multiprocessing.active_children() == []
    return taken, str(caught.value)


@pytest.mark.parametrize("settings", WAYS, ids=IDS)
def test_results_are_in_the_order_of_tasks(settings: Prefetch) -> None:
    assert list(prefetched(range(40), double, name, settings)) == [2 * n for n in range(40)]
    assert list(prefetched([], double, name, settings)) == []


@pytest.mark.parametrize("settings", WAYS, ids=IDS)
def test_an_exception_in_a_worker_ends_the_run_and_names_the_sample(settings: Prefetch) -> None:
    taken, message = take_until_error(fail_at_seven, settings)
    assert taken == list(range(7))
    assert message.startswith("sample 7 cannot be loaded: ")
    assert "ValueError: seven is not to be had. Fix" in message


@pytest.mark.parametrize("settings", WAYS[:2], ids=IDS[:2])
def test_the_message_of_a_gracetune_error_is_kept(settings: Prefetch) -> None:
    _, message = take_until_error(refuse_seven, settings)
    assert message == "sample 7 cannot be loaded: seven is broken. Fix or remove it."


@pytest.mark.parametrize(("work", "code"), [(exit_at_seven, 3), (killed_at_seven, -signal.SIGKILL)])
def test_a_dead_worker_process_ends_the_run_and_names_the_sample(work: object, code: int) -> None:
    # much longer than the time limit of a test: the error must not wait for it
    taken, message = take_until_error(work, PROCESSES._replace(timeout_s=3600))
    assert taken == list(range(7))
    assert message.startswith(
        f"sample 7 cannot be loaded: its worker process died with exit code {code}."
    )


@pytest.mark.parametrize("settings", [THREADS, PROCESSES], ids=IDS[1:])
def test_a_hanging_worker_ends_the_run_after_one_timeout(
    settings: Prefetch, timeouts: list[float]
) -> None:
    # processes take a while to start, which counts as waiting for their first result
    start = time.monotonic()
    taken, message = take_until_error(hang_at_seven, settings._replace(timeout_s=4))
    assert taken == list(range(7))
    assert message.startswith("sample 7: loading it took longer than timeout_s (4")
    assert time.monotonic() - start >= 4
    assert timeouts == [4] * 8, "one wait for each sample, including the one that hangs"


def test_a_process_stopped_while_sending_its_result_ends_the_run(timeouts: list[float]) -> None:
    settings = PROCESSES._replace(timeout_s=4)
    taken, message = take_until_error(stop_while_sending, settings)
    assert len(taken) == 7
    assert message.startswith("sample 7: loading it took longer than")
    assert timeouts == [4] * 8


def test_only_one_thread_at_a_time_joins_a_killed_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    child: prefetch._Child[int, int] = prefetch._Child(hang_at_seven)
    joining: list[str] = []
    overlaps: list[str] = []
    join = child._process.join

    def record(timeout: float) -> None:
        overlaps.extend(joining)
        joining.append(threading.current_thread().name)
        time.sleep(0.2)
        join(timeout)
        joining.pop()

    monkeypatch.setattr(child._process, "join", record)
    errors: list[RunFailedError] = []

    def wait_for_result() -> None:
        with pytest.raises(RunFailedError) as caught:
            child.do(7)
        errors.append(caught.value)

    waiter = threading.Thread(target=wait_for_result)
    waiter.start()
    child.kill()
    waiter.join()
    assert overlaps == []
    assert "exit code -9" in str(errors[0])


def test_a_hanging_thread_does_not_keep_the_process_alive() -> None:
    program = (
        "import time; from gracetune.data.prefetch import *\n"
        "list(prefetched([1], lambda _: time.sleep(3600), str, Prefetch(2, 2, 0.2)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.returncode == 1
    assert "1: loading it took longer than timeout_s (0.2 s)" in run.stderr


def test_no_more_than_depth_tasks_are_prefetched() -> None:
    started: list[int] = []
    results = prefetched(range(100), started.append, name, THREADS)
    for taken in range(1, 30):
        next(results)
        time.sleep(0.002)
        assert len(started) <= taken + THREADS.depth
    results.close()  # type: ignore[attr-defined]


def test_tasks_are_iterated_only_by_the_consuming_thread() -> None:
    """A batch order has state and is not thread-safe."""
    threads: set[str] = set()

    def tasks() -> Iterator[int]:
        for number in range(30):
            threads.add(threading.current_thread().name)
            yield number

    list(prefetched(tasks(), double, name, THREADS))
    assert threads == {threading.current_thread().name}


def raise_stop_signals(task: int) -> int:
    """Send this worker every signal that a launcher sends to the whole process group."""
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    return task


def test_worker_processes_leave_stop_signals_to_the_run() -> None:
    """Without them, the run could not finish the step before it saves."""
    assert list(prefetched(range(3), raise_stop_signals, name, PROCESSES)) == [0, 1, 2]


def test_closing_early_ends_threads_and_processes() -> None:
    before = {child.pid for child in psutil.Process().children()}
    threads = set(threading.enumerate())
    for settings in (THREADS, PROCESSES):
        results = prefetched(range(1000), double, name, settings)
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
    left = {child.pid for child in psutil.Process().children()} - before
    assert left == set()
    for thread in set(threading.enumerate()) - threads:
        thread.join()  # a thread that never ends exceeds the time limit of a test


def test_worker_processes_end_if_their_parent_is_killed(tmp_path: object) -> None:
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


@pytest.mark.parametrize(("num_cpus", "expected"), [(1, 1), (72, 72), (73, 72), (288, 72)])
def test_num_workers_defaults_to_the_number_of_cpus(
    monkeypatch: pytest.MonkeyPatch, num_cpus: int, expected: int
) -> None:
    """At most the cores of one Grace CPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cpus)))
    assert worker_threads(None, 4, 9.0).num_workers == expected
    assert worker_threads(3, 4, 9.0) == Prefetch(3, 4, 9.0)
