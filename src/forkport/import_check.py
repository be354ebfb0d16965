"""Find imports that worked in the fork or in upstream and no longer work in the merged tree.

Only modules of the repository itself are looked up; an import of anything else never resolves here,
neither before nor after, and is not reported. Nothing is executed.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport.git import GITLINK, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from forkport.git import TreeEntry
    from forkport.source_index import SourceReader

_DYNAMIC_IMPORTS = ("import_module", "__import__")


@dataclass(frozen=True, slots=True)
class Import:
    """An imported module, or a name imported from it."""

    level: int
    """Number of leading dots; 0 for an absolute import."""
    module: str
    name: str = ""
    """The name of `from module import name`; empty for an import of the module itself."""


@dataclass(frozen=True, slots=True)
class _Module:
    imports: frozenset[Import]
    names: frozenset[str]
    """Names that the module defines at its top level."""
    any_name: bool
    """True if more names may exist: after `from x import *`, or with a module `__getattr__`."""


class ModuleTree:
    """The Python modules of one tree of files, by the names under which they can be imported."""

    def __init__(self, reader: SourceReader, files: Mapping[str, TreeEntry]) -> None:
        self.reader = reader
        self.files = files
        self._parsed: dict[str, _Module | None] = {}
        self._folders: set[str] = set()
        self._places: dict[str, set[str]] = defaultdict(set)
        """Folders or paths without `.py`, by dotted name. A name may begin in any folder that is
        not itself in a package, because each may be on sys.path."""
        for path in files:
            if path.endswith(".py"):
                self._folders |= {str(folder) for folder in PurePosixPath(path).parents}
        stems = {path.removesuffix(".py") for path in files if path.endswith(".py")}
        for place in stems | (self._folders - {"."}):
            parts = place.removesuffix("/__init__").split("/")
            for first in range(len(parts)):
                root = "/".join(parts[:first])
                if not root or f"{root}/__init__.py" not in files:
                    self._places[".".join(parts[first:])].add("/".join(parts))

    def imports(self, path: str) -> frozenset[Import]:
        """Return what a file imports; nothing if it cannot be parsed."""
        module = self._parse(path)
        return frozenset() if module is None else module.imports

    def names(self, path: str) -> frozenset[str]:
        """Return the names that a file defines at its top level."""
        module = self._parse(path)
        return frozenset() if module is None else module.names

    def resolves(self, path: str, wanted: Import) -> bool:
        """Return True if an import in the file `path` finds its module, and its name in there."""
        folder = PurePosixPath(path).parent
        parts = [part for part in wanted.module.split(".") if part]
        if wanted.level:
            for _ in range(wanted.level - 1):
                folder = folder.parent
            places = {str(folder.joinpath(*parts))}
        else:
            places = {*self._places.get(wanted.module, ()), str(folder.joinpath(*parts))}
        return any(self._has(place, wanted.name) for place in places)

    def _has(self, place: str, name: str) -> bool:
        sources = [path for path in (f"{place}.py", f"{place}/__init__.py") if path in self.files]
        if not sources and place not in self._folders:
            return False
        inner = name if place == "." else f"{place}/{name}"
        if not name or f"{inner}.py" in self.files or inner in self._folders:
            return True
        parsed = [self._parse(path) for path in sources]
        return any(each is None or each.any_name or name in each.names for each in parsed)

    def _parse(self, path: str) -> _Module | None:
        if path not in self._parsed:
            entry = self.files.get(path)
            is_source = entry is not None and entry.mode not in (GITLINK, SYMLINK)
            if entry is None or not is_source or not path.endswith(".py"):
                self._parsed[path] = None
            else:
                self._parsed[path] = _parse_module(self.reader.read(entry))
        return self._parsed[path]


def _parse_module(content: bytes) -> _Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about upstream's code are none of our business
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return None
    names = set(_top_level_names(tree.body))
    imports = frozenset(each for node in ast.walk(tree) for each in _imports_of(node))
    return _Module(imports, frozenset(names), bool(names & {"*", "__getattr__"}))


def _imports_of(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(0, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            name = "" if alias.name == "*" else alias.name
            yield Import(node.level, node.module or "", name)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else ""
        called = function.id if isinstance(function, ast.Name) else called
        module = node.args[0].value
        if called in _DYNAMIC_IMPORTS and isinstance(module, str) and module[:1] not in ("", "."):
            yield Import(0, module)


def _top_level_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    yield from _top_level_names([child])
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from _top_level_names(child.body)
                else:
                    yield from (
                        each.id
                        for each in ast.walk(child)
                        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                    )


def broken_imports(
    result: ModuleTree, upstream: ModuleTree, fork: ModuleTree, tip: str, fork_paths: Iterable[str]
) -> dict[str, str]:
    """Return the files of `result` with a broken import, each with a description of the import.

    `tip` is upstream's commit, and `fork_paths` are the files that the fork adds or changes.
    """
    changed = {path for path, entry in result.files.items() if upstream.files.get(path) != entry}
    sources = [path for path in fork_paths if path.endswith(".py")]
    found: dict[str, str] = {}
    for path in sorted(changed | _possibly_affected(result, upstream, tip)):
        for wanted in sorted(result.imports(path), key=lambda each: (each.module, each.name)):
            is_standard = wanted.module.partition(".")[0] in sys.stdlib_module_names
            if (is_standard and not wanted.level) or result.resolves(path, wanted):
                continue
            origins = [(upstream, path), *((fork, each) for each in (path, *sources))]
            if any(
                wanted in tree.imports(each) and tree.resolves(each, wanted)
                for tree, each in origins
            ):
                found.setdefault(path, _describe(result, path, wanted))
    return found


def _describe(result: ModuleTree, path: str, wanted: Import) -> str:
    module = Import(wanted.level, wanted.module)
    dotted = "." * wanted.level + wanted.module
    if wanted.name and result.resolves(path, module):
        return f"{wanted.name} from {dotted}"
    return dotted


def _possibly_affected(result: ModuleTree, upstream: ModuleTree, tip: str) -> set[str]:
    """Return the files of upstream that mention a module or a name which the port removes."""
    words: set[str] = set()
    for path, entry in upstream.files.items():
        if path.endswith(".py") and result.files.get(path) != entry:
            words |= upstream.names(path) - result.names(path) - {"*"}
            if path not in result.files:
                words.add(PurePosixPath(path.removesuffix("/__init__.py")).stem)
    if not words:
        return set()
    patterns = [option for word in sorted(words) for option in ("-e", word)]
    raw = upstream.reader.git.run(
        *("grep", "-l", "-z", "--no-color", "--full-name", "-w", "-F", *patterns, tip),
        *("--", ":(top)*.py"),
        allow=(0, 1),
    ).decode(errors="surrogateescape")
    paths = {record.removeprefix(f"{tip}:") for record in raw.split("\0")[:-1]}
    return paths & set(result.files)
