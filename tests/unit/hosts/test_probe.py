"""Probe small hand-written hosts, with and without problems."""

from pathlib import Path

import pytest

from gracetune.errors import HostError
from gracetune.hosts.probe import (
    InstalledHost,
    RequiredSymbol,
    UsageSite,
    find_installed,
    format_probe,
    probe,
)

SOURCE = """
from elsewhere import borrowed
import a.b as c

try:
    import fast
except ImportError:
    fast = None
LIMIT: int = 3


class Trainer:
    def __init__(self, config=None, *, device="cpu"):
        pass

    def train(self):
        with self.accelerator.accumulate(self.model):
            self.step(self.batch)

    def step(self, batch, *, scale=1.0):
        pass


@dataclass
class Field:
    name: str
    choices: list = field(default_factory=list)


async def later(first, second=None, **rest):
    pass
"""


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    (tmp_path / "pkg/deep/__init__.py").write_text("x = 1\n")
    (tmp_path / "pkg/mod.py").write_text(SOURCE)
    return tmp_path


def find_problem(root: Path, **fields) -> str:
    [found] = probe(root, [RequiredSymbol(**{"module": "pkg.mod", "purpose": "a test", **fields})])
    assert found.ok == (not found.problem)
    return found.problem


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "borrowed"},
        {"name": "c"},
        {"name": "fast"},
        {"name": "LIMIT"},
        {"name": "Trainer", "accepted_parameters": ("config", "device")},
        {
            "name": "Trainer.step",
            "leading_parameters": ("batch",),
            "accepted_parameters": ("scale",),
        },
        {"name": "later", "leading_parameters": ("first",), "accepted_parameters": ("anything",)},
        {"name": "Field", "accepted_parameters": ("name", "choices")},
        {"module": "pkg.deep", "name": "x"},
        {
            "name": "Trainer",
            "usage_sites": (UsageSite("pkg.mod", "Trainer.train", "self.step(self.batch)"),),
        },
        {
            "name": "Trainer",
            "usage_sites": (UsageSite("pkg.mod", "", "self.accelerator.accumulate"),),
        },
    ],
)
def test_symbols_that_fit(root, fields):
    assert find_problem(root, **fields) == ""


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"module": "pkg.gone", "name": "x"}, "there is no module pkg.gone"),
        ({"name": "Trainer.fit"}, "pkg.mod has no Trainer.fit"),
        (
            {"name": "LIMIT", "leading_parameters": ("x",)},
            "LIMIT is not a function or a class any more",
        ),
        (
            {"name": "Trainer.step", "leading_parameters": ("batch", "scale")},
            "the signature is Trainer.step(batch); it should begin with (batch, scale)",
        ),
        (
            {
                "name": "Trainer.step",
                "leading_parameters": ("batch",),
                "accepted_parameters": ("mode",),
            },
            "the signature is Trainer.step(batch); it takes no mode",
        ),
        (
            {"name": "Field", "accepted_parameters": ("name", "tab")},
            "the signature is Field(name, choices); it takes no tab",
        ),
        (
            {"name": "Trainer.step", "accepted_parameters": ("scale",)},
            "the signature is Trainer.step(batch); batch is new and required",
        ),
        (
            {
                "name": "Trainer",
                "usage_sites": (UsageSite("pkg.mod", "Trainer.train", "self.fit"),),
            },
            "Trainer.train no longer uses self.fit",
        ),
        (
            {"name": "Trainer", "usage_sites": (UsageSite("pkg.mod", "Trainer.fit", "self.x"),)},
            "pkg.mod has no Trainer.fit, which should use self.x",
        ),
        (
            {"name": "Trainer", "usage_sites": (UsageSite("pkg.gone", "", "self.x"),)},
            "there is no module pkg.gone, which should use self.x",
        ),
    ],
)
def test_symbols_that_do_not_fit(root, fields, problem):
    assert find_problem(root, **fields) == problem


LOOP = """
import torch
from elsewhere import borrowed

class Trainer:
    def train(self, steps, *, limit=None):
        for raw_batch in self.batches:
            prepared = self.prepare(raw_batch, scale=limit, mode='train')
            borrowed(prepared, prepared)
        te_path = self.path()
        with open(te_path, 'r', encoding='utf-8') as file:
            return f'{te_path}-{steps}.pt', [each.load(te_path) for each in self.items]

    def read(self, path, as_bytes=False, *, limit=10, name='a'):
        pass
"""
LOOP_SITES = (
    "self.prepare(raw_batch, scale=limit, mode='train')",
    "borrowed(prepared, prepared)",
    "open(te_path, 'r', encoding='utf-8')",
    "f'{te_path}-{steps}.pt'",
    "each.load(te_path)",
)


