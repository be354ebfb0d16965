from dataclasses import replace

import pytest

from gracetune.config.load import known_keys
from gracetune.config.schema import RunFile
from gracetune.data.sample import Sample
from gracetune.errors import CheckpointError
from gracetune.train.run_identity import (
    CHANGEABLE_SETTINGS,
    FORMER_BEHAVIOUR,
    IDENTITY_SETTINGS,
    IDENTITY_VERSION,
    NAMES_KEY,
    VERSION_KEY,
    changed_settings,
    check_same_run,
    removed_settings,
    run_identity,
    setting_of,
)

SAMPLES = [Sample("a", "1.png", "one", "d1", 8, 8), Sample("a", "2.png", "two", "d2", 8, 8)]


def identity(samples=SAMPLES, weights="w", precision="no", **sections):
    sections.setdefault("datasets", [{"id": "a", "instance_data_dir": "x"}])
    return run_identity(RunFile.model_validate(sections), samples, weights, precision)


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({}, []),
        ({"validation": {"every": 7}}, ["validation.every"]),
        ({"datasets": [{"trigger_word": "ohwx"}]}, ["datasets[0].trigger_word"]),
        ({"datasets": [{}, {"id": "b"}]}, ["datasets[1]"]),
        ({"datasets": []}, ["datasets[0]"]),
    ],
)
def test_settings_that_differ_are_named(sections, names):
    def settings(**changed):
        run = RunFile.model_validate({"datasets": [{}]} | changed)
        return run.model_dump(mode="json")

    assert changed_settings(settings(), settings(**sections)) == names
    older = settings()
    del older["validation"]["every"], older["logging"]
    assert changed_settings(older, settings()) == [], "added by a later version"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"train": {"batch_size": 2}}, "train.batch_size was 1 and is now 2"),
        ({"optimizer": {"lr": 0.5}}, "optimizer.lr"),
        ({"adapter": {"rank": 4}}, "adapter"),
        ({"datasets": [{"id": "a", "resolution": 64}]}, r"datasets\[0\].resolution"),
        ({"samples": SAMPLES[:1]}, "the training samples and captions or validation.holdout have"),
        ({"weights": "other"}, "the model's weights at the start"),
        ({"precision": "bf16"}, "train.mixed_precision"),
        (
            {"gh200_optimizations": {"batch_rampup_steps": 5}},
            "gh200_optimizations.batch_rampup_steps",
        ),
    ],
)
def test_a_changed_setting_that_shapes_the_weights_is_named(change, name):
    with pytest.raises(CheckpointError, match=name):
        check_same_run(identity(), identity(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"output_dir": "elsewhere"},
        {"train": {"max_train_steps": 5000, "checkpoint_every": 1}},
        {"datasets": [{"id": "a", "instance_data_dir": "moved", "type": "in_memory"}]},
        {"validation": {"every": 3}},
        {"logging": {"every": 3}},
        {"model": {"attention_mechanism": "sdpa"}},
        {
            "datasets": [
                {"id": "a", "remote": {"retries": 9, "timeout_s": 1, "options": {"k": "s"}}}
            ]
        },
        {"datasets": [{"id": "a", "columns": {"image": "jpg"}, "caption_strategy": "filename"}]},
        {"gh200_optimizations": {"placement": {"latents": "host"}}},
        {"plan": {"compile": "never"}},
        {"plan": "off"},
    ],
)
def test_other_settings_may_change(change):
    check_same_run(identity(), identity(**change))


def test_more_steps_are_another_run_if_the_schedule_depends_on_them():
    short = {"optimizer": {"schedule": "cosine"}, "train": {"max_train_steps": 10}}
    long = {"optimizer": {"schedule": "cosine"}, "train": {"max_train_steps": 20}}
    with pytest.raises(CheckpointError, match=r"train\.max_train_steps was 10 and is now 20"):
        check_same_run(identity(**short), identity(**long))
    changed = "another run: optimizer.schedule was 'constant' and is now 'cosine'. Restore"
    with pytest.raises(CheckpointError, match=changed):
        check_same_run(identity(), identity(**long))


def test_a_changed_caption_is_noticed():
    changed = [SAMPLES[0], Sample("a", "2.png", "zwei", "d2", 8, 8)]
    with pytest.raises(CheckpointError, match="captions"):
        check_same_run(identity(), identity(samples=changed))


def test_file_names_are_compared_where_caption_dropout_depends_on_them():
    renamed = [replace(sample, key=f"new-{sample.key}") for sample in SAMPLES]
    check_same_run(identity(), identity(samples=renamed))
    dropout = {"datasets": [{"id": "a", "instance_data_dir": "x", "caption_dropout": 0.1}]}
    before = identity(**dropout)
    with pytest.raises(CheckpointError, match="file names in datasets with caption_dropout have"):
        check_same_run(before, identity(samples=renamed, **dropout))
    older = without(before, NAMES_KEY) | {VERSION_KEY: 5}
    check_same_run(older, identity(samples=renamed, **dropout))
    assert removed_settings(before) == []


