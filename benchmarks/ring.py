"""Compare a LoRA step that streams its frozen weights with one whose weights are resident.

Streamed weights pass from host memory through a ring of device slots. The model has twenty of the
forty blocks of Wan2.2-A14B, with random weights and a LoRA of rank 32; a sample is one frame of
1024x1024 (4096 tokens). A resident and a streamed model are on the device and take turns, because
small eager batches are limited by the CPU, whose speed varies on a shared host. Steps are timed
with CUDA events, and the bandwidth of the link is measured in the same run. A streamed step takes
at least as long as the resident step, and at least as long as its copies; `ratio` is its time
divided by the larger of these bounds.

Each variant is measured with three slots first. If it stalls, the ring may add slots as in a run,
up to `--spare`, and is measured again as `grown`. A small batch is limited by the link in forward
and by compute in backward, and three slots are too few to prefetch across that boundary.

Blocks that are still in the slots when backward begins are not copied again. That saves a larger
share of twenty blocks than of forty; `copied_gib` is what was copied per step. `peak_gib` does not
include the other model.

    PYTHONPATH=src:benchmarks python benchmarks/ring.py [--out FOLDER] [--commit NAME]
        [--spare GIB] [--rehearse]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from wan14b import FULL, REHEARSAL, free_memory, make_model, make_step, time_each_step

from gracetune.memory.platform import open_machine
from gracetune.offload.buffer_autosize import MIN_STALL_SHARE, RING_WINDOW_PASSES
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.plan.apply import PlanLayout, apply_plan, fuse_operations
from gracetune.plan.result import BlockPlan
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from wan14b import Scale

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.result import ActivationMode

LAYERS = 20
TURNS = {1: 3, 2: 2, 4: 2}
"""Number of turns of each model, by batch size. Long steps vary less and need fewer turns."""
VARIANTS: list[tuple[bool, ActivationMode]] = [
    (compiled, activations) for compiled in (False, True) for activations in ("keep", "recompute")
]
"""Compiled or not, and the activation mode of all blocks; a rehearsal runs the first and last."""
STEPS_PER_TURN = 3
"""Steps of a turn, of which the first is not timed."""
SPARE_GIB = 12
MAX_WINDOWS = 8
"""Maximum number of stall windows to wait for the ring to stop growing."""
LINK_COPY_NBYTES = GIB // 2
MAX_RATIO = 1.04
REQUIRED_NBYTES = 120 * GIB


@dataclass
class Contender:
    """The resident or the streamed model, with its measurements."""

    scale: Scale
    model: nn.Module
    applied: AppliedPlan
    nbytes: int
    """Bytes of device memory that the model and its optimizer hold between steps."""
    step: Callable[[], torch.Tensor]
    seconds: list[float]
    peak_nbytes: int = 0


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--spare", type=int, default=SPARE_GIB, help="GiB of device memory for additional slots"
    )
    arguments = results.parse_arguments(parser)
    scale = REHEARSAL if arguments.rehearse else replace(FULL, layers=LAYERS)
    platform = open_machine().platform
    if not scale.has_memory(REQUIRED_NBYTES):
        print(f"This needs a GPU with 120 GiB free. Link: {platform.reasons['link']}")
        return 2
    began = time.perf_counter()
    turns_by_batch = {1: 1} if arguments.rehearse else TURNS
    copy_nbytes = 1 << 16 if arguments.rehearse else LINK_COPY_NBYTES
    link_gb_s = measure_link(scale, platform.link, copy_nbytes)
    print(f"link {link_gb_s:.1f} GB/s")
    figures: dict[str, object] = {"link_gb_s": link_gb_s, "spare_gib": arguments.spare}
    models = build_prepared_model(scale), build_prepared_model(scale)
    for compiled, activations in VARIANTS[:: 3 if arguments.rehearse else 1]:
        layouts = [
            PlanLayout([BlockPlan(weights, activations)] * scale.layers, compiled)
            for weights in ("resident", "streamed")
        ]
        contenders = [
            prepare(scale, model, layout, platform.link)
            for model, layout in zip(models, layouts, strict=True)
        ]
        name, spare_nbytes = variant_name(compiled, activations), arguments.spare * GIB
        measure(figures, name, *contenders, spare_nbytes, turns_by_batch)
        results.write("ring", figures, arguments.out, arguments.commit)
    figures["seconds"] = time.perf_counter() - began
    results.write("ring", figures, arguments.out, arguments.commit)
    return 0 if report(figures) or arguments.rehearse else 1


def build_prepared_model(scale: Scale) -> nn.Module:
    """Build a model and fuse its operations as a run does."""
    model = make_model(scale)
    fuse_operations(model)
    return model


def variant_name(compiled: bool, activations: ActivationMode) -> str:
    """Return the name of a variant in the result file."""
    return f"{'compiled' if compiled else 'eager'}.{activations}"


def measure_link(scale: Scale, link: Link, nbytes: int) -> float:
    """Return the GB/s of large copies from the kind of memory that weights are streamed from."""
    engine = open_copy_engine(scale.device, link)
    host, slot = engine.allocate_host(nbytes), engine.allocate_device(nbytes)
    host.fill_(1)  # unwritten pages are all the same zero page

    def copy() -> torch.Tensor:
        engine.copy(slot, host, poison=False).wait(prefetched=True)
        return slot

    seconds, _ = time_each_step(copy, 10, scale.device)
    engine.close()
    return nbytes / median(seconds[2:]) / 1e9


def prepare(scale: Scale, model: nn.Module, layout: PlanLayout, link: Link) -> Contender:
    """Apply a layout to a model, and measure the memory of the model and its optimizer."""
    device = scale.device
    on_device = sum(tensor.nbytes for tensor in model.parameters() if tensor.device == device)
    others_nbytes = torch.cuda.memory_allocated(device) - on_device
    engine = open_copy_engine(device, link)
    applied = apply_plan(model, {model: list(model.blocks)}, layout, engine, print_notice)
    step = make_step(model, min(TURNS), scale)
    step()
    gc.collect()
    nbytes = torch.cuda.memory_allocated(device) - others_nbytes
    return Contender(scale, model, applied, nbytes, step, [])


def measure(
    figures: dict[str, object],
    name: str,
    resident: Contender,
    streamed: Contender,
    spare_nbytes: int,
    turns_by_batch: dict[int, int],
) -> None:
    """Measure one variant with every batch size."""
    for batch, turns in turns_by_batch.items():
        for contender in (resident, streamed):
            contender.step = make_step(contender.model, batch, contender.scale)
        batch_name = f"batch_{batch}"
        found = alternate(figures, resident, streamed, turns)
        record(figures, f"{name}.resident.{batch_name}", as_figures(resident, streamed.nbytes))
        record(figures, f"{name}.streamed.{batch_name}", found)
        if found["waited_s"] > MIN_STALL_SHARE * found["step_s"]:
            grow_ring(streamed, spare_nbytes)
            grown = alternate(figures, resident, streamed, turns)
            record(figures, f"{name}.grown.{batch_name}", grown)
            streamed.applied.shrink_ring()
            streamed.applied.allow_ring_growth(0)
    for contender in (resident, streamed):
        contender.applied.close()
    free_memory()


def grow_ring(streamed: Contender, spare_nbytes: int) -> None:
    """Let the ring add slots until a window of passes adds none."""
    streamed.applied.allow_ring_growth(spare_nbytes)
    slots = 0
    for _ in range(MAX_WINDOWS):
        for _ in range(RING_WINDOW_PASSES):
            streamed.step()
        results.synchronize(streamed.scale.device)
        if slots == (slots := streamed.applied.ring.counters().slots):
            return


def alternate(
    figures: dict[str, object], resident: Contender, streamed: Contender, turns: int
) -> dict[str, float]:
    """Run both models in turns, and return the figures of the streamed one."""
    for contender in (resident, streamed):  # this step compiles and records the block order
        contender.seconds, contender.peak_nbytes = [], 0
        contender.step()
    before = streamed.applied.ring.counters()
    for _ in range(turns):
        for contender in (resident, streamed):
            take_turn(contender)
    after, steps = streamed.applied.ring.counters(), turns * STEPS_PER_TURN
    copied = (after.fetched_nbytes - before.fetched_nbytes) / steps
    link_s = copied / float(figures["link_gb_s"]) / 1e9
    resident_s, streamed_s = (median(c.seconds) for c in (resident, streamed))
    return as_figures(streamed, resident.nbytes) | {
        "slots": after.slots,
        "copied_gib": copied / GIB,
        "on_demand": (after.on_demand - before.on_demand) / steps,
        "waited_s": (after.stalled_s - before.stalled_s) / steps,
        "link_s": link_s,
        "resident_s": resident_s,
        "ratio": streamed_s / max(resident_s, link_s),
    }


def take_turn(contender: Contender) -> None:
    """Run and time some steps of one model, queued without synchronization as in a run."""
    contender.scale.reset_peak_memory()
    contender.step()
    device = contender.scale.device
    contender.seconds += time_each_step(contender.step, STEPS_PER_TURN - 1, device)[0]
    contender.peak_nbytes = max(contender.peak_nbytes, torch.cuda.max_memory_allocated())


def as_figures(contender: Contender, others_nbytes: int) -> dict[str, float]:
    """Return the step time, and the peak memory without that of the other model."""
    peak_gib = (contender.peak_nbytes - others_nbytes) / GIB
    return {"step_s": median(contender.seconds), "peak_gib": peak_gib}


def record(figures: dict[str, object], name: str, found: dict[str, float]) -> None:
    """Record and print the figures of one measurement."""
    figures[name] = found
    shown = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
    print(f"{name}: {shown}", flush=True)


def report(figures: dict[str, object]) -> bool:
    """Print each variant's ratio; return True if all are within `MAX_RATIO`.

    If the ring has grown, only the measurement after that counts.
    """
    all_met = True
    for name, variant in figures.items():
        if not isinstance(variant, dict) or "ratio" not in variant:
            continue
        final = name.replace(".streamed.", ".grown.") not in figures or ".grown." in name
        met = variant["ratio"] <= MAX_RATIO and variant["on_demand"] == 0
        all_met &= met or not final
        verdict = ("met   " if met else "MISSED") if final else "before"
        print(
            f"{verdict} {name}: {variant['ratio']:.3f} of its bound (at most {MAX_RATIO}), "
            f"{variant['step_s']:.3f} s, {variant['slots']:.0f} slots, "
            f"{variant['peak_gib']:.1f} GiB"
        )
    return all_met


def print_notice(notice: Notice) -> None:
    """Print a notice of the applied plan."""
    print("   ", notice.text)


if __name__ == "__main__":
    sys.exit(main())
