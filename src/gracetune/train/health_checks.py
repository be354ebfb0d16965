"""The health checks of a run: each looks at a stream of measurements and names a problem in words.

A check is an object with `look(measurements)`. It returns a `Finding` if there is a problem, `FINE`
if there is none, and `UNKNOWN` if these measurements do not tell. Checks read nothing but their
arguments, so that they can be tested with made-up measurements. `health.py` decides what follows
from their findings.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gracetune.events.types import (
        DeviceSensors,
        HealthLevel,
        HeldOutLoss,
        LossParts,
        MemoryUsed,
        StepDone,
        StepTimes,
        WeightsMoved,
    )


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """Facts about the files and captions of one dataset."""

    id: str
    samples: int
    share: float = 1.0
    """Share of the dataset in all draws."""
    empty_captions: int = 0
    same_caption: str = ""
    """The caption of all samples, if they have one and the same from files of their own."""
    caption_dropout: float = 0.0
    copies: int = 0
    """Number of files with the same bytes as an earlier one of the dataset."""
    copied: tuple[str, str] = ("", "")
    """An example of a file and its copy."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Files that cannot be read, with the reason."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that the checks need; they do not change."""

    total_steps: int
    start_step: int = 0
    warmup_steps: int = 0
    lr: float | None = None
    """The setting `optimizer.lr`; None if the optimizer chooses it."""
    is_adapter: bool = True
    is_pretrained: bool = True
    """False if training starts from random weights, whose samples are noise."""
    dataset_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of each dataset in all draws."""
    expected_timesteps: Mapping[str, float] = field(default_factory=dict)
    """Share of the timesteps of this model's own training in each range; empty if unknown."""
    expected_shift: str = ""
    """The value of `train.timestep_shift` that these shares come from, as text."""
    timestep_shift: str = ""
    """The run's own value of `train.timestep_shift`."""
    caches_in_memory: bool = True
    is_planned: bool = False
    checkpoint_nbytes: int = 0
    """Expected size of a checkpoint in bytes."""
    page_bytes: int = 4096
    datasets: Sequence[DatasetFacts] = ()
    held_out_copies: int = 0
    """Number of held-out samples that are also among the training samples."""
    batch_size: int = 1
    batch_fill: float = 1.0
    """Mean number of samples in a batch, as a share of `batch_size`."""
    max_grad_norm: float = 0.0
    """Norm that gradients are clipped to; 0: none."""


@dataclass(frozen=True, slots=True)
class SampleProblem:
    """A validation sample that shows nothing."""

    file: str
    problem: str
    """`black`, `white`, `flat`, `noise`, `silent` or `not finite`."""


@dataclass(frozen=True, slots=True)
class SamplesSeen:
    """The samples of one validation, and those among them that show nothing."""

    step: int
    count: int
    problems: tuple[SampleProblem, ...] = ()
    prompts: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    """A digest of each sample's values, in the order of `prompts`."""
    failed: str = ""
    """Why no samples could be generated; empty if they were."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements since the last check; None or empty if a value was not measured."""

    step: int
    steps: Sequence[StepDone] = ()
    times: StepTimes | None = None
    losses: LossParts | None = None
    latent_spread: Mapping[str, float] = field(default_factory=dict)
    """Mean standard deviation of latents over positions, by dataset."""
    moved: WeightsMoved | None = None
    sensors: DeviceSensors | None = None
    memory: MemoryUsed | None = None
    held_out: HeldOutLoss | None = None
    samples: SamplesSeen | None = None
    alloc_retries: int = 0
    """How often torch's allocator had to free cached memory and try again, since the start."""


class NoFinding(Enum):
    """The result of a look that finds no problem."""

    FINE = "fine"
    UNKNOWN = "unknown"
    """These measurements do not tell whether there is a problem."""


FINE, UNKNOWN = NoFinding.FINE, NoFinding.UNKNOWN


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: its cause in words, the setting to change, and how serious it is."""

    cause: str
    advice: str
    level: HealthLevel = "notice"
    values: Mapping[str, float] = field(default_factory=dict)


class Check(Protocol):
    """One health check."""

    name: str

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Look at new measurements and return a problem, or that there is none."""
        ...


# Training


