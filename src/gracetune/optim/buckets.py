"""An optimizer's state in pieces small enough to travel, and where each piece is at home.

A bucket is some parameters of one group that are updated together. Its state, as far as it is large
enough to be worth a copy, rests in host memory as one run of bytes; the tensors that the optimizer
knows are views of it. So whoever reads, saves or compares the state finds what it would find of an
optimizer on the device, and the same bytes fit any slot on the device that is large enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracetune.stream.movers import CopyStream

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from torch.nn import Parameter

    from gracetune.stream.movers import CopyEngine

    State = MutableMapping[Tensor, Any]

ALIGNMENT = 256
"""Of each tensor, in bytes: what device kernels expect of fresh memory."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a parameter's state."""

    parameter: Parameter
    key: str
    host: Tensor
    """As it rests."""
    offset: int
    """In bytes from the start of the bucket."""

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, in any memory that holds the bucket."""
        piece = memory[self.offset : self.offset + self.host.nbytes]
        return piece.view(self.host.dtype).as_strided(self.host.size(), self.host.stride())


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one group, and their state in host memory; empty where it has none there."""

    group: int
    parameters: list[Parameter]
    entries: list[StateTensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    """Host memory, in the order of the bucket's bytes."""

    @property
    def nbytes(self) -> int:
        """Of what rests in host memory."""
        return sum(len(piece) for piece in self.pieces)

    @property
    def numel(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)

    def due(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def spans(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of host memory, beside its place in a slot."""
        start = 0
        for piece in self.pieces:
            yield piece, memory[start : start + len(piece)]
            start += len(piece)

    def send_home(self, state: State, mover: CopyEngine, least_nbytes: int) -> bool:
        """Move what is not in host memory there; whether there was any.

        An optimizer makes state when it sees a first gradient, and torch loads it: both come here.
        """
        homeless = list(self._homeless(state, least_nbytes))
        if not homeless:
            return False
        first = self.nbytes
        offsets, nbytes = _lay_out([tensor for _, _, tensor in homeless])
        piece = mover.landing_memory(nbytes)
        self.pieces.append(piece)
        arrival = None
        for (parameter, key, tensor), offset in zip(homeless, offsets, strict=True):
            target = piece[offset : offset + tensor.nbytes]
            if tensor.device == mover.device:
                arrival = mover.copy(
                    target, _bytes(tensor), poison=False, lane=CopyStream.STATE_OUT
                )
            else:
                target.copy_(_bytes(tensor))
            host = target.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
            self.entries.append(StateTensor(parameter, key, host, first + offset))
            state[parameter][key] = host
        if arrival is not None:
            arrival.wait(ahead=False)  # memory on the device is given up when this returns
        return True

    def give_up(self, mover: CopyEngine) -> None:
        """Let host memory go; nobody may have its tensors any more."""
        for piece in self.pieces:
            mover.let_go(piece)
        self.pieces.clear()
        self.entries.clear()

    def _homeless(self, state: State, least_nbytes: int) -> Iterator[tuple[Parameter, str, Tensor]]:
        at_home = {id(entry.host) for entry in self.entries}
        for parameter in self.parameters:
            for key, value in state.get(parameter, {}).items():
                if id(value) not in at_home and is_large(value, least_nbytes):
                    yield parameter, key, value


def is_large(value: object, least_nbytes: int) -> bool:
    """Whether something that an optimizer keeps is worth moving: counters and the like are not."""
    return isinstance(value, Tensor) and value.nbytes >= least_nbytes and _is_dense(value)


def divide(groups: Sequence[dict[str, Any]], numel: int) -> list[Bucket]:
    """Parameters in their order, about so many numbers a bucket."""
    return [
        Bucket(index, group["params"][run.start : run.stop])
        for index, group in enumerate(groups)
        for run in runs([parameter.numel() for parameter in group["params"]], numel)
    ]


def runs(counts: Sequence[int], numel: int) -> list[range]:
    """Where a list is cut so that no part has more than so much, but for one that has it alone."""
    found: list[range] = []
    room = 0
    for index, count in enumerate(counts):
        if count > room or not found:
            found.append(range(index, index))
            room = numel
        found[-1] = range(found[-1].start, index + 1)
        room -= count
    return found


def _lay_out(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins, and where the last ends; every piece is a multiple of the alignment."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill one run of memory, in whatever order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
