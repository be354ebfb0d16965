"""gracetune's keys in SimpleTuner's configuration files."""

import pytest

from gracetune.config.schema import Gh200Section
from gracetune.errors import ConfigError
from gracetune.hosts.simpletuner.config_blocks import split_config, split_datasets

CONFIG = {
    "model_type": "lora",
    "train_batch_size": 4,
    "cache_config": {"vae_cache_type": "unified_memory", "persistent_cache": True},
    "gh200_optimizations": {
        "enable_uvm_hints": True,
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 32,
        "batch_rampup_steps": 400,
    },
}


def test_our_blocks_are_split_off():
    rest, blocks = split_config({**CONFIG, "--use_gh200_trainer": True}, {})
    assert rest == {"model_type": "lora", "train_batch_size": 4}
    assert blocks.gh200.target_effective_batch_size == 32
    assert blocks.cache.vae_cache_type == "unified_memory"
    assert blocks.raw["cache_config"] == CONFIG["cache_config"]


def test_a_configuration_without_our_blocks_is_unchanged():
    config = {"model_type": "lora", "num_train_epochs": 3}
    rest, blocks = split_config(config, {})
    assert rest == config
    assert (blocks.cache, blocks.notices, blocks.gh200) == (None, (), Gh200Section())


def test_use_gh200_trainer_false_disables_everything():
    _, blocks = split_config({**CONFIG, "use_gh200_trainer": False}, {})
    assert blocks.cache is None
    assert not blocks.gh200.enable_batch_size_rampup
    assert blocks.gh200.enable_uvm_hints is False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gh200_optimizations": {"enable_uvm_hint": True}}, "did you mean .*enable_uvm_hints"),
        ({"cache_config": {"vae_cache_type": "ram"}}, "^config.json: cache_config.vae_cache_type"),
        ({"datasets": []}, "data_backend_config names"),
        ({"cache_confg": {}}, "'cache_confg', which SimpleTuner drops. Did you mean 'cache_config"),
        ({"--gh200_optimisations": {}}, "Did you mean 'gh200_optimizations'"),
    ],
)
def test_settings_that_stock_simpletuner_drops_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        split_config(config, {})


def test_simpletuners_own_blocks_are_not_taken_for_misspellings():
    own = ("webhook_config", "deepspeed_config", "distillation_config", "publishing_config")
    config = {name: {} for name in own} | {"cache_conf": "text"}
    assert split_config(config, {})[0] == config


def test_settings_without_effect_are_reported():
    block = {"cache_dir": "x", "persistent_cache": False, "vae_cache_type": "disk"}
    _, blocks = split_config({"cache_config": block}, {})
    assert [text.split()[0] for text in blocks.ignored] == [
        "cache_config.cache_dir",
        "cache_config.persistent_cache",
    ]
    assert split_config(CONFIG, {})[1].ignored == (), "SimpleTuner keeps its files anyway"
    off = {"cache_config": block, "use_gh200_trainer": False}
    assert split_config(off, {})[1].ignored == ()


ALLOC_CONF = (
    "use_uvm:True,uvm_oversubscription_ratio:3.0,uvm_access_pattern:cpu_first,"
    "uvm_stage1_threshold:0.15,uvm_stage1_min_bytes:1073741824"
)


def test_settings_of_managed_memory_are_reported_because_nothing_is_managed():
    section = {"use_uvm": True, "managed": ["optimizer"], "managed_memory": "8GB"}
    _, blocks = split_config({"gh200_optimizations": section}, {"GRACETUNE_ALLOC_CONF": ALLOC_CONF})
    assert [text.split(" has no effect inside SimpleTuner: ")[0] for text in blocks.ignored] == [
        "gh200_optimizations.use_uvm",
        "gh200_optimizations.managed",
        "gh200_optimizations.managed_memory",
        "use_uvm:True",
        "uvm_oversubscription_ratio",
        "uvm_access_pattern",
        "uvm_stage1_threshold",
        "uvm_stage1_min_bytes",
    ]
    assert "optimizer state and batches belong to SimpleTuner" in blocks.ignored[0]
    assert not any("applied" in text for text in blocks.notices)


def test_variables_of_managed_memory_are_reported_without_our_blocks():
    _, blocks = split_config({"model_type": "lora"}, {"GH200_UVM_ACCESS_PATTERN": "gpu_first"})
    assert blocks.ignored == (
        "uvm_access_pattern has no effect inside SimpleTuner: it governs only what an extension "
        "allocates in gracetune.unified_pool()",
    )


def test_managed_memory_that_is_off_is_not_reported():
    off = {"gh200_optimizations": {"use_uvm": False, "managed": "off"}}
    assert split_config(off, {"GRACETUNE_ALLOC_CONF": "use_uvm:False"})[1].ignored == ()
    disabled = {"gh200_optimizations": {"use_uvm": True}, "use_gh200_trainer": False}
    assert split_config(disabled, {})[1].ignored == ()


def entry(**changes):
    return {"id": "pics", "type": "in_memory", "instance_data_dir": "/data", **changes}


def test_an_in_memory_data_set_is_local_to_simpletuner():
    block = {"compression": "lz4", "memory_limit_gb": 300, "num_workers": 2}
    block["file_extensions"] = [".PNG", "txt"]
    other = {"id": "text", "type": "local", "dataset_type": "text_embeds"}
    rest, [staged] = split_datasets([entry(in_memory=block), other], {})
    assert rest == [entry(type="local"), other]
    assert (staged.id, staged.folder, staged.extensions) == ("pics", "/data", ("png", "txt"))
    assert (staged.section.compression, staged.section.memory_limit_gb) == ("lz4", 300)


def test_a_disabled_data_set_is_not_staged():
    rest, staged = split_datasets([entry(disabled=True)], {})
    assert (rest[0]["type"], staged) == ("local", [])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry(in_memory={"compresion": "lz4"}), "did you mean .*compression"),
        (entry(in_memory={"file_extensions": "png"}), "file_extensions is 'png'"),
        (entry(in_memory=3), "in_memory is 3"),
        (entry(id=None), "has no id or no instance_data_dir"),
        (entry(type="local", in_memory={}), "has an in_memory block and is of type 'local'"),
        (entry(inmemory={}), "'pics' has a block 'inmemory'.*Did you mean 'in_memory'"),
    ],
)
def test_invalid_data_sets_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        split_datasets([wrong], {})
