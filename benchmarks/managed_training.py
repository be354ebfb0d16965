"""Train all weights of a model with optimizer state, EMA and gradients in managed memory.

The model is a Z-Image with fewer layers: 1.1 B parameters in fp32, computed in bf16, AdamW, EMA and
gradient clipping. Every way is a whole run of the trainer with deterministic kernels, in a process
of its own, so that nothing of an earlier way is alive:

- on the device: the reference;
- optimizer state, EMA and gradients in managed memory, read in place or prefetched;
- optimizer state in pinned host memory, streamed through the device;
- torch's memory limited, so that the run does not fit: without `use_uvm` it must fail and name the
  setting, with it the run must continue in managed memory;
- with a plan, in all memory and in less memory with `managed: auto`;
- a LoRA with a plan, its frozen weights on the device and in managed memory, prefetched (the
  default) or read in place;
- on the device again, whether the reference repeats itself;
- only optimizer state in managed memory, read in place or prefetched;
- optimizer state, EMA and gradients in managed memory at home on the device;
- trained weights in managed memory as well.

Judged: losses are equal bit for bit to those of the reference; the managed bytes of our statistics
are the sum of the allocations that the driver calls managed; the limited run completes and its
events say why. Managed memory is limited to `CAP`, which must be below a quarter of the free
memory. No way starts after `--minutes`. Ways that the commit has measured already are not run
again, unless it has measured all of them. Results of ways that are not run are kept, each with its
commit.

    PYTHONPATH=src:benchmarks python benchmarks/managed_training.py [--only NAME,...] [--out FOLDER]
        [--commit NAME] [--minutes N] [--rehearse]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from operator import eq
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matmuls

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import large_families
import random_weights
import results
import torch
from wan_experts import PhaseClock

from gracetune.config.load import load_run_file
from gracetune.errors import GracetuneError
from gracetune.events.types import (
    ManagedOverflow,
    MemoryRoles,
    Notice,
    RunStarted,
    StartTimed,
    StepDone,
)
from gracetune.memory import managed_roles
from gracetune.memory.driver import PointerKind, open_cuda_driver
from gracetune.models import pipeline_folder
from gracetune.train.run import run_training
from gracetune.units import GIB, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gracetune.events.types import Event
    from gracetune.memory.managed_roles import ManagedMemory

NAME = "managed_training"
CAP = "28GB"
STEPS, SMALL_STEPS = 10, 10
EVERY = 3
"""Steps that are logged together; the first group warms up."""
LAYERS = 2
BATCH = 4
KEPT = ["optimizer", "ema", "gradients"]
LIMITED_SHARE = 0.85
"""Share of the reference's peak that torch may use in the limited runs."""
MINUTES = 8.0
WAY_S = 150
"""Seconds after which the process of a way is killed."""
PLAN = {"compile": "never", "offload": False}
PLANNED_NBYTES = 18
"""Bytes of device memory for each parameter in the limited planned run. Without managed memory, the
smallest plan with this batch needs 23, although it streams the optimizer state."""
SMALL_NBYTES = 1 << 31, 1 << 27
"""Device memory of planned rehearsals, which have no device to measure, and what is added to that
of the limited one: a miniature's activations are larger than its weights."""

WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "managed_in_place": {"managed": KEPT, "access": "in_place"},
    "managed_prefetch": {"managed": KEPT, "access": "prefetch"},
    "streamed_state": {"optimizer.state": "host"},
    "limited_without_uvm": {"limited": True},
    "limited_overflow": {"limited": True, "managed": "auto"},
    "planned_device": {"plan": PLAN},
    "planned_auto": {
        **{"plan": PLAN, "limited": True, "managed": "auto"},
        "reference": "planned_device",
    },
    "planned_lora_device": {"plan": PLAN | {"stream": False}, "adapter": True},
    "planned_lora_weights": {
        **{"plan": PLAN | {"stream": False}, "adapter": True, "managed": ["weights"]},
        "reference": "planned_lora_device",
    },
    "planned_lora_weights_in_place": {
        **{"plan": PLAN | {"stream": False}, "adapter": True, "managed": ["weights"]},
        **{"access": "in_place", "reference": "planned_lora_device"},
    },
    "device_again": {},
    "managed_state_in_place": {"managed": ["optimizer"], "access": "in_place"},
    "managed_state_prefetch": {"managed": ["optimizer"], "access": "prefetch"},
    "managed_home_on_device": {"managed": KEPT, "access": "device"},
    "managed_trained_in_place": {"managed": [*KEPT, "trained"], "access": "in_place"},
}
"""Ways to train, the most important ones first. `reference`: the way whose losses must be the same;
by default the run on the device, or the way itself. `limited`: torch, or the plan, has a share of
the reference's memory."""


