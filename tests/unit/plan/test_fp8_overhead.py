"""The estimated overhead of fp8 matches a block whose weights were converted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gracetune.plan.cost import SUBSPACE_DIMENSIONS, fp8_extra_nbytes, with_fp8_overhead
from gracetune.plan.launch_overhead import equivalent_ops
from gracetune.plan.trace_records import Op, TracesByMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gracetune.plan.trace_records import BlockTraces, ModelTraces

TOKENS, WIDTH, WIDE, TEXT = 4096, 5120, 13824, 512


def trace_fp8_block(has_subspace: bool) -> BlockTraces:
    """Trace a block of Wan-14B with frozen weights in fp8, on fake tensors."""
    import torch
    from torch import nn

    from gracetune.adapters.compute.fp8_linear import Fp8Linear, convert_to_fp8
    from gracetune.adapters.inject import add_adapter
    from gracetune.config.schema import AdapterSection, ModelSection
    from gracetune.models.family import SampleShape
    from gracetune.plan.apply import fuse_operations
    from gracetune.plan.meta_models import build_meta_model
    from gracetune.plan.planner_input import TRACED_BATCH
    from gracetune.plan.trace import trace_model

    def subspace_basis(width: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(SUBSPACE_DIMENSIONS, width, dtype=torch.bfloat16), False)

    shape = build_meta_model(
        ModelSection(family="wan22"), SampleShape(1024, 1024), {"num_layers": 1}
    )
    with torch.device("meta"):
        add_adapter({"": shape.model}, AdapterSection(rank=32), shape.shapes.targets, seed=0)
        convert_to_fp8(shape.model.blocks)
        for layer in shape.model.modules() if has_subspace else ():
            if isinstance(layer, Fp8Linear):
                layer.outlier_basis = subspace_basis(layer.in_features)
                layer.outlier_weight = nn.Parameter(subspace_basis(layer.out_features).t(), False)
    fuse_operations(shape.model)
    (kind,) = trace_model(
        replace(shape.trace_target(), compute_dtype=torch.bfloat16), TRACED_BATCH
    ).kinds
    return kind


@pytest.fixture(scope="module")
def fp8_block() -> BlockTraces:
    return trace_fp8_block(has_subspace=False)


def test_eager_fp8_peaks_match_a_converted_block(
    fused_shapes: ModelTraces, fp8_block: BlockTraces
) -> None:
    estimate = with_fp8_overhead(fused_shapes.kinds[0].eager, compiled=False)
    for estimated, actual in (
        (estimate.keep, fp8_block.eager.keep),
        (estimate.lean, fp8_block.eager.lean),
    ):
        assert estimated.forward_peak_nbytes == pytest.approx(actual.forward_peak_nbytes, rel=0.03)
        assert estimated.backward_peak_nbytes == pytest.approx(
            actual.backward_peak_nbytes, rel=0.03
        )


def test_fp8_calls_match_a_converted_block(
    fused_shapes: ModelTraces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matmul counts as one kernel, as on CUDA; the CPU emulation takes several."""
    import torch

    from gracetune.adapters.compute import lora_matmul

    def one_kernel(
        left: Tensor, right: Tensor, _: Tensor, __: Tensor, dtype: torch.dtype, ___: Tensor | None
    ) -> Tensor:
        return torch.empty(len(left), right.shape[1], dtype=dtype).neg()

    monkeypatch.setattr(lora_matmul, "_scaled_matmul", one_kernel)
    actual = trace_fp8_block(has_subspace=True)
    for compiled in (False, True):
        traced = fused_shapes.kinds[0].compiled if compiled else fused_shapes.kinds[0].eager
        real = actual.compiled if compiled else actual.eager
        estimate = with_fp8_overhead(traced, compiled)
        for estimated, before, found in (
            (estimate.keep, traced.keep, real.keep),
            (estimate.lean, traced.lean, real.lean),
            (estimate.recompute, traced.recompute, real.recompute),
        ):
            assert estimated.forward_calls.custom_ops == found.forward_calls.custom_ops == 20
            assert estimated.backward_calls.custom_ops == found.backward_calls.custom_ops
            assert estimated.recompute_calls.custom_ops == pytest.approx(
                found.recompute_calls.custom_ops, rel=0.03
            )
            for way in ("forward_calls", "recompute_calls", "backward_calls"):
                estimated_calls, actual_calls, calls_before = (
                    getattr(trace, way) for trace in (estimated, found, before)
                )
                assert estimated_calls.kernels == pytest.approx(actual_calls.kernels, rel=0.15)
                assert estimated_calls.dispatched == pytest.approx(actual_calls.dispatched, rel=0.1)
                assert equivalent_ops(estimated_calls) == pytest.approx(
                    equivalent_ops(actual_calls), rel=0.12
                )
                assert estimated_calls.saved_tensors == pytest.approx(
                    actual_calls.saved_tensors, rel=0.2
                )
                assert bool(estimated_calls.policy_calls) == bool(calls_before.policy_calls)


