"""A family of its own for benchmarks: Wan 2.2 with both experts, and random weights made in place.

All but the weights is the package's `wan22`. They are drawn on the device, one at a time, and go to
host memory, where a run expects a model that it has just read; no file ever holds them.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from fakes.miniatures import write_miniature
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from gracetune.models.diffusers_family import find_model_folder, read_model_index
from gracetune.models.wan22 import TRANSFORMER_FOLDERS, assemble

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gracetune.config.schema import ModelSection
    from gracetune.models.wan22 import Wan22

NAME = "wan22_random"
SMALL = {"num_layers": 4, "ffn_dim": 384, "text_dim": 32, "freq_dim": 32, "rope_max_seq_len": 32}
SMALL |= {"num_attention_heads": 8, "attention_head_dim": 24}


def install(site: Path) -> None:
    """Publish the family as a package would: by an entry point."""
    about = site / f"{NAME}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[gracetune.family]\n{NAME} = wan_random:load\n")
    sys.path.insert(0, str(site))


def write_folder(folder: Path, *, small: bool) -> Path:
    """A pipeline's folder without the transformers' weights.

    VAE: the published shape. Text encoder: the published class and width, one layer of 24, since
    only the shape of what it gives matters here. `small`: a miniature of everything.
    """
    write_miniature("wan22-t2v", folder)
    torch.manual_seed(0)
    if not small:
        AutoencoderKLWan().save_pretrained(folder / "vae")
        config = UMT5Config(vocab_size=128, d_model=4096, d_ff=1024, num_layers=1, num_heads=64)
        UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    for name in set(TRANSFORMER_FOLDERS.values()):
        for file in (folder / name).glob("*.safetensors"):
            file.unlink()
        (folder / name / "config.json").write_text(json.dumps(SMALL if small else {}))
    return folder


def load(section: ModelSection) -> Wan22:
    """As `wan22`, but for the weights."""
    folder = find_model_folder(section)
    high, low = (
        random_transformer(json.loads((folder / TRANSFORMER_FOLDERS[name] / "config.json").read_text()), seed)
        for seed, name in enumerate(("high", "low"))
    )
    return assemble(section, folder, read_model_index(folder), high, low)


def random_transformer(config: Mapping[str, object], seed: int) -> nn.Module:
    """In bf16 but for what diffusers keeps in fp32, in host memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    with init_empty_weights():  # buffers are there, as they should be
        model: nn.Module = WanTransformer3DModel(**config)
    precise = WanTransformer3DModel._keep_in_fp32_modules
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            in_fp32 = any(part in f"{path}.{name}".split(".") for part in precise)
            dtype = torch.float32 if in_fp32 else torch.bfloat16
            home = torch.zeros(parameter.shape, dtype=dtype)  # pages of it, by all cores
            home.copy_(random_weight(path, name, parameter.shape, generator))
            module._parameters[name] = nn.Parameter(home, requires_grad=False)
    return model.eval()


def random_weight(
    path: str, name: str, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    """Of a size at which forty blocks give finite numbers."""
    if name == "bias":
        return torch.zeros(shape, device=generator.device)
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)  # a norm's
    fan_in = shape[-1] if "table" in f"{path}.{name}" else shape[1:].numel()
    drawn = torch.empty(shape, device=generator.device, dtype=torch.bfloat16)
    return drawn.normal_(0, fan_in**-0.5, generator=generator)
