"""Offloaded activations on a CUDA device: the resident step's gradients, whoever is slow."""

import gc
import random
from functools import partial

import pytest
import torch
from test_ring_gpu import DEVICE, LAYERS, batch, delay, difference, forward, step, wan
from waiting import count_waits

from gracetune.memory.driver import PointerKind, open_cuda_driver
from gracetune.memory.platform import Link
from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.copies import CopyStream, CudaCopyEngine, open_copy_engine
from gracetune.offload.ring import stream_weights

pytestmark = pytest.mark.gpu
SMALL = 64 * 1024
"""Bytes: the model is narrow, and hidden states are 256 KiB."""
LEAST_DIFFERENCE = 1e-4
REPETITIONS = 20
MIXES = {
    "all": (range(LAYERS), ()),
    "half": (range(0, LAYERS, 2), ()),
    "first, streamed": ([0, 1, 2], range(LAYERS)),
    "all, streamed": (range(LAYERS), range(LAYERS)),
    "half, the others streamed": (range(0, LAYERS, 2), range(1, LAYERS, 2)),
}
"""Blocks that are offloaded, and blocks whose weights are streamed."""


class SlowLanes(CudaCopyEngine):
    """Copies of any lane that take at random no time or far longer than a block."""

    def __init__(self, dice, longest=2_000_000):
        super().__init__(DEVICE, pin=True)
        self.dice = dice
        self.longest = longest

    def copy(self, target, source, poison, lane=CopyStream.WEIGHTS):
        with torch.cuda.stream(self._streams[lane]):
            torch.cuda._sleep(self.dice.choice([1, 1, 1, self.longest // 10, self.longest]))
        return super().copy(target, source, poison, lane)


@pytest.fixture(scope="module")
def case():
    """Two batches, the resident results, and how far those repeat themselves."""
    model = wan()
    batches = [batch(seed) for seed in range(2)]
    expected = [step(model, inputs) for inputs in batches]
    repeats = [
        difference(step(model, inputs), reference)
        for _ in range(10)
        for inputs, reference in zip(batches, expected, strict=True)
    ]
    assert difference(expected[0], expected[1]) > 0.1, "the batches must be told apart"
    return batches, expected, max(2 * max(repeats), LEAST_DIFFERENCE)


def offloaded(told, mix="all", mover=None, **settings):
    """A model, its offload, and its ring where it has one."""
    which, streamed = MIXES[mix]
    model = wan()
    blocks = list(model.blocks)
    mover = mover or open_copy_engine(DEVICE, Link.MANAGED)
    ring = None
    if streamed:
        ring = stream_weights(model, [blocks[k] for k in streamed], mover, told, 2, poison=True)
    offload = offload_activations(
        [blocks[k] for k in which],
        mover,
        ring,
        told,
        SMALL,
        other_blocks=[block for k, block in enumerate(blocks) if k not in which],
        settings=OffloadSettings(**settings),
    )
    return model, offload, ring


def assert_parity(model, case, repetitions=REPETITIONS):
    batches, expected, allowed = case
    found = []
    for repetition in range(repetitions):
        which = repetition % len(batches)
        found.append(difference(step(model, batches[which]), expected[which]))
    assert max(found) <= allowed, f"{max(found):.2e} of {allowed:.2e} allowed, {found}"


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_gradients_are_those_of_the_resident_step(case, told, mix, ahead, poison):
    model, offload, ring = offloaded(told, mix, ahead=ahead, poison=poison)
    assert_parity(model, case)
    counters = offload.counters()
    assert counters.sent > REPETITIONS * 3 * 4, counters
    assert counters.fetched_nbytes > 0.3 * counters.sent_nbytes, counters
    assert counters.on_demand == 0, counters
    assert counters.prefetch_blocks == ahead
    assert ring is None or ring.counters().order_mismatches == 0
    assert len(told.texts()) == 1, "host memory grows in the first step alone"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", MIXES)
def test_random_times_of_blocks_and_copies(case, told, mix, seed):
    dice = random.Random(seed)
    model, _, _ = offloaded(told, mix, SlowLanes(dice), ahead=1 + seed, poison=seed == 2)
    for block in model.blocks:
        block.register_forward_hook(partial(delay, dice))
    assert_parity(model, case)


@pytest.mark.parametrize("poison", [False, True])
def test_graphs_that_are_thrown_away_half_way(case, told, poison):
    dice = random.Random(0)
    model, _, _ = offloaded(told, "all", SlowLanes(dice), ahead=2, poison=poison)
    middle = next(p for p in model.blocks[3].parameters() if p.requires_grad)
    for _ in range(6):
        loss = forward(model, case[0][0])
        torch.autograd.grad(loss, [middle])  # blocks are brought ahead that nobody reads
        del loss
        ones = [torch.ones(2**16, device=DEVICE) for _ in range(160)]  # takes what is given up
        forward(model, case[0][1])
        assert_parity(model, case, 2)
        assert all((one == 1).all() for one in ones)


def test_a_graph_that_is_used_twice(case, told):
    model, _, _ = offloaded(told, "all", SlowLanes(random.Random(1)), poison=True)
    batches, expected, allowed = case
    model.zero_grad(set_to_none=True)
    loss = forward(model, batches[0])
    loss.backward(retain_graph=True)
    loss.backward()
    both = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.requires_grad])
    total = 2 * expected[0][1]
    assert ((both - total).norm() / total.norm()).item() < allowed + 2**-8  # summed in bf16


def test_sampling_and_accumulation_between_steps(case, told):
    model, offload, _ = offloaded(told, "all", SlowLanes(random.Random(2)), poison=True)
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
    both = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.requires_grad])
    total = expected[0][1] + expected[1][1]
    assert ((both - total).norm() / total.norm()).item() < allowed + 2**-8


