"""The model family `flux`: FLUX.1 for images, with diffusers' classes.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. The transformer reads
patches of 2x2 cells as tokens. diffusers is imported inside functions because the adapter commands
read `KEY_TABLE` from here and should not wait seconds for that import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gracetune.adapters.files.keys import FusedProjection, KeyTable, PipelineSpec
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    captions_longer_than,
    check_channels,
    check_pipeline_class,
    digest_of_folder,
    find_model_folder,
    num_patches,
    pack_latents,
    packed_shape,
    read_model_index,
    read_pretrained,
    read_scheduler,
    read_text_encoder,
    read_transformer,
    read_vae,
    tokenize,
    unpack_latents,
)
from gracetune.models.family import PROBE_JOINT_ATTENTION, GeneratedSample, PlannerShapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gracetune.adapters.files.check_loading import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import (
        AudioFormat,
        Config,
        EncodedShape,
        Forward,
        MediaKind,
        PredictionType,
        SampleRequest,
        SampleShape,
    )

SUPPORTED_MODELS = "flux trains FLUX.1 dev and schnell, not Fill, Control, Redux or Kontext"
TEXT_LENGTH = 512
"""Number of tokens of every caption. T5 runs without a mask, so padding is embedded as well."""
TRAINED_GUIDANCE = 1.0
"""Guidance value that training passes to models with a guidance input, such as FLUX.1-dev."""
MAX_EDGE = 4096
TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "single_transformer_blocks.*.proj_mlp",
    "single_transformer_blocks.*.proj_out",
)


def load(section: ModelSection) -> Flux:
    """Load the FLUX.1 pipeline that `model.path` names."""
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    from gracetune.models.attention_processors import make_attention_grads_contiguous

    folder = find_model_folder(section)
    check_pipeline_class(folder, read_model_index(folder), ("FluxPipeline",), "flux")
    vae = read_vae(folder, AutoencoderKL)
    transformer = read_transformer(
        FluxTransformer2DModel, section, folder, "transformer", section.transformer_file
    )
    channels = vae.config.latent_channels * PATCH_SIZE**2
    check_channels(folder, transformer, [channels], "flux", SUPPORTED_MODELS)
    make_attention_grads_contiguous(transformer)
    return Flux(
        folder=folder,
        transformer=transformer,
        vae=vae,
        text_encoders=[
            read_text_encoder(folder, "text_encoder", CLIPTextModel),
            read_text_encoder(folder, "text_encoder_2", T5EncoderModel),
        ],
        tokenizers=(
            read_pretrained(folder, "tokenizer", AutoTokenizer),
            read_pretrained(folder, "tokenizer_2", AutoTokenizer),
        ),
        vae_scale=2 ** (len(vae.config.block_out_channels) - 1),
    )


@dataclass(frozen=True)
class Flux(DiffusersFamily):
    """A loaded FLUX.1 model. `Family` documents the members."""

    folder: Path
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]
    """The text encoders CLIP and T5; empty once they are released."""
    tokenizers: tuple[Any, Any]
    """The tokenizers of CLIP and T5."""
    vae_scale: int
    """Pixels along each edge of a latent cell."""
    name: str = "flux"
    boundary: None = None
    kinds: tuple[MediaKind, ...] = ("image",)
    audio: AudioFormat | None = None
    starts_from: Literal["text", "image"] = "text"
    takes_control: bool = False
    max_edge: int = MAX_EDGE
    prediction: PredictionType = "flow"
    adapter_targets: tuple[str, ...] = TARGETS

    @property
    def pixel_step(self) -> int:
        """Pixels along each edge of a patch: width and height must be multiples of it."""
        return self.vae_scale * PATCH_SIZE

    def identity(self) -> dict[str, str]:
        """Return strings for cache keys, made of hashes of the encoders' files."""
        names = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
        text = "-".join(digest_of_folder(self.folder / name) for name in names)
        return {
            "latents": f"flux-mode-{digest_of_folder(self.folder / 'vae')}",
            "text": f"flux-{TEXT_LENGTH}-{text}",
        }

    def blocks(self) -> Sequence[nn.Module]:
        """Return the double-stream blocks, then the single-stream blocks."""
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]

    def encode(self, media: Tensor) -> Tensor:
        """Encode images to latents: the mode of the VAE's distribution, shifted and scaled."""
        parameter, config = next(self.vae.parameters()), self.vae.config
        with torch.no_grad():
            raw: Tensor = self.vae.encode(media.to(parameter)).latent_dist.mode()
        return (raw - float(config.shift_factor)) * float(config.scaling_factor)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the encoded images unchanged, and an empty dict: there are no image conditions."""
        return encoded, {}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of an image's latents: channels, rows and columns."""
        width, height = shape
        return (
            self.vae.config.latent_channels,
            height // self.vae_scale,
            width // self.vae_scale,
        )

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of patches; each is one token."""
        return num_patches(latent_shape)

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions that have more tokens than T5 reads, and will be cut."""
        return captions_longer_than(self.tokenizers[1], captions, TEXT_LENGTH)

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """Encode captions: T5's token embeddings (`tokens`), CLIP's pooled embedding (`pooled`)."""
        clip, t5 = self.text_encoders
        clip_tokenizer, t5_tokenizer = self.tokenizers
        device = next(t5.parameters()).device
        texts = []
        for caption in captions:
            clip_ids, t5_ids = (
                tokenize(tokenizer, caption, length, pad=True)["input_ids"].to(device)
                for tokenizer, length in (
                    (clip_tokenizer, clip_tokenizer.model_max_length),
                    (t5_tokenizer, TEXT_LENGTH),
                )
            )
            with torch.no_grad():
                pooled, tokens = clip(clip_ids).pooler_output[0], t5(t5_ids)[0][0]
            texts.append({"tokens": tokens, "pooled": pooled})
        return texts

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the embeddings of captions into a batch; all have the same length."""
        return {key: torch.stack([text[key] for text in texts]) for key in ("tokens", "pooled")}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the predicted velocity. FLUX.1 takes timesteps from 0 to 1, like sigmas."""
        height, width = noisy.shape[2:]
        dtype, tokens = self.transformer.x_embedder.weight.dtype, conditions["tokens"]
        takes_guidance = self.transformer.config.guidance_embeds
        rows: Tensor = transformer(
            hidden_states=pack_latents(noisy).to(dtype),
            timestep=sigmas.to(dtype),
            guidance=torch.full_like(sigmas, TRAINED_GUIDANCE) if takes_guidance else None,
            pooled_projections=conditions["pooled"].to(dtype),
            encoder_hidden_states=tokens.to(dtype),
            txt_ids=sigmas.new_zeros(tokens.shape[1], 3),
            img_ids=_patch_positions(height // PATCH_SIZE, width // PATCH_SIZE, sigmas),
            return_dict=False,
        )[0]
        return unpack_latents(rows, height, width)

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Generate one image per prompt. Models without a guidance input ignore `guidance`."""
        import diffusers

        pipeline = diffusers.FluxPipeline(
            scheduler=read_scheduler(self.folder),
            vae=self.sampling_vae(request),
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=self.transformer,
        )
        pipeline.set_progress_bar_config(disable=True)
        parameter = next(self.transformer.parameters())
        width, height = request.shape
        samples = []
        for number, text in enumerate(request.texts):
            embeddings = {key: t.to(parameter) for key, t in self.stack_text([text]).items()}
            image = pipeline(
                prompt_embeds=embeddings["tokens"],
                pooled_prompt_embeds=embeddings["pooled"],
                width=width,
                height=height,
                num_inference_steps=request.steps,
                guidance_scale=request.guidance,
                generator=torch.Generator().manual_seed(request.seed + number),
                output_type="pt",
            ).images[0]
            samples.append(GeneratedSample("image", image.float().cpu() * 2 - 1))
        return samples


def _patch_positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return the position of every patch, as (0, row, column), for RoPE."""
    positions = like.new_zeros(rows, columns, 3)
    positions[..., 1] = torch.arange(rows, device=like.device)[:, None]
    positions[..., 2] = torch.arange(columns, device=like.device)[None]
    return positions.view(-1, 3)


class FluxShapes(PlannerShapes):
    """Describes the transformer of FLUX.1 to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of the latents and of the padded T5 embedding of a sample."""
        return packed_shape(config, sample, TEXT_LENGTH)

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised tensors like those that `predict` passes to the transformer."""
        tokens = num_patches(encoded.latent_shape)
        pooled_width = config["pooled_projection_dim"]
        inputs = {
            "hidden_states": torch.empty(batch_size, tokens, config["in_channels"], dtype=dtype),
            "encoder_hidden_states": torch.empty(batch_size, *encoded.text_shape, dtype=dtype),
            "pooled_projections": torch.empty(batch_size, pooled_width, dtype=dtype),
            "timestep": torch.empty(batch_size, dtype=dtype),
            "img_ids": torch.empty(tokens, 3),
            "txt_ids": torch.empty(encoded.text_shape[0], 3),
        }
        if config["guidance_embeds"]:
            inputs["guidance"] = torch.empty(batch_size, dtype=dtype)
        return inputs


PLANNER_SHAPES = FluxShapes(
    class_name="FluxTransformer2DModel",
    published_config={"guidance_embeds": True},
    published_name="the published FLUX.1-dev, 12 B",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    targets=TARGETS,
    probe_config={
        **PROBE_JOINT_ATTENTION,
        "num_layers": 4,
        "num_single_layers": 8,
        "pooled_projection_dim": 16,
    },
)


# Key names in other tools. The original checkpoint fuses query, key and value (and, in single
# blocks, the MLP) into one projection; diffusers keeps them separate.

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
FUSED_PROJECTIONS = (
    FusedProjection(
        f"{DOUBLE}.attn.to_qkv",
        ((f"{DOUBLE}.attn.to_q", 1), (f"{DOUBLE}.attn.to_k", 1), (f"{DOUBLE}.attn.to_v", 1)),
    ),
    FusedProjection(
        f"{DOUBLE}.attn.to_added_qkv",
        (
            (f"{DOUBLE}.attn.add_q_proj", 1),
            (f"{DOUBLE}.attn.add_k_proj", 1),
            (f"{DOUBLE}.attn.add_v_proj", 1),
        ),
    ),
    FusedProjection(
        f"{SINGLE}.attn.to_qkv_mlp_proj",
        (
            (f"{SINGLE}.attn.to_q", 1),
            (f"{SINGLE}.attn.to_k", 1),
            (f"{SINGLE}.attn.to_v", 1),
            (f"{SINGLE}.proj_mlp", 4),
        ),
    ),
)
"""Projections that are one module in the original FLUX.1, such as qkv, and their parts, with the
names that diffusers gives both."""


def _adapter_pipeline(transformer: Callable[[Any], Any]) -> Any:
    """Return a pipeline without weights, to test whether diffusers loads an adapter file."""
    from diffusers import FluxPipeline, FluxTransformer2DModel

    return FluxPipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer(FluxTransformer2DModel),
    )


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    double, single = "transformer_blocks", "single_transformer_blocks"
    names = [f"{double}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{double}.attn.add_{x}_proj" for x in "qkv"]
    names += [f"{single}.attn.to_{x}" for x in "qkv"] + [f"{single}.proj_out", "x_embedder"]
    return {
        **shapes.heads(shapes.size(0, 3072, *names)),
        "num_layers": shapes.num_blocks(double),
        "num_single_layers": shapes.num_blocks(single),
        "joint_attention_dim": shapes.size(1, 4096, "context_embedder"),
        "pooled_projection_dim": shapes.size(1, 768, "time_text_embed.text_embedder.linear_1"),
        "in_channels": shapes.size(1, 64, "x_embedder"),
        "guidance_embeds": True,
    }


KEY_TABLE = KeyTable(
    family="flux",
    aliases=("flux1",),
    rows=(
        ("double_blocks.{}.img_attn.qkv", f"{DOUBLE}.attn.to_qkv"),
        ("double_blocks.{}.txt_attn.qkv", f"{DOUBLE}.attn.to_added_qkv"),
        ("double_blocks.{}.img_attn.proj", f"{DOUBLE}.attn.to_out.0"),
        ("double_blocks.{}.txt_attn.proj", f"{DOUBLE}.attn.to_add_out"),
        ("double_blocks.{}.img_mlp.0", f"{DOUBLE}.ff.net.0.proj"),
        ("double_blocks.{}.img_mlp.2", f"{DOUBLE}.ff.net.2"),
        ("double_blocks.{}.txt_mlp.0", f"{DOUBLE}.ff_context.net.0.proj"),
        ("double_blocks.{}.txt_mlp.2", f"{DOUBLE}.ff_context.net.2"),
        ("double_blocks.{}.img_mod.lin", f"{DOUBLE}.norm1.linear"),
        ("double_blocks.{}.txt_mod.lin", f"{DOUBLE}.norm1_context.linear"),
        ("single_blocks.{}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
        ("single_blocks.{}.linear2", f"{SINGLE}.proj_out"),
        ("single_blocks.{}.modulation.lin", f"{SINGLE}.norm.linear"),
        ("img_in", "x_embedder"),
        ("txt_in", "context_embedder"),
        ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
        ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
        ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
        ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
        ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ),
    unfused=tuple(part for fused in FUSED_PROJECTIONS for part, _ in fused.parts),
    fused=FUSED_PROJECTIONS,
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
    other_fused=(
        FusedProjection(
            f"{SINGLE}.attn.to_qkv", tuple((f"{SINGLE}.attn.to_{x}", 1) for x in "qkv")
        ),
    ),
    header_words=("flux-1", "flux1", "lora_flux"),
    row_ratios=(
        (f"{DOUBLE}.ff.net.0.proj", 4),
        (f"{DOUBLE}.ff_context.net.0.proj", 4),
        (f"{SINGLE}.attn.to_qkv_mlp_proj", 7),
    ),
    widths=(3072,),
    preferred_over=("chroma", "flux2"),
    swapped_halves=frozenset({"norm_out.linear"}),
    block_linears=(
        *(part for fused in FUSED_PROJECTIONS for part, _ in fused.parts),
        f"{DOUBLE}.attn.to_out.0",
        f"{DOUBLE}.attn.to_add_out",
        f"{DOUBLE}.ff.net.0.proj",
        f"{DOUBLE}.ff.net.2",
        f"{DOUBLE}.ff_context.net.0.proj",
        f"{DOUBLE}.ff_context.net.2",
        f"{SINGLE}.proj_out",
    ),
    max_blocks=(("transformer_blocks", 19), ("single_transformer_blocks", 38)),
    comfyui_prefixes=(
        ("diffusion_model.", ".", "original"),
        ("lora_unet_", "_", "original"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
        ("lora_transformer_", "_", "diffusers"),
    ),
    pipeline=PipelineSpec(_adapter_pipeline, _adapter_config),
)
