"""An entry as bytes: its tensors side by side, and before them a record of what they are.

The record repeats what the index knows of an entry, so that a lost index can be made again from the
files alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_digest, xxh3_128

from gracetune.cache.index import TensorPlace
from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    Bytes = NDArray[np.uint8]

ALIGN = 64
PAGE = 4096
LARGE = 64 * 1024
"""Entries from this size on begin and end with a page, so that they can be read past the kernel's
page cache."""
RECORD = b"gtentry1"
"""What a record begins with; its length and the checksum of its text follow."""
_HEAD_NBYTES = 24
_MOST_RECORD_NBYTES = 16 * 1024**2
_LOOKED_AT = 1024 * ALIGN
DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""By their names in safetensors."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Packed:
    """An entry as it is written: where each tensor lies, the bytes, and what they hash to."""

    places: tuple[TensorPlace, ...]
    parts: tuple[Bytes, ...]
    """One of bytes for each place, none of them copied."""
    nbytes: int
    checksum: bytes
    record: bytes


class Recorded(NamedTuple):
    """What a record says, and where its entry begins."""

    key: str
    begin: int
    nbytes: int
    tensors: tuple[TensorPlace, ...]
    checksum: bytes
    about: Mapping[str, str]


def pack(key: str, entry: Mapping[str, Tensor], about: Mapping[str, str]) -> Packed:
    """Lay the tensors of an entry out one after the other, each aligned."""
    places: list[TensorPlace] = []
    parts: list[Bytes] = []
    end = 0
    for name, tensor in entry.items():
        if tensor.dtype not in DTYPES:
            raise CacheError(
                f"Entry {key}: {name} is of {tensor.dtype}, which a cache cannot keep. "
                f"Known: {', '.join(sorted(DTYPES.values()))}."
            )
        begin, data = aligned(end), tensor_bytes(tensor)
        places.append(
            TensorPlace(name, DTYPES[tensor.dtype], tuple(tensor.shape), begin, data.nbytes)
        )
        parts.append(data)
        end = begin + data.nbytes
    summed = checksum(parts)
    told = {"key": str(key), "tensors": places, "checksum": summed.hex(), "about": dict(about)}
    return Packed(tuple(places), tuple(parts), end, summed, _record(told))


def unpack(data: Tensor, begin: int, places: Iterable[TensorPlace]) -> dict[str, Tensor]:
    """The tensors of an entry that begins there, as views."""
    return {
        place.name: data[begin + place.begin : begin + place.begin + place.nbytes]
        .view(TORCH_DTYPES[place.dtype])
        .view(place.shape)
        for place in places
    }


def tensor_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, copied only where it is not in one piece in host memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: Bytes = flat.view(torch.uint8).numpy()
    return data


def checksum(parts: Iterable[Bytes]) -> bytes:
    """What an entry's bytes must hash to, in the order of its tensors.

    XXH3 finds what disks and kills do to bytes, faster than memory gives them; who may write here
    may write the index too, so nothing is lost by its not being a cryptographic one.
    """
    hasher = xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.digest()


def checksum_at(data: Bytes, begin: int, places: Iterable[TensorPlace]) -> bytes:
    """What the bytes of an entry that begins there hash to."""
    starts = ((begin + place.begin, place.nbytes) for place in places)
    return checksum(data[start : start + nbytes] for start, nbytes in starts)


def aligned(offset: int, to: int = ALIGN) -> int:
    """Up to the next place where a tensor may begin."""
    return -(-offset // to) * to


def alignment(nbytes: int) -> int:
    """Where an entry of this size may begin."""
    return PAGE if nbytes >= LARGE else ALIGN


def room_for(nbytes: int) -> int:
    """What an entry of this size takes, in a file and in memory."""
    return aligned(nbytes, PAGE) if nbytes >= LARGE else nbytes


def read_record(data: Bytes, at: int) -> Recorded | None:
    """The record that begins there; none where no whole one does."""
    head = data[at : at + _HEAD_NBYTES].tobytes()
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != RECORD or length > _MOST_RECORD_NBYTES:
        return None
    text = data[at + _HEAD_NBYTES : at + _HEAD_NBYTES + length].tobytes()
    if len(text) < length or xxh3_64_digest(text) != head[16:]:
        return None
    told = json.loads(text)
    places = tuple(TensorPlace(n, d, tuple(s), b, size) for n, d, s, b, size in told["tensors"])
    end = max((place.begin + place.nbytes for place in places), default=0)
    begin = aligned(at + _HEAD_NBYTES + length, alignment(end))
    return Recorded(told["key"], begin, end, places, bytes.fromhex(told["checksum"]), told["about"])


def find_record(data: Bytes, at: int) -> int | None:
    """Where the next record begins, there or later; what follows tells whether it is whole."""
    while at + _HEAD_NBYTES <= len(data):
        some = data[at : at + _LOOKED_AT]
        heads = some[: len(some) // ALIGN * ALIGN].reshape(-1, ALIGN)[:, :8]
        found = np.flatnonzero((heads == np.frombuffer(RECORD, np.uint8)).all(axis=1))
        if len(found):
            return at + int(found[0]) * ALIGN
        at += _LOOKED_AT
    return None


def _record(told: Mapping[str, object]) -> bytes:
    text = json.dumps(told, separators=(",", ":")).encode()
    return RECORD + len(text).to_bytes(8, "little") + xxh3_64_digest(text) + text
