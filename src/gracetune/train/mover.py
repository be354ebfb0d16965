"""Bringing batches to the device, where the run wants them, and telling what memory is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from gracetune.config.environment import environment_settings, process_environment
from gracetune.events.types import Notice
from gracetune.memory.machine import open_machine
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.pool import UnifiedPool
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import memory_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gracetune.config.schema import Gh200Section
    from gracetune.data.sample import Batch
    from gracetune.events.types import Event, MemoryUsed
    from gracetune.memory.placement import PlacementTable

MOVED_AHEAD = {"latents": "staged", "audio": "staged"}
"""A batch is about to be used: what lives in host memory is moved, not read over the link."""


class Mover:
    """Copies from pinned memory; into managed memory, with hints, where a run asks for that."""

    def __init__(self, session: MemorySession, device: torch.device, table: PlacementTable) -> None:
        self._session = session
        self._device = device
        self._table = table
        self._hints = session.hints if session.enabled else None
        pool = session.pool() if self._hints is not None else None
        self._pool = pool if isinstance(pool, UnifiedPool) else None

    def move(self, tensor: Tensor) -> Tensor:
        """To the device, without waiting for it."""
        if self._device.type != "cuda":
            return tensor
        pinned = tensor.pin_memory()
        if self._pool is None:
            return pinned.to(self._device, non_blocking=True)
        with self._pool.allocating():
            moved = torch.empty_like(pinned, device=self._device)
        return moved.copy_(pinned, non_blocking=True)

    def place(self, batch: Batch) -> Batch:
        """Give each tensor of a batch the home of its role; what cannot be done is told once."""
        if self._hints is not None:
            place_batch(batch, self._hints, self._table)
        return batch

    def used(self, step: int) -> MemoryUsed:
        """What is in use now; between steps, so that stages may change and reclaim here."""
        self._session.observe(act=True)
        return memory_event(step, self._session.stats(), psutil.Process().memory_info().rss)


def build_mover(
    section: Gh200Section, device: torch.device, tell: Callable[[Event], None]
) -> Mover:
    """Look at the machine once, and say what was found and decided."""
    session = MemorySession(
        lambda: open_machine(device.index or 0),
        lambda: environment_settings(process_environment()),
        tell,
    )
    session.override = section.enable_uvm_hints
    platform = session.machine.platform
    hints = "on" if session.enabled else "off"
    tell(Notice(f"memory link: {platform.link.value} ({platform.why['link']}); hints {hints}"))
    if session.enabled and platform.has_managed:
        pool = session.pool()
        if not isinstance(pool, UnifiedPool):
            text = f"hints are on, but batches are not in managed memory: {pool.reason}"
            tell(Notice(text, level="warning", fallback=True))
    return Mover(session, device, placement_table({**MOVED_AHEAD, **section.placement}))
