"""Divide the weights of a model among ranks with torch's `fully_shard` (FSDP2 and HSDP).

Each block of a transformer is one unit, and what is left of the transformer is another. A rank
stores a part of every tensor: the rows of dimension 0 that `torch.chunk` would give it, which may
be none. The weights of a unit are gathered before its forward pass and again before its backward
pass, and its gradients are summed and divided among the ranks right after:

    forward:    gather 0 | block 0, gather 1 | block 1, gather 2 | ...
    backward:   gather 2 | block 2, gather 1 | block 1, reduce 2 | block 0, reduce 1 | reduce 0

`fully_shard` represents a divided tensor as a DTensor. Everything after backward (clipping, the
optimizer, master weights, EMA, checkpoints) sees plain tensors instead: `ShardedParameters.local`
has a rank's part of each trained tensor, in the same memory.

Gradients are summed, not averaged, because the step divides once by the number of samples. They are
reduced after every micro-batch: to reduce only after the last one, a rank would have to keep the
gradients of the whole model. Copies of the model (HSDP) exchange their sums only in the last one.

All ranks must run the same forward and backward passes, in the same order, because each pass
gathers weights.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from gracetune.distributed.gradients import ComputeTimer
from gracetune.errors import ModelError, RunFailedError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from gracetune.config.schema import DistributedSection
    from gracetune.distributed.layout import Layout
    from gracetune.events.dispatcher import Emit

REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# The model


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The part of a tensor that a rank stores: some rows of dimension 0, perhaps none."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: int
    """Number of the first row."""
    length: int
    """Number of rows."""


class ShardedParameters:
    """The trained tensors of a model that `shard_model` has divided among the ranks."""

    def __init__(
        self,
        units: Sequence[FSDPModule],
        trained: Mapping[str, Parameter],
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Describe the tensors; use `shard_model` instead of calling this.

        `trained` has the DTensors by name, and `group` the ranks that store one copy of the model.
        """
        self.units = units
        """The blocks of all transformers in forward order, then the transformers."""
        self.layout = layout
        self._trained = dict(trained)
        self._group = group
        self._device = device
        with torch.no_grad():
            self.local = {name: Parameter(_local(p).detach()) for name, p in trained.items()}
        """This rank's part of each trained tensor, in the memory of the model's own."""
        self._is_checked = False
        self._numels = {self.local[name]: p.numel() for name, p in trained.items()}

    def shard_of(self, name: str) -> TensorShard:
        """Return which part of a trained tensor this rank stores."""
        shape = tuple(self._trained[name].shape)
        offset, length = shard_rows(shape[0], self.layout.shard, self.layout.shard_size)
        assert length == len(self.local[name]), (name, shape, offset, self.local[name].shape)
        return TensorShard(shape, offset, length)

    def shards(self) -> dict[str, TensorShard]:
        """Return which part of each trained tensor this rank stores, by name."""
        return {name: self.shard_of(name) for name in self.local}

    def numel(self, parameter: Parameter) -> int:
        """Return the number of elements of the whole tensor to which a part belongs."""
        return self._numels[parameter]

    @property
    def num_trained(self) -> int:
        """Number of elements of all trained tensors, over all ranks."""
        return sum(self._numels.values())

    def collect_gradients(self) -> None:
        """Move the gradients of the model's tensors to the parts in `local`."""
        if not self._is_checked:  # once: `fully_shard` completes its set-up in the first pass
            self._check_memory_is_shared()
        with torch.no_grad():
            for name, parameter in self._trained.items():
                gradient, local = parameter.grad, self.local[name]
                local.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
                parameter.grad = None

    def _check_memory_is_shared(self) -> None:
        """Raise if the optimizer would update other memory than the model gathers from."""
        for name, parameter in self._trained.items():
            pointers = self.local[name].data_ptr(), _local(parameter).data_ptr()
            assert pointers[0] == pointers[1], f"{name} has moved from {pointers}"
        self._is_checked = True

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that store one copy of the model."""
        total = values.to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def full_tensor(self, name: str, values: Tensor | None = None) -> Tensor:
        """Return a whole trained tensor, gathered from all ranks, which must all call this.

        `values` is this rank's part of another tensor of the same shape, such as an average.
        """
        shard = self.shard_of(name)
        part = (self.local[name] if values is None else values).detach()
        num_rows = -(-shard.shape[0] // self.layout.shard_size)
        padded = torch.zeros(num_rows, *shard.shape[1:], dtype=part.dtype, device=self._device)
        padded[: shard.length] = part
        whole = padded.new_empty(num_rows * self.layout.shard_size, *shard.shape[1:])
        parts = list(whole.chunk(self.layout.shard_size))
        dist.all_gather(parts, padded, group=self._group)
        return whole[: shard.shape[0]]

    def free_gathered(self) -> None:
        """Free gathered weights, so that the next pass gathers the current ones.

        Call it when weights were changed by something else than a step, and after passes without
        a backward, which may leave weights gathered.
        """
        for unit in self.units:
            unit.reshard()


def shard_rows(num_rows: int, shard: int, shard_size: int) -> tuple[int, int]:
    """Return the first row and the number of rows that a rank stores, as `torch.chunk` divides."""
    chunk = -(-num_rows // shard_size)
    offset = min(num_rows, shard * chunk)
    return offset, min(num_rows - offset, chunk)


def shard_model(
    transformers: Mapping[str, nn.Module],
    blocks: Sequence[nn.Module],
    layout: Layout,
    settings: DistributedSection,
    device: torch.device,
    emit: Emit,
    trained_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> ShardedParameters:
    """Divide the weights of a model among the ranks, and move each rank's part to its device.

    `transformers` has them by the first part of their parameters' names (empty for a single one),
    and `blocks` those of all transformers in forward order. The model may be on the CPU: blocks are
    moved one by one, so that no device ever holds all of it. All ranks must call this.

    Trained tensors are stored in `trained_dtype`; by default, in the most common dtype of their
    unit, because `fully_shard` requires one dtype. With `compute_dtype`, the weights of blocks are
    converted before they are gathered; those outside of blocks, which embed timesteps and texts,
    are gathered as they are stored.
    """
    mesh = layout.weight_mesh(device.type)
    reduce_dtype = REDUCE_DTYPES[settings.reduce_dtype]
    offload = (
        CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if settings.cpu_offload
        else OffloadPolicy()
    )
    units: list[FSDPModule] = []
    num_converted = 0
    for transformer in transformers.values():
        _check_no_scalars(transformer)
        inside = set(transformer.modules())
        own = [block for block in blocks if block in inside]
        for unit in (*own, transformer):
            unit.register_forward_hook(_clone_views)
        for block in own:
            num_converted += _store_in_one_dtype(block.parameters(), trained_dtype)
            policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=settings.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
            )
        rest = [p for p in transformer.parameters() if not isinstance(p, DTensor)]
        num_converted += _store_in_one_dtype(rest, trained_dtype)
        policy = MixedPrecisionPolicy(None, reduce_dtype, cast_forward_inputs=False)
        fully_shard(transformer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        _set_prefetch(transformer, own, settings.prefetch_blocks)
        units += [unit for unit in (*own, transformer) if isinstance(unit, FSDPModule)]
    if num_converted and trained_dtype is None:
        text = f"{num_converted} trained tensors are converted to the dtype of their block's other "
        emit(Notice(f"{text}tensors, because FSDP2 needs one dtype per block"))
    for module in units:
        # Sums: the step divides by the number of samples. Plain ones, because gloo has no others.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    trained = {
        f"{expert}.{name}" if expert else name: parameter
        for expert, transformer in transformers.items()
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }
    return ShardedParameters(units, trained, layout, mesh.get_group("shard"), device)


def local_nbytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the parts that this rank stores; of plain tensors, all bytes."""
    return sum(_local(p).nbytes for p in parameters)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor without a copy; a plain tensor is returned itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def _store_in_one_dtype(parameters: Iterable[Parameter], dtype: torch.dtype | None) -> int:
    """Convert the trained tensors of a unit to a dtype, by default to their most common one.

    Returns the number of tensors that had another dtype.
    """
    trained = [p for p in parameters if p.requires_grad]
    numel_by_dtype: Counter[torch.dtype] = Counter()
    for parameter in trained:
        numel_by_dtype[parameter.dtype] += parameter.numel()
    if dtype is None and trained:
        dtype = numel_by_dtype.most_common(1)[0][0]
    others = [p for p in trained if p.dtype != dtype]
    for parameter in others:
        parameter.data = parameter.data.to(dtype)
    return len(others)


