"""Traces on fake tensors match the same blocks run for real."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.errors import ModelError
from gracetune.plan.cost import CostModel
from gracetune.plan.machines import MACHINES, effective_rates, machine_rates
from gracetune.plan.trace import TraceTarget, trace_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.adapters.compute.quantized_linear import QuantizationKind
    from gracetune.plan.trace_records import ModelTraces, Op

WIDTH, TOKENS = 32, 24


class TransformerBlock(nn.Module):
    """A transformer block with a LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y = self.norm(x) + shift
        q, k, v = self.qkv(y).view(*y.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + a.transpose(1, 2).reshape(x.shape) + self.up(self.down(y))
        return x + self.back(nn.functional.gelu(self.wide(x)))


class ParallelBlock(nn.Module):
    """Attention parallel to a feed-forward layer, as in Flux, computed in either order."""

    def __init__(self, wide_first: bool) -> None:
        super().__init__()
        self.wide_first = wide_first
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(5 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y = x + shift
        if self.wide_first:
            wide, attended = self._widen(y), self._attend(y)
        else:
            attended, wide = self._attend(y), self._widen(y)
        return x + self.out(torch.cat([attended, wide], -1))

    def _widen(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.wide(x) + self.up(self.down(x)))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class Stack(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(count))
        self.head = nn.Linear(WIDTH, 8).requires_grad_(False)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, shift=shift)
        return self.head(x)


def build_trace_target(model: nn.Module, blocks: list[nn.Module] | None = None) -> TraceTarget:
    return TraceTarget(
        "stack",
        model,
        list(model.blocks) if blocks is None else blocks,
        lambda batch: {"x": torch.empty(batch, TOKENS, 8), "shift": torch.empty(batch, 1, WIDTH)},
        lambda called, batch: called(**batch),
    )


@pytest.fixture(scope="module")
def traced() -> ModelTraces:
    return trace_model(build_trace_target(Stack()), 2)


def measure_saved(run: Callable[[Tensor, Tensor], Tensor], block: nn.Module) -> tuple[int, bool]:
    """Return the bytes that autograd saves besides weights and input, and if it saves the input."""
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    shift = torch.randn(2, 1, WIDTH)
    outside = {t.untyped_storage().data_ptr() for t in (*block.parameters(), shift)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(x, shift)
    del out
    saves_input = kept.pop(x.untyped_storage().data_ptr(), 0) > 0
    return sum(kept.values()), saves_input


def flops(ops: tuple[Op, ...], kind: str = "gemm") -> float:
    return sum(op.flops for op in ops if op.kind == kind)


def test_eager_blocks_save_what_autograd_saves(traced: ModelTraces) -> None:
    block = TransformerBlock()
    nbytes, saves_input = measure_saved(lambda x, s: block(x, shift=s), block)
    trace = traced.kinds[0].eager.keep
    assert trace.saved_nbytes == nbytes
    assert trace.saves_input == saves_input


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_quantized_blocks_are_traced_as_they_are_stored(
    traced: ModelTraces, kind: QuantizationKind
) -> None:
    """On the meta device, so that nf4 needs no package."""
    with torch.device("meta"):
        model = Stack(1)
    (block,) = model.blocks
    for name in ("qkv", "wide", "back"):
        setattr(block, name, QuantizedLinear(getattr(block, name), kind))
    quantized, plain = trace_model(build_trace_target(model), 2).kinds[0], traced.kinds[0]
    frozen = [p for p in block.parameters() if not p.requires_grad]
    assert quantized.frozen_nbytes == sum(p.nbytes for p in frozen) < plain.frozen_nbytes / 2
    assert quantized.dequantized_nbytes == 4 * WIDTH * WIDTH * 4, "the largest, in fp32"
    for modes, other in ((quantized.eager, plain.eager), (quantized.compiled, plain.compiled)):
        for trace, reference in ((modes.keep, other.keep), (modes.lean, other.lean)):
            assert flops(trace.forward) == flops(reference.forward)
            assert flops(trace.backward) == flops(reference.backward)
            assert trace.saved_nbytes == reference.saved_nbytes, "no dequantized weight"
    dequantizing = [op for op in quantized.eager.keep.forward if op.weights_nbytes == op.nbytes]
    assert len({id(op) for op in dequantizing}) >= 3, "of each layer"
    assert {op.kind for op in dequantizing} == {"elementwise"}
    assert all(op.nbytes > WIDTH * WIDTH * 4 for op in dequantizing)
    products = [op for op in quantized.eager.keep.forward if op.reads_frozen_weight]
    assert sorted(op.dims[1:] for op in products) == sorted(
        op.dims[1:] for op in plain.eager.keep.forward if op.reads_frozen_weight
    )
    # Mode `lean` saves the whole operator, with its dequantization.
    lean, keep = quantized.eager.lean, quantized.eager.keep
    repeated = lean.backward[: len(lean.backward) - len(keep.backward)]
    assert not any(op.weights_nbytes == op.nbytes > 0 for op in repeated)


def test_flops_match_torchs_flop_counter(traced: ModelTraces) -> None:
    block = TransformerBlock()
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        block(x, torch.randn(2, 1, WIDTH)).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    for trace in (traced.kinds[0].eager.keep, traced.kinds[0].compiled.keep):
        assert flops(trace.forward) + flops(trace.backward) == products


def test_attention_flops_are_those_of_its_matmuls(traced: ModelTraces) -> None:
    trace = traced.kinds[0].eager.keep
    forward = 2 * 2 * (2 * TOKENS * TOKENS * WIDTH)
    assert flops(trace.forward, "attention") == forward
    assert flops(trace.backward, "attention") == 2.5 * forward


def test_matmuls_with_frozen_weights_are_marked(traced: ModelTraces) -> None:
    for trace in (traced.kinds[0].eager.keep, traced.kinds[0].compiled.keep):
        frozen = sum(op.flops for op in trace.forward if op.kind == "gemm" and op.frozen)
        rows = 2 * TOKENS
        assert frozen == 2 * rows * WIDTH * (3 + 4 + 4) * WIDTH
        assert flops(trace.forward) - frozen == 2 * rows * WIDTH * 4 * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own imports
def test_compiled_blocks_save_what_torchs_partitioner_saves(traced: ModelTraces) -> None:
    block = TransformerBlock()
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False)
    nbytes, saves_input = measure_saved(lambda x, s: compiled(x, shift=s), block)
    trace = traced.kinds[0].compiled.keep
    assert trace.saved_nbytes == pytest.approx(nbytes, rel=0.02)
    assert trace.saves_input == saves_input


@pytest.mark.parametrize("compiled", [False, True])
def test_saving_less_means_recomputing_more(traced: ModelTraces, compiled: bool) -> None:
    kind = traced.kinds[0]
    ways = kind.compiled if compiled else kind.eager
    assert ways.recompute.saved_nbytes < ways.lean.saved_nbytes < ways.keep.saved_nbytes
    assert ways.lean.flops == pytest.approx(ways.keep.flops, rel=0.1)  # thin matmuls are recomputed
    assert ways.recompute.flops > 1.2 * ways.keep.flops
    attention = [flops(way.backward, "attention") for way in (ways.keep, ways.recompute)]
    assert attention[0] == attention[1]  # the output of attention is saved


def test_saved_bytes_match_selective_checkpointing(
    traced: ModelTraces,
) -> None:
    from gracetune.offload.checkpointing import wrap_blocks

    block = TransformerBlock()
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    saved = (
        2 * TOKENS * (WIDTH * 4 + 2 * 4)
    )  # the output of attention, and a logsumexp for each of two heads
    assert traced.kinds[0].eager.recompute.saved_nbytes == saved
    assert traced.kinds[0].compiled.recompute.saved_nbytes == saved
    plain, again = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with plain:
        block(x, torch.randn(2, 1, WIDTH)).sum().backward()
    running = wrap_blocks([block], ["recompute"], None, None)
    with again:
        block(x, torch.randn(2, 1, WIDTH)).sum().backward()
    running.close()
    ways = traced.kinds[0].eager
    more = again.get_total_flops() - plain.get_total_flops()
    assert ways.recompute.flops - ways.keep.flops == pytest.approx(more, rel=0.01)


def test_fused_kernels_move_fewer_bytes_than_eager_ones(traced: ModelTraces) -> None:
    def moved(ops: tuple[Op, ...]) -> float:
        return sum(op.nbytes for op in ops if op.kind == "elementwise")

    eager, compiled = traced.kinds[0].eager.keep, traced.kinds[0].compiled.keep
    assert 0 < moved(compiled.forward) < moved(eager.forward)
    assert 0 < moved(compiled.backward) < moved(eager.backward)


def test_peaks_include_saved_bytes(traced: ModelTraces) -> None:
    kind = traced.kinds[0]
    for ways in (kind.eager, kind.compiled):
        for trace in (ways.keep, ways.lean, ways.recompute):
            assert trace.forward_peak_nbytes >= trace.saved_nbytes + kind.input_nbytes
            assert trace.backward_peak_nbytes > trace.saved_nbytes
            assert trace.backward_peak_nbytes < 4 * kind.eager.keep.saved_nbytes


def test_the_order_of_parallel_branches_does_not_change_compiled_peaks() -> None:
    peaks = set()
    for wide_first in (False, True):
        model = Stack(0)
        model.blocks.append(ParallelBlock(wide_first))
        peaks.add(
            trace_model(build_trace_target(model), 2).kinds[0].compiled.lean.backward_peak_nbytes
        )
    assert len(peaks) == 1, f"{peaks} bytes"


def test_equal_blocks_are_one_kind(traced: ModelTraces) -> None:
    block = TransformerBlock()
    trained = sum(p.nbytes for p in block.parameters() if p.requires_grad)
    assert traced.order == (0, 0, 0)
    assert traced.kinds[0].trained_nbytes == trained
    assert traced.trained_nbytes == 3 * trained
    assert traced.frozen_nbytes == sum(
        p.nbytes for p in Stack().parameters() if not p.requires_grad
    )
    assert traced.kinds[0].input_nbytes == 2 * TOKENS * WIDTH * 4
    assert traced.batch_nbytes == 2 * (TOKENS * 8 + WIDTH) * 4


@pytest.mark.parametrize("trains_all", [False, True])
def test_one_trace_predicts_every_batch(trains_all: bool) -> None:
    model = Stack(1)
    if trains_all:
        model.requires_grad_(True)
    subject = build_trace_target(model)
    two, five = (trace_model(subject, batch) for batch in (2, 5))
    speeds = effective_rates(machine_rates(MACHINES["h200-pcie"]))
    foretold, seen = CostModel(two, speeds).at(5), CostModel(five, speeds).at(5)
    (block,), (same,) = foretold.blocks, seen.blocks
    for guess, truth in (
        (block.eager.keep, same.eager.keep),
        (block.compiled.keep, same.compiled.keep),
        (block.compiled.lean, same.compiled.lean),
        (block.compiled.recompute, same.compiled.recompute),
        (foretold.outside, seen.outside),
    ):
        assert guess.saved_nbytes == pytest.approx(truth.saved_nbytes, rel=0.02)
        assert guess.forward_peak_nbytes == pytest.approx(truth.forward_peak_nbytes, rel=0.02)
        assert guess.backward_peak_nbytes == pytest.approx(truth.backward_peak_nbytes, rel=0.02)
        assert guess.forward.gemm == pytest.approx(truth.forward.gemm, rel=0.02)
        assert guess.backward.total == pytest.approx(truth.backward.total, rel=0.02)
    assert foretold.batch_nbytes == seen.batch_nbytes


def test_tracing_leaves_the_model_unchanged() -> None:
    with torch.device("meta"):
        model = Stack(1)
    own = model.blocks[0].__dict__["forward"] = model.blocks[0].forward
    trace_model(build_trace_target(model), 1)
    assert model.blocks[0].__dict__["forward"] is own
    assert all(p.is_meta for p in model.parameters())
    assert not model.blocks[0]._forward_hooks


def test_tracing_does_not_read_weights() -> None:
    model = Stack(1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trace_model(build_trace_target(model), 1)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_tracing_collects_no_garbage() -> None:
    """Each full collection would visit half a million objects of torch and diffusers."""
    target, seen = build_trace_target(Stack(1)), []

    def predict(called: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(gc.isenabled())
        return target.predict(called, batch)

    trace_model(replace(target, predict=predict), 1)
    assert set(seen) == {False}
    assert gc.isenabled()


def test_a_model_without_blocks_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"names no blocks.*blocks\(\).*embed, blocks, head"):
        trace_model(build_trace_target(Stack(1), blocks=[]), 1)


def test_an_unused_block_is_an_error() -> None:
    model = Stack(2)
    model.spare = TransformerBlock()
    with pytest.raises(ModelError, match=r"block 2 of 'stack' is never called"):
        trace_model(build_trace_target(model, [*model.blocks, model.spare]), 1)


def test_full_training_is_traced() -> None:
    model = Stack(2).requires_grad_(True)
    shapes = trace_model(build_trace_target(model), 1)
    assert shapes.frozen_nbytes == 0
    kind = shapes.kinds[0]
    eager, compiled = kind.eager.keep, kind.compiled.keep
    assert flops(eager.backward) == pytest.approx(2 * flops(eager.forward), rel=0.01)
    assert flops(compiled.backward) == flops(eager.backward)
