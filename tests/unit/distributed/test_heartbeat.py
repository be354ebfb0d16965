"""Two monitors watch each other in one process, and slow ranks are found."""

import os
import threading
import time
from queue import Queue

import pytest
import torch.distributed as dist

from gracetune.config.schema import DistributedSection
from gracetune.distributed import heartbeat
from gracetune.distributed.heartbeat import (
    LostRankError,
    RankMonitor,
    StragglerWatch,
    address_towards,
    watch_ranks,
)
from gracetune.distributed.ranks import SINGLE, RankGroup
from gracetune.errors import ConfigError, InterruptedRunError, RunFailedError
from gracetune.events.types import CheckpointSaved, Notice, StageProgress, StepDone

# Two monitors in one process


class ThreadGroup(RankGroup):
    """A group of two ranks that are threads of this process."""

    def __init__(self, rank, barrier, values):
        super().__init__(rank, ["a", "a"], ["one", "one"])
        self._barrier, self._values = barrier, values

    def gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        found = [self._values[rank] for rank in range(2)]
        self._barrier.wait()
        return found

    def broadcast(self, value):
        return self.gather(value)[0]


SETTINGS = DistributedSection(heartbeat_s=0.2, stall_timeout_s=1.0)


def run_two(first, second):
    """Run a function on each of two ranks; return their errors."""
    barrier, values, errors = threading.Barrier(2, timeout=20), {}, [None, None]

    def call(rank, function):
        try:
            group = ThreadGroup(rank, barrier, values)
            with watch_ranks(group, SETTINGS, lambda: "Start again.") as monitor:
                function(monitor)
        except BaseException as error:  # noqa: BLE001
            errors[rank] = error

    threads = [threading.Thread(target=call, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def lose_contact(monitor):
    """Fail as gloo does, a moment after the other rank has failed."""
    time.sleep(0.3)
    raise dist.DistBackendError("Connection closed by peer [10.0.0.7]:4711")


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_rank_is_named_by_the_other(failing):
    def fail(monitor):
        monitor.progress("step 3")
        raise ConfigError("datasets[0] is empty.")

    functions = [fail, lose_contact] if failing == 0 else [lose_contact, fail]
    errors = run_two(*functions)
    assert isinstance(errors[failing], ConfigError)
    lost = errors[1 - failing]
    assert isinstance(lost, LostRankError)
    assert f"rank {failing} on one (process {os.getpid()}, " in str(lost)
    assert "s ago at step 3) has failed: datasets[0] is empty. So rank" in str(lost)
    assert str(lost).endswith("ends, too. Start again.")
    assert lost.exit_code == 2


def test_ranks_that_end_at_different_times_are_not_taken_for_dead():
    errors = run_two(lambda monitor: None, lambda monitor: time.sleep(2.0))
    assert errors == [None, None]


def test_ranks_with_news_in_every_tick_still_read_of_each_other():
    def train(monitor):
        for step in range(60):
            monitor.progress(f"step {step}")
            time.sleep(0.025)
        heard[monitor._group.rank] = monitor._table.beats[1 - monitor._group.rank].activity

    heard = {}
    assert run_two(train, train) == [None, None]
    assert all(int(activity.removeprefix("step ")) > 0 for activity in heard.values()), heard


def test_a_rank_that_was_stopped_by_the_user_has_not_failed():
    def stop(monitor):
        raise InterruptedRunError("stopped after step 3")

    errors = run_two(stop, lambda monitor: time.sleep(0.5))
    assert isinstance(errors[0], InterruptedRunError)
    assert errors[1] is None


def test_an_error_of_which_nothing_is_known_names_the_address():
    errors = run_two(lose_contact, lambda monitor: time.sleep(3.0))
    assert "contact to another rank at 10.0.0.7 is lost" in str(errors[0])


def test_a_process_that_hangs_is_ended_with_a_report(monkeypatch, capfd):
    """Rank 1 fails, and the main thread of rank 0 does not notice it."""
    monkeypatch.setattr(heartbeat, "GRACE_S", 0.1)
    codes, reports = Queue(), Queue()

    def hang(monitor):
        monitor._exit_process = codes.put
        with monitor.reporting_to(reports.put):
            assert codes.get(timeout=10) == 1

    def fail(monitor):
        raise ValueError("bad sample")

    errors = run_two(hang, fail)
    assert errors[0] is None
    assert isinstance(errors[1], ValueError)
    report = reports.get(timeout=1)
    assert "has failed: ValueError: bad sample. So rank 0 on one ends, too." in report
    assert f"gracetune: {report}\n" in capfd.readouterr().err


def test_ranks_that_cannot_reach_rank_0_say_so(monkeypatch):
    group = ThreadGroup(1, threading.Barrier(1), {0: "127.0.0.1:1: refused", 1: ""})
    monitor = RankMonitor(group, SETTINGS)
    monkeypatch.setattr(monitor, "_connect", lambda: (None, ""))
    with pytest.raises(RunFailedError, match=r"rank 0 on one cannot connect .* refused"):
        monitor.start()


def test_one_process_watches_nothing():
    before = threading.active_count()
    with watch_ranks(SINGLE, SETTINGS) as monitor:
        monitor.progress("step 1")
        assert threading.active_count() == before
        lost = pytest.raises(LostRankError, match="contact to another rank")
        with lost, monitor.naming_lost_ranks():
            raise dist.DistNetworkError("Connection reset by peer")


def test_events_are_signs_of_progress():
    monitor = RankMonitor(SINGLE, SETTINGS)
    for event, activity in [
        (StageProgress("encoding latents", 3, 48), "encoding latents: 3 of 48 files"),
        (StepDone(7, 0.1, 0.1, 0.1, 4, 1, 0, 0.1), "step 7"),
        (CheckpointSaved(7, "runs/x", 1, 0.1, ""), "the checkpoint of step 7"),
        (Notice("plan: none"), "the checkpoint of step 7"),
    ]:
        monitor.handle(event)
        assert monitor._activity == activity
    monitor.close()


def test_an_address_that_others_cannot_use_is_not_returned():
    assert address_towards("127.0.0.1") == ""
    assert address_towards("no-such-host.invalid") == ""


# Stragglers


def test_a_persistently_slow_rank_is_named_once_in_a_while():
    watch = StragglerWatch(["one", "one", "two", "two"], window=20, every=100)
    messages = [watch.add([1.0, 1.02, 1.5, 0.98]) for _ in range(125)]
    told = [step for step, text in enumerate(messages) if text]
    assert told == [19, 119]
    assert messages[19].startswith(
        "rank 2 on two is slow: it needed 1.5 s for its part of a step, the others 1 s (mean of 20"
    )


def test_times_of_several_steps_are_counted_as_steps():
    watch = StragglerWatch(["one", "two"], steps_each=10)
    messages = [watch.add([1.0, 2.0]) for _ in range(60)]
    assert [number for number, text in enumerate(messages) if text] == [3, 53]
    assert "(mean of 40 steps)" in messages[3]


@pytest.mark.parametrize(
    "steps",
    [
        [[1.0, 1.2]] * 60,  # within the limit
        [[1.0, 1.0]] * 30 + [[1.0, 50.0]] + [[1.0, 1.0]] * 29,  # one slow step
        [[1.0, 2.0], [2.0, 1.0]] * 30,  # by turns
        [[1.0]] * 60,
    ],
)
def test_ranks_that_are_sometimes_slow_are_not_named(steps):
    watch = StragglerWatch(["one"] * len(steps[0]))
    assert not any(watch.add(step) for step in steps)
