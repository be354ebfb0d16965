"""SimpleTuner's options and datasets become the settings that mean the same."""

import json

import pytest

from gracetune.config.importers.detect import import_files
from gracetune.config.importers.report import MISSING
from gracetune.config.importers.simpletuner_datasets import KNOWN_KEYS as DATASET_KEYS
from gracetune.config.importers.simpletuner_keys import KNOWN_KEYS
from gracetune.config.parse_text import walk
from gracetune.errors import ConfigError

CONFIG = {
    "model_family": "flux",
    "model_type": "lora",
    "model_flavour": "dev",
    "optimizer": "optimi-adamw",
    "output_dir": "out",
    "max_train_steps": 100,
    "data_backend_config": "datasets.json",
}
DATASET = {
    "id": "cats",
    "type": "local",
    "instance_data_dir": "data/cats",
    "caption_strategy": "textfile",
    "resolution": 512,
}


@pytest.fixture
def convert(tmp_path):
    """Import a config and one dataset with some keys changed; a value of None removes a key."""

    def call(dataset=None, files=None, **config):
        merged = {key: value for key, value in (CONFIG | config).items() if value is not None}
        entries = dataset if isinstance(dataset, list) else [DATASET | (dataset or {})]
        (tmp_path / "config.json").write_text(json.dumps(merged))
        (tmp_path / "datasets.json").write_text(json.dumps(entries))
        for name, content in (files or {}).items():
            (tmp_path / name).write_text(json.dumps(content))
        return import_files([tmp_path / "config.json"])

    return call


