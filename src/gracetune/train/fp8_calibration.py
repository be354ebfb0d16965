"""Convert the frozen linear layers to fp8, calibrated with the run's own samples.

The model runs once over a few training samples, at timesteps that it is trained on, while each
frozen layer records its inputs. From these `adapters/compute/outlier_subspace.py` finds the
directions in which the inputs are large; the layer computes those in bf16 and the rest in fp8. The
samples are always the first ones of the run, so that a resumed run computes the same numbers. With
several ranks, rank 0 calibrates, and the others convert their layers with its result.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.compute.fp8_linear import (
    BlockCalibration,
    calibration_of,
    convert_to_fp8_calibrated,
    convert_to_fp8_like,
)
from gracetune.data.batch_order import NO_EPOCH
from gracetune.distributed.ranks import SINGLE
from gracetune.events.types import Notice
from gracetune.models.context_parallel import whole_sequences
from gracetune.models.family import EXPERTS, Experts, bind_expert
from gracetune.offload.host_weights import load_resident_weights, select_streamed_weights
from gracetune.train import objective
from gracetune.train.step import PositionalRng
from gracetune.train.timesteps import (
    FULL_WINDOW,
    expert_windows,
    sample_timesteps,
    scheduled_timesteps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.config.schema import RunFile
    from gracetune.data.batch_order import BatchOrder, Draw
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.types import Event
    from gracetune.models.family import Expert, Family

    Emit = Callable[[Event], None]

MAX_SAMPLES, MAX_TOKENS = 64, 16384
"""Largest number of samples and of tokens in the calibration batch; it has one sample at least."""


def convert_frozen_layers(
    run: RunFile,
    family: Family,
    pipeline: DataPipeline,
    device: torch.device,
    emit: Emit,
    ranks: RankGroup = SINGLE,
) -> None:
    """Convert every frozen linear layer to fp8 if a kernel supports it. Call before fusing LoRA.

    All `ranks` must call this at the same time, and get layers with the same bits.
    """
    blocks = family.blocks()
    streamed = select_streamed_weights(family.transformer, blocks)
    load_resident_weights(family.transformer, streamed, device)
    if ranks.is_main:
        _calibrate(run, family, pipeline, device, emit)
        for block in blocks if ranks.world_size > 1 else ():
            ranks.broadcast(calibration_of(block))
    else:
        calibrations = (ranks.broadcast(BlockCalibration((), {})) for _ in blocks)
        convert_to_fp8_like(calibrations, blocks, device)


def _calibrate(
    run: RunFile, family: Family, pipeline: DataPipeline, device: torch.device, emit: Emit
) -> None:
    experts = EXPERTS if isinstance(family.transformer, Experts) else (None,)
    tried: list[int] = []

    def run_model() -> None:
        """Run each transformer once on the calibration batch; if memory is short, on one sample."""
        for count in (calibration_batch_size(family, pipeline), 1):
            batch = pipeline.load(first_draws(pipeline.order, count))
            tried.append(len(batch))
            try:
                with whole_sequences(family):  # only rank 0 calibrates
                    for expert in experts:
                        forward_once(run, family, batch, expert, device)
            except torch.OutOfMemoryError:  # layers that have run keep what they recorded
                text = f"fp8 calibration: {len(batch)} samples at once do not fit on the device"
                emit(Notice(text, level="warning", fallback=True))
                continue
            return

    result = convert_to_fp8_calibrated(run_model, family.blocks(), device)
    calibrated = result.converted - result.uncalibrated
    emit(
        Notice(
            f"fp8: {result.converted} frozen layers converted, {calibrated} of them calibrated "
            f"with {' or '.join(map(str, tried))} samples"
        )
    )
    if result.uncalibrated:
        text = (
            f"fp8: {result.uncalibrated} layers were not calibrated because no input reached them; "
            "they compute entirely in fp8"
        )
        emit(Notice(text, level="warning", fallback=True))
    if result.skipped:
        text = f"fp8: {result.skipped} frozen layers stay in bf16: no fp8 kernel fits their sizes"
        emit(Notice(text, level="warning", fallback=True))


def calibration_batch_size(family: Family, pipeline: DataPipeline) -> int:
    """Return the size of the calibration batch, within `MAX_SAMPLES` and `MAX_TOKENS`."""
    one = pipeline.load(first_draws(pipeline.order, 1))
    x0, _ = family.split_encoded(one.latents)
    return max(1, min(MAX_SAMPLES, MAX_TOKENS // family.num_tokens(x0.shape[1:])))


def first_draws(order: BatchOrder, count: int) -> tuple[Draw, ...]:
    """Return the first `count` samples of the run that have the same size, with their captions.

    Unlike in training, no caption is dropped at random. The epoch of each draw is removed, because
    loading a draw of an epoch can start the encoding of new random crops.
    """
    draws: list[Draw] = []
    for index in itertools.takewhile(lambda each: order.epoch_at(each) == 0, itertools.count()):
        draws += (draw for draw in order.batch_at(index) if not draws or draw.size == draws[0].size)
        if len(draws) >= count:
            break
    return tuple(
        replace(draw, epoch=NO_EPOCH, caption=draw.sample.caption) for draw in draws[:count]
    )


def forward_once(
    run: RunFile, family: Family, batch: Batch, expert: Expert | None, device: torch.device
) -> None:
    """Run one forward pass as in training.

    `expert` is the transformer to run, `high` or `low` noise, for Wan 2.2; timesteps are drawn from
    its range.
    """
    x0, given = family.split_encoded(batch.latents)
    generator = PositionalRng(run.seed, device).at("rounding", expert or "alone")
    window = FULL_WINDOW
    if expert is not None and family.boundary is not None:
        window = expert_windows(family.boundary)[expert]
    tokens = family.num_tokens(x0.shape[1:])
    positions = sample_timesteps(run.train, len(batch), generator, window, tokens)
    timesteps = scheduled_timesteps(positions, family.noise_schedule)
    noise = torch.randn(x0.shape, generator=generator, device=device)
    noisy = objective.add_noise(x0, noise, timesteps, family.prediction)
    conditions = {**batch.text, **given}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, torch.bfloat16):
        family.predict(bind_expert(family.transformer, expert), noisy, timesteps, conditions)
