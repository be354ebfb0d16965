"""Our keys in ai-toolkit's YAML: what makes a process ours, and what is refused."""

import pytest

from gracetune.errors import ConfigError
from gracetune.hosts.ai_toolkit.config_blocks import (
    OPTIMIZER_NAME,
    uses_gracetune,
    check_misspelled_keys,
    split_config,
)

FLIP = {"method": "HorizontalFlip", "params": {"p": 0.5}}


def process(**keys):
    return {"type": "sd_trainer", "train": {"lr": 1e-5}, **keys}


def dataset(**keys):
    return process(datasets=[{"folder_path": "pictures", **keys}])


@pytest.mark.parametrize(
    "given",
    [
        {"type": "gracetune"},
        process(gracetune={}),
        dataset(in_memory={}),
        dataset(type="in_memory"),
        dataset(augmentations_cache_mode="static"),
        process(train={"optimizer": "gracetune_automagic"}),
        process(train={"optimizer": "automagic", "optimizer_params": {"low_noise_max_lr": 1e-4}}),
    ],
)
def test_any_key_of_ours_makes_a_process_ours(given):
    assert uses_gracetune(given)


@pytest.mark.parametrize(
    "given",
    [
        process(),
        process(datasets=None),
        dataset(cache_latents_to_disk=True, type="image"),
        process(train={"optimizer": "automagic", "optimizer_params": {"max_lr": 1e-4}}),
        process(train=None),
    ],
)
def test_everything_else_stays_theirs(given):
    assert not uses_gracetune(given)


def test_what_is_left_has_none_of_our_keys_and_the_original_all_of_them():
    given = dataset(
        type="in_memory",
        in_memory={"compression": "zstd"},
        resolution=[512, 768],
        cache_latents_to_disk=True,
        augments=["ColorJitter"],
        augmentations=[FLIP],
        augmentations_cache_mode="static",
    ) | {"gracetune": {"check_saves": False, "cache_config": {"host_budget_gb": 2}}}
    rest, blocks = split_config(given, {})
    assert rest == {
        "type": "sd_trainer",
        "train": {"lr": 1e-5},
        "datasets": [
            {"folder_path": "pictures", "resolution": [512, 768], "cache_latents_to_disk": True}
        ],
    }
    assert given["datasets"][0]["augmentations"] == [FLIP]
    (found,) = blocks.datasets
    assert (found.cache_mode, found.augments, found.augmentations) == (
        "static",
        ("ColorJitter",),
        (FLIP,),
    )
    assert found.in_memory.compression == "zstd"
    assert found.num_resolutions == 2
    assert blocks.cache.host_budget_gb == 2
    assert blocks.stage_timesteps
    assert not blocks.check_saves
    assert blocks.optimizer is None


def test_bounds_by_stage_choose_our_automagic():
    given = {
        "optimizer": "automagic",
        "lr": 2e-6,
        "optimizer_params": {
            "high_noise_lr_bump": 1e-6,
            "low_noise_max_lr": 5e-4,
            "beta2": 0.99,
        },
    }
    rest, blocks = split_config(process(train=given), {})
    assert rest["train"] == {"optimizer": OPTIMIZER_NAME, "lr": 2e-6}
    section = blocks.optimizer
    assert (section.lr, section.high_noise_lr_bump, section.low_noise_max_lr) == (2e-6, 1e-6, 5e-4)
    assert (section.betas, section.weight_decay) == ((0.9, 0.99), 0.0)


def test_augmentations_stay_where_no_cache_is_to_hold_them():
    given = dataset(augmentations=[FLIP], augmentations_cache_mode="disable_cache")
    rest, blocks = split_config(given, {})
    assert rest["datasets"][0]["augmentations"] == [FLIP]
    assert blocks.datasets[0].cache_mode == ""
    without = split_config(dataset(augmentations_cache_mode="static"), {})[1]
    assert without.datasets[0].cache_mode == ""


def test_the_environment_decides_what_the_blocks_leave_open():
    _, blocks = split_config(process(gracetune={}), {"AITK_GH200_ENABLE_UVM_HINTS": "1"})
    assert blocks.gh200.enable_uvm_hints
    assert any("set by the environment" in text for text in blocks.notices)


CACHED = {"cache_latents_to_disk": True, "augmentations": [FLIP]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (process(gracetune=[1]), "gracetune is .1.; it is a block"),
        (process(gracetune={"check_save": True}), "check_save is not known.*mean check_saves"),
        (process(gracetune={"check_saves": "yes"}), "'yes'; it is true or false"),
        (
            process(gracetune={"cache_config": {"vae_cache_typ": "disk"}}),
            "cache_config.vae_cache_typ is not known.*vae_cache_type",
        ),
        (
            process(gracetune={"gh200_optimizations": {"enable_batch_size_rampup": True}}),
            "enable_batch_size_rampup is not known inside ai-toolkit",
        ),
        (process(gracetune={"cache_config": {"vae_cache_type": "tape"}}), "vae_cache_type"),
        (dataset(in_memory={"compresion": "lz4"}), r"datasets\[0\].*compression"),
        (process(datasets=[{"in_memory": {}}]), "has no folder_path"),
        (dataset(augmentations_cache_mode="sometimes"), "one of disable_cache, static"),
        (dataset(augmentations=[FLIP], augmentations_cache_mode="static"), "there is no cache"),
        (
            dataset(**CACHED, cache_latents=True, augmentations_cache_mode="refresh_each_epoch"),
            "workers keep as they first saw it",
        ),
        (
            dataset(
                cache_latents_to_disk=True, augmentations=FLIP, augmentations_cache_mode="static"
            ),
            "augmentations is .*; it is a list",
        ),
        (
            process(train={"optimizer": "adamw", "optimizer_params": {"low_noise_max_lr": 1e-4}}),
            "'adamw', and optimizer_params has bounds by stage",
        ),
        (
            process(train={"optimizer": "gracetune_automagic", "optimizer_params": [1]}),
            "it is a block",
        ),
        (
            process(
                train={"optimizer": "automagic", "optimizer_params": {"low_noise_max_l": 1e-4}}
            ),
            "low_noise_max_lr",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(given, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        split_config(given, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (process(gracetun={}), "the process has a key 'gracetun'.*Did you mean 'gracetune'"),
        (dataset(inmemory={}), r"datasets\[0\] has a key 'inmemory'.*'in_memory'"),
        (dataset(augmentation_cache_mode="static"), "Did you mean 'augmentations_cache_mode'"),
    ],
)
def test_a_key_that_is_not_quite_ours_is_not_ignored(given, said):
    assert not uses_gracetune(given)
    with pytest.raises(ConfigError, match=said):
        check_misspelled_keys(given)


def test_keys_of_their_own_are_no_spelling_mistakes_of_ours():
    check_misspelled_keys(dataset(augmentations=[FLIP], augments=[], cache_latents_to_disk=True))
    check_misspelled_keys(process(gracetune={}, datasets=None))
