"""List what ai-toolkit's job files can contain: models, processes, and keys without a counterpart.

`ai_toolkit.py` translates the keys that gracetune has a setting for. The tables here cover all
others: those without an effect on the result, with the reason, and those that gracetune cannot
follow, with advice. A test compares the tables with the keys that ai-toolkit's own classes read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.importers.values import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.importers.report import ImportedRun


class Model(NamedTuple):
    """A value of ai-toolkit's `model.arch` for which gracetune has a model family."""

    family: str
    """Value of `model.family`."""
    shift: float | str = 1.0
    """Value of `train.timestep_shift` for `timestep_type: shift`: the shift of the scheduler that
    ai-toolkit trains this model with."""
    blocks: str = ""
    """Regular expression for the block names that ai-toolkit adapts. It is empty where ai-toolkit's
    module names are not those of diffusers."""
    takes_references: bool = False
    """True if the model edits images, so that `control_path` is used."""
    pixel_step: int = 16
    """Number of pixels of which the width and height of samples are multiples."""


@dataclass(slots=True)
class Job:
    """The facts about a job that decide about keys in several sections."""

    imported: ImportedRun
    arch: str
    """ai-toolkit's name of the model, without a tag."""
    model: Model
    has_adapter: bool
    is_dora: bool
    trigger_word: str | None
    captions_unused: bool
    """True if ai-toolkit trains with the trigger word as the only caption."""
    resolutions: list[int]
    """Resolutions of all datasets."""
    is_quantized: bool = False
    """True if the run file sets `model.quantize`."""
    micro_steps: int = 1
    """Number of ai-toolkit's steps in one optimizer step."""

    @property
    def is_flow(self) -> bool:
        """True if the model is trained by flow matching."""
        return self.model.family not in ("sdxl", "sd15")

    @property
    def is_video(self) -> bool:
        """True for models whose clips have 4n+1 frames."""
        return self.model.family == "wan22"

    @property
    def needs_images(self) -> bool:
        """True if every prompt needs an input image: to edit it, or to start a video from it."""
        section = self.imported.run.get("model")
        starts = isinstance(section, dict) and section.get("task") == "image"
        return self.model.takes_references or self.arch.endswith("_i2v") or starts

    @property
    def has_experts(self) -> bool:
        """True for models with a high-noise and a low-noise transformer."""
        return self.arch.startswith("wan22_14b")

    def fit_edge(self, pixels: int) -> int:
        """Return the largest width or height of at most `pixels` that the model can generate."""
        return max(self.model.pixel_step, pixels // self.model.pixel_step * self.model.pixel_step)

    def count_steps(self, steps: int) -> int:
        """Convert a number of ai-toolkit's steps to optimizer steps."""
        return max(1, round(steps / self.micro_steps))


_FLUX_BLOCKS = r"(?:single_)?transformer_blocks\..*"
_QWEN = Model("qwen_image", "qwen_image", r"transformer_blocks\..*")
_QWEN_EDIT = _QWEN._replace(takes_references=True)
_FLUX = Model("flux", "flux", _FLUX_BLOCKS)
_FLUX2 = Model("flux2", "flux")
_WAN = Model("wan22", 3.0, r"(?:(?:high|low)\.)?blocks\..*")

MODELS: Mapping[str, Model] = {
    "flux": _FLUX,
    "flux_kontext": _FLUX._replace(takes_references=True),
    "flux2": _FLUX2,
    "flux2_klein_4b": _FLUX2,
    "flux2_klein_9b": _FLUX2,
    "chroma": Model("chroma", "flux"),
    "wan21": _WAN,
    "wan21_i2v": _WAN,
    "wan22_14b": _WAN,
    "wan22_14b_i2v": _WAN,
    "wan22_5b": _WAN._replace(shift=5.0, pixel_step=32),
    "qwen_image": _QWEN,
    "qwen_image_edit": _QWEN_EDIT,
    "qwen_image_edit_plus": _QWEN_EDIT,
    "zimage": Model("z_image", 3.0, r"layers\..*"),
    "krea2": Model("krea2", "krea2"),
    "sdxl": Model("sdxl", pixel_step=32),
    "sd1": Model("sd15", pixel_step=64),
    "sd15": Model("sd15", pixel_step=64),
    "sd3": Model("sd3", 3.0, r"transformer_blocks\..*"),
}
"""Models by ai-toolkit's `model.arch`, without the tag after a colon."""

NOT_TRANSLATED = {"ideogram4": "ideogram4-lora"}
"""Models of `OTHER_MODELS` that gracetune trains, with the example to start from."""
OTHER_MODELS: Mapping[str, str] = {
    "ace_step_15": "ACE-Step 1.5",
    "ace_step_15_xl": "ACE-Step 1.5 XL",
    "anima": "Anima",
    "auraflow": "AuraFlow",
    "boogu_image": "Boogu Image",
    "boogu_image_edit": "Boogu Image Edit",
    "chroma_radiance": "Chroma Radiance",
    "cogview4": "CogView4",
    "ernie_image": "ERNIE-Image",
    "f-lite": "F-Lite",
    "flex1": "Flex.1",
    "flex2": "Flex.2",
    "hidream": "HiDream I1",
    "hidream_e1": "HiDream E1",
    "hidream_o1": "HiDream O1",
    "ideogram4": "Ideogram 4",
    "ltx2": "LTX-2",
    "ltx2.3": "LTX-2.3",
    "ltx2.5": "LTX-2.5",
    "lumina2": "Lumina Image 2",
    "mageflow": "MageFlow",
    "mageflow_edit": "MageFlow Edit",
    "minimax_h3": "MiniMax H3",
    "minimax_h3_ref2va": "MiniMax H3 Ref2VA",
    "nucleus_image": "Nucleus Image",
    "omnigen2": "OmniGen2",
    "pixart": "PixArt",
    "pixart_sigma": "PixArt Sigma",
    "prx_pixel": "PRX Pixel",
    "sd2": "Stable Diffusion 2",
    "ssd": "SSD-1B",
    "vega": "Segmind Vega",
    "zeta_chroma": "Zeta Chroma",
    "zimage_l2p": "Z-Image L2P",
}
"""Names of the models that ai-toolkit trains and gracetune does not have, by `model.arch`."""

MODEL_FLAGS: Mapping[str, str] = {
    "is_v2": "sd2",
    "is_v3": "sd3",
    "is_xl": "sdxl",
    "is_pixart": "pixart",
    "is_pixart_sigma": "pixart_sigma",
    "is_auraflow": "auraflow",
    "is_flux": "flux",
    "is_lumina2": "lumina2",
    "is_vega": "vega",
    "is_ssd": "ssd",
}
"""Older keys of `model` that select the `arch`. The first that is true counts."""

PATH_HINTS: tuple[tuple[str, str], ...] = (
    (r"qwen-image-edit-2", "qwen_image_edit_plus"),
    (r"qwen-image-edit", "qwen_image_edit"),
    (r"qwen-image", "qwen_image"),
    (r"flex\.?1", "flex1"),
    (r"flex\.?2", "flex2"),
    (r"flux.*kontext", "flux_kontext"),
    (r"flux\.?2.*klein.*4b", "flux2_klein_4b"),
    (r"flux\.?2.*klein", "flux2_klein_9b"),
    (r"flux\.?2", "flux2"),
    (r"flux", "flux"),
    (r"z-image", "zimage"),
    (r"wan2\.2.*i2v-a14b", "wan22_14b_i2v"),
    (r"wan2\.2.*5b", "wan22_5b"),
    (r"wan2\.2", "wan22_14b"),
    (r"wan2\.1.*i2v", "wan21_i2v"),
    (r"wan2\.1", "wan21"),
    (r"zeta-chroma", "zeta_chroma"),
    (r"chroma", "chroma"),
    (r"krea-2", "krea2"),
    (r"stable-diffusion-xl|sdxl", "sdxl"),
    (r"stable-diffusion-3", "sd3"),
    (r"hidream", "hidream"),
    (r"lumina", "lumina2"),
    (r"omnigen2", "omnigen2"),
)
"""Regular expressions for a model's path, with the `arch` that they suggest. The first counts."""

TRAINERS = frozenset(("sd_trainer", "ui_trainer", "diffusion_trainer", "gracetune"))
"""Types of processes that are imported."""

OTHER_PROCESSES: Mapping[str, str] = {
    "concept_slider": "Sliders are not supported.",
    "slider": "Sliders are not supported.",
    "slider_old": "Sliders are not supported.",
    "ultimate_slider_trainer": "Sliders are not supported.",
    "image_reference_slider_trainer": "Sliders are not supported.",
    "concept_replacer": "Replacing a concept is not supported.",
    "textual_inversion_trainer": "Textual inversion is not supported; train a LoRA instead.",
    "reference": "Training on pairs of images is not supported.",
    "vae": "Training a VAE is not supported.",
    "esrgan": "Training an upscaler is not supported.",
    "rescale_sd": "Rescaling a model is not supported.",
    "lora_hack": "Editing adapter weights is not supported.",
    "locon": "Use `gracetune adapter extract` to extract an adapter.",
    "lora": "Use `gracetune adapter extract` to extract an adapter.",
    "rescale_lora": "Use `gracetune adapter` to convert and merge adapter files.",
    "to_folder": "Use `gracetune sample` to generate images.",
    "reference_generator": "Use `gracetune sample` to generate images.",
    "pure_lora_generator": "Use `gracetune sample` to generate images.",
    "batch_img2img": "Use `gracetune sample` to generate images.",
    "dataset_tools": "Preparing datasets is not supported.",
    "super_tagger": "Captioning is not supported.",
    "sync_from_collection": "Downloading datasets is not supported.",
}
"""Types of processes that are not imported, with advice."""

NETWORKS: Mapping[str, str] = {
    "lora": "lora",
    "lierla": "lora",
    "dora": "dora",
    "locon": "locon",
    "lycoris": "locon",
    "lokr": "lokr",
    "fullrank": "full",
}
"""Values of `adapter.kind` by ai-toolkit's `network.type`."""

MODULATION: Mapping[str, str] = {
    "flux": "norm*.linear",
    "qwen_image": "*_mod.1",
    "sd3": "norm1*.linear",
    "z_image": "adaLN_modulation.0",
}
"""Layers that ai-toolkit adapts in addition to gracetune's default targets, by family."""

AUGMENTATIONS: Mapping[str, str] = {
    "HorizontalFlip": "flip",
    "VerticalFlip": "vertical_flip",
    "ToGray": "grayscale",
}
"""Augmentations of albumentations that gracetune has under another name."""

OWN_SWITCHES: Mapping[str, str] = {
    "stage_timesteps": "each expert is always trained on its own timesteps",
    "check_saves": "adapter files are always checked",
}
"""Keys of the section `gracetune` that is for gracetune inside ai-toolkit."""

QUANTIZATION: Mapping[str, tuple[str, str]] = {
    "qfloat8": ("fp8", ""),
    "float8": ("fp8", ""),
    "qfloat8_e4m3fn": ("fp8", ""),
    "qint8": ("int8", ""),
    "int8": ("int8", ""),
    "uint8": ("int8", ""),
    "convrot8": ("int8", "which has no rotation of the weights"),
    **{f"{kind}{bits}": ("int8", f"which has 8 bits instead of {bits}")
       for kind in ("uint", "convrotint") for bits in (5, 6, 7)},
    "uint4": ("nf4", "another format of 4 bits"),
    "qint4": ("nf4", "another format of 4 bits"),
    "nvfp4": ("nf4", "another format of 4 bits"),
    "convrot4": ("nf4", "another format of 4 bits"),
    "convrotint4": ("nf4", "another format of 4 bits"),
    **{f"{kind}{bits}": ("nf4", f"which has 4 bits instead of {bits}")
       for kind in ("uint", "convrotint", "qint") for bits in (2, 3)},
    "convrotbitnet": ("nf4", "which has 4 bits instead of 1.58"),
}  # fmt: skip
"""Value of `model.quantize` for each `qtype`, with the difference if there is one."""


class Optimizer(NamedTuple):
    """An optimizer of ai-toolkit, and gracetune's nearest one."""

    name: str
    """Value of `optimizer.name`."""
    weight_decay: float = 0.0
    """Weight decay if `optimizer_params` does not set it."""
    eps: float | None = 1e-6
    """The epsilon that ai-toolkit passes; None if gracetune's optimizer has none."""
    betas: tuple[float, float] | None = None
    """Betas if `optimizer_params` does not set them; None: those of both are equal."""
    why: str = ""
    """The difference between the two."""
    is_like: bool = True
    """False if gracetune's optimizer takes other steps."""


_PLAIN_ADAM = "with weight decay, AdamW shrinks weights apart from the gradient; Adam does not"
_ADAFACTOR = (
    "gracetune's adafactor multiplies steps by the size of the weights, and ai-toolkit's does not. "
    "At the same lr, adamw takes steps of the same size; it needs 8 bytes for each trained weight"
)
_PRODIGY = "with safeguard_warmup, which ai-toolkit leaves off"
NO_MATCH = "gracetune does not have it; adamw is used. Check the learning rate"

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer("adamw", why=_PLAIN_ADAM),
    "adamw": Optimizer("adamw", weight_decay=0.01),
    "adam8": Optimizer("adamw_8bit", why=_PLAIN_ADAM),
    "adamw8": Optimizer("adamw_8bit"),
    "adam8bit": Optimizer("adamw_8bit", why=_PLAIN_ADAM),
    "adamw8bit": Optimizer("adamw_8bit", weight_decay=0.01),
    "ademamix8bit": Optimizer(
        "adamw_8bit",
        why="gracetune does not have AdEMAMix; AdamW has no slow average of gradients",
        is_like=False,
    ),
    "lion": Optimizer("lion", eps=None, betas=(0.9, 0.99)),
    "lion8bit": Optimizer(
        "lion", eps=None, betas=(0.9, 0.99), why="its state has 32 bits instead of 8"
    ),
    "adafactor": Optimizer("adamw", eps=None, why=_ADAFACTOR),
    "prodigy": Optimizer("prodigy", why=_PRODIGY),
    "prodigyopt": Optimizer("prodigy", why=_PRODIGY),
    "prodigy8bit": Optimizer("prodigy", why="its state has 32 bits instead of 8"),
    "automagic": Optimizer("automagic", eps=None),
    "automagic2": Optimizer(
        "automagic", eps=None, why="as version 1, with a learning rate for each weight"
    ),
    "automagic3": Optimizer(
        "automagic", eps=None, why="gracetune's own rule, with one learning rate for all weights"
    ),
    "gracetune_automagic": Optimizer("automagic", eps=None),
    "adagrad": Optimizer("adamw", why=NO_MATCH, is_like=False),
    "automagicexperiment": Optimizer("automagic", eps=None, why="as version 1", is_like=False),
    "dadaptation": Optimizer(
        "prodigy", why="gracetune does not have D-Adaptation; Prodigy succeeds it", is_like=False
    ),
}
"""Optimizers by ai-toolkit's name in lower case."""

