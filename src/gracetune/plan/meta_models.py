"""Models by their configuration alone: on the meta device, with the batches they are called with.

A run file's `model.path` says what the model is, if it is a folder; otherwise the published shape
of the family stands for it, and the plan says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gracetune.errors import ConfigError, ModelError
from gracetune.models.attention_processors import make_attention_grads_contiguous
from gracetune.models.family import PLANNABLE, planner_shapes
from gracetune.plan.trace import TraceTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import EncodedShape, PlannerShapes, SampleShape


@dataclass(frozen=True)
class MetaModel:
    """A model without weights."""

    name: str
    model: nn.Module
    shapes: PlannerShapes
    experts: int
    encoded: EncodedShape
    """One sample of the run."""
    dtype: torch.dtype
    source: str
    """Where its shape is from."""

    def subject(self) -> TraceTarget:
        """For the tracer; an adapter must be in place by now."""
        blocks = [
            b for name in self.shapes.blocks for b in self.model.get_submodule(name).children()
        ]
        return TraceTarget(self.name, self.model, blocks, self._inputs, self._predict, self.dtype)

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        config = cast("Any", self.model).config
        return self.shapes.inputs(config, self.encoded, batch, self.dtype)

    def _predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        others = self.shapes.extra_arguments(self.encoded, len(batch["timestep"]))
        prediction: Tensor = model(**batch, **others, return_dict=False)[0]
        return prediction


def build_meta_model(
    section: ModelSection,
    picture: SampleShape,
    changes: Mapping[str, Any] | None = None,
    device: str = "meta",
) -> MetaModel:
    """The model that a run file names, or the published shape of its family.

    `changes` are to its configuration: fewer layers, say. On another device than `meta` its weights
    have values, any.
    """
    if section.family not in PLANNABLE:
        raise ConfigError(
            f"model.family is {section.family!r}; the planner knows the shapes of "
            f"{', '.join(PLANNABLE)}. `gracetune train` plans others from the model that "
            "it has loaded; in Python, gracetune.plan.trace.trace_model takes a Subject that names "
            "the model's blocks."
        )
    shapes = planner_shapes(section.family)
    config, experts, source = shapes.published_config, shapes.experts, shapes.published_name
    file = None if section.path is None else Path(section.path) / "transformer" / "config.json"
    if file is not None and file.is_file():
        class_name, config = _read(file)
        if class_name != shapes.class_name:
            raise ModelError(
                f"model.path {section.path!r} holds a {class_name}, but the transformer of "
                f"{section.family} is a {shapes.class_name}. Set model.family to the family of "
                "that folder, or name another folder."
            )
        experts = 2 if (file.parents[1] / "transformer_2").is_dir() else 1
        source = f"as in {file}"
    dtype = torch.float32 if section.dtype == "float32" else shapes.dtype
    model = _make(shapes.class_name, {**config, **(changes or {})}, dtype, device)
    return MetaModel(
        name=section.family,
        model=model,
        shapes=shapes,
        experts=experts,
        encoded=shapes.encoded_shape(cast("Any", model).config, picture),
        dtype=dtype,
        source=source,
    )


def _make(class_name: str, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> nn.Module:
    """A model of diffusers, all of it frozen."""
    cls = getattr(import_module("diffusers"), class_name)
    with torch.device(device):
        model = cast("nn.Module", cls.from_config(dict(config)))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    make_attention_grads_contiguous(model)  # as its family loads it
    return model.requires_grad_(False)


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        return str(config["_class_name"]), config
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{file} cannot be read as a model's configuration: {error}. Name a folder as "
            "diffusers saves it."
        ) from error
