"""The model family `flux`: FLUX.1 and FLUX.1 Kontext, which edits images.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. The transformer reads
patches of 2x2 cells as tokens. Kontext also reads the tokens of the image to edit (the reference),
after those of the noisy image. diffusers is imported inside functions because the adapter commands
read `KEY_TABLE` from here and should not wait seconds for that import.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    captions_longer_than,
    num_patches,
    pack_latents,
    packed_shape,
    patch_positions,
    references_of,
    to_pil,
    unpack_latents,
)
from gracetune.models.family import PROBE_JOINT_ATTENTION, PlannerShapes, SampleShape
from gracetune.models.key_tables import (
    DOUBLE,
    FLUX_BLOCK_LINEARS,
    FLUX_FUSED,
    FLUX_LINEARS,
    FLUX_PREFIXES,
    FLUX_ROW_RATIOS,
    FLUX_ROWS,
    SINGLE,
    flux_config,
    fuse_qkv,
    part_names,
    pipeline_spec,
)
from gracetune.models.pipeline_folder import PipelineParts, read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, EncodedShape

KONTEXT_PIPELINE = "FluxKontextPipeline"
SUPPORTED_MODELS = "flux trains FLUX.1 dev, schnell and Kontext, not Fill, Control or Redux"
TEXT_LENGTH = 512
"""Number of tokens of every caption. T5 runs without a mask, so padding is embedded as well."""
TRAINED_GUIDANCE = 1.0
"""Guidance value that training passes to models with a guidance input, such as FLUX.1-dev."""


def load(section: ModelSection) -> Flux:
    """Load the FLUX.1 pipeline that `model.path` names."""
    from gracetune.models.attention_processors import make_attention_grads_contiguous

    family = Flux(read_parts(section, PLANNER_SHAPES, ("FluxPipeline", KONTEXT_PIPELINE)))
    make_attention_grads_contiguous(family.transformer)
    return family


class FluxShapes(PlannerShapes):
    """Describes the transformer of FLUX.1 to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of the latents and of the padded T5 embedding of a sample."""
        shape = packed_shape(config, sample, TEXT_LENGTH)
        if not sample.controls:
            return shape
        reference = SampleShape(*kontext_size(sample.width, sample.height))
        control = packed_shape(config, reference, TEXT_LENGTH).latent_shape
        return replace(shape, control_shape=(sample.controls, *control))

    def conditions(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised embeddings of T5 (`tokens`) and CLIP (`pooled`)."""
        pooled = torch.empty(batch_size, config["pooled_projection_dim"], dtype=dtype)
        return {**super().conditions(config, encoded, batch_size, dtype), "pooled": pooled}

    def arguments(
        self,
        config: Config,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1, like sigmas.

        The rows of the image to edit follow those of the noisy image, with a position of their own.
        """
        images = [noisy, *references_of(conditions)]
        positions = [
            patch_positions(x.shape[2] // PATCH_SIZE, x.shape[3] // PATCH_SIZE, sigmas, number)
            for number, x in enumerate(images)
        ]
        tokens, takes_guidance = conditions["tokens"], config["guidance_embeds"]
        return {
            "hidden_states": torch.cat([pack_latents(x) for x in images], dim=1).to(dtype),
            "timestep": sigmas.to(dtype),
            "guidance": torch.full_like(sigmas, TRAINED_GUIDANCE) if takes_guidance else None,
            "pooled_projections": conditions["pooled"].to(dtype),
            "encoder_hidden_states": tokens.to(dtype),
            "txt_ids": sigmas.new_zeros(tokens.shape[1], 3),
            "img_ids": torch.cat(positions),
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        """Return the velocity of the noisy image as latents, from its patches."""
        rows = output[:, : num_patches(noisy.shape[1:])]
        return unpack_latents(rows, *noisy.shape[2:])


PLANNER_SHAPES = FluxShapes(
    class_name="FluxTransformer2DModel",
    published_config={"guidance_embeds": True},
    published_name="the published FLUX.1-dev, 12 B",
    other_published={
        "black-forest-labs/FLUX.1-schnell": {"guidance_embeds": False},
        "black-forest-labs/FLUX.1-Kontext-dev": {},
    },
    blocks=("transformer_blocks", "single_transformer_blocks"),
    targets=FLUX_LINEARS,
    input_layer="x_embedder",
    supported_models=SUPPORTED_MODELS,
    probe_config={
        **PROBE_JOINT_ATTENTION,
        "num_layers": 4,
        "num_single_layers": 8,
        "pooled_projection_dim": 16,
    },
)


class Flux(DiffusersFamily):
    """A loaded FLUX.1 model. `Family` documents the members."""

    name = "flux"
    shapes = PLANNER_SHAPES
    text_arguments = (("tokens", "prompt_embeds"), ("pooled", "pooled_prompt_embeds"))
    channels_per_patch = True
    text_length = TEXT_LENGTH
    has_fixed_text_length = True

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        self.max_controls = int(parts.index["_class_name"] == KONTEXT_PIPELINE)
        self.cache_name = "flux-kontext" if self.takes_control else "flux"

    @property
    def uses_negative_prompt(self) -> bool:
        """False: the guidance of FLUX.1 is an input of the transformer."""
        return False

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the image to edit, for a generated image of this size."""
        return kontext_size(width, height)

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions that have more tokens than T5 reads, and will be cut."""
        return captions_longer_than(self.parts.components["tokenizer_2"], captions, TEXT_LENGTH)

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption: T5's token embeddings (`tokens`), CLIP's pooled one (`pooled`)."""
        tokens, pooled, _ = self.parts.pipeline().encode_prompt(
            caption, None, self.encoder_device(), max_sequence_length=TEXT_LENGTH
        )
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def image_arguments(
        self,
        pipeline: Any,  # noqa: ARG002
        images: Sequence[Tensor],
        width: int,
        height: int,
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for an image to edit, which has its size already.

        By default, the pipeline would generate an image of one megapixel.
        """
        (image,) = images
        return {"image": to_pil(image), "_auto_resize": False, "max_area": width * height}


def kontext_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of the image to edit: of those that Kontext knows, the one most alike."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    ratio = width / height
    _, *size = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
    return size[0], size[1]


# Key names in other tools


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    return {
        **flux_config(shapes),
        "joint_attention_dim": shapes.size(1, 4096, "context_embedder"),
        "pooled_projection_dim": shapes.size(1, 768, "time_text_embed.text_embedder.linear_1"),
        "in_channels": shapes.size(1, 64, "x_embedder"),
        "guidance_embeds": True,
    }


KEY_TABLE = KeyTable(
    family="flux",
    aliases=("flux1",),
    rows=(
        *FLUX_ROWS,
        ("double_blocks.{}.img_mod.lin", f"{DOUBLE}.norm1.linear"),
        ("double_blocks.{}.txt_mod.lin", f"{DOUBLE}.norm1_context.linear"),
        ("single_blocks.{}.modulation.lin", f"{SINGLE}.norm.linear"),
        ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
        ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
        ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
        ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
        ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    ),
    unfused=part_names(FLUX_FUSED),
    fused=FLUX_FUSED,
    # XLabs' LoRA on attention processors, and ComfyUI's name for query, key and value of a single
    # block.
    other_names=(
        ("double_blocks.{}.processor.qkv_lora1", f"{DOUBLE}.attn.to_qkv"),
        ("double_blocks.{}.processor.qkv_lora2", f"{DOUBLE}.attn.to_added_qkv"),
        ("double_blocks.{}.processor.proj_lora1", f"{DOUBLE}.attn.to_out.0"),
        ("double_blocks.{}.processor.proj_lora2", f"{DOUBLE}.attn.to_add_out"),
        ("single_blocks.{}.processor.qkv", f"{SINGLE}.attn.to_qkv"),
        ("single_blocks.{}.processor.proj", f"{SINGLE}.proj_out"),
        ("single_blocks.{}.linear1_qkv", f"{SINGLE}.attn.to_qkv"),
    ),
    other_fused=(fuse_qkv(f"{SINGLE}.attn.to_qkv", [f"{SINGLE}.attn.to_{x}" for x in "qkv"]),),
    header_words=("flux-1", "flux1", "lora_flux"),
    row_ratios=FLUX_ROW_RATIOS,
    widths=(3072,),
    preferred_over=("chroma", "flux2"),
    swapped_halves=frozenset({"norm_out.linear"}),
    block_linears=FLUX_BLOCK_LINEARS,
    max_blocks=(("transformer_blocks", 19), ("single_transformer_blocks", 38)),
    comfyui_prefixes=FLUX_PREFIXES,
    comfyui_bare_version="0.11",
    pipeline=pipeline_spec("FluxPipeline", "FluxTransformer2DModel", _adapter_config),
)
