import json

import pytest

from gracetune.config.checks import check_run, find_remarks, find_violations
from gracetune.config.load import load_run_text
from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError
from gracetune.models.registry import FAMILIES


def run(**sections):
    return RunFile.model_validate(sections)


def ramp(**settings):
    return {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4, **settings}


def test_the_default_run_breaks_no_rule():
    assert find_violations(RunFile()) == []
    assert find_remarks(RunFile()) == []


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        (
            {"gh200_optimizations": {"enable_batch_size_rampup": True}},
            "gh200_optimizations.enable_batch_size_rampup",
            "initial_effective_batch_size is missing",
        ),
        (
            {"gh200_optimizations": ramp(target_effective_batch_size=2)},
            "gh200_optimizations.initial_effective_batch_size",
            "is 4; it must be at most target_effective_batch_size (2)",
        ),
        (
            {
                "gh200_optimizations": ramp(target_effective_batch_size=6),
                "train": {"batch_size": 8},
            },
            "gh200_optimizations.target_effective_batch_size",
            "is 6; it must be at least train.batch_size (8)",
        ),
        (
            {
                "optimizer": {"schedule": "cosine", "warmup_steps": 10},
                "train": {"max_train_steps": 10},
            },
            "optimizer.warmup_steps",
            "must be below train.max_train_steps (10)",
        ),
        ({"optimizer": {"lr_bump": 1e-6}}, "optimizer.lr_bump", "is 1e-06; only automagic has"),
        ({"optimizer": {"low_noise_max_lr": 1.0}}, "optimizer.low_noise_max_lr", "only automagic"),
        (
            {"optimizer": {"name": "automagic", "min_lr": 2.0, "max_lr": 1.0}},
            "optimizer.min_lr",
            "is 2; it must be at most optimizer.max_lr (1)",
        ),
        (
            {"optimizer": {"name": "automagic", "high_noise_min_lr": 2.0, "max_lr": 1.0}},
            "optimizer.high_noise_min_lr",
            "at most optimizer.max_lr (1)",
        ),
        (
            {"train": {"timestep_window": (0.5, 0.5)}},
            "train.timestep_window",
            "is [0.5, 0.5]; the first number must be below the second",
        ),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas.1", "below 1"),
        ({"adapter": {"targets": ()}}, "adapter.targets", "empty list"),
        (
            {"datasets": ({"caption_strategy": "instanceprompt"},)},
            "datasets.0.caption_strategy",
            "instance_prompt is missing",
        ),
        ({"datasets": ({"bucket_step": 64, "resolution": 32},)}, "datasets.0.bucket_step", "32"),
        (
            {"datasets": ({"bucket_step": 64, "resolution": (128, 32)},)},
            "datasets.0.bucket_step",
            "at most datasets.0.resolution (32)",
        ),
        ({"datasets": ({"resolution": ()},)}, "datasets.0.resolution", "is an empty list"),
        ({"datasets": ({"bucket_aspects": ()},)}, "datasets.0.bucket_aspects", "is an empty list"),
        (
            {"datasets": ({"bucket_aspects": (1.0, 0.25)},)},
            "datasets.0.bucket_aspects",
            "has 0.25; it must be from 0.333 to 3",
        ),
        (
            {"datasets": ({"cache_latents_to_disk": True},)},
            "datasets.0.cache_latents_to_disk",
            "is true, but cache_config.persistent_cache is false",
        ),
        ({"validation": {"prompts": ()}}, "validation.prompts", "empty list"),
        ({"validation": {"holdout": 1}}, "validation.holdout", "no sample to train on"),
        (
            {"distributed": {"strategy": "fsdp2"}, "adapter": {"rank": 4}},
            "distributed.strategy",
            "the run trains an adapter. Gathering the frozen weights",
        ),
        (
            {"distributed": {"strategy": "fsdp2"}, "model": {"quantize": "int8"}},
            "model.quantize",
            "is int8, but distributed.strategy fsdp2 cannot divide",
        ),
        (
            {"distributed": {"strategy": "hsdp"}, "optimizer": {"name": "muon"}},
            "optimizer.name",
            "is muon, which orthogonalizes whole matrices, but with distributed.strategy hsdp each "
            "rank has only some rows of a tensor. Use one of adamw, automagic, lion, "
            "schedule_free",
        ),
        (
            {"distributed": {"strategy": "fsdp2"}, "optimizer": {"name": "prodigy"}},
            "optimizer.name",
            "estimates one step size",
        ),
        (
            {"distributed": {"strategy": "fsdp2"}, "optimizer": {"name": "of_another_package"}},
            "optimizer.name",
            "may need whole tensors",
        ),
    ],
)
def test_a_violation_names_the_key_the_value_and_the_rule(sections, key, words):
    (violation,) = find_violations(run(**sections))
    assert violation.key == key
    assert words in violation.message


def test_duplicate_ids_are_all_reported():
    found = find_violations(run(datasets=({"id": "a"}, {"id": "b"}, {"id": "a"})))
    assert [violation.key for violation in found] == ["datasets.0.id", "datasets.2.id"]


