"""Merge single changes of a fork with single changes of upstream, case by case."""

import pytest
from git_history import Repo

from forkport.extract import extract
from forkport.plan import make_plan
from forkport.report import conflict_lines, plan_lines


@pytest.fixture
def planned(grow):
    """Return a function that plans a fork's changes, as one patch, on an upstream."""

    def plan(fork, upstream):
        repo = grow(fork, upstream)
        folder = repo.folder.parent / "patches"
        manifest = extract(repo.git, "fork", "upstream", folder, [("all", "*")])
        [one] = make_plan(repo.git, manifest, folder, "upstream")
        return one

    return plan


def content(repo, file) -> bytes:
    return repo.git.read_blob(file.entry.blob)


def test_changes_of_distant_lines_merge(planned, repo, module):
    one = planned(
        {"pkg/one.py": module.replace("a = 1", "a = 10")},
        {"pkg/one.py": module.replace("z = 3", "z = 30")},
    )
    assert one.verdict == "applies"
    [file] = one.files
    assert content(repo, file).decode() == module.replace("a = 1", "a = 10").replace(
        "z = 3", "z = 30"
    )
    assert file.notes == ()


def test_changes_of_the_same_line_conflict(planned, repo, module):
    one = planned(
        {"pkg/one.py": module.replace("b = 2", "b = 20")},
        {"pkg/one.py": module.replace("b = 2", "b = 200")},
    )
    assert one.verdict == "conflicts"
    [file] = one.files
    [conflict] = file.conflicts
    assert (conflict.base, conflict.ours, conflict.theirs) == (
        b"    b = 2\n",
        b"    b = 200\n",
        b"    b = 20\n",
    )
    lines = content(repo, file).decode().splitlines()
    assert lines[conflict.line - 1].startswith("<<<<<<< upstream ")
    assert [entry is not None for entry in file.stages] == [True, True, True]
    [touch] = one.commits
    assert (touch.subject, touch.labels) == ("upstream", ("pkg/one.py: first",))


def test_changes_of_neighbouring_lines_are_both_kept_with_a_note(planned, repo, module):
    one = planned(
        {"pkg/one.py": module.replace("b = 2", "b = 20")},
        {"pkg/one.py": module.replace("c = 3", "c = 30")},
    )
    assert one.verdict == "applies"
    [file] = one.files
    assert b"    b = 20\n    c = 30\n" in content(repo, file)
    assert file.notes == (
        "below 'b = 20' both sides changed neighbouring lines; both changes are kept",
    )


def test_two_insertions_at_one_place_conflict(planned, module):
    one = planned(
        {"pkg/one.py": module.replace("    b = 2\n", "    b = 2\n    fork = 1\n")},
        {"pkg/one.py": module.replace("    b = 2\n", "    b = 2\n    upstream = 1\n")},
    )
    assert one.verdict == "conflicts"
    assert one.files[0].conflicts[0].base == b""


def test_the_same_change_on_both_sides_needs_no_patch(planned, module):
    new = module.replace("b = 2", "b = 20")
    one = planned({"pkg/one.py": new}, {"pkg/one.py": new})
    assert (one.verdict, one.files) == ("already upstream", ())


def test_lines_equal_on_both_sides_stay_outside_the_markers(planned, repo, module):
    fork = module.replace("    b = 2\n", "    both = 1\n    fork = 1\n    tail = 1\n")
    upstream = module.replace("    b = 2\n", "    both = 1\n    up = 1\n    tail = 1\n")
    one = planned({"pkg/one.py": fork}, {"pkg/one.py": upstream})
    [conflict] = one.files[0].conflicts
    assert (conflict.ours, conflict.theirs) == (b"    up = 1\n", b"    fork = 1\n")
    text = content(repo, one.files[0])
    assert text.count(b"both = 1") == text.count(b"tail = 1") == 1


def test_markers_start_new_lines_after_an_unterminated_last_line(planned, repo):
    one = planned({"docs/guide.md": "fork"}, {"docs/guide.md": "upstream"})
    text = content(repo, one.files[0])
    assert b"upstream\n|||||||" in text
    assert b"fork\n>>>>>>>" in text


def test_a_renamed_file_is_followed(planned, module):
    one = planned(
        {"pkg/one.py": module.replace("a = 1", "a = 10")},
        {"pkg/one.py": None, "core/uno.py": module.replace("z = 3", "z = 30")},
    )
    assert one.verdict == "moved"
    [file] = one.files
    assert file.path == "core/uno.py"
    assert file.notes == ("pkg/one.py is core/uno.py upstream",)


def test_new_files_follow_their_renamed_folder(planned, module):
    two = '"""Two."""\n\n\ndef other():\n    return 2\n'
    one = planned(
        {"pkg/extra.py": "x = 1\n", "pkg/deep/er.py": "y = 1\n"},
        {"pkg/one.py": None, "pkg/two.py": None, "core/one.py": module, "core/two.py": two},
    )
    assert [file.path for file in one.files] == ["core/deep/er.py", "core/extra.py"]
    assert one.verdict == "moved"


