"""Every benchmark runs to its end in a rehearsal, and every result file says how it was made."""

import json
import re
import runpy
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]
LONG_REHEARSALS = {
    "async_saving",
    "families_step",
    "gradient_check",
    "large_families",
    "managed_training",
    "planned_ranks",
    "sharded",
    "wan14b_step",
    "wan_experts",
}
"""Scripts whose rehearsal takes over five seconds; `make test-slow` runs them."""


@pytest.fixture
def _restored(monkeypatch):
    """Undo what a script sets for its whole process."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG_REHEARSALS), id=path.stem)
        for path in SCRIPTS
    ],
)
def test_a_rehearsal_runs_to_its_end(script, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    monkeypatch.setattr(sys, "argv", [str(script), "--rehearse", "--out", str(tmp_path)])
    with suppress_success():
        runpy.run_path(str(script), run_name="__main__")
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before
    for path in tmp_path.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["script"] == f"benchmarks/{script.name}"
        assert record["figures"]
        assert (RESULTS / path.name).exists(), "a measurement writes the same files"


@contextmanager
def suppress_success():
    """Suppress the SystemExit of a script that ends with the exit code 0."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


def test_every_measuring_script_is_rehearsed():
    """A file without the guard is imported by others; if nobody does, it must be a script."""
    sources = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    for name in sources.keys() - {path.stem for path in SCRIPTS}:
        pattern = rf"^\s*(?:import {name}\b|from {name} import)"
        users = [other for other, text in sources.items() if re.search(pattern, text, re.M)]
        assert users, f"benchmarks/{name}.py is neither imported nor run"


@pytest.mark.usefixtures("_restored")
def test_a_rehearsal_never_writes_to_the_results(monkeypatch, capsys):
    argv = ["bare_loop.py", "--rehearse", "--out", str(RESULTS)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCHMARKS / "bare_loop.py"), run_name="__main__")
    assert "a rehearsal does not write to" in capsys.readouterr().err


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_file_names_its_date_commit_machine_and_script(path):
    record = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", record["commit"])
    assert "torch" in record["machine"]
    assert ROOT / record["script"] in SCRIPTS
    assert record["figures"]
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if shallow != "false":
        pytest.skip("the history is not complete, or this is not a git repository")
    commit = record["commit"].removesuffix("-dirty")
    assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit
