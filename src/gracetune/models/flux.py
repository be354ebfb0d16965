"""The family `flux`: FLUX.1 in diffusers' classes, for pictures.

Latents: C channels, H rows, W columns, eight pixels a cell; the transformer reads them by 2x2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import Tensor, nn

from gracetune.models.attention_processors import with_dense_gradients
from gracetune.models.diffusers_family import (
    EDGE,
    FolderFamily,
    check_class,
    digest_of_folder,
    locate,
    packed,
    read_index,
    read_part,
    read_scheduler,
    read_transformer,
    tokens_of,
    too_long,
    unpacked,
)
from gracetune.models.family import Sampled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Forward, Kind, Prediction, SampleRequest, Sound

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
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    folder = locate(section)
    index = read_index(folder)
    check_class(folder, index, ("FluxPipeline",), "flux")

    def encoder(name: str, cls: Any) -> nn.Module:
        read: nn.Module = read_part(
            folder,
            name,
            lambda part: cls.from_pretrained(part, dtype="auto", local_files_only=True).eval(),
        )
        return read.requires_grad_(False)

    def tokenizer(name: str) -> Any:
        return read_part(
            folder, name, lambda part: AutoTokenizer.from_pretrained(part, local_files_only=True)
        )

    vae = read_part(
        folder,
        "vae",
        lambda part: AutoencoderKL.from_pretrained(
            part, torch_dtype=torch.float32, local_files_only=True
        ),
    )
    transformer = read_transformer(
        FluxTransformer2DModel, section, folder, "transformer", section.transformer_file
    )
    with_dense_gradients(transformer)
    return Flux(
        folder=folder,
        transformer=transformer,
        vae=vae.eval().requires_grad_(False),
        text=[encoder("text_encoder", CLIPTextModel), encoder("text_encoder_2", T5EncoderModel)],
        tokenizers=(tokenizer("tokenizer"), tokenizer("tokenizer_2")),
        cell=2 ** (len(vae.config.block_out_channels) - 1),
    )


@dataclass(frozen=True)
class Flux(FolderFamily):
    """The loaded parts. See `Family` for what each member means."""

    folder: Path
    transformer: Any
    vae: Any
    text: list[nn.Module]
    """CLIP and T5, until they are released."""
    tokenizers: tuple[Any, Any]
    cell: int
    """Pixels along the edge of a latent's cell."""
    name: str = "flux"
    boundary: None = None
    kinds: tuple[Kind, ...] = ("image",)
    sound: Sound | None = None
    starts_from: Literal["text", "image"] = "text"
    takes_control: bool = False
    max_edge: int = MAX_EDGE
    prediction: Prediction = "flow"
    adapter_targets: tuple[str, ...] = TARGETS

    @property
    def pixel_step(self) -> int:
        """Whole patches."""
        return self.cell * EDGE

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

    def parts(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """All of it is noised."""
        return encoded, {}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Channels, rows and columns of cells."""
        width, height = shape
        return (self.vae.config.latent_channels, height // self.cell, width // self.cell)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """One a patch."""
        _, height, width = latent_shape
        return (height // EDGE) * (width // EDGE)

    def cut_captions(self, captions: Sequence[str]) -> list[str]:
        """By the tokenizer's count."""
        return too_long(self.tokenizers[1], captions, TEXT_LENGTH)

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """T5's tokens and CLIP's pooled vector."""
        clip, t5 = self.text
        device = next(t5.parameters()).device
        texts = []
        for caption in captions:
            short, long = (
                tokens_of(tokenizer, caption, length, pad=True)["input_ids"].to(device)
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
        s_B: Tensor,  # noqa: N803
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """One forward pass; the model counts levels from 0 to 1."""
        height, width = noisy.shape[2:]
        dtype, tokens = self.transformer.x_embedder.weight.dtype, conditions["tokens"]
        guided = self.transformer.config.guidance_embeds
        rows: Tensor = transformer(
            hidden_states=packed(noisy).to(dtype),
            timestep=s_B.to(dtype),
            guidance=torch.full_like(s_B, TRAINED_GUIDANCE) if guided else None,
            pooled_projections=conditions["pooled"].to(dtype),
            encoder_hidden_states=tokens.to(dtype),
            txt_ids=s_B.new_zeros(tokens.shape[1], 3),
            img_ids=_places(height // EDGE, width // EDGE, s_B),
            return_dict=False,
        )[0]
        return unpacked(rows, height, width)

    def sample(self, order: SampleRequest) -> list[Sampled]:
        """One picture a prompt; guidance is an input of the model, or nothing."""
        import diffusers

        pipeline = diffusers.FluxPipeline(
            scheduler=read_scheduler(self.folder),
            vae=self.vae_for(order),
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=self.transformer,
        )
        pipeline.set_progress_bar_config(disable=True)
        where = next(self.transformer.parameters())
        width, height = order.shape
        made = []
        for number, text in enumerate(order.texts):
            stacked = {key: t.to(where) for key, t in self.stack_text([text]).items()}
            picture = pipeline(
                prompt_embeds=stacked["tokens"],
                pooled_prompt_embeds=stacked["pooled"],
                width=width,
                height=height,
                num_inference_steps=order.steps,
                guidance_scale=order.guidance,
                generator=torch.Generator().manual_seed(order.seed + number),
                output_type="pt",
            ).images[0]
            made.append(Sampled("image", picture.float().cpu() * 2 - 1))
        return made


def _places(rows: int, columns: int, like: Tensor) -> Tensor:
    """The row and column of each patch; the first of three numbers is not used."""
    places = like.new_zeros(rows, columns, 3)
    places[..., 1] = torch.arange(rows, device=like.device)[:, None]
    places[..., 2] = torch.arange(columns, device=like.device)[None]
    return places.view(-1, 3)
