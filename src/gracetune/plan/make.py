"""The planner in one call, for a model on meta or one that is loaded."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.models.experts import transformers_of
from gracetune.plan.calls import Subject
from gracetune.plan.choose import choose, compared
from gracetune.plan.cost import CostModel
from gracetune.plan.rates import speeds_of
from gracetune.plan.trace import trace_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.models.family import Family
    from gracetune.plan.candidates import Constraints, PlanBudget
    from gracetune.plan.choose import Planned
    from gracetune.plan.peak import Fixed
    from gracetune.plan.rates import Basics
    from gracetune.plan.result import FrozenCompute

TRACED_BATCH = 2
"""Of one sample, some operations would be views that are none for two."""


def traced(
    subject: Subject,
    basics: Basics,
    frozen_compute: FrozenCompute = "bf16",
    stored_share: float = 1.0,
    plain_checkpointing: bool = False,
) -> CostModel:
    """A model on a machine, ready to be asked; `stored_share` is what quantised weights take."""
    shapes = trace_model(subject, TRACED_BATCH)
    return CostModel(shapes, speeds_of(basics), frozen_compute, stored_share, plain_checkpointing)


def make_plan(
    subject: Subject,
    basics: Basics,
    fixed: Fixed,
    budget: PlanBudget,
    wishes: Constraints,
    *,
    frozen_compute: FrozenCompute = "bf16",
    stored_share: float = 1.0,
    simulated: bool = False,
) -> Planned:
    """Trace the model and choose how to run it, beside how it would run as written."""
    model = traced(subject, basics, frozen_compute, stored_share)
    planned = choose(model, fixed, budget, wishes, simulated)
    return compared(planned, model, fixed, budget, wishes)


def family_subject(
    family: Family, latent_shape: Sequence[int], text: Mapping[str, Tensor]
) -> Subject:
    """A loaded family with its adapter in place, for the tracer; of two experts, a trained one.

    `latent_shape` is of one encoded sample, `text` a batch of any size as `stack_text` makes it.
    """
    transformers = transformers_of(family.transformer)
    number = next(
        (
            n
            for n, t in enumerate(transformers.values())
            if any(p.requires_grad for p in t.parameters())
        ),
        0,
    )
    model = list(transformers.values())[number]
    size = len(family.blocks()) // len(transformers)
    blocks = family.blocks()[number * size : (number + 1) * size]

    def inputs(batch: int) -> dict[str, Tensor]:
        texts = {
            name: torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype)
            for name, tensor in text.items()
        }
        return {"encoded": torch.empty(batch, *latent_shape), "levels": torch.empty(batch), **texts}

    def predict(called: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        noisy, given = family.parts(batch["encoded"])
        conditions = {name: batch[name] for name in text} | given
        return family.predict(called, noisy, batch["levels"], conditions)

    return Subject(family.name, model, blocks, inputs, predict, _products(model))


def _products(model: nn.Module) -> torch.dtype | None:
    """What a run computes in: the type of most of what is frozen; none where nothing is.

    A few tables of a model in bf16 may be kept in fp32, and may come first.
    """
    numels: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            numels[parameter.dtype] += parameter.numel()
    return max(numels, key=lambda dtype: numels[dtype]) if numels else None
