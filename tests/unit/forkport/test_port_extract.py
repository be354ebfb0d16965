"""Extract patch sets: content, grouping, risk, and when extraction is refused."""

import json

import pytest

from forkport import ForkportError
from forkport.extract import count_churn, extract
from forkport.git import open_repository
from forkport.patches import ValidationCommands, read_manifest, read_patch


@pytest.fixture
def patches(repo):
    return repo.folder.parent / "patches"


def test_patches_rebuild_the_fork_exactly(grow, patches, module):
    """Covers modified, new, deleted, renamed and binary files, applied one patch after another."""
    repo = grow(
        {
            "pkg/one.py": None,
            "pkg/uno.py": module.replace("a = 1", "a = 10"),
            "data.bin": b"\0\xff\0",
            "pkg/two.py": None,
            "näme with space.txt": "no end of line",
        },
        {"up.txt": "up\n"},
    )
    manifest = extract(repo.git, "fork", "upstream", patches)
    tree = manifest.base
    for patch in manifest.patches:
        tree = repo.git.write_patched_tree(tree, read_patch(patches, patch))
    assert repo.git.list_tree(tree) == repo.git.list_tree("fork")
    files = {f.path: f for patch in manifest.patches for f in patch.files}
    assert (files["pkg/uno.py"].status, files["pkg/uno.py"].insertions) == ("R", 1)
    assert read_manifest(patches) == manifest
    page = (patches / "GH200_PATCH_MANIFEST.md").read_text()
    assert "| `pkg/uno.py` |" in page


def test_folders_that_change_upstream_files_come_first(grow, patches, module):
    repo = grow(
        {"a/new.py": "", "a/newer.py": "x\n", "pkg/one.py": module + "#\n", "docs/x.md": "x\n"},
        {"up.txt": "up\n"},
    )
    names = [patch.name for patch in extract(repo.git, "fork", "upstream", patches).patches]
    assert names == ["01-one", "02-a", "03-x-md"]


def test_the_user_can_group_files(grow, patches, module):
    repo = grow({"a/new.py": "x\n", "pkg/one.py": module + "#\n", "docs/x.md": "x\n"}, {"u": "u\n"})
    groups = [("Documents", "*.md"), ("code", "a")]
    manifest = extract(repo.git, "fork", "upstream", patches, groups)
    assert {p.name: [f.path for f in p.files] for p in manifest.patches} == {
        "01-documents": ["docs/x.md"],
        "02-code": ["a/new.py"],
        "03-one": ["pkg/one.py"],
    }
    with pytest.raises(ForkportError, match="--group nothing matches no changed file"):
        extract(repo.git, "fork", "upstream", patches, [("nothing", "*.rs")])


def test_risk_follows_upstreams_changes_of_the_same_files(repo, patches, module):
    guide = "".join(f"line {i}\n" for i in range(20))
    repo.commits(
        "fork",
        [
            (
                "fork",
                {
                    "pkg/one.py": module + "#\n",
                    "docs/guide.md": guide + "x\n",
                    "pkg/two.py": "x = 1\n",
                    "n/new.py": "n\n",
                },
            )
        ],
        parent="main",
    )
    steps = [(f"{i}", {"pkg/one.py": module + f"# {i}\n"}) for i in range(6)]
    steps.append(("rename", {"pkg/one.py": None, "core/one.py": module + "# 5\n"}))
    steps += [(f"{i}", {"core/one.py": module + f"# {i}\n"}) for i in range(6, 10)]
    steps.append(("guide", {"docs/guide.md": "first\n" + guide}))
    repo.commits("upstream", steps, parent="main")
    manifest = extract(repo.git, "fork", "upstream", patches)
    risks = {patch.name: (patch.risk, patch.why) for patch in manifest.patches}
    assert risks == {
        "01-guide-md": ("medium", "docs/guide.md: 1 upstream commits, 1 lines"),
        "02-pkg": ("high", "pkg/one.py: 11 upstream commits, 19 lines"),
        "03-new": ("low", "only new files"),
    }
    churn = count_churn(repo.git, manifest.base, "upstream")
    assert churn.commits["pkg/one.py"] == 11, "counted under the name that the base has"


