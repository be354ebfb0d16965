"""How staged files are compressed: one line a codec, and the choice that `auto` makes."""

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
    """Bytes to fewer bytes, and back."""

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
"""What `auto` tries: the fastest and the smallest of those that decode faster than a disk reads."""

WORTHWHILE = 0.05
"""The share of its bytes that a codec must save under `auto`: decoding is paid at each read."""


class CodecChoice(NamedTuple):
    """What `auto` found."""

    codec: str | None
    savings: Mapping[str, float]
    """By candidate: the share of the sampled bytes that it saves."""


def choose(sampled: Sequence[bytes]) -> CodecChoice:
    """Try each candidate on a few files; none where not even the best is worthwhile."""
    total = sum(map(len, sampled))
    if total == 0:
        return CodecChoice(None, dict.fromkeys(CANDIDATES, 0.0))
    savings = {
        name: 1 - sum(len(CODECS[name].compress(data)) for data in sampled) / total
        for name in CANDIDATES
    }
    best = max(CANDIDATES, key=lambda name: savings[name])
    return CodecChoice(best if savings[best] >= WORTHWHILE else None, savings)


def pack(data: bytes, codec: str, keep: float) -> bytes | None:
    """The compressed bytes, where they save more than the share `keep`; else none."""
    packed = CODECS[codec].compress(data)
    worthwhile = len(packed) < len(data) and len(packed) <= (1 - keep) * len(data)
    return packed if worthwhile else None


# ------------------------------------------------------------------------------------------
# Which codec each file of a data set is staged with: as asked, or as `auto` finds by trying.


SAMPLED_FILES = 16
"""How many files of a kind `auto` tries its codecs on."""
SAMPLED_NBYTES = 32 * 1024**2
"""How many of their bytes it holds for that, the first file aside."""
KINDS = 16
"""How many endings are tried apart; the rarer ones are one kind."""
OTHERS = "other"


@dataclass(frozen=True, slots=True)
class Packing:
    """How each file is stored."""

    by_kind: Mapping[str, str | None]
    others: str | None
    """The codec of kinds that are not named."""
    keep: float
    """The share of its bytes that a file must save to stay compressed."""
    why: str
    sampled: Mapping[str, bytes]
    """Files that the choice has read already; none is read twice."""

    def codec_of(self, key: str) -> str | None:
        """The codec to try on this file."""
        return self.by_kind.get(kind_of(key), self.others) if self.by_kind else self.others

    @property
    def compresses(self) -> bool:
        """Whether any file may be stored compressed."""
        return self.others is not None or any(self.by_kind.values())


def choose_packing(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    compression: str | None,
    num_workers: int,
) -> Packing:
    """What `in_memory.compression` means for these files."""
    if compression in (None, "none"):
        return Packing({}, None, 0.0, "compression is off", {})
    if compression != "auto":
        return Packing({}, compression, 0.0, f"{compression} as asked", {})
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
            f"{choice.codec or 'no compression'} for {kind or 'files without an ending'} "
            f"(on {count} sampled files {saves})"
        )
    why = "auto chose " + "; ".join(words or ["nothing, there are no files"])
    return Packing(codecs, codecs.get(OTHERS), WORTHWHILE, why, sampled)


def kind_of(key: str) -> str:
    """The ending, in small letters: files that share one compress alike."""
    stem, dot, ending = key.rpartition(".")
    return f".{ending.lower()}" if dot and stem and "/" not in ending else ""


def _samples(keys: Sequence[str], sizes: Sequence[int]) -> dict[str, list[str]]:
    """A few keys of each kind, spread over all of them; the commonest kind first."""
    common = {kind for kind, _ in Counter(map(kind_of, keys)).most_common(KINDS)}
    rows: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        kind = kind_of(key)
        rows[kind if kind in common else OTHERS].append(row)
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
        return None  # recorded when its turn comes
