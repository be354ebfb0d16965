"""Choose the settings of a first run, with a reason for each: the rules behind `gracetune init`.

`FAMILY_PRESETS` has one entry per model family: its model on the hub, the sizes that it was trained
with, and what to train in 12, 16, 24, 48 and 96 GB of GPU memory. Frozen weights stream from host
memory, so the memory decides about resolution and batch size rather than about the model.
`choose_settings` combines a preset with a goal and with facts about the data; `run_file_text`
writes the result as YAML with comments. Nothing here imports torch or reads a file.

The values follow what the trainers of this field recommend for a LoRA: AdamW at 1e-4, rank 16 to
32, and about a hundred uses of each image of a character.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.models.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Goal = Literal["style", "character", "concept", "edit", "video"]
GOALS: tuple[Goal, ...] = ("style", "character", "concept", "edit", "video")
MEMORY_SIZES = (12, 16, 24, 48, 96)
"""GPU memory in GB for which there is a preset."""
MEMORY_TOLERANCE = 0.97
"""A card counts as one of `MEMORY_SIZES` if it has this share of it: cards report a bit less."""
HOLDOUT_SAMPLES = 40
"""Number of samples from which some are held out, to measure overfitting."""


@dataclass(frozen=True, slots=True)
class SizePreset:
    """Resolution and batch size that fit a certain amount of GPU memory."""

    resolution: int
    batch_size: int
    frames: int = 1
    """Number of frames of a clip, for videos."""


def _sizes(*pairs: tuple[int, ...]) -> dict[int, SizePreset]:
    return {gb: SizePreset(*pair) for gb, pair in zip(MEMORY_SIZES, pairs, strict=True)}


MEDIUM = _sizes((768, 1), (1024, 1), (1024, 2), (1024, 4), (1024, 4))
LARGE = _sizes((512, 1), (768, 1), (1024, 1), (1024, 2), (1024, 4))
HUGE = _sizes((512, 1), (512, 1), (1024, 1), (1024, 1), (1024, 2))
FLOW_BY_SIZE = ("flux", "larger images get more noise, as in the model's own training")


@dataclass(frozen=True, slots=True)
class FamilyPreset:
    """The settings of a first run that depend on the model family."""

    title: str
    pixel_step: int
    """Pixels that widths and heights are multiples of, for the model on the hub."""
    sizes: Mapping[int, SizePreset]
    """Resolution and batch size of images for each of `MEMORY_SIZES`."""
    guidance: float
    sample_steps: int
    timestep_shift: tuple[float | str, str] | None = None
    """Value of `train.timestep_shift` and its reason."""
    unshifted_edge: int | None = None
    """Edge of an image in pixels at which the shift is 1, if it is proportional to the edge."""
    timestep_std: float | None = None
    uniform_timesteps: bool = False
    kinds: tuple[str, ...] = ("image",)
    """Media that the model is trained on."""
    edit_model: str | None = None
    """Model on the hub that edits images."""
    video_sizes: Mapping[int, SizePreset] | None = None
    weights_gb: float = 0.0
    """Size of the frozen weights in bf16."""
    uses_guidance: bool = True
    """True if samples are generated with classifier-free guidance, which needs empty captions."""
    min_resolution: int = 512
    min_snr: bool = False
    lr: float = 1e-4
    rank: int = 16
    targets: tuple[str, ...] = ()
    """Modules to adapt; empty: the family's default."""
    tokenizer: tuple[str, int] | None = ("tokenizer", 512)
    """Folder of the tokenizer and the number of tokens to which captions are cut."""


