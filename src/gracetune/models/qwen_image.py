"""The model family `qwen_image`: Qwen-Image, and Qwen-Image-Edit, which edits images.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. The transformer reads
patches of 2x2 cells as tokens. An edit model also reads the tokens of the image to edit (the
reference), after those of the noisy image. The reference has an area of one megapixel whatever the
size of the noisy image, as in diffusers' pipeline. diffusers is imported inside functions because
the adapter commands read `KEY_TABLE` from here and should not wait seconds for that import.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from gracetune.adapters.files.keys import KeyTable, PipelineSpec
from gracetune.models.diffusers_family import (
    PATCH_SIZE,
    DiffusersFamily,
    append_channels,
    captions_longer_than,
    check_channels,
    check_pipeline_class,
    digest_of_folder,
    find_model_folder,
    num_patches,
    pack_latents,
    packed_shape,
    pad_embeddings,
    padding_mask,
    read_model_index,
    read_pretrained,
    read_scheduler,
    read_text_encoder,
    read_transformer,
    read_vae,
    restore_appended,
    tokenize,
    unpack_latents,
)
from gracetune.models.family import (
    PROBE_JOINT_ATTENTION,
    EncodedShape,
    GeneratedSample,
    PlannerShapes,
    SampleShape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gracetune.adapters.files.check_loading import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import (
        AudioFormat,
        Config,
        Forward,
        MediaKind,
        PredictionType,
        SampleRequest,
    )

EDIT_PIPELINE = "QwenImageEditPipeline"
SUPPORTED_MODELS = "qwen_image trains Qwen-Image and Qwen-Image-Edit with one reference"
REFERENCE_AREA = 1024 * 1024
"""Pixels of the image to edit, for the VAE and for the language model. See `reference_size`."""
REFERENCE_STEP = 32
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
    """Load the Qwen-Image pipeline that `model.path` names."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import (
        AutoImageProcessor,
        AutoTokenizer,
        Qwen2_5_VLForConditionalGeneration,
    )

    folder = find_model_folder(section)
    index = read_model_index(folder)
    check_pipeline_class(folder, index, ("QwenImagePipeline", EDIT_PIPELINE), "qwen_image")
    is_edit = index["_class_name"] == EDIT_PIPELINE
    image_processor = read_pretrained(folder, "processor", AutoImageProcessor) if is_edit else None
    vae = read_vae(folder, AutoencoderKLQwenImage)
    text_encoder = read_text_encoder(folder, "text_encoder", Qwen2_5_VLForConditionalGeneration)
    transformer = read_transformer(
        QwenImageTransformer2DModel,
        section,
        folder,
        "transformer",
        section.transformer_file,
        PLANNER_SHAPES,
    )
    channels = vae.config.z_dim * PATCH_SIZE**2
    check_channels(folder, transformer, [channels], "qwen_image", SUPPORTED_MODELS)
    return QwenImage(
        folder=folder,
        transformer=transformer,
        vae=vae,
        text_encoders=[text_encoder],
        tokenizer=read_pretrained(folder, "tokenizer", AutoTokenizer),
        image_processor=image_processor,
        vae_scale=2 ** len(vae.temperal_downsample),
        takes_control=is_edit,
    )


