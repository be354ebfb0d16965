"""Our blocks in SimpleTuner's files: taken out, checked, and kept for whoever asks.

Stock SimpleTuner drops blocks without a word and dies of scalars that it does not know. Both are
taken out before it sees them; a key inside them that we do not know is an error, with a suggestion.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from gracetune.config.load import load_run_text
from gracetune.config.schema import CacheSection, Gh200Section
from gracetune.errors import ConfigError
from gracetune.hosts.staged_files import StagedDatasetConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.load import LoadedRun

OUR_KEYS = ("gh200_optimizations", "cache_config", "use_gh200_trainer")
FLAT_KEYS = (
    "enable_uvm_hints",
    "enable_batch_size_rampup",
    "initial_effective_batch_size",
    "target_effective_batch_size",
    "batch_rampup_steps",
)
"""What the forks' guides also write at the top level."""
IN_MEMORY = "in_memory"
IGNORED_CACHE_KEYS = {
    "cache_dir": "a data set names the folder of its cache",
    "persistent_cache": "its cache files are always kept",
    "device_budget_gb": "SimpleTuner brings batches to the device",
    "vae_tiling": "vae_enable_tiling is SimpleTuner's own",
    "prefetch_depth": "SimpleTuner brings batches to the device",
    "prefetch_budget_gb": "SimpleTuner brings batches to the device",
}
"""Of cache_config: what means something to the trainer and nothing here, and why."""


@dataclass(frozen=True, slots=True)
class SimpleTunerBlocks:
    """What a configuration says to us."""

    gh200: Gh200Section = field(default_factory=Gh200Section)
    cache: CacheSection | None = None
    """None: caches stay SimpleTuner's own."""
    raw: Mapping[str, object] = field(default_factory=dict)
    """The whole configuration, as it was read."""
    notices: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """What was asked for and is not done."""


def split_config(
    config: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[dict[str, object], SimpleTunerBlocks]:
    """What is left for SimpleTuner, and what is ours."""
    plain = {key.lstrip("-"): value for key, value in config.items()}
    if "datasets" in plain:
        raise ConfigError(
            "config.json has `datasets`, which SimpleTuner does not read there. Put the list into "
            "the file that data_backend_config names."
        )
    _check_misspelled_blocks("config.json", plain, OUR_KEYS)
    mine = {key: plain[key] for key in (*OUR_KEYS, *FLAT_KEYS) if key in plain}
    rest = {key: value for key, value in config.items() if key.lstrip("-") not in mine}
    # The batch is SimpleTuner's; it is named so that rules between it and the ramp hold.
    batch = plain.get("train_batch_size")
    run = {**mine, **({"train_batch_size": batch} if isinstance(batch, int) else {})}
    loaded = _load(run, "config.json", environment)
    used = loaded.run.use_gh200_trainer
    return rest, SimpleTunerBlocks(
        gh200=loaded.run.gh200_optimizations if used else Gh200Section(enable_uvm_hints=False),
        cache=loaded.run.cache_config if used and "cache_config" in mine else None,
        raw=dict(config),
        notices=loaded.notices if mine else (),
        ignored=_ignored_settings(mine.get("cache_config")) if used else (),
    )


def _ignored_settings(block: object) -> tuple[str, ...]:
    said = block if isinstance(block, dict) else {}
    return tuple(
        f"cache_config.{key} does nothing inside SimpleTuner: {why}"
        for key, why in IGNORED_CACHE_KEYS.items()
        if key in said and (key, said[key]) != ("persistent_cache", True)
    )


def _check_misspelled_blocks(where: str, said: Mapping[str, object], names: Sequence[str]) -> None:
    """A block whose name is not quite ours would be dropped without a word."""
    for key, value in said.items():
        close = get_close_matches(key, names, n=1, cutoff=0.8)
        if isinstance(value, dict) and close and key not in names:
            raise ConfigError(
                f"{where} has a block {key!r}, which SimpleTuner drops. Did you mean {close[0]!r}?"
            )


def split_datasets(
    entries: Sequence[Mapping[str, object]], environment: Mapping[str, str]
) -> tuple[list[dict[str, object]], list[StagedDatasetConfig]]:
    """`type: in_memory` is `local` to SimpleTuner; what makes it ours is remembered."""
    rest: list[dict[str, object]] = []
    staged = []
    for place, entry in enumerate(entries):
        _check_misspelled_blocks(f"data set {entry.get('id')!r}", entry, (IN_MEMORY,))
        kept = dict(entry)
        block = kept.pop(IN_MEMORY, None)
        if kept.get("type") == IN_MEMORY:
            kept["type"] = "local"
            if not (kept.get("disabled") or kept.get("disable")):
                staged.append(_parse_staged(place, kept, block, environment))
        elif block is not None:
            raise ConfigError(
                f"data set {kept.get('id')!r} has an in_memory block and is of type "
                f"{kept.get('type')!r}; set type: in_memory, or take the block out."
            )
        rest.append(kept)
    return rest, staged


def _parse_staged(
    place: int, entry: Mapping[str, object], block: object, environment: Mapping[str, str]
) -> StagedDatasetConfig:
    name, folder = entry.get("id"), entry.get("instance_data_dir")
    if not isinstance(name, str) or not isinstance(folder, str):
        raise ConfigError(
            f"data set {place} is of type in_memory and has no id or no instance_data_dir; "
            "give it both."
        )
    settings = dict(block) if isinstance(block, dict) else block
    extensions: tuple[str, ...] = ()
    if isinstance(settings, dict):
        given = settings.pop("file_extensions", ())
        if not isinstance(given, list | tuple) or not all(isinstance(e, str) for e in given):
            raise ConfigError(
                f"data set {name!r}: in_memory.file_extensions is {given!r}; it is a list such as "
                '["png", "txt"].'
            )
        extensions = tuple(each.lower().lstrip(".") for each in given)
    section = {"id": name, "type": IN_MEMORY, "instance_data_dir": folder}
    run = {"datasets": [section if settings is None else {**section, IN_MEMORY: settings}]}
    loaded = _load(run, f"data set {name!r}", environment)
    return StagedDatasetConfig(name, folder, loaded.run.datasets[0].in_memory, extensions)


def _load(run: Mapping[str, object], name: str, environment: Mapping[str, str]) -> LoadedRun:
    """As a run file is read; its lines are not those of the host's file, so none is named."""
    try:
        return load_run_text(json.dumps(run), "json", name, environment=environment)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{name}:1:", f"{name}:")) from None
