"""Generate samples from a trained run, one of its steps, or adapter files: `gracetune sample`.

The model is built as in training (`build.py`): the same precision, the same adapter layers and,
where the device is too small, the same weight ring. Requests come from `prompts.py`. So a sample
equals that of a validation with the same weights, prompt, seed and size.

Steps of a run are restored from their checkpoints, with averaged weights if the run exports those.
If only the adapter of a step is left, or for adapters of other tools, the adapter's file is added
to the model (`adapters/inject.py`).
"""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gracetune import __version__
from gracetune.atomic_files import atomic_file, check_writable
from gracetune.data.pipeline import tiling_rule
from gracetune.errors import AdapterError, CheckpointError, RunFailedError
from gracetune.events.types import Notice
from gracetune.memory.oversubscription import GcFreeze, hard_reclamation
from gracetune.memory.platform import Link, open_machine
from gracetune.models.attention_backends import set_attention_backend
from gracetune.models.diffusers_family import DiffusersFamily
from gracetune.models.family import load_family, transformers_of
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.optim.build import build_optimizer
from gracetune.optim.registry import optimizer_info
from gracetune.optim.schedule import AveragingOptimizer, averaged_weights
from gracetune.train.build import hash_weights, with_index
from gracetune.train.checkpoint import load_tensors
from gracetune.train.experts import build_expert_schedule, expected_token_counts
from gracetune.train.prepare_model import (
    make_trainable,
    prepare_transformer,
    quantize_frozen,
    reason_unplanned,
)
from gracetune.train.prompts import (
    SampleDefaults,
    SettingNames,
    build_requests,
    dataset_defaults,
    ignored_negatives,
    plan_prompts,
)
from gracetune.train.state import restore_optimizer, restore_weights
from gracetune.train.step import derive_seed
from gracetune.train.validate import comparison_sheet, sampling_autocast, write_sample
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from accelerate import Accelerator
    from PIL import Image

    from gracetune.adapters.files.layers import Adapter
    from gracetune.config.schema import PromptSection, RunFile, ValidationSection
    from gracetune.events.dispatcher import Emit
    from gracetune.events.types import Event
    from gracetune.models.family import Family, GeneratedSample, SampleRequest
    from gracetune.train.prompts import PlannedPrompt
    from gracetune.train.sample_targets import AdapterFiles, SampleTargets, Variant

DEFAULT_RESOLUTIONS = {"sd15": 512, "wan22": 480}
"""Width and height of samples, by family, if neither a run nor an option sets them."""
DEFAULT_RESOLUTION = 1024
DEFAULT_SECONDS = 10
ACTIVATIONS_SHARE, MIN_ACTIVATIONS = 0.25, 2 * GIB
"""Share of the device memory, and bytes at least, that are left to activations and the VAE."""
STREAM_SLOTS = 3
"""Slots of the weight ring (device buffers for one streamed block each)."""
SHEET_NAME = "comparison"


def sample_all(
    targets: SampleTargets,
    section: ValidationSection,
    prompts: Sequence[str | PromptSection],
    accelerator: Accelerator,
    out: Path,
    emit: Emit,
    report: Callable[[str, Path], None],
    names: SettingNames | None = None,
) -> list[Path]:
    """Generate a sample for every prompt with every variant of the weights; return the files.

    `section` has the settings that all prompts share, and `names` the names of these settings for
    error messages. `report` is called with a label and the path of each written file. For several
    variants, the last file is a comparison sheet.
    """
    run = targets.run
    with Sampler(run, accelerator, emit, targets.base_weights) as sampler:
        family = sampler.family
        is_known = bool(run.datasets)
        defaults = dataset_defaults(run.datasets[0]) if is_known else model_defaults(family)
        planned = plan_prompts(section, prompts, defaults, family, names)
        ignored = ignored_negatives(planned, family, names)
        if ignored:
            emit(Notice(ignored, level="warning"))
        check_writable(out, "--out")
        requests = sampler.encode(planned, names)
        written: list[Path] = []
        rows: list[tuple[str, list[Image.Image]]] = []
        for variant in targets.variants:
            images = []
            for number, sample in enumerate(sampler.generate(variant, requests)):
                one = planned[number]
                name = _free_name(out, f"{variant.name}_{number:02d}_{_slug(one)}")
                settings = _settings(run, variant, one)
                images.append(write_sample(sample, out, name, settings))
                files = sorted(out.glob(f"{name}.*"), key=lambda path: path.suffix == ".json")
                written += files
                report(variant.label, _main_file(files))
            rows.append((variant.label, images))
        if len(rows) > 1:
            path = out / f"{_free_name(out, SHEET_NAME)}.png"
            columns = [_column_label(one) for one in planned]
            with atomic_file(path) as staging:
                comparison_sheet(rows, columns, _title(run, planned)).save(staging, format="PNG")
            report("comparison", path)
            written.append(path)
    return written


