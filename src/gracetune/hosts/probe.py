"""Check in the source code of an installed host (trainer) that our hooks still fit it.

Nothing of the host is imported or run: that would be slow, and must work even if the host is broken
in some other way. A hook relies on a name that exists, on its parameters, and on the host using it
where the hook expects it.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class UsageSite:
    """A place in the host that must use a hooked symbol; otherwise the hook has no effect."""

    module: str
    within: str
    """A function or method; empty means anywhere in the module."""
    text: str
    """The expression, such as `self.prepare_batch(raw_batch)`.

    Names in it that the module does not define stand for any local variables.
    """


@dataclass(frozen=True, slots=True)
class RequiredSymbol:
    """One symbol of the host, and what the hook relies on."""

    module: str
    name: str
    purpose: str
    """What it is hooked for; shown to the user."""
    leading_parameters: tuple[str, ...] = ()
    """Parameters that must come first, in this order, not counting `self`.

    `name=value` also requires this default, because our replacement has it.
    """
    accepted_parameters: tuple[str, ...] = ()
    """Parameters that must exist at any position; `name=value` also requires this default."""
    usage_sites: tuple[UsageSite, ...] = ()

    @property
    def symbol(self) -> str:
        """The full name, for messages."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result for one required symbol."""

    required: RequiredSymbol
    problem: str
    """Empty if the hook can be set."""

    @property
    def ok(self) -> bool:
        """True if the hook can be set."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class InstalledHost:
    """A host found on disk."""

    name: str
    version: str
    root: Path
    """The folder that contains its packages."""


def find_installed(name: str, install_hint: str) -> InstalledHost:
    """Find a host in the current Python environment."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise HostError(f"{name} is not installed in this environment. {install_hint}") from None
    return InstalledHost(name, found.version, Path(str(found.locate_file(""))))


def probe(root: Path, symbols: Sequence[RequiredSymbol]) -> list[ProbeResult]:
    """Check every symbol, reading each module once."""
    sources = _SourceFiles(root, {})
    return [ProbeResult(required, _find_problem(sources, required)) for required in symbols]


def format_probe(
    host: InstalledHost, results: Sequence[ProbeResult], tested: Mapping[str, str]
) -> list[str]:
    """Format the results as a table whose last line is the verdict.

    `tested` describes the versions of the host that were tested.
    """
    width = max(len(each.required.symbol) for each in results)
    lines = [f"{host.name} {host.version} in {host.root}"]
    for each in results:
        status = "ok  " if each.ok else "FAIL"
        lines.append(f"{status}  {each.required.symbol:<{width}}  {each.required.purpose}")
        if not each.ok:
            lines.append(f"      {each.problem}")
    num_failed = sum(not each.ok for each in results)
    if num_failed:
        lines.append(
            f"{num_failed} of {len(results)} symbols do not fit: {host.name} {host.version} "
            "cannot be hooked. Use a version that was tested: " + ", ".join(tested) + "."
        )
    else:
        status = tested.get(host.version, "not tested, but has everything that is needed")
        lines.append(f"all {len(results)} symbols fit; {host.version} is {status}")
    return lines


def _find_problem(sources: _SourceFiles, required: RequiredSymbol) -> str:
    tree = sources.tree(required.module)
    if tree is None:
        return f"there is no module {required.module}"
    node = _find(tree, required.name)
    if node is None:
        return f"{required.module} has no {required.name}"
    if required.leading_parameters or required.accepted_parameters:
        function = _initializer_or_function(node)
        if function is None:
            return f"{required.name} is not a function or a class any more"
        problem = _signature_problem(function, required)
        if problem:
            return problem
    for site in required.usage_sites:
        problem = _usage_problem(sources, site)
        if problem:
            return problem
    return ""