def find_loop_problems(root: Path, source: str) -> list[str]:
    (root / "pkg/loop.py").write_text(source)
    sites = [UsageSite("pkg.loop", "Trainer.train", text) for text in LOOP_SITES]
    problems = (
        find_problem(root, module="pkg.loop", name="Trainer", usage_sites=(site,)) for site in sites
    )
    return [problem for problem in problems if problem]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("raw_batch", "batch"),
        ("te_path", "text_path"),
        ("steps", "num_steps"),
        ("limit", "at_most"),
        ("each", "item"),
        ("prepared", "raw_batch_2"),
        ("scale=limit, mode='train'", 'mode="train",  # a comment\n                scale=limit'),
        ("te_path = self.path()", "te_path: str = self.path()"),
        ("te_path = self.path()", "global other; te_path = self.path()"),
    ],
)
def test_names_of_local_variables_comments_and_layout_do_not_matter(root, old, new):
    assert old in LOOP
    assert find_loop_problems(root, LOOP.replace(old, new)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.prepare(", "self.place("),
        ("self.prepare(", "other.prepare("),
        ("prepare(raw_batch, ", "prepare(raw_batch, 1, "),
        ("prepare(raw_batch, ", "prepare(self.batch, "),
        ("prepare(raw_batch, ", "prepare(torch, "),
        ("prepare(raw_batch, ", "prepare(*raw_batch, "),
        ("mode='train'", "mode='eval'"),
        ("mode='train'", "kind='train'"),
        (", mode='train'", ""),
        ("borrowed(prepared, prepared)", "borrowed(prepared, te_path)"),
        ("borrowed(prepared, prepared)", "prepared(prepared, prepared)"),
        ("'r', encoding", "'rb', encoding"),
        ("f'{te_path}-{steps}.pt'", "f'{te_path}-{te_path}.pt'"),
        ("f'{te_path}-{steps}.pt'", "f'{te_path}-{steps}.bin'"),
        ("f'{te_path}-{steps}.pt'", "f'{te_path}-{steps:03d}.pt'"),
        ("each.load(te_path)", "self.load(te_path)"),
    ],
)
def test_another_call_or_other_arguments_are_refused(root, old, new):
    assert old in LOOP
    [problem] = find_loop_problems(root, LOOP.replace(old, new))
    assert problem.startswith("Trainer.train no longer uses ")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("False", "True", "as_bytes is True by default; it should be False"),
        ("=False", "", "as_bytes has no default; it should be False"),
        ("limit=10", "limit=11", "limit is 11 by default; it should be 10"),
        ("name='a'", 'name="a"', ""),
        ("path, as_bytes", "path: str, as_bytes: bool", ""),
        ("as_bytes=False, *, limit=10", "as_bytes=False, limit=10", ""),
    ],
)
def test_a_changed_default_is_refused(root, old, new, problem):
    assert old in LOOP
    (root / "pkg/loop.py").write_text(LOOP.replace(old, new))
    found = find_problem(
        root,
        module="pkg.loop",
        name="Trainer.read",
        leading_parameters=("path", "as_bytes=False"),
        accepted_parameters=("limit=10", "name='a'"),
    )
    assert found.endswith(problem) if problem else found == ""


def test_a_module_with_a_syntax_error_is_named(root):
    (root / "pkg/broken.py").write_text("def (:\n")
    with pytest.raises(HostError, match=r"broken\.py cannot be read as Python"):
        probe(root, [RequiredSymbol("pkg.broken", "x", "a test")])


def test_the_table_ends_with_the_verdict(root):
    symbols = [
        RequiredSymbol("pkg.mod", "Trainer", "is hooked"),
        RequiredSymbol("pkg.mod", "gone", "is hooked too"),
    ]
    installed = InstalledHost("host", "2.0", root)
    lines = format_probe(installed, probe(root, symbols), {"1.0": "tested"})
    assert lines[1] == "ok    pkg.mod.Trainer  is hooked"
    assert lines[2:4] == ["FAIL  pkg.mod.gone     is hooked too", "      pkg.mod has no gone"]
    assert lines[-1].endswith("cannot be hooked. Use a version that was tested: 1.0.")
    fits = probe(root, symbols[:1])
    assert (
        format_probe(installed, fits, {"2.0": "tested"})[-1] == "all 1 symbols fit; 2.0 is tested"
    )
    assert "not tested, but has everything that is needed" in format_probe(installed, fits, {})[-1]


def test_a_host_is_found_by_its_metadata():
    found = find_installed("pytest", "")
    assert (found.root / "_pytest").is_dir()
    with pytest.raises(HostError, match=r"no-such-host is not installed .* Install it\."):
        find_installed("no-such-host", "Install it.")
