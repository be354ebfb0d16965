"""Provide Wan 2.2 with random weights as a model family, for benchmarks of both experts.

Everything but the weights is the family `wan22`. Weights are drawn on the device, one tensor at a
time, and copied to host memory, where a run expects a loaded model. They are never written to a
file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from gracetune.models import wan22
from gracetune.models.pipeline_folder import TRANSFORMER_FOLDERS, find_model_folder

# The miniatures are test code, which is not installed with the package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.miniatures import write_miniature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import ModelSection
    from gracetune.models.wan22 import Wan22

NAME = "wan22_random"
SMALL = {"num_layers": 4, "ffn_dim": 384, "text_dim": 32, "freq_dim": 32, "rope_max_seq_len": 32}
SMALL |= {"num_attention_heads": 8, "attention_head_dim": 24}


def install(site: Path) -> None:
    """Write an entry point for the family into a folder and put it on sys.path."""
    dist_info = site / f"{NAME}-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(
        f"[gracetune.family]\n{NAME} = wan22_random_weights:load\n"
    )
    sys.path.insert(0, str(site))


def write_folder(folder: Path, *, small: bool) -> Path:
    """Write a pipeline folder without the transformers' weights.

    The VAE has the published shape. The text encoder has the published class and width but one of
    24 layers, since only the shape of its output matters. With `small`, everything is a miniature.
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
    """Load the family `wan22` with random transformers."""
    folder = find_model_folder(section)
    transformers = {
        name: random_transformer(json.loads((folder / name / "config.json").read_text()), seed)
        for seed, name in enumerate((TRANSFORMER_FOLDERS["high"], TRANSFORMER_FOLDERS["low"]))
    }
    return wan22.load(section, transformers)


def random_transformer(config: Mapping[str, object], seed: int) -> nn.Module:
    """Return a transformer in host memory, in bf16 except for what diffusers keeps in fp32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    with init_empty_weights():  # buffers get real values
        model: nn.Module = WanTransformer3DModel(**config)
    fp32_modules = WanTransformer3DModel._keep_in_fp32_modules
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            in_fp32 = any(part in f"{path}.{name}".split(".") for part in fp32_modules)
            dtype = torch.float32 if in_fp32 else torch.bfloat16
            host = torch.zeros(parameter.shape, dtype=dtype)  # touches its pages with all cores
            host.copy_(random_weight(path, name, parameter.shape, generator))
            module._parameters[name] = nn.Parameter(host, requires_grad=False)
    return model.eval()


def random_weight(
    path: str, name: str, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    """Return a random weight, scaled so that activations stay finite through forty blocks."""
    if name == "bias":
        return torch.zeros(shape, device=generator.device)
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)  # scale of a norm
    fan_in = shape[-1] if "table" in f"{path}.{name}" else shape[1:].numel()
    drawn = torch.empty(shape, device=generator.device, dtype=torch.bfloat16)
    return drawn.normal_(0, fan_in**-0.5, generator=generator)
