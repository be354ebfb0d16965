"""Every import in the source follows the rules of docs/architecture.md."""

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
    shared_class_names,
    torch_imports,
    unknown_layers,
    unsafe_readers,
)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    found = read_modules(SRC)
    assert len(found) > 20, f"only {len(found)} modules under {SRC}"
    return found


def test_every_package_is_in_the_table(modules: dict[str, Module]) -> None:
    assert unknown_layers(modules) == []


def test_packages_import_only_what_the_table_allows(modules: dict[str, Module]) -> None:
    assert forbidden_imports(modules) == []


def test_forkport_imports_nothing_of_gracetune() -> None:
    modules = read_modules(FORKPORT)
    assert len(modules) > 10, f"only {len(modules)} modules under {FORKPORT}"
    imports = [(module.name, each.target) for module in modules.values() for each in module.imports]
    assert [pair for pair in imports if pair[1].partition(".")[0] == "gracetune"] == []


def test_torch_free_packages_do_not_import_torch(modules: dict[str, Module]) -> None:
    assert torch_imports(modules) == []


def test_nothing_uses_pickle_or_torch_load(modules: dict[str, Module]) -> None:
    assert unsafe_readers(modules) == []


def test_there_are_no_import_cycles(modules: dict[str, Module]) -> None:
    assert load_cycle(modules) == []


def test_no_two_public_classes_share_a_name(modules: dict[str, Module]) -> None:
    assert shared_class_names(modules) == []


def test_no_file_is_longer_than_800_lines(modules: dict[str, Module]) -> None:
    lengths = {
        module.name: len(module.path.read_text(encoding="utf-8").splitlines())
        for module in modules.values()
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_files_that_docstrings_and_comments_name_exist(modules: dict[str, Module]) -> None:
    packages = "|".join(path.parent.name for path in SRC.glob("*/__init__.py"))
    names = re.compile(rf"(?<![\w/])(?:{packages})/[\w/]+\.py\b")
    named = {
        (module.name, name)
        for module in modules.values()
        for name in names.findall(module.path.read_text(encoding="utf-8"))
    }
    assert len(named) > 40
    assert sorted(pair for pair in named if not (SRC / pair[1]).is_file()) == []


def test_importing_torch_free_modules_does_not_load_torch(modules: dict[str, Module]) -> None:
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


def test_the_documented_table_equals_the_tested_one() -> None:
    text = (SRC.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (yes|no) \|$", text, flags=re.MULTILINE)
    documented = {layer: set(re.findall(r"`(\w+)`", allowed)) for layer, allowed, _ in rows}
    layers = {layer for layer in MAY_IMPORT if not layer.startswith("__")}
    assert documented == {layer: MAY_IMPORT[layer] for layer in layers}
    without = {layer for layer, _, torch in rows if torch == "no"}
    assert without == {layer for layer in WITHOUT_TORCH if not layer.startswith("__")}


# The tests below check that each rule can fail, on small source trees that break it.


def tree(folder: Path, **files: str) -> dict[str, Module]:
    """Write a package from `layer__module="source"` arguments."""
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


def test_an_unknown_package_is_reported(tmp_path: Path) -> None:
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
def test_a_forbidden_import_is_reported_in_every_form(tmp_path: Path, source: str) -> None:
    found = forbidden_imports(tree(tmp_path, train__loop="", cache__store=source))
    assert len(found) == 1
    assert found[0].startswith("gracetune.cache.store:")


def test_a_package_may_be_limited_to_one_module_of_another(tmp_path: Path) -> None:
    found = forbidden_imports(
        tree(
            tmp_path,
            data__sample="",
            data__loader="",
            plan__cost="import gracetune.data.sample\nimport gracetune.data.batch_order",
        )
    )
    assert found == ["gracetune.plan.cost:2 imports gracetune.data.batch_order"]


def test_only_the_data_pipeline_may_import_the_cache(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        cache__store="",
        data__pipeline="import gracetune.cache.store",
        data__batch_order="import gracetune.cache.store",
    )
    assert forbidden_imports(modules) == [
        "gracetune.data.batch_order:1 imports gracetune.cache.store"
    ]


def test_the_cache_may_not_import_the_data_pipeline(tmp_path: Path) -> None:
    source = "import gracetune.data.sample\nimport gracetune.data.pipeline"
    modules = tree(tmp_path, data__sample="", data__pipeline="", cache__store=source)
    assert forbidden_imports(modules) == ["gracetune.cache.store:2 imports gracetune.data.pipeline"]


def test_nothing_may_import_gh200(tmp_path: Path) -> None:
    modules = tree(tmp_path, gh200="from gracetune.train import loop", train__loop="", cli__x="")
    assert forbidden_imports(modules) == []
    for layer in set(MAY_IMPORT) - {"gh200", "__init__"}:  # __init__ re-exports it
        assert "gh200" not in MAY_IMPORT[layer]


def test_relative_imports_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in full"):
        tree(tmp_path, data__loader="from . import source")


def test_torch_is_reported_if_imported_directly_or_indirectly(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        events__log="def f():\n    import torch.nn",
        config__load="from gracetune.units import x",
        units="import diffusers",
        data__batch_order="import torch",
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
def test_pickle_and_torch_load_are_reported(tmp_path: Path, source: str) -> None:
    assert len(unsafe_readers(tree(tmp_path, data__loader=source))) == 1


def test_an_import_cycle_is_reported_unless_it_is_lazy(tmp_path: Path) -> None:
    ring = {"data__a": "import gracetune.data.b", "data__b": "import gracetune.data.a"}
    assert set(load_cycle(tree(tmp_path / "ring", **ring))) == {
        "gracetune.data.a",
        "gracetune.data.b",
    }
    lazy = ring | {"data__b": "def f():\n    import gracetune.data.a"}
    assert load_cycle(tree(tmp_path / "lazy", **lazy)) == []


def test_public_classes_that_share_a_name_are_reported(tmp_path: Path) -> None:
    two = {"data__a": "class Plan: ...\nclass _Part: ...", "plan__b": "class _Part: ..."}
    assert shared_class_names(tree(tmp_path / "private", **two)) == []
    same = two | {"plan__b": "class Plan: ..."}
    found = shared_class_names(tree(tmp_path / "public", **same))
    assert found == ["Plan: gracetune.data.a, gracetune.plan.b"]
