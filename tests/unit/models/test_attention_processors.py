"""Fused attention processors give diffusers' results up to rounding; gradients are contiguous."""

from inspect import signature

import pytest
import torch
from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from peft import LoraConfig
from torch import nn

from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.models import attention_processors
from gracetune.models.attention_processors import (
    FUSED_PROCESSORS,
    FusedFlux2AttnProcessor,
    FusedFluxAttnProcessor,
    FusedQwenAttnProcessor,
    FusedWanAttnProcessor,
    _cos_sin,
    apply_rotary_emb,
    contiguous_grad,
    signed_sines,
    use_fused_processors,
)
from gracetune.plan.launch_overhead import build_probe_model

NARROW = {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 16}
NARROW |= {"axes_dims_rope": (4, 6, 6), "num_layers": 2}
QKV_PROJECTIONS = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]


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


def flux2():
    torch.manual_seed(0)
    narrow = {**NARROW, "axes_dims_rope": (4, 4, 4, 4), "mlp_ratio": 2.0}
    model = Flux2Transformer2DModel(**narrow, in_channels=8, num_single_layers=1)
    inputs = {
        "hidden_states": torch.randn(2, 6, 8),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.rand(2),
        "guidance": torch.ones(2),
        "img_ids": torch.randint(0, 9, (2, 6, 4)),
        "txt_ids": torch.zeros(2, 5, 4, dtype=torch.long),
    }
    return model, inputs, 3, FusedFlux2AttnProcessor


JOINT_MODELS = [flux, qwen, masked_qwen]


