"""Ctrl-C and SIGTERM: between steps they stop a run well, before its first step at once.

Inside `between_steps` the first signal is only noted: the loop finishes and saves. A second one
leaves at once. Outside there is nothing to save, and either is a KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While open, `asked` names the signal that came between steps, if any."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._waits = False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Signals wait here until the loop looks."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.asked is not None:
            os._exit(130)
        if not self._waits:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        sys.stderr.write(
            f"\n{self.asked}: finishing the step and saving; once more leaves at once, unsaved\n"
        )
        sys.stderr.flush()
