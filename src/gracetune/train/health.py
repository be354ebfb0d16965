"""Watch the health of a run: grade what the checks find, act on it, and explain it.

    measurements -> checks (health_checks.py, health_machine.py) -> HealthMonitor -> HealthChanged

A problem is graded: `notice` (training goes on as before), `degraded` (the run frees memory to go
on), `stopping` (the run saves a checkpoint and ends, before it would be killed). A check that finds
nothing in `RECOVERY_LOOKS` looks in a row is `ok` again. The main rank decides, and all ranks act
together.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.config.presets import FAMILY_PRESETS
from gracetune.errors import ConfigError
from gracetune.events.types import HealthChanged
from gracetune.memory.oversubscription import return_freed_memory
from gracetune.train.health_checks import (
    DatasetDead,
    Finding,
    GradientSpikes,
    LearningRateHigh,
    NoFinding,
    Overfitting,
    PartUntrained,
    RunFacts,
    TimestepShift,
    WeightsStill,
)
from gracetune.train.health_data import (
    CaptionsUseless,
    CopiesInData,
    FewSamples,
    GradientsClipped,
    LatentsScale,
    RampLong,
    SamplesEmpty,
    SamplesSame,
    SkippedSteps,
    SmallBatches,
    TextEmbeddings,
    UnreadableFiles,
    ValidationPrompts,
    WarmupLong,
    dataset_facts,
    prompt_problem,
    ramp_end,
    text_problem,
)
from gracetune.train.health_machine import (
    DataWaits,
    DeviceMemory,
    DeviceShared,
    DiskSpace,
    HostMemory,
    PageCache,
    SlowDown,
    Throttling,
    WeightWaits,
)
from gracetune.train.step_recorder import NUM_TIMESTEP_RANGES, PartedFamily, timestep_range
from gracetune.train.timesteps import (
    TimestepWindow,
    cdf_at_edges,
    intersect,
    largest_known_tokens,
    shift_for,
)
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from gracetune.cache.batch_transfer import PrefetchDepth
    from gracetune.config.schema import HealthSection, RunFile, TrainSection
    from gracetune.data.pipeline import DataPipeline
    from gracetune.events.dispatcher import Emit
    from gracetune.events.types import HealthLevel
    from gracetune.memory.oversubscription import GcFreeze
    from gracetune.models.family import Family
    from gracetune.plan.controller import PlanController
    from gracetune.train.build import Session
    from gracetune.train.health_checks import Check, Measurements
    from gracetune.train.step_recorder import StepRecorder

MEMORY_CHECKS = ("host_memory", "device_memory")
"""Checks whose problems the run can cope with, because it can free memory."""
LEVELS: tuple[HealthLevel, ...] = ("ok", "notice", "degraded", "stopping")
"""Levels of a check, in rising order."""
RECOVERY_LOOKS = 3
"""Looks in a row without a problem after which a check is `ok` again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of a check's level that the main rank has decided, before the ranks act on it."""

    check: str
    level: HealthLevel
    finding: Finding | None
    """None if the problem is over."""
    before: HealthLevel = "ok"
    """The level until now."""
    is_new_cause: bool = False
    """True if the level is the same as before, for another cause."""


class HealthMonitor:
    """Grades the findings of all checks; keeps the level of each."""

    def __init__(self, checks: Iterable[Check], settings: HealthSection) -> None:
        self._checks = list(checks)
        self._settings = settings
        self._levels: dict[str, HealthLevel] = {}
        self._fine: dict[str, int] = {}
        self._kinds: dict[str, set[str]] = {}
        """Kinds of problems that were reported since the check was last `ok`."""

    @property
    def levels(self) -> Mapping[str, HealthLevel]:
        """The checks that are not `ok`, with their levels."""
        return {name: level for name, level in self._levels.items() if level != "ok"}

    def remember(self, earlier: Iterable[Measurements]) -> None:
        """Show the checks what earlier processes of the run have measured; decide nothing.

        So a resumed run judges as one that was not interrupted. Problems that were reported and
        are still there are reported again.
        """
        for measured in earlier:
            for check in self._checks:
                check.look(measured)

    def look(self, measured: Measurements) -> list[Decision]:
        """Show new measurements to all checks; return the changes of their levels."""
        decisions = []
        for check in self._checks:
            found = check.look(measured)
            if found is NoFinding.UNKNOWN:
                continue
            decision = (
                self._problem(check.name, found)
                if isinstance(found, Finding)
                else self._no_problem(check.name)
            )
            if decision is not None:
                decisions.append(decision)
        return decisions

    def _problem(self, name: str, found: Finding) -> Decision | None:
        level = self._allowed(name, found.level)
        self._fine[name] = 0
        before, kinds = self._levels.get(name, "ok"), self._kinds.setdefault(name, set())
        is_new_cause = level == before and found.kind not in kinds
        if LEVELS.index(level) <= LEVELS.index(before) and not is_new_cause:
            return None  # a problem that eases is not over
        kinds.add(found.kind)
        self._levels[name] = level
        return Decision(name, level, replace(found, level=level), before, is_new_cause)

    def _no_problem(self, name: str) -> Decision | None:
        if self._levels.get(name, "ok") == "ok":
            return None
        self._fine[name] = self._fine.get(name, 0) + 1
        if self._fine[name] < RECOVERY_LOOKS:
            return None
        before, self._levels[name] = self._levels[name], "ok"
        self._kinds[name].clear()
        return Decision(name, "ok", None, before)

    def _allowed(self, name: str, level: HealthLevel) -> HealthLevel:
        if level == "stopping" and not self._settings.stop:
            level = "degraded"
        can_degrade = self._settings.degrade and name in MEMORY_CHECKS
        return "notice" if level == "degraded" and not can_degrade else level


