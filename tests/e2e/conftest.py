"""Fixtures that start runs through the command line, as a user does."""

import json

import pytest
from fork_process import PythonProcess, run_python


@pytest.fixture
def run_file(tiny_run, tmp_path):
    """Return a function that writes a run file and returns its path."""

    def write(name="run.json", **sections):
        return write_run_file(tmp_path / name, tiny_run(**sections))

    return write


@pytest.fixture
def finished_run_file(finished_run, tmp_path):
    """Return the path of a run file whose run is done."""
    return write_run_file(tmp_path / "finished.json", finished_run)


def write_run_file(path, run):
    settings = run.model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(settings, indent=2))
    return path


@pytest.fixture
def gracetune():
    """Return a function that runs the command to its end."""

    def call(*words, **options):
        return run_python("-m", "gracetune", *words, **options)

    return call


@pytest.fixture
def start():
    """Return a function that starts the command; processes left over are killed at the end."""
    running = []

    def call(*words, **options):
        process = PythonProcess("-m", "gracetune", *words, **options)
        running.append(process)
        return process

    yield call
    for process in running:
        process.kill()
        process.wait()
