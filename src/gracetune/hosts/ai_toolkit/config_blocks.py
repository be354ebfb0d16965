"""Take gracetune's keys out of a process in ai-toolkit's YAML and validate them.

A process is an entry of `config.process`, such as a training. Stock ai-toolkit ignores every key
that it does not know. A process with one of gracetune's keys is run by an extended trainer class,
and an unknown key inside gracetune's blocks is an error.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from gracetune.config.schema import CacheSection, Gh200Section, OptimizerSection
from gracetune.errors import ConfigError
from gracetune.hosts import MANAGED_KEYS, idle_memory_settings, load_block

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.dataset_schema import InMemorySection

PROCESS_TYPE = "gracetune"
"""The value of `type` in ai-toolkit's YAML that always runs a process with gracetune."""
BLOCK = "gracetune"
IN_MEMORY = "in_memory"
CACHE_MODE_KEY = "augmentations_cache_mode"
CACHE_EPOCH_KEY = "augmentation_cache_epoch"
CACHE_MODES = ("disable_cache", "static", "refresh_each_epoch")
OPTIMIZER_NAME = "gracetune_automagic"
"""Value of `train.optimizer` that selects gracetune's Automagic. Keys of `optimizer_params` that
begin with `high_noise_` or `low_noise_` select it, too."""
SWITCHES = ("stage_timesteps", "check_saves")
SECTIONS = {
    "gh200_optimizations": ("enable_uvm_hints", "placement"),
    "cache_config": ("vae_cache_type", "text_cache_type", "host_budget_gb"),
}
"""The keys of each section that have an effect inside ai-toolkit."""
_STAGE_PREFIXES = ("high_noise_", "low_noise_")


@dataclass(frozen=True, slots=True)
class DatasetBlock:
    """The gracetune settings of one entry of `datasets` in ai-toolkit's YAML."""

    folder: str
    in_memory: InMemorySection | None
    """Settings for holding the files of the dataset in memory; None to read them from disk."""
    cache_mode: str
    """`static` or `refresh_each_epoch`; empty leaves augmentations and caches to ai-toolkit."""
    augments: tuple[object, ...]
    augmentations: tuple[object, ...]
    num_resolutions: int
    """Number of datasets that ai-toolkit creates from the entry: one for each resolution."""
    first_epoch: int = 0
    """Number of the epoch whose augmentations the first epoch uses."""


@dataclass(frozen=True, slots=True)
class AIToolkitBlocks:
    """The gracetune settings of one process in ai-toolkit's YAML, such as a training."""

    gh200: Gh200Section = field(default_factory=Gh200Section)
    cache: CacheSection | None = None
    """None if cache_config is not set: cache files are read from disk."""
    datasets: tuple[DatasetBlock, ...] = ()
    optimizer: OptimizerSection | None = None
    """Settings of gracetune's Automagic; None to use ai-toolkit's optimizer."""
    stage_timesteps: bool = True
    """True to draw only timesteps of the transformer being trained, high-noise or low-noise."""
    check_saves: bool = True
    """True to read every saved adapter file back and check it."""
    notices: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Messages about gracetune settings that have no effect inside ai-toolkit."""


def uses_gracetune(process: Mapping[str, object]) -> bool:
    """Return True if a process in ai-toolkit's YAML has a key or value that needs gracetune."""
    train = process.get("train")
    return (
        process.get("type") == PROCESS_TYPE
        or BLOCK in process
        or any(_has_our_key(entry) for entry in _dataset_entries(process))
        or (isinstance(train, dict) and _selects_automagic(train))
    )


def check_misspelled_keys(process: Mapping[str, object]) -> None:
    """Raise for a misspelled key of gracetune, which ai-toolkit would silently ignore."""
    _check_misspelled("the process", process, (BLOCK,))
    for index, entry in enumerate(_dataset_entries(process)):
        names = (IN_MEMORY, CACHE_MODE_KEY, CACHE_EPOCH_KEY)
        _check_misspelled(f"datasets[{index}]", entry, names)