def health_event(step: int, decision: Decision, action: str = "") -> HealthChanged:
    """Return the event of a change of level."""
    found = decision.finding
    if found is None:
        return HealthChanged(step, decision.check, "ok", "the measurements are normal again")
    return HealthChanged(
        step, decision.check, decision.level, found.cause, action, found.advice, found.values
    )


def build_checks(facts: RunFacts, settings: HealthSection) -> list[Check]:
    """Return the checks of a run, without those that `health.ignore` names."""
    checks: list[Check] = [
        GradientSpikes(),
        LearningRateHigh(facts),
        WeightsStill(facts),
        DatasetDead(facts),
        PartUntrained(facts),
        Overfitting(),
        TimestepShift(facts),
        SamplesEmpty(facts),
        SamplesSame(),
        TextEmbeddings(facts),
        ValidationPrompts(facts),
        CaptionsUseless(facts),
        FewSamples(facts),
        CopiesInData(facts),
        UnreadableFiles(facts),
        SmallBatches(facts),
        LatentsScale(),
        WarmupLong(facts),
        RampLong(facts),
        SkippedSteps(),
        GradientsClipped(facts),
        DataWaits(facts, settings.wait_share),
        WeightWaits(settings.wait_share),
        SlowDown(facts, settings.slow_down),
        Throttling(),
        DiskSpace(facts, settings.disk_min_gb),
        PageCache(facts),
        HostMemory(facts),
        DeviceMemory(),
        DeviceShared(),
    ]
    return [check for check in checks if check.name not in settings.ignore]


# Acting


class Remedies:
    """Actions with which a run continues with less memory. All ranks act together.

    They are for the checks of `MEMORY_CHECKS`; nothing is done about the problems of others.
    """

    def __init__(
        self,
        controller: PlanController | None,
        prefetch: Callable[[], PrefetchDepth],
        pipeline: DataPipeline,
        gc_freeze: GcFreeze,
    ) -> None:
        """`prefetch` returns the current depth, which belongs to the iterator over batches."""
        self._controller = controller
        self._prefetch = prefetch
        self._pipeline = pipeline
        self._gc_freeze = gc_freeze

    def apply(self, check: str, reason: str) -> str:
        """Free memory because of a problem; return what was done, empty if nothing can be."""
        if check not in MEMORY_CHECKS:
            return ""
        done = [
            self._shorten_prefetch(check),
            self._reduce_plan(reason) if check == "device_memory" else self._trim_host_memory(),
        ]
        return "; ".join(filter(None, done))

    def undo(self, check: str) -> str:
        """Use memory as before, because a problem is over; return what was done.

        A smaller plan stays: a larger one would fill the device again.
        """
        if check not in MEMORY_CHECKS:
            return ""
        if check == "host_memory":
            self._pipeline.restore()
        depth = self._prefetch()
        return f"prefetches {depth.batches} batches again" if depth.lengthen(check) else ""

    def _shorten_prefetch(self, check: str) -> str:
        depth = self._prefetch()
        before = depth.batches
        return f"prefetches 1 batch instead of {before}" if depth.shorten(check) else ""

    def _reduce_plan(self, reason: str) -> str:
        if self._controller is None:
            return ""
        if self._controller.shrink_ring(f"{reason}."):
            return "freed the slots that were added to the weight ring"
        if self._controller.reduce_memory(f"{reason}."):
            return "changed to a plan that needs less memory"
        return ""

    def _trim_host_memory(self) -> str:
        self._gc_freeze.collect()
        freed = self._pipeline.trim()
        return_freed_memory()
        text = "returned unused memory to the system"
        return f"{text} and dropped {format_bytes(freed)} of cached samples" if freed else text


