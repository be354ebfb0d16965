"""Provide models of the published shapes with random weights, for benchmarks of whole runs.

`write_folder` writes a pipeline folder without the transformers' weights, and `random_transformer`
takes the place of the function that reads them. Weights are drawn on the device, one tensor at a
time, and copied to host memory, where a run expects a loaded model. `write_weights` writes them to
files, for runs in processes of their own. Everything else is the model family of the product.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from gracetune.distributed.shard_files import write_tensors

# The miniatures are test code, which is not installed with the package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.miniatures import write_miniature

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Shape:
    """A family's miniature, and what differs in the published model from diffusers' defaults."""

    miniature: str
    text_width: int
    """Width of the text encoder's hidden states."""
    vae: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the transformer in a rehearsal, where it differs from the miniature's."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    text_encoders: Mapping[str, int] = field(default_factory=dict)
    """Text encoders besides `text_encoder`, with the width of their hidden states."""


KL_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "shift_factor": 0.1159,
    "scaling_factor": 0.3611,
}
"""The VAE of FLUX.1, which Z-Image uses as well."""
SHARD_NBYTES = 3 * 10**9
"""Bytes of weights in one file."""
SHAPES = {
    "flux": Shape(
        "flux",
        text_width=768,
        vae=KL_VAE,
        transformer={"guidance_embeds": True},
        text_encoders={"text_encoder_2": 4096},
    ),
    "qwen_image": Shape("qwen-image", text_width=3584),
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
    "wan21": Shape("wan21-t2v", text_width=4096),
    "flux2": Shape(
        "flux2-dev",
        text_width=5120,
        small={"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 16},
    ),
    "z_image": Shape(
        "z-image",
        text_width=2560,
        vae=KL_VAE,
        small={"n_layers": 6, "dim": 256, "n_heads": 16, "n_kv_heads": 16},
    ),
}


def write_folder(
    family: str, folder: Path, *, small: bool, config: Mapping[str, Any] | None = None
) -> Path:
    """Write a pipeline folder without the transformers' weights.

    The VAE has the published shape. The text encoder has the published class and width, but few
    narrow layers, since only the shape of its output matters. `config` has settings of the
    transformer that differ from the published ones. With `small`, everything is a miniature.
    """
    shape = SHAPES[family]
    write_miniature(shape.miniature, folder)
    torch.manual_seed(0)
    if not small:
        vae = getattr(diffusers, read_json(folder / "vae")["_class_name"])
        vae.from_config(shape.vae).save_pretrained(folder / "vae")
        for name, width in {"text_encoder": shape.text_width, **shape.text_encoders}.items():
            write_text_encoder(folder / name, width)
    for transformer in folder.glob("transformer*"):
        for file in transformer.glob("*.safetensors*"):
            file.unlink()
        miniature = read_json(transformer)
        published = {**shape.transformer, **(config or {})}  # the rest are diffusers' defaults
        settings = {**miniature, **shape.small} if small else published
        settings["_class_name"] = miniature["_class_name"]
        (transformer / "config.json").write_text(json.dumps(settings))
    return folder


def write_text_encoder(folder: Path, width: int) -> None:
    """Replace the miniature of a text encoder by one with hidden states of the published width."""
    config = transformers.AutoConfig.from_pretrained(folder)
    text = getattr(config, "text_config", config)
    if config.model_type == "qwen2_5_vl":  # the positions are divided among a head's channels
        text.num_attention_heads *= width // text.hidden_size
        config.vision_config.out_hidden_size = width
    text.hidden_size = width
    encoder = getattr(transformers, config.architectures[0])(config)
    encoder.to(torch.bfloat16).save_pretrained(folder)


def read_json(folder: Path) -> dict[str, Any]:
    """Read the configuration of a component."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def write_weights(folder: Path, name: str = "transformer") -> int:
    """Write random weights for a transformer of a pipeline folder; return their bytes.

    They are drawn on the device, all of them before any is written.
    """
    cls = getattr(diffusers, read_json(folder / name)["_class_name"])
    model = draw_transformer(cls, folder, name, torch.Tensor.to)
    shards: list[dict[str, torch.Tensor]] = [{}]
    nbytes = room = 0
    for key, weight in model.state_dict().items():
        if room < weight.nbytes:
            shards.append({})
            room = SHARD_NBYTES
        shards[-1][key] = weight
        room -= weight.nbytes
        nbytes += weight.nbytes
    stem, shards = "diffusion_pytorch_model", shards[1:]
    files = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_tensors, [folder / name / file for file in files], shards))
    weight_map = {k: file for shard, file in zip(shards, files, strict=True) for k in shard}
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (folder / name / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return nbytes


def random_transformer(cls: Any, _section: object, folder: Path, name: str, *_: object) -> Any:
    """Return a transformer in host memory, in bf16 except for what diffusers keeps in fp32.

    It takes the arguments of `gracetune.models.pipeline_folder.read_transformer`.
    """
    return draw_transformer(cls, folder, name, to_host).eval()


def to_host(drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor to host memory."""
    host = torch.zeros(drawn.shape, dtype=dtype)  # touches its pages with all cores
    return host.copy_(drawn)


def draw_transformer(
    cls: Any, folder: Path, name: str, place: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
) -> nn.Module:
    """Return a transformer whose weights are drawn on the device, one by one, and then placed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(int(name == "transformer_2"))
    with init_empty_weights():  # buffers get real values
        model: nn.Module = cls.from_config(read_json(folder / name))
    fp32_modules = cls._keep_in_fp32_modules or ()
    for path, module in model.named_modules():
        for weight, parameter in list(module.named_parameters(recurse=False)):
            in_fp32 = any(part in f"{path}.{weight}".split(".") for part in fp32_modules)
            dtype = torch.float32 if in_fp32 else torch.bfloat16
            placed = place(random_weight(path, weight, parameter.shape, generator), dtype)
            module._parameters[weight] = nn.Parameter(placed, requires_grad=False)
    return model


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
