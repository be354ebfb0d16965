"""Validation: generate samples of fixed prompts and measure the loss on held-out samples.

Samples are written as files that any player opens (PNG, MP4, WAV), plus one grid of images per
validation, so that the progress of a run can be seen at a glance.
"""

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

from gracetune.atomic_files import atomic_file, atomic_folder
from gracetune.cache.encode import EMPTY_PROMPT
from gracetune.data.augment import DEFAULT_TRANSFORM, render, render_control
from gracetune.data.buckets import audio_lengths, frame_counts
from gracetune.data.images import probe
from gracetune.data.pyav import load_av
from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import CheckpointError, ConfigError
from gracetune.events.types import Notice, Validated
from gracetune.models.family import SampleRequest
from gracetune.train.experts import SINGLE_TRANSFORMER, ExpertTurn
from gracetune.train.step import derive_seed, losses_given_noise
from gracetune.train.timesteps import scheduled_timesteps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.config.schema import RunFile
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch, Shape
    from gracetune.events.dispatcher import Emit
    from gracetune.models.family import AudioFormat, Family, GeneratedSample, MediaKind
    from gracetune.train.step import TrainState


VALIDATION_FOLDER = "validation"
FRAME_STEP = 4
"""Videos have 4n + 1 frames: the VAE encodes the first frame alone and then groups of four."""


class ValidationWriteError(CheckpointError):
    """Raised when generated validation samples cannot be written to disk."""


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """The prompts and held-out samples, encoded once and used at every validation."""

    folder: Path
    prompts: tuple[str, ...]
    request: SampleRequest
    held_out: Sequence[Batch]

    def grid_path(self, step: int) -> Path:
        """Return the path of the image grid of a step."""
        return grid_path(self.folder, step)


def grid_path(folder: Path, step: int) -> Path:
    """Return the path of the image grid of a step in the folder of validation samples."""
    return folder / f"step-{step:06d}.png"


def validate(state: TrainState, validation: ValidationSetup, step: int) -> Validated:
    """Generate samples and measure the held-out loss, with averaged weights if there are any."""
    started_at = time.monotonic()
    was_training = state.transformer.training
    state.transformer.eval()
    try:
        with torch.no_grad(), state.averaged_weights():
            losses = held_out_loss(state, validation.held_out)
            samples = generate_samples(state, validation)
    finally:
        state.transformer.train(was_training)
    grid = _write(validation, samples, step) if state.accelerator.is_main_process else None
    return Validated(
        step=step,
        grid=None if grid is None else str(grid),
        prompts=validation.prompts,
        losses=losses,
        seconds=time.monotonic() - started_at,
    )


def generate_samples(state: TrainState, validation: ValidationSetup) -> list[GeneratedSample]:
    """Generate one sample for each prompt with the pipeline of the model family."""
    with state.accelerator.autocast():
        return state.family.sample(validation.request)


