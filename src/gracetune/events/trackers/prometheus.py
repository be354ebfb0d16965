"""Serve the metrics of a run to Prometheus, at `http://127.0.0.1:PORT/metrics`.

The package `prometheus-client` (extra `prometheus`) formats the metrics and serves them from a
thread. Only the newest values are kept; Prometheus stores the history.
"""

from __future__ import annotations

from functools import singledispatchmethod
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError
from gracetune.events.types import (
    BatchesFed,
    CheckpointSaved,
    DeviceSensors,
    HealthChanged,
    HeldOutLoss,
    LossParts,
    MemoryRoles,
    MemoryUsed,
    RunStarted,
    StepDone,
    StepTimes,
    UnifiedMemory,
    WeightsMoved,
    WeightsStreamed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.events.types import Event

LEVELS = {"ok": 0, "notice": 1, "degraded": 2, "stopping": 3}
GPU_VALUES = (
    "temperature_c",
    "sm_clock_mhz",
    "power_w",
    "utilization",
    "memory_used",
    "memory_total",
)


class PrometheusSink:
    """An event sink that serves the newest values of a run over HTTP."""

    def __init__(self, port: int, host: str, run: str) -> None:
        """Open the port; 0 is any free one. `run` is the label `run` of all metrics."""
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(
                f"logging.prometheus_port is {port}, which needs the package prometheus-client: "
                "pip install 'gracetune[prometheus]'."
            ) from error
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, object] = {}
        self._run = run
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, host, self._registry
            )
        except OSError as error:
            raise ConfigError(
                f"logging.prometheus_port is {port} on {host}, which cannot be opened: "
                f"{error.strerror or error}. Choose another port, or 0 for a free one."
            ) from error
        self.port: int = self._server.server_port

    def handle(self, event: Event) -> None:
        """Keep the values of an event."""
        self._record(event)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, help_text: str, value: float, **labels: str) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            names = ["run", *labels]
            gauge = self._client.Gauge(
                f"gracetune_{name}", help_text, names, registry=self._registry
            )
            self._gauges[name] = gauge
        gauge.labels(run=self._run, **labels).set(value)  # type: ignore[attr-defined]

    def _set_all(self, name: str, help_text: str, label: str, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._set(name, help_text, value, **{label: key})

    @singledispatchmethod
    def _record(self, event: object) -> None:
        """Ignore events without numbers of interest."""

    @_record.register
    def _(self, event: RunStarted) -> None:
        self._set("steps_planned", "Optimizer steps of the run.", event.total_steps)
        self._set("trainable_parameters", "Trained weights.", event.trainable_parameters)

    @_record.register
    def _(self, event: StepDone) -> None:
        self._set("step", "Optimizer steps done.", event.step)
        self._set("loss", "Training loss of the last step.", event.loss)
        self._set("learning_rate", "Learning rate of the last step.", event.lr)
        self._set("gradient_norm", "Gradient norm before clipping.", event.grad_norm)
        self._set("step_seconds", "Wall time of a step.", event.seconds)
        self._set("samples_per_step", "Samples of a step, on all ranks.", event.samples)
        self._set("epoch", "Epoch of the next batch.", event.epoch)

    @_record.register
    def _(self, event: StepTimes) -> None:
        text = "Seconds of a step by phase."
        self._set_all("step_phase_seconds", text, "phase", event.seconds)

    @_record.register
    def _(self, event: LossParts) -> None:
        for name, parts in (
            ("dataset", event.by_dataset),
            ("timesteps", event.by_timestep),
            ("part", event.by_part),
            ("expert", event.by_expert),
        ):
            means = {key: part["loss"] for key, part in parts.items() if "loss" in part}
            self._set_all(f"loss_by_{name}", f"Training loss by {name}.", name, means)

    @_record.register
    def _(self, event: HeldOutLoss) -> None:
        text = "Loss on held-out samples with fixed noise."
        self._set_all("held_out_loss", text, "name", event.losses)
        means = {key: part["loss"] for key, part in event.by_timestep.items()}
        self._set_all("held_out_loss_by_timesteps", text, "timesteps", means)
        self._set("best_step", "Step with the lowest held-out loss.", event.best_step)

    @_record.register
    def _(self, event: MemoryUsed) -> None:
        text = "Memory in use in bytes."
        values = {"host": event.host, "device": event.device, "device_peak": event.device_peak}
        self._set_all("memory_bytes", text, "kind", values)

    @_record.register
    def _(self, event: MemoryRoles) -> None:
        for tier, roles in event.roles.items():
            for role, nbytes in roles.items():
                self._set(
                    "memory_role_bytes", "Memory by role in bytes.", nbytes, tier=tier, role=role
                )

    @_record.register
    def _(self, event: UnifiedMemory) -> None:
        values = {
            "stage": event.stage,
            "transitions": event.transitions,
            "headroom_bytes": event.headroom,
            "managed_current_bytes": event.current,
            "managed_peak_bytes": event.peak,
            "managed_cap_bytes": event.cap,
            "managed_denied": event.denied,
            "light_reclamations": event.light_reclamations,
            "full_reclamations": event.full_reclamations,
        }
        for name, value in values.items():
            self._set(f"uvm_{name}", "Accounting of CUDA managed memory.", value)
        self._set_all(
            "uvm_reclaimed_bytes", "Bytes that were reclaimed.", "kind", event.reclaimed_bytes
        )
        self._set_all("uvm_hints", "Hints to the driver by outcome.", "outcome", event.hints)
        self._set_all("uvm_faults", "Page faults and migrations.", "counter", event.faults)

    @_record.register
    def _(self, event: DeviceSensors) -> None:
        for gpu in event.gpus:
            number = f"{gpu.get('rank', 0)}:{gpu.get('index', 0)}"
            for name in GPU_VALUES:
                value = gpu.get(name)
                if isinstance(value, int | float):
                    self._set(f"gpu_{name}", f"GPU sensor {name}.", value, gpu=number)
            throttle = gpu.get("throttle", ())
            is_throttled = bool(throttle) if isinstance(throttle, list | tuple) else False
            self._set("gpu_throttled", "1 if clocks are lowered.", is_throttled, gpu=number)
        self._set_all("host", "Sensors of the host.", "sensor", event.host)

    @_record.register
    def _(self, event: WeightsMoved) -> None:
        text = "Relative distance of a block's weights from the start."
        self._set_all("weights_moved", text, "block", event.blocks)
        self._set_all("weight_norm", "Norm of a block's weights.", "block", event.weight_norms)

    @_record.register
    def _(self, event: BatchesFed) -> None:
        values = {
            "hits": event.hits,
            "reads": event.reads,
            "hot": event.hot,
            "waits": event.waits,
            "waited_seconds": event.waited_s,
            "depth": event.depth,
        }
        self._set_all("data", "Loading of batches.", "counter", values)

    @_record.register
    def _(self, event: WeightsStreamed) -> None:
        values = {
            "slots": event.slots,
            "bytes": event.nbytes,
            "waited_seconds": event.waited_s,
            "hidden_seconds": event.hidden_s,
        }
        self._set_all("weights_streamed", "Streaming of weights.", "counter", values)

    @_record.register
    def _(self, event: CheckpointSaved) -> None:
        self._set("checkpoint_step", "Step of the newest checkpoint.", event.step)
        self._set("checkpoint_bytes", "Size of the newest checkpoint.", event.nbytes)

    @_record.register
    def _(self, event: HealthChanged) -> None:
        text = "Health check: 0 ok, 1 notice, 2 degraded, 3 stopping."
        self._set("health", text, LEVELS[event.level], check=event.check)
