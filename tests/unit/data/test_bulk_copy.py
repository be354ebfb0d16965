"""The compiled helper that reads many files in one call; test_staging tests staging with it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
from pathlib import Path

import pytest
from fork_process import is_true_in_fork

from gracetune.data.bulk_copy import (
    FAILED,
    LIBRARY,
    BulkCopier,
    MissingBulkCopier,
    find_bulk_copier,
)
from gracetune.data.source import FileRange
from gracetune.memory.shared_memory import Arena, ArenaFullError, ArenaWriter, SegmentWriter
from gracetune.memory.shim import build_shim


@pytest.fixture
def gather() -> BulkCopier:
    found = find_bulk_copier()
    assert isinstance(found, BulkCopier), found.reason
    return found


def _write_files(folder: Path, lengths: list[int]) -> list[Path]:
    paths = [folder / f"{number:04d} ünï" for number in range(len(lengths))]
    for path, length in zip(paths, lengths, strict=True):
        path.write_bytes(os.urandom(length))
    return paths


def _gather_into_arena(
    gather: BulkCopier, places: list[FileRange], sizes: list[int]
) -> tuple[Arena, list[int], list[int]]:
    writer = ArenaWriter()
    with writer.segment_writer() as segment:
        segment.write(b"what was there before")
        starts, lengths = gather(segment, places, sizes)
        segment.write(b"what comes after")
    return writer.seal(), starts, lengths


@pytest.mark.parametrize(
    "lengths",
    [[1], [4096] * 3, [1, 4095, 4096, 4097] * 200, [3_000_000, 17, 600_000, 524_288, 5]],
    ids=["a byte", "pages", "many small ones", "more than the pipe holds"],
)
def test_gathered_files_are_complete_and_contiguous(
    tmp_path: Path, gather: BulkCopier, lengths: list[int]
) -> None:
    paths = _write_files(tmp_path, lengths)
    places = [FileRange(str(path), 0, None) for path in paths]
    arena, starts, found = _gather_into_arena(gather, places, lengths)
    assert found == lengths
    for path, start, length in zip(paths, starts, found, strict=True):
        assert bytes(arena.view(start, length)) == path.read_bytes()
    # There are no gaps between the files.
    assert len(arena.segments[0]) == sum(lengths) + len(b"what was there beforewhat comes after")


def test_sizes_are_0_for_files_that_cannot_be_accessed(tmp_path: Path, gather: BulkCopier) -> None:
    paths = [*_write_files(tmp_path, [0, 7, 100_000]), tmp_path / "gone", tmp_path / ("x" * 300)]
    assert gather.sizes([str(path) for path in paths]) == [0, 7, 100_000, 0, 0]
    assert gather.sizes([]) == []


def test_ranges_are_read_at_any_offset(tmp_path: Path, gather: BulkCopier) -> None:
    (shard,) = _write_files(tmp_path, [200_000])
    data = shard.read_bytes()
    cuts = [(0, 10), (4097, 100_000), (199_999, 1)]
    places = [FileRange(str(shard), offset, nbytes) for offset, nbytes in cuts]
    arena, starts, lengths = _gather_into_arena(gather, places, [nbytes for _, nbytes in cuts])
    for start, length, (offset, nbytes) in zip(starts, lengths, cuts, strict=True):
        assert bytes(arena.view(start, length)) == data[offset : offset + nbytes]


def test_unusual_files_are_marked_as_failed_and_the_rest_is_gathered(
    tmp_path: Path, gather: BulkCopier
) -> None:
    first, longer, shorter, last = _write_files(tmp_path, [50_000] * 4)
    os.mkfifo(tmp_path / "fifo")  # opening it would block
    places = [FileRange(str(p), 0, None) for p in (first, longer, shorter, tmp_path / "gone")]
    places += [FileRange(str(tmp_path), 0, None), FileRange(str(tmp_path / "fifo"), 0, None)]
    places += [FileRange(str(last), 40_000, 20_000), FileRange(str(last), 0, None)]
    sizes = [50_000, 49_999, 50_001, 9, 4096, 1, 20_000, 50_000]
    arena, starts, lengths = _gather_into_arena(gather, places, sizes)
    assert lengths == [50_000, FAILED, FAILED, FAILED, FAILED, FAILED, FAILED, 50_000]
    assert bytes(arena.view(starts[0], 50_000)) == first.read_bytes()
    assert bytes(arena.view(starts[-1], 50_000)) == last.read_bytes()
    assert len(arena.segments[0]) == 100_000 + len(b"what was there beforewhat comes after")


def test_a_file_shorter_than_its_size_is_gathered_up_to_its_end(
    tmp_path: Path, gather: BulkCopier
) -> None:
    """Files in /sys have the size of a page, whatever they contain."""
    page = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    (ordinary,) = _write_files(tmp_path, [100])
    content = page.read_bytes()
    assert len(content) < page.stat().st_size
    places = [FileRange(str(page), 0, None), FileRange(str(ordinary), 0, None)]
    arena, starts, lengths = _gather_into_arena(gather, places, [page.stat().st_size, 100])
    assert lengths == [len(content), 100]
    assert bytes(arena.view(starts[0], lengths[0])) == content
    assert bytes(arena.view(starts[1], 100)) == ordinary.read_bytes()


@pytest.mark.parametrize("length", [100, 2_000_000], ids=["at the end", "in between"])
def test_a_target_that_cannot_grow_raises_arena_full_error(
    tmp_path: Path, gather: BulkCopier, length: int
) -> None:
    (path,) = _write_files(tmp_path, [length])
    segment = SegmentWriter(0)
    fcntl.fcntl(segment._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(ArenaFullError, match="Operation not permitted"):
        gather(segment, [FileRange(str(path), 0, None)], [length])


def test_without_free_file_descriptors_every_file_fails(tmp_path: Path, gather: BulkCopier) -> None:
    (path,) = _write_files(tmp_path, [100])

    def all_failed() -> bool:
        with ArenaWriter().segment_writer() as segment:
            used = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, used))
            return gather(segment, [FileRange(str(path), 0, None)] * 2, [100] * 2)[1] == [
                FAILED,
                FAILED,
            ]

    assert is_true_in_fork(all_failed)


def test_no_file_descriptor_is_left_open(tmp_path: Path, gather: BulkCopier) -> None:
    paths = [*_write_files(tmp_path, [1000, 700_000]), tmp_path / "gone"]
    before = sorted(os.listdir("/proc/self/fd"))
    _gather_into_arena(
        gather, [FileRange(str(path), 0, None) for path in paths], [1000, 700_001, 5]
    )
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_path_with_a_nul_byte_is_refused(tmp_path: Path, gather: BulkCopier) -> None:
    with pytest.raises(AssertionError, match="NUL"):
        _gather_into_arena(gather, [FileRange("a\0b", 0, None)], [1])


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 65_535, 65_536, 70_001, 131_072])
def test_join_copies_pieces_back_to_back_and_changes_nothing_else(
    gather: BulkCopier, nbytes: int
) -> None:
    pieces = [ctypes.create_string_buffer(os.urandom(nbytes), nbytes or 1) for _ in range(5)]
    target = ctypes.create_string_buffer(b"x" * (7 * nbytes + 2))
    chosen = [pieces[number] for number in (4, 0, 0, 2)]  # in any order, the same one twice
    gather.join(ctypes.addressof(target) + 1, [ctypes.addressof(piece) for piece in chosen], nbytes)
    joined = b"".join(piece.raw[:nbytes] for piece in chosen)
    assert target.raw.rstrip(b"\0") == b"x" + joined + b"x" * (3 * nbytes + 1)
    gather.join(0, [], nbytes)


def test_a_missing_helper_has_a_reason(tmp_path: Path) -> None:
    missing = find_bulk_copier(tmp_path)
    assert isinstance(missing, MissingBulkCopier)
    assert "no C compiler" in missing.reason


def test_a_broken_helper_is_not_used(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")
    missing = find_bulk_copier(tmp_path)
    assert isinstance(missing, MissingBulkCopier)
    assert "cannot be loaded" in missing.reason


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "int gracetune_bulk_copy_abi(void) { return 99; }",
            "version 99, but this gracetune needs 2",
        ),
        ("int x;", "cannot be loaded.*undefined symbol"),
    ],
)
def test_a_helper_of_another_version_is_not_used(tmp_path: Path, code: str, why: str) -> None:
    source = tmp_path / "old.c"
    source.write_text(f'__attribute__((visibility("default"))) {code}\n')
    build_shim(tmp_path / LIBRARY, source=source)
    missing = find_bulk_copier(tmp_path)
    assert isinstance(missing, MissingBulkCopier)
    assert re.search(why, missing.reason)