_LOSS = "gracetune's loss does not have this term, so it is left out"
_NOISE = "noise is drawn from a standard normal distribution, so it is left out"
_PRESERVE = "preservation losses are not supported, so it is left out"
_OTHER_ADAPTER = "gracetune trains LoRA-like adapters only"
MEMORY = "the planner decides what is kept on the GPU; see `gracetune plan`"
TEXT_ENCODERS = "text encoders encode the captions before training and are then unloaded"
_CACHED = "latents and text embeddings are always encoded before training; see cache_config"
_ONE = (1, 1.0)
_ZERO = (0, 0.0, False)

JOB_NOT_NEEDED: Mapping[str, str] = {
    "job": "it says that this is a training job",
    "meta": "notes that only ai-toolkit writes into the adapter file",
}
PROCESS_NOT_NEEDED: Mapping[str, str] = {
    "type": "it says that this process trains a model",
    "device": "gracetune uses the GPU if there is one; choose it with CUDA_VISIBLE_DEVICES",
    "log_dir": "TensorBoard files are in the output folder",
    "sqlite_db_path": "it is for ai-toolkit's own interface",
    "performance_log_every": "the log has the time of every step",
    "is_v2": "the process's model section says it",
    "lorm_extract_mode": "it is used only with do_lorm",
    "lorm_extract_mode_param": "it is used only with do_lorm",
}
PROCESS_UNSUPPORTED: Mapping[str, Unsupported] = {
    "first_sample": Unsupported("the first validation uses the same prompts as the others"),
    "guidance": Unsupported("training with targeted guidance is not supported"),
    "embedding": Unsupported("textual inversion is not supported"),
    "decorator": Unsupported("decorators are not supported"),
    "adapter": Unsupported(_OTHER_ADAPTER),
    "slider": Unsupported("sliders are not supported"),
    "do_lorm": Unsupported("LoRM is not supported; it is left out"),
    "torch_profiler": Unsupported("use `gracetune plan` to see where time goes"),
}

