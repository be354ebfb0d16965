"""Importing text embeddings of other tools: which tensor is which, and where padding ends."""

import pytest
import torch

from gracetune.cache.import_foreign import (
    caption_digest,
    captions_by_digest,
    convert_text,
    match_text,
)
from gracetune.errors import CacheError

OURS = {
    "tokens": torch.randn(5, 8, generator=torch.Generator().manual_seed(1)),
    "pooled": torch.randn(6, generator=torch.Generator().manual_seed(2)),
    "mask": torch.ones(5, dtype=torch.bool),
}


def padded(tokens, length=12, value=0.0):
    return torch.cat([tokens, torch.full((length - len(tokens), tokens.shape[1]), value)])[None]


def test_padding_is_dropped_by_the_attention_mask():
    theirs = {
        "text_embed": padded(OURS["tokens"], value=3.0).bfloat16(),
        "attention_mask": (torch.arange(12) < 5).long()[None],
        "pooled_embed": OURS["pooled"][None],
    }
    matches = match_text(theirs, OURS)
    assert matches["tokens"].theirs == "text_embed"
    assert matches["pooled"].theirs == "pooled_embed"
    converted = convert_text(theirs, matches)
    torch.testing.assert_close(converted["tokens"], OURS["tokens"], rtol=1e-2, atol=1e-2)
    assert list(converted) == list(OURS)
    assert {n: (t.dtype, t.shape) for n, t in converted.items()} == {
        n: (t.dtype, t.shape) for n, t in OURS.items()
    }
    shorter = {
        "text_embed": padded(torch.ones(2, 8)),
        "attention_mask": torch.arange(12) < 2,
        "pooled_embed": torch.zeros(6),
    }
    again = convert_text(shorter, matches)
    assert (again["tokens"].shape, again["mask"].tolist()) == ((2, 8), [True, True])


def test_trailing_zeros_are_padding_without_a_mask():
    theirs = {"prompt_embeds": padded(OURS["tokens"])}
    converted = convert_text(theirs, match_text(theirs, {"tokens": OURS["tokens"]}))
    assert torch.equal(converted["tokens"], OURS["tokens"])


def test_tensors_that_we_keep_padded_stay_padded():
    ours = {"tokens": padded(OURS["tokens"], value=2.0)[0]}
    theirs = {"prompt_embeds": ours["tokens"][None], "ids": torch.arange(3)}
    assert torch.equal(convert_text(theirs, match_text(theirs, ours))["tokens"], ours["tokens"])


@pytest.mark.parametrize(
    "theirs",
    [
        {"embeds": padded(-OURS["tokens"])},
        {"embeds": padded(OURS["tokens"] * 1.5)},
        {"embeds": padded(OURS["tokens"][:4])},
        {"ids": torch.arange(5)},
        {},
    ],
    ids=["opposite", "scaled", "shorter", "numbers", "nothing"],
)
def test_text_of_another_encoder_is_refused(theirs):
    with pytest.raises(CacheError, match=r"another encoder.*like our 'tokens' of \(5, 8\)"):
        match_text(theirs, {"tokens": OURS["tokens"]})


@pytest.mark.parametrize("odd", [torch.zeros(1, 12, 8), torch.ones(1, 12, 9)], ids=["no", "wide"])
def test_an_entry_of_another_shape_than_the_first_is_refused(odd):
    matches = match_text({"e": padded(OURS["tokens"])}, {"tokens": OURS["tokens"]})
    with pytest.raises(CacheError, match="its 'e' has the shape"):
        convert_text({"e": odd}, matches)


def test_files_are_named_by_the_digest_of_their_caption():
    known = captions_by_digest(["a cat", ""])
    assert known["d41d8cd98f00b204e9800998ecf8427e"] == ""
    (digest,) = (key for key, caption in known.items() if caption == "a cat")
    assert caption_digest(digest) == caption_digest(f"{digest}-flux") == digest
    assert caption_digest("image") is None
    assert caption_digest(f"{digest}x") is None
