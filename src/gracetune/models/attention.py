"""The attention backend, by the names that run files use.

What is not installed is refused by name. A backend that the model's attention would ignore is
refused too: diffusers accepts it without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
"""What torch does on its own; `auto` is measured later, on a GPU, by what the model asks for."""


def choose_attention(transformer: nn.Module, name: str) -> None:
    """Switch the transformer to this backend, or say why it cannot be."""
    if name in UNTOUCHED:
        return
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"model.attention_mechanism {name!r} is not known. Known: {known}.")
    try:
        backend = backend_of(name)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(
            f"model.attention_mechanism {name!r} cannot be used here: {error} "
            "Set it to auto or sdpa."
        ) from error
    if not switch_attention(transformer, backend):
        raise ConfigError(
            f"model.attention_mechanism is {name!r}, but {type(transformer).__name__} does not use "
            "diffusers' attention dispatcher; set it to auto or sdpa."
        )


def backend_of(name: str) -> AttentionBackendName:
    """diffusers' own name; an error where what it needs is not installed."""
    backend = AttentionBackendName(BACKENDS[name])
    _check_attention_backend_requirements(backend)
    return backend


def switch_attention(transformer: nn.Module, backend: AttentionBackendName) -> int:
    """Give this backend to all attention that takes one; gives how many did.

    diffusers' own `set_attention_backend` would make it the default of the whole process too, for
    encoders and for runs to come.
    """
    processors = switchable(transformer)
    for processor in processors:
        processor._attention_backend = backend
    return len(processors)


def switchable(transformer: nn.Module) -> list[Any]:
    """The attention processors that go through diffusers' dispatcher."""
    if not isinstance(transformer, ModelMixin):
        return []
    return [p for p in transformer.attn_processors.values() if "_attention_backend" in dir(p)]
