"""The family `flux`: FLUX.1 in diffusers' classes, for pictures.

Latents: C channels, H rows, W columns, eight pixels a cell; the transformer reads them by 2x2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gracetune.adapters.files.keys import FusedProjection, KeyTable
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    captions_longer_than,
    check_pipeline_class,
    digest_of_folder,
    find_model_folder,
    num_patches,
    pack_latents,
    packed_shape,
    read_component,
    read_model_index,
    read_scheduler,
    read_transformer,
    tokenize,
    unpack_latents,
)
from gracetune.models.family import PROBE_JOINT_ATTENTION, GeneratedSample, PlannerShapes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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

TEXT_LENGTH = 512
"""T5 is asked without a mask: what it makes of the padding is a part of the caption."""
TRAINED_GUIDANCE = 1.0
"""What a model with a guidance input is told while it is trained."""
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
    """Read every part of the folder `model.path`."""
    # Imported here: key tables are read without loading diffusers, which takes seconds.
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    from gracetune.models.attention_processors import make_attention_grads_contiguous

    folder = find_model_folder(section)
    index = read_model_index(folder)
    check_pipeline_class(folder, index, ("FluxPipeline",), "flux")

    def encoder(name: str, cls: Any) -> nn.Module:
        read: nn.Module = read_component(
            folder,
            name,
            lambda part: cls.from_pretrained(part, dtype="auto", local_files_only=True).eval(),
        )
        return read.requires_grad_(False)

    def tokenizer(name: str) -> Any:
        return read_component(
            folder, name, lambda part: AutoTokenizer.from_pretrained(part, local_files_only=True)
        )

    vae = read_component(
        folder,
        "vae",
        lambda part: AutoencoderKL.from_pretrained(
            part, torch_dtype=torch.float32, local_files_only=True
        ),
    )
    transformer = read_transformer(
        FluxTransformer2DModel, section, folder, "transformer", section.transformer_file
    )
    make_attention_grads_contiguous(transformer)
    return Flux(
        folder=folder,
        transformer=transformer,
        vae=vae.eval().requires_grad_(False),
        text_encoders=[
            encoder("text_encoder", CLIPTextModel),
            encoder("text_encoder_2", T5EncoderModel),
        ],
        tokenizers=(tokenizer("tokenizer"), tokenizer("tokenizer_2")),
        vae_scale=2 ** (len(vae.config.block_out_channels) - 1),
    )


@dataclass(frozen=True)
class Flux(DiffusersFamily):
    """The loaded parts. See `Family` for what each member means."""

    folder: Path
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]
    """CLIP and T5, until they are released."""
    tokenizers: tuple[Any, Any]
    vae_scale: int
    """Pixels along the edge of a latent's cell."""
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
        """Whole patches."""
        return self.vae_scale * PATCH_SIZE

    def identity(self) -> dict[str, str]:
        """The encoders' own files."""
        names = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
        text = "-".join(digest_of_folder(self.folder / name) for name in names)
        return {
            "latents": f"flux-mode-{digest_of_folder(self.folder / 'vae')}",
            "text": f"flux-{TEXT_LENGTH}-{text}",
        }

    def blocks(self) -> Sequence[nn.Module]:
        """The double blocks, then the single ones."""
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]

    def encode(self, media: Tensor) -> Tensor:
        """Shifted and scaled latents."""
        where, config = next(self.vae.parameters()), self.vae.config
        with torch.no_grad():
            raw: Tensor = self.vae.encode(media.to(where)).latent_dist.mode()
        return (raw - float(config.shift_factor)) * float(config.scaling_factor)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """All of it is noised."""
        return encoded, {}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Channels, rows and columns of cells."""
        width, height = shape
        return (self.vae.config.latent_channels, height // self.vae_scale, width // self.vae_scale)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """One a patch."""
        return num_patches(latent_shape)

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """By the tokenizer's count."""
        return captions_longer_than(self.tokenizers[1], captions, TEXT_LENGTH)

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """T5's tokens and CLIP's pooled vector."""
        clip, t5 = self.text_encoders
        device = next(t5.parameters()).device
        texts = []
        for caption in captions:
            short, long = (
                tokenize(tokenizer, caption, length, pad=True)["input_ids"].to(device)
                for tokenizer, length in zip(
                    self.tokenizers, (self.tokenizers[0].model_max_length, TEXT_LENGTH), strict=True
                )
            )
            with torch.no_grad():
                pooled, tokens = clip(short).pooler_output[0], t5(long)[0][0]
            texts.append({"tokens": tokens, "pooled": pooled})
        return texts

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """All have one length."""
        return {key: torch.stack([text[key] for text in texts]) for key in ("tokens", "pooled")}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """One forward pass; the model counts levels from 0 to 1."""
        height, width = noisy.shape[2:]
        dtype, tokens = self.transformer.x_embedder.weight.dtype, conditions["tokens"]
        guided = self.transformer.config.guidance_embeds
        rows: Tensor = transformer(
            hidden_states=pack_latents(noisy).to(dtype),
            timestep=sigmas.to(dtype),
            guidance=torch.full_like(sigmas, TRAINED_GUIDANCE) if guided else None,
            pooled_projections=conditions["pooled"].to(dtype),
            encoder_hidden_states=tokens.to(dtype),
            txt_ids=sigmas.new_zeros(tokens.shape[1], 3),
            img_ids=_places(height // PATCH_SIZE, width // PATCH_SIZE, sigmas),
            return_dict=False,
        )[0]
        return unpack_latents(rows, height, width)

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """One picture a prompt; guidance is an input of the model, or nothing."""
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
        where = next(self.transformer.parameters())
        width, height = request.shape
        made = []
        for number, text in enumerate(request.texts):
            stacked = {key: t.to(where) for key, t in self.stack_text([text]).items()}
            picture = pipeline(
                prompt_embeds=stacked["tokens"],
                pooled_prompt_embeds=stacked["pooled"],
                width=width,
                height=height,
                num_inference_steps=request.steps,
                guidance_scale=request.guidance,
                generator=torch.Generator().manual_seed(request.seed + number),
                output_type="pt",
            ).images[0]
            made.append(GeneratedSample("image", picture.float().cpu() * 2 - 1))
        return made


def _places(rows: int, columns: int, like: Tensor) -> Tensor:
    """The row and column of each patch; the first of three numbers is not used."""
    places = like.new_zeros(rows, columns, 3)
    places[..., 1] = torch.arange(rows, device=like.device)[:, None]
    places[..., 2] = torch.arange(columns, device=like.device)[None]
    return places.view(-1, 3)


# Key names of FLUX.1. The original checkpoint fuses query, key and value (and, in single blocks, the
# MLP) into one projection; diffusers keeps them separate.

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
"""The wholes go by the names that diffusers gives to fused projections elsewhere."""

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
)


class FluxShapes(PlannerShapes):
    """The transformer of FLUX.1 for the planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return packed latents and the padded T5 embeddings."""
        return packed_shape(config, sample, TEXT_LENGTH)

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the tensors that `Flux.predict` passes."""
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
