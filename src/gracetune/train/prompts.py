"""Turn the prompts of a run, or of `gracetune sample`, into requests for generated samples.

`plan_prompts` combines the settings of each prompt with those that all prompts share, and checks
that the model can generate what they ask for. `build_requests` reads the input images and encodes
the texts. Validation and `gracetune sample` both use them, so that equal settings give equal
samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gracetune.cache.encode import EMPTY_PROMPT
from gracetune.config.schema import PromptSection
from gracetune.data.augment import DEFAULT_TRANSFORM, render, render_control
from gracetune.data.buckets import audio_lengths, frame_counts
from gracetune.data.images import probe_image
from gracetune.data.pyav import load_av
from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import ConfigError
from gracetune.models.family import SampleRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.encode import Tiling
    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.config.schema import ValidationSection
    from gracetune.data.sample import Shape
    from gracetune.models.family import AudioFormat, Family, MediaKind

    ReadTexts = Callable[[Sequence[str]], Sequence[Mapping[str, Tensor]]]

FRAME_STEP = 4
"""Videos have 4n + 1 frames: the VAE encodes the first frame alone and then groups of four."""
NO_GUIDANCE = 1.0
"""Scale of classifier-free guidance at which the negative prompt has no effect."""


class SettingNames(NamedTuple):
    """The names of settings in error messages, as the user has given them."""

    size: str = "validation.width and height"
    frames: str = "validation.frames"
    seconds: str = "validation.seconds"
    images: str = "validation.images"
    negative: str = "validation.negative_prompt"
    off: str = ", or set validation.every: 0"
    """A way to do without samples, or nothing."""

    def of_prompt(self, index: int, section: PromptSection) -> SettingNames:
        """Return the names for a prompt that has some of the settings itself."""
        prefix, values = f"validation.prompts.{index}", section.model_dump()
        own = {name for name, value in values.items() if value is not None}
        return self._replace(
            size=f"{prefix}.width and height" if own & {"width", "height"} else self.size,
            frames=f"{prefix}.frames" if "frames" in own else self.frames,
            seconds=f"{prefix}.seconds" if "seconds" in own else self.seconds,
            images=f"{prefix}.images" if "images" in own else self.images,
            negative=f"{prefix}.negative_prompt" if "negative_prompt" in own else self.negative,
        )


class SampleDefaults(NamedTuple):
    """The size and length of samples if no setting gives them."""

    kind: MediaKind
    """`audio`, or `image`; frames make a video of an image."""
    resolution: int = 0
    frames: int = 1
    channels: int = 0
    sample_rate: int = 0
    length: int = 0
    """Length of audio in samples."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt with all its settings."""

    prompt: str
    negative_prompt: str
    """Text to steer away from; empty: the empty prompt."""
    kind: MediaKind
    shape: Shape
    """Width and height, then frames for a video; channels and samples for audio."""
    seed: int
    steps: int
    guidance: float
    images: tuple[str, ...]
    """Paths of the input images: a first frame, or images to edit."""


def dataset_defaults(data: DatasetSection) -> SampleDefaults:
    """Return the size and length of the samples of a dataset: the largest ones."""
    if data.dataset_type == "audio":
        return SampleDefaults(
            "audio",
            channels=data.channels,
            sample_rate=data.sample_rate,
            length=max(audio_lengths(data)),
        )
    frames = max(frame_counts(data)) if data.dataset_type == "video" else 1
    return SampleDefaults("image", max(data.resolutions), frames)


def plan_prompts(
    section: ValidationSection,
    prompts: Sequence[str | PromptSection],
    defaults: SampleDefaults,
    family: Family,
    names: SettingNames | None = None,
) -> list[PlannedPrompt]:
    """Return the settings of each prompt; raise if the family cannot generate such a sample.

    `section` has the settings of all prompts, which a prompt may replace.
    """
    common, planned = names or SettingNames(), []
    _check_number_of_images(section, prompts, family, common)
    for index, entry in enumerate(prompts):
        if isinstance(entry, str):
            own, shown = PromptSection(prompt=entry), common
        else:
            own, shown = entry, common.of_prompt(index, entry)
        kind, shape = _kind_and_shape(own, section, defaults)
        images = () if section.images is None else _as_paths(section.images[index])
        one = PlannedPrompt(
            own.prompt,
            section.negative_prompt if own.negative_prompt is None else own.negative_prompt,
            kind,
            shape,
            section.seed + index if own.seed is None else own.seed,
            own.steps or section.sample_steps,
            section.guidance if own.guidance is None else own.guidance,
            images if own.images is None else _as_paths(own.images),
        )
        if own.images is None and shown.images == SettingNames().images:
            shown = shown._replace(images=f"{shown.images}[{index}]")
        _check_usable(own, kind, family, shown)
        _check(one, family, shown)
        planned.append(one)
    return planned


