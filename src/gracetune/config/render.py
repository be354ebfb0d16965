"""A run file as text again: what a run folder keeps, and what an editor checks against."""

from __future__ import annotations

import json

from gracetune.config.schema import RunFile


def resolved(run: RunFile) -> str:
    """Every setting with its value, in order, as JSON; loading it gives the same run."""
    return json.dumps(run.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def json_schema() -> str:
    """What a run file may say, as JSON Schema."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunFile.model_json_schema(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
