"""Quantized layers on a GPU agree with the CPU; streamed steps with resident ones."""

from functools import partial

import pytest
import torch
from fakes.quantization import KINDS, skip_without_package
from sync_checks import count_host_syncs
from test_ring_gpu import DEVICE, LAYERS, MIN_TOLERANCE, build_wan, difference, make_batch, step
from torch import nn

from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.memory.platform import Link
from gracetune.models.quantize import quantize_blocks
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.offload.ring import stream_weights

# The compiler warns about settings that would be faster.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-2
"""Relative, of bf16 matmuls on a CPU and on a GPU."""
COMPILED_TOLERANCE = 2e-2
"""A compiled block rounds to bf16 less often."""


@pytest.fixture(params=KINDS)
def kind(request):
    skip_without_package(request.param)
    return request.param


def forward_and_backward(layer, device):
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(3, 40, n, generator=generator).bfloat16() for n in (256, 384))
    x = x.to(device).requires_grad_()
    y = layer(x)
    y.backward(grad.to(device))
    return y.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("bias", [True, False])
def test_layers_agree_with_the_cpu(kind, bias):
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(256, 384, bias=bias).bfloat16(), kind).requires_grad_(False)
    weight, expected = layer.dequantize(), forward_and_backward(layer, "cpu")
    layer.to(DEVICE)
    assert (layer.dequantize().cpu() - weight).float().norm() <= 1e-3 * weight.float().norm()
    for found, reference in zip(forward_and_backward(layer, DEVICE), expected, strict=True):
        assert found.dtype == torch.bfloat16
        error = (found - reference).float().norm() / reference.float().norm()
        assert error <= TOLERANCE


def build_quantized_wan(kind):
    """Return a small Wan transformer on the CPU, with quantized weights and fused LoRAs."""
    model = build_wan("cpu")
    for module in list(model.blocks.modules()):
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Linear):
            module.base_layer = QuantizedLinear(base, kind)
    assert fuse_lora(model) == 10 * LAYERS
    return model


@pytest.mark.parametrize("compiled", [False, True])
def test_streamed_steps_equal_resident_ones(kind, compiled, recorder):
    model, resident = build_quantized_wan(kind), build_quantized_wan(kind).to(DEVICE)
    batches = [make_batch(seed) for seed in range(2)]
    expected = [step(resident, inputs) for inputs in batches]
    assert difference(expected[0], expected[1]) > 0.1, "the batches must differ"
    repeats = max(
        difference(step(resident, inputs), reference)
        for _ in range(5)
        for inputs, reference in zip(batches, expected, strict=True)
    )
    engine = open_copy_engine(DEVICE, Link.MANAGED)
    ring = stream_weights(model, list(model.blocks), engine, recorder, slots=2, poison=True)
    compiler = BlockCompiler(recorder) if compiled else None
    wrapped = wrap_blocks(list(model.blocks), ["lean"] * len(model.blocks), compiler, ring)
    tolerance = max(2 * repeats, COMPILED_TOLERANCE if compiled else MIN_TOLERANCE)
    for _ in range(10):
        for inputs, reference in zip(batches, expected, strict=True):
            assert difference(step(model, inputs), reference) <= tolerance
    counters = ring.counters()
    assert counters.fetches > 50
    assert counters.extra_slots == 0, recorder.texts()
    syncs = [count_host_syncs(partial(step, one, batches[0]), 2) for one in (model, resident)]
    assert syncs[0] <= syncs[1]
    if compiler is not None:
        assert not compiler.failure, recorder.texts()
        compiler.close()
    wrapped.close()
    ring.close()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_models_are_quantized_on_either_device(kind, where):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(256, 256)).bfloat16()
    weight = block[0].weight.detach().clone()
    block.to(where)
    quantize_blocks([block], kind)
    error = (block[0].dequantize().cpu() - weight).float().norm() / weight.float().norm()
    assert error < {"int8": 0.01, "fp8": 0.04, "nf4": 0.12}[kind]
