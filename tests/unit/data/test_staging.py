"""Staging of files that change or cannot be read, and across processes; see also test_staged."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fork_process import is_true_in_fork, undumpable_process
from source_files import FILES, write_folder, write_tar

from gracetune.config.dataset_schema import InMemorySection
from gracetune.data import staging
from gracetune.data.bulk_copy import BulkCopier, MissingBulkCopier, find_bulk_copier
from gracetune.data.shard_files import LocalShard, TarSource
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource
from gracetune.errors import DataError
from gracetune.events.types import Event, Notice, StageProgress
from gracetune.memory.shared_memory import ArenaFullError, SegmentWriter
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.data.source import FileRange, Source

BIG = bytes(range(256)) * 1000
"""Large enough to be copied inside the kernel."""
LIMIT = len(BIG) / GIB


Find = Callable[[], BulkCopier | MissingBulkCopier]
"""A function that returns the compiled helper, or why it is missing."""


@pytest.fixture(params=["compiled", "python"])
def find(request: pytest.FixtureRequest) -> Find:
    """Find the compiled helper, or none: the results must be the same."""
    return (
        find_bulk_copier
        if request.param == "compiled"
        else lambda: MissingBulkCopier("it is not here")
    )


def _stage(
    source: Source,
    events: list[Event] | None = None,
    find: Find = find_bulk_copier,
    **section: object,
) -> StagedSource:
    emitted: list[Event] = [] if events is None else events
    settings = InMemorySection.model_validate({"compression": "none", **section})
    return StagedSource.stage(
        source, source.keys(), settings, emitted.append, "datasets[0]", find=find
    )


class ChangingSource(FolderSource):
    """Changes a file after its size was read and before it is opened."""

    def __init__(self, root: Path, key: str, change: str) -> None:
        super().__init__(root)
        self._target = (root / key, key)
        self._change = change

    def place(self, key: str) -> FileRange:
        path, target = self._target
        if key == target:
            change, self._change = self._change, "nothing"
            match change:
                case "vanish":
                    path.unlink()
                case "grow":
                    path.write_bytes(path.read_bytes() * 2)
                case "shrink":
                    os.truncate(path, 7)
        return super().place(key)


@pytest.mark.parametrize("data", [b"small", BIG], ids=["small", "large"])
@pytest.mark.parametrize(
    ("change", "left"), [("vanish", None), ("shrink", 7), ("grow", 2.0), ("nothing", 1.0)]
)
def test_a_file_that_changes_while_it_is_staged_is_read_as_it_is_then(
    tmp_path: Path, data: bytes, change: str, left: float | None, find: Find
) -> None:
    write_folder(tmp_path, {"a": b"before", "b": data * 3, "c": b"after"})
    staged = _stage(ChangingSource(tmp_path, "b", change), find=find)
    assert (staged.read("a"), staged.read("c")) == (b"before", b"after")
    if left is None:
        with pytest.raises(OSError, match="No such file"):
            staged.read("b")
    else:
        whole = (data * 6)[: int(left * len(data) * 3) if isinstance(left, float) else left]
        assert staged.read("b") == whole
        assert staged.nbytes("b") == len(whole)


def test_a_file_without_permission_is_named_and_the_rest_is_staged(find: Find) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = write_folder(Path(name), {"a": b"mine", "b": b"secret", "c": BIG})
        for path, mode in ((root, 0o755), (root / "a", 0o644), (root / "b", 0), (root / "c", 0)):
            path.chmod(mode)
        assert is_true_in_fork(lambda: _only_a_is_readable(root, find), as_nobody=True)


def _only_a_is_readable(root: Path, find: Find) -> bool:
    staged = _stage(FolderSource(root), find=find)
    reasons = []
    for key in ("b", "c"):
        try:
            staged.read(key)
        except OSError as error:
            reasons.append(str(error))
    return staged.read("a") == b"mine" and reasons == ["Permission denied"] * 2


def test_a_file_without_a_known_place_is_read_from_its_source(tmp_path: Path, find: Find) -> None:
    class PartlyPlacedSource(FolderSource):
        def place(self, key: str) -> FileRange:
            if key != "b":
                return super().place(key)
            raise OSError("nobody knows")

        def read(self, key: str) -> bytes:
            return b"read by name" if key == "b" else super().read(key)

    source = PartlyPlacedSource(write_folder(tmp_path, {"a": BIG, "b": BIG}))
    staged = _stage(source, find=find)
    assert (staged.read("a"), staged.read("b")) == (BIG, b"read by name")


def test_a_folder_named_like_an_image_is_not_a_file(tmp_path: Path) -> None:
    write_folder(tmp_path, {"x.png/inner.png": b"in", "y.png": b""})
    staged = _stage(FolderSource(tmp_path))
    assert list(staged.keys()) == ["x.png/inner.png", "y.png"]
    assert staged.read("y.png") == b""


def test_large_and_small_files_are_staged_together(tmp_path: Path, find: Find) -> None:
    files = {f"{n:03d}": BIG[: n * 2500] for n in range(100)}
    source = FolderSource(write_folder(tmp_path, files))
    staged = _stage(source, find=find, num_workers=3, chunk_size=7)
    assert {key: staged.read(key) for key in staged.keys()} == files  # noqa: SIM118
    assert staged.stored_nbytes == sum(map(len, files.values()))


def test_small_files_are_written_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WRITE_BATCH_NBYTES", 1000)
    files = {f"{n:03d}": bytes([n]) * 300 for n in range(50)}
    source = FolderSource(write_folder(tmp_path, files))
    staged = _stage(source, find=lambda: MissingBulkCopier("it is not here"))
    assert {key: staged.read(key) for key in staged.keys()} == files  # noqa: SIM118


@pytest.mark.parametrize("chunk_size", [1, 10, 1000, None])
def test_chunk_size_does_not_change_the_contents(
    tmp_path: Path, chunk_size: int | None, find: Find
) -> None:
    path = write_tar(tmp_path / "x.tar", FILES)
    source = TarSource([LocalShard(path)], lambda event: None)
    staged = _stage(source, find=find, chunk_size=chunk_size)
    assert {key: staged.read(key) for key in staged.keys()} == FILES  # noqa: SIM118


def test_the_limit_holds_for_files_that_have_grown(tmp_path: Path, find: Find) -> None:
    write_folder(tmp_path, {"a": BIG, "b": BIG})
    with pytest.raises(DataError, match=r"datasets\[0\]\.in_memory\.memory_limit_gb"):
        _stage(ChangingSource(tmp_path, "b", "grow"), find=find, memory_limit_gb=2.5 * LIMIT)
    assert _stage(FolderSource(tmp_path), find=find, memory_limit_gb=3 * LIMIT)
    with pytest.raises(DataError, match=r"datasets\[0\]\.in_memory\.memory_limit_gb"):
        _stage(FolderSource(tmp_path), find=find, memory_limit_gb=2.9 * LIMIT)


def test_the_limit_holds_for_files_copied_in_the_kernel(tmp_path: Path) -> None:
    class UnsizedSource(FolderSource):
        def nbytes(self, key: str) -> int:
            raise OSError("who knows")

    source = UnsizedSource(write_folder(tmp_path, {"a": BIG, "b": BIG}))
    with pytest.raises(DataError, match=r"datasets\[0\]\.in_memory\.memory_limit_gb"):
        _stage(source, memory_limit_gb=1.9 * len(BIG) / GIB)
    assert _stage(source, memory_limit_gb=2 * len(BIG) / GIB).stored_nbytes == 2 * len(BIG)


def test_staging_is_refused_without_free_host_memory(tmp_path: Path) -> None:
    source = FolderSource(write_folder(tmp_path, {"a": BIG}))
    with pytest.raises(DataError, match="this machine has 0 B free"):
        StagedSource.stage(
            source, source.keys(), InMemorySection(), lambda event: None, room=lambda: -1
        )


def test_running_out_of_memory_while_staging_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SegmentWriter, data: bytes) -> int:
        raise ArenaFullError("No space left on device")

    monkeypatch.setattr(SegmentWriter, "write", full)
    source = FolderSource(write_folder(tmp_path, {"a": b"x"}))
    with pytest.raises(DataError, match=r"datasets\[0\].*ran out of memory.*No space left"):
        _stage(source)


@pytest.mark.parametrize("data", [b"small" * 100, BIG], ids=["small", "large"])
def test_the_error_names_the_file_size_limit_of_the_process(
    tmp_path: Path, find: Find, data: bytes
) -> None:
    source = FolderSource(write_folder(tmp_path, {f"{n:03d}": data for n in range(200)}))
    assert is_true_in_fork(lambda: _names_the_limit(source, find))


def _names_the_limit(source: Source, find: Find) -> bool:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    try:
        _stage(source, find=find, num_workers=1)
    except DataError as error:
        expected = "datasets[0]: the file-size limit of 8.0 KiB (ulimit -f) stopped staging"
        return str(error).startswith(expected) and "(File too large)" in str(error)
    return False


def test_a_missing_helper_is_reported_once(tmp_path: Path) -> None:
    events: list[Event] = []
    source = FolderSource(write_folder(tmp_path, {"a": BIG, "b": BIG}))
    _stage(source, events, lambda: MissingBulkCopier("it is not here"))
    (notice,) = (event for event in events if isinstance(event, Notice) and event.fallback)
    assert notice.text == "files are staged one by one in Python: it is not here"


def test_progress_has_files_bytes_and_seconds(tmp_path: Path) -> None:
    events: list[Event] = []
    _stage(FolderSource(write_folder(tmp_path, {"a": BIG, "b": BIG})), events)
    last = [event for event in events if isinstance(event, StageProgress)][-1]
    assert (last.done, last.nbytes, last.total_nbytes) == (2, 2 * len(BIG), 2 * len(BIG))
    assert last.seconds > 0


def test_the_notice_names_the_compression_of_each_suffix(tmp_path: Path) -> None:
    events: list[Event] = []
    words = {f"{n}.txt": b"the same words again " * 100 for n in range(5)}
    source = FolderSource(write_folder(tmp_path, {"n.jpg": os.urandom(5000), **words}))
    staged = _stage(source, events, compression="auto")
    (text,) = (event.text for event in events if isinstance(event, Notice))
    assert "5 compressed" in text
    assert "no compression for .jpg" in text
    assert staged.read("3.txt") == words["3.txt"]


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["quick", "slow"])
def test_sizes_are_in_order_with_one_or_several_threads(tmp_path: Path, seconds: float) -> None:
    source = FolderSource(write_folder(tmp_path, {f"{n:03d}": b"x" * n for n in range(200)}))
    times = iter([0.0, seconds])
    keys = list(source.keys())
    missing = MissingBulkCopier("it is not here")
    assert staging.sizes_of(source, keys, 3, missing, lambda: next(times)) == list(range(200))
    assert staging.sizes_of(source, keys, 3, find_bulk_copier()) == list(range(200))


def test_reading_a_staged_file_opens_no_file(tmp_path: Path) -> None:
    """An audit hook of the interpreter records every file that the process opens."""
    write_folder(tmp_path, {f"{n}.png": BIG for n in range(5)})
    program = f"""
