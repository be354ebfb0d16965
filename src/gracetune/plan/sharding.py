"""Sizes and traffic of a model that is divided among ranks (FSDP2, HSDP, context parallel).

`fully_shard` makes a unit of each block, and one of everything outside of blocks (the root). A rank
stores a shard of each parameter: some of its rows (its first dimension). With n shards,

    rows of a shard = ceil(rows / n), so the last shards may have fewer rows, or none;
    memory and messages are padded to ceil(rows / n) rows on every rank.

A unit is gathered before its forward, and again before its backward unless it stayed gathered. Its
gradients are reduced and scattered after its backward, and then added up over replicas (HSDP). One
replica per rank (n = 1) is plain data parallelism: nothing is gathered.

`Network` turns bytes into seconds, with the ring model of NCCL's own tuning:

    all-gather, reduce-scatter = latency + max(bytes (n-1)/n / NVLink,  bytes (m-1)/m / (p network))
    all-reduce                 = twice that

for n ranks on m machines, p = n/m on each: rings enter a machine through the network card of each
of its GPUs. The rates are published or assumed figures of `machines.py`; nothing here is measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING

from gracetune.plan.machines import NETWORK_CONSTANTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from gracetune.plan.cost import BlockCosts
    from gracetune.plan.machines import EffectiveRates


@dataclass(frozen=True, slots=True)
class ShardingChoice:
    """Settings of a strategy: the division of the model and the samples among ranks."""

    num_shards: int = 1
    """Number of ranks that together store one copy of the model."""
    num_replicas: int = 1
    """Number of copies of the model."""
    context_size: int = 1
    """Number of ranks that divide the tokens of a micro-batch among them (Ulysses)."""
    reshard: bool = True
    """True: a block's gathered weights are freed after forward and gathered again in backward."""
    prefetch_blocks: int = 1
    """Number of blocks that are gathered ahead of the one that computes."""
    cpu_offload: bool = False
    """True: shards, gradients and optimizer state are in host memory, and the CPU updates them."""
    compute_nbytes: int | None = 2
    """Bytes per element of a block's gathered weights; None: as they are stored, like those outside
    of blocks."""
    reduce_nbytes: int = 4
    """Bytes per element of the gradients that ranks exchange."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_shards * self.num_replicas

    @property
    def is_sharded(self) -> bool:
        """True if ranks store parts of the weights."""
        return self.num_shards > 1


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of one unit (a block, or everything outside of blocks) on each rank."""

    frozen_nbytes: int = 0
    """The rank's shard of frozen weights."""
    trained_nbytes: int = 0
    """The rank's shard of trained weights. Its gradient has as many bytes."""
    trained_numel: int = 0
    """Number of elements in the rank's shard of trained weights, with padding."""
    gathered_nbytes: int = 0
    """The gathered weights of the whole unit, with padding."""
    gradients_nbytes: int = 0
    """The gradients of the whole unit, as backward computes them."""
    reduced_nbytes: int = 0
    """The gradients of the whole unit with padding, in the dtype in which they are reduced."""


@dataclass(frozen=True, slots=True)
class ShardedSizes:
    """Bytes of a divided model on each rank. All ranks need the same, because shards are padded."""

    choice: ShardingChoice
    blocks: tuple[UnitSizes, ...]
    root: UnitSizes

    @property
    def units(self) -> tuple[UnitSizes, ...]:
        """All units: the blocks in forward order, then the root."""
        return (*self.blocks, self.root)

    @property
    def frozen_nbytes(self) -> int:
        """Bytes of the rank's shards of frozen weights."""
        return sum(unit.frozen_nbytes for unit in self.units)

    @property
    def trained_nbytes(self) -> int:
        """Bytes of the rank's shards of trained weights."""
        return sum(unit.trained_nbytes for unit in self.units)

    @property
    def trained_numel(self) -> int:
        """Number of elements in the rank's shards of trained weights."""
        return sum(unit.trained_numel for unit in self.units)


def measure_shards(
    model: nn.Module, blocks: Sequence[nn.Module], choice: ShardingChoice
) -> ShardedSizes:
    """Return the sizes of a model's units on each rank.

    The model may be on the meta device, loaded, or sharded already: only its shapes are read.
    """
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return ShardedSizes(
        choice,
        tuple(_unit_sizes(block.parameters(), choice) for block in blocks),
        _unit_sizes(rest, replace(choice, compute_nbytes=None)),
    )


