import pytest

from gracetune.config.aliases import (
    ALIASES,
    LISTS,
    REMOVED_KEYS,
    VALUE_ALIASES,
    VALUE_REMARKS,
    canonical_path,
)
from gracetune.config.load import known_keys, load_run_text
from gracetune.errors import ConfigError


def load(text, *overrides):
    return load_run_text(text, "json", "run.json", overrides, environment={})


def refusal(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_every_alias_leads_to_a_key_of_the_schema():
    for spelling, ours in ALIASES.items():
        target = ours.removesuffix(".").replace("datasets.0", "datasets.*")
        assert target in known_keys() or target == "datasets.*", spelling
        assert spelling.endswith(".") == ours.endswith("."), spelling


def test_no_alias_hides_a_key_of_the_schema():
    sections = {"optimizer"}
    assert set(ALIASES) & set(known_keys()) == sections
    assert not set(REMOVED_KEYS) & set(known_keys())


def test_no_key_of_the_schema_is_respelled():
    for key in set(known_keys()) - {"optimizer"}:
        path = tuple(0 if step == "*" else step for step in key.split("."))
        assert canonical_path(path, "value") == path


def test_values_and_remarks_belong_to_keys_of_the_schema():
    assert set(VALUE_ALIASES) <= set(known_keys())
    assert all(value in VALUE_ALIASES[key] for key, value in VALUE_REMARKS)


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ('{"train_batch_size": 3}', "train", "batch_size", 3),
        ('{"train": {"train_batch_size": 3}}', "train", "batch_size", 3),
        ('{"train": {"lr": 0.5}}', "optimizer", "lr", 0.5),
        ('{"learning_rate": 0.5}', "optimizer", "lr", 0.5),
        ('{"optimizer": "automagic"}', "optimizer", "name", "automagic"),
        ('{"optimizer": {"type": "AdamW"}}', "optimizer", "name", "adamw"),
        ('{"train": {"optimizer_params": {"weight_decay": 0}}}', "optimizer", "weight_decay", 0),
        ('{"lr_scheduler": "constant_with_warmup"}', "optimizer", "schedule", "constant"),
        ('{"attention_mechanism": "x"}', "model", "attention_mechanism", "x"),
        ('{"enable_manual_validation": true}', "validation", "enable_manual_validation", True),
        ('{"validation_prompt": "a cat"}', "validation", "prompts", ("a cat",)),
        ('{"mixed_precision": "fp32"}', "train", "mixed_precision", "no"),
        ('{"train": {"mixed_precision": null}}', "train", "mixed_precision", "auto"),
        ('{"train": {"timestep_type": "sigmoid"}}', "train", "timestep_sampling", "logit_normal"),
        ('{"snr_gamma": 5}', "train", "min_snr_gamma", 5),
        ('{"train": {"optimizer": "adamw8bit"}}', "optimizer", "name", "adamw_8bit"),
        ('{"model_type": "lora", "lora_rank": 4}', "adapter", "rank", 4),
        ('{"lora_rank": 4, "model_type": "lora"}', "adapter", "rank", 4),
        ('{"network": {"type": "lora", "linear": 8}}', "adapter", "rank", 8),
    ],
)
def test_other_tools_keys_are_translated(text, section, key, value):
    run = load(text).run
    assert run.model_dump()[section][key] == value
    assert section in run.model_fields_set


def test_model_type_full_means_no_adapter():
    assert load('{"model_type": "full"}').run.adapter is None


def test_translated_keys_are_listed_in_one_notice():
    notices = load('{"train_batch_size": 3, "lr": 0.5}').notices
    assert notices == (
        "Keys of other tools were translated: train_batch_size -> train.batch_size, "
        "lr -> optimizer.lr.",
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"data_backend": {"id": "a", "folder_path": "b"}}',
        '{"data_backend": [{"id": "a", "folder_path": "b"}]}',
        '{"dataset": {"id": "a", "folder_path": "b"}}',
        '{"datasets": {"id": "a", "instance_data_dir": "b"}}',
        '{"datasets": [], "id": "a", "instance_data_dir": "b"}',
        '{"id": "a", "instance_data_dir": "b"}',
        '"id": "a", "instance_data_dir": "b"',
    ],
)
def test_a_single_data_set_can_be_spelled_in_many_ways(text):
    (dataset,) = load(text).run.datasets
    assert (dataset.id, dataset.instance_data_dir) == ("a", "b")