NETWORK_NOT_NEEDED: Mapping[str, str] = {
    "layer_offloading": MEMORY,
    "old_lokr_format": "LoKr files have LyCORIS's names; `gracetune adapter convert` writes others",
}
NETWORK_UNSUPPORTED: Mapping[str, Unsupported] = {
    "transformer_only": Unsupported(
        "layers outside the blocks are not adapted; name them in adapter.targets", (True,)
    ),
    "split_multistage_loras": Unsupported("each expert has an adapter file of its own", (True,)),
    "pretrained_lora_path": Unsupported(
        "a run cannot start from an adapter; merge it into the model with `gracetune adapter merge`"
    ),
    "all_layers": Unsupported("only linear layers are adapted"),
    "lorm": Unsupported("LoRM is not supported; it is left out"),
}

_LAYERS = "set adapter.targets, and adapter.overrides for settings of some layers"
NETWORK_KWARGS_UNSUPPORTED: Mapping[str, Unsupported] = {
    "attn_only": Unsupported(_LAYERS),
    "full_if_contains": Unsupported("layers are adapted or frozen, not trained whole"),
    "parameter_threshold": Unsupported(_LAYERS, _ZERO),
    "block_dims": Unsupported(_LAYERS),
    "block_alphas": Unsupported(_LAYERS),
    "conv_block_dims": Unsupported(_LAYERS),
    "conv_block_alphas": Unsupported(_LAYERS),
    "modules_dim": Unsupported(_LAYERS),
    "modules_alpha": Unsupported(_LAYERS),
    "rank_dropout": Unsupported("use adapter.dropout", _ZERO),
    "module_dropout": Unsupported("use adapter.dropout", _ZERO),
    "target_lin_modules": Unsupported(_LAYERS),
    "target_conv_modules": Unsupported(_LAYERS),
    "full_train_in_out": Unsupported("layers outside the blocks are not trained"),
    "use_bias": Unsupported("adapters have no bias"),
    "varbose": Unsupported("the log names the adapted layers", (True, False)),
}

