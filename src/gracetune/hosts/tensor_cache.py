"""Keep the tensors of a host's cache files in the memory of this process.

`SharedTensorCache` in shared_tensor_cache.py has the same interface and keeps one copy for all
processes of a machine.
"""

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

IN_MEMORY_TYPES = ("memory", "unified_memory")
"""Values of `vae_cache_type` and `text_cache_type` that keep cache files in memory."""

FilePath = str | os.PathLike[str]
FileIdentity = tuple[int, int, int]
"""Inode, modification time in nanoseconds and size: they tell whether a file was replaced."""


class TensorCache(Protocol):
    """Interface of a memory that holds the contents of cache files (nested dicts of tensors)."""

    budget_nbytes: int
    """The most bytes that this process holds."""
    hits: int
    misses: int
    nbytes: int
    """The bytes that this process holds."""

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """Return the contents of a file from memory, or load them with `load(path)`."""

    def forget(self, path: FilePath) -> None:
        """Drop a file's contents from memory, because the file is about to change."""


@dataclass(slots=True)
class CachedValue:
    """The contents of a cache file, with what is needed to see if file or tensors have changed."""

    value: object
    file: FileIdentity
    versions: tuple[int, ...]
    """PyTorch's write counter of each tensor, at the time the value was stored."""
    nbytes: int


class LocalTensorMemory:
    """Keeps the contents of cache files in this process, dropping the least recently used first.

    They are used only if the file on disk is still the one that was read and nobody has written to
    a tensor since. Containers are returned as copies, because callers modify them.
    """

    def __init__(self, budget_nbytes: int, pin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.budget_nbytes = budget_nbytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._pin = pin
        self._values: OrderedDict[str, CachedValue] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """Return the contents of a file from memory, or load them with `load(path)`."""
        path = os.fspath(where)
        file = file_identity(path)
        with self._lock:
            found = self._values.get(path)
            if (
                found is not None
                and found.file == file
                and tensor_versions(found.value) == found.versions
            ):
                self._values.move_to_end(path)
                self.hits += 1
                return copy_containers(found.value)
            self._drop(path)
            self.misses += 1
        with outside_inference_mode():
            value = load(path)
            # If the file was replaced meanwhile, nobody knows which version was read.
            if file is not None and file_identity(path) == file:
                value = self._store(path, value, file)
        return value

    def forget(self, path: FilePath) -> None:
        """Drop a file's contents from memory, because the file is about to change."""
        with self._lock:
            self._drop(os.fspath(path))

    def _store(self, path: str, value: object, file: FileIdentity) -> object:
        nbytes = sum(tensor.nbytes for tensor in find_tensors(value))
        if nbytes > self.budget_nbytes:
            return value
        pinned = map_tensors(value, self._pin)
        with self._lock:
            self._drop(path)
            while self._values and self.nbytes + nbytes > self.budget_nbytes:
                self._drop(next(iter(self._values)))
            self._values[path] = CachedValue(pinned, file, tensor_versions(pinned), nbytes)
            self.nbytes += nbytes
        return copy_containers(pinned)

    def _drop(self, path: str) -> None:
        dropped = self._values.pop(path, None)
        if dropped is not None:
            self.nbytes -= dropped.nbytes


def file_identity(path: str) -> FileIdentity | None:
    """Return inode, modification time and size of a file, or None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def find_tensors(value: object) -> list[torch.Tensor]:
    """Return all tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in find_tensors(each)]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in find_tensors(each)]
    return []


def outside_inference_mode() -> AbstractContextManager[None]:
    """Return a context manager in which new tensors count writes to them.

    It leaves inference mode, whose tensors have no version counter.
    """
    return torch.inference_mode(mode=False)


def tensor_versions(value: object) -> tuple[int, ...]:
    """Return the version counters of all tensors in a value: they grow with every write."""
    return tuple(tensor._version for tensor in find_tensors(value))


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Return new containers with `change` applied to every tensor."""
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
    """Return new containers with the same tensors."""
    return map_tensors(value, lambda tensor: tensor)
