"""Cache files in memory that two real processes share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fork_process import run_python

from gracetune.errors import UnsafeFileError
from gracetune.hosts.shared_tensor_cache import (
    RecordLog,
    SegmentClosed,
    SegmentOpened,
    SharedTensorCache,
    UnsupportedValueError,
    ValueStored,
    read_log,
    serialize,
)

PAGE = os.sysconf("SC_PAGESIZE")
VALUES = {
    "latents": torch.arange(5000.0),
    "half": torch.linspace(-1, 1, 12, dtype=torch.bfloat16).reshape(3, 4).T,
    "nothing": torch.empty(0, 4),
    "one": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "metadata": {"crop": (0, [1, 2.5]), "caption": "a wörd", "none": None, "flip": True},
}
OTHER_PROCESS = """
import json, sys
from pathlib import Path
import torch
from gracetune.hosts.shared_tensor_cache import SharedTensorCache
def load(path):
    loads.append(path)
    return {"loaded": torch.full((2000,), float(len(loads)))}
for line in sys.argv[1:] or sys.stdin:
    action, folder, paths = json.loads(line)
    if action == "open":
        loads, notices = [], []
        memory = SharedTensorCache(1 << 20, Path(folder), notices.append)
        continue
    if action == "write":
        memory.get(paths[0], load)["loaded"].add_(100)
    sums = [memory.get(path, load)["loaded"].sum().item() for path in paths]
    maps = [row for row in open("/proc/self/maps") if "gracetune-tensors" in row]
    print(json.dumps({
        "loads": len(loads), "sums": sums, "nbytes": memory.nbytes, "notices": len(notices),
        "inodes": sorted({int(row.split()[4]) for row in maps}),
    }), flush=True)
"""


def is_equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(is_equal, one, other))
    return one == other


@pytest.fixture
def paths(tmp_path) -> list[str]:
    paths = []
    for number in range(4):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(bytes(number + 1))
        paths.append(str(path))
    return paths


@pytest.fixture
def notices() -> list:
    return []


@pytest.fixture
def open_memory(tmp_path, notices):
    return lambda budget=1 << 20: SharedTensorCache(budget, tmp_path / "meet", notices.append)


class CountingLoader:
    """Records the paths that are loaded from disk."""

    def __init__(self, value=None) -> None:
        self.paths: list[str] = []
        self.value = value

    def __call__(self, path):
        self.paths.append(path)
        if self.value is not None:
            return self.value
        return {"loaded": torch.full((2000,), float(len(self.paths)))}


@pytest.fixture(scope="module")
def other_process():
    """Another process; it reads actions from its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()


@pytest.fixture
def action_lines(tmp_path, paths):
    return lambda *actions: [json.dumps([each, str(tmp_path / "meet"), paths]) for each in actions]


@pytest.fixture
def other(other_process, action_lines):
    """Open the memory in another process, which loads every path on request and reports it."""

    def send(action) -> None:
        print(*action_lines(action), file=other_process.stdin, flush=True)

    def request(action="read") -> dict:
        send(action)
        return json.loads(other_process.stdout.readline())

    send("open")
    return request


def test_a_file_loaded_by_one_process_is_mapped_by_another(open_memory, other, paths, notices):
    memory, load = open_memory(), CountingLoader()
    mine = [memory.get(path, load)["loaded"].sum().item() for path in paths]
    theirs = other()
    assert theirs["sums"] == mine == [2000.0, 4000.0, 6000.0, 8000.0]
    assert (len(load.paths), theirs["loads"]) == (4, 0)
    assert (memory.nbytes, theirs["nbytes"]) == (4 * max(PAGE, 8192), 0)
    with open("/proc/self/maps") as maps:
        inodes = {int(row.split()[4]) for row in maps if "gracetune-tensors" in row}
    assert inodes & {*theirs["inodes"]}, "both processes map the same memory"
    assert (notices, theirs["notices"]) == ([], 0)
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert (memory.hits, memory.misses) == (1, 4)


