"""`gracetune examples`: the run files that come with gracetune, to list, print or copy."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping
    from importlib.resources.abc import Traversable

HELP = "List the example run files; with a NAME, print one; with --copy, copy them to a folder."

_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
_COMMENT_MARKS = ("//", "#")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("name", nargs="?", help="one example; without it: all of them")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="copy into this folder")


def run(args: argparse.Namespace) -> int:
    """List, print or copy."""
    # A checkout has a link there to its examples/, a wheel has the files themselves.
    known = find_examples(files("gracetune") / "examples")
    chosen = known if args.name is None else {args.name: _pick(known, args.name)}
    if args.copy is not None:
        copy_examples(chosen.values(), args.copy)
    elif args.name is not None:
        print(chosen[args.name].read_text(encoding="utf-8"), end="")
    else:
        width = max(map(len, known), default=0)
        for name, file in known.items():
            print(f"{name:<{width}}  {first_comment(file.read_text(encoding='utf-8'))}".rstrip())
    return 0


def find_examples(folder: Traversable) -> dict[str, Traversable]:
    """Every run file in the folder, by its name without the ending."""
    found = {
        Path(entry.name).stem: entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES)
    }
    return dict(sorted(found.items()))


def first_comment(text: str) -> str:
    """The first line that is a comment, without its mark: what the example is for."""
    for line in map(str.strip, text.splitlines()):
        for mark in _COMMENT_MARKS:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
    return ""


def copy_examples(chosen: Iterable[Traversable], folder: Path) -> None:
    """Copy into a folder, made where it is missing; a file that is there is never replaced."""
    for example in chosen:
        target = folder / example.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(example.read_bytes())
        except FileExistsError as error:
            raise ConfigError(
                f"{error.filename} is there already and is not replaced. "
                "Move it away, or copy to another folder."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--copy {folder}: {error.strerror}. Name a folder that can be written to."
            ) from error
        print(target)


def _pick(known: Mapping[str, Traversable], name: str) -> Traversable:
    if name not in known:
        raise ConfigError(f"example {name!r} is not known. Known: {', '.join(known)}.")
    return known[name]
