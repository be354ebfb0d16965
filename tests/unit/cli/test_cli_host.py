"""`gracetune host` without SimpleTuner installed; tests/hosts tests it with SimpleTuner."""

import json
import sys
from importlib.metadata import distributions

import pytest
from fork_process import run_python

from gracetune.cli.main import main
from gracetune.errors import HostError
from gracetune.hosts.probe import InstalledHost
from gracetune.hosts.simpletuner.__main__ import CONFIG_FLAG, enter

pytestmark = pytest.mark.skipif(
    [*distributions(name="simpletuner")] != [], reason="tests what happens without SimpleTuner"
)


def test_check_fails_if_the_host_is_not_installed(capsys):
    assert main(["host", "simpletuner", "check"]) == 1
    output = capsys.readouterr().out
    assert "simpletuner is not installed in this environment" in output
    assert "pip install simpletuner gracetune" in output


def test_run_fails_if_the_host_is_not_installed(capsys):
    assert main(["host", "simpletuner", "run", "--", "train", "--env", "x"]) == 2
    assert "simpletuner is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "there is no script to run"), (["train.py"], "simpletuner is not installed")],
)
def test_the_entry_point_reports_what_is_missing(arguments, message):
    done = run_python("-m", "gracetune.hosts.simpletuner", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"gracetune: {message}")
    assert "Traceback" not in done.stderr


class Replaced(BaseException):
    """Raised instead of replacing the test process by another program."""


@pytest.fixture
def replaced(monkeypatch):
    """Return the program, arguments and environment that the process would be replaced by."""
    calls = []

    def execve(program, arguments, environment):
        calls.append((program, arguments, environment))
        raise Replaced

    monkeypatch.setattr("os.execve", execve)
    return calls


@pytest.fixture
def simpletuner_command(tmp_path, monkeypatch):
    """Put a `simpletuner` command beside this Python, whose version check passes."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr("gracetune.hosts.simpletuner.__main__.check", lambda: ["4.10.1: ok"])
    command = tmp_path / "bin/simpletuner"
    command.parent.mkdir()
    command.touch()
    return command


def test_run_starts_simpletuner_through_our_entry_point(simpletuner_command, replaced, monkeypatch):
    monkeypatch.setenv("ACCELERATE_EXTRA_ARGS", "--num_processes 1")
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(Replaced):
        main(["host", "simpletuner", "run", "--", "train", "--env", "x"])
    ((program, arguments, environment),) = replaced
    assert program == str(simpletuner_command)
    assert arguments == [program, "train", "--env", "x"]
    assert environment["ACCELERATE_EXTRA_ARGS"] == (
        "--num_processes 1 -m gracetune.hosts.simpletuner"
    )
    assert environment["PATH"] == f"{simpletuner_command.parent}:/usr/bin"


ENTRY = "gracetune.hosts.simpletuner"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, f"-m {ENTRY}"),
        ("", f"-m {ENTRY}"),
        ("  ", f"-m {ENTRY}"),
        (f"-m {ENTRY}", f"-m {ENTRY}"),
        (f"--module {ENTRY}", f"-m {ENTRY}"),
        (f"-m {ENTRY} -m {ENTRY}", f"-m {ENTRY}"),
        (f"--cpu -m {ENTRY}", f"--cpu -m {ENTRY}"),
        (f"-m {ENTRY} --num_processes 2", f"--num_processes 2 -m {ENTRY}"),
        (f"-m --num_processes 2 {ENTRY}", f"--num_processes 2 -m {ENTRY}"),
        ('--config_file "my config.yaml"', f"--config_file 'my config.yaml' -m {ENTRY}"),
    ],
)
def test_run_keeps_the_other_arguments_for_accelerate(
    simpletuner_command, replaced, monkeypatch, given, expected
):
    if given is None:
        monkeypatch.delenv("ACCELERATE_EXTRA_ARGS", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_EXTRA_ARGS", given)
    with pytest.raises(Replaced):
        main(["host", "simpletuner", "run"])
    ((_, arguments, environment),) = replaced
    assert environment["ACCELERATE_EXTRA_ARGS"] == expected
    assert arguments[1:] == ["train"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--config_file 'open", "No closing quotation"),
        ("-m another.module", "another module"),
        ("--cpu --module another.module", "another module"),
    ],
)
def test_run_refuses_arguments_that_leave_no_room_for_our_entry_point(
    simpletuner_command, replaced, monkeypatch, capsys, given, reason
):
    monkeypatch.setenv("ACCELERATE_EXTRA_ARGS", given)
    assert main(["host", "simpletuner", "run"]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert f"ACCELERATE_EXTRA_ARGS is {given!r}" in message
    assert reason in message
    assert replaced == []


@pytest.mark.parametrize(
    ("files", "words", "expected"),
    [
        ({"config.env": "export ACCELERATE_EXTRA_ARGS='--cpu'"}, [], "--cpu"),
        ({"config.env": "# ACCELERATE_EXTRA_ARGS=--cpu\nACCELERATE_EXTRA_ARGS="}, [], ""),
        (
            {"config.env": "ACCELERATE_EXTRA_ARGS=--cpu", "x/config.env": "SEED=1"},
            ["--env", "x"],
            "--cpu",
        ),
        (
            {"config.env": "ACCELERATE_EXTRA_ARGS=--cpu", "x/config.env": "SEED=1"},
            ["--env=x"],
            "--cpu",
        ),
        (
            {
                "config.env": "ACCELERATE_EXTRA_ARGS=--cpu",
                "x/config.env": f'ACCELERATE_EXTRA_ARGS="--multi_gpu -m {ENTRY}"',
            },
            ["--env", "x"],
            "--multi_gpu",
        ),
        ({"x/config.env": "ACCELERATE_EXTRA_ARGS=--cpu"}, [], ""),
        ({}, ["--accelerate_extra_args=--cpu"], "--cpu"),
        ({}, ["--accelerate_extra_args", "'--cpu'"], "--cpu"),
        (
            {"config.env": "ACCELERATE_EXTRA_ARGS=--multi_gpu"},
            ["--seed=1", "--accelerate_extra_args=--cpu"],
            "--cpu",
        ),
    ],
)
def test_run_keeps_our_entry_point_where_simpletuner_replaces_the_variable(
    simpletuner_command, replaced, monkeypatch, tmp_path, files, words, expected
):
    """SimpleTuner reads config.env files over the environment, and its arguments over both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENV", raising=False)
    monkeypatch.setenv("ACCELERATE_EXTRA_ARGS", "")
    for name, text in files.items():
        file = tmp_path / "config" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    with pytest.raises(Replaced):
        main(["host", "simpletuner", "run", "--", "train", *words])
    ((_, arguments, environment),) = replaced
    given = [word for word in arguments if word.startswith("--accelerate_extra_args")]
    effective = given[0].partition("=")[2] if given else environment["ACCELERATE_EXTRA_ARGS"]
    assert len(given) <= 1
    assert effective == f"{expected} -m {ENTRY}".strip()
    assert bool(given) == bool(expected), "the variable alone is enough"
    kept = [word for word in words if "accelerate_extra_args" not in word and word != "'--cpu'"]
    assert [word for word in arguments[2:] if word not in given] == kept


