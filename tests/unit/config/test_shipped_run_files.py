"""Every run file in `config/` and `examples/` loads, and has the values that the guides promise."""

from pathlib import Path

import pytest
import yaml

from gracetune.cli.examples import first_comment
from gracetune.config.checks import check_run
from gracetune.config.load import load_run_file
from gracetune.data.buckets import audio_lengths, frame_counts
from gracetune.models.registry import FAMILIES

ROOT = Path(__file__).parents[3]
GUIDE_FILES = sorted((ROOT / "config").rglob("*.json"))
EXAMPLES = sorted((ROOT / "examples").glob("*.json"))


def test_the_guides_files_exist():
    assert {file.relative_to(ROOT).as_posix() for file in GUIDE_FILES} >= {
        "config/examples/minimal.json",
        "config/gh200_config.json",
        "config/gh200_in_memory_example.json",
    }


@pytest.mark.parametrize("file", GUIDE_FILES, ids=lambda file: file.name)
def test_a_guides_file_can_be_trained(file):
    check_run(load_run_file(file, environment={}).run)


def test_the_minimal_run_is_small_and_generates_its_data():
    run = load_run_file(ROOT / "config/examples/minimal.json", environment={}).run
    (dataset,) = run.datasets
    assert (run.model.family, dataset.type) == ("tiny", "shapes")
    assert dataset.instance_data_dir.startswith(run.output_dir)
    assert run.train.max_train_steps <= 20


def test_the_checklists_run_has_the_checklists_values():
    run = load_run_file(ROOT / "config/gh200_config.json", environment={}).run
    assert run.use_gh200_trainer
    assert run.datasets[0].type == "in_memory"
    assert run.cache_config.vae_cache_type == "unified_memory"
    assert run.train.batch_size == 32
    assert run.gh200_optimizations.initial_effective_batch_size == 4
    assert run.gh200_optimizations.enable_batch_size_rampup
    assert run.gh200_optimizations.enable_uvm_hints


def test_the_in_memory_example_stages_as_the_workflow_says():
    run = load_run_file(ROOT / "config/gh200_in_memory_example.json", environment={}).run
    staging = run.datasets[0].in_memory
    assert (staging.compression, staging.memory_limit_gb, staging.num_workers) == ("lz4", 360, 64)


def test_the_accelerate_file_sets_one_process_and_no_precision():
    settings = yaml.safe_load((ROOT / "accelerate_config_gh200.yaml").read_text())
    assert settings["num_processes"] == 1
    assert "mixed_precision" not in settings
    assert (ROOT / "accelerate_config_gh200.yaml").resolve() == (
        ROOT / "config/accelerate_config_gh200.yaml"
    )


def test_every_family_has_an_example():
    families = {load_run_file(file, environment={}).run.model.family for file in EXAMPLES}
    assert families == set(FAMILIES)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_loads_and_states_its_purpose(file):
    run = load_run_file(file, environment={}).run
    check_run(run)
    assert first_comment(file.read_text())
    assert run.output_dir == f"runs/{file.stem}"
    for data in run.datasets:
        lengths = {"video": frame_counts, "audio": audio_lengths}.get(data.dataset_type)
        assert lengths is None or lengths(data)
