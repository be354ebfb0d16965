"""The family `wan22`: Wan 2.2 in diffusers' classes, for pictures and videos.

T2V-A14B and I2V-A14B have two experts; TI2V-5B has one transformer for both tasks. Which one a
folder holds is read from the folder. Latents: C channels, F frames, H rows, W columns; an image is
a video of one frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gracetune.adapters.files.keys import KeyTable
from gracetune.errors import ModelError
from gracetune.models.diffusers_family import (
    DiffusersFamily,
    captions_longer_than,
    check_pipeline_class,
    clean_caption,
    copy_other_components,
    digest_of_folder,
    digest_of_weights,
    find_model_folder,
    pad_embeddings,
    read_component,
    read_model_index,
    read_scheduler,
    read_transformer,
    tokenize,
)
from gracetune.models.family import (
    PROBE_ATTENTION,
    EncodedShape,
    Experts,
    GeneratedSample,
    PlannerShapes,
    transformers_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import (
        AudioFormat,
        Config,
        Forward,
        MediaKind,
        PredictionType,
        SampleRequest,
        SampleShape,
    )

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
TEXT_LENGTH = 512
"""Captions are cut and padded to this many tokens; the model attends to the zeros as well."""
NUM_TIMESTEPS = 1000
FRAME_RATE = 16.0
DEFAULT_BOUNDARIES = {"text": 0.875, "image": 0.9}
"""Where the published models change experts, for folders that do not say."""
TRANSFORMER_FOLDERS = {"": "transformer", "high": "transformer", "low": "transformer_2"}
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TARGETS = (
    *(f"attn1.{name}" for name in ATTENTION),
    *(f"attn2.{name}" for name in ATTENTION),
    "ffn.net.0.proj",
    "ffn.net.2",
)


def load(section: ModelSection) -> Wan22:
    """Read every part of the folder `model.path`."""
    # Imported here: key tables are read without loading diffusers, which takes seconds.
    from diffusers import WanTransformer3DModel

    folder = find_model_folder(section)
    index = read_model_index(folder)
    check_pipeline_class(folder, index, PIPELINES, "wan22")
    high = read_transformer(
        WanTransformer3DModel, section, folder, "transformer", section.transformer_file
    )
    low = None
    if index.get("transformer_2", (None, None))[1] is not None:
        low = read_transformer(
            WanTransformer3DModel, section, folder, "transformer_2", section.transformer_2_file
        )
    elif section.transformer_2_file is not None:
        raise ModelError(
            f"model.transformer_2_file is {section.transformer_2_file!r}, but {folder} has one "
            "transformer. Leave it out, or name a folder with two."
        )
    return assemble(section, folder, index, high, low)


def assemble(
    section: ModelSection, folder: Path, index: Mapping[str, Any], high: Any, low: Any | None
) -> Wan22:
    """The folder's other parts around transformers that are there; no `low`: there is one."""
    from diffusers import AutoencoderKLWan
    from transformers import AutoTokenizer, UMT5EncoderModel

    vae = read_component(
        folder,
        "vae",
        lambda part: AutoencoderKLWan.from_pretrained(
            part, torch_dtype=torch.float32, local_files_only=True
        ),
    )
    task = _task(section, high, vae, index)
    edge = int(vae.config.scale_factor_spatial * high.config.patch_size[1])
    return Wan22(
        folder=folder,
        transformer=high if low is None else Experts(high, low),
        vae=vae.eval().requires_grad_(False),
        text_encoders=[
            read_component(
                folder,
                "text_encoder",
                lambda part: UMT5EncoderModel.from_pretrained(
                    part, dtype="auto", local_files_only=True
                ).eval(),
            ).requires_grad_(False)
        ],
        tokenizer=read_component(
            folder, "tokenizer", lambda p: AutoTokenizer.from_pretrained(p, local_files_only=True)
        ),
        boundary=None if low is None else index.get("boundary_ratio") or DEFAULT_BOUNDARIES[task],
        starts_from=task,
        # A picture that is given whole leaves nothing to learn.
        kinds=("video",) if task == "image" else ("image", "video"),
        expand_timesteps=bool(index.get("expand_timesteps")),
        pixel_step=edge,
        max_edge=high.config.rope_max_seq_len * edge,
    )


