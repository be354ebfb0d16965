"""Select the weights that a ring streams, and move them to host memory.

Each block gets one allocation. Its frozen parameters are copied into it one after the other and
become views of it, so they can still be read, saved and hashed. These weights stay on the device:

- trained parameters,
- parameters that a block shares with the rest of the model,
- parameters that are tiny compared with their block, mostly biases.

The allocations live as long as the ring. Activations come and go with every step and use a pool
instead (`offload/offloaded_activations.py`).

If a machine has several ranks, they share one copy of the streamed weights (`move_to_shared`):

    first rank     create files |           | copy block 0 | copy block 1    | ...
    other ranks                 | map files |              | compare block 0 | ...

There is one anonymous file per block; `|` are the points at which all ranks wait for each other.
The files have no names, so nothing is left if ranks are killed. If a rank cannot map them, all
ranks use memory of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gracetune.errors import RunFailedError
from gracetune.events.types import Notice
from gracetune.memory.oversubscription import return_freed_memory
from gracetune.memory.shared_memory import (
    close_files,
    create_anonymous_files,
    handle_of,
    open_shared_files,
)
from gracetune.offload.copy_engine import OffloadError, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gracetune.distributed.ranks import RankGroup
    from gracetune.offload.copy_engine import CopyEngine

    Emit = Callable[[Notice], None]

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
        _copy_weights(block, block_memory)
        return_freed_memory()
    return memory


def move_to_shared(
    blocks: Sequence[BlockWeights], copy_engine: CopyEngine, ranks: RankGroup, emit: Emit
) -> list[Tensor]:
    """Move the selected weights to host memory that the ranks of each machine share.

    The first rank of a machine copies its weights; the others compare theirs, bit by bit, and free
    them. That takes about as long as copying, and finds every difference. As in `move_to_host`,
    blocks are moved one at a time. If a rank cannot map the memory, no rank shares any.

    All ranks must call this at the same time, for the same blocks.

    Raises:
        OffloadError: A rank could not pin the memory. All ranks raise it.
        RunFailedError: Two ranks of a machine have different weights. All ranks raise it.
    """
    memory = map_shared_memory([block.nbytes for block in blocks], ranks, emit)
    if memory is None:
        return move_to_host(blocks, copy_engine.allocate_host)
    is_first = ranks.local_rank == 0
    different = ""
    """Name of the first weight of the blocks so far that differs from the first rank's."""
    for block, block_memory in zip(blocks, memory, strict=True):
        failure = ""
        try:
            if block.weights:
                copy_engine.adopt_host(block_memory)
            if is_first:
                _copy_weights(block, block_memory)
        except OffloadError as error:
            failure = str(error)
        _agree_on_move(ranks, failure, different)
        if not is_first:
            different = different or _different_weight(block, block_memory)
            _bind(block, block_memory)
        return_freed_memory()
    _agree_on_move(ranks, "", different)
    return memory


def map_shared_memory(sizes: Sequence[int], ranks: RankGroup, emit: Emit) -> list[Tensor] | None:
    """Map host memory of these sizes in bytes that the ranks of each machine share.

    It takes no memory until it is written to. Returns None on all ranks if it cannot be mapped on
    one of them, and rank 0 emits the reason. All ranks must call this at the same time.
    """
    files: list[int] = []
    memory: list[Tensor] = []
    failure, handle = "", None
    try:
        if ranks.local_rank == 0:
            files = create_anonymous_files(sizes)
            handle = handle_of(files)
    except OSError as error:
        failure = str(error)
    handle = ranks.gather_local(handle)[0]
    try:
        if handle is not None and ranks.local_rank > 0:
            files = open_shared_files(handle, os.O_RDWR)
        memory = [_map(file, nbytes) for file, nbytes in zip(files, sizes, strict=False)]
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError
        failure = str(error).splitlines()[0]
    failures = ranks.gather(failure)
    close_files(files)  # each rank has mapped them now
    for rank, text in enumerate(failures):
        if text:
            if ranks.is_main:
                emit(
                    Notice(
                        f"{ranks.name(rank)} cannot share host memory with the other ranks of its "
                        f"machine: {text}. Each rank keeps its own copy of the streamed weights.",
                        level="warning",
                        fallback=True,
                    )
                )
            return None
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


def _copy_weights(block: BlockWeights, memory: Tensor) -> None:
    """Copy a block's weights into its host memory; the parameters become views of it."""
    for weight in block.weights:  # a weight that two blocks share is copied into both
        view = weight.view(memory.view(weight.dtype))
        view.copy_(weight.parameter.detach())
        weight.parameter.data = view


def _bind(block: BlockWeights, memory: Tensor) -> None:
    """Make a block's parameters views of memory that has their values already."""
    for weight in block.weights:
        weight.parameter.data = weight.view(memory.view(weight.dtype))


def _different_weight(block: BlockWeights, memory: Tensor) -> str:
    """Return the name of the first weight whose bytes differ from those in memory, or ''."""
    for weight in block.weights:
        values = weight.parameter.detach()
        if values.device.type != "cpu" or values.stride() != weight.stride:
            values = torch.empty_strided(weight.shape, weight.stride, dtype=weight.dtype)
            values.copy_(weight.parameter.detach())
        if not _have_equal_bytes(values, weight.view(memory.view(weight.dtype))):
            return weight.name
    return ""


def _have_equal_bytes(first: Tensor, second: Tensor) -> bool:
    """Compare two dense CPU tensors with the same strides. Bytes tell NaN from NaN, and -0 from 0.

    Comparing 8 bytes at a time is as fast as copying; comparing bytes takes five times as long.
    """
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in (first, second)]
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in flat]
    dtype = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if not any(nbytes % dtype.itemsize for nbytes in (first.nbytes, *starts))
    )
    return torch.equal(flat[0].view(dtype), flat[1].view(dtype))


def _agree_on_move(ranks: RankGroup, failure: str, different: str) -> None:
    """Wait for all ranks; raise an error on all of them if one has failed.

    `failure` is the text of this rank's OffloadError, and `different` the name of a weight that
    differs from the first rank's; both may be empty.
    """
    for rank, (failed, weight) in enumerate(ranks.gather((failure, different))):
        if weight:
            raise RunFailedError(
                f"weight {weight!r} of {ranks.name(rank)} differs from that of the first rank "
                "there, but all ranks must train the same model. Give all "
                "ranks the same model files and revision, and start again."
            )
        if failed:
            raise OffloadError(f"{ranks.name(rank)}: {failed}")


def _map(descriptor: int, nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


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
