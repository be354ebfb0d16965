"""`gracetune host` without SimpleTuner installed; tests/hosts tests it with SimpleTuner."""

import json
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from gracetune.cli.main import main
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
    done = subprocess.run(
        [sys.executable, "-m", "gracetune.hosts.simpletuner", *arguments],
        capture_output=True,
        text=True,
    )
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
        "gracetune.hosts.simpletuner.hooks.install", lambda plugin, _: plugins.append(plugin)
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
