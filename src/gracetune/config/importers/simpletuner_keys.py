"""List SimpleTuner's keys that the importer does not translate, with the reason or a replacement.

`simpletuner.py` and `simpletuner_datasets.py` translate the other keys. The tables name models,
optimizers and options of SimpleTuner 4; its OPTIONS.md and DATALOADER.md document them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class SimpleTunerFamily(NamedTuple):
    """A model family of SimpleTuner that gracetune trains."""

    family: str
    """gracetune's name of the family."""
    default_flavour: str
    paths: Mapping[str, str]
    """Name of the model on the hub, by SimpleTuner's `model_flavour`."""
    targets: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Modules that SimpleTuner adapts by default, as they are called in diffusers."""
    lycoris_targets: tuple[str, ...] = ("Attention",)
    """Classes of modules that SimpleTuner adapts by default with LyCORIS."""
    has_flow: bool = True
    """True for flow matching, which SimpleTuner trains with a shift of 3 by default."""


WAN22_I2V = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
FAMILIES: Mapping[str, SimpleTunerFamily] = {
    "flux": SimpleTunerFamily(
        "flux",
        "krea",
        {
            "dev": "black-forest-labs/FLUX.1-dev",
            "krea": "black-forest-labs/FLUX.1-Krea-dev",
            "schnell": "black-forest-labs/FLUX.1-schnell",
            "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
            "fluxbooru": "terminusresearch/fluxbooru-v0.3",
            "libreflux": "jimmycarter/LibreFlux-SimpleTuner",
        },
    ),
    "flux2": SimpleTunerFamily(
        "flux2",
        "klein-9b",
        {
            "dev": "black-forest-labs/FLUX.2-dev",
            "klein-4b": "black-forest-labs/FLUX.2-klein-base-4B",
            "klein-9b": "black-forest-labs/FLUX.2-klein-base-9B",
        },
        targets=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
        lycoris_targets=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    ),
    "qwen_image": SimpleTunerFamily(
        "qwen_image",
        "v2.0",
        {
            "v1.0": "Qwen/Qwen-Image",
            "v2.0": "Qwen/Qwen-Image-2512",
            "edit-v1": "Qwen/Qwen-Image-Edit",
            "edit-v2": "Qwen/Qwen-Image-Edit-2509",
            "edit-v2+": "Qwen/Qwen-Image-Edit-2509",
            "edit-v3": "Qwen/Qwen-Image-Edit-2511",
        },
        lycoris_targets=("Attention", "FeedForward"),
    ),
    "sd1x": SimpleTunerFamily(
        "sd15",
        "dreamshaper",
        {
            "1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
            "1.4": "CompVis/stable-diffusion-v1-4",
            "dreamshaper": "Lykon/dreamshaper-8",
        },
        has_flow=False,
    ),
    "sdxl": SimpleTunerFamily(
        "sdxl",
        "base-1.0",
        {
            "base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
            "base-0.9": "stabilityai/stable-diffusion-xl-base-0.9",
        },
        has_flow=False,
    ),
    "sd3": SimpleTunerFamily(
        "sd3",
        "medium",
        {
            "medium": "stabilityai/stable-diffusion-3.5-medium",
            "large": "stabilityai/stable-diffusion-3.5-large",
        },
    ),
    "chroma": SimpleTunerFamily(
        "chroma",
        "base",
        {
            "base": "lodestones/Chroma1-Base",
            "hd": "lodestones/Chroma1-HD",
            "flash": "lodestones/Chroma1-Flash",
        },
    ),
    "wan": SimpleTunerFamily(
        "wan22",
        "t2v-480p-1.3b-2.1",
        {
            "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            "i2v-14b-2.1": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
            "i2v-14b-2.1-720p": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
            "i2v-14b-2.2-high": WAN22_I2V,
            "i2v-14b-2.2-low": WAN22_I2V,
            "ti2v-5b-2.2": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        },
    ),
    "z_image": SimpleTunerFamily(
        "z_image",
        "turbo-ostris-v2",
        {
            "base": "Tongyi-MAI/Z-Image",
            "turbo": "Tongyi-MAI/Z-Image-Turbo",
            "turbo-ostris-v2": "Tongyi-MAI/Z-Image-Turbo",
        },
        lycoris_targets=("Attention", "FeedForward"),
    ),
    "krea2": SimpleTunerFamily(
        "krea2",
        "raw",
        {"raw": "krea/Krea-2-Raw", "turbo": "krea/Krea-2-Turbo"},
        lycoris_targets=("Attention", "FeedForward"),
    ),
}
"""Families that both train, by SimpleTuner's `model_family`."""
NOT_TRANSLATED = {"ideogram": "ideogram4-lora"}
"""SimpleTuner's `model_family` -> the example to start from, for families that both train but whose
keys are not translated: Ideogram 4 has a schedule and captions of its own there."""
EDIT_FLAVOURS = {
    ("flux", "kontext"),
    *(("qwen_image", f"edit-{version}") for version in ("v1", "v2", "v2+", "v3")),
}
"""Pairs of `model_family` and `model_flavour` that edit an image, which gracetune also trains."""
ASSISTED_FLAVOURS = {("flux", "schnell"), ("z_image", "turbo"), ("z_image", "turbo-ostris-v2")}
"""Pairs of family and flavour that SimpleTuner trains on top of an assistant LoRA."""
FLUX_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
FLUX_CONTEXT = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
FLUX_CONTEXT_FFS = ("ff_context.net.0.proj", "ff_context.net.2")
FLUX_FFS = ("ff.net.0.proj", "ff.net.2", *FLUX_CONTEXT_FFS, "proj_mlp", "proj_out")
FLUX_TARGETS: Mapping[str, tuple[str, ...]] = {
    "mmdit": FLUX_ATTENTION,
    "context": FLUX_CONTEXT,
    "context+ffs": (*FLUX_CONTEXT, *FLUX_CONTEXT_FFS),
    "all": (*FLUX_ATTENTION, *FLUX_CONTEXT),
    "all+ffs": (*FLUX_ATTENTION, *FLUX_CONTEXT, *FLUX_FFS),
    "all+ffs+embedder": ("x_embedder", *FLUX_ATTENTION, *FLUX_CONTEXT, *FLUX_FFS),
    "ai-toolkit": (
        *(*FLUX_ATTENTION, *FLUX_CONTEXT, *FLUX_FFS),
        *("norm.linear", "norm1.linear", "norm1_context.linear"),
    ),
    "tiny": tuple(f"single_transformer_blocks.{block}.proj_out" for block in (7, 20)),
    "nano": ("single_transformer_blocks.7.proj_out",),
}
"""Modules of FLUX.1 that SimpleTuner adapts, by `flux_lora_target`."""
CLASS_PATTERNS: Mapping[str, str] = {
    "Attention": r"re:.*\.(attn|attn1|attn2|attention)\..*",
    "FeedForward": r"re:.*\.(ff|ff_context|ffn|img_mlp|txt_mlp|feed_forward)\..*",
    "Block": r"re:(.*\.)?(transformer_blocks|single_transformer_blocks|blocks|layers)\..*",
}
"""Names of modules in diffusers, by a word in the names of the classes that LyCORIS presets use."""


