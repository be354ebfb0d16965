"""How far the run is: samples of fixed prompts, and the loss on held-out samples."""

from __future__ import annotations

import json
import textwrap
import time
import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from gracetune.cache.prompt_keys import EMPTY_PROMPT
from gracetune.data.augment import PLAIN, render
from gracetune.data.buckets import frame_counts, sound_lengths
from gracetune.data.pyav import load_av
from gracetune.data.sample import UnreadableSampleError
from gracetune.atomic_files import atomic_file, atomic_folder
from gracetune.errors import CheckpointError, ConfigError
from gracetune.events.types import Notice, Validated
from gracetune.models.family import SampleRequest
from gracetune.optim.schedule import averaged
from gracetune.train.step import losses_given_noise, derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.config.schema import RunFile
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch, Shape
    from gracetune.events.types import Event
    from gracetune.models.family import Family, Kind, Sampled, Sound
    from gracetune.train.step import TrainState

    Emit = Callable[[Event], None]
    from numpy.typing import NDArray


class ValidationWriteError(CheckpointError):
    """What was sampled cannot be kept."""


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """What is sampled and measured, the same at every step."""

    folder: Path
    prompts: tuple[str, ...]
    request: SampleRequest
    held_out: Sequence[Batch]

    def grid_path(self, step: int) -> Path:
        """Where all samples of a step are seen."""
        return self.folder / f"step-{step:06d}.png"


def validate(t: TrainState, validation: ValidationSetup, step: int) -> Validated:
    """Sample and measure, with the averaged weights where there are any."""
    started = time.monotonic()
    was_training = t.transformer.training
    t.transformer.eval()
    try:
        with torch.no_grad(), t.ema.swapped_in() if t.ema is not None else averaged(t.optimizer):
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
        return t.family.sample(validation.request)


def held_out_loss(t: TrainState, batches: Sequence[Batch]) -> dict[str, float]:
    """The mean loss over evenly spread levels, with noise that never changes; by expert, too."""
    if not batches:
        return {}
    total = sum(len(batch) for batch in batches)
    means: dict[str, float] = {}
    for turn in t.expert_schedule.turns():
        loss, seen = torch.zeros((), device=t.accelerator.device), 0
        for index, batch in enumerate(batches):
            x0, _ = t.family.parts(batch.latents)
            generator = torch.Generator().manual_seed(derive_seed("held out", index))
            # In fp32, as in training: latents from another tool's cache may be narrower.
            noise = torch.randn(x0.shape, generator=generator).to(x0.device)
            shares = (torch.arange(seen, seen + len(batch)) + 0.5) / total
            levels = turn.window.low + (turn.window.high - turn.window.low) * shares
            loss += losses_given_noise(t, batch, levels.to(noise), noise, turn.expert).sum()
            seen += len(batch)
        means["held_out" if turn.expert is None else f"held_out_{turn.expert}"] = float(
            loss / total
        )
    return means


def _write(validation: ValidationSetup, made: Sequence[Sampled], step: int) -> Path:
    """Each sample by itself, with the prompts beside them, and stills of all on one sheet."""
    sheet = validation.grid_path(step)
    try:
        with atomic_folder(sheet.with_suffix("")) as folder:
            stills = [write_sample(one, folder, f"{number:03d}") for number, one in enumerate(made)]
            (folder / "prompts.json").write_text(json.dumps(validation.prompts, indent=2))
        with atomic_file(sheet) as staging:
            image_grid(stills, validation.prompts, f"step {step}").save(staging, format="PNG")
    except OSError as error:
        raise ValidationWriteError(f"the samples {sheet} cannot be written: {error}.") from error
    return sheet


# ------------------------------------------------------------------------------------------
# What a run samples while it trains: prompts, shape, and pictures to start from.


VALIDATION_FOLDER = "validation"
FRAME_STEP = 4
"""Videos have 4n + 1 frames."""


def validation_enabled(run: RunFile) -> bool:
    """Whether a run ever samples: by schedule, or when asked."""
    return run.validation.every > 0 or run.validation.enable_manual_validation


