"""Arenas: filling, sealing, attaching from other processes, and sharing one per machine."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fork_process import is_true_in_fork, undumpable_process

from gracetune.errors import UnsafeFileError
from gracetune.memory import shared_memory
from gracetune.memory.shared_memory import (
    Arena,
    ArenaFullError,
    ArenaWriter,
    SegmentWriter,
    close_files,
    create_anonymous_files,
    handle_of,
    open_shared_files,
    share_arena,
    user_shared_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


MIB = 1024**2


def filled_arena(*pieces: bytes) -> tuple[Arena, list[int]]:
    writer = ArenaWriter()
    with writer.segment_writer() as segment:
        addresses = [segment.write(piece) for piece in pieces]
    return writer.seal(), addresses


def shared_memory_nbytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


def test_written_data_is_read_in_place() -> None:
    arena, (first, empty, second) = filled_arena(b"first", b"", b"second")
    assert arena.view(first, 5) == b"first"
    assert arena.view(second, 6) == b"second"
    assert arena.view(empty, 0) == b""
    assert arena.view(first, 11) == b"firstsecond"  # without gaps
    assert arena.view(first, 5).readonly


def test_an_empty_arena_can_be_built() -> None:
    assert ArenaWriter().seal().segments == ()
    arena, (address,) = filled_arena(b"")
    assert arena.view(address, 0) == b""


def test_a_view_outlives_its_arena() -> None:
    arena, (address,) = filled_arena(b"kept" * 1000)
    view = arena.view(address, 4000)
    del arena
    gc.collect()
    assert view == b"kept" * 1000


def test_each_thread_fills_its_own_segment() -> None:
    writer = ArenaWriter()
    found: dict[int, list[int]] = {}
    barrier = threading.Barrier(4)

    def fill(number: int) -> None:
        with writer.segment_writer() as segment:
            barrier.wait(10)
            found[number] = [segment.write(bytes([number]) * 1000) for _ in range(50)]

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with writer.segment_writer() as segment:  # reuses one of the four segments
        again = segment.write(b"again")
    arena = writer.seal()
    assert len(arena.segments) == 4
    assert arena.view(again, 5) == b"again"
    for number, addresses in found.items():
        assert all(arena.view(address, 1000) == bytes([number]) * 1000 for address in addresses)


def test_files_are_copied_from_any_offset(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5000)
    writer = ArenaWriter()
    with path.open("rb") as file, writer.segment_writer() as segment:
        segment.write(b"before")
        address, done = segment.copy_from(file.fileno(), 100, 1_000_000)
        after = segment.write(b"after")
    arena = writer.seal()
    assert done == 1_000_000
    assert arena.view(address, done) == path.read_bytes()[100:1_000_100]
    assert arena.view(after, 5) == b"after"


def test_a_file_shorter_than_requested_is_copied_up_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"short")
    writer = ArenaWriter()
    with (tmp_path / "file").open("rb") as file, writer.segment_writer() as segment:
        address, done = segment.copy_from(file.fileno(), 2, 1000)
        after = segment.write(b"after")
    arena = writer.seal()
    assert (arena.view(address, done), done) == (b"ort", 3)
    assert arena.view(after, 5) == b"after"


@pytest.mark.parametrize(("expected_nbytes", "calls"), [(-1, 2), (5, 1), (3, 2)])
def test_copying_stops_at_the_expected_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_nbytes: int, calls: int
) -> None:
    (tmp_path / "file").write_bytes(b"whole")
    asked = []
    send = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda *all_of: asked.append(all_of) or send(*all_of))
    writer = ArenaWriter()
    with (tmp_path / "file").open("rb") as file, writer.segment_writer() as segment:
        address, done = segment.copy_from(file.fileno(), 0, 6, expected_nbytes)
    assert (writer.seal().view(address, done), len(asked)) == (b"whole", calls)


def test_files_without_sendfile_are_copied_through_a_buffer() -> None:
    writer = ArenaWriter()
    with open("/proc/self/cmdline", "rb") as file, writer.segment_writer() as segment:
        with pytest.raises(OSError, match="Invalid argument"):
            os.sendfile(segment._fd, file.fileno(), 0, 10)
        segment.write(b"before")
        address, done = segment.copy_from(file.fileno(), 0, 10**6)
        after = segment.write(b"after")
        file.seek(0)
        text = file.read()
    arena = writer.seal()
    assert arena.view(address, done) == text
    assert arena.view(after, 5) == b"after"


def test_an_unreadable_file_raises_os_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with ArenaWriter().segment_writer() as segment, pytest.raises(OSError, match="directory"):
            segment.copy_from(descriptor, 0, 10)
    finally:
        os.close(descriptor)


def test_a_full_machine_raises_arena_full_error(tmp_path: Path) -> None:
    """A file size limit makes writes fail as a full machine does."""
    program = """