class GradientSpikes:
    """Gradient norms that are far above their median, again and again."""

    name = "gradient_spikes"
    FACTOR, RECENT, COUNT, HISTORY = 10.0, 50, 3, 200

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=self.HISTORY)
        self._spikes: deque[tuple[int, float]] = deque(maxlen=self.RECENT)

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Count the spikes of the last steps."""
        if not measured.steps:
            return UNKNOWN
        for done in measured.steps:
            if not math.isfinite(done.grad_norm):
                continue
            if len(self._norms) >= 20:
                factor = done.grad_norm / max(statistics.median(self._norms), 1e-30)
                if factor > self.FACTOR:
                    self._spikes.append((done.step, factor))
                    continue  # a spike is not part of the history that it is compared with
            self._norms.append(done.grad_norm)
        recent = [(s, f) for s, f in self._spikes if s > measured.step - self.RECENT]
        if len(recent) < self.COUNT:
            return FINE
        worst = max(factor for _, factor in recent)
        return Finding(
            f"the gradient norm spiked in {len(recent)} of the last {self.RECENT} steps, up to "
            f"{worst:.0f} times its median of {statistics.median(self._norms):.3g}",
            "Look at the samples of these steps; lower optimizer.lr, or train.max_grad_norm to "
            "limit what one step can do.",
            values={"spikes": len(recent), "factor": worst},
        )


class SmoothedLoss:
    """An exponential moving average of the training loss, which is noisy from step to step."""

    DECAY, WARMUP = 0.95, 10

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0
        self.first = 0.0
        """The average after the first steps."""
        self.best, self.best_step = math.inf, 0

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step; values that are not finite are left out."""
        if not math.isfinite(loss):
            return
        self.count += 1
        decay = min(self.DECAY, 1 - 1 / self.count)  # a plain mean at first
        self.value = decay * self.value + (1 - decay) * loss
        if self.count == self.WARMUP:
            self.first = self.value
        if self.count >= self.WARMUP and self.value < self.best:
            self.best, self.best_step = self.value, step


