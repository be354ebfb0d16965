"""Activation checkpointing of eager blocks: keep a block's inputs, and run it again in backward.

    forward    the block saves tensors; autograd keeps an empty `_Placeholder` for each of them
    backward   asks for the first tensor: the block runs again and fills the placeholders in the
               order in which they were made, and ends with the last one

`torch.utils.checkpoint` does the same with `use_reentrant=False`, but runs several times as much
Python code for each saved tensor, and a block saves about sixty. Eager steps of small batches are
bound by the CPU, so it counts. Compiled blocks use torch's function, which the compiler knows
(`offload/checkpointing.py`).
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gracetune.errors import GracetuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CPU = torch.device("cpu")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The context managers in which a function and its recomputation run."""


def checkpoint_block(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    contexts: Callable[[], Contexts] = lambda: (nullcontext(), nullcontext()),
) -> Any:
    """Call a function with activation checkpointing, keeping only its inputs.

    Tensors among `args` and `kwargs` are kept where saved-tensor hooks may offload them.
    """
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    forward_context, recompute_context = contexts()
    recomputation = _Recomputation(call, args, kwargs, recompute_context)
    with saved_tensors_hooks(recomputation.pack, recomputation.unpack), forward_context:
        return call(*args, **kwargs)


class _Placeholder:
    """The object that autograd keeps instead of a tensor that backward recomputes."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _AllFilledError(Exception):
    """Ends a recomputation that has filled all placeholders."""


class _Recomputation:
    """The inputs of a call, the state in which it was made, and the tensors that it has saved."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        context: AbstractContextManager[Any],
    ) -> None:
        self._call = call
        self._names = tuple(kwargs)
        self._context = context
        inputs = [*args, *kwargs.values()]
        self._indices = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        tensors = [inputs[index] for index in self._indices]
        self._kept = _KeepTensors.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        self._others = [None if isinstance(value, Tensor) else value for value in inputs]
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), _CPU)
        self._autocast = _autocast_settings(self._device.type)
        self._random_state = _random_state(self._device)
        self._placeholders: list[weakref.ref[_Placeholder]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        """Shape and data type of each saved tensor, which must be the same when recomputed."""
        self._num_filled = 0
        self._backward: int | None = None
        """Number of the backward pass for which the call was repeated last."""

    def pack(self, tensor: Tensor) -> _Placeholder:
        """Return the placeholder of a tensor that the call saves; the tensor itself is dropped."""
        placeholder = _Placeholder()
        self._placeholders.append(weakref.ref(placeholder))
        self._kinds.append((tensor.shape, tensor.dtype))
        return placeholder

    def unpack(self, placeholder: _Placeholder) -> Tensor:
        """Return the tensor of a placeholder, after repeating the call if needed."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._repeat()
            self._backward = backward
        tensor, placeholder.tensor = placeholder.tensor, None
        assert tensor is not None, "backward has read a saved tensor twice"
        return tensor

    def _repeat(self) -> None:
        """Make the call again, and fill the placeholders with the tensors that it saves."""
        self._num_filled = 0
        inputs = list(self._others)
        for index, tensor in zip(self._indices, self._kept.grad_fn.saved_tensors, strict=True):
            inputs[index] = tensor
        num_args = len(inputs) - len(self._names)
        named = dict(zip(self._names, inputs[num_args:], strict=True))
        devices = [] if self._device.type == "cpu" else [self._device]
        with (
            torch.random.fork_rng(devices, device_type=self._device.type),
            torch.autocast(self._device.type, **self._autocast),
            torch.enable_grad(),
            saved_tensors_hooks(self._fill, _identity),
            self._context,
            suppress(_AllFilledError),
        ):
            _set_random_state(self._device, self._random_state)
            self._call(*inputs[:num_args], **named)
        if self._num_filled < len(self._placeholders):
            raise _mismatch(f"{len(self._placeholders)} tensors", f"{self._num_filled}")

    def _fill(self, tensor: Tensor) -> Tensor:
        """Fill the next placeholder, unless autograd no longer needs it."""
        number = self._num_filled
        self._num_filled = number + 1
        kind = (tensor.shape, tensor.dtype)
        if kind != self._kinds[number]:
            raise _mismatch(_describe(*self._kinds[number]), _describe(*kind))
        # Detached, so that neither the placeholder nor the recomputed graph keeps that graph alive.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        placeholder = self._placeholders[number]()
        if placeholder is not None:
            placeholder.tensor = tensor
        if self._num_filled == len(self._placeholders):
            raise _AllFilledError
        return tensor


class _KeepTensors(torch.autograd.Function):
    """Saves tensors like any autograd function, so that saved-tensor hooks see them."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> Tensor:
        """Return an empty tensor, whose `grad_fn` has the saved tensors."""
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _autocast_settings(device_type: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of torch's generators on the CPU and on the device."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor of shape {tuple(shape)} in {str(dtype).removeprefix('torch.')}"


def _mismatch(before: str, now: str) -> GracetuneError:
    return GracetuneError(
        f"a recomputed block saved {before} in forward, but {now} when backward ran it again, so "
        "gradients would be wrong. Its forward depends on more than its inputs, its weights and "
        "torch's random numbers. Change the model, or give the plan memory to keep all activations."
    )
