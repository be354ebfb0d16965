"""Take gracetune's keys out of SimpleTuner's configuration files and validate them.

Stock SimpleTuner silently drops blocks that it does not know, and fails on unknown scalars. Both
are removed before it sees them. An unknown key inside our blocks is an error with a suggestion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from gracetune.config.schema import CacheSection, Gh200Section
from gracetune.errors import ConfigError
from gracetune.hosts import idle_memory_settings, load_block
from gracetune.hosts.in_memory_files import StagedDatasetConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OUR_KEYS = ("gh200_optimizations", "cache_config", "use_gh200_trainer")
FLAT_KEYS = (
    "enable_uvm_hints",
    "enable_batch_size_rampup",
    "initial_effective_batch_size",
    "target_effective_batch_size",
    "batch_rampup_steps",
)
"""Keys of gh200_optimizations that may also be at the top level of config.json."""
IN_MEMORY = "in_memory"
IGNORED_CACHE_KEYS = {
    "cache_dir": "each dataset names the folder of its cache",
    "persistent_cache": "SimpleTuner always keeps its cache files",
    "device_budget_gb": "SimpleTuner moves batches to the device",
    "vae_tiling": "set SimpleTuner's own vae_enable_tiling",
    "prefetch_depth": "SimpleTuner moves batches to the device",
    "prefetch_budget_gb": "SimpleTuner moves batches to the device",
}
"""Keys of cache_config that have no effect inside SimpleTuner, and the reason."""


@dataclass(frozen=True, slots=True)
class SimpleTunerBlocks:
    """The gracetune settings of a SimpleTuner configuration."""

    gh200: Gh200Section = field(default_factory=Gh200Section)
    cache: CacheSection | None = None
    """None if cache_config is not set: SimpleTuner reads its caches from disk."""
    raw: Mapping[str, object] = field(default_factory=dict)
    """The whole configuration, as it was read."""
    notices: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Messages about gracetune settings that have no effect inside SimpleTuner."""


def split_config(
    config: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[dict[str, object], SimpleTunerBlocks]:
    """Split a configuration into what SimpleTuner reads and gracetune's settings.

    Keys may have leading dashes, as in SimpleTuner's config.json.
    """
    plain = {key.lstrip("-"): value for key, value in config.items()}
    if "datasets" in plain:
        raise ConfigError(
            "config.json has `datasets`, which SimpleTuner does not read there. Move the list to "
            "the file that data_backend_config names."
        )
    _check_misspelled_blocks("config.json", plain, OUR_KEYS)
    ours = {key: plain[key] for key in (*OUR_KEYS, *FLAT_KEYS) if key in plain}
    rest = {key: value for key, value in config.items() if key.lstrip("-") not in ours}
    # The batch size stays SimpleTuner's, but the rules for the batch ramp need it.
    batch_size = plain.get("train_batch_size")
    run = {**ours, **({"train_batch_size": batch_size} if isinstance(batch_size, int) else {})}
    loaded = load_block(run, "config.json", environment)
    enabled = loaded.run.use_gh200_trainer
    ignored = (
        *_ignored_settings(ours.get("cache_config")),
        *idle_memory_settings("SimpleTuner", loaded.run.gh200_optimizations, environment),
    )
    return rest, SimpleTunerBlocks(
        gh200=loaded.run.gh200_optimizations if enabled else Gh200Section(enable_uvm_hints=False),
        cache=loaded.run.cache_config if enabled and "cache_config" in ours else None,
        raw=dict(config),
        notices=loaded.notices if ours else (),
        ignored=ignored if enabled else (),
    )


def _ignored_settings(block: object) -> tuple[str, ...]:
    settings = block if isinstance(block, dict) else {}
    return tuple(
        f"cache_config.{key} has no effect inside SimpleTuner: {reason}"
        for key, reason in IGNORED_CACHE_KEYS.items()
        if key in settings and (key, settings[key]) != ("persistent_cache", True)
    )


def _check_misspelled_blocks(
    where: str, config: Mapping[str, object], names: Sequence[str]
) -> None:
    """Raise for a misspelled name of a gracetune block, which SimpleTuner would silently drop."""
    for key, value in config.items():
        close = get_close_matches(key, names, n=1, cutoff=0.8)
        if isinstance(value, dict) and close and key not in names:
            raise ConfigError(
                f"{where} has a block {key!r}, which SimpleTuner drops. Did you mean {close[0]!r}?"
            )


def split_datasets(
    entries: Sequence[Mapping[str, object]], environment: Mapping[str, str]
) -> tuple[list[dict[str, object]], list[StagedDatasetConfig]]:
    """Split datasets into SimpleTuner's entries and the settings of those held in memory.

    SimpleTuner sees `type: in_memory` as `type: local`.
    """
    rest: list[dict[str, object]] = []
    staged = []
    for index, entry in enumerate(entries):
        _check_misspelled_blocks(f"dataset {entry.get('id')!r}", entry, (IN_MEMORY,))
        remaining = dict(entry)
        block = remaining.pop(IN_MEMORY, None)
        if remaining.get("type") == IN_MEMORY:
            remaining["type"] = "local"
            if not (remaining.get("disabled") or remaining.get("disable")):
                staged.append(_parse_staged(index, remaining, block, environment))
        elif block is not None:
            raise ConfigError(
                f"dataset {remaining.get('id')!r} has an in_memory block and is of type "
                f"{remaining.get('type')!r}. Set type: in_memory, or remove the block."
            )
        rest.append(remaining)
    return rest, staged


def _parse_staged(
    index: int, entry: Mapping[str, object], block: object, environment: Mapping[str, str]
) -> StagedDatasetConfig:
    name, folder = entry.get("id"), entry.get("instance_data_dir")
    if not isinstance(name, str) or not isinstance(folder, str):
        raise ConfigError(
            f"dataset {index} is of type in_memory and has no id or no instance_data_dir. Set both."
        )
    settings = dict(block) if isinstance(block, dict) else block
    extensions: tuple[str, ...] = ()
    if isinstance(settings, dict):
        given = settings.pop("file_extensions", ())
        if not isinstance(given, list | tuple) or not all(isinstance(e, str) for e in given):
            raise ConfigError(
                f"dataset {name!r}: in_memory.file_extensions is {given!r}; it must be a list "
                'such as ["png", "txt"].'
            )
        extensions = tuple(each.lower().lstrip(".") for each in given)
    section = {"id": name, "type": IN_MEMORY, "instance_data_dir": folder}
    run = {"datasets": [section if settings is None else {**section, IN_MEMORY: settings}]}
    loaded = load_block(run, f"dataset {name!r}", environment)
    return StagedDatasetConfig(name, folder, loaded.run.datasets[0].in_memory, extensions)
