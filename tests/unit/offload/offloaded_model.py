"""Models whose blocks are kept, recomputed, offloaded and streamed in any mix, and slow copies."""

import copy

import torch
from streamed_model import run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.checkpointing import wrap_blocks
from gracetune.offload.copy_engine import POISON, CopyStream, SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

MIN_NBYTES = 64
"""The models are tiny, and nearly all tensors they save are larger than this."""
MODES = ["keep", "recompute", "offload", "inputs", "inside"]
"""The last two: recomputed by a checkpoint around or in the block, with its input offloaded."""


class MixedModel:
    """A copy of a model in which every block has its own mode; called like the model."""

    def __init__(self, model, modes, streamed, recorder, copy_engine=None, **settings):
        self.model = copy.deepcopy(model)
        self.modes = modes
        copy_engine = copy_engine or SynchronousCopyEngine()
        blocks = list(self.model.blocks)
        self.ring = None
        if streamed:
            streamed_blocks = [blocks[k] for k in streamed]
            self.ring = stream_weights(
                self.model, streamed_blocks, copy_engine, recorder, 2, poison=True
            )
        self.offload = None
        by_mode = {
            mode: [b for b, m in zip(blocks, modes, strict=True) if m == mode] for mode in MODES
        }
        wrap_blocks(by_mode["inside"], ["recompute"] * len(by_mode["inside"]), None, self.ring)
        if {"offload", "inputs", "inside"} & set(modes):
            self.offload = offload_activations(
                by_mode["offload"],
                copy_engine,
                self.ring,
                recorder,
                MIN_NBYTES,
                checkpointed_blocks=by_mode["inside"],
                other_blocks=by_mode["keep"] + by_mode["recompute"] + by_mode["inputs"],
                settings=OffloadSettings(**({"poison": True} | settings)),
            )
        self.model.groups = lambda order: [
            (blocks[k], modes[k]) for k in (range(len(blocks)) if order is None else order)
        ]
        self.model.forward = self.forward

    def forward(self, x, order=None):
        model = self.model
        x = model.inside(x)
        for block, mode in model.groups(order):
            if mode == "recompute":
                x = checkpoint(block, x, shift=0.1, use_reentrant=False)
            elif mode == "inputs":
                x = self.offload.checkpoint(block, x, shift=0.1)
            else:
                x = run(x, [block])
        return model.outside(x)


def offloaded(model, recorder, block_indices=None, copy_engine=None, **settings):
    """Return a copy of a model, and the offload of some of its blocks."""
    twin = copy.deepcopy(model)
    blocks = list(twin.blocks)
    chosen = blocks if block_indices is None else [blocks[k] for k in block_indices]
    offload = offload_activations(
        chosen,
        copy_engine or SynchronousCopyEngine(),
        None,
        recorder,
        MIN_NBYTES,
        other_blocks=[block for block in blocks if block not in chosen],
        settings=OffloadSettings(**({"poison": True} | settings)),
    )
    return twin, offload


class RandomDelayEngine(SynchronousCopyEngine):
    """Executes copies at random: immediately, or as late as the waits allow.

    Each stream is a queue. A delayed copy is executed when it or a later copy of its stream is
    waited for or executed immediately. Like a GPU this engine knows addresses, not owners: if
    memory was freed before its copy was executed, that is listed in `faults`.
    """

    def __init__(self, rng, late=0.7):
        super().__init__()
        self.rng = rng
        self.late = late
        self.queues = {stream: [] for stream in CopyStream}
        self.num_executed = dict.fromkeys(CopyStream, 0)
        self.faults = []
        self.overtaken = 0
        """Copies still pending when the next one was requested. A useful test has some."""

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        queue = self.queues[stream]
        self.overtaken += self.num_executed[stream] < len(queue)
        if poison:
            target.fill_(POISON)
        queue.append((Address(target), Address(source)))
        if self.rng.random() > self.late:
            self.execute(stream, len(queue))
        return QueuedCopy(self, stream, len(queue))

    def execute(self, stream, until):
        for target_address, source_address in self.queues[stream][
            self.num_executed[stream] : until
        ]:
            target, source = target_address.memory(), source_address.memory()
            if target is None or source is None:
                freed = "source" if source is None else "target"
                self.faults.append(f"{stream.value}: {freed} was freed")
            else:
                target[: len(source)].copy_(source)
        self.num_executed[stream] = max(self.num_executed[stream], until)

    def finish(self):
        """Execute all pending copies, as a device synchronization does."""
        for stream, queue in self.queues.items():
            self.execute(stream, len(queue))


class QueuedCopy:
    def __init__(self, engine, stream, position):
        self.engine, self.stream, self.position = engine, stream, position

    def wait(self, prefetched):
        self.engine.execute(self.stream, self.position)


class Address:
    """Bytes that are not owned: `memory` is None once their owners are gone."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.offset, self.nbytes = tensor.storage_offset(), len(tensor)

    def memory(self):
        if self.storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.offset, (self.nbytes,), (1,))
