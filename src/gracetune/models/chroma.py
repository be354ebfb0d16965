"""The model family `chroma`: Chroma for images, with diffusers' classes.

Chroma is a smaller FLUX.1 that reads T5 alone. Latents have C channels, H rows and W columns; a
cell is eight pixels wide. The transformer reads patches of 2x2 cells as tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    pack_latents,
    packed_shape,
    patch_positions,
    unpack_latents,
)
from gracetune.models.family import PROBE_JOINT_ATTENTION, PlannerShapes
from gracetune.models.key_tables import (
    FLUX_BLOCK_LINEARS,
    FLUX_FUSED,
    FLUX_LINEARS,
    FLUX_PREFIXES,
    FLUX_ROW_RATIOS,
    FLUX_ROWS,
    flux_config,
    part_names,
    pipeline_spec,
)
from gracetune.models.pipeline_folder import read_parts
from gracetune.offload.checkpointing import wrap_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, EncodedShape, SampleShape

TEXT_LENGTH = 512
"""Number of tokens of every caption. The transformer gets the padding, with a mask."""


def load(section: ModelSection) -> Chroma:
    """Load the Chroma pipeline that `model.path` names."""
    from gracetune.models.attention_processors import make_attention_grads_contiguous

    family = Chroma(read_parts(section, PLANNER_SHAPES, ("ChromaPipeline",)))
    make_attention_grads_contiguous(family.transformer)
    return family


class ChromaShapes(PlannerShapes):
    """Describes the transformer of Chroma to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of the latents and of the padded T5 embedding of a sample."""
        return packed_shape(config, sample, TEXT_LENGTH)

    def conditions(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised embeddings of T5 (`tokens`) and their `mask`."""
        mask = torch.empty(batch_size, encoded.text_shape[0], dtype=dtype)
        return {**super().conditions(config, encoded, batch_size, dtype), "mask": mask}

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1, like sigmas.

        The mask holds 1 for tokens that are read and 0 for the others. diffusers adds it to the
        scores of attention, as it is.
        """
        height, width = noisy.shape[2:]
        rows, mask = pack_latents(noisy), conditions["mask"].to(dtype)
        return {
            "hidden_states": rows.to(dtype),
            "timestep": sigmas.to(dtype),
            "encoder_hidden_states": conditions["tokens"].to(dtype),
            "txt_ids": sigmas.new_zeros(mask.shape[1], 3),
            "img_ids": patch_positions(height // PATCH_SIZE, width // PATCH_SIZE, sigmas),
            "attention_mask": torch.cat([mask, mask.new_ones(rows.shape[:2])], dim=1),
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        """Return the velocity as latents, from its patches."""
        return unpack_latents(output, *noisy.shape[2:])


PLANNER_SHAPES = ChromaShapes(
    class_name="ChromaTransformer2DModel",
    published_config={},
    published_name="the published Chroma1, 8.9 B",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    targets=FLUX_LINEARS,
    input_layer="x_embedder",
    probe_config={
        **PROBE_JOINT_ATTENTION,
        "num_layers": 4,
        "num_single_layers": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    },
    supported_models="chroma trains Chroma1",
)


class Chroma(DiffusersFamily):
    """A loaded Chroma model. `Family` documents the members."""

    name = "chroma"
    cache_name = "chroma"
    shapes = PLANNER_SHAPES
    text_arguments = (("tokens", "prompt_embeds"), ("mask", "prompt_attention_mask"))
    channels_per_patch = True
    text_length = TEXT_LENGTH
    has_fixed_text_length = True

    def enable_gradient_checkpointing(self) -> None:
        """Recompute block by block. diffusers' own checkpointing forgets the mask of some blocks.

        Its single-stream blocks would run without the mask, and have other gradients.
        """
        blocks = self.blocks()
        wrap_blocks(blocks, ["recompute"] * len(blocks), compiler=None)

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption: T5's token embeddings (`tokens`), and their `mask`."""
        tokens, _, mask, *_ = self.parts.pipeline().encode_prompt(
            caption,
            device=self.encoder_device(),
            do_classifier_free_guidance=False,
            max_sequence_length=TEXT_LENGTH,
        )
        return {"tokens": tokens[0], "mask": mask[0]}


# Key names in other tools: those of FLUX.1, without modulations and with a guidance network

GUIDANCE = "distilled_guidance_layer"
GUIDANCE_ROWS = (
    (f"{GUIDANCE}.in_proj", f"{GUIDANCE}.in_proj"),
    (f"{GUIDANCE}.out_proj", f"{GUIDANCE}.out_proj"),
    (f"{GUIDANCE}.layers.{{}}.in_layer", f"{GUIDANCE}.layers.{{}}.linear_1"),
    (f"{GUIDANCE}.layers.{{}}.out_layer", f"{GUIDANCE}.layers.{{}}.linear_2"),
)


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    layers = [f"{GUIDANCE}.{x}" for x in ("in_proj", "layers.linear_1", "layers.linear_2")]
    hidden = shapes.size(0, 0, *layers) or shapes.size(1, 5120, f"{GUIDANCE}.out_proj")
    return {
        **flux_config(shapes),
        "joint_attention_dim": shapes.size(1, 4096, "context_embedder"),
        "in_channels": shapes.size(1, 64, "x_embedder"),
        "approximator_num_channels": shapes.size(1, 64, f"{GUIDANCE}.in_proj"),
        "approximator_hidden_dim": hidden,
        "approximator_layers": shapes.num_blocks(f"{GUIDANCE}.layers"),
    }


KEY_TABLE = KeyTable(
    family="chroma",
    header_words=("chroma",),
    rows=(*FLUX_ROWS, *GUIDANCE_ROWS),
    unfused=part_names(FLUX_FUSED),
    fused=FLUX_FUSED,
    block_linears=FLUX_BLOCK_LINEARS,
    max_blocks=(("transformer_blocks", 19), ("single_transformer_blocks", 38)),
    row_ratios=FLUX_ROW_RATIOS,
    widths=(3072,),
    comfyui_prefixes=FLUX_PREFIXES,
    comfyui_bare_version="0.11",
    not_in_comfyui=frozenset(ours for _, ours in GUIDANCE_ROWS),
    pipeline=pipeline_spec("ChromaPipeline", "ChromaTransformer2DModel", _adapter_config),
)
