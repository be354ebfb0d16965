"""Storages under tensors: what they are worth, whose they are, and which ones blocks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether its values are bytes of one storage on the device, and nothing more."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.layout is not torch.strided or tensor.device != device:
        return False
    return not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def has_one_owner(tensor: Tensor) -> bool:
    """Whether no other tensor is made of the same storage."""
    storage = tensor.untyped_storage()
    tensor_and_storage = 2
    return int(torch._C._storage_Use_Count(storage._cdata)) == tensor_and_storage


def weights_of(block: nn.Module, min_nbytes: int) -> frozenset[int]:
    """Storages of parameters and buffers, as far as these are large."""
    return frozenset(
        tensor.untyped_storage()._cdata
        for module in block.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.layout is torch.strided and tensor.nbytes >= min_nbytes
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def storages_in(value: Any) -> list[StorageWeakRef]:
    """The storage of each of these tensors. While it is referred to, no other has its number."""
    return [
        StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        for tensor in tensors_in(value)
        if tensor.layout is torch.strided
    ]


class SharedInputs:
    """Inputs that a block has in common with the block before: rotary tables, text, time.

    The first block of a pass has none before it. Which of its inputs the second had too is known
    from the pass before, by their places.
    """

    def __init__(self) -> None:
        self._before: tuple[nn.Module, list[StorageWeakRef]] | None = None
        self._places: dict[nn.Module, frozenset[int]] = {}

    def begin(self) -> None:
        """A pass begins."""
        self._before = None

    def of(self, block: nn.Module, inputs: list[StorageWeakRef]) -> frozenset[int]:
        """The storages, by number."""
        if self._before is None:
            places = self._places.get(block, frozenset())
        else:
            other, theirs = self._before
            places = _places(inputs, theirs)
            self._places[other] = _places(theirs, inputs)
        self._before = block, inputs
        return frozenset(ref.cdata for place, ref in enumerate(inputs) if place in places)


def _places(mine: list[StorageWeakRef], theirs: list[StorageWeakRef]) -> frozenset[int]:
    known = set(theirs)
    return frozenset(place for place, storage in enumerate(mine) if storage in known)
