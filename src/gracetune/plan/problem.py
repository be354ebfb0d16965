"""The planner in one call, for a model on meta or one that is loaded."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.config.schema import PlanSection
from gracetune.errors import ConfigError
from gracetune.models.family import SampleShape, transformers_of
from gracetune.optim.registry import optimizer_info
from gracetune.plan.cost import CostModel
from gracetune.plan.machines import FITTED_CONSTANTS, effective_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.search import Constraints, compare_with_run_file, find_best_plan
from gracetune.plan.trace import TraceTarget, trace_model
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gracetune.config.schema import CacheSection, DatasetSection, RunFile
    from gracetune.models.family import Family
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.result import FrozenCompute
    from gracetune.plan.search import PlanBudget, SearchResult
    from gracetune.plan.shapes import ModelShapes


TRACED_BATCH = 2
"""Of one sample, some operations would be views that are none for two."""


def build_cost_model(
    subject: TraceTarget,
    basics: MachineRates,
    frozen_compute: FrozenCompute = "bf16",
    stored_share: float = 1.0,
    plain_checkpointing: bool = False,
) -> CostModel:
    """A model on a machine, ready to be asked; `stored_share` is what quantised weights take."""
    shapes = trace_model(subject, TRACED_BATCH)
    return CostModel(
        shapes, effective_rates(basics), frozen_compute, stored_share, plain_checkpointing
    )


def make_plan(
    subject: TraceTarget,
    basics: MachineRates,
    fixed: FixedMemory,
    budget: PlanBudget,
    wishes: Constraints,
    *,
    frozen_compute: FrozenCompute = "bf16",
    stored_share: float = 1.0,
    simulated: bool = False,
) -> SearchResult:
    """Trace the model and choose how to run it, beside how it would run as written."""
    model = build_cost_model(subject, basics, frozen_compute, stored_share)
    planned = find_best_plan(model, fixed, budget, wishes, simulated)
    return compare_with_run_file(planned, model, fixed, budget, wishes)


def family_trace_target(
    family: Family, latent_shape: Sequence[int], text: Mapping[str, Tensor]
) -> TraceTarget:
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
        noisy, given = family.split_encoded(batch["encoded"])
        conditions = {name: batch[name] for name in text} | given
        return family.predict(called, noisy, batch["levels"], conditions)

    return TraceTarget(family.name, model, blocks, inputs, predict, _products(model))


def _products(model: nn.Module) -> torch.dtype | None:
    """What a run computes in: the type of most of what is frozen; none where nothing is.

    A few tables of a model in bf16 may be kept in fp32, and may come first.
    """
    numels: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            numels[parameter.dtype] += parameter.numel()
    return max(numels, key=lambda dtype: numels[dtype]) if numels else None


# ------------------------------------------------------------------------------------------
# From a run file to what the planner is asked: the sample, what is open, what is fixed.


HOT_SHARE = 64
"""The trainer's default for texts that stay on the device: one part of so many of its memory."""
MASTER_NBYTES = 4
"""Of each trained number: a copy in fp32 that updates are added to."""
STATE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the optimizer's state, what may live in host memory where nobody has said."""
QUANTIZED_SHARES = {"none": 1.0, "fp8": 0.5, "int8": 0.5, "nf4": 0.2656}
"""Of bf16 weights, what quantised ones take: nf4 has a scale for every 64 numbers."""


def plan_settings(run: RunFile) -> PlanSection:
    """The section, also where the run file only says `auto` or `off`."""
    return run.plan if isinstance(run.plan, PlanSection) else PlanSection()


def largest_sample(run: RunFile) -> SampleShape:
    """The largest sample of the run: a plan that fits it fits all buckets."""
    if not run.datasets:
        raise ConfigError(
            "datasets is empty, so nobody knows how large a sample is. Name one with a resolution."
        )
    return max(map(_picture, run.datasets), key=lambda p: p.width * p.height * p.frames)


def _picture(section: DatasetSection) -> SampleShape:
    frames = 1
    if section.dataset_type == "video":
        frames = section.frames if isinstance(section.frames, int) else max(section.frames)
    edge = section.shapes.size if section.type == "shapes" else section.resolution
    width = edge
    if section.resolution_type == "edge":  # the longer edge of the widest bucket
        width = int(edge * section.max_aspect)
    return SampleShape(width, edge, frames)


