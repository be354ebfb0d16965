"""The weight ring on a GPU gives the gradients of the resident step, whatever the timing."""

import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from sync_checks import count_host_syncs

from gracetune.memory.driver import PointerKind, open_cuda_driver
from gracetune.memory.platform import Link
from gracetune.offload import buffer_autosize
from gracetune.offload.copy_engine import CopyStream, CudaCopyEngine, OffloadError, open_copy_engine
from gracetune.offload.ring import stream_weights

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LAYERS = 6
MIN_TOLERANCE = 1e-4
"""Allowed even if the resident step repeats exactly. A wrong slot changes results by percents."""
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
REPETITIONS = 50


def build_wan(device=DEVICE, recompute=False):
    """Return a small Wan transformer with a LoRA whose weights are not zero."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=128,
        ffn_dim=1536,
        num_layers=LAYERS,
        text_dim=64,
        in_channels=16,
        out_channels=16,
    )
    model.to(torch.bfloat16)
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=8, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
        parameter.data = parameter.data.to(torch.bfloat16)
    if recompute:
        model.enable_gradient_checkpointing()
    return model.to(device).train()


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 16, 1, 32, 32, generator=generator)
    text = torch.randn(1, 24, 64, generator=generator)
    return {
        "hidden_states": latents.to(DEVICE, torch.bfloat16),
        "encoder_hidden_states": text.to(DEVICE, torch.bfloat16),
        "timestep": torch.tensor([300 + seed], device=DEVICE),
    }


def forward(model, inputs):
    out = model(**inputs, return_dict=False)[0]
    return (out.float() - inputs["hidden_states"].float()).pow(2).mean()


def step(model, inputs):
    """Return the loss and all gradients without making the host wait."""
    model.zero_grad(set_to_none=True)
    loss = forward(model, inputs)
    loss.backward()
    grads = [p.grad.float().flatten() for p in model.parameters() if p.requires_grad]
    return loss.detach(), torch.cat(grads)


def difference(result, expected):
    """Return the larger relative difference of the loss and of the gradients; NaN is infinite."""
    loss = (result[0] - expected[0]).abs() / expected[0].abs()
    grads = (result[1] - expected[1]).norm() / expected[1].norm()
    return torch.maximum(loss, grads).nan_to_num(nan=float("inf")).item()


@pytest.fixture(scope="module", params=["kept", "recomputed"])
def case(request):
    """Return (recompute, two batches, their resident results, tolerance from repetitions)."""
    recompute = request.param == "recomputed"
    model = build_wan(recompute=recompute)
    batches = [make_batch(seed) for seed in range(2)]
    expected = [step(model, inputs) for inputs in batches]
    repeats = [
        difference(step(model, inputs), reference)
        for _ in range(10)
        for inputs, reference in zip(batches, expected, strict=True)
    ]
    assert difference(expected[0], expected[1]) > 0.1, "the batches must differ"
    return recompute, batches, expected, max(2 * max(repeats), MIN_TOLERANCE)


@dataclass
class FakeStallWindow:
    """A stall window whose measurements the test sets."""

    stalled_s: float
    span_s: float = 1.0

    def is_complete(self):
        return True


class SlowCopyEngine(CudaCopyEngine):
    """Delays copies at random, by nothing or by far more than a block takes."""

    def __init__(self, rng, max_cycles=2_000_000):
        super().__init__(DEVICE, pin=True)
        self.rng = rng
        self.max_cycles = max_cycles

    def copy(self, target, source, poison):
        with torch.cuda.stream(self._streams[CopyStream.WEIGHTS]):
            torch.cuda._sleep(self.rng.choice([1, self.max_cycles // 10, self.max_cycles]))
        return super().copy(target, source, poison)


class Delay(torch.autograd.Function):
    """Delays a block at random, in forward and backward."""

    @staticmethod
    def forward(ctx, x, rng):
        ctx.rng = rng
        torch.cuda._sleep(rng.choice([1, 200_000, 2_000_000]))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(ctx.rng.choice([1, 200_000, 2_000_000]))
        return grad.clone(), None


def delay_output(rng, module, args, output):
    return Delay.apply(output, rng)


def assert_parity(model, case, repetitions):
    _, batches, expected, allowed = case
    differences = []
    for repetition in range(repetitions):
        index = repetition % len(batches)
        differences.append(difference(step(model, batches[index]), expected[index]))
    assert max(differences) <= allowed, f"{max(differences):.2e} > {allowed:.2e}: {differences}"


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
@pytest.mark.parametrize("poison", [False, True])
def test_gradients_equal_those_of_the_resident_step(case, recorder, slots, poison):
    model = build_wan(recompute=case[0])
    ring = stream_weights(
        model, list(model.blocks), open_copy_engine(DEVICE, Link.MANAGED), recorder, slots, poison
    )
    assert_parity(model, case, REPETITIONS)
    counters = ring.counters()
    assert counters.order_mismatches == counters.on_demand == counters.extra_slots == 0, counters
    assert counters.fetches == slots + (REPETITIONS * 2 * (LAYERS - slots)), counters
    assert recorder.events == []


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("block_indices", [range(LAYERS), range(0, LAYERS, 2), [1, 2, 5]])
def test_random_delays_of_blocks_and_copies_change_nothing(case, recorder, slots, block_indices):
    rng = random.Random(slots)
    model = build_wan(recompute=case[0])
    ring = stream_weights(
        model,
        [model.blocks[k] for k in block_indices],
        SlowCopyEngine(rng),
        recorder,
        slots,
        poison=True,
    )
    for block in model.blocks:
        block.register_forward_hook(partial(delay_output, rng))
    assert_parity(model, case, REPETITIONS // 2)
    assert ring.counters().order_mismatches == 0
    assert recorder.events == []


def test_resizing_the_ring_between_passes_changes_nothing(case, recorder, monkeypatch):
    """With poisoned slots, delayed copies and random decisions of the autosizer."""

    class RandomStallEngine(SlowCopyEngine):
        def begin_stall_window(self, stream):
            return FakeStallWindow(self.rng.random() ** 4)

    monkeypatch.setattr(buffer_autosize, "RING_WINDOW_PASSES", 1)
    model = build_wan(recompute=case[0])
    ring = stream_weights(
        model, list(model.blocks), RandomStallEngine(random.Random(3)), recorder, 2, poison=True
    )
    sizes = set()
    for extra in (1, 3, 9, 9, 9, 9):
        ring.release_extra_slots()
        ring.enable_autosize(extra * ring.counters().slot_nbytes)
        for _ in range(5):
            assert_parity(model, case, 2)
            sizes.add(ring.counters().slots)
    assert len(sizes) >= 3, sizes
    assert ring.counters().extra_slots == 0
    assert not [notice for notice in recorder.events if notice.fallback]


def test_sampling_and_gradient_accumulation(case, recorder):
    model = build_wan(recompute=case[0])
    resident = build_wan(recompute=case[0])
    ring = stream_weights(
        model, list(model.blocks), SlowCopyEngine(random.Random(0)), recorder, 2, True
    )
    _, batches, expected, allowed = case
    with torch.no_grad():
        sampled = forward(resident, batches[0])
    for _ in range(5):
        with torch.no_grad():
            for _ in range(2):
                loss = forward(model, batches[0])
                torch.testing.assert_close(loss, sampled, rtol=1e-3, atol=0)
        assert_parity(model, case, 2)
    model.zero_grad(set_to_none=True)
    for inputs in batches:
        forward(model, inputs).backward()
    accumulated = torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.requires_grad]
    )
    total = expected[0][1] + expected[1][1]
    rounding = 2**-8  # the gradients are added in bf16
    assert (accumulated - total).norm() / total.norm() < allowed + rounding
    assert ring.counters().order_mismatches == 0


def test_pageable_host_memory_works_too(case, recorder):
    """As on coherent machines; on this one the driver copies it in pieces."""
    model = build_wan(recompute=case[0])
    stream_weights(
        model, list(model.blocks), open_copy_engine(DEVICE, Link.COHERENT), recorder, 3, True
    )
    assert_parity(model, case, 4)


def test_a_model_loaded_in_host_memory_uses_only_the_slots_on_the_device(case, recorder):
    model = build_wan(torch.device("cpu"), recompute=case[0])
    before = torch.cuda.memory_allocated()
    ring = stream_weights(
        model, list(model.blocks), open_copy_engine(DEVICE, Link.MANAGED), recorder
    )
    counters = ring.counters()
    resident_nbytes = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    resident_nbytes += sum(buffer.nbytes for buffer in model.buffers())
    slack = 1024 * len(list(model.parameters())) + 2**20
    used = torch.cuda.memory_allocated() - before
    assert used <= resident_nbytes + counters.slots * counters.slot_nbytes + slack
    assert counters.host_nbytes > 3 * resident_nbytes
    assert_parity(model, case, 4)


def test_streaming_frees_device_memory_and_close_restores_the_weights(case, recorder):
    model = build_wan(recompute=case[0])
    resident = torch.cuda.memory_allocated()
    ring = stream_weights(
        model, list(model.blocks), open_copy_engine(DEVICE, Link.MANAGED), recorder, 2
    )
    counters = ring.counters()
    driver = open_cuda_driver()  # is_pinned() looks at the start of the storage, which is not
    kinds = {driver.pointer_kind(piece.data_ptr()) for piece in ring._host_memory}
    assert kinds == {PointerKind.HOST}
    frozen = sum(p.nbytes for p in model.blocks.parameters() if not p.requires_grad)
    streamed = torch.cuda.memory_allocated()
    assert streamed <= resident - frozen + 2 * counters.slot_nbytes + 2**20
    assert_parity(model, case, 2)
    ring.close()
    assert all(p.is_cuda for p in model.parameters())
    assert_parity(model, case, 2)


def test_a_failure_to_pin_memory_is_not_reported_by_the_next_kernel():
    copy_engine = CudaCopyEngine(DEVICE, pin=True)
    pages = copy_engine.allocate_host(4096)
    with pytest.raises(OffloadError, match="cannot be pinned"):
        copy_engine._register(pages)  # a second time
    assert (torch.ones(2, device=DEVICE) + 1).sum().item() == 4
    copy_engine.close()


def test_stalls_are_measured(case, recorder):
    model = build_wan(recompute=case[0])
    rng = random.Random(0)
    ring = stream_weights(model, list(model.blocks), SlowCopyEngine(rng, 20_000_000), recorder, 2)
    for seed in range(3):
        step(model, case[1][seed % 2])
    counters = ring.counters()
    assert counters.late > 0
    assert counters.stalled_s > 1e-3
    assert counters.on_time + counters.late + counters.on_demand == 3 * (2 * LAYERS - 1)
    assert ring.counters() == counters, "reading the counters changes nothing"


def test_streaming_adds_no_host_syncs(case, recorder):
    counts = []
    for streaming in (False, True):
        model = build_wan(recompute=case[0])
        if streaming:
            stream_weights(
                model, list(model.blocks), open_copy_engine(DEVICE, Link.MANAGED), recorder
            )
        for _ in range(3):
            step(model, case[1][0])
        counts.append(count_host_syncs(partial(step, model, case[1][0]), 2))
    assert counts[1] == counts[0]