@pytest.mark.parametrize("name", ["later", "Box2.open"])
def test_a_function_moved_to_another_file_is_followed(planned, repo, module, name):
    """A function alone, or a method with its class."""
    box = module[module.index("class Box") : module.index("def last")]
    function = module[module.index("def last") :]
    if name == "later":
        one = planned(
            {"pkg/one.py": module.replace("y = 2", "y = 20")},
            {
                "pkg/one.py": module.replace(function, ""),
                "pkg/two.py": f'"""Two."""\n\n\n{function.replace("z = 3", "z = 30")}',
            },
        )
        expected = b"    y = 20\n    z = 30\n"
    else:
        one = planned(
            {"pkg/one.py": module.replace('lid = "ajar"', 'lid = "half"')},
            {
                "pkg/one.py": module.replace(box, ""),
                "pkg/two.py": '"""Two."""\n\n\n' + box.replace('lid = "open"', 'lid = "wide"'),
            },
        )
        expected = b'        lid = "half"\n        lid = "wide"\n'
    assert one.verdict == "moved"
    [file] = one.files
    assert file.path == "pkg/two.py"
    assert expected in content(repo, file)
    assert "was moved from pkg/one.py" in file.notes[0]


def test_a_method_that_became_a_function_is_reindented(planned, repo, module):
    method = module[module.index("    def open") : module.index("    def close")]
    function = "".join(line[4:] or "\n" for line in method.splitlines(keepends=True))
    one = planned(
        {"pkg/one.py": module.replace('lid = "ajar"', 'lid = "half"')},
        {"pkg/one.py": module.replace(method, "") + f"\n\n{function.rstrip()}\n"},
    )
    assert one.verdict == "moved"
    assert b'    lid = "shut"\n    lid = "half"\n' in content(repo, one.files[0])
    assert "Box.open was moved within the file as open" in one.files[0].notes[0]


def test_a_moved_function_changed_by_both_sides_conflicts_at_its_new_place(planned, module):
    function = module[module.index("def last") :]
    one = planned(
        {"pkg/one.py": module.replace("y = 2", "y = 20")},
        {
            "pkg/one.py": module.replace(function, ""),
            "pkg/two.py": f'"""Two."""\n\n\n{function.replace("y = 2", "y = 30")}',
        },
    )
    assert one.verdict == "conflicts"
    [file] = one.files
    assert (file.path, len(file.conflicts)) == ("pkg/two.py", 1)


def test_a_change_of_a_deleted_file_conflicts(planned, module):
    one = planned({"pkg/one.py": module.replace("y = 2", "y = 20")}, {"pkg/one.py": None})
    [file] = one.files
    assert file.reason == "the fork changes it, upstream deleted it"
    assert file.stages[1] is None


def test_a_different_function_of_the_same_name_is_not_followed(planned, module):
    """Upstream deletes `last` and adds an unrelated `last` elsewhere."""
    function = module[module.index("def last") :]
    one = planned(
        {"pkg/one.py": module.replace("y = 2", "y = 20")},
        {
            "pkg/one.py": module.replace(function, ""),
            "pkg/two.py": "def last(values):\n    for v in values:\n        print(v)\n",
        },
    )
    assert one.verdict == "conflicts"
    assert [file.path for file in one.files] == ["pkg/one.py"]


def test_two_equally_similar_candidates_conflict(planned, module):
    function = module[module.index("def last") :]
    one = planned(
        {"pkg/one.py": module.replace("y = 2", "y = 20")},
        {
            "pkg/one.py": module.replace(function, ""),
            "pkg/two.py": function,
            "pkg/three.py": function,
        },
    )
    assert one.verdict == "conflicts"


def test_a_deletion_conflicts_only_with_a_change(planned, module):
    one = planned(
        {"pkg/two.py": None, "docs/guide.md": None, "data.bin": None},
        {"docs/guide.md": "rewritten\n", "data.bin": None},
    )
    found = {file.path: (file.entry, file.reason) for file in one.files}
    assert found["pkg/two.py"] == (None, "")
    assert found["docs/guide.md"][1] == "the fork deletes it, upstream changed it"
    assert "data.bin" not in found, "both deleted it"


def test_a_binary_change_is_taken_whole(planned, repo):
    one = planned({"data.bin": b"\0fork"}, {"pkg/two.py": "x = 1\n"})
    assert content(repo, one.files[0]) == b"\0fork"


def test_binary_files_changed_by_both_sides_conflict(planned):
    one = planned({"data.bin": b"\0fork"}, {"data.bin": b"\0upstream"})
    assert one.files[0].reason == "both sides changed it, and it has no lines to merge"


