"""Crop, augment and render samples to the tensors that are encoded.

A `SampleTransform` says how one sample is rendered: crop position, drawn augmentations, decoder and
clip position. Its `name` is part of cache keys, so it differs wherever the pixels may differ. Draws
are pure functions of seed, content digest and augmentation epoch: any process can repeat the draw
of one sample.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from blake3 import blake3
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from gracetune.data.audio import decode_audio
from gracetune.data.images import (
    CENTRE_CROP,
    FULL_SIZE,
    PILLOW,
    cover,
    crop_box,
    decode,
    decode_pixels,
    fit,
    fit_pixels,
)
from gracetune.data.loader import seeded_uniform
from gracetune.data.video import decode_video
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gracetune.config.schema import AugmentationSection, DatasetSection
    from gracetune.data.images import Decoders, Lanczos
    from gracetune.data.sample import Sample, Shape, Size


Role = Literal["image", "mask", "control"]
Parameters = dict[str, float]

VERSION = 1
"""Part of cache keys; raised whenever the same parameters would give other pixels."""
NO_CHANGE = "as it is"


class Step(NamedTuple):
    """One applied augmentation with its drawn parameters."""

    name: str
    numbers: Parameters


@dataclass(frozen=True, slots=True)
class AugmentationDraw:
    """The augmentations of one sample in one augmentation epoch."""

    steps: tuple[Step, ...] = ()

    @property
    def name(self) -> str:
        """Short name that differs for other parameters; part of cache keys."""
        if not self.steps:
            return NO_CHANGE
        text = json.dumps([VERSION, *self.steps], sort_keys=True)
        return "augmented " + blake3(text.encode()).hexdigest(length=12)

    def as_json(self) -> list[dict[str, object]]:
        """Return the draw as JSON, for reports and manifests."""
        return [{"name": step.name, **step.numbers} for step in self.steps]

    @classmethod
    def from_json(cls, steps: list[dict[str, object]]) -> AugmentationDraw:
        """Read a draw written by `as_json`."""
        return cls(
            tuple(
                Step(str(step["name"]), {k: float(str(v)) for k, v in step.items() if k != "name"})
                for step in steps
            )
        )


NO_AUGMENTATIONS = AugmentationDraw()


class Augmentation(NamedTuple):
    """One kind of augmentation. Only geometric ones change masks and control images."""

    amount: float | None
    """Default strength; None for augmentations without a strength, such as flips."""
    max_amount: float
    draw: Callable[[float, Callable[[str], float]], Parameters]
    apply: Callable[[Image.Image, Parameters, Role], Image.Image]


def draw_augmentations(
    section: DatasetSection, seed: int, sample_digest: str, generation: int
) -> AugmentationDraw:
    """Draw the augmentations of one sample for one augmentation epoch."""
    steps = []
    for place, one in enumerate(section.augmentations):
        change, amount = (
            AUGMENTATIONS[one.name],
            _amount(one, f"{section.id!r}: augmentations[{place}]"),
        )
        about = f"augment {seed} {sample_digest} {generation} {place} {one.name}"
        if seeded_uniform(f"{about} at all") < one.probability:
            numbers = change.draw(amount, partial(_uniform, about))
            steps.append(Step(one.name, {key: round(x, 6) for key, x in numbers.items()}))
    return AugmentationDraw(tuple(steps))


def apply(draw: AugmentationDraw, image: Image.Image, kind: Role = "image") -> Image.Image:
    """Apply a draw to an image, mask or control image; masks are resampled without blending."""
    for name, numbers in draw.steps:
        image = AUGMENTATIONS[name].apply(image, numbers, kind)
    return image


def _uniform(about: str, what: str) -> float:
    return seeded_uniform(f"{about} {what}")


def _amount(one: AugmentationSection, where: str) -> float:
    change = AUGMENTATIONS[one.name]
    if change.amount is None:
        if one.amount is not None:
            raise ConfigError(
                f"dataset {where}.amount is {one.amount:g}, but {one.name} has no strength. "
                "Remove amount, and set probability."
            )
        return 0.0
    amount = change.amount if one.amount is None else one.amount
    if amount > change.max_amount:
        raise ConfigError(
            f"dataset {where}.amount is {amount:g}; the largest value for {one.name} is "
            f"{change.max_amount:g}. Lower it."
        )
    return amount


def _no_parameters(amount: float, chance: Callable[[str], float]) -> Parameters:  # noqa: ARG001
    return {}


def _symmetric(key: str) -> Callable[[float, Callable[[str], float]], Parameters]:
    return lambda amount, chance: {key: amount * (2 * chance(key) - 1)}


def _positive(key: str) -> Callable[[float, Callable[[str], float]], Parameters]:
    return lambda amount, chance: {key: amount * chance(key)}


def _draw_crop(amount: float, chance: Callable[[str], float]) -> Parameters:
    return {"cut": amount * chance("cut"), "left": chance("left"), "top": chance("top")}


def _draw_erase(amount: float, chance: Callable[[str], float]) -> Parameters:
    """Draw a box of up to `amount` of the area with an aspect ratio between 1:2 and 2:1."""
    edge, stretch = math.sqrt(amount * chance("area")), 2 ** (chance("aspect") - 0.5)
    width, height = min(1.0, edge * stretch), min(1.0, edge / stretch)
    left, top = chance("left") * (1 - width), chance("top") * (1 - height)
    return {"left": left, "top": top, "width": width, "height": height}


def _crop(image: Image.Image, numbers: Parameters, kind: Role) -> Image.Image:  # noqa: ARG001
    width, height = (max(1, round(edge * (1 - numbers["cut"]))) for edge in image.size)
    left = round((image.width - width) * numbers["left"])
    top = round((image.height - height) * numbers["top"])
    return image.crop((left, top, left + width, top + height))


def _rotate(image: Image.Image, numbers: Parameters, kind: Role) -> Image.Image:
    """Rotate counterclockwise about the centre, and zoom in until no corner is empty."""
    angle = math.radians(-numbers["degrees"])
    width, height = image.size
    grow = abs(math.cos(angle)) + abs(math.sin(angle)) * max(width / height, height / width)
    cos, sin = math.cos(angle) / grow, math.sin(angle) / grow
    x, y = width / 2, height / 2
    inverse = (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)
    how = Image.Resampling.NEAREST if kind == "mask" else Image.Resampling.BICUBIC
    return image.transform(image.size, Image.Transform.AFFINE, inverse, how)


def _enhance(
    enhancer: type[ImageEnhance.Brightness | ImageEnhance.Contrast | ImageEnhance.Color],
) -> Callable[[Image.Image, Parameters], Image.Image]:
    return lambda image, numbers: enhancer(image).enhance(1 + numbers["change"])


def _hue(image: Image.Image, numbers: Parameters) -> Image.Image:
    hsv = np.array(image.convert("HSV"))
    hsv[..., 0] += np.uint8(round(numbers["degrees"] / 360 * 256) % 256)
    return Image.fromarray(hsv, "HSV").convert("RGB")


def _blur(image: Image.Image, numbers: Parameters) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(numbers["radius"] * min(image.size)))


def _erase(image: Image.Image, numbers: Parameters, kind: Role) -> Image.Image:
    """Fill the box with grey in the image and black in the mask, so that it is not trained on."""
    if kind == "control":
        return image
    left, top = round(numbers["left"] * image.width), round(numbers["top"] * image.height)
    width, height = (
        round(numbers["width"] * image.width),
        round(numbers["height"] * image.height),
    )
    erased = image.copy()
    fill = 0 if kind == "mask" else 127
    erased.paste(
        fill if image.mode == "L" else (fill,) * 3, (left, top, left + width, top + height)
    )
    return erased


def _image_only(
    change: Callable[[Image.Image, Parameters], Image.Image],
) -> Callable[[Image.Image, Parameters, Role], Image.Image]:
    return lambda image, numbers, kind: change(image, numbers) if kind == "image" else image


AUGMENTATIONS: Mapping[str, Augmentation] = {
    "flip": Augmentation(None, 0, _no_parameters, lambda image, _, __: ImageOps.mirror(image)),
    "vertical_flip": Augmentation(
        None, 0, _no_parameters, lambda image, _, __: ImageOps.flip(image)
    ),
    "crop": Augmentation(0.2, 0.9, _draw_crop, _crop),
    "rotate": Augmentation(5.0, 45.0, _symmetric("degrees"), _rotate),
    "brightness": Augmentation(
        0.1, 1.0, _symmetric("change"), _image_only(_enhance(ImageEnhance.Brightness))
    ),
    "contrast": Augmentation(
        0.1, 1.0, _symmetric("change"), _image_only(_enhance(ImageEnhance.Contrast))
    ),
    "saturation": Augmentation(
        0.1, 1.0, _symmetric("change"), _image_only(_enhance(ImageEnhance.Color))
    ),
    "hue": Augmentation(10.0, 180.0, _symmetric("degrees"), _image_only(_hue)),
    "blur": Augmentation(0.002, 0.1, _positive("radius"), _image_only(_blur)),
    "grayscale": Augmentation(
        None, 0, _no_parameters, _image_only(lambda image, _: image.convert("L").convert("RGB"))
    ),
    "erase": Augmentation(0.1, 0.5, _draw_erase, _erase),
}
"""Augmentations by their names in the run file."""


# ------------------------------------------------------------------------------------------
# How one sample becomes pixels beyond the size of its bucket; its name is part of cache keys.


NUM_CROP_POSITIONS = 1024
"""Number of positions of a random crop or clip; discrete, so that cache keys are exact."""
TOP_CROP = (0.5, 0.0)


@dataclass(frozen=True, slots=True)
class SampleTransform:
    """How one sample is rendered: crop, augmentations, decoder and clip."""

    crop: tuple[float, float] = CENTRE_CROP
    draw: AugmentationDraw = NO_AUGMENTATIONS
    fast: bool = False
    lanczos: Lanczos = "pillow"
    rate: float = 0.0
    """Frames per second of a video or samples per second of audio; 0 for images."""
    clip: float = 0.0
    """Position of the clip in a video or audio file: 0 is the start, 1 the end."""

    @property
    def name(self) -> str:
        """Name that differs wherever the pixels may differ; part of cache keys."""
        place = "centre" if self.crop == CENTRE_CROP else f"{self.crop[0]:.10g},{self.crop[1]:.10g}"
        draw = f" {self.draw.name}" if self.draw.steps else ""
        clip = f" {self.rate:.10g} a second from {self.clip:.10g}" if self.rate else ""
        by = "" if self.lanczos == "pillow" else f"{self.lanczos}-"
        return f"cover-{by}lanczos-{place}{' reduced' if self.fast else ''}{draw}{clip}"


DEFAULT_TRANSFORM = SampleTransform()


def check_augmentable(section: DatasetSection, index: int) -> None:
    """Raise an error if a video or audio dataset asks for augmentations."""
    if section.augmentations and section.dataset_type != "image":
        raise ConfigError(
            f"datasets[{index}].augmentations has {len(section.augmentations)} entries; a "
            f"dataset of dataset_type {section.dataset_type!r} cannot be augmented. Remove them."
        )


def sample_transform(
    section: DatasetSection,
    sample: Sample,
    seed: int,
    generation: int = 0,
    lanczos: Lanczos = "pillow",
) -> SampleTransform:
    """Return the transform of a sample; files with equal bytes get equal transforms."""
    about = f"{seed} {sample.digest} {generation}"
    match section.crop:
        case "center":
            crop = CENTRE_CROP
        case "top":
            crop = TOP_CROP
        case "random":
            crop = (_step(f"crop {about} x"), _step(f"crop {about} y"))
    return SampleTransform(
        crop,
        draw_augmentations(section, seed, sample.digest, generation),
        section.decode == "fast",
        lanczos,
        _rate(section, sample),
        _clip(section, about),
    )


def _step(what: str) -> float:
    return int(seeded_uniform(what) * (NUM_CROP_POSITIONS + 1)) / NUM_CROP_POSITIONS


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
    """Render an image at the bucket's size: CHW in [-1, 1]."""
    if recipe.lanczos == "torch" and not recipe.draw.steps:
        pixels = decode_pixels(data, decoders, size if recipe.fast else FULL_SIZE)
        return fit_pixels(pixels, *size, recipe.crop)
    return _fit(_decode_and_augment(data, recipe, size, decoders, "image"), recipe, size)