def test_a_top_level_resolution_applies_to_every_data_set():
    run = load('{"resolution": 64, "datasets": [{"id": "a"}, {"id": "b", "resolution": 64}]}').run
    assert [dataset.resolution for dataset in run.datasets] == [64, 64]
    assert load('{"resolution": 64}').run.datasets[0].resolution == 64


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ('{"train_batch_size": 1,\n"train": {"batch_size": 2}}', "train_batch_size is 1", ":2: "),
        ('{"resolution": 8, "datasets": [{"resolution": 16}]}', "resolution is 8", "is 16"),
        ('{"adapter": null, "lora_rank": 4}', "adapter is null", "lora_rank is 4"),
        ('{"lora_rank": 4, "adapter": null}', "adapter is null", "lora_rank is"),
        ('{"train": 5, "max_train_steps": 3}', "train is 5", "max_train_steps is 3"),
        ('{"lora_dropout": 0, "adapter": {"dropout": false}}', "is false", "lora_dropout is 0"),
    ],
)
def test_two_spellings_of_a_key_must_agree(text, first, second):
    message = refusal(text)
    assert first in message
    assert second in message
    assert message.endswith("Remove one of them.")


def test_two_spellings_with_the_same_value_are_accepted():
    assert load('{"train_batch_size": 2, "train": {"batch_size": 2}}').run.train.batch_size == 2
    assert load('{"lora_rank": 4, "adapter": {}}').run.adapter.rank == 4


def test_the_top_level_initial_size_turns_the_ramp_on_unless_it_is_turned_off():
    loaded = load('{"initial_effective_batch_size": 4}')
    assert loaded.run.gh200_optimizations.enable_batch_size_rampup is True
    assert any("enable_batch_size_rampup is true" in notice for notice in loaded.notices)
    off = '{"initial_effective_batch_size": 4, "enable_batch_size_rampup": false}'
    assert load(off).run.gh200_optimizations.enable_batch_size_rampup is False
    nested = load('{"gh200_optimizations": {"initial_effective_batch_size": 4}}')
    assert nested.run.gh200_optimizations.enable_batch_size_rampup is False
    assert any("has no effect" in notice for notice in nested.notices)


@pytest.mark.parametrize("kind", ["vae_cache_type", "text_cache_type"])
def test_unified_memory_caches_turn_hints_on(kind):
    text = '{"cache_config": {"%s": "unified_memory"}%s}'
    hints = load(text % (kind, "")).run.gh200_optimizations.enable_uvm_hints
    assert hints is True
    disabled = load(text % (kind, ', "gh200_optimizations": {"enable_uvm_hints": false}')).run
    assert disabled.gh200_optimizations.enable_uvm_hints is False


def test_staging_does_not_compress_by_default_and_does_not_mention_it():
    text = '{"datasets": [{"in_memory": {"num_workers": 2}}]}'
    assert load(text).run.datasets[0].in_memory.compression == "none"
    assert not any("compression" in notice for notice in load(text).notices)
    null = '{"datasets": [{"in_memory": {"compression": null}}]}'
    assert load(null).run.datasets[0].in_memory.compression == "none"
    empty = load('{"datasets": [{"in_memory": {}}]}').run
    assert empty.datasets[0].in_memory.compression == "none"
    staged = load('{"datasets": [{"type": "in_memory"}]}').run
    assert staged.datasets[0].in_memory.compression == "none"
    assert load('{"datasets": [{"id": "a"}]}').run.datasets[0].type == "local"


def test_in_memory_must_be_an_object():
    with pytest.raises(ConfigError, match=r"in_memory is 3; it must be an object with keys"):
        load('{"datasets": [{"type": "in_memory", "in_memory": 3}]}')


def test_setting_in_memory_turns_staging_on():
    loaded = load('{"datasets": [{"in_memory": {"compression": "lz4"}}]}')
    assert loaded.run.datasets[0].type == "in_memory"
    assert "datasets.0.type is in_memory, because datasets.0.in_memory is set." in loaded.notices
    local = load('{"datasets": [{"type": "local", "in_memory": {"compression": "lz4"}}]}')
    assert local.run.datasets[0].type == "local"
    assert any("datasets.0.in_memory has no effect" in text for text in local.notices)


def test_removed_keys_are_refused_with_advice():
    with pytest.raises(ConfigError, match="move the datasets into `datasets` of this file"):
        load('{"data_backend_config": "datasets.json"}')


