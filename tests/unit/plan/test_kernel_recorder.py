"""Operator calls are expanded into kernels, and compiled blocks save what is planned."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch._subclasses.fake_tensor import FakeTensorMode

from gracetune.adapters.compute.fused_lora import fuse_lora, lora_linears
from gracetune.adapters.compute.lora_matmul import lora_gradients, lora_input_gradient, lora_linear
from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.models.attention_processors import use_fused_processors
from gracetune.models.family import SampleShape
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks
from gracetune.plan.kernel_recorder import (
    WeightStorages,
    is_matmul_or_attention,
    ops_of,
    storage_id,
)
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.trace import trace_model

if TYPE_CHECKING:
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.trace_records import BlockTraces

ROWS, INNER, OUTER, RANK = 64, 32, 48, 4
aten = torch.ops.aten


def empty_bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def operands() -> dict[str, torch.Tensor]:
    return {
        "x": empty_bf16(ROWS, INNER),
        "weight": empty_bf16(OUTER, INNER),
        "bias": empty_bf16(OUTER),
        "down": empty_bf16(RANK, INNER),
        "up": empty_bf16(OUTER, RANK),
        "grad": empty_bf16(ROWS, OUTER),
        "narrow": empty_bf16(ROWS, RANK),
    }


def kernels(func: Any, args: tuple[Any, ...], weight: torch.Tensor) -> list[Any]:
    weights = WeightStorages(frozenset({storage_id(weight)}), frozenset())
    return ops_of(func, args, {}, func(*args), weights, backward=False)


def test_a_fused_lora_layer_is_two_thin_matmuls_and_the_frozen_one() -> None:
    with FakeTensorMode():
        o = operands()
        args = o["x"], o["weight"], o["bias"], o["down"], o["up"], 1.0
        forward = kernels(lora_linear.overload, args, o["weight"])
        backward = kernels(
            lora_input_gradient.overload,
            (o["grad"], o["narrow"], o["weight"], o["down"]),
            o["weight"],
        )
    thin = 2.0 * ROWS * RANK
    assert [op.flops for op in forward] == [thin * INNER, thin * OUTER, 2.0 * ROWS * INNER * OUTER]
    assert [op.dims for op in forward if op.dims] == [(ROWS, INNER, OUTER)]
    assert [op.dims for op in backward if op.dims] == [(ROWS, OUTER, INNER)]
    assert {op.kind for op in (*forward, *backward)} == {"gemm"}
    # It reads x, the weight and the LoRA's result, and writes in place of that result.
    assert forward[-1].nbytes == 2 * (ROWS * INNER + INNER * OUTER + 2 * ROWS * OUTER)
    # The operator's results are saved together: the wide tensor and the narrow one.
    assert all(op.frozen for op in forward)
    assert sum(op.out_nbytes for op in forward) == 2 * ROWS * (OUTER + RANK)


def test_lora_gradients_are_three_thin_matmuls() -> None:
    with FakeTensorMode():
        o = operands()
        args = o["grad"], o["x"], o["narrow"], o["up"], 0.5
        ops = kernels(lora_gradients.overload, args, o["weight"])
    thin = 2.0 * ROWS * RANK
    assert [op.flops for op in ops] == [thin * OUTER, thin * OUTER, thin * INNER]
    assert not any(op.dims for op in ops)


def test_layers_with_one_input_read_it_once_for_their_loras() -> None:
    with FakeTensorMode():
        o = operands()
        three = [o["weight"]] * 3
        args = o["x"], three, [o["bias"]] * 3, empty_bf16(3 * RANK, INNER), [o["up"]] * 3, 1.0
        ops = kernels(lora_linears.overload, args, o["weight"])
    flops = [op.flops for op in ops if op.kind == "gemm"]
    thin, wide = 2.0 * ROWS * RANK * OUTER, 2.0 * ROWS * INNER * OUTER
    assert flops == [2.0 * ROWS * 3 * RANK * INNER, thin, wide, thin, wide, thin, wide]


def test_views_launch_no_kernels() -> None:
    with FakeTensorMode():
        x = empty_bf16(ROWS, INNER)
        assert kernels(aten.t.default, (x,), x) == []
        assert kernels(aten.empty_like.default, (x,), x) == []
        (op,) = kernels(aten.neg.default, (x,), empty_bf16(1))
    assert (op.kind, op.nbytes) == ("elementwise", 2 * 2 * ROWS * INNER)
    assert is_matmul_or_attention(aten.mm.default)
    assert not is_matmul_or_attention(torch.relu)


def build_small_wan() -> tuple[MetaModel, Any]:
    """Return a small Wan on the meta device and on the CPU, there with a fused LoRA."""
    changes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32}
    changes |= {"ffn_dim": 96, "text_dim": 16, "freq_dim": 16}
    shape = build_meta_model(ModelSection(family="wan22"), SampleShape(192, 192), changes)
    model = type(shape.model)(**changes).to(torch.bfloat16)
    add_adapter({"": model}, AdapterSection(rank=4), shape.shapes.targets, seed=0)
    fuse_lora(model)
    use_fused_processors(model)
    return shape, model


@pytest.fixture(scope="module")
def small_wan_traces() -> BlockTraces:
    shape, model = build_small_wan()
    (kind,) = trace_model(replace(shape, model=model).trace_target(), 2).kinds
    return kind


@pytest.mark.filterwarnings("ignore")  # torch's tracer reads attributes that torch warns about
@pytest.mark.parametrize("mode", ["keep", "lean", "recompute"])
def test_a_compiled_block_saves_what_was_planned(mode: str, small_wan_traces: BlockTraces) -> None:
    """The plan matches the tensors that autograd saves when torch partitions the graph."""
    shape, model = build_small_wan()
    kind = small_wan_traces
    trace = getattr(kind.compiled, mode)
    events: list[Any] = []
    compiler = BlockCompiler(events.append, "aot_eager_decomp_partition")
    running = wrap_blocks(list(model.blocks), [mode], compiler)  # type: ignore[list-item]
    found = saved_in_blocks(model, shape.trace_target().inputs(2))
    running.close()
    compiler.close()
    assert not any(event.fallback for event in events)  # compilation did not fail
    planned = trace.saved_nbytes + kind.input_nbytes * trace.saves_input
    assert found == pytest.approx(planned, rel=0.05)


def saved_in_blocks(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Return the bytes saved inside blocks, without weights, their copies and shared inputs."""
    owned: set[int] = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = defaultdict(int)
    inside = False

    def enter(_: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        nonlocal inside
        inside = True
        shared = [*args[1:], *kwargs.values()]
        flat = [t for group in shared for t in (group if isinstance(group, tuple) else (group,))]
        owned.update(t.untyped_storage().data_ptr() for t in flat if t is not None)

    def leave(*_: object) -> None:
        nonlocal inside
        inside = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    (block,) = model.blocks
    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave)
    given = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(**given, return_dict=False)
    for layer in (m.forward.__self__ for m in model.modules() if type(m) is LoraLinear):
        owned.update(half.untyped_storage().data_ptr() for half in layer.cast_weights)
    del out
    return sum(nbytes for address, nbytes in saved.items() if address not in owned)
