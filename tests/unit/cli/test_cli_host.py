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
