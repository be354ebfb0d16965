"""Simulate full training of a model of three times the device memory on a GH200. No GPU is used.

The model is Qwen-Image (20 B weights in fp32, AdamW): weights, gradients and optimizer state need
3.2 times the memory of a GH200 with 96 GB. `gracetune plan` chooses what is in managed memory. Then
a simulated CUDA driver, which keeps pages, their place and a clock, runs steps in five ways:

- `faults`: everything is managed memory without advice, as with an allocator that only replaces
  cudaMalloc. Kernels fault pages in, and the driver evicts others. Nothing governs it;
- `planned`: the roles of the plan at home in host memory and used in place, the rest on the device;
- `in_place`: all roles in host memory and used in place;
- `prefetch`: as `in_place`, but the weights of each block move to the device ahead of its use, and
  back;
- `gpu_first`: with `uvm_access_pattern:gpu_first`, so as much as the device has headroom for is at
  home there, the weights first.

Except in `faults`, the `MemorySession` of a run allocates the roles within its cap, and looks at
the memory after every step. Two steps have larger images, for which torch's allocator reserves more
of the device and keeps it: the plan and the access patterns leave more than the threshold free, so
without such steps the stage would never change. It then reclaims what a run does: text embeddings
on the device, managed pages, and at last torch's cache. What was moved returns when there is space.

All figures are SIMULATED from published rates of a GH200 (plan/machines.py); none is measured.

    PYTHONPATH=src:benchmarks python benchmarks/managed_simulated.py [--out FOLDER] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results
import torch

from gracetune.cache.batch_transfer import DeviceTextCache
from gracetune.cli.plan import predict
from gracetune.config.environment import environment_settings
from gracetune.config.load import load_run_file
from gracetune.events.types import MemoryReclaimed, StageChanged
from gracetune.memory.driver import HOST, CudaCode
from gracetune.memory.managed_roles import ManagedArray, ManagedMemory
from gracetune.memory.platform import HostFacts, Machine
from gracetune.memory.session import MemorySession
from gracetune.plan.machines import FITTED_CONSTANTS, find_machine
from gracetune.plan.report import report_json, report_lines
from gracetune.units import GIB

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.managed import unbacked_tensor_of
from fakes.simulated_driver import SimulatedDriver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.events.types import Event
    from gracetune.memory.managed_roles import ManagedRole, ManagedSlab
    from gracetune.memory.oversubscription import Reading
    from gracetune.plan.result import Plan

NAME = "managed_simulated"
MACHINE = "gh200-96"
DEVICE = 0
COMPUTE, COPIES = 0, 1
"""Streams of the simulated driver: kernels, and prefetches ahead of them."""
STEPS = 120
"""Simulated steps: more than the interval of reclamations. The last one is reported, when pages are
where a step leaves them."""
LARGE_STEPS, LARGER = range(4, 6), 0.1
"""Steps with larger images, and the share of the device that they need in addition."""
TEXTS_NBYTES, NUM_TEXTS = GIB // 2, 8
"""Bytes of the text embeddings that stay on the device, within what the plan has for caches."""
RUN = {
    "model": {"family": "qwen_image", "dtype": "float32"},
    "datasets": [{"instance_data_dir": ".", "resolution": 1024}],
    "train": {"batch_size": 1},
    "optimizer": {"name": "adamw"},
    "gh200_optimizations": {"use_uvm": True},
    "plan": {"compile": "never", "batch": "fixed"},
}
WAYS = ("faults", "planned", "in_place", "prefetch", "gpu_first")


class StreamPrefetcher:
    """Prefetches on a stream of its own, next to the kernels, as `PrefetchThread` does."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver

    def start(
        self, ranges: Sequence[tuple[int, int]], location: int, after: object = None
    ) -> StreamPrefetcher:
        """Queue a prefetch behind the kernels that are queued so far."""
        del after  # one stream does everything in order
        self._driver.wait(COPIES, COMPUTE)
        for pointer, nbytes in ranges:
            assert self._driver.prefetch(pointer, nbytes, location, COPIES) == CudaCode.SUCCESS
        return self

    def wait(self) -> None:
        """Let kernels wait for the prefetches that are queued so far."""
        self._driver.wait(COMPUTE, COPIES)

    def drain(self) -> None:
        """Do nothing: the driver has all requests."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


class TorchMemory:
    """Device memory of torch's allocator, which keeps what larger steps have needed."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self.allocated = self.cached = 0
        self._driver = driver
        self._pointer = 0

    def allocate(self, nbytes: int) -> int:
        """Allocate memory that the whole run uses; return its address."""
        code, pointer = self._driver.allocate_device(nbytes, DEVICE)
        assert code == CudaCode.SUCCESS, f"device memory: {code}"
        self.allocated += nbytes
        return pointer

    def free(self, pointer: int, nbytes: int) -> None:
        """Free memory from `allocate`."""
        assert self._driver.free(pointer) == CudaCode.SUCCESS
        self.allocated -= nbytes

    def reserve(self, nbytes: int) -> None:
        """Let a step use more, which is cached afterwards."""
        if not self.cached:
            code, self._pointer = self._driver.allocate_device(nbytes, DEVICE)
            assert code == CudaCode.SUCCESS, f"device memory: {code}"
            self.cached = nbytes

    def empty_cache(self) -> int:
        """Free what is cached; return its bytes."""
        freed, self.cached = self.cached, 0
        if freed:
            assert self._driver.free(self._pointer) == CudaCode.SUCCESS
        return freed


