"""A function in a fork of the test's own process: for what cannot be undone, such as who we are."""

from __future__ import annotations

import ctypes
import os
import traceback
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NOBODY = 65534
_PR_SET_DUMPABLE = 4


def holds_in_a_fork(claim: Callable[[], bool], *, as_nobody: bool = False) -> bool:
    """Whether the claim is true there; as nobody where we are root, since root may do anything."""
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads; this one ends without touching any lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 2
        try:
            if as_nobody and os.geteuid() == 0:
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            code = 0 if claim() else 1
        finally:
            if code == 2:
                traceback.print_exc()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


@contextmanager
def hidden_from_others() -> Iterator[None]:
    """Nobody can open this process's descriptors meanwhile, not even others of the same user."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_DUMPABLE, 1)
