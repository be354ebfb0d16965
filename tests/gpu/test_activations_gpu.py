"""Activation offload on a GPU gives the gradients of the resident step, whatever the timing."""

import gc
import random
from functools import partial

import pytest
import torch
from sync_checks import count_host_syncs
from test_ring_gpu import (
    DEVICE,
    LAYERS,
    MIN_TOLERANCE,
    build_wan,
    delay_output,
    difference,
    forward,
    make_batch,
    step,
)

from gracetune.memory.driver import PointerKind, open_cuda_driver
from gracetune.memory.platform import Link
from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.copy_engine import CopyStream, CudaCopyEngine, open_copy_engine
from gracetune.offload.ring import stream_weights

pytestmark = pytest.mark.gpu
MIN_NBYTES = 64 * 1024
"""The model is narrow: its hidden states are 256 KiB."""
REPETITIONS = 20
MIXES = {
    "all": (range(LAYERS), ()),
    "half": (range(0, LAYERS, 2), ()),
    "first, streamed": ([0, 1, 2], range(LAYERS)),
    "all, streamed": (range(LAYERS), range(LAYERS)),
    "half, the others streamed": (range(0, LAYERS, 2), range(1, LAYERS, 2)),
}
"""(blocks that are offloaded, blocks whose weights are streamed)."""


class SlowCopyEngine(CudaCopyEngine):
    """Delays copies of every stream at random, by nothing or by far more than a block takes."""

    def __init__(self, rng, max_cycles=2_000_000):
        super().__init__(DEVICE, pin=True)
        self.rng = rng
        self.max_cycles = max_cycles

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        with torch.cuda.stream(self._streams[stream]):
            torch.cuda._sleep(self.rng.choice([1, 1, 1, self.max_cycles // 10, self.max_cycles]))
        return super().copy(target, source, poison, stream)


@pytest.fixture(scope="module")
def case():
    """Return (two batches, their resident results, tolerance from repetitions)."""
    model = build_wan()
    batches = [make_batch(seed) for seed in range(2)]
    expected = [step(model, inputs) for inputs in batches]
    repeats = [
        difference(step(model, inputs), reference)
        for _ in range(10)
        for inputs, reference in zip(batches, expected, strict=True)
    ]
    assert difference(expected[0], expected[1]) > 0.1, "the batches must differ"
    return batches, expected, max(2 * max(repeats), MIN_TOLERANCE)


def offloaded(recorder, mix="all", copy_engine=None, **settings):
    """Return a model, its activation offload, and its ring or None."""
    offloaded_indices, streamed_indices = MIXES[mix]
    model = build_wan()
    blocks = list(model.blocks)
    copy_engine = copy_engine or open_copy_engine(DEVICE, Link.MANAGED)
    ring = None
    if streamed_indices:
        ring = stream_weights(
            model, [blocks[k] for k in streamed_indices], copy_engine, recorder, 2, poison=True
        )
    offload = offload_activations(
        [blocks[k] for k in offloaded_indices],
        copy_engine,
        ring,
        recorder,
        MIN_NBYTES,
        other_blocks=[block for k, block in enumerate(blocks) if k not in offloaded_indices],
        settings=OffloadSettings(**settings),
    )
    return model, offload, ring


def assert_parity(model, case, repetitions=REPETITIONS):
    batches, expected, allowed = case
    differences = []
    for repetition in range(repetitions):
        index = repetition % len(batches)
        differences.append(difference(step(model, batches[index]), expected[index]))
    assert max(differences) <= allowed, f"{max(differences):.2e} > {allowed:.2e}: {differences}"


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("prefetch_blocks", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_offloaded_gradients_equal_those_of_the_resident_step(
    case, recorder, mix, prefetch_blocks, poison
):
    model, offload, ring = offloaded(recorder, mix, prefetch_blocks=prefetch_blocks, poison=poison)
    assert_parity(model, case)
    counters = offload.counters()
    assert counters.sent > REPETITIONS * 3 * 4, counters
    assert counters.fetched_nbytes > 0.3 * counters.sent_nbytes, counters
    assert counters.on_demand == 0, counters
    assert counters.prefetch_blocks == prefetch_blocks
    assert ring is None or ring.counters().order_mismatches == 0
    assert len(recorder.texts()) == 1, "host memory grows only in the first step"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
def test_random_delays_of_blocks_and_copies_change_no_gradient(case, recorder, mix, seed):
    rng = random.Random(seed)
    model, _, _ = offloaded(
        recorder, mix, SlowCopyEngine(rng), prefetch_blocks=1 + seed, poison=seed == 2
    )
    for block in model.blocks:
        block.register_forward_hook(partial(delay_output, rng))
    assert_parity(model, case)


@pytest.mark.parametrize("poison", [False, True])
def test_discarded_graphs_do_no_harm(case, recorder, poison):
    rng = random.Random(0)
    model, _, _ = offloaded(recorder, "all", SlowCopyEngine(rng), prefetch_blocks=2, poison=poison)
    middle = next(p for p in model.blocks[3].parameters() if p.requires_grad)
    for _ in range(6):
        loss = forward(model, case[0][0])
        torch.autograd.grad(loss, [middle])  # prefetches blocks that are never read
        del loss
        ones = [torch.ones(2**16, device=DEVICE) for _ in range(160)]  # reuses freed memory
        forward(model, case[0][1])
        assert_parity(model, case, 2)
        assert all((tensor == 1).all() for tensor in ones)


def test_a_retained_graph_runs_backward_twice(case, recorder):
    model, _, _ = offloaded(recorder, "all", SlowCopyEngine(random.Random(1)), poison=True)
    batches, expected, allowed = case
    model.zero_grad(set_to_none=True)
    loss = forward(model, batches[0])
    loss.backward(retain_graph=True)
    loss.backward()
    accumulated = torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.requires_grad]
    )
    total = 2 * expected[0][1]
    assert ((accumulated - total).norm() / total.norm()).item() < allowed + 2**-8  # added in bf16


def test_sampling_and_gradient_accumulation_with_offload(case, recorder):
    model, offload, _ = offloaded(recorder, "all", SlowCopyEngine(random.Random(2)), poison=True)
    for _ in range(4):
        sent = offload.counters().sent
        with torch.no_grad():
            forward(model, case[0][0])
        assert offload.counters().sent == sent
        assert_parity(model, case, 2)
    batches, expected, allowed = case
    model.zero_grad(set_to_none=True)
    for inputs in batches:
        forward(model, inputs).backward()
    accumulated = torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.requires_grad]
    )
    total = expected[0][1] + expected[1][1]
    assert ((accumulated - total).norm() / total.norm()).item() < allowed + 2**-8


