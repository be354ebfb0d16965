"""Cache keys: a digest of everything an entry depends on, so that a stale entry cannot be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.data.recipe import PLAIN

if TYPE_CHECKING:
    from gracetune.data.recipe import Recipe
    from gracetune.data.sample import Sample, Shape

SCHEMA_VERSION = 1


def latent_key(sample: Sample, size: Shape, encoder: str, recipe: Recipe = PLAIN) -> str:
    """The picture's bytes, the geometry and draw it is fitted by, and the encoder."""
    geometry = f"{recipe.name} {'x'.join(map(str, size))}"
    return _key("latents", sample.digest, geometry, encoder)


def text_key(caption: str, encoder: str) -> str:
    """The caption and the encoder; equal captions share one entry."""
    return _key("text", caption, encoder)


def _key(*parts: str) -> str:
    hasher = blake3(f"{SCHEMA_VERSION}".encode())
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "big"))
        hasher.update(encoded)
    return hasher.hexdigest(length=20)
