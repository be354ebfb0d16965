"""The rates of a GPU and of the host that queues for it, measured in what memory is free."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from gracetune.events.types import Notice
from gracetune.memory.garbage import ASIDE
from gracetune.plan.choose import PlanError
from gracetune.plan.known_models import PUBLISHED
from gracetune.plan.measure import COPIED_NBYTES, EDGE, measure
from gracetune.train.narrow import ROOMY_NBYTES, STAND_IN, narrow
from gracetune.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.plan.probe import Narrow
    from gracetune.plan.rates import Basics

MEASURED_SHARE = 8
"""One part in so many of free device memory is for each piece that rates are measured by."""
LEAST_NBYTES = MIB
"""Of such a piece."""
BF16_NBYTES = 2


def measure_gpu(device: torch.device, family: str, tell: Callable[[Notice], None]) -> Basics:
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
    probed = probed_by(family, free, tell)
    basics = measure(device, torch.cuda.synchronize, edge, copied, narrow=probed)
    ASIDE.collect()  # models that were probed hold on to themselves
    return basics


def probed_by(family: str, free: int, tell: Callable[[Notice], None]) -> Narrow:
    """What makes the models that the host is measured by; told where they are not the best."""
    if family not in PUBLISHED:
        tell(Notice(f"how fast this host queues a step is measured by {STAND_IN} for {family}"))
    if free >= ROOMY_NBYTES:
        return partial(narrow, family)
    tell(
        Notice(
            f"only {format_bytes(free)} of device memory are free, so how fast this host queues a "
            "step is measured with small tensors: its part may be said too short"
        )
    )
    return lambda has_adapter, _: narrow(family, has_adapter)


def free_nbytes(device: torch.device, there_is: int | None = None) -> int:
    """What torch can still give out: of the device, and of this process's share of it.

    `there_is`: free of all, where the driver counts less than the kernel could give.
    """
    taken = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - taken
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min((free if there_is is None else there_is) + cached, int(total * share) - taken)
