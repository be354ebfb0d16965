"""Which weights are streamed, and the host memory that they live in: a piece for each block.

Frozen parameters of a block are copied into its piece and from then on are views of it: they can be
read, saved and hashed as before, at the price of host memory. What they were before is gone before
the next block is copied. What the blocks share with the rest of the model, everything that is
trained, and what is too small to matter, biases mostly, stays out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gracetune.offload.copies import StreamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ALIGNMENT = 256
"""Of each weight, in bytes: what device kernels expect of fresh memory."""

SMALL = 1000
"""A weight smaller than this part of its block stays on the device: to stream it saves no memory to
speak of, and takes the host as long as to stream a large one."""

Home = tuple[dict[str, Tensor], str]
"""The dictionary of a module that a weight is looked up in, and its name there."""


@dataclass(frozen=True, slots=True)
class HostWeight:
    """One frozen parameter of one block, and where its bytes are."""

    name: str
    parameter: nn.Parameter
    homes: tuple[Home, ...]
    """More than one where a block uses a weight twice."""
    first: int
    """Its first number, counted in its own type from the start of the block."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, start: Tensor) -> Tensor:
        """The weight, in any memory that holds the block: bytes seen as this weight's type."""
        return start.as_strided(self.size, self.stride, start.storage_offset() + self.first)


@dataclass(frozen=True, slots=True)
class Region:
    """The frozen weights of one block, and how many bytes they take."""

    places: tuple[HostWeight, ...]
    nbytes: int


def lay_out(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Region]:
    """Where each block's frozen weights go; what cannot be streamed is refused by name."""
    names = {module: name for name, module in model.named_modules()}
    _check_blocks(names, blocks)
    shared = {
        parameter
        for module in _reached_without(model, set(blocks))
        for parameter in module.parameters(recurse=False)
    }
    stay = shared | _small(blocks, shared)
    regions = [_region(names, block, stay) for block in blocks]
    if not any(region.places for region in regions):
        raise StreamError(
            f"there is nothing to stream: all weights of the {len(blocks)} blocks are trained, or "
            "shared with the rest of the model. Freeze them first, or train without streaming."
        )
    return regions


def fill(regions: Sequence[Region], allocate: Callable[[int], Tensor]) -> list[Tensor]:
    """Move the weights into memory of their own, whose views the parameters become.

    One piece of memory for all would be there beside all weights as they were: host memory for two
    models, and again for a plan that takes the place of another.
    """
    pieces = []
    for region in regions:
        piece = allocate(region.nbytes) if region.places else torch.empty(0, dtype=torch.uint8)
        pieces.append(piece)
        for place in region.places:  # a weight that two blocks share is in both
            home = place.view(piece.view(place.dtype))
            home.copy_(place.parameter.detach())
            place.parameter.data = home
    return pieces


def seen(parameter: Tensor) -> tuple[int, int]:
    """Where a parameter is, and how often torch knows it to have been written to."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def load_resident_weights(
    model: nn.Module, regions: Iterable[Region], device: torch.device
) -> None:
    """What is not streamed must be on the device: adapters, buffers, the rest of the model."""
    streamed = {place.parameter for region in regions for place in region.places}
    for parameter in model.parameters():
        if parameter not in streamed and parameter.device != device:
            parameter.data = parameter.data.to(device)
    brought: dict[Tensor, Tensor] = {}  # one buffer may have several names
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device == device:
                continue
            if buffer not in brought:
                brought[buffer] = buffer.to(device)
            module._buffers[name] = brought[buffer]


def put_back(regions: Iterable[Region], device: torch.device) -> None:
    """Make every streamed parameter an ordinary one on the device."""
    for parameter in {place.parameter for region in regions for place in region.places}:
        parameter.data = parameter.data.to(device, copy=True)


def _check_blocks(names: dict[nn.Module, str], blocks: Sequence[nn.Module]) -> None:
    if not blocks:
        raise StreamError("there are no blocks to stream; name at least one module of the model.")
    for index, block in enumerate(blocks):
        if block not in names:
            raise StreamError(
                f"block {index} ({type(block).__name__}) is not part of the model "
                f"({type(next(iter(names))).__name__}); give blocks of the model that is called."
            )
    for block in blocks:
        for other in blocks:
            if other is not block and other in set(block.modules()):
                raise StreamError(
                    f"block {names[other]!r} is inside block {names[block]!r}; blocks to stream "
                    "must not contain each other. Name the outer or the inner ones."
                )
    if len(set(blocks)) < len(blocks):
        raise StreamError("a block is given twice; name each block to stream once.")


def _reached_without(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules that are used outside of the blocks, whoever else has them too."""
    if module not in blocks:
        yield module
        for child in module.children():
            yield from _reached_without(child, blocks)


def _small(blocks: Sequence[nn.Module], shared: set[nn.Parameter]) -> set[nn.Parameter]:
    """What is not worth streaming in any block that has it."""
    small: set[nn.Parameter] = set()
    large: set[nn.Parameter] = set()
    for block in blocks:
        sizes = {p: p.numel() * p.element_size() for _, _, p in _frozen(block) if p not in shared}
        total_nbytes = sum(sizes.values())
        for parameter, nbytes in sizes.items():
            (small if SMALL * nbytes < total_nbytes else large).add(parameter)
    return small - large


def _region(names: dict[nn.Module, str], block: nn.Module, stay: set[nn.Parameter]) -> Region:
    homes: dict[nn.Parameter, list[Home]] = {}
    called: dict[nn.Parameter, str] = {}
    for module, name, parameter in _frozen(block):
        if parameter in stay:
            continue
        called.setdefault(parameter, f"{names[module]}.{name}")
        _check_streamable(called[parameter], module, parameter)
        homes.setdefault(parameter, []).append(
            (cast("dict[str, Tensor]", module._parameters), name)
        )
    places, offset = [], 0
    for parameter, its_homes in homes.items():
        size = tuple(parameter.shape)
        places.append(
            HostWeight(
                name=called[parameter],
                parameter=parameter,
                homes=tuple(its_homes),
                first=offset // parameter.element_size(),
                size=size,
                stride=_dense_stride(parameter),
                dtype=parameter.dtype,
            )
        )
        offset += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    return Region(tuple(places), offset)


def _frozen(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                yield module, name, parameter


def _check_streamable(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    reason = ""
    if type(parameter) is not nn.Parameter:
        reason = f"it is a {type(parameter).__name__}, whose parts cannot be moved one by one"
    elif parameter.layout is not torch.strided:
        reason = f"its layout is {parameter.layout}"
    elif parameter.is_meta:
        reason = "it is on the meta device and has no values; load the weights first"
    elif isinstance(module, nn.RNNBase):
        reason = f"{type(module).__name__} keeps its own list of weights"
    if reason:
        raise StreamError(
            f"weight {name!r} cannot be streamed: {reason}. Leave its block out of those to "
            "stream, or load the model with plain weights."
        )


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The weight's own order in memory where it has no holes: kernels are chosen by it."""
    return torch.empty_like(parameter, device="meta").stride()