class LearningRateHigh:
    """A loss that grows, or weights that move far without a lower loss.

    A model that predicts nothing has a loss of about 2 (1 for the noise, 1 for the latents), so a
    loss that stays above `EXPLODED` is worse than that, also in the first steps.
    """

    name = "learning_rate_high"
    GROWTH, FAR, TOO_FAR = 1.5, 0.5, 2.0
    EXPLODED, EXPLODED_GROWTH, EXPLODED_STEPS = 4.0, 3.0, 3

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._loss = SmoothedLoss()
        self._recent: deque[float] = deque(maxlen=self.EXPLODED_STEPS)
        self._first: tuple[int, float] | None = None
        self._moved = 0.0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the smoothed loss with its lowest value, and the weights with the start."""
        loss = self._loss
        for done in measured.steps:
            loss.add(done.step, done.loss)
            self._recent.append(done.loss)
            self._first = self._first or (done.step, done.loss)
        if measured.moved is not None and measured.moved.blocks:
            self._moved = statistics.median(measured.moved.blocks.values())
        lr = "" if self._facts.lr is None else f" optimizer.lr is {self._facts.lr:g}."
        advice = f"Lower optimizer.lr, for example to a tenth, and start over.{lr}"
        exploded = self._exploded(advice)
        if exploded is not None:
            return exploded
        if not measured.steps or loss.count < 2 * loss.WARMUP:
            return UNKNOWN
        growth = loss.value / max(loss.best, 1e-30)
        values = {"loss": loss.value, "best": loss.best, "moved": self._moved}
        if growth > self.GROWTH:
            return Finding(
                f"the training loss has grown from {loss.best:.4g} (step {loss.best_step}) to "
                f"{loss.value:.4g}: the learning rate is too high",
                advice,
                values=values,
            )
        has_not_fallen = loss.value > 0.98 * loss.first
        limit = self.FAR if has_not_fallen else self.TOO_FAR
        if self._facts.is_adapter and self._moved > limit:
            and_loss = ", and the loss has not fallen" if has_not_fallen else ""
            return Finding(
                f"the adapter has changed the weights of its blocks by {self._moved:.0%} (median)"
                f"{and_loss}: the learning rate is too high",
                advice,
                values=values,
            )
        return FINE

    def _exploded(self, advice: str) -> Finding | None:
        """Compare the last losses with the first one, which the first update has not changed."""
        if self._first is None or len(self._recent) < self.EXPLODED_STEPS:
            return None
        step, first = self._first
        least = min(self._recent)
        if least < max(self.EXPLODED, self.EXPLODED_GROWTH * first):
            return None
        return Finding(
            f"the training loss has grown from {first:.4g} (step {step}) to "
            f"{self._recent[-1]:.4g}, which is worse than predicting nothing: the learning rate is "
            "too high",
            advice,
            values={"loss": self._recent[-1], "first": first, "moved": self._moved},
        )


class WeightsStill:
    """Trained weights that do not move, in all blocks or in some."""

    name = "weights_still"
    MIN_STEPS, ADAPTER, FULL = 20, 1e-5, 1e-7
    HARDLY, MIN_TOTAL = 1e-3, 200
    """An adapter that will have changed its weights by less than this at the end of a run of so
    many steps or more has learned next to nothing."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the distances of blocks with the least that training would cause."""
        moved = measured.moved
        if moved is None or not moved.blocks:
            return UNKNOWN
        trained = moved.step - max(self._facts.start_step, self._facts.warmup_steps)
        if trained < min(self.MIN_STEPS, max(1, self._facts.total_steps // 2)):
            return UNKNOWN
        least = self.ADAPTER if moved.measure == "adapter" else self.FULL
        what = "the adapter" if moved.measure == "adapter" else "the model"
        farthest = max(moved.blocks.values())
        lr = "" if self._facts.lr is None else f" (it is {self._facts.lr:g})"
        if farthest < least:
            return Finding(
                f"{what} does not move: after {moved.step} steps, the largest change of a block is "
                f"{farthest:.1e} of its weights",
                f"Raise optimizer.lr{lr}: 1e-4 is usual for a LoRA with AdamW. Check "
                "adapter.alpha, which scales the adapter, and optimizer.warmup_steps.",
                values={"farthest": farthest},
            )
        total = self._facts.total_steps
        at_end = farthest * total / moved.step
        if moved.measure == "adapter" and total >= self.MIN_TOTAL and at_end < self.HARDLY:
            return Finding(
                f"the adapter hardly moves: after {moved.step} steps, the largest change of a "
                f"block is {farthest:.1e} of its weights, and at this pace {at_end:.1e} after all "
                f"{total}; the learning rate is too low",
                f"Raise optimizer.lr{lr}: 1e-4 is usual for a LoRA with AdamW. Check "
                "adapter.alpha, which scales the adapter.",
                values={"farthest": farthest, "at_end": at_end},
            )
        still = [name for name, distance in moved.blocks.items() if distance == 0]
        if still and len(still) < len(moved.blocks):
            return Finding(
                f"{len(still)} of {len(moved.blocks)} trained blocks do not move at all: "
                f"{_listed(still)}",
                "Their gradients are zero. Check adapter.targets, and train.experts for a model "
                "with two transformers.",
                values={"still": len(still)},
            )
        return FINE


class DatasetDead:
    """A dataset that is never drawn, or that has nothing to learn from."""

    name = "dataset_dead"
    MIN_SAMPLES, LOW_SHARE, FLAT_SHARE, FLAT = 16, 0.05, 0.15, 0.02

    def __init__(self, facts: RunFacts) -> None:
        self._shares = dict(facts.dataset_shares)
        self._counts: Counter[str] = Counter()
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._spread: dict[str, float] = {}

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the draws, losses and latents of datasets with each other."""
        if measured.losses is None:
            return UNKNOWN
        for name, part in measured.losses.by_dataset.items():
            self._counts[name] += int(part["samples"])
            if part["samples"]:
                recent = self._recent.setdefault(name, deque(maxlen=8))
                recent.append((part["loss"], part["samples"]))
        self._spread.update(measured.latent_spread)
        for name in self._shares:
            found = self._never_drawn(name) or self._flat(name) or self._no_loss(name)
            if found is not None:
                return found
        return FINE

    def _never_drawn(self, name: str) -> Finding | None:
        total, share = sum(self._counts.values()), self._shares[name]
        expected = total * share
        if self._counts[name] or expected < 20:
            return None
        return Finding(
            f"dataset {name!r} is dead: none of {total:,} samples came from it, although its share "
            f"is {share:.1%}",
            f"Check datasets[].repeats and weight of {name!r}, and train.batch_size: a bucket with "
            "fewer samples is drawn in smaller batches.",
            values={"samples": 0, "expected": expected},
        )

    def _flat(self, name: str) -> Finding | None:
        spread = self._spread.get(name)
        others = [value for other, value in self._spread.items() if other != name]
        limit = max(self.FLAT, self.FLAT_SHARE * statistics.median(others)) if others else self.FLAT
        if spread is None or spread >= limit:
            return None
        compared = f", against {statistics.median(others):.2g} of the others" if others else ""
        return Finding(
            f"dataset {name!r} is dead: its latents are flat (they vary by {spread:.2g}"
            f"{compared}), so its files are black, blank or silent",
            f"Look at the files of {name!r}: `gracetune data check`; remove the dataset, or fix "
            "its instance_data_dir.",
            values={"spread": spread},
        )

    def _no_loss(self, name: str) -> Finding | None:
        mean = self._mean(name)
        others = [m for other in self._recent if other != name if (m := self._mean(other))]
        if mean is None or self._counts[name] < self.MIN_SAMPLES:
            return None
        if mean < 1e-6 or (others and mean < self.LOW_SHARE * statistics.median(others)):
            rest = f", against {statistics.median(others):.3g} of the others" if others else ""
            return Finding(
                f"dataset {name!r} is dead: its loss is {mean:.3g}{rest}, so it has nothing to "
                "teach the model",
                f"Check that the masks of {name!r} do not exclude everything "
                "(datasets[].mask_invert), and that its files are neither blank nor all the same.",
                values={"loss": mean},
            )
        return None

    def _mean(self, name: str) -> float | None:
        recent = self._recent.get(name)
        if not recent:
            return None
        count = sum(samples for _, samples in recent)
        return sum(loss * samples for loss, samples in recent) / count


class PartUntrained:
    """A part of the model's output, such as sound, whose loss does not fall while others' do."""

    name = "part_untrained"
    MIN_WINDOWS, FELL, STAYED = 6, 0.9, 0.97

    def __init__(self) -> None:
        self._history: dict[str, list[tuple[float, float]]] = {}

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the latest losses of parts with their first ones."""
        silent = self._without_gradient(measured)
        if silent is not None:
            return silent
        if measured.losses is None or len(measured.losses.by_part) < 2:
            return UNKNOWN
        for name, part in measured.losses.by_part.items():
            if part["samples"]:
                self._history.setdefault(name, []).append((part["loss"], part["samples"]))
        if any(len(history) < self.MIN_WINDOWS for history in self._history.values()):
            return UNKNOWN
        ratios = {name: self._ratio(history) for name, history in self._history.items()}
        best = min(ratios, key=lambda name: ratios[name])
        worst = max(ratios, key=lambda name: ratios[name])
        if ratios[best] > self.FELL or ratios[worst] < self.STAYED:
            return FINE
        first, last = self._ends(self._history[worst])
        return Finding(
            f"the {worst} part of the model is not trained: its loss went from {first:.4g} to "
            f"{last:.4g}, while that of {best} fell by {1 - ratios[best]:.0%}",
            f"Check that adapter.targets include the {worst} blocks, and that the data have "
            f"{worst} at all.",
            values={"first": first, "last": last},
        )

    def _without_gradient(self, measured: Measurements) -> Finding | None:
        """Find a part whose blocks, named after it, have no gradient at all."""
        moved, losses = measured.moved, measured.losses
        if moved is None or losses is None or len(losses.by_part) < 2:
            return None
        for name in losses.by_part:
            norms = [norm for block, norm in moved.grad_norms.items() if name in block]
            if norms and not any(norms):
                return Finding(
                    f"the {name} part of the model is not trained: all {len(norms)} of its blocks "
                    "have a zero gradient",
                    f"Check that the data have {name} at all, and that its loss is not masked.",
                    values={"blocks": len(norms)},
                )
        return None

    @classmethod
    def _ends(cls, history: Sequence[tuple[float, float]]) -> tuple[float, float]:
        length = max(2, len(history) // 4)
        return _weighted_mean(history[:length]), _weighted_mean(history[-length:])

    @classmethod
    def _ratio(cls, history: Sequence[tuple[float, float]]) -> float:
        first, last = cls._ends(history)
        return last / first if first > 0 else 1.0


class Overfitting:
    """A loss on held-out samples that rises while the training loss falls."""

    name = "overfitting"
    RISE, AFTER = 1.02, 2

    def __init__(self) -> None:
        self._train = SmoothedLoss()
        self._seen: list[tuple[int, float, float]] = []

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the held-out loss with the lowest one so far."""
        for done in measured.steps:
            self._train.add(done.step, done.loss)
        held_out = measured.held_out
        if held_out is None:
            return UNKNOWN
        mean = sum(held_out.losses.values()) / len(held_out.losses)
        if self._train.count:
            self._seen.append((held_out.step, mean, self._train.value))
        if len(self._seen) <= self.AFTER:
            return UNKNOWN
        best_step, best, train_then = min(self._seen, key=lambda one: one[1])
        after = [loss for step, loss, _ in self._seen if step > best_step]
        is_rising = len(after) >= self.AFTER and min(after[-self.AFTER :]) > self.RISE * best
        if not is_rising or self._train.value > 1.02 * train_then:
            return FINE
        return Finding(
            f"the model overfits since step {best_step}: the loss on held-out samples has risen "
            f"from {best:.4g} to {mean:.4g}, while the training loss went from {train_then:.4g} to "
            f"{self._train.value:.4g}",
            f"Use the adapter of step {best_step} (adapters/ in the run's folder has that of every "
            "checkpoint) and stop; or train with more samples, a lower optimizer.lr or a smaller "
            "adapter.rank.",
            values={"best_step": best_step, "best": best, "held_out": mean},
        )


class TimestepShift:
    """Timesteps that are drawn from other ranges than those the model was trained on."""

    name = "timestep_shift"
    MIN_SAMPLES, DISTANCE = 100, 0.3

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._counts: Counter[str] = Counter()

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the drawn timesteps with the expected ones (total variation distance)."""
        expected = self._facts.expected_timesteps
        if measured.losses is None or not expected:
            return UNKNOWN
        for name, part in measured.losses.by_timestep.items():
            self._counts[name] += int(part["samples"])
        total = sum(self._counts.values())
        if total < self.MIN_SAMPLES:
            return UNKNOWN
        drawn = {name: self._counts[name] / total for name in expected}
        distance = sum(abs(drawn[name] - expected[name]) for name in expected) / 2
        if distance < self.DISTANCE:
            return FINE
        missing = max(expected, key=lambda name: expected[name] - drawn[name])
        return Finding(
            f"the timestep shift is wrong for this model: only {drawn[missing]:.1%} of the drawn "
            f"timesteps are in {missing.removeprefix('t')}, where {expected[missing]:.0%} are "
            "expected, so this range is hardly trained",
            f"Set train.timestep_shift: {self._facts.expected_shift} (it is "
            f"{self._facts.timestep_shift}), and check train.timestep_mean and timestep_sampling.",
            values={"distance": distance, "drawn": drawn[missing], "expected": expected[missing]},
        )


class SamplesEmpty:
    """Validation samples that show nothing: black, of one colour, noise, silent or not finite."""

    name = "samples_empty"

    def __init__(self, facts: RunFacts) -> None:
        self._is_pretrained = facts.is_pretrained
        self._shown_step: int | None = None

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Count the samples of the latest validation that show nothing."""
        seen = measured.samples
        if seen is not None and seen.failed:
            return Finding(
                f"no samples of step {seen.step} could be generated: {seen.failed}",
                "Lower validation.width, height or frames, or plan.device_memory. Training goes "
                "on without samples.",
            )
        if seen is None or not seen.count:
            return UNKNOWN
        noisy = [one for one in seen.problems if one.problem == "noise"]
        if 2 * len(noisy) >= seen.count:
            return self._noise(seen, len(noisy))
        if 2 * len(seen.problems) < seen.count:
            self._shown_step = seen.step
            return FINE
        kinds = Counter(one.problem for one in seen.problems)
        (kind, _), *_others = kinds.most_common()
        text = f"{len(seen.problems)} of {seen.count} samples of step {seen.step} are {kind}"
        if seen.step == 0:
            return Finding(
                f"{text} before training: the VAE's output is broken, not the training",
                "Check the VAE in model.path: other files, or weights that overflow. Samples from "
                "the base model must look right: gracetune sample --prompt.",
                values={"empty": len(seen.problems)},
            )
        return Finding(
            f"{text}: the model or its VAE puts out nothing",
            "If the samples of step 0 are empty too, the VAE in model.path is broken; otherwise "
            "lower optimizer.lr, and validation.guidance if it is above 10.",
            values={"empty": len(seen.problems)},
        )

    def _noise(self, seen: SamplesSeen, count: int) -> Finding | NoFinding:
        """Judge samples of noise, which a model that is trained from the start begins with."""
        text = f"{count} of {seen.count} samples of step {seen.step} are noise"
        if self._shown_step is not None:
            return Finding(
                f"{text}, and those of step {self._shown_step} were not: training has destroyed "
                "the model",
                f"Use a checkpoint of step {self._shown_step} or earlier, and lower optimizer.lr.",
                values={"noise": count},
            )
        if not self._is_pretrained:
            return UNKNOWN
        return Finding(
            f"{text}: the model, its VAE or the scale of its latents is wrong",
            "Samples from the base model must look right: gracetune sample --prompt. Check the "
            "files in model.path, the VAE's scaling_factor, and validation.sample_steps.",
            values={"noise": count},
        )


# Helpers


def _listed(names: Iterable[str], limit: int = 4) -> str:
    named = list(names)
    more = f" and {len(named) - limit} more" if len(named) > limit else ""
    return ", ".join(named[:limit]) + more


def _weighted_mean(parts: Sequence[tuple[float, float]]) -> float:
    return sum(value * count for value, count in parts) / sum(count for _, count in parts)
