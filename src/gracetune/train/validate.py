"""How far the run is: samples of fixed prompts, and the loss on held-out samples."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gracetune.durable import new_file, new_folder
from gracetune.errors import CheckpointError
from gracetune.events.types import Validated
from gracetune.optim.rates import averaged
from gracetune.train import media
from gracetune.train.draws import seed_of
from gracetune.train.grid import grid
from gracetune.train.step import losses_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gracetune.data.sample import Batch
    from gracetune.models.samples import Sampled, SampleRequest
    from gracetune.train.step import TrainState


class SamplesError(CheckpointError):
    """What was sampled cannot be kept."""


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """What is sampled and measured, the same at every step."""

    folder: Path
    prompts: tuple[str, ...]
    order: SampleRequest
    held_out: Sequence[Batch]

    def sheet(self, step: int) -> Path:
        """Where all samples of a step are seen."""
        return self.folder / f"step-{step:06d}.png"


def validate(t: TrainState, validation: ValidationSetup, step: int) -> Validated:
    """Sample and measure, with the averaged weights where there are any."""
    started = time.monotonic()
    was_training = t.transformer.training
    t.transformer.eval()
    try:
        with torch.no_grad(), t.ema.in_place() if t.ema is not None else averaged(t.optimizer):
            losses = held_out_loss(t, validation.held_out)
            made = sample(t, validation)
    finally:
        t.transformer.train(was_training)
    sheet = _write(validation, made, step) if t.accelerator.is_main_process else None
    return Validated(
        step=step,
        grid=None if sheet is None else str(sheet),
        prompts=validation.prompts,
        losses=losses,
        seconds=time.monotonic() - started,
    )


def sample(t: TrainState, validation: ValidationSetup) -> list[Sampled]:
    """One a prompt, by the family's own pipeline with the weights as they are."""
    with t.accelerator.autocast():
        return t.family.sample(validation.order)


def held_out_loss(t: TrainState, batches: Sequence[Batch]) -> dict[str, float]:
    """The mean loss over evenly spread levels, with noise that never changes; by expert, too."""
    if not batches:
        return {}
    total = sum(len(batch) for batch in batches)
    means: dict[str, float] = {}
    for turn in t.turns.all():
        loss, seen = torch.zeros((), device=t.accelerator.device), 0
        for index, batch in enumerate(batches):
            x0, _ = t.family.parts(batch.latents)
            generator = torch.Generator().manual_seed(seed_of("held out", index))
            # In fp32, as in training: latents from another tool's cache may be narrower.
            noise = torch.randn(x0.shape, generator=generator).to(x0.device)
            shares = (torch.arange(seen, seen + len(batch)) + 0.5) / total
            levels = turn.window.low + (turn.window.high - turn.window.low) * shares
            loss += losses_at(t, batch, levels.to(noise), noise, turn.expert).sum()
            seen += len(batch)
        means["held_out" if turn.expert is None else f"held_out_{turn.expert}"] = float(
            loss / total
        )
    return means


def _write(validation: ValidationSetup, made: Sequence[Sampled], step: int) -> Path:
    """Each sample by itself, with the prompts beside them, and stills of all on one sheet."""
    sheet = validation.sheet(step)
    try:
        with new_folder(sheet.with_suffix("")) as folder:
            stills = [media.write(one, folder, f"{number:03d}") for number, one in enumerate(made)]
            (folder / "prompts.json").write_text(json.dumps(validation.prompts, indent=2))
        with new_file(sheet) as staging:
            grid(stills, validation.prompts, f"step {step}").save(staging, format="PNG")
    except OSError as error:
        raise SamplesError(f"the samples {sheet} cannot be written: {error}.") from error
    return sheet
