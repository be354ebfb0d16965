"""Write a tiny Stable Diffusion XL pipeline and a SimpleTuner environment that trains on a CPU."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def write_pipeline(folder: Path) -> Path:
    """Write the published classes with few layers, seeded weights and a character tokenizer."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 1),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).save_pretrained(folder / "unet")
    AutoencoderKL(
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=64,
    ).save_pretrained(folder / "vae")
    text = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=1024,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    CLIPTextModel(text).save_pretrained(folder / "text_encoder")
    CLIPTextModelWithProjection(text).save_pretrained(folder / "text_encoder_2")
    EulerDiscreteScheduler(beta_schedule="scaled_linear").save_pretrained(folder / "scheduler")
    for name in ("tokenizer", "tokenizer_2"):
        _write_tokenizer(folder / name)
    parts = {
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    }
    index = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": "0.30.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{each}</w>" for each in letters)]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "CLIPTokenizer",
                "model_max_length": 77,
                "bos_token": "<|startoftext|>",
                "eos_token": "<|endoftext|>",
                "unk_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>",
            }
        )
    )


def write_environment(folder: Path, pipeline: Path, **changes: object) -> Path:
    """Write config.json and a dataset of eight images with captions."""
    pics = folder / "pics"
    pics.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(8):
        pixels = rng.integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(pics / f"{number}.png")
        (pics / f"{number}.txt").write_text(f"image number {number}")
    in_memory = bool(changes.pop("in_memory", False))
    images = {
        "id": "pics",
        "type": "in_memory" if in_memory else "local",
        "instance_data_dir": str(pics),
        "cache_dir_vae": str(folder / "vae_cache"),
        "caption_strategy": "textfile",
        "resolution": 64,
        "resolution_type": "pixel",
        "crop": False,
        "minimum_image_size": 0,
        "repeats": 20,
    }
    texts = {
        "id": "texts",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": str(folder / "text_cache"),
    }
    (folder / "sets.json").write_text(json.dumps([images, texts]))
    config = {
        "model_type": "lora",
        "model_family": "sdxl",
        "pretrained_model_name_or_path": str(pipeline),
        "pretrained_vae_model_name_or_path": str(pipeline / "vae"),
        "data_backend_config": str(folder / "sets.json"),
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
        "max_train_steps": 4,
        "num_train_epochs": 0,
        "train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "resolution": 64,
        "resolution_type": "pixel",
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "optimizer": "adamw_bf16",
        "mixed_precision": "no",
        "base_model_precision": "no_change",
        "lora_rank": 4,
        "seed": 1,
        "checkpoint_step_interval": 4,
        "checkpoints_total_limit": 5,
        "disable_benchmark": True,
        "validation_disable": True,
        "report_to": "none",
        "gradient_checkpointing": False,
        "attention_mechanism": "diffusers",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


if __name__ == "__main__":
    write_environment(Path(sys.argv[2]), write_pipeline(Path(sys.argv[1])))
