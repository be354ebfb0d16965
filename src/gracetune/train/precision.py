"""In what a transformer computes: as its weights are, or as torch's autocast has it.

Autocast is for weights in fp32. Where a transformer is in bf16 already, all it does is make norms,
and what follows them, fp32, which takes time and memory that no plan has counted. Such a one runs
as diffusers' own pipelines run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor

from gracetune.adapters.fused import computes_in

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

FLOWING = ("hidden_states", "encoder_hidden_states", "pooled_projections", "global_hidden_states")
"""What a transformer multiplies of its arguments. Levels and places are for it to round."""


def prepared(accelerator: Accelerator, transformer: nn.Module, *, is_planned: bool) -> nn.Module:
    """The transformer for its ranks, in the run's precision."""
    usual = accelerator.autocast_handler
    in_bf16 = accelerator.mixed_precision == "bf16" and computes_in(transformer, torch.bfloat16)
    if is_planned and in_bf16:
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
        transformer.register_forward_pre_hook(_rounded, with_kwargs=True)
    wrapped: nn.Module = accelerator.prepare_model(transformer, device_placement=not is_planned)
    accelerator.autocast_handler = usual
    return wrapped


def _rounded(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """A sampler goes on in fp32 from what it was given in it."""
    return tuple(map(_in_bf16, args[:1])) + args[1:], {
        name: _in_bf16(value) if name in FLOWING else value for name, value in named.items()
    }


def _in_bf16(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_number else value
