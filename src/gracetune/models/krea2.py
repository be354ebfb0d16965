"""The model family `krea2`: Krea 2 for images, with diffusers' classes.

Latents are those of Qwen-Image: C channels, H rows and W columns of cells of eight pixels. The
transformer reads patches of 2x2 cells as tokens, and hidden states of several layers of a language
model for each token of a caption.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    pack_latents,
    patch_positions,
    unpack_latents,
)
from gracetune.models.family import PROBE_ATTENTION, EncodedShape, PlannerShapes
from gracetune.models.key_tables import DOUBLE, IN_ORIGINAL_NAMES, pipeline_spec
from gracetune.models.pipeline_folder import read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, SampleShape

TEXT_LENGTH = 512
"""Number of tokens to which captions are cut or padded, with those after them in the template."""
VAE_SCALE = 8
TARGETS = tuple(
    f"transformer_blocks.*.{name}"
    for name in (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_gate",
        "attn.to_out.0",
        "ff.gate",
        "ff.up",
        "ff.down",
    )
)


def load(section: ModelSection) -> Krea2:
    """Load the Krea 2 pipeline that `model.path` names."""
    return Krea2(read_parts(section, PLANNER_SHAPES, ("Krea2Pipeline",), "AutoencoderKLQwenImage"))


class Krea2Shapes(PlannerShapes):
    """Describes the transformer of Krea 2 to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and of the embedding of a padded caption."""
        latents = (
            config["in_channels"] // PATCH_SIZE**2,
            sample.height // VAE_SCALE,
            sample.width // VAE_SCALE,
        )
        width = config["num_text_layers"] * config["text_hidden_dim"]
        return EncodedShape(latents, (TEXT_LENGTH, width))

    def conditions(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised hidden states of several layers (`tokens`), and their `mask`."""
        length, _ = encoded.text_shape
        layers = (config["num_text_layers"], config["text_hidden_dim"])
        return {
            "tokens": torch.empty(batch_size, length, *layers, dtype=dtype),
            "mask": torch.empty(batch_size, length, dtype=torch.bool),
        }

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1, like sigmas."""
        tokens, (height, width) = conditions["tokens"].to(dtype), noisy.shape[2:]
        image = patch_positions(height // PATCH_SIZE, width // PATCH_SIZE, sigmas)
        return {
            "hidden_states": pack_latents(noisy).to(dtype),
            "encoder_hidden_states": tokens,
            "timestep": sigmas.to(dtype),
            "position_ids": torch.cat([image.new_zeros(tokens.shape[1], 3), image]),
            "encoder_attention_mask": conditions["mask"],
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        """Return the velocity as latents, from its patches."""
        return unpack_latents(output, *noisy.shape[2:])


PLANNER_SHAPES = Krea2Shapes(
    class_name="Krea2Transformer2DModel",
    published_config={},
    published_name="the published Krea 2, 12.8 B",
    other_published={"krea/Krea-2-Turbo": {}},
    blocks=("transformer_blocks",),
    targets=TARGETS,
    input_layer="img_in",
    fp32_layers=("norm", "norm1", "norm2", "norm_q", "norm_k"),
    probe_config={
        **PROBE_ATTENTION,
        "num_layers": 12,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "timestep_embed_dim": 16,
        "text_hidden_dim": 16,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 16,
        "axes_dims_rope": (4, 6, 6),
    },
    supported_models="krea2 trains Krea 2",
)


class Krea2(DiffusersFamily):
    """A loaded Krea 2 model. `Family` documents the members."""

    name = "krea2"
    cache_name = "krea2"
    shapes = PLANNER_SHAPES
    text_arguments = (("tokens", "prompt_embeds"), ("mask", "prompt_embeds_mask"))
    channels_per_patch = True
    video_vae = True
    text_length = TEXT_LENGTH

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption: hidden states without those of padding (`tokens`), and their `mask`.

        The padding is between the caption and the end of the template.
        """
        tokens, mask = self.parts.pipeline().encode_prompt(
            caption, self.encoder_device(), max_sequence_length=TEXT_LENGTH
        )
        return {"tokens": tokens[0][mask[0]], "mask": mask[0]}

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions, with zeros for padding, which the transformer does not attend to."""
        mask = torch.stack([text["mask"] for text in texts])
        first = texts[0]["tokens"]
        tokens = first.new_zeros(*mask.shape, *first.shape[1:])
        for row, text in zip(tokens, texts, strict=True):
            row[text["mask"]] = text["tokens"]
        return {"tokens": tokens, "mask": mask}

    def prompt_arguments(
        self, text: Mapping[str, Tensor], empty: Mapping[str, Tensor], guidance: float
    ) -> dict[str, Any]:
        """Return the pipeline's arguments. Its scale of guidance is 0 where others have 1."""
        return super().prompt_arguments(text, empty, max(guidance - 1, 0.0))


