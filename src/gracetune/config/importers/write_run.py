"""Write the run file of an imported config as YAML or JSON, with comments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gracetune.config.importers.report import ImportedRun, count_verdicts
from gracetune.config.schema import RunFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MARKS = {"yaml": "# ", "json": "// "}
"""What starts a comment in each format; gracetune reads `//` comments in JSON."""


def format_run(imported: ImportedRun, text_format: str, names: str) -> str:
    """Return the text of a run file, `yaml` or `json`; `names` are the imported files."""
    mark = MARKS[text_format]
    lines = [f"Imported from {imported.tool} ({names}): {count_verdicts(imported)}."]
    for each in imported.keys:
        if each.verdict == "not supported":
            lines.append(f"Not supported: {each.key}: {each.text}")
    header = "".join(f"{mark}{line}\n" for line in lines)
    run = {name: imported.run[name] for name in RunFile.model_fields if name in imported.run}
    if text_format == "json":
        return f"{header}{json.dumps(run, indent=2, ensure_ascii=False)}\n"
    origins = {each.setting: each.key for each in imported.keys if each.setting}
    origins |= {each.setting: f"{imported.tool}'s default" for each in imported.defaults}
    return header + "".join(f"{line}\n" for line in _yaml_lines(run, origins))


def _yaml_lines(
    node: Mapping[str, object], origins: Mapping[str, str], path: str = "", indent: str = ""
) -> Iterator[str]:
    """Yield a section in block style. Values are written as JSON, which YAML contains."""
    for key, value in node.items():
        name = f"{path}.{key}" if path else key
        shown = key if key.replace("_", "").isalnum() else json.dumps(key)
        if isinstance(value, dict) and value:
            if not indent:
                yield ""
            yield f"{indent}{shown}:"
            yield from _yaml_lines(value, origins, name, f"{indent}  ")
        elif isinstance(value, list) and value and all(isinstance(e, dict) for e in value):
            yield f"\n{indent}{shown}:" if not indent else f"{indent}{shown}:"
            for index, entry in enumerate(value):
                first, *rest = _yaml_lines(entry, origins, f"{name}.{index}", f"{indent}    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            origin = origins.get(name, key)
            comment = "" if origin.rpartition(".")[2] == key else f"  # {origin}"
            yield f"{indent}{shown}: {json.dumps(value, ensure_ascii=False)}{comment}"
