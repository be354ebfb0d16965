"""Cache keys: a digest of everything an entry depends on, so that a stale entry cannot be found.

A key carries what it is a digest of. Stores keep that beside the entry, and `cache inspect` tells
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.data.augment import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.data.augment import SampleTransform
    from gracetune.data.sample import Companion, Sample, Shape

SCHEMA_VERSION = 1


class CacheKey(str):
    """The digest as text, and what went into it."""

    __slots__ = ("components",)
    components: Mapping[str, str]

    def __new__(cls, digest: str, about: Mapping[str, str]) -> CacheKey:
        """Two keys are equal when their digests are."""
        key = super().__new__(cls, digest)
        key.components = about
        return key

    def __getnewargs__(self) -> tuple[str, Mapping[str, str]]:  # type: ignore[override]
        """For copies and other processes."""
        return str(self), self.components


def latent_key(
    sample: Sample, size: Shape, encoder: str, transform: SampleTransform = PLAIN, tiled: bool = False
) -> CacheKey:
    """The bytes of sample and control, the geometry and draw it is fitted by, and the encoder."""
    geometry = f"{transform.name} {'x'.join(map(str, size))}"
    if sample.kind == "video":
        geometry += " as shown"  # once, pixels were taken for square, and BT.2020 for BT.601
    beside = [c.digest for c in sample.companions if c.role == "control"]
    content = " ".join([sample.digest, *beside])
    by = f"{encoder} by tiles" if tiled else encoder
    return _key(kind="latents", sample=content, geometry=geometry, encoder=by)


def mask_key(
    mask: Companion, size: Shape, cells: tuple[int, int], transform: SampleTransform
) -> CacheKey:
    """The bytes of the mask and which way round it is, its geometry, and its cells."""
    geometry = f"{transform.name} {'x'.join(map(str, size))} on black"  # what is transparent
    content = f"{mask.digest} inverted" if mask.inverted else mask.digest
    return _key(kind="mask", mask=content, geometry=geometry, cells=f"{cells[0]}x{cells[1]}")


def text_key(caption: str, encoder: str) -> CacheKey:
    """The caption and the encoder; equal captions share one entry."""
    return _key(kind="text", caption=caption, encoder=encoder)


def key_components(key: str) -> Mapping[str, str]:
    """What a key is a digest of; nothing where it is a bare digest."""
    return key.components if isinstance(key, CacheKey) else {}


def _key(**parts: str) -> CacheKey:
    hasher = blake3(f"{SCHEMA_VERSION}".encode())
    for part in parts.values():
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "big"))
        hasher.update(encoded)
    return CacheKey(hasher.hexdigest(length=20), {**parts, "schema": f"{SCHEMA_VERSION}"})
