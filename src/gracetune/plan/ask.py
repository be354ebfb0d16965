"""From a run file to what the planner is asked: the sample, what is open, what is fixed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from gracetune.config.rules import why_whole
from gracetune.config.schema import PlanSection
from gracetune.errors import ConfigError
from gracetune.plan.candidates import Constraints
from gracetune.plan.known_models import SampleShape
from gracetune.plan.peak import Fixed
from gracetune.plan.rates import FITTED
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.config.schema import CacheSection, DatasetSection, RunFile
    from gracetune.plan.outlines import Outline

HOT_SHARE = 64
"""The trainer's default for texts that stay on the device: one part of so many of its memory."""
MASTER_NBYTES = 4
"""Of each trained number: a copy in fp32 that updates are added to."""
STATE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the optimizer's state, what may live in host memory where nobody has said."""
STORED_SHARES = {"none": 1.0, "fp8": 0.5, "int8": 0.5, "nf4": 0.2656}
"""Of bf16 weights, what quantised ones take: nf4 has a scale for every 64 numbers."""


def settings_of(run: RunFile) -> PlanSection:
    """The section, also where the run file only says `auto` or `off`."""
    return run.plan if isinstance(run.plan, PlanSection) else PlanSection()


def picture_of(run: RunFile) -> SampleShape:
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


def wishes_of(run: RunFile) -> Constraints:
    """What the run file leaves to the planner."""
    settings = settings_of(run)
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
        written=batch,
    )


def _host_state(run: RunFile) -> tuple[float, ...]:
    """Shares of the optimizer's state to try in host memory; an adapter's is too small to ask."""
    if run.optimizer.state == "host":
        return (1.0,)
    whole = run.adapter is None or run.adapter.kind == "full"
    if run.optimizer.state == "auto" and whole and not why_whole(run.optimizer.name):
        return STATE_SHARES
    return (0.0,)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one expert trains."""

    nbytes: int
    state_nbytes: int
    """What the optimizer keeps for it."""
    state_slots_nbytes: int = 0
    """What that passes through on the device, where it lives in host memory."""


def fixed_of(
    run: RunFile, outline: Outline, trained: Trained, samples: int | None, device_nbytes: int
) -> Fixed:
    """What the run takes whatever is chosen; of a data set, as far as its size is known."""
    latents, text = cache_nbytes(outline)
    cache = run.cache_config
    asked = cache.device_budget_gb
    texts = sys.maxsize if samples is None else samples * text
    fixed = Fixed(
        optimizer_nbytes=outline.experts * trained.state_nbytes,
        experts=outline.experts,
        device_caches_nbytes=0 if asked is None else min(texts, int(asked * GIB)),
        text_nbytes=texts,
        text_part=HOT_SHARE if asked is None else 0,
        host_caches_nbytes=_in_host(cache, latents, text, samples),
        library_nbytes=int(FITTED["library_nbytes"].value),
        state_slots_nbytes=trained.state_slots_nbytes,
        averages_nbytes=outline.experts * trained.nbytes if run.train.ema_decay else 0,
    )
    return fixed.within(device_nbytes)


def cache_nbytes(outline: Outline) -> tuple[int, int]:
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
