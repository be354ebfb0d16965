"""A whole port: a generated upstream of 200 commits against a fork of 12 files."""

import pytest
from git_history import History, Repo

from forkport.apply import continue_apply, roll_back, start_apply
from forkport.extract import extract
from forkport.plan import make_plan
from forkport.three_way import SideLabels, find_conflicts


def agree(question: str) -> None:
    """Confirm every step."""


@pytest.fixture(scope="module", params=[1, 2])
def history(request) -> History:
    return History(seed=request.param, num_commits=200)


@pytest.fixture
def repo(history, tmp_path) -> Repo:
    return history.build(tmp_path / "clone")


def resolve(repo: Repo, conflicts) -> None:
    """Keep both sides of every conflict."""
    for file in conflicts:
        path = repo.folder / file.path
        lines = path.read_text().splitlines(keepends=True)
        base = False
        kept = []
        for line in lines:
            if line.startswith("||||||| "):
                base = True
            elif line.startswith(("=======", "<<<<<<< ", ">>>>>>> ")):
                base = False
            elif not base:
                kept.append(line)
        path.write_text("".join(kept))


def test_a_port_over_200_commits_keeps_every_change_and_rolls_back(history, repo):
    assert len(history.fork_files) == 12
    assert history.lines_changed_by_both(), "the history must have conflicts"
    folder = repo.folder / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    assert sum(len(patch.files) for patch in manifest.patches) == 12
    (repo.folder / "notes.txt").write_bytes(b"never added\r\n")
    (repo.folder / "pkg/part06.py").write_bytes(b"# half an idea\r\nx = 1")
    before = repo.files()

    outcome = start_apply(repo.git, folder, None, "port", "1", agree)
    seen = []
    while outcome.state.stopped is not None:
        for file in outcome.conflicts:
            assert not file.reason, file
            seen += file.conflicts
        resolve(repo, outcome.conflicts)
        outcome = continue_apply(repo.git)

    conflicting = [{line.strip() for line in c.base.decode().splitlines()} for c in seen]
    both = history.lines_changed_by_both()
    for lines in conflicting:
        assert lines & both, f"{lines}: only one side changed these"
    assert {line for lines in conflicting for line in lines} >= both
    check_result(history, repo)

    (repo.folder / "pkg/part07.py").write_bytes(b"work after the port\r\n")
    done = roll_back(repo.git, "2", agree)
    assert repo.files() == before
    assert repo.run("branch", "--show-current") == "fork\n"
    assert repo.run("status", "--porcelain", "--untracked-files=no") == " M pkg/part06.py\n"
    assert repo.show(done.saved_branch, "pkg/part07.py") == "work after the port\r\n"


def check_result(history, repo) -> None:
    """Check that every changed line of either side occurs once, in its function."""
    assert repo.run("branch", "--show-current") == "port\n"
    assert repo.run("status", "--porcelain", "--untracked-files=no") == ""
    texts = {path: data.decode() for path, data in repo.files().items() if path.endswith(".py")}
    everything = "".join(texts.values())
    for line in history.changed_upstream:
        assert everything.count(f"{line}  # upstream") == 1, line
    for line in history.changed_fork:
        assert everything.count(f"{line}  # the fork's") == 1, line
    for path, functions in history.upstream.files.items():
        for name in functions:
            assert f"def {name}():" in texts[path], (path, name)
    assert texts["pkg/extra/new3.py"] == "ANSWER = 3\n"


def test_the_plan_predicts_what_apply_does(history, repo):
    folder = repo.folder / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    status = repo.run("status", "--porcelain")
    plans = make_plan(repo.git, manifest, folder, "upstream")
    assert repo.run("status", "--porcelain") == status, "a plan changes nothing"
    verdicts = {plan.patch.name: plan.verdict for plan in plans}
    assert verdicts == {"01-pkg": "conflicts", "02-extra": "applies"}
    notes = [note for plan in plans for file in plan.files for note in file.notes]
    for old, new in history.renamed.items():
        assert f"{old} is {new} upstream" in notes
    outcome = start_apply(repo.git, folder, None, "port", "1", agree)
    assert {f.path: f.conflicts for f in outcome.conflicts} == {
        f.path: f.conflicts for plan in plans for f in plan.files if f.is_conflict
    }


def test_the_plan_names_the_commits_that_touched_the_same_functions(history, repo):
    folder = repo.folder / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    plans = make_plan(repo.git, manifest, folder, "upstream")
    named = {touch.subject: set(touch.labels) for plan in plans for touch in plan.commits}
    expected: dict[str, set[str]] = {}
    for path, text in history.fork_files.items():
        if path in history.base.files:
            for name in history.fork.files[path]:
                assert f"def {name}" in text
                for line in history.base.files[path][name]:
                    if line.strip() in history.changed_upstream:
                        subject = subject_of(history, line.strip())
                        expected.setdefault(subject, set()).add(f"{path}: {name}")
    for subject, labels in expected.items():
        assert named.pop(subject) == labels
    assert set(named) <= {"move 60", "move 61", "dissolve 120", "reorder 140"}
    assert named["move 60"] == {"pkg/part02.py: work_2_1"}


def subject_of(history, line: str) -> str:
    for functions in history.upstream.files.values():
        for body in functions.values():
            for text in body:
                if text.strip().startswith(f"{line}  # upstream "):
                    return f"edit {text.rpartition(' ')[2]}"
    raise AssertionError(line)


def test_conflict_markers_parse_back():
    text = b"a\n<<<<<<< u\nx\n||||||| before both\ny\n=======\nz\n>>>>>>> f\nb\n"
    [conflict] = find_conflicts(text, SideLabels("u", "f"))
    assert (conflict.line, conflict.ours, conflict.base, conflict.theirs) == (
        2,
        b"x\n",
        b"y\n",
        b"z\n",
    )
