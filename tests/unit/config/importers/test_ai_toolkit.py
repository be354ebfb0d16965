"""Jobs of ai-toolkit become run files of the same meaning; the report has a line for each key."""

import json
import re
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest

from gracetune.config.aliases import leaves
from gracetune.config.importers import ai_toolkit_keys as tables
from gracetune.config.importers.ai_toolkit import import_job
from gracetune.config.load import load_run_text
from gracetune.config.parse_text import dotted, parse_text
from gracetune.errors import ConfigError

JOB = """
job: extension
config:
  name: cat_v1
  process:
    - type: sd_trainer
      training_folder: output
      device: cuda:0
      network: {type: lora, linear: 16, linear_alpha: 8}
      save: {dtype: float16, save_every: 250}
      datasets:
        - {folder_path: /data/cats, caption_ext: txt, caption_dropout_rate: 0.05, resolution: [768]}
      train:
        batch_size: 2
        steps: 1500
        gradient_accumulation: 4
        optimizer: adamw8bit
        lr: 1e-4
        dtype: bf16
        noise_scheduler: flowmatch
        timestep_type: sigmoid
        ema_config: {use_ema: true, ema_decay: 0.99}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, quantize: true}
      sample:
        sampler: flowmatch
        sample_every: 250
        width: 1024
        height: 768
        prompts: [a cat, a dog]
        seed: 42
        walk_seed: true
        guidance_scale: 4
        sample_steps: 20
meta: {name: "[name]", version: "1.0"}
"""
PROCESS = "config.process.0."


def change(tree, path, value):
    """Set a value at a dotted path of the process; `...` removes the key."""
    node = tree["config"]["process"][0]
    *parents, last = path.split(".")
    for step in parents:
        node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
    if value is ...:
        node.pop(last, None)
    else:
        node[last] = value


def import_changed(changes=(), **more):
    tree = parse_text(JOB, "yaml", "job.yaml").tree
    for path, value in (dict(changes) | more).items():
        change(tree, path, value)
    return import_job(Path("job.yaml"), tree)


def setting(imported, path):
    node = imported.run
    for step in path.split("."):
        node = node[int(step)] if isinstance(node, list) else node.get(step)
    return node


def line(imported, key):
    (found,) = [each for each in imported.keys if each.key == PROCESS + key]
    return found


@pytest.fixture(scope="module")
def imported():
    return import_changed()


def test_the_run_file_is_valid(imported):
    loaded = load_run_text(json.dumps(imported.run), "json", "run.json", environment={})
    assert not loaded.notices
    run = loaded.run
    assert run.output_dir == "runs/cat_v1"
    assert (run.model.family, run.model.path) == ("flux", "black-forest-labs/FLUX.1-dev")
    assert (run.model.quantize, run.model.dtype) == ("fp8", "bfloat16")
    assert (run.adapter.kind, run.adapter.rank, run.adapter.alpha) == ("lora", 16, 8.0)
    assert (run.train.max_train_steps, run.train.gradient_accumulation_steps) == (1500, 4)
    assert (run.train.timestep_sampling, run.train.timestep_shift) == ("logit_normal", 1.0)
    assert (run.train.ema_decay, run.train.checkpoint_every) == (0.99, 250)
    assert run.train.gradient_checkpointing  # ai-toolkit's default
    assert (run.optimizer.name, run.optimizer.lr, run.optimizer.eps) == ("adamw_8bit", 1e-4, 1e-6)
    assert run.datasets[0].instance_data_dir == "/data/cats"
    assert (run.datasets[0].resolution, run.datasets[0].caption_dropout) == (768, 0.05)
    assert run.validation.prompts == ("a cat", "a dog")
    assert (run.validation.width, run.validation.height, run.validation.seed) == (1024, 768, 42)


def test_the_report_has_one_line_for_each_key(imported):
    keys = Counter(each.key for each in imported.keys)
    expected = [dotted(path) for path, _ in leaves(parse_text(JOB, "yaml", "job.yaml").tree)]
    assert keys == Counter(expected)


def test_the_report_says_what_quantization_costs(imported):
    assert "costs accuracy" in line(imported, "model.quantize").text


def test_the_report_names_the_package_of_an_optimizer(imported):
    assert "gracetune[optimizers]" in line(imported, "train.optimizer").text