@pytest.mark.parametrize(
    "sections",
    [
        {"gh200_optimizations": ramp(target_effective_batch_size=4)},
        {"gh200_optimizations": {"target_effective_batch_size": 1}, "train": {"batch_size": 8}},
        {"optimizer": {"warmup_steps": 10}, "train": {"max_train_steps": 10}},
        {"optimizer": {"name": "automagic", "lr_bump": 1.0, "min_lr": 1.0, "max_lr": 1.0}},
        {"datasets": ({"caption_strategy": "instanceprompt", "instance_prompt": "x"},)},
        {
            "datasets": ({"cache_latents_to_disk": True},),
            "cache_config": {"persistent_cache": True},
        },
    ],
)
def test_compatible_settings_are_accepted(sections):
    assert find_violations(run(**sections)) == []


def test_settings_that_the_strategy_does_not_use_are_reported():
    (text,) = find_remarks(run(distributed={"cpu_offload": True}))
    assert text.startswith("distributed.cpu_offload has no effect: distributed.strategy is auto")
    (text,) = find_remarks(run(distributed={"strategy": "fsdp2", "shard_size": 2}))
    assert text.startswith("distributed.shard_size has no effect")
    offload = {"strategy": "fsdp2", "cpu_offload": True}
    (text,) = find_remarks(run(distributed=offload, optimizer={"state": "host"}))
    assert text.startswith("optimizer.state has no effect")


def test_unused_ramp_settings_are_reported():
    idle = run(gh200_optimizations={"initial_effective_batch_size": 4})
    assert "has no effect" in find_remarks(idle)[0]
    both = {"target_effective_batch_size": 8, "batch_rampup_steps": 8}
    found = find_remarks(run(gh200_optimizations=both))
    assert [text.split()[0].rpartition(".")[2] for text in found] == list(both)


def test_unused_staging_settings_are_reported():
    local = run(datasets=({"type": "local", "in_memory": {"num_workers": 2}},))
    (text,) = find_remarks(local)
    assert text.startswith("datasets.0.in_memory has no effect, because datasets.0.type is local")
    assert (
        find_remarks(run(datasets=({"type": "in_memory", "in_memory": {"num_workers": 2}},))) == []
    )
    assert find_remarks(run(datasets=({"type": "local"},))) == []


def test_unused_cache_settings_are_reported():
    flips = {"augmentations": ({"name": "flip"},), "augmentations_cache_mode": "disable_cache"}
    kept = {"cache_config": {"persistent_cache": True}}
    (text,) = find_remarks(run(datasets=(flips,), **kept))
    assert "keeps only the captions of this dataset" in text
    assert find_remarks(run(datasets=(flips,))) == []
    (text,) = find_remarks(run(datasets=({"augmentations_cache_mode": "static"},)))
    assert "augmentations_cache_mode has no effect" in text
    assert (
        find_remarks(run(datasets=({"crop": "random", "augmentations_cache_mode": "static"},)))
        == []
    )
    one, other = ({"id": str(kept), "cache_latents_to_disk": kept} for kept in (True, False))
    (text,) = find_remarks(run(datasets=(one, other), **kept))
    assert text.startswith("datasets.1.cache_latents_to_disk is false but has no effect")


def test_training_needs_a_data_set_with_a_folder():
    with pytest.raises(ConfigError, match="datasets is empty"):
        check_run(RunFile())
    with pytest.raises(ConfigError, match=r"datasets\.1\.instance_data_dir is missing.*'b'"):
        check_run(run(datasets=({"id": "a", "instance_data_dir": "x"}, {"id": "b"})))
    check_run(run(datasets=({"instance_data_dir": "x"},)))


def test_all_missing_settings_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check_run(run(adapter={"targets": ()}))
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "adapter.targets",
        "datasets",
    ]


def test_a_holdout_without_validation_is_reported() -> None:
    run = RunFile.model_validate({"validation": {"every": 0, "holdout": 0.1}})
    assert any("is never measured" in remark for remark in find_remarks(run))
    assert find_remarks(RunFile.model_validate({"validation": {"holdout": 0.1}})) == []


def test_settings_that_an_optimizer_ignores_are_reported():
    lion = RunFile.model_validate({"optimizer": {"name": "lion", "eps": 1e-6, "lr": 1e-5}})
    assert find_remarks(lion) == ["optimizer.eps has no effect: lion does not use it."]
    muon = find_remarks(run(optimizer={"name": "muon", "eps": 1e-6, "betas": [0.9, 0.99]}))
    assert [line.split()[0] for line in muon] == ["optimizer.betas", "optimizer.eps"]
    assert all("which muon leaves to AdamW" in line for line in muon)
    assert find_remarks(run(optimizer={"name": "muon"})) == []
    assert find_remarks(RunFile.model_validate({"optimizer": {"name": "adamw", "eps": 1e-6}})) == []


