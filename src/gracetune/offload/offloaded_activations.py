"""Keep autograd's saved activations in host memory: storages, copies and host buffers.

The unit of a copy is a whole storage (`OffloadedStorage`). Autograd often saves several views of
one storage; they are copied together, and each view is recreated from the storage when backward
asks for it. Autograd owns the storages through the views it saved (`SavedView`). When it drops the
last view, `OffloadedStorage.__del__` only puts the host buffer on a list, because it may run at any
moment; `OffloadCopies.reclaim_host_buffers` returns the buffers later.

Ordering. All memory is reused in the order of the compute stream; the host never waits:

- Device memory that is copied out is kept alive until the compute stream has waited for the copy.
  Only then may torch's allocator reuse it.
- Device memory for a copy back is allocated on the compute stream, which the copy waits for.
- A host buffer is reused after the compute stream has waited for the last copy that reads it.
  Copies that write host buffers all run on one stream (`ACTIVATIONS_OUT`), so they stay in order.

`offload/activations.py` decides what is offloaded, and when.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.memory.platform import read_this_host
from gracetune.offload.copy_engine import POISON, CopyStream, aligned
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from gracetune.offload.copy_engine import CopyEngine, PendingCopy
    from gracetune.offload.stall_timer import StallTotals, StallWindow


MIN_SAVED_SHARE = 7 / 8
"""A storage is offloaded only if autograd has saved views of at least this share of its bytes."""
HOST_RESERVE = 2 * GIB
"""Bytes of host memory left to other programs if no limit is set."""


class SavedView(NamedTuple):
    """The object autograd keeps instead of a saved tensor: a view of an offloaded storage."""

    storage: OffloadedStorage
    dtype: torch.dtype
    offset: int
    """Storage offset of the saved tensor, in elements."""
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """Recreate the saved tensor as a view of device memory that holds its storage."""
        start = torch.empty(0, dtype=self.dtype, device=memory.device)
        return start.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class ReleasedStorage(NamedTuple):
    """Buffers of an offloaded activation, to be freed because autograd no longer needs it."""

    host: Tensor
    """The activation's copy in host memory."""
    device: Tensor | None
    """Device memory to which the storage is still being copied back; None: no copy is running."""
    pending_copy: PendingCopy | None
    """The copy back to the device, if compute has not waited for it yet; else None."""


class OffloadedStorage:
    """A storage that autograd saved: on the device, in host memory, or both."""

    def __init__(self, call: BlockCall, tensor: Tensor, released: list[ReleasedStorage]) -> None:
        """Describe the storage of `tensor`, which a block call has saved.

        When autograd drops the last view, the storage's memory is appended to `released`.
        """
        self.call = call
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.original: Tensor | None = tensor.detach()
        """The saved tensor; None once its device memory was released. It shares the version counter
        of the saved tensor, so in-place changes are noticed."""
        self.host: Tensor | None = None
        """Host buffer with the storage's bytes; None: they were not copied to the host."""
        self.device: Tensor | None = None
        """Device memory to which the storage is or was copied back."""
        self.pending_copy: PendingCopy | None = None
        """The running copy back to the device; None once the compute stream has waited for it."""
        self.prefetched = False
        """True if the copy back to the device was started before backward asked for the storage."""
        self.modified = False
        self._views: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
        self._covered_nbytes = 0
        self._saved_count = 0
        self._unread_count = 0
        self._released = released

    def __del__(self) -> None:
        """Append the storage's memory to `released` instead of freeing it: copies may still use it.

        `OffloadCopies.reclaim_host_buffers` frees it later.
        """
        if self.host is not None:
            device = None if self.pending_copy is None else self.device
            self._released.append(ReleasedStorage(self.host, device, self.pending_copy))

    def add_view(self, tensor: Tensor) -> SavedView:
        """Register a tensor that autograd saves, and return the object that autograd keeps."""
        saved = SavedView(
            self, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )
        view = (saved.offset * tensor.element_size(), saved.size, saved.stride)
        if view not in self._views:
            self._views.add(view)
            self._covered_nbytes += tensor.numel() * tensor.element_size()
        self._saved_count += 1
        return saved

    def is_worth_sending(self) -> bool:
        """Return True if autograd saved nearly all of the storage and it was not sent before."""
        return self.host is None and self._covered_nbytes >= MIN_SAVED_SHARE * self.nbytes

    def was_modified(self) -> bool:
        """Return True if the tensor was written in place after it was saved.

        The host buffer may then hold the values from before or after the write.
        """
        if self.original is not None and self.original._version != self.version:
            self.modified = True
        return self.modified

    def begin_fetch(self, device: Tensor, pending_copy: PendingCopy, prefetched: bool) -> None:
        """Remember a copy back to the device that has just been queued."""
        self.device, self.pending_copy, self.prefetched = device, pending_copy, prefetched
        self._unread_count = self._saved_count

    def read(self) -> Tensor:
        """Return device memory that holds the storage, ready for the compute stream.

        Once all saved views have been read, the reference to fetched device memory is dropped, so
        that a graph kept for a second backward does not keep that memory.
        """
        if self.original is not None:
            return self.original
        assert self.device is not None, "a storage was read that was not fetched"
        if self.pending_copy is not None:
            self.pending_copy.wait(self.prefetched)
            self.pending_copy = None
        device = self.device
        self._unread_count -= 1
        if self._unread_count == 0:
            self.device = None
        return device


