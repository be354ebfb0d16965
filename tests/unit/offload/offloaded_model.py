"""Models whose blocks are kept, recomputed, offloaded or streamed in any mix, and slow links."""

import copy

import torch
from streamed_model import run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.copies import POISON, CopyStream, SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

SMALL = 64
"""Bytes: the models are tiny, and nearly all they save is larger than this."""
WAYS = ["keep", "recompute", "offload", "inputs", "inside"]
"""The last two: recomputed by a checkpoint around or in the block, its input offloaded."""


class Mixed:
    """A copy of a model whose every block goes its own way; called like the model."""

    def __init__(self, model, ways, streamed, told, mover=None, **settings):
        self.model = copy.deepcopy(model)
        self.ways = ways
        mover = mover or SynchronousCopyEngine()
        blocks = list(self.model.blocks)
        self.ring = None
        if streamed:
            which = [blocks[k] for k in streamed]
            self.ring = stream_weights(self.model, which, mover, told, 2, poison=True)
        self.offload = None
        by_way = {way: [b for b, w in zip(blocks, ways, strict=True) if w == way] for way in WAYS}
        for block in by_way["inside"]:
            block.forward = self.checkpointed(block)
        if {"offload", "inputs", "inside"} & set(ways):
            self.offload = offload_activations(
                by_way["offload"],
                mover,
                self.ring,
                told,
                SMALL,
                inputs_of=by_way["inside"],
                others=by_way["keep"] + by_way["recompute"] + by_way["inputs"],
                settings=OffloadSettings(**({"poison": True} | settings)),
            )
        self.model.groups = lambda order: [
            (blocks[k], ways[k]) for k in (range(len(blocks)) if order is None else order)
        ]
        self.model.forward = self.forward

    def checkpointed(self, block):
        inner = block.forward

        def forward(x, shift):
            return checkpoint(inner, x, shift, use_reentrant=False)

        return forward

    def forward(self, x, order=None):
        model = self.model
        x = model.inside(x)
        for block, way in model.groups(order):
            if way == "recompute":
                x = checkpoint(block, x, shift=0.1, use_reentrant=False)
            elif way == "inputs":
                x = self.offload.checkpoint(block, x, shift=0.1)
            else:
                x = run(x, [block])
        return model.outside(x)


def offloaded(model, told, which=None, mover=None, **settings):
    """A copy of a model, as it is, some of whose blocks are offloaded."""
    twin = copy.deepcopy(model)
    blocks = list(twin.blocks)
    chosen = blocks if which is None else [blocks[k] for k in which]
    others = [block for block in blocks if block not in chosen]
    offload = offload_activations(
        chosen,
        mover or SynchronousCopyEngine(),
        None,
        told,
        SMALL,
        others=others,
        settings=OffloadSettings(**({"poison": True} | settings)),
    )
    return twin, offload


class Lanes(SynchronousCopyEngine):
    """A device whose copies are done as late as waits allow, or as early, by the dice.

    Each lane is a queue. A copy is done when computing waits for it, after all before it in its
    lane; or at once, after all before it. Like a device it knows addresses, not owners: memory that
    was let go before its copy was done is a fault, and is listed.
    """

    def __init__(self, dice, late=0.7):
        super().__init__()
        self.dice = dice
        self.late = late
        self.queues = {lane: [] for lane in CopyStream}
        self.done = dict.fromkeys(CopyStream, 0)
        self.faults = []
        self.overtaken = 0
        """Copies that were not done when the next was asked for: there must be some."""

    def copy(self, target, source, poison, lane=CopyStream.WEIGHTS):
        queue = self.queues[lane]
        self.overtaken += self.done[lane] < len(queue)
        if poison:
            target.fill_(POISON)
        queue.append((Address(target), Address(source)))
        if self.dice.random() > self.late:
            self.run(lane, len(queue))
        return Ticket(self, lane, len(queue))

    def run(self, lane, until):
        for target, source in self.queues[lane][self.done[lane] : until]:
            to, come = target.memory(), source.memory()
            if to is None or come is None:
                self.faults.append(f"{lane.value}: {'source' if come is None else 'target'} gone")
            else:
                to[: len(come)].copy_(come)
        self.done[lane] = max(self.done[lane], until)

    def finish(self):
        """As a device does when it is waited for."""
        for lane, queue in self.queues.items():
            self.run(lane, len(queue))


class Ticket:
    def __init__(self, mover, lane, place):
        self.mover, self.lane, self.place = mover, lane, place

    def wait(self, ahead):
        self.mover.run(self.lane, self.place)


class Address:
    """Bytes that are not owned: none when their owners let go."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.offset, self.nbytes = tensor.storage_offset(), len(tensor)

    def memory(self):
        if self.storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.offset, (self.nbytes,), (1,))
