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
from gracetune.models.dense_gradients import with_dense_gradients
from gracetune.plan.calls import Subject
from gracetune.plan.known_models import PUBLISHED, SHAPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import ModelSection
    from gracetune.plan.known_models import Encoded, SampleShape, Shape


@dataclass(frozen=True)
class Outline:
    """A model without weights."""

    name: str
    model: nn.Module
    shape: Shape
    experts: int
    encoded: Encoded
    """One sample of the run."""
    dtype: torch.dtype
    note: str
    """Where its shape is from."""

    def subject(self) -> Subject:
        """For the tracer; an adapter must be in place by now."""
        blocks = [
            b for name in self.shape.blocks for b in self.model.get_submodule(name).children()
        ]
        return Subject(self.name, self.model, blocks, self._inputs, self._predict, self.dtype)

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        config = cast("Any", self.model).config
        return self.shape.inputs(config, self.encoded, batch, self.dtype)

    def _predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        others = self.shape.others(self.encoded, len(batch["timestep"]))
        prediction: Tensor = model(**batch, **others, return_dict=False)[0]
        return prediction


def outline(
    section: ModelSection,
    picture: SampleShape,
    changes: Mapping[str, Any] | None = None,
    device: str = "meta",
) -> Outline:
    """The model that a run file names, or the published shape of its family.

    `changes` are to its configuration: fewer layers, say. On another device than `meta` its weights
    have values, any.
    """
    if section.family not in PUBLISHED:
        raise ConfigError(
            f"model.family is {section.family!r}; the planner knows the shapes of "
            f"{', '.join(sorted(PUBLISHED))}. `gracetune train` plans others from the model that "
            "it has loaded; in Python, gracetune.plan.trace.trace_model takes a Subject that names "
            "the model's blocks."
        )
    published = PUBLISHED[section.family]
    class_name, config = published.class_name, published.config
    experts, note = published.experts, published.note
    file = None if section.path is None else Path(section.path) / "transformer" / "config.json"
    if file is not None and file.is_file():
        class_name, config = _read(file)
        experts = 2 if (file.parents[1] / "transformer_2").is_dir() else 1
        note = f"as in {file}"
    if class_name not in SHAPES:
        raise ModelError(
            f"model.path {section.path!r} holds a {class_name}, whose blocks the planner cannot "
            f"find; it knows those of {', '.join(sorted(SHAPES))}. Set plan: off, or plan in "
            "Python: gracetune.plan.trace.trace_model takes a Subject that names the blocks."
        )
    dtype = torch.float32 if section.dtype == "float32" else published.dtype
    model = _make(class_name, {**config, **(changes or {})}, dtype, device)
    return Outline(
        name=section.family,
        model=model,
        shape=SHAPES[class_name],
        experts=experts,
        encoded=SHAPES[class_name].encoded(cast("Any", model).config, picture),
        dtype=dtype,
        note=note,
    )


def _make(class_name: str, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> nn.Module:
    """A model of diffusers, all of it frozen."""
    cls = getattr(import_module("diffusers"), class_name)
    with torch.device(device):
        model = cast("nn.Module", cls.from_config(dict(config)))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with_dense_gradients(model)  # as its family loads it
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
