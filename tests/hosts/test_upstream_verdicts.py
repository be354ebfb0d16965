"""What is concluded from runs of a host's tests, and which of them are run again."""

import pytest
from run_upstream_suite import PATIENCE, TRIES, Book, judge, report, settle
from upstream_modules import FORK, FRESH, TIMED_OUT, Ran


class Scripted:
    """Gives runs as they were written down, by way and hooks: the names of what passes.

    One that is empty does not end.
    """

    def __init__(self, **passed: list[str]) -> None:
        self.passed = {name: [*texts] for name, texts in passed.items()}
        self.asked: list[str] = []
        self.limits: list[float] = []

    def run(self, module, hooks, way, limit_s) -> Ran:
        self.limits.append(limit_s)
        name = f"{way}_{'with' if hooks else 'without'}"
        self.asked.append(name)
        text = self.passed[name].pop(0)
        others = {each: "failed" for each in "abc" if each not in text}
        ended = "done" if text else TIMED_OUT
        return Ran(module, hooks, way, ended, 1.0, tuple(text), others)


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path / "results.jsonl", "now")


def verdict(book, runner):
    settle("m", book, runner)
    return judge("m", book)


def test_what_passes_both_ways_is_run_once_each(book):
    runner = Scripted(fork_without=["abc"], fork_with=["abc"])
    found = verdict(book, runner)
    assert (found.kind, found.num_passed) == ("passed", 3)
    assert runner.asked == ["fork_without", "fork_with"]


def test_what_fails_on_its_own_has_a_fresh_process_to_do_better(book):
    runner = Scripted(fork_without=["ab"], fork_with=["ab"], fresh_without=["ab"])
    found = verdict(book, runner)
    assert (found.kind, found.detail) == ("same", "1 failed")
    assert runner.asked[-1] == f"{FRESH}_without"


def test_the_way_in_which_more_passes_counts(book):
    runner = Scripted(
        fork_without=["a"], fork_with=["a"], fresh_without=["abc"] * 2, fresh_with=["ab"] * 2
    )
    found = verdict(book, runner)
    assert (found.kind, found.num_passed, found.detail) == ("worse", 3, "c")


def test_a_loss_must_repeat_itself_to_count(book):
    unlucky = Scripted(fork_without=["abc"] * 2, fork_with=["ab", "abc"])
    assert verdict(book, unlucky).kind == "unsteady"


def test_a_test_that_stock_does_not_always_pass_is_not_held_against_hooks(book):
    unlucky = Scripted(fork_without=["abc", "ab"], fork_with=["ab", "ab"])
    assert verdict(book, unlucky).kind == "unsteady"


def test_a_loss_that_repeats_itself_is_one(book):
    found = verdict(book, Scripted(fork_without=["abc"] * 2, fork_with=["ab"] * 2))
    assert (found.kind, found.detail) == ("worse", "c")
    assert report([found])[-1].split()[0] == "1"


def test_results_are_kept_until_the_hooks_change(book):
    settle("m", book, Scripted(fork_without=["abc"], fork_with=["abc"]))
    same, other = Book(book.path, "now"), Book(book.path, "later")
    for each in (same, other):
        each.read()
    idle, again = Scripted(), Scripted(fork_with=["abc"])
    settle("m", same, idle)
    settle("m", other, again)
    assert (idle.asked, again.asked) == ([], [f"{FORK}_with"])


def test_what_hangs_has_another_try_with_more_time(book):
    runner = Scripted(fork_without=["abc"], fork_with=["", "", "abc"])
    assert verdict(book, runner).kind == "passed"
    assert runner.limits == [300, 300, 600, 1200]
    assert [each.ended for each in book.runs] == ["done", "done"]


def test_what_never_ends_with_hooks_is_worse(book):
    runner = Scripted(fork_without=["abc"] * 2, fork_with=[""] * 2 * TRIES)
    assert verdict(book, runner).kind == "worse"


def test_what_timed_out_is_not_believed_where_there_is_more_time_now(book):
    book.add(Ran("m", False, FORK, TIMED_OUT, 1200.2))
    for least_s, num_kept in ((300, 1), (400, 0)):
        again = Book(book.path, "now", least_s)
        again.read()
        assert len(again.runs) == num_kept


def test_a_slow_module_has_as_much_time_as_it_is_known_to_need(book):
    assert book.limit_s("m") == 300
    for seconds in (200.0, 500.0):
        book.add(Ran("m", False, FORK, "done", seconds))
    book.add(Ran("m", True, FORK, "died (-9)", 1.0))
    book.add(Ran("other", False, FORK, "done", 5000.0))
    assert book.limit_s("m") == PATIENCE * 200