@dataclass(slots=True, eq=False)
class BlockCall:
    """One call of one block in forward: the storages it saved, and the call before it."""

    previous: BlockCall | None
    """The block call before this one in the same pass. Backward reaches it after this one."""
    kept_storages: frozenset[int]
    """Numbers (`cdata`) of storages that stay on the device: weights, and inputs shared with other
    blocks."""
    only_storages: frozenset[int] | None
    """Numbers (`cdata`) of the only storages that may be offloaded: the inputs of a checkpointed
    block; None: all may."""
    sent: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    """Storages that were copied to the host, in order."""
    outgoing: list[tuple[weakref.ref[OffloadedStorage], Tensor]] = field(default_factory=list)
    """Storages whose copy to the host may still be running, each with the device memory that
    the copy reads."""
    last_copy: PendingCopy | None = None
    """The last copy to the host. Copies run in order, so waiting for it waits for all of them."""
    nbytes: int = 0
    """Bytes copied to the host."""
    by_storage: dict[tuple[int, int], OffloadedStorage] = field(default_factory=dict)
    """Storages saved so far, by (address, version); empty once the block has run."""

    def add_sent(self, storage: OffloadedStorage, pending_copy: PendingCopy) -> None:
        """Remember a copy to the host that has just been queued."""
        assert storage.original is not None, "a storage was sent that is not on the device"
        reference = weakref.ref(storage)
        self.sent.append(reference)
        self.outgoing.append((reference, storage.original))
        self.last_copy = pending_copy
        self.nbytes += storage.nbytes

    def offloaded(self) -> Iterator[OffloadedStorage]:
        """Yield the storages that exist only in host memory, in the order backward reads them."""
        for reference in reversed(self.sent):
            storage = reference()
            if storage is not None and storage.original is None and storage.device is None:
                yield storage

    def release_outgoing(self) -> list[Tensor]:
        """Make compute wait for the copies to the host, and return the device memory they read.

        Dropping the returned tensors frees that memory.
        """
        if self.last_copy is not None:
            self.last_copy.wait(prefetched=True)
            self.last_copy = None
        outgoing, self.outgoing = self.outgoing, []
        for reference, _ in outgoing:
            storage = reference()
            if storage is not None:
                storage.was_modified()  # remembers a change before the original is dropped
                storage.original = None
        return [original for _, original in outgoing]


