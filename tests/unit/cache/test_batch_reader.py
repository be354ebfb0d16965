"""Reading batches: names of prompts, and keys that are hashed once but stay correct."""

from types import SimpleNamespace

import pytest
import torch
from fakes.stores import DictStore

from gracetune.cache import batch_reader
from gracetune.cache.batch_reader import (
    BatchReader,
    MissingEntriesError,
    PromptNames,
    SampleTransforms,
)
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.memory_tier import allocate_pageable
from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.batch_order import NO_EPOCH, Draw
from gracetune.data.images import PILLOW
from gracetune.data.sample import Companion, Sample

CONTROL = Companion("control", "c.png", "digest of the control")
EDITED = Sample("d", "a.png", "make it red", "digest", 64, 64, companions=(CONTROL,))
SIZE = (64, 64)
RANDOM = {"crop": "random", "augmentations": [{"name": "rotate"}]}


def transforms(seed=0, **settings):
    section = DatasetSection.model_validate({"id": "d", "instance_data_dir": "x", **settings})
    return SampleTransforms({"d": section}, seed, PILLOW)


def prompt_name(size=SIZE, **settings):
    return PromptNames(True, transforms(**settings))("make it red", EDITED, size)


def test_a_prompt_without_control_is_named_by_its_caption():
    assert PromptNames(False, transforms())("make it red", EDITED, SIZE) == "make it red"


@pytest.mark.parametrize(
    "other",
    [{"size": (32, 64)}, {"crop": "top"}, {"crop": "random"}, {"crop": "random", "seed": 1}],
)
def test_a_control_with_another_geometry_has_another_name(other):
    assert prompt_name(**other) != prompt_name()
    assert prompt_name(**other) == prompt_name(**other)


class RecordingStore(DictStore):
    """Returns the keys that it is asked for, as numbers."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def gather(self, keys, name, allocate):
        self.keys.append(list(keys))
        return torch.zeros(len(keys), 1)


class OneStore:
    """Stands for augmentation epochs: every epoch has the same store."""

    def __init__(self, store):
        self.store = store

    def store_for(self, epoch):
        return self.store

    def current_store(self, epoch):
        return self.store


def reader_of(settings):
    latents, text = RecordingStore(), DictStore()
    stores = SimpleNamespace(latents=latents, text=text, hit_counts=SimpleNamespace(reads=0))
    made = transforms(**settings)
    identity = {"latents": "vae", "text": "t5"}
    epochs = OneStore(latents)
    return BatchReader(made, stores, epochs, {}, None, identity, lambda _: (1, 1)), made, stores


def samples(count):
    return [Sample("d", f"{n}.png", f"caption {n}", f"digest {n}", 64, 64) for n in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        RANDOM,
        {**RANDOM, "variants": 3},
        {**RANDOM, "augmentations_cache_mode": "refresh_each_epoch"},
    ],
    ids=["plain", "random", "variants", "refreshed"],
)
def test_remembered_keys_are_those_of_the_epoch_that_is_shown(settings):
    reader, made, stores = reader_of(settings)
    epochs = (NO_EPOCH, 0, 1, 2, 3, 4, 1, 0)
    for epoch in epochs:
        draws = [Draw(sample, "", SIZE, epoch) for sample in samples(5)]
        reader.read_latents(draws, allocate_pageable)
        expected = [latent_key(d.sample, SIZE, "vae", made(d.sample, epoch)) for d in draws]
        assert stores.latents.keys[-1] == expected
    assert stores.hit_counts.reads == 5 * len(epochs)


def test_a_key_is_hashed_once_for_a_static_sample_and_memory_is_bounded(monkeypatch):
    hashed = []

    def counting(sample, *parts):
        hashed.append(sample.key)
        return latent_key(sample, *parts)

    monkeypatch.setattr(batch_reader, "latent_key", counting)
    monkeypatch.setattr(batch_reader, "MAX_REMEMBERED_KEYS", 4)
    reader, _, _ = reader_of({})
    draws = [Draw(sample, sample.caption, SIZE, 0) for sample in samples(4)]
    for _ in range(3):
        reader.read_latents(draws, allocate_pageable)
    assert hashed == [draw.sample.key for draw in draws]
    many = [Draw(sample, "", SIZE, 7) for sample in samples(11)]
    reader.read_latents(many, allocate_pageable)
    assert len(reader._latent_keys) <= 4
    for key in reader._latent_keys.values():
        assert type(key) is str, "the components of keys are not kept"


def test_a_missing_text_is_an_error_that_says_how_to_continue():
    reader, _, stores = reader_of({})
    stores.text.put(text_key("there", "t5"), {"tokens": torch.ones(2)})
    assert reader.read_texts(["there", "there"])[1]["tokens"].tolist() == [1, 1]
    with pytest.raises(MissingEntriesError, match=r"1 entries .* Run the same command again"):
        reader.read_texts(["there", "gone"])
