"""The family `qwen_image`: Qwen-Image in diffusers' classes, for pictures, and for edits of them.

Latents: C channels, H rows, W columns, eight pixels a cell; the transformer reads them by 2x2. An
edit is given the latents of the picture it starts from as more rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from gracetune.adapters.files.keys import KeyTable
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
    pad_embeddings,
    padding_mask,
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


PIPELINES = ("QwenImagePipeline", "QwenImageEditPipeline")
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
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)


def load(section: ModelSection) -> QwenImage:
    """Read every part of the folder `model.path`."""
    # Imported here: key tables are read without loading diffusers, which takes seconds.
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import (
        AutoImageProcessor,
        AutoTokenizer,
        Qwen2_5_VLForConditionalGeneration,
    )

    folder = find_model_folder(section)
    index = read_model_index(folder)
    check_pipeline_class(folder, index, PIPELINES, "qwen_image")
    edits = index["_class_name"] == "QwenImageEditPipeline"
    looker = None
    if edits:
        looker = read_component(
            folder,
            "processor",
            lambda p: AutoImageProcessor.from_pretrained(p, local_files_only=True),
        )
    vae = read_component(
        folder,
        "vae",
        lambda part: AutoencoderKLQwenImage.from_pretrained(
            part, torch_dtype=torch.float32, local_files_only=True
        ),
    )
    encoder = read_component(
        folder,
        "text_encoder",
        lambda part: Qwen2_5_VLForConditionalGeneration.from_pretrained(
            part, dtype="auto", local_files_only=True
        ),
    )
    return QwenImage(
        folder=folder,
        transformer=read_transformer(
            QwenImageTransformer2DModel, section, folder, "transformer", section.transformer_file
        ),
        vae=vae.eval().requires_grad_(False),
        text_encoders=[encoder.eval().requires_grad_(False)],
        tokenizer=read_component(
            folder, "tokenizer", lambda p: AutoTokenizer.from_pretrained(p, local_files_only=True)
        ),
        image_processor=looker,
        vae_scale=2 ** len(vae.temperal_downsample),
        takes_control=edits,
    )


@dataclass(frozen=True)
class QwenImage(DiffusersFamily):
    """The loaded parts. See `Family` for what each member means."""

    folder: Path
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]
    """The text encoder, until it is released."""
    tokenizer: Any
    image_processor: Any
    """What prepares a picture for the text encoder; none where nothing is edited."""
    vae_scale: int
    """Pixels along the edge of a latent's cell."""
    name: str = "qwen_image"
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
        names = ["tokenizer", "text_encoder", *(["processor"] if self.takes_control else [])]
        text = "-".join(digest_of_folder(self.folder / name) for name in names)
        return {
            "latents": f"qwen-image-mode-{digest_of_folder(self.folder / 'vae')}",
            "text": f"qwen-image-{TEXT_LENGTH}-{text}",
        }

    def blocks(self) -> Sequence[nn.Module]:
        """The joint blocks."""
        return list(self.transformer.transformer_blocks)

    def encode(self, media: Tensor) -> Tensor:
        """Normalised latents; a control's follow its picture's as more channels."""
        return torch.cat([self._encoded(pixels) for pixels in torch.split(media, 3, dim=1)], dim=1)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The picture; what it is an edit of is given."""
        channels = self.vae.config.z_dim
        if not self.takes_control:
            return encoded, {}
        return encoded[:, :channels], {"reference": encoded[:, channels:]}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Channels, rows and columns of cells."""
        width, height = shape
        channels = self.vae.config.z_dim * (2 if self.takes_control else 1)
        return (channels, height // self.vae_scale, width // self.vae_scale)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """One a patch of what is noised."""
        return num_patches(latent_shape)

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """By the tokenizer's count."""
        return captions_longer_than(self.tokenizer, captions, TEXT_LENGTH)

    def encode_text(
        self, captions: Sequence[str], images: Sequence[Tensor] = ()
    ) -> list[dict[str, Tensor]]:
        """The language model's last states, from the caption or the picture on."""
        (encoder,) = self.text_encoders
        if not self.takes_control:
            return [{"tokens": encode_caption(encoder, self.tokenizer, one)} for one in captions]
        return [
            {"tokens": encode_edit(encoder, self.tokenizer, self.image_processor, caption, picture)}
            for caption, picture in zip(captions, images, strict=True)
        ]

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Zeros behind the shorter ones, and a mask that leaves them out."""
        tokens = [text["tokens"] for text in texts]
        longest = max(map(len, tokens))
        return {"tokens": pad_embeddings(tokens, longest), "mask": padding_mask(tokens, longest)}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """One forward pass; the model counts levels from 0 to 1."""
        count, _, height, width = noisy.shape
        dtype = self.transformer.img_in.weight.dtype
        rows = pack_latents(noisy)
        shape = (1, height // PATCH_SIZE, width // PATCH_SIZE)
        length, shapes = rows.shape[1], [shape]
        if "reference" in conditions:
            rows = torch.cat([rows, pack_latents(conditions["reference"])], dim=1)
            shapes = [shape, shape]
        velocity: Tensor = transformer(
            hidden_states=rows.to(dtype),
            timestep=sigmas.to(dtype),
            encoder_hidden_states=conditions["tokens"].to(dtype),
            encoder_hidden_states_mask=conditions["mask"],
            img_shapes=[shapes] * count,
            return_dict=False,
        )[0]
        return unpack_latents(velocity[:, :length], height, width)

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """One picture a prompt."""
        pipeline = self._pipeline(self.sampling_vae(request))
        device = next(self.transformer.parameters()).device
        dtype = self.transformer.img_in.weight.dtype
        width, height = request.shape
        empties = request.empty_texts or [request.empty_text] * len(request.texts)
        made = []
        for number, (text, empty) in enumerate(zip(request.texts, empties, strict=True)):
            tokens, nothing = (t["tokens"][None].to(device, dtype) for t in (text, empty))
            against = {
                "negative_prompt_embeds": nothing,
                "negative_prompt_embeds_mask": torch.ones(nothing.shape[:2], device=device).long(),
            }
            start = {"image": to_pil(request.images[number])} if request.images else {}
            picture = pipeline(
                prompt_embeds=tokens,
                prompt_embeds_mask=torch.ones(tokens.shape[:2], device=device).long(),
                **against if request.guidance > 1 else {},
                **start,
                width=width,
                height=height,
                num_inference_steps=request.steps,
                true_cfg_scale=request.guidance,
                generator=torch.Generator().manual_seed(request.seed + number),
                output_type="pt",
            ).images[0]
            made.append(GeneratedSample("image", picture.float().cpu() * 2 - 1))
        return made

    def _pipeline(self, vae: Any) -> Any:
        import diffusers

        edits = {"processor": None} if self.takes_control else {}
        cls = diffusers.QwenImageEditPipeline if edits else diffusers.QwenImagePipeline
        pipeline = cls(
            scheduler=read_scheduler(self.folder),
            vae=vae,
            text_encoder=None,
            tokenizer=None,
            transformer=self.transformer,
            **edits,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _encoded(self, pixels: Tensor) -> Tensor:
        """A picture is a film of one frame to this VAE."""
        where = next(self.vae.parameters())
        with torch.no_grad():
            raw: Tensor = self.vae.encode(pixels.to(where).unsqueeze(2)).latent_dist.mode()[:, :, 0]
        mean, std = (
            torch.tensor(values, device=raw.device).view(1, -1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (raw - mean) / std


# ------------------------------------------------------------------------------------------
# What Qwen-Image's language model is asked, and what is kept of its answer.
#
# It reads a template with the caption in it; for an edit also the picture that is edited. The
# states
# of all tokens from the end of the fixed words on are the text.


TEXT_LENGTH = 1024
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
"""Tokens before the caption, whose states are left out."""
IMAGE_TOKEN = "<|image_pad|>"
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
EDIT_TEMPLATE_TOKENS = 64
"""Tokens before the picture."""


def encode_caption(encoder: Any, tokenizer: Any, caption: str) -> Tensor:
    """The text of a caption."""
    found = tokenize(tokenizer, TEMPLATE.format(caption), TEXT_LENGTH + TEMPLATE_TOKENS)
    return _states(encoder, found)[TEMPLATE_TOKENS:]


def encode_edit(
    encoder: Any,
    tokenizer: Any,
    looker: Any,
    caption: str,
    picture_CHW: Tensor,  # noqa: N803
) -> Tensor:
    """The text of an instruction and of the picture in [-1, 1] that it is about."""
    seen = looker(images=[to_pil(picture_CHW)], return_tensors="pt")
    tokens = int(seen["image_grid_thw"].prod()) // looker.merge_size**2
    text = EDIT_TEMPLATE.format(caption).replace(IMAGE_TOKEN, IMAGE_TOKEN * tokens)
    length = TEXT_LENGTH + EDIT_TEMPLATE_TOKENS + tokens
    found = dict(tokenize(tokenizer, text, length))
    image = found["input_ids"] == encoder.config.image_token_id
    return _states(encoder, {**found, **seen, "mm_token_type_ids": image.int()})[
        EDIT_TEMPLATE_TOKENS:
    ]


def to_pil(pixels_CHW: Tensor) -> Image.Image:  # noqa: N803
    """Pixels in [-1, 1] as a picture."""
    scaled = pixels_CHW.clamp(-1, 1).add(1).mul(127.5).round().byte()
    return Image.fromarray(scaled.permute(1, 2, 0).cpu().numpy())


def _states(encoder: Any, inputs: Any) -> Tensor:
    device = next(encoder.parameters()).device
    dtype = next(encoder.parameters()).dtype
    moved = {
        name: t.to(device, dtype) if t.is_floating_point() else t.to(device)
        for name, t in inputs.items()
    }
    moved.pop("token_type_ids", None)
    with torch.no_grad():
        states: Tensor = encoder(**moved, output_hidden_states=True).hidden_states[-1][0]
    return states


# Key names of Qwen-Image and its edit models, which were published with diffusers' names.

BLOCK_LINEARS = tuple(
    f"transformer_blocks.{{}}.{name}"
    for name in (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
)
OTHER_MODULES = (
    *(
        f"transformer_blocks.{{}}.{name}"
        for name in (
            "img_mod.1",
            "txt_mod.1",
            "attn.norm_q",
            "attn.norm_k",
            "attn.norm_added_q",
            "attn.norm_added_k",
        )
    ),
    "img_in",
    "txt_in",
    "txt_norm",
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
    "norm_out.linear",
    "proj_out",
)

KEY_TABLE = KeyTable(
    family="qwen_image",
    aliases=("qwen",),
    rows=tuple((name, name) for name in (*BLOCK_LINEARS, *OTHER_MODULES)),
    block_linears=BLOCK_LINEARS,
    max_blocks=(("transformer_blocks", 60),),
)


class QwenImageShapes(PlannerShapes):
    """The transformer of Qwen-Image for the planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return packed latents and the text of a long caption."""
        return packed_shape(config, sample, PLANNED_TEXT_LENGTH)

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the tensors that `QwenImage.predict` passes."""
        tokens = num_patches(encoded.latent_shape)
        return {
            "hidden_states": torch.empty(batch_size, tokens, config["in_channels"], dtype=dtype),
            "encoder_hidden_states": torch.empty(batch_size, *encoded.text_shape, dtype=dtype),
            "timestep": torch.empty(batch_size, dtype=dtype),
        }

    def extra_arguments(self, encoded: EncodedShape, batch_size: int) -> dict[str, Any]:
        """Return the number of frames, rows and columns of patches in each image."""
        _, height, width = encoded.latent_shape
        return {"img_shapes": [[(1, height // PATCH_SIZE, width // PATCH_SIZE)]] * batch_size}


PLANNED_TEXT_LENGTH = 512
"""Tokens per caption in a plan. Captions are not padded, and few come near the limit of 1024."""
PLANNER_SHAPES = QwenImageShapes(
    class_name="QwenImageTransformer2DModel",
    published_config={},
    published_name="the published Qwen-Image, 20 B",
    blocks=("transformer_blocks",),
    targets=TARGETS,
    probe_config={**PROBE_JOINT_ATTENTION, "num_layers": 12},
)
