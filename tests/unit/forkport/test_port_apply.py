"""Apply patches, stop at conflicts, continue and roll back, on small histories."""

import os
import subprocess
from pathlib import Path

import pytest

from forkport import ForkportError
from forkport.apply import continue_apply, roll_back, start_apply
from forkport.extract import extract
from forkport.port_state import find_state, state_folder


def agree(question: str) -> None:
    """Confirm every step."""


def refuse(question: str) -> None:
    raise ForkportError(f"asked: {question}")


@pytest.fixture
def patches(repo) -> Path:
    return repo.folder / "patches"


@pytest.fixture
def conflicting(grow, patches, module):
    """Three patches; the second conflicts."""
    repo = grow(
        {
            "docs/guide.md": "fork\n" + "".join(f"line {i}\n" for i in range(20)),
            "pkg/one.py": module.replace("b = 2", "b = 20"),
            "extra/new.py": "new = 1\n",
        },
        {"pkg/one.py": module.replace("b = 2", "b = 200"), "up.txt": "up\n"},
    )
    extract(repo.git, "fork", "upstream", patches)
    return repo


def resolve(repo, text: str) -> None:
    (repo.folder / "pkg/one.py").write_text(text)


def test_each_patch_becomes_one_commit_on_top_of_upstream(grow, patches, module):
    repo = grow(
        {"pkg/one.py": module.replace("a = 1", "a = 10"), "extra/new.py": "new = 1\n"},
        {"up.txt": "up\n"},
    )
    extract(repo.git, "fork", "upstream", patches)
    outcome = start_apply(repo.git, patches, None, "port", "1", refuse)
    assert outcome.state.finished
    subjects = repo.run("log", "--format=%s", "upstream..port").splitlines()
    assert subjects == ["Reapply 02-new: extra/new.py", "Reapply 01-one: pkg/one.py"]
    assert repo.run("rev-parse", "port~2") == repo.run("rev-parse", "upstream")
    assert (repo.folder / "pkg/one.py").read_text() == module.replace("a = 1", "a = 10")
    assert (repo.folder / "up.txt").exists()
    assert repo.run("rev-parse", outcome.state.backup) == repo.run("rev-parse", "fork")


def test_a_patch_that_upstream_already_has_makes_no_commit(grow, patches, module):
    new = module.replace("a = 1", "a = 10")
    repo = grow({"pkg/one.py": new, "x.py": "x\n"}, {"pkg/one.py": new})
    extract(repo.git, "fork", "upstream", patches)
    state = start_apply(repo.git, patches, None, "port", "1", refuse).state
    assert {d.patch: (d.verdict, d.commit is None) for d in state.done} == {
        "01-one": ("already upstream", True),
        "02-x": ("applies", False),
    }


def test_a_conflict_stops_and_looks_like_a_git_conflict(conflicting, patches):
    outcome = start_apply(conflicting.git, patches, None, "port", "1", refuse)
    assert outcome.state.stopped.patch == "02-one"
    assert [file.path for file in outcome.conflicts] == ["pkg/one.py"]
    assert conflicting.run("status", "--porcelain", "--untracked-files=no") == "UU pkg/one.py\n"
    text = (conflicting.folder / "pkg/one.py").read_text()
    assert "    b = 200\n||||||| before both\n    b = 2\n=======\n    b = 20\n>>>>>>>" in text
    assert (conflicting.folder / "docs/guide.md").read_text().startswith("fork\n")


