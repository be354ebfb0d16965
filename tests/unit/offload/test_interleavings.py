"""Every interleaving of copies and compute gives the result of a model without offloading.

The tests run the real weight ring, activation offload, optimizer state and CUDA copy engine on a
recorded CUDA runtime (`fakes/recorded_cuda.py`). Each test shows two things:

(a) In issue order, losses, gradients and updates equal those of the resident model bit for bit.
(b) In every order in which the streams may execute the recorded operations, each operation reads
    the same data as in issue order (`fakes/interleavings.py`).

Together they prove that every interleaving of the recorded steps gives the right result. The host
issues the same operations in all of them: its decisions depend on the device only through
`Event.query` and `Event.elapsed_time`, whose results are parameters of the tests. The interleavings
are enumerated, not sampled; their number is printed at the end.
"""

import copy
import math
import random
from collections import defaultdict
from contextlib import contextmanager
from itertools import cycle, product

import pytest
import torch
from fakes import planted_races
from fakes.interleavings import explore
from fakes.recorded_cuda import RecordedCopyEngine, record_cuda
from offloaded_model import MODES, MixedModel
from streamed_model import Block, SmallBlock, assert_same, build_model, step, streamed
from torch import nn

from gracetune.config.schema import OptimizerSection
from gracetune.errors import RunFailedError
from gracetune.offload import buffer_autosize
from gracetune.offload.activations import offload_activations
from gracetune.offload.checkpointing import wrap_blocks
from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import OptimizerStepper, StateOffloadSettings

SMALL = {"shape": (1, 3)}
"""Inputs of which the activation offload sends three tensors per small block."""
HOST_NBYTES = 1 << 16
READY = {"never": [False], "always": [True], "alternating": [True, False]}
"""Results of `Event.query`."""


@pytest.fixture(scope="module")
def explorations(summary_lines):
    results = defaultdict(list)
    yield results
    total = [result for scenario in results.values() for result in scenario]
    for name, scenario in [*results.items(), *([("in total", total)] if total else [])]:
        states = sum(result.states for result in scenario)
        interleavings = in_words(sum(result.interleavings for result in scenario))
        summary_lines.append(
            f"{states:>9,} states {interleavings:>7} interleavings "
            f"{len(scenario):>4} recordings  {name}"
        )


def in_words(count):
    exponent = int(math.log10(count))
    return f"{count:,}" if exponent < 6 else f"{count // 10**exponent}e{exponent}"


@pytest.fixture
def prove(request, explorations):
    """Return a function that asserts that no interleaving of a recording goes wrong."""

    def prove(recording):
        result = explore(recording)
        assert result.violation is None, str(result.violation)
        assert result.interleavings > 1, "nothing runs at the same time"
        explorations[request.node.originalname].append(result)

    return prove


@contextmanager
def choose(ready="never", elapsed_ms=(0.0,)):
    """Record, with these results of `Event.query` and `Event.elapsed_time`."""
    answers, times = cycle(READY[ready]), cycle(elapsed_ms)
    with record_cuda(lambda: next(answers), lambda: next(times)) as cuda:
        yield cuda


def run_steps(cuda, twin, model, steps):
    """Run steps of a model and of its twin, and compare them."""
    cuda.name_blocks(twin.blocks)
    for arguments in steps:
        expected = step(model, **arguments)
        assert_same(step(twin, **arguments), expected)


@torch.no_grad()
def sample(model):
    return model(torch.ones(1, 3, 4))


# The weight ring


RING_SHAPES = [
    *product([3, 4], [2, 3], ["keep", "checkpoint", "reentrant", "pairs"], [SmallBlock]),
    *product([5], [2, 3], ["keep", "checkpoint"], [SmallBlock]),
    *product([3], [2, 3], ["keep", "checkpoint"], [Block]),
]


