"""Wan's self-attention with fewer passes over memory, for the same numbers.

diffusers writes the even and the odd half of each pair separately; compiled, those are strided
passes over memory that take longer than the norm beside them. Here a pair is the number times a
cosine plus its neighbour times a sine: the same products and sums, one contiguous pass. And a LoRA
on queries, keys and values reads what they share once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from gracetune.adapters.shared_input import share_input

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.adapters.shared_input import SharedInput


class RotatingProcessor(WanAttnProcessor):  # type: ignore[misc]
    """As diffusers', where a query is rotated; everything else is left to it."""

    shared: SharedInput | None = None
    """The LoRA layers of queries, keys and values as one, where they can be."""

    def share(self, attn: Any) -> None:
        """Look which of its layers can compute together."""
        self.shared = share_input([attn.to_q, attn.to_k, attn.to_v])

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of tokens to each other."""
        if rotary_emb is None or encoder_hidden_states is not None or attn.fused_projections:
            plain: Tensor = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
            return plain
        if self.shared is None:
            query, key, value = (give(hidden_states) for give in (attn.to_q, attn.to_k, attn.to_v))
        else:
            query, key, value = self.shared(hidden_states)
        heads = (attn.heads, -1)
        mixed: Tensor = dispatch_attention_fn(
            rotate(attn.norm_q(query).unflatten(2, heads), *rotary_emb),
            rotate(attn.norm_k(key).unflatten(2, heads), *rotary_emb),
            value.unflatten(2, heads),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        projected: Tensor = attn.to_out[0](mixed.flatten(2, 3).type_as(query))
        dropped: Tensor = attn.to_out[1](projected)
        return dropped


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Pairs of neighbours turned by their angles, which tables hold twice, once a neighbour."""
    neighbours = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    # Made on the device: a list of numbers would be copied there, and the host would wait for it.
    signs = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32) % 2 * 2 - 1
    return (x * cosines + neighbours * (sines * signs)).type_as(x)
