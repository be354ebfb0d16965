"""Models without weights as a run prepares them; and of no size, to measure a host by."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.plan.known_models import PUBLISHED, SHAPES, SampleShape
from gracetune.plan.outlines import outline
from gracetune.train.place import compute_faster
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.plan.outlines import Outline

STAND_IN = "wan22"
"""For a family whose shape nobody has published."""
EDGE, TOKENS, RANK = 64, 8, 2
"""Of a model of no size: pixels of its picture, tokens of text, its LoRA."""
ROOMY = {"attention_head_dim": 128, "axes_dims_rope": (16, 56, 56), "ffn_dim": 1024}
ROOMY_EDGE, ROOMY_TOKENS = 1024, 3072
"""Of one whose tensors have a MiB or more, and heads as models have them: torch's allocator and its
kernels treat smaller ones differently, and a host is quicker with those."""
ROOMY_NBYTES = 2 * GIB
"""What must be free to measure by such models: the largest, Qwen-Image's, take 1.3 GiB for weights
and for what they save."""


def prepare(shape: Outline, section: AdapterSection) -> None:
    """Give a model an adapter, and make both run as in a run."""
    with next(shape.model.parameters()).device:
        add_adapter({"": shape.model}, section, shape.shape.targets, seed=0)
    compute_faster(shape.model)


def narrow(family: str, has_adapter: bool, is_roomy: bool = False) -> Outline:
    """The family's model with hardly any numbers, as it is or as a run has it.

    A roomy one is for a GPU that has the room; a CPU would compute for seconds.
    """
    name = family if family in PUBLISHED else STAND_IN
    changes = SHAPES[PUBLISHED[name].class_name].narrow
    edge, tokens = EDGE, TOKENS
    if is_roomy and changes:  # what is small as it is stays so
        changes = {key: ROOMY.get(key, value) for key, value in changes.items()}
        edge, tokens = ROOMY_EDGE, ROOMY_TOKENS
    with torch.random.fork_rng(devices=[]):  # a run that is about to start draws as if it were not
        shape = outline(ModelSection(family=name), SampleShape(edge, edge), changes, "cpu")
        if has_adapter:
            prepare(shape, AdapterSection(rank=RANK))
    text = tokens, shape.encoded.text_shape[1]
    return replace(shape, encoded=replace(shape.encoded, text_shape=text))
