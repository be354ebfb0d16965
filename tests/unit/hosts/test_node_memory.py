"""Tensors of cache files, shared by processes that are really two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gracetune.hosts.shared_tensor_memory import (
    SegmentClosed,
    RecordLog,
    SharedTensorMemory,
    UnsupportedValueError,
    SegmentOpened,
    ValueStored,
    read_records,
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
OTHER = """
import json, sys
from pathlib import Path
import torch
from gracetune.hosts.shared_tensor_memory import SharedTensorMemory
folder, paths = Path(sys.argv[1]), json.loads(sys.argv[2])
loads = []
def load(path):
    loads.append(path)
    return {"loaded": torch.full((2000,), float(len(loads)))}
told = []
memory = SharedTensorMemory(1 << 20, folder, told.append)
for line in sys.stdin:
    if line.strip() == "write":
        memory.get(paths[0], load)["loaded"].add_(100)
    sums = [memory.get(path, load)["loaded"].sum().item() for path in paths]
    maps = [row for row in open("/proc/self/maps") if "gracetune-tensors" in row]
    print(json.dumps({
        "loads": len(loads), "sums": sums, "nbytes": memory.nbytes, "told": len(told),
        "inodes": sorted({int(row.split()[4]) for row in maps}),
    }), flush=True)
"""


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def paths(tmp_path) -> list[str]:
    made = []
    for number in range(4):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(bytes(number + 1))
        made.append(str(path))
    return made


@pytest.fixture
def told() -> list:
    return []


@pytest.fixture
def open_memory(tmp_path, told):
    return lambda budget=1 << 20: SharedTensorMemory(budget, tmp_path / "meet", told.append)


class Loads:
    """Counts what is read from disk."""

    def __init__(self, value=None) -> None:
        self.paths: list[str] = []
        self.value = value

    def __call__(self, path):
        self.paths.append(path)
        if self.value is not None:
            return self.value
        return {"loaded": torch.full((2000,), float(len(self.paths)))}


@pytest.fixture
def other(tmp_path, paths):
    """Another process, which is asked line by line."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path / "meet"), json.dumps(paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(word="read") -> dict:
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()


def test_what_one_process_has_loaded_another_does_not_load(open_memory, other, paths, told):
    memory, load = open_memory(), Loads()
    mine = [memory.get(path, load)["loaded"].sum().item() for path in paths]
    theirs = other()
    assert theirs["sums"] == mine == [2000.0, 4000.0, 6000.0, 8000.0]
    assert (len(load.paths), theirs["loads"]) == (4, 0)
    assert (memory.nbytes, theirs["nbytes"]) == (4 * max(PAGE, 8192), 0)
    with open("/proc/self/maps") as maps:
        inodes = {int(row.split()[4]) for row in maps if "gracetune-tensors" in row}
    assert inodes & {*theirs["inodes"]}, "the other maps the very same memory"
    assert (told, theirs["told"]) == ([], 0)
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert (memory.hits, memory.misses) == (1, 4)


def test_it_goes_both_ways_and_outlives_a_change_of_the_file(open_memory, other, paths):
    memory, load = open_memory(), Loads()
    assert other()["loads"] == 4
    assert memory.get(paths[2], load)["loaded"][0] == 3
    assert load.paths == []
    Path(paths[2]).write_bytes(b"another file")
    memory.forget(paths[2])
    assert memory.get(paths[2], load)["loaded"][0] == 1
    assert load.paths == [paths[2]]
    assert other()["sums"][2] == 2000.0


def test_who_writes_to_a_tensor_writes_for_itself_alone(open_memory, other, paths):
    memory, load = open_memory(), Loads()
    for path in paths:
        memory.get(path, load)
    theirs = other("write")
    assert theirs["loads"] == 1, "what it wrote to, it reads from disk from then on"
    assert theirs["sums"][0] == 2000.0
    assert [memory.get(path, load)["loaded"][0] for path in paths] == [1, 2, 3, 4]
    assert len(load.paths) == 4


def test_a_holder_that_ended_takes_its_memory_with_it(open_memory, tmp_path, paths):
    script = OTHER.replace("for line in sys.stdin", "for line in ['read']")
    words = [sys.executable, "-c", script, str(tmp_path / "meet"), json.dumps(paths)]
    memory, load = open_memory(), Loads()
    subprocess.run([*words[:2], f"{script}\nimport os; os._exit(0)", *words[3:]], check=True)
    [left] = set((tmp_path / "meet").glob("*/*.log")) - {memory._log.path}
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert load.paths == [paths[0]]
    open_memory()
    assert not left.exists()