def verdicts(imported):
    return {each.key: (each.verdict, each.text) for each in imported.keys}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"lora_rank": 8}, {"adapter.rank": 8, "adapter.alpha": MISSING, "adapter.dropout": 0.1}),
        ({"lora_alpha": 4, "lora_dropout": 0.0}, {"adapter.alpha": 4, "adapter.dropout": 0.0}),
        ({"use_dora": "true"}, {"adapter.kind": "dora"}),
        ({"model_type": "full"}, {"adapter": None}),
        ({"flux_lora_target": "mmdit"}, {"adapter.targets": ["to_k", "to_q", "to_v", "to_out.0"]}),
        ({"peft_lora_target_modules": '["to_q"]'}, {"adapter.targets": ["to_q"]}),
        ({"learning_rate": "1e-4"}, {"optimizer.lr": 1e-4}),
        ({"max_train_steps": "1e3", "seed": 3.0}, {"train.max_train_steps": 1000, "seed": 3}),
        ({"gradient_checkpointing": 1}, {"train.gradient_checkpointing": True}),
        ({}, {"optimizer.lr": 4e-7, "optimizer.eps": 1e-6, "optimizer.weight_decay": 0.0}),
        ({"optimizer_config": "weight_decay=0.1,eps=1e-7"}, {"optimizer.weight_decay": 0.1}),
        ({"optimizer_beta1": 0.8, "optimizer_beta2": 0.9}, {"optimizer.betas": [0.8, 0.9]}),
        ({"optimizer": "bnb-adamw8bit"}, {"optimizer.name": "adamw_8bit"}),
        ({"lr_scheduler": "constant_with_warmup"}, {"optimizer.schedule": "constant"}),
        (
            {"lr_scheduler": "polynomial", "learning_rate": 1e-4, "lr_end": 1e-5},
            {"optimizer.schedule": "linear", "optimizer.final_lr_share": 0.1},
        ),
        (
            {"lr_scheduler": "linear", "lr_warmup_steps": 100},
            {"optimizer.schedule": "constant", "optimizer.warmup_steps": 100},
        ),
        (
            {"lr_scheduler": "cosine", "lr_warmup_steps": 100, "lr_end": 0},
            {
                "optimizer.schedule": "cosine",
                "optimizer.warmup_steps": 0,
                "optimizer.final_lr_share": 0,
            },
        ),
        (
            {"lr_scheduler": "cosine", "lr_warmup_steps": 200, "lr_end": 0},
            {"optimizer.warmup_steps": 0, "optimizer.final_lr_share": 0.5},
        ),
        (
            {"lr_scheduler": "cosine", "lr_warmup_steps": 10},
            {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 10},
        ),
        ({"max_grad_norm": 0.1, "grad_clip_method": "norm"}, {"train.max_grad_norm": 0.1}),
        ({"max_grad_norm": 0.1}, {"train.max_grad_norm": MISSING}),
        ({}, {"train.timestep_shift": 3.0, "train.batch_size": 4}),
        ({"flow_schedule_shift": 0}, {"train.timestep_shift": MISSING}),
        ({"flow_schedule_auto_shift": True}, {"train.timestep_shift": "flux"}),
        ({"flow_use_uniform_schedule": True}, {"train.timestep_sampling": "uniform"}),
        ({"flux_schedule_shift": 2.5}, {"train.timestep_shift": 2.5}),
        (
            {"flux_schedule_shift": 0, "flux_schedule_auto_shift": True},
            {"train.timestep_shift": "flux"},
        ),
        ({"flow_schedule_shift": 2, "flux_schedule_shift": 5}, {"train.timestep_shift": 2}),
        ({"flux_use_uniform_schedule": True}, {"train.timestep_sampling": "uniform"}),
        ({"flow_matching_sigmoid_scale": 0.5}, {"train.timestep_std": 0.5}),
        ({"use_ema": True}, {"train.ema_decay": 0.995}),
        ({"use_ema": False, "ema_decay": 0.9}, {"train.ema_decay": MISSING}),
        ({"checkpointing_steps": 7, "checkpoints_total_limit": 2}, {"train.checkpoint_every": 7}),
        ({"base_model_precision": "int8-quanto"}, {"model.quantize": "int8"}),
        ({"base_model_precision": "fp8-torchao"}, {"model.quantize": "fp8"}),
        ({"base_model_precision": "nf4-bnb"}, {"model.quantize": "nf4"}),
        ({"base_model_precision": "int2-quanto"}, {"model.quantize": "nf4"}),
        ({"base_model_precision": "no_change"}, {"model.quantize": MISSING}),
        ({"model_flavour": "kontext"}, {"model.path": "black-forest-labs/FLUX.1-Kontext-dev"}),
        ({"pretrained_model_name_or_path": "mine"}, {"model.path": "mine"}),
        ({"validation_steps": 9, "validation_resolution": "832x480"}, {"validation.width": 832}),
        ({"validation_resolution": "512"}, {"validation.height": 512}),
        ({"validation_resolution": "1.0"}, {"validation.height": 1024}),
        ({"validation_disable": True, "validation_steps": 9}, {"validation.every": 0}),
        ({"disable_benchmark": True}, {"validation.at_start": False}),
        ({"disable_benchmark": False}, {"validation.at_start": MISSING}),
        (
            {"disable_benchmark": True, "validation_on_startup": True},
            {"validation.at_start": MISSING},
        ),
        (
            {"disable_benchmark": True, "validation_disable": True},
            {"validation.at_start": MISSING},
        ),
        (
            {"report_to": "tensorboard,wandb", "tracker_run_name": "one"},
            {
                "logging.tensorboard": MISSING,
                "logging.trackers": ["wandb"],
                "logging.tracker_project": "simpletuner",
                "logging.tracker_run_name": "one",
            },
        ),
        (
            {"report_to": ["trackio", "mlflow"], "tracker_project_name": "cats"},
            {"logging.trackers": ["trackio", "mlflow"], "logging.tracker_project": "cats"},
        ),
        (
            {"report_to": "tensorboard", "tracker_project_name": "cats"},
            {"logging.trackers": MISSING, "logging.tracker_project": MISSING},
        ),
        ({"report_to": "none"}, {"logging.tensorboard": False}),
        ({"caption_dropout_probability": 0.3}, {"datasets.0.caption_dropout": 0.3}),
    ],
)
def test_an_option_becomes_its_setting(convert, options, settings):
    imported = convert(**options)
    assert {name: imported.get(name) for name in settings} == settings
    assert set(options) <= {each.key for each in imported.keys}


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"repeats": 0}, {"repeats": 1}),
        ({"repeats": 9}, {"repeats": 10}),
        ({"resolution_type": "pixel"}, {"resolution": 512, "resolution_type": "edge"}),
        ({"resolution_type": "pixel_area"}, {"resolution": 512, "resolution_type": "area"}),
        ({"resolution_type": "area", "resolution": 1.0}, {"resolution": 1024}),
        ({"resolution_type": "area", "resolution": 0.25}, {"resolution": 512}),
        ({"minimum_image_size": 300}, {"min_resolution": 300, "min_edge": MISSING}),
        ({"minimum_image_size": 300, "resolution_type": "pixel"}, {"min_edge": 300}),
        ({"minimum_image_size": 0}, {"min_resolution": MISSING}),
        (
            {"minimum_image_size": 0.25, "resolution_type": "area", "resolution": 1},
            {"min_resolution": 500},
        ),
        ({"crop": True}, {"crop": "center", "bucket_aspects": [1.0]}),
        ({"crop": True, "crop_aspect": "preserve", "crop_style": "random"}, {"crop": "random"}),
        (
            {"crop": True, "crop_aspect": "closest", "crop_aspect_buckets": [1.0, 0.5]},
            {"bucket_aspects": [1.0, 0.5]},
        ),
        ({"crop": False, "crop_aspect": "square"}, {"bucket_aspects": MISSING, "crop": MISSING}),
        ({"minimum_aspect_ratio": 0.25}, {"max_aspect": 4.0}),
        ({"probability": 0.5}, {"weight": 0.5}),
        ({"caption_strategy": "filename"}, {"caption_strategy": "filename"}),
        (
            {"caption_strategy": "instanceprompt", "instance_prompt": "a cat"},
            {"caption_strategy": "instanceprompt", "instance_prompt": "a cat"},
        ),
        (
            {"instance_prompt": "ohwx", "prepend_instance_prompt": True},
            {"caption_prefix": "ohwx", "instance_prompt": MISSING},
        ),
        (
            {"instance_prompt": "ohwx", "only_instance_prompt": True},
            {"caption_strategy": "instanceprompt", "instance_prompt": "ohwx"},
        ),
        (
            {"caption_shuffle": {"enable": True, "count": 3, "position_start": 2}},
            {"caption_shuffle": True, "caption_keep_tokens": 2},
        ),
        ({"type": "aws", "aws_bucket_name": "b", "aws_data_prefix": "p/"}, {"type": "remote"}),
        (
            {"type": "huggingface", "dataset_name": "a/b", "caption_column": "text"},
            {"instance_data_dir": "hf://datasets/a/b", "columns.caption": "text"},
        ),
        (
            {"type": "webshart", "source": "a/b", "subfolder": "c"},
            {"instance_data_dir": "hf://datasets/a/b/c", "type": "tar"},
        ),
        (
            {"dataset_type": "video", "video": {"num_frames": 83, "min_frames": 83}},
            {"frames": 81, "dataset_type": "video"},
        ),
        ({"dataset_type": "video"}, {"frames": 73}),
        ({"in_memory": {"compression": "lz4"}}, {"in_memory.compression": "lz4"}),
    ],
)
def test_a_key_of_a_dataset_becomes_its_setting(convert, keys, settings):
    imported = convert(keys)
    assert {name: imported.get(f"datasets.0.{name}") for name in settings} == settings


