from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from forked import holds_in_a_fork

from gracetune.memory.shared_arena import Arena, ArenaFullError, ArenaWriter, SegmentWriter

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024**2


def _filled(*pieces: bytes) -> tuple[Arena, list[int]]:
    writer = ArenaWriter()
    with writer.segment_writer() as hand:
        places = [hand.write(piece) for piece in pieces]
    return writer.seal(), places


def _shared_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


def test_what_was_written_is_there_in_place() -> None:
    arena, (first, empty, second) = _filled(b"first", b"", b"second")
    assert arena.view(first, 5) == b"first"
    assert arena.view(second, 6) == b"second"
    assert arena.view(empty, 0) == b""
    assert arena.view(first, 11) == b"firstsecond"  # without gaps
    assert arena.view(first, 5).readonly


def test_an_arena_of_nothing_can_be_made() -> None:
    assert ArenaWriter().seal().segments == ()
    arena, (place,) = _filled(b"")
    assert arena.view(place, 0) == b""


def test_a_view_outlives_its_arena() -> None:
    arena, (place,) = _filled(b"kept" * 1000)
    view = arena.view(place, 4000)
    del arena
    gc.collect()
    assert view == b"kept" * 1000


def test_threads_fill_segments_of_their_own() -> None:
    writer = ArenaWriter()
    found: dict[int, list[int]] = {}
    together = threading.Barrier(4)

    def fill(number: int) -> None:
        with writer.segment_writer() as hand:
            together.wait(10)
            found[number] = [hand.write(bytes([number]) * 1000) for _ in range(50)]

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with writer.segment_writer() as hand:  # one of the four again
        again = hand.write(b"again")
    arena = writer.seal()
    assert len(arena.segments) == 4
    assert arena.view(again, 5) == b"again"
    for number, places in found.items():
        assert all(arena.view(place, 1000) == bytes([number]) * 1000 for place in places)


def test_files_are_copied_from_any_offset(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5000)
    writer = ArenaWriter()
    with path.open("rb") as file, writer.segment_writer() as hand:
        hand.write(b"before")
        place, done = hand.copy_from(file.fileno(), 100, 1_000_000)
        after = hand.write(b"after")
    arena = writer.seal()
    assert done == 1_000_000
    assert arena.view(place, done) == path.read_bytes()[100:1_000_100]
    assert arena.view(after, 5) == b"after"


def test_a_file_that_ends_early_gives_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"short")
    writer = ArenaWriter()
    with (tmp_path / "file").open("rb") as file, writer.segment_writer() as hand:
        place, done = hand.copy_from(file.fileno(), 2, 1000)
        after = hand.write(b"after")
    arena = writer.seal()
    assert (arena.view(place, done), done) == (b"ort", 3)
    assert arena.view(after, 5) == b"after"


@pytest.mark.parametrize(("likely", "calls"), [(-1, 2), (5, 1), (3, 2)])
def test_what_has_its_likely_length_is_not_asked_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, likely: int, calls: int
) -> None:
    (tmp_path / "file").write_bytes(b"whole")
    asked = []
    send = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda *all_of: asked.append(all_of) or send(*all_of))
    writer = ArenaWriter()
    with (tmp_path / "file").open("rb") as file, writer.segment_writer() as hand:
        place, done = hand.copy_from(file.fileno(), 0, 6, likely)
    assert (writer.seal().view(place, done), len(asked)) == (b"whole", calls)


def test_what_the_kernel_cannot_send_goes_through_a_buffer() -> None:
    writer = ArenaWriter()
    with open("/proc/self/cmdline", "rb") as file, writer.segment_writer() as hand:
        with pytest.raises(OSError, match="Invalid argument"):
            os.sendfile(hand._fd, file.fileno(), 0, 10)
        hand.write(b"before")
        place, done = hand.copy_from(file.fileno(), 0, 10**6)
        after = hand.write(b"after")
        file.seek(0)
        text = file.read()
    arena = writer.seal()
    assert arena.view(place, done) == text
    assert arena.view(after, 5) == b"after"


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with ArenaWriter().segment_writer() as hand, pytest.raises(OSError, match="directory"):
            hand.copy_from(descriptor, 0, 10)
    finally:
        os.close(descriptor)


