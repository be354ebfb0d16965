"""Step an optimizer whose state lives on the device, in host or managed memory, or is split.

State in host memory is divided into buckets. In each step the buckets pass through a few slots on
the device, and the optimizer's own kernels update them there, so the result is bit for bit that of
an optimizer with all its state on the device:

    copy in     bucket 3 | bucket 4 | ...          STATE_IN stream
    optimizer   bucket 2 | bucket 3 | ...          compute stream
    copy out    bucket 1 | bucket 2 | ...          STATE_OUT stream

Copies in both directions overlap. Each step visits the buckets in the opposite order of the step
before, so that buckets that are still in the slots are updated first. The last copies out overlap
the next forward pass. Updates cannot start before backward is over, because gradient clipping needs
the norm of all gradients.

State in managed memory (memory/managed_roles.py) needs no slots: the kernels use it over the link,
or after its pages were prefetched to the device.

The update does not run on the CPU, because that would be slower and round differently: AdamW's
moments take 8 bytes per element and direction over the link, but an update on the CPU would read
and write 28 bytes of host memory.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gracetune.errors import RunFailedError
from gracetune.memory.managed_roles import ALIGNMENT, ManagedGroups, slab_nbytes
from gracetune.offload.copy_engine import CopyStream, aligned
from gracetune.optim.master_weights import MasterWeights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.memory.managed_roles import ManagedMemory, ManagedPlacement, ManagedSlab
    from gracetune.offload.copy_engine import CopyEngine, PendingCopy

    State = MutableMapping[Tensor, Any]


DEFAULT_SLOTS = 3
"""Number of device buffers (slots) through which optimizer state in host memory is streamed: while
one is filled, another is updated and a third is copied out."""

FREE_DEVICE_MEMORY = (
    "Leave more of the device free (with optimizer.state: host, or a plan with a lower "
    "plan.device_memory)"
)
"""Advice for a run that is out of memory in an update, and cannot repeat it. A resumed run may have
other values of these settings."""


@dataclass(frozen=True, slots=True)
class ManagedState:
    """Managed memory for optimizer state, in place of pinned host memory."""

    memory: ManagedMemory
    placement: ManagedPlacement | None = None
    """None: the access pattern chooses it."""


@dataclass(frozen=True, slots=True)
class StateOffloadSettings:
    """Settings for optimizer state in host memory, which is streamed through the device.

    The state is divided into buckets. In each step they pass through a few device buffers (slots).
    """

    bucket_numel: int = 1 << 25
    """Number of parameter elements whose optimizer state is copied to the device together (a
    bucket). The default is large enough for the full bandwidth between host and device, even with
    NVLink-C2C."""
    min_nbytes: int = 1 << 14
    """Smallest size of a state tensor in host memory, in bytes. Smaller ones stay on the device."""
    slots: int = DEFAULT_SLOTS
    """Number of device buffers for optimizer state from host memory. Each holds the state of one
    bucket of parameters."""
    poison: bool = False
    """Fill a device buffer with NaN before state is copied into it, to expose reads that come too
    early (for tests)."""

    def slots_nbytes(self, numels: Sequence[int], nbytes_per_element: float) -> int:
        """Return the bytes of the device buffers through which the state is streamed.

        `numels` are the parameters' numbers of elements, and `nbytes_per_element` is the size of
        the state per element.
        """
        sizes = [
            sum(numels[index] for index in indices)
            for indices in split_by_numel(numels, self.bucket_numel)
        ]
        return int(min(self.slots, len(sizes)) * max(sizes, default=0) * nbytes_per_element)


class OptimizerStepper:
    """Steps an optimizer and keeps a share of its state in host memory.

    That state is streamed through a few device buffers (slots) in each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        copy_engine: CopyEngine,
        nbytes_per_element: float,
        settings: StateOffloadSettings | None = None,
    ) -> None:
        """Divide the parameters into buckets, whose state can be in host memory or on the device.

        At first all state stays on the device. `nbytes_per_element` is the size of the optimizer's
        state per parameter element.
        """
        self.num_steps = 0
        """Number of completed steps since this object was created."""
        self._optimizer = optimizer
        self._engine = copy_engine
        self._settings = settings or StateOffloadSettings()
        self._nbytes_per_element = nbytes_per_element
        self._fp32_tensors_per_parameter = round(nbytes_per_element / torch.float32.itemsize)
        self._buckets = make_buckets(optimizer.param_groups, self._settings.bucket_numel)
        self._num_in_host = 0
        """Number of buckets of parameters whose optimizer state is in host memory; they are the
        first in the list."""
        self._managed: ManagedState | None = None
        """Managed memory that the state is in instead of host memory; None: pinned host memory."""
        self._managed_groups: ManagedGroups | None = None
        self._is_kept = False
        """True: all state stays off the device, whatever `set_host_share` is called with."""
        self._slots: list[_StateSlot] = []
        self._reverse = False
        self._reader: PendingCopy | None = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of optimizer state in host memory."""
        return sum(bucket.nbytes for bucket in self._buckets)

    @property
    def managed_nbytes(self) -> int:
        """Bytes of optimizer state in managed memory."""
        return sum(slab.nbytes for bucket in self._buckets for slab in bucket.slabs)

    @property
    def device_nbytes(self) -> int:
        """Bytes of optimizer state on the device, with the buffers for state from host memory."""
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        total = sum(value.nbytes for value in state if isinstance(value, Tensor))
        in_host = sum(tensor.host.nbytes for bucket in self._buckets for tensor in bucket.tensors)
        return total - in_host + self.slots_nbytes

    @property
    def slots_nbytes(self) -> int:
        """Bytes of the device buffers (slots) through which state in host memory is streamed."""
        return len(self._slots) * self._slot_nbytes

    @property
    def movable_nbytes(self) -> int:
        """Bytes of state that can leave the device, with state that will be created on it."""
        state, min_nbytes = self._optimizer.state, self._settings.min_nbytes
        existing = sum(
            tensor.nbytes
            for bucket in self._buckets
            for _, _, tensor in bucket.state_on_device(state, min_nbytes)
        )
        return existing + self._future_nbytes(self._buckets[self._num_in_host :])

    @property
    def unmanaged_nbytes(self) -> int:
        """Bytes of managed memory that all state would need in addition, also state to come."""
        state, min_nbytes = self._optimizer.state, self._settings.min_nbytes
        found = (bucket.unmanaged_state(state, min_nbytes) for bucket in self._buckets)
        existing = sum(slab_nbytes(tensor for _, _, tensor in new) for new in found if new)
        return existing + self._future_nbytes(self._buckets)

    def keep_managed(self, managed: ManagedState) -> None:
        """Move all state to managed memory for the rest of the run, and hold bytes for new state.

        Raises:
            torch.OutOfMemoryError: It exceeds the cap, or will. Nothing has moved.
        """
        managed.memory.hold("optimizer", self.unmanaged_nbytes)
        try:
            self.set_host_share(1.0, managed)
        except torch.OutOfMemoryError:  # the driver has refused
            managed.memory.hold("optimizer", 0)
            raise
        self._is_kept = True

    def keep_in_host(self) -> None:
        """Move all state to pinned host memory for the rest of the run.

        Raises:
            torch.OutOfMemoryError: Memory ran out. All state still exists, in either place.
        """
        self.set_host_share(1.0)
        self._is_kept = True

    def set_host_share(self, host_share: float, managed: ManagedState | None = None) -> None:
        """Move at least this share of the optimizer's state (0 to 1) to host or managed memory.

        The rest is moved to the device. State that exists already is copied. Does nothing after
        `keep_managed` or `keep_in_host`.

        Raises:
            torch.OutOfMemoryError: Memory ran out. All state still exists, in either place. If
                managed memory ran out, nothing has moved.
        """
        assert 0 <= host_share <= 1, f"host_share is {host_share}"
        if self._is_kept:
            return
        self.wait_for_reader()
        self.synchronize()
        self._slots.clear()
        if self._managed is not None and managed != self._managed:
            for bucket in self._buckets[: self._num_in_host]:
                self._move_to_device(bucket)
            self._managed = self._managed_groups = None
        if managed is not None:
            self._move_to_managed(self._first_buckets(host_share), managed)
            self._managed = managed
            self._managed_groups = self._managed_groups or ManagedGroups(managed.memory)
        chosen = self._first_buckets(host_share)
        self._num_in_host = 0
        for bucket in self._buckets:
            if bucket in chosen:
                self._move_to_host(bucket)
                self._num_in_host += 1
            else:
                self._move_to_device(bucket)

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Raises:
            torch.OutOfMemoryError: Device memory ran out before any weight changed. The step can be
                repeated after memory has been freed.
            RunFailedError: Device memory ran out after some weights had changed. Repeating the step
                would update them twice.
        """
        self.reserve_memory()
        self.wait_for_reader()
        try:
            self._step()
        except torch.OutOfMemoryError as error:
            raise RunFailedError(
                "the GPU ran out of memory in the middle of an optimizer step "
                f"({str(error).splitlines()[0]}), after some weights had changed. Earlier "
                f"checkpoints are intact. {FREE_DEVICE_MEMORY} and resume from the last one."
            ) from error
        self.num_steps += 1

    def reserve_memory(self) -> None:
        """Allocate the device buffers for state from host memory, and test for other memory needs.

        The test allocates and frees as much memory as new state will take. `step` calls this, so
        that an error is raised before any weight has changed. Several ranks call it before `step`.

        Raises:
            torch.OutOfMemoryError: Memory is short. The step can be repeated after memory has been
                freed.
        """
        sizes = [bucket.nbytes for bucket in self._buckets if bucket.host_pieces]
        largest, count = max(sizes, default=0), min(self._settings.slots, len(sizes))
        if len(self._slots) < count or largest > self._slot_nbytes:
            for slot in self._slots:
                slot.finish_copy_out()
            self._slots.clear()
            self._slots = [_StateSlot(self._engine.allocate_device(largest)) for _ in range(count)]
        state = self._optimizer.state
        is_complete = len(state) == sum(len(bucket.parameters) for bucket in self._buckets)
        if self._managed is not None:
            self._hold_managed(self._managed.memory, is_complete=is_complete)
        if is_complete:
            return
        without_state = [
            [p for p in bucket.parameters if p.grad is not None and not state.get(p)]
            for bucket in self._buckets
        ]
        # New state stays on the device, except that of host buckets, which is there one at a time.
        staying = [p for bucket in without_state[self._num_in_host :] for p in bucket]
        passing = max(without_state[: self._num_in_host], key=_numel, default=[])
        probed = [p for p in staying + passing for _ in range(self._fp32_tensors_per_parameter)]
        probes = [torch.empty_like(p, dtype=torch.float32) for p in probed]
        del probes

    def synchronize(self) -> None:
        """Block until all state that the last step updated has been copied to host memory."""
        for slot in self._slots:
            slot.finish_copy_out()
        self._engine.stalls(CopyStream.STATE_OUT)

    def hold_for(self, reader: PendingCopy) -> None:
        """Let the next change of weights or state wait for a copy of them, for a checkpoint."""
        self.wait_for_reader()
        self._reader = reader

    def wait_for_reader(self) -> None:
        """Wait for the copy that `hold_for` has named, if any, before weights or state change."""
        if self._reader is not None:
            self._reader.wait(prefetched=True)
            self._reader = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the optimizer's state dict.

        State that belongs in host memory is not copied to the device first.
        """
        self.wait_for_reader()
        self.synchronize()
        for slot in self._slots:
            slot.bucket = None
        for bucket in self._buckets:
            self._free(bucket)
        self._optimizer.state.clear()  # also so that no tensor of freed memory is left after errors
        hosted = {p for bucket in self._buckets[: self._num_in_host] for p in bucket.parameters}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for_device: dict[int, dict[str, Any]] = {}
        for_host: dict[Parameter, dict[str, Tensor]] = {}
        for index, parameter in zip(saved, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if parameter in hosted and is_worth_moving(value, self._settings.min_nbytes):
                    for_host.setdefault(parameter, {})[key] = value
                else:
                    for_device.setdefault(index, {})[key] = value
        self._optimizer.load_state_dict(
            {"state": for_device, "param_groups": state_dict["param_groups"]}
        )
        for parameter, values in for_host.items():
            self._optimizer.state[parameter].update(values)
        for bucket in self._buckets[: self._num_in_host]:
            self._move_to_host(bucket)

    def close(self) -> None:
        """Free the device buffers through which state in host memory is streamed.

        No step is possible afterwards, but the state can still be read.
        """
        self.wait_for_reader()
        self.synchronize()
        self._slots.clear()
        self._engine.close()

    @property
    def _slot_nbytes(self) -> int:
        return len(self._slots[0].memory) if self._slots else 0

    def _hold_managed(self, memory: ManagedMemory, *, is_complete: bool) -> None:
        """Hold the managed memory of state that does not exist yet; raise if it is not there.

        Only the state that this step creates must fit.
        """
        hosted = self._buckets[: self._num_in_host]
        if is_complete:
            memory.hold("optimizer", 0)
            return
        memory.check_room("optimizer", self._future_nbytes(hosted, only_due=True))
        memory.hold("optimizer", min(self._future_nbytes(hosted), memory.room_for("optimizer")))

    def _future_nbytes(self, buckets: Sequence[Bucket], *, only_due: bool = False) -> int:
        """Return the bytes of the state that parameters of these buckets do not have yet.

        Those of tensors that would be moved; with `only_due`, of parameters with a gradient.
        """
        state, each = self._optimizer.state, self._nbytes_per_element
        numels = (
            p.numel()
            for bucket in buckets
            for p in bucket.parameters
            if not state.get(p) and not (only_due and p.grad is None)
        )
        # Each of its tensors is moved if it is large enough, and aligned in managed memory.
        tensors = max(1, self._fp32_tensors_per_parameter)
        return sum(
            int(numel * each) + tensors * ALIGNMENT
            for numel in numels
            if numel * each >= tensors * self._settings.min_nbytes
        )

    @torch.no_grad()
    def _step(self) -> None:
        hosted, resident = self._buckets[: self._num_in_host], self._buckets[self._num_in_host :]
        due = [bucket for bucket in hosted if bucket.has_gradients()]
        new = [bucket for bucket in due if not bucket.tensors]
        moving = [bucket for bucket in due if bucket.tensors]
        # Master weights need the gradients in fp32 as well: convert one bucket at a time.
        one_by_one = isinstance(self._optimizer, MasterWeights)
        for buckets in [[bucket] for bucket in resident] if one_by_one else [resident]:
            if buckets:
                self._step_buckets(buckets)
        for bucket in new:  # at their first gradient the optimizer creates state on the device
            self._step_buckets([bucket])
            self._move_to_host(bucket)
        if self._managed_groups is not None:
            groups = [bucket.managed_parts() for bucket in moving]
            self._managed_groups.for_each(groups, lambda n: self._step_in_managed(moving[n]))
        else:
            self._stream(moving)

    def _stream(self, buckets: Sequence[Bucket]) -> None:
        """Update buckets of parameters whose state is in host memory.

        The state is copied to one of a few device buffers (slots), updated there, and copied back.
        """
        order = list(reversed(buckets)) if self._reverse else list(buckets)
        self._reverse = not self._reverse
        for slot in self._slots:
            slot.finish_copy_out()
        first = order[: len(self._slots)]
        slot_of = {slot.bucket: slot for slot in self._slots if slot.bucket in first}
        waiting = deque(bucket for bucket in order if bucket not in slot_of)
        for slot in self._slots:
            if slot.bucket not in slot_of and waiting:
                slot_of[waiting[0]] = slot
                self._fetch(slot, waiting.popleft())
        previous: _StateSlot | None = None
        for bucket in order:
            slot = slot_of[bucket]
            self._step_in_slot(slot, bucket)
            if previous is not None and waiting:  # its copy out had one bucket's time to finish
                slot_of[waiting[0]] = previous
                self._fetch(previous, waiting.popleft())
            previous = slot

    def _fetch(self, slot: _StateSlot, bucket: Bucket) -> None:
        slot.finish_copy_out()
        for piece, place in bucket.spans(slot.memory):
            slot.copy_in = self._engine.copy(
                place, piece, self._settings.poison, stream=CopyStream.STATE_IN
            )
        slot.bucket = bucket

    def _step_in_slot(self, slot: _StateSlot, bucket: Bucket) -> None:
        """Update a bucket of parameters whose state was copied to a device buffer, the slot.

        Then start to copy the state back to host memory.
        """
        if slot.copy_in is not None:
            slot.copy_in.wait(prefetched=True)
            slot.copy_in = None
        state = self._optimizer.state
        views = [(tensor, tensor.view(slot.memory)) for tensor in bucket.tensors]
        for tensor, view in views:
            state[tensor.parameter][tensor.key] = view
        try:
            self._step_buckets([bucket])
        finally:
            for tensor, view in views:
                result = state[tensor.parameter][tensor.key]
                if result is not view:  # the optimizer replaced the tensor instead of updating it
                    view.copy_(result)
                state[tensor.parameter][tensor.key] = tensor.host
        for piece, place in bucket.spans(slot.memory):
            slot.copy_out = self._engine.copy(
                piece, place, poison=False, stream=CopyStream.STATE_OUT
            )
        if self._move_to_host(bucket):  # a parameter had its first gradient
            slot.bucket = None

    def _step_in_managed(self, bucket: Bucket) -> None:
        """Update a bucket of parameters whose state is in managed memory, where it is."""
        self._step_buckets([bucket])
        state = self._optimizer.state
        for tensor in bucket.tensors:
            result = state[tensor.parameter][tensor.key]
            if result is not tensor.host:  # the optimizer replaced the tensor
                tensor.host.copy_(result)
                state[tensor.parameter][tensor.key] = tensor.host
        self._move_to_host(bucket)  # a parameter may have had its first gradient

    def _step_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Call the optimizer's `step` for only the parameters in these buckets."""
        if len(buckets) == len(self._buckets):
            self._optimizer.step()
            return
        with _restricted_to(self._optimizer, buckets):
            self._optimizer.step()

    def _first_buckets(self, host_share: float) -> list[Bucket]:
        """Return the first buckets that have at least this share of the elements together."""
        target = host_share * sum(bucket.numel for bucket in self._buckets)
        before = accumulate((bucket.numel for bucket in self._buckets), initial=0)
        return [b for b, numel in zip(self._buckets, before, strict=False) if numel < target]

    def _move_to_managed(self, buckets: Sequence[Bucket], managed: ManagedState) -> None:
        """Move the existing state of buckets to managed memory, or nothing if there is no room.

        State in pinned memory does not pass through the device, which may be full.
        """
        state, min_nbytes = self._optimizer.state, self._settings.min_nbytes
        found = [(bucket, bucket.unmanaged_state(state, min_nbytes)) for bucket in buckets]
        moving = [(bucket, new) for bucket, new in found if new]
        made = managed.memory.allocate_all(
            "optimizer",
            [[tensor for _, _, tensor in new] for _, new in moving],
            managed.placement,
        )
        for (bucket, new), (slab, copies) in zip(moving, made, strict=True):
            pieces, bucket.host_pieces = bucket.host_pieces, []
            if pieces:
                bucket.tensors = []
            bucket.fill_slab(slab, copies, new, state)
            for piece in pieces:
                self._engine.free_host(piece)

    def _move_to_host(self, bucket: Bucket) -> bool:
        if self._managed is not None:
            return bucket.move_to_managed(
                self._optimizer.state, self._managed, self._settings.min_nbytes
            )
        return bucket.move_to_host(self._optimizer.state, self._engine, self._settings.min_nbytes)

    def _move_to_device(self, bucket: Bucket) -> None:
        # Copy everything before anything is replaced: there may be no memory for the last tensor.
        on_device = [tensor.host.to(self._engine.device, copy=True) for tensor in bucket.tensors]
        for tensor, value in zip(bucket.tensors, on_device, strict=True):
            self._optimizer.state[tensor.parameter][tensor.key] = value
        self._free(bucket)

    def _free(self, bucket: Bucket) -> None:
        """Free the host or managed memory of a bucket's state, which is not used any more."""
        bucket.free_host_memory(self._engine)
        if self._managed is not None:
            bucket.free_managed_memory(self._managed.memory)


