"""What an optimizer needs to know of sharded parameters: its own part, and sums over all parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def over_shards(owners: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """One row of sums for each owner, over all of its shards; one exchange for each mesh."""
    whole = list(rows)
    meshes: dict[object, list[int]] = {}
    for index, owner in enumerate(owners):
        if isinstance(owner, DTensor):
            meshes.setdefault((owner.device_mesh, owner.placements), []).append(index)
    for indices in meshes.values():
        owner = owners[indices[0]]
        assert isinstance(owner, DTensor)
        kinds = [Partial() if kind.is_shard() else Replicate() for kind in owner.placements]
        mine = torch.stack([rows[index] for index in indices])
        summed = DTensor.from_local(mine, owner.device_mesh, kinds, run_check=False).full_tensor()
        for index, row in zip(indices, summed.unbind(), strict=True):
            whole[index] = row
    return torch.stack(whole)
