"""Renames and moves of both sides: no change of the fork is lost, and every import resolves."""

import pytest
from git_history import port_fork

from forkport.apply import continue_apply, start_apply
from forkport.extract import extract

USER = "from pkg.one import first\n\nprint(first())\n"
RENAMED_USER = USER.replace("pkg.one", "pkg.uno")
TWO = '"""Two."""\n\n\ndef other():\n    return 2\n'


def agree(question: str) -> None:
    """Confirm every step."""


@pytest.fixture
def port(grow):
    """Return a function that ports a fork's files onto upstream's and checks the plan."""

    def port(fork, upstream):
        repo = grow(fork, upstream)
        return port_fork(repo)

    return port


def split(module: str) -> tuple[str, str, str]:
    """Return the parts of the module for a split into three files with other code."""
    box, last = module.index("class Box"), module.index("def last")
    other = "".join(f"other_{i} = {i}\n" for i in range(40))
    return module[:box] + other, module[box:last] + other, module[last:] + other


def moved_folder(module: str) -> dict[str, str | None]:
    """Return upstream's move of `pkg` to `core`."""
    return {"pkg/one.py": None, "core/one.py": module, "pkg/two.py": None, "core/two.py": TWO}


@pytest.mark.parametrize("edit", [False, True], ids=["renamed", "renamed and edited"])
@pytest.mark.parametrize(
    ("upstream", "reason"),
    [
        ("folder", "the fork renames pkg/one.py to pkg/uno.py, upstream to core/one.py"),
        ("file", "the fork renames pkg/one.py to pkg/uno.py, upstream to pkg/eins.py"),
        ("deleted", "the fork renames pkg/one.py to this name, upstream deleted it"),
        ("split", "the fork renames pkg/one.py to this name, upstream deleted it"),
    ],
)
def test_a_file_that_both_sides_rename_or_remove_is_a_conflict(
    port, module, edit, upstream, reason
):
    first, box, last = split(module)
    changes = {
        "folder": moved_folder(module),
        "file": {"pkg/one.py": None, "pkg/eins.py": module},
        "deleted": {"pkg/one.py": None},
        "split": {"pkg/one.py": None, "pkg/f.py": first, "pkg/b.py": box, "pkg/l.py": last},
    }[upstream]
    fork = module.replace("a = 1", "a = 10") if edit else module
    outcome = port({"pkg/one.py": None, "pkg/uno.py": fork, "use.py": RENAMED_USER}, changes)
    reasons = [file.reason for file in outcome.conflicts]
    assert any(each.startswith(reason) for each in reasons), reasons


def test_a_renaming_conflict_can_be_resolved(port, repo, module):
    port(
        {"pkg/one.py": None, "pkg/uno.py": module, "use.py": RENAMED_USER},
        moved_folder(module),
    )
    repo.run("add", "core/one.py")
    repo.run("mv", "core/one.py", "core/uno.py")
    outcome = continue_apply(repo.git)
    assert [file.path for file in outcome.conflicts] == ["use.py"]
    assert outcome.conflicts[0].reason == "imports pkg.uno, which the result does not have"
    (repo.folder / "use.py").write_text(USER.replace("pkg.one", "core.uno"))
    repo.run("add", "use.py")
    assert continue_apply(repo.git).state.finished
    assert repo.show("port", "use.py").startswith("from core.uno")


def test_the_same_rename_on_both_sides_is_no_conflict(port, repo, module):
    outcome = port(
        {"pkg/one.py": None, "pkg/uno.py": module.replace("a = 1", "a = 10")},
        {"pkg/one.py": None, "pkg/uno.py": module.replace("z = 3", "z = 30")},
    )
    assert outcome.state.finished
    assert "a = 10" in repo.show("port", "pkg/uno.py")


@pytest.mark.parametrize("new", ["pkg/One.py", "pkg/ONE.py"])
def test_a_rename_of_case_only_is_applied(port, repo, module, new):
    outcome = port(
        {"pkg/one.py": None, new: module}, {"pkg/one.py": module.replace("z = 3", "z = 30")}
    )
    assert outcome.state.finished
    tree = repo.git.list_tree("port")
    assert new in tree
    assert "pkg/one.py" not in tree
    assert "z = 30" in repo.show("port", new)


