"""Turn weights, optimizer state and RNG states into named tensors for a checkpoint, and back.

A resumed run gives the same weights as an uninterrupted one, bit for bit. Optimizer state is stored
under the name of its parameter, not under an index as in torch's `state_dict`, so that a different
parameter order in a later version cannot swap the state of two parameters.

In a sharded run, a rank has only a part of each parameter, and of the optimizer state with the
parameter's shape. A table of shards, by parameter name, says which part to restore.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gracetune.distributed.shard_files import saved_rows, saved_shape
from gracetune.errors import CheckpointError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.distributed.sharding import TensorShard

SEPARATOR = "|"
"""Separates, in the tensor names of a checkpoint, a parameter's name from the key of its optimizer
state: `parameter|exp_avg`."""
GROUP_PREFIX = "group "
"""Prefix, in the tensor names of a checkpoint, of numbers that belong to one of the optimizer's
param_groups; the index of the group follows: `group 0|key`."""
NUMBER_TYPES: dict[str, type[bool] | type[int] | type[float]] = {
    "bool": bool,
    "int": int,
    "float": float,
}
"""Python types of optimizer state that is not a tensor, by name."""


def detached_weights(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Return the current weights without autograd history; they share the parameters' memory."""
    return {name: p.detach() for name, p in parameters.items()}


def restore_weights(
    parameters: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    shards: Mapping[str, TensorShard] | None = None,
) -> None:
    """Copy saved values into the parameters of the same names.

    `shards` says which parts the parameters are; None if they are whole.
    """
    if parameters.keys() != saved.keys():
        differing = sorted(parameters.keys() ^ saved.keys())
        raise CheckpointError(
            f"the checkpoint does not fit the model: {len(differing)} parameter names differ, "
            f"first {differing[0]}. Resume with the model and adapter settings it was saved with."
        )
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape) if shards is None else shards[name].shape
        if shape != saved_shape(saved, name):
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} has shape {shape}, but was saved "
                f"with {saved_shape(saved, name)}. Resume with the model and adapter settings it "
                "was saved with."
            )
        value = saved_rows(saved, name, None if shards is None else shards[name])
        if parameter.itemsize < value.itemsize:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name} was saved as {value.dtype} "
                f"and would be rounded to {parameter.dtype}. Set model.dtype to the saved dtype."
            )
        parameter.data.copy_(value)


def flatten_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Parameter]
) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors named `parameter|key`.

    Numbers become tensors, with their type after the key: `parameter|step:int`. Numbers of a
    param_group, such as the weight of a schedule-free average, are named `group 0|key:float`.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}{SEPARATOR}{key}{_type_of(value)}"] = torch.as_tensor(value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if type(value) in NUMBER_TYPES.values():
                exact = torch.tensor(value, dtype=torch.float64)
                found[f"{GROUP_PREFIX}{index}{SEPARATOR}{key}{_type_of(value)}"] = exact
    return found


def optimizer_shards(
    flat: Mapping[str, Tensor], parameters: Mapping[str, Tensor], shards: Mapping[str, TensorShard]
) -> dict[str, TensorShard]:
    """Return which parts the tensors of `flatten_optimizer_state` are, in a sharded run.

    State with the shape of its parameter is divided like it. Numbers are the same on all ranks.
    """
    found = {}
    for full_name, tensor in flat.items():
        name = full_name.rpartition(SEPARATOR)[0]
        if name in shards and tensor.ndim and tensor.shape == parameters[name].shape:
            found[full_name] = shards[name]
        elif tensor.numel() != 1:
            raise RunFailedError(
                f"the optimizer's state {full_name} has shape {tuple(tensor.shape)}, which is not "
                "that of its parameter, so ranks with parts of the parameter cannot save it. Set "
                "optimizer.name: adamw, or distributed.strategy: replicate."
            )
    return found


def restore_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    saved: Mapping[str, Tensor],
    load: Callable[[dict[str, Any]], None] | None = None,
    shards: Mapping[str, TensorShard] | None = None,
) -> None:
    """Load optimizer state from the tensors that `flatten_optimizer_state` returned.

    `load` receives a torch `state_dict` and decides which device each tensor goes to; without it,
    `optimizer.load_state_dict` moves each one to the device of its parameter. `shards`
    says which parts the parameters are; None if they are whole.
    """
    indices = {
        id(parameter): index
        for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    groups = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    state: dict[int, dict[str, object]] = {}
    for full_name in saved:
        name, _, key = full_name.rpartition(SEPARATOR)
        key, _, kind = key.partition(":")
        own = None if shards is None else shards.get(name)
        is_divided = own is not None and saved_shape(saved, full_name) == own.shape
        tensor = saved_rows(saved, full_name, own if is_divided else None)
        value = NUMBER_TYPES[kind](tensor.item()) if kind else tensor
        if name.startswith(GROUP_PREFIX):
            groups[int(name.removeprefix(GROUP_PREFIX))][key] = value
        elif name in parameters:
            state.setdefault(indices[id(parameters[name])], {})[key] = value
        else:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {name}, which this run does not train. "
                "Resume with the adapter settings it was saved with."
            )
    (load or optimizer.load_state_dict)({"state": state, "param_groups": groups})


def _type_of(value: object) -> str:
    return "" if isinstance(value, torch.Tensor) else f":{type(value).__name__}"


def seed_rng(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Tensor]:
    """Return the states of the global generators, which dropout and libraries draw from."""
    _, words, next_gauss = random.getstate()
    gauss = [] if next_gauss is None else [next_gauss]
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert isinstance(keys, np.ndarray), kind
    return {
        **torch_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(gauss, dtype=torch.float64),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }


def torch_rng_state() -> dict[str, Tensor]:
    """Return the states of torch's global generators, the only ones that a training step uses.

    Reading them does not wait for the device.
    """
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(saved: Mapping[str, Tensor]) -> None:
    """Restore the generators from `rng_state`; without a GPU, the state of a GPU is ignored."""
    restore_torch_rng(saved)
    gauss = saved["python_gauss"].tolist()
    random.setstate((3, tuple(saved["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss, cached = saved["numpy_rest"].tolist()
    keys = saved["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))


def restore_torch_rng(saved: Mapping[str, Tensor]) -> None:
    """Restore torch's generators from `torch_rng_state`."""
    torch.set_rng_state(saved["torch"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
