"""The health checks of a run: each looks at a stream of measurements and names a problem in words.

A check is an object with `look(measurements)`. It returns a `Finding` if there is a problem, `FINE`
if there is none, and `UNKNOWN` if these measurements do not tell. Checks read nothing but their
arguments, so that they can be tested with made-up measurements. `health.py` decides what follows
from their findings.

A resumed run first shows its checks what earlier processes have logged (`HealthMonitor.remember`),
without sensors, times and samples. A check that compares with the start of the run must not judge
if it has not seen the start: the log may be in another folder, or have no such measurements.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

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

    RangeLosses = Mapping[str, Mapping[str, float]]
    """Range of timesteps -> mean `loss` and number of `samples`."""


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
    drawn_timesteps: Mapping[str, float] = field(default_factory=dict)
    """Share of the timesteps in each range, as the run's settings draw them."""
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
    batch_size: int = 1
    batch_fill: float = 1.0
    """Mean number of samples in a batch, as a share of `batch_size`."""
    max_grad_norm: float = 0.0
    """Norm that gradients are clipped to; 0: none."""
    weights: Sequence[str] = ()
    """Names of the model's weights; empty unless its output has several parts."""
    trained: Sequence[str] = ()
    """Names of the trained weights; empty unless the output has several parts."""
    ramp: tuple[int, int] | None = None
    """Samples in the last step of the run and at the end of the batch-size ramp; None: no ramp."""
    text_problem: str = ""
    """What is wrong with the text embeddings of the data; empty if nothing is."""
    prompt_problem: str = ""
    """Why validation prompts do not show what is trained; empty if they do."""


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
    held_out_samples: Sequence[float] = ()
    """Held-out losses of single samples and timesteps, always in the same order."""
    part_losses: Mapping[str, RangeLosses] = field(default_factory=dict)
    """Part of the output -> range of timesteps -> mean loss and number of samples."""
    grad_norms: Mapping[str, float] = field(default_factory=dict)
    """Trained weight -> norm of its gradient; only if `moved` is not None."""
    samples: SamplesSeen | None = None
    alloc_retries: int = 0
    """How often torch's allocator had to free cached memory and try again, since the process
    started."""


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
    kind: str = ""
    """What tells this problem from others of the same check, such as the name of a dataset: another
    kind is reported even if the level stays the same."""


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
        self._norms: dict[str, deque[float]] = {}
        """Norms of the last steps of each expert, spikes included: norms that stay high raise the
        median, and are no spikes any more."""
        self._spikes: deque[tuple[int, float, float]] = deque(maxlen=self.RECENT)

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Count the spikes of the last steps."""
        if not measured.steps:
            return UNKNOWN
        for done in measured.steps:
            if not math.isfinite(done.grad_norm):
                continue
            norms = self._norms.setdefault(done.expert, deque(maxlen=self.HISTORY))
            if len(norms) >= 20:
                median = max(statistics.median(norms), 1e-30)
                if done.grad_norm > self.FACTOR * median:
                    self._spikes.append((done.step, done.grad_norm / median, median))
            norms.append(done.grad_norm)
        recent = [one for one in self._spikes if one[0] > measured.step - self.RECENT]
        if len(recent) < self.COUNT:
            return FINE
        _, worst, median = max(recent, key=lambda one: one[1])
        return Finding(
            f"the gradient norm spiked in {len(recent)} of the last {self.RECENT} steps, up to "
            f"{worst:.0f} times its median of {median:.3g}",
            "Look at the samples of these steps; lower optimizer.lr, or train.max_grad_norm to "
            "limit what one step can do.",
            values={"spikes": len(recent), "factor": worst},
        )


class WindowMean(NamedTuple):
    """The mean loss of a window of steps."""

    step: int
    """The last step of the window."""
    mean: float
    error: float
    """Standard error of the mean."""

    def rise_to(self, later: WindowMean) -> float:
        """Return by how many standard errors a later mean is above this one.

        A window that is low by chance often varies little, too. So its error counts as no less than
        that of the other window, relative to the means.
        """
        error = math.hypot(
            later.error, max(self.error, later.error * self.mean / max(later.mean, 1e-30))
        )
        return (later.mean - self.mean) / max(error, 1e-30)


class LossWindows:
    """Means of the training loss over windows of steps; the loss of one step is mostly noise.

    A window has at least `SAMPLES` samples and `STEPS` steps, and so many samples that the error of
    its mean is about `ERROR`. It has a share of all samples so far, too, up to `MOST`: the more
    windows there are, the further the lowest is below the others by chance.
    """

    SAMPLES, STEPS, ERROR, SHARE, MOST = 100, 10, 0.05, 0.05, 2000
    GROWTH, ERRORS = 1.5, 4.0

    def __init__(self) -> None:
        self.first: WindowMean | None = None
        self.lowest: WindowMean | None = None
        """The window with the lowest mean so far, of those that do not overlap."""
        self._recent: deque[tuple[int, float, int]] = deque()
        """Steps of the current window: number, loss and samples."""
        self._samples = self._total = self._unused = self._unchecked = 0
        self._least = 0.0
        """Samples of a window, as far as its error is concerned; 0 before `SAMPLES` were seen."""
        self._grown: tuple[WindowMean, WindowMean] | None = None

    def add(self, done: StepDone) -> None:
        """Add the loss of a step; values that are not finite are left out."""
        if not math.isfinite(done.loss):
            return
        self._recent.append((done.step, done.loss, done.samples))
        self._samples += done.samples
        self._total += done.samples
        self._unused += 1
        self._unchecked += 1
        if not self._least and self._samples >= self.SAMPLES and len(self._recent) >= self.STEPS:
            relative = self.current.error / max(self.current.mean, 1e-30)
            self._least = max(self.SAMPLES, self._samples * (relative / self.ERROR) ** 2)
        needed = min(max(self._least or self.SAMPLES, self.SHARE * self._total), self.MOST)
        while len(self._recent) > self.STEPS and self._samples - self._recent[0][2] >= needed:
            self._samples -= self._recent.popleft()[2]
        count = len(self._recent)
        if not self._least or self._samples < needed or 4 * self._unchecked < count:
            return
        self._unchecked, window = 0, self.current
        lowest = self.lowest or window
        if window.mean > self.GROWTH * lowest.mean and lowest.rise_to(window) > self.ERRORS:
            self._grown = lowest, window
        if self._unused >= count:
            self._unused = 0
            self.first = self.first or window
            self.lowest = min(lowest, window, key=lambda one: one.mean)

    def take_growth(self) -> tuple[WindowMean, WindowMean] | None:
        """Return the lowest and a later window that is clearly above it, since the last call."""
        grown, self._grown = self._grown, None
        return grown

    @property
    def has_not_fallen(self) -> bool:
        """True if the current window is a later one than the first, and not below it."""
        if self.first is None or self._recent[0][0] <= self.first.step:
            return False
        return self.current.mean > 0.98 * self.first.mean

    @property
    def current(self) -> WindowMean:
        """The window of the last steps; before the first is full, all steps so far."""
        losses, count = [loss for _, loss, _ in self._recent], max(1, len(self._recent))
        step, mean = self._recent[-1][0] if losses else 0, math.fsum(losses) / count
        squares = math.fsum((loss - mean) ** 2 for loss in losses)
        error = math.sqrt(squares / (count - 1) / count) if count > 1 else math.inf
        return WindowMean(step, mean, error)


class LearningRateHigh:
    """A loss that grows, or weights that move far without a lower loss.

    A model that predicts nothing has a loss of about 2 (1 for the noise, 1 for the latents), so a
    loss that stays above `EXPLODED` is worse than that, also in the first steps.
    """

    name = "learning_rate_high"
    FAR, TOO_FAR = 0.5, 2.0
    EXPLODED, EXPLODED_GROWTH, EXPLODED_STEPS = 4.0, 3.0, 3
    HELD_OUT_RISE = 1.02

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._losses: dict[str, LossWindows] = {}
        """Losses of each expert, whose timesteps and so losses differ."""
        self._recent: deque[float] = deque(maxlen=self.EXPLODED_STEPS)
        self._first: tuple[int, float] | None = None
        self._moved = 0.0
        self._held_out: dict[int, float] = {}

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the last losses with the lowest ones, and the weights with the start."""
        for done in measured.steps:
            self._losses.setdefault(done.expert, LossWindows()).add(done)
            self._recent.append(done.loss)
            self._first = self._first or (done.step, done.loss)
        if measured.moved is not None and measured.moved.blocks:
            self._moved = statistics.median(measured.moved.blocks.values())
        if measured.held_out is not None:
            self._held_out[measured.held_out.step] = held_out_mean(measured.held_out)
        lr = "" if self._facts.lr is None else f" optimizer.lr is {self._facts.lr:g}."
        advice = f"Lower optimizer.lr, for example to a tenth, and start over.{lr}"
        found = self._exploded(advice)
        if found is not None:
            return found
        full = [losses for losses in self._losses.values() if losses.first is not None]
        if not measured.steps or not full:
            return UNKNOWN
        grown = [one for losses in full if (one := losses.take_growth()) is not None]
        return self._grown(grown, advice) or self._moved_far(full, advice) or FINE

    def _grown(self, found: Sequence[tuple[WindowMean, WindowMean]], advice: str) -> Finding | None:
        for lowest, now in found:
            growth = now.mean / max(lowest.mean, 1e-30)
            if growth < self.EXPLODED_GROWTH and self._held_out_is_fine(lowest.step):
                continue
            return Finding(
                f"the training loss has grown from {lowest.mean:.4g} (step {lowest.step}) to "
                f"{now.mean:.4g} (step {now.step}): the learning rate is too high",
                advice,
                values={"loss": now.mean, "best": lowest.mean, "moved": self._moved},
                kind="grown",
            )
        return None

    def _held_out_is_fine(self, since: int) -> bool:
        """Return True if a held-out loss after a step shows that the model has not become worse."""
        latest = max(self._held_out, default=0)
        before = [loss for step, loss in self._held_out.items() if step < latest]
        if latest <= since or not before:
            return False
        return self._held_out[latest] <= self.HELD_OUT_RISE * min(before)

    def _moved_far(self, full: Sequence[LossWindows], advice: str) -> Finding | None:
        sees_start = self._first is not None and self._first[0] <= 1
        has_not_fallen = sees_start and all(one.has_not_fallen for one in full)
        limit = self.FAR if has_not_fallen else self.TOO_FAR
        if not self._facts.is_adapter or self._moved <= limit:
            return None
        and_loss = ", and the loss has not fallen" if has_not_fallen else ""
        return Finding(
            f"the adapter has changed the weights of its blocks by {self._moved:.0%} (median)"
            f"{and_loss}: the learning rate is too high",
            advice,
            values={"moved": self._moved},
            kind="moved",
        )

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
            kind="grown",
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
        self._gradients: Mapping[str, float] = {}
        """Gradient norm of each block, as last measured."""

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the distances of blocks with the least that training would cause."""
        moved = measured.moved
        if moved is None or not moved.blocks:
            return UNKNOWN
        self._gradients = moved.grad_norms or self._gradients
        trained = moved.step - max(self._facts.start_step, self._facts.warmup_steps)
        if trained < min(self.MIN_STEPS, max(1, self._facts.total_steps // 2)):
            return UNKNOWN
        least = self.ADAPTER if moved.measure == "adapter" else self.FULL
        what = "the adapter" if moved.measure == "adapter" else "the model"
        farthest = max(moved.blocks.values())
        lr = "" if self._facts.lr is None else f" (it is {self._facts.lr:g})"
        if farthest < least and self._gradients and not any(self._gradients.values()):
            return Finding(
                f"{what} does not move, because all of its gradients are zero: the loss does not "
                f"depend on the trained weights of any of the {len(self._gradients)} blocks",
                "The learning rate has no part in this. Check that masks do not exclude everything "
                "(datasets[].mask_data_dir, mask_invert), and that adapter.targets name modules "
                "that the model uses.",
                values={"farthest": farthest},
                kind="zero gradients",
            )
        if farthest < least:
            return Finding(
                f"{what} does not move: after {moved.step} steps, the largest change of a block is "
                f"{farthest:.1e} of its weights",
                f"Raise optimizer.lr{lr}: 1e-4 is usual for a LoRA with AdamW. Check "
                "adapter.alpha, which scales the adapter, and optimizer.warmup_steps.",
                values={"farthest": farthest},
                kind="still",
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
                kind="slow",
            )
        still = [name for name, distance in moved.blocks.items() if distance == 0]
        if still and len(still) < len(moved.blocks):
            return Finding(
                f"{len(still)} of {len(moved.blocks)} trained blocks do not move at all: "
                f"{listed(still)}",
                "Their gradients are zero. Check adapter.targets, and train.experts for a model "
                "with two transformers.",
                values={"still": len(still)},
                kind="blocks",
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
        found = (self._never_drawn(n) or self._flat(n) or self._no_loss(n) for n in self._shares)
        return all_of(one for one in found if one is not None)

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
            kind=name,
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
            kind=name,
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
                kind=name,
            )
        return None

    def _mean(self, name: str) -> float | None:
        recent = self._recent.get(name)
        if not recent:
            return None
        count = sum(samples for _, samples in recent)
        return sum(loss * samples for loss, samples in recent) / count


class PartUntrained:
    """A part of the model's output, such as audio, that is not trained while others are.

    Weights belong to a part if a word of their name does, as in `blocks.3.audio_attn.to_q`.
    """

    name = "part_untrained"
    WINDOWS, FELL, STAYED, ERRORS = 20, 0.1, 0.03, 4.0

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._first: list[Mapping[str, RangeLosses]] = []
        self._last: deque[Mapping[str, RangeLosses]] = deque(maxlen=self.WINDOWS)

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Look at the trained weights of each part, at their gradients, then at the losses."""
        parts = measured.part_losses
        if len(parts) < 2:
            return UNKNOWN
        gradients = measured.grad_norms
        found = [self._structure(name) or self._no_gradient(name, gradients) for name in parts]
        known = [one for one in found if one is not None]
        if known:
            return all_of(known)
        if self._facts.start_step:  # the first losses of the run are not known any more
            return UNKNOWN
        (self._first if len(self._first) < self.WINDOWS else self._last).append(parts)
        return self._compare(list(parts)) if len(self._last) == self.WINDOWS else UNKNOWN

    def _structure(self, name: str) -> Finding | None:
        weights = _weights_of(name, self._facts.weights)
        if not weights or _weights_of(name, self._facts.trained):
            return None
        return Finding(
            f"the {name} part of the model is not trained: none of its {len(weights)} weights, "
            f"such as {weights[0]}, is adapted or trained",
            f"Check that adapter.targets include the {name} blocks. If that is intended, "
            "add part_untrained to health.ignore.",
            values={"weights": len(weights)},
            kind=name,
        )

    def _no_gradient(self, name: str, gradients: Mapping[str, float]) -> Finding | None:
        own = _weights_of(name, gradients)
        if not own or any(gradients[weight] for weight in own):
            return None
        return Finding(
            f"the {name} part of the model is not trained: all {len(own)} of its trained weights "
            "have a zero gradient",
            f"Check that the data have {name} at all, and that its loss is not masked.",
            values={"weights": len(own)},
            kind=name,
        )

    def _compare(self, parts: Sequence[str]) -> Finding | NoFinding:
        """Find a part whose loss has fallen by far less than half as much as another's.

        The difference must exceed its standard error several times, because losses are noisy.
        """
        falls = {name: self._fall(name) for name in parts}
        best = max(parts, key=lambda name: falls[name][0])
        worst = min(parts, key=lambda name: falls[name][0])
        (most, error), (least, own_error) = falls[best], falls[worst]
        if most < max(self.FELL, self.ERRORS * error) or least > self.STAYED + own_error:
            return FINE
        if most / 2 - least < self.ERRORS * math.hypot(error / 2, own_error):
            return FINE
        return Finding(
            f"the {worst} part of the model does not learn: its loss fell by {least:.1%}, while "
            f"that of {best} fell by {most:.0%}",
            f"Check that adapter.targets include the {worst} blocks, and that the data have "
            f"{worst} at all.",
            values={"fall": least, "other": most},
            kind=worst,
        )

    def _fall(self, name: str) -> tuple[float, float]:
        """Return by which share the loss of a part has fallen, and its standard error.

        Ranges of timesteps have very different losses. Each counts equally at both ends, so that
        the timesteps that were drawn make no difference.
        """
        ends = [[one.get(name, {}) for one in end] for end in (self._first, self._last)]
        ranges = set.intersection(*({key for one in end for key in one} for end in ends))
        means = [
            [_mean_and_error(one[key] for one in end if key in one) for key in ranges]
            for end in ends
        ]
        (first, last), (first_error, last_error) = (
            [math.fsum(mean for mean, _ in end) for end in means],
            [math.hypot(*(error for _, error in end)) for end in means],
        )
        if not ranges or first <= 0:
            return 0.0, math.inf
        ratio = last / first
        return 1 - ratio, math.hypot(last_error, ratio * first_error) / first


