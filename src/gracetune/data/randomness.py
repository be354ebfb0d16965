"""Chance that is a pure function of words: the same in every process, thread and release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    from numpy.typing import NDArray


def permutation(length: int, what: str) -> NDArray[np.int64]:
    """A shuffle that no numpy release changes: only raw bits and a stable sort are promised."""
    bits = np.random.PCG64(_bits(what, 16)).random_raw(length)
    return np.argsort(bits, kind="stable")


def uniform(what: str) -> float:
    """From 0 up to, and never, 1."""
    return (_bits(what, 8) >> 11) / 2**53


def _bits(what: str, nbytes: int) -> int:
    return int.from_bytes(blake3(what.encode()).digest(length=nbytes), "big")
