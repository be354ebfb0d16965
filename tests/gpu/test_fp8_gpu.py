"""fp8 matmuls on a GPU agree with the CPU reference, and their gradients with bf16."""

import copy

import pytest
import torch
from test_ring_gpu import (
    DEVICE,
    LAYERS,
    MIN_TOLERANCE,
    build_wan,
    difference,
    forward,
    make_batch,
    step,
)
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
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.offload.host_weights import load_resident_weights, select_streamed_weights
from gracetune.offload.ring import stream_weights
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu
MIN_COSINE = 0.98
REFERENCE_TOLERANCE = 1e-2
"""Relative: sums are rounded to bf16, and tensor cores accumulate with fewer bits than fp32."""


def cosine(a, b):
    return functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def relative_error(result, expected):
    result, expected = result.cpu().float(), expected.cpu().float()
    return ((result - expected).norm() / expected.norm()).item()


def random_tensor(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def build_linear(device):
    torch.manual_seed(0)
    linear = nn.Linear(96, 160).bfloat16().requires_grad_(False)
    return linear.to(device)


def forward_and_backward(matmul, rows, device, transposed=False, outliers=False):
    """Return the output of a matmul and its gradients."""
    x, grad = (
        random_tensor(rows, 96, seed=1).to(device),
        random_tensor(rows, 160, seed=2).to(device),
    )
    if transposed:
        x, grad = x.t().contiguous().t(), grad.t().contiguous().t()
    x.requires_grad_()
    weight, scales = quantize_rows(build_linear(device).weight)
    lora_weights = [random_tensor(8, 96, seed=3), random_tensor(160, 8, seed=4)]
    lora_weights = [w.mul_(0.1).to(device).requires_grad_() for w in lora_weights]
    outlier_tensors = (None, None)
    if outliers:
        basis = find_outlier_subspace(random_tensor(256, 96, seed=5).float()).bfloat16()
        projected = (build_linear("cpu").weight.float() @ basis.float().t()).bfloat16()
        outlier_tensors = (basis.to(device), projected.to(device))
    arguments = (x, weight, scales, build_linear(device).bias, *outlier_tensors)
    if matmul is LoraMatmulFp8:
        y = matmul.apply(*arguments, *lora_weights, 0.5)
        return [y, *torch.autograd.grad(y, [x, *lora_weights], grad)]
    y = matmul.apply(*arguments)
    return [y, *torch.autograd.grad(y, [x], grad)]


@pytest.mark.parametrize("matmul", [FrozenMatmulFp8, LoraMatmulFp8])
@pytest.mark.parametrize("rows", [1, 17, 256])
@pytest.mark.parametrize("outliers", [True, False])
def test_kernels_match_the_emulation(matmul, rows, outliers):
    expected = forward_and_backward(matmul, rows, "cpu", outliers=outliers)
    results = forward_and_backward(matmul, rows, DEVICE, outliers=outliers)
    for found, reference in zip(results, expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert relative_error(found, reference) < REFERENCE_TOLERANCE


@pytest.mark.parametrize("matmul", [FrozenMatmulFp8, LoraMatmulFp8])
def test_transposed_operands_are_supported(matmul):
    expected = forward_and_backward(matmul, 64, DEVICE)
    for found, reference in zip(
        forward_and_backward(matmul, 64, DEVICE, transposed=True), expected, strict=True
    ):
        assert relative_error(found, reference) < REFERENCE_TOLERANCE


def test_long_sums_are_accurate_enough():
    """Tensor cores accumulate fp8 products with fewer bits than fp32; fp8 itself costs 3 %."""
    x, weight = random_tensor(64, 13824, seed=1), random_tensor(128, 13824, seed=2)
    found = []
    for device in ("cpu", DEVICE):
        values, scales = quantize_rows(weight.to(device))
        found.append(FrozenMatmulFp8.apply(x.to(device), values, scales, None, None, None))
    assert relative_error(found[1], found[0]) < REFERENCE_TOLERANCE


def gradients_by_block(model, inputs):
    """Return each block's adapter gradients, and the gradients of each block's input."""
    input_gradients, handles = {}, []

    def remember(index, block):
        def hook(_, args):
            args[0].register_hook(lambda grad: input_gradients.__setitem__(index, grad.float()))

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
    return trained, [input_gradients[index] for index in range(LAYERS)]


@pytest.mark.filterwarnings("ignore")  # the compiler reads attributes that torch warns about
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_every_block_are_close_to_bf16(compiled, recorder):
    bf16_model, fp8_model = build_wan(), build_wan()
    assert convert_with_samples(fp8_model) == Fp8Conversion(10 * LAYERS, 0)
    compiler = BlockCompiler(recorder) if compiled else None
    found = []
    for model in (bf16_model, fp8_model):
        fuse_lora(model)
        wrap_blocks(model.blocks, ["keep"] * LAYERS, compiler)
        found.append(gradients_by_block(model, make_batch(0)))
    if compiler is not None:
        compiler.close()
    assert not [event for event in recorder.of(Notice) if event.fallback]
    for name, (bf16, fp8) in zip(("adapter", "input"), zip(*found, strict=True), strict=True):
        cosines = [cosine(a, b) for a, b in zip(fp8, bf16, strict=True)]
        assert min(cosines) >= MIN_COSINE, (name, cosines)
        assert min(cosines) < 1 - 1e-6, "nothing was rounded"


def convert_with_samples(model):
    return convert_to_fp8_calibrated(
        lambda: forward(model, make_batch(1)), list(model.blocks), DEVICE
    )


def test_streamed_fp8_weights_give_the_gradients_of_resident_ones(recorder):
    """Including outlier subspaces, which layers with the same input share."""
    model = build_wan()
    convert_with_samples(model)
    attention = model.blocks[0].attn1
    assert attention.to_q.base_layer.outlier_basis is attention.to_k.base_layer.outlier_basis
    fuse_lora(model)
    inputs = make_batch(0)
    expected = step(model, inputs)
    allowed = max(2 * difference(step(model, inputs), expected), MIN_TOLERANCE)
    nbytes = sum(p.nbytes for p in model.blocks.parameters() if not p.requires_grad)
    copy_engine = open_copy_engine(DEVICE, Link.MANAGED)
    ring = stream_weights(model, list(model.blocks), copy_engine, recorder, 2, poison=True)
    for _ in range(10):
        assert difference(step(model, inputs), expected) <= allowed
    assert ring.counters().host_nbytes < 1.1 * nbytes, "weights are stored in fp8"
    ring.close()


@pytest.mark.parametrize("autocast", [True, False])
def test_an_fp32_model_keeps_its_types(autocast):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32))
    exact.requires_grad_(False).to(DEVICE)
    converted = copy.deepcopy(exact)
    assert convert_to_fp8([converted]) == Fp8Conversion(2, 0, uncalibrated=2)
    x = random_tensor(48, 64, seed=1).float().to(DEVICE).requires_grad_()
    results = []
    for model in (exact, converted):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = model(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), [x])))
    for expected, found in zip(*results, strict=True):
        assert expected.dtype == found.dtype
        assert cosine(expected, found) > 0.99