SAVE_NOT_NEEDED: Mapping[str, str] = {
    "dtype": "`gracetune adapter convert --dtype` changes the data type of an adapter file",
    "save_format": "adapters are safetensors files, whole models are folders for diffusers",
    "hf_repo_id": "it is used only with push_to_hub",
    "hf_private": "it is used only with push_to_hub",
}
SAVE_UNSUPPORTED: Mapping[str, Unsupported] = {
    "push_to_hub": Unsupported("upload the result with `hf upload` when the run has ended"),
}

LOGGING_NOT_NEEDED: Mapping[str, str] = {
    "verbose": "the log file has all messages",
    "use_ui_logger": "it is for ai-toolkit's own interface",
    "project_name": "it is used only with use_wandb",
    "run_name": "it is used only with use_wandb",
}
LOGGING_UNSUPPORTED: Mapping[str, Unsupported] = {
    "use_wandb": Unsupported("progress goes to TensorBoard; set logging.trackers: [wandb] for W&B"),
}

DATASET_NOT_NEEDED: Mapping[str, str] = {
    "cache_latents": _CACHED,
    "cache_text_embeddings": _CACHED,
    "cache_clip_vision_to_disk": _CACHED,
    "cache_tensors_to_disk": _CACHED,
    "load_image_when_caching_latents": _CACHED,
    "cache_latents_num_workers": "the number of workers follows the CPUs",
    "num_workers": "the number of workers follows the CPUs",
    "prefetch_factor": "cache_config.prefetch_depth adjusts itself",
    "bucket_tolerance": "ai-toolkit replaces it by the model's own step, as gracetune does",
    "fast_image_size": "sizes are read from the headers of the files",
    "debug": "the log file has all messages",
    "guidance_type": "it is used only with a guidance section",
    "trim_auto_frame_count_tail": "frames after the last whole clip are always left out",
    "replay_transforms": "control images and masks are always changed like their image",
    "diff_output_preservation": "ai-toolkit sets it from the train section",
    "diff_output_preservation_class": "it is used only with diff_output_preservation",
    "num_controls_from_same_folder": "it is used only with control_from_same_folder",
    "random_triggers_max": "it is used only with random_triggers",
    "shuffle_augmentations": "it is used only with augmentations",
    "clip_image_shuffle_augmentations": "it is used only with clip_image_augmentations",
    "audio_preserve_pitch": "it is used only with do_audio",
    "audio_normalize": "it is used only with do_audio",
}
DATASET_UNSUPPORTED: Mapping[str, Unsupported] = {
    "is_reg": Unsupported(
        "it is trained like the other datasets, without the trigger word; ai-toolkit uses "
        "regularization images in every other step. Set datasets[].weight to use it more or less"
    ),
    "batch_size": Unsupported("all datasets have train.batch_size"),
    "type": Unsupported(
        "only datasets of images and videos are imported", ("image", "sd", "in_memory")
    ),
    "random_triggers": Unsupported("captions get no random words"),
    "random_scale": Unsupported("images are scaled to their bucket only"),
    "scale": Unsupported("resize the images before training", _ONE),
    "buckets": Unsupported("samples are always sorted into buckets", (True,)),
    "prior_reg": Unsupported(_PRESERVE),
    "network_weight": Unsupported("the adapter has strength 1 in training", _ONE),
    "token_dropout_rate": Unsupported("tags are not dropped one by one", _ZERO),
    "augments": Unsupported("use datasets[].augmentations of gracetune"),
    "control_from_same_folder": Unsupported("put control images into a folder of their own"),
    "inpaint_path": Unsupported("inpainting models are not supported"),
    "full_size_control_images": Unsupported("control images are cropped like their image", (True,)),
    "control_transparent_color": Unsupported(
        "remove transparency from control images before training", ([0, 0, 0],)
    ),
    "alpha_mask": Unsupported("write the masks to a folder and set mask_data_dir"),
    "unconditional_path": Unsupported("pairs with unconditional images are not supported"),
    "poi": Unsupported("ai-toolkit does not support it either"),
    "use_short_captions": Unsupported("each sample has one caption"),
    "standardize_images": Unsupported("the values of pixels are not changed"),
    "clip_image_path": Unsupported("IP adapters are not supported"),
    "clip_image_from_same_folder": Unsupported("IP adapters are not supported"),
    "clip_image_augmentations": Unsupported("IP adapters are not supported"),
    "replacements": Unsupported("change the words in the caption files"),
    "loss_multiplier": Unsupported("use datasets[].weight to use a dataset more or less", _ONE),
    "extra_values": Unsupported("models with extra inputs are not supported"),
    "square_crop": Unsupported("crop the images to squares before training"),
    "controls": Unsupported("control images are not generated; set conditioning_data_dir"),
    "do_audio": Unsupported("the sound of videos is not used"),
}

