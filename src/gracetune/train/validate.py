"""Validation: generate samples of fixed prompts and measure the loss on held-out samples.

Samples are written as files that any player opens (PNG, MP4, WAV), plus one grid of images per
validation, so that the progress of a run can be seen at a glance.
"""

from __future__ import annotations

import json
import textwrap
import time
import wave
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from gracetune.atomic_files import atomic_file, atomic_folder, write_text
from gracetune.data.pyav import load_av
from gracetune.errors import CheckpointError, RunFailedError
from gracetune.events.types import Notice, Validated
from gracetune.train.experts import SINGLE_TRANSFORMER, ExpertTurn
from gracetune.train.health_checks import SampleProblem, SamplesSeen
from gracetune.train.prompts import (
    build_requests,
    dataset_defaults,
    ignored_negatives,
    needs_images,
    plan_prompts,
)
from gracetune.train.step import derive_seed, losses_given_noise
from gracetune.train.step_recorder import LossTable, timestep_range
from gracetune.train.timesteps import scheduled_timesteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from accelerate import Accelerator
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from gracetune.cache.encode import Tiling
    from gracetune.config.schema import PromptSection, RunFile
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.dispatcher import Emit
    from gracetune.models.family import Family, GeneratedSample, SampleRequest
    from gracetune.train.prompts import PlannedPrompt
    from gracetune.train.step import TrainState

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


VALIDATION_FOLDER = "validation"
T = TypeVar("T")
REQUESTED_FOLDER = "requested"
"""Folder, in that of validations, of samples whose prompts came with a request."""
SAMPLES_FILE = "samples.json"
"""File with the settings of each sample of a validation, next to the samples."""


