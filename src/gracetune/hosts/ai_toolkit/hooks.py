"""Putting the plug-in into ai-toolkit's modules: each hook wraps what is there, and calls it."""

from __future__ import annotations

import functools
import os
from functools import partial
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError
from gracetune.hosts.ai_toolkit.config_blocks import (
    OPTIMIZER_NAME,
    uses_gracetune,
    check_misspelled_keys,
)
from gracetune.hosts.ai_toolkit.plugin import latent_key, latent_path, augmented_latents_of
from gracetune.hosts.ai_toolkit.process import process_class
from gracetune.hosts.probe import RequiredSymbol, UsageSite
from gracetune.optim.build import automagic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin

    Find = Callable[[str], ModuleType]
    Call = Callable[..., Any]


def hook_jobs(plugin: AIToolkitPlugin, find: Find, check: Callable[[], object]) -> None:
    """Let a job make our processes where it has keys of ours; nothing else is touched by then."""
    _wrap(find(JOB).BaseJob, "load_processes", partial(_hook_load_processes, plugin, find, check))


def install(plugin: AIToolkitPlugin, find: Find) -> None:
    """Set every hook that ai-toolkit's classes do not invite."""
    mixins, items, prompts = find(MIXINS), find(ITEMS), find(PROMPTS)
    load_file = mixins.load_file
    for module in (mixins, prompts):
        _wrap(module, "load_file", partial(_hook_load_file, plugin))
    for module in (mixins, items):
        _patch_imported_module(
            module, "Image", open=partial(_open_image, plugin, module.Image.open)
        )
        _patch_imported_module(
            module, "cv2", VideoCapture=partial(_open_video, plugin, module.cv2.VideoCapture)
        )
    vars(mixins)["open"] = partial(_open_text, plugin)
    latents = mixins.LatentCachingFileItemDTOMixin
    _wrap(latents, "get_latent_info_dict", _hook_latent_info)
    _wrap(latents, "get_latent_path", _hook_latent_path)
    _wrap(
        find(LOADER).AiToolkitDataset, "setup_epoch", partial(_hook_setup_epoch, plugin, load_file)
    )
    _wrap(find(TRAINER), "get_optimizer", _hook_get_optimizer)


def _wrap(owner: object, name: str, hook: Callable[[Call], Call]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(hook(original)))


def _patch_imported_module(owner: ModuleType, name: str, **changes: Call) -> None:
    """Let one module see another with some functions exchanged; everyone else sees it as it is."""
    original = vars(owner)[name]
    changed = ModuleType(original.__name__)
    vars(changed).update(vars(original))
    vars(changed).update(changes)
    setattr(owner, name, changed)


def _hook_load_processes(
    plugin: AIToolkitPlugin, find: Find, check: Callable[[], object], original: Call
) -> Call:
    done: list[bool] = []

    def load_processes(self: Any, process_dict: Mapping[str, object]) -> object:
        processes = [p for p in self.config.get("process", []) if isinstance(p, dict)]
        plugin.begin_job()
        for each in processes:
            check_misspelled_keys(each)
        types = {str(p.get("type")) for p in processes if uses_gracetune(p)}
        if types and not done:
            check()
            install(plugin, find)
            done.append(True)
        dressed = {name: _extend_process(plugin, find, name, process_dict[name]) for name in types}
        return original(self, {**process_dict, **dressed})

    return load_processes


def _extend_process(plugin: AIToolkitPlugin, find: Find, name: str, original: object) -> type:
    base = find(TRAINER).BaseSDTrainProcess
    if not (isinstance(original, type) and issubclass(original, base)):
        raise ConfigError(
            f"a process of type {name} has keys of gracetune's, but it is no trainer. Take them "
            "out, or use one of sd_trainer, ui_trainer, diffusion_trainer."
        )
    return process_class(plugin, original)


def _hook_load_file(plugin: AIToolkitPlugin, original: Call) -> Call:
    def load_file(filename: Any, device: Any = "cpu") -> object:
        if device != "cpu":
            return original(filename, device=device)
        return plugin.load(os.fspath(filename), original)

    return load_file


