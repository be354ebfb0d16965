"""Measure managed memory on this GPU: pools, prefetches, first touches and the cost of hints.

    PYTHONPATH=src python benchmarks/memory_core.py [--out FOLDER] [--commit ID] [--rehearse]

Uses less than a quarter of the free device memory. The exit code is 1 if a target is missed; the
results are written in any case. A rehearsal uses the simulated driver of the tests.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch

from gracetune.memory.hints import (
    Hint,
    HintOutcome,
    Hints,
    Span,
    legacy_stream,
    page_span,
    torch_stream,
)
from gracetune.memory.machine_checks import DeviceBytes
from gracetune.memory.managed_pool import ManagedPool, PoolSettings, TorchMemPools, open_pool
from gracetune.memory.platform import Link, open_machine
from gracetune.memory.shim import (
    LIBRARY,
    AccessPattern,
    MissingShim,
    Shim,
    ShimCounters,
    build_shim,
    find_shim,
)
from gracetune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from gracetune.events.types import Notice
    from gracetune.memory.driver import Driver
    from gracetune.memory.platform import Platform

TOUCH_BYTES = 512 * MIB
LATENT_BYTES = 128 * 1024
LATENTS_PER_BATCH = 16
TESTS = Path(__file__).parents[1] / "tests"


@dataclass(frozen=True)
class Scale:
    """Device, sizes and durations of the benchmark."""

    device: torch.device
    width: int = 4096
    layers: int = 8
    batch: int = 2048
    steps: int = 20
    rounds: int = 7
    sizes_mib: tuple[int, ...] = (64, 128, 256, 512)
    repetitions: int = 40
    pause_s: float = 1.0


REHEARSAL = Scale(torch.device("cpu"), 16, 2, 4, 1, 1, (1,), 1, 0.0)
WARM_UP = 5


@dataclass(frozen=True)
class Target:
    """A measured figure, its target, and True in `met` if it meets the target."""

    name: str
    value: float
    rule: str
    met: bool


def main() -> int:
    """Measure, write the results, and print the targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments = results.parse_arguments(parser)
    bench = open_rehearsal() if arguments.rehearse else open_bench()
    if bench is None:
        return 2
    free, _ = bench.driver.memory_info(0)
    print(f"{bench.scale.device}: {format_bytes(free)} free")

    began = time.perf_counter()
    figures: dict[str, object] = {}
    figures["pool_step"] = bench.pool_step()
    figures["prefetch"] = bench.prefetch()
    figures["first_touch"] = bench.first_touch()
    figures["hint_128_kib"] = bench.hint_cost()
    figures["managed_peak_bytes"] = bench.peak_bytes
    figures["free_device_bytes"] = free
    figures["seconds"] = time.perf_counter() - began
    targets = check_targets(figures, free)
    path = results.write("memory_core", figures, arguments.out, arguments.commit)
    print(path.read_text())
    for target in targets:
        verdict = "met   " if target.met else "MISSED"
        print(f"{verdict} {target.name}: {target.value:.4g}, {target.rule}")
    return 0 if arguments.rehearse or all(target.met for target in targets) else 1


def open_bench() -> Bench | None:
    """Open the GPU; None if there is none, or if too little of its memory is free."""
    machine = open_machine()
    if machine.driver is None:
        print(f"no GPU: {machine.platform.reasons['link']}")
        return None
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info(0)
    # One pool at a time, limited to an eighth; `first_touch` allocates another half a GiB.
    if free // 8 < 4 * GIB:
        print(f"{format_bytes(free)} of device memory are free; 32 GiB are needed")
        return None
    return Bench(
        Scale(torch.device("cuda", 0)),
        machine.driver,
        machine.platform,
        load_shim(),
        cap_bytes=free // 8,
    )


def open_rehearsal() -> Bench:
    """Open a simulated device, with the simulated driver of the tests."""
    sys.path += [str(TESTS)]
    from fakes.platforms import simulated_machine

    machine = simulated_machine(Link.MANAGED)
    return RehearsedBench(REHEARSAL, machine.driver, machine.platform, None, 0)


