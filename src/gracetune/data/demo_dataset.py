"""Generate a dataset of captioned images for the demo: coloured shapes on plain backgrounds.

A third of the combinations of colour, shape and background is held out. Sampling these shows
whether a model has learned the words or memorised the images. The images are written to a folder
when the dataset is first used.
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

    from gracetune.config.dataset_schema import DatasetSection, ShapesSection
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
"""Shapes that the usual dataset does not contain, so that an adapter can learn them as new."""
BACKGROUNDS: dict[str, Colour] = {
    "black": (15, 15, 15),
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "brown": (95, 60, 35),
}
MARKER = ".gracetune-shapes.json"

_DRAWING_VERSION = 1
"""Version of the drawing code. It must be raised with every change that gives other images for the
same settings; existing folders are then recreated."""
_SUPERSAMPLING = 8
"""Factor by which images are drawn larger and then reduced, for smooth edges."""


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """A combination of colour, shape and background, each by its name in captions."""

    colour: str
    shape: str
    background: str

    @property
    def caption(self) -> str:
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} on a {self.background} background"


def held_out(concept: str | None = None) -> tuple[ShapeSpec, ...]:
    """Return the third of all combinations of colour, shape and background that is not trained on.

    Each colour, shape and background also occurs in the training combinations. `concept` is a
    shape to use instead of the usual ones.
    """
    return tuple(figure for figure, held in _combinations(concept) if held)


def training_combinations(concept: str | None = None) -> tuple[ShapeSpec, ...]:
    """Return the combinations of colour, shape and background in the dataset: two thirds of all.

    The others are held out. `concept` is a shape to use instead of the usual ones.
    """
    return tuple(figure for figure, held in _combinations(concept) if not held)


def stencil(shape: str, edge: int, centre: tuple[float, float], radius: float) -> Image.Image:
    """Draw a shape in white on a square black image, without anti-aliasing.

    `edge` is the size of the image; `centre` and `radius` place the shape. All are in pixels.
    """
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
    """Draw an image of `size` x `size` pixels.

    The position (by up to 1/24 of the edge) and the size of the shape depend on `copy` and `seed`.
    """
    fine = size * _SUPERSAMPLING
    uniform = _uniforms(f"{seed} {copy} {figure.caption}")
    radius = fine * (7 + 2 * uniform[0]) / 24
    centre = (fine * (11 + 2 * uniform[1]) / 24, fine * (11 + 2 * uniform[2]) / 24)
    image = Image.new("RGB", (fine, fine), BACKGROUNDS[figure.background])
    image.paste(COLOURS[figure.colour], mask=stencil(figure.shape, fine, centre, radius))
    return image.resize((size, size), Image.Resampling.LANCZOS)


class ShapesSource:
    """A source with the generated images and captions; it creates their folder if necessary."""

    def __init__(
        self, path: str | Path, section: ShapesSection, emit: Emit, setting: str = "datasets"
    ) -> None:
        if section.concept is not None and section.concept not in CONCEPTS:
            raise ConfigError(
                f"{setting}.shapes.concept is {section.concept!r}; known: {', '.join(CONCEPTS)}."
            )
        root = Path(path).expanduser().resolve()
        try:
            _ensure_drawn(root, section, emit, f"{setting}.instance_data_dir")
        except OSError as error:
            raise DataError(
                f"{setting}.instance_data_dir is {str(path)!r}: the shapes cannot be written there "
                f"({error}). Set a writable folder."
            ) from error
        self._folder = FolderSource(root, setting)

    def keys(self) -> Sequence[str]:
        return self._folder.keys()

    def read(self, key: str) -> bytes:
        return self._folder.read(key)

    def nbytes(self, key: str) -> int:
        return self._folder.nbytes(key)

    def describe(self) -> str:
        return f"the generated shapes in {self._folder.describe()}"


def open_shapes(section: DatasetSection, setting: str, emit: Emit) -> ShapesSource:
    """Open the source of a dataset of type `shapes`."""
    return ShapesSource(data_dir(section, setting), section.shapes, emit, setting)


def _combinations(concept: str | None) -> list[tuple[ShapeSpec, bool]]:
    """Return all combinations of colour, shape and background, each with True if it is held out.

    `concept` is a shape to use instead of the usual ones.
    """
    shapes = SHAPES if concept is None else (concept,)
    words = itertools.product(enumerate(COLOURS), enumerate(shapes), enumerate(BACKGROUNDS))
    return [
        (ShapeSpec(colour, shape, background), (ci + si + bi) % 3 == 0)
        for (ci, colour), (si, shape), (bi, background) in words
    ]


def _uniforms(what: str) -> tuple[float, float, float]:
    """Return three random numbers in [0, 1) that depend only on the text `what`."""
    digest = blake3(what.encode()).digest(length=24)
    parts = [int.from_bytes(digest[at : at + 8], "big") >> 11 for at in (0, 8, 16)]
    return (parts[0] / 2**53, parts[1] / 2**53, parts[2] / 2**53)


def _ensure_drawn(root: Path, section: ShapesSection, emit: Emit, setting: str) -> None:
    """Create the folder of images, or recreate it if the settings changed.

    Raises an error if the folder contains files that gracetune did not generate.
    """
    settings = {"drawing": _DRAWING_VERSION, **section.model_dump()}
    if root.is_dir() and any(root.iterdir()):
        made = _marker(root, setting)
        if made["settings"] == settings:
            return
        _check_no_user_files(root, made["files"], setting)
        emit(Notice(f"{setting}: recreating the shapes in {root}, because their settings changed"))
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
        _move_into_place(new, root, settings, setting)
    finally:
        shutil.rmtree(staging)


def _move_into_place(new: Path, root: Path, settings: Mapping[str, object], setting: str) -> None:
    """Rename the new folder to `root`, unless another rank has already created the same one."""
    try:
        os.replace(new, root)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or _marker(root, setting)["settings"] != settings:
            raise


def _draw_all(folder: Path, section: ShapesSection) -> dict[str, str]:
    """Write all images and captions to a folder; return the digest of each file by name."""
    for figure in training_combinations(section.concept):
        for copy in range(section.copies):
            name = f"{figure.colour}-{figure.shape}-{figure.background}-{copy:03d}"
            draw(figure, section.size, copy, section.seed).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(figure.caption + "\n", encoding="utf-8")
    return _digests(folder)


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder by name; for a symbolic link, the word "link"."""
    return {
        str(path.relative_to(folder)): "link"
        if path.is_symlink()
        else blake3(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if (path.is_symlink() or not path.is_dir()) and path != folder / MARKER
    }


def _marker(root: Path, setting: str) -> dict[str, Mapping[str, object]]:
    """Read the marker file, by which a folder of generated images is recognised.

    It contains the settings and the digest of each file. Raises an error if the folder has none.
    """
    try:
        made = json.loads((root / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        made = None
    match made:
        case {"settings": dict(), "files": dict()}:
            return {"settings": made["settings"], "files": made["files"]}
    raise DataError(
        f"{setting} is {root}: it contains files that were not generated as shapes. Set an empty "
        "or new folder, or set type: local to train on these files."
    )


def _check_no_user_files(root: Path, files: Mapping[str, object], setting: str) -> None:
    """Raise an error if the user has added or changed files in the folder of generated images.

    `files` has the digests of the generated files by name.
    """
    foreign = [name for name, digest in _digests(root).items() if files.get(name) != digest]
    if foreign:
        raise DataError(
            f"{setting} is {root}: it contains shapes of other settings and {len(foreign)} files "
            f"that were added or changed since ({', '.join(foreign[:3])}), so it is not recreated. "
            "Move these files away, or set another folder."
        )
