"""Captions to embeddings as a pipeline would make them, one caption at a time and without padding.

Alone, a caption gives the same bits whoever its neighbours are, and short ones are not computed as
if they were long.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import ftfy
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


def cleaned(caption: str) -> str:
    """Mended characters, no HTML escapes, single spaces: what Wan's pipeline does."""
    text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return re.sub(r"\s+", " ", text).strip()


def tokens_of(
    tokenizer: Any, caption: str, length: int, *, pad: bool = False
) -> Mapping[str, Tensor]:
    """Ids and mask of one caption, cut after `length` tokens and padded only if asked."""
    found: Mapping[str, Tensor] = tokenizer(
        [caption],
        max_length=length,
        padding="max_length" if pad else False,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return found


def too_long(tokenizer: Any, captions: Sequence[str], length: int) -> list[str]:
    """Those with more tokens than fit."""
    if not captions:
        return []
    ids = tokenizer(list(captions), add_special_tokens=True, verbose=False)["input_ids"]
    return [caption for caption, tokens in zip(captions, ids, strict=True) if len(tokens) > length]


def padded(texts: Sequence[Tensor], length: int) -> Tensor:
    """As one batch, with zeros behind each."""
    out = texts[0].new_zeros((len(texts), length, *texts[0].shape[1:]))
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = text
    return out


def mask_of(texts: Sequence[Tensor], length: int) -> Tensor:
    """Which of the padded places hold a token."""
    counts = torch.tensor([len(text) for text in texts], device=texts[0].device)
    return torch.arange(length, device=texts[0].device) < counts[:, None]
