import io

import pytest
import torch
from PIL import Image

from gracetune.cache.encode import EncodeItem, fill_latents, fill_text
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.shard_store import ShardStore
from gracetune.cache.store import DictStore
from gracetune.data.sample import Sample


class Pictures:
    """A source of small PNG files, one of them broken."""

    def __init__(self, names, broken=()):
        self.files = {name: b"no picture" if name in broken else self.png(name) for name in names}

    @staticmethod
    def png(name):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (len(name) * 20, 0, 0)).save(buffer, "PNG")
        return buffer.getvalue()

    def read(self, key):
        return self.files[key]


def pictures(names, size=(8, 8), broken=()):
    source = Pictures(names, broken)
    return [EncodeItem(Sample("d", n, n, f"digest {n}", 8, 8), size, source) for n in names]


def encode(pixels):
    return pixels.mean((2, 3), keepdim=True)


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


@pytest.fixture(params=["memory", "shards"])
def store(request, tmp_path):
    return DictStore() if request.param == "memory" else ShardStore(tmp_path)


def test_a_store_gives_back_what_it_took(store):
    assert store.get("ab12") is None
    store.put("ab12", {"x": torch.arange(6).view(2, 3).T})
    assert torch.equal(store.get("ab12")["x"], torch.arange(6).view(2, 3).T)


def test_only_what_is_missing_is_encoded(store, told):
    counted = []

    def counting(pixels):
        counted.append(len(pixels))
        return encode(pixels)

    assert fill_latents(store, pictures(["a", "bb"]), counting, "e", told) == []
    assert fill_latents(store, pictures(["a", "bb", "ccc"]), counting, "e", told) == []
    assert counted == [2, 1]
    fill_latents(store, pictures(["a"], size=(4, 4)), counting, "e", told)
    fill_latents(store, pictures(["a"]), counting, "another encoder", told)
    assert counted == [2, 1, 1, 1]


def test_latents_are_those_of_their_own_picture(told):
    store = DictStore()
    names = ["a", "bb", "ccc"] * 1
    fill_latents(store, pictures(names), encode, "e", told)
    for picture in pictures(names):
        red = store.get(latent_key(picture.sample, (8, 8), "e"))["latents"][0].item()
        assert red == pytest.approx(len(picture.sample.key) * 20 / 127.5 - 1, abs=0.01)


def test_unreadable_pictures_come_back_with_a_reason(told):
    store = DictStore()
    lost = fill_latents(store, pictures(["a", "bb"], broken={"bb"}), encode, "e", told)
    assert [sample.key for sample, _ in lost] == ["bb"]
    assert all(reason for _, reason in lost)
    only_broken = pictures(["z"], broken={"z"})
    assert len(fill_latents(DictStore(), only_broken, encode, "e", told)) == 1


def test_each_distinct_caption_is_encoded_once(store, told):
    asked = []

    def encode_text(captions):
        asked.extend(captions)
        return [{"tokens": torch.full((len(c), 2), 1.0)} for c in captions]

    fill_text(store, ["b", "a", "b"], encode_text, "e", told)
    fill_text(store, ["a", "", "c"], encode_text, "e", told)
    assert asked == ["a", "b", "", "c"]
    assert store.get(text_key("", "e"))["tokens"].shape == (0, 2)
