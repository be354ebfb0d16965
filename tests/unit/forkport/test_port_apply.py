"""Applying, stopping, going on and going back, on small histories."""

import os
import subprocess
from pathlib import Path

import pytest

from forkport.apply import start_apply, continue_apply, roll_back
from forkport.extract import extract
from forkport.state import find_state, state_folder
from gracetune.errors import PortError


def agree(question: str) -> None:
    """Yes to everything."""


def refuse(question: str) -> None:
    raise PortError(f"asked: {question}")


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


def settle(repo, text: str) -> None:
    (repo.folder / "pkg/one.py").write_text(text)


def test_one_commit_a_patch_on_top_of_upstream(grow, patches, module):
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


def test_what_upstream_has_makes_no_commit(grow, patches, module):
    new = module.replace("a = 1", "a = 10")
    repo = grow({"pkg/one.py": new, "x.py": "x\n"}, {"pkg/one.py": new})
    extract(repo.git, "fork", "upstream", patches)
    state = start_apply(repo.git, patches, None, "port", "1", refuse).state
    assert {d.patch: (d.verdict, d.commit is None) for d in state.done} == {
        "01-one": ("upstream has it", True),
        "02-x": ("applies", False),
    }


def test_a_conflict_stops_with_gits_own_signs_of_it(conflicting, patches):
    outcome = start_apply(conflicting.git, patches, None, "port", "1", refuse)
    assert outcome.state.stopped.patch == "02-one"
    assert [file.path for file in outcome.conflicts] == ["pkg/one.py"]
    assert conflicting.run("status", "--porcelain", "--untracked-files=no") == "UU pkg/one.py\n"
    text = (conflicting.folder / "pkg/one.py").read_text()
    assert "    b = 200\n||||||| before both\n    b = 2\n=======\n    b = 20\n>>>>>>>" in text
    assert (conflicting.folder / "docs/guide.md").read_text().startswith("fork\n")