def test_no_memory_left_has_its_own_error(tmp_path: Path) -> None:
    """A file size limit stands in for a full machine; it ends the writes in the same way."""
    program = """
import resource, signal, sys
from gracetune.memory.shared_arena import ArenaFullError, ArenaWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with ArenaWriter().segment_writer() as hand:
    hand.write(bytes(90_000))
    try:
        hand.write(bytes(90_000))
    except ArenaFullError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "File too large\n"


def test_a_sealed_arena_cannot_be_changed_by_anyone() -> None:
    arena, (place,) = _filled(b"sealed")
    (descriptor,) = arena._fds
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"no")
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        for change in (
            lambda: os.pwrite(writable, b"no", 0),
            lambda: os.ftruncate(writable, 0),
            lambda: mmap.mmap(writable, 0),
        ):
            with pytest.raises(PermissionError):
                change()
        assert fcntl.fcntl(writable, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    finally:
        os.close(writable)
    with pytest.raises(TypeError):
        arena.view(place, 6)[0] = 1
    assert arena.view(place, 6) == b"sealed"


def test_descriptors_and_memory_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        arena, _ = _filled(b"x" * MIB)
        with ArenaWriter().segment_writer() as hand:
            hand.write(b"abandoned")
        del arena, hand
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pages_are_counted_once() -> None:
    arena, _ = _filled(bytes(10 * MIB))
    assert 10 * MIB <= arena.resident_nbytes <= 10.1 * MIB


ATTACH = """
import sys
from gracetune.memory.shared_arena import Arena, ArenaHandle
ticket = ArenaHandle(int(sys.argv[1]), ((int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])),))
view = Arena.attach(ticket).segments[0]
print(bytes(view[:5]), len(view), view.readonly)
"""


def test_another_process_maps_it_by_ticket() -> None:
    arena, _ = _filled(b"hello" * 1000)
    numbers = [arena.handle.pid, *arena.handle.segments[0]]
    done = subprocess.run(
        [sys.executable, "-c", ATTACH, *map(str, numbers)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "b'hello' 5000 True\n"


def test_a_fork_inherits_it() -> None:
    arena, (place,) = _filled(b"inherited")
    assert holds_in_a_fork(lambda: arena.view(place, 9) == b"inherited")


def test_a_ticket_whose_number_leads_elsewhere_is_refused() -> None:
    arena, _ = _filled(b"one")
    other, _ = _filled(b"other")
    ticket = arena.handle
    mixed = replace(ticket, segments=((other._fds[0], *ticket.segments[0][1:]),))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="no longer the shared memory"):
        Arena.attach(replace(ticket, segments=(*ticket.segments, *mixed.segments)))
    assert len(os.listdir("/proc/self/fd")) == before
    gone = replace(ticket, pid=2**22 + 1)
    with pytest.raises(FileNotFoundError):
        Arena.attach(gone)


def test_nothing_is_left_after_kill_9() -> None:
    program = f"""
import os, signal
from gracetune.memory.shared_arena import ArenaWriter
writer = ArenaWriter()
with writer.segment_writer() as hand:
    hand.write(bytes({256 * MIB}))
arena = writer.seal()
print("ready", flush=True)
signal.pause()
"""
    before = _shared_memory()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert _shared_memory() > before + 200 * MIB
        process.kill()
    deadline = time.monotonic() + 20  # the figure is the machine's: others may come and go
    while _shared_memory() >= before + 100 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not [name for name in os.listdir("/dev/shm") if "gracetune" in name]


def test_a_hand_says_when_the_machine_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing that cannot be brought about for real: the kernel out of memory in a copy."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(ArenaFullError, match="No space left"):
        SegmentWriter(0).copy_from(0, 0, 10)