FAMILY_PRESETS: Mapping[str, FamilyPreset] = {
    "flux": FamilyPreset(
        "FLUX.1 dev",
        16,
        LARGE,
        3.5,
        28,
        FLOW_BY_SIZE,
        edit_model="black-forest-labs/FLUX.1-Kontext-dev",
        weights_gb=24,
        uses_guidance=False,
        tokenizer=("tokenizer_2", 512),
    ),
    "flux2": FamilyPreset(
        "FLUX.2 dev",
        16,
        HUGE,
        4.0,
        50,
        FLOW_BY_SIZE,
        weights_gb=64,
        uses_guidance=False,
    ),
    "qwen_image": FamilyPreset(
        "Qwen-Image",
        16,
        LARGE,
        4.0,
        40,
        ("qwen_image", "larger images get more noise, as in the model's own training"),
        edit_model="Qwen/Qwen-Image-Edit-2511",
        weights_gb=41,
    ),
    "z_image": FamilyPreset("Z-Image", 16, MEDIUM, 5.0, 50, FLOW_BY_SIZE, weights_gb=12),
    "krea2": FamilyPreset("Krea 2", 16, LARGE, 5.5, 28, FLOW_BY_SIZE, weights_gb=26),
    "ideogram4": FamilyPreset(
        "Ideogram 4",
        16,
        LARGE,
        7.0,
        48,
        unshifted_edge=512,
        timestep_std=1.5,
        weights_gb=19,
        uses_guidance=False,  # its guidance uses another transformer, which is not trained
        tokenizer=("tokenizer", 2048),
    ),
    "chroma": FamilyPreset("Chroma1 HD", 16, LARGE, 3.0, 40, FLOW_BY_SIZE, weights_gb=18),
    "sd3": FamilyPreset(
        "Stable Diffusion 3.5 large",
        16,
        MEDIUM,
        4.5,
        28,
        (3.0, "the shift of the model's own scheduler"),
        weights_gb=16,
        tokenizer=("tokenizer_3", 256),
    ),
    "sdxl": FamilyPreset(
        "SDXL",
        32,
        _sizes((1024, 1), (1024, 2), (1024, 4), (1024, 4), (1024, 8)),
        5.0,
        30,
        uniform_timesteps=True,
        weights_gb=5,
        min_snr=True,
        tokenizer=("tokenizer", 77),
    ),
    "sd15": FamilyPreset(
        "Stable Diffusion 1.5",
        64,
        _sizes((512, 4), (512, 4), (512, 8), (512, 8), (512, 8)),
        7.5,
        30,
        uniform_timesteps=True,
        weights_gb=2,
        min_resolution=256,
        min_snr=True,
        tokenizer=("tokenizer", 77),
    ),
    "wan22": FamilyPreset(
        "Wan 2.2 T2V-A14B",
        16,
        LARGE,
        3.5,
        30,
        (5.0, "the shift that the model is sampled with"),
        uniform_timesteps=True,
        kinds=("image", "video"),
        video_sizes=_sizes((320, 1, 17), (384, 1, 17), (480, 1, 33), (480, 1, 49), (480, 1, 81)),
        weights_gb=57,
        min_resolution=256,
    ),
    "stable_audio": FamilyPreset(
        "Stable Audio Open",
        1,
        _sizes((1024, 1), (1024, 2), (1024, 4), (1024, 8), (1024, 8)),
        7.0,
        100,
        uniform_timesteps=True,
        kinds=("audio",),
        weights_gb=2,
    ),
    "tiny": FamilyPreset(
        "a small model for trying things out on a CPU",
        4,
        _sizes(*[(32, 16)] * 5),
        3.0,
        24,
        min_resolution=8,
        lr=3e-3,
        rank=32,
        targets=(
            "attn.*",
            "ff.*",
            "ff_context.*",
            "context_embedder",
            "norm1.linear",
            "norm1_context.linear",
            "norm_out.linear",
            "proj_out",
        ),
        tokenizer=None,
    ),
}
WAN_5B = ("TI2V-5B", 32)
"""Part of a model's name, and the pixel step of that model, which differs from its family's."""


