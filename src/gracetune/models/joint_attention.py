"""Attention of text and picture together, as in Flux and Qwen-Image, with fewer passes over memory.

diffusers rotates Qwen's queries and keys as complex numbers, which no compiler makes a kernel of,
and Flux's by pairs that are taken apart and put together again. Here both are the number times a
cosine plus its neighbour times a sine. And a LoRA on queries, keys and values reads what they share
once, for the picture and for the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

from gracetune.adapters.shared_input import share_input
from gracetune.models.wan_attention import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.adapters.shared_input import SharedInput

PICTURE = ("to_q", "to_k", "to_v")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")


class _TwoStreams:
    """The LoRA layers of each stream's queries, keys and values as one, where they can be."""

    picture: SharedInput | None = None
    text: SharedInput | None = None

    def share(self, attn: Any) -> None:
        """Look which of its layers can compute together."""
        self.picture = share_input([attn.get_submodule(name) for name in PICTURE])
        if attn.added_kv_proj_dim is not None:
            self.text = share_input([attn.get_submodule(name) for name in TEXT])


class FluxRotating(_TwoStreams, FluxAttnProcessor):  # type: ignore[misc]
    """As diffusers', where queries are rotated; everything else is left to it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Of a single block the text is a part of what it is given; of a double one beside it."""
        if image_rotary_emb is None or attn.fused_projections:
            plain: Tensor | tuple[Tensor, Tensor] = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return plain
        width = attn.head_dim
        query, key, value = _heads(attn, PICTURE, self.picture, hidden_states, width)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            of_text = _heads(attn, TEXT, self.text, encoder_hidden_states, width)
            query = torch.cat([attn.norm_added_q(of_text[0]), query], dim=1)
            key = torch.cat([attn.norm_added_k(of_text[1]), key], dim=1)
            value = torch.cat([of_text[2], value], dim=1)
        cosines, sines = (table[None, :, None] for table in image_rotary_emb)
        mixed = _attend(
            self,
            (rotate(query, cosines, sines), rotate(key, cosines, sines), value),
            attention_mask,
        )
        if encoder_hidden_states is None:
            return mixed
        length = encoder_hidden_states.shape[1]
        drawn = attn.to_out[1](attn.to_out[0](mixed[:, length:].contiguous()))
        return drawn, attn.to_add_out(mixed[:, :length].contiguous())


class QwenRotating(_TwoStreams, QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """As diffusers', where queries are rotated; everything else is left to it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The picture's part and the text's."""
        if image_rotary_emb is None or encoder_hidden_states is None or attention_mask is not None:
            plain: tuple[Tensor, Tensor] = super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
            return plain
        width = attn.inner_dim // attn.heads
        picture = _heads(attn, PICTURE, self.picture, hidden_states, width)
        text = _heads(attn, TEXT, self.text, encoder_hidden_states, width)
        of_picture, of_text = (_tables(numbers) for numbers in image_rotary_emb)
        query, key = (
            torch.cat([rotate(norm_text(t), *of_text), rotate(norm(p), *of_picture)], dim=1)
            for norm_text, t, norm, p in (
                (attn.norm_added_q, text[0], attn.norm_q, picture[0]),
                (attn.norm_added_k, text[1], attn.norm_k, picture[1]),
            )
        )
        value = torch.cat([text[2], picture[2]], dim=1)
        mask = None
        if encoder_hidden_states_mask is not None:
            drawn = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2])
            mask = torch.cat([encoder_hidden_states_mask, drawn], dim=1)[:, None, None]
        mixed = _attend(self, (query, key, value), mask)
        length = encoder_hidden_states.shape[1]
        out = attn.to_out[0](mixed[:, length:].contiguous())
        for more in attn.to_out[1:]:
            out = more(out)
        return out, attn.to_add_out(mixed[:, :length].contiguous())


def _heads(
    attn: Any, names: tuple[str, ...], shared: SharedInput | None, x: Tensor, width: int
) -> list[Tensor]:
    """Queries, keys and values of one stream."""
    given = [attn.get_submodule(name)(x) for name in names] if shared is None else shared(x)
    return [one.unflatten(-1, (-1, width)) for one in given]


def _tables(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Complex numbers of length one as cosines and sines, each twice, once a neighbour."""
    cosines, sines = torch.view_as_real(numbers)[:, None].repeat_interleave(2, dim=-2).unbind(-1)
    return cosines, sines


def _attend(processor: Any, joint: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> Tensor:
    mixed: Tensor = dispatch_attention_fn(
        *joint,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=False,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    return mixed.flatten(2, 3).to(joint[0].dtype)
