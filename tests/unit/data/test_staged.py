from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from gracetune.config.dataset_schema import InMemorySection
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource
from gracetune.errors import DataError
from gracetune.events.types import Event, Notice, StageProgress
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NOISE = random.Random(0).randbytes(4096)


class CountingSource:
    """Records reads by key and thread; keys in `broken` can be neither read nor sized."""

    def __init__(self, files: dict[str, bytes], broken: Sequence[str] = ()) -> None:
        self.files = files
        self.broken = broken
        self.reads: list[str] = []
        self.threads: set[str] = set()

    def keys(self) -> Sequence[str]:
        return sorted([*self.files, *self.broken])

    def read(self, key: str) -> bytes:
        self.reads.append(key)
        self.threads.add(threading.current_thread().name)
        if key in self.broken:
            raise OSError(5, "Input/output error")
        return self.files[key]

    def nbytes(self, key: str) -> int:
        if key in self.broken:
            raise OSError(5, "Input/output error")
        return len(self.files[key])

    def describe(self) -> str:
        return "counted files"


def _stage(
    source: CountingSource | FolderSource, events: list[Event] | None = None, **section: object
) -> StagedSource:
    emitted: list[Event] = [] if events is None else events
    return StagedSource.stage(
        source,
        source.keys(),
        InMemorySection.model_validate(section),
        emitted.append,
        "datasets[3]",
    )


def test_staged_files_can_be_read_after_the_folder_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.png").write_bytes(bytes([number]) * 1000)
    staged = _stage(FolderSource(folder))
    shutil.rmtree(folder)
    assert [staged.read(key) for key in staged.keys()] == [  # noqa: SIM118
        bytes([number]) * 1000 for number in range(5)
    ]
    assert staged.nbytes("3.png") == 1000
    assert "staged in memory" in staged.describe()


@pytest.mark.parametrize("compression", ["auto", "none", "zstd", None])
def test_every_file_is_read_once_by_worker_threads(compression: str | None) -> None:
    source = CountingSource({f"{number:03d}": b"x" * number for number in range(100)})
    _stage(source, compression=compression, num_workers=3)
    assert sorted(source.reads) == list(source.keys())
    assert any(name.startswith("gracetune-read") for name in source.threads)


def test_only_the_given_keys_are_staged() -> None:
    source = CountingSource({"a": b"1", "b": b"2"})
    staged = StagedSource.stage(source, ["b"], InMemorySection(), lambda event: None)
    assert list(staged.keys()) == ["b"]
    assert source.reads == ["b"]


def test_auto_compresses_only_files_that_shrink() -> None:
    events: list[Event] = []
    texts = {f"t{number}": b"words " * 500 for number in range(10)}
    staged = _stage(CountingSource({**texts, "noise": NOISE}), events)
    assert len(NOISE) < staged.stored_nbytes < len(NOISE) + 10 * 300
    notice = next(event for event in events if isinstance(event, Notice))
    assert "auto chose" in notice.text
    assert "10 compressed" in notice.text
    assert "saved" in notice.text
    assert staged.read("noise") == NOISE


def test_auto_reports_why_it_does_not_compress() -> None:
    events: list[Event] = []
    staged = _stage(CountingSource({"a": NOISE, "b": NOISE}), events)
    assert staged.stored_nbytes == 2 * len(NOISE)
    text = next(event.text for event in events if isinstance(event, Notice))
    assert "auto chose no compression for files without a suffix (on 2 sampled files" in text
    assert "lz4 saves" in text
    assert "zstd saves" in text


def test_a_given_codec_never_makes_a_file_larger() -> None:
    staged = _stage(CountingSource({"noise": NOISE, "empty": b""}), compression="lz4")
    assert staged.stored_nbytes == len(NOISE)
    assert staged.read("empty") == b""


def test_the_limit_is_exact_on_stored_bytes() -> None:
    files = {f"{number}": NOISE for number in range(4)}
    exact = 4 * len(NOISE) / GIB
    assert _stage(CountingSource(files), memory_limit_gb=exact).stored_nbytes == 4 * len(NOISE)
    with pytest.raises(DataError, match=r"datasets\[3\]\.in_memory\.memory_limit_gb is"):
        _stage(CountingSource(files), memory_limit_gb=(4 * len(NOISE) - 1) / GIB)


def test_without_a_codec_the_limit_is_checked_before_reading() -> None:
    source = CountingSource({"a": b"x" * 5000})
    with pytest.raises(DataError, match=r"needs about 4\.66e-06 GiB.*Raise the limit.*type: local"):
        _stage(source, compression="none", memory_limit_gb=4999 / GIB)
    assert source.reads == []


def test_the_limit_applies_to_compressed_bytes() -> None:
    files = {f"{number}": b"words " * 500 for number in range(4)}
    assert _stage(CountingSource(files), compression="zstd", memory_limit_gb=3000 / GIB)


def test_exceeding_the_limit_stops_reading_and_reports_the_estimated_need() -> None:
    source = CountingSource({f"{number:03d}": NOISE for number in range(200)})
    limit = 10.5 * len(NOISE) / GIB
    with pytest.raises(DataError) as caught:
        _stage(source, compression="zstd", memory_limit_gb=limit, num_workers=2)
    assert len(source.reads) < 30
    assert f"about {200 * len(NOISE) / GIB:.3g} GiB" in str(caught.value)


def test_the_limit_applies_to_a_file_that_grew_after_it_was_sized() -> None:
    class Growing(CountingSource):
        def nbytes(self, key: str) -> int:
            return 1

    with pytest.raises(DataError, match="memory_limit_gb"):
        _stage(Growing({"a": NOISE}), compression="none", memory_limit_gb=100 / GIB)


@pytest.mark.parametrize("compression", ["auto", "none"])
def test_an_unreadable_file_is_listed_and_raises_when_it_is_read(compression: str) -> None:
    staged = _stage(CountingSource({"a": b"fine"}, broken=["b"]), compression=compression)
    assert list(staged.keys()) == ["a", "b"]
    assert staged.read("a") == b"fine"
    for ask in (staged.read, staged.nbytes):
        with pytest.raises(OSError, match="Input/output error"):
            ask("b")


def test_progress_ends_at_the_total() -> None:
    events: list[Event] = []
    _stage(CountingSource({f"{number}": b"" for number in range(50)}), events)
    emitted = [event for event in events if isinstance(event, StageProgress)]
    assert (emitted[-1].stage, emitted[-1].done, emitted[-1].total) == ("staging", 50, 50)
    assert len(emitted) < 10


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_view_has_the_contents_of_its_file(compression: str) -> None:
    files = {f"{n % 7}/{n}": bytes([n % 251]) * (n % 90) for n in range(3000)}
    staged = _stage(CountingSource(files), compression=compression)
    assert {key: bytes(staged.view(key)) for key in files} == files
    assert all(staged.view(key).readonly for key in list(files)[:100])
    for unknown in ("0/1", "x" * 100, "", "\ud800"):
        with pytest.raises(FileNotFoundError, match="has no"):
            staged.view(unknown)


def test_memory_is_freed_without_a_garbage_collection() -> None:
    """The staged files may be most of the memory of the machine."""
    gc.disable()
    try:
        staged = _stage(CountingSource({"a": NOISE}))
        arena = weakref.ref(staged._arena)
        del staged
        assert arena() is None
    finally:
        gc.enable()
