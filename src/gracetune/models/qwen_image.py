"""The model family `qwen_image`: Qwen-Image, and Qwen-Image-Edit, which edits images.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. The transformer reads
patches of 2x2 cells as tokens. An edit model also reads the tokens of the image to edit (the
reference), after those of the noisy image; Qwen-Image-Edit-2509 and 2511 read several references.
A reference has an area of one megapixel whatever the size of the noisy image, as in diffusers'
pipelines, and the language model of 2509 and 2511 sees a smaller copy. diffusers is imported inside
functions because the adapter commands read `KEY_TABLE` from here and should not wait seconds for
that import.
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
    references_of,
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
from gracetune.models.key_tables import JOINT_ATTENTION_LINEARS, pipeline_spec
from gracetune.models.pipeline_folder import PipelineParts, read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config

EDIT_PIPELINE = "QwenImageEditPipeline"
EDIT_PLUS_PIPELINE = "QwenImageEditPlusPipeline"
"""Pipeline of Qwen-Image-Edit-2509 and 2511, which take several references."""
SUPPORTED_MODELS = "qwen_image trains Qwen-Image and Qwen-Image-Edit, also 2509 and 2511"
REFERENCE_AREA = 1024 * 1024
"""Pixels of a reference for the VAE, and for the language model of the first Qwen-Image-Edit. See
`reference_size`."""
TEXT_REFERENCE_AREA = 384 * 384
"""Pixels of a reference for the language model of Qwen-Image-Edit-2509 and 2511."""
MAX_REFERENCES = 8
"""Largest number of references of 2509 and 2511: the transformer has positions for 4096 tokens of
text and images, a caption takes up to 2048, and each reference about 210 of the others."""
REFERENCE_STEP = 32
TARGETS = (
    *JOINT_ATTENTION_LINEARS,
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)


def load(section: ModelSection) -> QwenImage:
    """Load the Qwen-Image pipeline that `model.path` names."""
    pipelines = ("QwenImagePipeline", EDIT_PIPELINE, EDIT_PLUS_PIPELINE)
    return QwenImage(read_parts(section, PLANNER_SHAPES, pipelines, "AutoencoderKLQwenImage"))


def reference_size(width: int, height: int, area: int) -> tuple[int, int]:
    """Return the size of a reference with about this area in pixels.

    It has the aspect ratio of the image to generate, whose size is given, except for rounding. The
    formula is that of diffusers' pipelines.
    """
    ratio = width / height
    exact = math.sqrt(area * ratio), math.sqrt(area * ratio) / ratio
    rounded_width, rounded_height = (round(e / REFERENCE_STEP) * REFERENCE_STEP for e in exact)
    return rounded_width, rounded_height


def _resized_already(
    references: Mapping[int, Image.Image], image: Image.Image, *_: object, **__: object
) -> Image.Image:
    """Return the reference that an image stands for, by the image's id, or the image itself."""
    return references.get(id(image), image)


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
IMAGE_TEMPLATE = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n"
    "{}{}<|im_end|>\n<|im_start|>assistant\n"
)
"""Prompt template of an edit, into which `edit_text` puts the references and the caption."""
EDIT_TEMPLATE_TOKENS = 64
"""Number of tokens of the prompt template before the first reference; their hidden states are
dropped."""


def encode_caption(encoder: Any, tokenizer: Any, caption: str) -> Tensor:
    """Return the embedding of a caption: the language model's hidden states of its tokens."""
    tokens = tokenize(tokenizer, TEMPLATE.format(caption), MAX_TOKENS + TEMPLATE_TOKENS)
    return _hidden_states(encoder, tokens)[TEMPLATE_TOKENS:][:TEXT_LENGTH]


def edit_text(caption: str, image_tokens: Sequence[int], *, numbered: bool) -> str:
    """Return the text of an edit: the template, the tokens of each reference, and the caption.

    The references of Qwen-Image-Edit-2509 and 2511 are numbered.
    """
    references = [
        (f"Picture {number}: " if numbered else "")
        + IMAGE_TEMPLATE.replace(IMAGE_TOKEN, IMAGE_TOKEN * count)
        for number, count in enumerate(image_tokens, start=1)
    ]
    return EDIT_TEMPLATE.format("".join(references), caption)