class Overfitting:
    """A loss on held-out samples that rises while the training loss falls."""

    name = "overfitting"
    RISE, UNKNOWN_RISE, AFTER, ERRORS = 1.02, 1.05, 2, 2.0
    """`UNKNOWN_RISE` is for a best step of an earlier process, whose single losses are unknown."""

    def __init__(self) -> None:
        self._train = LossWindows()
        self._seen: dict[int, tuple[float, Sequence[float], WindowMean | None]] = {}
        """Step -> held-out loss, its single losses, and the training loss; the last two are unknown
        for a step of an earlier process, the last one for step 0."""

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the held-out loss with the lowest one so far."""
        for done in measured.steps:
            self._train.add(done)
        event = measured.held_out
        if event is None:
            return UNKNOWN
        # A requested validation may repeat a step.
        mean, now = held_out_mean(event), self._train.current
        self._seen[event.step] = mean, measured.held_out_samples, now if now.step else None
        if event.best_step < min(self._seen):
            self._seen[event.best_step] = event.best_loss, (), None
        best_step = min(self._seen, key=lambda step: self._seen[step][0])
        after = sorted(step for step in self._seen if step > best_step)[-self.AFTER :]
        if len(self._seen) <= self.AFTER:
            return UNKNOWN
        best, _, then = self._seen[best_step]
        if len(after) < self.AFTER or not all(self._has_risen(best_step, step) for step in after):
            return FINE
        then = then or self._train.first or now
        if now.mean > 1.02 * then.mean and then.rise_to(now) > self.ERRORS:
            return FINE  # training has become worse, too
        return Finding(
            f"the model overfits since step {best_step}: the loss on held-out samples has risen "
            f"from {best:.4g} to {mean:.4g}, while the training loss went from {then.mean:.4g} to "
            f"{now.mean:.4g}",
            f"Use the adapter of step {best_step} (adapters/ in the run's folder has that of every "
            "checkpoint) and stop; or train with more samples, a lower optimizer.lr or a smaller "
            "adapter.rank.",
            values={"best_step": best_step, "best": best, "held_out": mean},
        )

    def _has_risen(self, best_step: int, step: int) -> bool:
        """Compare two validations, sample by sample if possible: their noise is the same."""
        (best, before, _), (loss, after, _) = self._seen[best_step], self._seen[step]
        if len(before) != len(after) or len(before) < 2:
            return loss > self.UNKNOWN_RISE * best
        rises = [b - a for a, b in zip(before, after, strict=True)]
        error = statistics.stdev(rises) / math.sqrt(len(rises))
        return loss > self.RISE * best and statistics.fmean(rises) > self.ERRORS * error


class TimestepShift:
    """Timesteps that are drawn from other ranges than those the model was trained on."""

    name = "timestep_shift"
    DISTANCE = 0.3

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the settings with the model's own (total variation distance of timesteps)."""
        drawn, expected = self._facts.drawn_timesteps, self._facts.expected_timesteps
        if not measured.steps or not expected:
            return UNKNOWN
        distance = sum(abs(drawn[name] - expected[name]) for name in expected) / 2
        if distance < self.DISTANCE:
            return FINE
        missing = max(expected, key=lambda name: expected[name] - drawn[name])
        own, theirs = self._facts.timestep_shift, self._facts.expected_shift
        return Finding(
            f"timesteps are drawn differently than in this model's own training: "
            f"{drawn[missing]:.1%} of them are in {missing.removeprefix('t')}, where its settings "
            f"draw {expected[missing]:.0%}",
            f"If you chose train.timestep_shift: {own} on purpose, there is nothing to do. "
            f"Otherwise set it to {theirs}, the model's own, and check train.timestep_mean and "
            "timestep_sampling.",
            values={"distance": distance, "drawn": drawn[missing], "expected": expected[missing]},
        )


# Helpers


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few of several names as text."""
    named = list(names)
    more = f" and {len(named) - limit} more" if len(named) > limit else ""
    return ", ".join(named[:limit]) + more


def all_of(findings: Iterable[Finding]) -> Finding | NoFinding:
    """Return several findings of a check as one; `FINE` if there are none."""
    found = list(findings)
    if len(found) < 2:
        return found[0] if found else FINE
    return replace(
        found[0],
        cause="; ".join(one.cause for one in found),
        advice=" ".join(dict.fromkeys(one.advice for one in found)),
        kind=", ".join(one.kind for one in found),
    )


def held_out_mean(event: HeldOutLoss) -> float:
    """Return the mean of the held-out losses of all trained transformers."""
    return math.fsum(event.losses.values()) / len(event.losses)


def _weights_of(part: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if part in re.split(r"[._]", name)]


def _mean_and_error(windows: Iterable[Mapping[str, float]]) -> tuple[float, float]:
    """Return the mean loss of several windows, weighted by samples, and its standard error."""
    found = [(one["loss"], one["samples"]) for one in windows]
    total = sum(count for _, count in found)
    mean = sum(loss * count for loss, count in found) / total
    if len(found) < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((count * (loss - mean)) ** 2 for loss, count in found)) / total
