"""The import rules of docs/architecture.md as data, and functions that find violations."""

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "gracetune"
FORKPORT = SRC.parent / "forkport"
MAX_LINES = 800

GROUND = {"errors", "units", "atomic_files"}
DATA = GROUND | {"entry_points", "config", "events", "memory", "distributed"}
PARTS = GROUND | {"entry_points", "config", "memory", "distributed", "offload"}
TRAINED = DATA | {"offload", "plan", "data", "cache", "adapters", "models", "optim"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "atomic_files": {"errors"},
    "entry_points": GROUND,
    "config": GROUND | {"models", "optim"},
    "events": GROUND,
    "memory": GROUND | {"events"},
    "distributed": GROUND | {"config", "events", "memory"},
    "offload": GROUND | {"events", "memory", "distributed"},
    "plan": PARTS | {"events", "data", "models", "adapters", "optim"},
    "data": DATA | {"cache", "models"},
    "cache": DATA | {"data"},
    "adapters": PARTS,
    "models": PARTS | {"events", "adapters"},
    "optim": PARTS,
    "train": TRAINED,
    "hosts": TRAINED,
    "dashboard": GROUND | {"events"},
    "cli": TRAINED | {"train", "hosts", "dashboard"},
    "__main__": {"cli"},
    "__init__": GROUND | TRAINED | {"train", "gh200"},
    "gh200": TRAINED | {"train", "hosts", "dashboard", "cli"},
}
"""Package -> packages it may import, anywhere in its code. A package may always import itself."""

ONLY_MODULE = {
    ("config", "models"): {"gracetune.models.registry"},
    ("config", "optim"): {"gracetune.optim.registry"},
    ("plan", "data"): {"gracetune.data.sample"},
}
"""(importer, imported) -> the only modules of the imported package that may be used."""

ONLY_IMPORTER = {
    ("data", "cache"): {"gracetune.data.pipeline"},
    ("data", "models"): {"gracetune.data.pipeline", "gracetune.data.dataset_checks"},
}
"""(importer, imported) -> the only modules of the importer that may use the imported package."""

NEVER = {("cache", "gracetune.data.pipeline")}
"""(importer, module) pairs that are forbidden although the packages are allowed."""

WITHOUT_TORCH = GROUND | {"entry_points", "config", "events", "dashboard", "__init__", "__main__"}
"""Packages that never import torch, not even inside functions."""
LOADED_WITHOUT_TORCH = {
    "gracetune.cli",
    "gracetune.cli.dash",
    "gracetune.cli.data",
    "gracetune.cli.init",
    "gracetune.cli.main",
    "gracetune.cli.now",
    "gracetune.cli.report",
}
"""Modules that must not load torch when they are imported, although their functions may."""

BRINGS_TORCH = {
    "torch",
    "torchvision",
    "diffusers",
    "peft",
    "accelerate",
    "transformers",
    "lycoris",
}
EXECUTES_WHAT_IT_READS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
}


@dataclass(frozen=True)
class Import:
    """One import of a module."""

    target: str
    line: int
    at_load: bool
    """True if it runs when the file is imported: not inside a function or for type checking."""


@dataclass(frozen=True)
class Module:
    """A source file and its imports."""

    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def layer(self) -> str:
        return layer_of(self.name)


def layer_of(module: str) -> str:
    """Return the package of a module: `gracetune.data.batch_order` -> `data`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def read_modules(src: Path) -> dict[str, Module]:
    """Parse every module below the package, by dotted name."""
    paths = {}
    for path in sorted(src.rglob("*.py")):
        parts = [src.name, *path.relative_to(src).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        paths[".".join(parts)] = path
    modules = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = tuple(imports_of(tree, set(paths)))
        modules[name] = Module(name, path, tree, found)
    return modules


def imports_of(tree: ast.Module, ours: set[str]) -> Iterator[Import]:
    """Imports at any depth; a string that names one of our modules is an import to come."""
    for node, at_load in walk(tree, at_load=True):
        for target in targets_of(node, ours):
            deferred = isinstance(node, ast.Constant)
            yield Import(target, node.lineno, at_load and not deferred)


def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, and whether loading the file executes it."""
    for child in ast.iter_child_nodes(node):
        yield child, at_load
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from walk(ast.Module(child.body, []), at_load=False)
            yield from walk(ast.Module(child.orelse, []), at_load)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk(child, at_load=False)
        else:
            yield from walk(child, at_load)


