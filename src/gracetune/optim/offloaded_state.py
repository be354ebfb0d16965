"""The optimizer's step, wherever its state lives: on the device, in host memory, or part here.

State in host memory passes through a few slots on the device, bucket by bucket, and the optimizer
itself steps on what is there: the same kernels on the same numbers, so the same bits as with all of
it on the device. Both directions of the link are busy at once: while one bucket arrives, the one
before leaves. AdamW's two moments are 8 bytes a number each way; a CPU that did the same update
would read and write 28 bytes of its memory, and round in its own way.

A step goes through the buckets against the order of the step before: what is still in the slots is
used first, and the last copies out are hidden behind the next forward. Updates cannot begin before
backward is over, since clipping needs the length of all gradients.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracetune.errors import RunFailedError
from gracetune.offload.copies import CopyStream
from gracetune.optim.master_weights import MasterWeights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.offload.copies import PendingCopy, CopyEngine

    State = MutableMapping[Tensor, Any]


SLOTS = 3
"""One fills, one is updated, one empties."""


@dataclass(frozen=True, slots=True)
class StateOffloadSettings:
    """How state is cut into buckets, and how they move."""

    bucket_numel: int = 1 << 25
    """Numbers trained by one bucket: large enough for the link's full speed, also over C2C."""
    min_nbytes: int = 1 << 14
    """State smaller than this stays on the device."""
    slots: int = SLOTS
    poison: bool = False
    """Fill a slot with NaN before it is filled: what is read too early shows."""

    def slots_nbytes(self, counts: Sequence[int], nbytes_each: float) -> int:
        """Device memory that slots will take, for parameters with so many numbers each."""
        sizes = [sum(counts[i] for i in run) for run in split_by_numel(counts, self.bucket_numel)]
        return int(min(self.slots, len(sizes)) * max(sizes, default=0) * nbytes_each)


@dataclass(slots=True, eq=False)
class _BucketSlot:
    memory: Tensor
    bucket: Bucket | None = None
    """Whose state is in it, or on its way there."""
    arrival: PendingCopy | None = None
    leaving: PendingCopy | None = None
    """The copy out that nobody has waited for."""

    def land(self) -> None:
        """Let what is queued from here on come after the copy out."""
        if self.leaving is not None:
            self.leaving.wait(prefetched=True)
            self.leaving = None


class OptimizerStepper:
    """Steps an optimizer; `place` says how much of its state lives in host memory."""

    def __init__(
        self,
        optimizer: Optimizer,
        copy_engine: CopyEngine,
        nbytes_per_element: float,
        settings: StateOffloadSettings | None = None,
    ) -> None:
        """`nbytes_each` is what the optimizer keeps for each number that is trained."""
        self.num_steps = 0
        """Updates made since this was."""
        self._optimizer = optimizer
        self._mover = copy_engine
        self._travel = settings or StateOffloadSettings()
        self._tensors_each = round(nbytes_per_element / torch.float32.itemsize)
        self._buckets = make_buckets(optimizer.param_groups, self._travel.bucket_numel)
        self._hosted = 0
        """The first so many buckets live in host memory."""
        self._slots: list[_BucketSlot] = []
        self._turned = False

    @property
    def host_nbytes(self) -> int:
        """State in host memory."""
        return sum(bucket.nbytes for bucket in self._buckets)

    @property
    def device_nbytes(self) -> int:
        """State on the device, and what state passes through there."""
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        whole = sum(value.nbytes for value in state if isinstance(value, Tensor))
        away = sum(entry.host.nbytes for bucket in self._buckets for entry in bucket.tensors)
        return whole - away + self.slots_nbytes

    @property
    def slots_nbytes(self) -> int:
        """Device memory that state passes through."""
        return len(self._slots) * self._slot_nbytes

    def set_host_share(self, host_share: float) -> None:
        """Let at least this share of the state live in host memory, and the rest on the device."""
        assert 0 <= host_share <= 1, f"a share of {host_share}"
        self.synchronize()
        self._slots.clear()
        wanted = host_share * sum(bucket.numel for bucket in self._buckets)
        numel = self._hosted = 0
        for bucket in self._buckets:
            if numel < wanted:
                self._hosted += 1
                numel += bucket.numel
                self._send_home(bucket)
            else:
                self._bring_back(bucket)

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Where memory runs out before anything has changed, a smaller plan can try again. After that
        nobody can: a second try would update some weights twice.
        """
        self._make_room()
        try:
            self._step()
        except torch.OutOfMemoryError as error:
            raise RunFailedError(
                f"the device was full in the middle of an update ({str(error).splitlines()[0]}): "
                "some weights have changed and others have not. Checkpoints saved before are kept. "
                "Go on from the last one with a lower plan.device_memory, or with another "
                "optimizer."
            ) from error
        self.num_steps += 1

    def synchronize(self) -> None:
        """Wait until host memory holds all that the last step left there."""
        for slot in self._slots:
            slot.land()
        self._mover.stalls(CopyStream.STATE_OUT)

    def load_state_dict(self, whole: Mapping[str, Any]) -> None:
        """What `Optimizer.load_state_dict` does, without bringing to the device what lives in host
        memory."""
        self.synchronize()
        for slot in self._slots:
            slot.bucket = None
        for bucket in self._buckets:
            bucket.free_host_memory(self._mover)
        hosted = {p for bucket in self._buckets[: self._hosted] for p in bucket.parameters}
        ours = [p for group in self._optimizer.param_groups for p in group["params"]]
        saved = [index for group in whole["param_groups"] for index in group["params"]]
        stays: dict[int, dict[str, Any]] = {}
        large: dict[Parameter, dict[str, Tensor]] = {}
        for index, parameter in zip(saved, ours, strict=True):
            for key, value in whole["state"].get(index, {}).items():
                if parameter in hosted and is_worth_moving(value, self._travel.min_nbytes):
                    large.setdefault(parameter, {})[key] = value
                else:
                    stays.setdefault(index, {})[key] = value
        self._optimizer.load_state_dict({"state": stays, "param_groups": whole["param_groups"]})
        for parameter, values in large.items():
            self._optimizer.state[parameter].update(values)
        for bucket in self._buckets[: self._hosted]:
            self._send_home(bucket)

    def close(self) -> None:
        """Bring nothing back: the state is only good for reading after this."""
        self.synchronize()
        self._slots.clear()
        self._mover.close()

    @property
    def _slot_nbytes(self) -> int:
        return len(self._slots[0].memory) if self._slots else 0

    def _make_room(self) -> None:
        """Take and let go of what the step will take: it may run out of memory here, not there."""
        sizes = [bucket.nbytes for bucket in self._buckets if bucket.host_pieces]
        largest, count = max(sizes, default=0), min(self._travel.slots, len(sizes))
        if len(self._slots) < count or largest > self._slot_nbytes:
            for slot in self._slots:
                slot.land()
            self._slots.clear()
            self._slots = [_BucketSlot(self._mover.allocate_device(largest)) for _ in range(count)]
        state = self._optimizer.state
        if len(state) == sum(len(bucket.parameters) for bucket in self._buckets):
            return
        new = [
            [p for p in bucket.parameters if p.grad is not None and not state.get(p)]
            for bucket in self._buckets
        ]
        stays = [p for bucket in new[self._hosted :] for p in bucket]
        passes = max(new[: self._hosted], key=_numel, default=[])
        wide = [p for p in stays + passes for _ in range(self._tensors_each)]
        room = [torch.empty_like(p, dtype=torch.float32) for p in wide]
        del room

    @torch.no_grad()
    def _step(self) -> None:
        hosted, resident = self._buckets[: self._hosted], self._buckets[self._hosted :]
        due = [bucket for bucket in hosted if bucket.has_gradients()]
        new = [bucket for bucket in due if not bucket.host_pieces]
        moving = [bucket for bucket in due if bucket.host_pieces]
        # Masters want gradients in fp32 as well: not of all weights at once.
        by_parts = isinstance(self._optimizer, MasterWeights)
        for part in [[bucket] for bucket in resident] if by_parts else [resident]:
            if part:
                self._step_only(part)
        for bucket in new:  # their first gradients: the optimizer makes state on the device
            self._step_only([bucket])
            self._send_home(bucket)
        self._stream(moving)

    def _stream(self, buckets: Sequence[Bucket]) -> None:
        """Let buckets pass through the slots; each slot is filled again once it is empty."""
        order = list(reversed(buckets)) if self._turned else list(buckets)
        self._turned = not self._turned
        for slot in self._slots:
            slot.land()
        first = order[: len(self._slots)]
        places = {slot.bucket: slot for slot in self._slots if slot.bucket in first}
        waiting = deque(bucket for bucket in order if bucket not in places)
        for slot in self._slots:
            if slot.bucket not in places and waiting:
                places[waiting[0]] = slot
                self._fetch(slot, waiting.popleft())
        before: _BucketSlot | None = None
        for bucket in order:
            slot = places[bucket]
            self._step_in(slot, bucket)
            if before is not None and waiting:
                places[waiting[0]] = before
                self._fetch(before, waiting.popleft())
            before = slot

    def _fetch(self, slot: _BucketSlot, bucket: Bucket) -> None:
        slot.land()
        for piece, place in bucket.spans(slot.memory):
            slot.arrival = self._mover.copy(
                place, piece, self._travel.poison, stream=CopyStream.STATE_IN
            )
        slot.bucket = bucket

    def _step_in(self, slot: _BucketSlot, bucket: Bucket) -> None:
        """Update a bucket whose state is in a slot, and send the state home."""
        if slot.arrival is not None:
            slot.arrival.wait(prefetched=True)
            slot.arrival = None
        state = self._optimizer.state
        views = [(entry, entry.view(slot.memory)) for entry in bucket.tensors]
        for entry, view in views:
            state[entry.parameter][entry.key] = view
        try:
            self._step_only([bucket])
        finally:
            for entry, view in views:
                made = state[entry.parameter][entry.key]
                if made is not view:  # the optimizer put another tensor in its place
                    view.copy_(made)
                state[entry.parameter][entry.key] = entry.host
        for piece, place in bucket.spans(slot.memory):
            slot.leaving = self._mover.copy(piece, place, poison=False, stream=CopyStream.STATE_OUT)
        if self._send_home(bucket):  # a parameter had its first gradient
            slot.bucket = None

    def _step_only(self, buckets: Sequence[Bucket]) -> None:
        """The optimizer's own step, on some of its parameters."""
        if len(buckets) == len(self._buckets):
            self._optimizer.step()
            return
        with _restricted(self._optimizer, buckets):
            self._optimizer.step()

    def _send_home(self, bucket: Bucket) -> bool:
        return bucket.move_to_host(self._optimizer.state, self._mover, self._travel.min_nbytes)

    def _bring_back(self, bucket: Bucket) -> None:
        # All of it before any is put in place: the device may have no room for the last one.
        there = [entry.host.to(self._mover.device, copy=True) for entry in bucket.tensors]
        for entry, tensor in zip(bucket.tensors, there, strict=True):
            self._optimizer.state[entry.parameter][entry.key] = tensor
        bucket.free_host_memory(self._mover)


