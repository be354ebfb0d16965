"""Look at the pictures of a run on the made shapes, and say which of them show what was asked.

    python examples/judge_shapes.py runs/demo [--min-colour 0.95] [--min-shape 0.90] [--json]

It judges pixels alone, by rules that anyone can follow: the background is what the border shows,
the figure is what differs from it, its colour is the nearest named one, and its shape is the ideal
one that covers it best, if any covers it well. It exits with 1 where too few are right.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from gracetune.data.shapes import BACKGROUNDS, COLOURS, CONCEPTS, SHAPES, stencil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Pixels = NDArray[np.float64]
    Mask = NDArray[np.bool_]

EDGE = 24
"""Pictures are judged at this edge, the one the shapes are drawn for."""
FINER = 4
"""Ideal shapes are compared on a grid this many times finer."""
NEAR = 70.0
"""How far in RGB a colour may be from the one it is named after."""
EVEN = 0.6
"""The share of a border, or of a figure, that must have one colour."""
AREA = (0.05, 0.5)
"""The share of the picture that a figure may fill."""
COVERS = {"circle": 0.84, "square": 0.78, "triangle": 0.74, "cross": 0.74, "star": 0.74}
"""How well the ideal shape must cover the figure: 1 is perfect, a clean drawing has over 0.9.

Any round heap of pixels covers a circle by 0.8, so that a circle has to be better than the rest.
"""
LEADS = 0.01
"""How much better than the next shape the best must cover it; less is a blob between two."""
SCALES = (0.88, 0.94, 1.0, 1.06, 1.12)
SHIFTS = (-0.75, 0.0, 0.75)
"""Sizes and places (in pixels) that are tried around those of the figure."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a picture shows; none where it shows nothing of the kind."""

    colour: str | None
    shape: str | None
    background: str | None


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt, what its picture shows, and whether that is what the prompt asked."""

    prompt: str
    verdict: Verdict
    colour_right: bool
    shape_right: bool


def judge(image: Image.Image) -> Verdict:
    """Name colour, shape and background of one picture."""
    small = image.convert("RGB").resize((EDGE, EDGE), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    ground = np.median(border, axis=0)
    background = _name(ground, BACKGROUNDS, border)
    figure = _figure(pixels, ground)
    if not AREA[0] <= figure.mean() <= AREA[1]:
        return Verdict(None, None, background)
    inside = pixels[figure]
    ink = np.median(inside, axis=0)
    colour = _name(ink, COLOURS, inside)
    if background is None or colour is None:
        return Verdict(colour, None, background)
    return Verdict(colour, _shape(_coverage(pixels, figure, ground, ink)), background)


def fits(coverage: Pixels) -> dict[str, float]:
    """For each shape, how well the best of its ideals covers the figure, edges softened in both.

    It is intersection over union, for coverages between 0 and 1: the sum of the smaller ones over
    the sum of the larger ones.
    """
    soft = _soften(coverage)
    found = {}
    for shape in (*SHAPES, *CONCEPTS):
        ideals = _soften(_ideals(shape, coverage))
        common = np.minimum(ideals, soft).sum(axis=(1, 2))
        found[shape] = float((common / np.maximum(ideals, soft).sum(axis=(1, 2))).max())
    return found


def _name(colour: Pixels, names: Mapping[str, tuple[int, int, int]], pixels: Pixels) -> str | None:
    """The nearest name, if it is near and most of the pixels bear it."""
    distances = {name: math.dist(colour, value) for name, value in names.items()}
    name = min(distances, key=lambda name: distances[name])
    bearing = np.linalg.norm(pixels - np.array(names[name]), axis=-1) < NEAR
    return name if distances[name] < NEAR and bearing.mean() >= EVEN else None


def _figure(pixels: Pixels, ground: Pixels) -> Mask:
    """The pixels nearer to the figure's colour than to the ground, without loose specks."""
    far = np.linalg.norm(pixels - ground, axis=-1)
    core = max(_components(far > NEAR), key=np.sum, default=np.zeros_like(far, dtype=np.bool_))
    if not core.any():
        return core
    colour = np.median(pixels[core], axis=0)
    parts = _components(np.linalg.norm(pixels - colour, axis=-1) < far)
    # A pixel or two are the sampler's noise; larger parts stay, and count against the shape.
    figure = np.zeros_like(core)
    for part in parts:
        if part.sum() > 2:
            figure |= part
    return figure


def _coverage(pixels: Pixels, figure: Mask, ground: Pixels, ink: Pixels) -> Pixels:
    """How much of each pixel the figure covers: its place on the way from ground to ink."""
    way = ink - ground
    share = ((pixels - ground) @ way / (way @ way)).clip(0, 1)
    return np.where(_grow(figure), share, 0.0)