def targets_of(node: ast.AST, ours: set[str]) -> Iterator[str]:
    """Yield the modules that a syntax node imports or names in a string."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write imports in full"
        assert node.module is not None
        for alias in node.names:
            deep = f"{node.module}.{alias.name}"
            is_ours = node.module.split(".")[0] == "gracetune"
            yield deep if deep in ours or not is_ours else node.module
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        named = node.value.partition(":")[0]
        if named in ours and named != "gracetune":
            yield named


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def unknown_layers(modules: dict[str, Module]) -> list[str]:
    return sorted({module.layer for module in modules.values()} - set(MAY_IMPORT))


def forbidden_imports(modules: dict[str, Module]) -> list[str]:
    """Return every import that the rules do not allow."""
    wrong = []
    for module in modules.values():
        for found in module.imports:
            if found.target == "gracetune" or not found.target.startswith("gracetune."):
                continue  # the top-level package only holds lazy names
            target = layer_of(found.target)
            pair = (module.layer, target)
            allowed = (
                target in MAY_IMPORT.get(module.layer, set()) | {module.layer}
                and found.target in ONLY_MODULE.get(pair, {found.target})
                and module.name in ONLY_IMPORTER.get(pair, {module.name})
                and (module.layer, found.target) not in NEVER
            )
            if not allowed:
                wrong.append(f"{module.name}:{found.line} imports {found.target}")
    return wrong


def torch_imports(modules: dict[str, Module]) -> list[str]:
    """Return imports of torch in torch-free packages, directly or through our own modules."""
    wrong = []
    for module in modules.values():
        if module.layer in WITHOUT_TORCH:
            wrong += [
                f"{module.name}:{found.line} imports {found.target}"
                for found in module.imports
                if brings_torch(found.target)
            ]
        if module.layer in WITHOUT_TORCH or module.name in LOADED_WITHOUT_TORCH:
            for name in loaded_by(module.name, modules):
                wrong += [
                    f"{module.name} loads {name}, which imports {found.target}"
                    for found in modules[name].imports
                    if found.at_load and brings_torch(found.target)
                ]
    return wrong


def brings_torch(target: str) -> bool:
    return target.split(".")[0] in BRINGS_TORCH or target.startswith("safetensors.torch")


def loaded_by(name: str, modules: dict[str, Module]) -> set[str]:
    """Return our modules that are executed when one module is imported, including parents."""
    loaded: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in loaded or current not in modules:
            continue
        loaded.add(current)
        waiting += [found.target for found in modules[current].imports if found.at_load]
        if "." in current:
            waiting.append(current.rpartition(".")[0])
    return loaded


def unsafe_readers(modules: dict[str, Module]) -> list[str]:
    """Return uses of torch.load, pickle-like modules and numpy's allow_pickle."""
    wrong = []
    for module in modules.values():
        for found in module.imports:
            if found.target.split(".")[0] in EXECUTES_WHAT_IT_READS or found.target == "torch.load":
                wrong.append(f"{module.name}:{found.line} imports {found.target}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                wrong.append(f"{module.name}:{node.lineno} uses torch.load")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                wrong.append(f"{module.name}:{node.value.lineno} uses allow_pickle")
    return wrong


def shared_class_names(modules: dict[str, Module]) -> list[str]:
    """Return public classes that have the name of another one, with their modules."""
    homes: dict[str, list[str]] = {}
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module.name)
    return [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1]


def load_cycle(modules: dict[str, Module]) -> list[str]:
    """Return modules that import each other in a cycle; empty if there is none."""
    graph = {
        module.name: {found.target for found in module.imports if found.at_load} & set(modules)
        for module in modules.values()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []
