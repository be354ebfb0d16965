"""The model family `qwen_image`: Qwen-Image, and Qwen-Image-Edit, which edits images.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. The transformer reads
patches of 2x2 cells as tokens. An edit model also reads the tokens of the image to edit (the
reference), after those of the noisy image. The reference has an area of one megapixel whatever the
size of the noisy image, as in diffusers' pipeline. diffusers is imported inside functions because
the adapter commands read `KEY_TABLE` from here and should not wait seconds for that import.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    num_patches,
    pack_latents,
    packed_shape,
    to_pil,
    tokenize,
    unpack_latents,
)
from gracetune.models.family import (
    PROBE_JOINT_ATTENTION,
    EncodedShape,
    PlannerShapes,
    SampleShape,
)
from gracetune.models.key_tables import pipeline_spec
from gracetune.models.pipeline_folder import PipelineParts, read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.check_loading import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config

EDIT_PIPELINE = "QwenImageEditPipeline"
SUPPORTED_MODELS = "qwen_image trains Qwen-Image and Qwen-Image-Edit with one reference"
REFERENCE_AREA = 1024 * 1024
"""Pixels of the image to edit, for the VAE and for the language model. See `reference_size`."""
REFERENCE_STEP = 32
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
    """Load the Qwen-Image pipeline that `model.path` names."""
    pipelines = ("QwenImagePipeline", EDIT_PIPELINE)
    return QwenImage(read_parts(section, PLANNER_SHAPES, pipelines, "AutoencoderKLQwenImage"))


def reference_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of the image to edit, for an image to generate of this size.

    As in diffusers' pipeline: the aspect ratio is kept, except for rounding.
    """
    ratio = width / height
    exact = math.sqrt(REFERENCE_AREA * ratio), math.sqrt(REFERENCE_AREA * ratio) / ratio
    rounded_width, rounded_height = (round(e / REFERENCE_STEP) * REFERENCE_STEP for e in exact)
    return rounded_width, rounded_height


def _same_image(image: Image.Image, *_: object, **__: object) -> Image.Image:
    """Return the first argument, in place of a resized image."""
    return image


def _patch_grid(latent_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the number of frames (one), rows and columns of patches in latents of this shape."""
    *_, height, width = latent_shape
    return (1, height // PATCH_SIZE, width // PATCH_SIZE)


# Text. The language model reads a template that contains the caption and, for an edit, the image.
# The embedding is its hidden states without those of the template's first, fixed tokens.

TEXT_LENGTH = 512
"""Number of tokens to which a caption's embedding is cut: the pipeline's `max_sequence_length`."""
MAX_TOKENS = 1024
"""Number of tokens of a caption that the language model reads: the `tokenizer_max_length` of the
pipeline, which cuts the embedding afterwards."""
EDIT_TEXT_LENGTH = 2048
"""Number of tokens to which the caption of an edit is cut. The pipeline cuts nothing; but the
transformer has positions for 4096 tokens, of which an image takes up to about 1400."""
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
"""Number of tokens of the prompt template before the caption; their hidden states are dropped."""
IMAGE_TOKEN = "<|image_pad|>"
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
EDIT_TEMPLATE_TOKENS = 64
"""Number of tokens of the prompt template before the image to edit; their hidden states are
dropped."""


def encode_caption(encoder: Any, tokenizer: Any, caption: str) -> Tensor:
    """Return the embedding of a caption: the language model's hidden states of its tokens."""
    tokens = tokenize(tokenizer, TEMPLATE.format(caption), MAX_TOKENS + TEMPLATE_TOKENS)
    return _hidden_states(encoder, tokens)[TEMPLATE_TOKENS:][:TEXT_LENGTH]


def encode_edit(
    encoder: Any,
    tokenizer: Any,
    image_processor: Any,
    caption: str,
    image_CHW: Tensor,  # noqa: N803
) -> Tensor:
    """Return the joint embedding of an edit instruction and the image to edit.

    The pixels are in [-1, 1]. `mm_token_type_ids` give the image's tokens positions in rows and
    columns, as in the training of Qwen-Image-Edit. With transformers 5, the pipeline of diffusers
    up to at least 0.42 does not pass them, and its image tokens have positions like text
    (https://github.com/huggingface/diffusers/issues/14194).
    """
    processed = image_processor(images=[to_pil(image_CHW)], return_tensors="pt")
    image_tokens = int(processed["image_grid_thw"].prod()) // image_processor.merge_size**2
    text = EDIT_TEMPLATE.format(caption).replace(IMAGE_TOKEN, IMAGE_TOKEN * image_tokens)
    length = EDIT_TEXT_LENGTH + EDIT_TEMPLATE_TOKENS + image_tokens
    tokens = dict(tokenize(tokenizer, text, length))
    is_image = tokens["input_ids"] == encoder.config.image_token_id
    inputs = {**tokens, **processed, "mm_token_type_ids": is_image.int()}
    return _hidden_states(encoder, inputs)[EDIT_TEMPLATE_TOKENS:]


def _hidden_states(encoder: Any, inputs: Any) -> Tensor:
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


LANGUAGE_PATCH = 28
"""Pixels along the edge of a patch of the image to edit that is one token of the language model."""


class QwenImageShapes(PlannerShapes):
    """Describes the transformer of Qwen-Image to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and of the embedding of a long caption.

        The embedding of an edit also has tokens of the image to edit.
        """
        shape = packed_shape(config, sample, TEXT_LENGTH)
        if not sample.has_control:
            return shape
        size = reference_size(sample.width, sample.height)
        tokens = TEXT_LENGTH + math.prod(round(edge / LANGUAGE_PATCH) for edge in size)
        reference = packed_shape(config, SampleShape(*size), tokens)
        return EncodedShape(shape.latent_shape, reference.text_shape, reference.latent_shape)

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1, like sigmas.

        The rows of the image to edit follow those of the noisy image.
        """
        images = [noisy, *([conditions["reference"]] if "reference" in conditions else [])]
        return {
            "hidden_states": torch.cat([pack_latents(x) for x in images], dim=1).to(dtype),
            "timestep": sigmas.to(dtype),
            "encoder_hidden_states": conditions["tokens"].to(dtype),
            "encoder_hidden_states_mask": conditions.get("mask"),
            "img_shapes": [[_patch_grid(x.shape) for x in images]] * len(noisy),
        }

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:
        """Return the velocity of the noisy image as latents, from its patches."""
        rows = output[:, : num_patches(noisy.shape[1:])]
        return unpack_latents(rows, *noisy.shape[2:])

    def extra_arguments(self, encoded: EncodedShape, batch_size: int) -> dict[str, Any]:
        """Return the number of frames, rows and columns of patches in each image."""
        return {"img_shapes": [[_patch_grid(s) for s in _image_shapes(encoded)]] * batch_size}


def _image_shapes(encoded: EncodedShape) -> list[tuple[int, ...]]:
    """Return the shapes of the latents of the noisy image and, for an edit, of its reference."""
    return [shape for shape in (encoded.latent_shape, encoded.control_shape) if shape]


PLANNER_SHAPES = QwenImageShapes(
    class_name="QwenImageTransformer2DModel",
    published_config={},
    published_name="the published Qwen-Image, 20 B",
    blocks=("transformer_blocks",),
    targets=TARGETS,
    input_layer="img_in",
    probe_config={**PROBE_JOINT_ATTENTION, "num_layers": 12},
    supported_models=SUPPORTED_MODELS,
    unsupported_inputs={
        "guidance_embeds": "a guidance value",
        "use_additional_t_cond": "a condition for layers",
        "use_layer3d_rope": "several layers",
    },
    unsupported_weights=("addition_t_embedding.",),  # Qwen-Image-Layered
)


class QwenImage(DiffusersFamily):
    """A loaded Qwen-Image or Qwen-Image-Edit model. `Family` documents the members."""

    name = "qwen_image"
    shapes = PLANNER_SHAPES
    video_vae = True
    channels_per_patch = True

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        self.takes_control = parts.index["_class_name"] == EDIT_PIPELINE
        self.text_length = EDIT_TEXT_LENGTH if self.takes_control else TEXT_LENGTH
        edit = f"qwen-image-edit-{REFERENCE_AREA}"
        self.cache_name = edit if self.takes_control else "qwen-image"

    @property
    def image_processor(self) -> Any:
        """The processor of the image to edit, for the text encoder."""
        return self.parts.components["processor"]

    def text_digest(self, *others: str) -> str:
        """Hash the files that the text encoder and the image to edit are read with."""
        return super().text_digest(*others, *(["processor"] if self.takes_control else []))

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the image to edit, for a generated image of this size."""
        return reference_size(width, height)

    def encode_caption(self, caption: str, image: Tensor | None = None) -> dict[str, Tensor]:
        """Encode a caption to the last hidden states of the vision-language model (`tokens`)."""
        (encoder,) = self.text_encoders
        if image is None:
            return {"tokens": encode_caption(encoder, self.tokenizer, caption)}
        tokens = encode_edit(encoder, self.tokenizer, self.image_processor, caption, image)
        return {"tokens": tokens}

    def prompt_arguments(
        self, text: Mapping[str, Tensor], empty: Mapping[str, Tensor], guidance: float
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for a prompt."""
        negative = {
            "negative_prompt_embeds": empty["tokens"],
            "negative_prompt_embeds_mask": empty["mask"].long(),
        }
        return {
            "prompt_embeds": text["tokens"],
            "prompt_embeds_mask": text["mask"].long(),
            "true_cfg_scale": guidance,
            **(negative if guidance > 1 else {}),
        }

    def image_arguments(self, pipeline: Any, image: Tensor, width: int, height: int) -> Any:
        """Return the pipeline's argument for an image to edit.

        The pipeline would resize it, by its aspect ratio, which rounding has changed. It is resized
        already, so pass an image with the aspect ratio of the image to generate.
        """
        reference = to_pil(image)
        assert reference.size == self.control_size(width, height), reference.size
        pipeline.image_processor.resize = partial(_same_image, reference)
        return {"image": Image.new("RGB", (width, height))}


# Key names in other tools. Qwen-Image was published with diffusers' names, so they are the same.

BLOCK_LINEARS = tuple(f"transformer_blocks.{{}}.{name}" for name in TARGETS)
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


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file."""
    block = "transformer_blocks"
    names = [f"{block}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{block}.attn.add_{x}_proj" for x in "qkv"]
    patch = 2 * 2
    return {
        **shapes.heads(shapes.size(0, 3072, *names, "img_in")),
        "num_layers": shapes.num_blocks(block),
        "joint_attention_dim": shapes.size(1, 3584, "txt_in"),
        "in_channels": shapes.size(1, 64, "img_in"),
        "out_channels": shapes.size(0, 16 * patch, "proj_out") // patch,
    }


KEY_TABLE = KeyTable(
    family="qwen_image",
    aliases=("qwen",),
    header_words=("qwen",),
    widths=(3072,),
    rows=tuple((name, name) for name in (*BLOCK_LINEARS, *OTHER_MODULES)),
    block_linears=BLOCK_LINEARS,
    max_blocks=(("transformer_blocks", 60),),
    comfyui_prefixes=(
        ("diffusion_model.", ".", "original"),
        ("lora_unet_", "_", "original"),
        ("", ".", "diffusers"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
    ),
    pipeline=pipeline_spec("QwenImagePipeline", "QwenImageTransformer2DModel", _adapter_config),
)
