"""Random numbers by position, not by history.

Each micro-batch of each rank has a generator of its own, seeded from where it stands in the run. A
resumed run therefore draws what the uninterrupted one would have, and there is no state to lose.
"""

from __future__ import annotations

import torch
from blake3 import blake3


def seed_of(*parts: int | str) -> int:
    """One 63-bit seed for a position."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big") >> 1


class Draws:
    """The generator of any position of a run, on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def at(self, purpose: str, *position: int | str) -> torch.Generator:
        """A generator that is valid until the next call."""
        return self._generator.manual_seed(seed_of(self._seed, purpose, *position))
