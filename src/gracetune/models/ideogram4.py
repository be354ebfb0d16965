"""The model family `ideogram4`: Ideogram 4 for images, with diffusers' classes.

The VAE is that of FLUX.2: 2x2 cells of eight pixels are the channels of one token of 16 pixels,
normalised by the statistics of the VAE's batch norm. The transformer reads one sequence, the tokens
of the caption and then those of the image, and predicts the negative velocity. Its timesteps go
from 0 (noise) to 1 (clean). Guidance uses a second transformer without text, which is not trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import DiffusersFamily
from gracetune.models.family import PROBE_ATTENTION, EncodedShape, PlannerShapes
from gracetune.models.key_tables import IN_ORIGINAL_NAMES, fuse_qkv, part_names, pipeline_spec
from gracetune.models.pipeline_folder import read_parts, read_transformer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, SampleRequest, SampleShape
    from gracetune.models.pipeline_folder import PipelineParts

TEXT_LENGTH = 2048
"""Number of tokens to which captions are cut, with those of the chat template."""
PLANNED_TEXT_LENGTH = 512
"""Tokens of a caption for which memory is planned. `gracetune train` plans for its own captions."""
FOLD = 2
"""Cells of the VAE along the edge of a token."""
CELL = 16
"""Pixels along the edge of a token of the published model."""
GUIDE = "unconditional_transformer"
TARGETS = (
    "attention.to_q",
    "attention.to_k",
    "attention.to_v",
    "attention.to_out.0",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)


def load(section: ModelSection) -> Ideogram4:
    """Load the Ideogram 4 pipeline that `model.path` names, without the second transformer."""
    pipelines, vae = ("Ideogram4Pipeline",), "AutoencoderKLFlux2"
    return Ideogram4(read_parts(section, PLANNER_SHAPES, pipelines, vae, ignored=(GUIDE,)), section)


class Ideogram4Shapes(PlannerShapes):
    """Describes the transformer of Ideogram 4 to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's folded latents and of the embedding of a caption."""
        latents = (config["in_channels"], sample.height // CELL, sample.width // CELL)
        return EncodedShape(latents, (PLANNED_TEXT_LENGTH, config["llm_features_dim"]))

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments: each has the tokens of the text, then of the image.

        Padding has the role 0 and a segment of its own, so that no other token attends to it.
        """
        from diffusers.models.transformers.transformer_ideogram4 import (
            IMAGE_POSITION_OFFSET,
            LLM_TOKEN_INDICATOR,
            OUTPUT_IMAGE_INDICATOR,
            SEQUENCE_PADDING_INDICATOR,
        )

        tokens = conditions["tokens"].to(dtype)
        count, length, _ = tokens.shape
        image = noisy.flatten(2).transpose(1, 2).to(dtype)
        mask = conditions.get("mask")
        if mask is None:
            mask = torch.ones(count, length, dtype=torch.bool, device=noisy.device)
        text_positions = torch.where(mask, mask.cumsum(1) - 1, 0)[..., None].expand(-1, -1, 3)
        grid = torch.zeros(*noisy.shape[2:], 3, dtype=torch.long, device=noisy.device)
        grid[..., 1] = torch.arange(grid.shape[0], device=noisy.device)[:, None]
        grid[..., 2] = torch.arange(grid.shape[1], device=noisy.device)
        image_positions = (grid + IMAGE_POSITION_OFFSET).view(1, -1, 3).expand(count, -1, -1)

        def join(of_text: Tensor, of_image: int) -> Tensor:
            return torch.cat([of_text, of_text.new_full(image.shape[:2], of_image)], 1)

        return {
            "hidden_states": functional.pad(image, (0, 0, length, 0)),
            "timestep": (1 - sigmas).to(dtype),
            "encoder_hidden_states": functional.pad(tokens, (0, 0, 0, image.shape[1])),
            "position_ids": torch.cat([text_positions, image_positions], 1),
            "segment_ids": join(torch.where(mask, 1, SEQUENCE_PADDING_INDICATOR), 1),
            "indicator": join(torch.where(mask, LLM_TOKEN_INDICATOR, 0), OUTPUT_IMAGE_INDICATOR),
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        """Return the velocity as latents: the transformer predicts its negative, also for text."""
        tokens: Tensor = output[:, -noisy[0, 0].numel() :]
        return -tokens.transpose(1, 2).reshape(noisy.shape)


PLANNER_SHAPES = Ideogram4Shapes(
    class_name="Ideogram4Transformer2DModel",
    published_config={},
    published_name="the published Ideogram 4, 9.3 B",
    blocks=("layers",),
    targets=TARGETS,
    input_layer="input_proj",
    probe_config={
        **PROBE_ATTENTION,
        "num_layers": 12,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 16,
        "mrope_section": (4, 2, 2),
    },
    supported_models="ideogram4 trains Ideogram 4",
)


class Ideogram4(DiffusersFamily):
    """A loaded Ideogram 4 model. `Family` documents the members."""

    name = "ideogram4"
    cache_name = "ideogram4"
    shapes = PLANNER_SHAPES
    patch_size = 1
    text_length = TEXT_LENGTH

    def __init__(self, parts: PipelineParts, section: ModelSection) -> None:
        super().__init__(parts)
        self.section = section

    @property
    def uses_negative_prompt(self) -> bool:
        """False: guidance uses a transformer without text."""
        return False

    @property
    def vae_scale(self) -> int:
        """Pixels along each edge of a token."""
        return super().vae_scale * FOLD

    @property
    def latent_channels(self) -> int:
        """Channels of the folded latents."""
        return super().latent_channels * FOLD**2

    def encode_image(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode images to folded latents, normalised by the VAE's batch norm.

        Unlike in FLUX.2, the channels of one cell are next to each other.
        """
        with torch.no_grad():
            raw: Tensor = vae.encode(pixels.to(next(vae.parameters()))).latent_dist.mode()
        by_channel = functional.pixel_unshuffle(raw, FOLD)
        count, _, rows, columns = by_channel.shape
        folded = by_channel.view(count, -1, FOLD**2, rows, columns).transpose(1, 2).flatten(1, 2)
        mean, variance = (x.view(1, -1, 1, 1) for x in (vae.bn.running_mean, vae.bn.running_var))
        latents: Tensor = (folded - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)
        return latents

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions with more tokens than the model reads, in the chat template."""
        return [caption for caption in captions if self._num_text_tokens(caption) > TEXT_LENGTH]

    def _num_text_tokens(self, caption: str) -> int:
        messages = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return len(ids)

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption to hidden states of 13 layers of the language model (`tokens`).

        The pipeline refuses captions that are too long, so they are cut here, at the end of a
        token, until the chat template with them is short enough.
        """
        while (length := self._num_text_tokens(caption)) > TEXT_LENGTH:
            ends = self.tokenizer(
                caption, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )["offset_mapping"]
            caption = caption[: ends[max(len(ends) - (length - TEXT_LENGTH), 1) - 1][1]]
        features, *_ = self.parts.pipeline().encode_prompt(
            caption, 1, 1, max_sequence_length=length, device=self.encoder_device()
        )
        # The pipeline returns fp32, and a row for each token of the image.
        return {"tokens": features[0, :length].to(next(self.text_encoders[0].parameters()).dtype)}

    def prompt_arguments(
        self,
        text: Mapping[str, Tensor],
        empty: Mapping[str, Tensor],  # noqa: ARG002
        guidance: float,
    ) -> dict[str, Any]:
        """Return the pipeline's arguments, with embeddings as the prompt: see `_pack_prompt`."""
        return {
            "prompt": [text],
            "max_sequence_length": text["tokens"].shape[1],
            "guidance_scale": guidance,
            "guidance_schedule": None,
        }

    def sampling_pipeline(self, request: SampleRequest) -> Any:
        """Return the pipeline with the current transformer, for embeddings instead of texts."""
        pipeline = super().sampling_pipeline(request)
        device = next(self.transformer.parameters()).device
        is_guided = request.guidance != 1
        guide = self._read_guide(device) if is_guided else _NoGuide(device, self.dtype)
        pipeline.register_modules(**{GUIDE: guide})
        pipeline.encode_prompt = _pack_prompt
        return pipeline

    def _read_guide(self, device: torch.device) -> Any:
        """Read the transformer without text. On a GPU, its blocks are copied there one by one.

        It is read for each validation and freed after it, because training does not need it.
        """
        import diffusers

        cls = getattr(diffusers, PLANNER_SHAPES.class_name)
        dtype = str(self.dtype).removeprefix("torch.")
        section = self.section.model_copy(update={"dtype": dtype})
        guide = read_transformer(cls, section, self.folder, GUIDE, None, PLANNER_SHAPES)
        guide.eval().requires_grad_(False)
        if device.type == "cuda":
            guide.enable_group_offload(
                onload_device=device, offload_type="block_level", num_blocks_per_group=1
            )
        return guide


class _NoGuide(nn.Module):
    """Stands in for the transformer without text if guidance is off: its output has no weight."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.device, self.dtype = device, dtype

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        """Return zeros."""
        return (torch.zeros_like(hidden_states),)


def _pack_prompt(
    prompt: Sequence[Mapping[str, Tensor]],
    grid_h: int,
    grid_w: int,
    max_sequence_length: int,  # noqa: ARG001
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Do what the pipeline's `encode_prompt` does, for an encoded prompt instead of a text.

    The pipeline has no argument for embeddings, and the text encoder may have been released.
    """
    (text,) = prompt
    noisy, sigmas = torch.empty(1, 1, grid_h, grid_w, device=device), torch.empty(1, device=device)
    given = PLANNER_SHAPES.arguments({}, noisy, sigmas, text, text["tokens"].dtype)
    names = ("encoder_hidden_states", "position_ids", "segment_ids", "indicator")
    return tuple(given[name] for name in names)


# Key names in other tools. The original checkpoint fuses query, key and value.

BLOCK = "layers.{}"
QKV = fuse_qkv(f"{BLOCK}.attention.to_qkv", [f"{BLOCK}.attention.to_{x}" for x in "qkv"])
SAME_IN_BLOCKS = (
    "attention.norm_q",
    "attention.norm_k",
    "attention_norm1",
    "attention_norm2",
    "ffn_norm1",
    "ffn_norm2",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
    "adaln_modulation",
)
SAME = (
    *(f"{BLOCK}.{name}" for name in SAME_IN_BLOCKS),
    "input_proj",
    "llm_cond_norm",
    "llm_cond_proj",
    "t_embedding.mlp_in",
    "t_embedding.mlp_out",
    "adaln_proj",
    "embed_image_indicator",
    "final_layer.linear",
    "final_layer.adaln_modulation",
)
"""Names that are the same in diffusers and in the original."""


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    rows = [f"layers.attention.to_{x}" for x in ("q", "k", "v", "out")]
    rows += ["layers.feed_forward.w2", "input_proj", "llm_cond_proj"]
    inner = ["layers.feed_forward.w1", "layers.feed_forward.w3"]
    width = shapes.size(0, 0, *rows) or shapes.size(1, 4608, *inner, "final_layer.linear")
    modulations = [f"{part}.adaln_modulation" for part in ("layers", "final_layer")]
    return {
        **shapes.heads(width),
        "num_layers": shapes.num_blocks("layers"),
        "intermediate_size": shapes.size(0, 0, *inner)
        or shapes.size(1, 12288, "layers.feed_forward.w2"),
        "adaln_dim": shapes.size(1, 0, *modulations) or shapes.size(0, 512, "adaln_proj"),
        "llm_features_dim": shapes.size(1, 53248, "llm_cond_proj"),
        "in_channels": shapes.size(1, 128, "input_proj"),
    }


KEY_TABLE = KeyTable(
    family="ideogram4",
    aliases=("ideogram",),
    header_words=("ideogram4", "ideogram-4", "ideogram_4"),
    rows=(
        (f"{BLOCK}.attention.qkv", QKV.whole),
        (f"{BLOCK}.attention.o", f"{BLOCK}.attention.to_out.0"),
        *((name, name) for name in SAME),
    ),
    unfused=part_names((QKV,)),
    fused=(QKV,),
    block_linears=tuple(f"{BLOCK}.{name}" for name in TARGETS),
    max_blocks=(("layers", 34),),
    widths=(4608,),
    # diffusers reads a LoRA in original names, and ComfyUI knows no others. LoHa and LoKr of query,
    # key and value have no exact form in these names.
    default_formats=(("lokr", "diffusers"), ("loha", "lycoris"), ("other", "comfyui")),
    comfyui_prefixes=IN_ORIGINAL_NAMES,
    comfyui_version="0.24",
    pipeline=pipeline_spec("Ideogram4Pipeline", "Ideogram4Transformer2DModel", _adapter_config),
)
