"""Cache keys: a digest of everything an entry depends on, so that a stale entry cannot be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from gracetune.data.sample import Sample

SCHEMA_VERSION = 1


def latent_key(sample: Sample, size: tuple[int, int], encoder: str) -> str:
    """The picture's bytes, the geometry it is fitted to, and the encoder."""
    return _key("latents", sample.digest, f"cover-lanczos-centre {size[0]}x{size[1]}", encoder)


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