def test_every_kind_of_value_comes_back_as_it_was(open_memory, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"x")
    memory, load = open_memory(), Loads(VALUES)
    first = memory.get(path, load)
    first["metadata"]["caption"] = first["latents"] = None
    assert same(memory.get(path, load), VALUES)
    assert len(load.paths) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: torch.ones(1)}, "a mapping whose keys are not text"),
        ({"x": object()}, "a object"),
        ({"x": torch.ones(2, 2).to_sparse()}, "torch.sparse_coo on cpu"),
        ({"x": torch.ones(1, requires_grad=True)}, "with a gradient"),
        ({"x": torch.ones(1, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_what_cannot_be_shared_is_told_once_and_read_from_disk(
    open_memory, told, paths, value, said
):
    with pytest.raises(UnsupportedValueError, match=said):
        serialize(value)
    memory, load = open_memory(), Loads(value)
    for path in paths:
        assert memory.get(path, load) is value
    assert memory.nbytes == 0
    [notice] = told
    assert said in notice.text
    assert notice.fallback


def test_the_budget_holds_and_the_oldest_segment_leaves(open_memory, tmp_path, other, paths):
    size = max(PAGE, 8192)
    memory, load = open_memory(4 * size), Loads()
    first = memory.get(paths[0], load)
    for path in paths[1:]:
        memory.get(path, load)
    assert memory.nbytes == 4 * size
    assert other()["loads"] == 0
    more = tmp_path / "more.pt"
    more.write_bytes(b"more")
    memory.get(more, load)
    assert memory.nbytes == 4 * size
    assert first["loaded"].sum() == 2000.0, "who has it, keeps it"
    assert memory.get(paths[3], load)["loaded"][0] == 4
    assert len(load.paths) == 5
    memory.get(paths[0], load)
    assert len(load.paths) == 6
    huge = Loads({"x": torch.zeros(4 * size)})
    big = tmp_path / "big.pt"
    big.write_bytes(b"big")
    assert memory.get(big, huge) is memory.get(big, huge) is huge.value
    assert len(huge.paths) == 2


def test_files_that_are_not_there_or_change_while_they_are_read(open_memory, tmp_path, paths):
    memory = open_memory()

    def gone(path):
        raise FileNotFoundError(path)

    with pytest.raises(FileNotFoundError):
        memory.get(tmp_path / "gone.pt", gone)

    def changing(path):
        Path(path).write_bytes(b"changed while it was read")
        return {"x": torch.ones(1)}

    memory.get(paths[0], changing)
    assert memory.nbytes == 0


def test_a_fork_reads_and_does_not_hold(open_memory, paths):
    memory, load = open_memory(), Loads()
    memory.get(paths[0], load)
    child = os.fork()
    if child == 0:
        held = memory.get(paths[0], load)["loaded"][0] == 1 and len(load.paths) == 1
        memory.get(paths[1], load)
        os._exit(0 if held and memory.nbytes == max(PAGE, 8192) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory._log.path.exists()


class Refused(SegmentOpened):
    """As of a process of another user."""

    def open(self, proc):
        raise PermissionError(13, "Permission denied")


def test_where_memory_of_others_is_not_to_be_seen_each_has_its_own(
    open_memory, tmp_path, paths, told
):
    memory, load = open_memory(), Loads()
    log = RecordLog(memory._log.path.with_name(f"{os.getpid()}-0.log"))
    found = os.stat(paths[0])
    file = (found.st_ino, found.st_mtime_ns, found.st_size)
    log.add(ValueStored(paths[0], file, 0, 0, 8, {"plain": None}))
    memory._opened[log.path, 0] = Refused(0, 1, 1, 1, 1)
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert load.paths == [paths[0]]
    assert "cannot be mapped ([Errno 13] Permission denied): each has its own" in told[0].text
    assert memory.get(paths[0], load)["loaded"][0] == 1
    assert len(load.paths) == 1


def test_a_log_is_read_by_whole_lines(tmp_path):
    path = tmp_path / "1-1.log"
    log = RecordLog(path)
    notes = [
        SegmentOpened(0, 1, 2, 3, 4),
        ValueStored("a", (1, 2, 3), 0, 0, 8, {"plain": None}),
        SegmentClosed(0),
    ]
    log.add(notes[0])
    with path.open("ab") as file:
        file.write(b'["SegmentClosed", {"seg')
    found, offset = read_records(path, 0)
    assert found == notes[:1]
    assert read_records(path, offset) == ([], offset)
    with path.open("ab") as file:
        file.write(b'ment": 0}]\n')
    assert read_records(path, offset)[0] == [SegmentClosed(0)]
    assert read_records(tmp_path / "gone.log", 7) == ([], 7)


def test_where_no_note_can_be_written_values_come_from_the_disk(open_memory, paths, told):
    memory, loads = open_memory(), Loads()
    memory.get(paths[0], loads)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, memory._log._fd)
    os.close(full)
    for _ in range(2):
        assert "loaded" in memory.get(paths[1], loads)
    assert len(loads.paths) == 3
    assert len(told) == 1
    assert "loaded" in memory.get(paths[0], loads)
    assert len(loads.paths) == 3, "what was noted before is still there"


def test_a_note_that_finds_half_of_its_room_leaves_nothing(tmp_path, monkeypatch):
    log = RecordLog(tmp_path / "log")
    log.add(SegmentClosed(1))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[: len(line) // 2]))
    with pytest.raises(OSError, match="No space"):
        log.add(SegmentClosed(2))
    monkeypatch.undo()
    log.add(SegmentClosed(3))
    assert read_records(log.path, 0)[0] == [SegmentClosed(1), SegmentClosed(3)]
