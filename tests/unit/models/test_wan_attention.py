"""Rotations in one pass are diffusers' own, but for the last bits that kernels round away."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.models.attention_processors import FusedWanAttnProcessor, use_fused_processors, apply_rotary_emb

SMALL = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "ffn_dim": 64,
    "text_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "freq_dim": 32,
}


def gradients(dtype, rotated):
    torch.manual_seed(0)
    model = WanTransformer3DModel(**SMALL).to(dtype)
    if rotated:
        assert use_fused_processors(model) == 2 * SMALL["num_layers"]
        assert use_fused_processors(model) == 0
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, 1, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 6, 32, generator=generator).to(dtype)
    (out,) = model(latents, torch.tensor([500]), text, return_dict=False)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_in_one_pass_changes_nothing(dtype):
    for ours, theirs in zip(gradients(dtype, True), gradients(dtype, False), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_has_the_bits_of_diffusers_own(dtype):
    """Even and odd halves apart, as its processor writes them, and back."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(1, 5, 1, 16, generator=generator).repeat_interleave(2, dim=-1)
    cosines, sines = angles.cos(), angles.sin()
    x = torch.randn(2, 5, 3, 32, generator=generator).to(dtype)
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    even, odd = theirs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cosines[..., 0::2], sines[..., 1::2]
    expected = torch.empty_like(theirs)
    expected[..., 0::2] = even * cos - odd * sin
    expected[..., 1::2] = even * sin + odd * cos
    found = apply_rotary_emb(ours, cosines, sines)
    assert torch.equal(found, expected)
    found.backward(grad)
    expected.backward(grad)
    assert torch.equal(ours.grad, theirs.grad)


def test_a_lora_on_queries_keys_and_values_reads_their_input_once():
    torch.manual_seed(0)
    model = WanTransformer3DModel(**SMALL)
    targets = ["to_q", "to_k", "to_v"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    latents, text = torch.randn(1, 4, 1, 8, 8), torch.randn(1, 6, 32)

    def trained():
        (out,) = model(latents, torch.tensor([500]), text, return_dict=False)
        model.zero_grad()
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = trained()
    assert fuse_lora(model) == 6 * SMALL["num_layers"]
    use_fused_processors(model)
    assert model.blocks[0].attn1.processor.shared_qkv is not None
    for ours, theirs in zip(trained(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_backend_that_was_chosen_stays_chosen():
    model = WanTransformer3DModel(**SMALL)
    model.set_attention_backend("native")
    use_fused_processors(model)
    processor = model.blocks[0].attn1.processor
    assert isinstance(processor, FusedWanAttnProcessor)
    assert processor._attention_backend == "native"
