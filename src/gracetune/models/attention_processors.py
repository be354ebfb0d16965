"""Replace diffusers' attention processors by faster ones that compute the same numbers.

The fused processors save passes over memory in two ways:

- RoPE. diffusers rotates the even and the odd element of each pair separately. Compiled, these are
  strided passes that take longer than the norm before them. `apply_rotary_emb` computes
  `x * cos + neighbour * (+-sin)`: the same products and sums in one contiguous pass.
- LoRA. Query, key and value projections read the same input; their LoRA matmuls are fused where
  that is possible, so that the input is read once.

They are also the place where ranks that divide a sample's tokens exchange them for heads
(`distributed/context_parallel.py`).

`contiguous_grad` works around a bug in torch's cuDNN attention; see there.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from diffusers import ChromaTransformer2DModel, FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Attention,
    Flux2AttnProcessor,
    Flux2ParallelSelfAttention,
    Flux2ParallelSelfAttnProcessor,
)
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch.autograd import Function

from gracetune.adapters.compute.fused_lora import fuse_shared_input

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager, ExitStack

    from torch import Tensor, nn

    from gracetune.adapters.compute.fused_lora import SharedInputLora
    from gracetune.distributed.context_parallel import TokenSplit


IMAGE_PROJECTIONS = ("to_q", "to_k", "to_v")
TEXT_PROJECTIONS = ("add_q_proj", "add_k_proj", "add_v_proj")
ATTENTION_MODULES = (
    Attention,
    FluxAttention,
    Flux2Attention,
    Flux2ParallelSelfAttention,
    WanAttention,
)


def _with_signature(call: Callable[..., Any]) -> Callable[..., Any]:
    """Store a function's signature, which diffusers asks for at every call of attention."""
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return call


def use_fused_processors(transformer: nn.Module, undo: ExitStack | None = None) -> int:
    """Replace the processors that have a fused version, and return how many were replaced.

    Call it after `fuse_lora`, if that is used. Callbacks that restore the old processors are pushed
    onto `undo`. Processors that divide tokens among ranks are fused ones already; they are replaced
    by ones that share the fused LoRA.
    """
    count = 0
    for module in transformer.modules():
        if not isinstance(module, ATTENTION_MODULES):
            continue
        original = module.processor
        split = original.token_split if isinstance(original, FusedProcessor) else None
        cls = FUSED_PROCESSORS.get(type(original)) if split is None else type(original)
        if cls is None:
            continue
        fused: Any = cls()
        fused._attention_backend = original._attention_backend
        fused.token_split = split
        fused.share_inputs(module)
        module.set_processor(fused)
        if undo is not None:
            undo.callback(module.set_processor, original)
        count += 1
    return count


class FusedProcessor:
    """Base of the fused attention processors."""

    token_split: TokenSplit | None = None
    """Divides tokens among ranks. None: this rank computes all of them."""
    attention_mode: AbstractContextManager[Any] | None = None
    """Mode to enter during attention, with which checkpointing saves and reuses its output."""

    def during_attention(self) -> AbstractContextManager[Any]:
        """Return the context in which attention must run."""
        return nullcontext() if self.attention_mode is None else self.attention_mode

    def share_inputs(self, attn: Any) -> None:
        """Fuse the LoRA layers that read the same input, if possible."""


