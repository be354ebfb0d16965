"""Every JSON and YAML block that the guides print loads as it stands."""

import re
from pathlib import Path

import pytest

from gracetune.config.load import load_run_text, resolved_json

SEEDS = Path(__file__).parents[2] / "data" / "seeds"
BLOCK = re.compile(r"^ *```(json|yaml)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)

BLOCKS = [
    (f"{file.name[:3]}-{number}", language, text)
    for file in sorted(SEEDS.glob("*.txt"))
    for number, (language, text) in enumerate(BLOCK.findall(file.read_text("utf-8")))
]

EXPECTED = {
    "001-0": {
        "cache_config": {
            "vae_cache_type": "unified_memory",
            "text_cache_type": "unified_memory",
            "cache_dir": "cache/gh200",
            "persistent_cache": True,
        },
        "gh200_optimizations": {
            "enable_uvm_hints": True,
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 4,
            "target_effective_batch_size": 32,
            "batch_rampup_steps": 400,
        },
    },
    "001-1": {
        "datasets": (
            {
                "id": "train_images",
                "type": "in_memory",
                "dataset_type": "image",
                "instance_data_dir": "/workspace/DLAY-1024/subject",
                "in_memory": {"compression": "lz4", "num_workers": 64, "memory_limit_gb": 200},
            },
        )
    },
    "002-0": {
        "datasets": (
            {
                "id": "train_images",
                "type": "in_memory",
                "dataset_type": "image",
                "instance_data_dir": "/workspace/datasets/my_diffusion_set",
                "in_memory": {"compression": "lz4", "memory_limit_gb": 360, "num_workers": 64},
            },
        )
    },
    "004-0": {
        "datasets": (
            {
                "resolution": 1024,
                "cache_latents_to_disk": True,
                "augmentations_cache_mode": "static",
            },
        ),
        "cache_config": {"persistent_cache": True},
        "optimizer": {
            "name": "automagic",
            "high_noise_lr_bump": 1e-6,
            "low_noise_lr_bump": 5e-7,
            "high_noise_max_lr": 1e-3,
            "low_noise_max_lr": 5e-4,
        },
    },
    "004-1": {"train": {"gradient_checkpointing": True, "batch_size": 1}},
    "004-2": {"train": {"mixed_precision": "bf16"}},
}


def test_every_block_of_the_guides_has_expected_settings():
    assert {name for name, _, _ in BLOCKS} == set(EXPECTED)


@pytest.mark.parametrize(("name", "language", "text"), BLOCKS, ids=[block[0] for block in BLOCKS])
def test_a_block_of_the_guides_gives_the_expected_settings(name, language, text):
    run = load_run_text(text, language, name, environment={}).run
    assert run.model_dump(exclude_unset=True) == EXPECTED[name]
    assert load_run_text(resolved_json(run), "json", "again", environment={}).run == run


def test_half_precision_is_accepted_with_a_warning_that_names_bf16():
    text = next(text for name, _, text in BLOCKS if name == "004-2")
    notices = load_run_text(text, "yaml", "004", environment={}).notices
    assert any("fp16" in notice and "bf16" in notice for notice in notices)


def test_the_settings_of_the_first_guides_checklist_are_applied():
    text = """{
      "data_backend": {"type": "in_memory", "instance_data_dir": "x"},
      "cache_config": {"vae_cache_type": "unified_memory"},
      "train_batch_size": 32,
      "initial_effective_batch_size": 4,
      "use_gh200_trainer": true
    }"""
    run = load_run_text(text, "json", "000", environment={}).run
    assert run.datasets[0].type == "in_memory"
    assert run.train.batch_size == 32
    assert run.gh200_optimizations.enable_batch_size_rampup is True
    assert run.gh200_optimizations.initial_effective_batch_size == 4
    assert run.gh200_optimizations.enable_uvm_hints is True
    assert run.use_gh200_trainer is True
