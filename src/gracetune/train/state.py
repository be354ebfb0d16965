"""Where a run stands, and everything it needs to go on from there bit for bit.

Tensors are named; a parameter's optimizer state is keyed by the parameter's own name, so that an
order that changes between versions cannot swap two of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gracetune.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

SEPARATOR = "|"
GROUP_PREFIX = "group "
NUMBER_TYPES: dict[str, type[bool] | type[int] | type[float]] = {
    "bool": bool,
    "int": int,
    "float": float,
}


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """The counters of a run."""

    step: int = 0
    """Optimizer steps done."""
    micro_batches: int = 0
    """Micro-batches done by each rank: the ramp's position."""
    consumed: int = 0
    """Batches that all ranks together have taken from the data stream."""
    high_steps: int = 0
    low_steps: int = 0
    """Of the optimizer steps, how many trained which expert; both 0 where there is none."""

    def after(self, micro_batches: int, consumed: int, expert: str | None) -> TrainProgress:
        """One optimizer step later."""
        return TrainProgress(
            self.step + 1,
            self.micro_batches + micro_batches,
            consumed,
            self.high_steps + (expert == "high"),
            self.low_steps + (expert == "low"),
        )


def detached_weights(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The trained weights as they are now."""
    return {name: p.detach() for name, p in parameters.items()}


def restore_weights(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Put saved values into tensors of the same names and shapes."""
    if parameters.keys() != saved.keys():
        odd = sorted(parameters.keys() ^ saved.keys())
        raise CheckpointError(
            f"the checkpoint does not fit the model: {len(odd)} names differ, first {odd[0]}."
        )
    for name, parameter in parameters.items():
        if parameter.shape != saved[name].shape:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} is {tuple(parameter.shape)}, "
                f"saved as {tuple(saved[name].shape)}."
            )
        if parameter.itemsize < saved[name].itemsize:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} was saved as {saved[name].dtype} "
                f"and would be rounded to {parameter.dtype}. Set model.dtype to what it was saved "
                "as."
            )
        parameter.data.copy_(saved[name])


def flatten_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state, each tensor as `parameter|key`, and the numbers of its groups.

    Numbers that are no tensors say their type behind the key, as `parameter|step:int`.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}{SEPARATOR}{key}{_type_of(value)}"] = torch.as_tensor(value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if type(value) in NUMBER_TYPES.values():  # a schedule-free average keeps its weight here
                exact = torch.tensor(value, dtype=torch.float64)
                found[f"{GROUP_PREFIX}{index}{SEPARATOR}{key}{_type_of(value)}"] = exact
    return found


def restore_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    saved: Mapping[str, Tensor],
    load: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """The reverse; torch moves each tensor to where its parameter is, unless `load` does it."""
    places = {
        id(parameter): index
        for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    whole = optimizer.state_dict()
    groups = [dict(group) for group in whole["param_groups"]]
    state: dict[int, dict[str, object]] = {}
    for full_name, tensor in saved.items():
        name, _, key = full_name.rpartition(SEPARATOR)
        key, _, kind = key.partition(":")
        value = NUMBER_TYPES[kind](tensor.item()) if kind else tensor
        if name.startswith(GROUP_PREFIX):
            groups[int(name.removeprefix(GROUP_PREFIX))][key] = value
        elif name in parameters:
            state.setdefault(places[id(parameters[name])], {})[key] = value
        else:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {name}, not trained now."
            )
    (load or optimizer.load_state_dict)({"state": state, "param_groups": groups})


def optimizer_state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor that an optimizer keeps."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _type_of(value: object) -> str:
    return "" if isinstance(value, torch.Tensor) else f":{type(value).__name__}"


def seed_rng(seed: int) -> None:
    """Begin every process-wide generator from the run's seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Tensor]:
    """The states of the process-wide generators, which dropout and libraries draw from."""
    _, words, gauss_next = random.getstate()
    waiting = [] if gauss_next is None else [gauss_next]
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert isinstance(keys, np.ndarray), kind
    return {
        **torch_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(waiting, dtype=torch.float64),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }


def torch_rng_state() -> dict[str, Tensor]:
    """Of torch's own alone, which is all that a step draws from; the device is not waited for."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(saved: Mapping[str, Tensor]) -> None:
    """Put them back; a GPU's state is skipped where there is no GPU."""
    restore_torch_rng(saved)
    gauss = saved["python_gauss"].tolist()
    random.setstate((3, tuple(saved["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss, cached = saved["numpy_rest"].tolist()
    keys = saved["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))


def restore_torch_rng(saved: Mapping[str, Tensor]) -> None:
    """Put torch's own back."""
    torch.set_rng_state(saved["torch"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