import resource, signal, sys
from gracetune.memory.shared_memory import ArenaFullError, ArenaWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with ArenaWriter().segment_writer() as segment:
    segment.write(bytes(90_000))
    try:
        segment.write(bytes(90_000))
    except ArenaFullError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "File too large\n"


def test_a_sealed_arena_cannot_be_changed_by_anyone() -> None:
    arena, (address,) = filled_arena(b"sealed")
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
        arena.view(address, 6)[0] = 1
    assert arena.view(address, 6) == b"sealed"


def test_descriptors_are_closed_with_the_arena() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        arena, _ = filled_arena(b"x" * MIB)
        with ArenaWriter().segment_writer() as segment:
            segment.write(b"abandoned")
        del arena, segment
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_resident_bytes_are_counted_once() -> None:
    arena, _ = filled_arena(bytes(10 * MIB))
    assert 10 * MIB <= arena.resident_nbytes <= 10.1 * MIB


ATTACH = """
import sys
from gracetune.memory.shared_memory import Arena, ArenaHandle
handle = ArenaHandle(int(sys.argv[1]), ((int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])),))
view = Arena.attach(handle).segments[0]
print(bytes(view[:5]), len(view), view.readonly)
"""


def test_another_process_attaches_by_handle() -> None:
    arena, _ = filled_arena(b"hello" * 1000)
    numbers = [arena.handle.pid, *arena.handle.segments[0]]
    done = subprocess.run(
        [sys.executable, "-c", ATTACH, *map(str, numbers)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "b'hello' 5000 True\n"


def test_a_fork_inherits_the_arena() -> None:
    arena, (address,) = filled_arena(b"inherited")
    assert is_true_in_fork(lambda: arena.view(address, 9) == b"inherited")


def test_a_handle_with_a_reused_descriptor_is_refused() -> None:
    arena, _ = filled_arena(b"one")
    other, _ = filled_arena(b"other")
    handle = arena.handle
    mixed = replace(handle, segments=((other._fds[0], *handle.segments[0][1:]),))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="no longer the shared memory"):
        Arena.attach(replace(handle, segments=(*handle.segments, *mixed.segments)))
    assert len(os.listdir("/proc/self/fd")) == before
    gone = replace(handle, pid=2**22 + 1)
    with pytest.raises(FileNotFoundError):
        Arena.attach(gone)


FILL_ARENA = f"""
from gracetune.memory.shared_memory import ArenaWriter
writer = ArenaWriter()
with writer.segment_writer() as segment:
    segment.write(bytes({256 * MIB}))
arena = writer.seal()
"""
FILL_FILES = f"""
import mmap, os
from gracetune.memory.shared_memory import close_files, create_anonymous_files
files = create_anonymous_files([{128 * MIB}] * 2)
mapped = [mmap.mmap(file, 0) for file in files]
close_files(files)
for memory in mapped:
    memory.write(bytes({128 * MIB}))
"""


@pytest.mark.parametrize("fill", [FILL_ARENA, FILL_FILES], ids=["arena", "files"])
def test_sigkill_leaves_no_memory_behind(fill: str) -> None:
    program = f"{fill}\nimport signal\nprint('ready', flush=True)\nsignal.pause()\n"
    before = shared_memory_nbytes()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert shared_memory_nbytes() > before + 200 * MIB
        process.kill()
    deadline = time.monotonic() + 20  # other processes change the figure, too
    while shared_memory_nbytes() >= before + 100 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not [name for name in os.listdir("/dev/shm") if "gracetune" in name]


def test_processes_write_to_the_same_anonymous_file() -> None:
    files = create_anonymous_files([4096, 100])
    handle = handle_of(files)

    def write() -> bool:
        opened = open_shared_files(handle, os.O_RDWR)
        sizes = [os.fstat(file).st_size for file in opened]
        with mmap.mmap(opened[0], 0) as memory:
            memory[:5] = b"hello"
        return sizes == [4096, 100]

    assert is_true_in_fork(write)
    with mmap.mmap(files[0], 0) as memory:
        assert memory[:5] == b"hello"
    close_files(files)
    with pytest.raises(OSError, match="/proc/"):
        open_shared_files(handle)


def test_files_that_cannot_be_created_leave_none_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Invalid argument"):
        create_anonymous_files([4096, -1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_machine_during_a_copy_raises_arena_full_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulates a kernel out of memory, which cannot be produced safely."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(ArenaFullError, match="No space left"):
        SegmentWriter(0).copy_from(0, 0, 10)


RANK = """
import os, signal, sys, time
from pathlib import Path
from gracetune.memory.shared_memory import ArenaWriter, share_arena

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build():
    print("building", flush=True)
    time.sleep(seconds)
    writer = ArenaWriter()
    with writer.segment_writer() as segment:
        segment.write(b"built by %d" % os.getpid())
    return writer.seal()

shared = share_arena(folder, "data", build, lambda: print("waiting", flush=True))
print(shared.is_owner, bytes(shared.arena.segments[0]).decode(), flush=True)
signal.pause()
"""


class Rank:
    """A process that shares the arena."""

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


def start_rank(ranks: list[Rank], folder: Path, seconds: float = 0.0) -> Rank:
    ranks.append(Rank(folder, seconds))
    return ranks[-1]


def test_one_process_builds_the_arena_and_others_wait_and_map_it(
    ranks: list[Rank], tmp_path: Path
) -> None:
    first = start_rank(
        ranks, tmp_path, 5.0
    )  # long enough for two processes to start on a busy machine
    assert first.line() == "building"
    others = [start_rank(ranks, tmp_path), start_rank(ranks, tmp_path)]
    assert [rank.line() for rank in others] == ["waiting", "waiting"]
    built = f"built by {first.process.pid}"
    assert first.line() == f"True {built}"
    assert [rank.line() for rank in others] == [f"False {built}"] * 2


def test_a_late_process_maps_the_arena(ranks: list[Rank], tmp_path: Path) -> None:
    first = start_rank(ranks, tmp_path)
    assert [first.line(), first.line()] == ["building", f"True built by {first.process.pid}"]
    assert start_rank(ranks, tmp_path).line() == f"False built by {first.process.pid}"


def test_the_next_process_builds_if_the_builder_is_killed(
    ranks: list[Rank], tmp_path: Path
) -> None:
    first = start_rank(ranks, tmp_path, 600)
    assert first.line() == "building"
    second = start_rank(ranks, tmp_path)
    assert second.line() == "waiting"
    first.kill()
    assert [second.line(), second.line()] == ["building", f"True built by {second.process.pid}"]


def test_a_mapped_arena_survives_its_builder(ranks: list[Rank], tmp_path: Path) -> None:
    first = start_rank(ranks, tmp_path)
    assert [first.line(), first.line()][0] == "building"
    second = start_rank(ranks, tmp_path)
    assert second.line() == f"False built by {first.process.pid}"
    first.kill()
    assert second.process.poll() is None
    third = start_rank(ranks, tmp_path)  # the offer is stale: its process has ended
    assert [third.line(), third.line()] == ["building", f"True built by {third.process.pid}"]


def build_arena(text: bytes) -> Arena:
    writer = ArenaWriter()
    with writer.segment_writer() as segment:
        segment.write(text)
    return writer.seal()


def must_not_wait() -> None:
    raise AssertionError("no other process holds the lock")


def test_each_name_has_its_own_arena(tmp_path: Path) -> None:
    kept = [
        share_arena(tmp_path, name, lambda: build_arena(b"x"), must_not_wait) for name in ("a", "b")
    ]
    assert all(shared.is_owner for shared in kept)
    assert kept[0].arena.handle != kept[1].arena.handle


def test_a_second_call_in_one_process_builds_again(tmp_path: Path) -> None:
    held = share_arena(tmp_path, "a", lambda: build_arena(b"x"), must_not_wait)
    again = share_arena(tmp_path, "a", lambda: build_arena(b"y"), must_not_wait)
    assert bytes(again.arena.segments[0]) == b"y"
    assert bytes(held.arena.segments[0]) == b"x"
    assert again.share_error is None


def test_an_arena_that_cannot_be_offered_is_kept(monkeypatch, tmp_path: Path) -> None:
    share_arena(tmp_path, "a", lambda: build_arena(b"x"), must_not_wait)
    (offer,) = tmp_path.glob("*.json")
    offer.with_suffix(".new").mkdir()
    shared = share_arena(tmp_path, "a", lambda: build_arena(b"y"), must_not_wait)
    assert bytes(shared.arena.segments[0]) == b"y"
    assert "Is a directory" in str(shared.share_error)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    shared = share_arena(tmp_path, "b", lambda: build_arena(b"z"), must_not_wait)
    assert bytes(shared.arena.segments[0]) == b"z"
    assert "No locks available" in str(shared.share_error)


def test_an_offer_whose_descriptor_was_reused_is_replaced(
    ranks: list[Rank], tmp_path: Path
) -> None:
    """The process is alive, but the descriptor in its offer is another file now."""
    first = start_rank(ranks, tmp_path)
    assert [first.line(), first.line()][0] == "building"
    (offer,) = tmp_path.glob("*.json")
    handle = json.loads(offer.read_text())
    handle["segments"][0][0] = 1
    offer.write_text(json.dumps(handle))
    second = start_rank(ranks, tmp_path)
    assert [second.line(), second.line()] == ["building", f"True built by {second.process.pid}"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "segments": 3}'])
def test_an_invalid_offer_is_replaced(tmp_path: Path, text: str) -> None:
    share_arena(tmp_path, "a", lambda: build_arena(b"x"), must_not_wait)
    (offer,) = tmp_path.glob("*.json")
    offer.write_text(text)
    assert share_arena(tmp_path, "a", lambda: build_arena(b"y"), must_not_wait).is_owner
    assert json.loads(offer.read_text())["pid"] == os.getpid()


def test_other_boots_and_containers_do_not_share(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "self/ns").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("another\n")
    (proc / "self/ns/pid").write_text("")
    folder = tmp_path / "meet"
    here = share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait)
    there = share_arena(folder, "a", lambda: build_arena(b"y"), must_not_wait, proc)
    assert bytes(there.arena.segments[0]) == b"y"
    assert len(list(folder.glob("*.json"))) == 2
    assert bytes(here.arena.segments[0]) == b"x"


def test_an_arena_without_permission_is_reported_and_built_again() -> None:
    """The offer is readable but the memory is not: report it, and build the arena again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "meet"
        held = share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait)
        Path(name).chmod(0o755)
        for path in (folder, *folder.iterdir()):
            give_away(path)

        def asks() -> bool:
            shared = share_arena(folder, "a", lambda: build_arena(b"y"), must_not_wait)
            return shared.is_owner and "Permission denied" in str(shared.share_error)

        with undumpable_process():
            assert is_true_in_fork(asks, as_nobody=True)
        assert held.is_owner


# Files of other users

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def give_away(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)


def replace_by_link(path: Path) -> None:
    target = path.with_name(f"{path.name}-target")
    path.rename(target)
    path.symlink_to(target)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def open_to_all(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(give_away, "belongs to user 65534", marks=as_root),
        (replace_by_link, "is not a folder, but a link"),
        (open_to_all, "has mode 777"),
        (lambda folder: (folder.rmdir(), folder.write_bytes(b"")), "is not a folder"),
    ],
)
def test_a_folder_that_another_user_controls_is_refused(tmp_path: Path, damage, reason) -> None:
    folder = tmp_path / "meet"
    folder.mkdir(mode=0o700)
    damage(folder)
    with pytest.raises(UnsafeFileError, match=f"^{folder} {reason}"):
        share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait)


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o750])
def test_a_folder_of_an_earlier_version_becomes_private(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "meet"
    folder.mkdir()
    folder.chmod(mode)
    assert share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait).is_owner
    assert folder.stat().st_mode & 0o777 == 0o700


@as_root
def test_a_folder_that_is_exchanged_after_its_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without sticky bit, another user can rename ours and put one in its place."""
    folder = tmp_path / "meet"
    share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait)
    planted = [path.name for path in folder.iterdir()]
    check = shared_memory.open_private_folder

    def exchange(checked: Path) -> int:
        owner = check(checked)
        checked.rename(tmp_path / "away")
        checked.mkdir(mode=0o777)
        os.chown(checked, 1234, 1234)
        for name in planted:
            (checked / name).touch(mode=0o600)
            os.chown(checked / name, 1234, 1234)
        return owner

    monkeypatch.setattr(shared_memory, "open_private_folder", exchange)
    with pytest.raises(UnsafeFileError, match="belongs to user 1234"):
        share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait)