def test_an_option_applies_to_the_datasets_that_do_not_set_it(convert):
    entries = [DATASET, {"id": "b", "instance_data_dir": "b"}]
    imported = convert(entries, resolution=768, minimum_image_size=100)
    assert [each["resolution"] for each in imported.run["datasets"]] == [512, 768]
    assert [each["caption_strategy"] for each in imported.run["datasets"]] == [
        "textfile",
        "filename",
    ]
    assert verdicts(imported)["resolution"][0] == "translated"


def test_caches_and_disabled_datasets_are_not_needed(convert):
    cache = {"id": "text", "dataset_type": "text_embeds", "default": True, "cache_dir": "c"}
    imported = convert([DATASET | {"disabled": True, "id": "old"}, DATASET, cache])
    assert [each["id"] for each in imported.run["datasets"]] == ["cats"]
    found = verdicts(imported)
    assert found["0.resolution"] == ("not needed", "the dataset is disabled")
    assert found["2.cache_dir"][0] == "not needed"


@pytest.mark.parametrize(
    ("kind", "flavour", "setting"),
    [
        ("reference_strict", "kontext", "conditioning_data_dir"),
        ("mask", "dev", "mask_data_dir"),
    ],
)
def test_conditioning_data_belong_to_the_dataset_that_names_them(convert, kind, flavour, setting):
    other = {"id": "other", "conditioning_type": kind, "instance_data_dir": "refs", "type": "local"}
    entries = [DATASET | {"conditioning_data": "other"}, other | {"dataset_type": "conditioning"}]
    imported = convert(entries, model_flavour=flavour)
    assert len(imported.run["datasets"]) == 1
    assert imported.get(f"datasets.0.{setting}") == "refs"


