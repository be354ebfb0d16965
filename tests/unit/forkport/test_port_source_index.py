import pytest

from forkport.source_index import (
    flatten,
    reordered,
    innermost_definition,
    is_touched,
    similarity,
    reindent,
    parse_definitions,
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
def units():
    return parse_definitions("a.py", SOURCE)


def test_units_have_their_decorators_and_their_class(units):
    found = {name: (unit.start, unit.end) for name, unit in flatten(units).items()}
    assert found == {
        "one": (2, 6),
        "Two": (7, 17),
        "Two.three": (10, 13),
        "Two.three#2": (14, 17),
        "four": (19, 21),
    }
    assert flatten(units)["Two.three#2"].last_name == "three"


def test_the_innermost_unit(units):
    names = [unit.name if (unit := innermost_definition(units, line)) else None for line in (0, 4, 8, 11)]
    assert names == [None, "one", "Two", "Two.three"]


def test_a_class_is_touched_where_its_methods_are_not(units):
    two = flatten(units)["Two"]
    assert is_touched(two, 8, 9)
    assert not is_touched(two, 11, 12)
    assert is_touched(two, 9, 9), "an insertion between"
    assert not is_touched(two, 12, 12), "an insertion in a method"
    assert not is_touched(two, 17, 17), "an insertion behind"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a.md", SOURCE),
        ("a.py", b"def broken(:\n"),
        ("a.py", b"x = 1\rdef f(): pass\n"),
        ("a.py", b"x = '\0'\n"),
    ],
)
def test_what_cannot_be_read_has_no_units(path, content):
    assert parse_definitions(path, content) == ()


def test_upstreams_own_warnings_are_not_ours():
    assert parse_definitions("a.py", b"def f():\n    return '\\d'\n")


def test_the_fewest_that_moved():
    before = parse_definitions("a.py", b"".join(b"def f%d(): pass\n" % i for i in range(5)))
    after = flatten(parse_definitions("a.py", b"".join(b"def f%d(): pass\n" % i for i in (1, 2, 0, 3))))
    assert reordered(before, after) == {"f0"}


def test_likeness_ignores_indentation():
    assert similarity([b"  a\n", b"  b\n"], [b"a\n", b"\n", b"b\n"]) == 1.0
    assert similarity([b"a\n"], [b"b\n"]) == 0.0


def test_reindent_leaves_empty_lines_alone():
    assert reindent([b"def f():\n", b"\n", b"    x\n"], [b"    def g():\n"]) == [
        b"    def f():\n",
        b"\n",
        b"        x\n",
    ]
