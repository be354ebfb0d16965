"""Hook gracetune into ai-toolkit's modules, and list the symbols that the hooks rely on.

Each hook wraps an existing function and calls it. probe.py checks REQUIRED_SYMBOLS against the
clone before any hook is set.
"""

from __future__ import annotations

import functools
import os
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError
from gracetune.hosts import patch_imported_module
from gracetune.hosts.ai_toolkit.config_blocks import (
    OPTIMIZER_NAME,
    check_misspelled_keys,
    uses_gracetune,
)
from gracetune.hosts.ai_toolkit.plugin import augmented_latents_of, extended_latent_key, latent_path
from gracetune.hosts.ai_toolkit.trainer_subclass import process_class
from gracetune.hosts.fork_modules import add_fork_module
from gracetune.hosts.in_memory_files import path_in_memory
from gracetune.hosts.probe import RequiredSymbol, UsageSite
from gracetune.optim.build import automagic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin

    Find = Callable[[str], ModuleType]
    Call = Callable[..., Any]


TESTED_COMMITS = {"27a03a91f23e": "tested"}
"""The tested commits of ai-toolkit. A clone without history is known by its version number."""

FORK_MODULE = "toolkit.gh200_helpers"
"""The module with the GH200 fork's functions, which gracetune adds."""
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
        "loads our file and asks it for its process class",
        usage_sites=(
            UsageSite(EXTENSION, "get_all_extensions", "'extensions'"),
            UsageSite(EXTENSION, "get_all_extensions", "'AI_TOOLKIT_EXTENSIONS'"),
            UsageSite("jobs.ExtensionJob", "", "get_all_extensions_process_dict()"),
        ),
    ),
    RequiredSymbol(EXTENSION, "Extension", "is the base class of our extension"),
    RequiredSymbol(
        JOB,
        "BaseJob.load_processes",
        "creates the processes, extended ones for processes with our keys",
        leading_parameters=("process_dict",),
        usage_sites=(UsageSite("jobs.ExtensionJob", "", "self.load_processes(self.process_dict)"),),
    ),
    RequiredSymbol(
        SD_TRAINER,
        "SDTrainer",
        "is the base class of our process",
        leading_parameters=("process_id", "job", "config"),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.__init__",
        "reads the configuration, after our keys were removed",
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
        "creates one dataset per resolution, in order",
        leading_parameters=("raw_config",),
    ),
    RequiredSymbol(
        CONFIG,
        "DatasetConfig",
        "holds a dataset's settings and disables caches if it has augmentations",
        usage_sites=(UsageSite(CONFIG, "DatasetConfig.__init__", "self.augmentations"),),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.before_dataset_load",
        "is called before datasets load: they are staged here",
        usage_sites=(UsageSite(TRAINER, _RUN, "self.before_dataset_load()"),),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.hook_before_train_loop",
        "is called once the model's stages are known",
        usage_sites=(UsageSite(TRAINER, _RUN, "self.hook_before_train_loop()"),),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.hook_add_extra_train_params",
        "receives the parameters: they are grouped by stage here",
        leading_parameters=("params",),
        usage_sites=(UsageSite(TRAINER, _RUN, "self.hook_add_extra_train_params(params)"),),
    ),
    RequiredSymbol(
        TRAINER,
        "get_optimizer",
        "creates the optimizer, ours by its name",
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
        "draws timesteps and moves a batch to the device, where it is placed",
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
        "makes the timesteps from which a stage draws",
        leading_parameters=("num_timesteps", "device"),
        accepted_parameters=("timestep_type", "latents", "patch_size"),
    ),
    RequiredSymbol(
        TRAINER,
        f"{_CLASS}.save",
        "writes the adapter, which is then read back and checked",
        leading_parameters=("step=None",),
        usage_sites=(
            UsageSite(TRAINER, f"{_CLASS}.save", "self.network.save_weights"),
            UsageSite(TRAINER, f"{_CLASS}.save", "f'{lora_name}{step_num}.safetensors'"),
        ),
    ),
    RequiredSymbol(NETWORK, "ToolkitNetworkMixin.get_all_modules", "lists the trained modules"),
    RequiredSymbol(
        LOADER,
        "AiToolkitDataset.setup_epoch",
        "starts an epoch: caches are preloaded or refreshed",
        usage_sites=(
            UsageSite(LOADER, "AiToolkitDataset.setup_epoch", "self.cache_latents_all_latents()"),
            UsageSite(LOADER, "trigger_dataloader_setup_epoch", "sub_dataset.setup_epoch()"),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        f"{_LATENTS}.get_latent_info_dict",
        "names cached latents, by their augmentations too",
        usage_sites=(
            UsageSite(MIXINS, f"{_LATENTS}.get_latent_path", "self.get_latent_info_dict()"),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        f"{_LATENTS}.get_latent_path",
        "locates cached latents, again in each augmentation epoch",
        leading_parameters=("recalculate=False",),
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
        "reads cached latents, from memory if they are kept there",
        usage_sites=(UsageSite(MIXINS, f"{_LATENTS}.get_latent", "load_file"),),
    ),
    RequiredSymbol(
        PROMPTS,
        "load_file",
        "reads cached text embeddings, from memory if they are kept there",
        usage_sites=(
            UsageSite(PROMPTS, "PromptEmbeds.load", "load_file(path, device='cpu')"),
            UsageSite(MIXINS, "TextEmbeddingFileItemDTOMixin", "PromptEmbeds.load(te_path)"),
        ),
    ),
    RequiredSymbol(
        MIXINS,
        "Image",
        "opens images, staged ones from memory",
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
        "opens images to read their size, staged ones from memory",
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


# The hooks


def hook_jobs(plugin: AIToolkitPlugin, find: Find, check: Callable[[], object]) -> None:
    """Hook the function in which an ai-toolkit job creates its processes.

    If a process has gracetune's keys, it then checks the clone and sets the other hooks.
    """
    hook = partial(_hook_load_processes, plugin, find, check)
    _wrap(find(JOB).BaseJob, "load_processes", hook)


def install_hooks(plugin: AIToolkitPlugin, find: Find) -> None:
    """Replace the functions of ai-toolkit that are not methods of the trainer by wrappers.

    Methods of the trainer are overridden in a subclass instead.
    """
    mixins, items, prompts = find(MIXINS), find(ITEMS), find(PROMPTS)
    load_file = mixins.load_file
    for module in (mixins, prompts):
        _wrap(module, "load_file", partial(_hook_load_file, plugin))
    for module in (mixins, items):
        open_image = partial(_open_image, plugin, module.Image.open)
        patch_imported_module(module, "Image", open=open_image)
        open_video = partial(_open_video, plugin, module.cv2.VideoCapture)
        patch_imported_module(module, "cv2", VideoCapture=open_video)
    vars(mixins)["open"] = partial(_open_text, plugin)
    latents = mixins.LatentCachingFileItemDTOMixin
    _wrap(latents, "get_latent_info_dict", _hook_latent_info)
    _wrap(latents, "get_latent_path", _hook_latent_path)
    dataset = find(LOADER).AiToolkitDataset
    _wrap(dataset, "setup_epoch", partial(_hook_setup_epoch, plugin, load_file))
    _wrap(find(TRAINER), "get_optimizer", _hook_get_optimizer)
    add_fork_module(FORK_MODULE, plugin.session)


def _wrap(owner: object, name: str, hook: Callable[[Call], Call]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(hook(original)))


def _hook_load_processes(
    plugin: AIToolkitPlugin, find: Find, check: Callable[[], object], original: Call
) -> Call:
    installed: list[bool] = []

    def load_processes(self: Any, process_dict: Mapping[str, object]) -> object:
        processes = [p for p in self.config.get("process", []) if isinstance(p, dict)]
        plugin.begin_job()
        for each in processes:
            check_misspelled_keys(each)
        types = {str(p.get("type")) for p in processes if uses_gracetune(p)}
        if types and not installed:
            check()
            install_hooks(plugin, find)
            installed.append(True)
        extended = {name: _extend_process(plugin, find, name, process_dict[name]) for name in types}
        return original(self, {**process_dict, **extended})

    return load_processes


def _extend_process(plugin: AIToolkitPlugin, find: Find, name: str, original: object) -> type:
    base = find(TRAINER).BaseSDTrainProcess
    if not (isinstance(original, type) and issubclass(original, base)):
        raise ConfigError(
            f"a process of type {name} has gracetune keys, but is not a trainer. Remove them, or "
            "use one of sd_trainer, ui_trainer, diffusion_trainer."
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
    """Open a video from memory: cv2.VideoCapture needs a path."""
    staged = plugin.staged_bytes(source)
    if staged is None:
        return original(source, *args, **options)
    with path_in_memory(staged) as path:
        return original(path, *args, **options)


def _open_text(
    plugin: AIToolkitPlugin, path: Any, mode: str = "r", *args: Any, **options: Any
) -> Any:
    staged = plugin.open_staged(path, mode)
    return open(path, mode, *args, **options) if staged is None else staged


def _hook_latent_info(original: Call) -> Call:
    return lambda item: extended_latent_key(item, original(item))


def _hook_latent_path(original: Call) -> Call:
    return lambda item, recalculate=False: latent_path(item, original, recalculate)


def _hook_setup_epoch(plugin: AIToolkitPlugin, load_file: Call, original: Call) -> Call:
    """Wrap `setup_epoch` to load cache files into memory before the first epoch.

    Before later epochs, it encodes augmented latents again if the dataset asks for that.
    """

    def setup_epoch(self: Any) -> None:
        is_first = self.epoch_num == 0
        original(self)
        latents = augmented_latents_of(self.dataset_config)
        if is_first:
            plugin.preload(_cache_files(self), load_file)
        elif latents is not None and latents.cache_mode == "refresh_each_epoch":
            latents.refresh(self)

    return setup_epoch


def _cache_files(dataset: Any) -> list[str]:
    """Return the existing cache files that the dataset's loader reads in every epoch."""
    items = dataset.file_list
    latents = [i.get_latent_path() for i in items if i.is_latent_cached and i.is_caching_to_disk]
    texts = [i.get_text_embedding_path() for i in items if i.is_text_embedding_cached]
    return [path for path in (*latents, *texts) if os.path.exists(path)]


def _hook_get_optimizer(original: Call) -> Call:
    def get_optimizer(params: Any, optimizer_type: str = "adam", *args: Any, **options: Any) -> Any:
        if optimizer_type != OPTIMIZER_NAME:
            return original(params, optimizer_type, *args, **options)
        optimizer: Any = automagic(params, options["optimizer_params"]["section"], seed=0)
        optimizer.get_avg_learning_rate = lambda: float(optimizer.mean_lr())
        return optimizer

    return get_optimizer
