"""Configs are recognized by their structure, and found with the files that they name."""

import json
from pathlib import Path

import pytest

from gracetune.config.importers.detect import (
    find_named_file,
    find_tool,
    import_files,
    parse_environment,
    read_config,
)
from gracetune.config.importers.values import own_output_dir
from gracetune.config.load import load_run_file
from gracetune.config.parse_text import FORMATS_BY_SUFFIX, parse_text
from gracetune.errors import ConfigError

ROOT = Path(__file__).parents[4]
OWN = [
    path
    for folder in ("config", "examples", "src/gracetune/examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in FORMATS_BY_SUFFIX
]
DATASETS = [
    {"id": "cats", "type": "local", "instance_data_dir": "cats", "caption_strategy": "textfile"},
    {"id": "text", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
]


def write(folder, name="config/config.json", **options):
    """Write a SimpleTuner config with its datasets; return the path of the config."""
    config = {
        "--model_family": "sdxl",
        "--model_type": "lora",
        "--data_backend_config": "config/datasets.json",
        "--max_train_steps": "30",
        "--output_dir": str(folder / "out"),
        **{f"--{key}": value for key, value in options.items()},
    }
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    (folder / "config" / "datasets.json").write_text(json.dumps(DATASETS))
    return path


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_run_files_are_not_imported(path):
    text = path.read_text(encoding="utf-8")
    assert find_tool(parse_text(text, FORMATS_BY_SUFFIX[path.suffix], path.name).tree) is None


@pytest.mark.parametrize(
    ("tree", "tool"),
    [
        ({"data_backend_config": "a.json", "model_family": "flux"}, "SimpleTuner"),
        ({"--seed": 1, "--model_family": "flux"}, "SimpleTuner"),
        ({"data_backend_config": "a.json"}, None),
        ({"model_family": "flux", "train_batch_size": 4, "datasets": []}, None),
        ({"data_backend_config": "a.json", "model_family": "flux", "datasets": [{}]}, None),
        ({"job": "extension", "config": {"name": "a", "process": [{}]}}, "ai-toolkit"),
        ({"config": "a"}, None),
        ({}, None),
    ],
)
def test_a_tool_is_recognized_by_several_keys(tree, tool):
    assert find_tool(tree) == tool


def test_a_config_is_loaded_like_a_run_file(tmp_path):
    loaded = load_run_file(write(tmp_path), ["train.batch_size=2"], {})
    run = loaded.run
    assert (run.model.family, run.train.max_train_steps, run.train.batch_size) == ("sdxl", 30, 2)
    assert run.datasets[0].instance_data_dir == "cats"
    assert "config.json is a config of SimpleTuner: " in loaded.notices[0]
    assert loaded.notices[0].endswith("config.json` explains every key.")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("output/flux-ohwx", "runs/flux-ohwx"),
        ("/scratch/output/mine/", "runs/mine"),
        ("runs/mine", "runs/mine-gracetune"),
        ("./runs/mine/", "runs/mine-gracetune"),
        ("..", "runs/imported"),
    ],
)
def test_results_never_go_to_the_other_trainers_folder(theirs, ours):
    assert own_output_dir(theirs) == ours


def test_results_do_not_go_to_an_absolute_path_of_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert own_output_dir(str(tmp_path / "runs" / "mine")) == "runs/mine-gracetune"


def test_the_output_folder_of_a_config_can_still_be_chosen(tmp_path):
    path = write(tmp_path)
    loaded = load_run_file(path, [], {})
    assert loaded.run.output_dir == "runs/out"
    assert "Results go to runs/out; --set output_dir=DIR" in loaded.notices[0]
    chosen = load_run_file(path, [f"output_dir={tmp_path / 'out'}"], {})
    assert chosen.run.output_dir == str(tmp_path / "out")
    assert f"Results go to {tmp_path / 'out'};" in chosen.notices[0]
    (line,) = [each for each in import_files([path]).keys if each.key == "output_dir"]
    assert line.text == 'output_dir is "runs/out": SimpleTuner\'s folder is not changed'


def test_a_refused_config_is_an_error_with_the_fix(tmp_path):
    path = write(tmp_path, controlnet="true")
    with pytest.raises(ConfigError, match=r"remove controlnet from .*config\.json to train"):
        load_run_file(path)


