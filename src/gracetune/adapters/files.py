"""Adapter files as diffusers reads them: one safetensors file with its settings in the header."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from gracetune.adapters.inject import NAME, alpha_of
from gracetune.durable import new_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from gracetune.config.schema import AdapterSection

FILE_NAME = "pytorch_lora_weights.safetensors"
"""What diffusers' `load_lora_weights` looks for in a folder."""


def save_lora(
    folder: Path,
    model: nn.Module,
    section: AdapterSection,
    modules: Sequence[str],
    about: Mapping[str, str],
) -> Path:
    """Write the adapter that `model` carries; `about` goes into the header beside its settings.

    The scale alpha / rank is multiplied into the weights, so that a loader which looks for no alpha
    computes the same as one that does.
    """
    layers = get_peft_model_state_dict(model, adapter_name=NAME)
    scale = alpha_of(section) / section.rank
    tensors = {
        f"transformer.{key}": (t * scale if ".lora_B." in key else t).detach().cpu().contiguous()
        for key, t in layers.items()
    }
    settings = {
        "transformer.r": section.rank,
        "transformer.lora_alpha": section.rank,
        "transformer.target_modules": list(modules),
    }
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(settings), **about}
    path = folder / FILE_NAME
    with new_file(path) as staging:
        save_file(tensors, staging, metadata=header)
    return path
