"""2,000 damaged files: each is read or says why not; no crash, no hang, no other error."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzzing import PICTURES, SOUNDS, VIDEOS, Damaged, clean, damage, read

from gracetune.data.audio import probe_audio
from gracetune.data.prefetch import Prefetch, prefetched
from gracetune.data.sample import UnreadableSampleError
from gracetune.data.video import probe_video

# A process a worker: a crash in a decoder ends it, and the file is named.
WORKERS = Prefetch(num_workers=2, depth=16, timeout_s=30, processes=True)


def _run(names: list[str], count: int, first: int = 0) -> Counter[str]:
    tasks = [Damaged(names[n % len(names)], n // len(names)) for n in range(first, first + count)]
    return Counter(prefetched(tasks, read, repr, WORKERS))


@pytest.mark.parametrize("name", [*PICTURES, *VIDEOS, *SOUNDS])
def test_the_files_are_readable_before_they_are_damaged(name: str) -> None:
    assert damage(Damaged(name, 0)) == damage(Damaged(name, 0))
    assert any(damage(Damaged(name, n)) != clean(name) for n in range(3))


@pytest.mark.parametrize(
    ("names", "count"),
    [(list(PICTURES), 1320), (list(VIDEOS), 320), (list(SOUNDS), 360)],
    ids=["pictures", "videos", "sounds"],
)
def test_damaged_files_are_read_or_unreadable(names: list[str], count: int) -> None:
    ends = _run(names, count)
    assert sum(ends.values()) == count
    # Both ends are reached, so that the damage is neither fatal nor harmless throughout.
    assert ends["read"] > count / 20
    assert ends["unreadable"] > count / 20


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Damaged("mp4", 67), "its codec is unknown"),
        (Damaged("m4a", 27), "its codec is unknown"),
        (Damaged("mp4", 21), "the video has no frames"),
        (Damaged("matroska", 157), "frame 0 is damaged"),
        (Damaged("wav", 165), "218 channels at 8000 samples per second are not supported"),
    ],
)
def test_known_damage_has_its_own_words(task: Damaged, reason: str) -> None:
    probe = probe_video if task.name in VIDEOS else probe_audio
    with pytest.raises(UnreadableSampleError, match=f"^{reason}$"):
        probe(damage(task))


@pytest.mark.slow
def test_many_more_damaged_files_are_read_or_unreadable() -> None:
    names = [*PICTURES, *VIDEOS, *SOUNDS]
    assert sum(_run(names, 30_000, first=2_000 * len(names)).values()) == 30_000
