"""When the ring fetches what: its policy over block numbers, without bytes or clocks.

The same policy as the ring's own: at each use, slots are filled with what comes soonest, never at
the price of what comes sooner, and never from under the block in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def fetches(uses: Sequence[int], slots: int) -> list[list[int]]:
    """For each use, the blocks whose fetch is asked for just before it."""
    upcoming = _upcoming(uses)
    held: set[int] = set()
    asked: list[list[int]] = []
    for place, block in enumerate(uses):
        now: list[int] = []
        ranks = upcoming[place]
        if block not in held:
            _make_room(held, slots, ranks, block, -1)
            held.add(block)
            now.append(block)
        for other, rank in ranks.items():
            if other in held:
                continue
            if not _make_room(held, slots, ranks, block, rank):
                break
            held.add(other)
            now.append(other)
        asked.append(now)
    return asked


def _make_room(
    held: set[int], slots: int, ranks: dict[int, int], in_use: int, sooner_than: int
) -> bool:
    """Let the block go that is needed last, if that is later than what shall come."""
    if len(held) < slots:
        return True
    last = max((b for b in held if b != in_use), key=lambda b: ranks.get(b, len(ranks)))
    if ranks.get(last, len(ranks)) <= sooner_than:
        return False
    held.remove(last)
    return True


def _upcoming(uses: Sequence[int]) -> list[dict[int, int]]:
    """For each use, how soon every block comes after it, soonest first."""
    found: list[dict[int, int]] = []
    order: list[int] = []
    for block in reversed(uses):
        found.append({other: rank for rank, other in enumerate(order)})
        order = [block, *(other for other in order if other != block)]
    return found[::-1]