@dataclass(slots=True, eq=False)
class _StateSlot:
    memory: Tensor
    bucket: Bucket | None = None
    """The bucket of parameters whose optimizer state is in this device buffer, or is being copied
    to it."""
    copy_in: PendingCopy | None = None
    copy_out: PendingCopy | None = None
    """A copy of this device buffer to host memory that the compute stream has not waited for yet;
    None if there is none."""

    def finish_copy_out(self) -> None:
        """Make all work that is queued from now on wait until this buffer is copied to the host."""
        if self.copy_out is not None:
            self.copy_out.wait(prefetched=True)
            self.copy_out = None


@contextmanager
def _restricted_to(optimizer: Optimizer, buckets: Sequence[Bucket]) -> Iterator[None]:
    """Let the optimizer have only the parameters of these buckets, inside the context."""
    all_parameters = [group["params"] for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [p for b in buckets if b.group == index for p in b.parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
            group["params"] = parameters


def _numel(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# Buckets
#
# The state of a bucket in host memory is a run of bytes that fits any large enough slot. The
# tensors in the optimizer's state are views of it, so code that reads, saves or compares the state
# sees the same as for an optimizer on the device.


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a parameter's optimizer state in host memory, such as a moment."""

    parameter: Parameter
    key: str
    """Key of the tensor in the parameter's state, such as `exp_avg`."""
    host: Tensor
    """The tensor, as a view of the host memory that holds the state of its bucket of parameters."""
    offset: int
    """Position of the tensor in the state of its bucket of parameters, in bytes."""

    def view(self, memory: Tensor) -> Tensor:
        """Return this tensor's copy on the device, as a view of `memory`.

        `memory` is a device buffer with a copy of the state of the tensor's bucket of parameters.
        """
        span = memory[self.offset : self.offset + self.host.nbytes]
        return span.view(self.host.dtype).as_strided(self.host.size(), self.host.stride())


@dataclass(slots=True, eq=False)
class Bucket:
    """Some parameters of one group that are updated together, and their state in host memory."""

    group: int
    """Index of the optimizer's parameter group."""
    parameters: list[Parameter]
    tensors: list[StateTensor] = field(default_factory=list)
    """Optimizer state in host or managed memory; empty if the state is on the device or does not
    exist yet."""
    host_pieces: list[Tensor] = field(default_factory=list)
    """Allocations of pinned host memory. One after the other, they are the bytes of the state of
    the bucket's parameters."""
    slabs: list[ManagedSlab] = field(default_factory=list)
    """Allocations of managed memory with the state of the bucket's parameters."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the optimizer state of the bucket's parameters takes."""
        return sum(len(piece) for piece in self.host_pieces)

    @property
    def numel(self) -> int:
        """Number of elements of the bucket's parameters."""
        return _numel(self.parameters)

    def has_gradients(self) -> bool:
        """Return True if any of the bucket's parameters has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def spans(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs: an allocation of host memory, and the part of `memory` for its copy.

        `memory` is a device buffer for the bucket's whole state.
        """
        start = 0
        for piece in self.host_pieces:
            yield piece, memory[start : start + len(piece)]
            start += len(piece)

    def move_to_host(self, state: State, engine: CopyEngine, min_nbytes: int) -> bool:
        """Move all state of the bucket's parameters to host memory; return True if any was moved.

        New state appears at the first gradient of a parameter, and when a state dict is loaded.
        State tensors smaller than `min_nbytes` are not moved.
        """
        new = self.state_on_device(state, min_nbytes)
        if not new:
            return False
        start = self.nbytes
        offsets, nbytes = _layout([tensor for _, _, tensor in new])
        piece = engine.allocate_pinned(nbytes)
        self.host_pieces.append(piece)
        last_copy = None
        for (parameter, key, tensor), offset in zip(new, offsets, strict=True):
            target = piece[offset : offset + tensor.nbytes]
            if tensor.device == engine.device:
                last_copy = engine.copy(
                    target, _tensor_bytes(tensor), poison=False, stream=CopyStream.STATE_OUT
                )
            else:
                target.copy_(_tensor_bytes(tensor))
            host = target.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
            self.tensors.append(StateTensor(parameter, key, host, start + offset))
            state[parameter][key] = host
        if last_copy is not None:
            last_copy.wait(prefetched=False)  # the device memory is freed when this returns
        return True

    def move_to_managed(self, state: State, managed: ManagedState, min_nbytes: int) -> bool:
        """Move all state of the bucket's parameters to managed memory; return True if any moved.

        Kernels use it there like state on the device.
        """
        new = self.state_on_device(state, min_nbytes)
        if not new:
            return False
        slab, copies = managed.memory.allocate_like(
            "optimizer", [tensor for _, _, tensor in new], managed.placement
        )
        self.fill_slab(slab, copies, new, state)
        return True

    def fill_slab(
        self,
        slab: ManagedSlab,
        copies: Sequence[Tensor],
        new: Sequence[tuple[Parameter, str, Tensor]],
        state: State,
    ) -> None:
        """Copy state tensors to a slab of managed memory, and use the copies from now on."""
        self.slabs.append(slab)
        for (parameter, key, tensor), copy in zip(new, copies, strict=True):
            copy.copy_(tensor)
            self.tensors.append(StateTensor(parameter, key, copy, 0))
            state[parameter][key] = copy

    def managed_parts(self) -> list[tuple[ManagedSlab, Tensor]]:
        """Return the managed memory of the bucket's state, to prefetch it."""
        return [(slab, slab.memory) for slab in self.slabs]

    def free_managed_memory(self, memory: ManagedMemory) -> None:
        """Free the managed memory of the bucket's state. Its tensors must not be in use."""
        for slab in self.slabs:
            memory.free(slab)
        self.slabs.clear()
        self.tensors.clear()

    def free_host_memory(self, engine: CopyEngine) -> None:
        """Free the host memory of the bucket's state. Its tensors must not be in use any more."""
        for piece in self.host_pieces:
            engine.free_host(piece)
        self.host_pieces.clear()
        self.tensors.clear()

    def state_on_device(self, state: State, min_nbytes: int) -> list[tuple[Parameter, str, Tensor]]:
        """Return the state that is in neither host nor managed memory, but could be."""
        moved = {id(tensor.host) for tensor in self.tensors}
        return [
            (parameter, key, value)
            for parameter in self.parameters
            for key, value in state.get(parameter, {}).items()
            if id(value) not in moved and is_worth_moving(value, min_nbytes)
        ]

    def unmanaged_state(self, state: State, min_nbytes: int) -> list[tuple[Parameter, str, Tensor]]:
        """Return the state that is not in managed memory, but could be."""
        pinned = self.tensors if self.host_pieces else []
        return [
            *((tensor.parameter, tensor.key, tensor.host) for tensor in pinned),
            *self.state_on_device(state, min_nbytes),
        ]


def is_worth_moving(value: object, min_nbytes: int) -> bool:
    """Return True if a value of the optimizer's state should be moved to host memory.

    It must be a dense tensor of at least `min_nbytes`. Small values such as step counters stay on
    the device.
    """
    return isinstance(value, Tensor) and value.nbytes >= min_nbytes and _is_dense(value)


def make_buckets(groups: Sequence[dict[str, Any]], bucket_numel: int) -> list[Bucket]:
    """Divide the parameters of each group into buckets of at most `bucket_numel` elements."""
    return [
        Bucket(index, group["params"][indices.start : indices.stop])
        for index, group in enumerate(groups)
        for indices in split_by_numel(
            [parameter.numel() for parameter in group["params"]], bucket_numel
        )
    ]


def split_by_numel(numels: Sequence[int], max_numel: int) -> list[range]:
    """Split a list of sizes into consecutive index ranges with a total of at most `max_numel`.

    A size that is larger than `max_numel` gets a range of its own.
    """
    ranges: list[range] = []
    remaining = 0
    for index, numel in enumerate(numels):
        if numel > remaining or not ranges:
            ranges.append(range(index, index))
            remaining = max_numel
        ranges[-1] = range(ranges[-1].start, index + 1)
        remaining -= numel
    return ranges


def _layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the aligned byte offset of each tensor in a common buffer, and the buffer's size."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += aligned(tensor.nbytes)
    return offsets, end


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's elements are contiguous in memory, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _tensor_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements as a uint8 view, without the rest of its storage."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
