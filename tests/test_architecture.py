"""The layers import what docs/architecture.md allows, seen in the imports themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from architecture_rules import (
    FORKPORT,
    LOADED_WITHOUT_TORCH,
    MAX_LINES,
    MAY_IMPORT,
    SRC,
    WITHOUT_TORCH,
    Module,
    forbidden_imports,
    load_cycle,
    read_modules,
    torch_imports,
    unknown_layers,
    unsafe_readers,
)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    found = read_modules(SRC)
    assert len(found) > 20, f"only {len(found)} modules under {SRC}"
    return found


def test_every_layer_is_in_the_table(modules: dict[str, Module]) -> None:
    assert unknown_layers(modules) == []


def test_layers_import_what_the_table_allows(modules: dict[str, Module]) -> None:
    assert forbidden_imports(modules) == []


def test_forkport_imports_nothing_of_gracetune() -> None:
    modules = read_modules(FORKPORT)
    assert len(modules) > 10, f"only {len(modules)} modules under {FORKPORT}"
    imports = [(module.name, each.target) for module in modules.values() for each in module.imports]
    assert [pair for pair in imports if pair[1].partition(".")[0] == "gracetune"] == []


def test_layers_without_torch_do_without(modules: dict[str, Module]) -> None:
    assert torch_imports(modules) == []


def test_nothing_reads_what_it_would_execute(modules: dict[str, Module]) -> None:
    assert unsafe_readers(modules) == []


def test_no_module_needs_itself_to_load(modules: dict[str, Module]) -> None:
    assert load_cycle(modules) == []


def test_files_stay_short(modules: dict[str, Module]) -> None:
    lengths = {
        module.name: len(module.path.read_text(encoding="utf-8").splitlines())
        for module in modules.values()
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_python_agrees_that_torch_stays_out(modules: dict[str, Module]) -> None:
    names = sorted(
        name
        for name, module in modules.items()
        if (module.layer in WITHOUT_TORCH or name in LOADED_WITHOUT_TORCH)
        and module.layer != "__main__"
    )
    script = (
        "import sys; from importlib import import_module\n"
        "for name in sys.argv[1:]:\n"
        "    import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_documented_table_is_this_table() -> None:
    """Each row of the table in the documentation names the layers that the test allows."""
    text = (SRC.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (yes|no) \|$", text, flags=re.MULTILINE)
    documented = {layer: set(re.findall(r"`(\w+)`", allowed)) for layer, allowed, _ in rows}
    layers = {layer for layer in MAY_IMPORT if not layer.startswith("__")}
    assert documented == {layer: MAY_IMPORT[layer] for layer in layers}
    without = {layer for layer, _, torch in rows if torch == "no"}
    assert without == {layer for layer in WITHOUT_TORCH if not layer.startswith("__")}


# What follows shows that each rule can fail, on small trees that break it.


def tree(folder: Path, **files: str) -> dict[str, Module]:
    """A package made of `layer__module="source"`."""
    src = folder / "gracetune"
    files = {"__init__": "", **files}
    for name, source in files.items():
        parts = [name] if name.startswith("__") else name.split("__")
        path = src.joinpath(*parts).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        if len(parts) > 1 and not (path.parent / "__init__.py").exists():
            (path.parent / "__init__.py").write_text("")
    return read_modules(src)


def test_an_unknown_layer_is_found(tmp_path: Path) -> None:
    assert unknown_layers(tree(tmp_path, magic__wand="")) == ["magic"]


@pytest.mark.parametrize(
    "source",
    [
        "import gracetune.train.loop",
        "from gracetune.train.loop import go",
        "from gracetune.train import loop",
        "from gracetune import train",
        "def late():\n    from gracetune.train.loop import go",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gracetune.train.loop",
        "KNOWN = {'go': 'gracetune.train.loop:go'}",
        "class A:\n    def b(self):\n        import gracetune.train",
    ],
)
def test_a_forbidden_import_is_found_however_it_is_written(tmp_path: Path, source: str) -> None:
    found = forbidden_imports(tree(tmp_path, train__loop="", cache__store=source))
    assert len(found) == 1
    assert found[0].startswith("gracetune.cache.store:")


def test_a_part_of_a_layer_is_not_the_whole_of_it(tmp_path: Path) -> None:
    found = forbidden_imports(
        tree(
            tmp_path,
            memory__platform="",
            memory__pool="",
            plan__cost="import gracetune.memory.platform\nimport gracetune.memory.pool",
        )
    )
    assert found == ["gracetune.plan.cost:2 imports gracetune.memory.pool"]


def test_nobody_may_import_the_forks_names(tmp_path: Path) -> None:
    modules = tree(tmp_path, gh200="from gracetune.train import loop", train__loop="", cli__x="")
    assert forbidden_imports(modules) == []
    for layer in set(MAY_IMPORT) - {"gh200", "__init__"}:  # the public face re-exports it
        assert "gh200" not in MAY_IMPORT[layer]


def test_relative_imports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in full"):
        tree(tmp_path, data__loader="from . import source")


def test_torch_is_found_directly_and_through_others(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        events__log="def f():\n    import torch.nn",
        config__load="from gracetune.units import x",
        units="import diffusers",
        data__loader="import torch",
    )
    assert torch_imports(modules) == [
        "gracetune.config.load loads gracetune.units, which imports diffusers",
        "gracetune.events.log:2 imports torch.nn",
        "gracetune.units:1 imports diffusers",
        "gracetune.units loads gracetune.units, which imports diffusers",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_readers_that_execute_are_found(tmp_path: Path, source: str) -> None:
    assert len(unsafe_readers(tree(tmp_path, data__loader=source))) == 1


def test_a_cycle_is_found_but_not_one_for_type_checkers(tmp_path: Path) -> None:
    ring = {"data__a": "import gracetune.data.b", "data__b": "import gracetune.data.a"}
    assert set(load_cycle(tree(tmp_path / "ring", **ring))) == {
        "gracetune.data.a",
        "gracetune.data.b",
    }
    lazy = ring | {"data__b": "def f():\n    import gracetune.data.a"}
    assert load_cycle(tree(tmp_path / "lazy", **lazy)) == []
