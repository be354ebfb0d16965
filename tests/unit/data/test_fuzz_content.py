"""2,000 damaged files are read or reported as unreadable: no crash, no hang, no other error."""

from __future__ import annotations

from collections import Counter

import pytest
from damaged_files import AUDIO, IMAGES, VIDEOS, DamagedFile, damage, intact_file, read

from gracetune.data.audio import probe_audio
from gracetune.data.prefetch import Prefetch, prefetched
from gracetune.data.sample import UnreadableSampleError
from gracetune.data.video import probe_video

# Worker processes: if a decoder crashes, the error names the file.
WORKERS = Prefetch(num_workers=2, depth=16, timeout_s=30, processes=True)


def _run(names: list[str], count: int, first: int = 0) -> Counter[str]:
    tasks = [
        DamagedFile(names[n % len(names)], n // len(names)) for n in range(first, first + count)
    ]
    return Counter(prefetched(tasks, read, repr, WORKERS))


@pytest.mark.parametrize("name", [*IMAGES, *VIDEOS, *AUDIO])
def test_damage_is_reproducible_and_changes_the_file(name: str) -> None:
    assert damage(DamagedFile(name, 0)) == damage(DamagedFile(name, 0))
    assert any(damage(DamagedFile(name, n)) != intact_file(name) for n in range(3))


@pytest.mark.parametrize(
    ("names", "count"),
    [(list(IMAGES), 1320), (list(VIDEOS), 320), (list(AUDIO), 360)],
    ids=["images", "videos", "audio"],
)
def test_damaged_files_are_read_or_reported_as_unreadable(names: list[str], count: int) -> None:
    results = _run(names, count)
    assert sum(results.values()) == count
    # Both results occur: the damage is neither always fatal nor always harmless.
    assert results["read"] > count / 20
    assert results["unreadable"] > count / 20


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (DamagedFile("mp4", 67), "its codec is unknown"),
        (DamagedFile("m4a", 27), "its codec is unknown"),
        (DamagedFile("mp4", 21), "the video has no frames"),
        (DamagedFile("matroska", 157), "frame 0 is damaged"),
        (DamagedFile("wav", 165), "218 channels at 8000 samples per second are not supported"),
    ],
)
def test_known_kinds_of_damage_have_their_own_reason(task: DamagedFile, reason: str) -> None:
    probe = probe_video if task.name in VIDEOS else probe_audio
    with pytest.raises(UnreadableSampleError, match=f"^{reason}$"):
        probe(damage(task))


@pytest.mark.slow
def test_many_damaged_files_are_read_or_reported_as_unreadable() -> None:
    names = [*IMAGES, *VIDEOS, *AUDIO]
    assert sum(_run(names, 30_000, first=2_000 * len(names)).values()) == 30_000
