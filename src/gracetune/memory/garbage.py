"""Python's own garbage: what a run was made of is looked through once, and not again and again.

A full collection looks at every object there is, half a million with torch and what a trainer loads
beside it. It comes whenever steps have made a quarter as many that lived a little, which eager ones
do in some dozens, and takes as long as a short step, in the middle of one.
"""

from __future__ import annotations

import gc


class Aside:
    """What this process has set aside. Whoever did so before us keeps it as it is."""

    def __init__(self) -> None:
        self._is_ours = False

    def set(self) -> None:
        """Collections look only at what is made from here on, until `take_back`."""
        if gc.get_freeze_count() and not self._is_ours:
            return
        self.collect()
        gc.freeze()
        self._is_ours = True

    def take_back(self) -> None:
        """They look at everything again."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False

    def collect(self) -> None:
        """One full collection, of what we have set aside too: it may hold tensors by now."""
        if self._is_ours:
            gc.unfreeze()
        gc.collect()
        if self._is_ours:
            gc.freeze()


ASIDE = Aside()
"""The one of this process, as its collector is one."""
