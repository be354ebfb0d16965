"""Run a check in a forked child, for changes a process cannot undo, such as its user."""

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


def is_true_in_fork(claim: Callable[[], bool], *, as_nobody: bool = False) -> bool:
    """Return whether `claim()` is true in a forked child.

    With `as_nobody`, a child of root first becomes the user nobody, because file permissions do not
    apply to root.
    """
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about forking with threads; this child takes no lock.
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
def undumpable_process() -> Iterator[None]:
    """Keep other processes, also of the same user, from opening this one's file descriptors."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_DUMPABLE, 1)
