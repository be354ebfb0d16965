"""Compression of staged files: the codecs, and how `compression: auto` chooses between them."""

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
    """A compress and a decompress function."""

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
"""Codecs that `auto` tries: the fastest, and the smallest that still decodes faster than a disk."""

MIN_SAVING = 0.05
"""Fraction of bytes that a codec must save under `auto`, because every read pays for decoding."""


class CodecChoice(NamedTuple):
    """The codec that `auto` chose."""

    codec: str | None
    savings: Mapping[str, float]
    """Fraction of the sampled bytes that each candidate saves."""


def choose(sampled: Sequence[bytes]) -> CodecChoice:
    """Try each candidate on sampled files; choose None if the best does not save enough."""
    total = sum(map(len, sampled))
    if total == 0:
        return CodecChoice(None, dict.fromkeys(CANDIDATES, 0.0))
    savings = {
        name: 1 - sum(len(CODECS[name].compress(data)) for data in sampled) / total
        for name in CANDIDATES
    }
    best = max(CANDIDATES, key=lambda name: savings[name])
    return CodecChoice(best if savings[best] >= MIN_SAVING else None, savings)


def pack(data: bytes, codec: str, min_saving: float) -> bytes | None:
    """Return the compressed bytes, or None if they save less than the fraction `min_saving`."""
    packed = CODECS[codec].compress(data)
    worthwhile = len(packed) < len(data) and len(packed) <= (1 - min_saving) * len(data)
    return packed if worthwhile else None


# Choosing a codec for every file of a dataset

SAMPLED_FILES = 16
"""Files per suffix that `auto` tries its codecs on."""
SAMPLED_NBYTES = 32 * 1024**2
"""Bytes of sampled files per suffix that are kept, not counting the first file."""
MAX_SUFFIXES = 16
"""Suffixes that are sampled separately; rarer ones are sampled together."""
OTHER_SUFFIXES = "other"


@dataclass(frozen=True, slots=True)
class Packing:
    """The codec of each file, by its suffix."""

    by_suffix: Mapping[str, str | None]
    others: str | None
    """Codec of suffixes that are not listed."""
    min_saving: float
    """Fraction of its bytes that a file must save to be stored compressed."""
    reason: str
    sampled: Mapping[str, bytes]
    """Contents of the sampled files, so that they are not read twice."""

    def codec_of(self, key: str) -> str | None:
        """Return the codec to try on this file."""
        return self.by_suffix.get(suffix_of(key), self.others) if self.by_suffix else self.others

    @property
    def compresses(self) -> bool:
        """Return whether any file may be stored compressed."""
        return self.others is not None or any(self.by_suffix.values())


def choose_packing(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    compression: str | None,
    num_workers: int,
) -> Packing:
    """Resolve `in_memory.compression` for these files."""
    if compression in (None, "none"):
        return Packing({}, None, 0.0, "compression is off", {})
    if compression != "auto":
        return Packing({}, compression, 0.0, f"compression is {compression}", {})
    kinds = _samples(keys, sizes)
    wanted = [key for chosen in kinds.values() for key in chosen]
    found = ordered_map(lambda key: _read(source, key), wanted, num_workers)
    sampled = {key: data for key, data in zip(wanted, found, strict=True) if data is not None}
    codecs: dict[str, str | None] = {}
    words = []
    for kind, chosen in kinds.items():
        choice = choose([sampled[key] for key in chosen if key in sampled])
        codecs[kind] = choice.codec
        saves = ", ".join(f"{name} saves {share:.1%}" for name, share in choice.savings.items())
        count = sum(key in sampled for key in chosen)
        words.append(
            f"{choice.codec or 'no compression'} for {kind or 'files without a suffix'} "
            f"(on {count} sampled files {saves})"
        )
    why = "auto chose " + "; ".join(words or ["nothing, because there are no files"])
    return Packing(codecs, codecs.get(OTHER_SUFFIXES), MIN_SAVING, why, sampled)


def suffix_of(key: str) -> str:
    """Return the lower-case suffix; files with the same suffix compress alike."""
    stem, dot, ending = key.rpartition(".")
    return f".{ending.lower()}" if dot and stem and "/" not in ending else ""


def _samples(keys: Sequence[str], sizes: Sequence[int]) -> dict[str, list[str]]:
    """Choose a few keys per suffix, spread evenly; the most common suffix first."""
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