class SimulatedSession(MemorySession):
    """The memory objects of a run on the simulated driver."""

    def __init__(
        self, driver: SimulatedDriver, memory: TorchMemory, settings: str, events: list[Event]
    ) -> None:
        spec = find_machine(MACHINE)
        super().__init__(
            lambda: Machine(driver, spec.platform()),
            lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": settings}),
            events.append,
            read_host=lambda: HostFacts(
                spec.host_bytes, driver.free_host_bytes(), driver.page_bytes
            ),
        )
        self.managed = ManagedMemory(
            *(driver, DEVICE, self.accounting, StreamPrefetcher(driver), events.append),
            *(unbacked_tensor_of, self.pattern, self.policy.stage1_above),
        )
        self.stages._empty_cache = memory.empty_cache
        self._memory = memory

    def _reading(self) -> Reading | None:
        """Read the memory, with the simulated bytes of torch's allocator."""
        reading, memory = super()._reading(), self._memory
        assert reading is not None, "the driver is simulated, so there is always a reading"
        reserved = memory.allocated + memory.cached
        return replace(reading, reserved=reserved, allocated=memory.allocated)


class Step:
    """A training step on a simulated driver, whose roles are in managed or device memory."""

    def __init__(self, way: str, plan: Plan) -> None:
        spec = find_machine(MACHINE)
        self.way, self.plan, self.num_blocks = way, plan, len(plan.blocks)
        self.driver = SimulatedDriver(
            [spec.device()], spec.host_bytes, page_bytes=32 * spec.page_bytes
        )
        self.torch_memory = TorchMemory(self.driver)
        self.events: list[Event] = []
        settings = "use_uvm:True" + (",uvm_access_pattern:gpu_first" * (way == "gpu_first"))
        self.session = SimulatedSession(self.driver, self.torch_memory, settings, self.events)
        self.memory = self.session.managed
        self.number = 0
        self.lowest_free = spec.device().nbytes
        self.slabs: dict[str, list[ManagedSlab]] = {}
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        self.texts = DeviceTextCache({})

    def allocate(self) -> None:
        """Allocate every role, one range for each block; raise if the device has no space."""
        sizes, device = self.plan.managed_nbytes, self.plan.device
        other = device.activations + device.workspace + device.caches - TEXTS_NBYTES
        if self.way == "planned":  # with what the plan reserves for fragmentation
            fragmentation = FITTED_CONSTANTS["fragmentation"].value
            other += device.gradients + int(fragmentation * device.total)
        self.torch_memory.allocate(other)
        texts = {
            str(n): {"prompt": self._text(TEXTS_NBYTES // NUM_TEXTS)} for n in range(NUM_TEXTS)
        }
        self.texts = DeviceTextCache(texts, torch.device("cpu"))
        self.session.trimmers.register("texts on the device", self.texts)
        for role in ("trained", "gradients", "optimizer"):
            nbytes = sizes[role] // self.num_blocks
            self.ranges[role] = []
            for _ in range(self.num_blocks):
                if self.way == "planned" and role not in self.plan.managed:
                    self.torch_memory.allocate(nbytes)
                else:
                    self._allocate_managed(role, nbytes)

    def _allocate_managed(self, role: ManagedRole, nbytes: int) -> None:
        if self.way == "faults":
            code, pointer = self.driver.allocate_managed(nbytes)
            assert code == CudaCode.SUCCESS, f"managed memory: {code}"
            place = HOST
        else:
            fetched = self.way == "prefetch" and role == "trained"
            slab = self.memory.allocate(role, nbytes, "prefetch" if fetched else None)
            self.slabs.setdefault(role, []).append(slab)
            pointer, place = slab.pointer, DEVICE if slab.placement == "device" else HOST
        self.driver.touch(pointer, nbytes, place, write=True)
        self.ranges[role].append((pointer, nbytes))

    def run(self) -> None:
        """Run forward, backward and update; then look at the memory, as a run does."""
        self.number += 1
        if self.number in LARGE_STEPS:
            self.torch_memory.reserve(int(LARGER * self.driver.memory_info(DEVICE)[1]))
        self._read_texts()
        s = self.plan.seconds
        compute = (s.gemm + s.attention + s.elementwise + s.recompute + s.overhead) / (
            3 * self.num_blocks
        )
        for block in range(self.num_blocks):
            self._weights(block, block + 1)
            self._kernel(compute)
        for block in reversed(range(self.num_blocks)):
            self._weights(block, block - 1)
            self._kernel(2 * compute)
            self._touch("gradients", block, write=True)
        for block in range(self.num_blocks):
            self._touch("gradients", block)  # the norm
        for block in range(self.num_blocks):
            self._touch("gradients", block, write=True)  # clipping
            self._touch("gradients", block)
            for role in ("optimizer", "trained"):
                self._touch(role, block)
                self._touch(role, block, write=True)
        self.driver.synchronize()
        if self.way != "faults":
            self.session.observe(reclaim=True, step=self.number)

    def _weights(self, block: int, following: int) -> None:
        if not self.ranges["trained"]:
            return
        slabs = self.slabs.get("trained", [])
        if self.way == "prefetch":
            if 0 <= following < self.num_blocks:
                self.memory.prefetch(slabs[following], "device")
            self.driver.wait(COMPUTE, COPIES)
        self._touch("trained", block)
        if self.way == "prefetch":
            self.memory.prefetch(slabs[block], "host")

    def _touch(self, role: str, block: int, *, write: bool = False) -> None:
        if self.ranges[role]:
            self.driver.touch(*self.ranges[role][block], DEVICE, COMPUTE, write=write)
            self.lowest_free = min(self.lowest_free, self.driver.memory_info(DEVICE)[0])

    def _kernel(self, seconds: float) -> None:
        self.driver.compute(seconds, DEVICE, COMPUTE)

    def _read_texts(self) -> None:
        """Read the text embeddings of a batch; those that were trimmed return to the device."""
        name = str(self.number % NUM_TEXTS)
        if self.texts.get_all([name]) is None and not self.texts._is_trimmed:
            self.texts.keep([name], [{"prompt": self._text(TEXTS_NBYTES // NUM_TEXTS)}])

    def _text(self, nbytes: int) -> torch.Tensor:
        """Return an embedding on the simulated device, which frees its memory there at its end."""
        pointer = self.torch_memory.allocate(nbytes)
        array = ManagedArray(pointer, nbytes)
        weakref.finalize(array, self.torch_memory.free, pointer, nbytes).atexit = False
        return unbacked_tensor_of(array)


def simulate(way: str, plan: Plan) -> dict[str, Any]:
    """Run some steps in one way; return the time and the traffic of the last one."""
    step = Step(way, plan)
    step.allocate()
    before: dict[str, float] = {}
    for _ in range(STEPS):
        before = counters(step.driver)
        step.run()
    after = counters(step.driver)
    figures = {name: after[name] - before[name] for name in after}
    stats = step.session.uvm_stats()
    changes = [event for event in step.events if isinstance(event, StageChanged)]
    return {
        "seconds": figures.pop("seconds"),
        **{f"{name}_gib": nbytes / GIB for name, nbytes in figures.items()},
        "managed_gib": sum(size for role in step.ranges.values() for _, size in role) / GIB,
        "lowest_free_device_gib": step.lowest_free / GIB,
        "stage_changes": [f"step {event.step}: stage {event.stage}" for event in changes],
        "light_reclamations": stats["uvm.light_reclamations"],
        "full_reclamations": stats["uvm.hard_reclamations"],
        "reclaimed_gib": step.session.stages.reclaimed_bytes / GIB,
        "decisions": [
            f"step {event.step}: {event.kind}, {event.nbytes / GIB:.1f} GiB"
            for event in step.events
            if isinstance(event, MemoryReclaimed)
        ],
        "managed_peak_gib": int(stats["uvm.bytes.managed.peak"]) / GIB,
        "managed_denied": stats["uvm.bytes.managed.denied"],
        "headroom_gib": int(stats["uvm.headroom"]) / GIB,
    }


def counters(driver: SimulatedDriver) -> dict[str, float]:
    """Return the simulated time and the bytes moved so far, by cause."""
    traffic = driver.traffic
    return {
        "seconds": driver.synchronize(),
        "faulted": traffic.faulted.to_device + traffic.faulted.to_host,
        "evicted": traffic.evicted,
        "prefetched_in": traffic.prefetched.to_device,
        "prefetched_out": traffic.prefetched.to_host,
        "used_in_place": traffic.read_in_place,
    }


def main() -> int:
    """Plan, simulate, print and write the results."""
    arguments = results.parse_arguments(
        argparse.ArgumentParser(description=__doc__.splitlines()[0])
    )
    spec = find_machine(MACHINE)
    options = {"machine": MACHINE, "gpus": 1, "gpus_per_machine": None, "hbm": None}
    options |= {"host_memory": None, "samples": 1000, "network": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(RUN | {"output_dir": folder}))
        run = load_run_file(path, environment={}).run
        result, heading = predict(run, argparse.Namespace(**options), None, None)
    print("SIMULATED: no GPU was used.")
    print(*report_lines(result, heading), sep="\n")
    plan = result.best
    needed = sum(plan.managed_nbytes[role] for role in ("trained", "gradients", "optimizer"))
    planned = report_json(result, heading)["plan"]
    figures: dict[str, Any] = {
        "simulated": True,
        "machine": spec.title,
        "model_gib": needed / GIB,
        "times_the_device": needed / spec.device().nbytes,
        "managed_roles": list(plan.managed),
        "managed_gib": plan.managed_total / GIB,
        "predicted_step_s": plan.seconds.step,
        "predicted_device_gib": plan.device.total / GIB,
        "predicted_host_gib": plan.host.total / GIB,
        "plan_seconds": planned["seconds"],
    }
    print(f"\n{'way (simulated)':<18}{'s/step':>9}{'faulted':>9}{'evicted':>9}{'in place':>9}")
    for way in WAYS[-1:] if arguments.rehearse else WAYS:
        found = figures[way] = simulate(way, plan)
        print(
            f"{way:<18}{found['seconds']:>9.2f}{found['faulted_gib']:>9.0f}"
            f"{found['evicted_gib']:>9.0f}{found['used_in_place_gib']:>9.0f}"
        )
        for line in found["stage_changes"] + found["decisions"]:
            print(f"{'':<20}{line}")
        results.write(NAME, dict(results.flatten(figures)), arguments.out, arguments.commit)
    found = figures["gpu_first"]
    kinds = [decision.split()[2] for decision in found["decisions"]]
    if len(found["stage_changes"]) != 2 or kinds != ["light,", "full,", "restored,"]:
        print("larger images have not changed the stage and back, or what was moved did not return")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
