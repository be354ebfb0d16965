"""Write scalars, histograms, text, images and sounds for TensorBoard, without torch or tensorflow.

This uses TensorBoard's record writer directly. Its `EventFileWriter` would import tensorflow if
that is installed, and writes from a thread, so a killed run would lose records.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import wave
from contextlib import suppress
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from gracetune.errors import RunFailedError
from gracetune.events.trackers.tracker import NO_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gracetune.events.trackers.tracker import SampleFile
    from gracetune.events.types import HealthChanged


class TensorBoardTracker:
    """A tracker that writes one TensorBoard event file to `folder`.

    `purge_step` is the first step of this process: TensorBoard discards records of earlier
    processes from this step on. None means a new run.
    """

    def __init__(
        self, folder: Path, purge_step: int | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._folder = folder
        self.address = ""
        self.last_step = NO_STEP
        """TensorBoard itself discards the steps that a resumed run repeats."""
        self._start_step = self._last_step = purge_step or 0
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

    def describe(self, parts: Mapping[str, Any]) -> None:
        """Write facts about the run, such as its settings and its plan, as text."""
        for name, part in parts.items():
            text = json.dumps(part, indent=2, ensure_ascii=False, default=str)
            self._text(self._start_step, f"run/{name}", f"```json\n{text}\n```")

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self._summary(step, [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])

    def log_histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Write a histogram of log10 of the values: learning rates span several decades."""
        edges = [math.log10(edge) for edge in edges]
        centres = [(low + high) / 2 for low, high in pairwise(edges)]
        filled = [centre for centre, count in zip(centres, counts, strict=True) if count]
        weighted = list(zip(centres, counts, strict=True))
        histogram = HistogramProto(
            min=filled[0] if filled else 0.0,
            max=filled[-1] if filled else 0.0,
            num=sum(counts),
            sum=sum(centre * count for centre, count in weighted),
            sum_squares=sum(centre**2 * count for centre, count in weighted),
            bucket_limit=edges[1:],
            bucket=counts,
        )
        tag = name.replace("train/rates", "train/log10_rate")
        self._summary(step, [Summary.Value(tag=tag, histo=histogram)])

    def log_samples(self, step: int, grid: Path, samples: Sequence[SampleFile]) -> None:
        """Write the image of all samples, and sounds; TensorBoard plays no MP4 files."""
        encoded = grid.read_bytes()
        with Image.open(BytesIO(encoded)) as image:
            width, height = image.size
            channels = len(image.getbands())
        picture = Summary.Image(
            width=width, height=height, colorspace=channels, encoded_image_string=encoded
        )
        values = [Summary.Value(tag="validation/grid", image=picture)]
        for sample in samples:
            if sample.kind == "audio":
                tag = f"validation/{sample.number:03d}"
                values.append(Summary.Value(tag=tag, audio=_audio(sample.path)))
        self._summary(step, values)

    def log_health(self, event: HealthChanged, text: str) -> None:
        """Write the cause of a change as text."""
        self._text(event.step, f"health/{event.check}", text)

    def finish(self, status: str) -> None:
        """Close the file; every record is already written."""
        self._text(self._last_step, "run/status", status)
        self._file.close()

    def _summary(self, step: int, values: Sequence[Summary.Value]) -> None:
        self._last_step = max(self._last_step, step)
        summary = Summary(value=values)
        self._write(Record(wall_time=self._clock(), step=step, summary=summary))

    def _text(self, step: int, tag: str, text: str) -> None:
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            string_val=[text.encode("utf-8", errors="backslashreplace")],
        )
        metadata = SummaryMetadata(plugin_data=plugin)
        self._summary(step, [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

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
            f"{self._folder} cannot be written: {error.strerror}. Choose another output_dir, or "
            "set logging.tensorboard: false"
        )


def _audio(path: Path) -> Summary.Audio:
    """Return a WAV file as TensorBoard stores it."""
    with wave.open(str(path)) as file:
        rate, channels, frames = file.getframerate(), file.getnchannels(), file.getnframes()
    return Summary.Audio(
        sample_rate=rate,
        num_channels=channels,
        length_frames=frames,
        encoded_audio_string=path.read_bytes(),
        content_type="audio/wav",
    )