def test_an_invalid_value_is_named_as_the_other_tools_key(tmp_path):
    path = write(tmp_path, learning_rate="fast")
    with pytest.raises(ConfigError) as error:
        load_run_file(path)
    first, second = str(error.value).splitlines()
    assert first.startswith(f'{path}: learning_rate (optimizer.lr) is "fast"; it must be a')
    assert second.startswith("This is about a config of SimpleTuner: change the key there.")
    assert load_run_file(path, ["optimizer.lr=1e-4"]).run.optimizer.lr == 1e-4


def test_toml_and_environment_files_have_the_same_options(tmp_path):
    write(tmp_path)
    toml = tmp_path / "config" / "config.toml"
    toml.write_text('model_family = "sdxl"\nmodel_type = "lora"\nmax_train_steps = 30\n')
    with toml.open("a") as file:
        file.write('data_backend_config = "config/datasets.json"\n')
    env = tmp_path / "config" / "config.env"
    env.write_text(
        "# comment\nexport MODEL_FAMILY=sdxl\nMODEL_TYPE='lora'\nMAX_NUM_STEPS=30 # steps\n"
        'DATALOADER_CONFIG="config/datasets.json"\nTRAINING_NUM_PROCESSES=1\n'
        'TRAINER_EXTRA_ARGS="--lora_rank=8"\nTRAINER_EXTRA_ARGS+=" --use_dora"\n'
    )
    for path in (toml, env):
        run = load_run_file(path).run
        assert (run.model.family, run.train.max_train_steps) == ("sdxl", 30)
    assert (run.adapter.rank, run.adapter.kind) == (8, "dora")


def test_extra_arguments_are_options():
    text = "TRAINER_EXTRA_ARGS='--seed=3 --use_ema'\nNUM_EPOCHS=2"
    assert parse_environment(text) == {"seed": "3", "use_ema": True, "num_train_epochs": "2"}


def test_variables_refer_to_each_other_and_quotes_may_be_open():
    text = 'export BASE_DIR=/data\nOUTPUT_DIR="${BASE_DIR}/out"\nVALIDATION_PROMPT=a cat\'s eye'
    assert parse_environment(text) == {
        "base_dir": "/data",
        "output_dir": "/data/out",
        "validation_prompt": "a cat's eye",
    }


def test_files_may_be_passed_instead_of_found(tmp_path):
    config = write(tmp_path, data_backend_config="elsewhere/data.json")
    with pytest.raises(ConfigError, match=r"'elsewhere/data.json', and there is no such file\. P"):
        import_files([config])
    imported = import_files([config, tmp_path / "config" / "datasets.json"])
    assert len(imported.run["datasets"]) == 1


def test_a_part_of_a_config_needs_the_config(tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"is a list of SimpleTuner.s datasets\. Pass the config"):
        import_files([tmp_path / "config" / "datasets.json"])
    other = tmp_path / "other.json"
    other.write_text('{"what": 1, "else": 2}')
    with pytest.raises(ConfigError, match="is neither a run file nor a config of SimpleTuner or"):
        import_files([other])
    with pytest.raises(ConfigError, match=r"must end in one of .*\.env"):
        read_config(Path(__file__))


def test_an_option_with_and_without_dashes_is_refused(tmp_path):
    path = write(tmp_path)
    config = json.loads(path.read_text()) | {"max_train_steps": 3}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has the option max_train_steps twice"):
        import_files([path])


def test_named_files_are_searched_above_the_config(tmp_path, monkeypatch):
    folder = tmp_path / "simpletuner" / "examples" / "one"
    folder.mkdir(parents=True)
    data = tmp_path / "simpletuner" / "examples" / "data.json"
    data.touch()
    assert find_named_file("config/examples/data.json", [folder]) == data
    assert find_named_file("missing.json", [folder]) is None
    assert find_named_file(str(data), []) == data
    assert find_named_file("/home/me/config/data.json", [folder]) == data
    monkeypatch.chdir(tmp_path)
    assert find_named_file("config/examples/data.json", [folder]) == Path(
        "simpletuner/examples/data.json"
    )
