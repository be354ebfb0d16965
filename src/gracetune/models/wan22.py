"""The model family `wan22`: Wan 2.2 for images and videos, with diffusers' classes.

T2V-A14B and I2V-A14B have two transformers (experts), one for high and one for low noise; TI2V-5B
has one transformer for both tasks, and so have T2V and I2V of Wan 2.1. I2V of Wan 2.1 also reads an
embedding of the first frame by CLIP, which is cached with the latents. The folder decides which
model is loaded. Latents have C channels, F frames, H rows and W columns; an image is a video of one
frame. diffusers is imported inside functions because the adapter commands read `KEY_TABLE` from
here and should not wait seconds for that import.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from gracetune.adapters.files.keys import KeyTable, PipelineSpec
from gracetune.errors import ModelError
from gracetune.models.diffusers_family import (
    DiffusersFamily,
    append_channels,
    clean_caption,
    pad_embeddings,
    restore_appended,
    standardize_latents,
    to_pil,
    tokenize,
)
from gracetune.models.family import (
    PROBE_ATTENTION,
    EncodedShape,
    Experts,
    GeneratedSample,
    PlannerShapes,
)
from gracetune.models.pipeline_folder import (
    PipelineParts,
    check_channels,
    digest_of_folder,
    find_model_folder,
    read_parts,
    read_scheduler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, Forward, SampleRequest, SampleShape

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
SUPPORTED_MODELS = "wan22 trains Wan 2.1 T2V and I2V and Wan 2.2 T2V-A14B, I2V-A14B and TI2V-5B"
IMAGE_WEIGHTS = ("img_emb.", "image_embedder.", ".k_img.", ".add_k_proj.")
"""Parts of names of weights that only I2V and FLF2V of Wan 2.1 have."""
IMAGE_COMPONENTS = ("image_encoder", "image_processor")
IMAGE_TOKENS = 257
"""Tokens of the embedding of a first frame by the published CLIP model."""
OTHER_MODELS_WEIGHTS = (
    *("img_emb.emb_pos", "image_embedder.pos_embed"),  # FLF2V of Wan 2.1
    *("vace_", "control_adapter.", "ref_conv."),  # VACE, Fun-Control and Fun-Camera
    *("face_adapter.", "motion_encoder.", "pose_patch_embedding."),  # Animate
    *("audio_injector.", "audio_encoder."),  # S2V
)
"""Parts of names of weights that only models which are not supported have."""
TEXT_LENGTH = 512
"""Number of tokens to which captions are cut or padded. The model attends to the padding, too."""
NUM_TIMESTEPS = 1000
FRAME_RATE = 16.0
"""Frames per second of generated videos."""
DEFAULT_BOUNDARIES = {"text": 0.875, "image": 0.9}
"""Sigma at which the published models switch from the high-noise to the low-noise transformer, by
the task, for folders that do not state one."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TARGETS = (
    *(f"attn1.{name}" for name in ATTENTION),
    *(f"attn2.{name}" for name in ATTENTION),
    "ffn.net.0.proj",
    "ffn.net.2",
)


def load(section: ModelSection, transformers: Mapping[str, Any] | None = None) -> Wan22:
    """Load the Wan 2.2 pipeline that `model.path` names.

    `transformers`, if given, are used instead of those in the folder: `transformer`, and
    `transformer_2` for low noise.
    """
    config = find_model_folder(section) / "transformer" / "config.json"
    reads_image = config.is_file() and json.loads(config.read_text()).get("image_dim")
    # Folders of Wan 2.2 may name an image encoder that their transformers do not use.
    ignored = () if reads_image else IMAGE_COMPONENTS
    parts = read_parts(
        section, PLANNER_SHAPES, PIPELINES, "AutoencoderKLWan", transformers, ignored
    )
    return Wan22(parts, section)


