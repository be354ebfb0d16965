"""Build diffusers pipelines without weights, in which the loading of adapter files is checked."""

from __future__ import annotations

import logging
import math
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gracetune.adapters.files.keys import BLOCK
from gracetune.adapters.files.layers import delta_shape
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gracetune.adapters.files.keys import PipelineSpec
    from gracetune.adapters.files.layers import Layer


class LayerShapes:
    """The shapes of the weights that an adapter changes, by module name without block numbers.

    A model family derives from them the configuration of a transformer that the adapter fits.
    """

    HEAD_WIDTH = 128
    """Width of an attention head, which is the same in all published models that are checked."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._modules = tuple(layers)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.by_module: dict[str, tuple[int, ...]] = {}
        """Shape of each weight by the module's full name, without norms and biases alone."""
        for module, layer in layers.items():
            shape = delta_shape(layer)
            if len(shape) > 1 and shape[1]:
                self.by_module[module] = shape
                name = ".".join(part for part in module.split(".") if not part.isdigit())
                self._shapes.setdefault(name, shape)
        self._blocks = count_blocks(layers)

    def size(self, axis: int, default: int, *names: str) -> int:
        """Return the size of a weight's axis, in the first of these modules that the adapter has.

        If it has none of them, the result is `default`.
        """
        return next((self._shapes[name][axis] for name in names if name in self._shapes), default)

    def fan_in(self, default: int, name: str) -> int:
        """Return the input size of a convolution times the kernel's, or `default` without it.

        Some files have the kernel's axes flattened into the input.
        """
        return math.prod(self._shapes[name][1:]) if name in self._shapes else default

    def num_blocks(self, kind: str, module: str = "") -> int:
        """Return how many blocks of a kind, such as `transformer_blocks`, the model needs.

        With `module`, only blocks count in which the adapter has it, and there may be none.
        """
        if not module:
            return self._blocks.get(kind, 1)
        return count_blocks(name for name in self._modules if f".{module}" in name).get(kind, 0)

    def heads(self, width: int) -> dict[str, object]:
        """Return the number and the width of attention heads for a hidden size of `width`."""
        head = self.HEAD_WIDTH if width % self.HEAD_WIDTH == 0 else width
        return {"num_attention_heads": width // head, "attention_head_dim": head}


def count_blocks(modules: Iterable[str]) -> dict[str, int]:
    """Return, by kind of block, how many blocks a model needs to have all of these modules."""
    counts: dict[str, int] = {}
    for module in modules:
        in_block = BLOCK.match(module)
        if in_block:
            kind = in_block[1].rstrip(".")
            counts[kind] = max(counts.get(kind, 0), int(in_block[2]) + 1)
    return counts


def placeholder_pipeline(
    spec: PipelineSpec, layers: Mapping[str, Layer], config: Mapping[str, object] | None
) -> Any:
    """Return a diffusers pipeline without weights, into which an adapter's layers can be loaded.

    `config` is the transformer's configuration; by default it is derived from the layers.
    """
    settings = spec.config(LayerShapes(layers)) if config is None else config
    dtypes = {tensor.dtype for layer in layers.values() for tensor in layer.tensors.values()}
    # With the adapter's own dtype nothing is converted on load.
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    with quiet_diffusers():
        return spec.build(lambda cls: placeholder_model(cls, settings, dtype))


def placeholder_model(cls: Any, config: Mapping[str, object], dtype: torch.dtype) -> Any:
    """Return a model whose parameters are zeros that take no memory."""
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    try:
        with torch.device("meta"):
            model: nn.Module = cls(**settings)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AdapterError(
            f"no {cls.__name__} can be built from this configuration: {error}. "
            "Give the config.json of the transformer that the adapter is for.",
            kind="other-model",
        ) from error
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Silence diffusers' logs and warnings, because the check reports the same problems itself."""
    from diffusers.utils import logging as diffusers_logging

    def is_kept(record: logging.LogRecord) -> bool:  # image processors are imported, but not used
        return "requires torchvision (not installed)" not in record.getMessage()

    importer = logging.getLogger("transformers.utils.import_utils")
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(logging.CRITICAL)
    importer.addFilter(is_kept)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        importer.removeFilter(is_kept)
        diffusers_logging.set_verbosity(verbosity)
