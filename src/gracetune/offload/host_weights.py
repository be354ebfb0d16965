"""Select the weights that a ring streams, and move them to host memory.

Each block gets one allocation. Its frozen parameters are copied into it one after the other and
become views of it, so they can still be read, saved and hashed. These weights stay on the device:

- trained parameters,
- parameters that a block shares with the rest of the model,
- parameters that are tiny compared with their block, mostly biases.

The allocations live as long as the ring. Activations come and go with every step and use a pool
instead (`offload/offloaded_activations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gracetune.offload.copy_engine import OffloadError, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

SMALL_WEIGHT_DIVISOR = 1000
"""A weight of less than 1/1000 of its block's bytes stays on the device. Streaming it would save
hardly any memory, and replacing the parameter at every call costs as much CPU time as for a large
one."""

Binding = tuple[dict[str, Tensor], str]
"""The parameter dictionary of a module, and the weight's name in it."""


@dataclass(frozen=True, slots=True)
class HostWeight:
    """One streamed parameter of a block, and its place in the block's host memory."""

    name: str
    """The weight's full name in the model, for error messages."""
    parameter: nn.Parameter
    bindings: tuple[Binding, ...]
    """Every parameter dictionary of the block that has the weight; several if modules share it."""
    offset: int
    """Start of the weight in the block's host memory, in elements of the weight's dtype."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        """Return the weight as a view of a buffer with the block's weights, on host or device.

        `memory` must already be viewed as the weight's dtype.
        """
        return memory.as_strided(self.shape, self.stride, memory.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The streamed weights of one block. Empty if all of the block's weights stay on the device."""

    weights: tuple[HostWeight, ...]
    nbytes: int
    """Size of the buffer that holds the block's streamed weights, in bytes, including alignment."""


def select_streamed_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> list[BlockWeights]:
    """Choose the weights of each block to stream, and their offsets in the block's buffer.

    Raises:
        OffloadError: A block or a weight cannot be streamed; the message names it.
    """
    names = {module: name for name, module in model.named_modules()}
    _check_blocks(names, blocks)
    shared = {
        parameter
        for module in _modules_outside(model, set(blocks))
        for parameter in module.parameters(recurse=False)
    }
    resident = shared | _small_weights(blocks, shared)
    selected = [_block_weights(names, block, resident) for block in blocks]
    if not any(block.weights for block in selected):
        raise OffloadError(
            f"there is nothing to stream: all weights of the {len(blocks)} blocks are trained, or "
            "shared with the rest of the model. Freeze them first, or train without streaming."
        )
    return selected


def move_to_host(blocks: Sequence[BlockWeights], allocate: Callable[[int], Tensor]) -> list[Tensor]:
    """Copy the selected weights into host memory, and return the buffer of each block.

    Parameters become views of these buffers. Blocks are moved one at a time, and the old memory of
    one is freed before the next is allocated. A single allocation for all blocks would need host
    memory for two copies of the model.
    """
    memory = []
    for block in blocks:
        block_memory = (
            allocate(block.nbytes) if block.weights else torch.empty(0, dtype=torch.uint8)
        )
        memory.append(block_memory)
        for weight in block.weights:  # a weight that two blocks share is copied into both
            view = weight.view(block_memory.view(weight.dtype))
            view.copy_(weight.parameter.detach())
            weight.parameter.data = view
    return memory


def move_to_device(blocks: Iterable[BlockWeights], device: torch.device) -> None:
    """Make every streamed parameter an ordinary parameter on the device."""
    for parameter in {weight.parameter for block in blocks for weight in block.weights}:
        parameter.data = parameter.data.to(device, copy=True)


def load_resident_weights(
    model: nn.Module, streamed: Iterable[BlockWeights], device: torch.device
) -> None:
    """Move everything that is not streamed to the device: adapters, buffers, other modules."""
    streamed_parameters = {weight.parameter for block in streamed for weight in block.weights}
    for parameter in model.parameters():
        if parameter not in streamed_parameters and parameter.device != device:
            parameter.data = parameter.data.to(device)
    moved: dict[Tensor, Tensor] = {}  # one buffer may have several names
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device == device:
                continue
            if buffer not in moved:
                moved[buffer] = buffer.to(device)
            module._buffers[name] = moved[buffer]