# Stalls


class StallWatch:
    """A thread that reports when no step ends for a long time, and what the run waits for.

    The main thread cannot do this: it hangs, for example in a read from a dead network disk.

    A step that waits for a batch has stalled after `limit_s`. A step that computes may take as long
    as earlier ones did, and the first one compiles: it has stalled after a multiple of that.
    """

    INTERVAL_S = 1.0
    FIRST_STEP, LONGEST_STEP = 15, 3
    """The first step may take so many times `limit_s`, later ones so many times the longest."""

    def __init__(
        self,
        emit: Emit,
        limit_s: float,
        recorder: StepRecorder,
        clock: Callable[[], float] = time.monotonic,
        checks: Collection[str] = ("loader_stalled", "step_stalled"),
    ) -> None:
        """`limit_s` is `health.stall_s`. `checks` are those that are not ignored."""
        self._emit = emit
        self._limit_s = limit_s
        self._recorder = recorder
        self._clock = clock
        self._checks = checks
        self._step = 0
        self._since: float | None = None
        self._longest: float | None = None
        """Seconds of the longest step so far; None before the end of the first."""
        self._stalled = ""
        """The check that has reported a stall; empty if there is none."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gracetune-stalls", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def step_done(self, step: int) -> None:
        """Note that a step is done, or that work between steps is."""
        now = self._clock()
        if self._since is not None and step > self._step:
            self._longest = max(self._longest or 0.0, now - self._since)
        self._step, self._since = step, now
        if self._stalled:
            text, check, self._stalled = "steps are done again", self._stalled, ""
            self._emit(HealthChanged(step, check, "ok", text))

    def pause(self) -> None:
        """Stop the clock until the next step: validations and checkpoints take their time."""
        self._since = None

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Report a stall, if there is a new one."""
        since, waiting = self._since, self._recorder.waiting_since
        if self._stalled or since is None:
            return
        step = self._step + 1
        stalled = self._clock() - (since if waiting is None else max(since, waiting))
        if stalled < (self._step_limit() if waiting is None else self._limit_s):
            return
        if waiting is not None:
            self._stalled = "loader_stalled"
            cause = (
                f"the data loader has stalled: step {step} has waited for a batch for "
                f"{format_seconds(stalled)}"
            )
            advice = (
                "Check the disk or network that the data and the cache are on. After "
                "datasets[].timeout_s the run ends with the name of the file."
            )
        else:
            self._stalled = "step_stalled"
            cause = (
                f"step {step} has not ended for {format_seconds(stalled)}; the data are there, "
                f"and it is in this phase: {self._recorder.phase}"
            )
            advice = "Check the GPU (nvidia-smi) and, with several ranks, the other ranks."
        if self._stalled in self._checks:
            self._emit(HealthChanged(self._step, self._stalled, "notice", cause, "", advice))

    def _step_limit(self) -> float:
        if self._longest is None:
            return self.FIRST_STEP * self._limit_s
        return max(self._limit_s, self.LONGEST_STEP * self._longest)

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL_S):
            self.look()


# Facts


