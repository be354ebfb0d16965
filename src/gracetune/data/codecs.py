"""How staged files are compressed: one line a codec, and the choice that `auto` makes."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import cramjam

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