def test_mask_settings_are_compared_only_with_masks():
    plain = {"datasets": [{"instance_data_dir": "d", "resolution": 32}]}
    masked = {"datasets": [{"instance_data_dir": "d", "resolution": 32, "mask_data_dir": "m"}]}
    assert not any("mask" in key for key in identity(**plain))
    assert "datasets[0].mask_normalize" in identity(**masked)


def test_every_setting_is_either_compared_or_changeable():
    """A new setting fails here: decide whether it affects the trained weights."""
    keys = known_keys()
    sections = {key.rpartition(".")[0].removesuffix(".*") for key in keys}
    settings = {key for key in keys if key not in sections}
    assert settings == IDENTITY_SETTINGS | CHANGEABLE_SETTINGS
    assert not IDENTITY_SETTINGS & CHANGEABLE_SETTINGS


def test_the_version_is_raised_with_every_new_setting():
    """A setting that is added to IDENTITY_SETTINGS needs another IDENTITY_VERSION."""
    assert (IDENTITY_VERSION, len(IDENTITY_SETTINGS)) == (6, 92)


def without(saved, *names):
    return {key: value for key, value in saved.items() if key not in names}


FULL = {
    "adapter": {"rank": 4, "overrides": {"blocks.*.attn": {"rank": 2}}},
    "datasets": [{"id": "a", "augmentations": [{"name": "flip"}]}, {"id": "b"}],
}


@pytest.mark.parametrize(
    "name",
    [
        "train.min_snr_in_flow",
        "optimizer.final_lr_share",
        "datasets[1].variants",
        "datasets[0].augmentations[0].amount",
        "adapter.full_matrix",
        "adapter.overrides.blocks.*.attn.factor",
        "gh200_optimizations.rampup_shape",
    ],
)
def test_a_setting_that_the_checkpoint_does_not_have_counts_as_its_default(name):
    current = identity(**FULL)
    assert name in current
    older = without(current, name, VERSION_KEY)
    check_same_run(older, current)
    with pytest.raises(CheckpointError, match=r"\(the checkpoint is older than this setting\)"):
        check_same_run(older, current | {name: "another value"})


def test_a_default_that_changes_the_result_counts_as_the_former_behaviour(monkeypatch):
    monkeypatch.setitem(FORMER_BEHAVIOUR, "train.min_snr_in_flow", "exact")
    older = without(identity(), "train.min_snr_in_flow")
    with pytest.raises(CheckpointError, match="min_snr_in_flow was 'exact'"):
        check_same_run(older, identity())
    check_same_run(older, identity(train={"min_snr_in_flow": "exact"}))


def test_a_new_setting_does_not_block_a_checkpoint_of_version_1():
    """The settings of version 1, which had more entries than are compared now."""
    saved = without(identity(**FULL), VERSION_KEY, "cache_config.vae_tiling") | {
        "model.attention_mechanism": "sdpa",
        "datasets[0].remote.retries": 3,
        "datasets[0].remote.options.key": "secret",
        "datasets[0].columns.image": None,
        "datasets[1].augmentations": [],
    }
    check_same_run(saved, identity(**FULL, cache_config={"vae_tiling": True}))
    assert removed_settings(saved) == []
    assert removed_settings(without(identity(), "adapter") | {"adapter": None}) == []


@pytest.mark.parametrize("name", ["train.loss_scale", "datasets[0].flip", "bias", "section.x.y"])
def test_settings_that_no_longer_exist_are_listed_and_not_compared(name):
    saved = identity() | {name: 3}
    check_same_run(saved, identity())
    assert removed_settings(saved) == [name]
    assert not setting_of(name)


def test_a_checkpoint_of_a_later_version_is_refused():
    with pytest.raises(CheckpointError, match=r"later version of gracetune.*version \d+.*Update"):
        check_same_run(identity() | {VERSION_KEY: IDENTITY_VERSION + 1}, identity())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"adapter": {}}, "adapter was absent and is now set"),
        ({"adapter": {}}, {}, "adapter was set and is now absent"),
        (FULL, {**FULL, "datasets": FULL["datasets"][:1]}, r"datasets\[1\] was set"),
        (FULL, {**FULL, "adapter": {"rank": 4}}, r"adapter.overrides.blocks.\*.attn was set"),
        ({**FULL, "adapter": {"rank": 4}}, FULL, r"adapter.overrides.blocks.\*.attn was absent"),
        (
            FULL,
            {**FULL, "datasets": [{"id": "a"}, {"id": "b"}]},
            r"datasets\[0\].augmentations\[0\] was set and is now absent",
        ),
    ],
)
def test_an_added_or_removed_part_is_named_once(before, after, message):
    with pytest.raises(CheckpointError, match=f"another run: {message}[^;]*Restore"):
        check_same_run(identity(**before), identity(**after))