def encode_edit(
    encoder: Any,
    tokenizer: Any,
    image_processor: Any,
    caption: str,
    images: Sequence[Tensor],
    *,
    numbered: bool = False,
) -> Tensor:
    """Return the joint embedding of an edit instruction and the references (CHW in [-1, 1]).

    `mm_token_type_ids` give the image's tokens positions in rows and columns, as in the training of
    Qwen-Image-Edit. With transformers 5, the pipeline of diffusers up to at least 0.42 does not
    pass them, and its image tokens have positions like text
    (https://github.com/huggingface/diffusers/issues/14194).
    """
    processed = image_processor(images=[to_pil(image) for image in images], return_tensors="pt")
    image_tokens = (processed["image_grid_thw"].prod(1) // image_processor.merge_size**2).tolist()
    text = edit_text(caption, image_tokens, numbered=numbered)
    length = EDIT_TEXT_LENGTH + EDIT_TEMPLATE_TOKENS + sum(image_tokens)
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

        The embedding of an edit also has tokens of the references. With one reference, the
        transformers of the first Qwen-Image-Edit and of 2509 are the same, and the first has more.
        """
        shape, count = packed_shape(config, sample, TEXT_LENGTH), sample.controls
        if not count:
            return shape
        is_plus = count > 1 or config["zero_cond_t"]  # 2511 sets zero_cond_t
        area = TEXT_REFERENCE_AREA if is_plus else REFERENCE_AREA
        size, text_size = (
            reference_size(sample.width, sample.height, a) for a in (REFERENCE_AREA, area)
        )
        tokens = math.prod(round(edge / LANGUAGE_PATCH) for edge in text_size)
        reference = packed_shape(config, SampleShape(*size), TEXT_LENGTH + count * tokens)
        return EncodedShape(
            shape.latent_shape, reference.text_shape, (count, *reference.latent_shape)
        )

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1, like sigmas.

        The rows of the references follow those of the noisy image.
        """
        images = [noisy, *references_of(conditions)]
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
    """Return the shapes of the latents of the noisy image and, for an edit, of its references."""
    references, *shape = encoded.control_shape or (0,)
    return [encoded.latent_shape, *[tuple(shape)] * references]


PLANNER_SHAPES = QwenImageShapes(
    class_name="QwenImageTransformer2DModel",
    published_config={},
    published_name="the published Qwen-Image, 20 B",
    other_published={
        "Qwen/Qwen-Image-Edit": {},
        "Qwen/Qwen-Image-Edit-2509": {},
        "Qwen/Qwen-Image-Edit-2511": {"zero_cond_t": True},
    },
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
    min_text_tokens = 16  # a caption of one word has 6, an empty one 5

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        pipeline = parts.index["_class_name"]
        self.is_plus = pipeline == EDIT_PLUS_PIPELINE
        self.max_controls = MAX_REFERENCES if self.is_plus else int(pipeline == EDIT_PIPELINE)
        self.text_length = EDIT_TEXT_LENGTH if self.takes_control else TEXT_LENGTH
        self.cache_name = "qwen-image"
        if self.takes_control:
            sizes = f"{REFERENCE_AREA}-{TEXT_REFERENCE_AREA}" if self.is_plus else REFERENCE_AREA
            self.cache_name = f"qwen-image-edit-{sizes}"

    @property
    def image_processor(self) -> Any:
        """The processor of references, for the text encoder."""
        return self.parts.components["processor"]

    def text_digest(self, *others: str) -> str:
        """Hash the files that the text encoder and the references are read with."""
        return super().text_digest(*others, *(["processor"] if self.takes_control else []))

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of a reference, for a generated image of this size."""
        return reference_size(width, height, REFERENCE_AREA)

    def text_control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of a reference for the text encoder."""
        area = TEXT_REFERENCE_AREA if self.is_plus else REFERENCE_AREA
        return reference_size(width, height, area)

    def encode_caption(self, caption: str, images: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Encode a caption to the last hidden states of the vision-language model (`tokens`)."""
        (encoder,) = self.text_encoders
        if not images:
            return {"tokens": encode_caption(encoder, self.tokenizer, caption)}
        tokens = encode_edit(
            encoder, self.tokenizer, self.image_processor, caption, images, numbered=self.is_plus
        )
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

    def image_arguments(
        self, pipeline: Any, images: Sequence[Tensor], width: int, height: int
    ) -> dict[str, Any]:
        """Return the pipeline's argument for the references.

        The pipeline would resize them, by their aspect ratio, which rounding has changed. They are
        resized already, so pass blank images with the aspect ratio of the image to generate, and
        replace each by its reference where the pipeline resizes it.
        """
        references = [to_pil(image) for image in images]
        for reference in references:
            assert reference.size == self.control_size(width, height), reference.size
        blanks = [Image.new("RGB", (width, height)) for _ in references]
        by_id = {id(b): reference for b, reference in zip(blanks, references, strict=True)}
        pipeline.image_processor.resize = partial(_resized_already, by_id)
        return {"image": blanks if self.is_plus else blanks[0]}


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
