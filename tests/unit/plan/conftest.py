from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gracetune.plan.result import FrozenCompute
    from gracetune.plan.trace_records import ModelTraces


@pytest.fixture(scope="session")
def wan_shapes() -> ModelTraces:
    """One block of Wan-14B with peft's own LoRA of rank 32 in bf16, one frame of 1024x1024."""
    import torch

    from gracetune.adapters.inject import add_adapter
    from gracetune.config.schema import AdapterSection, ModelSection
    from gracetune.models.family import SampleShape
    from gracetune.plan.meta_models import build_meta_model
    from gracetune.plan.planner_input import TRACED_BATCH
    from gracetune.plan.trace import trace_model

    shape = build_meta_model(
        ModelSection(family="wan22"), SampleShape(1024, 1024), {"num_layers": 1}
    )
    with torch.device("meta"):
        add_adapter({"": shape.model}, AdapterSection(rank=32), shape.shapes.targets, seed=0)
    for parameter in shape.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return trace_model(shape.trace_target(), TRACED_BATCH)


@pytest.fixture(scope="session")
def fused_shapes() -> ModelTraces:
    """The same block as in a run: LoRA in fp32, with fused matmuls."""
    return trace_as_in_a_run("bf16")


@pytest.fixture(scope="session")
def fp8_shapes() -> ModelTraces:
    """The same block in a run whose frozen layers compute in fp8."""
    return trace_as_in_a_run("fp8")


def trace_as_in_a_run(frozen_compute: FrozenCompute) -> ModelTraces:
    from gracetune.cli.plan import prepare_meta_model
    from gracetune.config.schema import AdapterSection, ModelSection
    from gracetune.models.family import SampleShape
    from gracetune.plan.meta_models import build_meta_model
    from gracetune.plan.planner_input import TRACED_BATCH
    from gracetune.plan.trace import trace_model

    shape = build_meta_model(
        ModelSection(family="wan22"), SampleShape(1024, 1024), {"num_layers": 1}
    )
    prepare_meta_model(shape, AdapterSection(rank=32), frozen_compute)
    return trace_model(shape.trace_target(), TRACED_BATCH)
