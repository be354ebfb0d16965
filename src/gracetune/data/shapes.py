"""The made data set: coloured shapes on plain backgrounds, drawn here, captioned exactly.

A third of the combinations is never drawn, so that a run can show whether it learned the words or
the pictures. Once its folder is made it is a folder like any other.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from PIL import Image, ImageDraw

from gracetune.data.source import FolderSource, data_dir
from gracetune.errors import ConfigError, DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.schema import DatasetSection, ShapesSection
    from gracetune.events.dispatcher import Emit

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 190),
    "orange": (245, 130, 30),
}
SHAPES = ("circle", "square", "triangle", "cross")
CONCEPTS = ("star",)
"""Shapes that the usual set lacks: what an adapter can be taught."""
BACKGROUNDS: dict[str, Colour] = {
    "black": (15, 15, 15),
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "brown": (95, 60, 35),
}
MARKER = ".gracetune-shapes.json"

_DRAWING = 1
"""Counted up when the same settings would draw other pictures."""
_FINER = 8
"""Shapes are drawn this many times larger and reduced, which smooths their edges."""


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """One combination of words."""

    colour: str
    shape: str
    background: str

    @property
    def caption(self) -> str:
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} on a {self.background} background"


def held_out(concept: str | None = None) -> tuple[ShapeSpec, ...]:
    """The combinations that are never drawn: a third, every word among them."""
    return tuple(figure for figure, held in _figures(concept) if held)


def drawn(concept: str | None = None) -> tuple[ShapeSpec, ...]:
    """The combinations to train on."""
    return tuple(figure for figure, held in _figures(concept) if not held)


def stencil(shape: str, edge: int, centre: tuple[float, float], radius: float) -> Image.Image:
    """The shape in white on black, one byte a pixel, drawn as hard as pixels are."""
    image = Image.new("L", (edge, edge), 0)
    pen = ImageDraw.Draw(image)
    x, y = centre
    match shape:
        case "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        case "square":
            half = 0.86 * radius
            pen.rectangle((x - half, y - half, x + half, y + half), fill=255)
        case "triangle":
            foot = y + 0.8 * radius
            pen.polygon([(x, y - radius), (x - radius, foot), (x + radius, foot)], fill=255)
        case "cross":
            half = 0.36 * radius
            pen.rectangle((x - half, y - radius, x + half, y + radius), fill=255)
            pen.rectangle((x - radius, y - half, x + radius, y + half), fill=255)
        case "star":
            turns = [
                (radius if corner % 2 == 0 else 0.4 * radius, math.pi * corner / 5)
                for corner in range(10)
            ]
            pen.polygon([(x + r * math.sin(a), y - r * math.cos(a)) for r, a in turns], fill=255)
        case _:
            raise AssertionError(f"no stencil for {shape!r}")
    return image


def draw(figure: ShapeSpec, size: int, copy: int, seed: int) -> Image.Image:
    """One picture; the copy's number moves it by up to 1/24 of the edge and sets its size."""
    fine = size * _FINER
    uniform = _uniforms(f"{seed} {copy} {figure.caption}")
    radius = fine * (7 + 2 * uniform[0]) / 24
    centre = (fine * (11 + 2 * uniform[1]) / 24, fine * (11 + 2 * uniform[2]) / 24)
    image = Image.new("RGB", (fine, fine), BACKGROUNDS[figure.background])
    image.paste(COLOURS[figure.colour], mask=stencil(figure.shape, fine, centre, radius))
    return image.resize((size, size), Image.Resampling.LANCZOS)


class ShapesSource:
    """The folder of drawn shapes, made when it is not there."""

    def __init__(
        self, path: str | Path, section: ShapesSection, emit: Emit, setting: str = "datasets"
    ) -> None:
        if section.concept is not None and section.concept not in CONCEPTS:
            raise ConfigError(
                f"{setting}.shapes.concept is {section.concept!r}; known: {', '.join(CONCEPTS)}."
            )
        root = Path(path).expanduser().resolve()
        try:
            _make(root, section, emit, f"{setting}.instance_data_dir")
        except OSError as error:
            raise DataError(
                f"{setting}.instance_data_dir is {str(path)!r}: the shapes cannot be made there "
                f"({error}). Name a folder that can be written."
            ) from error
        self._folder = FolderSource(root, setting)

    def keys(self) -> Sequence[str]:
        return self._folder.keys()

    def read(self, key: str) -> bytes:
        return self._folder.read(key)

    def nbytes(self, key: str) -> int:
        return self._folder.nbytes(key)

    def describe(self) -> str:
        return f"the made shapes in {self._folder.describe()}"


