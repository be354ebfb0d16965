"""Port a fork of which upstream already has some commits."""

import pytest
from git_history import Repo, port_fork

from forkport.apply import start_apply


def agree(question: str) -> None:
    """Confirm every step."""


def lines(*changes: tuple[str, str], count: int = 40) -> str:
    """Return a text of `count` lines, some of them replaced."""
    text = "".join(f"value_{i} = {i}\n" for i in range(count))
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


A1 = ("value_10 = 10\n", "value_10 = 100\n")
A2 = ("value_10 = 100\n", "value_10 = 1000\nextra = 1\n")
B1 = ("value_20 = 20\n", "value_20 = 200\n")


@pytest.fixture
def port(repo):
    """Return a function that ports a fork's commits onto upstream's, given as lists of files.

    `base` are files that both sides start from.
    """

    def port(base, fork, upstream):
        repo.commits("main", [("start", base)], parent="main")
        for branch, steps in (("fork", fork), ("upstream", upstream)):
            commits = [(f"{branch} {n}", files) for n, files in enumerate(steps)]
            repo.commits(branch, commits, parent="main")
        repo.run("checkout", "--quiet", "fork")
        return port_fork(repo)

    return port


def verdicts(outcome) -> dict[str, str]:
    return {done.patch: done.verdict for done in outcome.state.done}


@pytest.mark.parametrize(
    ("fork", "upstream", "expected"),
    [
        pytest.param(
            [[A1], [A1, A2]], [[A1]], [A1, A2], id="the first commit, the second changes the same"
        ),
        pytest.param([[A1], [A1, A2]], [[A1, A2]], [A1, A2], id="both commits, squashed"),
        pytest.param(
            [[A1], [A1, B1], [A1, A2, B1]], [[B1], [A1, B1]], [A1, A2, B1], id="in another order"
        ),
        pytest.param(
            [[A1]],
            [[A1], [A1, ("value_10 = 100\n", "value_10 = 123\n")]],
            [A1, ("value_10 = 100\n", "value_10 = 123\n")],
            id="and then upstream went on",
        ),
        pytest.param(
            [[A1], [A1, A2], [A1, A2, B1]],
            [[A1], [A1, A2], [A1, A2, ("extra = 1\n", "extra = 2\n")]],
            [A1, A2, ("extra = 1\n", "extra = 2\n"), B1],
            id="and both sides went on",
        ),
        pytest.param([[A1]], [[A1], []], [A1], id="and reverted it: it is applied again"),
        pytest.param(
            [[A1, B1]], [[A1, B1], [A1]], [A1, B1], id="and reverted a part: it is applied again"
        ),
        pytest.param(
            [[A1]],
            [[("value_10 = 10\n", "value_10  =  100 \n")]],
            [("value_10 = 10\n", "value_10  =  100 \n")],
            id="with other whitespace",
        ),
        pytest.param(
            [[("value_10 = 10\n", "value_10 = 10\nnew = 1\nmore = 2\n")]],
            [[("value_10 = 10\n", "value_10 = 10\nnew = 1\n")]],
            [("value_10 = 10\n", "value_10 = 10\nnew = 1\nmore = 2\n")],
            id="the first of two new lines",
        ),
        pytest.param([[A1, B1]], [[A1]], [A1, B1], id="one of two hunks"),
    ],
)
@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved file"])
def test_what_upstream_took_is_not_merged_again(port, repo, fork, upstream, expected, moved):
    steps = [{"lib/a.py": lines(*step)} for step in upstream]
    if moved:
        steps.append({"lib/a.py": None, "core/deep/a.py": lines(*upstream[-1])})
    outcome = port({"lib/a.py": lines()}, [{"lib/a.py": lines(*step)} for step in fork], steps)
    assert outcome.state.finished, outcome.conflicts
    assert repo.show("port", "core/deep/a.py" if moved else "lib/a.py") == lines(*expected)


@pytest.mark.parametrize("text", ["value_10 = 77\n", "value_10  =  10\n"])
def test_reverted_and_then_changed_differently_is_a_conflict(port, text):
    other = ("value_10 = 10\n", text)
    outcome = port(
        {"a.py": lines()},
        [{"a.py": lines(A1)}],
        [{"a.py": lines(A1)}, {"a.py": lines()}, {"a.py": lines(other)}],
    )
    [file] = outcome.conflicts
    assert file.conflicts[0].theirs == b"value_10 = 100\n"


def test_reverted_with_other_whitespace_is_a_conflict(port):
    other = ("value_10 = 10\n", "value_10  =  10\n")
    outcome = port(
        {"a.py": lines()}, [{"a.py": lines(A1)}], [{"a.py": lines(A1)}, {"a.py": lines(other)}]
    )
    assert [file.path for file in outcome.conflicts] == ["a.py"]


