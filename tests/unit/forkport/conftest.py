"""A small repository with a base commit; tests add a fork branch and an upstream branch."""

import pytest
from git_history import Repo

MODULE = '''"""A module."""

import os


def first():
    a = 1
    b = 2
    c = 3
    return a + b + c


class Box:
    size = 1

    def open(self):
        lid = "shut"
        lid = "ajar"
        lid = "open"
        return lid

    def close(self):
        return os.name


def last():
    x = 1
    y = 2
    z = 3
    return x * y * z
'''


@pytest.fixture
def module() -> str:
    return MODULE


@pytest.fixture
def repo(tmp_path) -> Repo:
    """A repository whose `main` branch is the base of fork and upstream."""
    repo = Repo(tmp_path / "clone")
    files = {
        "pkg/one.py": MODULE,
        "pkg/two.py": '"""Two."""\n\n\ndef other():\n    return 2\n',
        "docs/guide.md": "".join(f"line {i}\n" for i in range(20)),
        "data.bin": b"\0\1\2\3" * 10,
    }
    repo.commits("main", [("base", files)])
    return repo


@pytest.fixture
def grow(repo):
    """Return a function that commits changes to `fork` and `upstream` and checks out `fork`."""

    def grow(fork, upstream) -> Repo:
        repo.commits("fork", [("the fork", fork)], parent="main")
        repo.commits("upstream", [("upstream", upstream)], parent="main")
        repo.run("checkout", "--quiet", "fork")
        return repo

    return grow