@dataclass(frozen=True)
class QwenImage(DiffusersFamily):
    """A loaded Qwen-Image or Qwen-Image-Edit model. `Family` documents the members."""

    folder: Path
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]
    """The text encoder, a vision-language model; empty once it is released."""
    tokenizer: Any
    image_processor: Any
    """Prepares the image to edit for the text encoder. None if the model does not edit."""
    vae_scale: int
    """Pixels along each edge of a latent cell."""
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
        """Pixels along each edge of a patch: width and height must be multiples of it."""
        return self.vae_scale * PATCH_SIZE

    def identity(self) -> dict[str, str]:
        """Return strings for cache keys: hashes of the encoders' files, and sizes of the inputs."""
        names = ["tokenizer", "text_encoder", *(["processor"] if self.takes_control else [])]
        text = "-".join(digest_of_folder(self.folder / name) for name in names)
        model = f"qwen-image-edit-{REFERENCE_AREA}" if self.takes_control else "qwen-image"
        return {
            "latents": f"{model}-mode-{digest_of_folder(self.folder / 'vae')}",
            "text": f"{model}-{self._text_length}-{text}",
        }

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the image to edit, for a generated image of this size."""
        return reference_size(width, height)

    def blocks(self) -> Sequence[nn.Module]:
        """Return the double-stream blocks in forward order."""
        return list(self.transformer.transformer_blocks)

    def encode(self, media: Tensor) -> Tensor:
        """Encode images to normalised latents; those of images to edit follow as channels."""
        latents = self._encode_image(self.vae, media[:, :3])
        if not self.takes_control:
            return latents
        width, height = self.control_size(media.shape[-1], media.shape[-2])
        references = restore_appended(media[:, 3:], (3, height, width))
        # One at a time and not in tiles: the caller decides both for the size to generate.
        vae = copy.copy(self.vae)
        vae.disable_tiling()
        encoded = [self._encode_image(vae, reference[None]) for reference in references]
        return append_channels(latents, torch.cat(encoded))

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the latents to add noise to, and those of an image to edit as a condition."""
        channels = self.vae.config.z_dim
        if not self.takes_control:
            return encoded, {}
        shape = self._reference_shape(*encoded.shape[-2:])
        reference = restore_appended(encoded[:, channels:], shape)
        return encoded[:, :channels], {"reference": reference}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of an encoded image: channels, rows, columns.

        An edit has more channels, which hold the latents of the image to edit.
        """
        width, height = shape
        rows, columns = height // self.vae_scale, width // self.vae_scale
        channels = self.vae.config.z_dim
        if self.takes_control:
            channels += -(-math.prod(self._reference_shape(rows, columns)) // (rows * columns))
        return (channels, rows, columns)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of patches, each one token, without those of the image to edit."""
        return num_patches(latent_shape)

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions with more tokens than the model reads."""
        return captions_longer_than(self.tokenizer, captions, self._text_length)

    def encode_text(
        self, captions: Sequence[str], images: Sequence[Tensor] = ()
    ) -> list[dict[str, Tensor]]:
        """Encode captions to the last hidden states of the vision-language model (`tokens`)."""
        (encoder,) = self.text_encoders
        if not self.takes_control:
            return [
                {"tokens": encode_caption(encoder, self.tokenizer, caption)} for caption in captions
            ]
        return [
            {"tokens": encode_edit(encoder, self.tokenizer, self.image_processor, caption, image)}
            for caption, image in zip(captions, images, strict=True)
        ]

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions, padded with zeros to the longest; `mask` marks the real tokens."""
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
        """Return the predicted velocity. Qwen-Image takes timesteps from 0 to 1, like sigmas."""
        count, _, height, width = noisy.shape
        dtype = self.transformer.img_in.weight.dtype
        rows = pack_latents(noisy)
        length, shapes = rows.shape[1], [_patch_grid(noisy.shape)]
        if "reference" in conditions:
            rows = torch.cat([rows, pack_latents(conditions["reference"])], dim=1)
            shapes.append(_patch_grid(conditions["reference"].shape))
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
        """Generate one image per prompt."""
        pipeline = self._pipeline(self.sampling_vae(request))
        device = next(self.transformer.parameters()).device
        dtype = self.transformer.img_in.weight.dtype
        width, height = request.shape
        empty_texts = request.empty_texts or [request.empty_text] * len(request.texts)
        samples = []
        for number, (text, empty) in enumerate(zip(request.texts, empty_texts, strict=True)):
            prompt, negative = (t["tokens"][None].to(device, dtype) for t in (text, empty))
            guidance = {
                "negative_prompt_embeds": negative,
                "negative_prompt_embeds_mask": torch.ones(negative.shape[:2], device=device).long(),
            }
            start = {}
            if request.images:
                # The pipeline would resize the image to edit, by its aspect ratio, which rounding
                # has changed. It is resized already, so give the ratio of the image to generate.
                reference = to_pil(request.images[number])
                assert reference.size == self.control_size(width, height), reference.size
                start["image"] = Image.new("RGB", (width, height))
                pipeline.image_processor.resize = partial(_same_image, reference)
            image = pipeline(
                prompt_embeds=prompt,
                prompt_embeds_mask=torch.ones(prompt.shape[:2], device=device).long(),
                **guidance if request.guidance > 1 else {},
                **start,
                width=width,
                height=height,
                num_inference_steps=request.steps,
                true_cfg_scale=request.guidance,
                generator=torch.Generator().manual_seed(request.seed + number),
                output_type="pt",
            ).images[0]
            samples.append(GeneratedSample("image", image.float().cpu() * 2 - 1))
        return samples

    def _pipeline(self, vae: Any) -> Any:
        import diffusers

        edit = {"processor": None} if self.takes_control else {}
        cls = diffusers.QwenImageEditPipeline if edit else diffusers.QwenImagePipeline
        pipeline = cls(
            scheduler=read_scheduler(self.folder),
            vae=vae,
            text_encoder=None,
            tokenizer=None,
            transformer=self.transformer,
            **edit,
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def _text_length(self) -> int:
        return EDIT_TEXT_LENGTH if self.takes_control else TEXT_LENGTH

    def _reference_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Return the shape of the latents of an image to edit, by rows and columns of the other."""
        width, height = self.control_size(columns * self.vae_scale, rows * self.vae_scale)
        return (self.vae.config.z_dim, height // self.vae_scale, width // self.vae_scale)

    def _encode_image(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode images to normalised latents, as videos of one frame: the VAE is a video VAE."""
        video = pixels.to(next(vae.parameters())).unsqueeze(2)
        with torch.no_grad():
            raw: Tensor = vae.encode(video).latent_dist.mode()[:, :, 0]
        mean, std = (
            torch.tensor(values, device=raw.device).view(1, -1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (raw - mean) / std


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


def to_pil(pixels_CHW: Tensor) -> Image.Image:  # noqa: N803
    """Convert pixels in [-1, 1] to an 8-bit PIL image."""
    scaled = pixels_CHW.clamp(-1, 1).add(1).mul(127.5).round().byte()
    return Image.fromarray(scaled.permute(1, 2, 0).cpu().numpy())


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

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised tensors like those that `predict` passes to the transformer."""
        tokens = sum(map(num_patches, _image_shapes(encoded)))
        return {
            "hidden_states": torch.empty(batch_size, tokens, config["in_channels"], dtype=dtype),
            "encoder_hidden_states": torch.empty(batch_size, *encoded.text_shape, dtype=dtype),
            "timestep": torch.empty(batch_size, dtype=dtype),
        }

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
    probe_config={**PROBE_JOINT_ATTENTION, "num_layers": 12},
    supported_models=SUPPORTED_MODELS,
    unsupported_inputs={
        "guidance_embeds": "a guidance value",
        "use_additional_t_cond": "a condition for layers",
        "use_layer3d_rope": "several layers",
    },
    unsupported_weights=("addition_t_embedding.",),  # Qwen-Image-Layered
)


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


def _adapter_pipeline(transformer: Callable[[Any], Any]) -> Any:
    """Return a pipeline without weights, to test whether diffusers loads an adapter file."""
    from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

    return QwenImagePipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer(QwenImageTransformer2DModel),
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
    pipeline=PipelineSpec(_adapter_pipeline, _adapter_config),
)