def every_known_key():
    """Return a job with every key of the tables and every key that has a setting."""
    tree = parse_text(JOB, "yaml", "job.yaml").tree
    (process,) = tree["config"]["process"]
    for name, table in (
        (None, "PROCESS"),
        ("network", "NETWORK"),
        ("save", "SAVE"),
        ("train", "TRAIN"),
        ("model", "MODEL"),
        ("sample", "SAMPLE"),
    ):
        section = process if name is None else process[name]
        for key in (*vars(tables)[f"{table}_NOT_NEEDED"], *vars(tables)[f"{table}_UNSUPPORTED"]):
            section.setdefault(key, None)
    (dataset,) = process["datasets"]
    for key in (*tables.DATASET_NOT_NEEDED, *tables.DATASET_UNSUPPORTED):
        dataset.setdefault(key, None)
    process["logging"] = {"log_every": 5} | dict.fromkeys(tables.LOGGING_NOT_NEEDED)
    return tree


def test_no_key_has_two_lines_or_none():
    tree = every_known_key()
    imported = import_job(Path("job.yaml"), deepcopy(tree))
    keys = Counter(each.key for each in imported.keys)
    assert keys == Counter(dotted(path) for path, _ in leaves(tree))
    assert not [each.key for each in imported.keys if "not known" in each.text]


@pytest.mark.parametrize(
    "value",
    [None, "", "abc", [], {}, -1, 0, 2.5, True, ["a"], {"a": 1}, [{"a": 1}], [None]],
    ids=str,
)
@pytest.mark.parametrize("arch", ["flux", "sdxl", "wan22_14b", "qwen_image_edit_plus"])
def test_values_of_any_kind_have_a_line(arch, value):
    """Every section gets the value in all of its keys except those that choose the model."""
    tree = every_known_key()
    (process,) = tree["config"]["process"]
    process["model"] = {"arch": arch, "name_or_path": "x"} | dict.fromkeys(
        (*tables.MODEL_NOT_NEEDED, *tables.MODEL_UNSUPPORTED, "quantize", "qtype", "compile"), value
    )
    for section in (process["train"], process["datasets"][0], process["sample"], process["save"]):
        section.update(dict.fromkeys(section, value))
    process["network"] = {"type": "lora", "linear": value, "dropout": value, "lokr_factor": value}
    imported = import_job(Path("job.yaml"), deepcopy(tree))
    keys = Counter(each.key for each in imported.keys)
    assert keys == Counter(dotted(path) for path, _ in leaves(tree))


def test_keys_that_ai_toolkit_does_not_have_are_reported():
    imported = import_changed({"train.stepz": 3, "lerning": 1, "datasets.0.repeets": 2})
    for key in ("train.stepz", "lerning", "datasets.0.repeets"):
        assert "not known" in line(imported, key).text
        assert line(imported, key).verdict == "not supported"


def test_features_without_a_counterpart_are_named_only_if_they_are_used():
    off = import_changed({"train.noise_offset": 0.0, "datasets.0.network_weight": "1.0"})
    assert line(off, "train.noise_offset").verdict == "not needed"
    assert line(off, "datasets.0.network_weight").verdict == "not needed"
    on = import_changed({"train.noise_offset": 0.1, "train.train_unet": False})
    assert line(on, "train.noise_offset").verdict == "not supported"
    assert line(on, "train.train_unet").verdict == "not supported"


def test_numbers_as_text_null_and_missing_sections_are_read():
    imported = import_changed({
        "train.lr": "2e-5", "train.steps": "300", "datasets.0.mask_path": None,
        "trigger_word": None, "sample": ..., "save": ..., "model.low_vram": "true",
        "train.batch_size": "many",
    })  # fmt: skip
    assert setting(imported, "optimizer.lr") == 2e-5
    assert setting(imported, "train.max_train_steps") == 300
    assert setting(imported, "validation.every") == 0
    assert "whole number" in line(imported, "train.batch_size").text


def test_ai_toolkits_defaults_are_used_for_missing_keys():
    imported = import_changed({"network": {"type": "lora"}, "train": {"optimizer": "adamw"}})
    assert setting(imported, "adapter.rank") == 4
    assert setting(imported, "adapter.alpha") == 1.0
    assert setting(imported, "optimizer.lr") == 1e-6
    assert setting(imported, "train.mixed_precision") == "no"
    reasons = {each.setting: each.why for each in imported.defaults}
    assert reasons["adapter.alpha"] == "alpha is not set"
    assert reasons["train.mixed_precision"] == "dtype is not set"


