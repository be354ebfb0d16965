import pytest
import torch

from gracetune.cache.encode import AUTO_TILE_PIXELS, NO_TILING, Tiling, choose_tiling, ExclusiveEncoder
from gracetune.cache.keys import latent_key
from gracetune.data.sample import Sample
from gracetune.errors import ConfigError


@pytest.mark.parametrize(
    ("asked", "can", "expected"),
    [
        ("auto", True, Tiling(AUTO_TILE_PIXELS)),
        ("auto", False, NO_TILING),
        (False, True, NO_TILING),
        (True, True, Tiling(0)),
    ],
)
def test_what_a_run_file_asks_for_is_what_the_family_can(asked, can, expected):
    assert choose_tiling(asked, "flux", can) == expected


def test_tiles_that_a_family_does_not_have_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"vae_tiling is true, but the encoder of tiny cannot work in tiles"):
        choose_tiling(True, "tiny", False)


def test_size_and_kind_decide():
    auto = Tiling(AUTO_TILE_PIXELS)
    assert not auto.applies_to((2048, 2048), "image")
    assert auto.applies_to((2064, 2048), "image")
    assert auto.applies_to((4096, 2048, 81), "video")
    assert not auto.applies_to((2, 10**8), "audio")
    assert not NO_TILING.applies_to((10**5, 10**5), "image")


def test_the_encoder_is_switched_for_each_batch_by_its_size():
    switched = []

    def tile(on):
        switched.append(on)
        return True

    encode = ExclusiveEncoder(lambda media: media * 2, tile, Tiling(64))
    assert encode(torch.ones(1, 3, 8, 8)).sum() == 384
    encode(torch.ones(1, 3, 8, 9))
    encode(torch.ones(1, 3, 5, 8, 8))
    assert switched == [False, True, False]


def test_a_family_that_never_tiles_is_not_asked():
    def encode(media):
        return media

    ExclusiveEncoder(encode, lambda on: 1 / 0, NO_TILING)(torch.ones(1, 3, 8, 8))


def test_tiled_latents_have_keys_of_their_own():
    sample = Sample("d", "a.png", "a", "digest", 8, 8)
    whole, tiled = (latent_key(sample, (8, 8), "e", tiled=on) for on in (False, True))
    assert whole != tiled
    assert tiled.components["encoder"] == "e by tiles"
    assert latent_key(sample, (8, 8), "e") == whole
