import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.cli.train_script import LaunchArguments, main, parse
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError

ROOT = Path(__file__).parents[3]
MINIMAL = "config/examples/minimal.json"


def test_options_become_overrides():
    argv = (
        "--config=run.json --attention_mechanism flash_attn_3 --max-train-steps=10 "
        "--enable_manual_validation --train.batch_size 4 --seed -1 --output_dir=a=b"
    )
    assert parse(argv.split()) == LaunchArguments(
        "run.json",
        (
            "attention_mechanism=flash_attn_3",
            "max_train_steps=10",
            "enable_manual_validation=true",
            "train.batch_size=4",
            "seed=-1",
            "output_dir=a=b",
        ),
        "auto",
    )


@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ([], "auto"),
        (["--resume"], "auto"),
        (["--resume", "latest"], "auto"),
        (["--resume_from_checkpoint", "latest"], "auto"),
        (["--resume-from-checkpoint=runs/x/checkpoints/step-5"], "runs/x/checkpoints/step-5"),
        (["--resume", "none"], "none"),
    ],
)
def test_resume_accepts_the_names_of_the_forks(words, resume):
    assert parse(["--config", "run.json", *words]).resume == resume


def test_the_commands_of_the_guides_set_what_they_name():
    for words in (
        ["--attention_mechanism", "flash_attn_3", "--max_train_steps", "10"],
        ["--enable_manual_validation", "--max_train_steps", "10"],
    ):
        arguments = parse(["--config", str(ROOT / MINIMAL), *words])
        run = load_run_file(arguments.config, arguments.overrides, {}).run
        assert run.train.max_train_steps == 10
        assert (
            run.model.attention_mechanism == "flash_attn_3"
            or run.validation.enable_manual_validation
        )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config is missing"),
        (["--config"], "--config is missing"),
        (["--config="], "--config is missing"),
        (["run.json"], "'run.json' is not an option"),
        (["--config", "a.json", "--x", "1", "2"], "'2' is not an option"),
        (["--config", "a.json", "--"], "'--' is not an option"),
        (["-c", "a.json"], "'-c' is not an option"),
    ],
)
def test_words_that_are_not_options_are_rejected(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(argv)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "no.json"], "gracetune: no.json does not exist"),
        (["--config", MINIMAL, "--max_trian_steps", "3"], "did you mean train.max_train_steps?"),
        (["--config", MINIMAL, "--max_train_steps", "0"], "it must be at least 1"),
        (["--config", MINIMAL, "--datasets.1.id", "b"], "datasets.1.instance_data_dir is missing"),
        (["--nothing"], "--config is missing"),
    ],
)
def test_a_users_mistake_exits_with_2_and_one_message(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_bad_allocator_setting_is_a_users_mistake(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "use_uvm:perhaps")
    assert main(["--config", str(ROOT / MINIMAL)]) == 2
    assert "use_uvm in PYTORCH_CUDA_ALLOC_CONF is 'perhaps'" in capsys.readouterr().err


def test_help_prints_the_usage(capsys):
    assert main(["--config", "x", "--help"]) == 0
    assert "--resume_from_checkpoint" in capsys.readouterr().out


AT_TORCH = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(1, os.environ.get("PYTORCH_ALLOC_CONF", "nothing").encode())
            os._exit(0)
sys.meta_path.insert(0, Watch())
from gracetune.cli import main, train_script
{call}
"""


@pytest.mark.parametrize(
    "call", [f"main.main(['train', '{MINIMAL}'])", f"train_script.main(['--config', '{MINIMAL}'])"]
)
def test_expandable_segments_are_set_before_torch_is_imported(call, monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    words = [sys.executable, "-c", AT_TORCH.format(call=call)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("expandable_segments:True"), done.stdout + done.stderr


def test_train_py_returns_the_exit_code():
    result = subprocess.run(
        [sys.executable, "train.py", "--config", MINIMAL, "--seeed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "seeed is not a known key; did you mean seed?" in result.stderr
    assert "Traceback" not in result.stderr