def test_a_clip_that_ai_toolkit_would_spread_over_the_video_is_reported():
    imported = import_changed({"model.arch": "wan22_5b", "datasets.0.num_frames": 41})
    assert setting(imported, "datasets.0.clip") == "start"
    (found,) = [each for each in imported.defaults if each.setting == "datasets.0.clip"]
    assert "spreads the frames" in found.why


# Refused jobs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.is_flux": False, "model.arch": "hidream"}, "HiDream I1"),
        ({"model.arch": "lumina2:x"}, "Lumina Image 2"),
        ({"model.name_or_path": "ostris/Flex.1-alpha"}, "Flex.1"),
        ({"model.arch": "no_such"}, "this model"),
        ({"model.arch": "ideogram4"}, "Start from `gracetune examples ideogram4-lora --copy`"),
        (
            {"model.arch": "krea2:o_edit", "model.model_kwargs": {"edit": True}},
            "without references",
        ),
        ({"type": "concept_slider"}, "Sliders are not supported"),
        ({"network": None, "adapter": {"type": "ip"}}, "trains its section `adapter`"),
        ({"model": None}, "no section `model`"),
        ({"datasets.0.folder_path": "${GRACETUNE_NO_SUCH_VARIABLE}/x"}, "is not set"),
    ],
)
def test_other_jobs_are_refused_with_one_line(changes, words):
    with pytest.raises(ConfigError) as caught:
        import_changed(changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("job", ["extract", "generate", "mod"])
def test_jobs_that_do_not_train_are_refused(job):
    tree = {"job": job, "config": {"name": "x", "process": [{"type": "rescale_lora"}]}}
    with pytest.raises(ConfigError, match="training processes"):
        import_job(Path("job.yaml"), tree)


def test_a_file_without_processes_is_refused():
    with pytest.raises(ConfigError, match=r"config\.process"):
        import_job(Path("job.json"), {"job": "extension", "config": {"name": "x"}})


def test_the_first_training_process_of_several_is_imported():
    tree = parse_text(JOB, "yaml", "job.yaml").tree
    tree["config"]["process"] = [
        {"type": "dataset_tools", "path": "x"},
        *tree["config"]["process"],
        {"type": "sd_trainer", "model": {"arch": "hidream"}},
    ]
    imported = import_job(Path("job.yaml"), tree)
    assert setting(imported, "model.family") == "flux"
    others = {each.key: each.text for each in imported.keys if ".process.1." not in each.key}
    assert "only the first" in others["config.process.0.path"]
    assert "only the first" in others["config.process.2.model.arch"]


# Meaning of the keys


@pytest.mark.parametrize(
    ("arch", "family"), [("wan22_14b:t2v", "wan22"), ("zimage:turbo", "z_image"), ("sd15", "sd15")]
)
def test_the_tag_of_an_arch_is_ignored(arch, family):
    imported = import_changed({"model.arch": arch, "model.is_flux": ...})
    assert setting(imported, "model.family") == family


def test_a_model_without_an_arch_is_recognized_by_its_path():
    model = {"name_or_path": "Qwen/Qwen-Image-Edit-2509", "is_qwen": True}
    imported = import_changed({"model": model})
    assert setting(imported, "model.family") == "qwen_image"
    assert "not known" in line(imported, "model.is_qwen").text
    imported = import_changed({"model": {"name_or_path": "some/checkpoint"}})
    assert setting(imported, "model.family") == "sd15"


def test_a_resolution_that_is_listed_twice_is_used_twice():
    imported = import_changed({"datasets.0.resolution": [1024, 1024]})
    assert setting(imported, "datasets.0.resolution") == 1024
    assert setting(imported, "datasets.0.repeats") == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.timestep_type": "linear"}, {"timestep_sampling": "uniform"}),
        ({"train.timestep_type": "flux_shift"},
         {"timestep_sampling": "uniform", "timestep_shift": "flux"}),
        ({"train.timestep_type": "weighted"},
         {"timestep_sampling": "logit_normal", "timestep_mean": 0.48, "timestep_std": 1.58}),
        ({"train.content_or_style": "style"},
         {"timestep_sampling": "logit_normal", "timestep_mean": -1.2, "timestep_std": 1.44}),
        ({"train.timestep_type": "linear", "train.max_denoising_steps": 250},
         {"timestep_sampling": "uniform", "timestep_window": [0.75, 1.0]}),
        ({"train.max_denoising_steps": 500},
         {"timestep_sampling": "logit_normal", "timestep_window": [0.5, 1.0]}),
    ],
)  # fmt: skip
def test_timesteps(changes, expected):
    train = setting(import_changed(changes), "train")
    assert {key: value for key, value in train.items() if "timestep" in key} == expected


