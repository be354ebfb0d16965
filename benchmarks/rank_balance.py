"""Plan how long ranks wait for each other when they share batches of mixed-length video.

The data are clips of 17 to 121 frames in three aspect ratios: of about 480p, and of 480p and 720p
together. The model is Wan2.2-14B with a LoRA, planned for an H200; each micro-batch is one clip.
Three sizes are traced and the others interpolated, as in a run; the figures include the error of
that. Three ways to divide the micro-batches of each optimizer step among ranks are compared:

    by time     gracetune: the longest first, each to the rank with the least work
    similar     the same, with `train.similar_batches` set to the micro-batches in a step
    by count    every rank gets as many, in the order of the epoch, like a DistributedSampler

`imbalance` is the mean over steps of (time of the slowest rank / mean time - 1). `least imbalance`
is a bound for any assignment: a micro-batch cannot be divided, so a step takes as long as its
longest one. `epoch` is the planned time of an epoch by time, relative to the same by count.
`accumulation` is the number of micro-batches of a step for each rank; with 1, no assignment can
balance the ranks unless the batches are similar. All times are planned, so no GPU is needed.

    PYTHONPATH=src:benchmarks python benchmarks/rank_balance.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import results
import torch

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.data.batch_order import BatchOrder, BucketGroup, RankShare
from gracetune.data.sample import Sample
from gracetune.models.family import SampleShape
from gracetune.plan.bucket_seconds import (
    bucket_seconds,
    planned_seconds,
    sizes_to_trace,
    token_counts,
)
from gracetune.plan.machines import FITTED_CONSTANTS, find_machine, machine_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.planner_input import build_cost_model
from gracetune.plan.search import Constraints, PlanBudget, find_best_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.data.sample import Shape
    from gracetune.plan.bucket_seconds import BucketSeconds
    from gracetune.plan.cost import CostModel
    from gracetune.plan.meta_models import MetaModel

MACHINE = "h200-pcie"
SIZES_480P = ((832, 480), (480, 832), (624, 624))
SIZES_720P = ((1280, 720), (720, 1280), (960, 960))
CLIPS = {17: 300, 33: 250, 49: 200, 65: 160, 81: 120, 97: 90, 121: 60}
"""Number of clips by their frames: short clips are more frequent than long ones."""
REHEARSED_CLIPS = {17: 30, 33: 20}
RANKS, ACCUMULATIONS = (2, 4, 8), (1, 2, 4, 8)
LIMIT = 0.10
"""Largest imbalance that is accepted."""


class PlannedWan:
    """Wan2.2-14B without weights: token counts and planned times of its clips."""

    def __init__(self, rehearse: bool) -> None:
        changes = {"num_layers": 1, "num_attention_heads": 2} if rehearse else {}
        self._rehearse = rehearse
        section = ModelSection(family="wan22")
        self._model = build_meta_model(section, SampleShape(832, 480), changes)
        with torch.device("meta"):
            targets = self._model.shapes.targets
            add_adapter({"": self._model.model}, AdapterSection(rank=32), targets, seed=0)

    def blocks(self) -> Sequence[torch.nn.Module]:
        return self._model.shapes.find_blocks(self._model.model)

    def latent_shape(self, *size: int) -> tuple[int, ...]:
        return tuple(self._at(size).encoded.latent_shape)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        _, frames, height, width = latent_shape
        return frames * (height // 2) * (width // 2)

    def seconds(self, sizes: Sequence[Shape]) -> tuple[BucketSeconds, float]:
        """Return the planned seconds of each size, and the largest error of the interpolation."""
        tokens = token_counts(cast("Any", self), sizes)
        by_count = {count: size for size, count in tokens.items()}
        models = {size: self._cost_model(size) for size in by_count.values()}
        largest = models[by_count[max(by_count)]]
        plan = self._plan(largest)
        print(f"plan for the largest clip: {plan.seconds.step:.1f} s, compiled: {plan.compiled}")
        traced = {
            by_count[tokens[size]]: planned_seconds(models[by_count[tokens[size]]], plan)
            for size in sizes_to_trace(tokens)
        }
        found = bucket_seconds(cast("Any", self), sizes, 1, traced)
        errors = [
            abs(found(size, 1) / planned_seconds(model, plan)[0] - 1)
            for size, model in models.items()
        ]
        return found, max(errors)

    def _at(self, size: Shape) -> MetaModel:
        config = cast("Any", self._model.model).config
        encoded = self._model.shapes.encoded_shape(config, SampleShape(*size))
        return replace(self._model, encoded=encoded)

    def _cost_model(self, size: Shape) -> CostModel:
        rates = machine_rates(find_machine(MACHINE))
        target = self._at(size).trace_target()
        return build_cost_model(target, rates, may_compile=not self._rehearse)

    def _plan(self, model: CostModel) -> Any:
        machine = find_machine(MACHINE)
        budget = PlanBudget(
            int(machine.device_memory.value - FITTED_CONSTANTS["context_nbytes"].value),
            machine.host_bytes,
            FITTED_CONSTANTS["fragmentation"].value,
        )
        compile_choices = (False,) if self._rehearse else (True, False)
        constraints = Constraints(
            samples=1,
            batches=(1,),
            compile=compile_choices,
            stream=True,
            offload=True,
            host_state=(0.0,),
            run_file_batch=1,
        )
        fixed = FixedMemory(optimizer_nbytes=2 * model.trained_nbytes, batches_ahead=2)
        return find_best_plan(model, fixed, budget, constraints, simulated=True).best


def mixed_order(
    sizes: Sequence[tuple[int, int]], clips: dict[int, int], similar: int = 1
) -> BatchOrder:
    """Return the batches of a dataset with `clips`: the number of clips by their frames."""
    groups = []
    for frames, count in clips.items():
        for place, (width, height) in enumerate(sizes):
            samples = tuple(
                Sample("clips", f"{width}x{height}x{frames}/{number}", "", "0", width, height)
                for number in range(place, count, len(sizes))
            )
            groups.append(BucketGroup(samples, 1, 0.0, (width, height, frames)))
    return BatchOrder([group for group in groups if group.samples], 1, 0, similar)


class Epoch(NamedTuple):
    """Planned times of the steps of an epoch."""

    imbalance: float
    least_imbalance: float
    seconds: float


def plan_epoch(order: BatchOrder, share: RankShare, seconds: BucketSeconds) -> Epoch:
    """Return the imbalance, the least that any assignment could have, and the time of an epoch."""
    ratios, least, epoch_s, consumed = [], [], 0.0, 0
    while consumed < order.epoch_length:
        ranks = [
            [seconds(*order.size_at(part.index)) for part in own]
            for own in share.assign(order, consumed)
        ]
        mean = sum(map(sum, ranks)) / len(ranks)
        ratios.append(max(map(sum, ranks)) / mean - 1)
        least.append(max(0.0, max(map(max, ranks)) / mean - 1))
        epoch_s += max(map(sum, ranks))
        consumed += share.num_batches(consumed)
    return Epoch(sum(ratios) / len(ratios), sum(least) / len(least), epoch_s)


def measure(make_order: Callable[[int], BatchOrder], seconds: BucketSeconds) -> dict[str, object]:
    """Compare the ways to divide an epoch's batches, for all numbers of ranks and batches."""
    order = make_order(1)
    figures: dict[str, object] = {"micro-batches in an epoch": order.epoch_length}
    for ranks in RANKS:
        for accumulation in ACCUMULATIONS:
            share = RankShare(0, ranks, None, seconds).with_steps_of(ranks * accumulation)
            ours = plan_epoch(order, share, seconds)
            theirs = plan_epoch(order, replace(share, batch_seconds=None), seconds)
            similar = plan_epoch(make_order(ranks * accumulation), share, seconds)
            figures[f"{ranks} ranks, accumulation {accumulation}"] = {
                "imbalance by time": round(ours.imbalance, 3),
                "imbalance by count": round(theirs.imbalance, 3),
                "imbalance of similar batches": round(similar.imbalance, 3),
                "least imbalance": round(ours.least_imbalance, 3),
                "epoch": round(ours.seconds / theirs.seconds, 3),
                "epoch of similar batches": round(similar.seconds / theirs.seconds, 3),
                "within 10 %": min(ours.imbalance, similar.imbalance) <= LIMIT,
            }
            print(
                f"{ranks} ranks, accumulation {accumulation}: imbalance {ours.imbalance:6.1%} by "
                f"time, {theirs.imbalance:6.1%} by count, {similar.imbalance:6.1%} similar, at "
                f"least {ours.least_imbalance:6.1%}; epoch {ours.seconds / theirs.seconds:.2f}, "
                f"{similar.seconds / theirs.seconds:.2f} similar"
            )
    return figures


def main() -> None:
    """Plan both datasets and write `rank_balance.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments = results.parse_arguments(parser)
    wan = PlannedWan(arguments.rehearse)
    clips = REHEARSED_CLIPS if arguments.rehearse else CLIPS
    figures: dict[str, object] = {"model": "Wan2.2-14B, LoRA of rank 32", "machine": MACHINE}
    datasets = {"480p": SIZES_480P, "480p and 720p": SIZES_480P + SIZES_720P}
    for name, sizes in list(datasets.items())[: 1 if arguments.rehearse else None]:
        order = mixed_order(sizes, clips)
        seconds, error = wan.seconds(list(order.draws_by_size()))
        all_seconds = [seconds(size, 1) for size in order.draws_by_size()]
        spread = max(all_seconds) / min(all_seconds)
        print(f"{name}: the longest clip takes {spread:.0f} times as long as the shortest")
        figures[name] = {
            "longest to shortest": round(spread, 1),
            "largest error of the interpolation": round(error, 3),
            **measure(partial(mixed_order, sizes, clips), seconds),
        }
    results.write("rank_balance", figures, arguments.out, arguments.commit)


if __name__ == "__main__":
    main()
