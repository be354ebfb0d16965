"""The report names every key, and the run file is read back as the same settings."""

import json

import pytest

from gracetune.cli.import_config import format_run
from gracetune.cli.main import main
from gracetune.config.importers.report import ImportedRun, KeyReader, format_report, summarize
from gracetune.config.load import load_run_file, load_run_text
from gracetune.config.schema import RunFile

PATTERN = r"re:.*\.(attn|ff)\..*"


@pytest.fixture
def imported():
    run = ImportedRun("Other")
    tree = {
        "rate": 1e-4,
        "old": [{"a": 1}, {"b": 2}],
        "text": "x: # y",
        "aws_secret_access_key": "hunter2",
        "twice": 1,
    }
    reader = KeyReader(run, "other.json", tree)
    reader.take("rate", "optimizer.lr")
    reader.translate("text", "datasets.0.instance_prompt", 'a "quoted": # text', "it changed")
    reader.not_needed("old", "nothing needs it")
    reader.not_supported("aws_secret_access_key", "set it elsewhere")
    reader.not_needed("twice", "first")
    reader.not_supported("twice", "second")
    reader.finish()
    run.set("datasets.0.augmentations", [{"name": "flip"}, {"name": "crop"}])
    run.set("adapter.overrides", {PATTERN: {"factor": 8}})
    run.set("output_dir", "out")
    run.default("train.batch_size", 4, "the batch size is 4")
    run.default("train.max_grad_norm", 1.0, "the same as gracetune's")
    return run


def test_each_key_has_one_line(imported):
    keys = [each.key for each in imported.keys]
    assert sorted(keys) == sorted(
        ["rate", "old.0.a", "old.1.b", "text", "aws_secret_access_key", "twice"]
    )
    text = format_report(imported)
    assert "6 keys: 1 not supported, 1 translated, 1 taken, 3 not needed." in text
    assert "twice = 1 -> first" in text
    assert "hunter2" not in text
    assert "train.batch_size is 4: the batch size is 4" in text
    assert "train.max_grad_norm" not in text


def test_a_summary_names_what_is_not_supported(imported):
    text = summarize(imported, "other.json", "out/x")
    assert "Not supported: aws_secret_access_key. Results go to out/x; --set output_dir=" in text
    assert text.endswith("`gracetune import other.json` explains every key.")


def test_unknown_keys_are_reported_at_the_end():
    run = ImportedRun("Other")
    KeyReader(run, "f", {"rankk": 1, "zzz": 2}).finish(["rank"])
    assert [each.text for each in run.keys] == [
        "this key is not known, so it is ignored; did you mean rank?",
        "this key is not known, so it is ignored. Check its spelling, or remove it",
    ]


@pytest.mark.parametrize("text_format", ["yaml", "json"])
def test_the_run_file_has_the_same_settings(imported, text_format):
    text = format_run(imported, text_format, "other.json")
    run = load_run_text(text, text_format, "run").run
    assert run == RunFile.model_validate(
        {
            "output_dir": "out",
            "adapter": {"overrides": {PATTERN: {"factor": 8}}},
            "datasets": (
                {
                    "instance_prompt": 'a "quoted": # text',
                    "augmentations": ({"name": "flip"}, {"name": "crop"}),
                },
            ),
            "train": {"batch_size": 4},
            "optimizer": {"lr": 1e-4},
        }
    )
    assert "Not supported: aws_secret_access_key: set it elsewhere" in text


@pytest.fixture
def config(tmp_path):
    options = {
        "model_family": "sdxl",
        "model_type": "lora",
        "output_dir": "out",
        "data_backend_config": "datasets.json",
        "max_train_steps": 7,
        "unknown_option": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(options))
    datasets = [{"id": "a", "type": "local", "instance_data_dir": "a", "repeats": 2}]
    (tmp_path / "datasets.json").write_text(json.dumps(datasets))
    return tmp_path / "config.json"


def test_the_command_writes_a_run_file_and_explains(config, tmp_path, capsys):
    output = tmp_path / "run.yaml"
    assert main(["import", str(config), "-o", str(output)]) == 0
    out = capsys.readouterr().out
    assert "0.repeats = 2 -> datasets.0.repeats is 3: " in out
    assert f"Train it with: gracetune train {output}" in out
    assert load_run_file(output).run == load_run_file(config).run
    assert main(["import", str(config), "-o", str(output)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["import", str(config), "-o", "run.txt"]) == 2
    assert "must end in .yaml or .json" in capsys.readouterr().err


def test_the_run_file_is_printed_without_an_output(config, capsys):
    assert main(["import", str(config)]) == 0
    out, err = capsys.readouterr()
    assert load_run_text(out, "yaml", "out").run == load_run_file(config).run
    assert "unknown_option = 1 -> this key is not known" in err


def test_a_refused_config_has_a_report_and_no_run_file(config, tmp_path, capsys):
    options = json.loads(config.read_text()) | {"controlnet": True}
    config.write_text(json.dumps(options))
    output = tmp_path / "run.json"
    assert main(["import", str(config), "-o", str(output)]) == 2
    out, err = capsys.readouterr()
    assert "controlnet = true -> remove controlnet" in out
    assert "gracetune: controlnet asks for a ControlNet" in err
    assert not output.exists()


@pytest.mark.parametrize(
    "words",
    [
        "plan {} --set model.family=missing",
        "check gradients {} --set model.family=missing",
        "cache build {}",
        "cache verify {}",
        "cache stats {}",
        "data check {}",
        "sample {}",
    ],
)
def test_other_commands_print_a_summary(words, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = json.loads(config.read_text()) | {"pretrained_model_name_or_path": "./missing"}
    config.write_text(json.dumps(options))
    main(words.format(config).split())  # most end with an error, because files are missing
    assert capsys.readouterr().err.count("config.json is a config of SimpleTuner: ") == 1