def _task(
    section: ModelSection, transformer: Any, vae: Any, index: Mapping[str, Any]
) -> Literal["text", "image"]:
    """Return `text` if samples are generated from text, `image` if also from a first frame.

    `model.task` decides; `auto` is the transformer's own task. A transformer that has more input
    channels than the latents takes a first frame.
    """
    own: Literal["text", "image"]
    own = "image" if transformer.config.in_channels > vae.config.z_dim else "text"
    task = own if section.task == "auto" else section.task
    if task != own and not index.get("expand_timesteps"):
        raise ModelError(
            f"model.task is {task!r}, but this model was made for {own!r}: it takes "
            f"{transformer.config.in_channels} channels. Set model.task: auto, or name another "
            "model.path."
        )
    return task


class WanShapes(PlannerShapes):
    """Describes a transformer of Wan 2.2 to the memory planner.

    TI2V-5B is recognised by its 48 latent channels.
    """

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of the latents of a clip and of the embedding of a padded caption."""
        cell = 16 if config["in_channels"] == 48 else 8  # TI2V-5B has its own VAE
        frames = (sample.frames - 1) // 4 + 1
        latents = (config["in_channels"], frames, sample.height // cell, sample.width // cell)
        return EncodedShape(latents, (TEXT_LENGTH, config["text_dim"]))

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised tensors like those that `predict` passes to the transformer."""
        _, frames, height, width = encoded.latent_shape
        patch_frames, patch_height, patch_width = config["patch_size"]
        tokens = (frames // patch_frames) * (height // patch_height) * (width // patch_width)
        per_token = config["in_channels"] == 48  # TI2V-5B: every token has its own timestep
        inputs = {
            "hidden_states": torch.empty(batch_size, *encoded.latent_shape, dtype=dtype),
            "encoder_hidden_states": torch.empty(batch_size, *encoded.text_shape, dtype=dtype),
            "timestep": torch.empty((batch_size, tokens) if per_token else (batch_size,)),
        }
        if config["image_dim"]:
            image = torch.empty(batch_size, IMAGE_TOKENS, config["image_dim"], dtype=dtype)
            inputs["encoder_hidden_states_image"] = image
        return inputs

    def foreign_weights(self, config: Config) -> tuple[str, ...]:
        """Return parts of weight names of other models; I2V of Wan 2.1 has some of its own."""
        own = IMAGE_WEIGHTS if config.get("image_dim") else ()
        return (*self.unsupported_weights, *(p for p in IMAGE_WEIGHTS if p not in own))


WAN21_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
PLANNER_SHAPES = WanShapes(
    class_name="WanTransformer3DModel",
    published_config={},
    published_name="the published A14B, with two experts of 14 B",
    blocks=("blocks",),
    targets=TARGETS,
    input_layer="patch_embedding",
    probe_config={
        **PROBE_ATTENTION,
        "num_layers": 12,
        "ffn_dim": 32,
        "text_dim": 16,
        "freq_dim": 16,
    },
    other_published={  # as in diffusers' scripts/convert_wan_to_diffusers.py
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": {"in_channels": 36},
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
            "num_layers": 30,
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "in_channels": 48,
            "out_channels": 48,
        },
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": {},
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {
            "num_layers": 30,
            "num_attention_heads": 12,
            "ffn_dim": 8960,
        },
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": WAN21_I2V,
        "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": WAN21_I2V,
    },
    supported_models=SUPPORTED_MODELS,
    unsupported_inputs={"pos_embed_seq_len": "a last frame"},  # FLF2V of Wan 2.1
    unsupported_weights=OTHER_MODELS_WEIGHTS,
)


