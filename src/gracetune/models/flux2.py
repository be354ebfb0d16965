"""The model family `flux2`: FLUX.2 dev and Klein for images, with diffusers' classes.

The VAE's latents are folded: 2x2 cells of eight pixels are the channels of one cell of 16 pixels,
which is one token. They are normalised by the statistics of the VAE's batch norm. So latents have
C channels, H rows and W columns of such cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import DiffusersFamily, captions_longer_than
from gracetune.models.family import PROBE_ATTENTION, EncodedShape, PlannerShapes
from gracetune.models.key_tables import (
    DOUBLE,
    FLUX_PREFIXES,
    IMAGE_QKV,
    SINGLE,
    STREAM_ROWS,
    TEXT_QKV,
    flux_config,
    part_names,
    pipeline_spec,
)
from gracetune.models.pipeline_folder import read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, SampleShape

KLEIN_PIPELINE = "Flux2KleinPipeline"
FOLD = 2
"""Cells of the VAE along the edge of a folded cell."""
CELL = 16
"""Pixels along the edge of a folded cell of the published VAE."""
TEXT_LENGTH = 512
"""Number of tokens of every caption. The transformer reads padding, too, without a mask."""
TRAINED_GUIDANCE = 1.0
"""Guidance value that training passes to models with a guidance input, such as FLUX.2 dev."""
TARGETS = (
    "transformer_blocks.*.attn.to_q",
    "transformer_blocks.*.attn.to_k",
    "transformer_blocks.*.attn.to_v",
    "transformer_blocks.*.attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.linear_in",
    "ff.linear_out",
    "ff_context.linear_in",
    "ff_context.linear_out",
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
    "single_transformer_blocks.*.attn.to_out",
)


def load(section: ModelSection) -> Flux2:
    """Load the FLUX.2 pipeline that `model.path` names."""
    pipelines = ("Flux2Pipeline", KLEIN_PIPELINE)
    return Flux2(read_parts(section, PLANNER_SHAPES, pipelines, "AutoencoderKLFlux2"))


class Flux2Shapes(PlannerShapes):
    """Describes the transformer of FLUX.2 to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's folded latents and of the embedding of a caption."""
        latents = (config["in_channels"], sample.height // CELL, sample.width // CELL)
        return EncodedShape(latents, (TEXT_LENGTH, config["joint_attention_dim"]))

    def arguments(
        self,
        config: Config,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1, like sigmas.

        Positions are (image, row, column, number of the text token).
        """
        count, _, rows, columns = noisy.shape
        tokens = conditions["tokens"].to(dtype)
        image = torch.zeros(rows, columns, 4, dtype=torch.long, device=noisy.device)
        image[..., 1] = torch.arange(rows, device=noisy.device)[:, None]
        image[..., 2] = torch.arange(columns, device=noisy.device)[None]
        text = torch.zeros(tokens.shape[1], 4, dtype=torch.long, device=noisy.device)
        text[:, 3] = torch.arange(tokens.shape[1], device=noisy.device)
        takes_guidance = config["guidance_embeds"]
        return {
            "hidden_states": noisy.flatten(2).transpose(1, 2).to(dtype),
            "timestep": sigmas.to(dtype),
            "guidance": torch.full_like(sigmas, TRAINED_GUIDANCE) if takes_guidance else None,
            "encoder_hidden_states": tokens,
            "txt_ids": text.expand(count, -1, -1),
            "img_ids": image.view(1, -1, 4).expand(count, -1, -1),
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        """Return the velocity as latents, from its tokens."""
        velocity: Tensor = output.transpose(1, 2).reshape(noisy.shape)
        return velocity


# Klein9BParams and Klein4BParams, as musubi-tuner has them, with diffusers' names.
KLEIN_9B = {
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
    "guidance_embeds": False,
}
KLEIN_4B = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
PLANNER_SHAPES = Flux2Shapes(
    class_name="Flux2Transformer2DModel",
    published_config={},
    published_name="the published FLUX.2 dev, 32 B",
    other_published={
        "black-forest-labs/FLUX.2-klein-base-9B": KLEIN_9B,
        "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
        "black-forest-labs/FLUX.2-klein-9B": KLEIN_9B,
        "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
    },
    blocks=("transformer_blocks", "single_transformer_blocks"),
    targets=TARGETS,
    input_layer="x_embedder",
    probe_config={
        **PROBE_ATTENTION,
        "num_layers": 4,
        "num_single_layers": 8,
        "joint_attention_dim": 16,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    supported_models="flux2 trains FLUX.2 dev and Klein, without references",
)


class Flux2(DiffusersFamily):
    """A loaded FLUX.2 model. `Family` documents the members."""

    name = "flux2"
    cache_name = "flux2"
    shapes = PLANNER_SHAPES
    patch_size = 1
    text_length = TEXT_LENGTH
    has_fixed_text_length = True

    @property
    def uses_negative_prompt(self) -> bool:
        """True for FLUX.2 klein. The guidance of FLUX.2 dev is an input of the transformer."""
        return bool(self.parts.index["_class_name"] == KLEIN_PIPELINE)

    @property
    def vae_scale(self) -> int:
        """Pixels along each edge of a folded cell."""
        return super().vae_scale * FOLD

    @property
    def latent_channels(self) -> int:
        """Channels of the folded latents."""
        return super().latent_channels * FOLD**2

    def encode_image(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode images to folded latents, normalised by the VAE's batch norm."""
        with torch.no_grad():
            raw: Tensor = vae.encode(pixels.to(next(vae.parameters()))).latent_dist.mode()
        folded = functional.pixel_unshuffle(raw, FOLD)
        mean, variance = (x.view(1, -1, 1, 1) for x in (vae.bn.running_mean, vae.bn.running_var))
        latents: Tensor = (folded - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)
        return latents

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions that alone have more tokens than the model reads.

        A few tokens fewer remain for a caption, because of the chat template around it.
        """
        # The tokenizer of FLUX.2 dev is a processor of texts and images.
        tokenizer = vars(self.tokenizer).get("tokenizer", self.tokenizer)
        return captions_longer_than(tokenizer, captions, TEXT_LENGTH)

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption to hidden states of three layers of the language model (`tokens`)."""
        tokens, _ = self.parts.pipeline().encode_prompt(
            caption, self.encoder_device(), max_sequence_length=TEXT_LENGTH
        )
        return {"tokens": tokens[0]}


# Key names in other tools. Modulations are shared by all blocks, and diffusers, too, has single
# blocks with fused projections.

CONDITION_ROWS = (
    ("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    ("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    ("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1"),
    ("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2"),
    ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    ("single_stream_modulation.lin", "single_stream_modulation.linear"),
)


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    embedders = [f"time_guidance_embed.{x}_embedder.linear_1" for x in ("timestep", "guidance")]
    return {
        **flux_config(shapes, default_width=6144),
        "joint_attention_dim": shapes.size(1, 15360, "context_embedder"),
        "in_channels": shapes.size(1, 128, "x_embedder"),
        "timestep_guidance_channels": shapes.size(1, 256, *embedders),
    }


KEY_TABLE = KeyTable(
    family="flux2",
    aliases=("flux2_dev", "flux2_klein"),
    header_words=("flux-2", "flux2", "flux_2", "klein"),
    rows=(
        *STREAM_ROWS,
        ("double_blocks.{}.img_mlp.0", f"{DOUBLE}.ff.linear_in"),
        ("double_blocks.{}.img_mlp.2", f"{DOUBLE}.ff.linear_out"),
        ("double_blocks.{}.txt_mlp.0", f"{DOUBLE}.ff_context.linear_in"),
        ("double_blocks.{}.txt_mlp.2", f"{DOUBLE}.ff_context.linear_out"),
        ("single_blocks.{}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
        ("single_blocks.{}.linear2", f"{SINGLE}.attn.to_out"),
        *CONDITION_ROWS,
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    ),
    unfused=part_names((IMAGE_QKV, TEXT_QKV)),
    fused=(IMAGE_QKV, TEXT_QKV),
    swapped_halves=frozenset({"norm_out.linear"}),
    block_linears=(
        *part_names((IMAGE_QKV, TEXT_QKV)),
        f"{DOUBLE}.attn.to_out.0",
        f"{DOUBLE}.attn.to_add_out",
        f"{DOUBLE}.ff.linear_in",
        f"{DOUBLE}.ff.linear_out",
        f"{DOUBLE}.ff_context.linear_in",
        f"{DOUBLE}.ff_context.linear_out",
        f"{SINGLE}.attn.to_qkv_mlp_proj",
        f"{SINGLE}.attn.to_out",
    ),
    max_blocks=(("transformer_blocks", 8), ("single_transformer_blocks", 48)),
    row_ratios=(
        (f"{DOUBLE}.ff.linear_in", 6),
        (f"{DOUBLE}.ff_context.linear_in", 6),
        (f"{SINGLE}.attn.to_qkv_mlp_proj", 9),
    ),
    widths=(6144, 4096, 3072),
    # diffusers reads a LoRA in original names, and every ComfyUI with FLUX.2 knows them. LoHa and
    # LoKr of query, key and value have no exact form in these names.
    default_formats=(
        ("lokr", "diffusers"),
        ("loha", "lycoris"),
        ("other", "comfyui"),
    ),
    comfyui_prefixes=FLUX_PREFIXES,
    not_in_comfyui=frozenset(ours for _, ours in CONDITION_ROWS),
    comfyui_names_version="0.11",
    pipeline=pipeline_spec("Flux2Pipeline", "Flux2Transformer2DModel", _adapter_config),
)
