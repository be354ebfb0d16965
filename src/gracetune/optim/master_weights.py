"""Weights in bf16, updated in fp32: a wide copy of each is part of the optimizer's state.

Updates are far smaller than the steps of bf16, so that most would change nothing. Here a parameter
has a master in fp32, which any optimizer updates as if it were the parameter; the parameter is what
is nearest to it. With its moments the master lives wherever state lives: in host memory, a weight
takes 2 bytes of the device and its gradient 2 more, where fp32 takes 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MASTER = "master"
OWN = ("params", "param_names")
"""Of a group: what is not handed on as a setting."""


class _Lent(NamedTuple):
    parameter: Parameter
    stand_in: Parameter
    master: Tensor | None
    """None: the parameter stands for itself."""


class MasterWeights(Optimizer):
    """Another optimizer's rule on masters; what it keeps is state of the parameters here."""

    def __init__(self, rule: Optimizer, stood_for: Mapping[Parameter, Parameter]) -> None:
        """`rule` was made for stand-ins, each for a parameter of the same shape."""
        self._rule = rule
        groups = [
            {**group, "params": [stood_for[stand_in] for stand_in in group["params"]]}
            for group in rule.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lent: list[_Lent] = []
        for group, theirs in zip(self.param_groups, self._rule.param_groups, strict=True):
            theirs.update({key: value for key, value in group.items() if key not in OWN})
            found = [self._lend(p) for p in group["params"] if p.grad is not None]
            theirs["params"] = [one.stand_in for one in found]
            lent += found
        self._rule.step()
        for one in lent:
            self._take_back(one)
        for theirs in self._rule.param_groups:
            theirs["params"] = []  # nobody but the state has masters between steps
        return loss

    def _lend(self, p: Parameter) -> _Lent:
        """What the rule updates for a parameter: its master, or itself where it is wide enough."""
        assert p.grad is not None, "a parameter without a gradient"
        state = dict(self.state[p])
        master = state.pop(MASTER, None)
        stand_in = p
        if p.dtype != torch.float32:
            master = p.detach().float() if master is None else master
            stand_in = Parameter(master)
            stand_in.grad = p.grad.float()
        if state:  # what has none is given some by the rule
            self._rule.state[stand_in] = state
        return _Lent(p, stand_in, master)

    def _take_back(self, one: _Lent) -> None:
        state = dict(self._rule.state.pop(one.stand_in, {}))
        if one.master is not None:
            state[MASTER] = one.master
            one.parameter.copy_(one.master)
        self.state[one.parameter] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, but each tensor in the type it was saved in: torch would make all of them
        the parameter's."""
        counters = {
            index: {key: value for key, value in state.items() if key == "step"}
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": counters})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, ours, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step":
                    self.state[p][key] = value.to(p.device)


def fp32_placeholders(parameters: Iterable[Parameter]) -> dict[Parameter, Parameter]:
    """For each parameter one of its shape in fp32, that takes no memory: a rule is made for it."""
    return {
        Parameter(torch.zeros((), dtype=torch.float32, device=p.device).expand(p.shape)): p
        for p in parameters
    }