def test_a_mode_change_follows_a_rename(port, repo, module):
    repo.commits("fork", [("x", {"pkg/one.py": None, "pkg/uno.py": module})], parent="main")
    repo.run("checkout", "--quiet", "fork")
    (repo.folder / "pkg/uno.py").chmod(0o755)
    repo.run("commit", "--quiet", "--all", "--amend", "--message=mode")
    repo.commits("upstream", [("u", {"pkg/one.py": module + "# u\n"})], parent="main")
    folder = repo.folder.parent / "patches"
    extract(repo.git, "fork", "upstream", folder)
    assert start_apply(repo.git, folder, None, "port", "1", agree).state.finished
    entry = repo.git.list_tree("port")["pkg/uno.py"]
    assert entry.mode == "100755"
    assert repo.git.read_blob(entry.blob).endswith(b"# u\n")


@pytest.mark.parametrize("upstream", ["deleted", "link", "same new file"])
def test_a_lost_mode_change_is_a_conflict(repo, module, upstream):
    """The fork only makes a file executable; upstream deletes it or makes it a link."""
    path = "run.sh" if upstream == "same new file" else "pkg/one.py"
    repo.run("checkout", "--quiet", "-b", "fork", "main")
    (repo.folder / path).write_text(module)
    (repo.folder / path).chmod(0o755)
    repo.run("add", path)
    repo.run("commit", "--quiet", "--all", "--message=mode")
    repo.run("checkout", "--quiet", "-b", "upstream", "main")
    (repo.folder / path).unlink(missing_ok=True)
    if upstream == "link":
        (repo.folder / path).symlink_to("two.py")
    elif upstream == "same new file":
        (repo.folder / path).write_text(module)
    repo.run("add", "--all", ".")
    repo.run("commit", "--quiet", "--message=upstream")
    repo.run("checkout", "--quiet", "fork")
    folder = repo.folder.parent / "patches"
    extract(repo.git, "fork", "upstream", folder)
    outcome = start_apply(repo.git, folder, None, "port", "1", agree)
    assert [file.path for file in outcome.conflicts] == [path]


def test_a_deletion_follows_a_moved_file(port, repo, module):
    outcome = port({"pkg/two.py": None}, moved_folder(module))
    assert outcome.state.finished
    assert "core/two.py" not in repo.git.list_tree("port")


def test_a_deletion_of_a_file_that_upstream_moved_and_changed_is_a_conflict(port, module):
    outcome = port(
        {"pkg/one.py": None},
        {"pkg/one.py": None, "core/one.py": module.replace("z = 3", "z = 30")},
    )
    assert outcome.conflicts[0].reason == "the fork deletes it, upstream changed it"


@pytest.mark.parametrize("whole", [True, False], ids=["file", "function"])
def test_deleting_a_function_that_upstream_moved_is_a_conflict(port, module, whole):
    first, box, last = split(module)
    if whole:
        fork, upstream = {"pkg/one.py": None}, {"pkg/one.py": None, "f.py": first, "b.py": box}
    else:
        rest = module[: module.index("def last")]
        fork, upstream = {"pkg/one.py": rest}, {"pkg/one.py": rest}
    outcome = port(fork, {**upstream, "pkg/t.py": last})
    reasons = {file.path: file.reason for file in outcome.conflicts}
    assert reasons["pkg/t.py"] == "the fork deletes `last`, upstream moved it to pkg/t.py"
    assert len(reasons) == (3 if whole else 1)


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute import", "relative import"])
def test_a_new_file_in_a_moved_folder_moves_and_its_imports_are_checked(
    port, repo, module, absolute
):
    text = "from pkg.one import first\n" if absolute else "from .one import first\n"
    outcome = port({"pkg/extra.py": text}, moved_folder(module))
    if absolute:
        [file] = outcome.conflicts
        assert (file.path, file.reason) == (
            "core/extra.py",
            "imports pkg.one, which the result does not have",
        )
    else:
        assert outcome.state.finished
        assert repo.show("port", "core/extra.py") == text


