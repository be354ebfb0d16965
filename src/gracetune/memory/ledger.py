"""Who holds how many bytes, by tier and role, and no more than the tier's cap.

The books of what gracetune itself allocates: a cache, an arena or a pool takes bytes here before it
allocates and gives them back after. Torch's own allocations are in torch's statistics.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tier(StrEnum):
    """Where bytes are."""

    DEVICE = "device"
    HOST = "host"
    MANAGED = "managed"
    """On either side, wherever the driver has moved them."""


class MemoryAccounting:
    """Bytes by tier and role; safe to use from several threads."""

    def __init__(self, caps: Mapping[Tier, int] = MappingProxyType({})) -> None:
        """`caps` are the most bytes of a tier; a tier without one is not limited here."""
        self.caps = MappingProxyType(dict(caps))
        self._lock = threading.Lock()
        self._held: Counter[tuple[Tier, str]] = Counter()
        self._total: Counter[Tier] = Counter()
        self._peak: Counter[Tier] = Counter()
        self._denied: Counter[Tier] = Counter()

    def take(self, tier: Tier, role: str, nbytes: int) -> bool:
        """Book bytes before allocating them; false, and nothing booked, past the cap."""
        assert nbytes >= 0, f"{role} takes {nbytes} bytes"
        with self._lock:
            total = self._total[tier] + nbytes
            if tier in self.caps and total > self.caps[tier]:
                self._denied[tier] += 1
                return False
            self._held[tier, role] += nbytes
            self._total[tier] = total
            self._peak[tier] = max(self._peak[tier], total)
            return True

    def give_back(self, tier: Tier, role: str, nbytes: int) -> None:
        """Unbook bytes after freeing them."""
        with self._lock:
            held = self._held[tier, role]
            assert 0 <= nbytes <= held, f"{role} gives back {nbytes} of {held} bytes in {tier}"
            self._held[tier, role] -= nbytes
            self._total[tier] -= nbytes

    def held(self, tier: Tier) -> int:
        """Bytes of a tier that are out now."""
        return self._total[tier]

    def peak(self, tier: Tier) -> int:
        """The most that were ever out at once."""
        return self._peak[tier]

    def denied(self, tier: Tier) -> int:
        """How often the cap said no."""
        return self._denied[tier]

    def by_role(self) -> dict[tuple[Tier, str], int]:
        """Bytes out now, by tier and role; roles that gave all back are not listed."""
        with self._lock:
            return {key: nbytes for key, nbytes in self._held.items() if nbytes}
