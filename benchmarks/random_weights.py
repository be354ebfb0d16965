"""Provide models of the published shapes with random weights, for benchmarks of whole runs.

`write_folder` writes a pipeline folder without the transformers' weights, and `random_transformer`
takes the place of the function that reads them. Weights are drawn on the device, one tensor at a
time, and copied to host memory, where a run expects a loaded model. They are never written to a
file. Everything else is the model family of the product.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

# The miniatures are test code, which is not installed with the package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.miniatures import write_miniature

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Shape:
    """A family's miniature, and what differs in the published model from diffusers' defaults."""

    miniature: str
    text_width: int
    """Width of the text encoder's hidden states."""
    vae: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the transformer in a rehearsal, where it differs from the miniature's."""


SHAPES = {
    "wan22": Shape(
        "wan22-t2v",
        text_width=4096,
        small={
            "num_layers": 4,
            "ffn_dim": 384,
            "num_attention_heads": 8,
            "attention_head_dim": 24,
        },
    ),
    "flux2": Shape(
        "flux2-dev",
        text_width=5120,
        small={"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 16},
    ),
    "z_image": Shape(
        "z-image",
        text_width=2560,
        vae={
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "block_out_channels": (128, 256, 512, 512),
            "layers_per_block": 2,
            "latent_channels": 16,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "shift_factor": 0.1159,
            "scaling_factor": 0.3611,
        },
        small={"n_layers": 6, "dim": 256, "n_heads": 16, "n_kv_heads": 16},
    ),
}


def write_folder(family: str, folder: Path, *, small: bool) -> Path:
    """Write a pipeline folder without the transformers' weights.

    The VAE has the published shape. The text encoder has the published class and width, but few
    narrow layers, since only the shape of its output matters. With `small`, everything is a
    miniature.
    """
    shape = SHAPES[family]
    write_miniature(shape.miniature, folder)
    torch.manual_seed(0)
    if not small:
        vae = getattr(diffusers, read_json(folder / "vae")["_class_name"])
        vae.from_config(shape.vae).save_pretrained(folder / "vae")
        write_text_encoder(folder / "text_encoder", shape.text_width)
    for transformer in folder.glob("transformer*"):
        for file in transformer.glob("*.safetensors*"):
            file.unlink()
        miniature = read_json(transformer)
        config = {**miniature, **shape.small} if small else {}  # the published ones are defaults
        config["_class_name"] = miniature["_class_name"]
        (transformer / "config.json").write_text(json.dumps(config))
    return folder


def write_text_encoder(folder: Path, width: int) -> None:
    """Replace the miniature of a text encoder by one with hidden states of the published width."""
    config = transformers.AutoConfig.from_pretrained(folder)
    getattr(config, "text_config", config).hidden_size = width
    encoder = getattr(transformers, config.architectures[0])(config)
    encoder.to(torch.bfloat16).save_pretrained(folder)


def read_json(folder: Path) -> dict[str, Any]:
    """Read the configuration of a component."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def random_transformer(cls: Any, _section: object, folder: Path, name: str, *_: object) -> Any:
    """Return a transformer in host memory, in bf16 except for what diffusers keeps in fp32.

    It takes the arguments of `gracetune.models.pipeline_folder.read_transformer`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(int(name == "transformer_2"))
    with init_empty_weights():  # buffers get real values
        model: nn.Module = cls.from_config(read_json(folder / name))
    fp32_modules = cls._keep_in_fp32_modules or ()
    for path, module in model.named_modules():
        for weight, parameter in list(module.named_parameters(recurse=False)):
            in_fp32 = any(part in f"{path}.{weight}".split(".") for part in fp32_modules)
            dtype = torch.float32 if in_fp32 else torch.bfloat16
            host = torch.zeros(parameter.shape, dtype=dtype)  # touches its pages with all cores
            host.copy_(random_weight(path, weight, parameter.shape, generator))
            module._parameters[weight] = nn.Parameter(host, requires_grad=False)
    return model.eval()


def random_weight(
    path: str, name: str, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    """Return a random weight, scaled so that activations stay finite through many blocks."""
    if name == "bias":
        return torch.zeros(shape, device=generator.device)
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)  # scale of a norm
    fan_in = shape[-1] if "table" in f"{path}.{name}" else shape[1:].numel()
    drawn = torch.empty(shape, device=generator.device, dtype=torch.bfloat16)
    return drawn.normal_(0, fan_in**-0.5, generator=generator)
