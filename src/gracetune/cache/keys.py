"""Compute cache keys: digests of everything that a cache entry depends on.

    key = blake3(schema version, kind, part 1, part 2, ...), 20 bytes as 40 hexadecimal digits

Each part is hashed with its length in front, so that no two lists of parts hash alike. File names
and folders are not part of a key; file contents are. If anything that changes the entry changes (a
pixel, the crop, the weights of the VAE), the key changes too, and the old entry is simply never
looked up again: a stale entry cannot be read. `gracetune cache gc` deletes such entries.

A `CacheKey` also has the parts that were hashed. Stores write them next to the entry, and
`gracetune cache inspect` prints them.

The hashed texts are part of the cache format: changing the wording of one invalidates every
existing cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.data.augment import DEFAULT_TRANSFORM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.data.augment import SampleTransform
    from gracetune.data.sample import Companion, Sample, Shape

SCHEMA_VERSION = 1
"""Version number that is part of every key; increase it to invalidate all existing caches."""


class CacheKey(str):
    """A cache key: a hexadecimal digest, with the parts that were hashed."""

    __slots__ = ("components",)
    components: Mapping[str, str]
    """The hashed parts by name, such as `caption` and `encoder`."""

    def __new__(cls, digest: str, components: Mapping[str, str]) -> CacheKey:
        """Create a key; like any `str`, two keys are equal if their digests are."""
        key = super().__new__(cls, digest)
        key.components = components
        return key

    def __getnewargs__(self) -> tuple[str, Mapping[str, str]]:  # type: ignore[override]
        """Return the arguments of `__new__`, so that keys can be copied and pickled."""
        return str(self), self.components


def latent_key(
    sample: Sample,
    size: Shape,
    encoder: str,
    transform: SampleTransform = DEFAULT_TRANSFORM,
    tiled: bool = False,
) -> CacheKey:
    """Return the key of a sample's latents.

    The key depends on the bytes of the sample and its control images, the crop, augmentations and
    bucket size, the encoder's id, and on whether the sample is encoded in tiles.
    """
    geometry = f"{transform.name} {'x'.join(map(str, size))}"
    if sample.kind == "video":
        # Marks clips decoded with their pixel aspect ratio and BT.2020 colours: earlier versions
        # ignored both, and their latents must not be found.
        geometry += " as shown"
    controls = [c.digest for c in sample.companions if c.role == "control"]
    content = " ".join([sample.digest, *controls])
    by = f"{encoder} by tiles" if tiled else encoder
    return _digest(kind="latents", sample=content, geometry=geometry, encoder=by)


def mask_key(
    mask: Companion, size: Shape, grid: tuple[int, int], transform: SampleTransform
) -> CacheKey:
    """Return the key of a mask that is averaged to `grid` (rows, columns).

    The key depends on the mask's bytes, whether it is inverted, its crop, sizes and augmentations.
    """
    # Marks masks whose transparent pixels are decoded as black.
    geometry = f"{transform.name} {'x'.join(map(str, size))} on black"
    content = f"{mask.digest} inverted" if mask.inverted else mask.digest
    return _digest(kind="mask", mask=content, geometry=geometry, cells=f"{grid[0]}x{grid[1]}")


def text_key(prompt: str, encoder: str) -> CacheKey:
    """Return the key of a prompt's text embeddings; equal prompts share one cache entry."""
    return _digest(kind="text", caption=prompt, encoder=encoder)


def key_components(key: str) -> Mapping[str, str]:
    """Return the hashed parts of a `CacheKey` by name; empty for a plain string."""
    return key.components if isinstance(key, CacheKey) else {}


def _digest(**parts: str) -> CacheKey:
    hasher = blake3(f"{SCHEMA_VERSION}".encode())
    for part in parts.values():
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "big"))
        hasher.update(encoded)
    return CacheKey(hasher.hexdigest(length=20), {**parts, "schema": f"{SCHEMA_VERSION}"})