def model_defaults(family: Family) -> SampleDefaults:
    """Return the size of samples of a model without a run."""
    if family.audio is not None:
        length = min(family.audio.max_length, DEFAULT_SECONDS * family.audio.sample_rate)
        return SampleDefaults(
            "audio",
            channels=family.audio.channels,
            sample_rate=family.audio.sample_rate,
            length=length,
        )
    edge = min(DEFAULT_RESOLUTIONS.get(family.name, DEFAULT_RESOLUTION), family.max_edge)
    return SampleDefaults("image", edge - edge % family.pixel_step)


# The model


@dataclass(frozen=True, slots=True)
class _Applied:
    """The weights that are in the model now, and the callbacks that remove them."""

    is_run: bool
    """True if the model has the adapter layers of the run, or its trained weights."""
    structure: ExitStack
    """Removes adapter layers and the memory plan."""
    weights: ExitStack
    """Restores weights that were swapped in."""

    def close(self) -> None:
        self.weights.close()
        self.structure.close()


class Sampler:
    """A loaded model that generates samples with several sets of weights, one after the other."""

    def __init__(
        self, run: RunFile, accelerator: Accelerator, emit: Emit, base_weights: str = ""
    ) -> None:
        """Load the model of a run. `base_weights` is the digest of the weights that its adapter was
        trained on: a warning says if the model has others.
        """
        self.run = run
        self.emit = emit
        self.accelerator = accelerator
        self.device = with_index(accelerator.device)
        self.family: Family = load_family(run.model)
        self._base_weights = base_weights
        self._digest = hash_weights(self.family) if base_weights else None
        if run.model.quantize != "none":
            self._check_base_weights()  # before they are quantized
        if run.model.frozen_compute == "fp8":
            emit(Notice("model.frozen_compute is fp8; samples are computed in bf16"))
        quantize_frozen(run, self.family, emit)
        self.family.transformer.requires_grad_(False)
        self._unplanned = reason_unplanned(run, self.device)
        self._link = open_machine(self.device.index or 0).platform.link
        self._streams_all = False
        self._is_prepared = False
        self._applied: _Applied | None = None
        transformers = transformers_of(self.family.transformer).values()
        set_attention_backend(transformers, run.model.attention_mechanism, emit)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._applied is not None:
            self._applied.close()

    def encode(
        self, planned: Sequence[PlannedPrompt], names: SettingNames | None = None
    ) -> list[SampleRequest]:
        """Encode the prompts, then free the text encoders."""
        self.family.to(self.device)
        tiling = tiling_rule(self.run, self.family)
        requests = build_requests(planned, self.family, tiling, names)
        self.family.release_text_encoder()
        self._clear_cached_memory()
        return requests

    def generate(
        self, variant: Variant, requests: Sequence[SampleRequest]
    ) -> Iterator[GeneratedSample]:
        """Yield the samples of all requests with one set of weights, each when it is ready."""
        self._apply(variant)
        is_split = isinstance(self.family, DiffusersFamily)  # it generates one sample at a time
        for request in requests:
            for part in _one_by_one(request) if is_split else [request]:
                reason = ""
                try:
                    samples = self._sample(part)
                except torch.OutOfMemoryError as error:
                    reason = str(error).splitlines()[0]
                if reason:
                    self._stream_everything(variant, reason)
                    samples = self._sample(part)
                yield from samples

    def _sample(self, request: SampleRequest) -> list[GeneratedSample]:
        self.family.transformer.eval()
        autocast = sampling_autocast(self.accelerator, self.family.transformer)
        with torch.no_grad(), autocast, warnings.catch_warnings():
            # Autocast casts the input of a norm, but not its weight.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            return self.family.sample(request)

    def _stream_everything(self, variant: Variant, reason: str) -> None:
        """Stream the weights of all blocks; raise if they stream already, or cannot."""
        if self._streams_all or self._unplanned:
            raise RunFailedError(
                f"the device is out of memory ({reason}). Give a smaller --size, or fewer --frames."
            )
        self.emit(Notice(f"out of memory: all weights stream now ({reason})", fallback=True))
        self._streams_all = True
        self._remove()
        self._clear_cached_memory()
        self._apply(variant)

    # Weights

    def _check_base_weights(self) -> None:
        if self._digest is not None and self._digest.result() != self._base_weights:
            text = "the model has other weights than the run was trained on, so samples differ from"
            hint = "those of its validations. Name the model of the run with --model FAMILY=PATH"
            self.emit(Notice(f"{text} {hint}", level="warning"))
        self._digest = None

    def _apply(self, variant: Variant) -> None:
        self._check_base_weights()
        applied = self._applied
        has_structure = applied is not None and applied.is_run and self.run.adapter is not None
        if has_structure and variant.checkpoint is not None:  # only the adapter's weights change
            assert applied is not None
            applied.weights.close()
            self._restore(variant.checkpoint, applied.weights)
            return
        self._remove()
        with ExitStack() as undo:
            structure, weights = undo.enter_context(ExitStack()), undo.enter_context(ExitStack())
            if variant.is_run:
                self._build_as_trained(structure)
                if variant.checkpoint is not None:
                    self._restore(variant.checkpoint, weights)
                if self.run.adapter is None:
                    self.family.transformer.requires_grad_(False)  # frozen weights can stream
            elif variant.adapters:
                self._install(variant.adapters, structure)
            self._place(structure)
            self._applied = _Applied(variant.is_run, structure.pop_all(), weights.pop_all())

    def _remove(self) -> None:
        if self._applied is not None:
            self._applied.close()
            self._applied = None

    def _build_as_trained(self, undo: ExitStack) -> None:
        """Add the adapter of the run, or unfreeze the trained weights, as in training."""
        run, family = self.run, self.family
        counts = expected_token_counts(run, family)
        schedule = build_expert_schedule(run.train, family.boundary, counts)
        make_trainable(run, family, schedule, _ignore)  # its notices are about training
        if run.adapter is not None:
            from gracetune.adapters.inject import remove_adapters

            for transformer in transformers_of(family.transformer).values():
                undo.callback(remove_adapters, transformer)

    def _restore(self, path: Path, undo: ExitStack) -> None:
        """Load the weights that the run would export at this checkpoint."""
        named = self.family.transformer.named_parameters()
        parameters = {name: p for name, p in named if p.requires_grad}
        tensors = load_tensors(path, "ema") or load_tensors(path, "weights")
        try:
            restore_weights(parameters, tensors)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} does not fit the model: {error} Sample with the model that the run was "
                "trained on."
            ) from error
        section = self.run.optimizer
        if self.run.train.ema_decay or not optimizer_info(section.name).averages_weights:
            return
        optimizer = build_optimizer(parameters, section, derive_seed(0, "rounding"))
        if isinstance(optimizer, AveragingOptimizer):
            restore_optimizer(optimizer, parameters, load_tensors(path, "optimizer"))
            undo.enter_context(averaged_weights(optimizer))

    def _install(self, adapters: Sequence[AdapterFiles], undo: ExitStack) -> None:
        from gracetune.adapters.inject import install_adapters  # peft takes seconds to import

        transformers = transformers_of(self.family.transformer)
        parts = [
            (read_part(path, self.family.name, transformers.keys()), files.strength)
            for files in adapters
            for path in files.paths
        ]
        for adapter, _ in parts:
            for text in adapter.notices:
                self.emit(Notice(f"adapter: {text}"))
        install_adapters(transformers, parts, undo)

    # Memory

    def _clear_cached_memory(self) -> None:
        if self.device.type == "cuda":
            hard_reclamation(self.device.index, GcFreeze())()

    def _place(self, undo: ExitStack) -> None:
        """Move the model to the device; weights for which there is no room stream from the host."""
        family = self.family
        if self._unplanned:
            family.transformer.to(self.device)
        else:
            # Imported here, because the planner takes seconds to import.
            from gracetune.plan.apply import PlanLayout
            from gracetune.plan.planner import apply_layout, device_nbytes_for, fuse_family
            from gracetune.plan.result import BlockPlan

            fuse_family(family, undo)
            one_memory = self._link is Link.INTEGRATED  # nothing to stream from
            room = device_nbytes_for(self.run, family, self.device, one_memory)
            per_transformer = len(family.blocks()) // len(transformers_of(family.transformer))
            count = per_transformer if self._streams_all else num_streamed(family, room)
            count = 0 if one_memory else count
            if count:
                text = f"{count} of {per_transformer} blocks stream from host memory"
                self.emit(Notice(f"plan: {text}, {format_bytes(room)} of device memory are free"))
            is_streamed = _spread(count, per_transformer)
            blocks = [BlockPlan("streamed" if s else "resident", "keep") for s in is_streamed]
            layout = PlanLayout(blocks, compiled=False, slots=STREAM_SLOTS)
            applied = apply_layout(
                layout, family, open_copy_engine(self.device, self._link), self.emit
            )
            undo.callback(applied.close)
        if not self._is_prepared:
            is_planned = not self._unplanned
            prepare_transformer(self.accelerator, family.transformer, is_placed=is_planned)
            self._is_prepared = True


