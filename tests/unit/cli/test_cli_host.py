"""`gracetune host` without SimpleTuner installed; tests/hosts tests it with SimpleTuner."""

import subprocess
import sys
from importlib.metadata import distributions

import pytest

from gracetune.cli.main import main

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