@pytest.mark.parametrize(("num_blocks", "slots", "checkpointing", "block_class"), RING_SHAPES)
@pytest.mark.parametrize("poison", [False, True])
def test_streamed_weights(num_blocks, slots, checkpointing, block_class, poison, recorder, prove):
    model = build_model(num_blocks, checkpointing, block_class=block_class)
    steps = [{"seed": seed, "micro_batches": 1 + seed} for seed in range(2)]
    with choose() as cuda:
        engine = RecordedCopyEngine(cuda, pin=poison)
        twin, ring = streamed(model, recorder, None, slots, engine, poison)
        run_steps(cuda, twin, model, steps)
        sample(twin)  # prefetches blocks that no one waits for
        ring.close()
    prove(cuda.recording)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3, 4, 5])
@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint", "reentrant", "pairs"])
def test_streamed_weights_of_larger_models(slots, checkpointing, recorder, prove):
    model = build_model(8, checkpointing)
    with choose() as cuda:
        twin, ring = streamed(model, recorder, None, slots, RecordedCopyEngine(cuda))
        run_steps(cuda, twin, model, [{"seed": seed, "micro_batches": 2} for seed in range(4)])
        ring.close()
    prove(cuda.recording)


@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint", "pairs"])
@pytest.mark.parametrize("slots", [2, 3])
def test_streamed_weights_in_any_order(slots, checkpointing, recorder, prove):
    """Blocks are repeated, skipped and reordered, so that fetches are predicted wrongly."""
    orders = [None, [0, 1, 0, 1, 2, 3], [3, 1], [2, 2], None, [3, 2, 1, 0], None]
    model = build_model(4, checkpointing, block_class=SmallBlock)
    with choose() as cuda:
        twin, _ = streamed(model, recorder, None, slots, RecordedCopyEngine(cuda))
        steps = [{"seed": seed, "order": order} for seed, order in enumerate(orders)]
        run_steps(cuda, twin, model, steps)
    prove(cuda.recording)


@pytest.mark.parametrize(("ready", "grows"), [("never", False), ("always", True)])
@pytest.mark.parametrize("elapsed", ["none", "constant", "falling"])
def test_autosized_ring(ready, grows, elapsed, recorder, prove, monkeypatch):
    monkeypatch.setattr(buffer_autosize, "RING_WINDOW_PASSES", 1)
    model = build_model(4, block_class=SmallBlock)
    times = {"none": [0.0], "constant": [9.0], "falling": [0.95**k for k in range(200)]}
    with choose(ready, times[elapsed]) as cuda:
        twin, ring = streamed(model, recorder, None, 2, RecordedCopyEngine(cuda))
        ring.enable_autosize(2 * ring.counters().slot_nbytes)
        run_steps(cuda, twin, model, [{"seed": seed} for seed in range(5)])
        assert any("steps waited" in text for text in recorder.texts()) == (
            grows and elapsed != "none"
        )
        sample(twin)  # prefetches blocks that no one waits for
        ring.release_extra_slots()
        assert_same(step(twin, 5), step(model, 5))
        ring.close()
    prove(cuda.recording)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.high, self.low = (build_model(3, seed=k, block_class=SmallBlock) for k in range(2))


@pytest.mark.parametrize("slots", [2, 3])
def test_experts_that_share_a_ring(slots, recorder, prove):
    experts = Experts()
    twins = copy.deepcopy(experts)
    blocks = [*twins.high.blocks, *twins.low.blocks]
    with choose() as cuda:
        ring = stream_weights(
            twins,
            blocks,
            RecordedCopyEngine(cuda),
            recorder,
            slots,
            poison=True,
            submodels=[twins.high, twins.low],
        )
        cuda.name_blocks(blocks)
        for seed, name in enumerate(["high", "low", "low", "high", "low"]):
            expected = step(getattr(experts, name), seed)
            assert_same(step(getattr(twins, name), seed), expected)
        ring.close()
    prove(cuda.recording)


