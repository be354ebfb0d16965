"""Write scalars, histograms and images for TensorBoard, without torch or tensorflow.

This uses TensorBoard's record writer directly. Its `EventFileWriter` would import tensorflow if
that is installed, and writes from a thread, so a killed run would lose records.
"""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import suppress
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from gracetune.errors import RunFailedError
from gracetune.events.types import (
    BatchesFed,
    DeviceSensors,
    HealthChanged,
    HeldOutLoss,
    LossParts,
    MemoryRoles,
    MemoryUsed,
    RatesSpread,
    StepDone,
    StepTimes,
    UnifiedMemory,
    Validated,
    WeightsMoved,
    WeightsStreamed,
)
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.events.types import Event


DETAILS = (
    StepTimes,
    LossParts,
    HeldOutLoss,
    WeightsMoved,
    DeviceSensors,
    MemoryRoles,
    UnifiedMemory,
    HealthChanged,
)
"""Events of the telemetry whose numbers are drawn over steps."""
HEALTH_LEVELS = {"ok": 0, "notice": 1, "degraded": 2, "stopping": 3}


class TensorBoardSink:
    """An event sink that writes one TensorBoard event file to `folder`.

    `purge_step` is the first step of this process: TensorBoard discards records of earlier
    processes from this step on. None means a new run.
    """

    def __init__(
        self, folder: Path, purge_step: int | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._folder = folder
        now = clock()
        # TensorBoard reads files in the order of their names. With microseconds in the name, the
        # file of a quick restart still comes after that of the run it resumes.
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("xb")
        except OSError as error:
            raise self._unwritable(error) from error
        self._records = RecordWriter(self._file)
        self._write(Record(wall_time=now, file_version="brain.Event:2"))
        # TensorBoard ignores the first START in a folder, so new runs write one too. Otherwise the
        # START of the first resumed run would be ignored.
        start = SessionLog(status=SessionLog.START)
        self._write(Record(wall_time=now, step=purge_step or 0, session_log=start))

    def handle(self, event: Event) -> None:
        """Write an event that TensorBoard can draw over steps; ignore others."""
        if isinstance(event, StepDone):
            self._scalars(event.step, _step_scalars(event))
        elif isinstance(event, MemoryUsed):
            self._scalars(event.step, _memory_scalars(event))
        elif isinstance(event, BatchesFed):
            self._scalars(event.step, _batch_scalars(event))
        elif isinstance(event, WeightsStreamed):
            self._scalars(event.step, _streaming_scalars(event))
        elif isinstance(event, DETAILS):
            self._scalars(event.step, _detail_scalars(event))
        elif isinstance(event, RatesSpread):
            self._histogram(event)
        elif isinstance(event, Validated):
            losses = {f"validation/{name}": loss for name, loss in event.losses.items()}
            self._scalars(event.step, losses)
            if event.grid is not None:
                self._image(event.step, Path(event.grid).read_bytes())

    def close(self) -> None:
        """Close the file; every record is already written."""
        self._file.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if values:
            summary = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._write(Record(wall_time=self._clock(), step=step, summary=Summary(value=summary)))

    def _histogram(self, event: RatesSpread) -> None:
        """Write a histogram of log10(rate): learning rates span several decades."""
        tag = f"train/log10_rate_{event.expert}" if event.expert else "train/log10_rate"
        edges = [math.log10(limit) for limit in event.limits]
        centres = [(low + high) / 2 for low, high in pairwise(edges)]
        filled = [centre for centre, count in zip(centres, event.counts, strict=True) if count]
        weighted = list(zip(centres, event.counts, strict=True))
        histogram = HistogramProto(
            min=filled[0] if filled else 0.0,
            max=filled[-1] if filled else 0.0,
            num=sum(event.counts),
            sum=sum(centre * count for centre, count in weighted),
            sum_squares=sum(centre**2 * count for centre, count in weighted),
            bucket_limit=edges[1:],
            bucket=event.counts,
        )
        summary = Summary(value=[Summary.Value(tag=tag, histo=histogram)])
        self._write(Record(wall_time=self._clock(), step=event.step, summary=summary))

    def _image(self, step: int, encoded: bytes) -> None:
        with Image.open(BytesIO(encoded)) as image:
            width, height = image.size
            channels = len(image.getbands())
        encoded_image = Summary.Image(
            width=width, height=height, colorspace=channels, encoded_image_string=encoded
        )
        summary = Summary(value=[Summary.Value(tag="validation/grid", image=encoded_image)])
        self._write(Record(wall_time=self._clock(), step=step, summary=summary))

    def _write(self, record: Record) -> None:
        try:
            self._records.write(record.SerializeToString())
            self._records.flush()
        except OSError as error:
            with suppress(OSError):  # closing flushes, and fails, again; the first error counts
                self._file.close()
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"logging.tensorboard is true, but {self._folder} cannot be written: "
            f"{error.strerror}. Choose another output_dir, or set logging.tensorboard: false."
        )


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
    """Return the numbers of an event of the telemetry, by their names in TensorBoard."""
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
            return moved | {f"grad_norm/{name}": v for name, v in event.grad_norms.items()}
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
