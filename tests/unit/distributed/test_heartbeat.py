"""Rules that find a lost rank, and two monitors that watch each other in one process."""

import os
import threading
import time
from dataclasses import replace
from queue import Queue

import pytest
import torch.distributed as dist

from gracetune.config.schema import DistributedSection
from gracetune.distributed import heartbeat
from gracetune.distributed.heartbeat import (
    Heartbeat,
    LostRankError,
    RankMonitor,
    RankTable,
    StragglerWatch,
    address_towards,
    watch_ranks,
)
from gracetune.distributed.ranks import SINGLE, RankGroup
from gracetune.errors import ConfigError, InterruptedRunError, RunFailedError
from gracetune.events.types import CheckpointSaved, Notice, StageProgress, StepDone

RUNNING = Heartbeat(pid=100, birth=1, activity="step 12")


class Table:
    """A table of rank 0 with ranks 1 and 2; rank 1 is on the same machine."""

    def __init__(self):
        self.dead = set()
        group = RankGroup(0, ["a", "a", "b"], ["one", "one", "two"])
        beats = [replace(RUNNING, pid=100 + rank) for rank in range(3)]
        self.table = RankTable(group, beats, 45.0, lambda beat: beat.pid not in self.dead)
        self.beats = beats

    def read(self, now, **changed):
        """Read new heartbeats of all ranks; `rank_1={...}` changes that of rank 1."""
        for rank in range(3):
            changes = changed.get(f"rank_{rank}", {})
            if changes is not None:
                count = self.beats[rank].count + 1
                self.beats[rank] = replace(self.beats[rank], count=count, **changes)
        self.table.update(self.beats, now)

    def text(self, now, **options):
        lost = self.table.find_lost(now, **options)
        return None if lost is None else lost.text


def test_ranks_that_send_heartbeats_are_not_lost():
    table = Table()
    for now in range(0, 2000, 5):
        table.read(now, rank_1={"idle_s": float(now)})
        assert table.text(now + 4) is None


def test_a_rank_without_heartbeats_is_lost_after_the_stall_timeout():
    table = Table()
    table.read(10)
    for now in range(15, 56, 5):
        table.read(now, rank_2=None)
    assert table.text(55) is None
    assert table.text(56) == (
        "rank 2 on two (process 102) has sent no heartbeat for 46 s; the last one was at step 12. "
        "The process was stopped, or its machine or network is down"
    )


def test_the_error_of_a_failed_rank_is_shown_with_its_exit_code():
    table = Table()
    table.read(5, rank_2={"state": "failed", "error": "no disk", "exit_code": 2})
    lost = table.table.find_lost(6)
    assert lost.text == "rank 2 on two (process 102, 1 s ago at step 12) has failed: no disk"
    assert (lost.rank, lost.exit_code) == (2, 2)


def test_the_rank_with_the_cause_comes_before_those_that_failed_because_of_it():
    table = Table()
    consequence = {"state": "failed", "error": "rank 2 is gone", "is_cause": False}
    table.read(5, rank_1=consequence)
    assert table.text(5) == "rank 2 is gone"
    table.read(6, rank_1=consequence, rank_2={"state": "failed", "error": "no disk"})
    assert "no disk" in table.text(6)


def test_a_process_that_disappeared_from_this_machine_is_lost_at_once():
    table = Table()
    table.read(5)
    table.dead.add(101)
    assert table.text(5.5) is None  # it may have said that it ended
    table.table.touch(6)
    assert "rank 1 on one (process 101, 1 s ago at step 12) has died" in table.text(6)


def test_a_process_that_has_ended_as_it_should_is_not_lost():
    table = Table()
    table.dead.add(101)
    assert table.text(5.5) is None
    table.read(6, rank_1={"state": "ended"})
    assert table.text(500) is not None  # rank 2 is silent
    table.read(501)
    assert table.text(502) is None


def test_the_rank_with_the_store_is_lost_with_it():
    group = RankGroup(1, ["a", "b"], ["one", "two"])
    table = RankTable(group, [RUNNING, RUNNING], 45.0, lambda beat: True)
    assert "rank 0 on one" in table.find_lost(1, "Connection reset").text
    assert "no heartbeat for 46 s" in table.find_lost(46).text
    table.update([replace(RUNNING, state="ended"), RUNNING], 2)
    assert table.find_lost(3, "Connection reset") is None


def test_a_lost_store_does_not_make_ranks_dead_if_rank_0_has_ended():
    dead = set()
    group = RankGroup(2, ["a"] * 3, ["one"] * 3)
    beats = [replace(RUNNING, pid=100 + rank) for rank in range(3)]
    table = RankTable(group, beats, 45.0, lambda beat: beat.pid not in dead)
    dead.add(100)
    assert "rank 0 on one (process 100, 1 s ago" in table.find_lost(1, "Connection reset").text
    table.update([replace(beats[0], state="ended"), *beats[1:]], 2)
    dead.add(101)  # it may have ended as well, but can no longer say so
    assert table.find_lost(3, "Connection reset") is None


def test_after_a_timeout_the_rank_that_made_no_progress_is_named():
    table = Table()
    table.read(5, rank_1={"idle_s": 3.0}, rank_2={"idle_s": 1790.0, "activity": "encoding"})
    assert table.table.most_behind(6, 5, is_timeout=False) is None
    text = table.table.most_behind(6, 5, is_timeout=True).text
    assert text.startswith("rank 2 on two (process 102, 1 s ago at encoding) has made no progress")
    assert "for 1791 s" in text
    table.read(30, rank_1=None)
    assert "rank 1 on one" in table.table.most_behind(30, 5, is_timeout=False).text


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
        "rank 2 on two is slow: it needed 1.5 s for its part of a step, the others 1 s"
    )


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
