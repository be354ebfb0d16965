"""Keep gradients, weights and offloaded activations in managed memory.

Kernels compute the same with tensors in managed memory as with tensors on the device, so the
results of a step do not change. What changes is the time: see `memory/managed_roles.py` for where
pages are and how they move.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gracetune.memory.managed_roles import ManagedMemoryFullError, slab_nbytes
from gracetune.offload.copy_engine import CopyStream, OffloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.nn import Parameter
    from torch.utils.hooks import RemovableHandle

    from gracetune.memory.managed_roles import (
        ManagedMemory,
        ManagedPlacement,
        ManagedRole,
        ManagedSlab,
        PendingPrefetch,
    )
    from gracetune.offload.copy_engine import CopyEngine, PendingCopy
    from gracetune.offload.stall_timer import StallTotals, StallWindow


class ManagedGradients:
    """Stores the gradients of parameters in managed memory as soon as backward has computed them.

    Backward computes each gradient on the device. It is then copied to managed memory, and the
    memory on the device is free for the next one. Further micro-batches are added to it in place.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        memory: ManagedMemory,
        placement: ManagedPlacement | None = None,
    ) -> None:
        """Allocate managed memory for the gradients; without a placement, the pattern chooses it.

        Raises:
            torch.OutOfMemoryError: The cap is too low. Nothing has changed.
        """
        parameters = list(parameters)
        self._memory = memory
        groups = memory.allocate_groups("gradients", parameters, placement)
        self._slabs = [slab for slab, _ in groups]
        copies = [copy for _, group in groups for copy in group]
        self._gradients = dict(zip(parameters, copies, strict=True))
        # Python's garbage collector does not see the hooks of a parameter. With a strong reference,
        # they would keep the model of a run alive that fails before anyone calls `close`.
        store = partial(_call_weakly, weakref.WeakMethod(self._store))
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(store)  # type: ignore[no-untyped-call]
            for p in parameters
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of managed memory."""
        return sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        """Stop storing gradients, and drop those that exist."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._gradients:
            parameter.grad = None
        self._gradients.clear()

    @torch.no_grad()
    def _store(self, parameter: Parameter) -> None:
        own, gradient = self._gradients[parameter], parameter.grad
        if gradient is None or gradient.data_ptr() == own.data_ptr():
            return  # this micro-batch was added to the gradient in managed memory
        own.copy_(gradient)
        parameter.grad = own


def _call_weakly(method: weakref.WeakMethod[Callable[[Parameter], None]], of: Parameter) -> None:
    store = method()
    if store is not None:
        store(of)


def fitting_parameters(
    parameters: Iterable[Parameter], blocks: Sequence[nn.Module], room: int
) -> list[Parameter]:
    """Return parameters that fit into `room` bytes of managed memory, block by block."""
    chosen: list[Parameter] = []
    for _, group in _by_block(parameters, blocks):
        room -= slab_nbytes(group)
        if room < 0:
            break
        chosen += group
    return chosen


def _by_block(
    parameters: Iterable[Parameter], blocks: Sequence[nn.Module]
) -> list[tuple[int | None, list[Parameter]]]:
    """Return the parameters of each block, with its number, and those outside with None."""
    left = dict.fromkeys(parameters)
    groups: list[tuple[int | None, list[Parameter]]] = []
    for number, block in enumerate(blocks):
        own = [p for p in block.parameters() if p in left]
        for parameter in own:
            del left[parameter]
        groups.append((number, own))
    groups.append((None, list(left)))
    return [(number, group) for number, group in groups if group]


