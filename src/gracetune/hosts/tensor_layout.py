"""A value with tensors in it as plain text and bytes, and back, without a copy on the way back.

What is not made of strided tensors on the CPU and of plain data has no layout; pickle, which could
give it one, executes what it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch

if TYPE_CHECKING:
    from mmap import mmap

    Layout = dict[str, object]

_ALIGNMENT = 64
_DTYPES = {
    str(each): each
    for each in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class NoLayoutError(Exception):
    """A value that cannot be handed to another process in this way; the text says what of it."""


class TensorPart(NamedTuple):
    """The bytes of one tensor, and where they go."""

    offset: int
    data: memoryview


def lay_out(value: object) -> tuple[Layout, list[TensorPart], int]:
    """How to build the value again, its bytes, and how many bytes they span."""
    parts: list[TensorPart] = []
    layout = _lay_out(value, parts)
    end = parts[-1].offset + len(parts[-1].data) if parts else 0
    return layout, parts, end


def _lay_out(value: object, parts: list[TensorPart]) -> Layout:
    kind = type(value)
    if kind is torch.Tensor:
        return _lay_out_tensor(cast("torch.Tensor", value), parts)
    if kind is dict:
        items = cast("dict[object, object]", value)
        if not all(type(key) is str for key in items):
            raise NoLayoutError("a mapping whose keys are not text")
        return {"dict": {key: _lay_out(each, parts) for key, each in items.items()}}
    if kind in (list, tuple):
        each_one = cast("list[object]", value)
        return {kind.__name__: [_lay_out(each, parts) for each in each_one]}
    if value is None or kind in (bool, int, float, str):
        return {"plain": value}
    raise NoLayoutError(f"a {kind.__name__}")


def _lay_out_tensor(tensor: torch.Tensor, parts: list[TensorPart]) -> Layout:
    name = str(tensor.dtype)
    if tensor.layout is not torch.strided or not tensor.device.type == "cpu":
        raise NoLayoutError(f"a tensor that is {tensor.layout} on {tensor.device}")
    if name not in _DTYPES or tensor.requires_grad:
        raise NoLayoutError(f"a tensor of {name}" + " with a gradient" * tensor.requires_grad)
    last = parts[-1] if parts else TensorPart(0, memoryview(b""))
    offset = -(-(last.offset + len(last.data)) // _ALIGNMENT) * _ALIGNMENT
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    parts.append(TensorPart(offset, flat.numpy().data))
    return {"tensor": [name, list(tensor.shape), offset]}


def build(layout: Layout, memory: mmap, base: int) -> object:
    """The value, whose tensors are the memory itself."""
    [(kind, said)] = layout.items()
    if kind == "tensor":
        name, shape, offset = cast("tuple[str, list[int], int]", said)
        dtype = _DTYPES[name]
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + offset).view(shape)
    if kind == "dict":
        items = cast("dict[str, Layout]", said)
        return {key: build(each, memory, base) for key, each in items.items()}
    if kind == "plain":
        return said
    built = [build(each, memory, base) for each in cast("list[Layout]", said)]
    return built if kind == "list" else tuple(built)
