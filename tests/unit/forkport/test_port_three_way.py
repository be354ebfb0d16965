"""Properties of the three-way merge that hold for any texts."""

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
def test_a_change_of_one_side_is_taken_as_it_is(base, changed):
    assert merge(base, changed, base).content == b"".join(changed)
    assert merge(base, base, changed).content == b"".join(changed)
    both = merge(base, changed, changed)
    assert (both.content, both.conflicts) == (b"".join(changed), ())


@given(TEXTS, TEXTS, TEXTS)
def test_swapping_sides_mirrors_conflicts_and_markers_parse_back(base, ours, theirs):
    one, other = merge(base, ours, theirs), merge(base, theirs, ours)
    assert [(c.ours, c.theirs) for c in one.conflicts] == [
        (c.theirs, c.ours) for c in other.conflicts
    ]
    if not one.conflicts and not one.whitespace_changes:
        assert one.content == other.content
    assert find_conflicts(one.content, LABELS) == one.conflicts
    assert bool(find_markers(one.content, LABELS)) == bool(one.conflicts)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        (b"x=2 \n", b"x = 2\n", True),
        (b"\tx = 2\n", b"    x = 2\n", True),
        (b"x = 2\r\n", b"x = 2\n", True),
        (b"x = 2\n\n", b"x = 2\n", True),
        (b"    x = 2\n", b"        x = 2\n", False),
        (b"x = 'a b'\n", b"x = 'ab'\n", False),
    ],
)
def test_the_same_change_with_other_whitespace_is_made_once(ours, theirs, is_same):
    merged = merge([b"x = 1\n"], split_lines(ours), split_lines(theirs))
    assert bool(merged.conflicts) != is_same
    if is_same:
        assert merged.content == ours
        assert merged.whitespace_changes


@given(TEXTS, TEXTS, TEXTS)
def test_resolving_conflicts_for_one_side_keeps_all_of_its_lines(base, ours, theirs):
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
def test_an_unterminated_last_line_is_terminated_before_added_lines(swapped):
    base, shorter, longer = [b"a\n", b"b\n"], [b"a\n", b"b"], [b"a\n", b"b\n", b"c\n"]
    merged = merge(base, longer, shorter) if swapped else merge(base, shorter, longer)
    assert (merged.content, merged.conflicts) == (b"a\nb\nc\n", ())


@given(st.binary(max_size=40))
def test_only_line_feeds_split_lines(content):
    lines = split_lines(content)
    assert b"".join(lines) == content
    assert all(line.endswith(b"\n") for line in lines[:-1])
    assert all(b"\n" not in line[:-1] for line in lines)