def test_sharing_works_both_ways_and_a_changed_file_is_reloaded(open_memory, other, paths):
    memory, load = open_memory(), CountingLoader()
    assert other()["loads"] == 4
    assert memory.get(paths[2], load)["loaded"][0] == 3
    assert load.paths == []
    Path(paths[2]).write_bytes(b"another file")
    memory.forget(paths[2])
    assert memory.get(paths[2], load)["loaded"][0] == 1
    assert load.paths == [paths[2]]
    assert other()["sums"][2] == 2000.0


def test_a_write_to_a_tensor_is_private_to_its_process(open_memory, other, paths):
    memory, load = open_memory(), CountingLoader()
    for path in paths:
        memory.get(path, load)
    theirs = other("write")
    assert theirs["loads"] == 1, "a modified value is loaded from disk from then on"
    assert theirs["sums"][0] == 2000.0
    assert [memory.get(path, load)["loaded"][0] for path in paths] == [1, 2, 3, 4]
    assert len(load.paths) == 4


def test_memory_of_an_ended_process_is_gone(open_memory, tmp_path, paths, action_lines):
    memory, load = open_memory(), CountingLoader()
    script = f"{OTHER_PROCESS}\nimport os; os._exit(0)"
    done = run_python("-c", script, *action_lines("open", "read"))
    assert done.returncode == 0, done.stderr
    [left] = set((tmp_path / "meet").glob("*/*.log")) - {memory._log.path}
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert load.paths == [paths[0]]
    open_memory()
    assert not left.exists()