class MeasuredError(Exception):
    """Ends a run after its last measured step, before it saves a checkpoint."""


class Recorder:
    """An event sink that keeps what is measured, and ends the run."""

    def __init__(self, clock: PhaseClock, steps: int, memories: list[ManagedMemory]) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.overflow: list[ManagedOverflow] = []
        self.warnings: list[str] = []
        self.booked: dict[str, int] = {}
        self.walked: int | None = None
        self.slabs = 0
        self.parameters = 0
        self.start_s: dict[str, float] = {}
        self._clock = clock
        self._steps = steps
        self._memories = memories

    def handle(self, event: Event) -> None:
        """Record an event; raise after the last measured step."""
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
            if event.step > EVERY:
                self.seconds.append(event.seconds)
        elif isinstance(event, MemoryRoles):
            self.booked = dict(event.roles.get("managed", {}))
            self.booked.pop("batches", None)  # in torch's managed pool
            if event.step >= self._steps - 1:
                self._count_managed_bytes()
                raise MeasuredError
        elif isinstance(event, ManagedOverflow):
            self.overflow.append(event)
            self._clock.print(
                f"  managed: {event.role} {event.nbytes / GIB:.2f} GiB {event.placement} at step "
                f"{event.step}: {event.reason}"
            )
        elif isinstance(event, Notice):
            if event.level == "warning":
                self.warnings.append(event.text)
                self._clock.print(f"  warning: {event.text[:300]}")
        elif isinstance(event, RunStarted):
            self.parameters = event.trainable_parameters
        elif isinstance(event, StartTimed):
            self.start_s = dict(event.seconds)

    def _count_managed_bytes(self) -> None:
        if self._memories:
            self.slabs = sum(slab.nbytes for slab in self._memories[-1].slabs)
            self.walked = managed_bytes_of_tensors()

    def close(self) -> None:
        """Do nothing."""


def managed_bytes_of_tensors() -> int | None:
    """Return the bytes of all live tensors whose pointer the driver calls managed.

    Tensors of torch's managed pool (batches) are left out: they are cached by torch.
    """
    if not torch.cuda.is_available():
        return None
    driver = open_cuda_driver()
    pooled = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
    ]
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.is_cuda:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(
        nbytes
        for pointer, nbytes in storages.items()
        if nbytes
        and not any(pointer in segment for segment in pooled)
        and driver.pointer_kind(pointer) is PointerKind.MANAGED
    )


def main() -> int:
    """Train in every way, compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ways to run, separated by commas")
    parser.add_argument("--folder", type=Path, help="folder for the model and the data")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start no way after this")
    arguments = results.parse_arguments(parser)
    if not arguments.rehearse and not results.gpu_name():
        parser.error("there is no GPU; --rehearse trains a miniature without one")
    clock, began = PhaseClock(), time.monotonic()
    commit = arguments.commit or results.this_commit()
    figures: dict[str, Any] = by_way(results.previous(NAME, arguments))
    names = unmeasured(figures, commit, arguments.only.split(",") if arguments.only else WAYS)
    figures |= {"batch": BATCH, "cap": CAP, "steps": STEPS}
    crashed = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        writer = results.start_forked(write_run, Path(temporary), arguments)
        writer.join()
        if writer.exitcode:
            return writer.exitcode
        path = Path(temporary) / "run.json"
        for name in names:
            if time.monotonic() - began > 60 * arguments.minutes:
                clock.print(f"{name}: skipped, because {arguments.minutes:g} minutes are over")
                continue
            clock.print(f"{name}:")
            started = time.monotonic()
            given = name, path, arguments.rehearse, figures.get(reference_of(name))
            process = results.start_forked(measure_alone, *given)
            process.join(None if arguments.rehearse else WAY_S)
            if process.is_alive():
                process.kill()
                process.join()
            found = path.parent / f"{name}.figures.json"
            if not found.exists():
                crashed.append(f"{name}: the process ended with code {process.exitcode}")
                clock.print(crashed[-1])
                continue
            figures[name] = json.loads(found.read_text())
            figures[name]["wall_s"] = time.monotonic() - started
            figures[name]["commit"] = commit
            results.write(NAME, dict(results.flatten(figures)), arguments.out, arguments.commit)
    measured = [name for name in WAYS if figures.get(name, {}).get("commit") == commit]
    failed = crashed + [f"{name}: {why}" for name in measured for why in faults(name, figures)]
    print_table(figures, measured)
    clock.print("all as promised" if not failed else "; ".join(failed))
    return 1 if failed and not arguments.rehearse else 0


def by_way(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a result file by way, as `measure` returns them."""
    found: dict[str, Any] = {}
    for key, value in figures.items():
        way, _, name = key.partition(".")
        if way in WAYS:
            found.setdefault(way, {})[name] = value
    return found