def plan_sample_shape(run: RunFile, family: Family) -> Shape:
    """The shape of what is sampled; what cannot be is refused before the data take their time."""
    kind, shape = _shape(run)
    if not validation_enabled(run):
        return shape
    if kind == "video" and kind not in family.kinds:
        raise ConfigError(
            f"validation.frames is {shape[2]}; {family.name} makes no videos. Leave it out."
        )
    require_packages(kind)
    if family.sound is not None:
        _check_length(shape, family.name, family.sound)
    else:
        _check_edges(shape, family)
    if kind == "video" and shape[2] % FRAME_STEP != 1:
        raise ConfigError(
            f"validation.frames is {shape[2]}; a video has {FRAME_STEP}n + 1 frames. Set 1, 5, 9, "
            "..., 81."
        )
    _check_images(run, family)
    return shape


def build_validation(
    run: RunFile, family: Family, feed: DataPipeline, shape: Shape, emit: Emit
) -> ValidationSetup | None:
    """Encode what is sampled, once; the text encoder is not needed after."""
    if not validation_enabled(run):
        return None
    section, (kind, _) = run.validation, _shape(run)
    prompts = section.prompts
    if not prompts:
        captions = dict.fromkeys(sample.caption for sample in feed.train_samples)
        prompts = tuple(captions)[: section.num_prompts]
        emit(Notice("validation.prompts: none given; picturing " + "; ".join(map(repr, prompts))))
    images = [_read_image(path, (shape[0], shape[1])) for path in section.images or ()]
    texts, empties = _encoded(family, prompts, images)
    return ValidationSetup(
        folder=Path(run.output_dir) / VALIDATION_FOLDER,
        prompts=prompts,
        request=SampleRequest(
            texts=texts,
            empty=empties[0],
            shape=shape,
            seed=section.seed,
            steps=section.sample_steps,
            guidance=section.guidance,
            images=images,
            empties=empties if family.takes_control else (),
            tiled=feed.tiling.applies_to(shape, kind),
        ),
        held_out=[feed.load(draws) for draws in feed.held_out_draws],
    )


def _encoded(
    family: Family, prompts: Sequence[str], images: Sequence[Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Each prompt's text, and that of no caption: once, or with each picture."""
    if not family.takes_control:
        *texts, empty = map(_on_host, family.encode_text([*prompts, EMPTY_PROMPT]))
        return texts, [empty]
    both = family.encode_text([*prompts, *[EMPTY_PROMPT] * len(prompts)], [*images, *images])
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


def _check_edges(shape: Shape, family: Family) -> None:
    if any(edge % family.pixel_step or edge > family.max_edge for edge in shape[:2]):
        raise ConfigError(
            f"validation pictures of {shape[0]}x{shape[1]} do not suit {family.name}: edges are "
            f"multiples of {family.pixel_step} up to {family.max_edge}. "
            "Set validation.width and height."
        )


def _check_length(shape: Shape, name: str, sound: Sound) -> None:
    if shape[-1] > sound.max_length:
        raise ConfigError(
            f"validation.seconds asks for {shape[-1]} samples; {name} makes at most "
            f"{sound.max_length}, {sound.max_length / sound.sample_rate:.5g} seconds. Lower it."
        )


def _check_images(run: RunFile, family: Family) -> None:
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


# ------------------------------------------------------------------------------------------
# What was sampled, as files that a player opens, and as one still picture for the sheet.


CONTACT_SHEET_FRAMES = 8
"""Frames on a contact sheet."""
CONTACT_SHEET_COLUMNS = 4
WINDOW = 1024
"""Samples in one column of a spectrogram."""
FLOOR_DB = -90.0
SPECTROGRAM_SIZE = (512, 256)
COLORMAP = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], float)
"""From silent to loud."""


def require_packages(kind: Kind) -> None:
    """Say now which extra is missing, not at the first validation."""
    if kind == "video":
        load_av("video")


def write_sample(sampled: Sampled, folder: Path, name: str) -> Image.Image:
    """The file of one sample, with a still beside it where it moves or sounds; gives the still."""
    match sampled.kind:
        case "image":
            still = _picture(sampled.data)
        case "video":
            _write_mp4(sampled, folder / f"{name}.mp4")
            still = contact_sheet(sampled.data)
        case "audio":
            _write_wav(sampled, folder / f"{name}.wav")
            still = spectrogram(sampled.data)
    still.save(folder / f"{name}.png")
    return still