def test_continue_commits_the_resolution(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    resolve(conflicting, module.replace("b = 2", "b = 220"))
    state = continue_apply(conflicting.git).state
    assert state.finished
    assert conflicting.show("port", "pkg/one.py") == module.replace("b = 2", "b = 220")
    assert conflicting.show("port", "extra/new.py") == "new = 1\n"
    message = conflicting.run("log", "-1", "--format=%b", "port~1")
    assert "Resolved by hand: pkg/one.py." in message
    with pytest.raises(ForkportError, match="every patch is already on port"):
        continue_apply(conflicting.git)


def test_continue_refuses_remaining_conflict_markers(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    path = conflicting.folder / "pkg/one.py"
    with pytest.raises(ForkportError, match=r"pkg/one.py:8 is a conflict marker"):
        continue_apply(conflicting.git)
    # Half removed is not removed, and what ends a line does not matter.
    lines = [line for line in path.read_text().splitlines() if not line.startswith("<<<<<<<")]
    path.write_text("\r\n".join(lines))
    with pytest.raises(ForkportError, match="is a conflict marker"):
        continue_apply(conflicting.git)
    assert find_state(conflicting.git).stopped is not None


def test_a_commit_by_the_user_counts_as_the_resolution(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    resolve(conflicting, module.replace("b = 2", "b = 5"))
    conflicting.run("commit", "--quiet", "--all", "--message=mine")
    assert continue_apply(conflicting.git).state.finished
    assert conflicting.run("log", "-1", "--format=%s", "port~1") == "mine\n"


def test_a_resolution_equal_to_upstream_makes_no_commit(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    resolve(conflicting, module.replace("b = 2", "b = 200"))
    state = continue_apply(conflicting.git).state
    assert state.done[1].commit is None
    assert conflicting.run("rev-list", "--count", "upstream..port") == "2\n"


def test_continue_is_refused_on_another_branch_or_history(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    conflicting.run("checkout", "--quiet", "--force", "fork")
    with pytest.raises(ForkportError, match="HEAD is not on port"):
        continue_apply(conflicting.git)
    conflicting.run("checkout", "--quiet", "port")
    conflicting.run("reset", "--quiet", "--hard", "upstream")
    with pytest.raises(ForkportError, match="other ancestors"):
        continue_apply(conflicting.git)


def test_a_deleted_or_changed_file_is_chosen_with_git_add_or_rm(grow, patches, module):
    repo = grow({"pkg/one.py": module.replace("b = 2", "b = 20")}, {"pkg/one.py": None})
    extract(repo.git, "fork", "upstream", patches)
    outcome = start_apply(repo.git, patches, None, "port", "1", refuse)
    assert outcome.state.stopped.unmarked == ("pkg/one.py",)
    with pytest.raises(ForkportError, match=r"choose with `git add pkg/one\.py`"):
        continue_apply(repo.git)
    repo.run("add", "pkg/one.py")
    assert continue_apply(repo.git).state.finished
    assert "b = 20" in repo.show("port", "pkg/one.py")


def test_a_second_port_is_refused_while_one_is_in_progress(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    with pytest.raises(ForkportError, match="a port onto upstream is in progress"):
        start_apply(conflicting.git, patches, None, "port2", "2", refuse)


def test_an_existing_branch_is_not_overwritten(conflicting, patches):
    conflicting.run("branch", "port")
    with pytest.raises(ForkportError, match="the branch port already exists"):
        start_apply(conflicting.git, patches, None, "port", "1", refuse)


def test_a_port_is_refused_during_the_users_own_merge(conflicting, patches):
    git = subprocess.run(
        ["git", "merge", "--quiet", "upstream"],
        cwd=conflicting.folder,
        env=conflicting.environment,
        capture_output=True,
    )
    assert git.returncode != 0
    with pytest.raises(ForkportError, match="in the middle of a merge"):
        start_apply(conflicting.git, patches, None, "port", "1", refuse)


def test_uncommitted_work_needs_confirmation(conflicting, patches):
    (conflicting.folder / "pkg/two.py").write_text("idea = 1\n")
    before = conflicting.files()
    with pytest.raises(
        ForkportError, match=r"asked: 1 files have uncommitted changes \(pkg/two.py"
    ):
        start_apply(conflicting.git, patches, None, "port", "1", refuse)
    assert conflicting.files() == before
    assert find_state(conflicting.git) is None


def test_rollback_restores_every_byte(conflicting, patches):
    """Covers staged, unstaged, new, deleted and executable files, CRLF line ends and a link."""
    folder = conflicting.folder
    conflicting.run("config", "core.autocrlf", "true")
    conflicting.run("read-tree", "--empty")
    conflicting.run("reset", "--quiet", "--hard")  # rewrites the files with CRLF line ends
    (folder / "pkg/two.py").write_bytes(b"staged\r\nmixed\nends\r")
    conflicting.run("add", "pkg/two.py")
    (folder / "pkg/two.py").write_bytes(b"and more on disk\r\n\x00\xff")
    (folder / "docs/guide.md").unlink()
    (folder / "added.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "added.sh").chmod(0o755)
    (folder / "link").symlink_to("nowhere")
    conflicting.run("add", "added.sh", "link")
    (folder / "untracked.txt").write_bytes(b"\x00never added")
    before, status = conflicting.files(), conflicting.run("status", "--porcelain")
    staged = conflicting.run("diff", "--cached", "--raw")

    start_apply(conflicting.git, patches, None, "port", "1", agree)
    (folder / "pkg/one.py").write_bytes(b"half resolved\r\n")
    (folder / "added.sh").write_bytes(b"another of this name\n")
    done = roll_back(conflicting.git, "2", agree)

    assert conflicting.files() == before
    assert conflicting.run("status", "--porcelain") == status
    assert conflicting.run("diff", "--cached", "--raw") == staged
    assert os.access(folder / "added.sh", os.X_OK)
    assert os.readlink(folder / "link") == "nowhere"
    assert conflicting.run("branch", "--show-current") == "fork\n"
    assert conflicting.show(done.saved_branch, "pkg/one.py") == "half resolved\r\n"
    assert conflicting.show(done.saved_branch, "added.sh") == "another of this name\n"
    assert find_state(conflicting.git) is None
    assert list(state_folder(conflicting.git).glob("ended-*.json"))


def test_a_refused_rollback_changes_nothing(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    before = conflicting.files()
    with pytest.raises(
        ForkportError, match=r"asked: Return to fork .* 1 uncommitted files are saved"
    ):
        roll_back(conflicting.git, "2", refuse)
    assert conflicting.files() == before


def test_rollback_without_a_port_is_refused(repo):
    with pytest.raises(ForkportError, match="no port is in progress"):
        roll_back(repo.git, "1", agree)


def test_rollback_goes_to_the_backup_if_the_fork_moved_meanwhile(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    head = conflicting.run("rev-parse", "fork")
    conflicting.run("update-ref", "refs/heads/fork", "upstream")
    done = roll_back(conflicting.git, "2", agree)
    assert done.branch == "gh200-backup-1"
    assert conflicting.run("rev-parse", "HEAD") == head
    assert conflicting.run("rev-parse", "fork") == conflicting.run("rev-parse", "upstream")


def test_rollback_from_a_detached_head_goes_to_the_backup(conflicting, patches):
    conflicting.run("checkout", "--quiet", "--detach")
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    assert roll_back(conflicting.git, "2", agree).branch == "gh200-backup-1"


def test_ignored_files_are_not_overwritten(grow, patches, module):
    """Upstream tracks a file that the fork ignores: git would silently overwrite it."""
    repo = grow({".gitignore": "mine.json\npatches\n"}, {"mine.json": "upstream's\n"})
    extract(repo.git, "fork", "upstream", patches)
    (repo.folder / "mine.json").write_text("precious\n")
    with pytest.raises(ForkportError, match=r"mine\.json"):
        start_apply(repo.git, patches, None, "port", "1", agree)
    assert (repo.folder / "mine.json").read_text() == "precious\n"
    (repo.folder / "mine.json").unlink()
    assert continue_apply(repo.git).state.finished


def test_untracked_files_are_not_overwritten_by_a_conflict(conflicting, patches, module):
    repo = conflicting
    repo.commits(
        "fork2",
        [("both", {"pkg/one.py": module.replace("b = 2", "b = 9"), "pkg/n.py": "n\n"})],
        parent="main",
    )
    repo.run("checkout", "--quiet", "fork2")
    extract(repo.git, "fork2", "upstream", patches)
    repo.run("checkout", "--quiet", "fork")
    (repo.folder / "pkg/n.py").write_text("mine\n")
    with pytest.raises(
        ForkportError, match=r"pkg/n\.py is not tracked, and the patch would overwrite it"
    ):
        start_apply(repo.git, patches, None, "port", "1", agree)
    assert (repo.folder / "pkg/n.py").read_text() == "mine\n"
    (repo.folder / "pkg/n.py").unlink()
    assert continue_apply(repo.git).state.stopped is not None


@pytest.fixture
def blocked(grow, patches, module):
    """A port whose conflicting patch could not be written because of an untracked file."""
    repo = grow(
        {"docs/guide.md": "fork\n", "pkg/one.py": module.replace("b = 2", "b = 9"), "n.py": "n\n"},
        {"pkg/one.py": module.replace("b = 2", "b = 200")},
    )
    extract(repo.git, "fork", "upstream", patches, [("all", "*.py")])
    repo.run("checkout", "--quiet", "main")
    (repo.folder / "n.py").write_text("mine\n")
    with pytest.raises(
        ForkportError, match=r"n\.py is not tracked, and the patch would overwrite it"
    ):
        start_apply(repo.git, patches, None, "port", "1", agree)
    return repo


def test_a_refusal_changes_nothing(blocked):
    assert blocked.run("branch", "--show-current") == "main\n"
    assert blocked.run("status", "--porcelain", "--untracked-files=no") == ""
    assert not blocked.git.succeeds("rev-parse", "--verify", "--quiet", "refs/heads/port")
    (blocked.folder / "n.py").unlink()
    assert continue_apply(blocked.git).state.stopped is not None


def test_continue_after_a_refusal_keeps_uncommitted_changes(blocked):
    (blocked.folder / "n.py").unlink()
    (blocked.folder / "pkg/one.py").write_text("precious\n")
    with pytest.raises(
        ForkportError, match=r"pkg/one\.py: uncommitted, and continuing would overwrite"
    ):
        continue_apply(blocked.git)
    assert (blocked.folder / "pkg/one.py").read_text() == "precious\n"


def test_continue_after_a_refusal_keeps_commits_on_the_port_branch(blocked):
    (blocked.folder / "n.py").unlink()
    blocked.run("checkout", "--quiet", "-b", "port")
    blocked.run("commit", "--quiet", "--allow-empty", "--message=precious")
    mine = blocked.run("rev-parse", "port")
    with pytest.raises(ForkportError, match="port has commits that the port did not make"):
        continue_apply(blocked.git)
    assert blocked.run("rev-parse", "port") == mine


def test_a_file_in_the_place_of_a_tracked_folder_is_restored(conflicting, patches):
    """Git reports the files of the folder as deleted and the new file as untracked."""
    folder = conflicting.folder
    for old in (folder / "docs").iterdir():
        old.unlink()
    (folder / "docs").rmdir()
    (folder / "docs").write_text("precious\n")
    before = conflicting.files()
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    roll_back(conflicting.git, "2", agree)
    assert conflicting.files() == before


def test_a_tracked_patch_set_survives_the_branch_switch(conflicting, patches, module):
    conflicting.run("add", "patches")
    conflicting.run("commit", "--quiet", "--message=patches")
    extract(conflicting.git, "fork", "upstream", patches)
    conflicting.run("commit", "--quiet", "--all", "--message=again")
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    assert not patches.exists()
    resolve(conflicting, module)
    assert continue_apply(conflicting.git).state.finished
    assert not any("patches/" in d.patch for d in find_state(conflicting.git).done)


def test_an_unreadable_state_file_is_named(conflicting, patches):
    home = state_folder(conflicting.git)
    home.mkdir()
    (home / "state.json").write_text("{}")
    with pytest.raises(ForkportError, match=r"state\.json cannot be read"):
        find_state(conflicting.git)
