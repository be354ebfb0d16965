"""Store a run with MLflow: on the server of `MLFLOW_TRACKING_URI`, or in the output folder.

The package `mlflow-skinny` (extra `mlflow`) is enough to write. Without a server, the run is in
`mlflow/mlflow.db` of the output folder, which `mlflow ui` of the package `mlflow` displays.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any

from gracetune.events.trackers.tracker import NO_STEP, TrackerState, flatten_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.events.trackers.tracker import SampleFile, TrackerOptions
    from gracetune.events.types import HealthChanged

STATUS = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
MAX_PARAMS = 100
"""Parameters in one call, by MLflow's rules; it takes 1,000 metrics."""
MAX_METRICS = 1000
MAX_VALUE = 500
"""Characters of a parameter that all servers take."""
MAX_TAG = 5000
LOSS = "train/loss"
"""A metric that every step has."""


class MlflowTracker:
    """One run in MLflow, which resumed processes of the run continue."""

    def __init__(self, options: TrackerOptions) -> None:
        from mlflow import MlflowClient
        from mlflow.tracking import get_tracking_uri, is_tracking_uri_set

        for name in ("mlflow", "alembic"):  # they announce each table of a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        self._state = TrackerState(options.folder, "mlflow")
        local = (options.folder / "mlflow").resolve()
        artifacts: str | None = None
        if is_tracking_uri_set() and not options.offline:
            uri = get_tracking_uri()
        else:
            local.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{local / 'mlflow.db'}", (local / "artifacts").as_uri()
        self._client = MlflowClient(uri)
        run_id = self._state.values.get("run_id")
        self._is_new = run_id is None
        if run_id is None:
            experiment = self._experiment(options.project, artifacts)
            created = self._client.create_run(experiment, run_name=options.run_name)
            run_id = created.info.run_id
            self._state.update(run_id=run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id: str = run_id
        self.last_step = self._stored_step()
        self.address = f"MLflow run {run_id} in {uri if artifacts is None else local}"

    def describe(self, parts: Mapping[str, Any]) -> None:
        """Store settings as parameters, and everything as JSON files."""
        from mlflow.entities import Param

        settings = parts.get("settings")
        if settings is not None and self._is_new:  # parameters cannot be changed later
            params = [
                Param(_name(name), str(value)[:MAX_VALUE])
                for name, value in flatten_settings(settings).items()
            ]
            for first in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])
        suffix = "" if self._is_new else f"-from-step-{self.last_step + 1}"
        for name, part in parts.items():
            self._client.log_dict(self._run_id, part, f"{name}{suffix}.json")

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_METRICS])

    def log_histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Store a histogram as a JSON file; MLflow draws none."""
        histogram = {"step": step, "edges": list(edges), "counts": list(counts)}
        self._client.log_dict(self._run_id, histogram, f"histograms/{name}/step-{step:06d}.json")

    def log_samples(self, step: int, grid: Path, samples: Sequence[SampleFile]) -> None:
        """Store the files of the samples, and their prompts."""
        folder = f"samples/step-{step:06d}"
        self._client.log_artifact(self._run_id, str(grid), folder)
        for sample in samples:
            self._client.log_artifact(self._run_id, str(sample.path), folder)
        prompts = {sample.path.name: sample.prompt for sample in samples}
        self._client.log_dict(self._run_id, prompts, f"{folder}/prompts.json")

    def log_health(self, event: HealthChanged, text: str) -> None:
        """Set the state of the check as a tag."""
        tag = f"step {event.step}: {text}"[:MAX_TAG]
        self._client.set_tag(self._run_id, f"health.{event.check}", tag)

    def finish(self, status: str) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run_id, STATUS[status])

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment; create it if it does not exist."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                created: str = self._client.create_experiment(name, artifact_location=artifacts)
            except MlflowException:  # another run has just created it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
            else:
                return created
        experiment: str = found.experiment_id
        return experiment

    def _stored_step(self) -> int:
        if self._is_new:
            return NO_STEP
        history = self._client.get_metric_history(self._run_id, LOSS)
        return max((metric.step for metric in history), default=NO_STEP)


def _name(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)
