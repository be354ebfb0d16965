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
"""Key of the fp32 master weight in a parameter's optimizer state. Part of the checkpoint format."""
GROUP_KEYS_NOT_SHARED = ("params", "param_names")
"""Keys of a parameter group that are not settings. All other keys are copied to the optimizer that
`MasterWeights` wraps."""


class MasterWeights(Optimizer):
    """Wraps an optimizer so that it updates fp32 master weights of bf16 parameters.

    Between steps this object holds all state, with the real parameters as keys. For a step, the
    wrapped optimizer gets the fp32 master weight in place of each parameter, and its state.
    """

    def __init__(self, inner: Optimizer, parameter_of: Mapping[Parameter, Parameter]) -> None:
        """Wrap the optimizer `inner`, which was built with fp32 placeholders for the parameters.

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
        prepared: list[_StepParameter] = []
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner_group.update(
                {key: value for key, value in group.items() if key not in GROUP_KEYS_NOT_SHARED}
            )
            prepared_in_group = [self._prepare(p) for p in group["params"] if p.grad is not None]
            inner_group["params"] = [parameter.step_parameter for parameter in prepared_in_group]
            prepared += prepared_in_group
        self._inner.step()
        for parameter in prepared:
            self._finish(parameter)
        for inner_group in self._inner.param_groups:
            inner_group["params"] = []  # between steps only the state may refer to the masters
        return loss

    def _prepare(self, p: Parameter) -> _StepParameter:
        """Prepare a parameter for a step of the wrapped optimizer, and move its state there.

        For a bf16 parameter, the optimizer gets its fp32 master weight instead.
        """
        assert p.grad is not None, "a parameter without a gradient"
        state = dict(self.state[p])
        master = state.pop(MASTER, None)
        step_parameter = p
        if p.dtype != torch.float32:
            master = p.detach().float() if master is None else master
            step_parameter = Parameter(master)
            step_parameter.grad = p.grad.float()
        if state:  # otherwise the inner optimizer creates it
            self._inner.state[step_parameter] = state
        return _StepParameter(p, step_parameter, master)

    def _finish(self, prepared: _StepParameter) -> None:
        """Move the state back after a step, and round the master weight to the parameter."""
        state = dict(self._inner.state.pop(prepared.step_parameter, {}))
        if prepared.master is not None:
            state[MASTER] = prepared.master
            prepared.parameter.copy_(prepared.master)
        self.state[prepared.parameter] = state

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


class _StepParameter(NamedTuple):
    parameter: Parameter
    step_parameter: Parameter
    """The parameter that the wrapped optimizer updates in place of `parameter`: its fp32 master
    weight, or `parameter` itself if that is fp32."""
    master: Tensor | None
    """The fp32 master weight of a bf16 parameter; None if the parameter is fp32."""


def fp32_placeholders(parameters: Iterable[Parameter]) -> dict[Parameter, Parameter]:
    """Return a dict from a new fp32 placeholder to each parameter.

    The optimizer that `MasterWeights` wraps is built with the placeholders. They have the
    parameters' shapes but take no memory, because they are expanded from one element.
    """
    return {
        Parameter(torch.zeros((), dtype=torch.float32, device=p.device).expand(p.shape)): p
        for p in parameters
    }
