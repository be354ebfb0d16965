"""Divide the tokens of a sample among ranks, and exchange them for attention heads (Ulysses).

Outside attention, a transformer computes each token on its own, so every rank of a context group
computes a part of the tokens. Attention mixes tokens, but not heads. Around it, the ranks exchange
data, so that each has all tokens of some heads:

    tokens of rank 0 | tokens of rank 1          all tokens       | all tokens
    all heads        | all heads        <---->   heads of rank 0  | heads of rank 1

`TokenSplit` does this for one transformer. Lengths need not be multiples of the number of ranks:
the first ranks have one token more. `models/context_parallel.py` installs it in a model.

Every rank computes the loss of the whole gathered prediction, but backward only passes the gradient
of its own tokens on. The gradients of all weights, also of those outside the divided part such as
the time embedding, are therefore *parts*: their sum over the context group is the gradient that one
process computes. An average would be too small by the number of ranks.

Traffic. For B samples of S tokens with C = heads x width channels, n ranks and e bytes per element,
one attention sends from each rank, in forward and again in backward,

    4 * B * S * C * e / n * (n - 1) / n     bytes: query, key, value and output.

A block that is recomputed (activation modes `recompute` and `lean`) repeats the forward traffic.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from gracetune.errors import CompiledBlockError, ConfigError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.distributed.layout import Layout

IMAGE = "hidden_states"
"""Name of the sequence of image or video tokens, as in the arguments of diffusers' transformers."""
TEXT = "encoder_hidden_states"
"""Name of the sequence of text tokens."""


class PeerFailedError(torch.OutOfMemoryError):
    """Raised if another rank of the context group has left the step, mostly out of memory."""


def split_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of the parts of a sequence; the first parts have one token more."""
    return [length // parts + (part < length % parts) for part in range(parts)]


class ContextGroup:
    """The ranks that divide the tokens of their samples among them."""

    def __init__(self, rank: int, size: int, group: str = "", control: str = "") -> None:
        """Describe the group; use `connect_context_group`, or no names to plan without ranks.

        `group` names the process group of the exchanges, `control` a gloo group on the CPU with
        which ranks tell each other that they cannot finish a step; without it, they do not.
        """
        self.rank = rank
        self.size = size
        self.group = group
        self.control = control

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raise on all ranks of the group if one is out of memory in the `with` block.

        Otherwise the others would wait in the next exchange for a rank that has left the block.
        Each rank announces in every exchange, and at the end of the block, that it is well. A rank
        that is out of memory, or in which a compiled block failed, announces that instead, and the
        others raise where they hear it.
        """
        if not self.control:
            yield
            return
        try:
            yield
        except PeerFailedError:
            raise
        except (torch.OutOfMemoryError, CompiledBlockError):
            _announce(self.control, failed=True)
            raise
        _check_peers(self.control)


SINGLE_CONTEXT = ContextGroup(0, 1)
"""The group of a rank that computes all tokens of its samples."""


def connect_context_group(layout: Layout, device_type: str) -> ContextGroup:
    """Create the process groups of this rank's context group. Every rank of the run must call it.

    Without context parallel, nothing is created. Ranks that divide the weights cannot tell each
    other that they are out of memory: the others may be waiting for weights.
    """
    if layout.context_size == 1:
        return SINGLE_CONTEXT
    group = layout.data_mesh(device_type)["context"].get_group()
    control = ""
    for first in range(0, layout.ranks.world_size, layout.context_size):
        ranks = list(range(first, first + layout.context_size))
        created = None if layout.is_sharded else dist.new_group(ranks, backend="gloo")
        if created is not None and layout.ranks.rank in ranks:
            control = created.group_name
    return ContextGroup(layout.context_rank, layout.context_size, group.group_name, control)


