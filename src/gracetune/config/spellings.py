"""The forks' and hosts' spellings of our keys and values, as tables; `translate` applies them.

`ALIASES` is the one place where a foreign key is known. A name with a dot at its end stands for a
whole section; `*` is any data set, and where only the right side has it, every data set is meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    # Data sets: one instead of a list, or its keys at the top level.
    "data_backend": "datasets",
    "data_backend.": "datasets.0.",
    "data_backend.*.": "datasets.*.",
    "dataset": "datasets",
    "dataset.": "datasets.0.",
    "dataset.*.": "datasets.*.",
    "id": "datasets.0.id",
    "type": "datasets.0.type",
    "dataset_type": "datasets.0.dataset_type",
    "instance_data_dir": "datasets.0.instance_data_dir",
    "instance_prompt": "datasets.0.instance_prompt",
    "caption_strategy": "datasets.0.caption_strategy",
    "in_memory.": "datasets.0.in_memory.",
    "shapes.": "datasets.0.shapes.",
    "resolution": "datasets.*.resolution",
    "caption_dropout_probability": "datasets.*.caption_dropout",
    "max_corruption_rate": "datasets.*.max_corruption_rate",
    "datasets.*.folder_path": "datasets.*.instance_data_dir",
    "datasets.*.dataset_path": "datasets.*.instance_data_dir",
    "datasets.*.num_repeats": "datasets.*.repeats",
    "datasets.*.caption_dropout_rate": "datasets.*.caption_dropout",
    "datasets.*.default_caption": "datasets.*.instance_prompt",
    "datasets.*.minimum_image_size": "datasets.*.min_edge",
    "datasets.*.mask_path": "datasets.*.mask_data_dir",
    "datasets.*.invert_mask": "datasets.*.mask_invert",
    "datasets.*.mask_min_value": "datasets.*.mask_background",
    "datasets.*.aspect_bucket_alignment": "datasets.*.bucket_step",
    "datasets.*.config.in_memory_limit_gb": "datasets.*.in_memory.memory_limit_gb",
    "datasets.*.config.in_memory_compression_lib": "datasets.*.in_memory.compression",
    "datasets.*.config.max_corruption_rate": "datasets.*.max_corruption_rate",
    "aspect_bucket_alignment": "datasets.*.bucket_step",
    "cache_dir": "cache_config.cache_dir",
    # The ramp.
    "initial_effective_batch_size": "gh200_optimizations.initial_effective_batch_size",
    "target_effective_batch_size": "gh200_optimizations.target_effective_batch_size",
    "batch_rampup_steps": "gh200_optimizations.batch_rampup_steps",
    "enable_batch_size_rampup": "gh200_optimizations.enable_batch_size_rampup",
    "enable_uvm_hints": "gh200_optimizations.enable_uvm_hints",
    # The model and its adapter.
    "model_family": "model.family",
    "pretrained_model_name_or_path": "model.path",
    "model.name_or_path": "model.path",
    "model.arch": "model.family",
    "attention_mechanism": "model.attention_mechanism",
    "model_type": "adapter",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "network.type": "adapter.kind",
    "network.linear": "adapter.rank",
    "network.linear_alpha": "adapter.alpha",
    "network.dropout": "adapter.dropout",
    # The loop.
    "training_folder": "output_dir",
    "train_batch_size": "train.batch_size",
    "batch_size": "train.batch_size",
    "train.train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "train.gradient_accumulation": "train.gradient_accumulation_steps",
    "max_train_steps": "train.max_train_steps",
    "train.steps": "train.max_train_steps",
    "mixed_precision": "train.mixed_precision",
    "train.dtype": "train.mixed_precision",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "max_grad_norm": "train.max_grad_norm",
    "flow_schedule_shift": "train.timestep_shift",
    "train.timestep_type": "train.timestep_sampling",
    "snr_gamma": "train.min_snr_gamma",
    "ema_decay": "train.ema_decay",
    "train.ema_config.ema_decay": "train.ema_decay",
    "train.seed": "seed",
    "checkpointing_steps": "train.checkpoint_every",
    "checkpoint_step_interval": "train.checkpoint_every",
    "checkpoints_total_limit": "train.keep_checkpoints",
    "save.save_every": "train.checkpoint_every",
    "save.max_step_saves_to_keep": "train.keep_checkpoints",
    # The optimizer.
    "optimizer": "optimizer.name",
    "optimizer.type": "optimizer.name",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.lr_scheduler": "optimizer.schedule",
    "optimizer.lr_warmup_steps": "optimizer.warmup_steps",
    "train.optimizer": "optimizer.name",
    "train.optimizer_params.": "optimizer.",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "train.lr": "optimizer.lr",
    "train.learning_rate": "optimizer.lr",
    "lr_scheduler": "optimizer.schedule",
    "train.lr_scheduler": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "train.lr_warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    # Validation and logging.
    "enable_manual_validation": "validation.enable_manual_validation",
    "validation_steps": "validation.every",
    "validation_step_interval": "validation.every",
    "validation_prompt": "validation.prompts",
    "validation_seed": "validation.seed",
    "validation_guidance": "validation.guidance",
    "validation_num_inference_steps": "validation.sample_steps",
    "sample.sample_every": "validation.every",
    "sample.prompts": "validation.prompts",
    "sample.seed": "validation.seed",
    "sample.guidance_scale": "validation.guidance",
    "sample.sample_steps": "validation.sample_steps",
    "sample.width": "validation.width",
    "sample.height": "validation.height",
    "logging_steps": "logging.every",
}

ELSEWHERE: Mapping[str, str] = {
    "resume_from_checkpoint": "say it at the command line: --resume latest, or a checkpoint",
    "data_backend_config": "put the data sets into `datasets` of this file",
    "config": "put the keys of the process at the top level of this file",
    "train.snr_gamma": "set train.min_snr_gamma: gamma/SNR without a limit is not offered",
    "job": "put the keys of the process at the top level of this file",
    "datasets.*.augmentation_cache_epoch": "leave it out: a run counts its epochs itself",
}
"""Keys that the hosts have and a run file does not, with the way out."""

VALUES: Mapping[str, Mapping[str | bool | None, object]] = {
    "adapter": {"lora": {}, "full": None},
    "train.mixed_precision": {
        "fp16": "bf16",
        "float16": "bf16",
        "bfloat16": "bf16",
        "fp32": "no",
        "float32": "no",
        False: "no",
        None: "auto",
    },
    "train.timestep_sampling": {"sigmoid": "logit_normal", "linear": "uniform"},
    "optimizer.name": {
        "AdamW": "adamw",
        "adamw8bit": "adamw_8bit",
        "bnb-adamw8bit": "adamw_8bit",
        "adamw_schedulefree": "schedule_free",
        "Adafactor": "adafactor",
        "Automagic": "automagic",
        "Lion": "lion",
        "Muon": "muon",
        "Prodigy": "prodigy",
    },
    "optimizer.schedule": {"constant_with_warmup": "constant"},
    "datasets.*.in_memory.compression": {None: "none"},
}
"""Values with another spelling; what also changes the meaning has its words in `REMARKS`."""

REMARKS: Mapping[tuple[str, str | bool | None], str] = {
    ("train.mixed_precision", "fp16"): "diffusion transformers overflow in it and train in bf16",
    ("train.mixed_precision", "float16"): "diffusion transformers overflow in it and train in bf16",
}

RAMP_SWITCH = "initial_effective_batch_size"
"""At the top level this also switches the ramp on, as the forks' guide promises."""
