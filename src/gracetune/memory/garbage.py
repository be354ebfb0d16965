"""Python's own garbage: what a run was made of is looked through once, and not again and again.

A full collection looks at every object there is, half a million with torch and what a trainer loads
beside it. It comes whenever steps have made a quarter as many that lived a little, which eager ones
do in some dozens, and takes longer than the step in whose middle it is.
"""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Collections look only at what is made from here on, until `take_back`."""
    collect()
    gc.freeze()


def take_back() -> None:
    """They look at everything again."""
    gc.unfreeze()


def collect() -> None:
    """One full collection, of what was set aside too: it may hold tensors by now."""
    was_set_aside = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_set_aside:
        gc.freeze()