def test_models_with_a_noise_schedule_use_all_timesteps_evenly():
    imported = import_changed({"model": {"name_or_path": "x", "is_xl": True}})
    assert setting(imported, "train.timestep_sampling") == "uniform"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": "prodigy", "lr": 1e-4}, {"name": "prodigy", "lr": 1.0, "weight_decay": 0.0}),
        ({"optimizer": "adafactor", "lr": 3e-5},
         {"name": "adamw", "lr": 3e-5, "weight_decay": 0.0}),
        ({"optimizer": "automagic", "lr": 0.01},
         {"name": "automagic", "lr": 1e-6, "lr_bump": 1e-6}),
        ({"optimizer": "lion"}, {"name": "lion", "betas": [0.9, 0.99], "weight_decay": 0.0}),
        ({"optimizer_params": {"weight_decay": "1e-4"}}, {"weight_decay": 1e-4}),
        ({"unet_lr": 5e-5}, {"lr": 5e-5}),
        ({"lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": 1e-5}},
         {"schedule": "cosine", "final_lr_share": 0.1}),
        ({"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 20}},
         {"schedule": "constant", "warmup_steps": 20}),
        ({"lr_scheduler": "linear"}, {"schedule": "constant"}),
        ({"lr_scheduler": "linear", "lr_scheduler_params": {"start_factor": 1, "end_factor": 0.2}},
         {"schedule": "linear", "final_lr_share": 0.2}),
    ],
)  # fmt: skip
def test_optimizers_and_schedules(changes, expected):
    imported = import_changed({f"train.{key}": value for key, value in changes.items()})
    optimizer = setting(imported, "optimizer")
    assert optimizer == optimizer | expected


def test_older_gradient_accumulation_divides_the_steps():
    changes = {"train.gradient_accumulation": ..., "train.gradient_accumulation_steps": 5}
    imported = import_changed(changes)
    assert setting(imported, "train.gradient_accumulation_steps") == 5
    assert setting(imported, "train.max_train_steps") == 300
    assert setting(imported, "train.checkpoint_every") == 50
    assert setting(imported, "validation.every") == 50


@pytest.mark.parametrize(
    ("qtype", "kind", "verdict"),
    [
        ("qfloat8", "fp8", "translated"),
        ("uint3|ostris/accuracy.safetensors", "nf4", "not supported"),
        ("int8", "int8", "translated"),
    ],
)
def test_quantization(qtype, kind, verdict):
    imported = import_changed({"model.qtype": qtype})
    assert setting(imported, "model.quantize") == kind
    assert line(imported, "model.qtype").verdict == verdict


def test_a_whole_model_is_trained_without_a_network():
    imported = import_changed({"network": None})
    assert "adapter" not in imported.run
    assert setting(imported, "model.quantize") is None
    assert line(imported, "model.quantize").verdict == "not supported"


def test_a_dora_is_not_quantized():
    imported = import_changed({"network.type": "dora"})
    assert setting(imported, "adapter.kind") == "dora"
    assert setting(imported, "model.quantize") is None
    assert "norms" in line(imported, "model.quantize").text


def test_experts():
    kwargs = {"train_high_noise": False, "train_low_noise": True}
    model = {"name_or_path": "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16", "arch": "wan22_14b"}
    imported = import_changed({
        "model": model | {"model_kwargs": kwargs}, "train.switch_boundary_every": 10,
    })  # fmt: skip
    assert setting(imported, "train.experts") == "low"
    assert setting(imported, "train.switch_every") == 10
    assert setting(imported, "model.path") == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"


