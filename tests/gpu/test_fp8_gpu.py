"""fp8 products on a CUDA device: the numbers that are computed by hand elsewhere, and gradients
that point where those of bf16 do.
"""

import copy

import pytest
import torch
from test_ring_gpu import DEVICE, LAYERS, batch, difference, forward, step, wan
from torch import nn
from torch.nn import functional

from gracetune.adapters.compute.fp8_linear import (
    Fp8Conversion,
    Fp8Linear,
    check_fp8_support,
    convert_to_fp8,
    convert_to_fp8_calibrated,
)
from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.adapters.compute.lora_matmul import FrozenMatmulFp8, LoraMatmulFp8, quantize_rows
from gracetune.adapters.compute.outlier_subspace import find_outlier_subspace
from gracetune.events.types import Notice, StepDone
from gracetune.memory.platform import Link
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks
from gracetune.offload.copies import open_copy_engine
from gracetune.offload.host_weights import load_resident_weights, select_streamed_weights
from gracetune.offload.ring import stream_weights
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu
LEAST_COSINE = 0.98
BY_HAND = 1e-2
"""Relative: sums of rounded numbers are rounded to bf16, and tensor cores keep fewer bits."""
LEAST_DIFFERENCE = 1e-4


def cosine(one, other):
    return functional.cosine_similarity(one.double().flatten(), other.double().flatten(), 0).item()


def apart(one, other):
    one, other = one.cpu().float(), other.cpu().float()
    return ((one - other).norm() / other.norm()).item()


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def layer(device):
    torch.manual_seed(0)
    made = nn.Linear(96, 160).bfloat16().requires_grad_(False)
    return made.to(device)


def there_and_back(product, rows, device, turned=False, knows=False):
    """What a product gives and what its gradients are, on any device."""
    x, grad = drawn(rows, 96, seed=1).to(device), drawn(rows, 160, seed=2).to(device)
    if turned:
        x, grad = x.t().contiguous().t(), grad.t().contiguous().t()
    x.requires_grad_()
    weight, scales = quantize_rows(layer(device).weight)
    halves = [drawn(8, 96, seed=3), drawn(160, 8, seed=4)]
    halves = [half.mul_(0.1).to(device).requires_grad_() for half in halves]
    directions = (None, None)
    if knows:
        along = find_outlier_subspace(drawn(256, 96, seed=5).float()).bfloat16()
        across = (layer("cpu").weight.float() @ along.float().t()).bfloat16()
        directions = (along.to(device), across.to(device))
    given = (x, weight, scales, layer(device).bias, *directions)
    if product is LoraMatmulFp8:
        y = product.apply(*given, *halves, 0.5)
        return [y, *torch.autograd.grad(y, [x, *halves], grad)]
    y = product.apply(*given)
    return [y, *torch.autograd.grad(y, [x], grad)]