def held_out_loss(state: TrainState, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the mean loss on held-out samples by name: one for each trained transformer.

    Wan 2.2 has two transformers, other models one. Timesteps are spread evenly over the samples and
    the noise has a fixed seed, so that the values of different steps can be compared.
    """
    if not batches:
        return {}
    total = sum(len(batch) for batch in batches)
    turns = [SINGLE_TRANSFORMER]
    if state.expert_schedule is not None:
        turns = [ExpertTurn(*item) for item in state.expert_schedule.windows.items()]
    means: dict[str, float] = {}
    for turn in turns:
        loss, seen = torch.zeros((), device=state.accelerator.device), 0
        for index, batch in enumerate(batches):
            x0, _ = state.family.split_encoded(batch.latents)
            generator = torch.Generator().manual_seed(derive_seed("held out", index))
            # In fp32, as in training; latents imported from another tool's cache may be in bf16.
            noise = torch.randn(x0.shape, generator=generator).to(x0.device)
            shares = (torch.arange(seen, seen + len(batch)) + 0.5) / total
            positions = turn.window.low + (turn.window.high - turn.window.low) * shares
            timesteps = scheduled_timesteps(positions, state.family.noise_schedule)
            losses = losses_given_noise(state, batch, timesteps.to(noise), noise, turn.expert)
            loss += losses.sum()
            seen += len(batch)
        name = "held_out" if turn.expert is None else f"held_out_{turn.expert}"
        means[name] = float(loss / total)
    return means


def _write(validation: ValidationSetup, samples: Sequence[GeneratedSample], step: int) -> Path:
    """Write every sample, the prompts, and an image grid of all samples; return the grid's path."""
    path = validation.grid_path(step)
    try:
        with atomic_folder(path.with_suffix("")) as folder:
            images = [
                write_sample(sample, folder, f"{number:03d}")
                for number, sample in enumerate(samples)
            ]
            (folder / "prompts.json").write_text(json.dumps(validation.prompts, indent=2))
        with atomic_file(path) as staging:
            image_grid(images, validation.prompts, f"step {step}").save(staging, format="PNG")
    except OSError as error:
        raise ValidationWriteError(
            f"the samples {path} cannot be written: {error}. Free some disk space, or set "
            "validation.every: 0."
        ) from error
    return path


# Setting up


def validation_enabled(run: RunFile) -> bool:
    """Return True if the run validates, on schedule or on request."""
    return run.validation.every > 0 or run.validation.enable_manual_validation


def plan_sample_shape(run: RunFile, family: Family) -> Shape:
    """Return the shape of validation samples; raise if the family cannot generate it."""
    kind, shape = _sample_shape(run)
    if not validation_enabled(run):
        return shape
    if kind == "video" and kind not in family.kinds:
        raise ConfigError(
            f"validation.frames is {shape[2]}, but {family.name} generates no videos. Remove it."
        )
    require_packages(kind)
    if family.audio is not None:
        _check_length(shape, family.name, family.audio)
    else:
        _check_edges(shape, family)
    if kind == "video" and shape[2] % FRAME_STEP != 1:
        raise ConfigError(
            f"validation.frames is {shape[2]}, but a video must have {FRAME_STEP}n + 1 frames. "
            "Set 1, 5, 9, ..., 81."
        )
    _check_images(run, family)
    return shape


def build_validation(
    run: RunFile, family: Family, pipeline: DataPipeline, shape: Shape, emit: Emit
) -> ValidationSetup | None:
    """Encode the prompts and load the held-out samples; None if the run never validates."""
    if not validation_enabled(run):
        return None
    section, (kind, _) = run.validation, _sample_shape(run)
    prompts = section.prompts
    if not prompts:
        captions = dict.fromkeys(sample.caption for sample in pipeline.train_samples)
        prompts = tuple(captions)[: section.num_prompts]
        text = f"validation.prompts is empty: validating with the first {len(prompts)} captions, "
        emit(Notice(text + "; ".join(map(repr, prompts))))
    images: list[list[Tensor]] = []
    text_images: list[list[Tensor]] = []
    for paths in map(_image_paths, section.images or ()):
        size = (shape[0], shape[1])
        if family.takes_control:
            images.append(_read_images(paths, size, family.control_size(*size)))
            text_images.append(_read_images(paths, size, family.text_control_size(*size)))
        else:
            images.append(_read_images(paths, size))
    texts, empty_texts = _encode_prompts(family, prompts, text_images)
    return ValidationSetup(
        folder=Path(run.output_dir) / VALIDATION_FOLDER,
        prompts=prompts,
        request=SampleRequest(
            texts=texts,
            empty_text=empty_texts[0],
            shape=shape,
            seed=section.seed,
            steps=section.sample_steps,
            guidance=section.guidance,
            images=images,
            empty_texts=empty_texts if family.takes_control else (),
            tiled=pipeline.tiling.applies_to(shape, kind),
        ),
        held_out=[pipeline.load(draws) for draws in pipeline.held_out_draws],
    )


def _encode_prompts(
    family: Family, prompts: Sequence[str], images: Sequence[Sequence[Tensor]]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Encode the prompts and the empty prompt, which classifier-free guidance needs.

    If the family encodes prompts together with control images, there is one empty prompt for each
    prompt, otherwise a single one.
    """
    if not family.takes_control:
        *texts, empty = map(_to_host, family.encode_text([*prompts, EMPTY_PROMPT]))
        return texts, [empty]
    both = family.encode_text([*prompts, *[EMPTY_PROMPT] * len(prompts)], [*images, *images])
    on_host = [_to_host(text) for text in both]
    return on_host[: len(prompts)], on_host[len(prompts) :]


def _to_host(text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.cpu() for key, tensor in text.items()}


def _sample_shape(run: RunFile) -> tuple[MediaKind, Shape]:
    """Return kind (image, video or audio) and shape of the samples that a validation generates.

    They follow from the section `validation` of the run file or else from the first dataset.
    """
    section, data = run.validation, run.datasets[0]
    if data.dataset_type == "audio":
        length = max(audio_lengths(data))
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
            f"validation.width and height are {shape[0]}x{shape[1]}, but {family.name} needs "
            f"multiples of {family.pixel_step} up to {family.max_edge}. Change them."
        )


def _check_length(shape: Shape, name: str, audio: AudioFormat) -> None:
    if shape[-1] > audio.max_length:
        raise ConfigError(
            f"validation.seconds is {shape[-1] / audio.sample_rate:.5g}, but {name} generates at "
            f"most {audio.max_length / audio.sample_rate:.5g} seconds. Lower it."
        )


def _check_images(run: RunFile, family: Family) -> None:
    prompts, images = run.validation.prompts, run.validation.images
    is_required = family.starts_from == "image" or family.takes_control
    if not is_required and images is not None:
        raise ConfigError(
            f"validation.images has {len(images)} files, but this {family.name} uses prompts "
            "only. Remove it."
        )
    if is_required and (prompts is None or images is None or len(images) != len(prompts)):
        raise ConfigError(
            f"validation.images has {len(images or ())} files for {len(prompts or ())} prompts, "
            f"but this {family.name} needs an image for each prompt. Set both to the same number, "
            "or set validation.every: 0."
        )
    limit = family.max_controls if family.takes_control else 1
    for index, paths in enumerate(map(_image_paths, images or ())):
        if not 1 <= len(paths) <= limit:
            raise ConfigError(
                f"validation.images[{index}] has {len(paths)} files, but this {family.name} takes "
                f"{'one' if limit == 1 else f'1 to {limit}'} for a prompt. Change the list."
            )


def _image_paths(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of the input images of one prompt."""
    return (entry,) if isinstance(entry, str) else entry


def _read_images(
    paths: Sequence[str], size: tuple[int, int], control_size: tuple[int, int] | None = None
) -> list[Tensor]:
    """Read first frames, or images to edit of `control_size`.

    They are cropped and resized like those that are trained on.
    """
    images = []
    for path in paths:
        try:
            data = Path(path).read_bytes()
            probe(data)
            if control_size is not None:
                images.append(render_control(data, DEFAULT_TRANSFORM, size, control_size))
            else:
                images.append(render(data, DEFAULT_TRANSFORM, size))
        except (OSError, UnreadableSampleError) as error:
            raise ConfigError(
                f"validation.images: {path!r} cannot be read: {error}. Check the path and the file."
            ) from error
    return images


def require_packages(kind: MediaKind) -> None:
    """Raise at start-up, not at the first validation, if the package to write videos is missing."""
    if kind == "video":
        load_av("video")


# Files

CONTACT_SHEET_FRAMES = 8
CONTACT_SHEET_COLUMNS = 4
SPECTROGRAM_WINDOW = 1024
"""Audio samples in one window of the Fourier transform."""
FLOOR_DB = -90.0
"""Loudness in decibels that is drawn as silence."""
SPECTROGRAM_SIZE = (512, 256)
COLORMAP = np.array(
    [(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], float
)
"""RGB colours of a spectrogram, from silent to loud."""


def write_sample(sample: GeneratedSample, folder: Path, name: str) -> Image.Image:
    """Write one sample, and an image that shows it: itself, a contact sheet or a spectrogram.

    Returns the image.
    """
    match sample.kind:
        case "image":
            image = _to_image(sample.data)
        case "video":
            _write_mp4(sample, folder / f"{name}.mp4")
            image = contact_sheet(sample.data)
        case "audio":
            _write_wav(sample, folder / f"{name}.wav")
            image = spectrogram(sample.data)
    image.save(folder / f"{name}.png")
    return image


def contact_sheet(clip_CFHW: Tensor) -> Image.Image:  # noqa: N803
    """Draw evenly spaced frames of a video on one image, from the first to the last."""
    frames = clip_CFHW.shape[1]
    count = min(CONTACT_SHEET_FRAMES, frames)
    indices = np.linspace(0, frames - 1, count).round().astype(int)
    images = [_to_image(clip_CFHW[:, index]) for index in indices]
    width, height = images[0].size
    columns = min(CONTACT_SHEET_COLUMNS, count)
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height))
    for position, image in enumerate(images):
        sheet.paste(image, (position % columns * width, position // columns * height))
    return sheet


def spectrogram(waves_CN: Tensor) -> Image.Image:  # noqa: N803
    """Draw the spectrogram of audio, all channels mixed: time to the right, frequency upwards."""
    padding = SPECTROGRAM_WINDOW // 2
    mono = torch.nn.functional.pad(waves_CN.float().mean(0), (padding, padding))
    window = torch.hann_window(SPECTROGRAM_WINDOW)
    amplitude = torch.stft(
        mono,
        SPECTROGRAM_WINDOW,
        SPECTROGRAM_WINDOW // 4,
        window=window,
        center=False,
        return_complex=True,
    ).abs()
    decibels = 20 * (amplitude / window.sum() * 2).clamp_min(1e-9).log10()
    loudness = (1 - decibels / FLOOR_DB).clamp(0, 1).flip(0).numpy()
    position = loudness * (len(COLORMAP) - 1)
    low = np.minimum(position.astype(int), len(COLORMAP) - 2)
    colours = COLORMAP[low] + (position - low)[..., None] * (COLORMAP[low + 1] - COLORMAP[low])
    image = Image.fromarray(colours.round().astype(np.uint8))
    return image.resize(SPECTROGRAM_SIZE, Image.Resampling.BILINEAR)


def _to_pixels(data: Tensor) -> NDArray[np.uint8]:
    """Convert values in [-1, 1] with channels first to bytes with channels last."""
    scaled = data.float().clamp(-1, 1).add(1).mul(127.5).round().byte()
    pixels: NDArray[np.uint8] = scaled.movedim(0, -1).numpy()
    return pixels


def _to_image(data_CHW: Tensor) -> Image.Image:  # noqa: N803
    return Image.fromarray(_to_pixels(data_CHW))


def _write_mp4(sample: GeneratedSample, path: Path) -> None:
    """Write a video as H.264 in the pixel format yuv420p, which every player supports."""
    av = load_av("video")
    pixels = _to_pixels(sample.data)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", Fraction(sample.rate).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "16"}
        for frame in pixels:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _write_wav(sample: GeneratedSample, path: Path) -> None:
    """Write audio as 16-bit PCM."""
    samples = sample.data.float().clamp(-1, 1).mul(32767).round().to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(round(sample.rate))
        file.writeframes(samples.T.contiguous().numpy().astype("<i2").tobytes())


# The grid

MIN_TILE = 128
"""Shortest edge of an image in the grid, in pixels; smaller ones are enlarged by a whole factor."""
MARGIN = 6
FONT_SIZE = 12
TEXT_COLOUR, BACKGROUND = (40, 40, 40), (250, 250, 250)


def image_grid(images: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """Draw images with their captions on one sheet that is about twice as wide as high."""
    factor = max(1, -(-MIN_TILE // min(images[0].size)))
    width, height = (edge * factor for edge in images[0].size)
    columns = min(len(images), max(1, round((len(images) * 2 * height / width) ** 0.5)))
    rows = -(-len(images) // columns)
    font = ImageFont.load_default(FONT_SIZE)
    wrapped = [textwrap.wrap(caption, max(8, width // 7))[:3] for caption in captions]
    line_height = FONT_SIZE + 3
    text_height = line_height * max([len(lines) for lines in wrapped] + [1])
    cell_width, cell_height = width + MARGIN, height + text_height + MARGIN
    header = FONT_SIZE + 2 * MARGIN
    size = (columns * cell_width + MARGIN, header + rows * cell_height + MARGIN)
    sheet = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, TEXT_COLOUR, font)
    for index, (image, lines) in enumerate(zip(images, wrapped, strict=True)):
        left = MARGIN + index % columns * cell_width
        top = header + MARGIN + index // columns * cell_height
        sheet.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(lines):
            draw.text((left, top + height + 1 + number * line_height), line, TEXT_COLOUR, font)
    return sheet