class TokenSplit:
    """Divides the sequences of one transformer's current pass among the ranks of a group.

    Attention mixes all divided sequences: the text tokens, if they are divided, and then the image
    tokens. After an exchange, the tokens are in the order of the ranks: text and image tokens of
    rank 0, of rank 1, and so on. Attention does not depend on the order of its tokens.
    """

    def __init__(self, context: ContextGroup) -> None:
        self.context = context
        self.enabled = True
        """False: the transformer computes whole sequences on this rank; see `whole_sequences`."""
        self.ring_config: Any = None
        """diffusers' configuration of ring attention, which passes keys and values from rank to
        rank. None: Ulysses, which exchanges heads for tokens."""
        self._lengths: dict[str, int] = {}
        """Number of tokens of each divided sequence in the current pass."""

    def __deepcopy__(self, _: object) -> TokenSplit:
        """Return this object: copies of a model's modules belong to the same ranks."""
        return self

    def begin_pass(self) -> None:
        """Forget the sequences of the last pass."""
        self._lengths = {}

    def split(self, x: Tensor, dim: int, name: str = "") -> Tensor:
        """Return this rank's part of a tensor. `name` is that of a sequence that attention mixes.

        The part has memory of its own, so that the whole tensor can be freed.
        """
        length, parts = x.shape[dim], self.context.size
        if self.ring_config and length % parts:
            raise ConfigError(
                f"distributed.context_parallel is {parts}, but a sequence has {length} tokens. "
                "With context_parallel_kind ring, it must be a multiple. Set the kind to ulysses."
            )
        if name == IMAGE and length < parts:  # there may be fewer text tokens than ranks
            raise ConfigError(
                f"distributed.context_parallel is {parts}, but a sample has only {length} tokens. "
                "Lower context_parallel, or train on larger samples."
            )
        if name:
            self._lengths[name] = length
        start, size = self._part(length)
        return x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the image tokens of all ranks; in backward, a rank gets its own part."""
        context = self.context
        whole: Tensor = all_gather(
            x.transpose(0, dim).contiguous(),
            split_sizes(self._lengths[IMAGE], context.size),
            context.rank,
            context.group,
            context.control,
        )
        return whole.transpose(0, dim)

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return query, key and value of all tokens, for this rank's heads.

        Shapes are (batch, tokens, heads, width). All three are sent at once, in the type in which
        attention computes them.
        """
        dtype, parts = value.dtype, self.context.size
        if torch.is_autocast_enabled(value.device.type):
            dtype = torch.get_autocast_dtype(value.device.type)
        stacked = torch.stack([x.to(dtype) for x in (query, key, value)])
        # (3, batch, tokens, ranks, heads of a rank, width) -> (ranks, tokens, 3, batch, ...)
        by_rank = torch.unflatten(stacked, 3, (parts, -1)).permute(3, 2, 0, 1, 4, 5)
        sizes = self._sizes()
        tokens = by_rank.shape[1]
        assert tokens == sizes[self.context.rank], (tokens, self._lengths)
        received = self._exchange(by_rank.flatten(0, 1), sizes, [tokens] * parts)
        return received.permute(1, 2, 0, 3, 4).unbind(0)

    def gather_heads(self, x: Tensor) -> Tensor:
        """Return the attention output of this rank's tokens, for all heads."""
        sizes, parts = self._sizes(), self.context.size
        tokens = sizes[self.context.rank]
        received = self._exchange(x.transpose(0, 1), [tokens] * parts, sizes)
        by_rank = torch.unflatten(received, 0, (parts, tokens))
        return by_rank.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def order_mask(self, text_mask: Tensor) -> Tensor:
        """Return the mask of all keys in the order of an exchange, from that of all text tokens."""
        parts = self.context.size
        text, image = (split_sizes(self._lengths[name], parts) for name in (TEXT, IMAGE))
        pieces: list[Tensor] = []
        for mask, num_image in zip(torch.split(text_mask, text, dim=1), image, strict=True):
            pieces += [mask, mask.new_ones(len(mask), num_image)]
        return torch.cat(pieces, dim=1)

    def places(self, num_tokens: int) -> tuple[int, list[int]]:
        """Return where this rank's tokens are in the sequence that one process would compute.

        Returns the length of that sequence, and the start and size of each piece of it that this
        rank has. The sequence is recognised by its number of tokens on this rank: image tokens,
        text tokens, or both. Any other number belongs to a sequence that is not divided; its length
        is 0. If two sequences have the same number of tokens here, the first is taken.
        """
        if not self.enabled:
            return 0, []
        pieces: list[int] = []
        whole = 0
        for name in (TEXT, IMAGE):
            length = self._lengths.get(name)
            if length is not None:
                start, size = self._part(length)
                pieces += [whole + start, size]
                whole += length
        for name in (IMAGE, TEXT):
            length = self._lengths.get(name)
            if length is not None and self._part(length)[1] == num_tokens:
                return length, list(self._part(length))
        if num_tokens == sum(pieces[1::2]):
            return whole, pieces
        return 0, []

    def _part(self, length: int) -> tuple[int, int]:
        """Return the start and the size of this rank's part of a sequence."""
        sizes = split_sizes(length, self.context.size)
        return sum(sizes[: self.context.rank]), sizes[self.context.rank]

    def _sizes(self) -> list[int]:
        """Return the number of tokens that each rank has in attention."""
        parts = self.context.size
        each = [split_sizes(length, parts) for length in self._lengths.values()]
        return [sum(of_rank) for of_rank in zip(*each, strict=True)]

    def _exchange(self, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Tensor:
        context = self.context
        found: Tensor = all_to_all(
            x.contiguous(), out_sizes, in_sizes, context.group, context.control
        )
        return found


def _announce(control: str, *, failed: bool = False, mark: int = 0) -> tuple[bool, bool]:
    """Return whether any rank of a gloo group has failed, and whether all have the same mark."""
    found = torch.tensor([failed, mark, -mark])
    dist.all_reduce(found, dist.ReduceOp.MAX, group=_resolve_process_group(control))  # type: ignore[arg-type]
    has_failed, highest, lowest = found.tolist()
    return bool(has_failed), highest == -lowest


def _check_peers(control: str, mark: int = 0) -> None:
    """Raise if another rank is out of memory, or is not at the same exchange as this one."""
    if not control:
        return
    has_failed, is_same = _announce(control, mark=mark)
    if has_failed:
        raise PeerFailedError("another rank of the context group cannot finish the step")
    if not is_same:
        raise RunFailedError(
            "the ranks of a context group exchange tokens in different orders. Set plan.compile: "
            "never, and please report this"
        )


# Operators. They are opaque to the compiler, and fake tensors need no other ranks. They are not in
# the namespace `gracetune`, whose operators the planner counts as matmuls.


@torch.library.custom_op("gracetune_context::all_to_all", mutates_args=())
def all_to_all(
    x: Tensor, out_sizes: list[int], in_sizes: list[int], group: str, control: str
) -> Tensor:
    """Send `in_sizes[r]` rows of `x` to each rank r, and return the rows that the ranks sent.

    `out_sizes[r]` is the number of rows that rank r sends.
    """
    # A compiled block may be ordered differently on ranks with another number of tokens.
    _check_peers(control, 2 * x[:1].numel() + (min(in_sizes) == max(in_sizes)) + 1)
    received = x.new_empty(sum(out_sizes), *x.shape[1:])
    dist.all_to_all_single(
        received,
        x,
        list(out_sizes),
        list(in_sizes),
        group=_resolve_process_group(group),  # type: ignore[arg-type]
    )
    return received


@all_to_all.register_fake
def _(x: Tensor, out_sizes: list[int], *_: object) -> Tensor:
    return x.new_empty(sum(out_sizes), *x.shape[1:])


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    _, *ctx.arguments = inputs


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    out_sizes, in_sizes, group, control = ctx.arguments
    returned: Tensor = all_to_all(gradient.contiguous(), in_sizes, out_sizes, group, control)
    return returned, None, None, None, None


all_to_all.register_autograd(_exchange_back, setup_context=_keep_sizes)


@torch.library.custom_op("gracetune_context::all_gather", mutates_args=())
def all_gather(x: Tensor, sizes: list[int], rank: int, group: str, control: str) -> Tensor:  # noqa: ARG001
    """Return the rows of all ranks, of which rank r has `sizes[r]`.

    Its backward returns the gradient of the own rows only: see the module's docstring.
    """
    _check_peers(control, -1)
    longest = max(sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=_resolve_process_group(group))  # type: ignore[arg-type]
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


@all_gather.register_fake
def _(x: Tensor, sizes: list[int], *_: object) -> Tensor:
    return x.new_empty(sum(sizes), *x.shape[1:])


def _own_rows(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    sizes, rank, _, _ = ctx.arguments
    return gradient[sum(sizes[:rank]) :][: sizes[rank]], None, None, None, None


all_gather.register_autograd(_own_rows, setup_context=_keep_sizes)
