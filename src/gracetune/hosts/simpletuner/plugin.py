"""What the hooks share while SimpleTuner runs: its configuration's blocks, data and tensors held in
memory, the ramp, and where batches are placed."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from gracetune.config.environment import environment_settings
from gracetune.data.staging import host_room
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.hosts.shared_tensor_memory import SharedTensorMemory
from gracetune.hosts.simpletuner.config_blocks import (
    SimpleTunerBlocks,
    split_config,
    split_datasets,
)
from gracetune.hosts.staged_files import stage_dataset
from gracetune.hosts.tensor_memory import LocalTensorMemory
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.session import MemorySession
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import SimpleNamespace

    import torch

    from gracetune.config.schema import Gh200Section
    from gracetune.events.types import Event
    from gracetune.hosts.staged_files import StagedFiles, StagedDatasetConfig
    from gracetune.hosts.tensor_memory import TensorMemory
    from gracetune.memory.platform import Machine


log = logging.getLogger("gracetune")
IN_MEMORY_TYPES = ("memory", "unified_memory")
TEXT_EMBEDS = "text_embeds"
DEFAULT_TEXT_BACKEND_PREFIX = "text-embeds"
"""How the name of a data set begins that SimpleTuner makes where the file has none for texts."""
_MEMORY_SHARE = 0.5
"""Of what the host can spare, for tensors of caches, where nothing is said."""


def emit(event: Event) -> None:
    """Notices go to the log of the run; progress is SimpleTuner's to show."""
    if isinstance(event, Notice):
        log.log(logging.WARNING if event.level == "warning" else logging.INFO, "%s", event.text)