def test_cache_latents_to_disk_turns_the_persistent_cache_on():
    text = '{"datasets": [{"id": "a", "cache_latents_to_disk": true}, {"id": "b"}]%s}'
    assert load(text % "").run.cache_config.persistent_cache is True
    message = refusal(text % ',\n"cache_config": {"persistent_cache": false}')
    assert "datasets.0.cache_latents_to_disk is true" in message
    assert "persistent_cache is false" in message


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.batch_size=4", "train", "batch_size", 4),
        ("train_batch_size=4", "train", "batch_size", 4),
        ("train-batch-size=4", "train", "batch_size", 4),
        ('train={"batch_size": 4}', "train", "batch_size", 4),
        ("output_dir=a=b", None, "output_dir", "a=b"),
        ("gradient_checkpointing=True", "train", "gradient_checkpointing", True),
        ("model_type=full", None, "adapter", None),
        ("model.path=None", "model", "path", None),
    ],
)
def test_overrides_replace_values_in_any_spelling(override, section, key, value):
    text = '{"train": {"batch_size": 9}, "adapter": {"rank": 3}, "model": {"path": "x"}}'
    dump = load(text, override).run.model_dump()
    assert (dump[section] if section else dump)[key] == value


def test_overrides_can_set_list_items():
    text = '{"datasets": [{"id": "a"}, {"id": "b"}]}'
    run = load(text, "datasets.1.repeats=2", "resolution=64", "datasets.2.id=c").run
    assert [dataset.repeats for dataset in run.datasets] == [1, 2, 1]
    assert [dataset.resolution for dataset in run.datasets] == [64, 64, 1024]
    loaded = load(text, "datasets.*.repeats=3")
    assert [dataset.repeats for dataset in loaded.run.datasets] == [3, 3]
    assert loaded.notices == (), "it is no key of another tool"
    assert load(text, "model_type=lora", "lora_rank=2", "model_type=lora").run.adapter.rank == 2


def test_overrides_can_set_all_items_of_every_list_of_sections():
    known = {key[: key.rindex(".*.")] for key in known_keys() if ".*." in key}
    assert known == LISTS
    text = """{"datasets": [{"augmentations": [{"name": "flip"}, {"name": "hue"}]}, {"id": "b"}],
        "validation": {"prompts": ["a", {"prompt": "b", "width": 512}, {"prompt": "c"}]}}"""
    every = ("validation.prompts.*.width=64", "datasets.*.augmentations.*.probability=0.25")
    loaded = load(text, *every)
    first, *others = loaded.run.validation.prompts
    assert first == "a", "a text has no width of its own"
    assert [(each.prompt, each.width) for each in others] == [("b", 64), ("c", 64)]
    assert [each.probability for each in loaded.run.datasets[0].augmentations] == [0.25, 0.25]
    assert loaded.notices == ()
    assert load("{}", every[0]).run.validation.prompts is None
    assert "did you mean validation.prompts?" in refusal(text, "validation.promts.*.width=64")


@pytest.mark.parametrize("key", ["datasets", "data_backend", "dataset"])
def test_a_list_override_replaces_the_whole_list(key):
    text = '{"datasets": [{"id": "a", "repeats": 2}, {"id": "b"}]}'
    (dataset,) = load(text, key + '=[{"id": "c", "folder_path": "x"}]').run.datasets
    assert (dataset.id, dataset.repeats, dataset.instance_data_dir) == ("c", 1, "x")
    assert load(text, f"{key}=[]").run.datasets == ()
    assert load("{}", "optimizer.betas=[0.5, 0.6]").run.optimizer.betas == (0.5, 0.6)


def test_implied_settings_do_not_hide_mistakes():
    message = refusal('{"datasets": [5, {"in_memory": {"num_workers": 1}}]}')
    assert message == "run.json:1: datasets.0 is 5; it must be an object with keys."


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("x", "is not an override"),
        ("=3", "is not an override"),
        ("a..b=3", "is not an override"),
        ("datasets.3.repeats=2", "sets item 3 of a list with 1 items"),
        ("datasets.0.in_memory.0.x=2", "override datasets.0.in_memory.0.x=2: "),
        ("validation.prompts.x=1", "sets item x"),
        ("seed=NaN", "finite"),
        ("optimizer.lr=1e999", "finite"),
        ("train.lr=abc", 'train.lr (optimizer.lr) is "abc"; it must be a number'),
        ("max_trian_steps=1", "did you mean train.max_train_steps?"),
    ],
)
def test_bad_overrides_are_refused(override, message):
    assert message in refusal('{"datasets": [{}], "validation": {"prompts": ["a"]}}', override)
