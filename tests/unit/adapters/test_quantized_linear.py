"""Quantized layers compute with their dequantized weight, and save and stream what they store."""

import copy

import pytest
import torch
from fakes.quantization import KINDS, import_quietly, skip_without_package
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

from gracetune.adapters.compute.fused_lora import FusedLora, fuse_lora, runs_in_dtype
from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.models.quantize import quantize_blocks
from gracetune.offload.copy_engine import OffloadError, SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

pytestmark = pytest.mark.filterwarnings("ignore")
"""The compiler reads attributes that torch warns about."""

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(params=KINDS)
def kind(request):
    skip_without_package(request.param)
    return request.param


def make_layer(kind, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return QuantizedLinear(nn.Linear(WIDTH, 96, bias=bias).to(dtype).requires_grad_(False), kind)


def make_model(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = Model().to(dtype).requires_grad_(False)
    quantize_blocks(list(model.blocks), kind)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"]}
    inject_adapter_in_model(LoraConfig(**config, init_lora_weights=False), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def step(model, dtype=torch.float32, seed=1):
    """Run forward and backward; return the output and all gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, WIDTH, generator=generator).to(dtype).requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_the_matmul_uses_the_dequantized_weight(kind, dtype, bias):
    layer = make_layer(kind, bias=bias)
    weight = layer.dequantize()
    assert weight.shape == (96, WIDTH)
    x = torch.randn(3, 5, WIDTH, dtype=dtype, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert y.dtype == dtype
    if dtype == torch.float64:  # the weight is then dequantized in a higher precision
        torch.testing.assert_close(x.grad, grad @ weight.double(), rtol=1e-5, atol=1e-5)
        return
    other = weight.to(dtype) if kind != "fp8" else _fp8_weight(layer, dtype)
    expected = functional.linear(x, other, None if layer.bias is None else layer.bias.to(dtype))
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, grad @ other, rtol=0, atol=0)


def _fp8_weight(layer, dtype):
    values = layer.weight.view(torch.float8_e4m3fn)
    return (values.float() * layer.weight_scales).to(dtype)


def test_autocast_decides_the_type_of_the_matmul(kind):
    layer, x = make_layer(kind), torch.randn(3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_rows_of_zeros_stay_zero(kind):
    linear = nn.Linear(WIDTH, 4)
    linear.weight.data[1] = 0.0
    weight = QuantizedLinear(linear, kind).dequantize()
    assert weight.isfinite().all()
    assert not weight[1].any()


def test_autograd_saves_the_stored_tensors_and_nothing_of_the_weights_size(kind):
    layer, saved = make_layer(kind), []
    stored = {part.data_ptr() for part in layer.parts}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(3, WIDTH, requires_grad=True))
    assert {tensor.data_ptr() for tensor in saved} == stored


def test_fused_loras_compute_what_peft_computes(kind):
    expected = step(make_model(kind))
    model = make_model(kind)
    assert fuse_lora(model) == 8
    assert isinstance(model.blocks[0].up.forward.__self__, FusedLora)
    for ours, theirs in zip(step(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_fused_bf16_model_needs_no_autocast(kind):
    model = make_model(kind, torch.bfloat16)
    assert not runs_in_dtype(model, torch.bfloat16), "its LoRA is in fp32"
    fuse_lora(model)
    assert runs_in_dtype(model, torch.bfloat16)
    assert not runs_in_dtype(make_model(kind), torch.bfloat16)
    assert all(gradient.isfinite().all() for gradient in step(model, torch.bfloat16))


@pytest.mark.parametrize("fused", [True, False])
def test_streamed_steps_are_equal_bit_for_bit(kind, fused, recorder):
    model = make_model(kind)
    twin = copy.deepcopy(model)
    layer = twin.blocks[0].up.base_layer
    before = [part.clone() for part in layer.parts]
    if fused:
        fuse_lora(model)
        fuse_lora(twin)
    ring = stream_weights(
        twin, list(twin.blocks), SynchronousCopyEngine(), recorder, slots=2, poison=True
    )
    for seed in range(3):
        for ours, theirs in zip(step(twin, seed=seed), step(model, seed=seed), strict=True):
            assert torch.equal(ours, theirs)
    counters = ring.counters()
    assert counters.fetches > 12
    assert counters.extra_slots == 0, "nothing keeps a slot after its block has run"
    whole = sum(p.nbytes for n, p in twin.named_parameters() if n.endswith("base_layer.weight"))
    assert whole <= counters.host_nbytes < 1.5 * whole, "the weights stream as they are stored"
    assert all(map(torch.equal, layer.parts, before)), "and can be read meanwhile"
    layer.weight.add_(1)
    with pytest.raises(OffloadError, match=r"up\.base_layer\.weight' was moved, replaced or writ"):
        step(twin)


def test_compiled_layers_compute_the_same(kind):
    """The compiler must not save a dequantized weight for backward."""
    model = make_model(kind)
    fuse_lora(model)
    expected, saved = step(model), []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = step(compiled)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    shapes = {tensor.shape for tensor in saved if tensor.is_floating_point()}
    assert shapes
    assert not shapes & {(2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_fp32_weights_are_quantized_as_by_torchao(kind):
    torchao = import_quietly("torchao.quantization")
    ours = make_layer(kind)
    torch.manual_seed(0)
    theirs = nn.Linear(WIDTH, 96)
    name = "Int8WeightOnlyConfig" if kind == "int8" else "Float8WeightOnlyConfig"
    torchao.quantize_(theirs, getattr(torchao, name)())
    torch.testing.assert_close(ours.dequantize(), theirs.weight.dequantize(), rtol=1e-6, atol=0)