def test_going_on_takes_what_was_settled(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    settle(conflicting, module.replace("b = 2", "b = 220"))
    state = continue_apply(conflicting.git).state
    assert state.finished
    assert conflicting.show("port", "pkg/one.py") == module.replace("b = 2", "b = 220")
    assert conflicting.show("port", "extra/new.py") == "new = 1\n"
    message = conflicting.run("log", "-1", "--format=%b", "port~1")
    assert "Settled by hand: pkg/one.py." in message
    with pytest.raises(PortError, match="already"):
        continue_apply(conflicting.git)


def test_markers_must_be_gone(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    path = conflicting.folder / "pkg/one.py"
    with pytest.raises(PortError, match=r"pkg/one.py:8 is a conflict marker"):
        continue_apply(conflicting.git)
    # Half removed is not removed, and what ends a line does not matter.
    lines = [line for line in path.read_text().splitlines() if not line.startswith("<<<<<<<")]
    path.write_text("\r\n".join(lines))
    with pytest.raises(PortError, match="is a conflict marker"):
        continue_apply(conflicting.git)
    assert find_state(conflicting.git).stopped is not None


def test_a_commit_of_the_users_own_counts(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    settle(conflicting, module.replace("b = 2", "b = 5"))
    conflicting.run("commit", "--quiet", "--all", "--message=mine")
    assert continue_apply(conflicting.git).state.finished
    assert conflicting.run("log", "-1", "--format=%s", "port~1") == "mine\n"


def test_settled_as_upstream_has_it_makes_no_commit(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    settle(conflicting, module.replace("b = 2", "b = 200"))
    state = continue_apply(conflicting.git).state
    assert state.done[1].commit is None
    assert conflicting.run("rev-list", "--count", "upstream..port") == "2\n"


def test_going_on_elsewhere_is_refused(conflicting, patches, module):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    conflicting.run("checkout", "--quiet", "--force", "fork")
    with pytest.raises(PortError, match="HEAD is not on port"):
        continue_apply(conflicting.git)
    conflicting.run("checkout", "--quiet", "port")
    conflicting.run("reset", "--quiet", "--hard", "upstream")
    with pytest.raises(PortError, match="other ancestors"):
        continue_apply(conflicting.git)


def test_a_choice_between_deleted_and_changed_is_made_with_git(grow, patches, module):
    repo = grow({"pkg/one.py": module.replace("b = 2", "b = 20")}, {"pkg/one.py": None})
    extract(repo.git, "fork", "upstream", patches)
    outcome = start_apply(repo.git, patches, None, "port", "1", refuse)
    assert outcome.state.stopped.unmarked == ("pkg/one.py",)
    with pytest.raises(PortError, match=r"choose with `git add pkg/one\.py`"):
        continue_apply(repo.git)
    repo.run("add", "pkg/one.py")
    assert continue_apply(repo.git).state.finished
    assert "b = 20" in repo.show("port", "pkg/one.py")


def test_a_port_under_way_is_not_begun_twice(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", refuse)
    with pytest.raises(PortError, match="is under way"):
        start_apply(conflicting.git, patches, None, "port2", "2", refuse)


def test_a_branch_that_is_there_is_not_taken(conflicting, patches):
    conflicting.run("branch", "port")
    with pytest.raises(PortError, match="the branch port is there already"):
        start_apply(conflicting.git, patches, None, "port", "1", refuse)


def test_a_merge_of_the_users_own_comes_first(conflicting, patches):
    git = subprocess.run(
        ["git", "merge", "--quiet", "upstream"],
        cwd=conflicting.folder,
        env=conflicting.environment,
        capture_output=True,
    )
    assert git.returncode != 0
    with pytest.raises(PortError, match="in the middle of a merge"):
        start_apply(conflicting.git, patches, None, "port", "1", refuse)


def test_uncommitted_work_is_asked_about(conflicting, patches):
    (conflicting.folder / "pkg/two.py").write_text("idea = 1\n")
    before = conflicting.files()
    with pytest.raises(PortError, match=r"asked: 1 files have uncommitted changes \(pkg/two.py"):
        start_apply(conflicting.git, patches, None, "port", "1", refuse)
    assert conflicting.files() == before
    assert find_state(conflicting.git) is None


def test_rollback_gives_back_every_byte(conflicting, patches):
    """Staged and not, new, deleted, with other line ends, executable, a link."""
    folder = conflicting.folder
    conflicting.run("config", "core.autocrlf", "true")
    conflicting.run("read-tree", "--empty")
    conflicting.run("reset", "--quiet", "--hard")  # written anew, with the ends of lines it wants
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
    (folder / "pkg/one.py").write_bytes(b"half settled\r\n")
    (folder / "added.sh").write_bytes(b"another of this name\n")
    done = roll_back(conflicting.git, "2", agree)

    assert conflicting.files() == before
    assert conflicting.run("status", "--porcelain") == status
    assert conflicting.run("diff", "--cached", "--raw") == staged
    assert os.access(folder / "added.sh", os.X_OK)
    assert os.readlink(folder / "link") == "nowhere"
    assert conflicting.run("branch", "--show-current") == "fork\n"
    assert conflicting.show(done.saved_branch, "pkg/one.py") == "half settled\r\n"
    assert conflicting.show(done.saved_branch, "added.sh") == "another of this name\n"
    assert find_state(conflicting.git) is None
    assert list(state_folder(conflicting.git).glob("ended-*.json"))


def test_rollback_asks_and_changes_nothing_when_refused(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    before = conflicting.files()
    with pytest.raises(PortError, match=r"asked: Return to fork .* 1 uncommitted files are kept"):
        roll_back(conflicting.git, "2", refuse)
    assert conflicting.files() == before


def test_rollback_without_a_port_is_refused(repo):
    with pytest.raises(PortError, match="no port is under way"):
        roll_back(repo.git, "1", agree)


def test_a_fork_that_moved_meanwhile_is_not_moved_back(conflicting, patches):
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    head = conflicting.run("rev-parse", "fork")
    conflicting.run("update-ref", "refs/heads/fork", "upstream")
    done = roll_back(conflicting.git, "2", agree)
    assert done.branch == "gh200-backup-1"
    assert conflicting.run("rev-parse", "HEAD") == head
    assert conflicting.run("rev-parse", "fork") == conflicting.run("rev-parse", "upstream")


def test_rollback_from_no_branch_goes_to_the_backup(conflicting, patches):
    conflicting.run("checkout", "--quiet", "--detach")
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    assert roll_back(conflicting.git, "2", agree).branch == "gh200-backup-1"


def test_ignored_files_are_not_overwritten(grow, patches, module):
    """Upstream tracks what the fork ignores: git would write over it without a word."""
    repo = grow({".gitignore": "mine.json\npatches\n"}, {"mine.json": "upstream's\n"})
    extract(repo.git, "fork", "upstream", patches)
    (repo.folder / "mine.json").write_text("precious\n")
    with pytest.raises(PortError, match=r"mine\.json"):
        start_apply(repo.git, patches, None, "port", "1", agree)
    assert (repo.folder / "mine.json").read_text() == "precious\n"
    (repo.folder / "mine.json").unlink()
    assert continue_apply(repo.git).state.finished


def test_files_in_the_way_of_a_conflict_are_not_overwritten(conflicting, patches, module):
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
    with pytest.raises(PortError, match=r"pkg/n\.py is not tracked, and the patch would write"):
        start_apply(repo.git, patches, None, "port", "1", agree)
    assert (repo.folder / "pkg/n.py").read_text() == "mine\n"
    (repo.folder / "pkg/n.py").unlink()
    assert continue_apply(repo.git).state.stopped is not None


@pytest.fixture
def blocked(grow, patches, module):
    """A port whose second patch conflicts, and that stopped before it for a file in its way."""
    repo = grow(
        {"docs/guide.md": "fork\n", "pkg/one.py": module.replace("b = 2", "b = 9"), "n.py": "n\n"},
        {"pkg/one.py": module.replace("b = 2", "b = 200")},
    )
    extract(repo.git, "fork", "upstream", patches, [("all", "*.py")])
    repo.run("checkout", "--quiet", "main")
    (repo.folder / "n.py").write_text("mine\n")
    with pytest.raises(PortError, match=r"n\.py is not tracked, and the patch would write over it"):
        start_apply(repo.git, patches, None, "port", "1", agree)
    return repo


def test_a_refusal_leaves_everything_where_it_was(blocked):
    assert blocked.run("branch", "--show-current") == "main\n"
    assert blocked.run("status", "--porcelain", "--untracked-files=no") == ""
    assert not blocked.git.succeeds("rev-parse", "--verify", "--quiet", "refs/heads/port")
    (blocked.folder / "n.py").unlink()
    assert continue_apply(blocked.git).state.stopped is not None


def test_going_on_after_a_refusal_takes_no_uncommitted_change(blocked):
    (blocked.folder / "n.py").unlink()
    (blocked.folder / "pkg/one.py").write_text("precious\n")
    with pytest.raises(PortError, match=r"pkg/one\.py: uncommitted, and going on would write over"):
        continue_apply(blocked.git)
    assert (blocked.folder / "pkg/one.py").read_text() == "precious\n"


def test_going_on_after_a_refusal_drops_no_commit_on_the_ports_branch(blocked):
    (blocked.folder / "n.py").unlink()
    blocked.run("checkout", "--quiet", "-b", "port")
    blocked.run("commit", "--quiet", "--allow-empty", "--message=precious")
    mine = blocked.run("rev-parse", "port")
    with pytest.raises(PortError, match="port has commits that are not the port's"):
        continue_apply(blocked.git)
    assert blocked.run("rev-parse", "port") == mine


def test_a_file_in_the_place_of_a_tracked_folder_is_kept(conflicting, patches):
    """Git calls the files of the folder deleted, and the new file only untracked."""
    folder = conflicting.folder
    for old in (folder / "docs").iterdir():
        old.unlink()
    (folder / "docs").rmdir()
    (folder / "docs").write_text("precious\n")
    before = conflicting.files()
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    roll_back(conflicting.git, "2", agree)
    assert conflicting.files() == before


def test_patches_that_are_tracked_survive_the_switch(conflicting, patches, module):
    conflicting.run("add", "patches")
    conflicting.run("commit", "--quiet", "--message=patches")
    extract(conflicting.git, "fork", "upstream", patches)
    conflicting.run("commit", "--quiet", "--all", "--message=again")
    start_apply(conflicting.git, patches, None, "port", "1", agree)
    assert not patches.exists()
    settle(conflicting, module)
    assert continue_apply(conflicting.git).state.finished
    assert not any("patches/" in d.patch for d in find_state(conflicting.git).done)


def test_a_state_that_cannot_be_read_is_named(conflicting, patches):
    home = state_folder(conflicting.git)
    home.mkdir()
    (home / "state.json").write_text("{}")
    with pytest.raises(PortError, match=r"state\.json cannot be read"):
        find_state(conflicting.git)