@dataclass(frozen=True, slots=True)
class GoalPreset:
    """The settings of a first run that depend on what it is to learn."""

    title: str
    uses: int
    """Number of times that each sample is used."""
    rank_factor: int
    why_rank: str
    needs_trigger: bool
    prompt: str | None
    """A prompt unlike the captions, to see what the adapter does with something new."""


GOAL_PRESETS: Mapping[Goal, GoalPreset] = {
    "style": GoalPreset(
        "how images look",
        60,
        2,
        "a style changes every part of an image",
        False,
        "a lighthouse by the sea at sunset",
    ),
    "character": GoalPreset(
        "a person or figure",
        100,
        1,
        "enough for one character",
        True,
        "[trigger] walking through a city at night",
    ),
    "concept": GoalPreset(
        "an object or idea",
        100,
        1,
        "enough for one object or idea",
        True,
        "[trigger] on a wooden table, studio light",
    ),
    "edit": GoalPreset(
        "a change of an input image", 40, 2, "an edit has to follow the input image", False, None
    ),
    "video": GoalPreset("motion", 80, 2, "motion takes more than a still image", False, None),
}
USES_LIMITS = (1500, 6000)
"""Fewest and most uses of samples in a run."""
MIN_STEPS = 500
TINY_STEPS = 600
"""Steps of a run of `tiny`: a minute or two on two CPU cores."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The user's answers to `gracetune init`, and facts about the data."""

    folder: str
    family: str
    goal: Goal
    memory_gb: float
    """GPU memory in GB."""
    output_dir: str
    num_samples: int
    kind: Literal["image", "video", "audio"] = "image"
    typical_edge: int = 1024
    """Edge in pixels of a square that two of three samples are as large as, or larger."""
    sample_size: tuple[int, int] | None = None
    """Width and height of the most frequent bucket, for generated samples."""
    frames: tuple[int, int] = (0, 0)
    """Number of frames of the shortest video at `WAN_FPS`, and that which most videos have."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """Length of the shortest audio file, and that which most files have."""
    captions: tuple[str, ...] = ()
    """Different captions of the data, for prompts."""
    caption_extension: str = "txt"
    one_caption: str | None = None
    """Caption for all samples, if they have none of their own."""
    are_tags: bool = False
    trigger_word: str | None = None
    control_folder: str | None = None
    control_images: tuple[str, ...] = ()
    """Input images for validation of an edit model, one for each of `captions`."""
    has_fp8: bool = False
    """True if the GPU computes in fp8."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the new run file: its dotted key, its value and why it was chosen."""

    key: str
    value: object
    reason: str = ""


WAN_FPS = 16
MAX_AUDIO_S = 47.0
"""Longest audio that Stable Audio Open generates, in seconds."""


def size_preset(request: RunRequest) -> SizePreset:
    """Return the preset for the largest of `MEMORY_SIZES` that the GPU has."""
    preset = FAMILY_PRESETS[request.family]
    sizes = preset.sizes
    if request.kind == "video" and preset.video_sizes is not None:
        sizes = preset.video_sizes
    fitting = [gb for gb in MEMORY_SIZES if request.memory_gb >= gb * MEMORY_TOLERANCE]
    return sizes[fitting[-1] if fitting else MEMORY_SIZES[0]]


def choose_settings(request: RunRequest, size: SizePreset) -> list[Setting]:
    """Return all settings of the run file, in the order in which they are written.

    `size` is the preset for the GPU, or a smaller one if a plan has shown that it does not fit.
    """
    schedule = _schedule(request, size)
    return [
        Setting("output_dir", request.output_dir, "logs, samples, checkpoints and the result"),
        *_model(request),
        *_dataset(request, size),
        *_train(request, size, schedule),
        *_validation(request, schedule),
    ]


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The length of a run and the size of its batches."""

    steps: int
    batch_size: int
    accumulation: int

    @property
    def interval(self) -> int:
        """Number of steps between two checkpoints and validations; a run has about eight."""
        return max(50, round(self.steps / 8 / 50) * 50)


def _default_model(request: RunRequest) -> str | None:
    """Return the name of the family's default model on the hub; None if the family creates it."""
    return FAMILIES[request.family].default_model