class FusedWanAttnProcessor(FusedProcessor, WanAttnProcessor):  # type: ignore[misc]
    """Attention processor for Wan with a fused self-attention.

    Cross-attention and other cases are left to diffusers' processor.
    """

    shared_qkv: SharedInputLora | None = None
    """The fused LoRA layers of query, key and value; None if they cannot be fused."""

    def share_inputs(self, attn: Any) -> None:
        """Fuse the LoRA layers of query, key and value, which read the same input, if possible."""
        self.shared_qkv = _fuse_lora(attn, IMAGE_PROJECTIONS)

    @_with_signature
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the attention output, computed with fused operations if it is self-attention."""
        if rotary_emb is None or encoder_hidden_states is not None or attn.fused_projections:
            with self.during_attention():
                original: Tensor = super().__call__(
                    attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
                )
            return original
        if self.shared_qkv is None:
            query, key, value = (
                layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v)
            )
        else:
            query, key, value = self.shared_qkv(hidden_states)
        heads = (attn.heads, -1)
        cos, sin = rotary_emb[0], signed_sines(rotary_emb[1])
        mixed = _attend(
            self,
            (
                apply_rotary_emb(attn.norm_q(query).unflatten(2, heads), cos, sin),
                apply_rotary_emb(attn.norm_k(key).unflatten(2, heads), cos, sin),
                value.unflatten(2, heads),
            ),
            attention_mask,
        )
        projected: Tensor = attn.to_out[0](mixed.type_as(query))
        dropped: Tensor = attn.to_out[1](projected)
        return dropped


class _TwoStreamProcessor(FusedProcessor):
    """Base of attention processors with fused LoRA layers for an image and a text stream."""

    shared_image: SharedInputLora | None = None
    shared_text: SharedInputLora | None = None

    def share_inputs(self, attn: Any) -> None:
        """Fuse the LoRA layers that read the same input: query, key and value of each stream."""
        self.shared_image = _fuse_lora(attn, IMAGE_PROJECTIONS)
        if attn.added_kv_proj_dim is not None:
            self.shared_text = _fuse_lora(attn, TEXT_PROJECTIONS)


class FusedFluxAttnProcessor(_TwoStreamProcessor, FluxAttnProcessor):  # type: ignore[misc]
    """Attention processor for Flux with fused RoPE and LoRA.

    Attention without RoPE and other cases are left to diffusers' processor.
    """

    @_with_signature
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the attention output; in a double-stream block, a pair for image and text.

        In a single-stream block, `hidden_states` holds both text and image tokens.
        """
        if image_rotary_emb is None or attn.fused_projections:
            with self.during_attention():
                original: Tensor | tuple[Tensor, Tensor] = super().__call__(
                    attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
                )
            return original
        width = attn.head_dim
        query, key, value = _project(
            attn, IMAGE_PROJECTIONS, self.shared_image, hidden_states, width
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            text_query, text_key, text_value = _project(
                attn, TEXT_PROJECTIONS, self.shared_text, encoder_hidden_states, width
            )
            query = torch.cat([attn.norm_added_q(text_query), query], dim=1)
            key = torch.cat([attn.norm_added_k(text_key), key], dim=1)
            value = torch.cat([text_value, value], dim=1)
        cos, sin = _tables(image_rotary_emb)
        mixed = _attend(
            self,
            (apply_rotary_emb(query, cos, sin), apply_rotary_emb(key, cos, sin), value),
            attention_mask,
        )
        if encoder_hidden_states is None:
            return mixed
        length = encoder_hidden_states.shape[1]
        image = attn.to_out[1](attn.to_out[0](mixed[:, length:].contiguous()))
        return image, attn.to_add_out(mixed[:, :length].contiguous())


class FusedQwenAttnProcessor(_TwoStreamProcessor, QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """Attention processor for Qwen-Image with fused RoPE and LoRA.

    Attention without RoPE and other cases are left to diffusers' processor.
    """

    @_with_signature
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention outputs of the image tokens and of the text tokens."""
        if image_rotary_emb is None or encoder_hidden_states is None or attention_mask is not None:
            with self.during_attention():
                original: tuple[Tensor, Tensor] = super().__call__(
                    attn,
                    hidden_states,
                    encoder_hidden_states,
                    encoder_hidden_states_mask,
                    attention_mask,
                    image_rotary_emb,
                )
            return original
        width = attn.inner_dim // attn.heads
        image = _project(attn, IMAGE_PROJECTIONS, self.shared_image, hidden_states, width)
        text = _project(attn, TEXT_PROJECTIONS, self.shared_text, encoder_hidden_states, width)
        image_rotary, text_rotary = (_cos_sin(rotations) for rotations in image_rotary_emb)
        query, key = (
            torch.cat(
                [
                    apply_rotary_emb(text_norm(text_part), *text_rotary),
                    apply_rotary_emb(image_norm(image_part), *image_rotary),
                ],
                dim=1,
            )
            for text_norm, text_part, image_norm, image_part in (
                (attn.norm_added_q, text[0], attn.norm_q, image[0]),
                (attn.norm_added_k, text[1], attn.norm_k, image[1]),
            )
        )
        value = torch.cat([text[2], image[2]], dim=1)
        mask = None
        if encoder_hidden_states_mask is not None:
            mask = self._joint_mask(encoder_hidden_states_mask, hidden_states)[:, None, None]
        mixed = _attend(self, (query, key, value), mask)
        length = encoder_hidden_states.shape[1]
        out = attn.to_out[0](mixed[:, length:].contiguous())
        for module in attn.to_out[1:]:
            out = module(out)
        return out, attn.to_add_out(mixed[:, :length].contiguous())

    def _joint_mask(self, text_mask: Tensor, image: Tensor) -> Tensor:
        """Return the mask of all keys: those of the text, and the image's, which are all used."""
        if self.token_split is not None and self.token_split.enabled:
            return self.token_split.order_mask(text_mask)  # `text_mask` is that of all ranks
        return torch.cat([text_mask, text_mask.new_ones(image.shape[:2])], dim=1)


class FusedFlux2AttnProcessor(FusedProcessor, Flux2AttnProcessor):  # type: ignore[misc]
    """Attention processor for the double-stream blocks of FLUX.2, with fused RoPE.

    Its projections have no bias, so that their LoRA layers cannot be fused.
    """

    @_with_signature
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the attention outputs of the image tokens and of the text tokens."""
        if image_rotary_emb is None or encoder_hidden_states is None or attn.fused_projections:
            with self.during_attention():
                original: Tensor | tuple[Tensor, Tensor] = super().__call__(
                    attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
                )
            return original
        width = attn.head_dim
        image = _project(attn, IMAGE_PROJECTIONS, None, hidden_states, width)
        text = _project(attn, TEXT_PROJECTIONS, None, encoder_hidden_states, width)
        query = torch.cat([attn.norm_added_q(text[0]), attn.norm_q(image[0])], dim=1)
        key = torch.cat([attn.norm_added_k(text[1]), attn.norm_k(image[1])], dim=1)
        value = torch.cat([text[2], image[2]], dim=1)
        cos, sin = _tables(image_rotary_emb)
        qkv = apply_rotary_emb(query, cos, sin), apply_rotary_emb(key, cos, sin), value
        mixed = _attend(self, qkv, attention_mask)
        length = encoder_hidden_states.shape[1]
        out = attn.to_out[1](attn.to_out[0](mixed[:, length:].contiguous()))
        return out, attn.to_add_out(mixed[:, :length].contiguous())


class FusedFlux2ParallelSelfAttnProcessor(FusedProcessor, Flux2ParallelSelfAttnProcessor):  # type: ignore[misc]
    """Attention processor for the single-stream blocks of FLUX.2, with fused RoPE.

    One projection gives query, key, value and the input of the MLP.
    """

    @_with_signature
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the sum of the outputs of attention and MLP, for text and image tokens."""
        if image_rotary_emb is None:
            with self.during_attention():
                original: Tensor = super().__call__(attn, hidden_states, attention_mask, None)
            return original
        qkv, mlp = attn.to_qkv_mlp_proj(hidden_states).split(
            [3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor], dim=-1
        )
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in qkv.chunk(3, dim=-1))
        cos, sin = _tables(image_rotary_emb)
        rotated = [apply_rotary_emb(x, cos, sin) for x in (attn.norm_q(query), attn.norm_k(key))]
        mixed = _attend(self, (rotated[0], rotated[1], value), attention_mask)
        out: Tensor = attn.to_out(torch.cat([mixed, attn.mlp_act_fn(mlp)], dim=-1))
        return out


FUSED_PROCESSORS: Mapping[type, type[FusedProcessor]] = {
    WanAttnProcessor: FusedWanAttnProcessor,
    FluxAttnProcessor: FusedFluxAttnProcessor,
    Flux2AttnProcessor: FusedFlux2AttnProcessor,
    Flux2ParallelSelfAttnProcessor: FusedFlux2ParallelSelfAttnProcessor,
    QwenDoubleStreamAttnProcessor2_0: FusedQwenAttnProcessor,
}
"""Class of diffusers' attention processor -> class of its fused version."""


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: rotate each pair of neighbouring elements by its angle.

    `cos` and `sin` hold the cosine and sine of each angle twice, once for each element of a pair.
    The sines have the signs of `signed_sines`.
    """
    neighbours = torch.unflatten(x, -1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos + neighbours * sin).type_as(x)


def signed_sines(sin: Tensor) -> Tensor:
    """Return the sines of RoPE, negated for the first element of each pair.

    Compute them once for query and key: each kernel counts where the CPU is the limit.
    """
    # Computed on the device: copying a Python list there would make the CPU wait for the GPU.
    signs = torch.arange(-1, 2, 2, device=sin.device, dtype=torch.int32)
    return (torch.unflatten(sin, -1, (-1, 2)) * signs).flatten(-2)


def _tables(rotary_emb: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return tables of cosines and sines for `apply_rotary_emb`, with dimensions as in attention.

    `rotary_emb` has the cosines and the sines of all tokens, without these signs.
    """
    cos, sin = rotary_emb
    return cos[None, :, None], signed_sines(sin)[None, :, None]


def _cos_sin(rotations: Tensor) -> tuple[Tensor, Tensor]:
    """Turn rotations given as complex numbers into the tables that `apply_rotary_emb` takes."""
    cos, sin = torch.view_as_real(rotations)[:, None].repeat_interleave(2, dim=-2).unbind(-1)
    return cos, signed_sines(sin)


def _fuse_lora(attn: Any, names: tuple[str, ...]) -> SharedInputLora | None:
    return fuse_shared_input([attn.get_submodule(name) for name in names])


def _project(
    attn: Any, names: tuple[str, ...], shared: SharedInputLora | None, x: Tensor, width: int
) -> list[Tensor]:
    """Project one stream (image or text) to query, key and value, split into heads of `width`."""
    projected = [attn.get_submodule(name)(x) for name in names] if shared is None else shared(x)
    return [tensor.unflatten(-1, (-1, width)) for tensor in projected]


def _attend(
    processor: FusedProcessor, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    """Return the attention output of this rank's tokens, with the heads side by side.

    If ranks divide the tokens, attention runs on all tokens of some heads. `mask` is then that of
    all tokens, in the order of `TokenSplit`.
    """
    query, key, value = qkv
    split = processor.token_split
    if split is not None and not split.enabled:
        split = None
    is_ulysses = split is not None and split.ring_config is None
    if split is not None and is_ulysses:
        query, key, value = split.scatter_heads(query, key, value)
    with processor.during_attention():
        mixed: Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,  # type: ignore[attr-defined]
            parallel_config=None if split is None else split.ring_config,
        )
    if split is not None and is_ulysses:
        mixed = split.gather_heads(mixed)
    return mixed.flatten(2, 3).to(qkv[0].dtype)


# Contiguous gradients


class ContiguousGrad(Function):
    """Identity in forward; makes the gradient contiguous in backward."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Return the input, as a view."""
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient, copied to contiguous memory if it is not contiguous."""
        return grad.contiguous()


def make_attention_grads_contiguous(transformer: nn.Module) -> None:
    """Make the gradients of single-stream attention contiguous, in FLUX.1 and Chroma.

    Other models need nothing.

    This works around a bug of torch's cuDNN attention: see `contiguous_grad`.
    """
    if isinstance(transformer, FluxTransformer2DModel | ChromaTransformer2DModel):
        for block in transformer.single_transformer_blocks:
            contiguous_grad(block.attn)


def contiguous_grad(attention: nn.Module) -> None:
    """Make the gradient of a module's output contiguous, with a forward hook.

    Torch caches cuDNN's attention graphs by the memory layout of query, key and value, but not by
    that of the gradient. A single block of Flux concatenates the outputs of attention and MLP, so
    attention's gradient is a slice of wider rows; in a double block it is contiguous. All else
    being equal, one kind of block gets the other's cached graph, which then reads out of bounds or
    uses wrong numbers (seen on an H200 with torch 2.11). With contiguous gradients everywhere,
    there is only one layout.
    """
    attention.register_forward_hook(_contiguous_grad_hook)


def _contiguous_grad_hook(_module: nn.Module, _inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    hooked: Tensor = ContiguousGrad.apply(out)  # type: ignore[no-untyped-call]
    return hooked