def test_blocks_are_on_the_device_only_during_their_pass():
    """As in a run, weights that are too small to stream are on the device already."""
    resident, in_host = build_wan(), build_wan()
    for block in in_host.blocks:
        block.to("cpu")
    load_resident_weights(in_host, select_streamed_weights(in_host, list(in_host.blocks)), DEVICE)
    assert next(in_host.blocks[0].parameters()).is_cuda
    for model in (resident, in_host):
        convert_with_samples(model)
    for block in in_host.blocks:
        assert all(p.device.type == "cpu" for p in block.parameters())
        block.to(DEVICE)
    found, expected = (forward(model, make_batch(0)).item() for model in (in_host, resident))
    assert found == pytest.approx(expected, rel=1e-3)


def test_layers_with_unsupported_dimensions_compute_as_before():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 16))
    block.requires_grad_(False).to(DEVICE, torch.bfloat16)
    assert convert_to_fp8([block]) == Fp8Conversion(1, 2, uncalibrated=1)
    assert isinstance(block[2], Fp8Linear)
    assert block(random_tensor(5, 32, seed=1).to(DEVICE)).isfinite().all()


def test_this_device_supports_fp8():
    check_fp8_support(DEVICE)


def test_a_run_in_fp8_trains_like_one_in_bf16(tiny_run, recorder, tmp_path):
    """The demo model is fp32, and all its layers have supported sizes."""

    def losses(compute):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / compute),
            model={"frozen_compute": compute},
            adapter={"rank": 4},
            train={"max_train_steps": 12, "mixed_precision": "bf16"},
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    bf16_losses, fp8_losses = losses("bf16"), losses("fp8")
    assert any("frozen layers converted" in text for text in recorder.texts())
    assert not any("stay in bf16" in text for text in recorder.texts())
    assert fp8_losses != bf16_losses
    torch.testing.assert_close(fp8_losses, bf16_losses, rtol=3e-2, atol=0)
