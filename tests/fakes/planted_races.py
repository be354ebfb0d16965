"""Put known races back into the copy code, to test that the checks for races find them.

Each function is a context manager that replaces a part of the product while it is open.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from gracetune.offload import ring


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