def test_control_images_of_a_model_without_them_are_not_supported(convert):
    other = {"id": "other", "conditioning_type": "controlnet", "instance_data_dir": "refs"}
    imported = convert([DATASET | {"conditioning_data": ["other"]}, other])
    assert verdicts(imported)["0.conditioning_data"][0] == "not supported"


@pytest.mark.parametrize(
    ("vae", "verdict"),
    [("madebyollin/sdxl-vae-fp16-fix", "not supported"), ("base", "not needed")],
)
def test_another_vae_is_not_supported(convert, vae, verdict):
    key = "pretrained_vae_model_name_or_path"
    imported = convert([DATASET], pretrained_model_name_or_path="base", **{key: vae})
    assert verdicts(imported)[key][0] == verdict


def test_epochs_become_steps_if_the_samples_can_be_counted(convert, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(5):
        (data / f"{number}.png").touch()
    keys = {"instance_data_dir": str(data), "repeats": 1}
    imported = convert(keys, max_train_steps=0, num_train_epochs=3, train_batch_size=4)
    assert imported.get("train.max_train_steps") == 9  # 10 samples are 3 batches of an epoch
    refused = convert(max_train_steps=0, num_train_epochs=3)
    assert refused.refusals == [
        "num_train_epochs is 3, but the samples could not be counted. Set max_train_steps in "
        f"{tmp_path / 'config.json'}."
    ]


def test_wan_flavours_choose_the_expert(convert):
    imported = convert(model_family="wan", model_flavour="i2v-14b-2.2-low")
    assert imported.get("train.experts") == "low"
    assert imported.get("model.path") == "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
    assert imported.get("model.family") == "wan22"
    assert imported.get("validation.every") == 0


LYCORIS = {
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 16,
    "apply_preset": {
        "target_module": ["Attention", "FeedForward"],
        "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 8}},
    },
}


def test_a_lycoris_config_is_the_adapter(convert):
    options = {"lora_type": "lycoris", "lycoris_config": "lycoris.json"}
    imported = convert(files={"lycoris.json": LYCORIS}, **options)
    adapter = imported.run["adapter"]
    assert (adapter["kind"], adapter["full_matrix"], adapter["factor"]) == ("lokr", True, 16)
    assert len(adapter["targets"]) == 2
    assert list(adapter["overrides"].values()) == [{"factor": 16}, {"factor": 8}]
    found = verdicts(imported)
    assert found["apply_preset.module_algo_map.FeedForward.factor"][0] == "translated"
    assert not imported.refusals
    low_rank = convert(
        files={"lycoris.json": {"algo": "loha", "linear_dim": 8, "linear_alpha": 4}}, **options
    )
    adapter = low_rank.run["adapter"]
    assert (adapter["kind"], adapter["rank"], adapter["alpha"]) == ("loha", 8, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controlnet": True}, "controlnet asks for a ControlNet, which gracetune does not train"),
        ({"distillation_method": "dcm"}, "remove distillation_method from "),
        ({"model_flavour": "vace"}, "model_flavour is 'vace', which gracetune does not train"),
        ({"lora_type": "lycoris", "lycoris_config": "no.json"}, "there is no such file"),
        (
            {"fsdp_enable": True, "fsdp_transformer_layer_cls_to_wrap": "DiTBlock"},
            "names DiTBlock, but the blocks of flux are FluxTransformerBlock and",
        ),
    ],
)
def test_what_gracetune_cannot_train_is_refused(convert, options, message):
    (refusal,) = convert(**options).refusals
    assert message in refusal