def _check_misspelled(where: str, keys: Mapping[str, object], names: tuple[str, ...]) -> None:
    for key in keys:
        close = get_close_matches(str(key), names, n=1, cutoff=0.8)
        if close and key not in names:
            raise ConfigError(
                f"{where} has a key {key!r}, which ai-toolkit ignores. Did you mean {close[0]!r}?"
            )


def split_config(
    process: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[dict[str, object], AIToolkitBlocks]:
    """Split the YAML of a process into the part for ai-toolkit and gracetune's settings."""
    rest = copy.deepcopy(dict(process))
    block = rest.pop(BLOCK, None) or {}
    if not isinstance(block, dict):
        raise ConfigError(f"{BLOCK} is {block!r}; it must be a block, such as {BLOCK}: {{}}.")
    _check_known_keys(BLOCK, block, (*SWITCHES, *SECTIONS))
    for name, known in SECTIONS.items():
        section = block.get(name)
        if isinstance(section, dict):
            _check_known_keys(f"{BLOCK}.{name}", section, known)
    sections = {name: block[name] for name in SECTIONS if name in block}
    loaded = load_block(sections, BLOCK, environment)
    train = rest.get("train")
    return rest, AIToolkitBlocks(
        gh200=loaded.run.gh200_optimizations,
        cache=loaded.run.cache_config if "cache_config" in block else None,
        datasets=tuple(
            _split_dataset(index, entry, environment)
            for index, entry in enumerate(_dataset_entries(rest))
        ),
        optimizer=_split_optimizer(train, environment) if isinstance(train, dict) else None,
        stage_timesteps=_switch(block, "stage_timesteps"),
        check_saves=_switch(block, "check_saves"),
        notices=loaded.notices,
        ignored=idle_memory_settings("ai-toolkit", loaded.run.gh200_optimizations, environment),
    )


def _dataset_entries(process: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the entries of `datasets` in a process, except malformed ones (not mappings)."""
    found = process.get("datasets")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _has_our_key(entry: Mapping[str, object]) -> bool:
    return IN_MEMORY in entry or CACHE_MODE_KEY in entry or entry.get("type") == IN_MEMORY


def _split_dataset(
    index: int, entry: dict[str, object], environment: Mapping[str, str]
) -> DatasetBlock:
    """Remove gracetune's keys from an entry of `datasets` and return the validated settings."""
    where = f"datasets[{index}]"
    folder = entry.get("folder_path") or entry.get("dataset_path")
    is_staged = entry.get("type") == IN_MEMORY or IN_MEMORY in entry
    settings = entry.pop(IN_MEMORY, None)
    if entry.get("type") == IN_MEMORY:
        del entry["type"]
    in_memory = None
    if is_staged:
        if not isinstance(folder, str):
            raise ConfigError(f"{where} is in_memory and has no folder_path. Name its folder.")
        section = {"id": where, "type": IN_MEMORY, "instance_data_dir": folder}
        run = {"datasets": [section if settings is None else {**section, IN_MEMORY: settings}]}
        in_memory = load_block(run, where, environment).run.datasets[0].in_memory
    cache_mode, augments, augmentations = _split_augmentations(where, entry)
    first_epoch = entry.pop(CACHE_EPOCH_KEY, 0)
    if not isinstance(first_epoch, int) or isinstance(first_epoch, bool) or first_epoch < 0:
        raise ConfigError(
            f"{where}.{CACHE_EPOCH_KEY} is {first_epoch!r}; it must be a number of epochs, 0 or "
            "more."
        )
    resolution = entry.get("resolution")
    return DatasetBlock(
        folder=str(folder),
        in_memory=in_memory,
        cache_mode=cache_mode,
        augments=augments,
        augmentations=augmentations,
        num_resolutions=len(resolution) if isinstance(resolution, list) else 1,
        first_epoch=first_epoch,
    )


def _split_augmentations(
    where: str, entry: dict[str, object]
) -> tuple[str, tuple[object, ...], tuple[object, ...]]:
    """Remove and return the cache mode of a dataset, and its augmentations if they are cached.

    ai-toolkit disables its caches if it finds augmentations when it reads the configuration. So
    the plug-in sets them later (`AIToolkitPlugin.attach_datasets`).
    """
    mode = entry.pop(CACHE_MODE_KEY, None)
    if mode is None:
        return "", (), ()
    if mode not in CACHE_MODES:
        raise ConfigError(
            f"{where}.{CACHE_MODE_KEY} is {mode!r}; it must be one of {', '.join(CACHE_MODES)}."
        )
    augments, augmentations = entry.get("augments"), entry.get("augmentations")
    if mode == "disable_cache" or not (augments or augmentations):
        return "", (), ()
    to_disk = bool(entry.get("cache_latents_to_disk"))
    if not (to_disk or entry.get("cache_latents")):
        raise ConfigError(
            f"{where}.{CACHE_MODE_KEY} is {mode}, but there is no cache. Set "
            f"cache_latents_to_disk: true, or {CACHE_MODE_KEY}: disable_cache."
        )
    if mode == "refresh_each_epoch" and (entry.get("cache_latents") or not to_disk):
        raise ConfigError(
            f"{where}.{CACHE_MODE_KEY} is refresh_each_epoch with cache_latents, but data loader "
            "workers keep their first copy of that cache. Set cache_latents_to_disk: true and "
            "cache_latents: false; to hold the cache in memory, set "
            "gracetune.cache_config.vae_cache_type: memory."
        )
    for key in ("augments", "augmentations"):
        entry.pop(key, None)
    return (
        str(mode),
        _as_tuple(where, "augments", augments),
        _as_tuple(where, "augmentations", augmentations),
    )


def _as_tuple(where: str, key: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ConfigError(f"{where}.{key} is {value!r}; it must be a list.")
    return tuple(value)


def _selects_automagic(train: Mapping[str, object]) -> bool:
    params = train.get("optimizer_params")
    by_stage = isinstance(params, dict) and any(key.startswith(_STAGE_PREFIXES) for key in params)
    return train.get("optimizer") == OPTIMIZER_NAME or by_stage


def _split_optimizer(
    train: dict[str, object], environment: Mapping[str, str]
) -> OptimizerSection | None:
    """Remove the settings of gracetune's Automagic from `train` and return them.

    `train.optimizer` becomes its name. Returns None if the configuration does not select it.
    """
    if not _selects_automagic(train):
        return None
    name = train.get("optimizer")
    if name not in ("automagic", OPTIMIZER_NAME):
        raise ConfigError(
            f"train.optimizer is {name!r}, and optimizer_params has bounds by stage, which only "
            "automagic supports. Set optimizer: automagic, or remove the bounds."
        )
    params = train.pop("optimizer_params", None) or {}
    if not isinstance(params, dict):
        raise ConfigError(f"train.optimizer_params is {params!r}; it must be a block.")
    settings = {"weight_decay": 0.0, **params}
    if "beta2" in settings:
        settings["betas"] = [0.9, settings.pop("beta2")]
    if "lr" in train:
        settings["lr"] = train["lr"]
    run = {"optimizer": {"name": "automagic", **settings}}
    train["optimizer"] = OPTIMIZER_NAME
    return load_block(run, "train.optimizer_params", environment).run.optimizer


def _switch(block: Mapping[str, object], name: str) -> bool:
    value = block.get(name, True)
    if not isinstance(value, bool):
        raise ConfigError(f"{BLOCK}.{name} is {value!r}; it must be true or false.")
    return value


def _check_known_keys(where: str, block: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in block:
        if key in MANAGED_KEYS and key not in known:
            raise ConfigError(
                f"{where}.{key} has no effect inside ai-toolkit: weights, gradients, optimizer "
                "state and batches belong to ai-toolkit, and gracetune's hooks put none of them "
                "into managed memory. Remove it."
            )
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{where}.{key} is not known inside ai-toolkit.{hint} Known: {', '.join(known)}."
            )
