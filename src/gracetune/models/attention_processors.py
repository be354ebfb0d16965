"""Attention of the models we know, each by a processor that reads memory less often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch.autograd import Function

from gracetune.adapters.compute.fused_lora import fuse_shared_input

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    from torch import Tensor, nn

    from gracetune.adapters.compute.fused_lora import SharedInputLora


IMAGE_PROJECTIONS = ("to_q", "to_k", "to_v")
TEXT_PROJECTIONS = ("add_q_proj", "add_k_proj", "add_v_proj")


class _TwoStreams:
    """The LoRA layers of each stream's queries, keys and values as one, where they can be."""

    shared_image: SharedInputLora | None = None
    shared_text: SharedInputLora | None = None

    def share(self, attn: Any) -> None:
        """Look which of its layers can compute together."""
        self.shared_image = fuse_shared_input(
            [attn.get_submodule(name) for name in IMAGE_PROJECTIONS]
        )
        if attn.added_kv_proj_dim is not None:
            self.shared_text = fuse_shared_input(
                [attn.get_submodule(name) for name in TEXT_PROJECTIONS]
            )


class FusedFluxAttnProcessor(_TwoStreams, FluxAttnProcessor):  # type: ignore[misc]
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
        query, key, value = _heads(attn, IMAGE_PROJECTIONS, self.shared_image, hidden_states, width)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            of_text = _heads(attn, TEXT_PROJECTIONS, self.shared_text, encoder_hidden_states, width)
            query = torch.cat([attn.norm_added_q(of_text[0]), query], dim=1)
            key = torch.cat([attn.norm_added_k(of_text[1]), key], dim=1)
            value = torch.cat([of_text[2], value], dim=1)
        cosines, sines = (table[None, :, None] for table in image_rotary_emb)
        mixed = _attend(
            self,
            (apply_rotary_emb(query, cosines, sines), apply_rotary_emb(key, cosines, sines), value),
            attention_mask,
        )
        if encoder_hidden_states is None:
            return mixed
        length = encoder_hidden_states.shape[1]
        drawn = attn.to_out[1](attn.to_out[0](mixed[:, length:].contiguous()))
        return drawn, attn.to_add_out(mixed[:, :length].contiguous())


class FusedQwenAttnProcessor(_TwoStreams, QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
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
        picture = _heads(attn, IMAGE_PROJECTIONS, self.shared_image, hidden_states, width)
        text = _heads(attn, TEXT_PROJECTIONS, self.shared_text, encoder_hidden_states, width)
        of_picture, of_text = (_tables(numbers) for numbers in image_rotary_emb)
        query, key = (
            torch.cat(
                [apply_rotary_emb(norm_text(t), *of_text), apply_rotary_emb(norm(p), *of_picture)],
                dim=1,
            )
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
    attn: Any, names: tuple[str, ...], shared: SharedInputLora | None, x: Tensor, width: int
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


# ------------------------------------------------------------------------------------------
# Wan's self-attention with fewer passes over memory, for the same numbers.
#
# diffusers writes the even and the odd half of each pair separately; compiled, those are strided
# passes over memory that take longer than the norm beside them. Here a pair is the number times a
# cosine plus its neighbour times a sine: the same products and sums, one contiguous pass. And a
# LoRA
# on queries, keys and values reads what they share once.


class FusedWanAttnProcessor(WanAttnProcessor):  # type: ignore[misc]
    """As diffusers', where a query is rotated; everything else is left to it."""

    shared: SharedInputLora | None = None
    """The LoRA layers of queries, keys and values as one, where they can be."""

    def share(self, attn: Any) -> None:
        """Look which of its layers can compute together."""
        self.shared = fuse_shared_input([attn.to_q, attn.to_k, attn.to_v])

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
            apply_rotary_emb(attn.norm_q(query).unflatten(2, heads), *rotary_emb),
            apply_rotary_emb(attn.norm_k(key).unflatten(2, heads), *rotary_emb),
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


def apply_rotary_emb(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Pairs of neighbours turned by their angles, which tables hold twice, once a neighbour."""
    neighbours = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    # Made on the device: a list of numbers would be copied there, and the host would wait for it.
    signs = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32) % 2 * 2 - 1
    return (x * cosines + neighbours * (sines * signs)).type_as(x)


# ------------------------------------------------------------------------------------------
# Attention of the models we know, each by a processor that reads memory less often.


FUSED_PROCESSORS: Mapping[
    type, type[FusedWanAttnProcessor | FusedFluxAttnProcessor | FusedQwenAttnProcessor]
] = {
    WanAttnProcessor: FusedWanAttnProcessor,
    FluxAttnProcessor: FusedFluxAttnProcessor,
    QwenDoubleStreamAttnProcessor2_0: FusedQwenAttnProcessor,
}


def use_fused_processors(transformer: nn.Module, undo: ExitStack | None = None) -> int:
    """Give each attention that we have a processor for that one; gives how many.

    Call it after LoRA layers were fused, if they are. What would give theirs back is put on `undo`.
    """
    count = 0
    for module in transformer.modules():
        if not isinstance(module, WanAttention | FluxAttention | Attention):
            continue
        theirs = module.processor
        if type(theirs) not in FUSED_PROCESSORS:
            continue
        ours = FUSED_PROCESSORS[type(theirs)]()
        ours._attention_backend = theirs._attention_backend
        ours._parallel_config = theirs._parallel_config
        ours.share(module)
        module.set_processor(ours)
        if undo is not None:
            undo.callback(module.set_processor, theirs)
        count += 1
    return count


# ------------------------------------------------------------------------------------------
# Attention whose gradient lies in rows of its own.
#
# torch keeps cuDNN's graphs of attention by the layout of queries, keys and values, and not by the
# gradient's. A single block of Flux puts what attention gives beside what its MLP gives, so its
# gradient comes back as a part of wider rows; a double block's does not. All else is equal, so one
# kind gets the graph of the other, which reads past the end or, worse, the wrong numbers (seen on
# an
# H200 with torch 2.11). With rows of its own everywhere there is one layout.


class ContiguousGrad(Function):
    """The tensor as it is; its gradient without gaps between rows."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Nothing is computed."""
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        """A copy where there are gaps."""
        return grad.contiguous()


def make_attention_grads_contiguous(transformer: nn.Module) -> None:
    """Let Flux's single blocks have it; other models need nothing."""
    if isinstance(transformer, FluxTransformer2DModel):
        for block in transformer.single_transformer_blocks:
            contiguous_grad(block.attn)


def contiguous_grad(attention: nn.Module) -> None:
    """Let a module that gives one tensor take its gradient in this way."""
    attention.register_forward_hook(_take)


def _take(_module: nn.Module, _given: tuple[Any, ...], out: Tensor) -> Tensor:
    dense: Tensor = ContiguousGrad.apply(out)  # type: ignore[no-untyped-call]
    return dense
