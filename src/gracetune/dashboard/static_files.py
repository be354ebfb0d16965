"""Read the page's own files: markup, scripts and styles."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def read_static() -> dict[str, bytes]:
    """Return the files of the page by name, without folders."""
    paths = [path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES]
    return {path.name: path.read_bytes() for path in paths}
