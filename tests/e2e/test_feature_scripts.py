"""The test scripts of the guides pass if, and only if, the feature they test works."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from git_history import IDENTITY, Repo

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "test_upstream_features.sh": ["--attention", "--manual-validation", "--manual", "--audio"],
    "test_gh200_features.sh": ["--diagnostic", "--uvm", "--staging", "--ramp"],
    "test_combined_features.sh": ["--backend sdpa", "--manual-validation", "--manual", "--audio"],
}
ALL = [(script, flag) for script, flags in SCRIPTS.items() for flag in flags]


def call(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / script), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(("script", "flag"), ALL)
def test_every_check_fails_if_its_program_fails(script, flag):
    done = call(f"scripts/{script}", *flag.split(), PYTHON="/bin/false")
    assert done.returncode == 1, done.stdout
    assert done.stdout.endswith("0 passed, 1 failed\n")


@pytest.mark.parametrize(("script", "flag"), ALL)
def test_no_check_passes_if_nothing_was_done(script, flag):
    """The program does nothing and exits with 0."""
    done = call(f"scripts/{script}", *flag.split(), PYTHON="/bin/true")
    assert done.returncode == 1, done.stdout
    assert "FAIL" in done.stdout


@pytest.mark.parametrize("script", [*SCRIPTS, "../execute_gh200_rebase.sh"])
def test_help_and_unknown_options(script):
    done = call(f"scripts/{script}", "--help")
    assert (done.returncode, done.stdout[:6]) == (0, "usage:")
    done = call(f"scripts/{script}", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense is not an option" in done.stderr


def test_all_checks_run_without_flags():
    done = call("scripts/test_gh200_features.sh", PYTHON="/bin/false")
    assert done.stdout.endswith("0 passed, 4 failed\n")


def test_checks_of_working_features_pass():
    done = call("scripts/test_upstream_features.sh", "--audio", "--manual")
    assert done.returncode == 0, done.stdout
    assert "PASS  audio files" in done.stdout
    assert "PASS  validation on request" in done.stdout


@pytest.mark.slow
def test_a_missing_attention_backend_is_skipped_by_name_and_sdpa_is_tested():
    words = ["--backend", "flash_attn_3", "--allow-cpu"]
    done = call("scripts/test_combined_features.sh", *words)
    assert done.returncode == 0, done.stdout
    name = "ramp with attention backend"
    assert f"SKIP  {name} flash_attn_3: flash_attn_3 cannot be used here: " in done.stdout
    assert f"PASS  {name} sdpa, instead of flash_attn_3" in done.stdout
    assert "SKIP  hints with attention backend sdpa: there is no GPU, so no hint" in done.stdout
    assert done.stdout.endswith("1 passed, 2 skipped, 0 failed\n")


def test_hints_that_were_not_applied_do_not_pass():
    """The same holds for `--backend`, see above."""
    done = call("scripts/test_combined_features.sh", "--manual", "--allow-cpu")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [
        "PASS  ramp with validation on request",
        "SKIP  hints with validation on request: there is no GPU, so no hint can be applied",
        "1 passed, 1 skipped, 0 failed",
    ]
    done = call("scripts/test_combined_features.sh", "--manual")
    assert done.returncode == 1, done.stdout
    assert "FAIL  hints with validation on request: there is no GPU" in done.stdout
    assert done.stdout.endswith("1 passed, 1 failed\n")


def test_skipped_checks_of_the_diagnosis_are_named():
    done = call("scripts/test_gh200_features.sh", "--diagnostic", "--allow-cpu")
    assert done.returncode == 0, done.stdout
    passed, skipped, total = done.stdout.splitlines()
    assert passed == "PASS  diagnosis"
    assert re.match(r"SKIP  diagnosis: \d+ of \d+ checks: NUMA, pinned copies, ", skipped)
    assert total == "1 passed, 1 skipped, 0 failed"


def test_an_unknown_attention_backend_fails():
    done = call("scripts/test_upstream_features.sh", "--attention", "--backend", "flash_attn_9")
    assert done.returncode == 1
    assert "flash_attn_9 is not an attention backend" in done.stdout


def test_managed_memory_and_hints_are_not_passed_without_an_allocation():
    done = call("scripts/test_gh200_features.sh", "--uvm", "--allow-cpu")
    assert done.returncode == 77, done.stdout
    assert "SKIP  managed memory: no managed memory was allocated: there is no GPU" in done.stdout
    assert done.stdout.endswith("0 passed, 1 skipped, 0 failed\n")
    done = call("scripts/test_combined_features.sh", "--audio", "--allow-cpu")
    assert done.returncode == 77, done.stdout
    assert "SKIP  audio in memory with hints: there is no GPU" in done.stdout


ONE = "def one():\n    a = 1\n    b = 2\n    c = 3\n    return a\n"


@pytest.fixture
def clone(tmp_path) -> Repo:
    """Return a clone of a fork whose upstream has new commits."""
    origin = Repo(tmp_path / "origin")
    origin.commits("main", [("base", {"one.py": ONE})])
    fork = Repo(tmp_path / "clone")
    fork.run("remote", "add", "origin", str(origin.folder))
    fork.run("fetch", "--quiet", "origin")
    files = {"one.py": ONE.replace("b = 2", "b = 20"), "extra.py": "x = 1\n"}
    fork.commits("fork", [("fork", files)], parent="origin/main")
    fork.run("checkout", "--quiet", "fork")
    changed = {"one.py": ONE.replace("b = 2", "b = 200")}
    origin.commits("main", [("theirs", changed)], parent="main")
    return fork


def test_a_complete_rebase(clone):
    (clone.folder / "extra.py").write_text("x = 1  # uncommitted\n")
    before = clone.files()
    script = "execute_gh200_rebase.sh"
    words = ["--repo", str(clone.folder)]
    commands = ["--validate-upstream", "grep -q 200 one.py", "--validate-ours", "test -f extra.py"]
    commands += ["--validate-combined", "grep -q 220 one.py"]

    done = call(script, *words, **IDENTITY)
    assert done.returncode == 2, "uncommitted work, no terminal, no --yes"
    done = call(script, *words, *commands, "--yes", **IDENTITY)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "01-one: conflicts" in done.stdout or "one.py:3: both sides" in done.stderr
    assert "stopped at a conflict" in (clone.folder / "GH200_REBASE_CHECKLIST.md").read_text()

    (clone.folder / "one.py").write_text(ONE.replace("b = 2", "b = 220"))
    done = call(script, *words, "--continue", **IDENTITY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 commands passed." in done.stdout
    assert "Backup branch: gh200-backup-" in (clone.folder / "MERGE_LOG.txt").read_text()

    done = subprocess.run(
        [clone.folder / "ROLLBACK.sh", "--yes"],
        env={**os.environ, **IDENTITY},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    left = {path: data for path, data in clone.files().items() if path in before}
    assert left == before
    assert set(clone.files()) - set(before) >= {"MERGE_LOG.txt", "ROLLBACK.sh"}


def test_a_rebase_without_validation_fails(clone):
    clone.run("checkout", "--quiet", "-b", "fork2")
    clone.run("reset", "--quiet", "--hard", "origin/main")
    (clone.folder / "new.py").write_text("n = 1\n")
    clone.run("add", "new.py")
    clone.run("commit", "--quiet", "--message=new")
    words = ["--repo", str(clone.folder), "--branch", "port"]
    done = call("execute_gh200_rebase.sh", *words, **IDENTITY)
    assert done.returncode == 2
    assert "nothing would be tested" in done.stderr
    assert "All 1 patches are on port." in done.stdout
    done = call("execute_gh200_rebase.sh", *words[:2], "--rollback", "--yes", **IDENTITY)
    assert done.returncode == 0, done.stderr
    assert clone.run("branch", "--show-current") == "fork2\n"
