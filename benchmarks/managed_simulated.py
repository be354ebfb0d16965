"""Simulate full training of a model of three times the device memory on a GH200. No GPU is used.

The model is Qwen-Image (20 B weights in fp32, AdamW): weights, gradients and optimizer state need
3.2 times the memory of a GH200 with 96 GB. `gracetune plan` chooses what is in managed memory. Then
a simulated CUDA driver, which keeps pages, their place and a clock, runs steps in four ways:

- `faults`: everything is managed memory without advice, as with an allocator that only replaces
  cudaMalloc. Kernels fault pages in, and the driver evicts others. Nothing governs it;
- `planned`: the roles of the plan at home in host memory and used in place, the rest on the device;
- `in_place`: all roles in host memory and used in place;
- `prefetch`: as `in_place`, but the weights of each block move to the device ahead of its use, and
  back.

Except in `faults`, roles are allocated by `ManagedMemory` within its cap, and the two-stage machine
reads the memory after every step and reclaims pages, as in a run.

All figures are SIMULATED from published rates of a GH200 (plan/machines.py); none is measured.

    PYTHONPATH=src:benchmarks python benchmarks/managed_simulated.py [--out FOLDER] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results
import torch

from gracetune.cli.plan import predict
from gracetune.config.load import load_run_file
from gracetune.events.types import StageChanged
from gracetune.memory.driver import HOST, CudaCode
from gracetune.memory.managed_roles import ManagedMemory, ManagedPages
from gracetune.memory.oversubscription import Reading, StagePolicy, Stages, Trimmers, managed_cap
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.plan.machines import FITTED_CONSTANTS, find_machine
from gracetune.plan.report import report_json, report_lines
from gracetune.units import GIB

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.simulated_driver import SimulatedDriver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.events.types import Event
    from gracetune.memory.managed_roles import ManagedRole, ManagedSlab
    from gracetune.plan.result import Plan

NAME = "managed_simulated"
MACHINE = "gh200-96"
DEVICE = 0
COMPUTE, COPIES = 0, 1
"""Streams of the simulated driver: kernels, and prefetches ahead of them."""
STEPS = 4
"""Simulated steps; the last one is reported, when pages are where a step leaves them."""
RUN = {
    "model": {"family": "qwen_image", "dtype": "float32"},
    "datasets": [{"instance_data_dir": ".", "resolution": 1024}],
    "train": {"batch_size": 1},
    "optimizer": {"name": "adamw"},
    "gh200_optimizations": {"use_uvm": True},
    "plan": {"compile": "never", "batch": "fixed"},
}
WAYS = ("faults", "planned", "in_place", "prefetch")


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


def unbacked_tensor(pointer: int, nbytes: int) -> torch.Tensor:
    """Return a tensor of this size with the memory of one byte: only addresses are used."""
    del pointer
    return torch.empty(1, dtype=torch.uint8).expand(nbytes)


class Step:
    """A training step on a simulated driver, whose roles are in managed or device memory."""

    def __init__(self, way: str, plan: Plan) -> None:
        spec, self.policy = find_machine(MACHINE), StagePolicy()
        self.way, self.plan, self.num_blocks = way, plan, len(plan.blocks)
        self.driver = SimulatedDriver(
            [spec.device()], spec.host_bytes, page_bytes=32 * spec.page_bytes
        )
        cap = managed_cap(self.policy, spec.device().nbytes, spec.host_bytes)
        self.memory = ManagedMemory(
            *(self.driver, DEVICE, MemoryAccounting({Tier.MANAGED: cap})),
            *(StreamPrefetcher(self.driver), print, unbacked_tensor),
        )
        trimmers = Trimmers()
        trimmers.register(
            "managed pages", ManagedPages(lambda: self.memory, self.policy.stage1_above)
        )
        self.events: list[Event] = []
        self.stages = Stages(self.policy, trimmers, lambda: 0, self.events.append)
        self.stage_by_step: list[int] = []
        self.lowest_free = spec.device().nbytes
        self.slabs: dict[str, list[ManagedSlab]] = {}
        self.ranges: dict[str, list[tuple[int, int]]] = {}

    def allocate(self) -> None:
        """Allocate every role, one range for each block; raise if the device has no space."""
        sizes, device = self.plan.managed_nbytes, self.plan.device
        other = device.activations + device.workspace + device.caches
        if self.way == "planned":  # with what the plan reserves for fragmentation
            fragmentation = FITTED_CONSTANTS["fragmentation"].value
            other += device.gradients + int(fragmentation * device.total)
        code, _ = self.driver.allocate_device(other, DEVICE)
        assert code == CudaCode.SUCCESS, f"activations: {code}"
        for role in ("trained", "gradients", "optimizer"):
            nbytes = sizes[role] // self.num_blocks
            self.ranges[role] = []
            for _ in range(self.num_blocks):
                if self.way == "planned" and role not in self.plan.managed:
                    code, _ = self.driver.allocate_device(nbytes, DEVICE)
                    assert code == CudaCode.SUCCESS, f"device memory: {code}"
                else:
                    self._allocate_managed(role, nbytes)

    def _allocate_managed(self, role: ManagedRole, nbytes: int) -> None:
        if self.way == "faults":
            code, pointer = self.driver.allocate_managed(nbytes)
            assert code == CudaCode.SUCCESS, f"managed memory: {code}"
        else:
            fetched = self.way == "prefetch" and role == "trained"
            slab = self.memory.allocate(role, nbytes, "prefetch" if fetched else "in_place")
            self.slabs.setdefault(role, []).append(slab)
            pointer = slab.pointer
        self.driver.touch(pointer, nbytes, HOST, write=True)
        self.ranges[role].append((pointer, nbytes))

    def run(self) -> None:
        """Run forward, backward and update."""
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
            self.stage_by_step.append(int(self.stages.update_and_reclaim(self._reading())))

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

    def _reading(self) -> Reading:
        free, total = self.driver.memory_info(DEVICE)
        used, host = total - free, self.driver.free_host_bytes()
        return Reading(used, used, free, total, host, self.memory.used_bytes)


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
    changes = [event for event in step.events if isinstance(event, StageChanged)]
    return {
        "seconds": figures.pop("seconds"),
        **{f"{name}_gib": nbytes / GIB for name, nbytes in figures.items()},
        "managed_gib": sum(size for role in step.ranges.values() for _, size in role) / GIB,
        "lowest_free_device_gib": step.lowest_free / GIB,
        "stage_after_each_step": step.stage_by_step,
        "stage_changes": len(changes),
        "reclamations": step.stages.state.light_reclamations,
        "reclaimed_gib": step.stages.reclaimed_bytes / GIB,
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
    print(
        f"\n{'way (simulated)':<18}{'s/step':>9}{'faulted':>9}{'evicted':>9}{'in place':>9}  stage"
    )
    for way in WAYS:
        found = figures[way] = simulate(way, plan)
        print(
            f"{way:<18}{found['seconds']:>9.2f}{found['faulted_gib']:>9.0f}"
            f"{found['evicted_gib']:>9.0f}{found['used_in_place_gib']:>9.0f}"
            f"  {found['stage_after_each_step'] or 'none'}"
        )
        results.write(NAME, dict(results.flatten(figures)), arguments.out, arguments.commit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
