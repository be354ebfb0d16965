"""What Qwen-Image's language model is asked, and what is kept of its answer.

It reads a template with the caption in it; for an edit also the picture that is edited. The states
of all tokens from the end of the fixed words on are the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from gracetune.models.captions import tokens_of

if TYPE_CHECKING:
    from torch import Tensor

TEXT_LENGTH = 1024
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
"""Tokens before the caption, whose states are left out."""
IMAGE = "<|image_pad|>"
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
EDIT_TEMPLATE_TOKENS = 64
"""Tokens before the picture."""


def describe(encoder: Any, tokenizer: Any, caption: str) -> Tensor:
    """The text of a caption."""
    found = tokens_of(tokenizer, TEMPLATE.format(caption), TEXT_LENGTH + TEMPLATE_TOKENS)
    return _states(encoder, found)[TEMPLATE_TOKENS:]


def describe_edit(
    encoder: Any,
    tokenizer: Any,
    looker: Any,
    caption: str,
    picture_CHW: Tensor,  # noqa: N803
) -> Tensor:
    """The text of an instruction and of the picture in [-1, 1] that it is about."""
    seen = looker(images=[picture_of(picture_CHW)], return_tensors="pt")
    tokens = int(seen["image_grid_thw"].prod()) // looker.merge_size**2
    text = EDIT_TEMPLATE.format(caption).replace(IMAGE, IMAGE * tokens)
    length = TEXT_LENGTH + EDIT_TEMPLATE_TOKENS + tokens
    found = dict(tokens_of(tokenizer, text, length))
    image = found["input_ids"] == encoder.config.image_token_id
    return _states(encoder, {**found, **seen, "mm_token_type_ids": image.int()})[
        EDIT_TEMPLATE_TOKENS:
    ]


def picture_of(pixels_CHW: Tensor) -> Image.Image:  # noqa: N803
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