def test_a_compiled_block_holds_rounded_inputs_of_recomputed_matmuls(
    fused_shapes: ModelTraces,
) -> None:
    """Inputs of both attentions and their outputs, of both feed-forward layers, and text twice."""
    ways, batch = fused_shapes.kinds[0].compiled, fused_shapes.batch
    found = with_fp8_overhead(ways, compiled=True)
    inputs = batch * (TOKENS * (5 * WIDTH + WIDE) + 2 * TEXT * WIDTH)
    more = found.recompute.backward_peak_nbytes - ways.recompute.backward_peak_nbytes
    assert more == pytest.approx(inputs, rel=0.01)
    assert found.recompute.transposed_nbytes == WIDTH * WIDE, (
        "one transposed weight, whatever the batch"
    )
    for estimated, before in ((found.keep, ways.keep), (found.lean, ways.lean)):
        assert estimated.backward_peak_nbytes == before.backward_peak_nbytes, (
            "nothing is recomputed"
        )
        assert estimated.forward_peak_nbytes == before.forward_peak_nbytes


def test_inputs_are_split_in_forward_and_when_recomputed(fused_shapes: ModelTraces) -> None:
    ways, batch = fused_shapes.kinds[0].compiled, fused_shapes.batch
    found = with_fp8_overhead(ways, compiled=True)
    passes = 3 * 2 * batch * (TOKENS * (5 * WIDTH + WIDE) + 2 * TEXT * WIDTH)

    def more(estimated: Sequence[Op], before: Sequence[Op]) -> float:
        return sum(op.nbytes for op in estimated) - sum(op.nbytes for op in before)

    assert more(found.keep.forward, ways.keep.forward) == pytest.approx(passes, rel=0.01)
    assert more(found.keep.backward, ways.keep.backward) == 0
    assert more(found.lean.backward, ways.lean.backward) == 0
    again = more(found.recompute.backward, ways.recompute.backward)
    assert again == pytest.approx(passes, rel=0.01)


def test_layers_outside_custom_operators_do_not_share_inputs(fused_shapes: ModelTraces) -> None:
    """Consecutive matmuls share a quantized input only inside one custom operator."""
    keep = fused_shapes.kinds[0].compiled.keep

    def passes(*ops: Op) -> float:
        trace = replace(keep, forward=ops, backward=())
        found = with_fp8_overhead(TracesByMode(trace, trace, trace), compiled=True).keep.forward
        return sum(op.nbytes for op in found[len(ops) :])

    first = Op("gemm", 0.0, 0.0, frozen=True, dims=(10, 16, 32))
    assert passes(first, first) == 2 * passes(first)
    assert passes(replace(first, starts_custom_op=True), first) == passes(first)


def test_fp8_layers_store_their_outlier_subspace(fused_shapes: ModelTraces) -> None:
    """The estimate equals the bytes of a real layer: weight, scales and outlier subspace."""
    import torch
    from torch import nn

    from gracetune.adapters.compute.fp8_linear import Fp8Linear
    from gracetune.adapters.compute.outlier_subspace import MAX_DIMENSIONS

    basis = nn.Parameter(
        torch.zeros(MAX_DIMENSIONS, 256, dtype=torch.bfloat16), requires_grad=False
    )
    linear = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer_nbytes = sum(
        part.nbytes for part in Fp8Linear(linear, basis).frozen_tensors if part is not None
    )
    product = Op("gemm", 0.0, 0.0, frozen=True, dims=(1, 256, 512), reads_frozen_weight=True)
    keep = replace(fused_shapes.kinds[0].eager.keep, forward=(product,))
    assert layer_nbytes == linear.weight.nbytes // 2 + fp8_extra_nbytes(keep)
    wan = fp8_extra_nbytes(fused_shapes.kinds[0].eager.keep)
    assert 0.02 < wan / (fused_shapes.kinds[0].frozen_nbytes / 2) < 0.03
