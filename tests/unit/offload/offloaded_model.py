"""Models whose blocks are kept, recomputed, offloaded and streamed in any mix."""

import copy

from streamed_model import run
from torch.utils.checkpoint import checkpoint

from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.checkpointing import wrap_blocks
from gracetune.offload.copy_engine import SynchronousCopyEngine
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
