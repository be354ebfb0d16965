"""The state that gracetune's hooks share while SimpleTuner runs.

The plug-in holds gracetune's settings, datasets and cached tensors in memory, the placement of
batches, and the batch ramp (a growing effective batch size) in SimpleTuner's own training loop.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from gracetune.config.environment import environment_settings
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.hosts.in_memory_files import stage_dataset
from gracetune.hosts.shared_tensor_cache import open_tensor_cache
from gracetune.hosts.simpletuner.config_blocks import (
    SimpleTunerBlocks,
    split_config,
    split_datasets,
)
from gracetune.hosts.tensor_cache import IN_MEMORY_TYPES
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.session import MemorySession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import SimpleNamespace

    import torch

    from gracetune.config.schema import Gh200Section
    from gracetune.events.types import Event
    from gracetune.hosts.in_memory_files import StagedDatasetConfig, StagedFiles
    from gracetune.hosts.tensor_cache import TensorCache
    from gracetune.memory.platform import Machine


log = logging.getLogger("gracetune")
TEXT_EMBEDS = "text_embeds"
"""The `dataset_type` of datasets in which SimpleTuner caches text embeddings."""
DEFAULT_TEXT_BACKEND_PREFIX = "text-embeds"
"""Prefix of the id of the dataset that SimpleTuner creates if none is set for text embeddings."""


def emit(event: Event) -> None:
    """Log a notice. Other events are ignored, because SimpleTuner shows its own progress."""
    if isinstance(event, Notice):
        log.log(logging.WARNING if event.level == "warning" else logging.INFO, "%s", event.text)


class SimpleTunerPlugin:
    """The state that gracetune's hooks share in one SimpleTuner process (rank)."""

    def __init__(
        self,
        environment: Mapping[str, str],
        open_machine: Callable[[], Machine],
        pin: Callable[[torch.Tensor], torch.Tensor],
        shared_folder: Path | None = None,
    ) -> None:
        """`pin` pins cached tensors; processes with the same `shared_folder` share memory."""
        self.blocks = SimpleTunerBlocks()
        self.memory: TensorCache | None = None
        self.runtime: dict[str, object] = {}
        self._environment = environment
        self._pin = pin
        self.shared_folder = shared_folder
        self._staged_datasets: dict[str, StagedDatasetConfig] = {}
        self._dataset_types: dict[str, object] = {}
        self._staged_files: dict[str, StagedFiles] = {}
        self.session = MemorySession(open_machine, lambda: environment_settings(environment), emit)
        """Gives hints for batches, and serves the functions of `simpletuner.gh200`."""

    def split_config(self, config: Mapping[str, object]) -> dict[str, object]:
        """Apply gracetune's settings; return the configuration without them, for SimpleTuner."""
        rest, blocks = split_config(config, self._environment)
        if blocks == self.blocks or (len(rest) == len(config) and self.blocks.raw):
            return rest  # read a second time, or another mapping without any of our keys
        self.blocks = blocks
        for text in self.blocks.notices:
            log.info("%s", text)
        for text in self.blocks.ignored:
            log.warning("%s", text)
        self.session.hints_override = self.blocks.gh200.enable_uvm_hints
        cache = self.blocks.cache
        if cache is not None and {cache.vae_cache_type, cache.text_cache_type} & {*IN_MEMORY_TYPES}:
            num_ranks = int(self._environment.get("LOCAL_WORLD_SIZE", "1"))
            self.memory = open_tensor_cache(
                cache.host_budget_gb, num_ranks, self.shared_folder, self._pin, emit
            )
        return rest

    def split_datasets(self, entries: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Remember which datasets to hold in memory; return the entries for SimpleTuner."""
        rest, staged = split_datasets(entries, self._environment)
        self._staged_datasets |= {each.id: each for each in staged}
        self._dataset_types |= {str(each.get("id")): each.get("dataset_type") for each in entries}
        if self.blocks.gh200.enable_batch_size_rampup:
            for each in entries:
                if each.get("train_batch_size") is not None:
                    log.warning(
                        "dataset %r sets its own train_batch_size; the batch ramp counts samples "
                        "with the train_batch_size of config.json",
                        each.get("id"),
                    )
        return rest

    def tensor_cache_for(self, dataset: str) -> TensorCache | None:
        """Return the memory for a dataset's cache files, or None to read them from disk."""
        cache = self.blocks.cache
        if cache is None:
            return None
        is_default_text = dataset not in self._dataset_types and dataset.startswith(
            DEFAULT_TEXT_BACKEND_PREFIX
        )
        is_text = is_default_text or self._dataset_types.get(dataset) == TEXT_EMBEDS
        cache_type = cache.text_cache_type if is_text else cache.vae_cache_type
        return self.memory if cache_type in IN_MEMORY_TYPES else None

    def staged_files(self, dataset: str) -> StagedFiles | None:
        """Return the files of a dataset that are held in memory; the first call reads them.

        None if the dataset is not to be held in memory.
        """
        config = self._staged_datasets.get(dataset)
        if config is None:
            return None
        if dataset not in self._staged_files:
            self._staged_files[dataset] = stage_dataset(config, emit, self.shared_folder)
        return self._staged_files[dataset]

    def staged_bytes(self, path: str) -> bytes | None:
        """Return the bytes of a dataset's file from memory, or None if it is not held there."""
        for files in self._staged_files.values():
            if files.holds(path):
                return files.read(path)
        return None

    def place_batch(self, batch: object) -> None:
        """Tell the driver where to keep the tensors of a batch: in host or in device memory.

        Does nothing between epochs, when `batch` is not a dict.
        """
        if isinstance(batch, dict) and self.session.hints_enabled:
            table = placement_table(self.blocks.gh200.placement)
            place_batch(batch, self.session.hints, table)

    def set_runtime(self, runtime: Mapping[str, object] | None) -> None:
        """Replace what `StateTracker.get_gh200_runtime_config` returns."""
        self.runtime = dict(runtime or {})

    def attach_trainer(self, trainer: SimpleNamespace) -> None:
        """Make the effective batch size of a SimpleTuner trainer grow, if that is enabled."""
        self.runtime = {"uvm_hints_enabled": self.session.hints_enabled}
        if not self.blocks.gh200.enable_batch_size_rampup or trainer.accelerator is None:
            return
        accelerator, config = trainer.accelerator, trainer.config
        schedule = build_schedule(
            self.blocks.gh200,
            config.train_batch_size,
            config.gradient_accumulation_steps,
            accelerator.num_processes,
        )
        assert schedule is not None
        check_ramp_supported(accelerator.distributed_type.name, vars(config))

        def set_accumulation(accumulation: int) -> None:
            if config.gradient_accumulation_steps != accumulation:
                log.info("GH200 ramp adjusted gradient_accumulation_steps -> %s", accumulation)
            config.gradient_accumulation_steps = AccumulationSteps(
                accumulation, lambda: bool(accelerator.sync_gradients)
            )

        ramp = SimpleTunerRamp(
            schedule, accelerator, lambda: int(trainer.state["global_step"]), set_accumulation
        )
        accelerator.accumulate = partial(ramp.accumulate, accelerator.accumulate)
        first, last = schedule.accumulation(0), schedule.accumulation(schedule.length)
        self.runtime["gradient_accumulation_schedule"] = {
            "initial_ga": first,
            "target_ga": last,
            "total_steps": schedule.length,
        }
        log.info(
            "GH200 gradient accumulation ramp enabled: %s -> %s micro-batches over %s",
            *(first, last, schedule.length),
        )
        samples = first * schedule.samples_per_micro_batch
        if samples != schedule.initial:
            log.warning(
                "gh200_optimizations.initial_effective_batch_size is %s, but the ramp starts with "
                "%s samples: SimpleTuner's micro-batches always have train_batch_size samples (%s "
                "on each of %s ranks). Lower train_batch_size to start smaller",
                *(schedule.initial, samples, config.train_batch_size, accelerator.num_processes),
            )
        if first == last:
            log.warning("the ramp has no effect: it starts and ends with %s samples", samples)
        log.warning(
            "SimpleTuner counts epochs and the learning-rate schedule with the configured "
            "gradient_accumulation_steps, %s; set max_train_steps instead of epochs",
            config.gradient_accumulation_steps,
        )


# The batch ramp on SimpleTuner's own loop
#
# accelerate divides each loss by `gradient_accumulation_steps` and makes an optimizer step when its
# micro-batch counter is a multiple of it. The ramp changes the value only right after an optimizer
# step, and resets the counter at the same time. So the loss weights of every optimizer step add up
# to 1. The position in the ramp follows from the number of optimizer steps, so a resumed run needs
# no saved state.


def check_ramp_supported(engine: str, config: Mapping[str, object]) -> None:
    """Raise if the effective batch size cannot grow, as with DeepSpeed.

    It can only if accelerate's `gradient_accumulation_steps` decides when the optimizer steps.
    """
    if engine == "DEEPSPEED":
        raise ConfigError(
            "gh200_optimizations.enable_batch_size_rampup is true, but DeepSpeed accumulates "
            "gradients itself, with a fixed number. Use FSDP or one GPU, or set it to false."
        )
    if config.get("optimizer_release_gradients"):
        raise ConfigError(
            "gh200_optimizations.enable_batch_size_rampup is true and optimizer_release_gradients "
            "is set, which makes an optimizer step in every micro-batch. Set one of them to false."
        )


class Accelerator(Protocol):
    """The attributes of accelerate's Accelerator that are needed to change the accumulation."""

    gradient_accumulation_steps: int
    sync_gradients: bool
    step: int
    num_processes: int


@dataclass(frozen=True, slots=True)
class AccumulationSchedule:
    """Computes the number of micro-batches in each optimizer step, which grows during the run."""

    initial: int
    """Effective batch size at the start, in samples."""
    target: int
    """Effective batch size at the end, in samples."""
    length: int
    """Micro-batches until the target is reached."""
    shape: Literal["quadratic", "linear"]
    samples_per_micro_batch: int

    def accumulation(self, micro_batches: int) -> int:
        """Return the number of micro-batches in the next step, when `micro_batches` are done."""
        progress = min(1.0, micro_batches / self.length)
        share = progress if self.shape == "linear" else progress * progress
        effective = self.initial + (self.target - self.initial) * share
        return math.ceil(round(effective, 6) / self.samples_per_micro_batch)

    def micro_batches_after(self, optimizer_steps: int) -> int:
        """Return the number of micro-batches in the first `optimizer_steps` steps together."""
        total = 0
        for _ in range(optimizer_steps):
            total += self.accumulation(total)
        return total


class AccumulationSteps(int):
    """An int for `gradient_accumulation_steps` whose `count % steps` is 0 where a step ends.

    SimpleTuner validates and uploads checkpoints when its micro-batch count is a multiple of this
    setting. If the setting grows during a run, that could be in the middle of an optimizer step. So
    `%` with this int returns 0 exactly at the end of an optimizer step.
    """

    _ends_step: Callable[[], bool]

    def __new__(cls, value: int, ends_step: Callable[[], bool]) -> AccumulationSteps:
        steps = super().__new__(cls, value)
        steps._ends_step = ends_step
        return steps

    def __rmod__(self, micro_batches: int) -> int:
        return 0 if self._ends_step() else micro_batches % int(self) or 1

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Copy and pickle this object as a plain int, for example for experiment trackers."""
        return int, (int(self),)


def build_schedule(
    section: Gh200Section, batch_size: int, accumulation: int, world_size: int
) -> AccumulationSchedule | None:
    """Build the schedule of the growing batch size; return None if it is not enabled."""
    if not section.enable_batch_size_rampup:
        return None
    samples = batch_size * world_size
    initial = section.initial_effective_batch_size
    target = section.target_effective_batch_size or samples * accumulation
    if initial is None or not initial <= target or target < samples:
        raise ConfigError(
            f"gh200_optimizations.initial_effective_batch_size is {initial} and the target is "
            f"{target}. A ramp needs both, must not shrink, and must end with at least one "
            f"micro-batch ({batch_size} samples on each of {world_size} ranks)."
        )
    return AccumulationSchedule(
        initial, target, section.batch_rampup_steps, section.rampup_shape, samples
    )


@dataclass
class SimpleTunerRamp:
    """Changes how many micro-batches accelerate accumulates in a step, as a schedule says."""

    schedule: AccumulationSchedule
    accelerator: Accelerator
    optimizer_steps: Callable[[], int]
    """Returns the number of optimizer steps done; called once, when the training loop begins."""
    on_change: Callable[[int], None]
    """Called at the start of each optimizer step with its number of micro-batches."""
    _micro_batches: int | None = None

    def accumulate(
        self, accumulate: Callable[..., AbstractContextManager[object]], *models: object
    ) -> AbstractContextManager[object]:
        """Call accelerate's `accumulate`, which starts a micro-batch.

        Before the first one of an optimizer step, set the number of micro-batches in the step.
        """
        if self._micro_batches is None:
            self._micro_batches = self.schedule.micro_batches_after(self.optimizer_steps())
            self._begin_step(self._micro_batches)
        elif self.accelerator.sync_gradients:
            self._begin_step(self._micro_batches)
        self._micro_batches += 1
        return accumulate(*models)

    def _begin_step(self, micro_batches: int) -> None:
        accumulation = self.schedule.accumulation(micro_batches)
        self.accelerator.step = 0
        if self.accelerator.gradient_accumulation_steps != accumulation:
            self.accelerator.gradient_accumulation_steps = accumulation
        self.on_change(accumulation)
