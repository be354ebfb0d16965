"""Attention of the models we know, each by a processor that reads memory less often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from gracetune.models.joint_attention import FluxRotating, QwenRotating
from gracetune.models.wan_attention import RotatingProcessor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    from torch import nn

OURS: Mapping[type, type[RotatingProcessor | FluxRotating | QwenRotating]] = {
    WanAttnProcessor: RotatingProcessor,
    FluxAttnProcessor: FluxRotating,
    QwenDoubleStreamAttnProcessor2_0: QwenRotating,
}


def attend_in_fewer_passes(transformer: nn.Module, undo: ExitStack | None = None) -> int:
    """Give each attention that we have a processor for that one; gives how many.

    Call it after LoRA layers were fused, if they are. What would give theirs back is put on `undo`.
    """
    count = 0
    for module in transformer.modules():
        if not isinstance(module, WanAttention | FluxAttention | Attention):
            continue
        theirs = module.processor
        if type(theirs) not in OURS:
            continue
        ours = OURS[type(theirs)]()
        ours._attention_backend = theirs._attention_backend
        ours._parallel_config = theirs._parallel_config
        ours.share(module)
        module.set_processor(ours)
        if undo is not None:
            undo.callback(module.set_processor, theirs)
        count += 1
    return count
