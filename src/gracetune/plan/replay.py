"""Calls that a trace saw, to be made again on a device, where they can be timed.

How fast an elementwise kernel is cannot be told from its bytes: one that mixes types, or reads
across the grain, takes two or three times as long as one that copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten
STATISTICS = {aten.native_layer_norm_backward.default: (3, 4)}
"""Arguments that CUDA wants in fp32, and the CPU in the type of the input."""


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """A call of an operator; equal ones take equally long."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        return str(self.func)


@dataclass(frozen=True, slots=True)
class _Looks:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool

    def made(self, device: torch.device) -> Tensor:
        """Of zeros, which are good indices too."""
        spans = ((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        numel = 0 if 0 in self.shape else 1 + sum(spans)
        plain = torch.zeros(numel, dtype=self.dtype, device=device)
        laid = plain.as_strided(self.shape, self.strides)
        return laid.conj() if self.conjugate else laid


@dataclass(frozen=True, slots=True)
class _Number:
    """With its type: 2 and 2.0 are equal, and may not give the same."""

    kind: type
    value: complex


@dataclass(frozen=True, slots=True)
class _Several:
    """A list among the arguments, which could not be looked up as it is."""

    members: tuple[object, ...]


def recipe_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayCall:
    """What to write down of a call."""
    named = tuple((name, _described(value)) for name, value in sorted(kwargs.items()))
    placed = [_described(value) for value in args]
    for place in STATISTICS.get(func, ()):
        looks = placed[place]
        assert isinstance(looks, _Looks), f"{func} has {looks} there"
        placed[place] = replace(looks, dtype=torch.float32)
    return ReplayCall(func, tuple(placed), named)


def prepared(recipe: ReplayCall, device: torch.device) -> Callable[[], object]:
    """The same call, with tensors of its own, on this device."""
    args = [_remade(value, device) for value in recipe.args]
    kwargs = {name: _remade(value, device) for name, value in recipe.kwargs}
    return lambda: recipe.func(*args, **kwargs)


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _Looks(tuple(value.shape), tuple(value.stride()), value.dtype, value.is_conj())
    if isinstance(value, list | tuple):
        return _Several(tuple(_described(member) for member in value))
    return _Number(type(value), value) if isinstance(value, int | float | complex) else value


def _remade(value: object, device: torch.device) -> object:
    if isinstance(value, _Looks):
        return value.made(device)
    if isinstance(value, _Several):
        return [_remade(member, device) for member in value.members]
    if isinstance(value, _Number):
        return value.value
    return device if isinstance(value, torch.device) else value