def test_csv_lists_and_unknown_kinds_of_data_are_refused(convert):
    assert "is a CSV list of addresses" in convert({"type": "csv"}).refusals[0]
    assert "dataset_type is 'audio'" in convert({"dataset_type": "audio"}).refusals[0]
    assert "aws_bucket_name is missing" in convert({"type": "aws"}).refusals[0]


def test_another_family_is_one_clear_line(convert):
    with pytest.raises(ConfigError, match=r"model_family is 'hidream', which .* does not train\."):
        convert(model_family="hidream")


def test_a_family_without_a_translation_names_its_example(convert):
    with pytest.raises(ConfigError, match=r"not translated\. Start from .*ideogram4-lora --copy"):
        convert(model_family="ideogram")


def test_a_typo_is_reported_with_the_right_name(convert):
    found = verdicts(convert(learning_rte=1e-4))
    verdict, text = found["learning_rte"]
    assert verdict == "not supported"
    assert "did you mean learning_rate?" in text


def test_fsdp_and_context_parallel_become_settings_of_ranks(convert):
    imported = convert(
        model_type="full",
        fsdp_enable=True,
        fsdp_version=2,
        fsdp_reshard_after_forward="false",
        fsdp_cpu_offload=True,
        fsdp_limit_all_gathers=True,
        fsdp_transformer_layer_cls_to_wrap="FluxTransformerBlock",
        context_parallel_size=2,
        context_parallel_comm_strategy="allgather",
    )
    assert imported.run["distributed"] == {
        "strategy": "fsdp2",
        "reshard_after_forward": False,
        "cpu_offload": True,
        "context_parallel": 2,
    }
    verdict, text = verdicts(imported)["fsdp_limit_all_gathers"]
    assert verdict == "not needed"
    assert "distributed.prefetch_blocks" in text
    assert "Ulysses" in verdicts(imported)["context_parallel_comm_strategy"][1]


def test_an_adapter_is_trained_without_fsdp(convert):
    imported = convert(fsdp_enable=True, fsdp_cpu_offload=True)
    assert imported.run["distributed"] == {"strategy": "replicate"}
    assert "only in full training" in verdicts(imported)["fsdp_enable"][1]
    assert verdicts(imported)["fsdp_cpu_offload"][0] == "not needed"


def test_without_a_model_type_every_weight_is_trained(convert):
    """SimpleTuner's default of model_type is full."""
    imported = convert(model_type=None, base_model_precision="int8-quanto", fsdp_enable=True)
    assert imported.run["adapter"] is None
    assert "quantize" not in imported.run["model"]
    assert imported.run["distributed"]["strategy"] == "fsdp2"


def test_fsdp_that_is_off_is_not_needed(convert):
    imported = convert(fsdp_version=2, fsdp_cpu_offload=True, context_parallel_size=1)
    assert "distributed" not in imported.run
    found = verdicts(imported)
    assert found["fsdp_cpu_offload"] == ("not needed", "fsdp_enable is off")
    assert found["context_parallel_size"][0] == "not needed"


def test_the_report_names_the_extra_of_a_tracker(convert):
    verdict, text = verdicts(convert(report_to="wandb"))["report_to"]
    assert verdict == "translated"
    assert 'logging.trackers is ["wandb"]' in text
    assert "training needs pip install 'gracetune[wandb]'" in text
    verdict, text = verdicts(convert(report_to="wandb,comet_ml"))["report_to"]
    assert verdict == "not supported"
    assert "there is no tracker comet_ml; logging.trackers is" in text
    assert verdicts(convert(report_to="simpletuner"))["report_to"][0] == "not needed"
    assert "logging.trackers" in verdicts(convert(report_to="all"))["report_to"][1]


