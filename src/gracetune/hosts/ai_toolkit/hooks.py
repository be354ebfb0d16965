"""Putting the plug-in into ai-toolkit's modules: each hook wraps what is there, and calls it."""

from __future__ import annotations

import functools
import os
from functools import partial
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError
from gracetune.hosts.ai_toolkit.blocks import OPTIMIZER, is_ours, refuse_near_misses
from gracetune.hosts.ai_toolkit.generations import describe, latent_path, of_settings
from gracetune.hosts.ai_toolkit.needs import ITEMS, JOB, LOADER, MIXINS, PROMPTS, TRAINER
from gracetune.hosts.ai_toolkit.process import process_class
from gracetune.optim.named import automagic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin

    Find = Callable[[str], ModuleType]
    Call = Callable[..., Any]


def enter_jobs(plugin: AIToolkitPlugin, find: Find, check: Callable[[], object]) -> None:
    """Let a job make our processes where it has keys of ours; nothing else is touched by then."""
    _wrap(find(JOB).BaseJob, "load_processes", partial(_dressing, plugin, find, check))


def install(plugin: AIToolkitPlugin, find: Find) -> None:
    """Set every hook that ai-toolkit's classes do not invite."""
    mixins, items, prompts = find(MIXINS), find(ITEMS), find(PROMPTS)
    load_file = mixins.load_file
    for module in (mixins, prompts):
        _wrap(module, "load_file", partial(_from_memory, plugin))
    for module in (mixins, items):
        _change(module, "Image", open=partial(_open_picture, plugin, module.Image.open))
        _change(module, "cv2", VideoCapture=partial(_open_video, plugin, module.cv2.VideoCapture))
    vars(mixins)["open"] = partial(_open_text, plugin)
    latents = mixins.LatentCachingFileItemDTOMixin
    _wrap(latents, "get_latent_info_dict", _describing)
    _wrap(latents, "get_latent_path", _finding)
    _wrap(find(LOADER).AiToolkitDataset, "setup_epoch", partial(_at_epochs, plugin, load_file))
    _wrap(find(TRAINER), "get_optimizer", _making_optimizers)


def _wrap(owner: object, name: str, hook: Callable[[Call], Call]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(hook(original)))


def _change(owner: ModuleType, name: str, **changes: Call) -> None:
    """Let one module see another with some functions exchanged; everyone else sees it as it is."""
    original = vars(owner)[name]
    changed = ModuleType(original.__name__)
    vars(changed).update(vars(original))
    vars(changed).update(changes)
    setattr(owner, name, changed)


def _dressing(
    plugin: AIToolkitPlugin, find: Find, check: Callable[[], object], original: Call
) -> Call:
    done: list[bool] = []

    def load_processes(self: Any, process_dict: Mapping[str, object]) -> object:
        processes = [p for p in self.config.get("process", []) if isinstance(p, dict)]
        plugin.begin_job()
        for each in processes:
            refuse_near_misses(each)
        types = {str(p.get("type")) for p in processes if is_ours(p)}
        if types and not done:
            check()
            install(plugin, find)
            done.append(True)
        dressed = {name: _dressed(plugin, find, name, process_dict[name]) for name in types}
        return original(self, {**process_dict, **dressed})

    return load_processes


def _dressed(plugin: AIToolkitPlugin, find: Find, name: str, original: object) -> type:
    base = find(TRAINER).BaseSDTrainProcess
    if not (isinstance(original, type) and issubclass(original, base)):
        raise ConfigError(
            f"a process of type {name} has keys of gracetune's, but it is no trainer. Take them "
            "out, or use one of sd_trainer, ui_trainer, diffusion_trainer."
        )
    return process_class(plugin, original)


def _from_memory(plugin: AIToolkitPlugin, original: Call) -> Call:
    def load_file(filename: Any, device: Any = "cpu") -> object:
        if device != "cpu":
            return original(filename, device=device)
        return plugin.load(os.fspath(filename), original)

    return load_file


def _open_picture(
    plugin: AIToolkitPlugin, original: Call, source: object, *args: Any, **options: Any
) -> Any:
    staged = plugin.staged_bytes(source)
    return original(source if staged is None else BytesIO(staged), *args, **options)


def _open_video(
    plugin: AIToolkitPlugin, original: Call, source: object, *args: Any, **options: Any
) -> Any:
    """Video decoders want a path: one that leads to memory, until it is open."""
    staged = plugin.staged_bytes(source)
    if staged is None:
        return original(source, *args, **options)
    with os.fdopen(os.memfd_create("gracetune-video"), "wb") as file:
        file.write(staged)
        file.flush()
        return original(f"/proc/self/fd/{file.fileno()}", *args, **options)


def _open_text(
    plugin: AIToolkitPlugin, path: Any, mode: str = "r", *args: Any, **options: Any
) -> Any:
    staged = plugin.opened(path, mode)
    return open(path, mode, *args, **options) if staged is None else staged


def _describing(original: Call) -> Call:
    return lambda item: describe(item, original(item))


def _finding(original: Call) -> Call:
    return lambda item, recalculate=False: latent_path(item, original, recalculate)


def _at_epochs(plugin: AIToolkitPlugin, load_file: Call, original: Call) -> Call:
    def setup_epoch(self: Any) -> None:
        is_first = self.epoch_num == 0
        original(self)
        generations = of_settings(self.dataset_config)
        if is_first:
            plugin.hold(_cache_files(self), load_file)
        elif generations is not None and generations.mode == "refresh_each_epoch":
            generations.refresh(self)

    return setup_epoch


def _cache_files(dataset: Any) -> list[str]:
    """What the data set's loader will read again and again."""
    items = dataset.file_list
    latents = [i.get_latent_path() for i in items if i.is_latent_cached and i.is_caching_to_disk]
    texts = [i.get_text_embedding_path() for i in items if i.is_text_embedding_cached]
    return [path for path in (*latents, *texts) if os.path.exists(path)]


def _making_optimizers(original: Call) -> Call:
    def get_optimizer(params: Any, optimizer_type: str = "adam", *args: Any, **options: Any) -> Any:
        if optimizer_type != OPTIMIZER:
            return original(params, optimizer_type, *args, **options)
        optimizer: Any = automagic(params, options["optimizer_params"]["section"], seed=0)
        optimizer.get_avg_learning_rate = lambda: float(optimizer.mean_rate())
        return optimizer

    return get_optimizer
