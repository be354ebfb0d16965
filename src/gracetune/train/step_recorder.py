"""Record the times and losses of training steps without waiting for the device.

`train_step` calls a `StepRecorder`: it marks the phases of a step, and hands over the losses of
samples, which stay on the device. Every `logging.every` steps, when the loop waits for the device
anyway, `StepRecorder.take` reads all of it at once.

On CUDA a mark is an event in the compute stream, on a CPU a time of the clock.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from gracetune.errors import GracetuneError
from gracetune.train.weight_movement import WeightMovement, sampled_norms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from gracetune.data.sample import Batch, Sample
    from gracetune.models.family import Expert, Family
    from gracetune.train.export import AdaptedModules

NUM_TIMESTEP_RANGES = 4
MARKS = {
    "begin": "forward and backward",
    "gradients": "summing gradients over ranks",
    "reduced": "the optimizer's update",
    "updated": "reading results from the device, logging and checks",
}
"""Mark of a step -> the phase that begins with it, in words."""
PHASES = ("gradients", "reduced", "updated")
"""Marks of a step, in order, after `begin`: the micro-batches are done; gradients are summed over
ranks; the weights are updated."""


@runtime_checkable
class PartedFamily(Protocol):
    """A model family whose output has several parts, such as a video and its sound."""

    def part_losses(self, predicted: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Return the mean squared error of each part of the output, one value per sample."""
        ...


def timestep_range(timestep: float) -> str:
    """Return the label of the range that a timestep is in, as in `t0.25-0.50`."""
    number = min(NUM_TIMESTEP_RANGES - 1, max(0, int(timestep * NUM_TIMESTEP_RANGES)))
    low, high = number / NUM_TIMESTEP_RANGES, (number + 1) / NUM_TIMESTEP_RANGES
    return f"t{low:.2f}-{high:.2f}"


TIMESTEP_RANGES = tuple(timestep_range(i / NUM_TIMESTEP_RANGES) for i in range(NUM_TIMESTEP_RANGES))