@contextmanager
def nested_passes(model, where):
    """Call the model without gradients before blocks 0 and 2, or inside them; yield the outputs."""
    outputs, depth, groups = [], [], model.groups

    def sample_once(*_):
        if not depth:
            depth.append(1)
            outputs.append(sample(model))
            depth.clear()

    def groups_and_samples(order):
        for index, group in enumerate(groups(order)):
            if index in (0, 2):
                sample_once()
            yield group

    hooks = []
    if where == "before blocks":
        model.groups = groups_and_samples
    if where == "inside blocks":
        hooks = [model.blocks[index].register_forward_pre_hook(sample_once) for index in (0, 2)]
    yield outputs
    model.groups = groups
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("where", "mode"),
    [
        *product(["before backward", "before blocks"], ["keep", "recompute", "offload", "inputs"]),
        *product(["inside blocks"], ["keep", "recompute", "offload"]),
    ],
)
def test_passes_without_gradients(where, mode, recorder, prove):
    model = build_model(4, block_class=SmallBlock)

    def run(each):
        each.zero_grad(set_to_none=True)
        with nested_passes(each, where) as outputs:
            loss = each(torch.ones(1, 3, 4)).square().mean()
        if where == "before backward":
            outputs.append(sample(each))
        loss.backward()
        return [loss.detach(), *outputs], {n: p.grad for n, p in each.named_parameters()}

    with choose() as cuda:
        mixed = record_activations(cuda, model, [mode] * 4, range(4), recorder)
        cuda.name_blocks(mixed.model.blocks)
        for _ in range(2):
            expected = run(model)
            assert_same(run(mixed.model), expected)
    prove(cuda.recording)


@pytest.mark.parametrize("modes", [["lean"] * 4, ["recompute", "lean", "keep", "recompute"]])
@pytest.mark.parametrize("offloads", [False, True])
def test_blocks_that_the_plan_wraps(modes, offloads, recorder, prove):
    """Streamed blocks are wrapped by checkpoints, and their inputs offloaded, as in training."""
    model = build_model(4, block_class=SmallBlock)
    with choose() as cuda:
        engine = RecordedCopyEngine(cuda)
        twin, ring = streamed(model, recorder, None, 2, engine)
        wrap_blocks(twin.blocks, modes, None, ring)
        if offloads:
            chosen = [b for b, mode in zip(twin.blocks, modes, strict=True) if mode == "recompute"]
            others = [block for block in twin.blocks if block not in chosen]
            offload_activations(others, engine, ring, recorder, 64, checkpointed_blocks=chosen)
        run_steps(cuda, twin, model, [{"seed": seed, **SMALL} for seed in range(3)])
    prove(cuda.recording)


def test_a_model_that_changes_its_stream(recorder, prove):
    model = build_model(4, block_class=SmallBlock)
    with choose() as cuda:
        mixed = record_activations(cuda, model, ["offload"] * 4, range(4), recorder)
        cuda.name_blocks(mixed.model.blocks)
        compute = cuda.current
        for seed, stream in enumerate([compute, cuda.new_stream("other compute"), compute]):
            expected = step(model, seed, **SMALL)
            with cuda.stream(stream):
                assert_same(step(mixed.model, seed, **SMALL), expected)
    prove(cuda.recording)


# Offloaded activations

ACTIVATION_SHAPES = [
    (["offload"] * 3, []),
    (["offload"] * 5, []),
    (["offload"] * 4, [0, 1, 2, 3]),
    (["inputs"] * 4, [0, 1, 2, 3]),
    (["inside"] * 4, [0, 2]),
    (["offload", "inputs", "keep", "offload"], [0, 1, 3]),
    (["recompute", "offload", "inside", "offload"], [1, 2, 3]),
]


def record_activations(cuda, model, modes, streams, recorder, **options):
    engine = RecordedCopyEngine(cuda)
    return MixedModel(model, modes, streams, recorder, engine, host_nbytes=HOST_NBYTES, **options)


@pytest.mark.parametrize(("modes", "streams"), ACTIVATION_SHAPES)
@pytest.mark.parametrize("distance", [1, 2])
@pytest.mark.parametrize("poison", [False, True])
def test_offloaded_activations(modes, streams, distance, poison, recorder, prove):
    """Host buffers are reused by later steps, and by steps with other sizes."""
    model = build_model(len(modes), block_class=SmallBlock)
    steps = [
        {"seed": 0, "shape": (1, 3), "micro_batches": 2},
        {"seed": 1, "shape": (1, 7)},
        {"seed": 2, "shape": (1, 3)},
    ]
    with choose() as cuda:
        mixed = record_activations(
            cuda, model, modes, streams, recorder, prefetch_blocks=distance, poison=poison
        )
        run_steps(cuda, mixed.model, model, steps)
        mixed.offload.close()
    prove(cuda.recording)