def test_every_supported_value_round_trips(open_memory, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"x")
    memory, load = open_memory(), CountingLoader(VALUES)
    first = memory.get(path, load)
    first["metadata"]["caption"] = first["latents"] = None
    assert is_equal(memory.get(path, load), VALUES)
    assert len(load.paths) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: torch.ones(1)}, "a dict whose keys are not strings"),
        ({"x": object()}, "a value of type object"),
        ({"x": torch.ones(2, 2).to_sparse()}, "torch.sparse_coo tensor on cpu"),
        ({"x": torch.ones(1, requires_grad=True)}, "with a gradient"),
        ({"x": torch.ones(1, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_unsupported_values_are_reported_once_and_read_from_disk(
    open_memory, notices, paths, value, message
):
    with pytest.raises(UnsupportedValueError, match=message):
        serialize(value)
    memory, load = open_memory(), CountingLoader(value)
    for path in paths:
        assert memory.get(path, load) is value
    assert memory.nbytes == 0
    [notice] = notices
    assert message in notice.text
    assert notice.fallback


def test_the_oldest_segment_is_dropped_to_stay_in_the_budget(open_memory, tmp_path, other, paths):
    size = max(PAGE, 8192)
    memory, load = open_memory(4 * size), CountingLoader()
    first = memory.get(paths[0], load)
    for path in paths[1:]:
        memory.get(path, load)
    assert memory.nbytes == 4 * size
    assert other()["loads"] == 0
    more = tmp_path / "more.pt"
    more.write_bytes(b"more")
    memory.get(more, load)
    assert memory.nbytes == 4 * size
    assert first["loaded"].sum() == 2000.0, "a tensor in use stays valid"
    assert memory.get(paths[3], load)["loaded"][0] == 4
    assert len(load.paths) == 5
    memory.get(paths[0], load)
    assert len(load.paths) == 6
    huge = CountingLoader({"x": torch.zeros(4 * size)})
    big = tmp_path / "big.pt"
    big.write_bytes(b"big")
    assert memory.get(big, huge) is memory.get(big, huge) is huge.value
    assert len(huge.paths) == 2


def test_files_that_are_missing_or_change_during_loading_are_not_kept(open_memory, tmp_path, paths):
    memory = open_memory()

    def missing(path):
        raise FileNotFoundError(path)

    with pytest.raises(FileNotFoundError):
        memory.get(tmp_path / "gone.pt", missing)

    def changing(path):
        Path(path).write_bytes(b"changed while it was read")
        return {"x": torch.ones(1)}

    memory.get(paths[0], changing)
    assert memory.nbytes == 0


def test_a_fork_reads_but_does_not_store(open_memory, paths):
    memory, load = open_memory(), CountingLoader()
    memory.get(paths[0], load)
    child = os.fork()
    if child == 0:
        held = memory.get(paths[0], load)["loaded"][0] == 1 and len(load.paths) == 1
        memory.get(paths[1], load)
        os._exit(0 if held and memory.nbytes == max(PAGE, 8192) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory._log.path.exists()


class RefusedSegment(SegmentOpened):
    """A segment of another user's process."""

    def open(self, proc):
        raise PermissionError(13, "Permission denied")


def test_each_process_keeps_its_own_copy_if_access_is_denied(open_memory, paths, notices):
    memory, load = open_memory(), CountingLoader()
    log = RecordLog(memory._log.path.with_name(f"{os.getpid()}-0.log"), os.geteuid())
    found = os.stat(paths[0])
    file = (found.st_ino, found.st_mtime_ns, found.st_size)
    log.add(ValueStored(paths[0], file, 0, 0, 8, {"plain": None}))
    memory._opened[log.path, 0] = RefusedSegment(0, 1, 1, 1, 1)
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert load.paths == [paths[0]]
    assert (
        "cannot be mapped ([Errno 13] Permission denied): each rank keeps its own"
        in notices[0].text
    )
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert len(load.paths) == 1


def test_incomplete_log_lines_are_read_later(tmp_path):
    path = tmp_path / "1-1.log"
    log = RecordLog(path, os.geteuid())
    records = [
        SegmentOpened(0, 1, 2, 3, 4),
        ValueStored("a", (1, 2, 3), 0, 0, 8, {"plain": None}),
        SegmentClosed(0),
    ]
    log.add(records[0])
    with path.open("ab") as file:
        file.write(b'["Gone", {"seg')
    found, offset = read_log(path, 0, os.geteuid())
    assert found == records[:1]
    assert read_log(path, offset, os.geteuid()) == ([], offset)
    with path.open("ab") as file:
        file.write(b'ment": 0}]\n')
    assert read_log(path, offset, os.geteuid())[0] == [SegmentClosed(0)]
    assert read_log(tmp_path / "gone.log", 7, os.geteuid()) == ([], 7)


def test_values_come_from_disk_if_the_log_is_full(open_memory, paths, notices):
    memory, load = open_memory(), CountingLoader()
    memory.get(paths[0], load)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, memory._log._fd)
    os.close(full)
    for _ in range(2):
        assert "loaded" in memory.get(paths[1], load)
    assert len(load.paths) == 3
    assert len(notices) == 1
    assert "loaded" in memory.get(paths[0], load)
    assert len(load.paths) == 3, "earlier entries are still there"


def test_a_partial_log_write_is_undone(tmp_path, monkeypatch):
    log = RecordLog(tmp_path / "log", os.geteuid())
    log.add(SegmentClosed(1))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[: len(line) // 2]))
    with pytest.raises(OSError, match="No space"):
        log.add(SegmentClosed(2))
    monkeypatch.undo()
    log.add(SegmentClosed(3))
    assert read_log(log.path, 0, os.geteuid())[0] == [SegmentClosed(1), SegmentClosed(3)]


@pytest.mark.parametrize("kind", ["folder", "subfolder", "log", "link"])
def test_another_users_files_are_refused(open_memory, tmp_path, paths, kind):
    first = open_memory()
    meet = tmp_path / "meet"
    [subfolder] = meet.iterdir()
    [log] = subfolder.glob("*.log")
    if kind == "link":
        planted = log.with_name(f"{os.getpid()}-1.log")
        planted.symlink_to(log)
    else:
        planted = {"folder": meet, "subfolder": subfolder, "log": log}[kind]
        planted.chmod(0o777)
    with pytest.raises(UnsafeFileError, match=str(planted)):
        open_memory().get(paths[0], CountingLoader())
    assert first.hits == 0