class SimpleTunerOptimizer(NamedTuple):
    """An optimizer of SimpleTuner: gracetune's optimizer for it, and SimpleTuner's defaults."""

    name: str
    betas: tuple[float, float] | None = (0.9, 0.999)
    eps: float | None = 1e-8
    weight_decay: float = 0.01
    remark: str = ""
    """Difference to gracetune's optimizer, if there is one."""


_ADAM = SimpleTunerOptimizer("adamw", weight_decay=0.0, remark="Adam without weight decay")
_8BIT = SimpleTunerOptimizer("adamw_8bit")
_LION = SimpleTunerOptimizer("lion", (0.9, 0.99), None, 0.0)
OPTIMIZERS: Mapping[str, SimpleTunerOptimizer] = {
    "adamw_bf16": SimpleTunerOptimizer(
        "adamw", eps=1e-6, remark="its state is in fp32 instead of bf16; there is nothing to do"
    ),
    "adamw": SimpleTunerOptimizer("adamw"),
    "torch-adamw": SimpleTunerOptimizer("adamw"),
    "torch-adam": _ADAM,
    "optimi-adam": _ADAM._replace(betas=(0.9, 0.99), eps=1e-6),
    "optimi-adamw": SimpleTunerOptimizer("adamw", (0.9, 0.99), 1e-6, 0.0),
    "optimi-stableadamw": SimpleTunerOptimizer(
        "adamw", (0.9, 0.99), 1e-6, remark="AdamW without StableAdamW's clipping of updates"
    ),
    "optimi-lion": _LION,
    "bnb-lion": _LION,
    "bnb-lion-paged": _LION,
    "bnb-lion8bit": _LION._replace(remark="its state is not quantized"),
    "bnb-lion8bit-paged": _LION._replace(remark="its state is not quantized"),
    "bnb-adam": _ADAM,
    "bnb-adam8bit": _8BIT._replace(weight_decay=0.0),
    "bnb-adamw": SimpleTunerOptimizer("adamw"),
    "bnb-adamw-paged": SimpleTunerOptimizer("adamw"),
    "bnb-adamw8bit": _8BIT,
    "bnb-adamw8bit-paged": _8BIT,
    "ao-adamw8bit": _8BIT._replace(eps=1e-6),
    "ao-adamw4bit": _8BIT._replace(eps=1e-6, remark="with 8 instead of 4 bits"),
    "ao-adamfp8": _8BIT._replace(eps=1e-6, remark="in int8 instead of fp8"),
    "ao-adamwfp8": _8BIT._replace(eps=1e-6, remark="in int8 instead of fp8"),
    "adamw_schedulefree": SimpleTunerOptimizer("schedule_free"),
    "adamw_schedulefree+aggressive": SimpleTunerOptimizer("schedule_free", weight_decay=1e-3),
    "adamw_schedulefree+no_kahan": SimpleTunerOptimizer("schedule_free", weight_decay=1e-3),
    "prodigy": SimpleTunerOptimizer("prodigy", (0.9, 0.99), weight_decay=0.0),
    "torch-adafactor": SimpleTunerOptimizer("adafactor", None, None, 0.0),
    "muon": SimpleTunerOptimizer("muon", None, None, 0.1),
}
"""gracetune's optimizer for each of SimpleTuner's `optimizer` names that has one."""