class ValidationWriteError(CheckpointError):
    """Raised when generated validation samples cannot be written to disk."""


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """The prompts and held-out samples, encoded once and used at every validation."""

    folder: Path
    prompts: tuple[str, ...]
    requests: Sequence[SampleRequest]
    """Requests for the samples of all prompts, in order; successive prompts may share one."""
    held_out: Sequence[Batch]
    planned: Sequence[PlannedPrompt] = ()
    """The settings of each prompt."""
    request_id: str = ""
    """The id of the request that the prompts came with; empty for those of the run file."""

    def grid_path(self, step: int) -> Path:
        """Return the path of the image grid of a step."""
        if self.request_id:
            return self.folder / REQUESTED_FOLDER / f"step-{step:06d}-{self.request_id}.png"
        return grid_path(self.folder, step)


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The event of a validation, with what telemetry and health checks need besides."""

    event: Validated
    held_out: HeldOutLosses
    seen: SamplesSeen


class HeldOutLosses(NamedTuple):
    """Losses on held-out samples; those of different steps can be compared."""

    means: dict[str, float]
    """Mean loss by name: one for each trained transformer."""
    by_timestep: dict[str, dict[str, float]]
    """Mean by range of timesteps: `{"loss": mean, "samples": count}`."""
    single: list[float]
    """All losses, in a fixed order."""


def grid_path(folder: Path, step: int) -> Path:
    """Return the path of the image grid of a step in the folder of validation samples."""
    return folder / f"step-{step:06d}.png"


def validate(state: TrainState, validation: ValidationSetup, step: int) -> ValidationResult:
    """Generate samples and measure the held-out loss, with averaged weights if there are any."""
    started_at = time.monotonic()
    was_training = state.transformer.training
    state.transformer.eval()
    try:
        with torch.no_grad(), state.averaged_weights():
            held_out = held_out_loss(state, validation.held_out)
            records = _write_samples(state, validation, step)
    finally:
        state.transformer.train(was_training)
    event = Validated(
        step=step,
        grid=str(validation.grid_path(step)),
        prompts=validation.prompts,
        losses=held_out.means,
        seconds=time.monotonic() - started_at,
        request=validation.request_id,
    )
    problems = tuple(
        SampleProblem(str(one["file"]), str(one["problem"])) for one in records if one["problem"]
    )
    digests = tuple(str(one["digest"]) for one in records)
    prompts = tuple(str(one["prompt"]) for one in records)
    seen = SamplesSeen(step, len(records), problems, prompts, digests)
    return ValidationResult(event, held_out, seen)


def _write_samples(
    state: TrainState, validation: ValidationSetup, step: int
) -> list[dict[str, object]]:
    """Generate one sample for each prompt, and write all of them and an image grid.

    Each rank writes its part of the samples into one folder, from whose images the main rank makes
    the grid. If one rank fails, all raise. Returns the records of all samples, as in
    `samples.json`.
    """
    ranks, path = state.ranks, validation.grid_path(step)
    records: dict[int, dict[str, object]] = {}
    with _naming_write_errors(path), ExitStack() as stack:
        folder, write_error, out_of_memory = None, "", ""
        try:
            if ranks.is_main:
                folder = stack.enter_context(atomic_folder(path.with_suffix("")))
                (folder / "prompts.json").write_text(json.dumps(validation.prompts, indent=2))
        except OSError as error:
            write_error = str(error)
        folder = ranks.broadcast(folder)
        try:
            if folder is not None:
                with state.context.fail_together():
                    samples = generate_samples(state, validation)
                # The ranks of a context group have generated the same samples.
                for number, sample in samples.items() if state.context.rank == 0 else ():
                    write_sample(sample, folder, f"{number:03d}")
                    records[number] = _sample_record(number, sample, validation)
        except OSError as error:
            write_error = str(error)
        except torch.OutOfMemoryError as error:
            out_of_memory = _reason(state, error)
        _raise_write_error(ranks, write_error)
        _raise_out_of_memory(ranks, out_of_memory)
        ordered = _merge_records(ranks, records)
        if ranks.is_main and folder is not None:
            text = json.dumps({"step": step, "samples": ordered}, indent=2, ensure_ascii=False)
            (folder / SAMPLES_FILE).write_text(text, encoding="utf-8")
    if ranks.is_main:
        with _naming_write_errors(path), atomic_file(path) as staging:
            images = [
                _read_image(path.with_suffix("") / f"{number:03d}.png")
                for number in range(len(validation.prompts))
            ]
            image_grid(images, validation.prompts, f"step {step}").save(staging, format="PNG")
    return ordered


def _merge_records(
    ranks: RankGroup, records: Mapping[int, dict[str, object]]
) -> list[dict[str, object]]:
    """Return the records of the samples of all ranks, in the order of the prompts."""
    merged = {n: one for found in ranks.gather(records) for n, one in found.items()}
    return [merged[number] for number in sorted(merged)]


MEDIA_SUFFIXES = {"image": "png", "video": "mp4", "audio": "wav"}
FLAT_STD, DARK, BRIGHT, SILENT, NOISE = 0.01, -0.95, 0.95, 1e-3, 0.15
"""A sample is flat if its values vary by less than this; then it is black or white if its mean is
beyond these, in [-1, 1]. Audio below the fourth number is silent, and an image whose neighbouring
pixels correlate less than the last is noise."""


def _sample_record(
    number: int, sample: GeneratedSample, validation: ValidationSetup
) -> dict[str, object]:
    """Return the settings of a sample and what it is, for `samples.json`."""
    record: dict[str, object] = {
        "number": number,
        "file": f"{number:03d}.{MEDIA_SUFFIXES[sample.kind]}",
        "image": f"{number:03d}.png",
        "kind": sample.kind,
        "prompt": validation.prompts[number],
    }
    if number < len(validation.planned):
        one = validation.planned[number]
        record |= {
            "negative_prompt": one.negative_prompt,
            "seed": one.seed,
            "steps": one.steps,
            "guidance": one.guidance,
        }
    if sample.kind == "audio":
        record |= {"channels": sample.data.shape[0], "seconds": sample.data.shape[1] / sample.rate}
    else:
        record |= {"width": sample.data.shape[-1], "height": sample.data.shape[-2]}
    if sample.kind == "video":
        record |= {"frames": sample.data.shape[1], "fps": sample.rate}
    # A digest of all values: rounded to 8 bits, small changes of a sample would not show.
    digest = xxhash.xxh3_64_hexdigest(sample.data.float().numpy().tobytes())
    return record | {"problem": sample_problem(sample), "digest": digest}


def sample_problem(sample: GeneratedSample) -> str:
    """Return why a sample shows nothing (`black`, `noise`, `silent`, ...); empty if it does."""
    data = sample.data.float()
    if not bool(torch.isfinite(data).all()):
        return "black, because values are not finite"
    if sample.kind == "audio":
        return "silent" if float(data.abs().max()) < SILENT else ""
    if float(data.clamp(-1, 1).flatten(1).std(1).max()) >= FLAT_STD:
        return "noise" if _neighbour_correlation(data) < NOISE else ""
    mean = float(data.mean())
    return "black" if mean < DARK else "white" if mean > BRIGHT else "flat"


def _neighbour_correlation(data: Tensor) -> float:
    """Return the correlation of neighbouring pixels: above 0.8 for images, about 0 for noise."""
    centred = data - data.mean((-2, -1), keepdim=True)
    power = float(centred.square().mean())
    return float((centred[..., 1:] * centred[..., :-1]).mean()) / max(power, 1e-12)


def _read_image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


@contextmanager
def _naming_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValidationWriteError(
            f"the samples {path} cannot be written: {error}. Free some disk space, or set "
            "validation.every: 0."
        ) from error


def generate_samples(state: TrainState, validation: ValidationSetup) -> dict[int, GeneratedSample]:
    """Generate this rank's part of the samples of every request, by the number of the prompt."""
    layout, number = state.layout, 0
    found: dict[int, GeneratedSample] = {}
    for turn, request in enumerate(validation.requests):
        # Ranks take turns, so that requests of one prompt each do not all fall to one rank.
        place = (layout.data_rank + turn) % layout.data_size
        first, part = part_of(request, place, layout.data_size)
        count = len(part.texts)
        if layout.is_sharded:  # all ranks must run the same passes
            part = padded(request, first, count, -(-len(request.texts) // layout.data_size))
        if part.texts:
            with sampling_autocast(state.accelerator, state.family.transformer):
                samples = state.family.sample(part)
            found.update(enumerate(samples[:count], start=number + first))
        number += len(request.texts)
    return found


def part_of(request: SampleRequest, place: int, places: int) -> tuple[int, SampleRequest]:
    """Return one of `places` parts of a request, after the position of its first prompt.

    Some parts have no prompts, if there are fewer prompts than parts.
    """
    count = len(request.texts)
    first, stop = count * place // places, count * (place + 1) // places
    return first, _selected(request, range(first, stop))


def padded(request: SampleRequest, first: int, count: int, length: int) -> SampleRequest:
    """Return the part with `count` prompts from `first` on, extended to `length` prompts.

    The last prompt is repeated; if the part is empty, the last one of the request.
    """
    last = max(first + count, 1) - 1
    return _selected(request, [*range(first, first + count), *[last] * (length - count)])


def _selected(request: SampleRequest, numbers: Sequence[int]) -> SampleRequest:
    """Return a request for the prompts with these numbers, of which the first sets the seed."""

    def select(values: Sequence[T]) -> Sequence[T]:
        return [values[number] for number in numbers] if values else values

    return replace(
        request,
        texts=select(request.texts),
        seed=request.seed + (numbers[0] if numbers else 0),
        images=select(request.images),
        empty_texts=select(request.empty_texts),
    )


def sampling_autocast(
    accelerator: Accelerator, transformer: nn.Module
) -> AbstractContextManager[object]:
    """Return autocast as in training; for bf16 weights, bf16 autocast even if training has none.

    Pipelines pass latents to the VAE in the dtype of the transformer. The VAE is in fp32, so that
    without autocast its first layer would raise an error for latents in bf16.
    """
    in_bf16 = any(weight.dtype == torch.bfloat16 for weight in transformer.parameters())
    if in_bf16 and accelerator.mixed_precision == "no":
        return torch.autocast(accelerator.device.type, torch.bfloat16)
    found: AbstractContextManager[object] = accelerator.autocast()
    return found


MIN_HELD_OUT_TIMESTEPS = 8
"""Held-out samples are measured at no fewer timesteps than this, together."""


def held_out_loss(state: TrainState, batches: Sequence[Batch]) -> HeldOutLosses:
    """Measure the loss on held-out samples.

    There is one mean for each trained transformer: Wan 2.2 has two, other models one. Timesteps are
    spread evenly over the samples and the noise has a fixed seed, so that the values of different
    steps can be compared. The ranges of timesteps need more values than a few samples give, so that
    these are measured several times; the first time alone counts for the mean. Each rank computes
    the losses of some batches.
    """
    if not batches:
        return HeldOutLosses({}, {}, [])
    ranks, total = state.ranks, sum(len(batch) for batch in batches)
    rounds = -(-MIN_HELD_OUT_TIMESTEPS // total)
    turns = [SINGLE_TRANSFORMER]
    if state.expert_schedule is not None:
        turns = [ExpertTurn(*item) for item in state.expert_schedule.windows.items()]
    means: dict[str, float] = {}
    by_timestep, single = LossTable(), []
    for turn in turns:
        own: dict[int, tuple[list[float], list[float]]] = {}
        out_of_memory = ""
        try:
            with state.context.fail_together():
                own = _own_held_out_losses(state, batches, turn, total, rounds)
        except torch.OutOfMemoryError as error:
            out_of_memory = _reason(state, error)
        _raise_out_of_memory(ranks, out_of_memory)
        name = "held_out" if turn.expert is None else f"held_out_{turn.expert}"
        merged = {index: one for of_rank in ranks.gather(own) for index, one in of_rank.items()}
        # In the order of their numbers, so that the result does not depend on the ranks.
        first = [loss for index in range(len(batches)) for loss in merged[index][0]]
        means[name] = float(torch.tensor(first).mean())
        for _, (values, timesteps) in sorted(merged.items()):
            single += values
            for loss, timestep in zip(values, timesteps, strict=True):
                by_timestep.add(timestep_range(timestep), loss)
    return HeldOutLosses(means, dict(sorted(by_timestep.means().items())), single)


def _own_held_out_losses(
    state: TrainState, batches: Sequence[Batch], turn: ExpertTurn, total: int, rounds: int
) -> dict[int, tuple[list[float], list[float]]]:
    """Return losses and timesteps of this rank's batches, by the number of the batch.

    Each round measures all batches once. Ranks that divide the weights must run the same number of
    passes, so some run one for nothing.
    """
    layout = state.layout
    found: dict[int, tuple[list[float], list[float]]] = {}
    low, high = turn.window
    starts = list(accumulate((len(batch) for batch in batches), initial=0))
    num_passes = rounds * len(batches)
    for first in range(0, num_passes, layout.data_size):
        index = first + layout.data_rank
        is_own = index < num_passes
        if not (is_own or layout.is_sharded):
            continue
        index = index if is_own else first
        number, batch_number = divmod(index, len(batches))
        batch = batches[batch_number]
        # Each round moves the samples on, so that every sample is measured all over the range.
        samples = torch.arange(starts[batch_number], starts[batch_number + 1])
        places = (samples + number * -(-total // rounds)) % total
        x0, _ = state.family.split_encoded(batch.latents)
        generator = torch.Generator().manual_seed(derive_seed("held out", index))
        # In fp32, as in training; latents imported from another tool's cache may be in bf16.
        noise = torch.randn(x0.shape, generator=generator).to(x0.device)
        positions = low + (high - low) * (places + (0.5 + number / rounds) % 1) / total
        timesteps = scheduled_timesteps(positions, state.family.noise_schedule)
        losses = losses_given_noise(state, batch, timesteps.to(noise), noise, turn.expert)
        if is_own:
            found[index] = losses.tolist(), timesteps.tolist()
    return found


def _raise_write_error(ranks: RankGroup, reason: str) -> None:
    """Raise on all ranks if one of them could not write its samples."""
    for problem in filter(None, ranks.gather(reason)):
        raise OSError(problem)


def _reason(state: TrainState, error: torch.OutOfMemoryError) -> str:
    """Return why this rank is out of memory, to tell the others; a single rank raises the error.

    Ranks that divide the weights cannot tell the others, which wait for weights.
    """
    if state.ranks.world_size == 1:
        raise error
    reason = str(error).splitlines()[0]
    if state.layout.is_sharded:
        raise RunFailedError(
            f"{state.ranks.name(state.ranks.rank)} ran out of device memory in a validation "
            f"({reason}). Checkpoints are kept. Lower validation.width, height or frames, or set "
            "validation.every: 0, and run the same command again."
        ) from error
    return reason


def _raise_out_of_memory(ranks: RankGroup, reason: str) -> None:
    """Raise on all ranks if one of them is out of memory; `reason` is empty if this one is not."""
    for rank, text in enumerate(ranks.gather(reason)):
        if text:
            raise torch.OutOfMemoryError(f"{ranks.name(rank)}: {text}")


# Setting up


def validation_enabled(run: RunFile) -> bool:
    """Return True if the run validates, on schedule or on request."""
    return run.validation.every > 0 or run.validation.enable_manual_validation


def check_validation(run: RunFile, family: Family) -> None:
    """Raise if the family cannot generate the samples of a validation.

    Without prompts, those of a validation are captions, which are not known before the data are.
    """
    if validation_enabled(run):
        _plan(run, family, run.validation.prompts or ([] if needs_images(family) else [""]))


def build_validation(
    run: RunFile, family: Family, pipeline: DataPipeline, emit: Emit
) -> ValidationSetup | None:
    """Read the encoded prompts and the held-out samples; None if the run never validates."""
    if not validation_enabled(run):
        return None
    prompts: Sequence[str | PromptSection] | None = run.validation.prompts
    if not prompts:
        captions = dict.fromkeys(sample.caption for sample in pipeline.train_samples)
        prompts = tuple(captions)[: run.validation.num_prompts]
        text = f"validation.prompts is empty: validating with the first {len(prompts)} captions, "
        emit(Notice(text + "; ".join(map(repr, prompts))))
    planned = _plan(run, family, prompts)
    ignored = ignored_negatives(planned, family)
    if ignored:
        emit(Notice(ignored, level="warning"))
    if run.validation.holdout and not pipeline.held_out_draws:
        num_files = len({sample.digest for sample in pipeline.train_samples})
        text = f"validation.holdout is {run.validation.holdout:g}, which is none of {num_files}"
        hint = f"so no held-out loss is measured. Set it to at least {1 / num_files:.2g}"
        emit(Notice(f"{text} files, {hint}", level="warning"))
    return ValidationSetup(
        folder=Path(run.output_dir) / VALIDATION_FOLDER,
        prompts=tuple(one.prompt for one in planned),
        requests=build_requests(planned, family, pipeline.tiling, read_texts=pipeline.read_texts),
        held_out=[pipeline.load(draws) for draws in pipeline.held_out_draws],
        planned=planned,
    )


def requested_validation(
    state: TrainState,
    validation: ValidationSetup,
    prompts: Sequence[str | PromptSection],
    tiling: Tiling,
    request_id: str,
) -> ValidationSetup:
    """Return the set-up of a validation with other prompts, which are encoded now.

    The family's text encoder must be loaded.
    """
    planned = _plan(state.run, state.family, prompts)
    return replace(
        validation,
        prompts=tuple(one.prompt for one in planned),
        requests=build_requests(planned, state.family, tiling),
        planned=planned,
        request_id=request_id,
    )


def _plan(
    run: RunFile, family: Family, prompts: Sequence[str | PromptSection]
) -> list[PlannedPrompt]:
    return plan_prompts(run.validation, prompts, dataset_defaults(run.datasets[0]), family)


# Files

SETTINGS_CHUNK = "gracetune"
"""Name of the text chunk of a PNG file that has the settings of a sample."""
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


def write_sample(
    sample: GeneratedSample,
    folder: Path,
    name: str,
    settings: Mapping[str, object] | None = None,
) -> Image.Image:
    """Write one sample, and an image that shows it: itself, a contact sheet or a spectrogram.

    `settings` are stored as JSON: in a text chunk of the image, and in a file next to a clip or
    sound. Returns the image.
    """
    text = None if settings is None else json.dumps(settings, indent=2, ensure_ascii=False)
    match sample.kind:
        case "image":
            image = _to_image(sample.data)
        case "video":
            _write_mp4(sample, folder / f"{name}.mp4")
            image = contact_sheet(sample.data)
        case "audio":
            _write_wav(sample, folder / f"{name}.wav")
            image = spectrogram(sample.data)
    chunks = PngInfo()
    if text is not None:
        chunks.add_itxt(SETTINGS_CHUNK, text)
        if sample.kind != "image":
            write_text(folder / f"{name}.json", text + "\n")
    with atomic_file(folder / f"{name}.png") as staging:
        image.save(staging, format="PNG", pnginfo=chunks)
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


# The comparison sheet

SHEET_TILE = (192, 384)
"""Shortest edge at which small images are enlarged, and longest edge of large ones, in pixels."""
SHEET_MARGIN, SHEET_GAP = 24, 10
LABEL_SIZE = 16
MUTED_COLOUR, LINE_COLOUR = (120, 120, 120), (225, 225, 225)
MAX_LABEL_WIDTH = 220
MAX_HEADER_LINES = 4


def comparison_sheet(
    rows: Sequence[tuple[str, Sequence[Image.Image]]], columns: Sequence[str], title: str
) -> Image.Image:
    """Draw a table of images: a row for each set of weights, a column for each prompt.

    The text above a column is that prompt; its last line is drawn in a lighter colour, like the
    title.
    """
    font, small = ImageFont.load_default(LABEL_SIZE), ImageFont.load_default(LABEL_SIZE - 2)
    line = LABEL_SIZE + 5
    tiles = [[_fit_tile(image) for image in images] for _, images in rows]
    widths = [max(row[index].width for row in tiles) for index in range(len(columns))]
    heights = [max(tile.height for tile in row) for row in tiles]
    labels = [_wrap(label, font, MAX_LABEL_WIDTH) for label, _ in rows]
    label_width = max(int(font.getlength(text)) for lines in labels for text in lines)
    headers = [
        (_wrap(text.rpartition("\n")[0], font, width), text.rpartition("\n")[2])
        for text, width in zip(columns, widths, strict=True)
    ]
    header = line * (1 + max(len(lines) for lines, _ in headers)) + SHEET_GAP
    left, top = SHEET_MARGIN + label_width + 2 * SHEET_GAP, SHEET_MARGIN + header
    titles = _wrap(title, small, sum(widths) + left - SHEET_MARGIN)
    top += line * len(titles) + SHEET_GAP
    size = (
        left + sum(widths) + SHEET_GAP * (len(widths) - 1) + SHEET_MARGIN,
        top + sum(heights) + SHEET_GAP * (len(heights) - 1) + SHEET_MARGIN,
    )
    sheet = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for number, text in enumerate(titles):
        draw.text((SHEET_MARGIN, SHEET_MARGIN + number * line), text, MUTED_COLOUR, small)
    x = left
    for width, (lines, note) in zip(widths, headers, strict=True):
        y = top - SHEET_GAP - line * (len(lines) + 1)
        for text in lines:
            draw.text((x, y), text, TEXT_COLOUR, font)
            y += line
        draw.text((x, y), note, MUTED_COLOUR, small)
        x += width + SHEET_GAP
    y = top
    for row, lines, height in zip(tiles, labels, heights, strict=True):
        middle = y + (height - line * len(lines)) // 2
        for number, text in enumerate(lines):
            right = SHEET_MARGIN + label_width - int(font.getlength(text))
            draw.text((right, middle + number * line), text, TEXT_COLOUR, font)
        draw.line((left - SHEET_GAP, y, left - SHEET_GAP, y + height - 1), LINE_COLOUR, 2)
        x = left
        for tile, width in zip(row, widths, strict=True):
            sheet.paste(tile, (x, y))
            x += width + SHEET_GAP
        y += height + SHEET_GAP
    return sheet


def _fit_tile(image: Image.Image) -> Image.Image:
    """Enlarge a small image by a whole factor, or shrink a large one."""
    smallest, largest = SHEET_TILE
    if max(image.size) > largest:
        scale = largest / max(image.size)
        size = [max(1, round(edge * scale)) for edge in image.size]
        return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    factor = max(1, min(-(-smallest // min(image.size)), largest // max(image.size)))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _wrap(text: str, font: Font, width: int) -> list[str]:
    """Break a text into lines of at most this width in pixels, and cut it after a few lines."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    lines = [_shorten(one, font, width) for one in lines]
    if len(lines) > MAX_HEADER_LINES:
        lines = [*lines[: MAX_HEADER_LINES - 1], f"{lines[MAX_HEADER_LINES - 1]} …"]
    return lines


def _shorten(text: str, font: Font, width: int) -> str:
    """Cut a single long word, so that it is at most this many pixels wide."""
    kept = text
    while len(kept) > 1 and font.getlength(text) > width:
        kept = kept[:-1]
        text = f"{kept}…"
    return text