def test_lokr():
    network = {"type": "lokr", "linear": 32, "linear_alpha": 32, "lokr_factor": 8}
    imported = import_changed({"network": network})
    assert setting(imported, "adapter") == {"kind": "lokr", "factor": 8, "full_matrix": True}


def test_words_in_module_names_become_targets():
    words = {
        "only_if_contains": ["transformer.single_transformer_blocks.7.proj_out", "blocks.1.attn"],
        "ignore_if_contains": ["to_k"],
    }
    imported = import_changed({"network.network_kwargs": words})
    targets = [target.removeprefix("re:") for target in setting(imported, "adapter.targets")]

    def is_adapted(name):
        return any(re.fullmatch(target, name) for target in targets)

    assert is_adapted("single_transformer_blocks.7.proj_out")
    assert is_adapted("transformer_blocks.1.attn.to_q")
    assert not is_adapted("transformer_blocks.1.attn.to_k")
    assert not is_adapted("single_transformer_blocks.17.proj_out")
    assert not is_adapted("x_embedder")


def test_a_trigger_word():
    imported = import_changed({
        "trigger_word": "p3r", "sample.prompts": ["a [trigger] cat", "a dog"],
        "datasets": [{"folder_path": "a"}, {"folder_path": "b", "trigger_word": "q4"},
                     {"folder_path": "c", "is_reg": True}],
    })  # fmt: skip
    words = [each.get("trigger_word") for each in setting(imported, "datasets")]
    assert words == ["p3r", "q4", None]
    assert [each["id"] for each in setting(imported, "datasets")] == ["a", "b", "c"]
    assert setting(imported, "validation.prompts") == ["a p3r cat", "a dog"]


def test_captions_are_not_used_without_a_text_encoder():
    imported = import_changed({"trigger_word": "p3r", "train.unload_text_encoder": True})
    (dataset,) = setting(imported, "datasets")
    assert dataset["caption_strategy"] == "instanceprompt"
    assert dataset["instance_prompt"] == "p3r"
    assert "caption_dropout" not in dataset


def test_a_default_caption_is_used_where_no_caption_files_exist(tmp_path):
    changes = {"datasets.0.folder_path": str(tmp_path), "datasets.0.default_caption": "a cat"}
    assert setting(import_changed(changes), "datasets.0.instance_prompt") == "a cat"
    (tmp_path / "0.txt").write_text("a dog")
    imported = import_changed(changes)
    assert "instance_prompt" not in setting(imported, "datasets.0")
    assert line(imported, "datasets.0.default_caption").verdict == "not supported"


def test_datasets():
    imported = import_changed({
        "model.arch": "qwen_image_edit_plus",
        "datasets.0.resolution": [512, "768"], "datasets.0.num_repeats": 3,
        "datasets.0.caption_ext": ".caption", "datasets.0.shuffle_tokens": True,
        "datasets.0.keep_tokens": 1, "datasets.0.control_path_1": "one",
        "datasets.0.control_path_2": "two", "datasets.0.mask_path": "masks",
        "datasets.0.mask_min_value": 0.1, "datasets.0.random_crop": True,
    })  # fmt: skip
    (dataset,) = setting(imported, "datasets")
    assert dataset == {
        "instance_data_dir": "/data/cats",
        "resolution": [512, 768],
        "caption_strategy": "textfile",
        "caption_extension": "caption",
        "caption_dropout": 0.05,
        "caption_shuffle": True,
        "caption_keep_tokens": 1,
        "conditioning_data_dir": ["one", "two"],
        "mask_data_dir": "masks",
        "mask_background": 0.1,
        "repeats": 3,
        "crop": "random",
    }


def test_flips_add_a_flipped_copy_of_the_dataset():
    imported = import_changed({"datasets.0.flip_x": True})
    plain, flipped = setting(imported, "datasets")
    assert flipped["augmentations"] == [{"name": "flip", "probability": 1.0}]
    assert plain["id"] != flipped["id"]
    loaded = load_run_text(json.dumps(imported.run), "json", "run.json", environment={})
    assert len(loaded.run.datasets) == 2


