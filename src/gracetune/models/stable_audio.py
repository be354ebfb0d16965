"""The model family `stable_audio`: Stable Audio Open, with diffusers' classes.

An audio clip is padded with silence to the model's fixed length; its real length in seconds is a
condition. Latents have C channels and L positions. `encode` appends one channel, which holds the
length in seconds.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch.nn import functional

from gracetune.errors import ConfigError
from gracetune.models.diffusers_family import (
    DiffusersFamily,
    pad_embeddings,
    padding_mask,
    tokenize,
)
from gracetune.models.family import AudioFormat, GeneratedSample, PlannerShapes
from gracetune.models.pipeline_folder import (
    PipelineParts,
    digest_of_folder,
    read_parts,
    read_scheduler,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Forward, SampleRequest

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


TRANSFORMER = PlannerShapes(
    class_name="StableAudioDiTModel",
    published_config={},
    published_name="the published Stable Audio Open",
    blocks=("transformer_blocks",),
    targets=TARGETS,
    input_layer="preprocess_conv",
    probe_config={},
    supported_models="stable_audio trains Stable Audio Open",
)
"""Facts about the transformer. Those for the memory planner, which knows images, are missing."""


def load(section: ModelSection) -> StableAudio:
    """Load the Stable Audio pipeline that `model.path` names."""
    return StableAudio(
        read_parts(section, TRANSFORMER, ("StableAudioPipeline",), "AutoencoderOobleck")
    )


class StableAudio(DiffusersFamily):
    """A loaded Stable Audio Open model. `Family` documents the members."""

    name = "stable_audio"
    shapes = TRANSFORMER
    kinds = ("audio",)
    audio: AudioFormat
    pixel_step = 1
    max_edge = 1
    prediction = "v"

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        config = self.vae.config
        self.audio = AudioFormat(
            config.audio_channels,
            config.sampling_rate,
            int(self.transformer.config.sample_size) * self.vae.hop_length,
        )
        self.projection = parts.components["projection_model"]
        """Frozen model that turns the start and end of a clip, in seconds, into embeddings."""
        self.text_length = self.tokenizer.model_max_length

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents."""
        return int(self.vae.config.decoder_input_channels)

    def identity(self) -> dict[str, str]:
        """Return strings for cache keys: hashes of the encoders' files, and the padded length.

        Clips of any length are padded with silence to this length.
        """
        vae = digest_of_folder(self.folder / "vae")
        return {
            "latents": f"stable-audio-mode-{self.audio.max_length}-{vae}",
            "text": f"stable-audio-{self.text_digest('projection_model')}",
        }

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

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption to the hidden states of T5 (`tokens`); an empty one has no tokens."""
        (encoder,) = self.text_encoders
        tokens = tokenize(self.tokenizer, caption, self.text_length)
        device = self.encoder_device()
        states = encoder(
            tokens["input_ids"].to(device), attention_mask=tokens["attention_mask"].to(device)
        )[0]
        return {"tokens": states[0] if caption else states[0, :0]}

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions, padded with zeros to the tokenizer's length; `mask` marks real tokens."""
        tokens, length = [text["tokens"] for text in texts], self.text_length
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
        dtype = self.dtype
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
        pipeline = self.parts.pipeline(
            **dict.fromkeys(self.parts.encoders), scheduler=_read_sde_scheduler(self.folder)
        )
        device = next(self.transformer.parameters()).device
        _, length = request.shape
        samples = []
        for number, text in enumerate(request.texts):
            embeddings = self.stack_text([text])
            negative = {}
            if request.has_negative:
                stacked = self.stack_text([request.empty_text])
                negative = {
                    "negative_prompt_embeds": stacked["tokens"].to(device),
                    "negative_attention_mask": stacked["mask"].to(device),
                }
            with warnings.catch_warnings():
                # The scheduler's last sigma is a rounding error below torchsde's first.
                warnings.filterwarnings("ignore", r"Should have t[ab]", UserWarning)
                waveform = pipeline(
                    prompt_embeds=embeddings["tokens"].to(device),
                    attention_mask=embeddings["mask"].to(device),
                    **negative,
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
