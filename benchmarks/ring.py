"""What streaming frozen weights costs a LoRA step, beside the resident step and the link.

Blocks of Wan2.2-A14B's shape, twenty of forty, random weights, one frame of 1024x1024 (4096
tokens), LoRA of rank 32. Each step is timed by events on the device; the link is measured in the
same run, from the same kind of host memory. A streamed step cannot be faster than the larger of
the resident step and the time its bytes need on the link: `ratio` is how near it comes.

Every way is measured with three slots first. Where that waits for weights, the ring may then grow
as it does in a run, within `--spare`, and is measured again when it has settled: `grown`. A small
batch is bound by the link on its way forward and by computing on its way back, and no ring of
three slots can carry what the link has left over from one to the other.

What is in the slots at either turn is not fetched again, which is more of twenty blocks than it
would be of forty: `copied_gib` has what was.

    PYTHONPATH=src:benchmarks python benchmarks/ring.py [--out FOLDER] [--commit NAME]
        [--spare GIB]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from wan14b import DEVICE, WARM_UP, let_go, make_model, make_step, time_step

from gracetune.adapters.fused import fuse_lora
from gracetune.memory.machine import open_machine
from gracetune.models.fewer_passes import attend_in_fewer_passes
from gracetune.plan.result import BlockPlan
from gracetune.stream.growth import WINDOW, WORTH
from gracetune.stream.movers import open_mover
from gracetune.train.place import Layout, place
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link
    from gracetune.plan.result import Activations, Weights
    from gracetune.train.place import Placed

LAYERS = 20
BATCHES = (1, 2, 4)
STEPS = 4
SPARE_GIB = 12
MOST_WINDOWS = 8
"""In which a ring must have settled."""
COPIED = GIB // 2
LONGEST_RATIO = 1.04
NEEDED = 110 * GIB


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--spare", type=int, default=SPARE_GIB, help="GiB that slots may take more")
    arguments = parser.parse_args()
    platform = open_machine().platform
    if not torch.cuda.is_available() or torch.cuda.mem_get_info(DEVICE)[0] < NEEDED:
        print(f"a GPU with 110 GiB free is needed; link: {platform.why['link']}")
        return 2
    began = time.perf_counter()
    link_gb_s = measure_link(platform.link)
    print(f"link {link_gb_s:.1f} GB/s")
    figures: dict[str, object] = {"link_gb_s": link_gb_s, "spare_gib": arguments.spare}
    model = make_model(LAYERS)
    fuse_lora(model)
    attend_in_fewer_passes(model)
    for compiled in (False, True):
        for activations in ("keep", "recompute"):
            for weights in ("resident", "streamed"):
                layout = Layout(
                    [BlockPlan(weights, activations)] * LAYERS,
                    compiled,
                    spare_nbytes=arguments.spare * GIB,
                )
                name = way(compiled, activations)
                measure(figures, name, weights, model, layout, platform.link)
                results.write("ring", figures, arguments.out, arguments.commit)
    figures["seconds"] = time.perf_counter() - began
    results.write("ring", figures, arguments.out, arguments.commit)
    return 0 if report(figures) else 1


def way(compiled: bool, activations: Activations) -> str:
    """As the result file calls it."""
    return f"{'compiled' if compiled else 'eager'}.{activations}"


def measure_link(link: Link) -> float:
    """The rate of large copies from the memory that weights are streamed from."""
    mover = open_mover(DEVICE, link)
    host, slot = mover.host_memory(COPIED), mover.device_memory(COPIED)
    host.fill_(1)  # pages that nobody wrote to are all the same page
    seconds = [
        timed(lambda: mover.copy(slot, host, poison=False).wait(ahead=True)) for _ in range(10)
    ]
    mover.release()
    return COPIED / median(seconds[2:]) / 1e9


def measure(
    figures: dict[str, object],
    name: str,
    weights: Weights,
    model: nn.Module,
    layout: Layout,
    link: Link,
) -> None:
    """Every batch of one way; a streamed one is judged by the resident one before it."""
    placed = place(model, {model: list(model.blocks)}, layout, open_mover(DEVICE, link), show)
    let_go()
    for batch in BATCHES:
        step = make_step(model, batch)
        found = timed_ring(figures, placed, step, f"{name}.resident.batch_{batch}")
        keep(figures, f"{name}.{weights}.batch_{batch}", found)
        if placed.ring is not None and found["waited_s"] > WORTH * found["step_s"]:
            settle(placed, step, layout.spare_nbytes)
            grown = timed_ring(figures, placed, step, f"{name}.resident.batch_{batch}")
            keep(figures, f"{name}.grown.batch_{batch}", grown)
            placed.give_back()
    placed.close()
    let_go()


def settle(placed: Placed, step: Callable[[], object], spare_nbytes: int) -> None:
    """Let the ring grow until a window of passes has changed nothing."""
    placed.may_grow(spare_nbytes)
    slots = 0
    for _ in range(MOST_WINDOWS):
        for _ in range(WINDOW):
            step()
        torch.cuda.synchronize()
        if slots == (slots := placed.ring.counters().slots):
            return


def timed_ring(
    figures: dict[str, object], placed: Placed, step: Callable[[], torch.Tensor], resident: str
) -> dict[str, float]:
    """One way; a streamed one is held against the resident one that was measured before it."""
    before = placed.ring.counters() if placed.ring else None
    measured = time_step(step, STEPS)
    found = {"step_s": measured.seconds, "peak_gib": measured.peak_gib}
    if placed.ring is None or before is None:
        return found
    after, steps = placed.ring.counters(), STEPS + WARM_UP
    copied = (after.fetched_nbytes - before.fetched_nbytes) / steps
    link_s = copied / float(figures["link_gb_s"]) / 1e9
    resident_s = figures[resident]["step_s"]
    return found | {
        "slots": after.slots,
        "copied_gib": copied / GIB,
        "on_demand": (after.on_demand - before.on_demand) / steps,
        "waited_s": (after.waited_s - before.waited_s) / steps,
        "link_s": link_s,
        "ratio_to_resident": measured.seconds / resident_s,
        "ratio": measured.seconds / max(resident_s, link_s),
    }


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
