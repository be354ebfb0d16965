"""Fused LoRA layers compute the same as peft's, and fp8 layers nearly the same."""

import sys
from contextlib import ExitStack

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

from gracetune.adapters.compute.fp8_linear import (
    Fp8Conversion,
    Fp8Linear,
    check_fp8_capability,
    check_fp8_support,
    convert_to_fp8,
)
from gracetune.adapters.compute.fused_lora import FusedLora, fuse_lora, runs_in_dtype
from gracetune.adapters.compute.lora_matmul import FP8_MAX, quantize_rows
from gracetune.errors import GracetuneError

pytestmark = pytest.mark.filterwarnings("ignore")
"""The compiler reads attributes that torch warns about."""

NAMES = ["inner", "outer"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 48)
        self.outer = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.outer(functional.gelu(self.inner(x)))


def make(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = Net().requires_grad_(False).to(dtype)
    config = {"r": 4, "lora_alpha": 8, "target_modules": NAMES, "init_lora_weights": False}
    inject_adapter_in_model(LoraConfig(**config | settings), model)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    return model


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    return [y.detach(), x.grad, *trained]


def test_layers_with_a_trained_weight_are_not_fused():
    model = make(bias="all")
    assert model.inner.base_layer.bias.requires_grad
    assert fuse_lora(model) == 1  # the other has no bias
    gradients(model, torch.randn(3, 32))
    assert model.inner.base_layer.bias.grad is not None


def test_fusing_can_be_undone_and_repeated():
    model, x = make(torch.bfloat16), torch.randn(3, 32, dtype=torch.bfloat16)
    expected = gradients(make(torch.bfloat16), x)
    with ExitStack() as undo:
        assert fuse_lora(model, undo) == 2
        assert isinstance(model.inner.forward.__self__, FusedLora)
    assert not model._forward_pre_hooks
    assert model.inner.forward.__self__ is model.inner
    for mine, theirs in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(mine, theirs)
    model.zero_grad()
    assert fuse_lora(model) == 2
    assert isinstance(model.inner.forward.__self__, FusedLora)


def test_runs_in_dtype_counts_cast_lora_weights():
    model = make(torch.bfloat16)
    assert not runs_in_dtype(model, torch.bfloat16), "its LoRA is in fp32"
    fuse_lora(model)
    assert runs_in_dtype(model, torch.bfloat16)
    assert not runs_in_dtype(model, torch.float32)
    model.norm = nn.LayerNorm(4).requires_grad_(False)
    assert not runs_in_dtype(model, torch.bfloat16), "a norm is in fp32"


def test_runs_in_dtype_accepts_fp8_layers():
    model = make(torch.bfloat16)
    convert_to_fp8([model])
    fuse_lora(model)
    assert runs_in_dtype(model, torch.bfloat16)


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32)])
def test_fused_lora_computes_what_peft_computes(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).view(*shape)
    if len(shape) == 1:
        x = x[None]
    expected = gradients(make(), x)
    model = make()
    assert fuse_lora(model) == 2
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bf16_matmuls_train_fp32_weights():
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    model = make(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, x)
    model = make(torch.bfloat16)
    fuse_lora(model)
    found = gradients(model, x)
    assert all(grad.dtype == torch.float32 for grad in found[2:])
    for ours, theirs in zip(found, expected, strict=True):
        cosine = functional.cosine_similarity(ours.float().flatten(), theirs.float().flatten(), 0)
        assert cosine > 0.999
    before = model(x)
    model.inner.lora_B["default"].weight.data.mul_(2)  # an optimizer's step
    assert not torch.equal(model(x), before)


def test_fp32_layers_under_autocast_use_pefts_forward():
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    plain, fused = make(), make()
    fuse_lora(fused)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = gradients(plain, x), gradients(fused, x)
    assert found[0].dtype == torch.bfloat16
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_weights_in_the_compute_dtype_take_few_calls_of_python_functions():
    """Steps of small batches are bound by the CPU, and this hook reads all LoRA weights."""
    model = make()
    fuse_lora(model)
    (hook,) = model._forward_pre_hooks.values()
    calls = []
    sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
    try:
        hook(model, ())
    finally:
        sys.setprofile(None)
    assert len(calls) < 2 * len(NAMES) + 3
    assert model.inner.forward.__self__.cast_weights is None


def test_a_layer_that_is_not_called_gets_no_gradient():
    model = make(torch.bfloat16)
    fuse_lora(model)
    model.forward = lambda x: model.inner(x)
    model(torch.ones(2, 32, dtype=torch.bfloat16)).float().sum().backward()
    assert model.inner.lora_A["default"].weight.grad is not None
    assert model.outer.lora_A["default"].weight.grad is None


