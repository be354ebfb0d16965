"""Whether an installed host still has what we hook, read from its source.

Nothing of the host is imported or run: that takes long, and a host that is broken in some other way
must still be probed. What is looked at is what a hook relies on: that a name exists, which
parameters it takes, and that the host calls it where we think it does.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Signature = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class UsageSite:
    """A place that must call or name what we replace: else replacing it does nothing."""

    module: str
    within: str
    """A function or method; empty: anywhere in the module."""
    text: str
    """The expression as Python writes it: `self.prepare_batch`."""


@dataclass(frozen=True, slots=True)
class RequiredSymbol:
    """One symbol of the host's, and what we rely on of it."""

    module: str
    name: str
    purpose: str
    leading_parameters: tuple[str, ...] = ()
    """Parameters that must be there in this order, before any other; `self` is not counted."""
    accepted_parameters: tuple[str, ...] = ()
    """Parameters that must be there, in any place."""
    usage_sites: tuple[UsageSite, ...] = ()

    @property
    def symbol(self) -> str:
        """For people."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What became of a need."""

    need: RequiredSymbol
    problem: str
    """Empty: as it should be."""

    @property
    def ok(self) -> bool:
        """Whether the hook can be set."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class InstalledHost:
    """A host on this disk."""

    name: str
    version: str
    root: Path
    """The folder that its package is in."""


def find_installed(name: str, install_hint: str) -> InstalledHost:
    """The host in the environment that runs this."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise HostError(f"{name} is not installed in this environment. {install_hint}") from None
    return InstalledHost(name, found.version, Path(str(found.locate_file(""))))


def probe(root: Path, needs: Sequence[RequiredSymbol]) -> list[ProbeResult]:
    """Look for every symbol; each module is read once."""
    shelf = _SourceFiles(root, {})
    return [ProbeResult(need, _find_problem(shelf, need)) for need in needs]


def _find_problem(shelf: _SourceFiles, need: RequiredSymbol) -> str:
    tree = shelf.tree(need.module)
    if tree is None:
        return f"there is no module {need.module}"
    node = _find(tree, need.name)
    if node is None:
        return f"{need.module} has no {need.name}"
    if need.leading_parameters or need.accepted_parameters:
        signature = _signature(node)
        if signature is None:
            return f"{need.name} is not a function or a class any more"
        wrong = _signature_problem(signature, need)
        if wrong:
            return wrong
    for site in need.usage_sites:
        wrong = _usage_problem(shelf, site)
        if wrong:
            return wrong
    return ""


def _signature_problem(signature: Signature, need: RequiredSymbol) -> str:
    """What a call of ours would stumble over."""
    arguments = signature.args
    ordered = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if ordered[:1] in (["self"], ["cls"]):
        ordered = ordered[1:]
    named = {*ordered, *(each.arg for each in arguments.kwonlyargs)}
    shown = f"{need.name}({', '.join(ordered)})"
    if tuple(ordered[: len(need.leading_parameters)]) != need.leading_parameters:
        return (
            f"the signature is {shown}; it should begin with ({', '.join(need.leading_parameters)})"
        )
    lost = [name for name in need.accepted_parameters if name not in named]
    if lost and arguments.kwarg is None:
        return f"the signature is {shown}; it takes no {', '.join(lost)}"
    # What it takes beyond that must be optional: we call it with what we know.
    num_optional = len(arguments.defaults)
    demanded = ordered[: len(ordered) - num_optional]
    new = [
        name
        for name in demanded
        if name not in (*need.leading_parameters, *need.accepted_parameters)
    ]
    return f"the signature is {shown}; {', '.join(new)} is new and must be given" if new else ""


def _usage_problem(shelf: _SourceFiles, site: UsageSite) -> str:
    tree = shelf.tree(site.module)
    if tree is None:
        return f"there is no module {site.module}, which should use {site.text}"
    place: ast.AST | None = _find(tree, site.within) if site.within else tree
    if place is None:
        return f"{site.module} has no {site.within}, which should use {site.text}"
    for node in ast.walk(place):
        if isinstance(node, ast.expr) and ast.unparse(node) == site.text:
            return ""
    return f"{site.within or site.module} no longer uses {site.text}"


@dataclass(frozen=True, slots=True)
class _SourceFiles:
    root: Path
    trees: dict[str, ast.Module | None]

    def tree(self, module: str) -> ast.Module | None:
        if module not in self.trees:
            self.trees[module] = self._read(self.root.joinpath(*module.split(".")))
        return self.trees[module]

    def _read(self, path: Path) -> ast.Module | None:
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                try:
                    return ast.parse(file.read_bytes())
                except (SyntaxError, ValueError) as error:
                    raise HostError(f"{file} cannot be read as Python: {error}.") from None
        return None


def _find(tree: ast.AST, name: str) -> ast.AST | None:
    """A definition, an assignment or an import, by its qualified name."""
    node: ast.AST | None = tree
    for part in name.split("."):
        assert node is not None
        node = next((each for each, bound in _bindings(node) if bound == part), None)
        if node is None:
            return None
    return node


def _bindings(scope: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Everything that a scope binds a name to, under `if` and `try` too."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node, node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield node, (alias.asname or alias.name).partition(".")[0]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
                yield from ((node, name) for name in names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node, node.target.id
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bindings(node)


def _signature(node: ast.AST) -> Signature | None:
    """Of a class, what making one takes."""
    if isinstance(node, ast.ClassDef):
        made = _find(node, "__init__")
        if made is None and node.decorator_list:
            return _dataclass_init(node)
        return made if isinstance(made, ast.FunctionDef) else None
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _dataclass_init(node: ast.ClassDef) -> Signature:
    """The initializer that a dataclass gets."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
    defaults = [each.value for each in fields if each.value is not None]
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, defaults)
    return ast.FunctionDef("__init__", arguments, [], [])


def format_probe(
    installed: InstalledHost, found: Sequence[ProbeResult], known: Mapping[str, str]
) -> list[str]:
    """A table for people; the last line is the verdict."""
    width = max(len(each.need.symbol) for each in found)
    lines = [f"{installed.name} {installed.version} in {installed.root}"]
    for each in found:
        lines.append(
            f"{'ok  ' if each.ok else 'FAIL'}  {each.need.symbol:<{width}}  {each.need.purpose}"
        )
        if not each.ok:
            lines.append(f"      {each.problem}")
    failed = sum(not each.ok for each in found)
    if failed:
        lines.append(
            f"{failed} of {len(found)} symbols do not fit: {installed.name} {installed.version} "
            "cannot be hooked. Use a version that is known to fit: " + ", ".join(known) + "."
        )
    else:
        tested = known.get(installed.version, "not among those tried, but everything is there")
        lines.append(f"all {len(found)} symbols fit; {installed.version} is {tested}")
    return lines
