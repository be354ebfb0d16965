"""Collect the measurements of a run every few steps, log them, and show them to the health checks.

`MetricsBuffer` (loop.py) calls `Telemetry.collect` when it has logged steps, which is when the CPU
has waited for the device anyway. Values are read from the device only then. Everything but the
losses of steps is collected at most once per `INTERVAL_S`, so that short steps do not pay for it.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from blake3 import blake3

from gracetune.cache.open_stores import cache_root
from gracetune.config.load import resolved_json
from gracetune.events.log import event_from_record, events_of_kind
from gracetune.events.types import (
    KINDS,
    BatchSkipped,
    DeviceSensors,
    HealthChanged,
    HeldOutLoss,
    LossParts,
    RunDescribed,
    RunStarted,
    StepDone,
    StepTimes,
    WeightsMoved,
)
from gracetune.memory.sensors import open_sensors
from gracetune.train.health import (
    HealthMonitor,
    Remedies,
    StallWatch,
    build_checks,
    dataset_shares,
    health_event,
    run_facts,
)
from gracetune.train.health_checks import LearningRateHigh, Measurements, held_out_mean, listed
from gracetune.train.step_recorder import TIMESTEP_RANGES, StepRecorder, merge_records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.cache.batch_transfer import PrefetchDepth
    from gracetune.data.pipeline import DataPipeline
    from gracetune.events.types import MemoryUsed
    from gracetune.memory.sensors import SensorReading, Sensors
    from gracetune.train.build import Session
    from gracetune.train.health import Decision
    from gracetune.train.health_checks import SamplesSeen
    from gracetune.train.last_seen import LastSeen
    from gracetune.train.step_recorder import StepRecords
    from gracetune.train.validate import HeldOutLosses

INTERVAL_S = 1.0
"""Seconds between two collections; only the losses of steps are logged more often."""
MOVEMENT_EVERY = 10
"""Collections between two measurements of how far weights have moved."""
FAR = 0.5
"""Relative distance of weights from the start that only a high learning rate causes."""
NOTE_S = 1.0
"""Seconds between two notes of the step in the record for the next start."""
PACKAGES = ("gracetune", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


class Telemetry:
    """The telemetry of one rank. All ranks call its methods together, and the main rank logs."""

    def __init__(
        self,
        session: Session,
        start_step: int,
        sensors: Sensors | None = None,
        last_seen: LastSeen | None = None,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the sensors and the checks.

        `sensors` replaces those of this machine. `last_seen` is the record for the next start, on
        the main rank.
        """
        self.stop_reason = ""
        """Why the run must stop; empty if it need not. A health check sets it on all ranks."""
        self._session = session
        self._ranks = session.state.ranks
        self._emit = session.emit
        self._interval_s = interval_s
        self._clock = clock
        recorder = session.state.recorder
        assert isinstance(recorder, StepRecorder), "a session has a recorder"
        self._recorder = recorder
        self._sensors = sensors or _open_sensors(session)
        run = session.state.run
        settings = run.health
        self._settings = settings
        checks = build_checks(run_facts(session, start_step), settings) if settings.enabled else []
        self._monitor = HealthMonitor(checks, settings)
        earlier = []
        if start_step and self._ranks.is_main:
            earlier = earlier_measurements(_folder(session) / "events.jsonl", start_step)
        self._monitor.remember(earlier)
        self._remedies: Remedies | None = None
        self._collected_at = -float("inf")
        self._collections = 0
        self._pending: list[StepDone] = []
        self._stalled_s = self._moved = 0.0
        self._moved_step = -1
        """The step at which `_moved`, the median distance of the blocks, was measured."""
        self._held_out: tuple[HeldOutLoss, list[float]] | None = None
        measured = [one.held_out for one in earlier if one.held_out is not None]
        means = [(held_out_mean(one), one.step) for one in measured]
        self._best = (min(means)[1], min(means)[0]) if means else None
        self._noted_at = -float("inf")
        self._phase = ""
        self._last_seen = last_seen
        self._watch: StallWatch | None = None
        if self._ranks.is_main and settings.enabled:
            stalls = {"loader_stalled", "step_stalled"} - set(settings.ignore)
            self._watch = StallWatch(self._emit, settings.stall_s, recorder, checks=stalls)

    def start(self, step: int, prefetch: Callable[[], PrefetchDepth]) -> None:
        """Describe the run in the log and start to watch it; `prefetch` returns the depth."""
        session = self._session
        self._remedies = Remedies(
            session.plan_controller, prefetch, session.pipeline, session.gc_freeze
        )
        self._emit(describe_run(self._session, step))
        self.note(step, "training")
        if self._watch is not None:
            self._watch.start()

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()

    def note(self, step: int, phase: str) -> None:
        """Note what the run does now: `training`, `saving` or `validating`."""
        now = self._clock()
        if self._last_seen is not None and (phase != self._phase or now - self._noted_at > NOTE_S):
            self._last_seen.update(step=step, phase=phase)
            self._phase, self._noted_at = phase, now
        if self._watch is not None:
            if phase == "training":
                self._watch.step_done(step)
            else:
                self._watch.pause()

    # What is measured

    def collect(self, done: Sequence[StepDone], memory: MemoryUsed) -> None:
        """Log measurements since the last call, and look at the health of the run."""
        self._pending += done
        now = self._clock()
        is_due = now - self._collected_at >= self._interval_s or done[-1].step >= self._total_steps
        if not self._ranks.broadcast(is_due):
            return
        self._collected_at = now
        measured = self._measure(done[-1].step, memory)
        self._look(measured)

    def before_stop(self, step: int) -> None:
        """Log how far the weights have moved until now, before the last checkpoint is saved."""
        if self._moved_step != step:
            self._emit(self._movement(step, {}))

    def add_held_out(self, step: int, found: HeldOutLosses) -> None:
        """Log the loss on held-out samples, with the best step so far."""
        if not found.means:
            return
        mean = sum(found.means.values()) / len(found.means)
        if self._best is None or mean < self._best[1]:
            self._best = step, mean
        event = HeldOutLoss(step, found.means, found.by_timestep, len(found.single), *self._best)
        self._held_out = event, found.single
        self._emit(event)

    def after_validation(self, seen: SamplesSeen) -> None:
        """Look at the samples of a validation and at the held-out loss at once."""
        held_out, single = self._held_out or (None, [])
        self._held_out = None
        self._look(
            Measurements(seen.step, held_out=held_out, held_out_samples=single, samples=seen)
        )

    def skipped(self, step: int, loss: float, grad_norm: float, micro_batches: int) -> BatchSkipped:
        """Return the event of a step that was skipped, with the files of this rank's samples."""
        skips = self._session.state.skips
        assert skips is not None, "only a run that may skip steps does"
        files = self._recorder.files_since(-(-micro_batches // self._ranks.world_size))
        return BatchSkipped(step, loss, grad_norm, files, len(skips.up_to(step)))

    def diverged(
        self, step: int, loss: float, grad_norm: float, losses: tuple[float, float]
    ) -> str:
        """Log that the loss or the gradient is not finite, which ends the run; return the advice.

        `losses` are the first loss of this process and the last that was finite.
        """
        why, advice = self._why_diverged(step, losses)
        cause = (
            f"training diverged: the loss is {loss} and the gradient norm {grad_norm} at step "
            f"{step}; {why}"
        )
        action = "the run ends; checkpoints saved before are kept"
        values = {"loss": loss, "grad_norm": grad_norm}
        self._emit(HealthChanged(step, "not_finite", "stopping", cause, action, advice, values))
        return advice

    def _why_diverged(self, step: int, losses: tuple[float, float]) -> tuple[str, str]:
        """Return what is known about the cause of a loss that is not finite, and advice."""
        batches = [one for one in self._ranks.gather(self._recorder.first_not_finite()) if one]
        files, bad, latents, texts = (
            list(dict.fromkeys(name for one in batches for name in one[place]))
            for place in range(4)
        )
        rest = "Delete the cache after a change, and start over in another output_dir."
        skip = "If single files are bad, set train.skip_bad_batches: true."
        if latents:
            why = f"the latents of {listed(latents)} are not finite"
            return why, f"Check these files and the VAE in model.path. {rest} {skip}"
        if texts:
            why = f"the text embeddings of {listed(texts)} are not finite"
            return why, f"Check these captions and the text encoders in model.path. {rest} {skip}"
        if step == 1:
            why = "no weight had been changed before, so the learning rate is not the cause"
            which = "" if len(bad) == len(files) else f", and the files {listed(bad)}"
            return why, f"Check the weights in model.path, its precision{which}. {skip}"
        return self._why_trained(losses, files, bad), (
            "Lower optimizer.lr or train.max_grad_norm and start over in another output_dir. "
            f"{skip}"
        )

    def _why_trained(
        self, losses: tuple[float, float], files: Sequence[str], bad: Sequence[str]
    ) -> str:
        """Return what is known about a loss that is not finite after the first step."""
        if self._moved > FAR:  # as last measured: by now, the weights may not be finite either
            moved = f"by {self._moved:.0%} (median)"
            return f"the weights of its blocks have moved {moved}: the learning rate is too high"
        first, last = losses
        if last > max(LearningRateHigh.EXPLODED, LearningRateHigh.EXPLODED_GROWTH * first):
            return (
                f"the loss had grown from {first:.4g} to {last:.4g}: the learning rate is too high"
            )
        if len(bad) < len(files):
            return (
                f"the loss of {len(bad)} of {len(files)} samples is not finite: {listed(bad)}; "
                "these samples are bad, or the learning rate is too high"
            )
        which = f" ({listed(bad)})" if bad else ""
        return f"the learning rate is too high, or a sample of this step{which} is bad"

    def _measure(self, step: int, memory: MemoryUsed) -> Measurements:
        session = self._session
        shard_size = session.state.layout.shard_size
        records = merge_records(self._ranks.gather(self._recorder.take()), shard_size)
        times = self._step_times(step, records)
        losses = self._loss_parts(step, records)
        sensors = self._read_sensors(step)
        roles, unified = session.batch_transfer.memory_details(step, planned_roles(session))
        for event in (times, losses, sensors, roles, unified):
            if event is not None:
                self._emit(event)
        moved = None
        if self._collections % MOVEMENT_EVERY == 0 or step >= self._total_steps:
            moved = self._movement(step, records.grad_norms)
            self._emit(moved)
        self._collections += 1
        self._recorder.wants_gradients = self._collections % MOVEMENT_EVERY == 0
        pending, self._pending = self._pending, []
        spread = {k: v["loss"] for k, v in records.latent_spread.means().items() if "loss" in v}
        return Measurements(
            step,
            pending,
            times,
            losses,
            spread,
            moved,
            sensors,
            memory,
            part_losses=_nested(records.by_part_range.means()),
            grad_norms=records.grad_norms,
            alloc_retries=session.batch_transfer.alloc_retries,
        )

    def _movement(self, step: int, grad_norms: Mapping[str, float]) -> WeightsMoved:
        movement = self._recorder.movement
        distances = movement.distances()
        norms = movement.by_block(grad_norms), movement.weight_norms()
        self._moved = statistics.median(distances.values()) if distances else 0.0
        self._moved_step = step
        return WeightsMoved(step, movement.measure, distances, *norms)

    @property
    def _total_steps(self) -> int:
        return self._session.state.run.train.max_train_steps

    def _step_times(self, step: int, records: StepRecords) -> StepTimes | None:
        """Return the mean seconds of each phase of a step; None if no step is complete."""
        count = records.steps
        if not count or not self._pending:
            return None
        mean = {name: seconds / count for name, seconds in records.seconds.items()}
        controller = self._session.plan_controller
        stalled = 0.0 if controller is None else controller.stall_seconds()
        weights = max(0.0, stalled - self._stalled_s) / count
        self._stalled_s = stalled
        data = min(mean["data"], mean["gradients"])
        weights = min(weights, mean["gradients"] - data)
        is_alone = self._ranks.world_size == 1
        phases = {
            "compute": mean["gradients"] - data - weights,
            "data": data,
            "weights": weights,
            "host": 0.0 if is_alone else mean["reduced"],
            "optimizer": mean["updated"],
        }
        recent = self._pending[-count:]
        total = sum(done.seconds for done in recent) / len(recent)
        phases["other"] = max(0.0, total - sum(phases.values()))
        return StepTimes(step, count, phases, sum(phases.values()))

    def _loss_parts(self, step: int, records: StepRecords) -> LossParts:
        ids = [section.id for section in self._session.state.run.datasets]
        return LossParts(
            step,
            records.by_dataset.means(ids),
            records.by_timestep.means(TIMESTEP_RANGES),
            records.by_part.means(),
            records.by_expert.means(),
        )

    def _read_sensors(self, step: int) -> DeviceSensors:
        """Read the sensors of all ranks.

        Of host values, those of the machine with least memory count; of the output's disk, those of
        the main rank, which writes to it; of the disks of caches, those of the fullest.
        """
        readings = self._ranks.gather(self._sensors.read())
        host = dict(min(readings, key=_memory_share).host)
        host.pop("output_free", None)
        host |= {k: v for k, v in readings[0].host.items() if k == "output_free"}
        caches = [one.host["cache_free"] for one in readings if "cache_free" in one.host]
        host |= {"cache_free": min(caches)} if caches else {}
        gpus = tuple({"rank": rank, **gpu} for rank, one in enumerate(readings) for gpu in one.gpus)
        return DeviceSensors(step, gpus, host, readings[0].unavailable)

    # Health

    def _look(self, measured: Measurements) -> None:
        """Let the main rank decide, and all ranks act on it."""
        decisions = self._monitor.look(measured) if self._ranks.is_main else []
        for decision in self._ranks.broadcast(decisions):
            decided, action = self._act(decision)
            if decided.level != decision.before or decided.is_new_cause:
                self._emit(health_event(measured.step, decided, action))

    def _act(self, decision: Decision) -> tuple[Decision, str]:
        """Act on a decision; return it, or a lower level if nothing can be done, and the action."""
        found, remedies = decision.finding, self._remedies
        assert remedies is not None, "`start` was called"
        if found is None:
            return decision, remedies.undo(decision.check)
        if decision.level == "degraded":
            action = remedies.apply(decision.check, found.cause)
            return (decision, action) if action else (replace(decision, level="notice"), "")
        if decision.level == "stopping":
            self.stop_reason = (
                f"the health check {decision.check} stops the run: {found.cause}. {found.advice}"
            )
            return decision, "the run saves a checkpoint and stops"
        return decision, ""


def _nested(
    table: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return losses that are named `audio t0.25-0.50` by part, then by range of timesteps."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, mean in table.items():
        part, _, timesteps = name.rpartition(" ")
        found.setdefault(part, {})[timesteps] = mean
    return found


def _folder(session: Session) -> Path:
    return Path(session.state.run.output_dir)


def _open_sensors(session: Session) -> Sensors:
    device = session.state.accelerator.device
    index = (device.index or 0) if device.type == "cuda" else None
    folder = _folder(session)
    return open_sensors(index, folder, cache_root(session.state.run))


def _memory_share(reading: SensorReading) -> float:
    host = reading.host
    return host.get("memory_available", 0.0) / max(1.0, host.get("memory_total", 1.0))


def earlier_measurements(log: Path, start_step: int) -> list[Measurements]:
    """Return what earlier processes of a resumed run have measured, as far as the log has it.

    Steps after `start_step`, from which the run continues, do not count; nor do those that an
    earlier process repeated.
    """
    kinds = (RunStarted, StepDone, LossParts, WeightsMoved, HeldOutLoss)
    events: list[StepDone | LossParts | WeightsMoved | HeldOutLoss] = []
    for record in events_of_kind(log, *(KINDS[kind] for kind in kinds)):
        event = event_from_record(record)
        if isinstance(event, RunStarted):
            events = [one for one in events if one.step <= event.start_step]
        elif isinstance(event, kinds) and event.step <= start_step:
            events.append(event)
    found: list[Measurements] = []
    for is_step, group in groupby(events, key=lambda one: isinstance(one, StepDone)):
        if is_step:
            steps = [one for one in group if isinstance(one, StepDone)]
            found.append(Measurements(steps[-1].step, steps))
            continue
        for one in group:
            match one:
                case LossParts():
                    found.append(Measurements(one.step, losses=one))
                case WeightsMoved():
                    found.append(Measurements(one.step, moved=one))
                case HeldOutLoss():
                    found.append(Measurements(one.step, held_out=one))
    return found


# The description of a run


def describe_run(session: Session, step: int) -> RunDescribed:
    """Return the event that describes the machine, the versions, the data and the plan."""
    run = session.state.run
    return RunDescribed(
        step=step,
        machine=describe_machine(session),
        versions=package_versions(),
        settings=blake3(resolved_json(run).encode()).hexdigest(length=8),
        data=describe_data(session),
        plan=describe_plan(session),
    )


def describe_machine(session: Session) -> dict[str, object]:
    """Return the host, its CPUs and memory, and the GPUs of all ranks."""
    device, ranks = session.state.accelerator.device, session.state.ranks
    gpus = []
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpus = [{"name": properties.name, "memory": properties.total_memory}]
    return {
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "memory": psutil.virtual_memory().total,
        "gpus": [gpu for found in ranks.gather(gpus) for gpu in found],
        "link": session.batch_transfer.link.value,
        "ranks": ranks.world_size,
        "machines": ranks.num_machines,
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute a step."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_data(session: Session) -> dict[str, object]:
    """Return the datasets, buckets, unreadable files and captions of a run."""
    run, pipeline = session.state.run, session.pipeline
    shares = dataset_shares(session)
    trained = Counter(sample.dataset for sample in pipeline.train_samples)
    held_out = Counter(d.sample.dataset for draws in pipeline.held_out_draws for d in draws)
    batch_size = run.train.batch_size
    return {
        "samples": len(pipeline.train_samples),
        "held_out": sum(held_out.values()),
        "datasets": [
            {
                "id": section.id,
                "type": section.dataset_type,
                "samples": trained[section.id],
                "held_out": held_out[section.id],
                "repeats": section.repeats,
                "weight": section.weight,
                "share": shares[section.id],
            }
            for section in run.datasets
        ],
        "buckets": [
            {
                "size": "x".join(map(str, size)),
                "samples": draws,
                "batches": -(-draws // batch_size),
            }
            for size, draws in pipeline.order.draws_by_size().items()
        ],
        "corrupt": [
            {"dataset": one.dataset, "file": one.key, "reason": one.reason}
            for one in pipeline.corruptions
        ],
        "captions": _caption_statistics(pipeline),
    }


def _caption_statistics(pipeline: DataPipeline) -> dict[str, float]:
    captions = [sample.caption for sample in pipeline.train_samples]
    words = [len(caption.split()) for caption in captions] or [0]
    return {
        "samples": len(captions),
        "unique": len(set(captions)),
        "empty": sum(not caption.strip() for caption in captions),
        "words_min": min(words),
        "words_mean": sum(words) / len(words),
        "words_max": max(words),
    }


def describe_plan(session: Session) -> dict[str, object] | None:
    """Return the memory plan as JSON; None if the run has none."""
    if session.plan_controller is None:
        return None
    plan = session.plan_controller.plan
    return {
        "batch": plan.batch,
        "accumulation": plan.accumulation,
        "slots": plan.slots,
        "compiled": plan.compiled,
        "frozen_compute": plan.frozen_compute,
        "host_state": plan.host_state,
        "blocks": [
            {"name": f"block {index}", **asdict(block)} for index, block in enumerate(plan.blocks)
        ],
        "seconds": asdict(plan.seconds),
        "launch_costs_s": asdict(session.plan_controller.launch_costs),
        "device": dict(plan.device.by_role()),
        "host": dict(plan.host.by_role()),
    }


def planned_roles(session: Session) -> dict[str, dict[str, int]]:
    """Return the bytes that the plan expects, by kind of memory and role; empty without a plan."""
    if session.plan_controller is None:
        return {}
    plan = session.plan_controller.plan
    return {
        "device": {str(role): nbytes for role, nbytes in plan.device.by_role().items()},
        "host": {str(role): nbytes for role, nbytes in plan.host.by_role().items()},
    }
