"""The memory of a training run, item by item: what a planner counts, for those who plan by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.plan.ask import cache_nbytes
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.plan.ask import Trained
    from gracetune.plan.outlines import Outline
    from gracetune.plan.shapes import ModelShapes


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One item."""

    item: str
    nbytes: int

    def __str__(self) -> str:
        return f"| {self.item} | {format_bytes(self.nbytes)} |"


def memory_table(
    outline: Outline, shapes: ModelShapes, trained: Trained, samples: int
) -> Iterator[MemoryRow]:
    """Of a data set of so many samples, and of a step with one of them."""
    latents, text = cache_nbytes(outline)
    experts = outline.experts
    both = " of both experts" if experts == 2 else ""
    yield MemoryRow(f"latents of {samples} samples", samples * latents)
    yield MemoryRow(
        f"text of {samples} samples, padded (stored without padding: less)", samples * text
    )
    yield MemoryRow(f"frozen weights{both}", experts * shapes.frozen_nbytes)
    yield MemoryRow(f"adapters{both}", experts * trained.nbytes)
    yield MemoryRow(f"adapters{both}, copied for products", experts * shapes.copies_nbytes)
    yield MemoryRow("gradients of one step", trained.nbytes)
    yield MemoryRow(f"optimizer state{both}", experts * trained.state_nbytes)
    blocks = shapes.blocks
    for name, ways in (
        ("recomputed, compiled", [block.compiled.recompute for block in blocks]),
        ("kept lean, compiled", [block.compiled.lean for block in blocks]),
        ("kept, compiled", [block.compiled.keep for block in blocks]),
        ("kept, eager", [block.eager.keep for block in blocks]),
    ):
        held = sum(
            way.saved_nbytes + (block.input_nbytes if way.saves_input else 0)
            for way, block in zip(ways, blocks, strict=True)
        )
        yield MemoryRow(f"activations of one sample, {name}", held // shapes.batch)
