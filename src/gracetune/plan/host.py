"""What queueing a step costs the host: its seconds for each kind of call.

Kernels of a small batch are short, and a step that is not compiled then takes as long as the host
needs to call its operators. `probe` measures that on the machine at hand. What the ring and the
offload do in Python are multiples of what a policy does in Python, since all of it is bound by the
interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gracetune.plan.shapes import Calls, Trace

VIEW = 0.7
"""Of an operator with a kernel, what one without takes: on a CPU, with tensors of no size."""

PACKED = (0.1, 0.07)
"""What the ring does with each tensor that autograd saves, there and back: in calls of a policy.
These and the following were measured on a CPU, with three models of no size."""
USED = (7.0, 5.0)
"""What it does for a block that it streams."""
UPDATED = 3.0
"""Operators that a host could call while it copies, gathers and updates one trained tensor."""
SENT = (1.2, 0.65)
"""What the offload does with each tensor that is sent to host memory and comes back."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host's thread."""

    forward_s: float = 0.0
    """Of an operator that a model's code calls, with its share of that code."""
    backward_s: float = 0.0
    """Of one that autograd calls."""
    own_s: float = 0.0
    """Of one of ours, on top of the kernels inside."""
    policed_s: float = 0.0
    """What a policy adds to each call: it is asked about all of them, in Python."""
    again_s: float = 0.0
    """What it adds to each when forward is done again."""

    def there_s(self, trace: Trace) -> float:
        """To queue a pass forward."""
        calls = trace.forward_calls
        return self._called(calls, self.forward_s) + calls.policed * self.policed_s

    def back_s(self, trace: Trace) -> float:
        """To queue the way back, and what is done again on it."""
        again, back = trace.again_calls, trace.backward_calls
        twice = self._called(again, self.forward_s) + again.policed * self.again_s
        return twice + self._called(back, self.backward_s)

    def hooks_s(
        self, num_saved: float, *, streamed: bool, packed: bool, sent: bool
    ) -> tuple[float, float]:
        """What the ring and the offload do for one block, there and back.

        `packed`: some block of the model is streamed, so that the ring looks at what is saved.
        """
        each = SENT if sent else PACKED if packed else (0.0, 0.0)
        there, back = (
            (num_saved * one + (use if streamed else 0.0)) * self.policed_s
            for one, use in zip(each, USED, strict=True)
        )
        return there, back

    def update_s(self, num_trained: int) -> float:
        """What an update of so many tensors takes, however small they are."""
        return num_trained * UPDATED * self.forward_s

    def _called(self, calls: Calls, each_s: float) -> float:
        return operators(calls) * each_s + calls.own * self.own_s


def operators(calls: Calls) -> float:
    """Calls of torch's own operators, each as dear as one with a kernel."""
    return calls.kernels + VIEW * calls.views
