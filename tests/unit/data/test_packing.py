from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from gracetune.data import codecs
from gracetune.data.codecs import choose_packing, suffix_of

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISE = random.Random(0).randbytes(3000)
WORDS = b"words and words " * 200


class Memory:
    """Files in a dict; those without bytes cannot be read."""

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


def _choose(source: Memory, compression: str | None = "auto") -> codecs.Packing:
    keys = source.keys()
    return choose_packing(source, keys, [source.nbytes(key) for key in keys], compression, 2)


def test_each_kind_of_file_gets_its_own_codec() -> None:
    files: dict[str, bytes | None] = {f"{n}.jpg": NOISE for n in range(20)}
    files |= {f"{n}.TXT": WORDS for n in range(3)}
    chosen = _choose(Memory(files))
    assert chosen.codec_of("new.jpg") is None
    assert chosen.codec_of("new.txt") in ("lz4", "zstd")
    assert "no compression for .jpg (on 16 sampled files" in chosen.reason
    assert " for .txt (on 3 sampled files" in chosen.reason
    assert chosen.min_saving == 0.05


def test_what_was_sampled_is_kept_and_what_is_broken_is_not() -> None:
    source = Memory({"a.txt": WORDS, "b.txt": None})
    chosen = _choose(source)
    assert chosen.sampled == {"a.txt": WORDS}
    assert "on 1 sampled files" in chosen.reason


def test_rare_endings_are_one_kind() -> None:
    source = Memory({f"x.{n:04d}": WORDS for n in range(200)})
    chosen = _choose(source)
    assert len(chosen.by_suffix) == codecs.MAX_SUFFIXES + 1
    assert chosen.codec_of("x.0199") is not None
    assert chosen.codec_of("x.never-seen") is not None
    assert len(source.reads) <= codecs.SAMPLED_FILES * (codecs.MAX_SUFFIXES + 1)


def test_samples_are_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SAMPLED_NBYTES", 2 * len(NOISE))
    source = Memory({f"{n}.jpg": NOISE for n in range(30)} | {"huge.mp4": NOISE * 100})
    _choose(source)
    assert sorted(source.reads)[-1] == "huge.mp4"  # the only one of its kind
    assert len(source.reads) == 3


@pytest.mark.parametrize("compression", [None, "none"])
def test_off_is_off(compression: str | None) -> None:
    source = Memory({"a": WORDS})
    chosen = _choose(source, compression)
    assert not chosen.compresses
    assert source.reads == []


def test_a_codec_that_was_asked_for_is_for_all() -> None:
    chosen = _choose(Memory({"a": WORDS}), "snappy")
    assert chosen.compresses
    assert (chosen.codec_of("x.jpg"), chosen.min_saving, chosen.sampled) == ("snappy", 0.0, {})


def test_nothing_needs_no_codec() -> None:
    assert "there are no files" in _choose(Memory({})).reason


@pytest.mark.parametrize(
    ("key", "kind"),
    [("a/b.JPG", ".jpg"), ("a.d/b", ""), ("b", ""), (".png", ""), ("x.tar.GZ", ".gz")],
)
def test_the_kind_is_the_ending(key: str, kind: str) -> None:
    assert suffix_of(key) == kind