def _creates_model(request: RunRequest) -> bool:
    """Return True for a family that starts with random weights (`tiny`), not a published model."""
    return _default_model(request) is None


def _schedule(request: RunRequest, size: SizePreset) -> _Schedule:
    batch_size = max(1, min(size.batch_size, request.num_samples // 4))
    accumulation = 4 if request.kind == "video" else 1
    if _creates_model(request):
        return _Schedule(TINY_STEPS, batch_size, 1)
    uses = GOAL_PRESETS[request.goal].uses * request.num_samples
    uses = min(max(uses, USES_LIMITS[0]), USES_LIMITS[1])
    steps = round(uses / (batch_size * accumulation) / 50) * 50
    return _Schedule(max(MIN_STEPS, steps), batch_size, accumulation)


_WHY_LORA = "small, and loads in diffusers and ComfyUI"


def _model(request: RunRequest) -> list[Setting]:
    preset, goal = FAMILY_PRESETS[request.family], GOAL_PRESETS[request.goal]
    settings = [Setting("model.family", request.family)]
    model = preset.edit_model if request.control_folder is not None else _default_model(request)
    if model is not None:
        settings.append(Setting("model.path", model, "a name on the Hugging Face hub, or a folder"))
        if request.kind != "audio":
            settings.append(Setting("model.dtype", "bfloat16", "half the memory of fp32"))
    if request.has_fp8 and preset.weights_gb > 0.6 * request.memory_gb:
        settings.append(
            Setting(
                "model.frozen_compute",
                "fp8",
                f"{preset.weights_gb:g} GB of weights stream from host memory; fp8 halves that. "
                "Set bf16 for the exact weights",
            )
        )
    if _creates_model(request):
        return [
            *settings,
            Setting("adapter.kind", "lora"),
            Setting("adapter.rank", preset.rank, "large: the model has random weights so far"),
            Setting("adapter.targets", list(preset.targets), "nearly all layers, for that reason"),
        ]
    why = "small; the model stays as it is" if request.kind == "audio" else _WHY_LORA
    return [
        *settings,
        Setting("adapter.kind", "lora", why),
        Setting("adapter.rank", preset.rank * goal.rank_factor, goal.why_rank),
    ]


def _dataset(request: RunRequest, size: SizePreset) -> list[Setting]:
    preset, here = FAMILY_PRESETS[request.family], "datasets.0."
    settings = [Setting(f"{here}id", "data")]
    if request.kind != "image":
        settings.append(Setting(f"{here}dataset_type", request.kind))
    settings.append(Setting(f"{here}instance_data_dir", request.folder))
    if request.control_folder is not None:
        settings.append(
            Setting(
                f"{here}conditioning_data_dir",
                request.control_folder,
                "the images before the edit, with the same names",
            )
        )
    if request.kind == "audio":
        settings += [
            Setting(f"{here}sample_rate", 44100, "that of the model; files are converted"),
            Setting(f"{here}channels", 2),
            Setting(f"{here}seconds", _seconds(request), "each file uses the longest that it has"),
        ]
    else:
        settings.append(resolution_setting(request, size))
    if request.kind == "video":
        settings += [
            Setting(
                f"{here}frames",
                sorted({_clip_frames(n, size.frames) for n in request.frames}),
                "each clip uses the largest number that it has",
            ),
            Setting(f"{here}fps", WAN_FPS, "the frame rate of the model"),
        ]
    return settings + _captions(request, preset)


def _clip_frames(available: int, most: int) -> int:
    """Return a usual number of frames that a video has; fewer for a very short one."""
    usual = [n for n in (17, 33, 49, 81) if n <= min(available, most)]
    return usual[-1] if usual else max(1, (available - 1) // 4 * 4 + 1)


def _seconds(request: RunRequest) -> list[float]:
    """Return clip lengths for the shortest and for most audio files, in steps of half a second."""
    lengths = [min(MAX_AUDIO_S, max(0.5, length // 0.5 * 0.5)) for length in request.seconds]
    return sorted(set(lengths))


def resolution_setting(request: RunRequest, size: SizePreset) -> Setting:
    """Choose the resolution: that of the memory preset, but not far above that of the data."""
    preset = FAMILY_PRESETS[request.family]
    step = max(preset.pixel_step, 4 if _creates_model(request) else 64)
    edge = max(request.typical_edge // step * step, preset.min_resolution)
    key, resolution = "datasets.0.resolution", min(size.resolution, edge)
    if resolution < size.resolution:
        is_enlarged = request.typical_edge < resolution
        reason = (
            "the smallest size of this model; many of your samples are smaller and are enlarged"
            if is_enlarged
            else "many of your samples are this small; more would only enlarge them"
        )
    elif _creates_model(request):
        reason = "the model is made for small images"
    else:
        reason = f"pixels per edge of a square; chosen for {request.memory_gb:.3g} GB"
    return Setting(key, resolution, reason)


def _captions(request: RunRequest, preset: FamilyPreset) -> list[Setting]:
    here, settings = "datasets.0.", []
    if request.one_caption is not None:
        settings += [
            Setting(f"{here}caption_strategy", "instanceprompt", "the files have no captions"),
            Setting(f"{here}instance_prompt", request.one_caption),
        ]
    if request.caption_extension != "txt":
        settings.append(Setting(f"{here}caption_extension", request.caption_extension))
    if request.trigger_word is not None:
        settings.append(
            Setting(
                f"{here}trigger_word",
                request.trigger_word,
                "put in front of captions that lack it; replaces [trigger]",
            )
        )
    is_clip = preset.tokenizer is not None and preset.tokenizer[1] == 77
    if request.are_tags and is_clip and request.one_caption is None:
        settings += [
            Setting(f"{here}caption_shuffle", True, "captions are tags, whose order is random"),
            Setting(f"{here}caption_keep_tokens", 1, "the first tag stays in front"),
        ]
    if preset.uses_guidance and request.control_folder is None and request.one_caption is None:
        settings.append(
            Setting(f"{here}caption_dropout", 0.1, "empty captions keep guidance working")
        )
    return settings


def _train(request: RunRequest, size: SizePreset, schedule: _Schedule) -> list[Setting]:
    preset, steps, batch_size = FAMILY_PRESETS[request.family], schedule.steps, schedule.batch_size
    each = steps * batch_size * schedule.accumulation / request.num_samples
    reason = f"each of {request.num_samples} samples is used about {each:.0f} times"
    if _creates_model(request):
        reason = "a minute or two on a CPU"
    why = "" if _creates_model(request) else f"chosen for {request.memory_gb:.3g} GB"
    settings = [
        Setting("train.max_train_steps", steps, reason),
        Setting(
            "train.batch_size",
            batch_size,
            "a quarter of the samples, of which there are few"
            if batch_size < size.batch_size
            else why,
        ),
    ]
    if schedule.accumulation > 1:
        settings.append(
            Setting(
                "train.gradient_accumulation_steps",
                schedule.accumulation,
                "the gradient of one clip is noisy; a step averages these",
            )
        )
    if preset.uniform_timesteps:
        settings.append(Setting("train.timestep_sampling", "uniform", "as the model was trained"))
    if preset.timestep_shift is not None:
        settings.append(Setting("train.timestep_shift", *preset.timestep_shift))
    if preset.unshifted_edge is not None:
        edge = resolution_setting(request, size).value
        assert isinstance(edge, int)
        shift = edge / preset.unshifted_edge
        why = f"the pipeline's for {edge}x{edge} pixels; proportional to the edge"
        settings.append(Setting("train.timestep_shift", shift, why))
    if preset.timestep_std is not None:
        settings.append(Setting("train.timestep_std", preset.timestep_std, "as in its pipeline"))
    if preset.min_snr:
        settings.append(
            Setting("train.min_snr_gamma", 5.0, "balances timesteps; the value of its paper")
        )
    warmup = min(100, steps // 20)
    return [
        *settings,
        Setting("train.checkpoint_every", schedule.interval, "saves the adapter of this step, too"),
        Setting("optimizer.lr", preset.lr, "the usual rate for a LoRA of this family"),
        *(
            [Setting("optimizer.schedule", "cosine", "ends with small steps, for cleaner images")]
            if _creates_model(request)
            else []
        ),
        Setting("optimizer.warmup_steps", warmup, "a gentle start"),
        *(
            [
                Setting("cache_config.persistent_cache", True, "encode once, also for later runs"),
                Setting("cache_config.cache_dir", f"cache/{request.family}"),
            ]
            if not _creates_model(request)
            else []
        ),
    ]


def _validation(request: RunRequest, schedule: _Schedule) -> list[Setting]:
    preset = FAMILY_PRESETS[request.family]
    settings = [
        Setting("validation.every", schedule.interval, "compare the samples of each checkpoint"),
        Setting("validation.prompts", _prompts(request), "samples are generated from these"),
        Setting("validation.sample_steps", preset.sample_steps),
        Setting("validation.guidance", preset.guidance, "the model's usual value"),
    ]
    if request.sample_size is not None and request.kind != "audio":
        width, height = request.sample_size
        settings += [
            Setting("validation.width", width, "the most frequent bucket of your data"),
            Setting("validation.height", height),
        ]
    if request.control_images:
        settings.append(
            Setting("validation.images", list(request.control_images), "an input for each prompt")
        )
    if request.num_samples >= HOLDOUT_SAMPLES and request.kind == "image":
        settings.append(
            Setting("validation.holdout", 0.05, "their loss shows overfitting; not trained on")
        )
    return settings


def _prompts(request: RunRequest) -> list[str]:
    """Return prompts for validation: some captions, and something new."""
    if request.control_images:
        return list(request.captions[: len(request.control_images)])
    found = [caption for caption in request.captions if caption][:2]
    new = GOAL_PRESETS[request.goal].prompt
    word = request.trigger_word
    if new is not None and request.kind == "image" and request.family != "tiny":
        if word is None:
            new = None if "[trigger]" in new else new
        elif "[trigger]" not in new:
            new = f"[trigger], {new}"
        found += [new] if new is not None else []
    return found or [word or "a photo"]


def run_file_text(settings: Sequence[Setting], heading: Sequence[str]) -> str:
    """Return a run file in YAML: the settings by section, each with its reason as a comment."""
    lines = [f"# {line}".rstrip() for line in heading]
    section = ""
    for setting in settings:
        *path, name = setting.key.split(".")
        indent = "  " * len(path)
        if path and path[0] != section:
            section = path[0]
            lines += ["", f"{section}:"]
        elif not path:
            lines.append("")
        is_first = indent and lines[-1] == "datasets:"
        if setting.reason:
            width = 98 - len(indent)
            lines += [f"{indent}# {line}" for line in textwrap.wrap(setting.reason, width)]
        mark = f"{indent[:-2]}- " if is_first else indent
        lines += _yaml_lines(mark, indent, name, setting.value)
    return "\n".join(lines) + "\n"


_PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_YAML_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))


def _yaml_lines(mark: str, indent: str, name: str, value: object) -> list[str]:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [f"{mark}{name}:", *(f"{indent}  - {_scalar(each)}" for each in value)]
    return [f"{mark}{name}: {_scalar(value)}"]


def _scalar(value: object) -> str:
    """Return a value as YAML; JSON's form is valid YAML, except for exponents without a dot."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.10f}".rstrip("0")
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