def unmeasured(figures: dict[str, Any], commit: str, names: Iterable[str]) -> list[str]:
    """Return those of the ways that this commit has not measured; all if it has measured each."""
    names = list(names)
    return [name for name in names if figures.get(name, {}).get("commit") != commit] or names


def reference_of(name: str) -> str:
    """Return the way whose losses a way must have; without one, the way itself."""
    if WAYS[name].get("plan"):
        return str(WAYS[name].get("reference", name))
    return "device"


def measure_alone(
    name: str, path: Path, is_rehearsal: bool, reference: dict[str, Any] | None
) -> None:
    """Train in one way, in a process of its own, and write what was measured."""
    # With `warn_only`, the backward of flash attention would not be deterministic.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with ExitStack() as undo:
        if is_rehearsal:
            torch.compiler.set_stance("force_eager")
            simulate_gpu(undo)
        found = measure(name, path, PhaseClock(), reference)
    (path.parent / f"{name}.figures.json").write_text(json.dumps(found))


def measure(
    name: str, path: Path, clock: PhaseClock, reference: dict[str, Any] | None
) -> dict[str, Any]:
    """Train in one way; return its losses, times, memory and events."""
    way = WAYS[name]
    run = load_run_file(write_way(name, path, reference), environment={}).run
    memories: list[ManagedMemory] = []
    original = managed_roles.ManagedMemory.__init__

    def create(memory: ManagedMemory, *given: Any, **options: Any) -> None:
        original(memory, *given, **options)
        memories.append(memory)

    steps = run.train.max_train_steps
    recorder = Recorder(clock, steps, memories)
    failure = ""
    limit_memory(reference if way.get("limited") and not way.get("plan") else None)
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    try:
        with (
            patch.object(pipeline_folder, "read_transformer", random_weights.random_transformer),
            patch.object(managed_roles.ManagedMemory, "__init__", create),
        ):
            run_training(run, sinks=[recorder])
    except MeasuredError:
        pass
    except GracetuneError as error:
        failure = str(error)
        clock.print(f"  failed: {failure}")
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        failure = str(error).splitlines()[0]
        clock.print(f"  not deterministic, so losses cannot be compared: {failure}")
    found: dict[str, Any] = {
        "parameters": recorder.parameters,
        "start_s": recorder.start_s,
        "step_s": mean(recorder.seconds) if recorder.seconds else 0.0,
        # A slow run ends one step earlier.
        "losses": [loss.hex() for loss in recorder.losses[: steps - 1]],
        "failure": failure,
        "managed": recorder.booked,
        "managed_bytes_booked": sum(recorder.booked.values()),
        "managed_bytes_of_slabs": recorder.slabs,
        "managed_bytes_of_pointers": recorder.walked,
        "free_gib_before": None if free is None else free / GIB,
        "overflow": [
            f"step {event.step}: {event.role}, {event.nbytes} bytes, {event.placement}, total "
            f"{event.total} of {event.cap}: {event.reason}"
            for event in recorder.overflow
        ],
        "warnings": recorder.warnings,
    }
    if memories:
        found["prefetched_gib_a_step"] = {
            to: nbytes / GIB / max(1, len(recorder.losses))
            for to, nbytes in memories[-1].prefetched_bytes.items()
        }
    if torch.cuda.is_available():
        found["device_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    clock.print(
        f"  {found['step_s']:.4f} s a step, {found['managed_bytes_booked'] / GIB:.2f} GiB managed, "
        f"peak {found.get('device_peak_gib', 0):.2f} GiB"
    )
    return found


def limit_memory(reference: dict[str, Any] | None) -> None:
    """Limit torch's memory to a share of the reference's peak; None: no limit."""
    if torch.cuda.is_available() and reference is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        share = LIMITED_SHARE * reference["reserved_gib"] * GIB / total
        torch.cuda.set_per_process_memory_fraction(share)


def simulate_gpu(undo: ExitStack) -> None:
    """Let a rehearsal find the managed memory of a simulated driver, until `undo` is closed."""
    import pytest
    from fakes.managed import simulate_machine

    simulate_machine(undo.enter_context(pytest.MonkeyPatch.context()))