def test_a_folder_that_both_sides_rename_is_a_conflict(port, module):
    lib = {"pkg/one.py": None, "lib/one.py": module, "pkg/two.py": None, "lib/two.py": TWO}
    outcome = port(lib, moved_folder(module))
    assert {file.path for file in outcome.conflicts} == {"core/one.py", "core/two.py"}


def test_a_file_that_upstream_adds_to_a_folder_that_the_fork_renames_is_a_conflict(port, module):
    lib = {"pkg/one.py": None, "lib/one.py": module, "pkg/two.py": None, "lib/two.py": TWO}
    outcome = port(lib, {"pkg/three.py": "three = 3\n"})
    [file] = outcome.conflicts
    assert file.path == "pkg/three.py"
    assert file.reason == "upstream adds it to pkg, which the fork renames to lib"


def test_a_new_file_in_a_folder_that_upstream_split_in_halves_is_a_conflict(port, module):
    outcome = port(
        {"pkg/extra.py": "x = 1\n"},
        {"pkg/one.py": None, "left/one.py": module, "pkg/two.py": None, "right/two.py": TWO},
    )
    assert "left" in outcome.conflicts[0].reason
    assert "right" in outcome.conflicts[0].reason


# Imports


@pytest.mark.parametrize(
    ("user", "missing"),
    [
        ("from pkg.uno import first\n", "pkg.uno"),
        ("import pkg.uno\n", "pkg.uno"),
        ("from pkg import uno\n", "pkg"),
        ("def f():\n    from pkg import uno as u\n    return u\n", "pkg"),
        ("import importlib\nimportlib.import_module('pkg.uno')\n", "pkg.uno"),
    ],
)
def test_imports_of_a_module_that_ends_up_elsewhere_are_conflicts(port, module, user, missing):
    """The fork adds pkg/uno.py and uses it; upstream moves the folder."""
    outcome = port({"pkg/uno.py": "def first(): ...\n", "use.py": user}, moved_folder(module))
    reasons = {file.path: file.reason for file in outcome.conflicts}
    assert reasons == {"use.py": f"imports {missing}, which the result does not have"}


def test_upstreams_new_import_of_a_file_that_the_fork_renames_is_a_conflict(port, module):
    outcome = port(
        {"pkg/one.py": None, "pkg/uno.py": module},
        {"tool/new.py": "from pkg.one import first\n"},
    )
    [file] = outcome.conflicts
    assert (file.path, file.reason) == (
        "tool/new.py",
        "imports pkg.one, which the result does not have",
    )


def test_a_fork_that_imports_a_module_that_upstream_deleted_is_a_conflict(port):
    outcome = port({"extra/new.py": "from pkg.two import other\n"}, {"pkg/two.py": None})
    assert [file.path for file in outcome.conflicts] == ["extra/new.py"]


def test_a_fork_that_imports_a_function_that_upstream_deleted_is_a_conflict(port, module):
    function = module[module.index("def last") :]
    outcome = port(
        {"extra/new.py": "from pkg.one import last\n"},
        {"pkg/one.py": module.replace(function, "")},
    )
    [file] = outcome.conflicts
    assert file.reason == "imports last from pkg.one, which the result does not have"


def test_a_missing_import_can_be_accepted_with_git_add(port, repo):
    port({"extra/new.py": "from pkg.two import other\n"}, {"pkg/two.py": None})
    repo.run("add", "extra/new.py")
    outcome = continue_apply(repo.git)
    assert outcome.state.finished
    assert outcome.state.done[-1].by_hand == ("extra/new.py",)


def test_imports_that_never_resolved_and_other_packages_are_not_reported(port, module):
    outcome = port(
        {"pkg/one.py": "import numpy\nimport logging\nfrom .gone import x\n" + module},
        {"docs/guide.md": "new\n", "pkg/two.py": "import nowhere.at.all\n" + TWO},
    )
    assert outcome.state.finished
