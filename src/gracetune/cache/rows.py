"""Where the tensors of entries lie in memory, so that a batch of them is copied by one call.

What is looked at to find an entry has left the processor's caches since it was looked at last. A
tensor is spread over five objects, and all that a copy needs of it is in one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.cache.store import stack_in
from gracetune.data.gather import MissingGather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gracetune.cache.store import Entry, Room
    from gracetune.data.gather import Gather


class TensorForm(NamedTuple):
    """What tensors of one batch have in common; one object for all of them."""

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


class TensorRow(NamedTuple):
    """Where a tensor begins; whoever has the row has the memory too."""

    form: TensorForm
    address: int
    tensor: Tensor


class Rows:
    """Rows by name and key. Whoever calls holds a lock."""

    def __init__(self, gather: Gather | MissingGather) -> None:
        self._gather = None if isinstance(gather, MissingGather) else gather
        self._rows: dict[str, dict[str, TensorRow]] = {}
        self._forms: dict[TensorForm, TensorForm] = {}

    def add(self, key: str, entry: Entry) -> None:
        """Of an entry that is new, or takes the place of another."""
        self.forget(key)
        for name, tensor in entry.items():
            assert tensor.is_contiguous(), f"{name} of {key} has strides {tensor.stride()}"
            form = TensorForm(tensor.dtype, tensor.shape, tensor.nbytes)
            row = TensorRow(self._forms.setdefault(form, form), tensor.data_ptr(), tensor)
            self._rows.setdefault(name, {})[key] = row

    def find(self, keys: Sequence[str], name: str) -> list[TensorRow] | None:
        """Those of a batch; none where one is missing."""
        try:
            return [*map(self._rows[name].__getitem__, keys)]
        except KeyError:
            return None

    def forget(self, key: str) -> None:
        """Its entry leaves: its memory is free as soon as nobody copies from it."""
        for rows in self._rows.values():
            rows.pop(key, None)

    def joined(self, rows: Sequence[TensorRow], room: Room) -> Tensor:
        """Copy them side by side into memory that is asked for; needs no lock.

        With several threads, torch shares a batch out among them; for one, the helper is faster.
        What is not of one form is refused by torch, which says why.
        """
        forms, addresses, tensors = zip(*rows, strict=True)
        form, count = forms[0], len(rows)
        if self._gather is None or forms.count(form) < count or torch.get_num_threads() > 1:
            return stack_in(tensors, room)
        out = room(count * form.nbytes).view(form.dtype).view(count, *form.shape)
        self._gather.join(out.data_ptr(), addresses, form.nbytes)
        return out
