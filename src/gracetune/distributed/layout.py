"""Divide the ranks of a run into groups that share weights, batches and sequences.

A rank has a place in two grids. The grid of weights says which part of the model it stores; the
grid of data says which micro-batches it computes, and which part of their tokens:

    weights: replicas x shards     rank = replica * shard_size + shard
    data:    data x context        rank = data_rank * context_size + context_rank

For example, eight ranks with `strategy: hsdp`, `shard_size: 4` and `context_parallel: 2` store two
copies of the model in four parts each, and compute four micro-batches at a time in two parts each.

Gradients are summed over all ranks, whatever the grids are: ranks with other micro-batches add
their samples' gradients, and ranks with other tokens of a micro-batch add their tokens' gradients.
Only the number of samples is counted once per micro-batch (see `train_step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gracetune.distributed.ranks import SINGLE
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import DistributedSection
    from gracetune.distributed.ranks import RankGroup


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of this rank among all ranks of the run."""

    ranks: RankGroup = SINGLE
    shard_size: int = 1
    """Number of ranks that together store one copy of the trained weights. 1: every rank has all
    of them."""
    context_size: int = 1
    """Number of ranks that divide the tokens of a micro-batch among them."""

    @property
    def is_sharded(self) -> bool:
        """True if ranks store parts of the weights."""
        return self.shard_size > 1

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model in all ranks together."""
        return self.ranks.world_size // self.shard_size

    @property
    def shard(self) -> int:
        """Number of the part of the model that this rank stores."""
        return self.ranks.rank % self.shard_size

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that compute different micro-batches."""
        return self.ranks.world_size // self.context_size

    @property
    def data_rank(self) -> int:
        """Number of this rank's group among those that compute different micro-batches."""
        return self.ranks.rank // self.context_size

    @property
    def context_rank(self) -> int:
        """Position of this rank among those that divide its micro-batches' tokens."""
        return self.ranks.rank % self.context_size

    def weight_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the weights for `fully_shard`: one dimension, or two for HSDP.

        This is collective: every rank must call it.
        """
        if self.num_replicas == 1:
            return init_device_mesh(device_type, (self.shard_size,), mesh_dim_names=("shard",))
        shape = (self.num_replicas, self.shard_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))

    def data_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the data, with the dimensions `data` and `context`.

        This is collective: every rank must call it.
        """
        shape = (self.data_size, self.context_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("data", "context"))

    def ring_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of this rank's context group for diffusers' ring attention.

        This is collective: every rank must call it.
        """
        shape = (self.data_size, self.context_size, 1)
        names = ("data", "ring", "ulysses")
        return init_device_mesh(device_type, shape, mesh_dim_names=names)["ring", "ulysses"]

    def describe(self) -> str:
        """Return the layout in words; empty if every rank has the whole model and whole samples."""
        parts = []
        if self.is_sharded:
            copies = "" if self.num_replicas == 1 else f", {self.num_replicas} copies"
            name = "FSDP2" if self.num_replicas == 1 else "HSDP"
            parts.append(f"{name}: weights in {self.shard_size} shards{copies}")
        if self.context_size > 1:
            parts.append(f"context parallel: {self.context_size} ranks per sample")
        return "; ".join(parts)


SINGLE_LAYOUT = Layout()
"""The layout of a run with one process."""


def build_layout(settings: DistributedSection, ranks: RankGroup) -> Layout:
    """Return the layout that the section `distributed` of a run file describes.

    Raises if the number of ranks cannot be divided as the section says. A single rank has nothing
    to divide, so it may have any strategy.
    """
    world_size = ranks.world_size
    if world_size % settings.context_parallel:
        raise ConfigError(
            f"distributed.context_parallel is {settings.context_parallel}, which does not divide "
            f"the {world_size} ranks of the run. Choose a divisor, or start more ranks."
        )
    return Layout(ranks, _shard_size(settings, ranks), settings.context_parallel)


def _shard_size(settings: DistributedSection, ranks: RankGroup) -> int:
    world_size = ranks.world_size
    if settings.strategy in ("auto", "replicate"):
        return 1
    if settings.strategy == "fsdp2":
        return world_size
    size = settings.shard_size or ranks.local_world_size
    if world_size % size:
        raise ConfigError(
            f"distributed.shard_size is {size}, which does not divide the {world_size} ranks of "
            "the run. Choose a divisor."
        )
    return size
