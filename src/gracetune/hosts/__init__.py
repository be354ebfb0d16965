"""Run gracetune inside other trainers ("hosts"): SimpleTuner and ai-toolkit, both unmodified.

probe.py checks that an installed host still has the functions that are hooked. Each host's package
holds its hooks, its plug-in and its part of the host's configuration; in_memory_files.py and
tensor_cache.py keep datasets and cache files in memory for both.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gracetune.config.environment import environment_settings
from gracetune.config.load import load_run_text
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.config.load import LoadedRun
    from gracetune.config.schema import Gh200Section


def load_block(run: Mapping[str, object], name: str, environment: Mapping[str, str]) -> LoadedRun:
    """Validate settings from a host's configuration with the rules for run files.

    Errors begin with `name` and leave out line numbers, which would not be those of the host's
    file.
    """
    try:
        return load_run_text(json.dumps(run), "json", name, environment=environment)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{name}:1:", f"{name}:")) from None


MANAGED_KEYS = ("use_uvm", "managed", "managed_access", "managed_memory")
"""Keys of gh200_optimizations about managed memory, which only gracetune's own trainer has."""


def idle_memory_settings(
    host: str, section: Gh200Section, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a warning for each given setting of managed memory, which hooked hosts do not have.

    `host` is the name of the host. Hooks put none of the host's tensors into managed memory; the
    `uvm_*` settings still govern the pool in which an extension may allocate tensors itself.
    """
    reason = (
        f"weights, gradients, optimizer state and batches belong to {host}, and gracetune's hooks "
        "put none of them into managed memory"
    )
    texts = [
        f"gh200_optimizations.{key} has no effect inside {host}: {reason}"
        for key in MANAGED_KEYS
        if key in section.model_fields_set and getattr(section, key) not in (None, False, "off")
    ]
    settings = environment_settings(environment)
    if settings.use_uvm:
        texts.append(f"use_uvm:True has no effect inside {host}: {reason}")
    pool = "what an extension allocates in gracetune.unified_pool()"
    stages = "gracetune.manage_memory() and uvm.headroom in torch.cuda.memory_stats()"
    for name, value, governs in (
        ("uvm_oversubscription_ratio", settings.oversubscription_ratio, pool),
        ("uvm_access_pattern", settings.access_pattern, pool),
        ("uvm_stage1_threshold", settings.stage1_threshold, stages),
        ("uvm_stage1_min_bytes", settings.stage1_min_bytes, stages),
    ):
        if value is not None:
            texts.append(f"{name} has no effect inside {host}: it governs only {governs}")
    return tuple(texts)


def patch_imported_module(owner: ModuleType, name: str, **changes: Callable[..., Any]) -> None:
    """Replace functions of a module that `owner` imports as `name`, for `owner` alone."""
    original = vars(owner)[name]
    patched = ModuleType(original.__name__)
    vars(patched).update(vars(original))
    vars(patched).update(changes)
    setattr(owner, name, patched)
