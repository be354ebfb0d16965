"""Rules that find a lost rank."""

from dataclasses import replace

from gracetune.distributed.rank_table import Heartbeat, RankTable
from gracetune.distributed.ranks import RankGroup

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
