"""Check that validation images of the demo show the colours and shapes of their prompts.

    python examples/judge_shapes.py runs/demo [--min-colour 0.95] [--min-shape 0.90] [--json]

The check uses simple rules on pixels: the background is the colour of the border, the figure is
what differs from it, the figure's colour is the nearest named colour, and its shape is the ideal
shape with the largest overlap, if that is large enough. The exit code is 1 if too few images match.
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

from gracetune.data.demo_dataset import BACKGROUNDS, COLOURS, CONCEPTS, SHAPES, stencil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Pixels = NDArray[np.float64]
    Mask = NDArray[np.bool_]

EDGE = 24
"""Width and height to which images are resized; the shapes are drawn in this size."""
SUPERSAMPLING = 4
"""Supersampling factor of the ideal shapes."""
MAX_COLOUR_DISTANCE = 70.0
"""Largest RGB distance of a colour from the named colour."""
MIN_COLOUR_SHARE = 0.6
"""Smallest share of a border, or of a figure, that must have its colour."""
AREA_RANGE = (0.05, 0.5)
"""Smallest and largest share of the image that a figure may fill."""
MIN_OVERLAP = {"circle": 0.84, "square": 0.78, "triangle": 0.74, "cross": 0.74, "star": 0.74}
"""Smallest overlap (intersection over union) with the ideal shape; a clean drawing has over 0.9.

Any round blob overlaps a circle by 0.8, so a circle needs more than the other shapes.
"""
MIN_LEAD = 0.01
"""Smallest lead of the best shape over the second best; with less, the figure is neither."""
SCALES = (0.88, 0.94, 1.0, 1.06, 1.12)
SHIFTS = (-0.75, 0.0, 0.75)
"""Scales and shifts (in pixels) that are tried around the figure's own size and position."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Colour, shape and background of an image; None for what could not be recognised."""

    colour: str | None
    shape: str | None
    background: str | None


@dataclass(frozen=True, slots=True)
class Judged:
    """A prompt, the features recognised in its image, and which of them match the prompt."""

    prompt: str
    verdict: Verdict
    colour_right: bool
    shape_right: bool


def judge(image: Image.Image) -> Verdict:
    """Recognise colour, shape and background of an image."""
    small = image.convert("RGB").resize((EDGE, EDGE), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float64)
    border = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    ground = np.median(border, axis=0)
    background = _name(ground, BACKGROUNDS, border)
    figure = _figure(pixels, ground)
    if not AREA_RANGE[0] <= figure.mean() <= AREA_RANGE[1]:
        return Verdict(None, None, background)
    inside = pixels[figure]
    ink = np.median(inside, axis=0)
    colour = _name(ink, COLOURS, inside)
    if background is None or colour is None:
        return Verdict(colour, None, background)
    return Verdict(colour, _shape(_coverage(pixels, figure, ground, ink)), background)


def overlaps(coverage: Pixels) -> dict[str, float]:
    """Return the best overlap of the figure with each shape, with soft edges in both.

    For coverages between 0 and 1, intersection over union is the sum of the minima over the sum of
    the maxima.
    """
    soft = _soften(coverage)
    found = {}
    for shape in (*SHAPES, *CONCEPTS):
        ideals = _soften(_ideals(shape, coverage))
        common = np.minimum(ideals, soft).sum(axis=(1, 2))
        found[shape] = float((common / np.maximum(ideals, soft).sum(axis=(1, 2))).max())
    return found


def _name(colour: Pixels, names: Mapping[str, tuple[int, int, int]], pixels: Pixels) -> str | None:
    """Return the nearest colour name, if it is close and most of the pixels have that colour."""
    distances = {name: math.dist(colour, value) for name, value in names.items()}
    name = min(distances, key=lambda name: distances[name])
    matching = np.linalg.norm(pixels - np.array(names[name]), axis=-1) < MAX_COLOUR_DISTANCE
    return (
        name
        if distances[name] < MAX_COLOUR_DISTANCE and matching.mean() >= MIN_COLOUR_SHARE
        else None
    )


