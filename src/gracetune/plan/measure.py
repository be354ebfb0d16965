"""What the machine at hand does a second: a moment's work on the device that is there.

The same kernels that `machines` has figures for: a large product, a copy on the device, and copies
over the link both ways; and what queueing operators costs the host (`probe`). Products and
attention of a model are timed by their own extents when the planner comes to them: libraries are
not equally good at all of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from gracetune.plan.probe import probe_host
from gracetune.plan.rates import USUAL_HOST, Basics
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.plan.probe import Narrow
    from gracetune.plan.shapes import Kind

WARM_UP, REPEATS = 3, 10
MOST_ROWS = 16384
"""Of a product that is timed: more take as long as their number says."""


def measure(
    device: torch.device,
    synchronize: Callable[[], None],
    edge: int = 8192,
    copied_nbytes: int = 512 * MIB,
    clock: Callable[[], float] = time.perf_counter,
    narrow: Narrow | None = None,
) -> Basics:
    """Measure for a few seconds; memory of a few GiB is taken and given back.

    `narrow` makes the models by which the host is measured; none: another host stands for it.
    """
    pinned = torch.empty(copied_nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, back = (torch.empty(copied_nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.ones(edge, edge, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        return _timed(work, synchronize, clock)

    stopwatch = Stopwatch(device, synchronize, clock)
    return Basics(
        flops=2.0 * edge**3 / seconds(lambda: left @ right),
        memory=2.0 * copied_nbytes / seconds(lambda: back.copy_(there)),
        link_in=copied_nbytes / seconds(lambda: there.copy_(pinned, non_blocking=True)),
        link_out=copied_nbytes / seconds(lambda: pinned.copy_(there, non_blocking=True)),
        both_ways_share=_both_ways(device, (pinned, there, back), seconds),
        timer=stopwatch.seconds if device.type == "cuda" else None,  # a CPU would take minutes
        host=USUAL_HOST if narrow is None else probe_host(device, synchronize, clock, narrow),
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


class Stopwatch:
    """Times kernels of one device, each extent once."""

    def __init__(
        self, device: torch.device, synchronize: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._device = device
        self._synchronize = synchronize
        self._clock = clock
        self._known: dict[tuple[int, ...], float] = {}

    def seconds(self, kind: Kind, extent: tuple[int, ...], backward: bool) -> float:
        """Of one product (rows, inner, outer), or attention (samples, heads, queries, keys, width).

        Both grow with the first number, from where on there is work for the whole device.
        """
        if kind == "gemm":
            rows = min(extent[0], MOST_ROWS)
            return self._product(rows, *extent[1:]) * extent[0] / rows
        assert kind == "attention", kind
        forward = self._attention(False, *extent[1:])
        one = self._attention(True, *extent[1:]) - forward if backward else forward
        return one * extent[0]

    def _product(self, *extent: int) -> float:
        rows, inner, outer = extent
        if extent not in self._known:
            left, right = self._numbers(rows, inner), self._numbers(outer, inner)
            self._known[extent] = self._time(lambda: left @ right.t())
        return self._known[extent]

    def _attention(self, backward: bool, *extent: int) -> float:
        """Forward alone, or there and back."""
        heads, queries, keys, width = extent
        known = (int(backward), *extent)
        if known not in self._known:
            query, grad = (self._numbers(1, heads, queries, width) for _ in range(2))
            key, value = (self._numbers(1, heads, keys, width) for _ in range(2))
            leaves = [tensor.requires_grad_(backward) for tensor in (query, key, value)]

            def work() -> None:
                out = scaled_dot_product_attention(query, key, value)
                if backward:
                    torch.autograd.grad(out, leaves, grad)

            self._known[known] = self._time(work)
        return self._known[known]

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def _time(self, work: Callable[[], object]) -> float:
        return _timed(work, self._synchronize, self._clock)


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
