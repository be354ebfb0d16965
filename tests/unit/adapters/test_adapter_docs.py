"""docs/adapters.md matches the code."""

import argparse
import re
import shlex
from pathlib import Path

from gracetune.adapters.files.formats import FORMATS
from gracetune.cli.adapter import add_arguments

TEXT = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_docs_list_every_format_with_its_tools():
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.+?) \|$", TEXT.partition("## Formats")[2], re.M))
    assert {form.name: form.tools for form in FORMATS}.items() <= rows.items()


def test_commands_in_docs_parse():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    lines = re.findall(r"^gracetune adapter (.+)$", TEXT, re.M)
    assert len(lines) == 7
    for line in lines:
        parser.parse_args(shlex.split(line.replace("[", "").replace("]", "")))
