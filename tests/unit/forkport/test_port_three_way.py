"""What must hold of any merge, whatever the texts."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkport.git import Hunk
from forkport.three_way import SideLabels, find_conflicts, find_markers, merge_lines, split_lines

LABELS = SideLabels("up", "fork")
TEXTS = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"d\n", b"\n"]), max_size=12)


def hunks(old, new):
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [Hunk(i, j, k, m) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


def merge(base, ours, theirs):
    return merge_lines(base, (ours, hunks(base, ours)), (theirs, hunks(base, theirs)), LABELS)


@given(TEXTS, TEXTS)
def test_one_side_alone_is_taken_as_it_is(base, changed):
    assert merge(base, changed, base).content == b"".join(changed)
    assert merge(base, base, changed).content == b"".join(changed)
    both = merge(base, changed, changed)
    assert (both.content, both.conflicts) == (b"".join(changed), ())


@given(TEXTS, TEXTS, TEXTS)
def test_sides_are_equals_and_conflicts_read_back(base, ours, theirs):
    one, other = merge(base, ours, theirs), merge(base, theirs, ours)
    assert [(c.ours, c.theirs) for c in one.conflicts] == [
        (c.theirs, c.ours) for c in other.conflicts
    ]
    if not one.conflicts:
        assert one.content == other.content
    assert find_conflicts(one.content, LABELS) == one.conflicts
    assert bool(find_markers(one.content, LABELS)) == bool(one.conflicts)


@given(TEXTS, TEXTS, TEXTS)
def test_settling_every_conflict_for_one_side_keeps_all_of_its_lines(base, ours, theirs):
    """What upstream added is there whichever way conflicts are settled for it."""
    merged = merge(base, ours, theirs)
    lines, kept, inside = split_lines(merged.content), [], False
    for line in lines:
        if line == b"<<<<<<< up\n":
            inside = False
        elif line == b"||||||| before both\n":
            inside = True
        elif line == b">>>>>>> fork\n":
            inside = False
        elif not inside:
            kept.append(line)
    added = [line for h in hunks(base, ours) for line in ours[h.new_start : h.new_end]]
    for line in set(added):
        assert kept.count(line) >= added.count(line)


@pytest.mark.parametrize("swapped", [False, True])
def test_what_follows_a_last_line_without_an_end_is_a_line_of_its_own(swapped):
    base, shorter, longer = [b"a\n", b"b\n"], [b"a\n", b"b"], [b"a\n", b"b\n", b"c\n"]
    merged = merge(base, longer, shorter) if swapped else merge(base, shorter, longer)
    assert (merged.content, merged.conflicts) == (b"a\nb\nc\n", ())


@given(st.binary(max_size=40))
def test_lines_are_gits(content):
    lines = split_lines(content)
    assert b"".join(lines) == content
    assert all(line.endswith(b"\n") for line in lines[:-1])
    assert all(b"\n" not in line[:-1] for line in lines)