def test_a_partly_reverted_change_of_neighbouring_lines_is_a_conflict(port):
    both = [A1, ("value_11 = 11\n", "value_11 = 111\n")]
    outcome = port(
        {"a.py": lines()}, [{"a.py": lines(*both)}], [{"a.py": lines(*both)}, {"a.py": lines(A1)}]
    )
    assert [file.path for file in outcome.conflicts] == ["a.py"]


def test_upstream_took_some_of_eight_patches_as_git_rebase_knows(port, repo):
    """Upstream took the first commit of each file, and the second of some; git rebase is clean."""
    paths = [f"part{i}/m.py" for i in range(8)]
    fork = [{path: lines(A1)} for path in paths] + [{path: lines(A1, A2)} for path in paths]
    upstream = [*fork[:11], {"unrelated.txt": "u\n"}]
    outcome = port({path: lines() for path in paths}, fork, upstream)
    assert outcome.state.finished
    assert [*verdicts(outcome).values()] == ["already upstream"] * 3 + ["applies"] * 5
    repo.run("checkout", "--quiet", "-B", "rebased", "fork")
    repo.run("rebase", "--quiet", "upstream")
    assert repo.run("rev-parse", "port^{tree}") == repo.run("rev-parse", "rebased^{tree}")


def test_a_new_file_that_upstream_took_and_moved_is_not_added_twice(port, repo):
    outcome = port(
        {},
        [{"tools/new.py": lines(A1)}],
        [{"tools/new.py": lines(A1)}, {"tools/new.py": None, "bin/new.py": lines(A1)}],
    )
    assert outcome.state.finished
    assert verdicts(outcome) == {"01-new": "already upstream"}
    assert "already upstream: tools/new.py (as bin/new.py)" in outcome.state.done[0].notes


def test_a_new_file_that_upstream_took_elsewhere_and_changed_is_a_conflict(port):
    outcome = port({}, [{"tools/new.py": lines(A1)}], [{"bin/new.py": lines(A1, B1)}])
    assert "bin/new.py" in outcome.conflicts[0].reason


def test_a_new_file_that_upstream_took_deleted_and_wrote_anew_is_a_conflict(port):
    other = lines().replace("value", "other")
    steps = [{"n.py": lines(A1)}, {"n.py": None}, {"n.py": other}]
    outcome = port({}, [{"n.py": lines(A1)}], steps)
    assert [file.path for file in outcome.conflicts] == ["n.py"]


def test_a_new_file_whose_first_version_upstream_took(port, repo):
    outcome = port(
        {}, [{"n.py": lines(A1)}, {"n.py": lines(A1, A2)}], [{"n.py": lines(A1)}, {"x.txt": "x\n"}]
    )
    assert outcome.state.finished
    assert repo.show("port", "n.py") == lines(A1, A2)


def test_a_binary_file_whose_first_version_upstream_took(port, repo):
    outcome = port({"d": b"\0base"}, [{"d": b"\0one"}, {"d": b"\0two"}], [{"d": b"\0one"}])
    assert outcome.state.finished
    assert repo.show("port", "d") == "\0two"


def test_upstream_took_a_rename_and_moved_the_file_further(port, repo):
    outcome = port(
        {"lib/a.py": lines()},
        [{"lib/a.py": None, "lib/b.py": lines()}, {"lib/b.py": lines(A1)}],
        [{"lib/a.py": None, "lib/b.py": lines()}, {"lib/b.py": None, "core/b.py": lines()}],
    )
    assert outcome.state.finished
    assert repo.show("port", "core/b.py") == lines(A1)


def test_the_fork_renamed_further_what_upstream_took(port, repo):
    outcome = port(
        {"lib/a.py": lines()},
        [{"lib/a.py": None, "lib/b.py": lines()}, {"lib/b.py": None, "lib/c.py": lines(A1)}],
        [{"lib/a.py": None, "lib/b.py": lines(B1)}],
    )
    assert outcome.state.finished
    assert repo.show("port", "lib/c.py") == lines(A1, B1)
    assert "lib/b.py" not in repo.git.list_tree("port")


def test_a_function_that_upstream_took_and_placed_elsewhere_is_not_defined_twice(port, module):
    new = "\n\ndef added():\n    return 'a'\n"
    outcome = port(
        {},
        [{"pkg/one.py": module.replace("\n\nclass Box", f"{new}\n\nclass Box")}],
        [{"pkg/one.py": module + new}],
    )
    [file] = outcome.conflicts
    assert file.reason == "`added` is defined twice: both sides added it"


def test_patches_work_without_the_forks_commits(port, repo, tmp_path):
    """The commits of the fork are not in every clone; then the user decides."""
    port({"a.py": lines()}, [{"a.py": lines(A1)}, {"a.py": lines(A1, A2)}], [{"a.py": lines(A1)}])
    clone = Repo(tmp_path / "other")
    clone.run("fetch", "--quiet", str(repo.folder), "upstream:upstream")
    clone.run("checkout", "--quiet", "upstream")
    outcome = start_apply(clone.git, repo.folder.parent / "patches", None, "port", "1", agree)
    [file] = outcome.conflicts
    assert "is not in this clone" in " ".join(file.notes)
