"""Tensors of cache files, kept in this process; `node_memory` keeps them for a whole machine."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

FilePath = str | os.PathLike[str]
Identity = tuple[int, int, int]
"""Which file it was that was read: inode, time of its last change, size."""


class TensorMemory(Protocol):
    """Where tensors of cache files are kept."""

    hits: int
    misses: int
    nbytes: int
    """What this process holds of them."""

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """The value of a file, from memory where it is there."""

    def forget(self, path: FilePath) -> None:
        """The file is about to change."""


@dataclass(slots=True)
class CachedValue:
    """A value, which file it was, and how often each tensor of it had been written by then."""

    value: object
    file: Identity
    versions: tuple[int, ...]
    nbytes: int


class LocalTensorMemory:
    """What `torch_load` gave, kept within a budget; the least recently used leaves first.

    A hit is checked: the file on disk must be the one that was read, and no tensor may have been
    written to since. Containers are handed out as copies, because callers change them.
    """

    def __init__(self, budget_nbytes: int, pin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.budget_nbytes = budget_nbytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._pin = pin
        self._held: OrderedDict[str, CachedValue] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """The value of a file, from memory where it is there."""
        path = os.fspath(where)
        file = file_identity(path)
        with self._lock:
            held = self._held.get(path)
            if (
                held is not None
                and held.file == file
                and tensor_versions(held.value) == held.versions
            ):
                self._held.move_to_end(path)
                self.hits += 1
                return copy_containers(held.value)
            self._drop(path)
            self.misses += 1
        with count_writes():
            value = load(path)
            # A file that was replaced while it was read is not kept: nobody can say which it is.
            if file is not None and file_identity(path) == file:
                value = self._keep(path, value, file)
        return value

    def forget(self, path: FilePath) -> None:
        """The file is about to change."""
        with self._lock:
            self._drop(os.fspath(path))

    def _keep(self, path: str, value: object, file: Identity) -> object:
        nbytes = sum(tensor.nbytes for tensor in find_tensors(value))
        if nbytes > self.budget_nbytes:
            return value
        pinned = map_tensors(value, self._pin)
        with self._lock:
            self._drop(path)
            while self._held and self.nbytes + nbytes > self.budget_nbytes:
                self._drop(next(iter(self._held)))
            self._held[path] = CachedValue(pinned, file, tensor_versions(pinned), nbytes)
            self.nbytes += nbytes
        return copy_containers(pinned)

    def _drop(self, path: str) -> None:
        held = self._held.pop(path, None)
        if held is not None:
            self.nbytes -= held.nbytes


def file_identity(path: str) -> Identity | None:
    """Of the file that is there now."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def find_tensors(value: object) -> list[torch.Tensor]:
    """All that a value holds, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in find_tensors(each)]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in find_tensors(each)]
    return []


def count_writes() -> AbstractContextManager[None]:
    """Tensors made here count their writes, which those made in inference mode do not."""
    return torch.inference_mode(mode=False)


def tensor_versions(value: object) -> tuple[int, ...]:
    """How often each tensor has been written to."""
    return tuple(tensor._version for tensor in find_tensors(value))


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """The same containers anew, with changed tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(each, change) for key, each in value.items()}
    if type(value) is list:
        return [map_tensors(each, change) for each in value]
    if type(value) is tuple:
        return tuple(map_tensors(each, change) for each in value)
    return value


def copy_containers(value: object) -> object:
    """The same containers anew, with the same tensors."""
    return map_tensors(value, lambda tensor: tensor)