@dataclass(slots=True)
class LossTable:
    """Sums of losses and numbers of samples by name."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, name: str, loss: float, count: int = 1) -> None:
        """Add the loss of one sample, or the sum of several."""
        self.sums[name] += loss
        self.counts[name] += count

    def merge(self, other: LossTable) -> None:
        """Add the sums of another rank."""
        for name, loss in other.sums.items():
            self.add(name, loss, other.counts[name])

    def means(self, names: Iterable[str] = ()) -> dict[str, dict[str, float]]:
        """Return `{"loss": mean, "samples": count}` by name; `names` come first, also without any.

        A name without samples has no loss.
        """
        found: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys((*names, *self.sums)):
            count = self.counts.get(name, 0)
            found[name] = {"samples": count}
            if count:
                found[name]["loss"] = self.sums[name] / count
        return found


@dataclass(slots=True)
class StepRecords:
    """Records of the steps since the last call of `take`."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Sums over these steps: `data` (waiting for batches), and the marks of `PHASES`."""
    by_dataset: LossTable = field(default_factory=LossTable)
    by_timestep: LossTable = field(default_factory=LossTable)
    by_part: LossTable = field(default_factory=LossTable)
    by_part_range: LossTable = field(default_factory=LossTable)
    """Losses of the parts of the output by range of timesteps, named `audio t0.25-0.50`."""
    by_expert: LossTable = field(default_factory=LossTable)
    latent_spread: LossTable = field(default_factory=LossTable)
    """Standard deviation of the latents of a few samples over positions, by dataset; 0: flat."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """Gradient norm of each trained weight in one of the steps; may be empty."""


@dataclass(frozen=True, slots=True)
class _Losses:
    samples: tuple[Sample, ...]
    timesteps: Tensor
    losses: Tensor
    expert: str
    spread: Tensor | None
    inputs: Tensor
    """Sums over the latents and over the text embeddings of each sample; not finite if a value is
    not."""
    parts: Mapping[str, Tensor]
    """Losses of the parts of the output; empty if it has one."""


class NotFinite(NamedTuple):
    """The first micro-batch with a loss that is not finite."""

    files: tuple[str, ...]
    """The files of its samples."""
    bad: tuple[str, ...]
    """Those with a loss that is not finite."""
    latents: tuple[str, ...]
    """Those whose latents are not finite."""
    texts: tuple[str, ...]
    """Those whose text embeddings are not finite."""


class NoRecorder:
    """Records nothing, for code that runs steps outside of a run."""

    data_failed = False

    def mark(self, name: str) -> None:
        """Do nothing."""

    def timed(self, batches: Iterable[tuple[Batch, bool]]) -> Iterable[tuple[Batch, bool]]:
        """Return the batches unchanged."""
        return batches

    def add_losses(
        self, batch: Batch, timesteps: Tensor, losses: Tensor, expert: Expert | None
    ) -> None:
        """Do nothing."""

    def add_parts(self, predicted: Tensor, target: Tensor) -> None:
        """Do nothing."""

    def add_gradients(self, scale: Tensor) -> None:
        """Do nothing."""


class StepRecorder:
    """Collects the times and losses of the steps of one rank."""

    def __init__(self, device: torch.device, family: Family, movement: WeightMovement) -> None:
        self.movement = movement
        self.wants_gradients = True
        """True if the next step should record the gradient norm of each block."""
        self.waiting_since: float | None = None
        """Time of the clock at which the step began to wait for a batch; None while it does not."""
        self.data_failed = False
        """True if a batch could not be loaded, which ends the run."""
        self.phase = "before the first step"
        """What the CPU does now, in words."""
        self._is_cuda = device.type == "cuda"
        self._parted = family if isinstance(family, PartedFamily) else None
        self._split = family.split_encoded
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._losses: list[_Losses] = []
        self._parts: Mapping[str, Tensor] = {}
        self._gradients: tuple[list[str], Tensor] | None = None
        self._data_s = 0.0

    # Called in a step

    def mark(self, name: str) -> None:
        """Mark the end of a phase of the step; `begin` marks its start."""
        self.phase = MARKS[name]
        if not self._is_cuda:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((name, event))

    def timed(self, batches: Iterable[tuple[Batch, bool]]) -> Iterator[tuple[Batch, bool]]:
        """Yield the batches of a step, and measure how long each one was waited for."""
        iterator = iter(batches)
        while True:
            self.waiting_since = time.monotonic()
            began = time.perf_counter()
            try:
                following = next(iterator)
            except StopIteration:
                return
            except GracetuneError:
                self.data_failed = True
                raise
            finally:
                self._data_s += time.perf_counter() - began
                self.waiting_since = None
            yield following

    def add_losses(
        self, batch: Batch, timesteps: Tensor, losses: Tensor, expert: Expert | None
    ) -> None:
        """Keep the losses of a micro-batch that is trained on; nothing is read from the device."""
        parts, self._parts = self._parts, {}
        if not losses.requires_grad:
            return
        spread = None
        if not self._losses:  # of one micro-batch only, because it is another kernel
            x0, _ = self._split(batch.latents)
            spread = x0.detach().float().flatten(2).std(2).mean(1)
        inputs = torch.stack([_sums(batch, [batch.latents]), _sums(batch, batch.text.values())])
        values = (batch.samples, timesteps, losses.detach(), expert or "", spread, inputs, parts)
        self._losses.append(_Losses(*values))

    def add_parts(self, predicted: Tensor, target: Tensor) -> None:
        """Keep the loss of each part of the output, if the family has several."""
        if self._parted is not None and predicted.requires_grad:
            with torch.no_grad():
                self._parts = self._parted.part_losses(predicted.detach(), target)

    def add_gradients(self, scale: Tensor) -> None:
        """Keep the gradient norms of one step, if they are wanted; `scale` as for clipping."""
        if self.wants_gradients:
            self.wants_gradients = False
            self._gradients = self.movement.gradient_norms(scale)

    # Called between steps

    def files_since(self, num_micro_batches: int) -> tuple[str, ...]:
        """Return the files of the samples in the last micro-batches of this rank."""
        last = self._losses[-num_micro_batches:]
        return tuple(sample.key for one in last for sample in one.samples)

    def first_not_finite(self) -> NotFinite | None:
        """Return the first micro-batch since the last `take` with a loss that is not finite."""
        for one in self._losses:
            is_bad = [not ok for ok in one.losses.isfinite().tolist()]
            if any(is_bad):
                latents, texts = (~one.inputs.isfinite()).tolist()
                files = tuple(sample.key for sample in one.samples)
                return NotFinite(
                    files, *(tuple(compress(files, f)) for f in (is_bad, latents, texts))
                )
        return None

    def take(self) -> StepRecords:
        """Return everything since the last call. The device must have finished the steps."""
        records = StepRecords(seconds=self._take_seconds())
        records.steps = int(records.seconds.pop("steps"))
        self._take_losses(records)
        if self._gradients is not None:
            names, norms = self._gradients
            records.grad_norms = dict(zip(names, norms.tolist(), strict=True))
            self._gradients = None
        return records

    def _take_seconds(self) -> dict[str, float]:
        seconds = {"data": self._data_s, "steps": 0.0, **dict.fromkeys(PHASES, 0.0)}
        self._data_s = 0.0
        current: dict[str, float | torch.cuda.Event] = {}
        for name, stamp in self._marks:
            if name == "begin":
                current = {}  # a step that ran out of memory begins again
            current[name] = stamp
            if name == PHASES[-1] and len(current) == len(PHASES) + 1:
                previous = current["begin"]
                for phase in PHASES:
                    seconds[phase] += _elapsed(previous, current[phase])
                    previous = current[phase]
                seconds["steps"] += 1
        self._marks.clear()
        return seconds

    def _take_losses(self, records: StepRecords) -> None:
        kept, self._losses = self._losses, []
        if not kept:
            return
        losses = torch.cat([one.losses for one in kept]).tolist()
        timesteps = torch.cat([one.timesteps.to(one.losses) for one in kept]).tolist()
        samples = [(one, sample) for one in kept for sample in one.samples]
        kinds = {sample.kind for _, sample in samples}
        for (one, sample), loss, timestep in zip(samples, losses, timesteps, strict=True):
            records.by_dataset.add(sample.dataset, loss)
            records.by_timestep.add(timestep_range(timestep), loss)
            if one.expert:
                records.by_expert.add(one.expert, loss)
            if self._parted is None and len(kinds) > 1:
                records.by_part.add(sample.kind, loss)
        for name in dict.fromkeys(name for one in kept for name in one.parts):
            having = [one for one in kept if name in one.parts]
            values = torch.cat([one.parts[name] for one in having]).tolist()
            places = torch.cat([one.timesteps for one in having]).tolist()
            for loss, timestep in zip(values, places, strict=True):
                records.by_part.add(name, loss)
                records.by_part_range.add(f"{name} {timestep_range(timestep)}", loss)
        for one in kept:
            if one.spread is not None:
                for sample, spread in zip(one.samples, one.spread.tolist(), strict=True):
                    records.latent_spread.add(sample.dataset, spread)


def build_recorder(
    device: torch.device,
    family: Family,
    parameters: Mapping[str, nn.Parameter],
    adapted: AdaptedModules,
    frozen_norms: Mapping[str, float],
) -> StepRecorder:
    """Build the recorder of a run, before a checkpoint is loaded into the parameters."""
    return StepRecorder(device, family, WeightMovement(parameters, adapted, frozen_norms))


def frozen_norms(family: Family) -> dict[str, float]:
    """Estimate the norms of the model's weights, before they are quantized or moved."""
    return sampled_norms(family.transformer)


def merge_records(records: Sequence[StepRecords], shard_size: int = 1) -> StepRecords:
    """Add up the losses of all ranks; times are those of the first.

    So are gradient norms, unless the first `shard_size` ranks have different rows of each weight.
    """
    first = records[0]
    parts = [record.grad_norms for record in records[:shard_size]]
    first.grad_norms = {
        name: math.sqrt(sum(norms.get(name, 0.0) ** 2 for norms in parts)) for name in parts[0]
    }
    for other in records[1:]:
        tables = ("by_dataset", "by_timestep", "by_part", "by_part_range", "by_expert")
        for name in (*tables, "latent_spread"):
            getattr(first, name).merge(getattr(other, name))
    return first


def _sums(batch: Batch, tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of all values of each sample; not finite if one of them is not."""
    total = torch.zeros(len(batch), device=batch.latents.device)
    for tensor in tensors:
        if tensor.is_floating_point() and len(tensor) == len(batch):
            total = total + tensor.detach().flatten(1).sum(1, dtype=torch.float32)
    return total


def _elapsed(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1e3
