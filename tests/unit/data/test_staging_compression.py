from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from gracetune.data import staging_compression
from gracetune.data.staging_compression import plan_compression, suffix_of

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISE = random.Random(0).randbytes(3000)
WORDS = b"words and words " * 200


class DictSource:
    """A source of files in a dict; those with None cannot be read."""

    def __init__(self, files: dict[str, bytes | None]) -> None:
        self.files = files
        self.reads: list[str] = []

    def keys(self) -> Sequence[str]:
        return sorted(self.files)

    def read(self, key: str) -> bytes:
        self.reads.append(key)
        data = self.files[key]
        if data is None:
            raise OSError("broken")
        return data

    def nbytes(self, key: str) -> int:
        return len(self.files[key] or b"")

    def describe(self) -> str:
        return "a dict"


def _choose(
    source: DictSource, compression: str | None = "auto"
) -> staging_compression.CompressionPlan:
    keys = source.keys()
    return plan_compression(source, keys, [source.nbytes(key) for key in keys], compression, 2)


def test_each_suffix_gets_its_own_codec() -> None:
    files: dict[str, bytes | None] = {f"{n}.jpg": NOISE for n in range(20)}
    files |= {f"{n}.TXT": WORDS for n in range(3)}
    chosen = _choose(DictSource(files))
    assert chosen.codec_of("new.jpg") is None
    assert chosen.codec_of("new.txt") in ("lz4", "zstd")
    assert "no compression for .jpg (on 16 sampled files" in chosen.reason
    assert " for .txt (on 3 sampled files" in chosen.reason
    assert chosen.min_saving == 0.05


def test_sampled_files_are_kept_except_unreadable_ones() -> None:
    source = DictSource({"a.txt": WORDS, "b.txt": None})
    chosen = _choose(source)
    assert chosen.sampled == {"a.txt": WORDS}
    assert "on 1 sampled files" in chosen.reason


def test_rare_suffixes_share_a_codec() -> None:
    source = DictSource({f"x.{n:04d}": WORDS for n in range(200)})
    chosen = _choose(source)
    assert len(chosen.by_suffix) == staging_compression.MAX_SUFFIXES + 1
    assert chosen.codec_of("x.0199") is not None
    assert chosen.codec_of("x.never-seen") is not None
    assert len(source.reads) <= staging_compression.SAMPLED_FILES * (
        staging_compression.MAX_SUFFIXES + 1
    )


def test_the_number_of_sampled_bytes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_compression, "SAMPLED_NBYTES", 2 * len(NOISE))
    source = DictSource({f"{n}.jpg": NOISE for n in range(30)} | {"huge.mp4": NOISE * 100})
    _choose(source)
    assert sorted(source.reads)[-1] == "huge.mp4"  # the only one of its kind
    assert len(source.reads) == 3


@pytest.mark.parametrize("compression", [None, "none"])
def test_without_compression_no_file_is_sampled(compression: str | None) -> None:
    source = DictSource({"a": WORDS})
    chosen = _choose(source, compression)
    assert not chosen.compresses
    assert source.reads == []


def test_a_codec_from_the_run_file_applies_to_every_file() -> None:
    chosen = _choose(DictSource({"a": WORDS}), "snappy")
    assert chosen.compresses
    assert (chosen.codec_of("x.jpg"), chosen.min_saving, chosen.sampled) == ("snappy", 0.0, {})


def test_an_empty_source_needs_no_codec() -> None:
    assert "there are no files" in _choose(DictSource({})).reason


@pytest.mark.parametrize(
    ("key", "kind"),
    [("a/b.JPG", ".jpg"), ("a.d/b", ""), ("b", ""), (".png", ""), ("x.tar.GZ", ".gz")],
)
def test_suffix_of_returns_the_lowercase_suffix(key: str, kind: str) -> None:
    assert suffix_of(key) == kind
