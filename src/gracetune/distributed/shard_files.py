"""Write and read safetensors files that hold parts of tensors.

The ranks of a sharded run have some rows of each trained tensor: a range of its first dimension.
Each rank writes its rows to a file of its own,

    weights-00001-of-00004.safetensors ... weights-00004-of-00004.safetensors

and the header of each file has the whole shape and the first row of every tensor in it. A tensor
that only one rank wrote is stored whole, and has no such entry. `ShardedTensors` reads any rows of
a tensor, from all files that have some of them, so another number of ranks can read the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from gracetune.distributed.sharding import TensorShard

SHARDS_KEY = "gracetune.shards"
"""Header entry of a file with parts of tensors: JSON with the whole shape and the first row of each
tensor."""
DTYPE_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors headers, in the order in which the safetensors library writes
tensors."""
_WRITE_NBYTES = 1 << 24
"""Bytes that are written and hashed at a time, both without Python's global lock."""


# Writing


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file, flush it to the disk, and return the BLAKE3 digest of its bytes.

    The bytes are those that the safetensors library writes, with a sorted header. Unlike there,
    tensors may be on a device: they are copied to host memory one at a time. Python threads that
    train can run meanwhile.
    """
    order = list(DTYPE_NAMES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    entries: dict[str, object] = {}
    if header:
        entries["__metadata__"] = dict(sorted(header.items()))
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    digest = blake3()
    with path.open("wb", buffering=0) as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            _write_all(file.fileno(), memoryview(piece))
            digest.update(piece)
        for name in names:
            data = _bytes_of(tensors[name])
            for start in range(0, len(data), _WRITE_NBYTES):
                piece_of_data = data[start : start + _WRITE_NBYTES]
                _write_all(file.fileno(), piece_of_data)
                digest.update(piece_of_data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    on_host = tensor.detach().cpu().contiguous()
    # A view of a tensor without elements cannot change its dtype; it has no bytes anyway.
    flat = on_host.view(-1).view(torch.uint8) if on_host.numel() else torch.empty(0).byte()
    return flat.numpy().data.cast("B")


def shard_file_name(kind: str, index: int, count: int) -> str:
    """Return the name of a rank's file; `index` counts from 0."""
    return f"{kind}-{index + 1:05d}-of-{count:05d}.safetensors"


def shard_file_names(kind: str, count: int) -> list[str]:
    """Return the names of the files of all ranks."""
    return [shard_file_name(kind, index, count) for index in range(count)]


def is_whole(shard: TensorShard) -> bool:
    """Return True if a shard has all rows of its tensor."""
    return shard.offset == 0 and shard.length == shard.shape[0]


def shards_header(parts: Mapping[str, TensorShard]) -> dict[str, str]:
    """Return the header entry of a file with parts of tensors."""
    table = {name: [list(part.shape), part.offset] for name, part in sorted(parts.items())}
    return {SHARDS_KEY: json.dumps(table, separators=(",", ":"))}


# Reading


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a tensor in one file."""

    path: Path
    start: int
    length: int


class ShardedTensors(Mapping[str, "Tensor"]):
    """The tensors in the files of all ranks, by name.

    An item is a whole tensor, put together from all files; `rows` reads only a part. A file is
    opened when a tensor is first read from it, and then stays open.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the headers of the files; raise ValueError if rows are missing or appear twice."""
        self.header: dict[str, str] = {}
        """Entries of the first file's header, without those for shards."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._files: dict[Path, Any] = {}
        for number, path in enumerate(paths):
            with safe_open(path, "pt") as file:
                metadata = dict(file.metadata() or {})
                table = _parse_table(path, metadata.pop(SHARDS_KEY, "{}"))
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if number == 0:
                self.header = metadata
            for name, shape in shapes.items():
                whole, start = table.get(name, (shape, 0))
                self._add(path, name, shape, whole, start)
        for name, pieces in self._pieces.items():
            self._check_complete(name, pieces)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.rows(name, 0, shape[0] if shape else 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._shapes[name]

    def rows(self, name: str, start: int, length: int) -> Tensor:
        """Read some rows of a tensor, in new memory."""
        found = []
        for piece in self._pieces[name]:
            first = max(start, piece.start)
            last = min(start + length, piece.start + piece.length)
            if not self._shapes[name]:
                scalar: Tensor = self._open(piece.path).get_tensor(name)
                return scalar
            if first < last or length == 0:
                part = self._open(piece.path).get_slice(name)
                found.append(part[first - piece.start : max(first, last) - piece.start])
            if length == 0:
                break
        return found[0] if len(found) == 1 else torch.cat(found)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        return self._files[path]

    def _add(
        self, path: Path, name: str, shape: tuple[int, ...], whole: tuple[int, ...], start: int
    ) -> None:
        known = self._shapes.setdefault(name, whole)
        if known != whole or shape[1:] != whole[1:] or len(shape) != len(whole):
            raise ValueError(f"{path.name} has {name} with another shape than other files")
        self._pieces.setdefault(name, []).append(_Piece(path, start, shape[0] if shape else 1))

    def _check_complete(self, name: str, pieces: list[_Piece]) -> None:
        pieces.sort(key=lambda piece: piece.start)
        end = 0
        for piece in pieces:
            if piece.start != end:
                problem = "are missing" if piece.start > end else "appear twice"
                low, high = sorted((end, piece.start))
                raise ValueError(f"rows {low} to {high} of {name} {problem}: see {piece.path.name}")
            end += piece.length
        shape = self._shapes[name]
        if shape and end != shape[0]:
            raise ValueError(f"{name} has {end} of its {shape[0]} rows: a shard is missing")


def _parse_table(path: Path, text: str) -> dict[str, tuple[tuple[int, ...], int]]:
    try:
        return {
            name: (tuple(map(int, shape)), int(start))
            for name, (shape, start) in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the header of {path.name} has no valid {SHARDS_KEY}") from error


def saved_shape(saved: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a whole saved tensor, without reading it."""
    if isinstance(saved, ShardedTensors):
        return saved.shape(name)
    return tuple(saved[name].shape)


def saved_rows(saved: Mapping[str, Tensor], name: str, shard: TensorShard | None) -> Tensor:
    """Return a saved tensor, or only the rows of a shard of it.

    `saved` has the tensors of a file, which are mapped and read when they are used, or those of the
    files of several ranks.
    """
    if shard is None:
        return saved[name]
    if isinstance(saved, ShardedTensors):
        return saved.rows(name, shard.offset, shard.length)
    return saved[name].narrow(0, shard.offset, shard.length)
