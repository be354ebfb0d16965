"""The attention backend, by the names that run files use.

What is not installed is refused by name. A backend that the model's attention would ignore is
refused too: diffusers accepts it without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _check_attention_backend_requirements,
)
from diffusers.models.modeling_utils import ModelMixin

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

BACKENDS = {
    "sdpa": "native",
    "math": "_native_math",
    "cudnn": "_native_cudnn",
    "efficient": "_native_efficient",
    "flash": "_native_flash",
    "flash_attn_2": "flash",
    "flash_attn_3": "_flash_3",
    "flex": "flex",
    "sage": "sage",
    "xformers": "xformers",
}
UNTOUCHED = ("auto", "sdpa")
"""What torch does on its own."""


def choose_attention(transformer: nn.Module, name: str) -> None:
    """Switch the transformer to this backend, or say why it cannot be."""
    if name in UNTOUCHED:
        return
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"model.attention_mechanism {name!r} is not known. Known: {known}.")
    assert isinstance(transformer, ModelMixin), type(transformer)
    backend = AttentionBackendName(BACKENDS[name])
    try:
        _check_attention_backend_requirements(backend)
        if any(_takes_backend(processor) for processor in transformer.attn_processors.values()):
            transformer.set_attention_backend(backend.value)
            return
    except (RuntimeError, ImportError, ValueError) as error:
        raise ConfigError(
            f"model.attention_mechanism {name!r} cannot be used here: {error} "
            "Set it to auto or sdpa."
        ) from error
    raise ConfigError(
        f"model.attention_mechanism is {name!r}, but {type(transformer).__name__} does not use "
        "diffusers' attention dispatcher; set it to auto or sdpa."
    )


def _takes_backend(processor: object) -> bool:
    return "_attention_backend" in dir(processor)
