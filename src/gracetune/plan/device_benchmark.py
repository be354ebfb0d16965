"""What the machine at hand does a second: a moment's work on the device that is there.

The same kernels that `machines` has figures for: a large product, a copy on the device, and copies
over the link both ways; and what queueing operators costs the host (`probe`). Products, attention
and what runs between them one operation at a time are timed as a model has them when the planner
comes to them: libraries are not equally good at all of them.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from gracetune.events.types import Notice
from gracetune.models.family import PLANNABLE
from gracetune.plan.launch_probe import (
    PROXY_FAMILY,
    REALISTIC_NBYTES,
    build_probe_model,
    measure_launch_costs,
)
from gracetune.plan.machines import TYPICAL_LAUNCH_COSTS, MachineRates
from gracetune.plan.search import PlanError
from gracetune.plan.shapes import record_call, replay_on
from gracetune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from gracetune.plan.launch_probe import ProbeModelFactory
    from gracetune.plan.shapes import Op, ReplayCall


log = logging.getLogger(__name__)
WARM_UP, REPEATS = 3, 10
EDGE, COPIED_NBYTES = 8192, 512 * MIB
"""Of the products and copies that rates are measured by, where there is room."""
MOST_ROWS = 16384
"""Of a product that is timed: more take as long as their number says."""
MOST_NBYTES = 4 * GIB
"""That an elementwise kernel may touch to be timed; what touches more goes by its bytes."""
BUSY = (1, 4, 16)
"""Products that give the device something to do while short kernels are queued behind them: so many
of them, until they take long enough."""


def measure_device(
    device: torch.device,
    synchronize: Callable[[], None],
    edge: int = EDGE,
    copied_nbytes: int = COPIED_NBYTES,
    clock: Callable[[], float] = time.perf_counter,
    make_probe_model: ProbeModelFactory | None = None,
) -> MachineRates:
    """Measure for a few seconds; memory of a few GiB is taken and given back.

    `make_probe_model` makes the models by which the host is measured; none: another host stands for it.
    """
    host = (
        TYPICAL_LAUNCH_COSTS
        if make_probe_model is None
        else measure_launch_costs(device, synchronize, clock, make_probe_model)
    )
    pinned = torch.empty(copied_nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, back = (torch.empty(copied_nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.ones(edge, edge, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        return _timed(work, synchronize, clock)

    stopwatch = KernelTimer(device, synchronize, clock, edge)
    return MachineRates(
        flops=2.0 * edge**3 / seconds(lambda: left @ right),
        memory=2.0 * copied_nbytes / seconds(lambda: back.copy_(there)),
        link_in=copied_nbytes / seconds(lambda: there.copy_(pinned, non_blocking=True)),
        link_out=copied_nbytes / seconds(lambda: pinned.copy_(there, non_blocking=True)),
        both_ways_share=_both_ways(device, (pinned, there, back), seconds),
        timer=stopwatch.seconds if device.type == "cuda" else None,  # a CPU would take minutes
        host=host,
    )


def _both_ways(
    device: torch.device,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seconds: Callable[[Callable[[], object]], float],
) -> float:
    """What is left of each direction while the other is busy; a CPU has no link."""
    if device.type != "cuda":
        return 1.0
    pinned, there, back = buffers
    home = torch.empty_like(pinned, pin_memory=True)
    inward, outward = (torch.Stream(device) for _ in range(2))

    def copy(both: bool) -> None:
        with inward:
            there.copy_(pinned, non_blocking=True)
        if both:
            with outward:
                home.copy_(back, non_blocking=True)

    return min(1.0, seconds(lambda: copy(False)) / seconds(lambda: copy(True)))


class KernelTimer:
    """Times kernels of one device, each of a kind once."""

    def __init__(
        self,
        device: torch.device,
        synchronize: Callable[[], None],
        clock: Callable[[], float],
        edge: int = EDGE,
    ) -> None:
        """`edge`: of matrices that there is room for."""
        self._device = device
        self._synchronize = synchronize
        self._clock = clock
        self._edge = edge
        self._num_refused = 0
        self._known: dict[Hashable, float | None] = {}
        self._shortest = record_call(torch.ops.aten.neg.default, (torch.empty(1),), {})
        self._random = torch.Generator(device).manual_seed(0)  # a run's own draws are not touched

    def seconds(self, op: Op, scale: float) -> float | None:
        """Of one kernel at so many times the batch that was traced; none: it cannot be timed.

        What it takes grows with the batch, but for what the shortest of kernels takes.
        """
        if op.replay is not None:
            once = self._replay(op.replay) if op.nbytes <= MOST_NBYTES else None
            if once is None:
                return None
            fixed = min(once, self._replay(self._shortest) or 0.0)
            return fixed + (once - fixed) * scale
        if not op.dims:
            return None
        first, *others = max(1, round(op.dims[0] * scale)), *op.dims[1:]
        if op.kind == "gemm":
            rows = min(first, MOST_ROWS)
            once = self._product(rows, *others)
            return None if once is None else once * first / rows
        assert op.kind == "attention", op.kind
        once = self._attention(op.backward, *others)
        return None if once is None else once * first

    def _once(self, what: Hashable, work: Callable[[], float]) -> float | None:
        """What it takes; none where the device is short of memory, or has another operator for it
        than the CPU.
        """
        if what not in self._known:
            try:
                self._known[what] = work()
            except RuntimeError as refused:
                level = logging.DEBUG if self._num_refused else logging.WARNING  # told once
                log.log(level, "%s cannot be timed, it goes by other rates: %s", what, refused)
                self._num_refused += 1
                self._known[what] = None
        return self._known[what]

    def _replay(self, recipe: ReplayCall) -> float | None:
        def work() -> float:
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                return self._time_short(replay_on(recipe, self._device))

        return self._once(recipe, work)

    def _product(self, *extent: int) -> float | None:
        def work() -> float:
            rows, inner, outer = extent
            left, right = self._numbers(rows, inner), self._numbers(outer, inner)
            return self._time(lambda: left @ right.t())

        return self._once(("product", *extent), work)

    def _attention(self, is_back: bool, *extent: int) -> float | None:
        """Forward, or the way back, which is what both take less that."""
        there = self._once(("attention", *extent), lambda: self._attend(False, *extent))
        if not is_back:
            return there
        both = self._once(("attention, both ways", *extent), lambda: self._attend(True, *extent))
        return None if there is None or both is None else both - there

    def _attend(self, both_ways: bool, heads: int, queries: int, keys: int, width: int) -> float:
        query, grad = (self._numbers(1, heads, queries, width) for _ in range(2))
        key, value = (self._numbers(1, heads, keys, width) for _ in range(2))
        leaves = [tensor.requires_grad_(both_ways) for tensor in (query, key, value)]

        def work() -> None:
            out = scaled_dot_product_attention(query, key, value)
            if both_ways:
                torch.autograd.grad(out, leaves, grad)

        return self._time(work)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=self._random)

    def _time(self, work: Callable[[], object]) -> float:
        return _timed(work, self._synchronize, self._clock)

    def _time_short(self, work: Callable[[], object]) -> float:
        """A kernel may be shorter than its call: so calls queue up behind something long."""
        if self._device.type != "cuda":
            return self._time(work)
        with torch.cuda.device(self._device):
            long = torch.ones(self._edge, self._edge, dtype=torch.bfloat16, device=self._device)
            product = long @ long
            for _ in range(WARM_UP):
                work()
            began, ended = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            for num_products in BUSY:
                for _ in range(num_products):
                    torch.mm(long, long, out=product)
                began.record()
                for _ in range(REPEATS):
                    work()
                ended.record()
                is_ahead = not began.query()
                self._synchronize()
                if is_ahead:
                    break
        return float(began.elapsed_time(ended)) / 1e3 / REPEATS


def _timed(
    work: Callable[[], object], synchronize: Callable[[], None], clock: Callable[[], float]
) -> float:
    for _ in range(WARM_UP):
        work()
    synchronize()
    began = clock()
    for _ in range(REPEATS):
        work()
    synchronize()
    return (clock() - began) / REPEATS


# ------------------------------------------------------------------------------------------
# The rates of a GPU and of the host that queues for it, measured in what memory is free.


MEASURED_SHARE = 8
"""One part in so many of free device memory is for each piece that rates are measured by."""
LEAST_NBYTES = MIB
"""Of such a piece."""
BF16_NBYTES = 2


def measure_gpu(device: torch.device, family: str, emit: Callable[[Notice], None]) -> MachineRates:
    """For a few seconds, before a model is there; all memory is given back."""
    free = free_nbytes(device)
    room = free // MEASURED_SHARE
    if room < LEAST_NBYTES:
        raise PlanError(
            f"{format_bytes(max(0, free))} of device memory are free, too few to measure the "
            "device by. End what else is on it, or give torch a larger share."
        )
    edge = min(EDGE, 1 << int(math.log2(room / BF16_NBYTES) / 2))
    copied = min(COPIED_NBYTES, room)
    probed = probe_model_factory(family, free, emit)
    basics = measure_device(device, torch.cuda.synchronize, edge, copied, make_probe_model=probed)
    gc.collect()  # probed models contain reference cycles
    return basics


def probe_model_factory(
    family: str, free: int, emit: Callable[[Notice], None]
) -> ProbeModelFactory:
    """What makes the models that the host is measured by; told where they are not the best."""
    if family not in PLANNABLE:
        emit(Notice(f"how fast this host queues a step is measured by {PROXY_FAMILY} for {family}"))
    if free >= REALISTIC_NBYTES:
        return partial(build_probe_model, family)
    emit(
        Notice(
            f"only {format_bytes(free)} of device memory are free, so how fast this host queues a "
            "step is measured with small tensors: its part may be said too short"
        )
    )
    return lambda has_adapter, _: build_probe_model(family, has_adapter)


def free_nbytes(device: torch.device, there_is: int | None = None) -> int:
    """What torch can still give out: of the device, and of this process's share of it.

    `there_is`: free of all, where the driver counts less than the kernel could give.
    """
    taken = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - taken
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min((free if there_is is None else there_is) + cached, int(total * share) - taken)
