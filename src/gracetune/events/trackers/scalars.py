"""Turn the events of a run into named numbers, which every tracker draws over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.events.types import (
    BatchesFed,
    BatchSkipped,
    CheckpointSaved,
    DeviceSensors,
    HealthChanged,
    HeldOutLoss,
    LossParts,
    MemoryRoles,
    MemoryUsed,
    StepDone,
    StepTimes,
    UnifiedMemory,
    Validated,
    WeightsMoved,
    WeightsStreamed,
)
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.events.types import Event

HEALTH_LEVELS = {"ok": 0, "notice": 1, "degraded": 2, "stopping": 3}


def event_scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by their names in trackers; empty for other events."""
    match event:
        case StepDone():
            return _step_scalars(event)
        case MemoryUsed():
            return _memory_scalars(event)
        case BatchesFed():
            return _batch_scalars(event)
        case WeightsStreamed():
            return _streaming_scalars(event)
        case Validated():
            return {f"validation/{name}": loss for name, loss in event.losses.items()}
        case CheckpointSaved():
            return {"checkpoint/seconds": event.seconds, "checkpoint/gib": event.nbytes / GIB}
        case BatchSkipped():
            return {"train/skipped_steps": event.skipped}
    return _detail_scalars(event)


def _step_scalars(event: StepDone) -> dict[str, float]:
    values = {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/grad_norm": event.grad_norm,
        "train/samples": event.samples,
        "train/accumulation": event.accumulation,
        "train/epoch": event.epoch,
    }
    if event.expert:
        values[f"train/loss_{event.expert}"] = event.loss
    if event.seconds > 0:
        values["train/samples_per_s"] = event.samples / event.seconds
    return values


def _memory_scalars(event: MemoryUsed) -> dict[str, float]:
    return {
        "memory/host_gib": event.host / GIB,
        "memory/device_gib": event.device / GIB,
        "memory/device_peak_gib": event.device_peak / GIB,
        "memory/managed_gib": event.managed / GIB,
    }


def _batch_scalars(event: BatchesFed) -> dict[str, float]:
    return {
        "feed/waits": event.waits,
        "feed/waited_s": event.waited_s,
        "feed/hidden_s": event.hidden_s,
        "feed/depth": event.depth,
    }


def _streaming_scalars(event: WeightsStreamed) -> dict[str, float]:
    return {
        "stream/slots": event.slots,
        "stream/late": event.late + event.on_demand,
        "stream/waited_s": event.waited_s,
        "stream/hidden_s": event.hidden_s,
    }


def _detail_scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event of the telemetry, by their names in trackers."""
    match event:
        case StepTimes():
            return {f"time/{phase}_s": value for phase, value in event.seconds.items()}
        case LossParts():
            parts = {
                "dataset": event.by_dataset,
                "timestep": event.by_timestep,
                "part": event.by_part,
                "expert": event.by_expert,
            }
            return {
                f"loss_by_{kind}/{name}": part["loss"]
                for kind, found in parts.items()
                for name, part in found.items()
                if "loss" in part
            }
        case HeldOutLoss():
            return {f"held_out/{name}": p["loss"] for name, p in event.by_timestep.items()}
        case WeightsMoved():
            moved = {f"moved/{name}": value for name, value in event.blocks.items()}
            moved |= {f"grad_norm/{name}": v for name, v in event.grad_norms.items()}
            return moved | {f"weight_norm/{name}": v for name, v in event.weight_norms.items()}
        case MemoryRoles():
            return {
                f"memory_{tier}/{role}_gib": nbytes / GIB
                for tier, roles in event.roles.items()
                for role, nbytes in roles.items()
            }
        case UnifiedMemory():
            return _unified_scalars(event)
        case DeviceSensors():
            return _sensor_scalars(event)
        case HealthChanged():
            return {f"health/{event.check}": HEALTH_LEVELS[event.level]}
    return {}


def _unified_scalars(event: UnifiedMemory) -> dict[str, float]:
    values = {
        "uvm/stage": event.stage,
        "uvm/headroom_gib": event.headroom / GIB,
        "uvm/managed_current_gib": event.current / GIB,
        "uvm/managed_peak_gib": event.peak / GIB,
        "uvm/managed_denied": event.denied,
        "uvm/light_reclamations": event.light_reclamations,
        "uvm/full_reclamations": event.full_reclamations,
    }
    values |= {f"uvm/hints_{name}": count for name, count in event.hints.items()}
    return values | {f"uvm/{name}": count for name, count in event.faults.items()}


def _sensor_scalars(event: DeviceSensors) -> dict[str, float]:
    names = ("temperature_c", "sm_clock_mhz", "power_w", "utilization")
    values = {
        f"gpu/{name}_{gpu.get('rank', 0)}": float(value)
        for gpu in event.gpus
        for name in names
        if isinstance(value := gpu.get(name), int | float)
    }
    return values | {f"host/{name}": value for name, value in event.host.items()}
