"""Our keys in a process of ai-toolkit's YAML: taken out, checked, and remembered.

Stock ai-toolkit ignores every key that it does not know. A key of ours makes a process ours, and
inside our blocks an unknown key is an error.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from gracetune.config.load import load_run_text
from gracetune.config.schema import CacheSection, Gh200Section, InMemorySection, OptimizerSection
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.load import LoadedRun

PROCESS_TYPE = "gracetune"
"""A process type that is always ours."""
BLOCK = "gracetune"
IN_MEMORY = "in_memory"
CACHE_MODE_KEY = "augmentations_cache_mode"
CACHE_MODES = ("disable_cache", "static", "refresh_each_epoch")
OPTIMIZER_NAME = "gracetune_automagic"
"""Our Automagic in `train.optimizer`; bounds by stage choose it too."""
SWITCHES = ("stage_timesteps", "check_saves")
SECTIONS = {
    "gh200_optimizations": ("enable_uvm_hints", "placement"),
    "cache_config": ("vae_cache_type", "text_cache_type", "host_budget_gb"),
}
"""What of a section means something inside ai-toolkit."""
_STAGES = ("high_noise_", "low_noise_")


@dataclass(frozen=True, slots=True)
class DatasetBlock:
    """What an entry of `datasets` says to us."""

    folder: str
    in_memory: InMemorySection | None
    cache_mode: str
    """`static` or `refresh_each_epoch`; empty: augmentations and caches stay ai-toolkit's."""
    augments: tuple[object, ...]
    augmentations: tuple[object, ...]
    num_resolutions: int
    """As many data sets ai-toolkit makes of it."""


@dataclass(frozen=True, slots=True)
class AIToolkitBlocks:
    """What a process says to us."""

    gh200: Gh200Section = field(default_factory=Gh200Section)
    cache: CacheSection | None = None
    """None: cache files are read from disk, as ever."""
    datasets: tuple[DatasetBlock, ...] = ()
    optimizer: OptimizerSection | None = None
    """None: the optimizer is ai-toolkit's."""
    stage_timesteps: bool = True
    check_saves: bool = True
    notices: tuple[str, ...] = ()


def uses_gracetune(process: Mapping[str, object]) -> bool:
    """Whether a process has a key of ours."""
    train = process.get("train")
    return (
        process.get("type") == PROCESS_TYPE
        or BLOCK in process
        or any(_has_our_key(entry) for entry in _entries(process))
        or (isinstance(train, dict) and _wants_automagic(train))
    )


def check_misspelled_keys(process: Mapping[str, object]) -> None:
    """A key that is not quite ours would be ignored, and all that it says with it."""
    _check_misspelled("the process", process, (BLOCK,))
    for place, entry in enumerate(_entries(process)):
        _check_misspelled(f"datasets[{place}]", entry, (IN_MEMORY, CACHE_MODE_KEY))


def _check_misspelled(where: str, said: Mapping[str, object], names: tuple[str, ...]) -> None:
    for key in said:
        close = get_close_matches(str(key), names, n=1, cutoff=0.8)
        if close and key not in names:
            raise ConfigError(
                f"{where} has a key {key!r}, which ai-toolkit ignores. Did you mean {close[0]!r}?"
            )


