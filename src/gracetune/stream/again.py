"""A block that is done again on the way back, and of which nothing but its inputs is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


def checkpoint_block(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any
) -> Any:
    """Call now and once more in backward; hooks on saved tensors may send the inputs away.

    A checkpoint holds on to what is given by name, and to the function itself with all that it
    knows: so inputs go by place, and the function knows their names alone.
    """
    num_placed, names = len(args), tuple(kwargs)

    def by_place(*values: Any) -> Any:
        named = dict(zip(names, values[num_placed:], strict=True))
        return call(*values[:num_placed], **named)

    return checkpoint(by_place, *args, *kwargs.values(), use_reentrant=False, **how)