def _task(
    section: ModelSection, transformer: Any, vae: Any, index: Mapping[str, Any]
) -> Literal["text", "image"]:
    """More input channels than latents have: a first frame comes with them."""
    own: Literal["text", "image"]
    own = "image" if transformer.config.in_channels > vae.config.z_dim else "text"
    asked = own if section.task == "auto" else section.task
    if asked != own and not index.get("expand_timesteps"):
        raise ModelError(
            f"model.task is {asked!r}, but this model was made for {own!r}: it takes "
            f"{transformer.config.in_channels} channels. Set model.task: auto, or name another "
            "model.path."
        )
    return asked


@dataclass(frozen=True)
class Wan22(DiffusersFamily):
    """The loaded parts. See `Family` for what each member means."""

    folder: Path
    transformer: nn.Module
    vae: Any
    text_encoders: list[nn.Module]
    """The text encoder, until it is released."""
    tokenizer: Any
    boundary: float | None
    starts_from: Literal["text", "image"]
    kinds: tuple[MediaKind, ...]
    expand_timesteps: bool
    """TI2V-5B: each token has a level of its own, and a given first frame has none."""
    pixel_step: int
    max_edge: int
    name: str = "wan22"
    audio: AudioFormat | None = None
    takes_control: bool = False
    prediction: PredictionType = "flow"
    adapter_targets: tuple[str, ...] = TARGETS

    def identity(self) -> dict[str, str]:
        """The encoders' own files; a given first frame is a part of what is encoded."""
        text = "-".join(digest_of_folder(self.folder / p) for p in ("tokenizer", "text_encoder"))
        return {
            "latents": f"wan-{self.starts_from}-mode-{digest_of_folder(self.folder / 'vae')}",
            "text": f"umt5-{TEXT_LENGTH}-{text}",
        }

    def weights_digest(self) -> str:
        """Of one transformer or both."""
        return digest_of_weights(self.transformer)

    def blocks(self) -> Sequence[nn.Module]:
        """Of one transformer or both, high noise first."""
        return [
            block
            for transformer in transformers_of(self.transformer).values()
            for block in transformer.get_submodule("blocks").children()
        ]

    def enable_gradient_checkpointing(self) -> None:
        """As diffusers does it, block by block."""
        from diffusers import WanTransformer3DModel

        for transformer in transformers_of(self.transformer).values():
            assert isinstance(transformer, WanTransformer3DModel)
            transformer.enable_gradient_checkpointing()

    def encode(self, media: Tensor) -> Tensor:
        """Normalised latents; a first frame's mask and latents follow where it is given."""
        clip = media if media.ndim == 5 else media.unsqueeze(2)
        latents = self._encoded(clip)
        if not self._concatenates:
            return latents
        first = torch.zeros_like(clip)
        first[:, :, 0] = clip[:, :, 0]
        mask = latents.new_zeros(
            len(clip), self.vae.config.scale_factor_temporal, *latents.shape[2:]
        )
        mask[:, :, 0] = 1
        return torch.cat([latents, mask, self._encoded(first)], dim=1)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The clip; its first frame where the model starts from one."""
        channels = self.vae.config.z_dim
        latents, beside = encoded[:, :channels], encoded[:, channels:]
        if self._concatenates:
            return latents, {"beside": beside}
        if self.starts_from == "image":
            return latents, {"first": latents[:, :, :1]}
        return latents, {}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Of width, height and, for clips, frames."""
        width, height, frames = (*shape, 1)[:3]
        config = self.vae.config
        channels = config.z_dim
        if self._concatenates:
            channels += config.scale_factor_temporal + config.z_dim
        return (
            channels,
            (frames - 1) // config.scale_factor_temporal + 1,
            height // config.scale_factor_spatial,
            width // config.scale_factor_spatial,
        )

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """One a patch."""
        _, frames, height, width = latent_shape
        across, up, along = self._one.config.patch_size
        return int((frames // across) * (height // up) * (width // along))

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """By the tokenizer's count."""
        return captions_longer_than(self.tokenizer, captions, TEXT_LENGTH)

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """The encoder's last hidden states."""
        (encoder,) = self.text_encoders
        device = next(encoder.parameters()).device
        texts = []
        for caption in captions:
            found = tokenize(self.tokenizer, clean_caption(caption), TEXT_LENGTH)
            with torch.no_grad():
                hidden = encoder(
                    found["input_ids"].to(device), found["attention_mask"].to(device)
                ).last_hidden_state
            texts.append({"tokens": hidden[0]})
        return texts

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Zeros up to 512 tokens, as the model was trained."""
        return {"tokens": pad_embeddings([text["tokens"] for text in texts], TEXT_LENGTH)}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """One forward pass of one expert."""
        first = conditions.get("first")
        x, levels = noisy, sigmas * NUM_TIMESTEPS
        if first is not None:
            x = torch.cat([first, noisy[:, :, 1:]], dim=2)
        if "beside" in conditions:
            x = torch.cat([noisy, conditions["beside"]], dim=1)
        if self.expand_timesteps:
            levels = self._level_of_each_token(noisy, levels, given=first is not None)
        dtype = self._one.patch_embedding.weight.dtype
        velocity: Tensor = transformer(
            hidden_states=x.to(dtype),
            timestep=levels,
            encoder_hidden_states=conditions["tokens"].to(dtype),
            return_dict=False,
        )[0]
        if first is None:
            return velocity
        # What is given is known: its velocity is exact and costs no loss.
        s = sigmas.view(-1, 1, 1, 1, 1).clamp_min(torch.finfo(sigmas.dtype).tiny)
        known = ((noisy[:, :, :1] - first) / s).to(velocity.dtype)
        return torch.cat([known, velocity[:, :, 1:]], dim=2)

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """One clip or picture a prompt, by the pipeline that the model was published with."""
        pipeline = self._pipeline(self.sampling_vae(request))
        device = next(self.transformer.parameters()).device
        width, height, frames = (*request.shape, 1)[:3]
        made = []
        for number, text in enumerate(request.texts):
            both = self.stack_text([text, request.empty_text])["tokens"].to(device)
            image = {"image": (request.images[number][None] + 1) / 2} if request.images else {}
            video = pipeline(
                prompt_embeds=both[:1],
                negative_prompt_embeds=both[1:],
                width=width,
                height=height,
                num_frames=frames,
                num_inference_steps=request.steps,
                guidance_scale=request.guidance,
                generator=torch.Generator().manual_seed(request.seed + number),
                output_type="pt",
                **image,
            ).frames[0]
            clip = video.permute(1, 0, 2, 3).float().cpu() * 2 - 1
            if frames == 1:
                made.append(GeneratedSample("image", clip[:, 0]))
            else:
                made.append(GeneratedSample("video", clip, FRAME_RATE))
        return made

    def export(self, folder: Path) -> None:
        """A whole pipeline's folder; what was not trained is linked or copied."""
        from diffusers import WanTransformer3DModel

        for expert, transformer in transformers_of(self.transformer).items():
            assert isinstance(transformer, WanTransformer3DModel)
            transformer.save_pretrained(folder / TRANSFORMER_FOLDERS[expert])
        copy_other_components(self.folder, folder, exclude=TRANSFORMER_FOLDERS.values())

    @property
    def _one(self) -> Any:
        """Any of the transformers: their shapes are the same."""
        return next(iter(transformers_of(self.transformer).values()))

    @property
    def _concatenates(self) -> bool:
        return self.starts_from == "image" and not self.expand_timesteps

    def _encoded(self, clip: Tensor) -> Tensor:
        where = next(self.vae.parameters())
        with torch.no_grad():
            raw: Tensor = self.vae.encode(clip.to(where)).latent_dist.mode()
        mean, std = (
            torch.tensor(values, device=raw.device).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (raw - mean) / std

    def _level_of_each_token(self, noisy: Tensor, levels: Tensor, *, given: bool) -> Tensor:
        across, up, along = self._one.config.patch_size
        frames = noisy.shape[2] // across
        per_frame = (noisy.shape[3] // up) * (noisy.shape[4] // along)
        each = levels[:, None].expand(-1, frames * per_frame).clone()
        if given:
            each[:, :per_frame] = 0
        return each

    def _pipeline(self, vae: Any) -> Any:
        import diffusers

        experts = transformers_of(self.transformer)
        starts = self.starts_from == "image"
        cls = diffusers.WanImageToVideoPipeline if starts else diffusers.WanPipeline
        pipeline = cls(
            tokenizer=None,
            text_encoder=None,
            vae=vae,
            scheduler=read_scheduler(self.folder),
            transformer=self._one,
            transformer_2=experts.get("low"),
            boundary_ratio=self.boundary,
            expand_timesteps=self.expand_timesteps,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


# Key names of Wan 2.1 and 2.2 (T2V, I2V and TI2V, both experts): the original next to diffusers.

ATTENTION_KEYS = (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
ATTENTION_KINDS = (("self_attn", "attn1"), ("cross_attn", "attn2"))
LINEAR_KEYS = (
    *(
        (f"blocks.{{}}.{original}.{key}", f"blocks.{{}}.{diffusers}.{name}")
        for original, diffusers in ATTENTION_KINDS
        for key, name in ATTENTION_KEYS
    ),
    ("blocks.{}.ffn.0", "blocks.{}.ffn.net.0.proj"),
    ("blocks.{}.ffn.2", "blocks.{}.ffn.net.2"),
)
IMAGE_KEYS = (
    ("blocks.{}.cross_attn.k_img", "blocks.{}.attn2.add_k_proj"),
    ("blocks.{}.cross_attn.v_img", "blocks.{}.attn2.add_v_proj"),
)
"""Wan 2.1 I2V alone has these."""
REPLACED_NAMES = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")

KEY_TABLE = KeyTable(
    family="wan",
    aliases=("wan22", "wan21"),
    rows=(
        *LINEAR_KEYS,
        *IMAGE_KEYS,
        ("blocks.{}.self_attn.norm_q", "blocks.{}.attn1.norm_q"),
        ("blocks.{}.self_attn.norm_k", "blocks.{}.attn1.norm_k"),
        ("blocks.{}.cross_attn.norm_q", "blocks.{}.attn2.norm_q"),
        ("blocks.{}.cross_attn.norm_k", "blocks.{}.attn2.norm_k"),
        ("blocks.{}.cross_attn.norm_k_img", "blocks.{}.attn2.norm_added_k"),
        ("blocks.{}.norm3", "blocks.{}.norm2"),
        ("blocks.{}.modulation", "blocks.{}.scale_shift_table"),
        ("patch_embedding", "patch_embedding"),
        ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
        ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
        ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
        ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
        ("time_projection.1", "condition_embedder.time_proj"),
        ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
        ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
        ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
        ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
        ("head.head", "proj_out"),
        ("head.modulation", "scale_shift_table"),
    ),
    # The old converter looked for `to_out.0` and `ffn.net.0.proj` with their dots, where
    # underscored names have none: it replaced the other words and left these.
    mixed_rows=(
        *((a, b) for a, b in (*LINEAR_KEYS, *IMAGE_KEYS) if b.endswith(REPLACED_NAMES)),
        ("blocks.{}.self_attn.to_out.0", "blocks.{}.attn1.to_out.0"),
        ("blocks.{}.cross_attn.to_out.0", "blocks.{}.attn2.to_out.0"),
        ("blocks.{}.ffn.net.0.proj", "blocks.{}.ffn.net.0.proj"),
        ("blocks.{}.ffn.net.2", "blocks.{}.ffn.net.2"),
    ),
    bare_parameters=frozenset({"blocks.{}.scale_shift_table", "scale_shift_table"}),
    block_linears=tuple(diffusers for _, diffusers in LINEAR_KEYS),
    max_blocks=(("blocks", 40),),
    has_stages=True,
    # ComfyUI knows no diffusers' names of Wan; diffusers reads the original's.
    default_formats=(("other", "comfyui"),),
)


class WanShapes(PlannerShapes):
    """A transformer of Wan 2.2 for the planner. TI2V-5B is known by its 48 latent channels."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the latents of a clip and the text padded to its full length."""
        cell = 16 if config["in_channels"] == 48 else 8  # TI2V-5B has its own VAE
        frames = (sample.frames - 1) // 4 + 1
        latents = (config["in_channels"], frames, sample.height // cell, sample.width // cell)
        return EncodedShape(latents, (TEXT_LENGTH, config["text_dim"]))

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the tensors that `Wan22.predict` passes."""
        _, frames, height, width = encoded.latent_shape
        patch_frames, patch_height, patch_width = config["patch_size"]
        tokens = (frames // patch_frames) * (height // patch_height) * (width // patch_width)
        per_token = config["in_channels"] == 48  # TI2V-5B: every token has its own timestep
        return {
            "hidden_states": torch.empty(batch_size, *encoded.latent_shape, dtype=dtype),
            "encoder_hidden_states": torch.empty(batch_size, *encoded.text_shape, dtype=dtype),
            "timestep": torch.empty((batch_size, tokens) if per_token else (batch_size,)),
        }


PLANNER_SHAPES = WanShapes(
    class_name="WanTransformer3DModel",
    published_config={},
    published_name="the published A14B, with two experts",
    blocks=("blocks",),
    targets=TARGETS,
    probe_config={
        **PROBE_ATTENTION,
        "num_layers": 12,
        "ffn_dim": 32,
        "text_dim": 16,
        "freq_dim": 16,
    },
    experts=2,
)
