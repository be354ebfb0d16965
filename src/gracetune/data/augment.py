"""Decode, augment, crop and resize samples to the tensors that the VAE encodes.

A `SampleTransform` describes how one sample is rendered: crop position, random augmentations,
decoder and clip position. Its `name` is part of cache keys, so transforms that may give different
pixels have different names.

Random choices depend only on the run's seed, the digest of the sample's file and the number of the
epoch. Any process can therefore repeat them.
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
from gracetune.data.batch_order import seeded_uniform
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
    to_tensor,
)
from gracetune.data.video import decode_video
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gracetune.config.dataset_schema import AugmentationSection, DatasetSection
    from gracetune.data.images import Decoders, Lanczos
    from gracetune.data.sample import Sample, Shape, Size


Role = Literal["image", "mask", "control"]
Parameters = dict[str, float]

VERSION = 1
"""Version of the augmentation code, part of cache keys. It must be raised with every change that
gives other pixels for the same parameters."""
NO_CHANGE = "as it is"


class Step(NamedTuple):
    """One augmentation of a sample with its random parameters, such as the angle of a rotation."""

    name: str
    numbers: Parameters


@dataclass(frozen=True, slots=True)
class AugmentationDraw:
    """The randomly drawn augmentations of one sample, in the order in which they are applied."""

    steps: tuple[Step, ...] = ()

    @property
    def name(self) -> str:
        """Digest of the augmentations and their parameters, for cache keys."""
        if not self.steps:
            return NO_CHANGE
        text = json.dumps([VERSION, *self.steps], sort_keys=True)
        return "augmented " + blake3(text.encode()).hexdigest(length=12)

    def as_json(self) -> list[dict[str, object]]:
        """Return the augmentations as a JSON-serialisable list, for reports and manifests."""
        return [{"name": step.name, **step.numbers} for step in self.steps]


NO_AUGMENTATIONS = AugmentationDraw()


class Augmentation(NamedTuple):
    """One kind of augmentation, such as `rotate`: how its parameters are drawn and applied.

    Flips, crops and rotations also change masks and control images; `erase` also changes masks.
    """

    amount: float | None
    """Default of the setting `augmentations[].amount`, the largest change that is drawn, such as
    degrees of rotation; None for augmentations without an amount, like flips."""
    max_amount: float
    """Largest value that the run file may set as `augmentations[].amount`."""
    draw: Callable[[float, Callable[[str], float]], Parameters]
    """Function (amount, random) -> parameters. `random(name)` returns a number in [0, 1)."""
    apply: Callable[[Image.Image, Parameters, Role], Image.Image]
    """Function (image, parameters, role) -> changed image. The role says whether the image is a
    sample, a mask or a control image."""


def draw_augmentations(
    section: DatasetSection, seed: int, sample_digest: str, epoch: int
) -> AugmentationDraw:
    """Choose the random augmentations of one sample.

    The result depends only on the arguments. Another `epoch` gives other augmentations.
    """
    steps = []
    for place, one in enumerate(section.augmentations):
        change, amount = (
            AUGMENTATIONS[one.name],
            _amount(one, f"{section.id!r}: augmentations[{place}]"),
        )
        about = f"augment {seed} {sample_digest} {epoch} {place} {one.name}"
        if seeded_uniform(f"{about} at all") < one.probability:
            numbers = change.draw(amount, partial(_uniform, about))
            steps.append(Step(one.name, {key: round(x, 6) for key, x in numbers.items()}))
    return AugmentationDraw(tuple(steps))


def apply(draw: AugmentationDraw, image: Image.Image, kind: Role = "image") -> Image.Image:
    """Apply the drawn augmentations to a sample, its mask or its control image.

    Masks are rotated with nearest-neighbour sampling, so that they keep their values.
    """
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
    """Choose a random box to erase, as fractions of the image's width and height.

    It covers up to `amount` of the area and has an aspect ratio between 1:2 and 2:1, relative to
    that of the image.
    """
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
    """Rotate an image counterclockwise about its centre, and enlarge it to fill the corners."""
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
    """Fill a box with grey in a sample, or with black in its mask, which excludes it from training.

    Control images are not changed.
    """
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


# Transforms of whole samples


NUM_CROP_POSITIONS = 1024
"""A random crop or clip position is a multiple of 1/NUM_CROP_POSITIONS, so that its decimal text in
a cache key is exact."""
TOP_CROP = (0.5, 0.0)


@dataclass(frozen=True, slots=True)
class SampleTransform:
    """Everything besides the target size that decides how a sample is rendered to a tensor: crop,
    augmentations, decoder and clip position.
    """

    crop: tuple[float, float] = CENTRE_CROP
    """Position of the crop, horizontally and vertically: 0 keeps the left or top, 1 the right or
    bottom."""
    draw: AugmentationDraw = NO_AUGMENTATIONS
    """Random augmentations to apply."""
    fast: bool = False
    """Decode large JPEG files at reduced size (`decode: fast` in the run file)."""
    lanczos: Lanczos = "pillow"
    """Library that resizes images. Pillow and torch give slightly different pixels."""
    rate: float = 0.0
    """Rate that the clip is converted to: frames per second of a video, or samples per second of
    audio; 0 for images."""
    clip: float = 0.0
    """Position of the clip in a video or audio file: 0 for the first seconds, 1 for the last."""

    @property
    def name(self) -> str:
        """Text that identifies the transform in cache keys."""
        place = "centre" if self.crop == CENTRE_CROP else f"{self.crop[0]:.10g},{self.crop[1]:.10g}"
        draw = f" {self.draw.name}" if self.draw.steps else ""
        clip = f" {self.rate:.10g} a second from {self.clip:.10g}" if self.rate else ""
        by = "" if self.lanczos == "pillow" else f"{self.lanczos}-"
        return f"cover-{by}lanczos-{place}{' reduced' if self.fast else ''}{draw}{clip}"


DEFAULT_TRANSFORM = SampleTransform()


def check_augmentable(section: DatasetSection, index: int) -> None:
    """Raise an error if a video or audio dataset has augmentations, which only images support."""
    if section.augmentations and section.dataset_type != "image":
        raise ConfigError(
            f"datasets[{index}].augmentations has {len(section.augmentations)} entries; a "
            f"dataset of dataset_type {section.dataset_type!r} cannot be augmented. Remove them."
        )


def sample_transform(
    section: DatasetSection,
    sample: Sample,
    seed: int,
    epoch: int = 0,
    lanczos: Lanczos = "pillow",
) -> SampleTransform:
    """Return how to render a sample (crop, augmentations, clip) by its dataset's settings.

    The random choices depend only on the run's `seed`, the bytes of the file and the `epoch`.
    """
    about = f"{seed} {sample.digest} {epoch}"
    match section.crop:
        case "center":
            crop = CENTRE_CROP
        case "top":
            crop = TOP_CROP
        case "random":
            crop = (_step(f"crop {about} x"), _step(f"crop {about} y"))
    return SampleTransform(
        crop,
        draw_augmentations(section, seed, sample.digest, epoch),
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


def render(
    data: bytes, transform: SampleTransform, size: Size, decoders: Decoders = PILLOW
) -> Tensor:
    """Decode, augment, crop and resize an image to a CHW tensor in [-1, 1] of the given size."""
    if transform.lanczos == "torch" and not transform.draw.steps:
        pixels = decode_pixels(data, decoders, size if transform.fast else FULL_SIZE)
        return fit_pixels(pixels, *size, transform.crop)
    return _fit(_decode_and_augment(data, transform, size, decoders, "image"), transform, size)


def render_control(
    data: bytes,
    transform: SampleTransform,
    size: Size,
    control_size: Size,
    decoders: Decoders = PILLOW,
) -> Tensor:
    """Render a control image with the crop, flips and rotation of its sample, as CHW in [-1, 1].

    It is cropped to the aspect ratio of the sample's `size` and then resized to `control_size`,
    always with Pillow, as diffusers' pipelines do. Its colours are not augmented.
    """
    image = _decode_and_augment(data, transform, control_size, decoders, "control")
    part = image.crop(crop_box(image.size, size, transform.crop))
    return to_tensor(part.resize(control_size, Image.Resampling.LANCZOS))


def render_mask(
    data: bytes,
    transform: SampleTransform,
    size: Size,
    decoders: Decoders = PILLOW,
    inverted: bool = False,
) -> Tensor:
    """Render a mask with the crop, flips and rotation of its sample, as a 1HW tensor in [0, 1].

    Pixels with the value 1 are trained on. `inverted` exchanges black and white.
    """
    import torch

    mask = _decode_and_augment(
        data, transform, size, decoders, "inverted mask" if inverted else "mask"
    )
    if transform.lanczos == "torch":
        mask = mask.crop(crop_box(mask.size, size, transform.crop))
    fitted = np.array(cover(mask, *size, transform.crop))
    return torch.from_numpy(fitted).unsqueeze(0).float().div_(255)


def render_video(data: bytes, transform: SampleTransform, shape: Shape) -> Tensor:
    """Decode, crop and resize a video clip to a tensor with the layout CFHW, in [-1, 1].

    `shape` is the (width, height, frames) of the clip's bucket.
    """
    width, height, frames = shape
    return decode_video(
        data,
        (width, height),
        frames,
        transform.rate,
        transform.clip,
        transform.crop,
        transform.lanczos,
    )


def render_audio(data: bytes, transform: SampleTransform, shape: Shape) -> Tensor:
    """Decode an audio clip to a tensor with the layout CN: channels, audio samples.

    `shape` is the (channels, length) of the clip's bucket.
    """
    channels, length = shape
    return decode_audio(data, channels, length, round(transform.rate), transform.clip)


def _fit(image: Image.Image, transform: SampleTransform, size: Size) -> Tensor:
    if transform.lanczos == "torch":
        return fit_pixels(np.array(image), *size, transform.crop)
    return fit(image, *size, transform.crop)


def _decode_and_augment(
    data: bytes,
    transform: SampleTransform,
    size: Size,
    decoders: Decoders,
    kind: Literal["image", "control", "mask", "inverted mask"],
) -> Image.Image:
    # A crop or rotation uses a part of the image: decoding at reduced size could blur the result.
    whole = not transform.fast or bool(transform.draw.steps)
    # A mask may be white on transparent: a white background would erase it.
    background = "black" if kind in ("mask", "inverted mask") else "white"
    image = decode(data, decoders, FULL_SIZE if whole else size, background)
    if kind in ("image", "control"):
        return apply(transform.draw, image, kind)
    # Invert before augmenting: erased boxes must be black in the mask in either polarity.
    mask = ImageOps.invert(image.convert("L")) if kind == "inverted mask" else image.convert("L")
    return apply(transform.draw, mask, "mask")
