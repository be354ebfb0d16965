"""The model family `stable_audio`: Stable Audio Open, with diffusers' classes.

An audio clip is padded with silence to the model's fixed length; its real length in seconds is a
condition. Latents have C channels and L positions. `encode` appends one channel, which holds the
length in seconds.
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
    check_channels,
    check_pipeline_class,
    digest_of_folder,
    find_model_folder,
    pad_embeddings,
    padding_mask,
    read_model_index,
    read_pretrained,
    read_scheduler,
    read_text_encoder,
    read_transformer,
    read_vae,
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
    """Load the Stable Audio pipeline that `model.path` names."""
    from transformers import AutoTokenizer, T5EncoderModel

    folder = find_model_folder(section)
    check_pipeline_class(folder, read_model_index(folder), ("StableAudioPipeline",), "stable_audio")
    vae = read_vae(folder, AutoencoderOobleck)
    projection = read_pretrained(
        folder, "projection_model", StableAudioProjectionModel, torch_dtype=torch.float32
    )
    text_encoder = read_text_encoder(folder, "text_encoder", T5EncoderModel)
    transformer = read_transformer(
        StableAudioDiTModel, section, folder, "transformer", section.transformer_file
    )
    channels = vae.config.decoder_input_channels
    supported = "stable_audio trains Stable Audio Open"
    check_channels(folder, transformer, [channels], "stable_audio", supported)
    return StableAudio(
        folder=folder,
        transformer=transformer,
        vae=vae,
        projection=projection.eval().requires_grad_(False),
        text_encoders=[text_encoder],
        tokenizer=read_pretrained(folder, "tokenizer", AutoTokenizer),
        audio=AudioFormat(
            vae.config.audio_channels,
            vae.config.sampling_rate,
            int(transformer.config.sample_size) * vae.hop_length,
        ),
    )


@dataclass(frozen=True)
class StableAudio(DiffusersFamily):
    """A loaded Stable Audio Open model. `Family` documents the members."""

    folder: Path
    transformer: Any
    vae: Any
    projection: Any
    """Frozen model that turns the start and end of a clip, in seconds, into embeddings."""
    text_encoders: list[nn.Module]
    """The text encoder T5; empty once it is released."""
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
        """Return strings for cache keys: hashes of the encoders' files, and the padded length.

        Clips of any length are padded with silence to this length.
        """
        names = ("tokenizer", "text_encoder", "projection_model")
        text = "-".join(digest_of_folder(self.folder / name) for name in names)
        vae = digest_of_folder(self.folder / "vae")
        return {
            "latents": f"stable-audio-mode-{self.audio.max_length}-{vae}",
            "text": f"stable-audio-{text}",
        }

    def blocks(self) -> Sequence[nn.Module]:
        """Return the transformer's blocks in forward order."""
        return list(self.transformer.transformer_blocks)

    def to(self, device: torch.device) -> None:
        """Move the VAE, the projection and the text encoder, unless released, to a device."""
        for module in (self.vae, self.projection, *self.text_encoders):
            module.to(device)

    def release_text_encoder(self) -> None:
        """Free the text encoder T5. The projection stays, because every step needs it."""
        self.text_encoders.clear()

    def set_tiling(self, enabled: bool) -> bool:  # noqa: ARG002
        """Return False: the VAE of Stable Audio has no tiled encoding."""
        return False

    def encode(self, media: Tensor) -> Tensor:
        """Encode clips, padded with silence, to latents.

        A channel is appended that holds the length of the clip before padding, in seconds.
        """
        parameter, length = next(self.vae.parameters()), media.shape[-1]
        padded = functional.pad(media.to(parameter), (0, self.audio.max_length - length))
        with torch.no_grad():
            latents: Tensor = self.vae.encode(padded).latent_dist.mode()
        seconds = torch.full_like(latents[:, :1], length / self.audio.sample_rate)
        return torch.cat([latents, seconds], dim=1)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Split the last channel off: return the latents, and the clip's length as a condition."""
        return encoded[:, :-1], {"seconds": encoded[:, -1, 0]}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of an encoded clip, channels and positions: the same for any length."""
        assert len(shape) == 2, shape
        return (self.transformer.config.in_channels + 1, int(self.transformer.config.sample_size))

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of latent positions; each is one token."""
        return latent_shape[1]

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions with more tokens than the model reads."""
        return captions_longer_than(self.tokenizer, captions, self.tokenizer.model_max_length)

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """Encode captions to the hidden states of T5 (`tokens`); an empty caption has no tokens."""
        (encoder,) = self.text_encoders
        device = next(encoder.parameters()).device
        texts = []
        for caption in captions:
            tokens = tokenize(self.tokenizer, caption, self.tokenizer.model_max_length)
            with torch.no_grad():
                states = encoder(
                    tokens["input_ids"].to(device),
                    attention_mask=tokens["attention_mask"].to(device),
                )[0]
            texts.append({"tokens": states[0] if caption else states[0, :0]})
        return texts

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions, padded with zeros to the tokenizer's length; `mask` marks real tokens."""
        tokens, length = [text["tokens"] for text in texts], self.tokenizer.model_max_length
        return {"tokens": pad_embeddings(tokens, length), "mask": padding_mask(tokens, length)}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the predicted v. Stable Audio takes timesteps from 0 to 1, like sigmas.

        For an empty caption, all inputs of cross-attention are zero, even the embeddings of the
        clip's start and end. diffusers' pipeline does the same for classifier-free guidance.
        """
        dtype = self.transformer.preprocess_conv.weight.dtype
        seconds = conditions["seconds"].float()
        projected = self.projection(
            text_hidden_states=conditions["tokens"].float(),
            start_seconds=torch.zeros_like(seconds),
            end_seconds=seconds,
        )
        mask = conditions["mask"]
        tokens = projected.text_hidden_states * mask.unsqueeze(-1)
        start, end = projected.seconds_start_hidden_states, projected.seconds_end_hidden_states
        global_tokens = torch.cat([start, end], dim=2)
        cross_tokens = torch.cat([tokens, start, end], dim=1) * mask.any(dim=1)[:, None, None]
        rotary = get_1d_rotary_pos_embed(
            self.transformer.config.attention_head_dim // 2,
            noisy.shape[2] + global_tokens.shape[1],
            use_real=True,
            repeat_interleave_real=False,
        )
        v: Tensor = transformer(
            noisy.to(dtype),
            sigmas.to(dtype),
            encoder_hidden_states=cross_tokens.to(dtype),
            global_hidden_states=global_tokens.to(dtype),
            rotary_embedding=tuple(table.to(noisy.device) for table in rotary),
            return_dict=False,
        )[0]
        return v

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Generate one audio clip per prompt."""
        import diffusers

        pipeline = diffusers.StableAudioPipeline(
            vae=self.vae,
            text_encoder=None,
            projection_model=self.projection,
            tokenizer=None,
            transformer=self.transformer,
            scheduler=_read_sde_scheduler(self.folder),
        )
        pipeline.set_progress_bar_config(disable=True)
        device = next(self.transformer.parameters()).device
        _, length = request.shape
        samples = []
        for number, text in enumerate(request.texts):
            embeddings = self.stack_text([text])
            with warnings.catch_warnings():
                # The scheduler's last sigma is a rounding error below torchsde's first.
                warnings.filterwarnings("ignore", r"Should have t[ab]", UserWarning)
                waveform = pipeline(
                    prompt_embeds=embeddings["tokens"].to(device),
                    attention_mask=embeddings["mask"].to(device),
                    # Half a sample more, because the pipeline rounds down.
                    audio_end_in_s=(length + 0.5) / self.audio.sample_rate,
                    num_inference_steps=request.steps,
                    guidance_scale=request.guidance,
                    generator=torch.Generator().manual_seed(request.seed + number),
                    output_type="pt",
                ).audios[0]
            samples.append(GeneratedSample("audio", waveform.float().cpu(), self.audio.sample_rate))
        return samples


def _read_sde_scheduler(folder: Path) -> Any:
    try:
        return read_scheduler(folder)
    except ImportError as error:
        raise ConfigError(
            f"Sampling with the scheduler of {folder} needs the package torchsde: {error} "
            "Run `pip install gracetune[audio]`, or set validation.every: 0."
        ) from error