def _components(mask: Mask) -> Iterator[Mask]:
    """The parts of a mask whose pixels touch, also by corners."""
    left = mask.copy()
    while left.any():
        part = np.zeros_like(left)
        part.flat[int(np.argmax(left))] = True
        grown = _grow(part) & left
        while (grown != part).any():
            part, grown = grown, _grow(grown) & left
        left &= ~part
        yield part


def _grow(mask: Mask) -> Mask:
    """Every pixel and its eight neighbours."""
    padded = np.pad(mask, 1)
    tall = padded[:-2] | padded[1:-1] | padded[2:]
    return np.asarray(tall[:, :-2] | tall[:, 1:-1] | tall[:, 2:])


def _soften(coverage: Pixels) -> Pixels:
    """A blur of one pixel over the last two axes: ragged edges are not what is judged."""
    padded = np.pad(coverage, [(0, 0)] * (coverage.ndim - 2) + [(1, 1), (1, 1)])
    tall = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    return np.asarray(tall[..., :-2] + 2 * tall[..., 1:-1] + tall[..., 2:]) / 16


def _shape(coverage: Pixels) -> str | None:
    found = sorted(fits(coverage).items(), key=lambda item: -item[1])
    (best, fit), (_, second) = found[:2]
    return best if fit >= COVERS[best] and fit - second >= LEADS else None


def _ideals(shape: str, coverage: Pixels) -> Pixels:
    """The shape at sizes and places around those that give it the figure's area and centre."""
    edge = EDGE * FINER
    middle, unit_radius = edge / 2, edge / 3
    unit = np.asarray(stencil(shape, edge, (middle, middle), unit_radius)) / 255
    radius = unit_radius * math.sqrt(coverage.sum() * FINER**2 / unit.sum())
    # The centre of a triangle's area is not the point that it is drawn around.
    shift = (_centre(unit) - middle) * radius / unit_radius
    x, y = _centre(coverage) * FINER - shift
    drawn = [
        np.asarray(stencil(shape, edge, (x + right * FINER, y + down * FINER), radius * scale))
        for scale in SCALES
        for right in SHIFTS
        for down in SHIFTS
    ]
    blocks = np.stack(drawn).reshape(-1, EDGE, FINER, EDGE, FINER)
    return np.asarray(blocks.mean(axis=(2, 4)) / 255)


def _centre(coverage: Pixels) -> Pixels:
    rows, columns = np.indices(coverage.shape) + 0.5
    return np.average([columns.ravel(), rows.ravel()], axis=1, weights=coverage.ravel())


def judge_run(folder: Path) -> list[Judged]:
    """Judge the newest pictures of a run."""
    steps = (folder / "validation").glob("step-*/prompts.json")
    newest = max(steps, key=lambda path: int(path.parent.name[len("step-") :]), default=None)
    prompts = json.loads(newest.read_text(encoding="utf-8")) if newest else []
    if newest is None or not prompts:
        raise SystemExit(f"{folder} has no validation/step-*/prompts.json: nothing to judge.")
    return [
        judge_prompt(prompt, Image.open(newest.with_name(f"{number:03d}.png")))
        for number, prompt in enumerate(prompts)
    ]


def judge_prompt(prompt: str, image: Image.Image) -> Judged:
    """Right is what bears the prompt's own words; a right shape needs no right colour."""
    words = prompt.lower().split()
    verdict = judge(image)
    return Judged(prompt, verdict, verdict.colour in words, verdict.shape in words)


def main(arguments: Sequence[str]) -> int:
    """Print a line a prompt and the two shares; 1 where a share is below its minimum."""
    parser = argparse.ArgumentParser(description="Judge the pictures of a run on made shapes.")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--min-colour", type=float, default=0.95, help="least share right")
    parser.add_argument("--min-shape", type=float, default=0.90, help="least share right")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)

    judged = judge_run(options.run)
    colour = sum(one.colour_right for one in judged) / len(judged)
    shape = sum(one.shape_right for one in judged) / len(judged)
    passed = colour >= options.min_colour and shape >= options.min_shape
    if options.json:
        pictures = [asdict(one) for one in judged]
        shares = {"colour": colour, "shape": shape, "passed": passed}
        print(json.dumps({**shares, "pictures": pictures}, indent=2))
    else:
        for one in judged:
            mark = "ok" if one.colour_right and one.shape_right else "WRONG"
            seen = " ".join(word or "?" for word in (one.verdict.colour, one.verdict.shape))
            print(f"{mark:<6} {one.prompt:<44} {seen} on {one.verdict.background or '?'}")
        print(f"colour {colour:.1%} (at least {options.min_colour:.1%})")
        print(f"shape  {shape:.1%} (at least {options.min_shape:.1%})")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
