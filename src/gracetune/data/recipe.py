"""How one sample becomes pixels beyond the size of its bucket; its name is part of cache keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gracetune.data import augment
from gracetune.data.decoders import PILLOW
from gracetune.data.images import (
    CENTRE,
    WHOLE,
    cover,
    decode,
    decode_pixels,
    fit,
    fit_pixels,
    whole_box,
)
from gracetune.data.randomness import uniform
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from gracetune.config.schema import DatasetSection
    from gracetune.data.decoders import Decoders, Lanczos
    from gracetune.data.sample import Sample, Size

STEPS = 1024
"""A random crop lies on one of so many places along each edge, so that its name is exact."""
TOP = (0.5, 0.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The crop, the draw of augmentations, and how exactly a file is decoded."""

    crop: tuple[float, float] = CENTRE
    draw: augment.AugmentationDraw = augment.NOTHING
    fast: bool = False
    lanczos: Lanczos = "pillow"

    @property
    def name(self) -> str:
        """Another one wherever the pixels may differ."""
        place = "centre" if self.crop == CENTRE else f"{self.crop[0]:.10g},{self.crop[1]:.10g}"
        draw = f" {self.draw.name}" if self.draw.steps else ""
        by = "" if self.lanczos == "pillow" else f"{self.lanczos}-"
        return f"cover-{by}lanczos-{place}{' reduced' if self.fast else ''}{draw}"


PLAIN = Recipe()


def demand_known_mode(section: DatasetSection, index: int) -> None:
    """Augmentations meet the latent cache in one way so far: drawn once."""
    mode = section.augmentations_cache_mode
    if section.augmentations and mode != "static":
        raise ConfigError(
            f"datasets[{index}].augmentations_cache_mode is {mode!r}; latents are always cached, "
            "so augmentations are drawn once a sample. Set augmentations_cache_mode: static, or "
            "leave augmentations out."
        )


def recipe_of(
    section: DatasetSection,
    sample: Sample,
    seed: int,
    generation: int = 0,
    lanczos: Lanczos = "pillow",
) -> Recipe:
    """What the run file says for this sample; the same for equal bytes, whatever their name."""
    draw = augment.draw_augmentations(section, seed, sample.digest, generation)
    match section.crop:
        case "center":
            crop = CENTRE
        case "top":
            crop = TOP
        case "random":
            about = f"crop {seed} {sample.digest} {generation}"
            across, down = (int(uniform(f"{about} {axis}") * (STEPS + 1)) for axis in "xy")
            crop = (across / STEPS, down / STEPS)
    return Recipe(crop, draw, section.decode == "fast", lanczos)


def render(data: bytes, recipe: Recipe, size: Size, decoders: Decoders = PILLOW) -> Tensor:
    """A picture of the bucket's size: CHW in [-1, 1]."""
    if recipe.lanczos == "torch" and not recipe.draw.steps:
        pixels = decode_pixels(data, decoders, size if recipe.fast else WHOLE)
        return fit_pixels(pixels, *size, recipe.crop)
    return _fitted(_changed(data, recipe, size, decoders, "image"), recipe, size)


def render_control(data: bytes, recipe: Recipe, size: Size, decoders: Decoders = PILLOW) -> Tensor:
    """The control of a picture: the same crop and warp, no change of its colours."""
    return _fitted(_changed(data, recipe, size, decoders, "control"), recipe, size)


def render_mask(data: bytes, recipe: Recipe, size: Size, decoders: Decoders = PILLOW) -> Tensor:
    """The mask of a picture: 1HW in [0, 1], the same crop and warp."""
    import torch

    mask = _changed(data, recipe, size, decoders, "mask")
    if recipe.lanczos == "torch":
        mask = mask.crop(whole_box(mask.size, size, recipe.crop))
    fitted = np.array(cover(mask, *size, recipe.crop))
    return torch.from_numpy(fitted).unsqueeze(0).float().div_(255)


def _fitted(image: Image.Image, recipe: Recipe, size: Size) -> Tensor:
    if recipe.lanczos == "torch":
        return fit_pixels(np.array(image), *size, recipe.crop)
    return fit(image, *size, recipe.crop)


def _changed(
    data: bytes, recipe: Recipe, size: Size, decoders: Decoders, kind: augment.Role
) -> Image.Image:
    # A crop or a turn takes a part of the picture, so reducing it first could blur the result.
    whole = not recipe.fast or bool(recipe.draw.steps)
    image = decode(data, decoders, WHOLE if whole else size)
    return augment.apply(recipe.draw, image.convert("L") if kind == "mask" else image, kind)
