"""Write docs/reference-settings.md and docs/reference-commands.md from the schema and the parsers.

Run it after changes to settings, aliases, environment variables or command-line options;
`--check` only compares:

    .venv/bin/python scripts/reference_pages.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gracetune.cli.env import VARIABLES
from gracetune.cli.main import VERBS
from gracetune.config.aliases import ALIASES, REMOVED_KEYS, VALUE_ALIASES
from gracetune.config.load import json_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by scripts/reference_pages.py from {source}: do not edit. -->"
GUIDES = {
    "model": "[Model families](families.md), [Precision](precision.md)",
    "adapter": "[Adapters](families.md#adapters), [Tuning](tuning.md)",
    "datasets[]": "[Data sources](data-sources.md)",
    "cache_config": "[Caches](caches.md)",
    "gh200_optimizations": "[Memory hints](diagnose.md#memory-hints)",
    "train": "[Tuning](tuning.md), [Timesteps](optimizers.md#choose-the-trained-timesteps)",
    "optimizer": "[Optimizers](optimizers.md)",
    "validation": "[Sampling](sampling.md), [Tuning](tuning.md#what-to-look-at)",
    "logging": "[Watching a run](watching-a-run.md)",
    "health": "[Health checks](watching-a-run.md#health-checks)",
    "distributed": "[Several GPUs](several-gpus.md)",
    "plan": "[Planning](planning.md)",
}
"""Pages that explain a section."""


def settings_page() -> Iterator[str]:
    """Yield the lines of the page of all settings."""
    schema = json.loads(json_schema())
    yield NOTE.format(source="the schema of run files")
    yield "# Every setting of a run file"
    yield ""
    yield (
        "This page lists every key that a run file may have, with its type, its default and its "
        "meaning. Use it to look up a setting; the guides explain how to choose one. A run file "
        "is JSON, YAML or TOML. `gracetune schema` prints the same as JSON Schema, for editors, "
        "and an unknown key is an error that names the most similar one. To change a setting for "
        "one run, use `--set section.key=value`; "
        "in lists, an index, counted from 0, names the entry: `--set datasets.0.repeats=2`, or "
        "`--set 'datasets[0].repeats=2'`, in quotes because of the shell."
    )
    yield ""
    plain, sections = [], []
    for name, field in schema["properties"].items():
        (sections if _references(field) else plain).append((name, field))
    yield "## Top level"
    yield ""
    yield from _settings_table(plain, schema, schema.get("required", []))
    for name, field in sections:
        shown = f"{name}[]" if field.get("type") == "array" else name
        yield from _section(shown, _references(field)[0], field, schema)
    yield from _aliases()
    yield from _variables()


def commands_page() -> Iterator[str]:
    """Yield the lines of the page of all commands."""
    yield NOTE.format(source="the argument parsers")
    yield "# Every command and its options"
    yield ""
    yield (
        "This page lists every command of `gracetune` with its arguments. `gracetune train "
        "--help` and so on print the same. `RUN` is a run file, or a config of SimpleTuner or "
        "ai-toolkit."
    )
    yield ""
    yield "| command | use it to |"
    yield "|---|---|"
    for name, (_, text) in VERBS.items():
        yield f"| [`{name}`](#{_anchor(f'gracetune {name}')}) | {text} |"
    yield ""
    yield (
        "The exit code is 0 for success, 1 for a failure, 2 for a mistake in the arguments or the "
        "run file, 3 if `baseline compare` cannot decide, 130 if the command was interrupted after "
        "it had saved its work, and 141 if its output pipe was closed, for example by `head`. "
        "`launch` ends with 128 + N if signal N killed a rank."
    )
    yield ""
    for name, (module, _) in VERBS.items():
        verb = import_module(module)
        parser = argparse.ArgumentParser(prog=f"gracetune {name}", description=verb.HELP)
        verb.add_arguments(parser)
        yield from _command(parser, 2)


def _section(
    name: str, type_name: str, field: dict[str, Any], schema: dict[str, Any]
) -> Iterator[str]:
    """Yield a section of a run file, then the sections inside of it."""
    content = schema["$defs"][type_name]
    yield f"{'###' if '.' in name else '##'} {name}"
    yield ""
    yield _paragraph(content["description"])
    if field.get("description"):
        yield ""
        yield _paragraph(field["description"])
    if name in GUIDES:
        yield ""
        yield f"Guides: {GUIDES[name]}."
    yield ""
    fields = list(content["properties"].items())
    yield from _settings_table(fields, schema, content.get("required", []))
    for key, inner in fields:
        for found in _references(inner):
            if found != type_name:
                suffix = "[]" if "array" in _kinds(inner) else ""
                shown = f"{name}.{key}{suffix}"
                yield from _section(shown, found, {}, schema)


def _settings_table(
    fields: list[tuple[str, Any]], schema: dict[str, Any], required: list[str]
) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields:
        default = "required" if name in required else _default(field)
        meaning = _cell(field.get("description", "")) or _cell(_inner_description(field, schema))
        yield f"| `{name}` | {_type(field)} | {default} | {meaning} |"
    yield ""


def _inner_description(field: dict[str, Any], schema: dict[str, Any]) -> str:
    names = _references(field)
    return schema["$defs"][names[0]]["description"] if names else ""


def _references(field: dict[str, Any]) -> list[str]:
    """Return the names of the sections in a field: its own, in a list, or by name."""
    found = []
    if "$ref" in field:
        found.append(field["$ref"].rpartition("/")[2])
    for inner in (*field.get("anyOf", ()), field.get("items"), field.get("additionalProperties")):
        if isinstance(inner, dict):
            found += _references(inner)
    return found


def _kinds(field: dict[str, Any]) -> list[str]:
    return [
        field.get("type", ""),
        *(kind for one in field.get("anyOf", ()) for kind in _kinds(one)),
    ]


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        kinds = [_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return "section"
    if field.get("type") == "array":
        if "prefixItems" in field:
            return f"{len(field['prefixItems'])} values"
        return f"list of: {_type(field['items'])}" if field.get("items") else "list"
    names = {"integer": "whole number", "string": "text", "object": "table"}
    kind = names.get(field.get("type", ""), field.get("type", "any"))
    return kind + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {field[key]:g}" for key, word in words.items() if key in field]
    return f", {', '.join(limits)}" if limits else ""


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value is None or value in ({}, []) or (isinstance(value, dict) and _references(field)):
        return ""
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`" if value != "" else ""


def _aliases() -> Iterator[str]:
    yield "## Keys of other tools"
    yield ""
    yield (
        "A run file may also have these keys of SimpleTuner, ai-toolkit and their GH200 forks; "
        "each sets the key beside it. A trailing dot stands for all keys of a section, `*` for "
        "every dataset and `0` for the first one. To take over a whole config of another tool, "
        "use [`gracetune import`](import.md)."
    )
    yield ""
    yield "| key | sets |"
    yield "|---|---|"
    for key, target in ALIASES.items():
        yield f"| `{key}` | `{target}` |"
    yield ""
    yield "These values of other tools are translated:"
    yield ""
    yield "| setting | value | becomes |"
    yield "|---|---|---|"
    for key, values in VALUE_ALIASES.items():
        for value, target in values.items():
            yield f"| `{key}` | `{_value(value)}` | `{_value(target)}` |"
    yield ""
    yield "These keys are refused:"
    yield ""
    yield "| key | what to do |"
    yield "|---|---|"
    for key, advice in REMOVED_KEYS.items():
        yield f"| `{key}` | {_cell(advice)} |"
    yield ""


def _variables() -> Iterator[str]:
    yield "## Environment variables"
    yield ""
    yield "`gracetune env` shows which of these variables are set, and what they do."
    yield ""
    yield "| variable | meaning |"
    yield "|---|---|"
    for variable in VARIABLES:
        yield f"| `{variable.name}` | {_cell(variable.meaning)} |"
    yield ""


def _command(parser: argparse.ArgumentParser, level: int, summary: str = "") -> Iterator[str]:
    """Yield a command with its arguments, then its subcommands."""
    yield f"{'#' * level} {parser.prog}"
    yield ""
    text = parser.description or summary
    if text:
        yield text[:1].upper() + text[1:].rstrip(".") + "."
        yield ""
    rows, nested = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {one.dest: one.help or "" for one in action._choices_actions}
            nested += [(one, summaries.get(name, "")) for name, one in action.choices.items()]
        elif not (isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS):
            rows.append(f"| {_option(action)} | {_cell(_meaning(action, parser))} |")
    if not rows and not nested:
        yield "It has no arguments."
        yield ""
    if rows:
        yield "| argument | meaning |"
        yield "|---|---|"
        yield from rows
        yield ""
    for inner, text in nested:
        yield from _command(inner, min(level + 1, 4), text)


def _option(action: argparse.Action) -> str:
    formatter = argparse.HelpFormatter("")
    if not action.option_strings:
        shown = formatter._metavar_formatter(action, action.dest)(1)[0]
        return f"`{_escape(shown)}`" + (" (optional)" if action.nargs in ("?", "*") else "")
    value = ""
    if action.nargs != 0:
        default = formatter._get_default_metavar_for_optional(action)
        value = " " + formatter._format_args(action, default)
    names = ", ".join(f"`{_escape(name + value)}`" for name in action.option_strings)
    return names + (" (required)" if action.required else "")


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    if not action.help:
        return ""
    return parser._get_formatter()._expand_help(action)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    """Return text in one line that is safe in a cell of a Markdown table."""
    return _escape(" ".join(text.split()))


def _paragraph(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]+", "-", title.lower()).strip("-")


PAGES = {"reference-settings.md": settings_page, "reference-commands.md": commands_page}


def main() -> int:
    """Write the pages, or compare them; return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = []
    for name, lines in PAGES.items():
        text = "\n".join(lines()).rstrip() + "\n"
        if not check:
            (DOCS / name).write_text(text, encoding="utf-8")
        elif not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != text:
            old.append(name)
    if old:
        print(f"{', '.join(old)}: out of date, run scripts/reference_pages.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