@pytest.mark.parametrize("streams", [[], [0, 1, 2]])
@pytest.mark.parametrize("distance", [1, 2])
@pytest.mark.parametrize("poison", [False, True])
def test_offloaded_activations_of_larger_blocks(streams, distance, poison, recorder, prove):
    model = build_model(3)
    with choose() as cuda:
        mixed = record_activations(
            cuda,
            model,
            ["offload"] * 3,
            streams,
            recorder,
            prefetch_blocks=distance,
            poison=poison,
        )
        run_steps(cuda, mixed.model, model, [{"seed": 0}, {"seed": 1}])
    prove(cuda.recording)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [[], range(6)])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_offloaded_activations_of_larger_models(streams, distance, recorder, prove):
    model = build_model(6)
    with choose() as cuda:
        mixed = record_activations(
            cuda, model, ["offload"] * 6, streams, recorder, prefetch_blocks=distance
        )
        run_steps(cuda, mixed.model, model, [{"seed": seed} for seed in range(3)])
    prove(cuda.recording)


@pytest.mark.parametrize("ready", READY)
@pytest.mark.parametrize("elapsed", [[0.0], [9.0]])
def test_a_prefetch_distance_that_is_tuned(ready, elapsed, recorder, prove, monkeypatch):
    monkeypatch.setattr(buffer_autosize, "DISTANCE_WINDOW_PASSES", 1)
    model = build_model(5, block_class=SmallBlock)
    with choose(ready, elapsed) as cuda:
        mixed = record_activations(
            cuda, model, ["offload"] * 5, [], recorder, prefetch_nbytes=1 << 12
        )
        run_steps(cuda, mixed.model, model, [{"seed": seed, **SMALL} for seed in range(4)])
    raised = any("raised to 2" in text for text in recorder.texts())
    assert raised == (ready == "always" and elapsed != [0.0])
    prove(cuda.recording)


def discard_graphs(twin, model, seeds):
    """Drop graphs without a backward, and after a backward that stops early, between steps."""
    for seed in seeds:
        loss = twin(torch.ones(1, 3, 4)).square().mean()
        if seed % 2 == 0:  # backward starts, prefetches activations, and stops
            torch.autograd.grad(loss, [twin.blocks[2].a], retain_graph=seed % 4 == 0)
        del loss
        expected = step(model, seed, **SMALL)
        assert_same(step(twin, seed, **SMALL), expected)


