from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.staging_compression import CODECS, choose_codec

NOISE = random.Random(0).randbytes(20_000)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.binary(max_size=2000))
def test_every_codec_round_trips(name: str, data: bytes) -> None:
    codec = CODECS[name]
    assert codec.decompress(codec.compress(data)) == data


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_compresses_repetitive_data(name: str) -> None:
    assert len(CODECS[name].compress(b"gracetune " * 1000)) < 2000


def test_auto_does_not_compress_random_data() -> None:
    choice = choose_codec([NOISE])
    assert choice.codec is None
    assert all(share < 0.05 for share in choice.savings.values())


def test_auto_chooses_the_codec_that_saves_most() -> None:
    texts = [f"a picture of number {number} ".encode() * 20 for number in range(50)]
    choice = choose_codec(texts)
    assert choice.codec == max(choice.savings, key=lambda name: choice.savings[name])
    assert choice.savings[choice.codec] > 0.5


def test_auto_compresses_only_if_that_saves_five_percent() -> None:
    assert choose_codec([NOISE + bytes(700)]).codec is None
    assert choose_codec([NOISE + bytes(1500)]).codec is not None


def test_auto_does_not_compress_empty_files() -> None:
    assert choose_codec([]).codec is None
    assert choose_codec([b"", b""]).codec is None
