"""`gracetune host`, where SimpleTuner is not installed; where it is, tests/hosts has the rest."""

import subprocess
import sys
from importlib.metadata import distributions

import pytest

from gracetune.cli.main import main

pytestmark = pytest.mark.skipif(
    [*distributions(name="simpletuner")] != [], reason="this is about its absence"
)


def test_a_host_that_is_not_there_fails_the_check(capsys):
    assert main(["host", "simpletuner", "check"]) == 1
    said = capsys.readouterr().out
    assert "simpletuner is not installed in this environment" in said
    assert "pip install simpletuner gracetune" in said


def test_a_host_that_is_not_there_is_not_started(capsys):
    assert main(["host", "simpletuner", "run", "--", "train", "--env", "x"]) == 2
    assert "simpletuner is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "there is no script to run"), (["train.py"], "simpletuner is not installed")],
)
def test_the_entry_says_what_it_lacks(words, said):
    done = subprocess.run(
        [sys.executable, "-m", "gracetune.hosts.simpletuner", *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"gracetune: {said}")
    assert "Traceback" not in done.stderr
