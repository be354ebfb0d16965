"""Train bf16 weights with fp32 master weights that are part of the optimizer's state.

Updates are usually far smaller than the spacing of bf16 numbers, so most would be rounded away.
Here each bf16 parameter has a master copy in fp32. Any optimizer updates the masters as if they
were the parameters, and the parameters are the masters rounded to bf16.

The masters are stored where the rest of the optimizer's state is. If that is host memory, a weight
and its gradient take 2 bytes each on the device, instead of 4 bytes each in fp32.
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
"""Key of the master weight in a parameter's state. Part of the checkpoint format."""
GROUP_KEYS_NOT_SHARED = ("params", "param_names")
"""Keys of a parameter group that are not settings, and not copied to the wrapped optimizer."""


class MasterWeights(Optimizer):
    """Wrap an optimizer so that it updates fp32 master weights of bf16 parameters.

    Between steps the wrapper holds all state, with the real parameters as keys. For a step, the
    inner (wrapped) optimizer gets an fp32 stand-in for each parameter, with the parameter's state.
    """

    def __init__(self, inner: Optimizer, parameter_of: Mapping[Parameter, Parameter]) -> None:
        """Wrap `inner`, which was built with placeholders (see `fp32_placeholders`).

        `parameter_of` maps each placeholder to the real parameter.
        """
        self._inner = inner
        groups = [
            {**group, "params": [parameter_of[placeholder] for placeholder in group["params"]]}
            for group in inner.param_groups
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lent: list[_LentParameter] = []
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner_group.update(
                {key: value for key, value in group.items() if key not in GROUP_KEYS_NOT_SHARED}
            )
            lent_from_group = [self._lend(p) for p in group["params"] if p.grad is not None]
            inner_group["params"] = [one.stand_in for one in lent_from_group]
            lent += lent_from_group
        self._inner.step()
        for one in lent:
            self._take_back(one)
        for inner_group in self._inner.param_groups:
            inner_group["params"] = []  # between steps only the state may refer to the masters
        return loss

    def _lend(self, p: Parameter) -> _LentParameter:
        """Give the inner optimizer the state of a parameter, for the duration of a step.

        A bf16 parameter is replaced by an fp32 stand-in.
        """
        assert p.grad is not None, "a parameter without a gradient"
        state = dict(self.state[p])
        master = state.pop(MASTER, None)
        stand_in = p
        if p.dtype != torch.float32:
            master = p.detach().float() if master is None else master
            stand_in = Parameter(master)
            stand_in.grad = p.grad.float()
        if state:  # otherwise the inner optimizer creates it
            self._inner.state[stand_in] = state
        return _LentParameter(p, stand_in, master)

    def _take_back(self, lent: _LentParameter) -> None:
        state = dict(self._inner.state.pop(lent.stand_in, {}))
        if lent.master is not None:
            state[MASTER] = lent.master
            lent.parameter.copy_(lent.master)
        self.state[lent.parameter] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and keep the dtype of each tensor.

        Torch would convert all state, including the master weights, to the parameter's bf16.
        """
        steps_only = {
            index: {key: value for key, value in state.items() if key == "step"}
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": steps_only})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step":
                    self.state[p][key] = value.to(p.device)


class _LentParameter(NamedTuple):
    parameter: Parameter
    stand_in: Parameter
    """The parameter that the inner optimizer updates."""
    master: Tensor | None
    """The fp32 weight; None if the parameter is fp32 and is its own stand-in."""


def fp32_placeholders(parameters: Iterable[Parameter]) -> dict[Parameter, Parameter]:
    """Return a dict from an fp32 placeholder to the parameter that it stands for.

    The optimizer that `MasterWeights` wraps is built with the placeholders. They have the
    parameters' shapes but take no memory, because they are expanded from one element.
    """
    return {
        Parameter(torch.zeros((), dtype=torch.float32, device=p.device).expand(p.shape)): p
        for p in parameters
    }
