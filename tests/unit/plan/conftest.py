from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gracetune.plan.shapes import ModelShapes


@pytest.fixture(scope="session")
def wan_shapes() -> ModelShapes:
    """One block of Wan-14B with a LoRA of rank 32, one frame of 1024x1024."""
    from gracetune.cli.plan import make_trainable
    from gracetune.config.schema import AdapterSection, ModelSection
    from gracetune.plan.known_models import Picture
    from gracetune.plan.make import TRACED_BATCH
    from gracetune.plan.outlines import outline
    from gracetune.plan.trace import trace_model

    shape = outline(ModelSection(family="wan22"), Picture(1024, 1024), {"num_layers": 1})
    make_trainable(shape, AdapterSection(rank=32))
    return trace_model(shape.subject(), TRACED_BATCH)