class OffloadCopies:
    """Copy storages to the host and back, and release memory when the copies allow it."""

    def __init__(self, copy_engine: CopyEngine, pool: HostBufferPool, poison: bool) -> None:
        """`poison`, for debugging: overwrite memory with NaN when it is released."""
        self.sent = self.sent_nbytes = 0
        self.fetched_nbytes = self.on_demand = 0
        self.released: list[ReleasedStorage] = []
        """Memory of storages that autograd no longer needs, waiting to be reused."""
        self._engine = copy_engine
        self._pool = pool
        self._poison = poison
        self._outgoing_calls: list[BlockCall] = []
        """Block calls whose activations are still being copied to the host, oldest first."""

    def send(self, storage: OffloadedStorage) -> bool:
        """Start a storage's copy to the host. Return False if there is no host memory left."""
        assert storage.original is not None, "a storage was sent that is not on the device"
        host = self._pool.take(storage.nbytes)
        if host is None:
            return False
        storage.host = host
        pending_copy = self._engine.copy(
            host, storage_bytes(storage.original), False, CopyStream.ACTIVATIONS_OUT
        )
        storage.call.add_sent(storage, pending_copy)
        self.sent += 1
        self.sent_nbytes += storage.nbytes
        return True

    def fetch(self, storage: OffloadedStorage, prefetched: bool) -> None:
        """Start a storage's copy back to the device.

        `prefetched` is True if backward has not asked for the storage yet.
        """
        assert storage.host is not None, "a storage is not on the device but was never sent"
        device = torch.empty(storage.nbytes, dtype=torch.uint8, device=self._engine.device)
        pending_copy = self._engine.copy(
            device, storage.host, self._poison, CopyStream.ACTIVATIONS_IN
        )
        storage.begin_fetch(device, pending_copy, prefetched)
        self.on_demand += not prefetched
        self.fetched_nbytes += storage.nbytes

    def track_outgoing(self, call: BlockCall) -> None:
        """Remember a finished block call until `release_outgoing` frees its device memory."""
        if call.outgoing:
            self._outgoing_calls.append(call)

    def release_outgoing(self, keep: Collection[BlockCall] = ()) -> None:
        """Free the device memory of activations copied to the host, except for calls in `keep`."""
        for call in [call for call in self._outgoing_calls if call not in keep]:
            self._outgoing_calls.remove(call)
            memory = call.release_outgoing()
            while memory:
                self._poison_released(memory.pop())

    def reclaim_host_buffers(self) -> None:
        """Put the host buffers of storages that autograd has dropped back into the pool."""
        while self.released:
            host, device, pending_copy = self.released.pop()
            if pending_copy is not None:
                pending_copy.wait(prefetched=True)
            if device is not None:
                self._poison_released(device)
            if self._poison:
                nans = torch.full(
                    (len(host),), POISON, dtype=torch.uint8, device=self._engine.device
                )
                self._engine.copy(host, nans, False, CopyStream.ACTIVATIONS_OUT).wait(
                    prefetched=True
                )
            self._pool.put_back(host)

    def stalls(self) -> tuple[StallTotals, StallTotals]:
        """Return how long compute has waited for copies to the host, and for copies back.

        Blocks until the device has passed the last wait.
        """
        return (
            self._engine.stalls(CopyStream.ACTIVATIONS_OUT),
            self._engine.stalls(CopyStream.ACTIVATIONS_IN),
        )

    def begin_stall_window(self) -> StallWindow:
        """End the current stall window of the copies back to the device, and return a new one.

        A stall window measures how long compute waits for copies in a few passes.
        """
        return self._engine.begin_stall_window(CopyStream.ACTIVATIONS_IN)

    def close(self) -> None:
        """Wait for running copies and free the host memory."""
        self.release_outgoing()
        self.reclaim_host_buffers()
        self._pool.close()

    def _poison_released(self, memory: Tensor) -> None:
        """With `poison`, overwrite released device memory with NaN, unless it is still in use."""
        if self._poison and is_sole_owner(memory):
            storage_bytes(memory).fill_(POISON)


class HostBufferPool:
    """Pinned host buffers for activations, cut from large slabs that are kept until `close`.

    A returned buffer is reused for the same size. Once all buffers are back, the slabs are cut from
    the start again, so that other shapes (another resolution) need no more memory. Frozen weights
    do not use this pool: each block's weights are one allocation that lives as long as the ring
    (`offload/host_weights.py`).
    """

    def __init__(
        self, copy_engine: CopyEngine, slab_nbytes: int, available: Callable[[int], int]
    ) -> None:
        """`available(n)` returns how many more bytes may be allocated if the pool has n."""
        self.nbytes = 0
        """Size of all slabs together."""
        self._engine = copy_engine
        self._slab_nbytes = slab_nbytes
        self._available = available
        self._slabs: list[Tensor] = []
        self._used_nbytes: list[int] = []
        """Bytes of each slab that have been handed out as buffers."""
        self._free: dict[int, list[Tensor]] = {}
        """Free buffers that were put back, by aligned size."""
        self._num_taken = 0

    def take(self, nbytes: int) -> Tensor | None:
        """Return a buffer of `nbytes` bytes, or None if there is no host memory left."""
        aligned_nbytes = aligned(nbytes)
        free = self._free.get(aligned_nbytes)
        buffer = free.pop() if free else self._cut(aligned_nbytes)
        if buffer is None:
            return None
        self._num_taken += 1
        return buffer[:nbytes]

    def put_back(self, buffer: Tensor) -> None:
        """Take a buffer back. The compute stream must have waited for every copy that reads it."""
        aligned_nbytes = aligned(len(buffer))
        self._num_taken -= 1
        self._free.setdefault(aligned_nbytes, []).append(buffer.as_strided((aligned_nbytes,), (1,)))
        if self._num_taken == 0:
            self._free.clear()
            self._used_nbytes = [0] * len(self._slabs)

    def close(self) -> None:
        """Free all slabs."""
        for slab in self._slabs:
            self._engine.free_host(slab)
        self._slabs, self._used_nbytes = [], []
        self._free.clear()
        self.nbytes = 0

    def available_nbytes(self) -> int:
        """Return how many bytes the pool may still allocate."""
        return self._available(self.nbytes)

    def _cut(self, nbytes: int) -> Tensor | None:
        for index, slab in enumerate(self._slabs):
            start = self._used_nbytes[index]
            if start + nbytes <= len(slab):
                self._used_nbytes[index] += nbytes
                return slab[start : start + nbytes]
        available = self.available_nbytes()
        if nbytes > available:
            return None
        room = self._engine.pinned_room
        largest = available if room is None else min(room, available)
        slab = self._engine.allocate_pinned(max(nbytes, min(self._slab_nbytes, largest)))
        self._slabs.append(slab)
        self._used_nbytes.append(nbytes)
        self.nbytes += len(slab)
        return slab[:nbytes]


