"""Draw line plots with Pillow, so that benchmarks need no plotting library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Literal

SIZE = (1000, 640)
LEFT, TOP, RIGHT, BOTTOM = 90, 50, 30, 70
COLOURS = ("#4e79a7", "#76b7b2", "#59a14f", "#f28e2b", "#e15759", "#b07aa1")
SCALE = 2
"""Supersampling factor, for smooth lines."""


def draw_curves(
    curves: Mapping[str, Mapping[int, float]],
    path: Path,
    title: str,
    x_label: str,
    legend: Literal["high", "low"] = "high",
) -> None:
    """Draw up to six curves over common axes.

    The y axis covers the values after the first 5 %, so that a high start does not dominate it.
    """
    assert len(curves) <= len(COLOURS), len(curves)
    points = {name: sorted(curve.items()) for name, curve in curves.items()}
    last = max(x for curve in points.values() for x, _ in curve)
    lowest = min(y for curve in points.values() for _, y in curve)
    highest = max(y for curve in points.values() for x, y in curve if x >= last / 20)
    low, high = lowest - 0.05 * (highest - lowest), highest
    image = Image.new("RGB", (SIZE[0] * SCALE, SIZE[1] * SCALE), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(15 * SCALE)
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share = (y - low) / (high - low)
        return (LEFT + width * x / last) * SCALE, (TOP + height * (1 - share)) * SCALE

    for y in ticks(low, high):
        draw.line([place(0, y), place(last, y)], fill="#dddddd", width=SCALE)
        draw.text((10 * SCALE, place(0, y)[1] - 9 * SCALE), f"{y:.4g}", "black", font)
    for x in ticks(0, last):
        draw.line([place(x, low), place(x, high)], fill="#eeeeee", width=SCALE)
        draw.text(
            (place(x, low)[0] - 12 * SCALE, place(x, low)[1] + 8 * SCALE), f"{x:g}", "black", font
        )
    for colour, curve in zip(COLOURS, points.values(), strict=False):
        draw.line([place(x, y) for x, y in curve], fill=colour, width=3 * SCALE, joint="curve")
    draw.rectangle(
        [0, 0, SIZE[0] * SCALE, TOP * SCALE], "white"
    )  # hides curves that start above the axes
    draw.text((LEFT * SCALE, 14 * SCALE), title, "black", font)
    draw.text((LEFT * SCALE, (SIZE[1] - 34) * SCALE), x_label, "black", font)
    first = TOP + 12 if legend == "high" else SIZE[1] - BOTTOM - 12 - 24 * len(points)
    for index, (colour, name) in enumerate(zip(COLOURS, points, strict=False)):
        row = (first + 24 * index) * SCALE
        column = (SIZE[0] - RIGHT - 250) * SCALE
        line = [column, row + 9 * SCALE, column + 30 * SCALE, row + 9 * SCALE]
        draw.line(line, colour, 3 * SCALE)
        draw.text((column + 40 * SCALE, row), name, "black", font)
    image.resize(SIZE, Image.Resampling.LANCZOS).save(path)


def ticks(low: float, high: float) -> list[float]:
    """Return about six round numbers between `low` and `high`, for the labels of an axis."""
    rough = (high - low) / 6
    unit = 10 ** math.floor(math.log10(rough))
    step = min((m * unit for m in (1, 2, 5, 10)), key=lambda m: abs(m - rough))
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