def render_control(
    data: bytes, recipe: SampleTransform, size: Size, decoders: Decoders = PILLOW
) -> Tensor:
    """Render a control image: same crop and geometry as its sample, unchanged colours."""
    return _fit(_decode_and_augment(data, recipe, size, decoders, "control"), recipe, size)


def render_mask(
    data: bytes,
    recipe: SampleTransform,
    size: Size,
    decoders: Decoders = PILLOW,
    inverted: bool = False,
) -> Tensor:
    """Render a mask as 1HW in [0, 1] with its sample's crop and geometry; 1 is trained on."""
    import torch

    mask = _decode_and_augment(
        data, recipe, size, decoders, "inverted mask" if inverted else "mask"
    )
    if recipe.lanczos == "torch":
        mask = mask.crop(crop_box(mask.size, size, recipe.crop))
    fitted = np.array(cover(mask, *size, recipe.crop))
    return torch.from_numpy(fitted).unsqueeze(0).float().div_(255)


def render_video(data: bytes, recipe: SampleTransform, shape: Shape) -> Tensor:
    """Render a video clip of the bucket's width, height and frames: CFHW in [-1, 1]."""
    width, height, frames = shape
    return decode_video(
        data, (width, height), frames, recipe.rate, recipe.clip, recipe.crop, recipe.lanczos
    )


