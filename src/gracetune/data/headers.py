"""What the first bytes of a picture say, where it is as plain as most are.

Plain is eight bits of red, green and blue, upright, opaque, still, and of no colour profile. Such a
file needs no more than its decoder. Of all others, and of what looks odd, nothing is said here:
Pillow opens them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.data.sample import Size

_PNG_MARK = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_HEAD = struct.Struct(">IIBB").unpack_from
_PNG_CHUNK = struct.Struct(">I4s").unpack_from
_PNG_RGB = [8, 2]
PNG_EXIF = frozenset((b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp"))
"""Where the orientation of a PNG picture can be."""
_PNG_SPECIAL = PNG_EXIF | {b"tRNS", b"iCCP", b"acTL"}

_JPEG_START = 0xD8
_JPEG_SEGMENT = struct.Struct(">HH").unpack_from
_JPEG_FRAME = struct.Struct(">BHHBBxxBxxB").unpack_from
"""Depth, height, width, the number of components, and the name of each."""
_JPEG_FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)
"""Huffman-coded frames: baseline, extended and progressive."""
_JPEG_SCAN = 0xFFDA
_JPEG_PLAIN = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, 0xFFFE))
"""Tables, restart interval, JFIF and comment: others can hold a turn, a profile, or colour."""
_JPEG_COLOURS = (3, 1, 2, 3)
"""How JFIF numbers them; other numbers can mean other colours."""

_WEBP_SIZE = 0x3FFF
_WEBP_LOSSY_MARK = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_MARK = 0x2F
_WEBP_ALPHA = 1 << 28


def plain_header(data: bytes) -> tuple[str, Size] | None:
    """Format and size of a plain picture; none where Pillow has to look.

    In few steps: a decoder fills the processor's caches with pixels, so whatever Python does
    between two of them is fetched from memory again, and takes ten times as long.
    """
    try:
        file_format, read = _READERS[data[0]]
        size = read(data)
    except (KeyError, IndexError, struct.error):
        return None  # of another format, or it ends within its header
    return None if size is None else (file_format, size)


def png_chunks(data: bytes) -> set[bytes]:
    """The names of a PNG file's chunks, and the keywords of its texts, without reading pixels."""
    names, at, end = set(), 8, len(data) - 8
    while at <= end:
        length, name = _PNG_CHUNK(data, at)
        if name != b"IDAT":  # most of them, and none of the others is looked for so often
            names.add(name)
            if name in _PNG_TEXTS:
                names.add(data[at + 8 : at + 88].partition(b"\0")[0])
        at += 12 + length
    return names


def _png(data: bytes) -> Size | None:
    if not data.startswith(_PNG_MARK):
        return None
    width, height, *kind = _PNG_HEAD(data, 16)
    if kind != _PNG_RGB or not _PNG_SPECIAL.isdisjoint(png_chunks(data)):
        return None
    return width, height


def _jpeg(data: bytes) -> Size | None:
    size, at = None, 2
    if data[1] != _JPEG_START:
        return None
    while True:
        marker, length = _JPEG_SEGMENT(data, at)
        if marker in _JPEG_PLAIN:
            at += 2 + length
        elif marker == _JPEG_SCAN:
            return size
        elif marker in _JPEG_FRAMES and size is None:
            frame = _JPEG_FRAME(data, at + 4)
            if frame[0] != 8 or frame[3:] != _JPEG_COLOURS:
                return None
            size = frame[2], frame[1]
            at += 2 + length
        else:
            return None


def _webp(data: bytes) -> Size | None:
    match data[:4] + data[8:16]:
        case b"RIFFWEBPVP8 ":
            if data[23:26] != _WEBP_LOSSY_MARK:
                return None
            width, height = struct.unpack_from("<HH", data, 26)
            return width & _WEBP_SIZE, height & _WEBP_SIZE
        case b"RIFFWEBPVP8L":
            mark, bits = struct.unpack_from("<BI", data, 20)
            if mark != _WEBP_LOSSLESS_MARK or bits & _WEBP_ALPHA:
                return None
            return (bits & _WEBP_SIZE) + 1, (bits >> 14 & _WEBP_SIZE) + 1
    return None


_READERS: dict[int, tuple[str, Callable[[bytes], Size | None]]] = {
    0xFF: ("JPEG", _jpeg),
    0x89: ("PNG", _png),
    ord("R"): ("WEBP", _webp),
}
"""By the first byte of a file; each reader looks at the next ones itself."""