class ManagedWeights:
    """Keeps weights of a model in managed memory, one allocation for each block.

    With the placement `prefetch`, the weights of a block move to the device while the block before
    it runs (in backward: the block after it), and back to the host when it is done. What is outside
    of blocks is used at unknown moments, so it is read in place.
    """

    def __init__(
        self,
        role: ManagedRole,
        parameters: Iterable[Parameter],
        blocks: Sequence[nn.Module],
        memory: ManagedMemory,
        placement: ManagedPlacement | None = None,
    ) -> None:
        """Move `parameters` to managed memory. Those of `blocks`, in forward order, move together.

        Raises:
            torch.OutOfMemoryError: The cap is too low. Nothing has moved.
        """
        self._memory = memory
        self._arriving: dict[int, PendingPrefetch] = {}
        self._leaving: dict[int, PendingPrefetch] = {}
        groups = _by_block(parameters, blocks)
        made = memory.allocate_all(role, [group for _, group in groups], placement)
        self._parts = [
            _WeightSlab(number, slab, group)
            for (number, group), (slab, _) in zip(groups, made, strict=True)
        ]
        self._slabs = {part.number: part.slab for part in self._parts if part.number is not None}
        """Slab of each block, by its number in `blocks`."""
        with torch.no_grad():
            for part, (_, copies) in zip(self._parts, made, strict=True):
                for parameter, copy in zip(part.parameters, copies, strict=True):
                    copy.copy_(parameter)
                    parameter.data = copy
        self._hooks: dict[int, list[RemovableHandle]] = {}
        if placement == "prefetch":
            for part in self._parts:
                if part.number is None:
                    part.slab.placement = "in_place"
                else:
                    self._hooks[part.number] = self._hook(part.number, blocks[part.number])

    @property
    def nbytes(self) -> int:
        """Bytes of managed memory."""
        return sum(part.slab.nbytes for part in self._parts)

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that are in managed memory."""
        return [parameter for part in self._parts for parameter in part.parameters]

    def free_unused(self) -> None:
        """Free the memory of blocks whose weights were moved elsewhere, such as to the ring."""
        for part in [part for part in self._parts if not part.is_used()]:
            self._parts.remove(part)
            if part.number is not None:
                del self._slabs[part.number]
                self._arriving.pop(part.number, None)
                self._leaving.pop(part.number, None)
                for hook in self._hooks.pop(part.number, []):
                    hook.remove()
            self._memory.free(part.slab)

    def close(self) -> None:
        """Remove the hooks. The weights stay in managed memory."""
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()

    def _hook(self, number: int, block: nn.Module) -> list[RemovableHandle]:
        return [
            block.register_forward_pre_hook(partial(self._before_forward, number)),
            block.register_forward_hook(partial(self._after_forward, number)),
        ]

    def _before_forward(self, number: int, *_: object) -> None:
        if not _is_in_backward():
            self._use(number, number + 1)

    def _after_forward(self, number: int, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        if _is_in_backward():
            return
        outputs = output if isinstance(output, tuple) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                # It runs when backward reaches the block.
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._before_backward, number)
                )
                break
        self._send_home(number)

    def _before_backward(self, number: int, gradient: Tensor) -> None:  # noqa: ARG002
        for arrived in [other for other in self._arriving if other > number]:
            self._send_home(arrived)  # backward has passed it
        self._use(number, number - 1)

    def _use(self, number: int, following: int) -> None:
        """Wait for the weights of a block, and start to move those of the next one."""
        self._fetch(number)
        self._fetch(following)
        if number in self._arriving:
            self._arriving[number].wait()

    def _fetch(self, number: int) -> None:
        if number in self._slabs and number not in self._arriving:
            leaving = self._leaving.pop(number, None)
            self._arriving[number] = self._memory.prefetch(self._slabs[number], "device", leaving)

    def _send_home(self, number: int) -> None:
        if self._arriving.pop(number, None) is not None:
            self._leaving[number] = self._memory.prefetch(self._slabs[number], "host")


@dataclass(frozen=True, slots=True)
class _WeightSlab:
    """Weights of one block, or those outside of blocks, in managed memory."""

    number: int | None
    """Number of the block; None for weights outside of blocks."""
    slab: ManagedSlab
    parameters: list[Parameter]

    def is_used(self) -> bool:
        """Return True if a parameter is still in the slab."""
        first = self.slab.memory.data_ptr()
        return any(first <= p.data_ptr() < first + self.slab.nbytes for p in self.parameters)


def _is_in_backward() -> bool:
    """Return True if autograd is running backward, where a block's forward is a recomputation.

    Its weights have been fetched then, and must stay until its own backward is done.
    """
    return torch._C._current_graph_task_id() != -1


class ManagedHostEngine:
    """A copy engine with managed memory in place of the pinned memory that activations go to.

    Copies run as with pinned memory, but no time is spent on pinning.
    """

    def __init__(self, engine: CopyEngine, memory: ManagedMemory, role: ManagedRole) -> None:
        self._engine = engine
        self._memory = memory
        self._role = role
        self._slabs: dict[int, ManagedSlab] = {}
        """Slabs by the address of their first byte."""

    @property
    def device(self) -> torch.device:
        """Device to copy to and from."""
        return self._engine.device

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return host memory of the wrapped engine, for streamed weights."""
        return self._engine.allocate_host(nbytes)

    @property
    def pinned_room(self) -> int:
        """Bytes of managed memory that the role may still allocate."""
        return self._memory.room_for(self._role)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return managed memory whose home is the host.

        Raises:
            OffloadError: The cap or the driver refuses it. It is no OutOfMemoryError: a plan that
                needs less memory of the device would offload more.
        """
        try:
            slab = self._memory.allocate(self._role, nbytes, "in_place")
        except ManagedMemoryFullError as error:
            raise OffloadError(
                f"{error} Or take {self._role} out of gh200_optimizations.managed, or lower "
                "train.batch_size."
            ) from error
        self._slabs[slab.memory.data_ptr()] = slab
        return slab.memory

    def adopt_host(self, memory: Tensor) -> None:
        """Let the wrapped engine prepare the caller's memory."""
        self._engine.adopt_host(memory)

    def free_host(self, memory: Tensor) -> None:
        """Free one allocation, after running copies."""
        slab = self._slabs.pop(memory.data_ptr(), None)
        if slab is None:
            self._engine.free_host(memory)
        else:
            self._memory.free(slab)

    def allocate_device(self, nbytes: int) -> Tensor:
        """Return device memory."""
        return self._engine.allocate_device(nbytes)

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, stream: CopyStream = CopyStream.WEIGHTS
    ) -> PendingCopy:
        """Queue a copy behind all work of the compute stream."""
        return self._engine.copy(target, source, poison, stream)

    def stalls(self, stream: CopyStream = CopyStream.WEIGHTS) -> StallTotals:
        """Return how long compute has waited for copies of a stream."""
        return self._engine.stalls(stream)

    def begin_stall_window(self, stream: CopyStream) -> StallWindow:
        """Start a new stall measurement of a stream."""
        return self._engine.begin_stall_window(stream)

    def close(self) -> None:
        """Wait for running copies and free all memory."""
        self._engine.close()
        while self._slabs:
            self._memory.free(self._slabs.popitem()[1])