def _unit_sizes(parameters: Iterable[nn.Parameter], choice: ShardingChoice) -> UnitSizes:
    parameters = list(parameters)
    # FSDP2 needs one dtype per unit: `shard_model` stores trained tensors in the most common one.
    numels: Counter[int] = Counter()
    for parameter in parameters:
        numels[parameter.dtype.itemsize] += parameter.numel() * parameter.requires_grad
    common = numels.most_common(1)[0][0] if numels else 0
    frozen = trained = numel = gathered = gradients = reduced = 0
    for parameter in parameters:
        is_common = choice.is_sharded and parameter.requires_grad
        itemsize = common if is_common else parameter.dtype.itemsize
        shape = tuple(parameter.shape) or (1,)
        row = prod(shape[1:])
        padded = ceil(shape[0] / choice.num_shards) * row
        computed = choice.compute_nbytes or itemsize
        if choice.is_sharded:
            gathered += choice.num_shards * padded * computed
        if not parameter.requires_grad:
            frozen += padded * itemsize
            continue
        trained += padded * itemsize
        numel += padded
        gradients += prod(shape) * computed
        reduced += choice.num_shards * padded * choice.reduce_nbytes
    return UnitSizes(frozen, trained, numel, gathered, gradients, reduced)


# Time of collectives