class Wan22(DiffusersFamily):
    """A loaded Wan 2.2 model. `Family` documents the members."""

    name = "wan22"
    shapes = PLANNER_SHAPES

    def __init__(self, parts: PipelineParts, section: ModelSection) -> None:
        self.expand_timesteps = bool(parts.index.get("expand_timesteps"))
        """True for TI2V-5B: every token has its own timestep, and 0 marks a given first frame."""
        super().__init__(parts)
        high, low = self.transformer, parts.components.get("transformer_2")
        self.starts_from = _task(section, high, self.vae, parts.index)
        if self.starts_from == "image":
            # Not images: a single frame that is also the given first frame leaves nothing to learn.
            self.kinds = ("video",)
        else:
            self.kinds = ("image", "video")
        if low is not None:
            check_channels(parts.folder, low, self.input_channels, "wan22", SUPPORTED_MODELS)
            self.transformer = Experts(high, low)
            default = DEFAULT_BOUNDARIES[self.starts_from]
            self.boundary = parts.index.get("boundary_ratio") or default
            if low.config.image_dim != high.config.image_dim:
                raise ModelError(
                    f"{parts.folder / 'transformer_2'} takes an image embedding (image_dim: "
                    f"{low.config.image_dim}), but transformer has image_dim: "
                    f"{high.config.image_dim}. Name another model.path."
                )
        self.max_edge = high.config.rope_max_seq_len * self.pixel_step
        self.image_encoder = parts.components.get("image_encoder")
        """The CLIP model that embeds the first frame, for I2V of Wan 2.1; None for other models."""

    @property
    def vae_scale(self) -> int:
        """Pixels along each edge of a latent cell."""
        return int(self.vae.config.scale_factor_spatial)

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents."""
        return int(self.vae.config.z_dim)

    @property
    def input_channels(self) -> tuple[int, ...]:
        """Numbers of channels: those of the latents, then a mask and latents of a first frame."""
        channels = self.latent_channels
        return (channels, channels + self.vae.config.scale_factor_temporal + channels)

    @property
    def pixel_step(self) -> int:
        """Pixels along each edge of a patch: width and height must be multiples of it."""
        return int(self.vae_scale * self._any_transformer.config.patch_size[1])

    def identity(self) -> dict[str, str]:
        """Return strings for cache keys: hashes of the encoders' files, and the model's task."""
        encoders = ["vae"]
        if self.image_encoder is not None:
            encoders += IMAGE_COMPONENTS
        latents = "-".join(digest_of_folder(self.folder / name) for name in encoders)
        return {
            "latents": f"wan-{self.starts_from}-mode-{latents}",
            "text": f"umt5-{TEXT_LENGTH}-{self.text_digest()}",
        }

    def encode(self, media: Tensor) -> Tensor:
        """Encode images or clips to normalised latents.

        For I2V, more channels follow: a mask that marks the first frame, the latents of a clip in
        which all other frames are zero, and for Wan 2.1 an embedding of the first frame.
        """
        clip = media if media.ndim == 5 else media.unsqueeze(2)
        latents = standardize_latents(self.vae, clip)
        if not self._concatenates_first_frame:
            return latents
        first_frame = torch.zeros_like(clip)
        first_frame[:, :, 0] = clip[:, :, 0]
        mask = latents.new_zeros(
            len(clip), self.vae.config.scale_factor_temporal, *latents.shape[2:]
        )
        mask[:, :, 0] = 1
        encoded = torch.cat([latents, mask, standardize_latents(self.vae, first_frame)], dim=1)
        if self.image_encoder is None:
            return encoded
        return append_channels(encoded, self._embed_images(clip[:, :, 0]))

    def _embed_images(self, images: Tensor) -> Tensor:
        """Embed images with CLIP, as the pipeline does."""
        encoder, processor = (self.parts.components[name] for name in IMAGE_COMPONENTS)
        device = next(encoder.parameters()).device
        pixels = processor(images=[to_pil(image) for image in images], return_tensors="pt")
        with torch.no_grad():
            states = encoder(**pixels.to(device), output_hidden_states=True).hidden_states
        embeddings: Tensor = states[-2]
        return embeddings.float()

    @property
    def _image_shape(self) -> tuple[int, int]:
        """Shape of the embedding of a first frame: tokens and width."""
        config: Any = self.parts.components["image_encoder"].config
        return ((config.image_size // config.patch_size) ** 2 + 1, config.hidden_size)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the clip's latents to add noise to, and the conditions.

        The conditions hold the first frame if the model generates from one; otherwise they are
        empty.
        """
        channels = self.vae.config.z_dim
        latents = encoded[:, :channels]
        if self._concatenates_first_frame:
            end = self.input_channels[1]
            conditions = {"concatenated": encoded[:, channels:end]}
            if self.image_encoder is not None:
                conditions["image"] = restore_appended(encoded[:, end:], self._image_shape)
            return latents, conditions
        if self.starts_from == "image":
            return latents, {"first_frame": latents[:, :, :1]}
        return latents, {}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of an encoded clip: channels, frames, rows and columns."""
        width, height, frames = (*shape, 1)[:3]
        config = self.vae.config
        cells = (
            (frames - 1) // config.scale_factor_temporal + 1,
            height // config.scale_factor_spatial,
            width // config.scale_factor_spatial,
        )
        channels = self.input_channels[1 if self._concatenates_first_frame else 0]
        if self.image_encoder is not None:
            channels += -(-math.prod(self._image_shape) // math.prod(cells))
        return (channels, *cells)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of patches; each is one token."""
        _, frames, height, width = latent_shape
        patch_frames, patch_height, patch_width = self._any_transformer.config.patch_size
        return int((frames // patch_frames) * (height // patch_height) * (width // patch_width))

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption to the last hidden states of UMT5 (`tokens`)."""
        (encoder,) = self.text_encoders
        tokens = tokenize(self.tokenizer, clean_caption(caption), TEXT_LENGTH)
        device = self.encoder_device()
        hidden = encoder(tokens["input_ids"].to(device), tokens["attention_mask"].to(device))
        return {"tokens": hidden.last_hidden_state[0]}

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions, padded with zeros to 512 tokens, as in the training of Wan."""
        return {"tokens": pad_embeddings([text["tokens"] for text in texts], TEXT_LENGTH)}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the velocity that one transformer predicts.

        In a given first frame of TI2V-5B the velocity is the exact one, so it adds nothing to the
        loss.
        """
        first_frame = conditions.get("first_frame")
        x, timesteps = noisy, sigmas * NUM_TIMESTEPS
        if first_frame is not None:
            x = torch.cat([first_frame, noisy[:, :, 1:]], dim=2)
        if "concatenated" in conditions:
            x = torch.cat([noisy, conditions["concatenated"]], dim=1)
        if self.expand_timesteps:
            timesteps = self._timesteps_per_token(
                noisy, timesteps, first_frame_given=first_frame is not None
            )
        dtype = self.dtype
        image = {}
        if "image" in conditions:
            image["encoder_hidden_states_image"] = conditions["image"].to(dtype)
        velocity: Tensor = transformer(
            hidden_states=x.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=conditions["tokens"].to(dtype),
            **image,
            return_dict=False,
        )[0]
        if first_frame is None:
            return velocity
        # The given frame is known, so its exact velocity is returned and adds nothing to the loss.
        sigma = sigmas.view(-1, 1, 1, 1, 1).clamp_min(torch.finfo(sigmas.dtype).tiny)
        known = ((noisy[:, :, :1] - first_frame) / sigma).to(velocity.dtype)
        return torch.cat([known, velocity[:, :, 1:]], dim=2)

    def sampling_pipeline(self, request: SampleRequest) -> Any:
        """Return the pipeline of the task, with the current transformers."""
        import diffusers

        from_image = self.starts_from == "image"
        cls = diffusers.WanImageToVideoPipeline if from_image else diffusers.WanPipeline
        encoders = {}
        if self.image_encoder is not None:
            encoders = {name: self.parts.components[name] for name in IMAGE_COMPONENTS}
        pipeline = cls(
            **encoders,
            tokenizer=None,
            text_encoder=None,
            vae=self.sampling_vae(request),
            scheduler=read_scheduler(self.folder),
            transformer=self._any_transformer,
            transformer_2=self._transformers.get("low"),
            boundary_ratio=self.boundary,
            expand_timesteps=self.expand_timesteps,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Generate one image or video per prompt."""
        pipeline = self.sampling_pipeline(request)
        device = next(self.transformer.parameters()).device
        width, height, frames = (*request.shape, 1)[:3]
        samples = []
        for number, text in enumerate(request.texts):
            tokens = self.stack_text([text, request.empty_text])["tokens"].to(device)
            image = {}
            if request.images:  # CLIP's processor expects PIL images
                (pixels,) = request.images[number]
                is_embedded = self.image_encoder is not None
                image["image"] = to_pil(pixels) if is_embedded else (pixels[None] + 1) / 2
            video = pipeline(
                prompt_embeds=tokens[:1],
                negative_prompt_embeds=tokens[1:],
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
                samples.append(GeneratedSample("image", clip[:, 0]))
            else:
                samples.append(GeneratedSample("video", clip, FRAME_RATE))
        return samples

    @property
    def _any_transformer(self) -> Any:
        """One of the transformers, for facts that all of them share, such as the patch size."""
        return next(iter(self._transformers.values()))

    @property
    def _concatenates_first_frame(self) -> bool:
        """True for I2V-A14B, which takes the first frame as additional input channels."""
        return self.starts_from == "image" and not self.expand_timesteps

    def _timesteps_per_token(
        self, noisy: Tensor, timesteps: Tensor, *, first_frame_given: bool
    ) -> Tensor:
        """Return a timestep for each token: the sample's, but 0 in a given first frame."""
        patch_frames, patch_height, patch_width = self._any_transformer.config.patch_size
        frames = noisy.shape[2] // patch_frames
        per_frame = (noisy.shape[3] // patch_height) * (noisy.shape[4] // patch_width)
        expanded = timesteps[:, None].expand(-1, frames * per_frame).clone()
        if first_frame_given:
            expanded[:, :per_frame] = 0
        return expanded


# Key names of Wan 2.1 and 2.2 in other tools: (original name, diffusers' name).

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
"""Names of modules that only Wan 2.1 I2V has, in the original model and in diffusers."""
REPLACED_NAMES = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")


def _adapter_pipeline(transformer: Callable[[Any], Any]) -> Any:
    """Return a pipeline without weights, to test whether diffusers loads an adapter file."""
    from diffusers import WanPipeline, WanTransformer3DModel

    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=None,
        transformer=transformer(WanTransformer3DModel),
        transformer_2=transformer(WanTransformer3DModel),
        boundary_ratio=DEFAULT_BOUNDARIES["text"],
    )


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    attention = [f"blocks.attn{n}.to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out")]
    width = shapes.size(0, 0, *attention, "blocks.ffn.net") or shapes.size(
        1, 5120, "blocks.ffn.net.proj", "proj_out"
    )
    ffn = shapes.size(0, 0, "blocks.ffn.net.proj") or shapes.size(1, 13824, "blocks.ffn.net")
    added = shapes.size(1, 0, "blocks.attn2.add_k_proj", "blocks.attn2.add_v_proj")
    image = shapes.size(1, 0, "condition_embedder.image_embedder.ff.net.proj")
    patch = 1 * 2 * 2
    return {
        **shapes.heads(width),
        "num_layers": shapes.num_blocks("blocks"),
        "ffn_dim": ffn,
        "text_dim": shapes.size(1, 4096, "condition_embedder.text_embedder.linear_1"),
        "freq_dim": shapes.size(1, 256, "condition_embedder.time_embedder.linear_1"),
        "in_channels": shapes.fan_in(16 * patch, "patch_embedding") // patch,
        "out_channels": shapes.size(0, 16 * patch, "proj_out") // patch,
        "added_kv_proj_dim": added or None,
        "image_dim": image or added or None,
    }


KEY_TABLE = KeyTable(
    family="wan",
    aliases=("wan22", "wan21"),
    header_words=("wan",),
    widths=(5120, 3072, 1536),
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
    # Names written by an old converter. It searched underscored names for `to_out.0` and
    # `ffn.net.0.proj` with dots, so it translated all names but these.
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
    # ComfyUI does not know diffusers' names for Wan, but diffusers reads the original ones.
    default_formats=(("other", "comfyui"),),
    comfyui_prefixes=(
        ("diffusion_model.", ".", "original"),
        ("lora_unet_", "_", "original"),
    ),
    pipeline=PipelineSpec(_adapter_pipeline, _adapter_config),
)