@pytest.mark.parametrize("streams", [[], range(4)])
@pytest.mark.parametrize("distance", [1, 2])
@pytest.mark.parametrize("poison", [False, True])
def test_a_backward_that_is_never_run(streams, distance, poison, recorder, prove):
    model = build_model(4, block_class=SmallBlock)
    with choose() as cuda:
        mixed = record_activations(
            cuda,
            model,
            ["offload"] * 4,
            streams,
            recorder,
            prefetch_blocks=distance,
            poison=poison,
        )
        cuda.name_blocks(mixed.model.blocks)
        discard_graphs(mixed.model, model, range(5))
        mixed.offload.close()
    prove(cuda.recording)


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed, recorder, prove):
    """Any mix of kept, recomputed, offloaded and streamed blocks, called in any order."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    model = build_model(count, seed=seed, block_class=SmallBlock)
    with choose(rng.choice(sorted(READY))) as cuda:
        mixed = record_activations(
            cuda,
            model,
            [rng.choice([*MODES, "offload", "offload"]) for _ in range(count)],
            [index for index in range(count) if rng.random() < 0.6] or [0],
            recorder,
            prefetch_blocks=rng.randint(1, 3),
            poison=rng.random() < 0.5,
        )
        steps = [
            {
                "seed": number,
                "order": rng.choices(range(count), k=rng.randint(1, 9)) if number % 2 else None,
                "micro_batches": rng.randint(1, 2),
                "shape": (1, rng.choice([3, 5])),
            }
            for number in range(4)
        ]
        run_steps(cuda, mixed.model, model, steps)
    prove(cuda.recording)


# Optimizer state in host memory


class HostedOptimizer:
    """An optimizer whose state is in host memory, and the same with its state on the device."""

    def __init__(self, cuda, slots, bucket_numel, poison, **options):
        options = {"name": "adamw", "dtype": torch.float32, "num_parameters": 5} | options
        self.generator = torch.Generator().manual_seed(0)
        shapes = [(8, 4 + index % 2) for index in range(options["num_parameters"])]
        values = [torch.randn(shape, generator=self.generator) for shape in shapes]
        self.expected, self.parameters = (
            [nn.Parameter(value.to(options["dtype"], copy=True)) for value in values]
            for _ in range(2)
        )
        section = OptimizerSection(name=options["name"], lr=1e-2)
        self.resident, self.optimizer = (
            build_optimizer({f"p{index}": p for index, p in enumerate(parameters)}, section)
            for parameters in (self.expected, self.parameters)
        )
        engine, state_settings = RecordedCopyEngine(cuda), (bucket_numel, 48, slots, poison)
        self.stepper = OptimizerStepper(
            self.optimizer, engine, 8.0, StateOffloadSettings(*state_settings)
        )

    def set_gradients(self, without=()):
        for index, (p, q) in enumerate(zip(self.expected, self.parameters, strict=True)):
            grad = torch.randn(p.shape, generator=self.generator).to(p.dtype)
            p.grad, q.grad = (None, None) if index in without else (grad, grad.clone())

    def step(self, without=()):
        self.set_gradients(without)
        self.resident.step()
        self.stepper.step()

    def compare(self):
        """Compare parameters and state; the host reads the state."""
        self.stepper.synchronize()
        for p, q in zip(self.expected, self.parameters, strict=True):
            assert torch.equal(p, q)
            for key, value in self.resident.state[p].items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(self.optimizer.state[q][key], value), key

    def reload(self):
        self.stepper.synchronize()
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.stepper.load_state_dict(saved)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("bucket_numel", [32, 80])
@pytest.mark.parametrize("poison", [False, True])
def test_optimizer_state_in_host_memory(slots, bucket_numel, poison, prove):
    with choose() as cuda:
        hosted = HostedOptimizer(cuda, slots, bucket_numel, poison)
        hosted.stepper.set_host_share(1.0)
        for _ in range(4):
            hosted.step()
        hosted.compare()
        hosted.step()
        hosted.stepper.close()
        hosted.compare()
    prove(cuda.recording)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("ready", ["never", "always"])
def test_optimizer_state_that_moves(slots, ready, prove):
    """Shares change, state is loaded, and parameters get their first gradient late."""
    with choose(ready) as cuda:
        hosted = HostedOptimizer(cuda, slots, 40, poison=True)
        for share in (0.5, 1.0, 0.3, 0.0, 0.8):
            hosted.stepper.set_host_share(share)
            hosted.step(without=(2, 4) if share == 0.5 else ())
            hosted.step(without=(1,))
        hosted.compare()
        hosted.reload()
        hosted.step()
        hosted.step()
        hosted.compare()
    prove(cuda.recording)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_and_master_weights(name, dtype, prove):
    """With bf16 parameters the state has fp32 master weights."""
    with choose() as cuda:
        hosted = HostedOptimizer(cuda, 2, 32, poison=True, name=name, dtype=dtype)
        hosted.stepper.set_host_share(1.0)
        for _ in range(3):
            hosted.step()
        hosted.compare()
    prove(cuda.recording)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_of_an_optimizer(seed, prove):
    """Parameters are stepped in any combination, as with experts that are trained in turns."""
    rng = random.Random(seed)
    with choose() as cuda:
        slots, bucket_numel = rng.randint(2, 4), rng.choice([1, 40, 80])
        hosted = HostedOptimizer(cuda, slots, bucket_numel, poison=rng.random() < 0.5)
        for _ in range(rng.randint(4, 7)):
            if rng.random() < 0.4:
                hosted.stepper.set_host_share(rng.choice([0.2, 0.5, 1.0, 1.0]))
            hosted.step(without=rng.sample(range(5), rng.randint(0, 3)))
            if rng.random() < 0.3:
                hosted.compare()
        hosted.stepper.set_host_share(1.0)
        for _ in range(2):
            hosted.step()
        hosted.compare()
    prove(cuda.recording)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_optimizer_state_of_more_parameters(slots, prove):
    with choose() as cuda:
        hosted = HostedOptimizer(cuda, slots, 32, poison=True, num_parameters=12)
        hosted.stepper.set_host_share(1.0)
        for _ in range(8):
            hosted.step()
        hosted.compare()
    prove(cuda.recording)


# Errors


ERROR_SHAPES = {
    "streamed": (["keep"] * 3, range(3)),
    "streamed and recomputed": (["recompute"] * 3, range(3)),
    "offloaded": (["offload"] * 3, []),
    "streamed and offloaded": (["offload"] * 3, range(3)),
    "streamed with offloaded inputs": (["inputs"] * 3, range(3)),
}


def fail_everywhere(cuda, twin, expected):
    """Let one operation or allocation of a step fail, each in turn, and repeat the step.

    Returns the number of failed steps.
    """
    for index in range(1000):
        cuda.fail_at = cuda.num_calls + index
        try:
            step(twin, 0, **SMALL)
        except torch.OutOfMemoryError as error:
            error.with_traceback(None)  # as the training loop does
        else:
            cuda.fail_at = None
            return index
        twin.zero_grad(set_to_none=True)
        assert_same(step(twin, 0, **SMALL), expected)
    raise AssertionError("the step never ends")


@pytest.mark.parametrize("shape", ERROR_SHAPES)
def test_an_error_at_every_operation(shape, recorder, prove):
    modes, streams = ERROR_SHAPES[shape]
    model = build_model(3, block_class=SmallBlock)
    expected = step(model, 0, **SMALL)
    with choose() as cuda:
        mixed = record_activations(cuda, model, modes, streams, recorder)
        cuda.name_blocks(mixed.model.blocks)
        assert fail_everywhere(cuda, mixed.model, expected) > 50
    prove(cuda.recording)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ERROR_SHAPES)
def test_an_error_at_every_operation_of_the_first_step(shape, recorder, prove):
    modes, streams = ERROR_SHAPES[shape]
    model = build_model(3, block_class=SmallBlock)
    expected = step(model, 0, **SMALL)
    for index in range(1000):
        with choose() as cuda:
            mixed = record_activations(cuda, model, modes, streams, recorder)
            cuda.name_blocks(mixed.model.blocks)
            cuda.fail_at = cuda.num_calls + index
            try:
                step(mixed.model, 0, **SMALL)
            except torch.OutOfMemoryError as error:
                error.with_traceback(None)
            else:
                break
            mixed.model.zero_grad(set_to_none=True)
            for _ in range(2):
                assert_same(step(mixed.model, 0, **SMALL), expected)
        prove(cuda.recording)
    assert index > 50


@pytest.mark.slow
@pytest.mark.parametrize("shape", ERROR_SHAPES)
def test_an_error_at_every_operation_of_larger_models(shape, recorder, prove):
    modes, streams = ERROR_SHAPES[shape]
    model = build_model(5, block_class=SmallBlock)
    expected = step(model, 0, **SMALL)
    with choose() as cuda:
        mixed = record_activations(
            cuda, model, modes + modes[:2], range(5) if streams else [], recorder
        )
        cuda.name_blocks(mixed.model.blocks)
        assert fail_everywhere(cuda, mixed.model, expected) > 80
    prove(cuda.recording)


@pytest.mark.parametrize("slots", [2, 3])
def test_an_error_in_an_optimizer_step(slots, prove):
    """The step cannot be repeated, but copies that are left over must do no harm afterwards."""
    for index in range(1000):
        with choose() as cuda:
            hosted = HostedOptimizer(cuda, slots, 32, poison=False)
            hosted.stepper.set_host_share(1.0)
            for _ in range(2):
                hosted.step()
            hosted.set_gradients()
            cuda.fail_at = cuda.num_calls + index
            try:
                hosted.stepper.step()
            except RunFailedError as error:
                error.with_traceback(None)
            else:
                break
            cuda.fail_at = None
            hosted.stepper.close()
        prove(cuda.recording)
    assert index > 20


# Planted races


def run_ring(cuda, recorder):
    model = build_model(4, block_class=SmallBlock)
    twin, _ = streamed(model, recorder, None, 2, RecordedCopyEngine(cuda), poison=False)
    cuda.name_blocks(twin.blocks)
    for seed in range(2):
        step(twin, seed)


def run_activations(cuda, recorder):
    model = build_model(4, block_class=SmallBlock)
    mixed = record_activations(cuda, model, ["offload"] * 4, [], recorder, poison=False)
    cuda.name_blocks(mixed.model.blocks)
    discard_graphs(mixed.model, model, range(3))


def run_optimizer(cuda, _):
    hosted = HostedOptimizer(cuda, slots=2, bucket_numel=32, poison=False)
    hosted.stepper.set_host_share(1.0)
    for _ in range(3):
        hosted.step()
    return hosted


def run_optimizer_and_read(cuda, recorder):
    run_optimizer(cuda, recorder).compare()


STILL_WRITING = "copy_ is still writing"
FREED = "which was freed"
STALE = "the last writer is"
PLANTED = [
    (run_ring, "slot_race", "compute", "block 0: addmm", STALE),
    (run_ring, "copy_without_ready", "compute", "block 0: addmm", STILL_WRITING),
    (run_ring, "no_wait_for_copy", "compute", "block 0: addmm", STALE),
    (run_activations, "copy_without_ready", "activations out", "begin of block 0: copy_", STALE),
    (run_activations, "no_wait_for_copy", "activations out", "begin of block 0: copy_", FREED),
    (
        run_activations,
        "activations_released_early",
        "activations out",
        "begin of block 0: copy_",
        FREED,
    ),
    (
        run_activations,
        "host_buffers_reused_early",
        "activations back",
        "begin of backward of block 3: copy_",
        STILL_WRITING,
    ),
    (run_activations, "activations_read_early", "compute", "backward of block 1: mm", STALE),
    (run_optimizer, "copy_without_ready", "optimizer state in", "begin of copy_", STALE),
    (run_optimizer, "no_wait_for_copy", "optimizer state out", "begin of copy_", FREED),
    (
        run_optimizer,
        "state_slot_refilled_early",
        "optimizer state out",
        "begin of copy_",
        STILL_WRITING,
    ),
    (run_optimizer_and_read, "state_read_early", "host", "equal", STALE),
]


@pytest.mark.parametrize(("run", "race", "stream", "operation", "problem"), PLANTED)
def test_planted_races_are_found(run, race, stream, operation, problem, recorder):
    with getattr(planted_races, race)(), record_cuda() as cuda:
        run(cuda, recorder)
    violation = explore(cuda.recording).violation
    assert violation is not None
    assert (violation.stream, violation.operation) == (stream, operation)
    assert problem in violation.problem


@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint"])
@pytest.mark.parametrize("slots", [2, 3])
def test_the_slot_race_gives_wrong_gradients_without_a_gpu(slots, checkpointing, recorder):
    """The loss looks normal, and synchronous copies do not hide the race."""
    model = build_model(4, checkpointing)
    with planted_races.slot_race():
        twin, _ = streamed(model, recorder, None, slots, SynchronousCopyEngine())
        (loss,), gradients = step(twin, 0)
    (expected_loss,), expected = step(model, 0)
    assert 0.2 < loss / expected_loss < 5
    assert not any(torch.equal(gradients[name], expected[name]) for name in expected)
