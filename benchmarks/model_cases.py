"""Build models of three families with random weights, and their cost models.

FLUX.1-dev (12 B) and Qwen-Image (20 B) at 1024x1024, and one expert of Wan2.2-A14B for a video of
33 frames at 832x480. All have the published width and an fp32 LoRA of rank 32 on the family's
target layers. Some benchmarks use fewer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.models.attention_processors import make_attention_grads_contiguous
from gracetune.models.family import SampleShape, planner_shapes
from gracetune.plan.cost import CostModel
from gracetune.plan.launch_overhead import prepare_for_training
from gracetune.plan.machines import FITTED_CONSTANTS, effective_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.planner_input import TRACED_BATCH
from gracetune.plan.trace import trace_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from gracetune.models.family import PlannerShapes
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.result import FrozenCompute
    from gracetune.plan.trace_records import ModelTraces

RANK = 32
TRAINED_NBYTES = 4
STATE_NBYTES = 8
"""Bytes of AdamW's two fp32 moments per trained parameter."""


@dataclass(frozen=True)
class Case:
    """A model to measure: a family, changes to its published configuration, and a sample size."""

    family: str
    sample: SampleShape
    config: Mapping[str, Any]
    counts: tuple[int, ...]
    """Number of blocks of each kind."""
    frozen_compute: FrozenCompute = "bf16"
    """Precision of frozen matmuls."""

    def meta_model(self) -> MetaModel:
        """Return the model on the meta device, with its adapter and fused as in a run."""
        model = build_meta_model(ModelSection(family=self.family), self.sample, self.config)
        prepare_for_training(model, AdapterSection(rank=RANK), self.frozen_compute)
        return model

    def shapes(self) -> ModelTraces:
        """Trace the model on the meta device and return its shapes."""
        target = replace(self.meta_model().trace_target(), compute_dtype=torch.bfloat16)
        return trace_model(target, TRACED_BATCH)

    def plan_model(self, shapes: ModelTraces, rates: MachineRates) -> tuple[CostModel, FixedMemory]:
        """Return the planner's cost model for a machine, and the memory that every plan needs."""
        assert len(shapes.kinds) == len(self.counts), f"{len(shapes.kinds)} kinds of blocks"
        order = tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))
        shapes = replace(shapes, order=order)
        fixed = FixedMemory(
            optimizer_nbytes=shapes.trained_nbytes // TRAINED_NBYTES * STATE_NBYTES,
            library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
            batches_ahead=0,
        )
        return CostModel(shapes, effective_rates(rates), self.frozen_compute), fixed

    def model(self, device: torch.device) -> nn.Module:
        """Build the model on the device with random bf16 weights and a random LoRA."""
        cls = getattr(import_module("diffusers"), self._shape.class_name)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = cast(
                "nn.Module", cls.from_config({**self._shape.published_config, **self.config})
            )
        torch.set_default_dtype(torch.float32)
        make_attention_grads_contiguous(model)  # cuDNN's backward needs it, in the plain loop too
        add_adapter({"": model}, AdapterSection(rank=RANK), self._shape.targets, seed=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter).mul_(0.02)
        return model.train()

    def make_forward(
        self, model: nn.Module, batch: int, device: torch.device
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """Return a function that runs one forward pass on fixed inputs, and a target tensor."""
        config = cast("Any", model).config
        encoded = self._shape.encoded_shape(config, self.sample)
        empty = self._shape.inputs(config, encoded, batch, torch.bfloat16)
        inputs = {name: torch.randn_like(tensor, device=device) for name, tensor in empty.items()}
        inputs["timestep"] = torch.rand_like(inputs["timestep"])
        others = self._shape.extra_arguments(encoded, batch)

        def predict() -> Tensor:
            return cast("Any", model)(**inputs, **others, return_dict=False)[0]

        return predict, inputs["hidden_states"]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks in forward order."""
        names = self._shape.blocks
        return [block for name in names for block in model.get_submodule(name).children()]

    @property
    def _shape(self) -> PlannerShapes:
        return planner_shapes(self.family)


IMAGE, CLIP = SampleShape(1024, 1024), SampleShape(832, 480, 33)


def flux(double: int, single: int) -> Case:
    """Return FLUX.1-dev with this many double and single blocks."""
    config = {"num_layers": double, "num_single_layers": single}
    return Case("flux", IMAGE, config, (double, single))


def qwen(layers: int) -> Case:
    """Return Qwen-Image with this many blocks."""
    return Case("qwen_image", IMAGE, {"num_layers": layers}, (layers,))


def wan(layers: int, sample: SampleShape) -> Case:
    """Return one expert of Wan 2.2 with this many blocks."""
    return Case("wan22", sample, {"num_layers": layers}, (layers,))


TRACED = {"flux": flux(1, 2), "qwen": qwen(2), "wan": wan(2, IMAGE), "clip": wan(2, CLIP)}
TRACED |= {"fp8": replace(TRACED["wan"], frozen_compute="fp8")}
"""Models to trace: one or two blocks of each kind are enough."""
FULL = {"flux": flux(19, 38), "qwen": qwen(60), "wan": wan(40, IMAGE), "clip": wan(40, CLIP)}
SHORT = {"flux": flux(6, 12), "qwen": qwen(16), "wan": wan(12, IMAGE), "clip": wan(8, CLIP)}
SHORT |= {"fp8": replace(wan(12, IMAGE), frozen_compute="fp8")}


def miniature_of(case: Case) -> Case:
    """Return a tiny version of a model that runs on a CPU, to test the benchmark."""
    probe_config = planner_shapes(case.family).probe_config
    small = SampleShape(64, 64, min(case.sample.frames, 5))
    counts = tuple(min(count, 2) for count in case.counts)
    config = {**probe_config, **dict(zip(case.config, counts, strict=True))}
    return replace(case, sample=small, config=config, counts=counts)
