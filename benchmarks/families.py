"""Models of three families at full width with random weights, and what the planner says of them.

A Flux-1-dev-shaped 12 B and a Qwen-Image-shaped 20 B at 1024x1024, and one expert of Wan2.2-A14B
for a clip of 33 frames at 832x480. LoRA of rank 32 beside every linear layer of the blocks that the
family names, in fp32; fewer blocks where whoever measures asks for them.
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
from gracetune.plan.launch_probe import prepare_for_training
from gracetune.plan.machines import FITTED_CONSTANTS, effective_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.problem import TRACED_BATCH
from gracetune.plan.trace import trace_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from gracetune.models.family import PlannerShapes
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.result import FrozenCompute
    from gracetune.plan.shapes import ModelShapes

RANK = 32
TRAINED_NBYTES = 4
STATE_NBYTES = 8
"""AdamW's two moments of each trained number, in fp32."""


@dataclass(frozen=True)
class Case:
    """A family with a sample, and changes to its published shape."""

    family: str
    picture: SampleShape
    config: Mapping[str, Any]
    counts: tuple[int, ...]
    """Blocks of each kind."""
    frozen_compute: FrozenCompute = "bf16"
    """What frozen products are computed in; it is traced in bf16 all the same, as a run does."""

    def outline(self) -> MetaModel:
        """On the meta device, its adapter in place, as it will be run."""
        shape = build_meta_model(ModelSection(family=self.family), self.picture, self.config)
        prepare_for_training(shape, AdapterSection(rank=RANK))
        return shape

    def shapes(self) -> ModelShapes:
        """One trace tells of any number of blocks: a few of each kind are looked at."""
        subject = replace(self.outline().trace_target(), products=torch.bfloat16)
        return trace_model(subject, TRACED_BATCH)

    def plan_model(
        self, shapes: ModelShapes, basics: MachineRates
    ) -> tuple[CostModel, FixedMemory]:
        """On a machine of these rates; and what it needs whatever is chosen."""
        assert len(shapes.kinds) == len(self.counts), f"{len(shapes.kinds)} kinds of blocks"
        order = tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))
        mine = replace(shapes, order=order)
        fixed = FixedMemory(
            optimizer_nbytes=mine.trained_nbytes // TRAINED_NBYTES * STATE_NBYTES,
            library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
            batches_ahead=0,
        )
        return CostModel(mine, effective_rates(basics), self.frozen_compute), fixed

    def model(self, device: torch.device) -> nn.Module:
        """Made on the device: random frozen weights in bf16, and a LoRA that is not zero."""
        cls = getattr(import_module("diffusers"), self._shape.class_name)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = cast(
                "nn.Module", cls.from_config({**self._shape.published_config, **self.config})
            )
        torch.set_default_dtype(torch.float32)
        make_attention_grads_contiguous(model)  # for the plain loop too: without, cuDNN's backward fails
        add_adapter({"": model}, AdapterSection(rank=RANK), self._shape.targets, seed=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter).mul_(0.02)
        return model.train()

    def call(
        self, model: nn.Module, batch: int, device: torch.device
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """A prediction for inputs that stay, and its target."""
        config = cast("Any", model).config
        encoded = self._shape.encoded_shape(config, self.picture)
        empty = self._shape.inputs(config, encoded, batch, torch.bfloat16)
        inputs = {name: torch.randn_like(tensor, device=device) for name, tensor in empty.items()}
        inputs["timestep"] = torch.rand_like(inputs["timestep"])
        others = self._shape.extra_arguments(encoded, batch)

        def predict() -> Tensor:
            return cast("Any", model)(**inputs, **others, return_dict=False)[0]

        return predict, inputs["hidden_states"]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """In the order of forward."""
        names = self._shape.blocks
        return [block for name in names for block in model.get_submodule(name).children()]

    @property
    def _shape(self) -> PlannerShapes:
        return planner_shapes(self.family)


PICTURE, CLIP = SampleShape(1024, 1024), SampleShape(832, 480, 33)


def flux(double: int, single: int) -> Case:
    """FLUX.1-dev with so many blocks of each kind."""
    config = {"num_layers": double, "num_single_layers": single}
    return Case("flux", PICTURE, config, (double, single))


def qwen(layers: int) -> Case:
    """Qwen-Image with so many blocks."""
    return Case("qwen_image", PICTURE, {"num_layers": layers}, (layers,))


def wan(layers: int, picture: SampleShape) -> Case:
    """One expert of Wan 2.2 with so many blocks."""
    return Case("wan22", picture, {"num_layers": layers}, (layers,))


TRACED = {"flux": flux(1, 2), "qwen": qwen(2), "wan": wan(2, PICTURE), "clip": wan(2, CLIP)}
TRACED |= {"fp8": TRACED["wan"]}
"""What the planner looks at."""
FULL = {"flux": flux(19, 38), "qwen": qwen(60), "wan": wan(40, PICTURE), "clip": wan(40, CLIP)}
SHORT = {"flux": flux(6, 12), "qwen": qwen(16), "wan": wan(12, PICTURE), "clip": wan(8, CLIP)}
SHORT |= {"fp8": replace(wan(12, PICTURE), frozen_compute="fp8")}


def rehearsed(case: Case) -> Case:
    """The same code in no time, on any machine."""
    narrow = planner_shapes(case.family).probe_config
    small = SampleShape(64, 64, min(case.picture.frames, 5))
    return replace(case, picture=small, config={**narrow, **case.config})
