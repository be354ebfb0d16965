"""Simulate full training of a model of three times the device memory on a GH200. No GPU is used.

The model is Qwen-Image (20 B weights in fp32, AdamW): weights, gradients and optimizer state need
3.2 times the memory of a GH200 with 96 GB. `gracetune plan` chooses what is in managed memory. Then
a simulated CUDA driver, which keeps pages, their place and a clock, runs steps in four ways:

- `faults`: everything is managed memory without advice, as with an allocator that only replaces
  cudaMalloc. Kernels fault pages in, and the driver evicts others;
- `planned`: the roles of the plan at home in host memory and used in place, the rest on the device;
- `in_place`: all roles in host memory and used in place;
- `prefetch`: as `in_place`, but the weights of each block move to the device ahead of its use, and
  back.

All figures are SIMULATED from published rates of a GH200 (plan/machines.py); none is measured.

    PYTHONPATH=src:benchmarks python benchmarks/managed_simulated.py [--out FOLDER] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results

from gracetune.cli.plan import predict
from gracetune.config.load import load_run_file
from gracetune.memory.driver import HOST, Advice, CudaCode
from gracetune.memory.oversubscription import Reading, StagePolicy, StageState, advance
from gracetune.plan.machines import find_machine
from gracetune.plan.report import report_json, report_lines
from gracetune.units import GIB

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.simulated_driver import SimulatedDriver

if TYPE_CHECKING:
    from gracetune.plan.result import Plan

NAME = "managed_simulated"
MACHINE = "gh200-96"
DEVICE = 0
COMPUTE, COPIES = 0, 1
"""Streams of the simulated driver: kernels, and prefetches ahead of them."""
STEPS = 2
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


@dataclass
class Step:
    """A training step on a simulated driver, whose roles are in managed or device memory."""

    way: str
    plan: Plan
    num_blocks: int
    driver: SimulatedDriver
    policy: StagePolicy = field(default_factory=StagePolicy)
    state: StageState = field(default_factory=StageState)
    stages: list[int] = field(default_factory=list)
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def allocate(self) -> None:
        """Allocate every role, one range for each block; raise if the device has no space."""
        sizes = self.plan.managed_nbytes
        code, _ = self.driver.allocate_device(
            self.plan.device.activations + self.plan.device.workspace, DEVICE
        )
        assert code == CudaCode.SUCCESS, f"activations: {code}"
        for role in ("trained", "gradients", "optimizer"):
            nbytes = sizes[role] // self.num_blocks
            on_device = self.way == "planned" and role not in self.plan.managed
            for _ in range(self.num_blocks):
                self.ranges.setdefault(role, []).append((self._range(nbytes, on_device), nbytes))
        if self.way == "planned":
            self.ranges = {r: self.ranges[r] if r in self.plan.managed else [] for r in self.ranges}

    def _range(self, nbytes: int, on_device: bool) -> int:
        if on_device:
            code, pointer = self.driver.allocate_device(nbytes, DEVICE)
            assert code == CudaCode.SUCCESS, f"device memory: {code}"
            return pointer
        code, pointer = self.driver.allocate_managed(nbytes)
        assert code == CudaCode.SUCCESS, f"managed memory: {code}"
        if self.way != "faults":
            for advice, place in (
                (Advice.SET_PREFERRED_LOCATION, HOST),
                (Advice.SET_ACCESSED_BY, DEVICE),
            ):
                assert self.driver.advise(pointer, nbytes, advice, place) == CudaCode.SUCCESS
        self.driver.touch(pointer, nbytes, HOST, write=True)
        return pointer

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

    def _weights(self, block: int, following: int) -> None:
        ranges = self.ranges["trained"]
        if not ranges:
            return
        if self.way == "prefetch":
            if 0 <= following < self.num_blocks:
                self.driver.prefetch(*ranges[following], DEVICE, COPIES)
            self.driver.wait(COMPUTE, COPIES)
        self._touch("trained", block)
        if self.way == "prefetch":
            self.driver.wait(COPIES, COMPUTE)
            self.driver.prefetch(*ranges[block], HOST, COPIES)

    def _touch(self, role: str, block: int, *, write: bool = False) -> None:
        if self.ranges[role]:
            self.driver.touch(*self.ranges[role][block], DEVICE, COMPUTE, write=write)
            self._observe()

    def _kernel(self, seconds: float) -> None:
        self.driver.compute(seconds, DEVICE, COMPUTE)

    def _observe(self) -> None:
        free, total = self.driver.memory_info(DEVICE)
        reading = Reading(
            total - free, total - free, free, total, self.driver.memory_info(DEVICE)[0]
        )
        self.state, _ = advance(self.policy, self.state, reading)
        self.stages.append(int(self.state.stage))


def simulate(way: str, plan: Plan, num_blocks: int) -> dict[str, Any]:
    """Run some steps in one way; return the time and the traffic of the last one."""
    spec = find_machine(MACHINE)
    step = Step(
        way,
        plan,
        num_blocks,
        SimulatedDriver([spec.device()], spec.host_bytes, page_bytes=32 * spec.page_bytes),
    )
    step.allocate()
    before: dict[str, float] = {}
    for _ in range(STEPS):
        step.stages.clear()
        before = counters(step.driver)
        step.run()
    after = counters(step.driver)
    figures = {name: after[name] - before[name] for name in after}
    return {
        "seconds": figures.pop("seconds"),
        **{f"{name}_gib": nbytes / GIB for name, nbytes in figures.items()},
        "stage_at_the_end": step.stages[-1],
        "readings_in_stage_2": step.stages.count(2),
        "readings": len(step.stages),
        "stage_transitions": step.state.transitions,
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
        found = figures[way] = simulate(way, plan, len(plan.blocks))
        print(
            f"{way:<18}{found['seconds']:>9.2f}{found['faulted_gib']:>9.0f}"
            f"{found['evicted_gib']:>9.0f}{found['used_in_place_gib']:>9.0f}"
            f"{found['stage_at_the_end']:>7}"
        )
        results.write(NAME, dict(results.flatten(figures)), arguments.out, arguments.commit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
