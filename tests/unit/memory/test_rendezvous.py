from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forked import hidden_from_others, holds_in_a_fork

from gracetune.memory.shared_arena import Arena, ArenaWriter, share_arena

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK = """
import os, signal, sys, time
from pathlib import Path
from gracetune.memory.shared_arena import ArenaWriter
from gracetune.memory.shared_arena import share_arena

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])

def make():
    print("making", flush=True)
    time.sleep(seconds)
    writer = ArenaWriter()
    with writer.segment_writer() as hand:
        hand.write(b"made by %d" % os.getpid())
    return writer.seal()

shared = share_arena(folder, "data", make, lambda: print("waiting", flush=True))
print(shared.is_owner, bytes(shared.arena.segments[0]).decode(), flush=True)
signal.pause()
"""


class Rank:
    """A process of its own that wants the arena."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    started: list[Rank] = []
    yield started
    for rank in started:
        rank.kill()


def _start(ranks: list[Rank], folder: Path, seconds: float = 0.0) -> Rank:
    ranks.append(Rank(folder, seconds))
    return ranks[-1]


def test_one_makes_it_and_the_others_wait_and_map_it(ranks: list[Rank], tmp_path: Path) -> None:
    first = _start(ranks, tmp_path, 5.0)  # time enough for two processes to start on a busy machine
    assert first.line() == "making"
    others = [_start(ranks, tmp_path), _start(ranks, tmp_path)]
    assert [rank.line() for rank in others] == ["waiting", "waiting"]
    made = f"made by {first.process.pid}"
    assert first.line() == f"True {made}"
    assert [rank.line() for rank in others] == [f"False {made}"] * 2


def test_who_comes_late_maps_it_too(ranks: list[Rank], tmp_path: Path) -> None:
    first = _start(ranks, tmp_path)
    assert [first.line(), first.line()] == ["making", f"True made by {first.process.pid}"]
    assert _start(ranks, tmp_path).line() == f"False made by {first.process.pid}"


def test_the_next_takes_over_when_the_maker_is_killed(ranks: list[Rank], tmp_path: Path) -> None:
    first = _start(ranks, tmp_path, 600)
    assert first.line() == "making"
    second = _start(ranks, tmp_path)
    assert second.line() == "waiting"
    first.kill()
    assert [second.line(), second.line()] == ["making", f"True made by {second.process.pid}"]


def test_who_has_mapped_it_keeps_it_when_the_maker_is_killed(
    ranks: list[Rank], tmp_path: Path
) -> None:
    first = _start(ranks, tmp_path)
    assert [first.line(), first.line()][0] == "making"
    second = _start(ranks, tmp_path)
    assert second.line() == f"False made by {first.process.pid}"
    first.kill()
    assert second.process.poll() is None
    third = _start(ranks, tmp_path)  # the offer is stale: its process is gone
    assert [third.line(), third.line()] == ["making", f"True made by {third.process.pid}"]


def _make(text: bytes) -> Arena:
    writer = ArenaWriter()
    with writer.segment_writer() as hand:
        hand.write(text)
    return writer.seal()


def _never() -> None:
    raise AssertionError("nobody else is there")


def test_another_name_is_another_arena(tmp_path: Path) -> None:
    kept = [share_arena(tmp_path, name, lambda: _make(b"x"), _never) for name in ("a", "b")]
    assert all(shared.is_owner for shared in kept)
    assert kept[0].arena.handle != kept[1].arena.handle


def test_who_asks_again_gets_it_made_anew(tmp_path: Path) -> None:
    held = share_arena(tmp_path, "a", lambda: _make(b"x"), _never)
    again = share_arena(tmp_path, "a", lambda: _make(b"y"), _never)
    assert bytes(again.arena.segments[0]) == b"y"
    assert bytes(held.arena.segments[0]) == b"x"
    assert again.attach_error is None


def test_an_arena_that_was_let_go_is_made_anew(ranks: list[Rank], tmp_path: Path) -> None:
    """The process lives, and the number that its offer names is another file by now."""
    first = _start(ranks, tmp_path)
    assert [first.line(), first.line()][0] == "making"
    (offer,) = tmp_path.glob("*.json")
    ticket = json.loads(offer.read_text())
    ticket["segments"][0][0] = 1
    offer.write_text(json.dumps(ticket))
    second = _start(ranks, tmp_path)
    assert [second.line(), second.line()] == ["making", f"True made by {second.process.pid}"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "segments": 3}'])
def test_an_offer_that_is_none_is_replaced(tmp_path: Path, text: str) -> None:
    share_arena(tmp_path, "a", lambda: _make(b"x"), _never)
    (offer,) = tmp_path.glob("*.json")
    offer.write_text(text)
    assert share_arena(tmp_path, "a", lambda: _make(b"y"), _never).is_owner
    assert json.loads(offer.read_text())["pid"] == os.getpid()


def test_processes_of_another_boot_or_container_do_not_meet(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "self/ns").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("another\n")
    (proc / "self/ns/pid").write_text("")
    folder = tmp_path / "meet"
    here = share_arena(folder, "a", lambda: _make(b"x"), _never)
    there = share_arena(folder, "a", lambda: _make(b"y"), _never, proc)
    assert bytes(there.arena.segments[0]) == b"y"
    assert len(list(folder.glob("*.json"))) == 2
    assert bytes(here.arena.segments[0]) == b"x"


def test_an_arena_that_is_not_ours_to_see_is_refused_aloud() -> None:
    """The offer can be read, the memory cannot: it is said, and the arena made again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held = share_arena(folder, "a", lambda: _make(b"x"), _never)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o777)

        def asks() -> bool:
            shared = share_arena(folder, "a", lambda: _make(b"y"), _never)
            return shared.is_owner and "Permission denied" in str(shared.attach_error)

        with hidden_from_others():
            assert holds_in_a_fork(asks, as_nobody=True)
        assert held.is_owner
