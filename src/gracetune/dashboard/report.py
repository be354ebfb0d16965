"""Write runs into one HTML file that needs no server and no network.

The file has the page's own scripts and styles, the data as JSON, and samples as data URIs. Its
content security policy allows exactly these scripts, by their digests, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gracetune.dashboard.series import dump_json
from gracetune.dashboard.static_files import read_static
from gracetune.dashboard.thumbnails import make_thumbnail
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gracetune.dashboard.live_runs import LiveRun
    from gracetune.dashboard.run_folder import SampleSet

MODULES = (
    "basics.js",
    "store.js",
    "charts.js",
    "panels.js",
    "plan.js",
    "overview.js",
    "samples.js",
    "sources.js",
    "main.js",
)
"""The modules of the page; each comes after those that it imports."""
POINTS = 1200
MAX_SETS = 10
MAX_PROMPTS = 32
IMAGES_NBYTES = 12 * 1024 * 1024
"""Bytes of all images together; many samples are made smaller."""
CLIPS_NBYTES = 12 * 1024 * 1024
EDGES = ((60, 512), (240, 288))
"""Up to this number of samples -> longest edge of an image in pixels."""
SMALLEST_EDGE = 160
TITLE = "<title>gracetune report</title>"
HEAD_NBYTES = 4096
"""Bytes at the start of a report that contain its title."""
CLIP_TYPES = {"video": "video/mp4", "audio": "audio/wav"}

_IMPORT = re.compile(r"^import [^;]+;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@dataclass
class _Embedded:
    """Files as data URIs, within a number of bytes."""

    edge: int
    thumbnails: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    images_nbytes: int = 0
    clips_nbytes: int = 0

    def add_image(self, run: LiveRun, name: str, file: str) -> None:
        descriptor = run.samples.open(name, file)
        data = None if descriptor is None else make_thumbnail(descriptor, self.edge)
        if data is not None and self.images_nbytes + len(data) <= IMAGES_NBYTES:
            self.images_nbytes += len(data)
            self.thumbnails[f"{run.id}/{name}/{file}"] = _data_uri("image/webp", data)

    def add_clip(self, run: LiveRun, name: str, file: str, kind: str) -> None:
        descriptor = run.samples.open(name, file)
        if descriptor is None:
            return
        with open(descriptor, "rb") as opened:
            data = opened.read(CLIPS_NBYTES + 1)
        if self.clips_nbytes + len(data) <= CLIPS_NBYTES:
            self.clips_nbytes += len(data)
            self.files[f"{run.id}/{name}/{file}"] = _data_uri(CLIP_TYPES[kind], data)


def write_report(runs: Sequence[LiveRun]) -> str:
    """Return the HTML of a report about runs that have been read to their ends."""
    chosen = {run.id: choose_sets(run.samples.sets) for run in runs}
    count = sum(len(one.items) for sets in chosen.values() for one in sets)
    edge = next((edge for limit, edge in EDGES if count <= limit), SMALLEST_EDGE)
    embedded = _Embedded(edge)
    snapshots: list[dict[str, object]] = []
    for run in runs:
        snapshot = run.snapshot(POINTS)
        snapshot["samples"] = [one.to_json() for one in chosen[run.id]]
        snapshots.append(snapshot)
        _embed(run, chosen[run.id], embedded)
    data = {
        "made": time.time(),
        "runs": snapshots,
        "thumbnails": embedded.thumbnails,
        "files": embedded.files,
    }
    return build_html(dump_json(data))


def check_replaceable(path: Path) -> None:
    """Raise if a file exists that is not a report, and that a report would overwrite."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if TITLE.encode() in file.read(HEAD_NBYTES):
                return
    raise ConfigError(
        f"--output is {str(path)!r}, which exists and is not a report of gracetune. Name another "
        "file, or move that one away."
    )


def choose_sets(sets: Sequence[SampleSet]) -> list[SampleSet]:
    """Return validations for a report: the first, the last, and others evenly between them."""
    count = min(len(sets), MAX_SETS)
    if count > 1:
        numbers = {round(index * (len(sets) - 1) / (count - 1)) for index in range(count)}
        sets = [one for number, one in enumerate(sets) if number in numbers]
    return [replace(one, items=one.items[:MAX_PROMPTS]) for one in sets]


def _embed(run: LiveRun, sets: Sequence[SampleSet], embedded: _Embedded) -> None:
    # The newest first: they matter most if not all fit.
    for one in reversed(sets):
        for item in one.items:
            if item.image is not None:
                embedded.add_image(run, one.name, item.image)
            for kind, file in (("video", item.video), ("audio", item.audio)):
                if file is not None:
                    embedded.add_clip(run, one.name, file, kind)


def build_html(data: str) -> str:
    """Return the page with its scripts, its styles and JSON data in one text."""
    static = {name: content.decode() for name, content in read_static().items()}
    scripts = [static["theme.js"], static["uPlot.iife.min.js"], bundle_modules(static)]
    style = static["uPlot.min.css"] + static["dash.css"]
    body = re.search(r"<body>(.*?)<script", static["index.html"], re.DOTALL)
    assert body is not None, "index.html has no body"
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(_digest(script) for script in scripts)}",
            f"style-src {_digest(style)}",
            "img-src data:",
            "media-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        )
    )
    licence = static["LICENSE.uPlot.txt"].strip()
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            TITLE,
            f"<!-- uPlot, which is part of this file:\n{licence}\n-->",
            f"<style>{style}</style>",
            f"<script>{scripts[0]}</script>",
            "</head>",
            f"<body>{body[1]}",
            f'<script type="application/json" id="report-data">{escape_json(data)}</script>',
            f"<script>{scripts[1]}</script>",
            f"<script>{scripts[2]}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def bundle_modules(static: dict[str, str]) -> str:
    """Join the modules of the page into one script; their top-level names are different."""
    parts = [_EXPORT.sub("", _IMPORT.sub("", static[name])) for name in MODULES]
    script = "(() => {\n" + "\n".join(parts) + "})();\n"
    assert "</script" not in script.lower(), "a script must not end its own element"
    return script


def escape_json(text: str) -> str:
    """Return JSON that cannot end the element it is in, or start a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _data_uri(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
