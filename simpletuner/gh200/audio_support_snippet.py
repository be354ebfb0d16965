"""Placement hints for the audio tensors of a batch, under the name that the merge guide uses."""

from collections.abc import Mapping

from gracetune.gh200 import optimize_batch_for_gh200
from gracetune.memory.placement import BatchReport

AUDIO_KEYS = ("audio_latents", "audio_samples", "waveform")


def hint_audio(batch: Mapping[str, object]) -> BatchReport:
    """Tell the driver where to keep the audio tensors of a batch; report what it accepted."""
    return optimize_batch_for_gh200({key: batch[key] for key in AUDIO_KEYS if key in batch})
