"""diffusers pipelines with the shape of a model and the weight of none, to load adapters into.

Every parameter is one zero, seen as a whole tensor: names, shapes and loaders are the real ones,
and a pipeline of two 14 B experts takes no memory.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gracetune.adapters.comfy import blocks_of
from gracetune.adapters.delta import delta_shape
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gracetune.adapters.layers import Layer
    from gracetune.adapters.tables.types import Stage

HEAD = 128
"""The width of a head in every published model of these families."""
Sizes = dict[str, tuple[int, ...]]


def hollow_pipeline(
    family: str,
    layers: Mapping[str, Layer],
    config: Mapping[str, object] | None,
    dtype: torch.dtype,
) -> Any:
    """A pipeline whose transformers fit the layers (by module), or a given configuration."""
    settings = dict(config) if config is not None else CONFIGS[family](_sizes(layers))
    import diffusers  # slow to import, and only checks need it

    if family == "wan":
        return diffusers.WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=None,
            transformer=hollow(diffusers.WanTransformer3DModel, settings, dtype),
            transformer_2=hollow(diffusers.WanTransformer3DModel, settings, dtype),
            boundary_ratio=0.875,
        )
    if family == "flux":
        return diffusers.FluxPipeline(
            scheduler=None,
            vae=None,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=hollow(diffusers.FluxTransformer2DModel, settings, dtype),
        )
    return diffusers.QwenImagePipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=hollow(diffusers.QwenImageTransformer2DModel, settings, dtype),
    )


def transformer_for(pipeline: Any, stage: Stage | None) -> nn.Module:
    """The transformer that a stage's file goes into."""
    model: nn.Module = pipeline.transformer_2 if stage == "low" else pipeline.transformer
    return model


@contextlib.contextmanager
def quiet_diffusers() -> Iterator[None]:
    """What diffusers would print here is what the check itself reports, in its own words."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def hollow(cls: Any, config: Mapping[str, object], dtype: torch.dtype) -> Any:
    """A model of a class and a configuration, every parameter one zero."""
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    try:
        with torch.device("meta"):
            model: nn.Module = cls(**settings)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AdapterError(
            f"no {cls.__name__} can be made from this configuration: {error}. "
            "Give the config.json of the transformer that the adapter is for.",
            kind="other-model",
        ) from error
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model


def _sizes(layers: Mapping[str, Layer]) -> Sizes:
    """The weight's shape of each module, by its name without the block's number."""
    sizes: Sizes = {}
    for module, layer in layers.items():
        shape = delta_shape(layer)
        if len(shape) > 1 and shape[1]:  # neither a norm's change nor a bias' alone
            name = ".".join(part for part in module.split(".") if not part.isdigit())
            sizes.setdefault(name, shape)
    counts = blocks_of(layers)
    return sizes | {f"#{kind}": (count,) for kind, count in counts.items()}


def _first(sizes: Sizes, axis: int, default: int, *names: str) -> int:
    """One axis of the first module that is there: every one of them has the same."""
    return next((sizes[name][axis] for name in names if name in sizes), default)


def _heads(width: int) -> tuple[int, int]:
    return (width // HEAD, HEAD) if width % HEAD == 0 else (1, width)


def _wan(sizes: Sizes) -> dict[str, object]:
    attention = [f"blocks.attn{n}.to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out")]
    width = _first(sizes, 0, 0, *attention, "blocks.ffn.net") or _first(
        sizes, 1, 5120, "blocks.ffn.net.proj", "proj_out"
    )
    heads, head = _heads(width)
    added = _first(sizes, 1, 0, "blocks.attn2.add_k_proj", "blocks.attn2.add_v_proj")
    image = _first(sizes, 1, 0, "condition_embedder.image_embedder.ff.net.proj")
    patch = math.prod((1, 2, 2))
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": max(1, _first(sizes, 0, 1, "#blocks")),
        "ffn_dim": _first(sizes, 0, 0, "blocks.ffn.net.proj")
        or _first(sizes, 1, 13824, "blocks.ffn.net"),
        "text_dim": _first(sizes, 1, 4096, "condition_embedder.text_embedder.linear_1"),
        "freq_dim": _first(sizes, 1, 256, "condition_embedder.time_embedder.linear_1"),
        "in_channels": _first(sizes, 1, 16, "patch_embedding"),
        "out_channels": _first(sizes, 0, 16 * patch, "proj_out") // patch,
        "added_kv_proj_dim": added or None,
        "image_dim": image or added or None,
    }


def _flux(sizes: Sizes) -> dict[str, object]:
    double, single = "transformer_blocks", "single_transformer_blocks"
    names = [f"{double}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{double}.attn.add_{x}_proj" for x in "qkv"]
    names += [f"{single}.attn.to_{x}" for x in "qkv"] + [f"{single}.proj_out", "x_embedder"]
    width = _first(sizes, 0, 3072, *names)
    heads, head = _heads(width)
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": _first(sizes, 0, 1, f"#{double}"),
        "num_single_layers": _first(sizes, 0, 1, f"#{single}"),
        "joint_attention_dim": _first(sizes, 1, 4096, "context_embedder"),
        "pooled_projection_dim": _first(sizes, 1, 768, "time_text_embed.text_embedder.linear_1"),
        "in_channels": _first(sizes, 1, 64, "x_embedder"),
        "guidance_embeds": True,
    }


def _qwen_image(sizes: Sizes) -> dict[str, object]:
    block = "transformer_blocks"
    names = [f"{block}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{block}.attn.add_{x}_proj" for x in "qkv"]
    heads, head = _heads(_first(sizes, 0, 3072, *names, "img_in"))
    patch = 2 * 2
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": _first(sizes, 0, 1, f"#{block}"),
        "joint_attention_dim": _first(sizes, 1, 3584, "txt_in"),
        "in_channels": _first(sizes, 1, 64, "img_in"),
        "out_channels": _first(sizes, 0, 16 * patch, "proj_out") // patch,
    }


CONFIGS = {"wan": _wan, "flux": _flux, "qwen_image": _qwen_image}
"""What a transformer's configuration must have been, by the shapes of a file's layers."""
