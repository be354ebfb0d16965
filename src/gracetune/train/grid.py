"""Pictures on one sheet, each with its caption."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TILE = 128
"""Smaller pictures are enlarged by whole factors, so that every pixel stays visible."""
MARGIN = 6
FONT_SIZE = 12
INK, PAPER = (40, 40, 40), (250, 250, 250)


def grid(pictures: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """A sheet that is wider than high, in reading order."""
    factor = max(1, -(-MIN_TILE // min(pictures[0].size)))
    width, height = (edge * factor for edge in pictures[0].size)
    columns = min(len(pictures), max(1, round((len(pictures) * 2 * height / width) ** 0.5)))
    rows = -(-len(pictures) // columns)
    font = ImageFont.load_default(FONT_SIZE)
    lines = [textwrap.wrap(text, max(8, width // 7))[:3] for text in captions]
    line_height = FONT_SIZE + 3
    text_height = line_height * max([len(text) for text in lines] + [1])
    cell = (width + MARGIN, height + text_height + MARGIN)
    head = FONT_SIZE + 2 * MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + MARGIN, head + rows * cell[1] + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, font)
    for index, (picture, text) in enumerate(zip(pictures, lines, strict=True)):
        left = MARGIN + index % columns * cell[0]
        top = head + MARGIN + index // columns * cell[1]
        sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        for number, line in enumerate(text):
            draw.text((left, top + height + 1 + number * line_height), line, INK, font)
    return sheet