FLOW_OPTIONS: Mapping[str, str] = {
    "flow_schedule_shift": "flux_schedule_shift",
    "flow_schedule_auto_shift": "flux_schedule_auto_shift",
    "flow_use_uniform_schedule": "flux_use_uniform_schedule",
    "flow_sigmoid_scale": "flow_matching_sigmoid_scale",
}
"""Options of flow matching, with the names that they also had in SimpleTuner before version 2."""
TRACKERS = ("wandb", "trackio", "mlflow")
"""Names in `report_to` that `logging.trackers` also has. Each needs the extra of its name."""
LOCAL_REPORTS = ("tensorboard", "simpletuner", "all", "none")
"""Names in `report_to` for which files in the output folder are enough."""
TRACKER_NAMES: Mapping[str, str] = {
    "tracker_project_name": "logging.tracker_project",
    "tracker_run_name": "logging.tracker_run_name",
}


def _keys(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_PLANNER = "the planner decides what stays on the GPU; see `gracetune plan`"
_CACHE = "gracetune encodes once into its own cache; see cache_config"
_HUB = "gracetune does not upload; run `hf upload` with the files in output_dir"
_LAUNCH = "start with `torchrun` or `accelerate launch`; gracetune reads the number of ranks there"
_DEBUG = "it only changes SimpleTuner's messages or checks"
_SPEED = "it only changes SimpleTuner's speed"

NOT_NEEDED: Mapping[str, str] = {
    **_keys(
        "offload_during_startup offload_during_save delete_model_after_load offload_param_path "
        "enable_model_cpu_offload unet_attention_slice fuse_qkv_projections fused_qkv_projections "
        "keep_vae_loaded fully_unload_text_encoder enable_chunked_feed_forward "
        "feed_forward_chunk_size accelerator_cache_clear_interval ema_device ema_cpu_only "
        "ema_foreach_disable optimizer_offload_gradients optimizer_release_gradients "
        "fuse_optimizer optimizer_cpu_offload_method gradient_precision set_grads_to_none "
        "custom_text_encoder_intermediary_layers_cache attention_slicing quantize_via "
        "vae_enable_slicing vae_enable_patch_conv vae_enable_temporal_roll",
        _PLANNER,
    ),
    **_keys(
        "vae_batch_size vae_cache_scan_behaviour vae_cache_ondemand vae_cache_disable "
        "vae_cache_preprocess text_cache_ondemand text_cache_disable text_embed_full_cache "
        "cache_dir cache_dir_text cache_dir_vae cache_file_suffix compress_disk_cache "
        "preserve_data_backend_cache skip_file_discovery write_batch_size read_batch_size "
        "text_encoder_batch_size image_processing_batch_size enable_multiprocessing max_workers "
        "aws_max_pool_connections torch_num_threads dataloader_prefetch dataloader_prefetch_qlen "
        "dataloader_prefetch_device_threshold_mb aspect_bucket_worker_count "
        "aspect_bucket_disable_rebuild metadata_update_interval text_encoder_limit "
        "override_dataset_config delete_unwanted_images delete_problematic_images "
        "ignore_missing_files configs_dir",
        _CACHE,
    ),
    **_keys(
        "hub_model_id model_card_private model_card_safe_for_work model_card_note "
        "push_to_hub_background",
        "it only matters for uploads, which gracetune does not do",
    ),
    **_keys(
        "num_processes num_machines machine_rank main_process_ip main_process_port same_network "
        "local_rank accelerate_config accelerate_extra_args find_unused_parameters",
        _LAUNCH,
    ),
    **_keys(
        "debug_aspect_buckets debug_dataset_loader print_filenames print_sampler_statistics "
        "i_know_what_i_am_doing delete_invalid_checkpoints disk_low_threshold disk_low_action "
        "disk_low_script enable_watermark "
        "checkpointing_use_tempdir merge_environment_config log_level base_dir venv_path "
        "allow_dataset_oversubscription disable_bucket_pruning data_aesthetic_score",
        _DEBUG,
    ),
    **_keys(
        "disable_tf32 allow_tf32 sageattention_usage dynamo_backend dynamo_mode dynamo_dynamic "
        "dynamo_fullgraph dynamo_use_regional_compilation validation_torch_compile "
        "validation_torch_compile_mode validation_multigpu "
        "enable_xformers_memory_efficient_attention",
        f"{_SPEED}; `plan.compile` and `model.attention_mechanism` are `auto` here",
    ),
    "attention_mechanism": "`auto` measures the attention backends and uses the fastest; "
    "model.attention_mechanism: sdpa is SimpleTuner's `diffusers`",
    "benchmark_base_model": "gracetune validates before the first step, and repeats no benchmark",
    "logging_dir": "logs are written into output_dir",
    "lora_format": "`gracetune adapter convert` writes the other formats",
    "lora_init_type": "adapters start at zero output, as with `default`",
    "modelspec_comment": "it is only a comment in the exported file",
    "vae_dtype": "the VAE uses the precision of the run, and fp32 where it needs that",
    "variant": "the files of the folder or the hub are found without it",
    "trust_remote_code": "gracetune runs no code from the hub",
    "seed_for_each_device": "every rank draws its own noise",
    "validation_seed_source": "validation noise is drawn on the CPU",
    "validation_image_format": "validation images are PNG files",
    "validation_image_quality": "validation images are PNG files",
    "aspect_bucket_rounding": "bucket sizes follow from bucket_step and max_aspect",
    "strict_epoch_limit": "the run ends after train.max_train_steps",
    "framerate": "it only sets the speed of generated videos, which is the model's own here",
    "pretrained_vae_model_name_or_path": "the VAE of model.path is used",
    "pretrained_transformer_subfolder": "the transformer of model.path is used",
    "pretrained_unet_subfolder": "the UNet of model.path is used",
    "pretrained_t5_model_name_or_path": "the text encoder of model.path is used",
    "pretrained_gemma_model_name_or_path": "the text encoder of model.path is used",
    "qwen_text_encoder_model_name_or_path": "the text encoder of model.path is used",
    "resume_from_checkpoint": "`gracetune train` resumes from the newest checkpoint by itself",
    "ema_validation": "validation uses the average if there is one",
    "rescale_betas_zero_snr": "the noise schedule is the one in the model's folder",
    "training_scheduler_timestep_spacing": "timesteps are drawn from the whole schedule",
    "inference_scheduler_timestep_spacing": "validation uses the model's own scheduler",
    "disable_segmented_timestep_sampling": "every timestep of a batch is drawn independently",
    "fp16_is_ok": "bf16 is used",
    "num_eval_images": "it only matters for eval datasets",
    "eval_timesteps": "it only matters for eval datasets",
    "eval_loss_disable": "it only matters for eval datasets",
    "eval_dataset_pooling": "it only matters for eval datasets",
    "pretrained_evaluation_model_name_or_path": "it only matters for evaluation_type: clip",
    "custom_tracker": "it only matters for report_to: custom-tracker; events.jsonl has all numbers",
    "tracker_image_layout": "trackers get each sample with its prompt",
    "huber_c": "it only matters for loss_type: huber",
    "huber_schedule": "it only matters for loss_type: huber",
    "text_encoder_lr": "it only matters for train_text_encoder",
    "save_text_encoder": "text encoders are not trained",
    "freeze_encoder_before": "text encoders are not trained",
    "freeze_encoder_after": "text encoders are not trained",
    "freeze_encoder_strategy": "text encoders are not trained",
    "noise_offset": "it only matters with offset_noise",
    "noise_offset_probability": "it only matters with offset_noise",
    "input_perturbation_steps": "it only matters with input_perturbation",
    "soft_min_snr_sigma_data": "it only matters with use_soft_min_snr",
    "flow_beta_schedule_alpha": "it only matters with flow_use_beta_schedule",
    "flow_beta_schedule_beta": "it only matters with flow_use_beta_schedule",
    "flux_beta_schedule_alpha": "it only matters with flux_use_beta_schedule",
    "flux_beta_schedule_beta": "it only matters with flux_use_beta_schedule",
    "flow_timesteps_mode": "it only matters with flow_custom_timesteps",
    "timestep_bias_begin": "it only matters with timestep_bias_strategy",
    "timestep_bias_end": "it only matters with timestep_bias_strategy",
    "timestep_bias_multiplier": "it only matters with timestep_bias_strategy",
    "timestep_bias_portion": "it only matters with timestep_bias_strategy",
    "checkpointing_rolling_steps": "checkpoint_minutes saves between the other checkpoints",
    "checkpoints_rolling_total_limit": "it only matters with checkpointing_rolling_steps",
    "controlnet_custom_config": "it only matters with controlnet",
    "controlnet_model_name_or_path": "it only matters with controlnet",
    "distillation_config": "it only matters with distillation_method",
    "singlora_ramp_up_steps": "it only matters with peft_lora_mode: singlora",
    "init_lora_step": "it only matters with init_lora",
    "init_lora_ema": "it only matters with init_lora",
    "refiner_training_invert_schedule": "it only matters with refiner_training",
    "refiner_training_strength": "it only matters with refiner_training",
    "sdxl_refiner_uses_full_range": "it only matters with refiner_training",
    "ignore_final_epochs": "max_train_steps decides",
    "snr_weight": "SimpleTuner does not use it in training",
    "validate_after_epoch": "validations follow validation.every",
    "validate_after_step": "validations follow validation.every",
    "validation_randomize": "validation has a fixed seed, so that steps can be compared",
    "parquet_filename_column": "see the dataset's own `parquet` block",
    "parquet_caption_column": "see the dataset's own `parquet` block",
    "wan_validation_load_other_stage": "both transformers of the folder are loaded",
    "conditioning_multidataset_sampling": "all control images of a sample are used together",
    "audio_flow_schedule_shift": "it belongs to audio models",
    "tokenizer_max_length": "captions are cut to the length that the model was trained with",
    "t5_padding": "padding is as in the model's own pipeline",
    "sd3_clip_uncond_behaviour": "an empty prompt is encoded, as in the model's own pipeline",
    "sd3_t5_uncond_behaviour": "an empty prompt is encoded, as in the model's own pipeline",
    "validation_prompt_library_limit": "it only matters with validation_prompt_library",
}
"""Keys that have no effect on the result here, with the reason."""

NOT_SUPPORTED: Mapping[str, str] = {
    **_keys(
        "push_to_hub push_checkpoints_to_hub publishing_config post_upload_script "
        "post_checkpoint_script",
        _HUB,
    ),
    "webhook_config": "no messages are sent; list the addresses in logging.webhooks",
    "webhook_reporting_interval": "logging.webhooks get a message when a run starts, ends or fails",
    "checkpoint_epoch_interval": "set train.checkpoint_every in steps",
    "validation_epoch_interval": "set validation.every in steps",
    "eval_epoch_interval": "set validation.holdout and validation.every",
    "eval_steps_interval": "set validation.holdout; its loss is measured in every validation",
    "eval_dataset_id": "set validation.holdout to measure the loss on held-out samples",
    "evaluation_type": "samples are not scored; look at the images in output_dir/validation",
    "loss_type": "the loss is the mean squared error (l2)",
    "offset_noise": "noise has no offset here, so it is left out; there is nothing to do",
    "input_perturbation": "remove it; noise is not perturbed",
    "use_soft_min_snr": "set train.min_snr_gamma",
    "flow_use_beta_schedule": "set train.timestep_sampling to logit_normal, mode or cosmap",
    "flux_use_beta_schedule": "set train.timestep_sampling to logit_normal, mode or cosmap",
    "flow_cubic_schedule_weights": "set train.timestep_sampling to logit_normal, mode or cosmap",
    "flow_custom_timesteps": "set train.timestep_window to train on a range of timesteps",
    "flux_fast_schedule": "set train.timestep_shift to favour high noise",
    "timestep_bias_strategy": "set train.timestep_window or train.timestep_mean",
    "flux_guidance_mode": "FLUX.1-dev is trained with a constant guidance input of 1",
    "flux_guidance_min": "FLUX.1-dev is trained with a constant guidance input of 1",
    "flux_guidance_max": "FLUX.1-dev is trained with a constant guidance input of 1",
    "flux_attention_masked_training": "padding is attended to, as in the model's own pipeline",
    "train_text_encoder": "only the transformer or UNet is trained",
    "layer_freeze_strategy": "name modules in adapter.targets instead",
    "init_lora": "an adapter starts from zero; merge the old one with `gracetune adapter merge`",
    "init_lokr_norm": "a LoKr starts from zero output",
    "peft_lora_mode": "adapter.kind can be lora, dora, locon, loha, lokr or full",
    "tread_config": "tokens are not routed: all of them pass every layer, which takes longer",
    "quantization_config": "set model.quantize to int8, fp8 or nf4",
    "quantize_activations": "set model.frozen_compute: fp8 for fp8 matmuls",
    "enable_nsfw_check": "images are not classified; sort them before training",
    "delete_nsfw_images": "gracetune deletes no files",
    "masked_loss_probability": "masks apply to every batch",
    "ema_update_interval": "the average is updated in every step",
    "ema_warmup_steps": "the average starts with the first step",
    "prodigy_steps": "prodigy adapts its step size during the whole run",
    "lr_num_cycles": "schedules do not repeat",
    "lr_scale": "set optimizer.lr to the value that you want",
    "lr_scale_sqrt": "set optimizer.lr to the value that you want",
    "validation_num_images": "name a prompt several times in validation.prompts",
    "num_validation_images": "name a prompt several times in validation.prompts",
    "validation_method": "validation samples are generated by gracetune itself",
    "validation_external_script": "run your script on output_dir/validation",
    "validation_external_background": "run your script on output_dir/validation",
    "validation_using_datasets": "set validation.images to the input image of each prompt",
    "validation_input": "set validation.images to the input image of each prompt",
    "validation_stitch_input_location": "input images are shown beside the samples",
    "validation_guidance_real": "validation.guidance is the model's own guidance",
    "validation_no_cfg_until_timestep": "guidance applies to all steps",
    "validation_guidance_rescale": "guidance is not rescaled",
    "validation_guidance_skip_layers": "guidance skips no layers",
    "validation_guidance_skip_layers_start": "guidance skips no layers",
    "validation_guidance_skip_layers_stop": "guidance skips no layers",
    "validation_guidance_skip_scale": "guidance skips no layers",
    "validation_internal_guidance_scale": "internal guidance is not available",
    "validation_noise_scheduler": "validation uses the model's own scheduler",
    "validation_prompt_library": "name your prompts in validation.prompts",
    "validation_preview": "samples are shown when they are finished",
    "validation_lycoris_strength": "samples use the adapter at full strength",
    "data_backend_sampling": "datasets are mixed by their samples, repeats and weight",
    "refiner_training": "the refiner is not supported; train the base model",
    "max_grounding_entities": "grounding is not available; remove it",
    "pretrained_grounding_model_name_or_path": "grounding is not available; remove it",
    "assistant_lora_path": "train the base model instead of a distilled one",
    "assistant_lora_strength": "train the base model instead of a distilled one",
    "assistant_lora_inference_strength": "train the base model instead of a distilled one",
    "max_upscale_threshold": "set datasets[].min_resolution to drop small images",
    "disable_multiline_split": "a caption file is one caption",
    "caption_filter_list": "change the caption files; captions are used as they are",
    "custom_text_encoder_intermediary_layers": "the layers are those of the model's pipeline",
    "krea2_reference_latents": "krea2 is trained without reference images",
    "wan_force_2_1_time_embedding": "the time embedding is the model's own",
    "sla_config": "attention is dense",
    "diffusion_blocks_config": "all blocks are trained",
    "slider_lora_target": "set adapter.targets",
    "only_instance_prompt": "set datasets[].caption_strategy: instanceprompt",
    "deepspeed_config": "gracetune has no DeepSpeed; set distributed.strategy: fsdp2, and "
    "distributed.cpu_offload: true for its offload",
}
"""Keys that would change the result, or cannot be done here, with what to do. A key whose value
turns its feature off is not needed."""

FEATURES: Mapping[str, tuple[str, str]] = {
    "crepa_": ("crepa_enabled", "representation alignment is not available; remove it"),
    "urepa_": ("urepa_enabled", "representation alignment is not available; remove it"),
    "irepa_": ("irepa_enabled", "representation alignment is not available; remove it"),
    "layersync_": ("layersync_enabled", "layer alignment is not available; remove it"),
    "internal_guidance_": ("internal_guidance_enabled", "it is not available; remove it"),
    "xm_": ("xm_enabled", "explorative modeling is not available; remove it"),
    "nextlat_": ("nextlat_enabled", "it is not available; remove it"),
    "diff2flow_": ("diff2flow_enabled", "the model keeps its own prediction type; remove it"),
    "mixflow_": ("mixflow_enabled", "it is not available; remove it"),
    "twinflow_": ("twinflow_enabled", "it is not available; remove it"),
    "scheduled_sampling_": (
        "scheduled_sampling_max_step_offset",
        "inputs are noised directly; remove it",
    ),
    "nsfw_check_": ("enable_nsfw_check", "images are not classified; sort them before training"),
    "validation_adapter_": ("validation_adapter_path", "use `gracetune sample` with adapters"),
    "validation_preview_": ("validation_preview", "samples are shown when they are finished"),
}
"""Prefixes of the keys of a feature that gracetune does not have, with the key that turns the
feature on, and what to do. Without that key, the others are not needed."""

IGNORED_PREFIXES: Mapping[str, str] = {
    "ramtorch": _PLANNER,
    "musubi_": _PLANNER,
    "group_offload_": _PLANNER,
    "enable_group_offload": _PLANNER,
    "gradient_checkpointing_": _PLANNER,
    "sdnq_": "it belongs to SimpleTuner's quantization; model.quantize has no further options",
    "text_encoder_": "text encoders run once, before training, and are not quantized",
    "sdxl_validation_": "validation generates with the trained model only",
    **dict.fromkeys(
        (
            *("deepfloyd_", "pixart_", "ltx_", "ltx2_", "validation_ltx2_", "minimax_", "hidream_"),
            *("sana_", "cosmos3_", "ideogram_", "acestep_", "lyrics_", "validation_lyrics"),
            *("validation_audio_", "audio_"),
        ),
        "it belongs to another model family",
    ),
}
"""Prefixes of keys that have no effect on the result here, with the reason."""

TRANSLATED_KEYS = frozenset(
    _keys(
        "model_family model_flavour model_type pretrained_model_name_or_path revision "
        "pretrained_transformer_model_name_or_path pretrained_unet_model_name_or_path output_dir "
        "seed data_backend_config base_model_precision base_model_default_dtype mixed_precision "
        "lora_type lora_rank lora_alpha lora_dropout lycoris_config use_dora "
        "peft_lora_target_modules flux_lora_target optimizer optimizer_config optimizer_beta1 "
        "optimizer_beta2 adam_beta1 adam_beta2 adam_epsilon adam_weight_decay learning_rate "
        "lr_scheduler lr_warmup_steps lr_end lr_power max_train_steps num_train_epochs "
        "train_batch_size gradient_accumulation_steps gradient_checkpointing max_grad_norm "
        "grad_clip_method snr_gamma use_ema ema_decay prediction_type checkpoint_step_interval "
        "checkpointing_steps checkpoints_total_limit save_total_limit vae_enable_tiling report_to "
        "tracker_project_name tracker_run_name "
        "validation_prompt user_prompt_library validation_negative_prompt validation_guidance "
        "validation_num_inference_steps validation_seed validation_resolution validation_steps "
        "validation_step_interval validation_disable validation_disable_unconditional "
        "disable_benchmark validation_on_startup validation_num_video_frames "
        "caption_dropout_probability resolution resolution_type minimum_image_size "
        "maximum_image_size target_downsample_size aspect_bucket_alignment "
        "caption_strategy instance_prompt prepend_instance_prompt controlnet control "
        "distillation_method flux_guidance_value disable_assistant_lora cache_config "
        "gh200_optimizations use_gh200_trainer fsdp_enable fsdp_version fsdp_reshard_after_forward "
        "fsdp_cpu_offload fsdp_cpu_ram_efficient_loading fsdp_limit_all_gathers "
        "fsdp_activation_checkpointing fsdp_state_dict_type fsdp_auto_wrap_policy "
        "fsdp_transformer_layer_cls_to_wrap context_parallel_size context_parallel_comm_strategy",
        "",
    )
) | {*FLOW_OPTIONS, *FLOW_OPTIONS.values()}
"""Keys that `simpletuner.py` translates."""
KNOWN_KEYS = TRANSLATED_KEYS | NOT_NEEDED.keys() | NOT_SUPPORTED.keys()

ENVIRONMENT_NAMES: Mapping[str, str] = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint",
    "DATALOADER_CONFIG": "data_backend_config",
    "TRAINING_SEED": "seed",
    "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size",
    "USE_BITFIT": "layer_freeze_strategy",
    "PUSH_CHECKPOINTS": "push_checkpoints_to_hub",
    "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs",
    "CHECKPOINTING_STEPS": "checkpoint_step_interval",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval",
    "ACCELERATE_CONFIG_PATH": "accelerate_config",
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    "TRAINER_DYNAMO_BACKEND": "dynamo_backend",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
    "SIMPLETUNER_LOG_LEVEL": "log_level",
    "LR_SCHEDULE": "lr_scheduler",
    "DEBUG_EXTRA_ARGS": "log_level",
}
"""SimpleTuner's keys for the variables of a `config.env`, where the key is not the name of the
variable in small letters."""
