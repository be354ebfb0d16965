"""Send a run to Weights & Biases, or write it to `wandb/` in the output folder (offline).

The package `wandb` (extra `wandb`) uploads from a process of its own. `WANDB_MODE`, `WANDB_ENTITY`
and its other variables have their usual meaning.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from gracetune.errors import RunFailedError
from gracetune.events.trackers.tracker import NO_STEP, TrackerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.events.trackers.tracker import SampleFile, TrackerOptions
    from gracetune.events.types import HealthChanged

ALERT_LEVELS = {"notice": "WARN", "degraded": "WARN", "stopping": "ERROR"}
MEDIA_KEYS = {"image": "samples/images", "video": "samples/videos", "audio": "samples/sounds"}


class WandbTracker:
    """One run in Weights & Biases, which resumed processes of the run continue."""

    def __init__(self, options: TrackerOptions) -> None:
        import wandb

        self._wandb = wandb
        self._state = TrackerState(options.folder, "wandb")
        run_id = self._state.values.get("id") or secrets.token_hex(4)
        # wandb would ask on the terminal, from a thread, while the run prints its progress.
        mode = "offline" if options.offline else wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RunFailedError(
                "no W&B API key is configured. Run `wandb login`, set WANDB_API_KEY, or set "
                "logging.tracker_offline: true"
            )
        self._run = wandb.init(
            project=options.project,
            name=options.run_name,
            id=run_id,
            resume="allow",
            dir=str(options.folder),
            mode=mode,
            # The run has its own progress lines and sensors.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._is_local = mode != "online"
        known = self._state.values.get("step", NO_STEP)
        # A service knows its last step; files do not, because each process writes a new one.
        self.last_step: int = known if self._is_local else max(known, self._run.step - 1)
        self.address = (
            f"wandb sync {options.folder / 'wandb' / 'offline-run-*'}"
            if self._is_local
            else str(self._run.url)
        )
        self._state.update(id=run_id)

    def describe(self, parts: Mapping[str, Any]) -> None:
        """Add to the run's config."""
        self._run.config.update(dict(parts), allow_val_change=True)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of a step to the history, with the samples of that step."""
        # Without `commit`, a killed process would lose the step.
        self._run.log(dict(values), step=step, commit=True)
        self._state.update(step=step)

    def log_histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Add a histogram to the history."""
        self._run.log(
            {name: self._wandb.Histogram(np_histogram=(list(counts), list(edges)))}, step=step
        )

    def log_samples(self, step: int, grid: Path, samples: Sequence[SampleFile]) -> None:
        """Add the samples with their prompts to the history, in one gallery for each kind."""
        media: dict[str, Any] = {"samples/grid": self._wandb.Image(str(grid))}
        for sample in samples:
            media.setdefault(MEDIA_KEYS[sample.kind], []).append(self._media(sample))
        self._run.log(media, step=step)

    def log_health(self, event: HealthChanged, text: str) -> None:
        """Set the state of the check in the summary, and send an alert if there is a problem."""
        self._run.summary[f"health/{event.check}"] = text
        if event.level in ALERT_LEVELS:
            level = self._wandb.AlertLevel[ALERT_LEVELS[event.level]]
            self._run.alert(title=f"{event.check} at step {event.step}", text=text, level=level)

    def finish(self, status: str) -> None:
        """Mark the run as finished or failed and wait for the upload."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "done" else 1)

    def _media(self, sample: SampleFile) -> object:
        path, caption = str(sample.path), sample.prompt
        if sample.kind == "video":
            return self._wandb.Video(path, caption=caption, format="mp4")
        if sample.kind == "audio":
            return self._wandb.Audio(path, caption=caption)
        return self._wandb.Image(path, caption=caption)
