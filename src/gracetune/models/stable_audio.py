"""The family `stable_audio`: Stable Audio Open in diffusers' classes, for sounds.

A clip is filled up with silence to the model's own length and the model is told how long the sound
is. Latents: C channels, L places. The last channel of what is encoded holds the seconds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from diffusers import AutoencoderOobleck, StableAudioDiTModel, StableAudioProjectionModel
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn
from torch.nn import functional

from gracetune.errors import ConfigError
from gracetune.models.diffusers_family import (
    DiffusersFamily,
    captions_longer_than,
    check_pipeline_class,
    digest_of_folder,
    find_model_folder,
    pad_embeddings,
    padding_mask,
    read_component,
    read_model_index,
    read_scheduler,
    read_transformer,
    tokenize,
)
from gracetune.models.family import AudioFormat, GeneratedSample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Forward, MediaKind, PredictionType, SampleRequest

TARGETS = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
    "ff.net.0.proj",
    "ff.net.2",
)


def load(section: ModelSection) -> StableAudio:
    """Read every part of the folder `model.path`."""
    from transformers import AutoTokenizer, T5EncoderModel

    folder = find_model_folder(section)
    check_pipeline_class(folder, read_model_index(folder), ("StableAudioPipeline",), "stable_audio")
    vae = read_component(
        folder,
        "vae",
        lambda part: AutoencoderOobleck.from_pretrained(
            part, torch_dtype=torch.float32, local_files_only=True
        ),
    )
    projection = read_component(
        folder,
        "projection_model",
        lambda part: StableAudioProjectionModel.from_pretrained(
            part, torch_dtype=torch.float32, local_files_only=True
        ),
    )
    encoder = read_component(
        folder,
        "text_encoder",
        lambda part: T5EncoderModel.from_pretrained(part, dtype="auto", local_files_only=True),
    )
    transformer = read_transformer(
        StableAudioDiTModel, section, folder, "transformer", section.transformer_file
    )
    return StableAudio(
        folder=folder,
        transformer=transformer,
        vae=vae.eval().requires_grad_(False),
        projection=projection.eval().requires_grad_(False),
        text_encoders=[encoder.eval().requires_grad_(False)],
        tokenizer=read_component(
            folder, "tokenizer", lambda p: AutoTokenizer.from_pretrained(p, local_files_only=True)
        ),
        audio=AudioFormat(
            vae.config.audio_channels,
            vae.config.sampling_rate,
            int(transformer.config.sample_size) * vae.hop_length,
        ),
    )


@dataclass(frozen=True)
class StableAudio(DiffusersFamily):
    """The loaded parts. See `Family` for what each member means."""

    folder: Path
    transformer: Any
    vae: Any
    projection: Any
    """What makes tokens of seconds; frozen."""
    text_encoders: list[nn.Module]
    """The text encoder, until it is released."""
    tokenizer: Any
    audio: AudioFormat
    name: str = "stable_audio"
    boundary: None = None
    kinds: tuple[MediaKind, ...] = ("audio",)
    starts_from: Literal["text", "image"] = "text"
    takes_control: bool = False
    pixel_step: int = 1
    max_edge: int = 1
    prediction: PredictionType = "v"
    adapter_targets: tuple[str, ...] = TARGETS

    def identity(self) -> dict[str, str]:
        """The encoders' own files; and a clip is encoded with the silence after it."""
        names = ("tokenizer", "text_encoder", "projection_model")
        text = "-".join(digest_of_folder(self.folder / name) for name in names)
        vae = digest_of_folder(self.folder / "vae")
        return {
            "latents": f"stable-audio-mode-{self.audio.max_length}-{vae}",
            "text": f"stable-audio-{text}",
        }

    def blocks(self) -> Sequence[nn.Module]:
        """The transformer's."""
        return list(self.transformer.transformer_blocks)

    def to(self, device: torch.device) -> None:
        """The VAE, the seconds' projection, and the text encoder as long as it is there."""
        for part in (self.vae, self.projection, *self.text_encoders):
            part.to(device)

    def release_text_encoder(self) -> None:
        """The projection stays: seconds are told in every step."""
        self.text_encoders.clear()

    def set_tiling(self, enabled: bool) -> bool:  # noqa: ARG002
        """Sounds are encoded whole."""
        return False

    def encode(self, media: Tensor) -> Tensor:
        """Latents of the clip and the silence after it; then one channel of its seconds."""
        where, length = next(self.vae.parameters()), media.shape[-1]
        filled = functional.pad(media.to(where), (0, self.audio.max_length - length))
        with torch.no_grad():
            latents: Tensor = self.vae.encode(filled).latent_dist.mode()
        seconds = torch.full_like(latents[:, :1], length / self.audio.sample_rate)
        return torch.cat([latents, seconds], dim=1)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sound; its length is told."""
        return encoded[:, :-1], {"seconds": encoded[:, -1, 0]}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """The same for clips of any length."""
        assert len(shape) == 2, shape
        return (self.transformer.config.in_channels + 1, int(self.transformer.config.sample_size))

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """One a place."""
        return latent_shape[1]

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """By the tokenizer's count."""
        return captions_longer_than(self.tokenizer, captions, self.tokenizer.model_max_length)

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """T5's states. No caption is no token at all: what guidance compares with."""
        (encoder,) = self.text_encoders
        device = next(encoder.parameters()).device
        texts = []
        for caption in captions:
            found = tokenize(self.tokenizer, caption, self.tokenizer.model_max_length)
            with torch.no_grad():
                states = encoder(
                    found["input_ids"].to(device), attention_mask=found["attention_mask"].to(device)
                )[0]
            texts.append({"tokens": states[0] if caption else states[0, :0]})
        return texts

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Zeros up to the tokenizer's length, as the model was trained."""
        tokens, length = [text["tokens"] for text in texts], self.tokenizer.model_max_length
        return {"tokens": pad_embeddings(tokens, length), "mask": padding_mask(tokens, length)}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """One forward pass; the angle of the path is the model's own timestep.

        Without a caption attention is told nothing, not even the seconds, as in guidance.
        """
        dtype = self.transformer.preprocess_conv.weight.dtype
        seconds = conditions["seconds"].float()
        told = self.projection(
            text_hidden_states=conditions["tokens"].float(),
            start_seconds=torch.zeros_like(seconds),
            end_seconds=seconds,
        )
        mask = conditions["mask"]
        tokens = told.text_hidden_states * mask.unsqueeze(-1)
        start, end = told.seconds_start_hidden_states, told.seconds_end_hidden_states
        global_tokens = torch.cat([start, end], dim=2)
        attended = torch.cat([tokens, start, end], dim=1) * mask.any(dim=1)[:, None, None]
        rotary = get_1d_rotary_pos_embed(
            self.transformer.config.attention_head_dim // 2,
            noisy.shape[2] + global_tokens.shape[1],
            use_real=True,
            repeat_interleave_real=False,
        )
        v: Tensor = transformer(
            noisy.to(dtype),
            sigmas.to(dtype),
            encoder_hidden_states=attended.to(dtype),
            global_hidden_states=global_tokens.to(dtype),
            rotary_embedding=tuple(table.to(noisy.device) for table in rotary),
            return_dict=False,
        )[0]
        return v

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """One sound a prompt."""
        import diffusers

        pipeline = diffusers.StableAudioPipeline(
            vae=self.vae,
            text_encoder=None,
            projection_model=self.projection,
            tokenizer=None,
            transformer=self.transformer,
            scheduler=_scheduler(self.folder),
        )
        pipeline.set_progress_bar_config(disable=True)
        device = next(self.transformer.parameters()).device
        _, length = request.shape
        made = []
        for number, text in enumerate(request.texts):
            stacked = self.stack_text([text])
            with warnings.catch_warnings():
                # the scheduler's last level is a rounding below the first of torchsde's
                warnings.filterwarnings("ignore", r"Should have t[ab]", UserWarning)
                waves = pipeline(
                    prompt_embeds=stacked["tokens"].to(device),
                    attention_mask=stacked["mask"].to(device),
                    # half a sample more, for the pipeline rounds down
                    audio_end_in_s=(length + 0.5) / self.audio.sample_rate,
                    num_inference_steps=request.steps,
                    guidance_scale=request.guidance,
                    generator=torch.Generator().manual_seed(request.seed + number),
                    output_type="pt",
                ).audios[0]
            made.append(GeneratedSample("audio", waves.float().cpu(), self.audio.sample_rate))
        return made


def _scheduler(folder: Path) -> Any:
    try:
        return read_scheduler(folder)
    except ImportError as error:
        raise ConfigError(
            f"sampling with the scheduler of {folder} needs the package torchsde: {error} "
            "Run `pip install gracetune[audio]`, or set validation.every: 0."
        ) from error
