from types import SimpleNamespace

import pytest

from gracetune.cache.batch_reader import PromptNames, SampleTransforms
from gracetune.cache.encode import EMPTY_PROMPT, PromptEncoder
from gracetune.config.schema import DatasetSection
from gracetune.data.images import PILLOW
from gracetune.data.loader import BucketGroup
from gracetune.data.sample import Companion, Sample

CONTROL = Companion("control", "c.png", "digest of the control")
SAMPLE = Sample("d", "a.png", "make it red", "digest", 64, 64, companions=(CONTROL,))


def recipes(seed=0, **section):
    settings = {"id": "d", "instance_data_dir": "x", **section}
    return SampleTransforms({"d": DatasetSection.model_validate(settings)}, seed, PILLOW)


def family(takes_control):
    return SimpleNamespace(takes_control=takes_control)


def name(size=(64, 64), **settings):
    return PromptNames(True, recipes(**settings))("make it red", SAMPLE, size)


def test_a_caption_that_is_encoded_alone_is_its_own_name():
    assert PromptNames(False, recipes())("make it red", SAMPLE, (64, 64)) == "make it red"


@pytest.mark.parametrize(
    "other",
    [{"size": (32, 64)}, {"crop": "top"}, {"crop": "random"}, {"crop": "random", "seed": 1}],
)
def test_a_control_that_is_fitted_otherwise_gives_another_text(other):
    assert name(**other) != name()
    assert name(**other) == name(**other)


def test_one_control_in_two_buckets_is_encoded_for_each():
    groups = [BucketGroup((SAMPLE,), 1, 0.0, size) for size in ((64, 64), (32, 64))]
    texts = PromptEncoder(family(True), groups, {}, PromptNames(True, recipes()))
    assert len(texts.names) == 4  # with the caption and without, in both
    assert len(PromptEncoder(family(False), groups, {}, PromptNames(False, recipes())).names) == 2
    assert EMPTY_PROMPT in PromptEncoder(family(False), groups, {}, PromptNames(False, recipes())).names


def test_a_control_is_encoded_for_each_variant_and_for_the_first_of_draws_without_end():
    flips = {"augmentations": [{"name": "flip"}]}
    group = BucketGroup((SAMPLE,), 1, 0.0, (64, 64))
    drawn = recipes(variants=8, **flips)
    name_of = PromptNames(True, drawn)
    texts = PromptEncoder(family(True), [group], {}, name_of)
    asked = {name_of("make it red", SAMPLE, (64, 64), epoch) for epoch in range(20)}
    assert len(asked) == 2  # flipped, and not
    assert asked < set(texts.names)

    endless = recipes(augmentations_cache_mode="refresh_each_epoch", **flips)
    name_of = PromptNames(True, endless)
    asked = {name_of("make it red", SAMPLE, (64, 64), epoch) for epoch in range(20)}
    assert asked == {name_of("make it red", SAMPLE, (64, 64))}
    assert asked < set(PromptEncoder(family(True), [group], {}, name_of).names)