def parameter_state(parameter: Tensor) -> tuple[int, int]:
    """Return a parameter's address and version counter, which change if it is moved or modified."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def _check_blocks(names: dict[nn.Module, str], blocks: Sequence[nn.Module]) -> None:
    if not blocks:
        raise OffloadError("there are no blocks to stream. Pass at least one module of the model.")
    for index, block in enumerate(blocks):
        if block not in names:
            raise OffloadError(
                f"block {index} ({type(block).__name__}) is not part of the model "
                f"({type(next(iter(names))).__name__}). Pass blocks of the model that is called."
            )
    for block in blocks:
        for other in blocks:
            if other is not block and other in set(block.modules()):
                raise OffloadError(
                    f"block {names[other]!r} is inside block {names[block]!r}, but streamed blocks "
                    "must not contain each other. Pass either the outer or the inner ones."
                )
    if len(set(blocks)) < len(blocks):
        raise OffloadError("a block was passed twice. Pass each block to stream once.")


def _modules_outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield `module` and its descendants, except the blocks and the modules inside them."""
    if module not in blocks:
        yield module
        for child in module.children():
            yield from _modules_outside(child, blocks)


def _small_weights(blocks: Sequence[nn.Module], shared: set[nn.Parameter]) -> set[nn.Parameter]:
    """Return the weights that stay on the device because they are tiny compared with their block.

    A weight that several blocks share must be tiny in all of them.
    """
    small: set[nn.Parameter] = set()
    large: set[nn.Parameter] = set()
    for block in blocks:
        sizes = {
            parameter: parameter.numel() * parameter.element_size()
            for _, _, parameter in _frozen_parameters(block)
            if parameter not in shared
        }
        total_nbytes = sum(sizes.values())
        for parameter, nbytes in sizes.items():
            (small if SMALL_WEIGHT_DIVISOR * nbytes < total_nbytes else large).add(parameter)
    return small - large


def _block_weights(
    names: dict[nn.Module, str], block: nn.Module, resident: set[nn.Parameter]
) -> BlockWeights:
    bindings: dict[nn.Parameter, list[Binding]] = {}
    full_names: dict[nn.Parameter, str] = {}
    for module, name, parameter in _frozen_parameters(block):
        if parameter in resident:
            continue
        full_names.setdefault(parameter, f"{names[module]}.{name}")
        _check_streamable(full_names[parameter], module, parameter)
        bindings.setdefault(parameter, []).append(
            (cast("dict[str, Tensor]", module._parameters), name)
        )
    weights, offset = [], 0
    for parameter, parameter_bindings in bindings.items():
        weights.append(
            HostWeight(
                name=full_names[parameter],
                parameter=parameter,
                bindings=tuple(parameter_bindings),
                offset=offset // parameter.element_size(),
                shape=tuple(parameter.shape),
                stride=_dense_stride(parameter),
                dtype=parameter.dtype,
            )
        )
        offset += aligned(parameter.nbytes)
    return BlockWeights(tuple(weights), offset)


def _frozen_parameters(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                yield module, name, parameter


def _check_streamable(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    reason = ""
    if type(parameter) is not nn.Parameter:
        reason = f"it is a {type(parameter).__name__}, which is not one plain tensor"
    elif parameter.layout is not torch.strided:
        reason = f"its layout is {parameter.layout}"
    elif parameter.is_meta:
        reason = "it is on the meta device and has no values; load the weights first"
    elif isinstance(module, nn.RNNBase):
        reason = f"{type(module).__name__} keeps its own list of weights"
    if reason:
        raise OffloadError(
            f"weight {name!r} cannot be streamed: {reason}. Leave its block out of the streamed "
            "blocks, or load the model with plain weights."
        )


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a contiguous copy that keeps the parameter's dimension order.

    torch chooses kernels by the order of dimensions in memory, so it must not change.
    """
    return torch.empty_like(parameter, device="meta").stride()
