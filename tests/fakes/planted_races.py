"""Put known races back into the copy code, to test that the checks for races find them.

Each function is a context manager that replaces a part of the product while it is open.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from gracetune.offload import copy_engine, offloaded_activations, ring
from gracetune.optim import offloaded_state


@contextmanager
def slot_race() -> Iterator[None]:
    """Let the weight ring refill the slot of the block in use, and slots that tensors still use.

    Where forward turns to backward, the last block's slot is the one that is needed last, so the
    ring copies another block's weights into it while the last block computes. The loss stays finite
    and of the usual size, but gradients are wrong, even if copies are synchronous.
    """

    def slot_to_refill(slots, ranks, in_use, rank=-1):
        best, best_rank = None, rank
        for slot in slots:
            if slot.block is None:
                return slot
            slot_rank = ranks.get(slot.block, len(ranks))
            if slot_rank > best_rank:
                best, best_rank = slot, slot_rank
        return best

    def evict(pool, slot):
        if slot.block is not None:
            del pool._by_block[slot.block]
            slot.block = None

    with (
        patch.object(ring, "slot_to_refill", slot_to_refill),
        patch.object(ring.SlotPool, "evict", evict),
    ):
        yield


@contextmanager
def copy_without_ready() -> Iterator[None]:
    """Let CUDA copies start at once, without waiting for the compute stream."""

    def copy(engine, target, source, poison, stream=copy_engine.CopyStream.WEIGHTS):
        copy_stream = engine._streams[stream]
        with torch.cuda.stream(copy_stream):
            if poison:
                target.fill_(copy_engine.POISON)
            target[: len(source)].copy_(source, non_blocking=True)
            done = copy_engine._event()
            done.record(copy_stream)
        return copy_engine._CudaPendingCopy(engine, done, engine._timers[stream])

    with patch.object(copy_engine.CudaCopyEngine, "copy", copy):
        yield


@contextmanager
def no_wait_for_copy() -> Iterator[None]:
    """Let the compute stream go on without waiting for CUDA copies."""
    with patch.object(copy_engine.CudaCopyEngine, "wait", lambda *_: None):
        yield


@contextmanager
def activations_released_early() -> Iterator[None]:
    """Free the device memory of activations while it may still be copied to the host."""
    release_outgoing = offloaded_activations.BlockCall.release_outgoing

    def release(call):
        call.last_copy = None
        return release_outgoing(call)

    with patch.object(offloaded_activations.BlockCall, "release_outgoing", release):
        yield


@contextmanager
def activations_read_early() -> Iterator[None]:
    """Let backward read activations that may still be copied back to the device."""
    read = offloaded_activations.OffloadedStorage.read

    def read_early(storage):
        storage.pending_copy = None
        return read(storage)

    with patch.object(offloaded_activations.OffloadedStorage, "read", read_early):
        yield


@contextmanager
def host_buffers_reused_early() -> Iterator[None]:
    """Reuse the host buffers of discarded graphs while they may still be copied to the device."""
    kept = []

    def reclaim(copies):
        for released in copies.released:
            copies._pool.put_back(released.host)
        kept.extend(copies.released)  # only the host memory is reused early
        copies.released.clear()

    with patch.object(offloaded_activations.OffloadCopies, "reclaim_host_buffers", reclaim):
        yield


@contextmanager
def state_slot_refilled_early() -> Iterator[None]:
    """Refill a slot of the optimizer state while it may still be copied to the host."""

    def finish_copy_out(slot):
        slot.copy_out = None

    with patch.object(offloaded_state._StateSlot, "finish_copy_out", finish_copy_out):
        yield


@contextmanager
def state_read_early() -> Iterator[None]:
    """Let the host read optimizer state while it may still be copied to the host."""
    with patch.object(offloaded_state.OptimizerStepper, "synchronize", lambda _: None):
        yield
