"""Run gracetune inside other trainers ("hosts"): SimpleTuner and ai-toolkit, both unmodified.

probe.py checks that an installed host still has the functions that are hooked. Each host's package
holds its hooks, its plug-in and its part of the host's configuration; in_memory_files.py and
tensor_cache.py keep datasets and cache files in memory for both.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gracetune.config.load import load_run_text
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.config.load import LoadedRun


def load_block(run: Mapping[str, object], name: str, environment: Mapping[str, str]) -> LoadedRun:
    """Validate settings from a host's configuration with the rules for run files.

    Errors begin with `name` and leave out line numbers, which would not be those of the host's
    file.
    """
    try:
        return load_run_text(json.dumps(run), "json", name, environment=environment)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{name}:1:", f"{name}:")) from None


def patch_imported_module(owner: ModuleType, name: str, **changes: Callable[..., Any]) -> None:
    """Replace functions of a module that `owner` imports as `name`, for `owner` alone."""
    original = vars(owner)[name]
    patched = ModuleType(original.__name__)
    vars(patched).update(vars(original))
    vars(patched).update(changes)
    setattr(owner, name, patched)