# Key names in other tools

BLOCKS = (
    ("blocks.{}", DOUBLE),
    ("txtfusion.layerwise_blocks.{}", "text_fusion.layerwise_blocks.{}"),
    ("txtfusion.refiner_blocks.{}", "text_fusion.refiner_blocks.{}"),
)
LINEARS = (
    ("attn.wq", "attn.to_q"),
    ("attn.wk", "attn.to_k"),
    ("attn.wv", "attn.to_v"),
    ("attn.wo", "attn.to_out.0"),
    ("attn.gate", "attn.to_gate"),
    ("mlp.gate", "ff.gate"),
    ("mlp.up", "ff.up"),
    ("mlp.down", "ff.down"),
)


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    text = ["text_fusion.layerwise_blocks", "text_fusion.refiner_blocks"]
    width, keys, hidden = _widths(shapes, ["transformer_blocks"], (6144, 1536, 16384))
    text_width, text_keys, text_hidden = _widths(shapes, text, (2560, 2560, 6912))
    head, text_head = math.gcd(width, keys, 128), math.gcd(text_width, text_keys, 128)
    return {
        "num_layers": shapes.num_blocks("transformer_blocks"),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "num_key_value_heads": keys // head,
        "intermediate_size": hidden,
        "text_hidden_dim": text_width,
        "text_num_attention_heads": text_width // text_head,
        "text_num_key_value_heads": text_keys // text_head,
        "text_intermediate_size": text_hidden,
        "num_layerwise_text_blocks": shapes.num_blocks(text[0]),
        "num_refiner_text_blocks": shapes.num_blocks(text[1]),
        "num_text_layers": shapes.size(1, 12, "text_fusion.projector"),
        "in_channels": shapes.size(1, 64, "img_in"),
        "timestep_embed_dim": shapes.size(1, 256, "time_embed.linear_1"),
        "axes_dims_rope": (head, 0, 0),  # no weight depends on the parts
    }


def _widths(
    shapes: LayerShapes, kinds: Sequence[str], defaults: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return the hidden size of these kinds of blocks, and those of their keys and MLPs."""

    def size(axis: int, *names: str) -> int:
        return shapes.size(axis, 0, *(f"{kind}.{name}" for kind in kinds for name in names))

    width = size(0, "attn.to_q", "attn.to_gate", "attn.to_out", "ff.down")
    width = width or size(1, "attn.to_k", "attn.to_v", "ff.gate", "ff.up") or defaults[0]
    keys = size(0, "attn.to_k", "attn.to_v") or math.gcd(defaults[1], width)
    return width, keys, size(0, "ff.gate", "ff.up") or size(1, "ff.down") or defaults[2]


KEY_TABLE = KeyTable(
    family="krea2",
    header_words=("krea2", "krea-2", "krea_2"),
    rows=(
        *(
            (f"{original}.{theirs}", f"{block}.{ours}")
            for original, block in BLOCKS
            for theirs, ours in LINEARS
        ),
        ("first", "img_in"),
        ("last.linear", "final_layer.linear"),
        ("tmlp.0", "time_embed.linear_1"),
        ("tmlp.2", "time_embed.linear_2"),
        ("tproj.1", "time_mod_proj"),
        ("txtmlp.1", "txt_in.linear_1"),
        ("txtmlp.3", "txt_in.linear_2"),
        ("txtfusion.projector", "text_fusion.projector"),
    ),
    block_linears=tuple(f"{DOUBLE}.{ours}" for _, ours in LINEARS),
    max_blocks=(("transformer_blocks", 28),),
    widths=(6144,),
    # diffusers reads a LoRA in the original names, which are those of ComfyUI, but no LoKr.
    default_formats=(("lokr", "diffusers"), ("other", "comfyui")),
    comfyui_prefixes=(
        *IN_ORIGINAL_NAMES,
        ("diffusion_model.", ".", "diffusers"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
        ("", ".", "diffusers"),
    ),
    comfyui_version="0.26",
    pipeline=pipeline_spec("Krea2Pipeline", "Krea2Transformer2DModel", _adapter_config),
)
