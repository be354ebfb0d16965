"""Build a family's transformer from its configuration alone, usually on the meta device.

`gracetune plan` and the launch probe need a model's structure but not its weights. The
transformer's config.json of the run file's model is used, if the model is a local folder or its
configuration can be had from the hub or its cache. Otherwise it is the published configuration of
the model, if the family knows it, or of the family's default model, and the report says so. Each
family describes its shapes in `PlannerShapes` (models/family.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gracetune.errors import ConfigError
from gracetune.models.attention_processors import make_attention_grads_contiguous
from gracetune.models.family import PLANNABLE, planner_shapes
from gracetune.models.pipeline_folder import read_model_config, without_progress_bars
from gracetune.models.registry import FAMILIES
from gracetune.plan.trace import TraceTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import EncodedShape, PlannerShapes, SampleShape


@dataclass(frozen=True)
class MetaModel:
    """A transformer without pretrained weights, and the shapes of one encoded sample."""

    name: str
    model: nn.Module
    shapes: PlannerShapes
    num_transformers: int
    encoded: EncodedShape
    """Shapes of one sample's latents and text embeddings."""
    dtype: torch.dtype
    source: str
    """Origin of the configuration (a file, or the published model's name), for the report."""

    def trace_target(self) -> TraceTarget:
        """Return the model, its blocks and its inputs for the tracer.

        Add the adapter to the model before this call.
        """
        blocks = self.shapes.find_blocks(self.model)
        return TraceTarget(self.name, self.model, blocks, self._inputs, self._predict, self.dtype)

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        config = cast("Any", self.model).config
        return self.shapes.inputs(config, self.encoded, batch, self.dtype)

    def _predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = self.shapes.call(model, self.encoded, batch)
        return output


def build_meta_model(
    section: ModelSection,
    sample: SampleShape,
    changes: Mapping[str, Any] | None = None,
    device: str = "meta",
    folder: Path | None = None,
) -> MetaModel:
    """Build the transformer of a run file's `model` section without loading weights.

    `folder` has the configuration of the model; by default it is `model.path`, if that is a local
    folder. Without one, `model.path` may name a model on the hub that the family knows; for other
    names, the family's default model is built. `changes` override the configuration, such as the
    number of layers. On a device other than `meta`, the weights are random.
    """
    if section.family not in PLANNABLE:
        raise ConfigError(
            f"model.family is {section.family!r}; the planner knows the shapes of "
            f"{', '.join(PLANNABLE)}. `gracetune train` plans others from the model that "
            "it has loaded; in Python, pass a TraceTarget to gracetune.plan.trace.trace_model."
        )
    shapes = planner_shapes(section.family)
    config, source = shapes.published_config, shapes.published_name
    if section.path is not None and section.path in shapes.other_published:
        config = {**config, **shapes.other_published[section.path]}
        source = f"the published {section.path}"
    experts_of = {model.name: model.experts for model in FAMILIES[section.family].models}
    experts = experts_of.get(section.path or "", next(iter(experts_of.values()), 1))
    if folder is None and section.path is not None:
        folder = Path(section.path)
    file = None if folder is None else folder / shapes.component / "config.json"
    if file is not None and file.is_file():
        model_name = f"transformer of {section.family}"
        config = read_model_config(file.parent, shapes.class_name, model_name)
        shapes.check_config(config, f"model.path {str(folder)!r} holds a transformer that")
        experts = 2 if (file.parents[1] / "transformer_2").is_dir() else 1
        source = f"as in {file}"
    dtype = torch.float32 if section.dtype == "float32" else shapes.dtype
    model = _build(shapes, {**config, **(changes or {})}, dtype, device)
    return MetaModel(
        name=section.family,
        model=model,
        shapes=shapes,
        num_transformers=experts,
        encoded=shapes.encoded_shape(cast("Any", model).config, sample),
        dtype=dtype,
        source=source,
    )


def _build(
    shapes: PlannerShapes, config: Mapping[str, Any], dtype: torch.dtype, device: str
) -> nn.Module:
    """Build a diffusers model from its configuration, with frozen parameters."""
    cls = getattr(import_module("diffusers"), shapes.class_name)
    with torch.device(device), without_progress_bars():
        model = cast("nn.Module", cls.from_config(dict(config)))
    for name, parameter in model.named_parameters():
        is_fp32 = not set(shapes.fp32_layers).isdisjoint(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if is_fp32 else dtype)
    make_attention_grads_contiguous(model)  # as the family does when it loads weights
    return model.requires_grad_(False)