@pytest.mark.parametrize("streams", [False, True])
def test_the_input_of_a_checkpoint_that_the_model_makes(case, told, streams):
    model = wan()
    mover = SlowLanes(random.Random(3))
    blocks = list(model.blocks)
    ring = stream_weights(model, blocks, mover, told, 2, poison=True) if streams else None
    offload = offload_activations(
        [], mover, ring, told, SMALL, other_blocks=blocks, settings=OffloadSettings(poison=True)
    )
    model.enable_gradient_checkpointing(offload.checkpoint)
    assert_parity(model, case)
    counters = offload.counters()
    assert counters.sent >= REPETITIONS * LAYERS
    assert counters.on_demand == 0


@pytest.mark.filterwarnings("ignore")  # compilers look at what torch warns of looking at
@pytest.mark.parametrize("mix", ["all", "all, streamed"])
def test_compiled_blocks(case, told, mix):
    resident = wan()
    for block in resident.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    batches, _, _ = case
    expected = [step(resident, inputs) for inputs in batches]
    repeats = [difference(step(resident, batches[k % 2]), expected[k % 2]) for k in range(6)]
    model, offload, _ = offloaded(told, mix, poison=True)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    assert_parity(model, (batches, expected, max(2 * max(repeats), LEAST_DIFFERENCE)))
    assert offload.counters().sent > REPETITIONS * LAYERS
    assert offload.counters().on_demand == 0


def peak_of(model, inputs):
    """Bytes that a step adds at its highest, once all is warm."""
    for _ in range(3):
        step(model, inputs)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, inputs)
    return torch.cuda.max_memory_allocated() - before


def test_the_device_holds_less(case, told):
    """Of six blocks two are leaving at most, or are on their way back."""
    inputs = batch(0)
    inputs = {name: value.repeat(8, *[1] * (value.ndim - 1)) for name, value in inputs.items()}
    kept = peak_of(wan(), inputs)
    model, offload, _ = offloaded(told)
    held = peak_of(model, inputs)
    sent = offload.counters().sent_nbytes / 4
    spared = kept - held
    assert spared > 0.9 * sent * (LAYERS - 3) / LAYERS, (kept, held, sent)
    first = torch.cuda.memory_allocated()
    for _ in range(5):
        step(model, inputs)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= first, "nothing is left behind"


def test_waiting_is_measured_and_the_distance_grows_within_its_budget(case, told):
    mover = SlowLanes(random.Random(0), longest=4_000_000)
    model, offload, _ = offloaded(told, "all", mover, ahead_nbytes=2**30)
    for seed in range(14):
        step(model, case[0][seed % 2])
        torch.cuda.synchronize()
    counters = offload.counters()
    assert counters.late > 0
    assert counters.stalled_s > 1e-3
    assert any("brought back ahead: 2" in text for text in told.texts()), told.texts()


def test_an_offloaded_step_waits_for_the_device_no_more_than_a_resident_one(case, told):
    counts = []
    for model in (wan(), offloaded(told)[0], offloaded(told, "all, streamed")[0]):
        for _ in range(3):
            step(model, case[0][0])
        counts.append(count_waits(partial(step, model, case[0][0]), steps=2))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("link", [Link.MANAGED, Link.COHERENT])
def test_host_memory_is_pinned_on_every_machine_and_let_go(case, told, link):
    mover = open_copy_engine(DEVICE, link)
    model, offload, _ = offloaded(told, mover=mover)
    assert_parity(model, case, 4)
    driver = open_cuda_driver()
    slabs = list(offload._pool._slabs)
    assert {driver.pointer_kind(slab.data_ptr()) for slab in slabs} == {PointerKind.HOST}
    offload.close()
    assert PointerKind.HOST not in {driver.pointer_kind(slab.data_ptr()) for slab in slabs}
    assert_parity(model, case, 4)
    mover.close()


def test_the_lanes_are_streams_of_their_own_and_wait_for_what_is_queued():
    """A copy out reads what is computed before it and not after, however late it starts."""
    mover = SlowLanes(random.Random(0), longest=20_000_000)
    host = mover.allocate_pinned(4 * 2**20)
    for value in range(8):
        torch.cuda._sleep(5_000_000)
        device = torch.full((2**20,), float(value), device=DEVICE)
        flat = device.view(torch.uint8)
        out = mover.copy(host, flat, False, CopyStream.ACTIVATIONS_OUT)
        out.wait(prefetched=True)
        device.fill_(-1.0)
        back = torch.empty_like(flat)
        mover.copy(back, host, True, CopyStream.ACTIVATIONS_IN).wait(prefetched=True)
        assert (back.view(torch.float32) == value).all()
    assert mover.stalls(CopyStream.ACTIVATIONS_OUT).stalled_s > 0
    assert mover.stalls(CopyStream.ACTIVATIONS_IN).stalled_s > 0
    assert mover.stalls().stalled_s == 0
    mover.free_host(host)
    mover.free_host(host)
