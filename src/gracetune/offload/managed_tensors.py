"""Keep gradients, weights and offloaded activations in managed memory.

Kernels compute the same with tensors in managed memory as with tensors on the device, so the
results of a step do not change. What changes is the time: see `memory/managed_roles.py` for where
pages are and how they move.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gracetune.offload.copy_engine import CopyStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        placement: ManagedPlacement = "in_place",
    ) -> None:
        parameters = list(parameters)
        self._memory = memory
        groups = memory.allocate_groups("gradients", parameters, placement)
        self._slabs = [slab for slab, _ in groups]
        copies = [copy for _, group in groups for copy in group]
        self._gradients = dict(zip(parameters, copies, strict=True))
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._store)  # type: ignore[no-untyped-call]
            for p in parameters
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of managed memory."""
        return sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        """Stop storing gradients, and drop those that exist.

        Python's garbage collector does not see the hooks of a parameter, so without this call the
        parameters would never be freed.
        """
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


class ManagedWeights:
    """Keeps weights of a model in managed memory, one allocation for each block.

    With the placement `prefetch`, the weights of a block move to the device while the block before
    it runs (in backward: the block after it), and back to the host when it is done.
    """

    def __init__(
        self,
        role: ManagedRole,
        parameters: Iterable[Parameter],
        blocks: Sequence[nn.Module],
        memory: ManagedMemory,
        placement: ManagedPlacement = "in_place",
    ) -> None:
        """Move `parameters` to managed memory. Those of `blocks`, in forward order, move together.

        Raises:
            torch.OutOfMemoryError: The cap was reached. Weights that have moved stay moved.
        """
        self._memory = memory
        self._slabs: dict[int, ManagedSlab] = {}
        """Slab of each block, by its number in `blocks`."""
        self._arriving: dict[int, PendingPrefetch] = {}
        self._leaving: dict[int, PendingPrefetch] = {}
        self._hooks: list[RemovableHandle] = []
        self._outside: list[ManagedSlab] = []
        left = set(parameters)
        self._moved = list(left)
        for number, block in enumerate(blocks):
            own = [p for p in block.parameters() if p in left]
            left -= set(own)
            if own:
                (self._slabs[number],) = self._move(role, own, placement)
        outside = [p for p in self._moved if p in left]
        if outside:
            # What is outside of blocks is used at unknown moments, so it is read in place.
            self._outside = self._move(role, outside, "in_place")
        if placement == "prefetch":
            for number in self._slabs:
                block = blocks[number]
                self._hooks.append(
                    block.register_forward_pre_hook(partial(self._before_forward, number))
                )
                self._hooks.append(
                    block.register_forward_hook(partial(self._after_forward, number))
                )

    @property
    def nbytes(self) -> int:
        """Bytes of managed memory."""
        return sum(slab.nbytes for slab in [*self._slabs.values(), *self._outside])

    def close(self) -> None:
        """Remove the hooks. The weights stay in managed memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def _move(
        self, role: ManagedRole, parameters: list[Parameter], placement: ManagedPlacement
    ) -> list[ManagedSlab]:
        slab, copies = self._memory.allocate_like(role, parameters, placement)
        for parameter, copy in zip(parameters, copies, strict=True):
            copy.copy_(parameter)
            parameter.data = copy
        return [slab]

    def _before_forward(self, number: int, *_: object) -> None:
        self._use(number, number + 1)

    def _after_forward(self, number: int, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
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
        self._send_home(number + 1)
        self._use(number, number - 1)

    def _use(self, number: int, following: int) -> None:
        """Wait for the weights of a block, and start to move those of the next one."""
        self._fetch(number)
        self._fetch(following)
        self._arriving[number].wait()

    def _fetch(self, number: int) -> None:
        if number in self._slabs and number not in self._arriving:
            leaving = self._leaving.pop(number, None)
            self._arriving[number] = self._memory.prefetch(self._slabs[number], "device", leaving)

    def _send_home(self, number: int) -> None:
        if self._arriving.pop(number, None) is not None:
            self._leaving[number] = self._memory.prefetch(self._slabs[number], "host")


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

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return managed memory whose home is the host."""
        slab = self._memory.allocate(self._role, nbytes)
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