def contact_sheet(clip_CFHW: Tensor) -> Image.Image:  # noqa: N803
    """Frames at even distances, the first and the last among them, in reading order."""
    frames = clip_CFHW.shape[1]
    count = min(CONTACT_SHEET_FRAMES, frames)
    chosen = np.linspace(0, frames - 1, count).round().astype(int)
    pictures = [_picture(clip_CFHW[:, at]) for at in chosen]
    width, height = pictures[0].size
    columns = min(CONTACT_SHEET_COLUMNS, count)
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height))
    for place, picture in enumerate(pictures):
        sheet.paste(picture, (place % columns * width, place // columns * height))
    return sheet


def spectrogram(waves_CN: Tensor) -> Image.Image:  # noqa: N803
    """Time to the right, frequency upwards, loudness in decibels as colour; all channels mixed."""
    mono = torch.nn.functional.pad(waves_CN.float().mean(0), (WINDOW // 2, WINDOW // 2))
    window = torch.hann_window(WINDOW)
    power = torch.stft(
        mono, WINDOW, WINDOW // 4, window=window, center=False, return_complex=True
    ).abs()
    decibels = 20 * (power / window.sum() * 2).clamp_min(1e-9).log10()
    share = (1 - decibels / FLOOR_DB).clamp(0, 1).flip(0).numpy()
    at = share * (len(COLORMAP) - 1)
    low = np.minimum(at.astype(int), len(COLORMAP) - 2)
    colours = COLORMAP[low] + (at - low)[..., None] * (COLORMAP[low + 1] - COLORMAP[low])
    picture = Image.fromarray(colours.round().astype(np.uint8))
    return picture.resize(SPECTROGRAM_SIZE, Image.Resampling.BILINEAR)


def _pixels(data: Tensor) -> NDArray[np.uint8]:
    """Channels last."""
    scaled = data.float().clamp(-1, 1).add(1).mul(127.5).round().byte()
    pixels: NDArray[np.uint8] = scaled.movedim(0, -1).numpy()
    return pixels


def _picture(data_CHW: Tensor) -> Image.Image:  # noqa: N803
    return Image.fromarray(_pixels(data_CHW))


def _write_mp4(sampled: Sampled, path: Path) -> None:
    """H.264 in the colours that every player knows."""
    av = load_av("video")
    pixels = _pixels(sampled.data)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", Fraction(sampled.rate).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "16"}
        for frame in pixels:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _write_wav(sampled: Sampled, path: Path) -> None:
    samples = sampled.data.float().clamp(-1, 1).mul(32767).round().to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(round(sampled.rate))
        file.writeframes(samples.T.contiguous().numpy().astype("<i2").tobytes())


# ------------------------------------------------------------------------------------------
# Pictures on one sheet, each with its caption.


MIN_TILE = 128
"""Smaller pictures are enlarged by whole factors, so that every pixel stays visible."""
MARGIN = 6
FONT_SIZE = 12
INK, PAPER = (40, 40, 40), (250, 250, 250)


def image_grid(pictures: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """A sheet that is wider than high, in reading order."""
    factor = max(1, -(-MIN_TILE // min(pictures[0].size)))
    width, height = (edge * factor for edge in pictures[0].size)
    columns = min(len(pictures), max(1, round((len(pictures) * 2 * height / width) ** 0.5)))
    rows = -(-len(pictures) // columns)
    font = ImageFont.load_default(FONT_SIZE)
    lines = [textwrap.wrap(text, max(8, width // 7))[:3] for text in captions]
    line_height = FONT_SIZE + 3
    text_height = line_height * max([len(text) for text in lines] + [1])
    cell = (width + MARGIN, height + text_height + MARGIN)
    head = FONT_SIZE + 2 * MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + MARGIN, head + rows * cell[1] + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, font)
    for index, (picture, text) in enumerate(zip(pictures, lines, strict=True)):
        left = MARGIN + index % columns * cell[0]
        top = head + MARGIN + index // columns * cell[1]
        sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(text):
            draw.text((left, top + height + 1 + number * line_height), line, INK, font)
    return sheet