def test_a_fused_block_compiles_to_one_graph():
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    expected = gradients(make(), x)
    model = make()
    fuse_lora(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.5}, {"use_dora": True}])
def test_dropout_and_dora_layers_are_not_fused(settings):
    assert fuse_lora(make(**settings)) == 0


def test_a_disabled_adapter_has_no_effect():
    model, x = make(), torch.ones(2, 32)
    fuse_lora(model)
    for layer in (model.inner, model.outer):
        layer.enable_adapters(False)
    plain = Net()
    torch.manual_seed(0)
    plain = Net()
    assert torch.equal(model(x), plain(x))


def test_a_merged_or_inactive_adapter_uses_pefts_forward(monkeypatch):
    model, x = make(), torch.ones(2, 32)
    fuse_lora(model)
    fused = [layer.forward.__self__ for layer in (model.inner, model.outer)]
    assert all(one.is_active(x) for one in fused)
    for one in fused:  # peft keeps one name, or a list of names
        monkeypatch.setattr(one.layer, "_active_adapter", [one.name])
    assert all(one.is_active(x) for one in fused)
    monkeypatch.setattr(fused[0].layer, "_active_adapter", [fused[0].name, "other"])
    fused[1].layer.merge()
    assert not any(one.is_active(x) for one in fused)


def test_quantized_rows_use_the_whole_range_and_zero_rows_stay_zero():
    x = torch.tensor([[1e-3, -2e-3], [0.0, 0.0], [3e4, 1.0]])
    rounded, scales = quantize_rows(x)
    assert rounded.float().abs().amax(dim=1).tolist() == [FP8_MAX, 0.0, FP8_MAX]
    torch.testing.assert_close(rounded.float() * scales, x, rtol=0.07, atol=1e-6)


@pytest.mark.parametrize("has_lora", [True, False])
def test_fp8_gradients_are_close_to_exact_ones(has_lora):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    exact, model = make(), make()
    if not has_lora:
        exact, model = Net().requires_grad_(False), Net().requires_grad_(False)
        model.load_state_dict(exact.state_dict())
    expected = gradients(exact, x)
    assert convert_to_fp8([model]) == Fp8Conversion(2, 0, uncalibrated=2)
    assert fuse_lora(model) == (2 if has_lora else 0)
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        assert functional.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.998


def test_fp8_weights_take_half_the_bytes_and_trained_layers_are_kept():
    linear = nn.Linear(64, 64, bias=False).bfloat16()
    block = nn.ModuleDict({"frozen": linear.requires_grad_(False), "trained": nn.Linear(4, 4)})
    convert_to_fp8([block])
    assert type(block["trained"]) is nn.Linear
    frozen = block["frozen"]
    assert isinstance(frozen, Fp8Linear)
    assert frozen.weight.nbytes * 2 == linear.weight.nbytes
    assert frozen(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_fp8_is_refused_on_a_cpu():
    with pytest.raises(GracetuneError, match=r"frozen_compute is fp8, but cpu has no fp8"):
        check_fp8_support(torch.device("cpu"))


def test_a_gpu_without_fp8_is_refused_by_name():
    check_fp8_capability("NVIDIA L4", (8, 9))
    with pytest.raises(GracetuneError, match=r"NVIDIA A100 has no fp8.*capability 8\.9 or higher"):
        check_fp8_capability("NVIDIA A100", (8, 0))


@pytest.mark.parametrize("has_lora", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_fp8_layers_return_the_original_dtype(has_lora, dtype, autocast):
    model = make(dtype) if has_lora else Net().requires_grad_(False).to(dtype)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(x)
        convert_to_fp8([model])
        fuse_lora(model)
        found = model(x)
    assert found.dtype == expected.dtype
    cosine = functional.cosine_similarity(found.float().flatten(), expected.float().flatten(), 0)
    assert cosine > 0.99
    found.float().sum().backward()
    assert x.grad.dtype == dtype


def test_layers_with_unsupported_dimensions_are_skipped():
    block = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 16))
    block.requires_grad_(False)
    assert convert_to_fp8([block]) == Fp8Conversion(1, 2, uncalibrated=1)
    assert [type(layer) for layer in block] == [nn.Linear, nn.Linear, Fp8Linear]


def test_blocks_without_a_convertible_layer_are_refused():
    block = nn.Sequential(nn.Linear(8, 24)).requires_grad_(False)
    with pytest.raises(GracetuneError, match=r"none of 1 frozen linear.*multiples of 16.*bf16"):
        convert_to_fp8([block])