@pytest.mark.parametrize("streams", [False, True])
def test_inputs_of_the_models_own_checkpoints_are_offloaded(case, recorder, streams):
    model = build_wan()
    copy_engine = SlowCopyEngine(random.Random(3))
    blocks = list(model.blocks)
    ring = stream_weights(model, blocks, copy_engine, recorder, 2, poison=True) if streams else None
    offload = offload_activations(
        [],
        copy_engine,
        ring,
        recorder,
        MIN_NBYTES,
        other_blocks=blocks,
        settings=OffloadSettings(poison=True),
    )
    model.enable_gradient_checkpointing(offload.checkpoint)
    assert_parity(model, case)
    counters = offload.counters()
    assert counters.sent >= REPETITIONS * LAYERS
    assert counters.on_demand == 0


@pytest.mark.filterwarnings("ignore")  # the compiler reads attributes that torch warns about
@pytest.mark.parametrize("mix", ["all", "all, streamed"])
def test_compiled_blocks_are_offloaded(case, recorder, mix):
    resident = build_wan()
    for block in resident.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    batches, _, _ = case
    expected = [step(resident, inputs) for inputs in batches]
    repeats = [difference(step(resident, batches[k % 2]), expected[k % 2]) for k in range(6)]
    model, offload, _ = offloaded(recorder, mix, poison=True)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    assert_parity(model, (batches, expected, max(2 * max(repeats), MIN_TOLERANCE)))
    assert offload.counters().sent > REPETITIONS * LAYERS
    assert offload.counters().on_demand == 0