_SNR = "set train.min_snr_gamma; gamma/SNR without a limit is not supported"
_TURBO = "training with few steps is not supported, so it is left out"
_FEATURES = "losses of other networks are not supported, so it is left out"
_GUIDED = "training towards a guided prediction is not supported, so it is left out"
_USED_WITH = "it is used only with {}"

TRAIN_NOT_NEEDED: Mapping[str, str] = {
    "train_refiner": "there is no refiner",
    "xformers": "model.attention_mechanism: auto measures the installed backends",
    "sdp": "model.attention_mechanism: auto measures the installed backends",
    "attention_backend": "model.attention_mechanism: auto measures the installed backends",
    "force_first_sample": "a run always validates before its first step",
    "cache_text_embeddings": _CACHED,
    "start_step": "a run resumes from its own checkpoints; see `--resume`",
    "show_turbo_outputs": _USED_WITH.format("train_turbo"),
    "refiner_lr": _USED_WITH.format("a refiner"),
    "embedding_lr": _USED_WITH.format("an embedding"),
    "adapter_lr": _USED_WITH.format("an adapter section"),
    "text_encoder_lr": _USED_WITH.format("train_text_encoder"),
    "merge_network_on_save_strength": _USED_WITH.format("merge_network_on_save"),
    "adapter_assist_type": _USED_WITH.format("adapter_assist_name_or_path"),
    "batch_noise_correction_scale": _USED_WITH.format("do_batch_noise_correction"),
    "signal_amplification_strength": _USED_WITH.format("do_signal_amplification"),
    "signal_correction_noise_scale": _USED_WITH.format("do_signal_correction_noise"),
    "max_negative_prompts": _USED_WITH.format("negative_prompt"),
    "inverted_mask_prior_multiplier": _USED_WITH.format("inverted_mask_prior"),
    "diff_output_preservation_multiplier": _USED_WITH.format("diff_output_preservation"),
    "diff_output_preservation_class": _USED_WITH.format("diff_output_preservation"),
    "blank_prompt_preservation_multiplier": _USED_WITH.format("blank_prompt_preservation"),
    "cfg_scale": _USED_WITH.format("do_cfg"),
    "max_cfg_scale": _USED_WITH.format("do_random_cfg"),
    "cfg_rescale": _USED_WITH.format("do_cfg"),
    "correct_pred_norm_multiplier": _USED_WITH.format("correct_pred_norm"),
    "t0_velocity_equiv_weight": _USED_WITH.format("t0_loss_target"),
    "do_fft_velocity_equiv_weight": _USED_WITH.format("do_fft_loss"),
    "target_norm_std_value": _USED_WITH.format("target_norm_std"),
    "next_sample_timesteps": _USED_WITH.format("timestep_type: next_sample"),
    "paramiter_swapping_factor": _USED_WITH.format("do_paramiter_swapping"),
    "latent_feature_loss_weight": _USED_WITH.format("latent_feature_extractor_path"),
    "diffusion_feature_extractor_weight": _USED_WITH.format("diffusion_feature_extractor_path"),
    "guidance_loss_target": _USED_WITH.format("do_guidance_loss"),
    "do_guidance_loss_cfg_zero": _USED_WITH.format("do_guidance_loss"),
    "guidance_loss_schedule": _USED_WITH.format("do_guidance_loss"),
    "unconditional_prompt": _USED_WITH.format("do_guidance_loss"),
    "differential_guidance_scale": _USED_WITH.format("do_differential_guidance"),
    "audio_loss_multiplier": "the sound of videos is not used",
    "max_loss_debug": _USED_WITH.format("max_loss"),
}
TRAIN_UNSUPPORTED: Mapping[str, Unsupported] = {
    "train_unet": Unsupported("the transformer or U-Net is always trained", (True,)),
    "train_text_encoder": Unsupported("text encoders are not trained"),
    "train_turbo": Unsupported(_TURBO),
    "snr_gamma": Unsupported(_SNR, _ZERO),
    "learnable_snr_gos": Unsupported(_LOSS),
    "noise_offset": Unsupported(_NOISE, _ZERO),
    "weight_jitter": Unsupported("weights are not changed at random, so it is left out", _ZERO),
    "merge_network_on_save": Unsupported("merge the adapter with `gracetune adapter merge`"),
    "free_u": Unsupported("FreeU is not supported"),
    "adapter_assist_name_or_path": Unsupported(_OTHER_ADAPTER),
    "noise_multiplier": Unsupported(_NOISE, _ONE),
    "target_noise_multiplier": Unsupported(_NOISE, _ONE),
    "random_noise_multiplier": Unsupported(_NOISE, _ZERO),
    "do_signal_correction_noise": Unsupported(_NOISE),
    "do_batch_noise_correction": Unsupported(_NOISE),
    "do_signal_amplification": Unsupported(_NOISE),
    "random_noise_shift": Unsupported(_NOISE, _ZERO),
    "img_multiplier": Unsupported("change the contrast of the images before training", _ONE),
    "noisy_latent_multiplier": Unsupported(_NOISE, _ONE),
    "latent_multiplier": Unsupported("latents have the model's own scale", _ONE),
    "negative_prompt": Unsupported(_GUIDED),
    "reg_weight": Unsupported("set datasets[].weight of the regularization dataset", _ONE),
    "num_train_timesteps": Unsupported("the number of timesteps is the model's", (1000,)),
    "adaptive_scaling_factor": Unsupported("latents have the model's own scale"),
    "prompt_dropout_prob": Unsupported("use datasets[].caption_dropout", _ZERO),
    "match_noise_norm": Unsupported(_NOISE),
    "short_and_long_captions": Unsupported("each sample has one caption"),
    "short_and_long_captions_encoder_split": Unsupported("each sample has one caption"),
    "single_item_batching": Unsupported("use train.gradient_accumulation_steps"),
    "match_adapter_assist": Unsupported(_OTHER_ADAPTER),
    "match_adapter_chance": Unsupported(_OTHER_ADAPTER, _ZERO),
    "loss_target": Unsupported(_LOSS, ("noise",)),
    "inverted_mask_prior": Unsupported(_PRESERVE),
    "diff_output_preservation": Unsupported(_PRESERVE),
    "blank_prompt_preservation": Unsupported(_PRESERVE),
    "standardize_images": Unsupported("the values of pixels are not changed"),
    "standardize_latents": Unsupported("latents have the model's own scale"),
    "dynamic_noise_offset": Unsupported(_NOISE),
    "do_cfg": Unsupported(_GUIDED),
    "do_random_cfg": Unsupported(_GUIDED),
    "correct_pred_norm": Unsupported(_LOSS),
    "loss_type": Unsupported("the loss is the mean squared error", ("mse",)),
    "t0_loss_target": Unsupported(_LOSS),
    "do_fft_loss": Unsupported(_LOSS),
    "pred_scaler": Unsupported(_LOSS, _ONE),
    "prompt_saturation_chance": Unsupported("captions are not repeated", _ZERO),
    "do_prior_divergence": Unsupported(_LOSS),
    "target_norm_std": Unsupported(_LOSS),
    "do_paramiter_swapping": Unsupported("the optimizer trains all weights in every step"),
    "latent_feature_extractor_path": Unsupported(_FEATURES),
    "diffusion_feature_extractor_path": Unsupported(_FEATURES),
    "optimal_noise_pairing_samples": Unsupported(_NOISE, (1,)),
    "force_consistent_noise": Unsupported(_NOISE),
    "blended_blur_noise": Unsupported(_NOISE),
    "do_guidance_loss": Unsupported(_GUIDED),
    "do_differential_guidance": Unsupported(_GUIDED),
    "do_blank_stabilization": Unsupported(_PRESERVE),
    "max_loss": Unsupported("large gradients are clipped by train.max_grad_norm"),
    "validation_config": Unsupported(
        "set validation.holdout to measure the loss of samples that are not trained on"
    ),
}