def test_tf32_is_not_needed(convert, tmp_path):
    assert verdicts(convert(allow_tf32=True))["allow_tf32"][0] == "not needed"
    lines = (f"{key.upper()}={value}" for key, value in CONFIG.items())
    (tmp_path / "config.env").write_text("\n".join((*lines, "ALLOW_TF32=true")))
    found = verdicts(import_files([tmp_path / "config.env"]))
    assert found["allow_tf32"][0] == "not needed"


def test_features_that_are_off_are_not_needed(convert):
    found = verdicts(convert(crepa_enabled=False, crepa_lambda=0.5, push_to_hub="false"))
    assert {found[key][0] for key in ("crepa_enabled", "crepa_lambda", "push_to_hub")} == {
        "not needed"
    }
    assert verdicts(convert(crepa_enabled=True))["crepa_enabled"][0] == "not supported"


def test_prompts_of_a_library_are_validated(convert):
    library = {"one": "a cat", "two": {"prompt": "a dog", "adapter_strength": 0.5}}
    imported = convert(
        files={"prompts.json": library},
        user_prompt_library="prompts.json",
        validation_prompt="a bird",
        validation_negative_prompt="blurry",
    )
    assert imported.get("validation.prompts") == ["a bird", "a cat", "a dog"]
    assert imported.get("validation.negative_prompt") == "blurry"


def test_several_sizes_repeat_the_prompts(convert):
    imported = convert(validation_prompt="a cat", validation_resolution="512x512,832x480")
    assert imported.get("validation.width") == 512
    assert imported.get("validation.prompts") == [
        "a cat",
        {"prompt": "a cat", "width": 832, "height": 480},
    ]


def leaf_keys(tree):
    return {
        ".".join(map(str, path))
        for path, value in walk(tree)
        if path and isinstance(path[-1], str) and not (isinstance(value, dict) and value)
    }


@pytest.mark.parametrize("odd", ["", "abc", "0.5", -1, 0, 1.5, True, [], ["a"], {}, {"a": 1}, None])
def test_odd_values_are_reported_and_never_crash(convert, odd, tmp_path):
    """Every key has exactly one line, whatever its value is."""
    options = dict.fromkeys(KNOWN_KEYS - {"model_family", "data_backend_config"}, odd)
    keys = dict.fromkeys(DATASET_KEYS - {"disabled", "disable", "dataset_type"}, odd)
    for family in ("flux", "sdxl", "wan"):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_family": family, "data_backend_config": "datasets.json"} | options)
        )
        (tmp_path / "datasets.json").write_text(json.dumps([keys | {"dataset_type": "video"}]))
        imported = import_files([tmp_path / "config.json", tmp_path / "datasets.json"])
        lines = [each.key for each in imported.keys if each.file.endswith("config.json")]
        assert sorted(lines) == sorted(
            leaf_keys(json.loads((tmp_path / "config.json").read_text()))
        )
        data = [each.key for each in imported.keys if each.file.endswith("datasets.json")]
        assert sorted(data) == sorted(
            leaf_keys(json.loads((tmp_path / "datasets.json").read_text()))
        )


def test_sizes_before_cropping_are_explained(convert):
    keys = ("maximum_image_size", "target_downsample_size")
    large, equal = {keys[0]: 1536, keys[1]: 1024}, {keys[0]: 1536, keys[1]: 512}
    found = verdicts(convert({"crop": True} | large))
    assert found[f"0.{keys[0]}"] == ("not supported", "see target_downsample_size")
    verdict, text = found[f"0.{keys[1]}"]
    assert verdict == "not supported"
    assert "here an image is shrunk until the crop just fits" in text
    assert "There is nothing to do, unless you want closer crops" in text
    for dataset in ({"crop": True} | equal, {"crop": False} | large, {"crop": True, keys[1]: 1024}):
        found = verdicts(convert(dataset))
        assert {found[f"0.{key}"][0] for key in keys if key in dataset} == {"not needed"}
    found = verdicts(convert({"crop": True}, **large))
    assert [found[key][0] for key in keys] == ["not supported", "not supported"]
    found = verdicts(convert({"crop": False}, **large))
    assert {found[key][0] for key in keys} == {"not needed"}


