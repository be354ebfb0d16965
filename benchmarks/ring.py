"""What streaming frozen weights costs a LoRA step, beside the resident step and the link.

Blocks of Wan2.2-A14B's shape, ten of forty, random weights, one frame of 1024x1024 (4096 tokens),
bf16 LoRA of rank 32, eager. Each step is timed by events on the device; the link is measured in
the same run, from the same kind of host memory. A streamed step cannot be faster than the larger
of the resident step and the time its bytes need on the link: `ratio` is how near it comes.

What is in the slots at either turn is not fetched again, which is more of ten blocks than it would
be of forty: `copied_gib` has what was.

    PYTHONPATH=src:benchmarks python benchmarks/ring.py [--out FOLDER] [--commit NAME] [--slots 3]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from gracetune.memory.machine import open_machine
from gracetune.stream.movers import open_mover
from gracetune.stream.weights import DEFAULT_SLOTS, stream_weights
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link
    from gracetune.stream.weights import Ring, RingCounters

LAYERS = 10
RANK = 32
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
STREAMED = {"resident": range(0), "all": range(LAYERS), "every_second": range(0, LAYERS, 2)}
BATCHES = (1, 2)
WARM_UP, STEPS = 3, 9
COPIED = GIB // 2
LONGEST_RATIO = 1.04
NEEDED = 40 * GIB
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Measured:
    """One way to run a step."""

    seconds: float
    peak_gib: float
    copied_gib: float
    late: float
    on_demand: float
    waited_s: float


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--slots", type=int, default=DEFAULT_SLOTS, help="of the ring")
    arguments = parser.parse_args()
    platform = open_machine().platform
    if not torch.cuda.is_available() or torch.cuda.mem_get_info(DEVICE)[0] < NEEDED:
        print(f"a GPU with 40 GiB free is needed; link: {platform.why['link']}")
        return 2
    began = time.perf_counter()
    link_gb_s = measure_link(platform.link)
    print(f"link {link_gb_s:.1f} GB/s")
    measured: dict[str, Measured] = {}
    for name in STREAMED:
        measured |= measure_model(name, platform.link, arguments.slots)
    figures: dict[str, object] = {"link_gb_s": link_gb_s, "slots": arguments.slots}
    figures |= {name: judge(name, measured, link_gb_s) for name in measured}
    figures["seconds"] = time.perf_counter() - began
    path = results.write("ring", figures, arguments.out, arguments.commit)
    print(path.read_text())
    return 0 if report(figures) else 1


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


def measure_model(name: str, link: Link, slots: int) -> dict[str, Measured]:
    """Every way to run one model: kept and recomputed, each batch."""
    model = make_model()
    ring = None
    if len(STREAMED[name]):
        blocks = [model.blocks[index] for index in STREAMED[name]]
        ring = stream_weights(model, blocks, open_mover(DEVICE, link), show, slots)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    measured = {}
    for recompute in (False, True):
        if recompute:
            model.enable_gradient_checkpointing()
        for batch in BATCHES:
            case = f"{name}.{'recomputed' if recompute else 'kept'}.batch_{batch}"
            measured[case] = measure(make_step(model, optimizer, batch), ring)
            print(case, measured[case], flush=True)
    del model, ring, trained, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return measured


def make_model() -> torch.nn.Module:
    """Random frozen weights and a LoRA that is not zero."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = WanTransformer3DModel(num_layers=LAYERS)
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(DEVICE, torch.bfloat16).mul_(0.1)
            parameter.requires_grad_(True)
    return model.train()


def make_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int
) -> Callable[[], None]:
    """A whole step, on inputs that stay."""
    generator = torch.Generator(DEVICE).manual_seed(batch)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    latents, text = noise(batch, 16, 1, 128, 128), noise(batch, 512, 4096)
    timestep = torch.randint(0, 1000, (batch,), device=DEVICE, generator=generator)

    def step() -> None:
        (out,) = model(
            hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False
        )
        (out.float() - latents.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(step: Callable[[], None], ring: Ring | None) -> Measured:
    """The median of some steps after a warm-up, queued one behind the other as in a run."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = ring.counters() if ring else None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    after = ring.counters() if ring else None
    each = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return Measured(
        seconds=median(each),
        peak_gib=torch.cuda.max_memory_allocated() / GIB,
        copied_gib=a_step(before, after, "fetched_nbytes") / GIB,
        late=a_step(before, after, "late"),
        on_demand=a_step(before, after, "on_demand"),
        waited_s=a_step(before, after, "waited_s"),
    )


def a_step(before: RingCounters | None, after: RingCounters | None, name: str) -> float:
    """How much a counter grew, by steps; nothing where nothing is streamed."""
    if before is None or after is None:
        return 0.0
    return float(asdict(after)[name] - asdict(before)[name]) / STEPS


def judge(name: str, measured: dict[str, Measured], link_gb_s: float) -> dict[str, float]:
    """The figures of one way, and how near a streamed one is to what bounds it."""
    mine = measured[name]
    figures = {
        "step_s": mine.seconds,
        "peak_gib": mine.peak_gib,
        "copied_gib": mine.copied_gib,
        "late": mine.late,
        "on_demand": mine.on_demand,
        "waited_s": mine.waited_s,
    }
    if mine.copied_gib:
        resident = measured["resident." + name.split(".", 1)[1]]
        link_s = mine.copied_gib * GIB / link_gb_s / 1e9
        figures["link_s"] = link_s
        figures["ratio_to_resident"] = mine.seconds / resident.seconds
        figures["ratio"] = mine.seconds / max(resident.seconds, link_s)
    return figures


def report(figures: dict[str, object]) -> bool:
    """Print each promise, and whether it holds."""
    kept = True
    for name, one in figures.items():
        if isinstance(one, dict) and "ratio" in one:
            met = one["ratio"] <= LONGEST_RATIO and one["on_demand"] == 0
            kept &= met
            verdict = "met   " if met else "MISSED"
            print(
                f"{verdict} {name}: {one['ratio']:.3f} of what bounds it (at most {LONGEST_RATIO})"
                f", {one['step_s']:.3f} s, {one['peak_gib']:.1f} GiB"
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
    """Print what a ring tells."""
    print(notice.text)


if __name__ == "__main__":
    sys.exit(main())
