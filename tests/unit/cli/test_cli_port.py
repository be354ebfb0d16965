"""`gracetune port`, called by a user and by a script."""

import json
import os
import subprocess
import sys

import pytest
from git_history import IDENTITY, Repo

from gracetune.cli.main import main

ONE = "def one():\n    a = 1\n    b = 2\n    c = 3\n    return a\n"


@pytest.fixture
def repo(tmp_path, monkeypatch) -> Repo:
    """A fork that changes one line and adds a file; upstream changes the same line."""
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)
    repo = Repo(tmp_path / "clone")
    repo.commits("main", [("base", {"one.py": ONE})])
    fork = {"one.py": ONE.replace("b = 2", "b = 20"), "extra/new.py": "n = 1\n"}
    repo.commits("fork", [("fork", fork)], parent="main")
    upstream = {"one.py": ONE.replace("b = 2", "b = 200")}
    repo.commits("upstream", [("theirs", upstream)], parent="main")
    repo.run("checkout", "--quiet", "fork")
    return repo


@pytest.fixture
def port(repo):
    def call(*words: str) -> int:
        return main(["port", "--repo", str(repo.folder), *words])

    return call


def test_a_port_runs_from_extract_to_rollback(port, repo, capsys):
    assert port("extract", "--upstream", "upstream", "--validate-ours", "grep -q 220 one.py") == 0
    out = capsys.readouterr().out
    assert "01-one: 1 files, +1 -1, risk medium" in out
    assert "2 patches of fork since" in out

    assert port("plan") == 0
    out = capsys.readouterr().out
    assert "01-one: conflicts" in out
    assert "one.py:3: conflict: both sides changed these lines" in out
    assert "theirs (one.py: one)" in out
    assert out.endswith("2 patches: 1 conflicts, 1 applies\n")

    assert port("apply") == 1
    printed = capsys.readouterr()
    assert "Backup branch: gh200-backup-" in printed.out
    assert "  upstream:\n        b = 200\n  fork:\n        b = 20\n" in printed.err
    assert "gracetune port apply --continue" in printed.err

    (repo.folder / "one.py").write_text(ONE.replace("b = 2", "b = 220"))
    assert port("apply", "--continue") == 0
    assert "All 2 patches are on gh200-reintegration." in capsys.readouterr().out

    assert port("validate", "ours") == 0
    assert "1 of 1 commands passed." in capsys.readouterr().out
    assert port("checklist") == 0
    page = (repo.folder / "GH200_REBASE_CHECKLIST.md").read_text()
    assert "resolved by hand: `one.py`" in page
    assert "- [x] `grep -q 220 one.py`: passed" in page

    (repo.folder / "one.py").write_text("an idea\n")
    assert port("rollback", "--yes") == 0
    out = capsys.readouterr().out
    assert "HEAD is on fork" in out
    assert "Saved in gh200-kept-" in out
    assert (repo.folder / "one.py").read_text() == ONE.replace("b = 2", "b = 20")


def test_patches_that_upstream_already_has_are_named(port, repo, capsys):
    repo.commits("upstream", [("take it", {"extra/new.py": "n = 1\n"})], parent="upstream~1")
    assert port("extract", "--upstream", "upstream") == 0
    assert port("plan") == 0
    out = capsys.readouterr().out
    assert "02-new: already upstream" in out
    assert "  extra/new.py: already upstream" in out
    assert port("apply") == 0
    out = capsys.readouterr().out
    assert out.endswith("1 of 2 patches are on gh200-reintegration. Already upstream: 02-new.\n")


def test_uncommitted_changes_are_not_extracted(port, repo, capsys):
    (repo.folder / "one.py").write_text("an idea\n")
    assert port("extract", "--upstream", "upstream") == 0
    assert "Not included, because not committed: one.py." in capsys.readouterr().out


def test_extract_and_plan_can_print_json(port, capsys):
    assert port("extract", "--upstream", "upstream", "--json") == 0
    manifest = json.loads(capsys.readouterr().out)
    assert [patch["name"] for patch in manifest["patches"]] == ["01-one", "02-new"]
    assert port("plan", "--json") == 0
    plans = json.loads(capsys.readouterr().out)
    assert plans[0]["verdict"] == "conflicts"
    assert plans[0]["files"][0]["conflict_lines"] == [3]
    assert plans[0]["commits"][0]["subject"] == "theirs"


def test_a_failing_command_fails_and_its_last_lines_are_shown(port, capsys):
    assert port("extract", "--upstream", "upstream", "--validate-combined", "ls nowhere") == 0
    assert port("validate", "combined") == 1
    out = capsys.readouterr().out
    assert "FAILED, exit 2" in out
    assert "  | ls: cannot access 'nowhere'" in out
    assert port("validate", "everything") == 2
    assert "'everything' is not a validation group" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "Create the patches first"),
        (["extract", "--upstream", "nowhere"], "'nowhere' is not a commit"),
        (["extract", "--upstream", "upstream", "--group", "x"], "write NAME=PATTERN"),
        (["apply", "--continue"], "no port is in progress"),
        (["checklist", "--baseline", "nowhere.txt"], "--baseline nowhere.txt cannot be read"),
    ],
)
def test_user_errors_are_one_message(port, capsys, arguments, message):
    assert port(*arguments) == 2
    assert message in capsys.readouterr().err


def command(repo: Repo, *words: str) -> list[str]:
    return [sys.executable, "-m", "gracetune", "port", "--repo", str(repo.folder), *words]


def test_without_a_terminal_yes_is_required(port, repo):
    assert port("extract", "--upstream", "upstream") == 0
    (repo.folder / "one.py").write_text("uncommitted\n")
    done = subprocess.run(
        command(repo, "apply"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "There is no terminal to ask on; pass --yes to confirm." in done.stderr
    assert (repo.folder / "one.py").read_text() == "uncommitted\n"


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("y\n", 1)])
def test_the_user_is_asked_on_a_terminal(port, repo, answer, code):
    assert port("extract", "--upstream", "upstream") == 0
    (repo.folder / "one.py").write_text("uncommitted\n")
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, answer.encode())
        done = subprocess.run(
            command(repo, "apply"), stdin=terminal, capture_output=True, text=True, timeout=60
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert "Continue? [y/N]" in done.stdout
    assert done.returncode == code  # 1: it continued, up to the conflict
    assert ("nothing was changed. To continue, " in done.stderr) == (code == 2)


def test_port_does_not_import_torch():
    code = "import sys, gracetune.cli.port, gracetune.cli.baseline; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