def available_host_nbytes(limit_nbytes: int | None, used_nbytes: int) -> int:
    """Return how many more bytes of host memory may be used for activations.

    That is the rest of the limit. Without a limit, it is the host's (or container's) available
    memory minus `HOST_RESERVE`.
    """
    if limit_nbytes is not None:
        return limit_nbytes - used_nbytes
    return read_this_host().usable_bytes() - HOST_RESERVE


# Storages and tensors


def is_plain_tensor(tensor: Tensor, device: torch.device) -> bool:
    """Return True if the tensor is an ordinary strided view of one storage on the device."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.layout is not torch.strided or tensor.device != device:
        return False
    return not tensor.is_conj() and not tensor.is_neg()


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def is_sole_owner(tensor: Tensor) -> bool:
    """Return True if no other tensor uses the storage of this one."""
    storage = tensor.untyped_storage()
    tensor_and_storage = 2
    return int(torch._C._storage_Use_Count(storage._cdata)) == tensor_and_storage


def large_weight_storages(block: nn.Module, min_nbytes: int) -> frozenset[int]:
    """Return the storage numbers (`cdata`) of a block's weights and buffers, without small ones.

    Weights that a ring has bound to a slot are left out: the storage of such a view is short-lived.
    """
    tensors = (
        tensor
        for module in block.modules()
        for tensor in (
            *(one for one in module._parameters.values() if isinstance(one, nn.Parameter)),
            *module._buffers.values(),
        )
    )
    return frozenset(
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if tensor is not None and tensor.layout is torch.strided and tensor.nbytes >= min_nbytes
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storages_in(value: Any) -> list[StorageWeakRef]:
    """Return a weak reference to the storage of each tensor in `value`.

    While the weak reference lives, no other storage gets the same number (`cdata`).
    """
    return [
        StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        for tensor in tensors_in(value)
        if tensor.layout is torch.strided
    ]


class SharedInputs:
    """Find inputs that a block shares with the block before it: rotary tables, text, timestep.

    Such inputs stay on the device: each block would send the same bytes again. The first block of a
    pass has no block before it. The inputs that it shares with the second block are known from the
    previous pass, by their positions among the arguments.
    """

    def __init__(self) -> None:
        self._previous: tuple[nn.Module, list[StorageWeakRef]] | None = None
        self._shared_with_next: dict[nn.Module, frozenset[int]] = {}

    def begin_pass(self) -> None:
        """Forget the previous block: the next one is the first of a forward pass."""
        self._previous = None

    def find(self, block: nn.Module, inputs: list[StorageWeakRef]) -> frozenset[int]:
        """Return the storage numbers (`cdata`) of inputs that a neighbouring block also gets."""
        if self._previous is None:
            positions = self._shared_with_next.get(block, frozenset())
        else:
            previous_block, previous_inputs = self._previous
            positions = _shared_positions(inputs, previous_inputs)
            self._shared_with_next[previous_block] = _shared_positions(previous_inputs, inputs)
        self._previous = block, inputs
        return frozenset(ref.cdata for index, ref in enumerate(inputs) if index in positions)


def _shared_positions(
    inputs: list[StorageWeakRef], other_inputs: list[StorageWeakRef]
) -> frozenset[int]:
    others = set(other_inputs)
    return frozenset(index for index, storage in enumerate(inputs) if storage in others)
