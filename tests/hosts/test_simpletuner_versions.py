"""Every SimpleTuner from 4.6 on, each in a folder that `make test-host-versions` creates."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from gracetune.hosts.probe import probe
from gracetune.hosts.simpletuner.hooks import (
    REQUIRED_SYMBOLS,
    TESTED_VERSIONS,
    WEBUI_REQUIRED_SYMBOLS,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted((ROOT / ".hosts/simpletuner-versions").glob("[0-9]*"))
SCRIPT = Path(__file__).with_name("hook_and_serve.py")
pytestmark = [
    pytest.mark.skipif(not FOLDERS, reason="make test-host-versions downloads them"),
    pytest.mark.timeout(900),
]


def test_every_version_is_recorded_as_tested():
    assert {folder.name for folder in FOLDERS} <= {*TESTED_VERSIONS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_symbol_is_there(folder):
    found = probe(folder, (*REQUIRED_SYMBOLS, *WEBUI_REQUIRED_SYMBOLS))
    assert [(each.required.symbol, each.problem) for each in found if not each.ok] == []


@pytest.mark.skipif(
    not [*distributions(name="simpletuner")], reason="only in SimpleTuner's environment"
)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_hook_works(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
            "HOME": str(tmp_path),
            "CONFIG_PATH": str(tmp_path / "config.json"),
        },
        capture_output=True,
        text=True,
    )
    assert f"all hooks work in {folder.name}" in done.stdout, done.stderr[-3000:]
