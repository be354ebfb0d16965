"""What the machine at hand does a second: a moment's work on the device that is there.

The same kernels that `machines` has figures for: a large product, a copy on the device, and copies
over the link both ways. A device without work of this kind is not asked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from gracetune.plan.rates import Basics
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP, REPEATS = 3, 10


def measure(
    device: torch.device,
    synchronize: Callable[[], None],
    edge: int = 8192,
    copied_nbytes: int = 512 * MIB,
    clock: Callable[[], float] = time.perf_counter,
) -> Basics:
    """Measure for about a second; memory of a few GiB is taken and given back."""
    pinned = torch.empty(copied_nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, back = (torch.empty(copied_nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    left, right = (torch.ones(edge, edge, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            work()
        synchronize()
        began = clock()
        for _ in range(REPEATS):
            work()
        synchronize()
        return (clock() - began) / REPEATS

    return Basics(
        flops=2.0 * edge**3 / seconds(lambda: left @ right),
        memory=2.0 * copied_nbytes / seconds(lambda: back.copy_(there)),
        link_in=copied_nbytes / seconds(lambda: there.copy_(pinned, non_blocking=True)),
        link_out=copied_nbytes / seconds(lambda: pinned.copy_(there, non_blocking=True)),
    )