def split_config(
    process: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[dict[str, object], AIToolkitBlocks]:
    """What is left for ai-toolkit, and what is ours."""
    rest = copy.deepcopy(dict(process))
    block = rest.pop(BLOCK, None) or {}
    if not isinstance(block, dict):
        raise ConfigError(f"{BLOCK} is {block!r}; it is a block, such as {BLOCK}: {{}}.")
    _check_known_keys(BLOCK, block, (*SWITCHES, *SECTIONS))
    for name, known in SECTIONS.items():
        section = block.get(name)
        if isinstance(section, dict):
            _check_known_keys(f"{BLOCK}.{name}", section, known)
    loaded = _load({name: block[name] for name in SECTIONS if name in block}, BLOCK, environment)
    train = rest.get("train")
    return rest, AIToolkitBlocks(
        gh200=loaded.run.gh200_optimizations,
        cache=loaded.run.cache_config if "cache_config" in block else None,
        datasets=tuple(
            _split_dataset(place, entry, environment) for place, entry in enumerate(_entries(rest))
        ),
        optimizer=_split_optimizer(train, environment) if isinstance(train, dict) else None,
        stage_timesteps=_switch(block, "stage_timesteps"),
        check_saves=_switch(block, "check_saves"),
        notices=loaded.notices,
    )


def _entries(process: Mapping[str, object]) -> list[dict[str, object]]:
    """Data sets, as far as they are written as ai-toolkit wants them."""
    found = process.get("datasets")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _has_our_key(entry: Mapping[str, object]) -> bool:
    return IN_MEMORY in entry or CACHE_MODE_KEY in entry or entry.get("type") == IN_MEMORY


def _split_dataset(
    place: int, entry: dict[str, object], environment: Mapping[str, str]
) -> DatasetBlock:
    where = f"datasets[{place}]"
    folder = entry.get("folder_path") or entry.get("dataset_path")
    in_memory = entry.get("type") == IN_MEMORY or IN_MEMORY in entry
    settings = entry.pop(IN_MEMORY, None)
    if entry.get("type") == IN_MEMORY:
        del entry["type"]
    staged = None
    if in_memory:
        if not isinstance(folder, str):
            raise ConfigError(f"{where} is in_memory and has no folder_path; name its folder.")
        section = {"id": where, "type": IN_MEMORY, "instance_data_dir": folder}
        run = {"datasets": [section if settings is None else {**section, IN_MEMORY: settings}]}
        staged = _load(run, where, environment).run.datasets[0].in_memory
    mode, augments, augmentations = _split_augmentations(where, entry)
    resolution = entry.get("resolution")
    return DatasetBlock(
        folder=str(folder),
        in_memory=staged,
        cache_mode=mode,
        augments=augments,
        augmentations=augmentations,
        num_resolutions=len(resolution) if isinstance(resolution, list) else 1,
    )


def _split_augmentations(
    where: str, entry: dict[str, object]
) -> tuple[str, tuple[object, ...], tuple[object, ...]]:
    """ai-toolkit turns caches off at the sight of augmentations; it gets to see them later."""
    mode = entry.pop(CACHE_MODE_KEY, None)
    if mode is None:
        return "", (), ()
    if mode not in CACHE_MODES:
        raise ConfigError(
            f"{where}.{CACHE_MODE_KEY} is {mode!r}; it is one of {', '.join(CACHE_MODES)}."
        )
    augments, augmentations = entry.get("augments"), entry.get("augmentations")
    if mode == "disable_cache" or not (augments or augmentations):
        return "", (), ()
    to_disk = bool(entry.get("cache_latents_to_disk"))
    if not (to_disk or entry.get("cache_latents")):
        raise ConfigError(
            f"{where}.{CACHE_MODE_KEY} is {mode}, but there is no cache. Set cache_latents_to_disk: true, "
            f"or {CACHE_MODE_KEY}: disable_cache."
        )
    if mode == "refresh_each_epoch" and (entry.get("cache_latents") or not to_disk):
        raise ConfigError(
            f"{where}.{CACHE_MODE_KEY} is refresh_each_epoch with cache_latents, which workers keep as they "
            "first saw it. Set cache_latents_to_disk: true and cache_latents: false; to hold the "
            "cache in memory, set gracetune.cache_config.vae_cache_type: memory."
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
        raise ConfigError(f"{where}.{key} is {value!r}; it is a list.")
    return tuple(value)


def _wants_automagic(train: Mapping[str, object]) -> bool:
    params = train.get("optimizer_params")
    by_stage = isinstance(params, dict) and any(key.startswith(_STAGES) for key in params)
    return train.get("optimizer") == OPTIMIZER_NAME or by_stage


def _split_optimizer(
    train: dict[str, object], environment: Mapping[str, str]
) -> OptimizerSection | None:
    if not _wants_automagic(train):
        return None
    name = train.get("optimizer")
    if name not in ("automagic", OPTIMIZER_NAME):
        raise ConfigError(
            f"train.optimizer is {name!r}, and optimizer_params has bounds by stage, which only "
            "automagic has. Set optimizer: automagic, or take them out."
        )
    params = train.pop("optimizer_params", None) or {}
    if not isinstance(params, dict):
        raise ConfigError(f"train.optimizer_params is {params!r}; it is a block.")
    given = {"weight_decay": 0.0, **params}
    if "beta2" in given:
        given["betas"] = [0.9, given.pop("beta2")]
    if "lr" in train:
        given["lr"] = train["lr"]
    run = {"optimizer": {"name": "automagic", **given}}
    train["optimizer"] = OPTIMIZER_NAME
    return _load(run, "train.optimizer_params", environment).run.optimizer


def _switch(block: Mapping[str, object], name: str) -> bool:
    value = block.get(name, True)
    if not isinstance(value, bool):
        raise ConfigError(f"{BLOCK}.{name} is {value!r}; it is true or false.")
    return value


def _check_known_keys(where: str, block: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in block:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{where}.{key} is not known inside ai-toolkit.{hint} Known: {', '.join(known)}."
            )


def _load(run: Mapping[str, object], name: str, environment: Mapping[str, str]) -> LoadedRun:
    """As a run file is read; its lines are not those of the host's file, so none is named."""
    try:
        return load_run_text(json.dumps(run), "json", name, environment=environment)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{name}:1:", f"{name}:")) from None
