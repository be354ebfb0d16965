"""How one sample becomes pixels beyond the size of its bucket; its name is part of cache keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import ImageOps

from gracetune.data import augment
from gracetune.data.audio import decode_audio
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
from gracetune.data.video import decode_video
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from gracetune.config.schema import DatasetSection
    from gracetune.data.decoders import Decoders, Lanczos
    from gracetune.data.sample import Sample, Shape, Size

STEPS = 1024
"""A random crop or clip begins at one of so many places, so that its name is exact."""
TOP = (0.5, 0.0)


@dataclass(frozen=True, slots=True)
class SampleTransform:
    """The crop, the draw of augmentations, and how exactly a file is decoded."""

    crop: tuple[float, float] = CENTRE
    draw: augment.AugmentationDraw = augment.NOTHING
    fast: bool = False
    lanczos: Lanczos = "pillow"
    rate: float = 0.0
    """Frames a second of a video, samples a second of a sound; pictures have none."""
    clip: float = 0.0
    """The share of what is left over of a video or a sound that comes before the clip."""

    @property
    def name(self) -> str:
        """Another one wherever the pixels may differ."""
        place = "centre" if self.crop == CENTRE else f"{self.crop[0]:.10g},{self.crop[1]:.10g}"
        draw = f" {self.draw.name}" if self.draw.steps else ""
        clip = f" {self.rate:.10g} a second from {self.clip:.10g}" if self.rate else ""
        by = "" if self.lanczos == "pillow" else f"{self.lanczos}-"
        return f"cover-{by}lanczos-{place}{' reduced' if self.fast else ''}{draw}{clip}"


PLAIN = SampleTransform()


def demand_augmentable(section: DatasetSection, index: int) -> None:
    """Warps and colours are changes of pictures."""
    if section.augmentations and section.dataset_type != "image":
        raise ConfigError(
            f"datasets[{index}].augmentations has {len(section.augmentations)} entries; a data set "
            f"of dataset_type {section.dataset_type!r} cannot be augmented. Leave them out."
        )


def recipe_of(
    section: DatasetSection,
    sample: Sample,
    seed: int,
    generation: int = 0,
    lanczos: Lanczos = "pillow",
) -> SampleTransform:
    """What the run file says for this sample; the same for equal bytes, whatever their name."""
    about = f"{seed} {sample.digest} {generation}"
    match section.crop:
        case "center":
            crop = CENTRE
        case "top":
            crop = TOP
        case "random":
            crop = (_step(f"crop {about} x"), _step(f"crop {about} y"))
    return SampleTransform(
        crop,
        augment.draw_augmentations(section, seed, sample.digest, generation),
        section.decode == "fast",
        lanczos,
        _rate(section, sample),
        _clip(section, about),
    )


def _step(what: str) -> float:
    return int(uniform(what) * (STEPS + 1)) / STEPS


def _rate(section: DatasetSection, sample: Sample) -> float:
    match section.dataset_type:
        case "image":
            return 0.0
        case "video":
            return section.fps or sample.fps
        case "audio":
            return float(section.sample_rate)


def _clip(section: DatasetSection, about: str) -> float:
    if section.dataset_type == "image":
        return 0.0
    match section.clip:
        case "start":
            return 0.0
        case "center":
            return 0.5
        case "random":
            return _step(f"clip {about}")


def render(data: bytes, recipe: SampleTransform, size: Size, decoders: Decoders = PILLOW) -> Tensor:
    """A picture of the bucket's size: CHW in [-1, 1]."""
    if recipe.lanczos == "torch" and not recipe.draw.steps:
        pixels = decode_pixels(data, decoders, size if recipe.fast else WHOLE)
        return fit_pixels(pixels, *size, recipe.crop)
    return _fitted(_changed(data, recipe, size, decoders, "image"), recipe, size)


def render_control(
    data: bytes, recipe: SampleTransform, size: Size, decoders: Decoders = PILLOW
) -> Tensor:
    """The control of a picture: the same crop and warp, no change of its colours."""
    return _fitted(_changed(data, recipe, size, decoders, "control"), recipe, size)


def render_mask(
    data: bytes,
    recipe: SampleTransform,
    size: Size,
    decoders: Decoders = PILLOW,
    inverted: bool = False,
) -> Tensor:
    """The mask of a picture: 1HW in [0, 1], the same crop and warp; 1 is learnt."""
    import torch

    mask = _changed(data, recipe, size, decoders, "inverted mask" if inverted else "mask")
    if recipe.lanczos == "torch":
        mask = mask.crop(whole_box(mask.size, size, recipe.crop))
    fitted = np.array(cover(mask, *size, recipe.crop))
    return torch.from_numpy(fitted).unsqueeze(0).float().div_(255)


def render_video(data: bytes, recipe: SampleTransform, shape: Shape) -> Tensor:
    """A clip of the bucket's width, height and frames: CFHW in [-1, 1]."""
    width, height, frames = shape
    return decode_video(
        data, (width, height), frames, recipe.rate, recipe.clip, recipe.crop, recipe.lanczos
    )


def render_sound(data: bytes, recipe: SampleTransform, shape: Shape) -> Tensor:
    """A clip of the bucket's channels and length: CN."""
    channels, length = shape
    return decode_audio(data, channels, length, round(recipe.rate), recipe.clip)


def _fitted(image: Image.Image, recipe: SampleTransform, size: Size) -> Tensor:
    if recipe.lanczos == "torch":
        return fit_pixels(np.array(image), *size, recipe.crop)
    return fit(image, *size, recipe.crop)


def _changed(
    data: bytes,
    recipe: SampleTransform,
    size: Size,
    decoders: Decoders,
    kind: Literal["image", "control", "mask", "inverted mask"],
) -> Image.Image:
    # A crop or a turn takes a part of the picture, so reducing it first could blur the result.
    whole = not recipe.fast or bool(recipe.draw.steps)
    # A mask is drawn white on nothing: white paper would leave nothing of it to see.
    paper = "black" if kind in ("mask", "inverted mask") else "white"
    image = decode(data, decoders, WHOLE if whole else size, paper)
    if kind in ("image", "control"):
        return augment.apply(recipe.draw, image, kind)
    # Before the warp: what is erased is black in a mask, whichever way round the file is.
    mask = ImageOps.invert(image.convert("L")) if kind == "inverted mask" else image.convert("L")
    return augment.apply(recipe.draw, mask, "mask")