def peak_of(model, inputs):
    """Return the peak memory that a step adds, after warm-up."""
    for _ in range(3):
        step(model, inputs)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, inputs)
    return torch.cuda.max_memory_allocated() - before


def test_offload_reduces_peak_memory(case, recorder):
    """Of six blocks at most two are copied out or fetched at a time."""
    inputs = make_batch(0)
    inputs = {name: value.repeat(8, *[1] * (value.ndim - 1)) for name, value in inputs.items()}
    resident_peak = peak_of(build_wan(), inputs)
    model, offload, _ = offloaded(recorder)
    offloaded_peak = peak_of(model, inputs)
    sent = offload.counters().sent_nbytes / 4
    saved = resident_peak - offloaded_peak
    assert saved > 0.9 * sent * (LAYERS - 3) / LAYERS, (resident_peak, offloaded_peak, sent)
    first = torch.cuda.memory_allocated()
    for _ in range(5):
        step(model, inputs)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= first, "no memory leaks"


def test_stalls_are_measured_and_the_prefetch_distance_grows(case, recorder):
    copy_engine = SlowCopyEngine(random.Random(0), max_cycles=4_000_000)
    model, offload, _ = offloaded(recorder, "all", copy_engine, prefetch_nbytes=2**30)
    for seed in range(14):
        step(model, case[0][seed % 2])
        torch.cuda.synchronize()
    counters = offload.counters()
    assert counters.late > 0
    assert counters.stalled_s > 1e-3
    texts = recorder.texts()
    assert any("prefetch distance raised to 2 blocks" in text for text in texts), texts


def test_offload_adds_no_host_syncs(case, recorder):
    counts = []
    for model in (build_wan(), offloaded(recorder)[0], offloaded(recorder, "all, streamed")[0]):
        for _ in range(3):
            step(model, case[0][0])
        counts.append(count_host_syncs(partial(step, model, case[0][0]), steps=2))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("link", [Link.MANAGED, Link.COHERENT])
def test_host_memory_is_pinned_on_every_machine_and_freed(case, recorder, link):
    copy_engine = open_copy_engine(DEVICE, link)
    model, offload, _ = offloaded(recorder, copy_engine=copy_engine)
    assert_parity(model, case, 4)
    driver = open_cuda_driver()
    slabs = list(offload._pool._slabs)
    assert {driver.pointer_kind(slab.data_ptr()) for slab in slabs} == {PointerKind.HOST}
    offload.close()
    assert PointerKind.HOST not in {driver.pointer_kind(slab.data_ptr()) for slab in slabs}
    assert_parity(model, case, 4)
    copy_engine.close()


def test_copies_are_ordered_against_the_compute_stream():
    """A copy out reads what was computed before it and nothing later, however late it starts."""
    copy_engine = SlowCopyEngine(random.Random(0), max_cycles=20_000_000)
    host = copy_engine.allocate_pinned(4 * 2**20)
    for value in range(8):
        torch.cuda._sleep(5_000_000)
        device = torch.full((2**20,), float(value), device=DEVICE)
        flat = device.view(torch.uint8)
        out = copy_engine.copy(host, flat, False, CopyStream.ACTIVATIONS_OUT)
        out.wait(prefetched=True)
        device.fill_(-1.0)
        back = torch.empty_like(flat)
        copy_engine.copy(back, host, True, CopyStream.ACTIVATIONS_IN).wait(prefetched=True)
        assert (back.view(torch.float32) == value).all()
    assert copy_engine.stalls(CopyStream.ACTIVATIONS_OUT).stalled_s > 0
    assert copy_engine.stalls(CopyStream.ACTIVATIONS_IN).stalled_s > 0
    assert copy_engine.stalls().stalled_s == 0
    copy_engine.free_host(host)
    copy_engine.free_host(host)