def outputs_and_grads(model, inputs):
    (out,) = model(**inputs, return_dict=False)
    model.zero_grad()
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", [*JOINT_MODELS, flux2])
def test_fused_joint_attention_changes_nothing(make):
    model, inputs, count, fused_class = make()
    expected = outputs_and_grads(model, inputs)
    assert use_fused_processors(model) == count
    assert use_fused_processors(model) == 0
    assert type(model.transformer_blocks[0].attn.processor) is fused_class
    for ours, theirs in zip(outputs_and_grads(model, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", JOINT_MODELS)
def test_lora_on_joint_attention_reads_each_stream_once(make):
    model, inputs, _, _ = make()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=QKV_PROJECTIONS, init_lora_weights=False))
    expected = outputs_and_grads(model, inputs)
    fuse_lora(model)
    use_fused_processors(model)
    processor = model.transformer_blocks[0].attn.processor
    assert processor.shared_image is not None
    assert processor.shared_text is not None
    for ours, theirs in zip(outputs_and_grads(model, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rotary_tables_match_complex_multiplication():
    angles = torch.randn(5, 8)
    rotations = torch.polar(torch.ones_like(angles), angles)
    x = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    expected = apply_rotary_emb_qwen(x, rotations, use_real=False)
    torch.testing.assert_close(apply_rotary_emb(x, *_cos_sin(rotations)), expected)


@pytest.mark.parametrize(("make", "tables"), [(flux, 1), (flux2, 1), (qwen, 2)])
def test_query_and_key_share_the_signed_sines_of_rope(make, tables, monkeypatch):
    """Each kernel takes the CPU time of a launch. Qwen-Image has tables for image and text."""
    model, inputs, *_ = make()
    count = use_fused_processors(model)
    calls = []

    def counted(sin):
        calls.append(sin)
        return signed_sines(sin)

    monkeypatch.setattr(attention_processors, "signed_sines", counted)
    model(**inputs)
    assert len(calls) == tables * count


def test_attention_without_rope_is_left_to_diffusers():
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
    for ours, theirs in zip(attn(x, text), expected, strict=True):
        assert torch.equal(ours, theirs)


SMALL_WAN = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "ffn_dim": 64,
    "text_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "freq_dim": 32,
}


def wan_outputs_and_grads(dtype, fused):
    torch.manual_seed(0)
    model = WanTransformer3DModel(**SMALL_WAN).to(dtype)
    if fused:
        assert use_fused_processors(model) == 2 * SMALL_WAN["num_layers"]
        assert use_fused_processors(model) == 0
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, 1, 8, 8, generator=generator).to(dtype)
    text = torch.randn(1, 6, 32, generator=generator).to(dtype)
    (out,) = model(latents, torch.tensor([500]), text, return_dict=False)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_wan_attention_changes_nothing(dtype):
    for ours, theirs in zip(
        wan_outputs_and_grads(dtype, True), wan_outputs_and_grads(dtype, False), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rotary_emb_equals_diffusers_bit_for_bit(dtype):
    """diffusers' processor computes even and odd elements separately."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(1, 5, 1, 16, generator=generator).repeat_interleave(2, dim=-1)
    cos_table, sin_table = angles.cos(), angles.sin()
    x = torch.randn(2, 5, 3, 32, generator=generator).to(dtype)
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    even, odd = theirs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_table[..., 0::2], sin_table[..., 1::2]
    expected = torch.empty_like(theirs)
    expected[..., 0::2] = even * cos - odd * sin
    expected[..., 1::2] = even * sin + odd * cos
    found = apply_rotary_emb(ours, cos_table, signed_sines(sin_table))
    assert torch.equal(found, expected)
    found.backward(grad)
    expected.backward(grad)
    assert torch.equal(ours.grad, theirs.grad)


def test_lora_on_wan_reads_the_shared_input_once():
    torch.manual_seed(0)
    model = WanTransformer3DModel(**SMALL_WAN)
    targets = ["to_q", "to_k", "to_v"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    latents, text = torch.randn(1, 4, 1, 8, 8), torch.randn(1, 6, 32)

    def outputs_and_grads():
        (out,) = model(latents, torch.tensor([500]), text, return_dict=False)
        model.zero_grad()
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = outputs_and_grads()
    assert fuse_lora(model) == 6 * SMALL_WAN["num_layers"]
    use_fused_processors(model)
    assert model.blocks[0].attn1.processor.shared_qkv is not None
    for ours, theirs in zip(outputs_and_grads(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("original", FUSED_PROCESSORS)
def test_the_signature_is_found_without_a_search(original):
    """diffusers asks for it in every call of attention, and the CPU limits small batches."""
    fused = FUSED_PROCESSORS[original]
    assert "__signature__" in vars(fused.__call__)
    assert signature(fused().__call__).parameters.keys() == (
        signature(original().__call__).parameters.keys()
    )


def test_the_attention_backend_is_kept():
    model = WanTransformer3DModel(**SMALL_WAN)
    model.set_attention_backend("native")
    use_fused_processors(model)
    processor = model.blocks[0].attn1.processor
    assert isinstance(processor, FusedWanAttnProcessor)
    assert processor._attention_backend == "native"


class Double(nn.Module):
    """Doubles its input and records the gradient of its output."""

    def forward(self, x):
        y = 2 * x
        y.register_hook(self.grads.append)
        return y


def gradient(contiguous):
    attention = Double()
    attention.grads = []
    if contiguous:
        contiguous_grad(attention)
    torch.manual_seed(0)
    x, mlp_output = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5, 7)
    joined = torch.cat([attention(x), mlp_output], dim=2)
    joined.backward(torch.randn_like(joined))
    return x.grad, attention.grads[0].is_contiguous()


def test_the_gradient_is_contiguous_and_unchanged():
    expected, is_contiguous = gradient(contiguous=False)
    assert not is_contiguous
    grad, is_contiguous = gradient(contiguous=True)
    assert is_contiguous
    assert torch.equal(grad, expected)


class Block(nn.Module):
    """Concatenates attention and its input, like a single block of Flux."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cat([self.attn(x), x], dim=1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_block_supports_the_hook():
    block = Block()
    x = torch.randn(4, 3, requires_grad=True)
    block(x).square().sum().backward()
    expected, x.grad = x.grad, None
    contiguous_grad(block.attn)
    torch.compile(block, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_only_fluxs_single_blocks_are_hooked():
    flux, qwen = (
        build_probe_model(family, has_adapter=False).model for family in ("flux", "qwen_image")
    )
    hooked = {name for name, module in flux.named_modules() if module._forward_hooks}
    singles = range(len(flux.single_transformer_blocks))
    assert hooked == {f"single_transformer_blocks.{number}.attn" for number in singles}
    assert not any(module._forward_hooks for module in qwen.modules())
