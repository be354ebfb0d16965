"""The model family `z_image`: Z-Image and Z-Image-Turbo for images, with diffusers' classes.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. The transformer takes
lists of images and of captions of different lengths, and predicts the negative velocity. Its
timesteps go from 0 (noise) to 1 (clean).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import DiffusersFamily, captions_longer_than
from gracetune.models.family import EncodedShape, PlannerShapes
from gracetune.models.key_tables import (
    IN_ORIGINAL_NAMES,
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
    from gracetune.models.family import Config, SampleShape

TEXT_LENGTH = 512
"""Number of tokens to which captions are cut, with those of the chat template."""
VAE_SCALE = 8
TARGETS = (
    "attention.to_q",
    "attention.to_k",
    "attention.to_v",
    "attention.to_out.0",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)


def load(section: ModelSection) -> ZImage:
    """Load the Z-Image pipeline that `model.path` names."""
    return ZImage(read_parts(section, PLANNER_SHAPES, ("ZImagePipeline",)))


class ZImageShapes(PlannerShapes):
    """Describes the transformer of Z-Image to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and of the embedding of a long caption."""
        cells = sample.height // VAE_SCALE, sample.width // VAE_SCALE
        return EncodedShape((config["in_channels"], *cells), (TEXT_LENGTH, config["cap_feat_dim"]))

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments: a list of images and one of captions."""
        tokens = conditions["tokens"].to(dtype)
        lengths = _lengths(tokens, conditions.get("mask"))
        return {
            "x": list(noisy.unsqueeze(2).to(dtype).unbind()),
            "t": 1 - sigmas,
            "cap_feats": [text[:length] for text, length in zip(tokens, lengths, strict=True)],
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:  # noqa: ARG002
        """Return the velocity: the transformer predicts its negative."""
        return -torch.stack(output).squeeze(2)


def _lengths(tokens: Tensor, mask: Tensor | None) -> list[int]:
    """Return the number of tokens of each caption. A trace has no values, so it takes all."""
    if mask is None or detect_fake_mode([mask]) is not None:
        return [tokens.shape[1]] * len(tokens)
    lengths: list[int] = mask.sum(1).tolist()
    return lengths


PLANNER_SHAPES = ZImageShapes(
    class_name="ZImageTransformer2DModel",
    nests_arguments=True,
    published_config={},
    published_name="the published Z-Image, 6.2 B",
    other_published={"Tongyi-MAI/Z-Image-Turbo": {}},
    blocks=("noise_refiner", "context_refiner", "layers"),
    targets=TARGETS,
    input_layer="all_x_embedder.2-1",
    probe_config={
        "dim": 32,
        "n_heads": 2,
        "n_kv_heads": 2,
        "n_layers": 12,
        "cap_feat_dim": 16,
        "axes_dims": [4, 6, 6],
        "axes_lens": [4096, 512, 512],  # positions for more text than a caption has
    },
    supported_models="z_image trains Z-Image and Z-Image-Turbo",
    unsupported_inputs={"siglip_feat_dim": "an image embedding"},  # Z-Image-Omni
)


class ZImage(DiffusersFamily):
    """A loaded Z-Image model. `Family` documents the members."""

    name = "z_image"
    cache_name = "z-image"
    shapes = PLANNER_SHAPES
    text_length = TEXT_LENGTH

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        self.max_edge = min(self.transformer.config.axes_lens[1:]) * self.pixel_step

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions with more tokens than the model reads, in the chat template."""
        empty = self.tokenizer(self._in_template(""))["input_ids"]
        return captions_longer_than(self.tokenizer, captions, TEXT_LENGTH - len(empty))

    def _in_template(self, caption: str) -> Any:
        messages = [{"role": "user", "content": caption}]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption to hidden states of the language model (`tokens`)."""
        (tokens,), _ = self.parts.pipeline().encode_prompt(
            caption,
            self.encoder_device(),
            do_classifier_free_guidance=False,
            max_sequence_length=TEXT_LENGTH,
        )
        return {"tokens": tokens}

    def prompt_arguments(
        self, text: Mapping[str, Tensor], empty: Mapping[str, Tensor], guidance: float
    ) -> dict[str, Any]:
        """Return the pipeline's arguments. Its scale of guidance is 0 where others have 1."""
        return {
            "prompt_embeds": list(text["tokens"]),
            "negative_prompt_embeds": list(empty["tokens"]),
            "guidance_scale": max(guidance - 1, 0.0),
        }


# Key names in other tools: diffusers', except in ComfyUI's checkpoints, which fuse query, key and
# value

BLOCKS = ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
LINEARS = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
FUSED = tuple(
    fuse_qkv(f"{block}.attention.to_qkv", [f"{block}.attention.to_{x}" for x in "qkv"])
    for block in BLOCKS
)


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    kinds = [block.removesuffix(".{}") for block in BLOCKS]
    rows = [f"attention.to_{x}" for x in ("q", "k", "v", "out")] + ["feed_forward.w2"]
    width = shapes.size(0, 0, *(f"{kind}.{name}" for kind in kinds for name in rows))
    columns = [f"{kind}.feed_forward.{name}" for kind in kinds for name in ("w1", "w3")]
    width = width or shapes.size(1, 3840, *columns, "all_final_layer.2-1.linear")
    heads, head = shapes.heads(width).values()
    patch = 2 * 2
    return {
        "dim": width,
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": shapes.num_blocks("layers"),
        "n_refiner_layers": max(shapes.num_blocks(kind) for kind in kinds[1:]),
        "axes_dims": [head, 0, 0],  # no weight depends on the parts
        "cap_feat_dim": shapes.size(1, 2560, "cap_embedder"),
        "in_channels": shapes.size(1, 16 * patch, "all_x_embedder.2-1") // patch,
    }


KEY_TABLE = KeyTable(
    family="z_image",
    aliases=("zimage",),
    header_words=("z-image", "zimage", "z_image"),
    rows=(
        *(
            (f"{block}.{theirs}", f"{block}.{ours}")
            for block in BLOCKS
            for theirs, ours in (
                ("attention.qkv", "attention.to_qkv"),
                ("attention.out", "attention.to_out.0"),
                ("attention.q_norm", "attention.norm_q"),
                ("attention.k_norm", "attention.norm_k"),
                *((name, name) for name in LINEARS),
                *((f"{x}_norm{n}", f"{x}_norm{n}") for x in ("attention", "ffn") for n in (1, 2)),
            )
        ),
        *((f"{block}.adaLN_modulation.0", f"{block}.adaLN_modulation.0") for block in BLOCKS[:2]),
        ("x_embedder", "all_x_embedder.2-1"),
        ("cap_embedder.0", "cap_embedder.0"),
        ("cap_embedder.1", "cap_embedder.1"),
        ("t_embedder.mlp.0", "t_embedder.mlp.0"),
        ("t_embedder.mlp.2", "t_embedder.mlp.2"),
        ("final_layer.linear", "all_final_layer.2-1.linear"),
        ("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1"),
    ),
    unfused=part_names(FUSED),
    fused=FUSED,
    block_linears=tuple(
        f"{block}.{name}"
        for block in BLOCKS
        for name in (*(f"attention.to_{x}" for x in ("q", "k", "v", "out.0")), *LINEARS)
    ),
    max_blocks=(("layers", 30), ("noise_refiner", 2), ("context_refiner", 2)),
    widths=(3840,),
    comfyui_prefixes=(
        *IN_ORIGINAL_NAMES,
        ("diffusion_model.", ".", "diffusers"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
        ("", ".", "diffusers"),
    ),
    comfyui_bare_version="0.9",
    pipeline=pipeline_spec("ZImagePipeline", "ZImageTransformer2DModel", _adapter_config),
)
