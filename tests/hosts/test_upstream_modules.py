"""The runner of a host's own tests, with modules that pass, fail, hang and die; needs no host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from upstream_modules import FORK, FRESH

HERE = Path(__file__).parent
MODULE = """
import os, sys, time, unittest
hooked = getattr(sys, "hooked", False)
class Tests(unittest.TestCase):
    def test_a_passes(self):
        self.assertTrue(os.environ["HOME"].endswith("home"))
    def test_b_hooked(self):
        self.assertFalse(hooked)
    def test_c_parts(self):
        for number in range(3):
            with self.subTest(number):
                self.assertLess(number, {limit})
    @unittest.skip("a reason")
    def test_d_skipped(self): pass
    @unittest.expectedFailure
    def test_e_expected(self): self.fail()
    @unittest.expectedFailure
    def test_f_unexpected(self): {unexpected}
    def test_g_end(self): {end}
def test_h_function():
    assert not hooked
"""
SCRIPT = """
import sys
from pathlib import Path
here, folder, module, *rest = sys.argv[1:]
sys.path[:0] = [here, folder]
from upstream_modules import Runner, run_here
def hook(): sys.hooked = True
def fresh(module, records, hooks):
    words = [sys.executable, __file__, here, folder, module, str(records)]
    return [*words, "with" if hooks else "without"]
if len(rest) == 2:
    run_here(module, Path(rest[0]), hook if rest[1] == "with" else None)
else:
    runner = Runner(Path(folder), Path(folder, "logs"), hook, fresh)
    for hooks in (False, True):
        print(runner.run(module, hooks, rest[0], 5).line("s"))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tests").mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(way, end="pass", limit=3, unexpected="self.fail()"):
        text = MODULE.replace("{limit}", str(limit)).replace("{end}", end)
        file = tmp_path / "tests" / "test_it.py"
        file.write_text(text.replace("{unexpected}", unexpected))
        words = [sys.executable, str(script), str(HERE), str(tmp_path), "test_it", way]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def passed_letters(run) -> str:
    return "".join(sorted(name.split("test_")[-1][0] for name in run["passed"]))


@pytest.mark.parametrize("way", [FORK, FRESH])
def test_hooks_are_set_only_in_the_run_with_hooks(run, way):
    without, with_hooks = run(way)
    assert (without["ended"], without["hooks"], passed_letters(without)) == (
        "done",
        False,
        "abcefgh",
    )
    assert (with_hooks["ended"], with_hooks["hooks"], passed_letters(with_hooks)) == (
        "done",
        True,
        "acefg",
    )
    assert [*without["others"].values()] == ["skipped"]
    assert sorted(with_hooks["others"].values()) == ["failed", "failed", "skipped"]


def test_a_test_with_a_failed_subtest_has_not_passed(run):
    without, _ = run(FORK, limit=2, unexpected="pass", end="1 / 0")
    assert passed_letters(without) == "abeh"
    assert sorted(without["others"].values()) == ["error", "failed", "failed", "skipped"]


@pytest.mark.parametrize(
    ("end", "ended"), [("time.sleep(60)", "timed out"), ("os._exit(7)", "died (7)")]
)
def test_a_module_that_hangs_or_dies_reports_what_had_passed(run, end, ended):
    without, with_hooks = run(FORK, end=end)
    assert (without["ended"], passed_letters(without)) == (ended, "abcef")
    assert (with_hooks["ended"], passed_letters(with_hooks)) == (ended, "acef")