import sys
from gracetune.config.dataset_schema import InMemorySection
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource
source = FolderSource({str(tmp_path)!r})
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
staged = StagedSource.stage(source, source.keys(), InMemorySection(), lambda event: None)
while_staging = sum(str(name).startswith({str(tmp_path)!r}) for name in opened)
opened.clear()
for key in list(staged.keys()) * 3:
    staged.read(key), staged.view(key), staged.nbytes(key)
print(while_staging, opened)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "5 []\n"


RANK = """
import os, re, signal, sys
from pathlib import Path
from gracetune.config.dataset_schema import InMemorySection
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource

def private():
    found = re.search(r"^RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024

source = FolderSource(sys.argv[1])
before = private()
events = []
staged = StagedSource.stage(source, source.keys(), InMemorySection(compression="none"),
                            events.append, shared_folder=Path(sys.argv[2]))
total = sum(map(sum, (staged.view(key)[::4096] for key in staged.keys())))
texts = [event.text for event in events if type(event).__name__ == "Notice"]
print(private() - before, total, staged.resident_nbytes, "|".join(texts), sep="\\t", flush=True)
signal.pause()
"""


def test_ranks_share_one_copy(tmp_path: Path) -> None:
    data = {f"{n}": os.urandom(1024**2) for n in range(64)}
    folder = write_folder(tmp_path / "data", data)
    command = [sys.executable, "-c", RANK, str(folder), str(tmp_path / "meet")]
    ranks = []
    answers = []
    try:
        for _ in range(3):
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert ranks[-1].stdout is not None
            answers.append(ranks[-1].stdout.readline().rstrip("\n").split("\t"))
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
    assert "staged 64 files" in answers[0][3]
    for answer in answers[1:]:
        assert answer[1:3] == answers[0][1:3]
        assert (
            answer[3]
            == f"data: sharing the folder {folder} with process {ranks[0].pid}, which staged it"
        )
        assert int(answer[0]) < 0.05 * 64 * 1024**2


