"""Make thumbnails of sample images, for the page's grid and for reports."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MAX_PIXELS = 16 * 1024 * 1024
"""Enough for the contact sheet of a clip in 1920x1080. The decoded image takes 4 bytes per pixel,
and twice that if it has transparency."""
EDGE = 288
"""Longest edge of a thumbnail in pixels; twice the size in the grid, for sharp displays."""
CACHE_NBYTES = 16 * 1024 * 1024


def make_thumbnail(descriptor: int, edge: int = EDGE) -> bytes | None:
    """Return an image as WebP with a longest edge of at most `edge` pixels; closes the file.

    Small images keep their size and every pixel. Returns None if the file is not such an image.
    """
    with os.fdopen(descriptor, "rb") as file:
        try:
            with Image.open(file, formats=("PNG",)) as image:
                if image.width * image.height > MAX_PIXELS:
                    return None
                is_small = max(image.size) <= edge
                # A sample is RGB, and made smaller in place: there is no second copy of its size.
                large = image if image.mode in ("RGB", "L") else image.convert("RGB")
                large.thumbnail((edge, edge), Image.Resampling.LANCZOS)
                small = large.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
    target = io.BytesIO()
    small.save(target, "WEBP", lossless=is_small and max(small.size) <= 64, quality=82, method=2)
    return target.getvalue()


class ThumbnailCache:
    """Keeps the newest thumbnails in memory, up to a number of bytes."""

    def __init__(self, nbytes: int = CACHE_NBYTES) -> None:
        self._limit = nbytes
        self._nbytes = 0
        self._found: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._decoder = threading.Lock()
        """Held while an image is decoded: one at a time, so that memory has a limit."""

    def get(self, key: Hashable, open_file: Callable[[], int | None]) -> bytes | None:
        """Return a thumbnail, made from the file that `open_file` opens if it is not in memory."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        with self._decoder:
            descriptor = open_file()
            data = None if descriptor is None else make_thumbnail(descriptor)
        if data is None:
            return None
        with self._lock:
            if key not in self._found:
                self._found[key] = data
                self._nbytes += len(data)
            while self._nbytes > self._limit:
                _, dropped = self._found.popitem(last=False)
                self._nbytes -= len(dropped)
        return data