def load_shim() -> Shim:
    """Return the installed allocator library (shim), or compile one."""
    found = find_shim()
    if isinstance(found, MissingShim):
        found = Shim(build_shim(Path(tempfile.mkdtemp()) / LIBRARY))
    return found


class Bench:
    """Runs the measurements of managed memory on one device."""

    stream = staticmethod(torch_stream)

    def __init__(
        self,
        scale: Scale,
        driver: Driver,
        platform: Platform,
        shim: Shim | None,
        cap_bytes: int,
    ) -> None:
        self.scale = scale
        self.driver = driver
        self.platform = platform
        self.shim = shim
        self.cap_bytes = cap_bytes
        self.peak_bytes = 0
        self.hints = Hints(driver, platform, current_stream=self.stream)

    def allocate(self, pool: ManagedPool, nbytes: int) -> torch.Tensor:
        """Return a tensor of managed memory."""
        with pool.allocating():
            return torch.ones(nbytes, dtype=torch.uint8, device=self.scale.device)

    def in_pool(
        self, settings: PoolSettings, measure: Callable[[ManagedPool], dict[str, float]]
    ) -> dict[str, float]:
        """Run a measurement, which must free its tensors, in a pool; then close the pool."""
        assert self.shim is not None
        pool = open_pool(self.platform, self.shim, settings, TorchMemPools(), emit=print_notice)
        assert isinstance(pool, ManagedPool), pool.reason
        figures = measure(pool)
        gc.collect()
        counters = pool.counters()
        assert counters.failed_hints == 0, counters
        self.peak_bytes = max(self.peak_bytes, counters.peak_bytes)
        released = pool.close()
        assert released, released
        return figures

    def pool_step(self) -> dict[str, float]:
        """Compare a bf16 training step in a managed pool with one in ordinary memory."""
        settings = PoolSettings(self.cap_bytes, AccessPattern.GPU_FIRST)
        return self.in_pool(settings, partial(compare_steps, self.scale))

    def prefetch(self) -> dict[str, dict[str, float]]:
        """Compare `prefetch_to_device` with a copy from pinned memory, by size."""
        settings = PoolSettings(self.cap_bytes, AccessPattern.BALANCED, no_split=True)
        return {
            f"{size}_mib": self.in_pool(settings, partial(self._fetch_and_copy, size * MIB))
            for size in self.scale.sizes_mib
        }

    def first_touch(self) -> dict[str, float]:
        """Time a kernel's first touch of host pages, with faults and after a prefetch."""
        code, pointer = self.driver.allocate_managed(TOUCH_BYTES)
        assert code == 0, code
        self.peak_bytes = max(self.peak_bytes, TOUCH_BYTES)
        figures = self._touch(pointer)
        results.synchronize(self.scale.device)
        assert self.driver.free(pointer) == 0
        return figures

    def hint_cost(self) -> dict[str, float]:
        """Measure how many microseconds a memory hint for a latent of 128 KiB blocks its caller."""
        settings = PoolSettings(self.cap_bytes, AccessPattern.BALANCED, no_split=True)
        return self.in_pool(settings, self._time_hints)

    def _fetch_and_copy(self, nbytes: int, pool: ManagedPool) -> dict[str, float]:
        device = self.scale.device
        tensor = self.allocate(pool, nbytes)
        pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        resident = torch.empty(nbytes, dtype=torch.uint8, device=device)

        def fetch() -> Hint:
            return require_applied(self.hints.prefetch_to_device(tensor))

        fetched, copied = [], []
        for _ in range(10):
            require_applied(self.hints.prefetch_to_device(tensor, "cpu"))
            fetched.append(time_on_device(fetch, device))
            copied.append(time_on_device(lambda: resident.copy_(pinned, non_blocking=True), device))
        return {
            "prefetch_gb_s": nbytes / median(fetched) / 1e9,
            "pinned_copy_gb_s": nbytes / median(copied) / 1e9,
            "ratio": median(copied) / median(fetched),
        }

    def _touch(self, pointer: int) -> dict[str, float]:
        tensor = torch.as_tensor(DeviceBytes(pointer, TOUCH_BYTES), device="cuda:0").view(
            torch.int64
        )
        device = self.scale.device
        time_on_device(torch.ones(TOUCH_BYTES // 8, dtype=torch.int64, device=device).sum, device)
        faulting, prefetched = [], []
        for _ in range(3):
            ctypes.memset(pointer, 1, TOUCH_BYTES)
            faulting.append(time_on_device(tensor.sum, device))
            ctypes.memset(pointer, 1, TOUCH_BYTES)
            require_applied(self.hints.prefetch_to_device(tensor))
            prefetched.append(time_on_device(tensor.sum, device))
        return {
            "faulting_gb_s": TOUCH_BYTES / median(faulting) / 1e9,
            "after_prefetch_gb_s": TOUCH_BYTES / median(prefetched) / 1e9,
            "ratio": median(faulting) / median(prefetched),
        }

    def _time_hints(self, pool: ManagedPool) -> dict[str, float]:
        """Time memory hints for the latents of a batch, as in a run, and for a single latent."""
        hints = self.hints
        latents = [self.allocate(pool, LATENT_BYTES) for _ in range(LATENTS_PER_BATCH)]

        def to_host(latent: torch.Tensor) -> Hint:
            return hints.prefetch_to_device(latent, "cpu")

        def driver_alone(latent: torch.Tensor) -> Hint:
            span = page_span(latent, self.platform.page_bytes)
            assert isinstance(span, Span), span
            code = self.driver.prefetch(span.pointer, span.nbytes, 0, self.stream(0))
            return Hint(
                "driver", HintOutcome.APPLIED if code == 0 else HintOutcome.FAILED, code=code
            )

        timed = partial(median_us, self.scale.device)
        fetch, to_cpu, to_gpu = (
            hints.prefetch_to_device,
            hints.prefer_cpu_residency,
            hints.prefer_gpu_residency,
        )
        return {
            name: min(us)
            for name, us in measure_in_turns(
                {
                    "prefetch_driver_alone_us": partial(timed, latents, to_host, driver_alone),
                    "prefetch_to_device_us": partial(timed, latents, to_host, fetch),
                    "prefetch_already_there_us": partial(timed, latents, fetch, fetch),
                    "prefer_cpu_residency_us": partial(timed, latents, to_gpu, to_cpu),
                    "prefer_gpu_residency_us": partial(timed, latents, to_cpu, to_gpu),
                    "one_prefetch_alone_us": partial(timed, latents[:1], to_host, fetch),
                },
                self.scale,
            ).items()
        }


class HostPool:
    """A stand-in for a managed pool on a CPU: allocates from ordinary memory."""

    def allocating(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def counters(self) -> ShimCounters:
        """Return counters that are all 0."""
        return ShimCounters(*(0 for _ in fields(ShimCounters)))


class RehearsedBench(Bench):
    """Runs the measurements with a simulated driver, whose memory cannot be read."""

    stream = staticmethod(legacy_stream)

    def in_pool(
        self,
        settings: PoolSettings,  # noqa: ARG002
        measure: Callable[[ManagedPool], dict[str, float]],
    ) -> dict[str, float]:
        """Run a measurement with ordinary memory."""
        return measure(HostPool())  # type: ignore[arg-type]

    def allocate(self, pool: ManagedPool, nbytes: int) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor at simulated addresses."""
        from fakes.platforms import tensor_at

        code, pointer = self.driver.allocate_managed(nbytes)
        assert code == 0, code
        return tensor_at(pointer, nbytes)

    def first_touch(self) -> dict[str, float]:
        """Skip the measurement."""
        print("the part first_touch is skipped: its kernels read managed memory, which needs a GPU")
        return {"ratio": 0.0}


def compare_steps(scale: Scale, pool: ManagedPool) -> dict[str, float]:
    """Time steps in ordinary memory and in the pool alternately, so heat affects both alike."""
    steps = {
        "native_s": make_step(scale, nullcontext),
        "managed_s": make_step(scale, pool.allocating),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(scale.rounds):
        for name, step in steps.items():
            results.synchronize(scale.device)
            start = time.perf_counter()
            for _ in range(scale.steps):
                step()
            results.synchronize(scale.device)
            seconds[name].append((time.perf_counter() - start) / scale.steps)
    medians = {name: median(values) for name, values in seconds.items()}
    ratio = medians["managed_s"] / medians["native_s"]
    return {**medians, "ratio": ratio, "managed_bytes": pool.counters().peak_bytes}


def make_step(
    scale: Scale, allocate_in: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Build a training step of an 8-layer, 4096-wide bf16 model, allocated inside `allocate_in()`.

    Backward runs in this thread, because other threads do not allocate from an open pool.
    """
    with allocate_in():
        device, width = scale.device, scale.width
        layers = [
            torch.nn.Linear(width, width, device=device, dtype=torch.bfloat16)
            for _ in range(scale.layers)
        ]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        batch = torch.randn(scale.batch, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        with allocate_in(), torch.autograd.set_multithreading_enabled(False):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    return step


def time_on_device(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from an idle device until the work is complete."""
    results.synchronize(device)
    start = time.perf_counter()
    work()
    results.synchronize(device)
    return time.perf_counter() - start


def measure_in_turns(
    measures: dict[str, Callable[[], float]], scale: Scale
) -> dict[str, list[float]]:
    """Run all measurements in turn, many times.

    A shared CPU can be several times slower for seconds. So the turns are spread over most of a
    minute, and the caller uses the minimum, as timeit does.
    """
    figures: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(scale.repetitions):
        time.sleep(scale.pause_s)
        for name, measure in measures.items():
            figures[name].append(measure())
    return figures


def median_us(
    device: torch.device,
    tensors: list[torch.Tensor],
    prepare: Callable[[torch.Tensor], Hint],
    verb: Callable[[torch.Tensor], Hint],
) -> float:
    """Return the median microseconds that the hint `verb` blocks its caller.

    `prepare` restores the initial state before each measurement.
    """
    seconds = []
    for _ in range(20):
        for tensor in tensors:
            require_applied(prepare(tensor))
        results.synchronize(device)
        start = time.perf_counter()
        hints = [verb(tensor) for tensor in tensors]
        seconds.append((time.perf_counter() - start) / len(tensors))
        for hint in hints:
            require_applied(hint)
    return median(seconds) * 1e6


def require_applied(hint: Hint) -> Hint:
    """Check that a hint was applied; otherwise the figures would be meaningless."""
    assert hint, hint
    return hint


def print_notice(notice: Notice) -> None:
    """Print a notice."""
    print(notice.text)


def check_targets(figures: dict[str, object], free: int) -> list[Target]:
    """Compare the figures with the targets."""
    step, fetch = figures["pool_step"], figures["prefetch"]
    touch, cost = figures["first_touch"], figures["hint_128_kib"]
    assert isinstance(step, dict)
    assert isinstance(fetch, dict)
    assert isinstance(touch, dict)
    assert isinstance(cost, dict)
    lowest_ratio = min(size["ratio"] for size in fetch.values())
    slowest_hint_us = max(
        cost[name]
        for name in ("prefetch_to_device_us", "prefer_cpu_residency_us", "prefer_gpu_residency_us")
    )
    peak = figures["managed_peak_bytes"]
    assert isinstance(peak, int)
    return [
        Target("managed step / native step", step["ratio"], "at most 1.02", step["ratio"] <= 1.02),
        Target(
            "prefetch / pinned copy, 64 MiB and more",
            lowest_ratio,
            "at least 0.85",
            lowest_ratio >= 0.85,
        ),
        Target("faulting / prefetched touch", touch["ratio"], "at least 5", touch["ratio"] >= 5),
        Target("a hint for 128 KiB, us", slowest_hint_us, "under 30", slowest_hint_us < 30),
        Target("managed / free device memory", peak / free, "under 0.25", peak < free / 4),
    ]


if __name__ == "__main__":
    sys.exit(main())
