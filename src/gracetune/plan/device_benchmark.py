"""Measure the rates of the machine at hand: compute, memory, the link, and kernel launches.

`measure_device` measures what plan/machines.py lists for known machines: a large matmul, a copy on
the device, copies over the link in both directions, and the CPU's launch costs
(plan/launch_overhead.py). It takes a few seconds.

`KernelTimer` times single kernels of a model, each when the planner first asks for it: libraries do
not reach the same share of the peak rate for all shapes.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import deque
from contextlib import closing
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from gracetune.adapters.compute.lora_matmul import FP8, FP8_OUTPUT_DTYPE, scaled_matmul
from gracetune.events.types import Notice
from gracetune.memory.platform import Link
from gracetune.models.family import PLANNABLE
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.plan.launch_overhead import (
    PROXY_FAMILY,
    REALISTIC_NBYTES,
    build_probe_model,
    measure_launch_costs,
)
from gracetune.plan.machines import TYPICAL_LAUNCH_COSTS, MachineRates
from gracetune.plan.search import PlanError
from gracetune.plan.trace_records import record_call, replay_on
from gracetune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from gracetune.plan.launch_overhead import ProbeModelFactory
    from gracetune.plan.trace_records import Op, ReplayCall


log = logging.getLogger(__name__)
WARM_UP, REPEATS = 3, 10
"""Number of untimed and of timed repetitions of each measurement."""
EDGE, COPIED_NBYTES = 8192, 512 * MIB
"""Size of the measured matmul (rows and columns) and of the measured copies (bytes), if free memory
allows them."""
LINK_NBYTES = 128 * MIB
"""Maximum size of the copies over the link: pinning takes longer than copying."""
MAX_TIMED_ROWS = 16384
"""Maximum number of rows of a timed matmul; the time of more rows is extrapolated."""
MAX_TIMED_NBYTES = 4 * GIB
"""Maximum number of bytes that a timed elementwise kernel reads and writes. The time of a larger
one is estimated from its bytes."""
ROTATED_NBYTES = 128 * MIB
"""Bytes that repetitions of an elementwise kernel use in turn. They are more than a GPU's L2 cache
holds (50 MiB on an H200): with the same tensors each time, it would serve the kernel."""
BLOCKING_MATMULS = (1, 4, 16)
"""Numbers of large matmuls to queue before short kernels are timed, tried in turn. They keep the
device busy while the host launches the short kernels."""


def measure_device(
    device: torch.device,
    synchronize: Callable[[], None],
    edge: int = EDGE,
    copied_nbytes: int = COPIED_NBYTES,
    clock: Callable[[], float] = time.perf_counter,
    make_probe_model: ProbeModelFactory | None = None,
) -> MachineRates:
    """Measure the rates of a device: matmuls, memory, the link to the host, and kernel launches.

    This takes a few seconds and a few GiB of memory, which is freed again. `make_probe_model`
    builds the models for the launch probe; without it, typical launch costs are assumed.
    """
    host = (
        TYPICAL_LAUNCH_COSTS
        if make_probe_model is None
        else measure_launch_costs(device, synchronize, clock, make_probe_model)
    )
    source, target = (
        torch.empty(copied_nbytes, dtype=torch.uint8, device=device) for _ in range(2)
    )
    left, right = (torch.ones(edge, edge, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        return _timed(work, synchronize, clock)

    timer = KernelTimer(device, synchronize, clock, edge)
    link_nbytes = min(copied_nbytes, LINK_NBYTES)
    near = source[:link_nbytes], target[:link_nbytes]
    # torch's own allocator of pinned memory would keep it until the process ends.
    with closing(open_copy_engine(device, Link.MANAGED)) as engine:
        pinned, pinned_out = (engine.allocate_pinned(link_nbytes) for _ in range(2))
        return MachineRates(
            flops=2.0 * edge**3 / seconds(lambda: left @ right),
            memory=2.0 * copied_nbytes / seconds(lambda: target.copy_(source)),
            link_in=link_nbytes / seconds(lambda: near[0].copy_(pinned, non_blocking=True)),
            link_out=link_nbytes / seconds(lambda: pinned.copy_(near[0], non_blocking=True)),
            both_ways_share=_both_ways_share(device, near, (pinned, pinned_out), seconds),
            timer=timer.seconds if device.type == "cuda" else None,  # a CPU would take minutes
            host=host,
        )


def _both_ways_share(
    device: torch.device,
    near: tuple[torch.Tensor, torch.Tensor],
    pinned: tuple[torch.Tensor, torch.Tensor],
    seconds: Callable[[Callable[[], object]], float],
) -> float:
    """Return how much of its bandwidth the host-device link keeps per direction if both are busy.

    1.0: copies in opposite directions do not slow each other down. `near` are buffers on the
    device, and `pinned` buffers of the same size in host memory.
    """
    if device.type != "cuda":
        return 1.0  # a CPU has no link
    inward, outward = (torch.Stream(device) for _ in range(2))

    def copy(both: bool) -> None:
        with inward:
            near[0].copy_(pinned[0], non_blocking=True)
        if both:
            with outward:
                pinned[1].copy_(near[1], non_blocking=True)

    return min(1.0, seconds(lambda: copy(False)) / seconds(lambda: copy(True)))


class KernelTimer:
    """Times kernels on one device and remembers the results."""

    def __init__(
        self,
        device: torch.device,
        synchronize: Callable[[], None],
        clock: Callable[[], float],
        edge: int = EDGE,
    ) -> None:
        """`edge`: rows and columns of the matmul that keeps the device busy in `_time_short`."""
        self._device = device
        self._synchronize = synchronize
        self._clock = clock
        self._edge = edge
        self._num_refused = 0
        self._known: dict[Hashable, float | None] = {}
        self._shortest = record_call(torch.ops.aten.neg.default, (torch.empty(1),), {})
        self._random = torch.Generator(device).manual_seed(0)  # not the run's global generator

    def seconds(self, op: Op, scale: float) -> float | None:
        """Return a kernel's time at `scale` times the traced batch; None if it cannot be timed.

        Elementwise kernels are timed at the traced batch size and extrapolated,

            seconds(scale) = fixed + (seconds(1) - fixed) * scale,

        where `fixed` is the time of a kernel for a single element.
        """
        if op.replay is not None:
            once = self._replay(op.replay, op.nbytes) if op.nbytes <= MAX_TIMED_NBYTES else None
            if once is None:
                return None
            fixed = min(once, self._replay(self._shortest, nbytes=1.0) or 0.0)
            return fixed + (once - fixed) * scale
        if not op.dims:
            return None
        first, *others = max(1, round(op.dims[0] * scale)), *op.dims[1:]
        if op.kind == "gemm":
            rows = min(first, MAX_TIMED_ROWS)
            once = self._fp8_matmul(rows, *others) if op.fp8 else self._matmul(rows, *others)
            return None if once is None else once * first / rows
        assert op.kind == "attention", op.kind
        once = self._attention(op.backward, *others)
        return None if once is None else once * first

    def _once(self, what: Hashable, work: Callable[[], float]) -> float | None:
        """Measure a kernel in the first call, and return the remembered time in later calls.

        Returns None if the device cannot run the kernel: it may lack memory, or the operator may
        exist on the CPU only.
        """
        if what not in self._known:
            try:
                self._known[what] = work()
            except RuntimeError as refused:
                level = logging.DEBUG if self._num_refused else logging.WARNING  # warn once
                log.log(
                    level,
                    "cannot time %s, so its time is estimated from its bytes: %s",
                    what,
                    refused,
                )
                self._num_refused += 1
                self._known[what] = None
        return self._known[what]

    def _replay(self, recipe: ReplayCall, nbytes: float) -> float | None:
        """Return the time of a recorded call that reads and writes `nbytes`.

        Repetitions use several copies of the tensors in turn, so that they are not in the L2 cache.
        """

        def work() -> float:
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                count = min(REPEATS, math.ceil(ROTATED_NBYTES / max(nbytes, 1.0)))
                calls = cycle([replay_on(recipe, self._device) for _ in range(count)])
                results: deque[object] = deque(maxlen=count - 1)  # they take turns as well
                for _ in range(count):  # allocate their memory before the kernel is timed
                    results.append(next(calls)())
                return self._time_short(lambda: results.append(next(calls)()))

        return self._once(recipe, work)

    def _matmul(self, *dims: int) -> float | None:
        def work() -> float:
            rows, inner, outer = dims
            left, right = self._numbers(rows, inner), self._numbers(outer, inner)
            return self._time(lambda: left @ right.t())

        return self._once(("matmul", *dims), work)

    def _fp8_matmul(self, *dims: int) -> float | None:
        def work() -> float:
            rows, inner, outer = dims
            left, right = (self._numbers(n, inner).to(FP8) for n in (rows, outer))
            scales = [torch.ones(n, 1, device=self._device) for n in (rows, outer)]
            return self._time(
                lambda: scaled_matmul(
                    left, right.t(), scales[0], scales[1].t(), FP8_OUTPUT_DTYPE, None
                )
            )

        return self._once(("fp8 matmul", *dims), work)

    def _attention(self, is_backward: bool, *dims: int) -> float | None:
        """Return the time of attention's forward or backward.

        The time of backward is that of forward and backward together, minus forward.
        """
        forward = self._once(("attention", *dims), lambda: self._attend(False, *dims))
        if not is_backward:
            return forward
        both = self._once(("attention with backward", *dims), lambda: self._attend(True, *dims))
        return None if forward is None or both is None else both - forward

    def _attend(
        self, with_backward: bool, heads: int, queries: int, keys: int, width: int
    ) -> float:
        query, grad = (self._numbers(1, heads, queries, width) for _ in range(2))
        key, value = (self._numbers(1, heads, keys, width) for _ in range(2))
        leaves = [tensor.requires_grad_(with_backward) for tensor in (query, key, value)]

        def work() -> None:
            out = scaled_dot_product_attention(query, key, value)
            if with_backward:
                torch.autograd.grad(out, leaves, grad)

        return self._time(work)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=self._random)

    def _time(self, work: Callable[[], object]) -> float:
        return _timed(work, self._synchronize, self._clock)

    def _time_short(self, work: Callable[[], object]) -> float:
        """Time a kernel that may be shorter than its launch.

        A large matmul keeps the device busy until all launches are queued, so that the events
        measure the kernels back to back and not the launches.
        """
        if self._device.type != "cuda":
            return self._time(work)
        with torch.cuda.device(self._device):
            matrix = torch.ones(self._edge, self._edge, dtype=torch.bfloat16, device=self._device)
            result = matrix @ matrix
            for _ in range(WARM_UP):
                work()
            start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            for num_matmuls in BLOCKING_MATMULS:
                for _ in range(num_matmuls):
                    torch.mm(matrix, matrix, out=result)
                start.record()
                for _ in range(REPEATS):
                    work()
                end.record()
                is_ahead = not start.query()
                self._synchronize()
                if is_ahead:
                    break
        return float(start.elapsed_time(end)) / 1e3 / REPEATS


def _timed(
    work: Callable[[], object], synchronize: Callable[[], None], clock: Callable[[], float]
) -> float:
    for _ in range(WARM_UP):
        work()
    synchronize()
    start = clock()
    for _ in range(REPEATS):
        work()
    synchronize()
    return (clock() - start) / REPEATS


BUFFER_PART = 8
"""Each buffer of the benchmark may take 1/BUFFER_PART of the free device memory."""
MIN_BUFFER_NBYTES = MIB
BF16_NBYTES = 2


def measure_gpu(device: torch.device, family: str, emit: Callable[[Notice], None]) -> MachineRates:
    """Measure the rates of a GPU and its host, with buffers that fit into the free memory."""
    free = free_nbytes(device)
    room = free // BUFFER_PART
    if room < MIN_BUFFER_NBYTES:
        raise PlanError(
            f"only {format_bytes(max(0, free))} of device memory is free, too little to measure "
            "the device. End other programs on it, or raise torch's memory fraction."
        )
    edge = min(EDGE, 1 << int(math.log2(room / BF16_NBYTES) / 2))
    copied = min(COPIED_NBYTES, room)
    factory = probe_model_factory(family, free, emit)
    rates = measure_device(device, torch.cuda.synchronize, edge, copied, make_probe_model=factory)
    gc.collect()  # probe models contain reference cycles
    return rates


def probe_model_factory(
    family: str, free: int, emit: Callable[[Notice], None]
) -> ProbeModelFactory:
    """Return the function that builds the small models with which launch overhead is measured.

    Emits a notice if another family's model, or smaller tensors, must be used instead.
    """
    if family not in PLANNABLE:
        emit(Notice(f"launch overhead is measured with {PROXY_FAMILY} in place of {family}"))
    if free >= REALISTIC_NBYTES:
        return partial(build_probe_model, family)
    emit(
        Notice(
            f"launch overhead is measured with small tensors, because only "
            f"{format_bytes(free)} of device memory is free; it may be underestimated"
        )
    )
    return lambda has_adapter, _: build_probe_model(family, has_adapter)


def free_nbytes(
    device: torch.device, system_free_nbytes: int | None = None, num_sharing: int = 1
) -> int:
    """Return the bytes of device memory that torch can still allocate.

    They are limited by free memory and by the process's memory fraction. `system_free_nbytes`
    replaces the free memory that the driver reports, which is too low where host and device share
    one memory. `num_sharing` processes use the device, and each gets an equal part of what is free.
    """
    taken = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - taken
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(
        (free if system_free_nbytes is None else system_free_nbytes) // num_sharing + cached,
        int(total * share) - taken,
    )