def _clone_views(_: nn.Module, _args: object, output: Any) -> Any:
    """Forward hook that copies outputs which are views of other tensors.

    `fully_shard` gathers weights for backward by a hook on the outputs. A later in-place operation
    on a view would remove the hook.
    """

    def clone(value: Any) -> Any:
        is_view = isinstance(value, torch.Tensor) and value._base is not None
        return value.clone() if is_view and value.requires_grad else value

    return tree_map(clone, output)


def _set_prefetch(transformer: nn.Module, blocks: Sequence[nn.Module], count: int) -> None:
    """Let each block gather the weights of the next `count` blocks while it computes."""
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    assert isinstance(transformer, FSDPModule)
    transformer.set_modules_to_forward_prefetch(units[:count])
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])


def _check_no_scalars(transformer: nn.Module) -> None:
    scalars = [name for name, p in transformer.named_parameters() if p.ndim == 0]
    if scalars:
        raise ModelError(
            f"{scalars[0]} is a single number, which fsdp2 and hsdp cannot divide among ranks. Set "
            "distributed.strategy: replicate."
        )


# Gradients


class ShardedReducer:
    """Takes the gradients of a step from the divided model, which sums them over ranks itself."""

    def __init__(self, parameters: ShardedParameters, device: torch.device) -> None:
        self.timer = ComputeTimer(device)
        """Measures the time between `begin` and the end of the last backward. It contains the waits
        for other ranks, which every pass has."""
        self._parameters = parameters

    def begin(self, _: Iterable[Parameter]) -> None:
        """Start a step."""
        self.timer.start()
        self._parameters.free_gathered()
        self._exchange_between_copies(False)

    def num_passes(self, micro_batches: int) -> int:
        """Return the passes that each rank must run in a step of so many micro-batches in all."""
        return -(-micro_batches // self._parameters.layout.data_size)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Complete the sums while the `with` block runs the last backward of the step."""
        self._exchange_between_copies(True)
        yield

    def finish(self) -> None:
        """Store this rank's part of the sums as gradients."""
        self.timer.stop()
        self._parameters.collect_gradients()

    def abandon(self, reason: str) -> None:
        """Raise: the other ranks wait for weights in the middle of a pass, and cannot repeat it."""
        ranks = self._parameters.layout.ranks
        raise RunFailedError(
            f"{ranks.name(ranks.rank)} ran out of device memory in a step ({reason}). With "
            "distributed.strategy fsdp2 or hsdp, ranks cannot repeat a step. Checkpoints are kept. "
            "Lower plan.device_memory, so that more is recomputed (with plan: off, set "
            "train.gradient_checkpointing: true), lower train.batch_size, use more GPUs, or set "
            "distributed.cpu_offload: true, and run the same command again."
        )

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of the whole model, from this rank's part of them."""
        norms = torch._foreach_norm(list(gradients), 2.0, torch.float32)
        squares = torch.stack(norms).square().sum()
        return self._parameters.sum_over_shards(squares).sqrt()

    def _exchange_between_copies(self, enabled: bool) -> None:
        if self._parameters.layout.num_replicas > 1:
            for unit in self._parameters.units:
                unit.set_requires_all_reduce(enabled, recurse=False)
