"""What the first bytes of a picture say, where it is as plain as most are.

Plain is eight bits of red, green and blue, upright, opaque, still, and of no colour profile. Such a
file needs no more than its decoder. Of all others, and of what looks odd, nothing is said here:
Pillow opens them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.data.sample import Size

_PNG_MARK = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_RGB = (8, 2)
PNG_EXIF = frozenset((b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp"))
"""Where the orientation of a PNG picture can be."""
_PNG_SPECIAL = PNG_EXIF | {b"tRNS", b"iCCP", b"acTL"}

_JPEG_MARK = b"\xff\xd8\xff"
_JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
"""Huffman-coded frames: baseline, extended and progressive."""
_JPEG_SCAN = 0xDA
_JPEG_PLAIN = frozenset((0xC4, 0xDB, 0xDD, 0xE0, 0xFE))
"""Tables, restart interval, JFIF and comment: others can hold a turn, a profile, or colour."""
_JPEG_COMPONENTS = (1, 2, 3)
"""How JFIF numbers them; other numbers can mean other colours."""

_WEBP_SIZE = 0x3FFF
_WEBP_LOSSY_MARK = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_MARK = 0x2F
_WEBP_ALPHA = 1 << 28


class Header(NamedTuple):
    """Of a plain picture."""

    file_format: str
    size: Size


def plain_header(data: bytes) -> Header | None:
    """What a plain picture is; none where Pillow has to look."""
    for file_format, mark, read in _READERS:
        if data.startswith(mark):
            try:
                size = read(data)
            except (struct.error, IndexError):
                return None  # it ends within its header
            return None if size is None or not all(size) else Header(file_format, size)
    return None


def png_chunks(data: bytes) -> set[bytes]:
    """The names of a PNG file's chunks, and the keywords of its texts, without reading pixels."""
    names, at = set(), 8
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        names.add(name)
        if name in _PNG_TEXTS:
            names.add(data[at + 8 : at + 88].partition(b"\0")[0])
        at += 12 + length
    return names


def _png(data: bytes) -> Size | None:
    width, height, *kind = struct.unpack_from(">IIBB", data, 16)
    if tuple(kind) != _PNG_RGB or not _PNG_SPECIAL.isdisjoint(png_chunks(data)):
        return None
    return width, height


def _jpeg(data: bytes) -> Size | None:
    size, at = None, 2
    while True:
        fill, marker, length = struct.unpack_from(">BBH", data, at)
        if fill == 0xFF and marker == _JPEG_SCAN:
            return size
        if fill == 0xFF and marker in _JPEG_FRAMES and size is None:
            depth, height, width, count = struct.unpack_from(">BHHB", data, at + 4)
            if (depth, count) != (8, 3) or tuple(data[at + 10 : at + 19 : 3]) != _JPEG_COMPONENTS:
                return None
            size = width, height
        elif fill != 0xFF or marker not in _JPEG_PLAIN:
            return None
        at += 2 + length


def _webp(data: bytes) -> Size | None:
    match data[8:16]:
        case b"WEBPVP8 ":
            if data[23:26] != _WEBP_LOSSY_MARK:
                return None
            width, height = struct.unpack_from("<HH", data, 26)
            return width & _WEBP_SIZE, height & _WEBP_SIZE
        case b"WEBPVP8L":
            mark, bits = struct.unpack_from("<BI", data, 20)
            if mark != _WEBP_LOSSLESS_MARK or bits & _WEBP_ALPHA:
                return None
            return (bits & _WEBP_SIZE) + 1, (bits >> 14 & _WEBP_SIZE) + 1
    return None


_READERS: tuple[tuple[str, bytes, Callable[[bytes], Size | None]], ...] = (
    ("JPEG", _JPEG_MARK, _jpeg),
    ("PNG", _PNG_MARK, _png),
    ("WEBP", b"RIFF", _webp),
)
