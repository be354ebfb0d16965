"""What streaming frozen weights costs a LoRA step, beside the resident step and the link.

Blocks of Wan2.2-A14B's shape, twenty of forty, random weights, one frame of 1024x1024 (4096
tokens), LoRA of rank 32. Two equal models are on the device, one resident and one streamed, and
take turns: a host that others share is not equally fast all the time, and a small batch that is
not compiled is bound by it. Steps are timed by events on the device; the link is measured in the
same run, from the same kind of host memory. A streamed step cannot be faster than the larger of
the resident step and the time its bytes need on the link: `ratio` is how near it comes.

Every way is measured with three slots first. Where that waits for weights, the ring may then grow
as it does in a run, within `--spare`, and is measured again when it has settled: `grown`. A small
batch is bound by the link on its way forward and by computing on its way back, and no ring of
three slots can carry what the link has left over from one to the other.

What is in the slots at either turn is not fetched again, which is more of twenty blocks than it
would be of forty: `copied_gib` has what was. `peak_gib` is without what the other model holds.

    PYTHONPATH=src:benchmarks python benchmarks/ring.py [--out FOLDER] [--commit NAME]
        [--spare GIB]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from wan14b import DEVICE, time_each_step, free_memory, make_model, make_step

from gracetune.memory.platform import open_machine
from gracetune.offload.autosize import RING_WINDOW_PASSES, MIN_STALL_SHARE
from gracetune.offload.copies import open_copy_engine
from gracetune.plan.apply import PlanLayout, fuse_operations, apply_plan
from gracetune.plan.result import BlockPlan
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.result import ActivationMode

LAYERS = 20
TURNS = {1: 3, 2: 2, 4: 2}
"""Of each model, by batch: long steps differ less."""
STEPS = 3
"""In each turn; the first is not timed."""
SPARE_GIB = 12
MOST_WINDOWS = 8
"""In which a ring must have settled."""
COPIED = GIB // 2
LONGEST_RATIO = 1.04
NEEDED = 120 * GIB


@dataclass
class Side:
    """One of the two models, as it runs now."""

    model: nn.Module
    placed: AppliedPlan
    nbytes: int
    """What it holds on the device between steps."""
    step: Callable[[], torch.Tensor]
    seconds: list[float]
    peak_nbytes: int = 0


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--spare", type=int, default=SPARE_GIB, help="GiB that slots may take more")
    arguments = parser.parse_args()
    platform = open_machine().platform
    if not torch.cuda.is_available() or torch.cuda.mem_get_info(DEVICE)[0] < NEEDED:
        print(f"a GPU with 120 GiB free is needed; link: {platform.reasons['link']}")
        return 2
    began = time.perf_counter()
    link_gb_s = measure_link(platform.link)
    print(f"link {link_gb_s:.1f} GB/s")
    figures: dict[str, object] = {"link_gb_s": link_gb_s, "spare_gib": arguments.spare}
    models = make_ready(), make_ready()
    for compiled in (False, True):
        for activations in ("keep", "recompute"):
            layouts = [
                PlanLayout([BlockPlan(weights, activations)] * LAYERS, compiled)
                for weights in ("resident", "streamed")
            ]
            sides = [
                stand(model, layout, platform.link)
                for model, layout in zip(models, layouts, strict=True)
            ]
            measure(figures, way(compiled, activations), *sides, arguments.spare * GIB)
            results.write("ring", figures, arguments.out, arguments.commit)
    figures["seconds"] = time.perf_counter() - began
    results.write("ring", figures, arguments.out, arguments.commit)
    return 0 if report(figures) else 1


def make_ready() -> nn.Module:
    """A model prepared as a run does it."""
    model = make_model(LAYERS)
    fuse_operations(model)
    return model


def way(compiled: bool, activations: ActivationMode) -> str:
    """As the result file calls it."""
    return f"{'compiled' if compiled else 'eager'}.{activations}"


def measure_link(link: Link) -> float:
    """The rate of large copies from the memory that weights are streamed from."""
    mover = open_copy_engine(DEVICE, link)
    host, slot = mover.allocate_host(COPIED), mover.allocate_device(COPIED)
    host.fill_(1)  # pages that nobody wrote to are all the same page
    seconds = [
        timed(lambda: mover.copy(slot, host, poison=False).wait(prefetched=True)) for _ in range(10)
    ]
    mover.close()
    return COPIED / median(seconds[2:]) / 1e9


def stand(model: nn.Module, layout: PlanLayout, link: Link) -> Side:
    """A model as it will run, and what it and its optimizer hold."""
    here = sum(tensor.nbytes for tensor in model.parameters() if tensor.device == DEVICE)
    others_nbytes = torch.cuda.memory_allocated(DEVICE) - here
    placed = apply_plan(model, {model: list(model.blocks)}, layout, open_copy_engine(DEVICE, link), show)
    step = make_step(model, min(TURNS))
    step()
    gc.collect()
    return Side(model, placed, torch.cuda.memory_allocated(DEVICE) - others_nbytes, step, [])


def measure(
    figures: dict[str, object], name: str, resident: Side, streamed: Side, spare_nbytes: int
) -> None:
    """Every batch of one way."""
    for batch, turns in TURNS.items():
        for side in (resident, streamed):
            side.step = make_step(side.model, batch)
        at = f"batch_{batch}"
        found = in_turns(figures, resident, streamed, turns)
        keep(figures, f"{name}.resident.{at}", as_figures(resident, streamed.nbytes))
        keep(figures, f"{name}.streamed.{at}", found)
        if found["waited_s"] > MIN_STALL_SHARE * found["step_s"]:
            settle(streamed, spare_nbytes)
            grown = in_turns(figures, resident, streamed, turns)
            keep(figures, f"{name}.grown.{at}", grown)
            streamed.placed.shrink_ring()
            streamed.placed.allow_ring_growth(0)
    for side in (resident, streamed):
        side.placed.close()
    free_memory()


def settle(streamed: Side, spare_nbytes: int) -> None:
    """Let the ring grow until a window of passes has changed nothing."""
    streamed.placed.allow_ring_growth(spare_nbytes)
    slots = 0
    for _ in range(MOST_WINDOWS):
        for _ in range(RING_WINDOW_PASSES):
            streamed.step()
        torch.cuda.synchronize()
        if slots == (slots := streamed.placed.ring.counters().slots):
            return


def in_turns(
    figures: dict[str, object], resident: Side, streamed: Side, turns: int
) -> dict[str, float]:
    """Both models by turns; gives what is said of the streamed one."""
    for side in (resident, streamed):  # compiles, and learns the order of blocks
        side.seconds, side.peak_nbytes = [], 0
        side.step()
    before = streamed.placed.ring.counters()
    for _ in range(turns):
        for side in (resident, streamed):
            take_turn(side)
    after, steps = streamed.placed.ring.counters(), turns * STEPS
    copied = (after.fetched_nbytes - before.fetched_nbytes) / steps
    link_s = copied / float(figures["link_gb_s"]) / 1e9
    resident_s, streamed_s = (median(side.seconds) for side in (resident, streamed))
    return as_figures(streamed, resident.nbytes) | {
        "slots": after.slots,
        "copied_gib": copied / GIB,
        "on_demand": (after.on_demand - before.on_demand) / steps,
        "waited_s": (after.stalled_s - before.stalled_s) / steps,
        "link_s": link_s,
        "resident_s": resident_s,
        "ratio": streamed_s / max(resident_s, link_s),
    }


def take_turn(side: Side) -> None:
    """Some steps, queued one behind the other as in a run."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    side.step()
    side.seconds += time_each_step(side.step, STEPS - 1, DEVICE)[0]
    side.peak_nbytes = max(side.peak_nbytes, torch.cuda.max_memory_allocated())


