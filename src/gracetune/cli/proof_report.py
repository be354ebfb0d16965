"""The report of `gracetune prove`: leave out what is private, and write it as HTML and JSON."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gracetune.errors import redact_urls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gracetune.config.schema import RunFile

    Status = Literal["passed", "failed", "skipped", "measured"]

FORMAT = 1
PRIVATE = "[private]"
MIN_PRIVATE = 4
"""Characters of the shortest text that is replaced; shorter ones are parts of ordinary words."""
MIN_SECRET = 8
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.I)
_PATH = re.compile(r"(?:(?<=[\s'\"=(:,])|^)~?(?:\.{0,2}/)+[^\s'\",;:)]+|\b[\w.-]+/[\w./-]+")
_FILE = re.compile(
    r"[^\s'\"/]+\.(?:png|jpe?g|webp|avif|heic|gif|mp4|mov|mkv|webm|wav|flac|mp3|txt|caption|json|"
    r"yaml|yml|toml|safetensors|tar|parquet|csv)\b",
    re.I,
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "model": ("family", "dtype", "quantize", "frozen_compute", "task", "attention_mechanism"),
    "adapter": ("kind", "rank", "alpha", "dropout"),
    "train": (
        "batch_size",
        "gradient_accumulation_steps",
        "effective_batch_size",
        "mixed_precision",
        "gradient_checkpointing",
        "ema_decay",
        "experts",
    ),
    "optimizer": ("name", "lr", "state"),
    "gh200_optimizations": ("enable_uvm_hints", "placement"),
    "cache_config": ("vae_cache_type", "text_cache_type"),
    "distributed": ("strategy", "context_parallel"),
}
"""Settings that are in a report: numbers and names that gracetune defines, nothing a user wrote."""
DATASET_SETTINGS = ("type", "dataset_type", "resolution", "frames", "fps", "seconds", "sample_rate")
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}table{border-collapse:collapse;margin:.5rem 0 1rem}"
    "td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left;vertical-align:top}"
    ".passed{color:#0a6b2d}.failed{color:#b3261e;font-weight:600}.skipped{color:#777}"
    ".measured{color:#1a56a8}img{margin:.25rem;max-width:14rem}pre{background:#f4f4f4;"
    "padding:.6rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}figure{display:inline-block;margin:.25rem}"
    "figcaption{font-size:12px;color:#555}"
)


@dataclass
class Part:
    """One part of the proof and its result."""

    name: str
    title: str
    status: Status = "skipped"
    seconds: float = 0.0
    summary: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class Privacy:
    """Replaces texts that must not leave the machine: paths, names, tokens and captions."""

    def __init__(
        self, run: RunFile, environment: Mapping[str, str], *, host: bool, captions: bool
    ) -> None:
        """`host` and `captions` allow the host's name, and the prompts of the run file."""
        self.allows_captions = captions
        texts = {*_paths(run), str(Path.home()), str(Path.cwd())}
        texts |= {
            value
            for name, value in environment.items()
            if SECRET_NAME.search(name) and len(value) >= MIN_SECRET
        }
        texts |= {environment.get(name, "") for name in ("USER", "LOGNAME")} - {"root"}
        if not host:
            name = socket.gethostname()
            texts |= {name, name.partition(".")[0], environment.get("HOSTNAME", "")}
        if not captions:
            texts |= set(_captions(run))
        kept = sorted((t for t in texts if len(t) >= MIN_PRIVATE), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, kept))) if kept else None

    def clean(self, value: Any) -> Any:
        """Return JSON data with private texts replaced; keys are gracetune's own words."""
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, dict):
            return {key: self.clean(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(one) for one in value]
        return value

    def _clean_text(self, text: str) -> str:
        if self._pattern is not None:
            text = self._pattern.sub(PRIVATE, text)
        return redact_urls(text)


def clean_error(text: str, privacy: Privacy) -> str:
    """Return an error message of a command without paths and file names, known or not."""
    cleaned: str = privacy.clean(text)
    return _FILE.sub("[file]", _PATH.sub("[path]", cleaned))


def public_settings(run: RunFile) -> dict[str, Any]:
    """Return the settings of a run that a report may have."""
    settings = run.model_dump(mode="json")
    found: dict[str, Any] = {}
    for section, names in SETTINGS.items():
        values = settings.get(section)
        if isinstance(values, dict):
            found[section] = {name: values[name] for name in names if name in values}
    found["datasets"] = [
        {name: one[name] for name in DATASET_SETTINGS if one.get(name) is not None}
        for one in settings["datasets"]
    ]
    return found


def write_json(document: Mapping[str, Any]) -> str:
    """Return the report as JSON text."""
    return json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n"


def write_html(document: Mapping[str, Any], samples: Sequence[tuple[str, bytes]]) -> str:
    """Return the report as one HTML page without scripts.

    `samples` are titles and WebP images.
    """
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:"
    rows = "".join(
        f"<tr><td>{_text(part['title'])}</td>"
        f'<td class="{part["status"]}">{part["status"]}</td>'
        f"<td>{_text(part['summary'])}</td><td>{part['seconds']:.0f} s</td></tr>"
        for part in document["parts"]
    )
    details = "".join(
        f"<h2>{_text(part['title'])}</h2>{_details(part['details'])}"
        for part in document["parts"]
        if part["details"]
    )
    figures = "".join(
        f'<figure><img alt="" src="data:image/webp;base64,{base64.b64encode(data).decode()}">'
        f"<figcaption>{_text(title)}</figcaption></figure>"
        for title, data in samples
    )
    contents = "".join(f"<li>{_text(line)}</li>" for line in document["contents"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer"><title>gracetune proof</title>'
        f"<style>{STYLE}</style></head><body><h1>gracetune proof</h1>"
        f"<p>gracetune {_text(document['gracetune'])}, {_text(document['date'])}, "
        f"family {_text(document['settings']['model']['family'])}</p>"
        f"<table><tr><th>part</th><th>result</th><th></th><th>time</th></tr>{rows}</table>"
        f"<h2>Samples</h2>{figures or '<p>none</p>'}{details}"
        f"<h2>Settings</h2>{_details(document['settings'])}"
        f"<h2>What this file contains</h2><ul>{contents}</ul></body></html>\n"
    )


def loss_plot(losses: Sequence[float]) -> str:
    """Return a line of block characters that shows a curve, highest loss on top."""
    blocks = "▁▂▃▄▅▆▇█"
    if not losses:
        return ""
    low, high = min(losses), max(losses)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0
    return "".join(blocks[round((loss - low) * scale)] for loss in losses)


def _details(details: Mapping[str, Any]) -> str:
    rows = []
    for name, value in details.items():
        if isinstance(value, dict | list):
            cell = f"<pre>{_text(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"
        else:
            cell = _text(f"{value:.6g}" if isinstance(value, float) else str(value))
        rows.append(f"<tr><th>{_text(name)}</th><td>{cell}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))


def _paths(run: RunFile) -> Iterable[str]:
    """Yield the paths and addresses that a run file names, and their absolute forms."""
    named = [run.output_dir, run.model.path, run.model.transformer_file]
    named.append(run.model.transformer_2_file)
    for dataset in run.datasets:
        named += [dataset.instance_data_dir, dataset.mask_data_dir, *dataset.control_folders]
    named.append(run.cache_config.cache_dir)
    for one in named:
        if one:
            yield os.path.abspath(str(one))
        if one and "/" in str(one):  # a bare name may be an ordinary word
            yield str(one)
    yield from run.logging.webhooks


def _captions(run: RunFile) -> Iterable[str]:
    """Yield the prompts and caption settings of a run file."""
    for prompt in run.validation.prompts or ():
        yield prompt if isinstance(prompt, str) else prompt.prompt
    if run.validation.negative_prompt:
        yield run.validation.negative_prompt
    for dataset in run.datasets:
        for text in (
            dataset.instance_prompt,
            dataset.trigger_word,
            dataset.caption_prefix,
            dataset.caption_suffix,
        ):
            if text:
                yield text