def test_a_new_file_of_both_sides_conflicts_unless_equal(planned):
    one = planned({"new.py": "a = 1\n", "same.py": "s\n"}, {"new.py": "a = 2\n", "same.py": "s\n"})
    assert [file.path for file in one.files] == ["new.py"]
    assert one.files[0].stages[0] is None


def test_upstreams_change_follows_the_forks_rename(planned, repo, module):
    one = planned(
        {"pkg/one.py": None, "pkg/uno.py": module.replace("a = 1", "a = 10")},
        {"pkg/one.py": module.replace("z = 3", "z = 30")},
    )
    files = {file.path: file for file in one.files}
    assert files["pkg/one.py"].entry is None
    text = content(repo, files["pkg/uno.py"]).decode()
    assert "a = 10" in text
    assert "z = 30" in text


def test_a_rename_onto_an_existing_file_conflicts(planned, module):
    one = planned(
        {"pkg/one.py": None, "pkg/uno.py": module},
        {"pkg/uno.py": "something = 'else'\n", "pkg/one.py": module + "# more\n"},
    )
    assert "upstream has another file here" in one.files[0].reason


def test_commits_touching_lines_outside_functions_are_found(planned, module):
    """The fork changes a line; upstream shifts it down and deletes it."""
    one = planned(
        {"docs/guide.md": "".join(f"line {i}\n" for i in range(20)).replace("line 9", "line IX")},
        {"docs/guide.md": "new\n" + "".join(f"line {i}\n" for i in range(20) if i != 9)},
    )
    [touch] = one.commits
    assert touch.labels == ("docs/guide.md: line 10",)


def test_a_plan_shows_notes_and_reasons(planned, module):
    one = planned(
        {"pkg/one.py": module.replace("a = 1", "a = 10"), "pkg/two.py": "changed = 1\n"},
        {"pkg/one.py": None, "pkg/uno.py": module, "pkg/two.py": None},
    )
    lines = [*plan_lines([one])]
    assert "  pkg/uno.py: pkg/one.py is pkg/uno.py upstream" in lines
    assert "  pkg/two.py: conflict: the fork changes it, upstream deleted it" in lines
    shown = [line for file in one.files for line in conflict_lines(file)]
    assert "pkg/two.py: the fork changes it, upstream deleted it" in shown


def test_long_sides_of_a_conflict_are_shortened(planned):
    fork, upstream = ("".join(f"{who} {i}\n" for i in range(50)) for who in ("fork", "upstream"))
    one = planned({"docs/guide.md": fork}, {"docs/guide.md": upstream})
    shown = [line for file in one.files for line in conflict_lines(file)]
    assert shown.count("    ... 10 more lines in the file") == 2


def test_changed_modes_and_links_are_applied(planned, repo):
    """The fork makes one file executable and turns another one into a link."""
    one = planned({"docs/guide.md": "fork\n"}, {"docs/guide.md": None})
    assert one.files[0].reason
    (repo.folder / "pkg/two.py").chmod(0o755)
    (repo.folder / "data.bin").unlink()
    (repo.folder / "data.bin").symlink_to("pkg/two.py")
    repo.run("commit", "--quiet", "--all", "--message=modes")
    folder = repo.folder.parent / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder, [("all", "*")])
    [plan] = make_plan(repo.git, manifest, folder, "upstream")
    modes = {file.path: file.entry.mode for file in plan.files if file.entry}
    assert modes["pkg/two.py"] == "100755"
    assert modes["data.bin"] == "120000"


def test_a_link_changed_by_both_sides_conflicts(planned, repo):
    for branch, target in (("main", "a"), ("fork", "b"), ("upstream", "c")):
        repo.run("checkout", "--quiet", "-B", branch, "main")
        (repo.folder / "link").unlink(missing_ok=True)
        (repo.folder / "link").symlink_to(target)
        repo.run("add", "link")
        repo.run("commit", "--quiet", "--message=link")
    folder = repo.folder.parent / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    [plan] = make_plan(repo.git, manifest, folder, "upstream")
    assert plan.files[0].reason == "both sides changed it, and it has no lines to merge"


def test_sha256_repositories_work(tmp_path, module):
    repo = Repo(tmp_path / "sha256", "--object-format=sha256")
    repo.commits("main", [("base", {"a.py": module, "b.txt": "b\n"})])
    repo.commits("fork", [("f", {"a.py": module + "#\n", "b.txt": None})], parent="main")
    repo.commits("upstream", [("u", {"c.py": "c\n"})], parent="main")
    folder = tmp_path / "patches"
    manifest = extract(repo.git, "fork", "upstream", folder)
    [plan] = make_plan(repo.git, manifest, folder, "upstream")
    assert plan.verdict == "applies"
    entries = {file.path: file.entry for file in plan.files}
    assert "b.txt" not in repo.git.list_tree(repo.git.write_changed_tree("upstream", entries))