EMA_UNSUPPORTED: Mapping[str, Unsupported] = {
    "use_feedback": Unsupported("the average is not fed back into the weights"),
    "param_multiplier": Unsupported("weights are not multiplied", _ONE),
}
_ESTIMATE = "the optimizer has no such setting here, so its default is used"
OPTIMIZER_PARAMS_UNSUPPORTED: Mapping[str, Unsupported] = {
    "scale_parameter": Unsupported("set optimizer.name: adafactor, whose steps are scaled"),
    "relative_step": Unsupported("set optimizer.name: adafactor, whose steps are scaled"),
    "warmup_init": Unsupported("set optimizer.warmup_steps"),
    "clip_threshold": Unsupported(_ESTIMATE, _ONE),
    "decay_rate": Unsupported(_ESTIMATE, (-0.8,)),
    "beta1": Unsupported("set optimizer.betas"),
    "beta2": Unsupported("set optimizer.betas"),
    "beta3": Unsupported(_ESTIMATE),
    "amsgrad": Unsupported(_ESTIMATE),
    "decouple": Unsupported("weight decay is always apart from the gradient", (True,)),
    "use_bias_correction": Unsupported(_ESTIMATE),
    "safeguard_warmup": Unsupported("it is always on", (True,)),
    "d0": Unsupported(_ESTIMATE, (1e-6,)),
    "d_coef": Unsupported(_ESTIMATE, _ONE),
    "growth_rate": Unsupported(_ESTIMATE),
    "agreement_threshold": Unsupported(_ESTIMATE, (0.5,)),
    "polarity_history": Unsupported(_ESTIMATE, (8,)),
    "fused": Unsupported("it is chosen by the optimizer", (True, False)),
    "stochastic_rounding": Unsupported("trained weights have 32 bits", (True, False)),
    "stochastic_accumulation": Unsupported("trained weights have 32 bits", (True, False)),
    "do_paramiter_swapping": Unsupported("the optimizer trains all weights in every step"),
    "paramiter_swapping_factor": Unsupported("all weights are trained in every step", (0.1,)),
}
_SPANS = "the schedule spans the whole run"
SCHEDULE_UNSUPPORTED: Mapping[str, Unsupported] = {
    **dict.fromkeys(("total_iters", "max_iterations", "T_max", "T_0"), Unsupported(_SPANS)),
    "T_mult": Unsupported("the schedule does not start again", (1,)),
    "eta_min": Unsupported("set optimizer.final_lr_share", _ZERO),
    "num_warmup_steps": Unsupported("set optimizer.warmup_steps", _ZERO),
    "start_factor": Unsupported("set optimizer.warmup_steps", _ONE),
    "end_factor": Unsupported("set optimizer.final_lr_share", _ONE),
    "factor": Unsupported("set optimizer.lr", _ONE),
    "step_size": Unsupported("the learning rate does not fall in steps"),
    "gamma": Unsupported("the learning rate does not fall in steps"),
    "last_epoch": Unsupported(_SPANS, (-1,)),
}