def test_a_pickled_staged_source_is_small_and_opens_in_another_process(tmp_path: Path) -> None:
    staged = _stage(FolderSource(write_folder(tmp_path, {"a": BIG})))
    handed = pickle.dumps(staged)
    assert len(handed) < 1000
    program = """
import pickle, sys
staged = pickle.load(sys.stdin.buffer)
print(staged.describe(), len(staged.read("a")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=handed, capture_output=True, check=True
    )
    assert done.stdout.decode() == f"the folder {tmp_path}, staged in memory {len(BIG)}\n"


def test_a_changed_dataset_is_not_shared(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"a": b"one"})
    kept = [_stage_shared(folder, tmp_path / "meet")]
    (folder / "a").write_bytes(b"other")  # of another size
    kept.append(_stage_shared(folder, tmp_path / "meet"))
    assert [staged.read("a") for staged in kept] == [b"one", b"other"]


def test_an_edit_that_keeps_the_length_is_not_shared(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"a": b"one", "b": b"same"})
    command = [sys.executable, "-c", RANK, str(folder), str(tmp_path / "meet")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            events: list[Event] = []
            assert (
                _stage_shared(folder, tmp_path / "meet", events, compression="none").read("a")
                == b"one"
            )
            assert "sharing" in str(events[-1])
            status = (folder / "a").stat()
            (folder / "a").write_bytes(b"two")
            os.utime(folder / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
            assert (
                _stage_shared(folder, tmp_path / "meet", events, compression="none").read("a")
                == b"two"
            )
            assert "staged 2 files" in str(events[-1])
        finally:
            holder.kill()


def test_a_process_without_permission_reports_that_it_keeps_its_own_copy(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = write_folder(root / "data", {"a": b"one"})
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)
        held = _stage_shared(folder, root / "meet")
        if os.geteuid() == 0:
            for path in (root / "meet", *(root / "meet").iterdir()):
                os.chown(path, 65534, 65534)
        with undumpable_process():
            claim = partial(_reports_its_own_copy, folder, root / "meet")
            assert is_true_in_fork(claim, as_nobody=True)
        assert held.read("a") == b"one"


def _reports_its_own_copy(folder: Path, shared_folder: Path) -> bool:
    events: list[Event] = []
    staged = _stage_shared(folder, shared_folder, events)
    notices = [event for event in events if isinstance(event, Notice)]
    warned = [notice for notice in notices if notice.fallback and "its own copy" in notice.text]
    return staged.read("a") == b"one" and len(warned) == 1


def _stage_shared(
    folder: Path, shared_folder: Path, events: list[Event] | None = None, **section: object
) -> StagedSource:
    """Stage a folder, or map the copy of another process that meets in `shared_folder`."""
    source = FolderSource(folder)
    settings = InMemorySection.model_validate(section)
    emit = ([] if events is None else events).append
    return StagedSource.stage(source, source.keys(), settings, emit, shared_folder=shared_folder)


@pytest.mark.slow
def test_a_file_larger_than_2_gib_is_staged(tmp_path: Path) -> None:
    """The kernel copies at most 2 GiB per call."""
    nbytes = 2 * GIB + 12345
    with (tmp_path / "huge").open("wb") as file:
        file.seek(nbytes - 3)
        file.write(b"end")
    staged = _stage(FolderSource(tmp_path))
    assert staged.nbytes("huge") == nbytes
    assert staged.view("huge")[-3:] == b"end"


def test_a_hundred_thousand_files_have_a_small_index() -> None:
    class NamesSource:
        """A source whose files contain their own names."""

        def __init__(self, count: int) -> None:
            self._keys = [f"deep/folder/{number:09d}.bin" for number in range(count)]

        def keys(self) -> Sequence[str]:
            return self._keys

        def read(self, key: str) -> bytes:
            return key.encode()

        def nbytes(self, key: str) -> int:
            return len(key)

        def describe(self) -> str:
            return "made names"

    staged = _stage(NamesSource(100_000))
    assert len(staged.keys()) == 100_000
    assert staged.read("deep/folder/000077777.bin") == b"deep/folder/000077777.bin"
    assert staged.index_nbytes < 100 * 100_000
