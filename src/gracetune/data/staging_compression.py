"""Compress files that are staged in host memory, and choose a codec for `compression: auto`.

`auto` tries its codecs on a few files of each suffix, and chooses one for all files of that suffix.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import cramjam

from gracetune.data.prefetch import ordered_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.data.source import Source


class Codec(NamedTuple):
    """The compress and the decompress function of a compression format."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes | memoryview], bytes]


CODECS: dict[str, Codec] = {
    "lz4": Codec(
        lambda data: bytes(cramjam.lz4.compress(data)),
        lambda data: bytes(cramjam.lz4.decompress(data)),
    ),
    "snappy": Codec(
        lambda data: bytes(cramjam.snappy.compress(data)),
        lambda data: bytes(cramjam.snappy.decompress(data)),
    ),
    "zlib": Codec(zlib.compress, zlib.decompress),
    "zstd": Codec(
        lambda data: bytes(cramjam.zstd.compress(data)),
        lambda data: bytes(cramjam.zstd.decompress(data)),
    ),
}

CANDIDATES = ("lz4", "zstd")
"""Codecs that `compression: auto` tries: the fastest one, and the one with the smallest output that
still decompresses faster than a disk reads."""

MIN_SAVING = 0.05
"""Fraction of the bytes that compression must save under `compression: auto`. Below it, saving
memory is not worth decompressing the file at every read."""


class CodecChoice(NamedTuple):
    """The codec that `compression: auto` chose for the files of one suffix."""

    codec: str | None
    """Name of the codec; None for no compression."""
    savings: Mapping[str, float]
    """Fraction of the bytes that each codec saves on the files it was tried on, by its name."""


def choose_codec(sampled: Sequence[bytes]) -> CodecChoice:
    """Compress some files with each candidate codec, and choose the one that saves most.

    Chooses none if it saves less than the fraction MIN_SAVING.
    """
    total = sum(map(len, sampled))
    if total == 0:
        return CodecChoice(None, dict.fromkeys(CANDIDATES, 0.0))
    savings = {
        name: 1 - sum(len(CODECS[name].compress(data)) for data in sampled) / total
        for name in CANDIDATES
    }
    best = max(CANDIDATES, key=lambda name: savings[name])
    return CodecChoice(best if savings[best] >= MIN_SAVING else None, savings)


def compress_if_smaller(data: bytes, codec: str, min_saving: float) -> bytes | None:
    """Compress a file; return None if that saves less than the fraction `min_saving`."""
    packed = CODECS[codec].compress(data)
    worthwhile = len(packed) < len(data) and len(packed) <= (1 - min_saving) * len(data)
    return packed if worthwhile else None


# Choosing a codec for every file of a dataset

SAMPLED_FILES = 16
"""Largest number of files per suffix on which `compression: auto` tries its codecs."""
SAMPLED_NBYTES = 32 * 1024**2
"""Largest total size in bytes of the files per suffix on which `compression: auto` tries its
codecs. One file is used even if it is larger."""
MAX_SUFFIXES = 16
"""Number of suffixes that get a codec of their own; files of rarer suffixes share one."""
OTHER_SUFFIXES = "other"


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """The codec to use for each file of a dataset, by the file's suffix."""

    by_suffix: Mapping[str, str | None]
    """Name of the codec for each suffix; None for no compression."""
    others: str | None
    """Name of the codec for suffixes that are not in `by_suffix`; None for no compression."""
    min_saving: float
    """A file is stored compressed only if that saves at least this fraction of its bytes."""
    reason: str
    """Explanation of the choice, for a notice to the user."""
    sampled: Mapping[str, bytes]
    """Contents by key of the files that codecs were tried on, so that they are not read twice."""

    def codec_of(self, key: str) -> str | None:
        """Return the codec for the file named `key`; None: the file is stored as it is."""
        return self.by_suffix.get(suffix_of(key), self.others) if self.by_suffix else self.others

    @property
    def compresses(self) -> bool:
        """True if some files may be stored compressed."""
        return self.others is not None or any(self.by_suffix.values())


def plan_compression(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    compression: str | None,
    num_workers: int,
) -> CompressionPlan:
    """Choose the codecs for these files according to the setting `in_memory.compression`.

    `sizes` has the size of each file in bytes.
    """
    if compression in (None, "none"):
        return CompressionPlan({}, None, 0.0, "compression is off", {})
    if compression != "auto":
        return CompressionPlan({}, compression, 0.0, f"compression is {compression}", {})
    kinds = _samples(keys, sizes)
    wanted = [key for chosen in kinds.values() for key in chosen]
    found = ordered_map(lambda key: _read(source, key), wanted, num_workers)
    sampled = {key: data for key, data in zip(wanted, found, strict=True) if data is not None}
    codecs: dict[str, str | None] = {}
    words = []
    for kind, chosen in kinds.items():
        choice = choose_codec([sampled[key] for key in chosen if key in sampled])
        codecs[kind] = choice.codec
        saves = ", ".join(f"{name} saves {share:.1%}" for name, share in choice.savings.items())
        count = sum(key in sampled for key in chosen)
        words.append(
            f"{choice.codec or 'no compression'} for {kind or 'files without a suffix'} "
            f"(on {count} sampled files {saves})"
        )
    why = "auto chose " + "; ".join(words or ["nothing, because there are no files"])
    return CompressionPlan(codecs, codecs.get(OTHER_SUFFIXES), MIN_SAVING, why, sampled)


def suffix_of(key: str) -> str:
    """Return the suffix of a file name in lower case, such as `.jpg`; empty if it has none."""
    stem, dot, ending = key.rpartition(".")
    return f".{ending.lower()}" if dot and stem and "/" not in ending else ""


def _samples(keys: Sequence[str], sizes: Sequence[int]) -> dict[str, list[str]]:
    """Select the files to try codecs on: a few per suffix, spread evenly over the dataset.

    Returns their keys by suffix, the most common suffix first.
    """
    common = {kind for kind, _ in Counter(map(suffix_of, keys)).most_common(MAX_SUFFIXES)}
    rows: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        kind = suffix_of(key)
        rows[kind if kind in common else OTHER_SUFFIXES].append(row)
    chosen: dict[str, list[str]] = {}
    for kind, members in sorted(rows.items(), key=lambda item: -len(item[1])):
        spread = members[:: max(1, len(members) // SAMPLED_FILES)][:SAMPLED_FILES]
        spread.sort(key=lambda row: sizes[row])
        total = 0
        taken: list[str] = []
        for row in spread:
            total += sizes[row]
            if taken and total > SAMPLED_NBYTES:
                break
            taken.append(keys[row])
        chosen[kind] = taken
    return chosen


def _read(source: Source, key: str) -> bytes | None:
    try:
        return source.read(key)
    except OSError:
        return None  # reported when the file is staged