class SimpleTunerPlugin:
    """One a process."""

    def __init__(
        self,
        environment: Mapping[str, str],
        open_machine: Callable[[], Machine],
        pin: Callable[[torch.Tensor], torch.Tensor],
        meet_in: Path | None = None,
    ) -> None:
        self.blocks = SimpleTunerBlocks()
        self.memory: TensorMemory | None = None
        self.runtime: dict[str, object] = {}
        self._environment = environment
        self._pin = pin
        self._meet_in = meet_in
        self._staged_datasets: dict[str, StagedDatasetConfig] = {}
        self._dataset_types: dict[str, object] = {}
        self._staged_files: dict[str, StagedFiles] = {}
        self._session = MemorySession(open_machine, lambda: environment_settings(environment), emit)

    def split_config(self, config: Mapping[str, object]) -> dict[str, object]:
        """What SimpleTuner may see of its configuration."""
        rest, blocks = split_config(config, self._environment)
        if blocks == self.blocks or (len(rest) == len(config) and self.blocks.raw):
            return rest  # read again, or another mapping with nothing of ours in it
        self.blocks = blocks
        for text in self.blocks.notices:
            log.info("%s", text)
        for text in self.blocks.ignored:
            log.warning("%s", text)
        self._session.hints_override = self.blocks.gh200.enable_uvm_hints
        cache = self.blocks.cache
        if cache is not None and {cache.vae_cache_type, cache.text_cache_type} & {*IN_MEMORY_TYPES}:
            self.memory = self._open_memory(cache.host_budget_gb)
        return rest

    def _open_memory(self, limit_gib: float | None) -> TensorMemory:
        """Ranks of one machine share what it has, and what each of them has loaded."""
        ranks = int(self._environment.get("LOCAL_WORLD_SIZE", "1"))
        if limit_gib is not None:
            budget = int(limit_gib * GIB)
        else:
            budget = max(0, int(host_room() * _MEMORY_SHARE / ranks))
        log.info("cache files are kept in host memory, up to %s", format_bytes(budget))
        if ranks == 1 or self._meet_in is None:
            return LocalTensorMemory(budget, self._pin)
        log.info("each of %s ranks holds a share of them, for all of this machine", ranks)
        return SharedTensorMemory(budget, self._meet_in, emit)

    def split_datasets(self, entries: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """What SimpleTuner may see of its data sets."""
        rest, staged = split_datasets(entries, self._environment)
        self._staged_datasets |= {each.id: each for each in staged}
        self._dataset_types |= {str(each.get("id")): each.get("dataset_type") for each in entries}
        if self.blocks.gh200.enable_batch_size_rampup:
            for each in entries:
                if each.get("train_batch_size") is not None:
                    log.warning(
                        "data set %r has a train_batch_size of its own; the ramp counts samples by "
                        "that of config.json",
                        each.get("id"),
                    )
        return rest

    def tensor_memory_for(self, dataset: str) -> TensorMemory | None:
        """Where the tensors that a data set's backend loads are kept; none: on disk alone."""
        cache = self.blocks.cache
        if cache is None:
            return None
        made = dataset not in self._dataset_types and dataset.startswith(
            DEFAULT_TEXT_BACKEND_PREFIX
        )
        texts = made or self._dataset_types.get(dataset) == TEXT_EMBEDS
        kept = cache.text_cache_type if texts else cache.vae_cache_type
        return self.memory if kept in IN_MEMORY_TYPES else None

    def staged_files(self, dataset: str) -> StagedFiles | None:
        """The files of a data set in memory, staged when its backend is made."""
        chosen = self._staged_datasets.get(dataset)
        if chosen is None:
            return None
        if dataset not in self._staged_files:
            self._staged_files[dataset] = stage_dataset(chosen, emit, self._meet_in)
        return self._staged_files[dataset]

    def staged_bytes(self, path: str) -> bytes | None:
        """The bytes of a file of any staged data set."""
        for shelf in self._staged_files.values():
            if shelf.holds(path):
                return shelf.read(path)
        return None

    def place_batch(self, batch: object) -> None:
        """Hint where the tensors of a batch live; at the end of an epoch there is no batch."""
        if isinstance(batch, dict) and self._session.hints_enabled:
            table = placement_table(self.blocks.gh200.placement)
            place_batch(batch, self._session.hints, table)

    def attach_trainer(self, trainer: SimpleNamespace) -> None:
        """Once accelerator and configuration are there: the ramp, and what is told of us."""
        self.runtime = {"uvm_hints_enabled": self._session.hints_enabled}
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

        def follow(accumulation: int) -> None:
            if config.gradient_accumulation_steps != accumulation:
                log.info("GH200 ramp adjusted gradient_accumulation_steps -> %s", accumulation)
            config.gradient_accumulation_steps = AccumulationSteps(
                accumulation, lambda: bool(accelerator.sync_gradients)
            )

        ramp = SimpleTunerRamp(
            schedule, accelerator, lambda: int(trainer.state["global_step"]), follow
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
        log.warning(
            "SimpleTuner counts epochs and the learning-rate schedule by the "
            "gradient_accumulation_steps of its configuration, %s; set max_train_steps, not epochs",
            config.gradient_accumulation_steps,
        )


def check_ramp_supported(engine: str, config: Mapping[str, object]) -> None:
    """Where another engine accumulates gradients, a ramp would be wrong or do nothing."""
    if engine == "DEEPSPEED":
        raise ConfigError(
            "gh200_optimizations.enable_batch_size_rampup is true, but DeepSpeed accumulates "
            "gradients itself, by a fixed number. Use FSDP or one GPU, or set it to false."
        )
    if config.get("optimizer_release_gradients"):
        raise ConfigError(
            "gh200_optimizations.enable_batch_size_rampup is true and optimizer_release_gradients "
            "is set, which steps in every micro-batch. Set one of them to false."
        )


# ------------------------------------------------------------------------------------------
# The ramp on SimpleTuner's own loop: accumulation changes between optimizer steps only.
#
# Accelerate divides each loss by the accumulation of the moment and steps when its own count is a
# multiple of it. Both are set here at once, right after a step, and the count begins anew: so every
# optimizer step weighs 1. Where a ramp is after a number of optimizer steps follows from that
# number,
# so that resuming needs nothing saved.


class Accelerator(Protocol):
    """The part of accelerate's that is used."""

    gradient_accumulation_steps: int
    sync_gradients: bool
    step: int
    num_processes: int


@dataclass(frozen=True, slots=True)
class AccumulationSchedule:
    """Micro-batches of an optimizer step, by the micro-batches before it: as the trainer's own."""

    initial: int
    target: int
    length: int
    shape: Literal["quadratic", "linear"]
    samples_per_micro_batch: int

    def accumulation(self, micro_batches: int) -> int:
        """Micro-batches in the optimizer step that starts after this many."""
        done = min(1.0, micro_batches / self.length)
        share = done if self.shape == "linear" else done * done
        effective = self.initial + (self.target - self.initial) * share
        return math.ceil(round(effective, 6) / self.samples_per_micro_batch)

    def micro_batches_after(self, optimizer_steps: int) -> int:
        """Micro-batches that so many optimizer steps have taken."""
        done = 0
        for _ in range(optimizer_steps):
            done += self.accumulation(done)
        return done


class AccumulationSteps(int):
    """Micro-batches of the optimizer step at work, as SimpleTuner's configuration holds them.

    SimpleTuner validates, and uploads a checkpoint, where its count of micro-batches is a multiple
    of this number. While the number grows, that is in the middle of a step, or never: so the
    remainder answers what is asked by it, and is 0 where a step ends.
    """

    _ends_step: Callable[[], bool]

    def __new__(cls, value: int, ends_step: Callable[[], bool]) -> AccumulationSteps:
        made = super().__new__(cls, value)
        made._ends_step = ends_step
        return made

    def __rmod__(self, micro_batches: int) -> int:
        return 0 if self._ends_step() else micro_batches % int(self) or 1

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy, such as the one that trackers are given, is a plain number."""
        return int, (int(self),)


def build_schedule(
    section: Gh200Section, batch_size: int, accumulation: int, world_size: int
) -> AccumulationSchedule | None:
    """The ramp that a configuration asks for, if it does."""
    if not section.enable_batch_size_rampup:
        return None
    size = batch_size * world_size
    initial = section.initial_effective_batch_size
    target = section.target_effective_batch_size or size * accumulation
    if initial is None or not initial <= target or target < size:
        raise ConfigError(
            f"gh200_optimizations.initial_effective_batch_size is {initial} and the target is "
            f"{target}; a ramp needs both, grows, and ends with at least one micro-batch "
            f"({batch_size} samples on each of {world_size} ranks)."
        )
    return AccumulationSchedule(
        initial, target, section.batch_rampup_steps, section.rampup_shape, size
    )


@dataclass
class SimpleTunerRamp:
    """A schedule on its way; `enter` goes where the loop opens `accelerator.accumulate`."""

    schedule: AccumulationSchedule
    accelerator: Accelerator
    steps_done: Callable[[], int]
    """Optimizer steps so far: asked once, when the loop begins."""
    on_change: Callable[[int], None]
    """Called with each new accumulation, which others must know too."""
    _micro_batches: int | None = None

    def accumulate(
        self, accumulate: Callable[..., AbstractContextManager[object]], *models: object
    ) -> AbstractContextManager[object]:
        """Set what the step that begins now has, then let accelerate count."""
        if self._micro_batches is None:
            self._micro_batches = self.schedule.micro_batches_after(self.steps_done())
            self._begin_step()
        elif self.accelerator.sync_gradients:
            self._begin_step()
        self._micro_batches += 1
        return accumulate(*models)

    def _begin_step(self) -> None:
        assert self._micro_batches is not None
        wanted = self.schedule.accumulation(self._micro_batches)
        self.accelerator.step = 0
        if self.accelerator.gradient_accumulation_steps != wanted:
            self.accelerator.gradient_accumulation_steps = wanted
        self.on_change(wanted)
