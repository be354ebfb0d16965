"""A small fork and its upstream, which a test changes as it likes."""

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
    """`main` is the base; `fork` and `upstream` are for a test to grow from it."""
    made = Repo(tmp_path / "clone")
    files = {
        "pkg/one.py": MODULE,
        "pkg/two.py": '"""Two."""\n\n\ndef other():\n    return 2\n',
        "docs/guide.md": "".join(f"line {i}\n" for i in range(20)),
        "data.bin": b"\0\1\2\3" * 10,
    }
    made.commits("main", [("base", files)])
    return made


@pytest.fixture
def grow(repo):
    """Give the fork and upstream their changes, and stand on the fork."""

    def grow(fork, upstream) -> Repo:
        repo.commits("fork", [("the fork", fork)], parent="main")
        repo.commits("upstream", [("upstream", upstream)], parent="main")
        repo.run("checkout", "--quiet", "fork")
        return repo

    return grow
