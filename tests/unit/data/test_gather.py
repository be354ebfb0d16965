"""Files by one call of the compiled helper. Staging with and without it: test_staging."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from fork_process import is_true_in_fork

from gracetune.data.gather import FAILED, LIBRARY, SOURCE, Gather, MissingGather, find_gather
from gracetune.data.source import FileRange
from gracetune.memory.shared_arena import Arena, ArenaFullError, ArenaWriter, SegmentWriter
from gracetune.memory.shim import COMPILE_FLAGS, build_shim


@pytest.fixture
def gather() -> Gather:
    found = find_gather()
    assert isinstance(found, Gather), found.reason
    return found


def _made(folder: Path, lengths: list[int]) -> list[Path]:
    paths = [folder / f"{number:04d} ünï" for number in range(len(lengths))]
    for path, length in zip(paths, lengths, strict=True):
        path.write_bytes(os.urandom(length))
    return paths


def _gathered(
    gather: Gather, places: list[FileRange], sizes: list[int]
) -> tuple[Arena, list[int], list[int]]:
    writer = ArenaWriter()
    with writer.segment_writer() as hand:
        hand.write(b"what was there before")
        starts, lengths = gather(hand, places, sizes)
        hand.write(b"what comes after")
    return writer.seal(), starts, lengths


@pytest.mark.parametrize(
    "lengths",
    [[1], [4096] * 3, [1, 4095, 4096, 4097] * 200, [3_000_000, 17, 600_000, 524_288, 5]],
    ids=["a byte", "pages", "many small ones", "more than the pipe holds"],
)
def test_every_byte_lies_where_it_says(tmp_path: Path, gather: Gather, lengths: list[int]) -> None:
    paths = _made(tmp_path, lengths)
    places = [FileRange(str(path), 0, None) for path in paths]
    arena, starts, found = _gathered(gather, places, lengths)
    assert found == lengths
    for path, start, length in zip(paths, starts, found, strict=True):
        assert bytes(arena.view(start, length)) == path.read_bytes()
    # Nothing lies in between: memory is what the files have.
    assert len(arena.segments[0]) == sum(lengths) + len(b"what was there beforewhat comes after")


def test_lengths_are_told_and_0_for_what_cannot_be_asked(tmp_path: Path, gather: Gather) -> None:
    paths = [*_made(tmp_path, [0, 7, 100_000]), tmp_path / "gone", tmp_path / ("x" * 300)]
    assert gather.sizes([str(path) for path in paths]) == [0, 7, 100_000, 0, 0]
    assert gather.sizes([]) == []


def test_parts_of_files_lie_anywhere_in_them(tmp_path: Path, gather: Gather) -> None:
    (shard,) = _made(tmp_path, [200_000])
    data = shard.read_bytes()
    cuts = [(0, 10), (4097, 100_000), (199_999, 1)]
    places = [FileRange(str(shard), offset, nbytes) for offset, nbytes in cuts]
    arena, starts, lengths = _gathered(gather, places, [nbytes for _, nbytes in cuts])
    for start, length, (offset, nbytes) in zip(starts, lengths, cuts, strict=True):
        assert bytes(arena.view(start, length)) == data[offset : offset + nbytes]


def test_what_is_odd_is_left_to_others_and_the_rest_comes(tmp_path: Path, gather: Gather) -> None:
    first, longer, shorter, last = _made(tmp_path, [50_000] * 4)
    os.mkfifo(tmp_path / "fifo")  # would be waited for
    places = [FileRange(str(p), 0, None) for p in (first, longer, shorter, tmp_path / "gone")]
    places += [FileRange(str(tmp_path), 0, None), FileRange(str(tmp_path / "fifo"), 0, None)]
    places += [FileRange(str(last), 40_000, 20_000), FileRange(str(last), 0, None)]
    sizes = [50_000, 49_999, 50_001, 9, 4096, 1, 20_000, 50_000]
    arena, starts, lengths = _gathered(gather, places, sizes)
    assert lengths == [50_000, FAILED, FAILED, FAILED, FAILED, FAILED, FAILED, 50_000]
    assert bytes(arena.view(starts[0], 50_000)) == first.read_bytes()
    assert bytes(arena.view(starts[-1], 50_000)) == last.read_bytes()
    assert len(arena.segments[0]) == 100_000 + len(b"what was there beforewhat comes after")


def test_a_file_that_ends_before_its_length_is_as_long_as_it_is(
    tmp_path: Path, gather: Gather
) -> None:
    """Files of the kernel tell a whole page, whatever is in them."""
    page = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    (beside,) = _made(tmp_path, [100])
    content = page.read_bytes()
    assert len(content) < page.stat().st_size
    places = [FileRange(str(page), 0, None), FileRange(str(beside), 0, None)]
    arena, starts, lengths = _gathered(gather, places, [page.stat().st_size, 100])
    assert lengths == [len(content), 100]
    assert bytes(arena.view(starts[0], lengths[0])) == content
    assert bytes(arena.view(starts[1], 100)) == beside.read_bytes()


@pytest.mark.parametrize("length", [100, 2_000_000], ids=["at the end", "in between"])
def test_a_target_that_takes_no_more_is_full(tmp_path: Path, gather: Gather, length: int) -> None:
    (path,) = _made(tmp_path, [length])
    hand = SegmentWriter(0)
    fcntl.fcntl(hand._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(ArenaFullError, match="Operation not permitted"):
        gather(hand, [FileRange(str(path), 0, None)], [length])


def test_without_descriptors_every_file_is_odd(tmp_path: Path, gather: Gather) -> None:
    (path,) = _made(tmp_path, [100])

    def all_odd() -> bool:
        with ArenaWriter().segment_writer() as hand:
            used = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, used))
            return gather(hand, [FileRange(str(path), 0, None)] * 2, [100] * 2)[1] == [
                FAILED,
                FAILED,
            ]

    assert is_true_in_fork(all_odd)


def test_no_descriptor_is_left_open(tmp_path: Path, gather: Gather) -> None:
    paths = [*_made(tmp_path, [1000, 700_000]), tmp_path / "gone"]
    before = sorted(os.listdir("/proc/self/fd"))
    _gathered(gather, [FileRange(str(path), 0, None) for path in paths], [1000, 700_001, 5])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_path_with_a_nul_would_shift_all_others(tmp_path: Path, gather: Gather) -> None:
    with pytest.raises(AssertionError, match="NUL"):
        _gathered(gather, [FileRange("a\0b", 0, None)], [1])


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 65_535, 65_536, 70_001, 131_072])
def test_pieces_lie_behind_each_other_and_nothing_else_is_touched(
    gather: Gather, nbytes: int
) -> None:
    pieces = [ctypes.create_string_buffer(os.urandom(nbytes), nbytes or 1) for _ in range(5)]
    target = ctypes.create_string_buffer(b"x" * (7 * nbytes + 2))
    chosen = [pieces[number] for number in (4, 0, 0, 2)]  # in any order, the same one twice
    gather.join(ctypes.addressof(target) + 1, [ctypes.addressof(piece) for piece in chosen], nbytes)
    joined = b"".join(piece.raw[:nbytes] for piece in chosen)
    assert target.raw.rstrip(b"\0") == b"x" + joined + b"x" * (3 * nbytes + 1)
    gather.join(0, [], nbytes)


def test_a_missing_helper_says_why(tmp_path: Path) -> None:
    missing = find_gather(tmp_path)
    assert isinstance(missing, MissingGather)
    assert "no C compiler" in missing.reason


def test_a_broken_helper_is_not_used(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")
    missing = find_gather(tmp_path)
    assert isinstance(missing, MissingGather)
    assert "cannot be loaded" in missing.reason


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("int gracetune_gather_abi(void) { return 99; }", "version 99, but this gracetune needs 2"),
        ("int x;", "cannot be loaded.*undefined symbol"),
    ],
)
def test_a_helper_of_another_version_is_not_used(tmp_path: Path, code: str, why: str) -> None:
    source = tmp_path / "old.c"
    source.write_text(f'__attribute__((visibility("default"))) {code}\n')
    build_shim(tmp_path / LIBRARY, source=source)
    missing = find_gather(tmp_path)
    assert isinstance(missing, MissingGather)
    assert re.search(why, missing.reason)


def test_the_source_compiles_without_warnings_in_strict_c(tmp_path: Path) -> None:
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    command = ["cc", *COMPILE_FLAGS, *strict, str(SOURCE), "-o", str(tmp_path / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