def _one_by_one(request: SampleRequest) -> list[SampleRequest]:
    """Split a request into requests for one sample each, with the same results."""
    return [
        replace(
            request,
            texts=[text],
            seed=request.seed + number,
            images=request.images[number : number + 1],
            empty_texts=request.empty_texts[number : number + 1],
        )
        for number, text in enumerate(request.texts)
    ]


def _ignore(_: Event) -> None:
    pass


def num_streamed(family: Family, room: int) -> int:
    """Return how many blocks of each transformer must stream to fit into `room` bytes.

    A part of the room is left to activations and to the VAE.
    """
    blocks, transformers = family.blocks(), transformers_of(family.transformer)
    per_transformer = len(blocks) // len(transformers)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    total = sum(p.nbytes for p in family.transformer.parameters())
    reserve = max(int(room * ACTIVATIONS_SHARE), min(MIN_ACTIVATIONS, room // 2))
    if total <= room - reserve:
        return 0
    largest = max(sizes)
    slots = STREAM_SLOTS * largest
    missing = total + slots - (room - reserve)
    return min(per_transformer, -(-missing // (largest * len(transformers))))


def _spread(count: int, total: int) -> list[bool]:
    """Return a list of `total` flags of which `count` are True, spread evenly."""
    return [(index + 1) * count // total > index * count // total for index in range(total)]


def read_part(path: Path, family: str, experts: Any) -> Adapter:
    """Read an adapter file of any tool, for the transformers that the model has."""
    from gracetune.adapters.files.io import find_stage, read_adapter
    from gracetune.adapters.files.keys import get_table
    from gracetune.adapters.files.layers import with_stage
    from gracetune.models.family import key_tables

    tables = key_tables()
    adapter = read_adapter(path, tables, get_table(family, tables))
    if "" in experts or adapter.stages != (None,):
        return adapter
    stage, _ = find_stage(adapter, path)
    if stage is None:
        raise AdapterError(
            f"{path} does not say which of the two transformers it is for. Put high_noise or "
            "low_noise into the file's name.",
            kind="mixed-stages",
        )
    return with_stage(adapter, stage)


# Files


def _settings(run: RunFile, variant: Variant, one: PlannedPrompt) -> dict[str, object]:
    """Return everything that a sample depends on, to be stored with it."""
    size: dict[str, object] = {"width": one.shape[0], "height": one.shape[1]}
    if one.kind == "audio":
        size = {"channels": one.shape[0], "samples": one.shape[1]}
    elif one.kind == "video":
        size["frames"] = one.shape[2]
    return {
        "gracetune": __version__,
        "family": run.model.family,
        "model": run.model.path,
        "weights": variant.label,
        "checkpoint": None if variant.checkpoint is None else str(variant.checkpoint),
        "adapters": [
            {"file": str(path), "strength": files.strength}
            for files in variant.adapters
            for path in files.paths
        ],
        "prompt": one.prompt,
        "negative_prompt": one.negative_prompt,
        "seed": one.seed,
        **size,
        "steps": one.steps,
        "guidance": one.guidance,
        "images": list(one.images),
    }


def _slug(one: PlannedPrompt) -> str:
    words = re.sub(r"[^\w]+", "-", one.prompt.lower()).strip("-")[:40].strip("-")
    return f"{words or 'empty'}_seed{one.seed}"


def _free_name(folder: Path, name: str) -> str:
    """Return a name without suffix that no file in the folder has; nothing is overwritten."""
    taken = {path.stem for path in folder.iterdir()}
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def _main_file(files: Sequence[Path]) -> Path:
    """Return the file of a sample that the user opens: the clip or sound, or else the image."""
    return min(files, key=lambda path: (path.suffix == ".json", path.suffix == ".png"))


def _title(run: RunFile, planned: Sequence[PlannedPrompt]) -> str:
    """Return the title of a comparison sheet: the model, and settings that all prompts share."""
    model = run.model.family if run.model.path is None else f"{run.model.family} {run.model.path}"
    steps = {one.steps for one in planned}
    guidance = {one.guidance for one in planned}
    parts = [model]
    parts += [f"{value} steps" for value in steps if len(steps) == 1]
    parts += [f"guidance {value:g}" for value in guidance if len(guidance) == 1]
    return ", ".join(parts)


def _column_label(one: PlannedPrompt) -> str:
    negative = f"  (not: {one.negative_prompt})" if one.negative_prompt else ""
    return f"{one.prompt or '(empty prompt)'}{negative}\nseed {one.seed}"