def test_the_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        share_arena(tmp_path / "meet", "a", lambda: build_arena(b"x"), must_not_wait)
    finally:
        os.umask(before)
    found = {path.name[-5:]: path.stat().st_mode & 0o777 for path in (tmp_path / "meet").iterdir()}
    assert found == {".json": 0o600, ".lock": 0o600}
    assert (tmp_path / "meet").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ending", ["json", "lock"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(give_away, "belongs to user 65534", marks=as_root),
        (replace_by_link, "is a link"),
        (replace_by_pipe, "is not a regular file"),
        (open_to_all, "has mode 666"),
    ],
)
def test_a_file_that_another_user_controls_is_refused(
    tmp_path: Path, ending, damage, reason
) -> None:
    share_arena(tmp_path, "a", lambda: build_arena(b"x"), must_not_wait)
    (file,) = tmp_path.glob(f"*.{ending}")
    damage(file)
    with pytest.raises(UnsafeFileError, match=reason) as caught:
        share_arena(tmp_path, "a", lambda: build_arena(b"y"), must_not_wait)
    assert str(file) in str(caught.value)


def test_a_lock_that_is_a_dangling_link_creates_no_file(tmp_path: Path) -> None:
    share_arena(tmp_path, "a", lambda: build_arena(b"x"), must_not_wait)
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "made")
    with pytest.raises(UnsafeFileError, match="is a link"):
        share_arena(tmp_path, "a", lambda: build_arena(b"y"), must_not_wait)
    assert not (tmp_path / "made").exists()