@dataclass(frozen=True, slots=True)
class Network:
    """The links between the GPUs of a run, in bytes per second and direction, for each GPU."""

    nvlink: float
    """Rate between GPUs of one NVLink domain that collectives reach."""
    network: float
    """Rate of a GPU's network card that collectives reach."""
    nvlink_gpus: int
    """Number of GPUs of one NVLink domain: usually those of a machine."""

    def gather_seconds(self, nbytes: int, num_ranks: int, stride: int = 1) -> float:
        """Return the time of an all-gather of `nbytes` in all, or of a reduce-scatter.

        `stride` is the distance between the numbers of two neighbouring ranks of the group.
        """
        if num_ranks == 1 or not nbytes:
            return 0.0
        per_domain, domains = self.spread(num_ranks, stride)
        over_nvlink = nbytes * (num_ranks - 1) / num_ranks / self.nvlink if per_domain > 1 else 0.0
        over_network = nbytes * (domains - 1) / domains / (per_domain * self.network)
        return self._latency(num_ranks, domains) + max(over_nvlink, over_network)

    def all_reduce_seconds(self, nbytes: int, num_ranks: int, stride: int = 1) -> float:
        """Return the time to add up `nbytes` over ranks."""
        return 2 * self.gather_seconds(nbytes, num_ranks, stride)

    def exchange_seconds(self, nbytes: int, num_ranks: int) -> float:
        """Return the time of an all-to-all, in which each rank has `nbytes`."""
        if num_ranks == 1:
            return 0.0
        per_domain, domains = self.spread(num_ranks, 1)
        remote = nbytes * (domains - 1) / domains / self.network
        local = nbytes * (per_domain - 1) / num_ranks / self.nvlink
        return NETWORK_CONSTANTS["base_latency_s"].value + max(local, remote)

    def crosses_machines(self, num_ranks: int, stride: int = 1) -> bool:
        """Return True if a group of ranks is in more than one NVLink domain."""
        return self.spread(num_ranks, stride)[1] > 1

    def spread(self, num_ranks: int, stride: int) -> tuple[float, int]:
        """Return the ranks of a group in one NVLink domain, and the number of domains."""
        fit = max(1, self.nvlink_gpus // stride)
        domains = ceil(num_ranks / fit)
        return num_ranks / domains, domains

    def _latency(self, num_ranks: int, domains: int) -> float:
        constant = {name: figure.value for name, figure in NETWORK_CONSTANTS.items()}
        return (
            constant["base_latency_s"]
            + (num_ranks - domains) * constant["nvlink_hop_s"]
            + (domains - 1) * constant["network_hop_s"]
        )


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds of the copies and collectives of one unit, if each runs alone."""

    fetch_s: float = 0.0
    """Copy of the rank's shard from host memory, before it is gathered."""
    gather_s: float = 0.0
    reduce_s: float = 0.0
    """Reduce-scatter of the gradients."""
    all_reduce_s: float = 0.0
    """Sum of the gradients over replicas."""
    send_s: float = 0.0
    """Copy of the gradient's shard to host memory."""
    exchange_s: float = 0.0
    """All-to-alls of a forward pass with context parallel; backward has as many. Nothing overlaps
    them: attention needs their results."""


@dataclass(frozen=True, slots=True)
class StepDivision:
    """A model that is divided among ranks: its sizes, and the traffic of a micro-batch."""

    sizes: ShardedSizes
    blocks: tuple[UnitTraffic, ...]
    root: UnitTraffic
    update_s: float
    """Time of the optimizer step if the CPU runs it; 0 if the GPU does."""
    is_one_network: bool
    """True if gathering and summing over replicas use the same links."""
    gather_nbytes: int
    """Bytes that a rank receives to gather all units once."""
    reduce_nbytes: int
    """Bytes that a rank receives to reduce and scatter all gradients once."""
    all_reduce_nbytes: int
    """Bytes that a rank receives to add up gradients over replicas, once."""
    exchange_nbytes: int
    """Bytes that a rank receives in the all-to-alls of a forward pass."""

    def network_nbytes(self, accumulation: int) -> int:
        """Return the bytes that a rank receives in an optimizer step.

        Every micro-batch gathers and reduces; replicas exchange gradients once per step.
        """
        gathers = 2 if self.sizes.choice.reshard else 1
        each = gathers * self.gather_nbytes + self.reduce_nbytes + 2 * self.exchange_nbytes
        return accumulation * each + self.all_reduce_nbytes


@dataclass(frozen=True, slots=True)
class ModelDivision:
    """The part of a `StepDivision` that does not depend on the batch."""

    sizes: ShardedSizes
    network: Network
    cpu_rate: float = float("inf")
    """Bytes per second with which the CPU reads and writes host memory, for one rank."""
    state_nbytes: int = 0
    """Bytes of the rank's optimizer state for one transformer; only used with `cpu_offload`."""

    def at(self, blocks: Sequence[BlockCosts], rates: EffectiveRates) -> StepDivision:
        """Return the traffic of a micro-batch, for the costs of its blocks."""
        sizes, choice, network = self.sizes, self.sizes.choice, self.network
        shards, replicas, context = choice.num_shards, choice.num_replicas, choice.context_size
        exchanged = [self._exchanged_nbytes(block) for block in blocks]
        update_s = 0.0
        if choice.cpu_offload:
            update_s = (3 * sizes.trained_nbytes + 2 * self.state_nbytes) / self.cpu_rate
        replicated = [unit.reduced_nbytes // shards if replicas > 1 else 0 for unit in sizes.units]
        return StepDivision(
            sizes=sizes,
            blocks=tuple(
                self._traffic(unit, rates, nbytes)
                for unit, nbytes in zip(sizes.blocks, exchanged, strict=True)
            ),
            root=self._traffic(sizes.root, rates, 0),
            update_s=update_s,
            is_one_network=network.crosses_machines(shards)
            or not network.crosses_machines(replicas, shards),
            gather_nbytes=_received(sum(unit.gathered_nbytes for unit in sizes.units), shards),
            reduce_nbytes=_received(sum(unit.reduced_nbytes for unit in sizes.units), shards)
            if choice.is_sharded
            else 0,
            all_reduce_nbytes=2 * _received(sum(replicated), replicas),
            exchange_nbytes=_received(sum(exchanged), context),
        )

    def _traffic(self, unit: UnitSizes, rates: EffectiveRates, exchanged: int) -> UnitTraffic:
        choice, network = self.sizes.choice, self.network
        shards, replicas = choice.num_shards, choice.num_replicas
        stored = unit.frozen_nbytes + unit.trained_nbytes
        return UnitTraffic(
            fetch_s=stored / rates.link_in if choice.cpu_offload else 0.0,
            gather_s=network.gather_seconds(unit.gathered_nbytes, shards),
            reduce_s=network.gather_seconds(unit.reduced_nbytes, shards),
            all_reduce_s=network.all_reduce_seconds(
                unit.reduced_nbytes // shards, replicas, shards
            ),
            send_s=unit.trained_nbytes / rates.link_out if choice.cpu_offload else 0.0,
            exchange_s=ULYSSES_EXCHANGES
            * network.exchange_seconds(exchanged // ULYSSES_EXCHANGES, choice.context_size),
        )

    def _exchanged_nbytes(self, block: BlockCosts) -> int:
        """Return the bytes of a rank's queries, keys, values and attention outputs in a block."""
        if self.sizes.choice.context_size == 1:
            return 0
        return ULYSSES_EXCHANGES * block.input_nbytes


ULYSSES_EXCHANGES = 4
"""All-to-alls of a block's attention: queries, keys, values and outputs."""


def _received(nbytes: int, num_ranks: int) -> int:
    """Return the bytes that a rank receives of `nbytes` that its group has in all."""
    return nbytes * (num_ranks - 1) // num_ranks
