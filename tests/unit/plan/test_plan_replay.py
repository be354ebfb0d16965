"""Recorded calls can be repeated on a device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gracetune.plan.kernel_recorder import CudaKernels, KernelRecorder
from gracetune.plan.trace_records import record_call, replay_on

aten = torch.ops.aten
CPU = torch.device("cpu")


def test_a_replayed_call_has_tensors_with_the_same_strides() -> None:
    with FakeTensorMode():
        across = torch.empty(6, 4, dtype=torch.bfloat16).t()
        spread = torch.empty(1, 6).expand(4, 6)
        recipe = record_call(aten.mul.Tensor, (across, spread), {})
    made = replay_on(recipe, CPU)()
    assert isinstance(made, torch.Tensor)
    assert (made.shape, made.dtype) == ((4, 6), torch.float32)
    assert made.stride() == torch.mul(torch.ones(6, 4).t(), torch.ones(1, 6).expand(4, 6)).stride()


def test_only_equal_calls_compare_equal() -> None:
    def cat(dtype: torch.dtype, dim: int) -> object:
        tensors = [torch.empty(2, 3, dtype=dtype), torch.empty(2, 3, dtype=dtype)]
        return record_call(aten.cat.default, (tensors, dim), {})

    bf16 = torch.bfloat16
    assert len({cat(bf16, 1), cat(bf16, 1)}) == 1
    assert len({cat(bf16, 1), cat(bf16, 0), cat(torch.float32, 1)}) == 3
    whole = torch.ones(2, dtype=torch.int64)
    scaled = [record_call(aten.mul.Scalar, (whole, factor), {}) for factor in (2, 2.0, True)]
    assert [replay_on(one, CPU)().dtype for one in scaled] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]
    assert len(set(scaled)) == 3


def test_conjugate_tensors_stay_conjugate() -> None:
    turned = torch.ones(2, dtype=torch.complex64)
    plain, mirrored = (record_call(aten.neg.default, (t,), {}) for t in (turned, turned.conj()))
    assert plain != mirrored
    assert replay_on(record_call(aten.alias.default, (turned.conj(),), {}), CPU)().is_conj()


def test_lists_dtypes_and_devices_are_replayed() -> None:
    recipe = record_call(aten.cat.default, ([torch.ones(2, 3), torch.ones(1, 3)], 0), {})
    assert replay_on(recipe, CPU)().shape == (3, 3)
    moved = record_call(
        aten._to_copy.default,
        (torch.ones(2),),
        {"dtype": torch.bfloat16, "device": torch.device("cpu")},
    )
    copied = replay_on(moved, torch.device("meta"))()
    assert (copied.dtype, copied.device.type) == (torch.bfloat16, "meta")


def test_replayed_indices_are_valid_and_empty_tensors_stay_empty() -> None:
    index = torch.full((5,), 3)
    chosen = record_call(aten.index_select.default, (torch.ones(4, 2), 0, index), {})
    assert replay_on(chosen, CPU)().shape == (5, 2)
    empty = record_call(aten.add.Tensor, (torch.empty(0, 4), 1), {})
    assert replay_on(empty, CPU)().shape == (0, 4)


def test_layer_norm_statistics_are_replayed_in_fp32() -> None:
    half = torch.ones(2, 4, dtype=torch.bfloat16)
    statistics = torch.ones(2, 1, dtype=torch.bfloat16)
    args = half, half, [4], statistics, statistics, None, None, [True, False, False]
    recipe = record_call(aten.native_layer_norm_backward.default, args, {})
    types = [getattr(value, "dtype", None) for value in recipe.args]
    assert types[:5] == [torch.bfloat16, torch.bfloat16, None, torch.float32, torch.float32]


@pytest.mark.parametrize("trains_weight", [False, True])
def test_rms_norm_is_one_operator_and_saves_its_input(
    trains_weight: bool,
) -> None:
    saved: list[tuple[torch.Size, torch.dtype]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.shape, tensor.dtype))
        return tensor

    with FakeTensorMode():
        source = torch.empty(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(8, dtype=torch.bfloat16, requires_grad=trains_weight)
        watch = KernelRecorder([weight], [source])
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with watch, CudaKernels(), hooks:
            out = torch.nn.functional.rms_norm(source, (8,), weight)
            there, _ = watch.take()
            out.backward(torch.empty_like(out))
            back, _ = watch.take()
    assert (out.shape, out.dtype) == (source.shape, source.dtype)
    assert saved == [
        (source.shape, torch.bfloat16),
        ((2, 3, 1), torch.float32),
        ((8,), torch.bfloat16),
    ]
    assert [str(op.replay.func) for op in (*there, *back) if op.replay] == [
        "planned.rms_norm.default",
        "planned.rms_norm_backward.default",
    ]
    assert source.grad is not None
    assert (weight.grad is not None) == trains_weight