def write_run(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the model without weights, the images and the run file that all ways share.

    They share a cache as well, so that only the first one encodes the images and captions.
    """
    steps = SMALL_STEPS if arguments.rehearse else STEPS
    given = argparse.Namespace(rehearse=arguments.rehearse, compile="never", steps=steps)
    path = large_families.write_run("z_image", folder, given)
    config = folder / "model/transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layers": LAYERS}))
    settings = json.loads(path.read_text())
    settings["plan"] = "off"
    settings["cache_config"] = {"cache_dir": str(folder / "cache"), "persistent_cache": True}
    settings["model"] |= {"dtype": "float32", "attention_mechanism": "flash"}
    if arguments.rehearse:
        settings["model"]["attention_mechanism"] = "sdpa"
    settings["logging"]["every"] = EVERY
    settings["optimizer"]["lr"] = 1e-5
    settings["train"] |= {
        "batch_size": 1 if arguments.rehearse else BATCH,
        "max_train_steps": steps,
        "checkpoint_every": 0,
        "check_gradients": False,
        "ema_decay": 0.99,
        "max_grad_norm": 1.0,
    }
    path.write_text(json.dumps(settings, indent=2))
    return path


def write_way(name: str, path: Path, reference: dict[str, Any] | None) -> Path:
    """Write the run file of one way; it has a folder of its own, and the data of all."""
    way, settings = WAYS[name], json.loads(path.read_text())
    settings["output_dir"] = str(Path(settings["output_dir"]) / name)
    if not way.get("adapter"):
        del settings["adapter"]
    if way.get("optimizer.state"):
        settings["optimizer"]["state"] = way["optimizer.state"]
    if way.get("plan"):
        settings["plan"] = dict(way["plan"])
        whole, added = (None, 0) if torch.cuda.is_available() else SMALL_NBYTES
        if way.get("limited") and reference is not None:
            whole = PLANNED_NBYTES * reference["parameters"] + added
        if whole is not None:
            settings["plan"]["device_memory"] = str(whole)
    if "managed" in way:
        settings["gh200_optimizations"] = {
            "use_uvm": True,
            "managed": way["managed"],
            "managed_access": way.get("access", "auto"),
            "managed_memory": CAP,
        }
    own = path.parent / f"{name}.json"
    own.write_text(json.dumps(settings, indent=2))
    return own


def faults(name: str, figures: dict[str, Any]) -> list[str]:
    """Return what is not as promised in one way."""
    found, way, reference = figures[name], WAYS[name], figures.get(reference_of(name))
    wrong = []
    free = found["free_gib_before"]
    if "managed" in way and free is not None and parse_bytes(CAP) > free * GIB / 4:
        wrong.append(f"the cap is more than a quarter of the free {free:.1f} GiB")
    if name == "limited_without_uvm":
        return [] if "gh200_optimizations.use_uvm" in found["failure"] else ["does not name it"]
    if found["failure"]:
        return [found["failure"]]
    if reference is not None and found["losses"] != reference["losses"]:
        same = sum(map(eq, found["losses"], reference["losses"]))
        counts = f"{same} of {len(found['losses'])} and {len(reference['losses'])} are the same"
        wrong.append(f"losses differ from those of {reference_of(name)}: {counts}")
    if isinstance(way.get("managed"), list):
        missing = set(way["managed"]) - found["managed"].keys()
        wrong += [f"{role} is not in managed memory" for role in sorted(missing)]
    if found["managed_bytes_booked"] != found["managed_bytes_of_slabs"]:
        wrong.append("statistics differ from the slabs")
    if found["managed_bytes_of_pointers"] not in (None, found["managed_bytes_booked"]):
        wrong.append("statistics differ from what the driver calls managed")
    if way.get("managed") == "auto" and not found["overflow"]:
        wrong.append("nothing is in managed memory")
    return wrong


def print_table(figures: dict[str, Any], names: list[str]) -> None:
    """Print a short table of all ways."""
    print(f"{'way':<32}{'s/step':>9}{'managed GiB':>13}{'peak GiB':>10}  equal losses")
    for name in names:
        found = figures[name]
        expected = figures.get(reference_of(name), {}).get("losses")
        print(
            f"{name:<32}{found['step_s']:>9.4f}{found['managed_bytes_booked'] / GIB:>13.2f}"
            f"{found.get('device_peak_gib', 0.0):>10.2f}  {found['losses'] == expected}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