def test_a_warm_up_as_long_as_the_run_is_explained(convert):
    """SimpleTuner's cosine falls in `lr_warmup_steps` steps; its linear schedule warms up."""
    found = verdicts(convert(lr_scheduler="cosine", lr_warmup_steps=400))
    verdict, text = found["lr_warmup_steps"]
    assert verdict == "translated"
    assert "cosine has no warm-up; its rate falls for 400 steps" in text
    found = verdicts(convert(lr_scheduler="linear", lr_warmup_steps=400))
    assert found["lr_scheduler"][0] == "translated"
    assert "so the rate only rises" in found["lr_scheduler"][1]
    found = verdicts(convert(lr_scheduler="cosine", lr_warmup_steps=10))
    assert found["lr_warmup_steps"][0] == "translated"
    assert "turns every 10 steps" in found["lr_warmup_steps"][1]


def test_the_report_says_what_differs_and_what_to_do(convert):
    found = verdicts(
        convert(
            max_grad_norm=1.0,
            optimizer="adamw_bf16",
            webhook_config="webhook.json",
            gradient_checkpointing=True,
        )
    )
    assert found["max_grad_norm"][0] == "not supported"
    assert "so that a spike of the loss cannot undo training" in found["max_grad_norm"][1]
    assert "max_grad_norm: 0 turns it off, which is closest" in found["max_grad_norm"][1]
    assert "its state is in fp32 instead of bf16" in found["optimizer"][1]
    assert found["webhook_config"][0] == "not supported"
    assert "logging.webhooks" in found["webhook_config"][1]
    assert "on a GPU it has no effect" in found["gradient_checkpointing"][1]
    assert "gracetune[optimizers]" in verdicts(convert(optimizer="bnb-adamw8bit"))["optimizer"][1]
    found = verdicts(convert(model_family="wan", model_flavour=None, ignore_final_epochs=True))
    assert found["ignore_final_epochs"] == ("not needed", "max_train_steps decides")
    assert found["model_family"][1].endswith("Wan 2.1 and 2.2; model.path decides which")
    found = verdicts(convert(offset_noise=True))
    assert found["offset_noise"][1].endswith("left out; there is nothing to do")


def test_the_report_says_what_words_and_numbers_mean_here(convert):
    library = {"beach": "a cat on a beach", "forest": "a cat in a forest"}
    found = verdicts(
        convert(
            {"resolution_type": "pixel_area"},
            files={"prompts.json": library},
            lr_scheduler="polynomial",
            report_to="tensorboard",
            tracker_run_name="first",
            user_prompt_library="prompts.json",
            validation_seed=42,
            attention_mechanism="diffusers",
        )
    )
    text = {key: report[1] for key, report in found.items()}
    assert "the resolution is an edge in pixels, also with `area`" in text["0.resolution_type"]
    assert text["lr_scheduler"].endswith("its power is 1, that of SimpleTuner 0.8")
    assert text["report_to"] == "TensorBoard files are written"
    assert text["tracker_run_name"].startswith("report_to has no wandb, trackio or mlflow")
    assert text["user_prompt_library"].endswith("without their short names")
    assert found["validation_seed"][0] == "translated"
    assert "each further one has the next number, not the same one" in text["validation_seed"]
    assert "sdpa is SimpleTuner's `diffusers`" in text["attention_mechanism"]
    one = verdicts(convert(validation_prompt="a cat", validation_seed=42))
    assert one["validation_seed"][0] == "taken"
    assert "2.5" in verdicts(convert(lr_scheduler="polynomial", lr_power=2.5))["lr_scheduler"][1]
