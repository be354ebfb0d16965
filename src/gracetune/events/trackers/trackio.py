"""Store a run with trackio: on this machine, or in a Hugging Face Space.

The package `trackio` (extra `trackio`) writes to a local database, which `trackio show` displays.
With `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` it sends the values there as well.
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

MEDIA = {"image": "Image", "video": "Video", "audio": "Audio"}
ALERT_LEVELS = {"notice": "WARN", "degraded": "WARN", "stopping": "ERROR"}
REMOTE_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker:
    """One run in trackio, which resumed processes of the run continue."""

    def __init__(self, options: TrackerOptions) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._trackio, self._storage = trackio, SQLiteStorage
        remote = [name for name in REMOTE_VARIABLES if options.environment.get(name)]
        if options.offline and remote:
            raise RunFailedError(
                f"logging.tracker_offline is true, but {remote[0]} is set, and trackio would send "
                "the run there. Unset it"
            )
        self._state = TrackerState(options.folder, "trackio")
        # trackio knows runs by their names, and two output folders may have the same one.
        name = self._state.values.get("name") or f"{options.run_name}-{secrets.token_hex(2)}"
        self._is_local = not remote
        self._project, self._name = options.project, name
        self._run = trackio.init(
            project=options.project,
            name=name,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the run has its own sensors
            auto_log_cpu=False,
        )
        known = self._stored_step() if self._is_local else self._state.values.get("step")
        self.last_step: int = NO_STEP if known is None else known
        self._sent_step = self.last_step
        self.address = f"trackio show --project {options.project}, run {name}"
        self._state.update(name=name)

    def describe(self, parts: Mapping[str, Any]) -> None:
        """Add to the run's config, which trackio stores with the first values."""
        self._run.config.update(parts)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step."""
        self._run.log(dict(values), step=step)
        self._sent_step = step
        if not self._is_local:
            self._state.update(step=step)

    def log_histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Store a histogram."""
        histogram = self._trackio.Histogram(np_histogram=(list(counts), list(edges)))
        self._run.log({name: histogram}, step=step)

    def log_samples(self, step: int, grid: Path, samples: Sequence[SampleFile]) -> None:
        """Store each sample with its prompt."""
        media: dict[str, Any] = {"samples/grid": self._trackio.Image(str(grid))}
        for sample in samples:
            kind = getattr(self._trackio, MEDIA[sample.kind])
            media[f"samples/{sample.number:03d}"] = kind(str(sample.path), caption=sample.prompt)
        self._run.log(media, step=step)

    def log_health(self, event: HealthChanged, text: str) -> None:
        """Store an alert if a check has found a problem; its level is a number besides."""
        if event.level in ALERT_LEVELS:
            level = self._trackio.AlertLevel[ALERT_LEVELS[event.level]]
            self._run.alert(title=event.check, text=text, level=level, step=event.step)

    def finish(self, status: str) -> None:
        """Wait until everything is stored; raise if it is not, since trackio itself never does."""
        self._run.log({"status": status}, step=max(self._sent_step, 0))
        self._run.finish()
        if self._is_local and self._sent_step > (found := self._stored_step() or NO_STEP):
            raise RunFailedError(
                f"its database has values up to step {found}, not {self._sent_step}"
            )

    def _stored_step(self) -> int | None:
        """Return the last step in the local database; None if there is none."""
        step: int | None = self._storage.get_last_step(self._project, self._name)
        return step