MODEL_NOT_NEEDED: Mapping[str, str] = {
    "is_v_pred": "the scheduler in the model's folder says what the model predicts",
    "dtype": "ai-toolkit replaces it by train.dtype",
    "text_encoder_bits": TEXT_ENCODERS,
    "quantize_te": TEXT_ENCODERS,
    "qtype_te": TEXT_ENCODERS,
    "te_device": TEXT_ENCODERS,
    "te_dtype": TEXT_ENCODERS,
    "vae_device": "the VAE encodes the samples before training and is then unloaded",
    "vae_dtype": "the VAE encodes the samples before training and is then unloaded",
    "layer_offloading_text_encoder_percent": TEXT_ENCODERS,
    "latent_space_version": "cache entries are found by the VAE's weights",
    "refiner_start_at": "there is no refiner",
    "experimental_xl": "ai-toolkit does not use it",
    "unet_sample_size": "sizes follow datasets[].resolution",
    "compile_mode": _USED_WITH.format("compile"),
    "compile_fullgraph": _USED_WITH.format("compile"),
    "compile_dynamic": _USED_WITH.format("compile"),
    "cache_size_limit": _USED_WITH.format("compile"),
    "block_compile": "blocks are compiled one by one, if plan.compile says so",
    "quantize_kwargs": "the embedders and the output layer are never quantized",
}
MEMORY_KEYS = (
    "low_vram",
    "auto_memory",
    "layer_offloading",
    "layer_offloading_transformer_percent",
    "split_model_over_gpus",
    "split_model_other_module_param_count_scale",
)
"""Keys of the model that save GPU memory."""
_PARTS = "all parts of the model come from model.path; set it to a folder that has them"
MODEL_UNSUPPORTED: Mapping[str, Unsupported] = {
    "use_flux_cfg": Unsupported(_GUIDED),
    "vae_path": Unsupported(_PARTS),
    "te_name_or_path": Unsupported(_PARTS),
    "extras_name_or_path": Unsupported(_PARTS),
    "model_paths": Unsupported(_PARTS),
    "refiner_name_or_path": Unsupported("refiners are not supported"),
    "lora_path": Unsupported("merge it into the model with `gracetune adapter merge`"),
    "assistant_lora_path": Unsupported(
        "training adapters are not supported, and plain training slowly undoes the distillation of "
        "a turbo or schnell model: train few steps, or train the undistilled model"
    ),
    "inference_lora_path": Unsupported("samples are made with the trained adapter only"),
    "unconditional_lora_path": Unsupported("samples are made with the trained adapter only"),
    "use_text_encoder_1": Unsupported("all text encoders are used", (True,)),
    "use_text_encoder_2": Unsupported("all text encoders are used", (True,)),
    "attn_masking": Unsupported("attention is masked as in diffusers' pipeline"),
    "ignore_if_contains": Unsupported("without an adapter, all weights are trained"),
    "only_if_contains": Unsupported("without an adapter, all weights are trained"),
    "accuracy_recovery_adapter": Unsupported(
        "accuracy recovery adapters are not supported; the quantized model is trained without one"
    ),
    "in_context": Unsupported("in-context training is not supported"),
}
MODEL_KWARGS_NOT_NEEDED: Mapping[str, str] = {
    "match_target_res": "references have the size that diffusers' pipeline gives them",
    "checkpoint_filename": "the model's folder names its files",
    "text_encoder_path": "the text encoder comes from model.path",
    "vae_path": "the VAE comes from model.path",
    "control_image_max_pixels": "references have the size that diffusers' pipeline gives them",
    "vlm_max_pixels": "references have the size that diffusers' pipeline gives them",
    "max_text_length": "captions are cut as in diffusers' pipeline",
    "mmdit_config": "the model's folder has its configuration",
}
MODEL_KWARGS_UNSUPPORTED: Mapping[str, Unsupported] = {
    "kv_cache": Unsupported("references attend to the image, as in the model's pipeline"),
}

SAMPLE_NOT_NEEDED: Mapping[str, str] = {
    "sampler": "samples are made with the model's own scheduler",
    "format": "samples are PNG files, or MP4 files for videos",
    "fps": "generated videos have the frame rate of the model",
    "refiner_start_at": "there is no refiner",
    "adapter_conditioning_scale": "it is for IP adapters",
    "ctrl_idx": "references have the order of the list",
}
SAMPLE_UNSUPPORTED: Mapping[str, Unsupported] = {
    "sample_start_step": Unsupported("a run also validates before its first step", _ZERO),
    "network_multiplier": Unsupported(
        "validation uses the adapter with strength 1; `gracetune sample` can change it", _ONE
    ),
    "guidance_rescale": Unsupported("guidance is not rescaled", _ZERO),
    "extra_values": Unsupported("models with extra inputs are not supported"),
    "do_cfg_norm": Unsupported("guidance follows diffusers' pipeline"),
}
