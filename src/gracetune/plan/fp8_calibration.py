"""Frozen products in fp8, with the main directions of what the run's own data bring to them.

One pass of the model, over a few samples at levels that are trained on, shows every layer its
inputs; `adapters/directions.py` says what that is good for. The samples are always the first of the
run, so that a resumed run computes as it did before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.compute.fp8_linear import convert_to_fp8_calibrated
from gracetune.data.loader import NO_EPOCH
from gracetune.events.types import Notice
from gracetune.models.family import EXPERTS, Experts, bind_expert
from gracetune.offload.host_weights import select_streamed_weights, load_resident_weights
from gracetune.train import objective
from gracetune.train.step import PositionalRng
from gracetune.train.timesteps import FULL_WINDOW, expert_windows, sample_timesteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.config.schema import RunFile
    from gracetune.data.loader import BatchOrder, Draw
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.events.types import Event
    from gracetune.models.family import Expert, Family

    Emit = Callable[[Event], None]

SAMPLES, TOKENS = 64, 16384
"""That a model is shown at most; one sample in any case."""


def freeze(
    run: RunFile, family: Family, feed: DataPipeline, device: torch.device, emit: Emit
) -> None:
    """Frozen products in fp8, as many as there are kernels for; call it before LoRAs are fused."""
    experts = EXPERTS if isinstance(family.transformer, Experts) else (None,)
    blocks = family.blocks()
    load_resident_weights(family.transformer, select_streamed_weights(family.transformer, blocks), device)
    shown: list[int] = []

    def show_all() -> None:
        for count in (room_for(family, feed), 1):
            batch = feed.load(first_draws(feed.order, count))
            shown.append(len(batch))
            try:
                for expert in experts:
                    show(run, family, batch, expert, device)
            except torch.OutOfMemoryError:  # blocks that had their turn keep what they have seen
                text = f"the device has no room to show the model {len(batch)} samples at once"
                emit(Notice(text, level="warning", fallback=True))
                continue
            return

    frozen = convert_to_fp8_calibrated(show_all, blocks, device)
    emit(
        Notice(
            f"{frozen.converted} frozen products are computed in fp8; {frozen.converted - frozen.uncalibrated} of "
            f"them along main directions in bf16, found in {' or '.join(map(str, shown))} samples"
        )
    )
    if frozen.uncalibrated:
        text = f"{frozen.uncalibrated} frozen products have no main directions: none were found"
        emit(Notice(text, level="warning", fallback=True))
    if frozen.skipped:
        text = f"{frozen.skipped} frozen products are not in fp8: their sides fit no kernel"
        emit(Notice(text, level="warning", fallback=True))


def room_for(family: Family, feed: DataPipeline) -> int:
    """How many of the first samples are shown."""
    one = feed.load(first_draws(feed.order, 1))
    x0, _ = family.split_encoded(one.latents)
    return max(1, min(SAMPLES, TOKENS // family.num_tokens(x0.shape[1:])))


def first_draws(order: BatchOrder, count: int) -> tuple[Draw, ...]:
    """Of the first epoch, all of the first one's size, none without its caption; without the epoch,
    since looking enters none.
    """
    draws: list[Draw] = []
    for index in range(order.epoch_length):
        draws += (draw for draw in order.batch_at(index) if not draws or draw.size == draws[0].size)
        if len(draws) >= count:
            break
    return tuple(
        replace(draw, epoch=NO_EPOCH, caption=draw.sample.caption) for draw in draws[:count]
    )


def show(
    run: RunFile, family: Family, batch: Batch, expert: Expert | None, device: torch.device
) -> None:
    """One pass, as in training, at levels of this expert's."""
    x0, given = family.split_encoded(batch.latents)
    generator = PositionalRng(run.seed, device).at("rounding", expert or "alone")
    window = FULL_WINDOW
    if expert is not None and family.boundary is not None:
        window = expert_windows(family.boundary)[expert]
    tokens = family.num_tokens(x0.shape[1:])
    levels = sample_timesteps(run.train, len(batch), generator, window, tokens)
    noise = torch.randn(x0.shape, generator=generator, device=device)
    noisy = objective.add_noise(x0, noise, levels, family.prediction)
    conditions = {**batch.text, **given}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, torch.bfloat16):
        family.predict(bind_expert(family.transformer, expert), noisy, levels, conditions)