def _kind_and_shape(
    own: PromptSection, section: ValidationSection, defaults: SampleDefaults
) -> tuple[MediaKind, Shape]:
    if defaults.kind == "audio":
        seconds = own.seconds or section.seconds
        length = round(seconds * defaults.sample_rate) if seconds else defaults.length
        return "audio", (defaults.channels, length)
    size = (
        own.width or section.width or defaults.resolution,
        own.height or section.height or defaults.resolution,
    )
    frames = own.frames or section.frames or defaults.frames
    return ("image", size) if frames == 1 else ("video", (*size, frames))


def ignored_negatives(
    planned: Sequence[PlannedPrompt], family: Family, names: SettingNames | None = None
) -> str:
    """Return a text if a negative prompt has no effect, else an empty one."""
    negatives = [one for one in planned if one.negative_prompt]
    name = (names or SettingNames()).negative
    if negatives and not family.uses_negative_prompt:
        return (
            f"{name} has no effect: this {family.name} has guidance built in and takes no negative "
            "prompt."
        )
    without = sum(one.guidance <= NO_GUIDANCE for one in negatives)
    if without:
        return (
            f"{name} has no effect on {without} of {len(planned)} prompts: their guidance is 1 or "
            "less, which turns it off."
        )
    return ""


def build_requests(
    planned: Sequence[PlannedPrompt],
    family: Family,
    tiling: Tiling,
    names: SettingNames | None = None,
    read_texts: ReadTexts | None = None,
) -> list[SampleRequest]:
    """Read the input images, encode the texts, and return requests for all samples, in order.

    A request has one seed, shape, number of steps and so on, so there is one for each group of
    successive prompts that share these. The texts are on the CPU. `read_texts` returns the
    embeddings of texts without control images; by default, the family encodes them.
    """
    images: list[list[Tensor]] = []
    text_images: list[list[Tensor]] = []
    for one in planned:
        if not one.images:
            continue
        size, setting = (one.shape[0], one.shape[1]), (names or SettingNames()).images
        if family.takes_control:
            images.append(_read_images(one.images, size, setting, family.control_size(*size)))
            controls = family.text_control_size(*size)
            text_images.append(_read_images(one.images, size, setting, controls))
        else:
            images.append(_read_images(one.images, size, setting))
    encode = _text_encoder(family, planned, text_images, read_texts or family.encode_text)
    requests = []
    for group in _groups(planned):
        first, indices = planned[group.start], range(group.start, group.stop)
        negatives = [encode(planned[index].negative_prompt, index) for index in indices]
        requests.append(
            SampleRequest(
                texts=[encode(planned[index].prompt, index) for index in indices],
                empty_text=negatives[0],
                shape=first.shape,
                seed=first.seed,
                steps=first.steps,
                guidance=first.guidance,
                images=images[group] if images else [],
                empty_texts=negatives if family.takes_control else (),
                tiled=tiling.applies_to(first.shape, first.kind),
                has_negative=first.negative_prompt != EMPTY_PROMPT,
            )
        )
    return requests


def _groups(planned: Sequence[PlannedPrompt]) -> list[slice]:
    """Return spans of prompts with equal settings and seeds that count up."""
    starts = [0]
    for index in range(1, len(planned)):
        one, first = planned[index], planned[starts[-1]]
        is_alike = (one.shape, one.steps, one.guidance, one.negative_prompt) == (
            first.shape,
            first.steps,
            first.guidance,
            first.negative_prompt,
        ) and one.seed == first.seed + index - starts[-1]
        if not is_alike:
            starts.append(index)
    return [slice(*span) for span in zip(starts, [*starts[1:], len(planned)], strict=True)]


def _text_encoder(
    family: Family,
    planned: Sequence[PlannedPrompt],
    images: Sequence[Sequence[Tensor]],
    read_texts: ReadTexts,
) -> Callable[[str, int], dict[str, Tensor]]:
    """Encode or read all prompts, negative ones too; return a function that looks one up.

    If the family encodes prompts together with control images, an embedding is that of a text with
    the images of one prompt; otherwise, it depends on the text alone.
    """
    pairs = [(one.prompt, index) for index, one in enumerate(planned)]
    pairs += [(one.negative_prompt, index) for index, one in enumerate(planned)]
    if family.takes_control:
        texts, numbers = [text for text, _ in pairs], [index for _, index in pairs]
        encoded = family.encode_text(texts, [images[index] for index in numbers])
        found = {pair: _to_host(text) for pair, text in zip(pairs, encoded, strict=True)}
        return lambda text, index: found[text, index]
    unique = list(dict.fromkeys(text for text, _ in pairs))
    by_text = dict(zip(unique, map(_to_host, read_texts(unique)), strict=True))
    return lambda text, _: by_text[text]


