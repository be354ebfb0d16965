"""Ctrl-C and SIGTERM: the first one finishes the step and saves, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While open, `asked` names the signal that came, if any."""

    def __init__(self) -> None:
        self.asked: str | None = None
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

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.asked is not None:
            os._exit(130)
        self.asked = signal.Signals(number).name
        sys.stderr.write(
            f"\n{self.asked}: finishing this step and saving; once more leaves at once, unsaved\n"
        )
        sys.stderr.flush()