def _open_image(
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
    staged = plugin.open_staged(path, mode)
    return open(path, mode, *args, **options) if staged is None else staged


def _hook_latent_info(original: Call) -> Call:
    return lambda item: latent_key(item, original(item))


def _hook_latent_path(original: Call) -> Call:
    return lambda item, recalculate=False: latent_path(item, original, recalculate)


def _hook_setup_epoch(plugin: AIToolkitPlugin, load_file: Call, original: Call) -> Call:
    def setup_epoch(self: Any) -> None:
        is_first = self.epoch_num == 0
        original(self)
        generations = augmented_latents_of(self.dataset_config)
        if is_first:
            plugin.preload(_cache_files(self), load_file)
        elif generations is not None and generations.mode == "refresh_each_epoch":
            generations.refresh(self)

    return setup_epoch


def _cache_files(dataset: Any) -> list[str]:
    """What the data set's loader will read again and again."""
    items = dataset.file_list
    latents = [i.get_latent_path() for i in items if i.is_latent_cached and i.is_caching_to_disk]
    texts = [i.get_text_embedding_path() for i in items if i.is_text_embedding_cached]
    return [path for path in (*latents, *texts) if os.path.exists(path)]


def _hook_get_optimizer(original: Call) -> Call:
    def get_optimizer(params: Any, optimizer_type: str = "adam", *args: Any, **options: Any) -> Any:
        if optimizer_type != OPTIMIZER_NAME:
            return original(params, optimizer_type, *args, **options)
        optimizer: Any = automagic(params, options["optimizer_params"]["section"], seed=0)
        optimizer.get_avg_learning_rate = lambda: float(optimizer.mean_rate())
        return optimizer

    return get_optimizer


# ------------------------------------------------------------------------------------------
# What of ai-toolkit is hooked, and the commits that it was tried with.


TESTED_COMMITS = {"27a03a91f23e": "known to fit"}
"""By commit; a clone without history goes by the number in its version.py."""

EXTENSION = "toolkit.extension"
JOB = "jobs.BaseJob"
TRAINER = "jobs.process.BaseSDTrainProcess"
SD_TRAINER = "extensions_built_in.sd_trainer.SDTrainer"
LOADER = "toolkit.data_loader"
ITEMS = "toolkit.data_transfer_object.data_loader"
MIXINS = "toolkit.dataloader_mixins"
PROMPTS = "toolkit.prompt_utils"
CONFIG = "toolkit.config_modules"
NETWORK = "toolkit.network_mixins"
SCHEDULER = "toolkit.samplers.custom_flowmatch_sampler"

_CLASS = "BaseSDTrainProcess"
_RUN = f"{_CLASS}.run"
_BATCH = f"{_CLASS}.process_general_training_batch"
_LATENTS = "LatentCachingFileItemDTOMixin"

REQUIRED_SYMBOLS = (
    RequiredSymbol(
        EXTENSION,
        "get_all_extensions_process_dict",
        "finds our file, and asks it for its process",
        usage_sites=(
            UsageSite(EXTENSION, "get_all_extensions", "extension_folders"),
            UsageSite(EXTENSION, "get_all_extensions", "'AI_TOOLKIT_EXTENSIONS'"),
            UsageSite("jobs.ExtensionJob", "", "get_all_extensions_process_dict()"),
        ),
    ),
    RequiredSymbol(EXTENSION, "Extension", "is what our file shows itself as"),
    RequiredSymbol(
        JOB,
        "BaseJob.load_processes",
        "makes the processes: ours where a process has keys of ours",
        leading_parameters=("process_dict",),
        usage_sites=(UsageSite("jobs.ExtensionJob", "", "self.load_processes(self.process_dict)"),),
    ),
    RequiredSymbol(
        SD_TRAINER,
        "SDTrainer",
        "is what our process extends",
        leading_parameters=("process_id", "job", "config"),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.__init__",
        "reads the configuration, from which our keys are taken first",
        leading_parameters=("process_id", "job", "config"),
        accepted_parameters=("custom_pipeline",),
        usage_sites=(
            UsageSite(TRAINER, f"{_CLASS}.__init__", "preprocess_dataset_raw_config(raw_datasets)"),
            UsageSite(TRAINER, f"{_CLASS}.__init__", "self.dataset_configs.append(dataset)"),
            UsageSite(TRAINER, f"{_CLASS}.__init__", "TrainConfig(**self.get_conf('train', {}))"),
        ),
    ),
    RequiredSymbol(
        CONFIG,
        "preprocess_dataset_raw_config",
        "makes one data set of each resolution, in order",
        leading_parameters=("raw_config",),
    ),
    RequiredSymbol(
        CONFIG,
        "DatasetConfig",
        "holds a data set's settings, and turns caches off where augmentations are set",
        usage_sites=(UsageSite(CONFIG, "DatasetConfig.__init__", "self.augmentations"),),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.before_dataset_load",
        "is when data sets are staged",
        usage_sites=(UsageSite(TRAINER, _RUN, "self.before_dataset_load()"),),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.hook_before_train_loop",
        "is when the model's stages are known",
        usage_sites=(UsageSite(TRAINER, _RUN, "self.hook_before_train_loop()"),),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.hook_add_extra_train_params",
        "is when parameters are grouped by stage",
        leading_parameters=("params",),
        usage_sites=(UsageSite(TRAINER, _RUN, "self.hook_add_extra_train_params(params)"),),
    ),
    RequiredSymbol(
        TRAINER,
        "get_optimizer",
        "makes the optimizer: ours by its name",
        usage_sites=(
            UsageSite(
                TRAINER,
                _RUN,
                "get_optimizer(self.params, optimizer_type, learning_rate=self.train_config.lr, "
                "optimizer_params=self.train_config.optimizer_params)",
            ),
        ),
    ),
    RequiredSymbol(
        TRAINER,
        _BATCH,
        "draws timesteps and moves a batch to the device, after which it is placed",
        leading_parameters=("batch",),
        usage_sites=(
            UsageSite(TRAINER, _BATCH, "[1] + self.sd.multistage_boundaries"),
            UsageSite(TRAINER, _BATCH, "boundaries[self.current_boundary_index]"),
            UsageSite(TRAINER, _BATCH, "self.sd.noise_scheduler.set_train_timesteps"),
            UsageSite(SD_TRAINER, "", "self.process_general_training_batch"),
        ),
    ),
    RequiredSymbol(
        SCHEDULER,
        "CustomFlowMatchEulerDiscreteScheduler.set_train_timesteps",
        "makes the timesteps that a stage's window is cut from",
        leading_parameters=("num_timesteps", "device"),
        accepted_parameters=("timestep_type", "latents", "patch_size"),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.save",
        "writes the adapter, which is read back and counted",
        leading_parameters=("step",),
        usage_sites=(
            UsageSite(TRAINER, f"{_CLASS}.save", "self.network.save_weights"),
            UsageSite(TRAINER, f"{_CLASS}.save", "f'{lora_name}{step_num}.safetensors'"),
        ),
    ),
    RequiredSymbol(
        NETWORK, "ToolkitNetworkMixin.get_all_modules", "says which modules are trained"
    ),
    RequiredSymbol(
        LOADER,
        "AiToolkitDataset.setup_epoch",
        "is when an epoch begins: caches are held, or drawn anew",
        usage_sites=(
            UsageSite(LOADER, "AiToolkitDataset.setup_epoch", "self.cache_latents_all_latents()"),
            UsageSite(LOADER, "trigger_dataloader_setup_epoch", "sub_dataset.setup_epoch()"),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        f"{_LATENTS}.get_latent_info_dict",
        "names cached latents: by their augmentations too",
        usage_sites=(
            UsageSite(MIXINS, f"{_LATENTS}.get_latent_path", "self.get_latent_info_dict()"),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        f"{_LATENTS}.get_latent_path",
        "is where cached latents are: asked anew in each generation",
        leading_parameters=("recalculate",),
        usage_sites=(
            UsageSite(MIXINS, f"{_LATENTS}.get_latent", "self.get_latent_path()"),
            UsageSite(
                MIXINS,
                "LatentCachingMixin.cache_latents_all_latents",
                "prep_item.get_latent_path(recalculate=True)",
            ),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        "load_file",
        "reads cached latents: from memory where they are held",
        usage_sites=(UsageSite(MIXINS, f"{_LATENTS}.get_latent", "load_file"),),
    ),
    RequiredSymbol(
        PROMPTS,
        "load_file",
        "reads cached text embeddings, in the same way",
        usage_sites=(
            UsageSite(PROMPTS, "PromptEmbeds.load", "load_file(path, device='cpu')"),
            UsageSite(MIXINS, "TextEmbeddingFileItemDTOMixin", "PromptEmbeds.load(te_path)"),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        "Image",
        "opens pictures, staged ones from memory",
        usage_sites=(
            UsageSite(
                MIXINS,
                "ImageProcessingDTOMixin.load_and_process_image",
                "Image.open(self.path)",
            ),
        ),
    ),
    RequiredSymbol(
        ITEMS,
        "Image",
        "opens pictures to learn their size",
        usage_sites=(UsageSite(ITEMS, "FileItemDTO.__init__", "Image.open(self.path)"),),
    ),
    RequiredSymbol(
        MIXINS,
        "CaptionProcessingDTOMixin.load_caption",
        "opens captions, staged ones from memory",
        usage_sites=(
            UsageSite(
                MIXINS,
                "CaptionProcessingDTOMixin.load_caption",
                "open(prompt_path, 'r', encoding='utf-8')",
            ),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        "cv2",
        "opens videos, staged ones from memory",
        usage_sites=(
            UsageSite(
                MIXINS,
                "ImageProcessingDTOMixin.load_and_process_video",
                "cv2.VideoCapture(self.path)",
            ),
        ),
    ),
)