def _to_host(text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Copied, because an embedding in a cache is a view of its file.
    return {key: tensor.to("cpu", copy=True) for key, tensor in text.items()}


# Checks


def _check_usable(own: PromptSection, kind: MediaKind, family: Family, names: SettingNames) -> None:
    """Raise if a setting of this prompt, or an option of the command line, would have no effect."""
    has_seconds = own.seconds is not None or names.seconds.startswith("--")
    if has_seconds and kind != "audio":
        raise ConfigError(
            f"{names.seconds} is set, but {family.name} generates no sounds. Remove it."
        )
    for name, is_own in (
        (names.size, own.width is not None or own.height is not None),
        (names.frames, own.frames is not None),
    ):
        if kind == "audio" and (is_own or name.startswith("--")):
            raise ConfigError(f"{name} is set, but {family.name} generates sounds. Remove it.")


def _check(one: PlannedPrompt, family: Family, names: SettingNames) -> None:
    shape = one.shape
    if one.kind == "video" and one.kind not in family.kinds:
        raise ConfigError(
            f"{names.frames} is {shape[2]}, but {family.name} generates no videos. Remove it."
        )
    require_sample_packages(one.kind)
    if family.audio is not None:
        _check_length(shape, family.name, family.audio, names)
    elif any(edge % family.pixel_step or edge > family.max_edge for edge in shape[:2]):
        raise ConfigError(
            f"{names.size} are {shape[0]}x{shape[1]}, but {family.name} needs multiples of "
            f"{family.pixel_step} up to {family.max_edge}. Change them."
        )
    if one.kind == "video" and shape[2] % FRAME_STEP != 1:
        raise ConfigError(
            f"{names.frames} is {shape[2]}, but a video must have {FRAME_STEP}n + 1 frames. "
            "Set 1, 5, 9, ..., 81."
        )
    limit = family.max_controls if family.takes_control else 1
    if needs_images(family) and not 1 <= len(one.images) <= limit:
        raise ConfigError(
            f"{names.images} has {len(one.images)} files, but this {family.name} takes "
            f"{'one' if limit == 1 else f'1 to {limit}'} for a prompt. Change it."
        )


def _check_length(shape: Shape, name: str, audio: AudioFormat, names: SettingNames) -> None:
    if shape[-1] > audio.max_length:
        raise ConfigError(
            f"{names.seconds} is {shape[-1] / audio.sample_rate:.5g}, but {name} generates at most "
            f"{audio.max_length / audio.sample_rate:.5g} seconds. Lower it."
        )


def needs_images(family: Family) -> bool:
    """Return True if the model animates or edits an image, which comes with every prompt."""
    return family.starts_from == "image" or family.takes_control


def _check_number_of_images(
    section: ValidationSection,
    prompts: Sequence[str | PromptSection],
    family: Family,
    names: SettingNames,
) -> None:
    own = [one for one in prompts if isinstance(one, PromptSection) and one.images is not None]
    count = len(own) if section.images is None else len(section.images)
    if not needs_images(family) and (own or section.images is not None):
        raise ConfigError(
            f"{names.images} has {count} files, but this {family.name} uses prompts only. "
            "Remove it."
        )
    has_too_few = (
        needs_images(family) and section.images is None and len(own) < max(1, len(prompts))
    )
    if has_too_few or (section.images is not None and len(section.images) != len(prompts)):
        raise ConfigError(
            f"{names.images} has {count} files for {len(prompts)} prompts, but this {family.name} "
            f"needs an image for each prompt. Set both to the same number{names.off}."
        )


def require_sample_packages(kind: MediaKind) -> None:
    """Raise at start-up, not at the first validation, if the package to write videos is missing."""
    if kind == "video":
        load_av("video")


# Images


def _as_paths(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of the input images of one prompt."""
    return (entry,) if isinstance(entry, str) else entry


def _read_images(
    paths: Sequence[str],
    size: tuple[int, int],
    setting: str,
    control_size: tuple[int, int] | None = None,
) -> list[Tensor]:
    """Read first frames, or images to edit of `control_size`.

    They are cropped and resized like those that are trained on.
    """
    images = []
    for path in paths:
        try:
            data = Path(path).read_bytes()
            probe_image(data)
            if control_size is not None:
                images.append(render_control(data, DEFAULT_TRANSFORM, size, control_size))
            else:
                images.append(render(data, DEFAULT_TRANSFORM, size))
        except (OSError, UnreadableSampleError) as error:
            raise ConfigError(
                f"{setting}: {path!r} cannot be read: {error}. Check the path and the file."
            ) from error
    return images
