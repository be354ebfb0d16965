"""Joint attention in fewer passes is diffusers' own, but for the last bits that kernels round."""

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from peft import LoraConfig

from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.models.attention_processors import (
    FusedFluxAttnProcessor,
    FusedQwenAttnProcessor,
    _cos_sin,
    use_fused_processors,
    apply_rotary_emb,
)

NARROW = {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 16}
NARROW |= {"axes_dims_rope": (4, 6, 6), "num_layers": 2}
QUERIES = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]


def flux():
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        **NARROW, in_channels=8, num_single_layers=2, pooled_projection_dim=16
    )
    inputs = {
        "hidden_states": torch.randn(2, 6, 8),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.rand(2),
        "img_ids": torch.randint(0, 9, (6, 3)).float(),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, inputs, 4, FusedFluxAttnProcessor


def qwen(mask=None):
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**NARROW, in_channels=8, out_channels=2)
    inputs = {
        "hidden_states": torch.randn(2, 6, 8),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.rand(2),
        "img_shapes": [[(1, 2, 3)]] * 2,
    }
    return model, inputs, 2, FusedQwenAttnProcessor


def masked_qwen():
    return qwen(torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool())


FAMILIES = [flux, qwen, masked_qwen]


def trained(model, inputs):
    (out,) = model(**inputs, return_dict=False)
    model.zero_grad()
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", FAMILIES)
def test_fewer_passes_change_nothing(make):
    model, inputs, count, ours = make()
    expected = trained(model, inputs)
    assert use_fused_processors(model) == count
    assert use_fused_processors(model) == 0
    assert type(model.transformer_blocks[0].attn.processor) is ours
    for found, theirs in zip(trained(model, inputs), expected, strict=True):
        torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("make", FAMILIES)
def test_a_lora_reads_the_picture_and_the_text_once_each(make):
    model, inputs, _, _ = make()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=QUERIES, init_lora_weights=False))
    expected = trained(model, inputs)
    fuse_lora(model)
    use_fused_processors(model)
    processor = model.transformer_blocks[0].attn.processor
    assert processor.shared_image is not None
    assert processor.shared_text is not None
    for found, theirs in zip(trained(model, inputs), expected, strict=True):
        torch.testing.assert_close(found, theirs)


def test_rotating_by_cos_sin_is_multiplying_complex_numbers():
    angles = torch.randn(5, 8)
    numbers = torch.polar(torch.ones_like(angles), angles)
    x = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    expected = apply_rotary_emb_qwen(x, numbers, use_real=False)
    torch.testing.assert_close(apply_rotary_emb(x, *_cos_sin(numbers)), expected)


def test_what_is_not_rotated_is_left_to_diffusers():
    model, _, _, _ = flux()
    attn = model.single_transformer_blocks[0].attn
    x = torch.randn(1, 4, 32)
    expected = attn(x)
    use_fused_processors(model)
    assert torch.equal(attn(x), expected)
    model, _, _, _ = qwen()
    attn = model.transformer_blocks[0].attn
    text = torch.randn(1, 3, 32)
    expected = attn(x, text)
    use_fused_processors(model)
    for found, theirs in zip(attn(x, text), expected, strict=True):
        assert torch.equal(found, theirs)
