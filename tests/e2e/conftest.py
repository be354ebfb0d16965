"""Runs through the command line, as a user starts them."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def run_file(tiny_run, tmp_path):
    """Write a run file; gives its path."""

    def write(name="run.json", **sections):
        path = tmp_path / name
        settings = tiny_run(**sections).model_dump(mode="json", exclude_unset=True)
        path.write_text(json.dumps(settings, indent=2))
        return path

    return write


@pytest.fixture
def gracetune():
    """Run the command to its end."""

    def call(*words, **options):
        command = [sys.executable, "-m", "gracetune", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)

    return call


@pytest.fixture
def start():
    """Start the command and leave it running; whatever is left is killed at the end."""
    running = []

    def call(*words):
        command = [sys.executable, "-m", "gracetune", *map(str, words)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield call
    for process in running:
        process.kill()
        process.communicate()
