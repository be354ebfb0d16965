"""How far the run is: pictures of fixed prompts, and the loss on held-out samples."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image

from gracetune.durable import new_folder
from gracetune.errors import CheckpointError
from gracetune.events.types import Validated
from gracetune.models.sampling import euler
from gracetune.train.draws import seed_of
from gracetune.train.grid import grid
from gracetune.train.step import losses_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.config.schema import ValidationSection
    from gracetune.data.sample import Batch
    from gracetune.train.step import Trainee


@dataclass(frozen=True, slots=True)
class Validation:
    """What is pictured and measured, the same at every step."""

    section: ValidationSection
    folder: Path
    prompts: tuple[str, ...]
    text: Mapping[str, Tensor]
    empty: Mapping[str, Tensor]
    size: tuple[int, int]
    """Width and height of the pictures."""
    held_out: Sequence[Batch]


def validate(t: Trainee, validation: Validation, step: int) -> Validated:
    """Sample and measure, with the averaged weights where there are any."""
    started = time.monotonic()
    was_training = t.transformer.training
    t.transformer.eval()
    with torch.no_grad(), t.ema.in_place() if t.ema is not None else nullcontext():
        losses = held_out_loss(t, validation.held_out)
        pictures = sample(t, validation)
    t.transformer.train(was_training)
    sheet = _write(validation, pictures, step) if t.accelerator.is_main_process else None
    return Validated(
        step=step,
        grid=None if sheet is None else str(sheet),
        prompts=validation.prompts,
        losses=losses,
        seconds=time.monotonic() - started,
    )


def sample(t: Trainee, validation: Validation) -> list[Image.Image]:
    """One picture a prompt; picture i always starts from the noise of seed + i."""
    section, device = validation.section, t.accelerator.device
    shape = t.family.latent_shape(*validation.size)
    noise = torch.stack(
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(section.seed + i))
            for i in range(len(validation.prompts))
        ]
    ).to(device)

    def predict(x: Tensor, s: Tensor, text: Mapping[str, Tensor]) -> Tensor:
        with t.accelerator.autocast():
            return t.family.predict(t.family.transformer, x, s, text).float()

    latents = euler(
        predict,
        noise,
        validation.text,
        validation.empty,
        steps=section.sample_steps,
        guidance=section.guidance,
    )
    pixels = t.family.decode(latents).clamp(-1, 1).add(1).mul(127.5).round().byte()
    return [Image.fromarray(x.permute(1, 2, 0).cpu().numpy()) for x in pixels]


def held_out_loss(t: Trainee, batches: Sequence[Batch]) -> dict[str, float]:
    """The mean loss over evenly spread levels, with noise that never changes."""
    if not batches:
        return {}
    total = sum(len(batch) for batch in batches)
    loss, seen = torch.zeros((), device=t.accelerator.device), 0
    for index, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed_of("held out", index))
        noise = torch.randn(batch.latents.shape, generator=generator).to(batch.latents)
        levels = (torch.arange(seen, seen + len(batch)) + 0.5) / total
        loss += losses_at(t, batch, levels.to(noise), noise).sum()
        seen += len(batch)
    return {"held_out": float(loss / total)}


def _write(validation: Validation, pictures: Sequence[Image.Image], step: int) -> Path:
    """Each picture by itself, with the prompts beside them, and all on one sheet."""
    sheet = validation.folder / f"step-{step:06d}.png"
    try:
        with new_folder(validation.folder / f"step-{step:06d}") as folder:
            for index, picture in enumerate(pictures):
                picture.save(folder / f"{index:03d}.png")
            (folder / "prompts.json").write_text(json.dumps(validation.prompts, indent=2))
        grid(pictures, validation.prompts, f"step {step}").save(sheet)
    except OSError as error:
        raise CheckpointError(f"the pictures {sheet} cannot be written: {error}") from error
    return sheet
