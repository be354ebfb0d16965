"""Find every command, block, variable, import, name, file and setting in the seed documents.

The seed documents are the five guides of the forks that gracetune replaces (`tests/data/seeds`).
An item is a short text that a reader of a guide may type or look for:

- each command of a shell block, and each import of a Python block;
- each block of settings or code as a whole, called `block 001:57` after its first line, and each
  key of a JSON or YAML block;
- each text in backticks;
- each name in the prose: words with an underscore, a file extension, brackets or capitals inside.
"""

from __future__ import annotations

import re
from pathlib import Path

SEEDS = Path(__file__).parents[1] / "data" / "seeds"

_FENCE = re.compile(r"^ *```(\w*)$")
_COMMAND = re.compile(r" +git ")
"""A command in an indented line outside of a block."""
_JSON_KEY = re.compile(r'"(\w+)" *:')
_YAML_KEY = re.compile(r"^ *(\w+):")
_EMPHASIS = re.compile(r"^_(.*)_$")
_SPAN = re.compile(r"`([^`]+)`")
_NAME = re.compile(
    r"""
    (?<![\w.$-])
    (?:
        --[a-z][\w-]+                                             # an option
      | [\w./-]*\w\.(?:py|sh|md|json|ya?ml|txt|patch|log|wav)\b   # a file
      | [A-Za-z_][\w.]*\(\)                                       # a function
      | (?:[A-Za-z_]\w*\.)*_?[A-Za-z]\w*_\w*                      # a name with an underscore
      | [A-Z][a-z]+(?:[A-Z][a-z]+)+\b                             # a class
      | [a-z]+\.[a-z]+\.[a-z_.]+\b                                # a dotted name
    )
    """,
    re.VERBOSE,
)


def seed_items(folder: Path = SEEDS) -> dict[str, list[str]]:
    """Return every item of the documents, with its places as `document:line`."""
    items: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.txt")):
        for line, item in _document_items(file.name[:3], file.read_text("utf-8")):
            items.setdefault(item, []).append(f"{file.name[:3]}:{line}")
    return items


def _document_items(document: str, text: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    block: list[tuple[int, str]] = []
    language: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence is None and language is not None:
            block.append((number, line))
        elif fence is None:
            found += ((number, item) for item in _line_items(line))
        elif language is None:
            language = fence[1]
        else:
            found += _block_items(document, language, block)
            language, block = None, []
    assert language is None, f"{document}: a block is not closed"
    return found


def _line_items(line: str) -> list[str]:
    """Return the items of a line of prose: texts in backticks, and names outside of them."""
    if _COMMAND.match(line):
        return [line.strip()]
    line = _EMPHASIS.sub(r"\1", line)
    spans = [span.strip() for span in _SPAN.findall(line)]
    rest = re.sub(r"\]\(#[^)]*\)", "]", _SPAN.sub(" ", line))  # links within the document
    names = [match[0].rstrip(".") for match in _NAME.finditer(rest)]
    return list(dict.fromkeys([*spans, *names]))


def _block_items(
    document: str, language: str, block: list[tuple[int, str]]
) -> list[tuple[int, str]]:
    first, text = block[0]
    whole = [(first, f"block {document}:{first}")]
    if language in ("json", "yaml"):
        key = _JSON_KEY if language == "json" else _YAML_KEY
        return whole + [(number, name) for number, line in block for name in key.findall(line)]
    if language == "python" or text.lstrip().startswith("#!"):
        lines = [(number, line.strip()) for number, line in block]
        return whole + [each for each in lines if each[1].startswith(("from ", "import "))]
    return _commands(block)


def _commands(block: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the commands of a shell block, without comments, with continued lines joined."""
    found: list[tuple[int, str]] = []
    joined, start = "", 0
    for number, line in block:
        text = line.split(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        start = start or number
        if text.endswith("\\"):
            joined += text[:-1].strip() + " "
            continue
        found.append((start, joined + text))
        joined, start = "", 0
    return found
