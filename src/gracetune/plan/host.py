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

KEPT = 2.2
"""What a policy adds where it keeps what a call gave: in calls that it does not keep. Measured on a
CPU, Flux and Qwen-Image of no size."""
PACKED = (0.1, 0.07)
"""What the ring does with each tensor that autograd saves, there and back: in calls of a policy.
Measured on a CPU, with three models of no size."""
USED = (11.0, 10.0)
"""What it does for a block that it streams: by a clock around it on an H200, half and all of Flux's
blocks streamed. Without events and streams, on a CPU, it is 7 and 5."""
SENT = (1.2, 0.65)
"""What the offload does with each tensor that is sent to host memory and comes back: on a CPU."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host's thread."""

    forward_s: float = 0.0
    """Of an operator that a model's code calls, with its share of that code."""
    backward_s: float = 0.0
    """Of one that autograd calls."""
    own_s: float = 0.0
    """Of one of ours that a model calls, on top of the kernels inside."""
    own_back_s: float = 0.0
    """Of one that autograd calls."""
    policed_s: float = 0.0
    """What a policy adds to each call: it is asked about all of them, in Python."""
    again_s: float = 0.0
    """What it adds to each when forward is done again."""
    updated_s: float = 0.0
    """What the optimizer takes for one trained tensor, however small."""

    def there_s(self, trace: Trace) -> float:
        """To queue a pass forward."""
        calls = trace.forward_calls
        asked = calls.policed + KEPT * calls.kept
        return self._called_by_model(calls) + asked * self.policed_s

    def back_s(self, trace: Trace) -> float:
        """To queue the way back, and what is done again on it."""
        again, back = trace.again_calls, trace.backward_calls
        twice = self._called_by_model(again) + again.policed * self.again_s
        return twice + operators(back) * self.backward_s + back.own * self.own_back_s

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

    def _called_by_model(self, calls: Calls) -> float:
        return operators(calls) * self.forward_s + calls.own * self.own_s


def operators(calls: Calls) -> float:
    """Calls of torch's own operators, each as dear as one with a kernel."""
    return calls.kernels + VIEW * calls.views + calls.entering
