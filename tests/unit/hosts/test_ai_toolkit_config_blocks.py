"""gracetune's keys in ai-toolkit's YAML: which processes use them, and what is refused."""

import pytest

from gracetune.errors import ConfigError
from gracetune.hosts.ai_toolkit.config_blocks import (
    OPTIMIZER_NAME,
    check_misspelled_keys,
    split_config,
    uses_gracetune,
)

FLIP = {"method": "HorizontalFlip", "params": {"p": 0.5}}


def process(**keys):
    return {"type": "sd_trainer", "train": {"lr": 1e-5}, **keys}


def dataset(**keys):
    return process(datasets=[{"folder_path": "images", **keys}])


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
def test_any_of_our_keys_enables_gracetune(given):
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
def test_processes_without_our_keys_are_left_alone(given):
    assert not uses_gracetune(given)


def test_our_keys_are_split_off_a_copy():
    given = dataset(
        type="in_memory",
        in_memory={"compression": "zstd"},
        resolution=[512, 768],
        cache_latents_to_disk=True,
        augments=["ColorJitter"],
        augmentations=[FLIP],
        augmentations_cache_mode="static",
        augmentation_cache_epoch=3,
    ) | {"gracetune": {"check_saves": False, "cache_config": {"host_budget_gb": 2}}}
    rest, blocks = split_config(given, {})
    assert rest == {
        "type": "sd_trainer",
        "train": {"lr": 1e-5},
        "datasets": [
            {"folder_path": "images", "resolution": [512, 768], "cache_latents_to_disk": True}
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
    assert (found.num_resolutions, found.first_epoch) == (2, 3)
    assert blocks.cache.host_budget_gb == 2
    assert blocks.stage_timesteps
    assert not blocks.check_saves
    assert blocks.optimizer is None


def test_bounds_by_stage_select_our_automagic():
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


def test_augmentations_stay_if_they_are_not_cached():
    given = dataset(augmentations=[FLIP], augmentations_cache_mode="disable_cache")
    rest, blocks = split_config(given, {})
    assert rest["datasets"][0]["augmentations"] == [FLIP]
    assert blocks.datasets[0].cache_mode == ""
    without = split_config(dataset(augmentations_cache_mode="static"), {})[1]
    assert without.datasets[0].cache_mode == ""


def test_the_environment_sets_what_the_blocks_do_not():
    _, blocks = split_config(process(gracetune={}), {"AITK_GH200_ENABLE_UVM_HINTS": "1"})
    assert blocks.gh200.enable_uvm_hints
    assert any("set by the environment" in text for text in blocks.notices)


def test_variables_of_managed_memory_are_reported_because_nothing_is_managed():
    conf = "use_uvm:True,uvm_oversubscription_ratio:3.0"
    _, blocks = split_config(process(gracetune={}), {"GRACETUNE_ALLOC_CONF": conf})
    assert [text.split(" has no effect inside ai-toolkit: ")[0] for text in blocks.ignored] == [
        "use_uvm:True",
        "uvm_oversubscription_ratio",
    ]
    assert "optimizer state and batches belong to ai-toolkit" in blocks.ignored[0]
    assert split_config(process(gracetune={}), {})[1].ignored == ()


CACHED = {"cache_latents_to_disk": True, "augmentations": [FLIP]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (process(gracetune=[1]), "gracetune is .1.; it must be a block"),
        (
            dataset(**CACHED, augmentations_cache_mode="static", augmentation_cache_epoch=-1),
            "augmentation_cache_epoch is -1; it must be a number of epochs",
        ),
        (process(gracetune={"check_save": True}), "check_save is not known.*mean check_saves"),
        (
            process(gracetune={"gh200_optimizations": {"use_uvm": True}}),
            "gh200_optimizations.use_uvm has no effect inside ai-toolkit: .* Remove it",
        ),
        (process(gracetune={"check_saves": "yes"}), "'yes'; it must be true or false"),
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
            "workers keep their first copy of that cache",
        ),
        (
            dataset(
                cache_latents_to_disk=True, augmentations=FLIP, augmentations_cache_mode="static"
            ),
            "augmentations is .*; it must be a list",
        ),
        (
            process(train={"optimizer": "adamw", "optimizer_params": {"low_noise_max_lr": 1e-4}}),
            "'adamw', and optimizer_params has bounds by stage",
        ),
        (
            process(train={"optimizer": "gracetune_automagic", "optimizer_params": [1]}),
            "it must be a block",
        ),
        (
            process(
                train={"optimizer": "automagic", "optimizer_params": {"low_noise_max_l": 1e-4}}
            ),
            "low_noise_max_lr",
        ),
    ],
)
def test_invalid_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        split_config(given, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (process(gracetun={}), "the process has a key 'gracetun'.*Did you mean 'gracetune'"),
        (dataset(inmemory={}), r"datasets\[0\] has a key 'inmemory'.*'in_memory'"),
        (dataset(augmentation_cache_mode="static"), "Did you mean 'augmentations_cache_mode'"),
    ],
)
def test_misspelled_keys_are_refused(given, message):
    assert not uses_gracetune(given)
    with pytest.raises(ConfigError, match=message):
        check_misspelled_keys(given)


def test_ai_toolkits_own_keys_are_not_taken_for_misspellings():
    check_misspelled_keys(dataset(augmentations=[FLIP], augments=[], cache_latents_to_disk=True))
    check_misspelled_keys(process(gracetune={}, datasets=None))