def _figure(pixels: Pixels, ground: Pixels) -> Mask:
    """Return the pixels that are closer to the figure's colour than to the background."""
    far = np.linalg.norm(pixels - ground, axis=-1)
    core = max(
        _components(far > MAX_COLOUR_DISTANCE),
        key=np.sum,
        default=np.zeros_like(far, dtype=np.bool_),
    )
    if not core.any():
        return core
    colour = np.median(pixels[core], axis=0)
    parts = _components(np.linalg.norm(pixels - colour, axis=-1) < far)
    # Specks of one or two pixels are noise. Larger parts stay, and count against the shape.
    figure = np.zeros_like(core)
    for part in parts:
        if part.sum() > 2:
            figure |= part
    return figure


def _coverage(pixels: Pixels, figure: Mask, ground: Pixels, ink: Pixels) -> Pixels:
    """Return the share of each pixel that the figure covers: 0 at `ground` colour, 1 at `ink`."""
    way = ink - ground
    share = ((pixels - ground) @ way / (way @ way)).clip(0, 1)
    return np.where(_grow(figure), share, 0.0)


def _components(mask: Mask) -> Iterator[Mask]:
    """Yield the connected components of a mask, with 8-connectivity."""
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
    """Dilate a mask by one pixel."""
    padded = np.pad(mask, 1)
    tall = padded[:-2] | padded[1:-1] | padded[2:]
    return np.asarray(tall[:, :-2] | tall[:, 1:-1] | tall[:, 2:])


def _soften(coverage: Pixels) -> Pixels:
    """Blur the last two axes by one pixel, so that ragged edges do not matter."""
    padded = np.pad(coverage, [(0, 0)] * (coverage.ndim - 2) + [(1, 1), (1, 1)])
    tall = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    return np.asarray(tall[..., :-2] + 2 * tall[..., 1:-1] + tall[..., 2:]) / 16


def _shape(coverage: Pixels) -> str | None:
    found = sorted(overlaps(coverage).items(), key=lambda item: -item[1])
    (best, fit), (_, second) = found[:2]
    return best if fit >= MIN_OVERLAP[best] and fit - second >= MIN_LEAD else None


def _ideals(shape: str, coverage: Pixels) -> Pixels:
    """Draw the shape with about the figure's area and centre, at several scales and shifts."""
    edge = EDGE * SUPERSAMPLING
    middle, unit_radius = edge / 2, edge / 3
    unit = np.asarray(stencil(shape, edge, (middle, middle), unit_radius)) / 255
    radius = unit_radius * math.sqrt(coverage.sum() * SUPERSAMPLING**2 / unit.sum())
    # The centroid of a triangle is not the point that it is drawn around.
    shift = (_centre(unit) - middle) * radius / unit_radius
    x, y = _centre(coverage) * SUPERSAMPLING - shift
    drawn = [
        np.asarray(
            stencil(
                shape, edge, (x + right * SUPERSAMPLING, y + down * SUPERSAMPLING), radius * scale
            )
        )
        for scale in SCALES
        for right in SHIFTS
        for down in SHIFTS
    ]
    blocks = np.stack(drawn).reshape(-1, EDGE, SUPERSAMPLING, EDGE, SUPERSAMPLING)
    return np.asarray(blocks.mean(axis=(2, 4)) / 255)


def _centre(coverage: Pixels) -> Pixels:
    rows, columns = np.indices(coverage.shape) + 0.5
    return np.average([columns.ravel(), rows.ravel()], axis=1, weights=coverage.ravel())


def judge_run(folder: Path) -> list[Judged]:
    """Judge the newest validation images of a run."""
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
    """Compare an image with the words of its prompt; colour and shape are judged independently."""
    words = prompt.lower().split()
    verdict = judge(image)
    return Judged(prompt, verdict, verdict.colour in words, verdict.shape in words)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each prompt and the two shares; return 1 if a share is too small."""
    parser = argparse.ArgumentParser(
        description="Judge the validation images of a run on the drawn shapes."
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument(
        "--min-colour", type=float, default=0.95, help="smallest share that must be right"
    )
    parser.add_argument(
        "--min-shape", type=float, default=0.90, help="smallest share that must be right"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)

    judged = judge_run(options.run)
    colour = sum(result.colour_right for result in judged) / len(judged)
    shape = sum(result.shape_right for result in judged) / len(judged)
    passed = colour >= options.min_colour and shape >= options.min_shape
    if options.json:
        images = [asdict(one) for one in judged]
        shares = {"colour": colour, "shape": shape, "passed": passed}
        print(json.dumps({**shares, "pictures": images}, indent=2))
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