@as_root
def test_memory_of_another_user_is_not_mapped(tmp_path: Path) -> None:
    """A file in our folder names a live process of another user, whose bytes root could read."""
    folder = tmp_path / "meet"
    receive, send = os.pipe()
    release, hold = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(OTHER_USER)
        foreign = build_arena(b"theirs")
        os.write(send, json.dumps(asdict(foreign.handle)).encode() + b"\n")
        os.close(hold)
        os.read(release, 1)
        os._exit(0)
    try:
        share_arena(folder, "a", lambda: build_arena(b"x"), must_not_wait)
        (offer,) = folder.glob("*.json")
        offer.write_bytes(os.read(receive, 1000))
        shared = share_arena(folder, "a", lambda: build_arena(b"ours"), must_not_wait)
        assert bytes(shared.arena.segments[0]) == b"ours"
        assert "belongs to user 65534" in str(shared.share_error)
    finally:
        os.close(hold)
        os.waitpid(pid, 0)
        for descriptor in (receive, send, release):
            os.close(descriptor)


def test_a_stale_offer_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    share_arena(tmp_path, "a", lambda: build_arena(b"x"), must_not_wait)
    (offer,) = tmp_path.glob("*.json")
    offer.write_text(json.dumps({"pid": process.pid, "segments": [[3, 1, 2]]}))
    shared = share_arena(tmp_path, "a", lambda: build_arena(b"y"), must_not_wait)
    assert (shared.is_owner, shared.share_error) == (True, None)


def test_ranks_with_another_temporary_folder_share(monkeypatch, tmp_path: Path) -> None:
    before = user_shared_folder()
    for name in ("TMPDIR", "HOME", "USER", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert user_shared_folder() == before
    assert before.name == f"gracetune-{os.geteuid()}"
