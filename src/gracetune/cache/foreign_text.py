"""Text embeddings of other tools, brought to the form of ours: no padding, our names and dtypes.

Which of their tensors is which of ours, and how they pad, is found out by comparing the first of
their entries that has such tensors with what our own encoder makes of the same caption.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

ALIKE = 0.98
"""Least cosine between theirs and ours; precision differs between tools by a little."""
_BY_CAPTION = re.compile(r"(?P<digest>[0-9a-f]{32})(-.+)?")

Form = Literal["whole", "masked", "stripped"]
FORMS: Sequence[Form] = ("masked", "stripped", "whole")
"""How many tokens of theirs count: as their mask says, up to the last that is not zero, or all."""


@dataclass(frozen=True, slots=True)
class Match:
    """One tensor of ours, and where theirs has it."""

    theirs: str
    """Empty for a mask that is all ones, which needs no source."""
    form: Form
    like: Tensor


def captions_by_digest(captions: Iterable[str]) -> dict[str, str]:
    """SimpleTuner names a text's file by the md5 of its caption."""
    return {hashlib.md5(c.encode(), usedforsecurity=False).hexdigest(): c for c in captions}


def digest_in(stem: str) -> str | None:
    """The digest in the name of such a file; none where it is no such name."""
    found = _BY_CAPTION.fullmatch(stem)
    return None if found is None else found["digest"]


def match_text(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Match]:
    """Where each tensor of ours is in theirs, for one caption that both have encoded."""
    return {name: _match(name, tensor.cpu(), theirs) for name, tensor in ours.items()}


def take_text(theirs: Mapping[str, Tensor], matches: Mapping[str, Match]) -> dict[str, Tensor]:
    """Another entry of theirs, as ours would be."""
    taken, length = {}, 0
    for name, match in matches.items():
        if match.theirs:
            taken[name] = _formed(theirs, match.theirs, match.form).to(match.like.dtype)
            if taken[name].shape[1:] != match.like.shape[1:] or not len(taken[name]):
                raise CacheError(f"its {match.theirs!r} is {tuple(theirs[match.theirs].shape)}")
            length = max(length, len(taken[name]) if taken[name].ndim > 1 else 0)
    masks = {name: match.like for name, match in matches.items() if not match.theirs}
    made = {name: like.new_ones(length) for name, like in masks.items()}
    return {name: taken[name] if name in taken else made[name] for name in matches}


def _match(name: str, ours: Tensor, theirs: Mapping[str, Tensor]) -> Match:
    if ours.dtype == torch.bool and ours.all():
        return Match("", "whole", ours)
    best = 0.0
    for other, tensor in theirs.items():
        if not tensor.is_floating_point():
            continue
        for form in FORMS:
            formed = _formed(theirs, other, form)
            if formed.shape != ours.shape or not ours.numel():
                continue
            likeness = torch.cosine_similarity(
                formed.float().flatten(), ours.float().flatten(), dim=0
            ).item()
            scale = (formed.float().norm() / ours.float().norm()).item()
            if likeness >= ALIKE and 0.9 < scale < 1.1:
                return Match(other, form, ours[:0] if ours.ndim > 1 else ours)
            best = max(best, likeness)
    raise CacheError(
        f"it was made by another encoder: nothing in it is like our {name!r} of "
        f"{tuple(ours.shape)}; the best cosine is {best:.3f}"
    )


def _formed(theirs: Mapping[str, Tensor], name: str, form: Form) -> Tensor:
    """A tensor without the dimension of its batch of one, and of its tokens those that count."""
    tensor = theirs[name]
    while tensor.ndim > 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim < 2 or form == "whole":
        return tensor
    if form == "stripped":
        used = tensor.flatten(1).ne(0).any(dim=1).nonzero()
        return tensor[: int(used[-1]) + 1] if len(used) else tensor[:0]
    for other, mask in theirs.items():
        if "mask" in other and mask.numel() == len(tensor):
            return tensor[mask.flatten().bool()]
    return tensor[:0]
