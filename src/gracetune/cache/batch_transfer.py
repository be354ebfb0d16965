"""Bringing batches to the device, where the run wants them, and telling what memory is in use."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

from gracetune.cache.memory_tier import allocate_pageable, allocate_pinned, allocate_page_aligned
from gracetune.cache.prefetch import CudaTransferStream, PinnedStaging, copy_into
from gracetune.config.environment import environment_settings, process_environment
from gracetune.events.types import Notice
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.platform import open_machine
from gracetune.memory.pool import ManagedPool
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import Tier, memory_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gracetune.cache.prefetch import Filling
    from gracetune.cache.store import Allocate
    from gracetune.config.schema import Gh200Section
    from gracetune.events.types import Event, MemoryUsed
    from gracetune.memory.placement import PlacementTable
    from gracetune.memory.platform import Link

MOVED_AHEAD = {"latents": "staged", "audio": "staged"}
"""A batch is about to be used: what lives in host memory is moved, not read over the link."""


LATENTS = "latents of the batch"
"""No text is called so."""


class BatchTransfer:
    """Copies from pinned memory; into managed memory, with hints, where a run asks for that."""

    def __init__(self, session: MemorySession, device: torch.device, table: PlacementTable) -> None:
        self.device = device
        self._session = session
        self._table = table
        self._hints = session.hints if session.hints_enabled else None
        pool = session.pool() if session.wants_pool else None
        self._pool = pool if isinstance(pool, ManagedPool) else None
        self._tier = Tier.DEVICE if self.needs_copy else Tier.HOST
        self._watched: dict[str, tuple[Tier, Callable[[], int]]] = {}
        self._booked: dict[str, int] = {}
        self._staging = PinnedStaging(self.allocate_host, _mark_of_this_stream)

    @property
    def needs_copy(self) -> bool:
        """Whether the device has a memory of its own that batches must be brought to."""
        return self.device.type == "cuda"

    @property
    def link(self) -> Link:
        """How the device reaches host memory."""
        return self._session.machine.platform.link

    @property
    def device_nbytes(self) -> int:
        """The device's own memory; 0 where it has none."""
        return self._session.machine.platform.device_bytes if self.needs_copy else 0

    @property
    def nbytes_copied(self) -> int:
        """So far, in all."""
        return self._staging.nbytes_sent

    def allocate_host(self, nbytes: int) -> Tensor:
        """Memory that the device copies from at full speed."""
        return allocate_pinned(nbytes) if self.needs_copy else allocate_page_aligned(nbytes)

    def new_stream(self) -> CudaTransferStream:
        """A way to the device beside the step's."""
        return CudaTransferStream(self.device)

    def to_device(
        self, latents: Filling, text: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Have the latents put where the device copies from, and bring all to it without waiting.

        What is there already stays: latents that were just encoded, texts that are kept hot.
        """
        if not self.needs_copy:
            gathered, texts = latents(allocate_pageable), dict(text)
            self._place(gathered, texts)
            return gathered, texts
        made: list[Tensor] = []

        def fill(room: Allocate) -> Tensor:
            made.append(latents(room))
            return made[0]

        cold = {name: tensor for name, tensor in text.items() if not tensor.is_cuda}
        parts = {name: partial(copy_into, tensor) for name, tensor in cold.items()}
        moved = self._staging.send({**parts, LATENTS: fill}, self._new_on_device)
        gathered = moved.pop(LATENTS)
        self._place(None if gathered is made[0] else gathered, moved)
        return gathered, {**text, **moved}

    def track_memory(self, role: str, nbytes: Callable[[], int], tier: Tier | None = None) -> None:
        """Keep a role in the books: asked whenever memory is told; `tier`: the device's."""
        self._watched[role] = tier or self._tier, nbytes

    def memory_used(self, step: int) -> MemoryUsed:
        """What is in use now; between steps, so that stages may change and reclaim here."""
        self._session.observe(reclaim=True)
        for role, (tier, nbytes) in self._watched.items():
            self._session.accounting.release(tier, role, self._booked.get(role, 0))
            now = nbytes()
            # What is past a tier's cap is there all the same; the books say that it was denied.
            self._booked[role] = now if self._session.accounting.reserve(tier, role, now) else 0
        return memory_event(step, self._session.stats(), psutil.Process().memory_info().rss)

    def _place(self, latents: Tensor | None, text: Mapping[str, Tensor]) -> None:
        """Give each tensor that was brought the home of its role; a refusal is told once."""
        if self._hints is not None:
            place_batch({"latents": latents, "text": text}, self._hints, self._table)

    def _new_on_device(self, like: Tensor) -> Tensor:
        if self._pool is None:
            return torch.empty_like(like, device=self.device)
        with self._pool.allocating():
            return torch.empty_like(like, device=self.device)


def build_batch_transfer(
    section: Gh200Section, device: torch.device, emit: Callable[[Event], None]
) -> BatchTransfer:
    """Look at the machine once, and say what was found and decided."""
    session = MemorySession(
        lambda: open_machine(device.index or 0),
        lambda: environment_settings(process_environment()),
        emit,
    )
    session.hints_override = section.enable_uvm_hints
    platform = session.machine.platform
    hints = "on" if session.hints_enabled else "off"
    emit(Notice(f"memory link: {platform.link.value} ({platform.reasons['link']}); hints {hints}"))
    if session.wants_pool:
        pool = session.pool()
        if not isinstance(pool, ManagedPool):
            text = f"managed memory is wanted, but batches are not in it: {pool.reason}"
            emit(Notice(text, level="warning", fallback=True))
    return BatchTransfer(session, device, placement_table({**MOVED_AHEAD, **section.placement}))


def _mark_of_this_stream() -> torch.cuda.Event:
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record()
    return mark
