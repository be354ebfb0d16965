"""What a run samples while it trains: prompts, shape, and pictures to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.data.buckets import frame_counts, sound_lengths
from gracetune.data.recipe import PLAIN, render
from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.models.samples import SampleRequest
from gracetune.train import media
from gracetune.train.texts import EMPTY
from gracetune.train.validate import ValidationSetup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Shape
    from gracetune.events.types import Event
    from gracetune.models.family import Family, Kind, Sound
    from gracetune.train.feed import DataPipeline

    Tell = Callable[[Event], None]

VALIDATION_FOLDER = "validation"
FRAME_STEP = 4
"""Videos have 4n + 1 frames."""


def validates(run: RunFile) -> bool:
    """Whether a run ever samples: by schedule, or when asked."""
    return run.validation.every > 0 or run.validation.enable_manual_validation


def plan_order(run: RunFile, family: Family) -> Shape:
    """The shape of what is sampled; what cannot be is refused before the data take their time."""
    kind, shape = _shape(run)
    if not validates(run):
        return shape
    if kind == "video" and kind not in family.kinds:
        raise ConfigError(
            f"validation.frames is {shape[2]}; {family.name} makes no videos. Leave it out."
        )
    media.demand_packages(kind)
    if family.sound is not None:
        _demand_length(shape, family.name, family.sound)
    else:
        _demand_edges(shape, family)
    if kind == "video" and shape[2] % FRAME_STEP != 1:
        raise ConfigError(
            f"validation.frames is {shape[2]}; a video has {FRAME_STEP}n + 1 frames. Set 1, 5, 9, "
            "..., 81."
        )
    _demand_images(run, family)
    return shape


def build_validation(
    run: RunFile, family: Family, feed: DataPipeline, shape: Shape, tell: Tell
) -> ValidationSetup | None:
    """Encode what is sampled, once; the text encoder is not needed after."""
    if not validates(run):
        return None
    section, (kind, _) = run.validation, _shape(run)
    prompts = section.prompts
    if not prompts:
        captions = dict.fromkeys(sample.caption for sample in feed.trained)
        prompts = tuple(captions)[: section.num_prompts]
        tell(Notice("validation.prompts: none given; picturing " + "; ".join(map(repr, prompts))))
    images = [_read_image(path, (shape[0], shape[1])) for path in section.images or ()]
    texts, empties = _encoded(family, prompts, images)
    return ValidationSetup(
        folder=Path(run.output_dir) / VALIDATION_FOLDER,
        prompts=prompts,
        order=SampleRequest(
            texts=texts,
            empty=empties[0],
            shape=shape,
            seed=section.seed,
            steps=section.sample_steps,
            guidance=section.guidance,
            images=images,
            empties=empties if family.takes_control else (),
            tiled=feed.tiling.of(shape, kind),
        ),
        held_out=[feed.load(draws) for draws in feed.held_out],
    )


def _encoded(
    family: Family, prompts: Sequence[str], images: Sequence[Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Each prompt's text, and that of no caption: once, or with each picture."""
    if not family.takes_control:
        *texts, empty = map(_on_host, family.encode_text([*prompts, EMPTY]))
        return texts, [empty]
    both = family.encode_text([*prompts, *[EMPTY] * len(prompts)], [*images, *images])
    on_host = [_on_host(text) for text in both]
    return on_host[: len(prompts)], on_host[len(prompts) :]


def _shape(run: RunFile) -> tuple[Kind, Shape]:
    """As the section says; what it leaves open is taken from the first data set."""
    section, data = run.validation, run.datasets[0]
    if data.dataset_type == "audio":
        length = max(sound_lengths(data))
        if section.seconds is not None:
            length = round(section.seconds * data.sample_rate)
        return "audio", (data.channels, length)
    size = (section.width or data.resolution, section.height or data.resolution)
    frames = section.frames
    if frames is None:
        frames = max(frame_counts(data)) if data.dataset_type == "video" else 1
    return ("image", size) if frames == 1 else ("video", (*size, frames))


def _demand_edges(shape: Shape, family: Family) -> None:
    if any(edge % family.pixel_step or edge > family.max_edge for edge in shape[:2]):
        raise ConfigError(
            f"validation pictures of {shape[0]}x{shape[1]} do not suit {family.name}: edges are "
            f"multiples of {family.pixel_step} up to {family.max_edge}. "
            "Set validation.width and height."
        )


def _demand_length(shape: Shape, name: str, sound: Sound) -> None:
    if shape[-1] > sound.max_length:
        raise ConfigError(
            f"validation.seconds asks for {shape[-1]} samples; {name} makes at most "
            f"{sound.max_length}, {sound.max_length / sound.sample_rate:.5g} seconds. Lower it."
        )


def _demand_images(run: RunFile, family: Family) -> None:
    prompts, images = run.validation.prompts, run.validation.images
    needed = family.starts_from == "image" or family.takes_control
    if not needed and images is not None:
        raise ConfigError(
            f"validation.images has {len(images)} files, but this {family.name} starts from the "
            "prompt alone. Leave it out."
        )
    if needed and (prompts is None or images is None or len(images) != len(prompts)):
        raise ConfigError(
            f"validation.images has {len(images or ())} files for {len(prompts or ())} prompts; "
            f"this {family.name} starts from a picture. Name as many of both, or set "
            "validation.every: 0."
        )


def _read_image(path: str, size: tuple[int, int]) -> Tensor:
    try:
        return render(Path(path).read_bytes(), PLAIN, size)
    except (OSError, UnreadableSampleError) as error:
        raise ConfigError(f"validation.images: {path!r} cannot be read: {error}") from error


def _on_host(text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.cpu() for key, tensor in text.items()}
