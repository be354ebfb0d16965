"""Cache keys depend on contents, geometry and encoder, and not on names or folders."""

from dataclasses import replace

from gracetune.cache.keys import latent_key, mask_key, text_key
from gracetune.data.augment import DEFAULT_TRANSFORM, SampleTransform
from gracetune.data.sample import Companion, Sample

SIZE = (16, 8)
GRID = (2, 4)


def test_keys_differ_by_content_geometry_encoder_and_kind():
    sample, other = (Sample("d", "k", "c", digest, 8, 8) for digest in ("x", "y"))
    keys = {
        latent_key(sample, (8, 8), "e"),
        latent_key(other, (8, 8), "e"),
        latent_key(sample, (8, 16), "e"),
        latent_key(sample, (8, 8), "f"),
        text_key("c", "e"),
        text_key("c", "f"),
        text_key("ce", ""),
    }
    assert len(keys) == 7


def test_keys_do_not_depend_on_names_or_folders():
    here, there = (Sample(d, k, "c", "x", 8, 8) for d, k in (("a", "1.png"), ("b", "2.png")))
    assert latent_key(here, (8, 8), "e") == latent_key(there, (8, 8), "e")


def test_tiled_latents_have_keys_of_their_own():
    sample = Sample("d", "a.png", "a", "digest", 8, 8)
    whole, tiled = (latent_key(sample, (8, 8), "e", tiled=on) for on in (False, True))
    assert whole != tiled
    assert tiled.components["encoder"] == "e by tiles"
    assert latent_key(sample, (8, 8), "e") == whole


def test_mask_keys_depend_on_bytes_geometry_and_latent_grid():
    mask = Companion("mask", "m", "digest")
    base = mask_key(mask, SIZE, GRID, DEFAULT_TRANSFORM)
    others = [
        mask_key(replace(mask, digest="another"), SIZE, GRID, DEFAULT_TRANSFORM),
        mask_key(replace(mask, inverted=True), SIZE, GRID, DEFAULT_TRANSFORM),
        mask_key(mask, (8, 16), GRID, DEFAULT_TRANSFORM),
        mask_key(mask, SIZE, (4, 8), DEFAULT_TRANSFORM),
        mask_key(mask, SIZE, GRID, SampleTransform(crop=(0.5, 0.0))),
    ]
    assert len({base, *others}) == 6
    assert base == mask_key(replace(mask, key="of another name"), SIZE, GRID, DEFAULT_TRANSFORM)
    assert base.components["kind"] == "mask"
