"""Load the weights of single-file checkpoints: convert names to diffusers', and undo fp8 scales.

`load_transformer` loads a transformer or U-Net. `write_components` writes the VAE and the text
encoders of a file with a whole model, such as those of SDXL, to a pipeline folder, so that cache
keys, export and sampling treat them as those of any other folder.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file

from gracetune.adapters.files.convert import FP8_DTYPES
from gracetune.atomic_files import atomic_folder, link_or_copy, write_text
from gracetune.errors import ModelError
from gracetune.models.checkpoint_header import PARTS, WEIGHT_SCALES, is_marker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from gracetune.models.checkpoint_header import CheckpointHeader

UNET_PREFIX = "model.diffusion_model."
"""Prefix by which diffusers finds a U-Net."""
SCHEDULER_CONFIG = "scheduler_config.json"
READ_ERRORS = (OSError, ValueError, KeyError, IndexError, RuntimeError, SafetensorError)
"""Errors that diffusers and transformers raise for weights that do not fit."""


def read_transformer_weights(header: CheckpointHeader, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the transformer's tensors by original name, without a prefix and fp8 scales."""
    stored = dequantize(load_file(header.path), dtype)
    prefix = header.prefix
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }


def dequantize(stored: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Multiply weights by their scales, in fp32, and convert fp8 tensors to `dtype`.

    Tensors in other types without a scale are returned as they are. `stored` is emptied, so that
    memory holds each weight once.
    """
    scales = _scales_of_weights(stored)
    weights = {}
    for name in list(stored):
        tensor = stored.pop(name)
        if is_marker(name):
            continue
        if name in scales:
            scale = _expand_scale(scales[name].float(), tensor, name)
            tensor = (tensor.float() * scale).to(dtype)
        elif tensor.dtype in FP8_DTYPES:
            tensor = tensor.to(dtype)
        weights[name] = tensor
    return weights


def unscaled_weights(stored: Mapping[str, Tensor]) -> list[str]:
    """Return the names of fp8 weights without a scale, if there are scales of others."""
    scales = _scales_of_weights(stored)
    if not scales:
        return []
    return [
        n
        for n, t in stored.items()
        if t.dtype in FP8_DTYPES and n not in scales and not is_marker(n)
    ]


def _scales_of_weights(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{name.removesuffix(end)}.weight": tensor
        for name, tensor in stored.items()
        for end in WEIGHT_SCALES
        if name.endswith(end)
    }


def _expand_scale(scale: Tensor, weight: Tensor, name: str) -> Tensor:
    """Return a scale of a tensor, its rows or its blocks in a shape that multiplies the tensor."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows = scale.reshape(scale.shape[0], -1)
    if rows.shape[1] == 1 and len(rows) == len(weight):
        return rows.reshape(-1, *[1] * (weight.dim() - 1))
    sizes = [whole / part for whole, part in zip(weight.shape, rows.shape, strict=False)]
    if weight.dim() != 2 or any(not size.is_integer() for size in sizes):
        raise ValueError(f"the scale of {name} has shape {tuple(scale.shape)}, which does not fit")
    blocks = rows.repeat_interleave(int(sizes[0]), 0)
    return blocks.repeat_interleave(int(sizes[1]), 1)


def load_transformer(
    cls: Any, config_folder: Path, weights: dict[str, Tensor], dtype: torch.dtype, source: str
) -> Any:
    """Build a diffusers model from the configuration in a folder, with original weights.

    `source` starts errors. Raises if the file has weights that the model does not have.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    if cls.__name__ not in SINGLE_FILE_LOADABLE_CLASSES:
        raise ValueError(f"diffusers has no single-file form of {cls.__name__}")
    with torch.device("meta"):
        expected = cls.from_config(cls.load_config(config_folder, local_files_only=True))
    names = set(expected.state_dict())
    converted = weights if names == set(weights) else _convert(cls, expected.config, weights)
    unexpected = sorted(set(converted) - names)
    if unexpected:
        raise ModelError(
            f"{source} has {len(unexpected)} weights that a {cls.__name__} with the configuration "
            f"of {config_folder} does not have, first {unexpected[0]}. It belongs to another "
            "variant of the model: name that one in model.path."
        )
    missing = sorted(names - set(converted))
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the weights that a {cls.__name__} with the "
            f"configuration of {config_folder} has, first {missing[0]}. Download it again, or name "
            "in model.path the variant that the file belongs to."
        )
    model = cls.from_single_file(
        dict(converted),
        config=str(config_folder.parent),
        subfolder=config_folder.name,
        torch_dtype=dtype,
        local_files_only=True,
    )
    # diffusers keeps some layers in fp32 when it reads a folder, but not when it reads a file.
    kept = set(cls._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if not kept.isdisjoint(name.split(".")):
            parameter.data = converted[name].float()
    return model


def _convert(cls: Any, config: Mapping[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert original names and shapes to diffusers', with diffusers' own function."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    entry = SINGLE_FILE_LOADABLE_CLASSES[cls.__name__]
    if cls.__name__ == "UNet2DConditionModel":
        weights = {f"{UNET_PREFIX}{name}": tensor for name, tensor in weights.items()}
    converted: dict[str, Tensor] = entry["checkpoint_mapping_fn"](
        checkpoint=dict(weights), config=dict(config)
    )
    return converted


# Whole models


def write_components(header: CheckpointHeader, family: str, base: Path, folder: Path) -> None:
    """Write a pipeline folder with the VAE and text encoders of a file with a whole model.

    Everything else, such as tokenizers, the scheduler and the configuration of the transformer,
    comes from the folder `base`.
    """
    import diffusers
    import transformers

    index = json.loads((base / "model_index.json").read_text())
    parts = header.parts(family)
    stored = load_file(header.path)
    with atomic_folder(folder) as staging:
        for entry in sorted(base.iterdir()):
            if entry.is_file():
                shutil.copyfile(entry, staging / entry.name)
            elif entry.name not in parts:
                shutil.copytree(entry, staging / entry.name, copy_function=link_or_copy)
        for name in parts:
            prefix = PARTS[family][name]
            weights = {key: tensor for key, tensor in stored.items() if key.startswith(prefix)}
            found = {tensor.dtype for key, tensor in weights.items() if not is_marker(key)}
            dtype = _common_dtype(found)
            weights = _complete_names(dequantize(weights, dtype))
            library, cls_name = index[name]
            cls = getattr(transformers if library == "transformers" else diffusers, cls_name)
            source = f"{header.path} as {name}"
            model = _build_component(cls, base, name, weights, dtype, source)
            model.save_pretrained(staging / name)
        _write_prediction(header, staging)


def _common_dtype(found: set[torch.dtype]) -> torch.dtype:
    if torch.float32 in found:
        return torch.float32
    return torch.float16 if torch.float16 in found else torch.bfloat16


def _complete_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add names that some files leave out, and that diffusers needs to find the weights."""
    # Older files of Stable Diffusion 1.5 have CLIP without `text_model`.
    old, new = "cond_stage_model.transformer.", "cond_stage_model.transformer.text_model."
    if any(key.startswith(f"{old}embeddings.") for key in weights):
        weights = {key.replace(old, new, 1): tensor for key, tensor in weights.items()}
    # T5's token embeddings have two names, of which files have one or both.
    names = (".shared.weight", ".encoder.embed_tokens.weight")
    for one, other in (names, names[::-1]):
        for key in [key for key in weights if key.endswith(one)]:
            weights.setdefault(key.removesuffix(one) + other, weights[key])
    return weights


def _build_component(
    cls: Any, base: Path, name: str, weights: dict[str, Tensor], dtype: torch.dtype, source: str
) -> Any:
    from diffusers.loaders.single_file_utils import (
        create_diffusers_clip_model_from_ldm,
        create_diffusers_t5_model_from_checkpoint,
    )

    options = {"config": str(base), "subfolder": name, "torch_dtype": dtype}
    try:
        if name == "vae":
            model = cls.from_single_file(weights, local_files_only=True, **options)
        else:
            is_t5 = "T5" in cls.__name__
            build = (
                create_diffusers_t5_model_from_checkpoint
                if is_t5
                else create_diffusers_clip_model_from_ldm
            )
            model = build(cls, weights, local_files_only=True, **options)
    except READ_ERRORS as error:
        raise ModelError(
            f"{source} does not fit the configuration of {base / name} ({error}). Set model.path "
            "to the pipeline that the file was made from, and model.transformer_file to the file; "
            "then only its transformer is used."
        ) from error
    missing = [key for key, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} weights, first {missing[0]}. Download the file again, "
            "or name another one."
        )
    return model


def _write_prediction(header: CheckpointHeader, folder: Path) -> None:
    """Write the quantity that the model predicts into the scheduler's configuration."""
    file = folder / "scheduler" / SCHEDULER_CONFIG
    if header.prediction:
        content = json.loads(file.read_text()) | header.prediction
        write_text(file, json.dumps(content, indent=2) + "\n")


def digest_of_file(path: Path, *others: str) -> str:
    """Hash the bytes of a file, and other texts."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    for other in others:
        hasher.update(f"\0{other}".encode())
    return hasher.hexdigest(length=16)