def test_the_settings_of_families_exist_in_the_schema():
    for info in FAMILIES.values():
        for setting in info.settings:
            section, key = setting.split(".")
            assert key in type(getattr(RunFile(), section)).model_fields


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"model": {"transformer_file": "nowhere.safetensors"}}, "model.transformer_file"),
        ({"model": {"family": "flux", "task": "image"}}, "model.task"),
        ({"model": {"family": "flux", "init_seed": 1}}, "model.init_seed"),
        ({"train": {"switch_every": 7}}, "train.switch_every"),
        ({"train": {"timestep_sampling": "mode", "timestep_mean": 1}}, "train.timestep_mean"),
        ({"optimizer": {"final_lr_share": 0.1}}, "optimizer.final_lr_share"),
        ({"adapter": {"factor": 8}}, "adapter.factor"),
        ({"train": {"keep_adapters": 2}}, "train.keep_adapters"),
        ({"adapter": {"kind": "loha", "full_matrix": True}}, "adapter.full_matrix"),
        ({"datasets": ({"frames": 9},)}, "datasets.0.frames"),
        ({"datasets": ({"dataset_type": "video", "seconds": 3.0},)}, "datasets.0.seconds"),
        ({"datasets": ({},), "validation": {"seconds": 3.0}}, "validation.seconds"),
        (
            {"datasets": ({"dataset_type": "audio"},), "validation": {"width": 64}},
            "validation.width",
        ),
    ],
)
def test_settings_without_effect_are_reported(sections, setting):
    (text,) = find_remarks(run(**sections))
    assert text.startswith(f"{setting} has no effect: ")


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"family": "wan22", "transformer_2_file": "x", "task": "image"}},
        {"model": {"family": "of_a_package", "transformer_file": "x"}},
        {"adapter": {"kind": "lokr", "factor": 8, "full_matrix": True}},
        {"adapter": {"factor": -1}},
        {"train": {"timestep_std": 1.5}, "validation": {"num_prompts": 2}},
        {"optimizer": {"schedule": "linear", "final_lr_share": 0.1, "warmup_steps": 100}},
        {"datasets": ({"dataset_type": "video", "frames": 9, "clip": "center"},)},
        {"datasets": ({"dataset_type": "audio", "seconds": 3.0},), "validation": {"seconds": 2.0}},
    ],
)
def test_settings_with_an_effect_are_not_reported(sections):
    assert find_remarks(run(**sections)) == []


def test_unused_numbers_of_prompts_and_long_warmups_are_remarked():
    (text,) = find_remarks(run(validation={"prompts": ["a"], "num_prompts": 2}))
    assert text.startswith("validation.num_prompts has no effect")
    (text,) = find_remarks(run(optimizer={"warmup_steps": 10}, train={"max_train_steps": 10}))
    assert "does not reach optimizer.lr in the run's 10 steps" in text
    assert find_remarks(run(optimizer={"warmup_steps": 9}, train={"max_train_steps": 10})) == []


def test_the_trigger_word_replaces_its_placeholder_in_prompts():
    text = (
        '{"datasets": [{"trigger_word": " ohwx "}, {"id": "b", "trigger_word": "ohwx"}],'
        ' "validation": {"prompts": ["a photo of [trigger]", "a cat"]}}'
    )
    run = load_run_text(text, "json", "run.json", environment={}).run
    assert run.validation.prompts == ("a photo of ohwx", "a cat")
    assert run.datasets[0].trigger_word == "ohwx"


@pytest.mark.parametrize(
    ("datasets", "reason"),
    [
        ([{"id": "a"}], r"prompts.0 contains \[trigger\], but no dataset has a trigger_word"),
        (
            [{"id": "a", "trigger_word": "x"}, {"id": "b", "trigger_word": "y"}],
            r"several trigger words \(x, y\)\. Write the word itself",
        ),
    ],
)
def test_a_prompt_with_a_placeholder_needs_one_trigger_word(datasets, reason):
    text = json.dumps({"datasets": datasets, "validation": {"prompts": ["[trigger] sits"]}})
    with pytest.raises(ConfigError, match=reason):
        load_run_text(text, "json", "run.json", environment={})


@pytest.mark.parametrize(
    ("settings", "remark"),
    [
        ({"caption_keep_tokens": 2}, "datasets.0.caption_keep_tokens has no effect"),
        ({"caption_variants": 2}, "datasets.0.caption_variants has no effect"),
        (
            {"caption_strategy": "filename", "caption_extension": "tags"},
            "datasets.0.caption_extension has no effect",
        ),
        ({"instance_prompt": "a cat"}, "datasets.0.instance_prompt has no effect"),
    ],
)
def test_caption_settings_without_effect_are_remarked(settings, remark):
    (found,) = find_remarks(RunFile.model_validate({"datasets": [settings]}))
    assert found.startswith(remark)


@pytest.mark.parametrize(
    "settings",
    [
        {"caption_extension": "../x"},
        {"caption_extension": ""},
        {"trigger_word": " "},
        {"trigger_word": ["x", "y"]},
    ],
)
def test_unusable_caption_settings_are_refused(settings):
    text = json.dumps({"datasets": [settings], "validation": {"prompts": ["[trigger]"]}})
    with pytest.raises(ConfigError, match=r"it must be (a|text)"):
        load_run_text(text, "json", "run.json", environment={})
