"""Mapped shards: entries as views of files, with few mappings and no open files."""

from __future__ import annotations

import os
from collections import OrderedDict
from itertools import groupby
from typing import TYPE_CHECKING

from gracetune.cache.shards import find_file, map_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.index import Row


class MappedShards:
    """The most recently used files of a folder; one thread at a time."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._maps: OrderedDict[str, Tensor] = OrderedDict()

    def data(self, row: Row) -> Tensor | None:
        """The bytes of the file that has this row; none where it is gone or too short."""
        data = self._maps.get(row.shard)
        if data is None or len(data) < row.end:
            descriptor = find_file(self._folder, row.shard)
            if descriptor is None:
                return None
            try:
                data = map_file(descriptor)
            finally:
                os.close(descriptor)
            self._maps[row.shard] = data
            if len(self._maps) > self._most:
                self._maps.popitem(last=False)
        self._maps.move_to_end(row.shard)
        return data if len(data) >= row.end else None

    def clear(self) -> None:
        """Unmap what no view needs."""
        self._maps.clear()


def ask_disk(folder: Path, rows: Iterable[Row]) -> None:
    """Start reading these rows, all at once, instead of a page at a time when touched."""
    for shard, alike in groupby(sorted(rows, key=_place), key=lambda row: row.shard):
        descriptor = find_file(folder, shard)
        if descriptor is not None:
            for row in alike:
                os.posix_fadvise(descriptor, row.begin, row.nbytes, os.POSIX_FADV_WILLNEED)
            os.close(descriptor)


class Bits:
    """One bit a number: a million checked entries take 125 kB."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bytes) and bool(self._bytes[place] & 1 << (number & 7))

    def add(self, number: int) -> None:
        """Remember it."""
        place = number >> 3
        if place >= len(self._bytes):
            self._bytes.extend(bytes(place + 1 - len(self._bytes)))
        self._bytes[place] |= 1 << (number & 7)


def _place(row: Row) -> tuple[str, int]:
    return row.shard, row.begin
