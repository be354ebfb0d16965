"""What of ai-toolkit is hooked, and the commits that it was tried with."""

from __future__ import annotations

from gracetune.hosts.probe import Need, Site

KNOWN = {"27a03a91f23e": "known to fit"}
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

NEEDS = (
    Need(
        EXTENSION,
        "get_all_extensions_process_dict",
        "finds our file, and asks it for its process",
        sites=(
            Site(EXTENSION, "get_all_extensions", "extension_folders"),
            Site(EXTENSION, "get_all_extensions", "'AI_TOOLKIT_EXTENSIONS'"),
            Site("jobs.ExtensionJob", "", "get_all_extensions_process_dict()"),
        ),
    ),
    Need(EXTENSION, "Extension", "is what our file shows itself as"),
    Need(
        JOB,
        "BaseJob.load_processes",
        "makes the processes: ours where a process has keys of ours",
        takes=("process_dict",),
        sites=(Site("jobs.ExtensionJob", "", "self.load_processes(self.process_dict)"),),
    ),
    Need(
        SD_TRAINER,
        "SDTrainer",
        "is what our process extends",
        takes=("process_id", "job", "config"),
    ),
    Need(
        TRAINER,
        f"{_CLASS}.__init__",
        "reads the configuration, from which our keys are taken first",
        takes=("process_id", "job", "config"),
        accepts=("custom_pipeline",),
        sites=(
            Site(TRAINER, f"{_CLASS}.__init__", "preprocess_dataset_raw_config(raw_datasets)"),
            Site(TRAINER, f"{_CLASS}.__init__", "self.dataset_configs.append(dataset)"),
            Site(TRAINER, f"{_CLASS}.__init__", "TrainConfig(**self.get_conf('train', {}))"),
        ),
    ),
    Need(
        CONFIG,
        "preprocess_dataset_raw_config",
        "makes one data set of each resolution, in order",
        takes=("raw_config",),
    ),
    Need(
        CONFIG,
        "DatasetConfig",
        "holds a data set's settings, and turns caches off where augmentations are set",
        sites=(Site(CONFIG, "DatasetConfig.__init__", "self.augmentations"),),
    ),
    Need(
        TRAINER,
        f"{_CLASS}.before_dataset_load",
        "is when data sets are staged",
        sites=(Site(TRAINER, _RUN, "self.before_dataset_load()"),),
    ),
    Need(
        TRAINER,
        f"{_CLASS}.hook_before_train_loop",
        "is when the model's stages are known",
        sites=(Site(TRAINER, _RUN, "self.hook_before_train_loop()"),),
    ),
    Need(
        TRAINER,
        f"{_CLASS}.hook_add_extra_train_params",
        "is when parameters are grouped by stage",
        takes=("params",),
        sites=(Site(TRAINER, _RUN, "self.hook_add_extra_train_params(params)"),),
    ),
    Need(
        TRAINER,
        "get_optimizer",
        "makes the optimizer: ours by its name",
        sites=(
            Site(
                TRAINER,
                _RUN,
                "get_optimizer(self.params, optimizer_type, learning_rate=self.train_config.lr, "
                "optimizer_params=self.train_config.optimizer_params)",
            ),
        ),
    ),
    Need(
        TRAINER,
        _BATCH,
        "draws timesteps and moves a batch to the device, after which it is placed",
        takes=("batch",),
        sites=(
            Site(TRAINER, _BATCH, "[1] + self.sd.multistage_boundaries"),
            Site(TRAINER, _BATCH, "boundaries[self.current_boundary_index]"),
            Site(TRAINER, _BATCH, "self.sd.noise_scheduler.set_train_timesteps"),
            Site(SD_TRAINER, "", "self.process_general_training_batch"),
        ),
    ),
    Need(
        SCHEDULER,
        "CustomFlowMatchEulerDiscreteScheduler.set_train_timesteps",
        "makes the timesteps that a stage's window is cut from",
        takes=("num_timesteps", "device"),
        accepts=("timestep_type", "latents", "patch_size"),
    ),
    Need(
        TRAINER,
        f"{_CLASS}.save",
        "writes the adapter, which is read back and counted",
        takes=("step",),
        sites=(
            Site(TRAINER, f"{_CLASS}.save", "self.network.save_weights"),
            Site(TRAINER, f"{_CLASS}.save", "f'{lora_name}{step_num}.safetensors'"),
        ),
    ),
    Need(NETWORK, "ToolkitNetworkMixin.get_all_modules", "says which modules are trained"),
    Need(
        LOADER,
        "AiToolkitDataset.setup_epoch",
        "is when an epoch begins: caches are held, or drawn anew",
        sites=(
            Site(LOADER, "AiToolkitDataset.setup_epoch", "self.cache_latents_all_latents()"),
            Site(LOADER, "trigger_dataloader_setup_epoch", "sub_dataset.setup_epoch()"),
        ),
    ),
    Need(
        MIXINS,
        f"{_LATENTS}.get_latent_info_dict",
        "names cached latents: by their augmentations too",
        sites=(Site(MIXINS, f"{_LATENTS}.get_latent_path", "self.get_latent_info_dict()"),),
    ),
    Need(
        MIXINS,
        f"{_LATENTS}.get_latent_path",
        "is where cached latents are: asked anew in each generation",
        takes=("recalculate",),
        sites=(
            Site(MIXINS, f"{_LATENTS}.get_latent", "self.get_latent_path()"),
            Site(
                MIXINS,
                "LatentCachingMixin.cache_latents_all_latents",
                "prep_item.get_latent_path(recalculate=True)",
            ),
        ),
    ),
    Need(
        MIXINS,
        "load_file",
        "reads cached latents: from memory where they are held",
        sites=(Site(MIXINS, f"{_LATENTS}.get_latent", "load_file"),),
    ),
    Need(
        PROMPTS,
        "load_file",
        "reads cached text embeddings, in the same way",
        sites=(
            Site(PROMPTS, "PromptEmbeds.load", "load_file(path, device='cpu')"),
            Site(MIXINS, "TextEmbeddingFileItemDTOMixin", "PromptEmbeds.load(te_path)"),
        ),
    ),
    Need(
        MIXINS,
        "Image",
        "opens pictures, staged ones from memory",
        sites=(
            Site(
                MIXINS,
                "ImageProcessingDTOMixin.load_and_process_image",
                "Image.open(self.path)",
            ),
        ),
    ),
    Need(
        ITEMS,
        "Image",
        "opens pictures to learn their size",
        sites=(Site(ITEMS, "FileItemDTO.__init__", "Image.open(self.path)"),),
    ),
    Need(
        MIXINS,
        "CaptionProcessingDTOMixin.load_caption",
        "opens captions, staged ones from memory",
        sites=(
            Site(
                MIXINS,
                "CaptionProcessingDTOMixin.load_caption",
                "open(prompt_path, 'r', encoding='utf-8')",
            ),
        ),
    ),
    Need(
        MIXINS,
        "cv2",
        "opens videos, staged ones from memory",
        sites=(
            Site(
                MIXINS,
                "ImageProcessingDTOMixin.load_and_process_video",
                "cv2.VideoCapture(self.path)",
            ),
        ),
    ),
)
