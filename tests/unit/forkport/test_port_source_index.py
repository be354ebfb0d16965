"""Find definitions in Python files, and compare them."""

import pytest

from forkport.source_index import (
    flatten,
    innermost_definition,
    is_touched,
    parse_definitions,
    reindent,
    reordered,
    similarity,
)

SOURCE = b"""\
import x

@cache
def one():
    def inner():
        pass

class Two:
    size = 1

    @property
    def three(self):
        return 3

    @three.setter
    def three(self, value):
        pass

if x:
    async def four():
        pass
"""


@pytest.fixture
def definitions():
    return parse_definitions("a.py", SOURCE)


def test_definitions_include_decorators_and_are_named_by_class(definitions):
    found = {
        name: (definition.start, definition.end)
        for name, definition in flatten(definitions).items()
    }
    assert found == {
        "one": (2, 6),
        "Two": (7, 17),
        "Two.three": (10, 13),
        "Two.three#2": (14, 17),
        "four": (19, 21),
    }
    assert flatten(definitions)["Two.three#2"].last_name == "three"


def test_the_innermost_definition_around_a_line(definitions):
    names = [
        found.name if (found := innermost_definition(definitions, line)) else None
        for line in (0, 4, 8, 11)
    ]
    assert names == [None, "one", "Two", "Two.three"]


def test_a_change_in_a_method_does_not_touch_its_class(definitions):
    two = flatten(definitions)["Two"]
    assert is_touched(two, 8, 9)
    assert not is_touched(two, 11, 12)
    assert is_touched(two, 9, 9), "an insertion between methods"
    assert not is_touched(two, 12, 12), "an insertion in a method"
    assert not is_touched(two, 17, 17), "an insertion after the class"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.md", SOURCE),
        ("a.py", b"def broken(:\n"),
        ("a.py", b"x = 1\rdef f(): pass\n"),
        ("a.py", b"x = '\0'\n"),
    ],
)
def test_unreadable_files_have_no_definitions(path, content):
    assert parse_definitions(path, content) == ()


def test_syntax_warnings_of_upstream_are_ignored():
    assert parse_definitions("a.py", b"def f():\n    return '\\d'\n")


def test_reordered_returns_the_fewest_moves():
    before = parse_definitions("a.py", b"".join(b"def f%d(): pass\n" % i for i in range(5)))
    after = flatten(
        parse_definitions("a.py", b"".join(b"def f%d(): pass\n" % i for i in (1, 2, 0, 3)))
    )
    assert reordered(before, after) == {"f0"}


def test_similarity_ignores_indentation():
    assert similarity([b"  a\n", b"  b\n"], [b"a\n", b"\n", b"b\n"]) == 1.0
    assert similarity([b"a\n"], [b"b\n"]) == 0.0


def test_reindent_leaves_empty_lines_alone():
    assert reindent([b"def f():\n", b"\n", b"    x\n"], [b"    def g():\n"]) == [
        b"    def f():\n",
        b"\n",
        b"        x\n",
    ]