def render_audio(data: bytes, recipe: SampleTransform, shape: Shape) -> Tensor:
    """Render an audio clip of the bucket's channels and length: CN."""
    channels, length = shape
    return decode_audio(data, channels, length, round(recipe.rate), recipe.clip)


def _fit(image: Image.Image, recipe: SampleTransform, size: Size) -> Tensor:
    if recipe.lanczos == "torch":
        return fit_pixels(np.array(image), *size, recipe.crop)
    return fit(image, *size, recipe.crop)


def _decode_and_augment(
    data: bytes,
    recipe: SampleTransform,
    size: Size,
    decoders: Decoders,
    kind: Literal["image", "control", "mask", "inverted mask"],
) -> Image.Image:
    # A crop or rotation uses a part of the image: decoding at reduced size could blur the result.
    whole = not recipe.fast or bool(recipe.draw.steps)
    # A mask may be white on transparent: a white background would erase it.
    background = "black" if kind in ("mask", "inverted mask") else "white"
    image = decode(data, decoders, FULL_SIZE if whole else size, background)
    if kind in ("image", "control"):
        return apply(recipe.draw, image, kind)
    # Invert before augmenting: erased boxes must be black in the mask in either polarity.
    mask = ImageOps.invert(image.convert("L")) if kind == "inverted mask" else image.convert("L")
    return apply(recipe.draw, mask, "mask")
