"""`gracetune examples`: list, print or copy the run files that come with gracetune."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.dataset_schema import ShapesSection
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping
    from importlib.resources.abc import Traversable

HELP = (
    "List the example run files; with a NAME, print that one, or list all that match; with --copy, "
    "copy them to a folder."
)

_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
_COMMENT_MARKS = ("//", "#")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune examples`."""
    parser.add_argument(
        "name", nargs="?", help="the name of an example or a part of it, such as flux"
    )
    parser.add_argument("--copy", type=Path, metavar="DIR", help="copy into this folder")
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="draw captioned images of stars into this folder, to try out `gracetune init`",
    )


def run(args: argparse.Namespace) -> int:
    """List the example run files, print or copy them, or draw example images."""
    if args.images is not None:
        draw_images(args.images)
        return 0
    # In a checkout this is a link to examples/; a wheel contains the files themselves.
    known = find_examples(files("gracetune") / "examples")
    chosen = known if args.name is None else match_examples(known, args.name)
    if args.copy is not None:
        copy_examples(chosen.values(), args.copy)
    elif args.name is not None and len(chosen) == 1:
        print(*(file.read_text(encoding="utf-8") for file in chosen.values()), end="")
    else:
        width = max(map(len, chosen), default=0)
        for name, file in chosen.items():
            print(f"{name:<{width}}  {first_comment(file.read_text(encoding='utf-8'))}".rstrip())
    return 0


def find_examples(folder: Traversable) -> dict[str, Traversable]:
    """Return the run files in a folder, by file name without suffix."""
    found = {
        Path(entry.name).stem: entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES)
    }
    return dict(sorted(found.items()))


def first_comment(text: str) -> str:
    """Return the first comment line of a run file, which describes the example."""
    for line in map(str.strip, text.splitlines()):
        for mark in _COMMENT_MARKS:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
    return ""


def copy_examples(chosen: Iterable[Traversable], folder: Path) -> None:
    """Copy examples to a folder, which is created if needed; raise if a file exists."""
    for example in chosen:
        target = folder / example.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(example.read_bytes())
        except FileExistsError as error:
            raise ConfigError(
                f"{error.filename} already exists and is not replaced. "
                "Move it away, or copy to another folder."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--copy is {folder}: {error.strerror}. Name a folder that you may write to."
            ) from error
        print(target)


def draw_images(folder: Path) -> None:
    """Draw the images that examples/demo-lora.json trains on, and print how many there are."""
    from gracetune.data.demo_dataset import MARKER, ShapesSource

    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise ConfigError(f"--images is {folder}, which contains other files. Name a new folder.")
    section = ShapesSection(concept="star", copies=12)
    source = ShapesSource(folder, section, emit=lambda _: None, setting="--images")
    count = sum(key.endswith(".png") for key in source.keys())  # noqa: SIM118  not a dict
    print(f"{folder}  {count} images of stars with captions")


def match_examples(known: Mapping[str, Traversable], name: str) -> dict[str, Traversable]:
    """Return the example with this name, or else those that start with it or contain it.

    Spelling does not matter: `qwen_image`, `Qwen-Image` and `qwen image` are the same.
    """
    wanted = _normalized(name)
    for fits in (str.__eq__, str.startswith, str.__contains__):
        found = {each: file for each, file in known.items() if fits(_normalized(each), wanted)}
        if found:
            return found
    raise ConfigError(f"there is no example {name!r}. Use one of: {', '.join(known)}.")


def _normalized(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
