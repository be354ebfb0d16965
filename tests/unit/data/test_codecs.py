from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.codecs import CODECS, choose

NOISE = random.Random(0).randbytes(20_000)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.binary(max_size=2000))
def test_every_codec_gives_back_what_it_took(name: str, data: bytes) -> None:
    codec = CODECS[name]
    assert codec.decompress(codec.compress(data)) == data


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_shrinks_what_repeats(name: str) -> None:
    assert len(CODECS[name].compress(b"gracetune " * 1000)) < 2000


def test_auto_chooses_nothing_for_what_is_dense_already() -> None:
    choice = choose([NOISE])
    assert choice.codec is None
    assert all(share < 0.05 for share in choice.savings.values())


def test_auto_chooses_the_smallest() -> None:
    texts = [f"a picture of number {number} ".encode() * 20 for number in range(50)]
    choice = choose(texts)
    assert choice.codec == max(choice.savings, key=lambda name: choice.savings[name])
    assert choice.savings[choice.codec] > 0.5


def test_auto_wants_five_percent() -> None:
    assert choose([NOISE + bytes(700)]).codec is None
    assert choose([NOISE + bytes(1500)]).codec is not None


def test_auto_without_bytes_chooses_nothing() -> None:
    assert choose([]).codec is None
    assert choose([b"", b""]).codec is None