def run_facts(session: Session, start_step: int) -> RunFacts:
    """Collect what the checks need to know about a run."""
    state, run = session.state, session.state.run
    expected = expected_train_section(run, state.family)
    drawn_timesteps, expected_timesteps = compare_timesteps(run.train, expected, _tokens(session))
    trained = sum(p.nbytes for p in state.parameters.values())
    cached = run.cache_config.vae_cache_type != "disk"
    shares, pipeline = dataset_shares(session), session.pipeline
    draws_by_size, batch_size = pipeline.order.draws_by_size(), run.train.batch_size
    batches = sum(-(-draws // batch_size) for draws in draws_by_size.values())
    is_parted = isinstance(state.family, PartedFamily)
    validation = session.validation if run.validation.prompts else None
    return RunFacts(
        total_steps=run.train.max_train_steps,
        start_step=start_step,
        warmup_steps=run.optimizer.warmup_steps,
        lr=run.optimizer.lr,
        is_adapter=run.adapter is not None,
        is_pretrained=state.family.name != "tiny" or run.model.path is not None,
        dataset_shares=shares,
        drawn_timesteps=drawn_timesteps,
        expected_timesteps=expected_timesteps,
        expected_shift="" if expected is None else str(expected.timestep_shift),
        timestep_shift=str(run.train.timestep_shift),
        caches_in_memory=cached,
        is_planned=session.plan_controller is not None,
        # Weights, two moments of the optimizer, an average, and the exported adapter.
        checkpoint_nbytes=trained * (3 + (run.train.ema_decay > 0) + (run.adapter is not None)),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        datasets=[
            dataset_facts(
                section.id,
                [one for one in pipeline.train_samples if one.dataset == section.id],
                shares[section.id],
                section.caption_dropout,
                section.caption_strategy == "instanceprompt",
                [(c.key, c.reason) for c in pipeline.corruptions if c.dataset == section.id],
            )
            for section in run.datasets
        ],
        batch_size=batch_size,
        batch_fill=sum(draws_by_size.values()) / max(1, batches * batch_size),
        max_grad_norm=run.train.max_grad_norm,
        weights=[name for name, _ in state.transformer.named_parameters()] if is_parted else [],
        trained=list(state.parameters) if is_parted else [],
        ramp=None if session.ramp is None else ramp_end(session.ramp, run.train.max_train_steps),
        text_problem=text_problem(pipeline.some_texts()),
        prompt_problem=prompt_problem(
            () if validation is None else validation.prompts,
            (sample.caption for sample in pipeline.train_samples),
            [section.trigger_word for section in run.datasets if section.trigger_word],
        ),
    )


def dataset_shares(session: Session) -> dict[str, float]:
    """Return the share of each dataset in the samples of an epoch."""
    run, draws = session.state.run, {}
    for section in run.datasets:
        count = sum(sample.dataset == section.id for sample in session.pipeline.train_samples)
        draws[section.id] = count * section.repeats * section.weight
    total = sum(draws.values()) or 1.0
    return {name: count / total for name, count in draws.items()}


def expected_train_section(run: RunFile, family: Family) -> TrainSection | None:
    """Return the run's section `train` with the timesteps of the model's own training.

    None if they are not known: for another package's family, for a model with a discrete noise
    schedule, and for one whose shift depends on the size of images in a way of its own.
    """
    preset = FAMILY_PRESETS.get(family.name)
    if preset is None or family.prediction != "flow" or preset.unshifted_edge is not None:
        return None
    shift = 1.0 if preset.timestep_shift is None else preset.timestep_shift[0]
    changes: dict[str, object] = {"timestep_shift": shift, "timestep_mean": 0.0}
    if preset.timestep_std is None:
        changes["timestep_std"] = 1.0
    # A distribution of another shape is a choice; the shift is compared for the chosen one.
    return run.train.model_copy(update=changes)


def compare_timesteps(
    section: TrainSection, expected: TrainSection | None, tokens: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the shares of each range of timesteps with both sections; empty if none is expected.

    Samples with more tokens than the expected shift is known for are compared at the largest size
    that it is known for. A VAE with a small scale makes many tokens even of small images.
    """
    if expected is None:
        return {}, {}
    tokens = min(tokens, largest_known_tokens(expected.timestep_shift) or tokens)
    return timestep_shares(section, tokens), timestep_shares(expected, tokens)


def timestep_shares(section: TrainSection, tokens: int) -> dict[str, float]:
    """Return the probability of each range of timesteps, within `train.timestep_window`."""
    allowed, shift = TimestepWindow(*section.timestep_window), shift_for(section, tokens)
    low, high = cdf_at_edges(section, allowed, shift)
    shares = {}
    for number in range(NUM_TIMESTEP_RANGES):
        span = TimestepWindow(number / NUM_TIMESTEP_RANGES, (number + 1) / NUM_TIMESTEP_RANGES)
        try:
            first, last = cdf_at_edges(section, intersect(span, allowed), shift)
        except ConfigError:  # nothing, or next to nothing, is drawn from this range
            first = last = 0.0
        shares[timestep_range(span.low)] = (last - first) / (high - low)
    return shares


def _tokens(session: Session) -> int:
    """Return the number of tokens of the most frequent sample size."""
    draws = session.pipeline.order.draws_by_size()
    family = session.state.family
    shape = max(draws, key=lambda size: draws[size])
    return family.num_tokens(family.latent_shape(*shape))