@pytest.mark.parametrize("product", [FrozenMatmulFp8, LoraMatmulFp8])
@pytest.mark.parametrize("rows", [1, 17, 256])
@pytest.mark.parametrize("knows", [True, False])
def test_a_kernel_gives_what_is_computed_by_hand(product, rows, knows):
    expected = there_and_back(product, rows, "cpu", knows=knows)
    given = there_and_back(product, rows, DEVICE, knows=knows)
    for found, by_hand in zip(given, expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert apart(found, by_hand) < BY_HAND


@pytest.mark.parametrize("product", [FrozenMatmulFp8, LoraMatmulFp8])
def test_operands_may_lie_the_other_way_round(product):
    expected = there_and_back(product, 64, DEVICE)
    for found, straight in zip(
        there_and_back(product, 64, DEVICE, turned=True), expected, strict=True
    ):
        assert apart(found, straight) < BY_HAND


def test_long_sums_keep_enough_bits():
    """Tensor cores add up products of fp8 in fewer bits than fp32 has; rounding costs 3 %."""
    x, weight = drawn(64, 13824, seed=1), drawn(128, 13824, seed=2)
    found = []
    for device in ("cpu", DEVICE):
        values, scales = quantize_rows(weight.to(device))
        found.append(FrozenMatmulFp8.apply(x.to(device), values, scales, None, None, None))
    assert apart(found[1], found[0]) < BY_HAND


def by_blocks(model, inputs):
    """The adapter's gradients, and those of what came into each block."""
    entering, handles = {}, []

    def remember(index, block):
        def hook(_, args):
            args[0].register_hook(lambda grad: entering.__setitem__(index, grad.float()))

        handles.append(block.register_forward_pre_hook(hook))

    for index, block in enumerate(model.blocks):
        remember(index, block)
    latents = inputs["hidden_states"].clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    forward(model, inputs | {"hidden_states": latents}).backward()
    for handle in handles:
        handle.remove()
    trained = [
        torch.cat([p.grad.float().flatten() for p in block.parameters() if p.requires_grad])
        for block in model.blocks
    ]
    return trained, [entering[index] for index in range(LAYERS)]


@pytest.mark.filterwarnings("ignore")  # compilers look at what torch warns of looking at
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_every_block_point_where_those_of_bf16_do(compiled, told):
    usual, rounded = wan(), wan()
    assert freeze_shown(rounded) == Fp8Conversion(10 * LAYERS, 0)
    compiler = BlockCompiler(told) if compiled else None
    found = []
    for model in (usual, rounded):
        fuse_lora(model)
        wrap_blocks(model.blocks, ["keep"] * LAYERS, compiler)
        found.append(by_blocks(model, batch(0)))
    if compiler is not None:
        compiler.close()
    assert not [event for event in told.of(Notice) if event.fallback]
    for what, (theirs, ours) in zip(("adapter", "input"), zip(*found, strict=True), strict=True):
        cosines = [cosine(a, b) for a, b in zip(ours, theirs, strict=True)]
        assert min(cosines) >= LEAST_COSINE, (what, cosines)
        assert min(cosines) < 1 - 1e-6, "nothing was rounded"


def freeze_shown(model):
    return convert_to_fp8_calibrated(lambda: forward(model, batch(1)), list(model.blocks), DEVICE)


def test_streamed_fp8_weights_give_the_gradients_of_resident_ones(told):
    """Main directions too, of which layers with one input share one parameter."""
    model = wan()
    freeze_shown(model)
    own = model.blocks[0].attn1
    assert own.to_q.base_layer.outlier_basis is own.to_k.base_layer.outlier_basis
    fuse_lora(model)
    inputs = batch(0)
    expected = step(model, inputs)
    allowed = max(2 * difference(step(model, inputs), expected), LEAST_DIFFERENCE)
    nbytes = sum(p.nbytes for p in model.blocks.parameters() if not p.requires_grad)
    mover = open_copy_engine(DEVICE, Link.MANAGED)
    ring = stream_weights(model, list(model.blocks), mover, told, 2, poison=True)
    for _ in range(10):
        assert difference(step(model, inputs), expected) <= allowed
    assert ring.counters().host_nbytes < 1.1 * nbytes, "weights wait in fp8"
    ring.close()


@pytest.mark.parametrize("autocast", [True, False])
def test_an_fp32_model_goes_on_in_its_own_types(autocast):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32))
    exact.requires_grad_(False).to(DEVICE)
    rounded = copy.deepcopy(exact)
    assert convert_to_fp8([rounded]) == Fp8Conversion(2, 0, uncalibrated=2)
    x = drawn(48, 64, seed=1).float().to(DEVICE).requires_grad_()
    results = []
    for model in (exact, rounded):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = model(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), [x])))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert cosine(ours, theirs) > 0.99


def test_blocks_come_to_the_device_for_their_turn_and_go_home():
    """As a run brings a model: what is too small to stream is on the device before."""
    resident, waiting = wan(), wan()
    for block in waiting.blocks:
        block.to("cpu")
    load_resident_weights(waiting, select_streamed_weights(waiting, list(waiting.blocks)), DEVICE)
    assert next(waiting.blocks[0].parameters()).is_cuda
    for model in (resident, waiting):
        freeze_shown(model)
    for block in waiting.blocks:
        assert all(p.device.type == "cpu" for p in block.parameters())
        block.to(DEVICE)
    found, expected = (forward(model, batch(0)).item() for model in (waiting, resident))
    assert found == pytest.approx(expected, rel=1e-3)


def test_layers_whose_sides_fit_no_kernel_compute_as_before():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 16))
    block.requires_grad_(False).to(DEVICE, torch.bfloat16)
    assert convert_to_fp8([block]) == Fp8Conversion(1, 2, uncalibrated=1)
    assert isinstance(block[2], Fp8Linear)
    assert block(drawn(5, 32, seed=1).to(DEVICE)).isfinite().all()


def test_this_device_has_fp8_products():
    check_fp8_support(DEVICE)


def test_a_run_in_fp8_trains_as_one_in_bf16(tiny_run, told, tmp_path):
    """The demo's model is in fp32; all sides of its blocks fit."""

    def losses(compute):
        told.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / compute),
            model={"frozen_compute": compute},
            adapter={"rank": 4},
            train={"max_train_steps": 12, "mixed_precision": "bf16"},
        )
        run_training(run, sinks=[told])
        return [event.loss for event in told.of(StepDone)]

    usual, rounded = losses("bf16"), losses("fp8")
    assert any("frozen products are computed in fp8" in text for text in told.texts())
    assert not any("are not in fp8" in text for text in told.texts())
    assert rounded != usual
    torch.testing.assert_close(rounded, usual, rtol=3e-2, atol=0)