def open_shapes(section: DatasetSection, setting: str, emit: Emit) -> ShapesSource:
    """The source of `shapes`."""
    return ShapesSource(data_dir(section, setting), section.shapes, emit, setting)


def _figures(concept: str | None) -> list[tuple[ShapeSpec, bool]]:
    """Every combination in order, and whether it is held out."""
    shapes = SHAPES if concept is None else (concept,)
    words = itertools.product(enumerate(COLOURS), enumerate(shapes), enumerate(BACKGROUNDS))
    return [
        (ShapeSpec(colour, shape, background), (ci + si + bi) % 3 == 0)
        for (ci, colour), (si, shape), (bi, background) in words
    ]


def _uniforms(what: str) -> tuple[float, float, float]:
    """Three numbers in [0, 1) that depend on nothing but the words."""
    digest = blake3(what.encode()).digest(length=24)
    parts = [int.from_bytes(digest[at : at + 8], "big") >> 11 for at in (0, 8, 16)]
    return (parts[0] / 2**53, parts[1] / 2**53, parts[2] / 2**53)


def _make(root: Path, section: ShapesSection, emit: Emit, setting: str) -> None:
    """Have the folder hold what is asked: nothing to do, made, or made anew if it is all ours."""
    settings = {"drawing": _DRAWING, **section.model_dump()}
    if root.is_dir() and any(root.iterdir()):
        made = _marker(root, setting)
        if made["settings"] == settings:
            return
        _refuse_foreign(root, made["files"], setting)
        emit(Notice(f"{setting}: the shapes in {root} are made anew, for their settings changed"))
    root.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    try:
        new, old = staging / "new", staging / "old"
        new.mkdir()
        files = _draw_all(new, section)
        marker = {"settings": settings, "files": files}
        (new / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        if root.is_dir() and any(root.iterdir()):
            os.replace(root, old)
        _put(new, root, settings, setting)
    finally:
        shutil.rmtree(staging)


def _put(new: Path, root: Path, settings: Mapping[str, object], setting: str) -> None:
    """Take the place; another rank that was quicker with the same settings did our work."""
    try:
        os.replace(new, root)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or _marker(root, setting)["settings"] != settings:
            raise


def _draw_all(folder: Path, section: ShapesSection) -> dict[str, str]:
    """Draw and caption every combination; the digest of each file by name."""
    for figure in drawn(section.concept):
        for copy in range(section.copies):
            name = f"{figure.colour}-{figure.shape}-{figure.background}-{copy:03d}"
            draw(figure, section.size, copy, section.seed).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(figure.caption + "\n", encoding="utf-8")
    return _digests(folder)


def _digests(folder: Path) -> dict[str, str]:
    """Every file by name; a link has no digest of ours, wherever it leads."""
    return {
        str(path.relative_to(folder)): "link"
        if path.is_symlink()
        else blake3(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or not path.is_dir()) and path != folder / MARKER
    }


def _marker(root: Path, setting: str) -> dict[str, Mapping[str, object]]:
    """What the folder says about itself; without that it is someone else's."""
    try:
        made = json.loads((root / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        made = None
    match made:
        case {"settings": dict(), "files": dict()}:
            return {"settings": made["settings"], "files": made["files"]}
    raise DataError(
        f"{setting} is {root}: it holds files that were not made as shapes. Name an empty or new "
        "folder, or set type: local to train on what is there."
    )


def _refuse_foreign(root: Path, files: Mapping[str, object], setting: str) -> None:
    """Only what was made here and is still as it was made may be thrown away."""
    foreign = [name for name, digest in _digests(root).items() if files.get(name) != digest]
    if foreign:
        raise DataError(
            f"{setting} is {root}: it holds shapes of other settings and also {len(foreign)} files "
            f"that were added or changed since ({', '.join(foreign[:3])}), so it is not made anew. "
            "Move these away, or name another folder."
        )