@pytest.mark.parametrize("argv", [["--cpu", "train.py"], ["-m", ENTRY, "train.py"], ["gone.py"]])
def test_the_entry_point_names_a_script_that_does_not_exist(hooked, argv):
    with pytest.raises(HostError, match=rf"{argv[0]} is not a script.* before -m"):
        enter(argv)


def test_run_starts_the_webui_with_our_settings_page(simpletuner_command, replaced):
    with pytest.raises(Replaced):
        main(["host", "simpletuner", "run", "--", "server", "--port", "1"])
    ((program, arguments, _),) = replaced
    assert program == sys.executable
    assert arguments[1:] == [
        *("-m", "gracetune.hosts.simpletuner.webui"),
        *(str(simpletuner_command), "server", "--port", "1"),
    ]


def test_run_names_the_missing_simpletuner_command(simpletuner_command, capsys):
    simpletuner_command.unlink()
    assert main(["host", "simpletuner", "run"]) == 2
    assert f"{simpletuner_command} does not exist" in capsys.readouterr().err


@pytest.fixture
def hooked(monkeypatch):
    """Return the plug-ins that hooks were installed for; SimpleTuner's version check passes."""
    plugins = []
    monkeypatch.setattr("gracetune.hosts.simpletuner.__main__.check", list)
    monkeypatch.setattr(
        "gracetune.hosts.simpletuner.hooks.install_hooks", lambda plugin, _: plugins.append(plugin)
    )
    return plugins


def test_the_entry_point_runs_the_training_script_with_hooks(hooked, tmp_path, monkeypatch):
    """The script is run as `__main__`, with its own arguments."""
    script, output = tmp_path / "train.py", tmp_path / "seen.json"
    script.write_text(
        "import json, pathlib, sys\n"
        f"pathlib.Path({str(output)!r}).write_text(json.dumps([__name__, sys.argv[1:]]))\n"
    )
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    config = {"gh200_optimizations": {"enable_uvm_hints": False}}
    enter([f"{CONFIG_FLAG}{json.dumps(config)}", str(script), "--env", "x"])
    assert json.loads(output.read_text()) == ["__main__", ["--env", "x"]]
    (plugin,) = hooked
    assert plugin.blocks.gh200.enable_uvm_hints is False


def test_an_incompatible_simpletuner_is_refused_with_the_table(tmp_path, monkeypatch, capsys):
    """A package without the functions that are hooked."""
    installed = InstalledHost("simpletuner", "9.9.9", tmp_path)
    monkeypatch.setattr("gracetune.hosts.simpletuner.__main__.find_installed", lambda *_: installed)
    assert main(["host", "simpletuner", "check"]) == 1
    assert "9.9.9" in capsys.readouterr().out