def as_figures(side: Side, others_nbytes: int) -> dict[str, float]:
    """A step's seconds, and its peak beside the other model."""
    peak_gib = (side.peak_nbytes - others_nbytes) / GIB
    return {"step_s": median(side.seconds), "peak_gib": peak_gib}


def keep(figures: dict[str, object], name: str, found: dict[str, float]) -> None:
    """Write one way down, and show it."""
    figures[name] = found
    shown = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
    print(f"{name}: {shown}", flush=True)


def report(figures: dict[str, object]) -> bool:
    """Print each promise, and whether it holds: of a ring that has grown, as it then is."""
    kept = True
    for name, one in figures.items():
        if not isinstance(one, dict) or "ratio" not in one:
            continue
        final = name.replace(".streamed.", ".grown.") not in figures or ".grown." in name
        met = one["ratio"] <= LONGEST_RATIO and one["on_demand"] == 0
        kept &= met or not final
        verdict = ("met   " if met else "MISSED") if final else "before"
        print(
            f"{verdict} {name}: {one['ratio']:.3f} of what bounds it (at most {LONGEST_RATIO}), "
            f"{one['step_s']:.3f} s, {one['slots']:.0f} slots, {one['peak_gib']:.1f} GiB"
        )
    return kept


def timed(work: Callable[[], object]) -> float:
    """Seconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def show(notice: Notice) -> None:
    """Print what a placement tells."""
    print("   ", notice.text)


if __name__ == "__main__":
    sys.exit(main())