def constraints_of(run: RunFile) -> Constraints:
    """What the run file leaves to the planner."""
    settings = plan_settings(run)
    batch = run.train.batch_size
    ramp = run.gh200_optimizations
    samples = batch * run.train.gradient_accumulation_steps
    if ramp.enable_batch_size_rampup and ramp.target_effective_batch_size is not None:
        samples = max(batch, ramp.target_effective_batch_size // batch * batch)
    choices = {"auto": (True, False), "always": (True,), "never": (False,)}
    return Constraints(
        samples=samples,
        batches=None if settings.batch == "auto" else (batch,),
        compile=choices[settings.compile],
        stream=settings.stream and run.adapter is not None,  # what is trained cannot stream
        offload=settings.offload,
        host_state=_host_state(run),
        run_file_batch=batch,
    )


def _host_state(run: RunFile) -> tuple[float, ...]:
    """Shares of the optimizer's state to try in host memory; an adapter's is too small to ask."""
    if run.optimizer.state == "host":
        return (1.0,)
    whole = run.adapter is None or run.adapter.kind == "full"
    can_split = optimizer_info(run.optimizer.name).state_can_be_split
    if run.optimizer.state == "auto" and whole and can_split:
        return STATE_SHARES
    return (0.0,)


@dataclass(frozen=True, slots=True)
class TrainedSize:
    """What one expert trains."""

    nbytes: int
    state_nbytes: int
    """What the optimizer keeps for it."""
    state_slots_nbytes: int = 0
    """What that passes through on the device, where it lives in host memory."""


def fixed_memory_of(
    run: RunFile, outline: MetaModel, trained: TrainedSize, samples: int | None, device_nbytes: int
) -> FixedMemory:
    """What the run takes whatever is chosen; of a data set, as far as its size is known."""
    latents, text = cached_sample_nbytes(outline)
    cache = run.cache_config
    asked = cache.device_budget_gb
    texts = sys.maxsize if samples is None else samples * text
    fixed = FixedMemory(
        optimizer_nbytes=outline.experts * trained.state_nbytes,
        experts=outline.experts,
        device_caches_nbytes=0 if asked is None else min(texts, int(asked * GIB)),
        text_nbytes=texts,
        text_part=HOT_SHARE if asked is None else 0,
        host_caches_nbytes=_in_host(cache, latents, text, samples),
        library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
        state_slots_nbytes=trained.state_slots_nbytes,
        averages_nbytes=outline.experts * trained.nbytes if run.train.ema_decay else 0,
    )
    return fixed.for_budget(device_nbytes)


def cached_sample_nbytes(outline: MetaModel) -> tuple[int, int]:
    """Of one encoded sample: its latents, and its text with padding."""
    itemsize = outline.dtype.itemsize
    return itemsize * prod(outline.encoded.latent_shape), itemsize * prod(
        outline.encoded.text_shape
    )


def _in_host(cache: CacheSection, latents: int, text: int, samples: int | None) -> int:
    if samples is None:
        return 0
    kept = (latents if cache.vae_cache_type != "disk" else 0) + (
        text if cache.text_cache_type != "disk" else 0
    )
    limit = samples * kept
    return limit if cache.host_budget_gb is None else min(limit, int(cache.host_budget_gb * GIB))


# ------------------------------------------------------------------------------------------
# The memory of a training run, item by item: what a planner counts, for those who plan by hand.


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One item."""

    item: str
    nbytes: int

    def __str__(self) -> str:
        return f"| {self.item} | {format_bytes(self.nbytes)} |"


def memory_table(
    outline: MetaModel, shapes: ModelShapes, trained: TrainedSize, samples: int
) -> Iterator[MemoryRow]:
    """Of a data set of so many samples, and of a step with one of them."""
    latents, text = cached_sample_nbytes(outline)
    experts = outline.experts
    both = " of both experts" if experts == 2 else ""
    yield MemoryRow(f"latents of {samples} samples", samples * latents)
    yield MemoryRow(
        f"text of {samples} samples, padded (stored without padding: less)", samples * text
    )
    yield MemoryRow(f"frozen weights{both}", experts * shapes.frozen_nbytes)
    yield MemoryRow(f"adapters{both}", experts * trained.nbytes)
    yield MemoryRow(f"adapters{both}, copied for products", experts * shapes.cast_copies_nbytes)
    yield MemoryRow("gradients of one step", trained.nbytes)
    yield MemoryRow(f"optimizer state{both}", experts * trained.state_nbytes)
    blocks = shapes.blocks
    for name, ways in (
        ("recomputed, compiled", [block.compiled.recompute for block in blocks]),
        ("kept lean, compiled", [block.compiled.lean for block in blocks]),
        ("kept, compiled", [block.compiled.keep for block in blocks]),
        ("kept, eager", [block.eager.keep for block in blocks]),
    ):
        held = sum(
            way.saved_nbytes + (block.input_nbytes if way.saves_input else 0)
            for way, block in zip(ways, blocks, strict=True)
        )
        yield MemoryRow(f"activations of one sample, {name}", held // shapes.batch)