@contextmanager
def _restricted(optimizer: Optimizer, buckets: Sequence[Bucket]) -> Iterator[None]:
    """Let an optimizer see the parameters of some buckets alone; its groups stay the same."""
    whole = [group["params"] for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [p for b in buckets if b.group == index for p in b.parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _numel(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# ------------------------------------------------------------------------------------------
# An optimizer's state in pieces small enough to travel, and where each piece is at home.
#
# A bucket is some parameters of one group that are updated together. Its state, as far as it is
# large
# enough to be worth a copy, rests in host memory as one run of bytes; the tensors that the
# optimizer
# knows are views of it. So whoever reads, saves or compares the state finds what it would find of
# an
# optimizer on the device, and the same bytes fit any slot on the device that is large enough.


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
    tensors: list[StateTensor] = field(default_factory=list)
    host_pieces: list[Tensor] = field(default_factory=list)
    """Host memory, in the order of the bucket's bytes."""

    @property
    def nbytes(self) -> int:
        """Of what rests in host memory."""
        return sum(len(piece) for piece in self.host_pieces)

    @property
    def numel(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)

    def has_gradients(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def spans(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of host memory, beside its place in a slot."""
        start = 0
        for piece in self.host_pieces:
            yield piece, memory[start : start + len(piece)]
            start += len(piece)

    def move_to_host(self, state: State, mover: CopyEngine, least_nbytes: int) -> bool:
        """Move what is not in host memory there; whether there was any.

        An optimizer makes state when it sees a first gradient, and torch loads it: both come here.
        """
        homeless = list(self._homeless(state, least_nbytes))
        if not homeless:
            return False
        first = self.nbytes
        offsets, nbytes = _lay_out([tensor for _, _, tensor in homeless])
        piece = mover.allocate_pinned(nbytes)
        self.host_pieces.append(piece)
        arrival = None
        for (parameter, key, tensor), offset in zip(homeless, offsets, strict=True):
            target = piece[offset : offset + tensor.nbytes]
            if tensor.device == mover.device:
                arrival = mover.copy(
                    target, _bytes(tensor), poison=False, stream=CopyStream.STATE_OUT
                )
            else:
                target.copy_(_bytes(tensor))
            host = target.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
            self.tensors.append(StateTensor(parameter, key, host, first + offset))
            state[parameter][key] = host
        if arrival is not None:
            arrival.wait(prefetched=False)  # memory on the device is given up when this returns
        return True

    def free_host_memory(self, mover: CopyEngine) -> None:
        """Let host memory go; nobody may have its tensors any more."""
        for piece in self.host_pieces:
            mover.free_host(piece)
        self.host_pieces.clear()
        self.tensors.clear()

    def _homeless(self, state: State, least_nbytes: int) -> Iterator[tuple[Parameter, str, Tensor]]:
        at_home = {id(entry.host) for entry in self.tensors}
        for parameter in self.parameters:
            for key, value in state.get(parameter, {}).items():
                if id(value) not in at_home and is_worth_moving(value, least_nbytes):
                    yield parameter, key, value


def is_worth_moving(value: object, least_nbytes: int) -> bool:
    """Whether something that an optimizer keeps is worth moving: counters and the like are not."""
    return isinstance(value, Tensor) and value.nbytes >= least_nbytes and _is_dense(value)


def make_buckets(groups: Sequence[dict[str, Any]], numel: int) -> list[Bucket]:
    """Parameters in their order, about so many numbers a bucket."""
    return [
        Bucket(index, group["params"][run.start : run.stop])
        for index, group in enumerate(groups)
        for run in split_by_numel([parameter.numel() for parameter in group["params"]], numel)
    ]


def split_by_numel(counts: Sequence[int], numel: int) -> list[range]:
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
