"""A run with fp8 layers is traced with these layers, not with those in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from gracetune.adapters.compute.fp8_linear import Fp8Linear
from gracetune.adapters.compute.outlier_subspace import num_dimensions
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.models.family import SampleShape
from gracetune.plan.launch_overhead import prepare_for_training
from gracetune.plan.meta_models import build_meta_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.trace_records import ModelTraces, Op

TOKENS, WIDTH, WIDE, TEXT = 4096, 5120, 13824, 512
LAYERS = 10
"""Linear layers of a block of Wan-14B: two attentions with four each, and two feed-forward."""


def fp8_matmuls(ops: Sequence[Op]) -> list[Op]:
    return [op for op in ops if op.fp8]


def test_every_frozen_layer_is_an_fp8_matmul_of_its_size(fp8_shapes: ModelTraces) -> None:
    (kind,) = fp8_shapes.kinds
    rows = fp8_shapes.batch * TOKENS
    for modes in (kind.eager, kind.compiled):
        forward, backward = fp8_matmuls(modes.keep.forward), fp8_matmuls(modes.keep.backward)
        assert len(forward) == LAYERS
        assert len(backward) == LAYERS - 2, "keys and values of the text need no gradient"
        assert (rows, WIDTH, WIDE) in {op.dims for op in forward}
        assert (rows, WIDE, WIDTH) in {op.dims for op in backward}
        assert len(fp8_matmuls(modes.lean.backward)) == len(backward), "lean keeps the results"
        assert len(fp8_matmuls(modes.recompute.backward)) > len(backward)


def test_transposing_a_weight_does_not_grow_with_the_batch(fp8_shapes: ModelTraces) -> None:
    (kind,) = fp8_shapes.kinds
    for keep in (kind.eager.keep, kind.compiled.keep):
        transposing = [op for op in keep.backward if op.prepares_weight]
        assert max(op.weights_nbytes for op in transposing) == 2 * WIDTH * WIDE
        assert keep.transposed_nbytes == WIDTH * WIDE
        assert keep.backward_peak_nbytes > keep.transposed_nbytes


def test_fp8_layers_take_half_the_bytes_and_their_outlier_subspace(
    fused_shapes: ModelTraces, fp8_shapes: ModelTraces
) -> None:
    half = fused_shapes.kinds[0].frozen_nbytes / 2
    assert 1.01 < fp8_shapes.kinds[0].frozen_nbytes / half < 1.04


def test_a_compiled_block_saves_no_weights(
    fused_shapes: ModelTraces, fp8_shapes: ModelTraces
) -> None:
    """Weights exist anyway, so that saving a transposed one would only take memory."""
    plain, rounded = (shapes.kinds[0].compiled.keep for shapes in (fused_shapes, fp8_shapes))
    assert rounded.saved_nbytes < 1.02 * plain.saved_nbytes


def test_a_compiled_block_holds_rounded_inputs_of_recomputed_matmuls(
    fp8_shapes: ModelTraces,
) -> None:
    """Inputs of both attentions and their outputs, of both feed-forward layers, and the text."""
    (kind,) = fp8_shapes.kinds
    inputs = fp8_shapes.batch * TOKENS * (5 * WIDTH + WIDE)
    modes = kind.compiled
    assert modes.recompute.backward_peak_nbytes > modes.lean.backward_peak_nbytes + inputs / 2


def test_layers_with_the_same_input_share_an_outlier_basis() -> None:
    section = ModelSection(family="flux")
    changes = {"num_layers": 2, "num_single_layers": 2}
    model = build_meta_model(section, SampleShape(256, 256), changes)
    prepare_for_training(model, AdapterSection(rank=4), "fp8")
    for block in model.trace_target().blocks:
        layers = {n: m for n, m in block.named_modules() if isinstance(m, Fp8Linear)}
        assert not any(type(m) is nn.Linear and not m.weight.requires_grad for m in block.modules())
        bases = {n: layer.outlier_basis for n, layer in layers.items()}
        query, key, value = (bases[f"attn.to_{part}.base_layer"] for part in "qkv")
        assert query is key is value
        assert query.shape == (num_dimensions(3072), 3072)
        assert all(basis is not None for basis in bases.values())
        assert len({id(basis) for basis in bases.values()}) < len(bases)
        assert all(layer.weight.dtype is torch.float8_e4m3fn for layer in layers.values())