def test_files_untouched_by_upstream_are_low_risk(grow, patches, module):
    repo = grow({"pkg/one.py": module + "#\n"}, {"u": "u\n"})
    [patch] = extract(repo.git, "fork", "upstream", patches).patches
    assert (patch.risk, patch.why) == ("low", "upstream left these files alone")


def test_hand_written_validation_commands_survive_another_extract(grow, patches, module):
    repo = grow({"pkg/one.py": module + "#\n"}, {"u": "u\n"})
    extract(repo.git, "fork", "upstream", patches)
    text = json.loads((patches / "manifest.json").read_text())
    text["validation"]["ours"] = ["true"]
    (patches / "manifest.json").write_text(json.dumps(text))
    assert extract(repo.git, "fork", "upstream", patches).validation.ours == ("true",)
    new = ValidationCommands(upstream=("false",))
    assert extract(repo.git, "fork", "upstream", patches, (), new).validation == new


def test_a_folder_that_is_not_a_patch_set_is_refused(grow, patches, module):
    repo = grow({"pkg/one.py": module + "#\n"}, {"u": "u\n"})
    patches.mkdir()
    (patches / "mine.txt").write_text("mine")
    with pytest.raises(ForkportError, match="is not a patch set"):
        extract(repo.git, "fork", "upstream", patches)
    assert (patches / "mine.txt").exists()


def test_the_users_git_settings_do_not_change_patches(grow, patches, module):
    repo = grow({"pkg/one.py": module + "#\n"}, {"u": "u\n"})
    plain = extract(repo.git, "fork", "upstream", patches)
    for key, value in {
        "diff.noprefix": "true",
        "diff.external": "/bin/false",
        "diff.interHunkContext": "50",
        "color.ui": "always",
        "log.showSignature": "true",
        "diff.renames": "false",
    }.items():
        repo.run("config", key, value)
    assert extract(repo.git, "fork", "upstream", patches).patches == plain.patches


@pytest.mark.parametrize(
    ("branch", "upstream", "message"),
    [
        ("nowhere", "upstream", "'nowhere' is not a commit"),
        ("fork", "origin/main", "'origin/main' is not a commit .* after `git fetch`"),
        ("upstream", "upstream", "has no changes that upstream does not have"),
    ],
)
def test_extraction_is_refused(grow, patches, module, branch, upstream, message):
    repo = grow({"pkg/one.py": module + "#\n"}, {"u": "u\n"})
    with pytest.raises(ForkportError, match=message):
        extract(repo.git, branch, upstream, patches)


def test_an_edited_or_missing_patch_is_refused(grow, patches, module):
    repo = grow({"pkg/one.py": module + "#\n"}, {"u": "u\n"})
    extract(repo.git, "fork", "upstream", patches)
    file = patches / "01-one.patch"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(ForkportError, match="was edited after it was extracted"):
        read_manifest(patches)
    file.unlink()
    with pytest.raises(ForkportError, match="cannot be read"):
        read_manifest(patches)


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"version": 2}', "version"), ("{", "the file"), ('{"surprise": 1}', "Field required")],
)
def test_an_invalid_manifest_is_refused(patches, text, message):
    with pytest.raises(ForkportError, match="Create the patches first"):
        read_manifest(patches)
    patches.mkdir()
    (patches / "manifest.json").write_text(text)
    with pytest.raises(ForkportError, match=message):
        read_manifest(patches)


def test_a_folder_without_git_is_refused(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    (tmp_path / "plain").mkdir()
    with pytest.raises(ForkportError, match="not in a git working tree"):
        open_repository(tmp_path / "plain", environment)
    with pytest.raises(ForkportError, match="is not a folder"):
        open_repository(tmp_path / "absent", environment)
    with pytest.raises(ForkportError, match="`git` is not installed"):
        open_repository(tmp_path / "plain", {"PATH": str(tmp_path)})


def test_histories_without_a_common_commit_are_refused(repo, patches):
    repo.commits("stranger", [("other", {"x": "x\n"})])
    with pytest.raises(ForkportError, match=r"have no commit in common .* git fetch --unshallow"):
        extract(repo.git, "stranger", "main", patches)