def _signature_problem(function: FunctionNode, required: RequiredSymbol) -> str:
    """Describe why calling a function with the expected parameters would fail."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    values = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    defaults = {
        each.arg: "" if value is None else ast.unparse(value)
        for each, value in zip(
            [*positional, *arguments.kwonlyargs], [*values, *arguments.kw_defaults], strict=True
        )
    }
    ordered = [each.arg for each in positional]
    if ordered[:1] in (["self"], ["cls"]):
        ordered = ordered[1:]
    expected = dict(_split_default(each) for each in required.leading_parameters)
    leading = tuple(expected)
    expected |= (_split_default(each) for each in required.accepted_parameters)
    accepted = tuple(name for name in expected if name not in leading)
    shown = f"{required.name}({', '.join(ordered)})"
    if tuple(ordered[: len(leading)]) != leading:
        return f"the signature is {shown}; it should begin with ({', '.join(leading)})"
    missing = [name for name in accepted if name not in defaults]
    if missing and arguments.kwarg is None:
        return f"the signature is {shown}; it takes no {', '.join(missing)}"
    for name, default in expected.items():
        if default and name in defaults and defaults[name] != default:
            found = f"is {defaults[name]} by default" if defaults[name] else "has no default"
            return f"the signature is {shown}; {name} {found}; it should be {default}"
    # Any other parameter must have a default, because our calls do not pass it.
    mandatory = ordered[: len(ordered) - len(arguments.defaults)]
    new = [name for name in mandatory if name not in (*leading, *accepted)]
    return f"the signature is {shown}; {', '.join(new)} is new and required" if new else ""


def _usage_problem(sources: _SourceFiles, site: UsageSite) -> str:
    tree = sources.tree(site.module)
    if tree is None:
        return f"there is no module {site.module}, which should use {site.text}"
    scope: ast.AST | None = _find(tree, site.within) if site.within else tree
    if scope is None:
        return f"{site.module} has no {site.within}, which should use {site.text}"
    pattern = ast.parse(site.text, mode="eval").body
    known = {"self", "cls", *dir(builtins), *(name for _, name in _bindings(tree))}
    variables = {
        each.id
        for each in ast.walk(pattern)
        if isinstance(each, ast.Name) and each.id not in known and not each.id[0].isupper()
    }
    for node, local_names in _expressions(scope, frozenset()):
        if _matches(pattern, node, {}, variables, local_names):
            return ""
    return f"{site.within or site.module} no longer uses {site.text}"


def _split_default(parameter: str) -> tuple[str, str]:
    """Split `name=value` into the name and the default, which is empty if any will do."""
    name, _, value = parameter.partition("=")
    return name, value


def _expressions(
    node: ast.AST, local_names: frozenset[str]
) -> Iterator[tuple[ast.expr, frozenset[str]]]:
    """Yield every expression in a node, with the names of the local variables around it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        local_names |= _local_names(node)
    if isinstance(node, ast.expr):
        yield node, local_names
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child, local_names)


def _local_names(function: ast.AST) -> set[str]:
    found, outer = set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Global):
            outer.update(node.names)
    return found - outer - {"self", "cls"}


def _matches(
    pattern: object,
    node: object,
    renamed: dict[str, str],
    variables: set[str],
    local_names: frozenset[str],
) -> bool:
    """Return True if two syntax trees are equal but for the names of local variables.

    `variables` are names in the pattern that stand for one local variable each; `renamed` maps
    those that were seen to the local variable.
    """
    if isinstance(pattern, ast.Name) and pattern.id in variables:
        if not isinstance(node, ast.Name) or node.id not in local_names:
            return False
        if pattern.id not in renamed and node.id in renamed.values():
            return False
        return renamed.setdefault(pattern.id, node.id) == node.id
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        children = [(_children(pattern, name), _children(node, name)) for name in pattern._fields]
    elif isinstance(pattern, list):
        assert isinstance(node, list)
        if len(pattern) != len(node):
            return False
        children = list(zip(pattern, node, strict=True))
    else:
        return pattern == node
    return all(_matches(*each, renamed, variables, local_names) for each in children)


def _children(node: object, field: str) -> object:
    """Return a field of a syntax tree; the order of keyword arguments does not matter."""
    value: object = None if field == "ctx" else getattr(node, field)
    if isinstance(node, ast.Call) and field == "keywords":
        return sorted(node.keywords, key=lambda each: each.arg or "")
    return value


@dataclass(frozen=True, slots=True)
class _SourceFiles:
    """The parsed modules of a host, by name; None for a module that does not exist."""

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
    """Find a definition, an assignment or an import by its qualified name."""
    node: ast.AST | None = tree
    for part in name.split("."):
        assert node is not None
        node = next((each for each, bound in _bindings(node) if bound == part), None)
        if node is None:
            return None
    return node


def _bindings(scope: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield every node of a scope that binds a name, also inside `if`, `try` and `with`."""
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


def _initializer_or_function(node: ast.AST) -> FunctionNode | None:
    """Return a function itself, or the initializer of a class."""
    if isinstance(node, ast.ClassDef):
        initializer = _find(node, "__init__")
        if initializer is None and node.decorator_list:
            return _dataclass_init(node)
        return initializer if isinstance(initializer, ast.FunctionDef) else None
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _dataclass_init(node: ast.ClassDef) -> FunctionNode:
    """Return the initializer that the dataclass decorator generates."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
    defaults = [each.value for each in fields if each.value is not None]
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, defaults)
    return ast.FunctionDef("__init__", arguments, [], [])