def test_keys_of_gracetune_inside_ai_toolkit():
    imported = import_changed({
        "gracetune": {"cache_config": {"vae_cache_type": "memory"}, "check_saves": True},
        "datasets.0.in_memory": {"compression": "auto"},
        "datasets.0.augmentations": [{"method": "HorizontalFlip", "params": {"p": 0.3}}],
        "datasets.0.augmentations_cache_mode": "static", "datasets.0.augmentation_cache_epoch": 2,
        "model.arch": "wan22_14b",
        "train.optimizer": "automagic",
        "train.optimizer_params": {"high_noise_lr_bump": 1e-6, "low_noise_max_lr": 5e-4},
    })  # fmt: skip
    dataset = setting(imported, "datasets.0")
    assert (dataset["type"], dataset["in_memory"]) == ("in_memory", {"compression": "auto"})
    assert dataset["augmentations"] == [{"name": "flip", "probability": 0.3}]
    assert dataset["augmentations_cache_mode"] == "static"
    assert dataset["augmentation_cache_epoch"] == 2
    assert setting(imported, "cache_config.vae_cache_type") == "memory"
    assert setting(imported, "optimizer.low_noise_max_lr") == 5e-4
    assert not [each.key for each in imported.keys if each.verdict == "not supported"]
    load_run_text(json.dumps(imported.run), "json", "run.json", environment={})


def test_augmentations_that_gracetune_does_not_have_are_named():
    entries = [{"method": "HorizontalFlip"}, {"method": "CLAHE", "params": {"p": 1}}]
    imported = import_changed({"datasets.0.augmentations": entries})
    texts = {each.text for each in imported.keys if "augmentations" in each.key}
    assert "CLAHE" in texts.pop()
    assert setting(imported, "datasets.0.augmentations_cache_mode") == "refresh_each_epoch"


def test_videos():
    imported = import_changed({
        "model.arch": "wan22_5b", "datasets.0.num_frames": 40, "datasets.0.do_i2v": True,
        "datasets.0.shrink_video_to_frames": False, "datasets.0.fps": 16, "sample.num_frames": 41,
    })  # fmt: skip
    dataset = setting(imported, "datasets.0")
    assert (dataset["dataset_type"], dataset["frames"], dataset["fps"]) == ("video", 37, 16.0)
    assert dataset["clip"] == "random"
    assert setting(imported, "model.task") == "image"
    assert setting(imported, "validation.frames") == 41


def test_prompts_with_settings_of_their_own():
    prompts = [
        "a cat --w 512 --h 640 --d 7 --s 12 --l 3.5 --n ugly, dark",
        "a dog --m 0.5",
        "a -- b",
    ]
    imported = import_changed({"sample.prompts": prompts})
    assert setting(imported, "validation.prompts") == [
        {"prompt": "a cat", "width": 512, "height": 640, "seed": 7, "steps": 12, "guidance": 3.5,
         "negative_prompt": "ugly, dark"},
        "a dog",
        "a",
    ]  # fmt: skip
    assert "--m" in line(imported, "sample.prompts").text


def test_samples_with_settings_of_their_own():
    samples = [{"prompt": "a cat", "seed": 3, "width": 512}, {"prompt": "b", "neg": None}]
    imported = import_changed({"sample.samples": samples, "sample.walk_seed": False})
    assert setting(imported, "validation.prompts") == [
        {"prompt": "a cat", "seed": 3, "width": 512},
        {"prompt": "b", "seed": 42},
    ]
    assert line(imported, "sample.prompts").verdict == "not needed"


def test_reference_images_of_samples():
    samples = [
        {"prompt": "a", "ctrl_img": "x", "ctrl_img_2": "z"},
        {"prompt": "b", "ctrl_img_2": "y"},
    ]
    changes = {"model.arch": "flux_kontext", "sample.samples": samples}
    first, second = setting(import_changed(changes), "validation.prompts")
    assert (first["images"], second["images"]) == (["x", "z"], "y")
    imported = import_changed({"model.arch": "flux_kontext"})
    assert "prompts" not in setting(imported, "validation")
    assert setting(imported, "validation.every") == 0
    assert "ctrl_img" in line(imported, "sample.prompts").text
    without = import_changed({"sample.samples": samples})
    assert line(without, "sample.samples.0.ctrl_img").verdict == "not supported"


def test_the_first_sample_can_be_skipped():
    imported = import_changed({"train.skip_first_sample": True})
    assert setting(imported, "validation.at_start") is False
    assert line(imported, "train.skip_first_sample").verdict == "translated"
