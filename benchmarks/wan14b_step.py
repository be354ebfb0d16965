"""Images a second of a Wan2.2-A14B-shaped LoRA step in a given device memory, ours and others'.

The plain loop is what a user would write: diffusers' transformer, peft's LoRA in fp32 under bf16
autocast, gradient checkpointing, fused AdamW, SDPA, eager, at its best batch of 1, 2 and 4. Peers
are diffusers' group offload and RamTorch at the same work. Ours runs in a budget that torch's
memory fraction enforces. Where the first layout of a budget does not fit, the next is taken, and
`layout` in the result says which.

    PYTHONPATH=src:benchmarks python benchmarks/wan14b_step.py [--out FOLDER] [--commit NAME]
        [--only plain,ours,fp8,peers]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import results
import torch
import wan14b
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from wan14b import DEVICE, LAYERS, make_forward, free_memory, make_model, make_step, time_step

from gracetune.adapters.compute.fp8_linear import convert_to_fp8_calibrated
from gracetune.memory.platform import open_machine
from gracetune.offload.activations import OffloadSettings
from gracetune.offload.copies import open_copy_engine
from gracetune.plan.apply import PlanLayout, fuse_operations, apply_plan
from gracetune.plan.result import BlockPlan
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from wan14b import StepTiming

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link

STEPS = 5
SUSTAINED_S = 0.3
"""A kernel is timed alone after it has run for so long."""
LEAST = {"96": 2.1, "48": 1.55, "24": 1.4, "12": 1.2}
LEAST_FP8 = {"96": 2.6, "12": 1.4}
NEEDED = 130 * GIB
BESIDE = "copies"
"""The kind of work that other engines do while kernels run."""
TOKENS, WIDTH, HIDDEN, TEXT_TOKENS, HEADS = 4096, 5120, 13824, 512, 40


@dataclass(frozen=True)
class Way:
    """One layout to try: how many blocks do what; the rest of the blocks recompute."""

    name: str
    batch: int
    streamed: int = LAYERS
    keep: int = 0
    lean: int = 0
    offload: int = 0
    sends_inputs: bool = False
    """Whether what recomputed blocks start from waits in host memory."""

    def layout(self) -> PlanLayout:
        """Each kind spread evenly, so that links and kernels are busy at the same time."""
        streamed = spread(self.streamed, range(LAYERS))
        left = list(range(LAYERS))
        doing: dict[int, BlockPlan] = {}
        for kind, count in (("keep", self.keep), ("lean", self.lean), ("offload", self.offload)):
            for index in spread(count, left):
                doing[index] = BlockPlan("resident", kind)
            left = [index for index in left if index not in doing]
        doing |= {index: BlockPlan("resident", "recompute", self.sends_inputs) for index in left}
        blocks = [
            replace(doing[index], weights="streamed" if index in streamed else "resident")
            for index in range(LAYERS)
        ]
        return PlanLayout(blocks, compiled=True, offload=OffloadSettings(prefetch_blocks=2))


OURS = {
    "96": [
        Way("24 of 40 streamed, all kept", 2, streamed=24, keep=40),
        Way("resident, half kept, half lean", 2, streamed=0, keep=20, lean=20),
    ],
    "48": [Way("streamed, 36 lean", 2, lean=36), Way("streamed, 30 lean", 2, lean=30)],
    "24": [
        Way("streamed, 8 lean, 14 offloaded", 3, lean=8, offload=14, sends_inputs=True),
        Way("streamed, 14 offloaded", 3, offload=14, sends_inputs=True),
        Way("streamed, all recomputed", 2),
    ],
    "12": [
        Way("streamed, 14 offloaded", 3, offload=14, sends_inputs=True),
        Way("streamed, 8 offloaded", 2, offload=8, sends_inputs=True),
        Way("streamed, all recomputed, inputs in host memory", 2, sends_inputs=True),
    ],
}
IN_FP8 = {
    "96": [Way("resident, all kept", 2, streamed=0, keep=40)],
    "12": [
        Way("streamed, 20 offloaded", 3, offload=20, sends_inputs=True),
        Way("streamed, 12 offloaded", 2, offload=12, sends_inputs=True),
        Way("streamed, all recomputed, inputs in host memory", 2, sends_inputs=True),
    ],
}


def main() -> int:
    """Measure, print, write; what is done is written even where the rest fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--only", default="plain,ours,fp8,peers", help="parts to measure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.mem_get_info(DEVICE)[0] < NEEDED:
        print("a GPU with 130 GiB free is needed, of which ours is given less")
        return 2
    link = open_machine().platform.link
    figures: dict[str, float | str] = {}

    def save() -> None:
        results.write("wan14b_step", figures, arguments.out, arguments.commit)

    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: measure_plain(figures),
        "ours": lambda: measure_ours(figures, link, OURS, "", save),
        "fp8": lambda: measure_ours(figures, link, IN_FP8, "fp8_", save),
        "peers": lambda: measure_peers(figures, save),
    }
    for part in arguments.only.split(","):
        began = time.perf_counter()
        parts[part]()
        figures[f"{part}_took_s"] = time.perf_counter() - began
        save()
    return 0 if report(figures) else 1


def measure_plain(figures: dict[str, float | str]) -> None:
    """Its best batch is what everything is compared with."""
    model = make_model()
    model.enable_gradient_checkpointing()
    for batch in (1, 2, 4):
        note(figures, f"plain_batch_{batch}", batch, time_step(make_step(model, batch, True), 4))
    figures["plain_images_s"] = max(
        float(figures[f"plain_batch_{batch}_images_s"]) for batch in (1, 2, 4)
    )
    del model
    free_memory()


def measure_ours(
    figures: dict[str, float | str],
    link: Link,
    budgets: dict[str, list[Way]],
    prefix: str,
    save: Callable[[], None],
) -> None:
    """The first layout of each budget that fits; the first budget is also taken apart."""
    for budget, ways in budgets.items():
        for way in ways:
            try:
                measure_way(figures, link, f"{prefix}{budget}", int(budget), way)
                save()
                break
            except torch.OutOfMemoryError as full:
                print(f"{prefix}{budget} GB: {way} does not fit: {str(full)[:300]}", flush=True)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
                free_memory()


def measure_way(
    figures: dict[str, float | str], link: Link, name: str, budget_gb: int, way: Way
) -> None:
    """Place, narrow the memory, time."""
    model = make_model()
    if name.startswith("fp8"):
        convert_to_fp8_calibrated(make_forward(model, 1)[0], list(model.blocks), DEVICE)
    fuse_operations(model)
    placed = apply_plan(
        model, {model: list(model.blocks)}, way.layout(), open_copy_engine(DEVICE, link), show
    )
    free_memory()
    total = torch.cuda.mem_get_info(DEVICE)[1]
    torch.cuda.set_per_process_memory_fraction(budget_gb * 1e9 / total)
    try:
        step = make_step(model, way.batch)
        note(figures, name, way.batch, time_step(step, STEPS))
        figures[f"{name}_layout"] = f"batch {way.batch}: {way.name}"
        if "plain_images_s" in figures:
            figures[f"{name}_ratio"] = float(figures[f"{name}_images_s"]) / float(
                figures["plain_images_s"]
            )
        figures[f"{name}_waiting_s"] = placed.stall_seconds() / (wan14b.WARM_UP_STEPS + STEPS)
        print("   ", figures[f"{name}_layout"], figures.get(f"{name}_ratio"), flush=True)
        print("   ", placed.ring and placed.ring.counters(), flush=True)
        print("   ", placed.offload and placed.offload.counters(), flush=True)
        if budget_gb == 96:
            take_apart(figures, name, step, way.batch)
    finally:
        placed.close()


def take_apart(
    figures: dict[str, float | str], name: str, step: Callable[[], torch.Tensor], batch: int
) -> None:
    """Where the step goes, and how near it is to its products and attention alone.

    What is neither a kernel nor waiting for weights is idle.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in watched.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[kind_of(event.name)] += event.device_time_total / 1e6
    for kind, seconds in spent.items():
        figures[f"{name}_{kind}_s"] = seconds
    step_s, waiting_s = (float(figures[f"{name}_{part}_s"]) for part in ("step", "waiting"))
    busy_s = sum(seconds for kind, seconds in spent.items() if kind != BESIDE)
    figures[f"{name}_idle_s"] = max(0.0, step_s - busy_s - waiting_s)
    if not name.startswith("fp8"):
        limit = limit_s(batch)
        figures[f"{name}_limit_s"] = limit
        figures[f"{name}_of_limit"] = limit / step_s
    shown = [
        f"{part} {figures[f'{name}_{part}_s']:.3f}" for part in (*spent, "waiting", "idle", "step")
    ]
    print("    seconds:", ", ".join(shown), figures.get(f"{name}_of_limit"), flush=True)


def kind_of(kernel: str) -> str:
    """By name: libraries call their kernels what they are."""
    name = kernel.lower()
    for kind, marks in {
        "attention": ("flash", "fmha", "sdpa", "attention", "cudnn::fusion"),
        "gemm": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
        BESIDE: ("memcpy htod", "memcpy dtoh"),
        "elementwise": ("triton", "elementwise", "multi_tensor", "reduce"),
    }.items():
        if any(mark in name for mark in marks):
            return kind
    return "other"


def limit_s(batch: int) -> float:
    """A step's frozen products, forward and for the input's gradient, and its attention."""
    rows, text_rows = batch * TOKENS, batch * TEXT_TOKENS
    wide = product_s(rows, WIDTH, WIDTH)
    products = 6 * 2 * wide + 2 * (product_s(rows, WIDTH, HIDDEN) + product_s(rows, HIDDEN, WIDTH))
    products += 2 * product_s(text_rows, WIDTH, WIDTH)  # text needs no gradient
    return LAYERS * (products + attention_s(batch, TOKENS) + attention_s(batch, TEXT_TOKENS))


def product_s(rows: int, inner: int, outer: int) -> float:
    """One product alone."""
    left = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
    right = torch.randn(outer, inner, device=DEVICE, dtype=torch.bfloat16)
    return timed(lambda: left @ right.t())


def attention_s(batch: int, keys: int) -> float:
    """Attention alone, forward and backward."""

    def heads(tokens: int) -> torch.Tensor:
        shape = (batch, HEADS, tokens, WIDTH // HEADS)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    query, key, value = heads(TOKENS), heads(keys), heads(keys)
    grad = torch.randn_like(query)

    def there_and_back() -> None:
        functional.scaled_dot_product_attention(query, key, value).backward(grad)

    return timed(there_and_back)


def timed(work: Callable[[], object]) -> float:
    """One of many in a row, as in a step: a cool device is faster for its first tenths."""
    for _ in range(3):
        work()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    for _ in range(10):
        work()
    middle.record()
    torch.cuda.synchronize()
    times = max(10, int(SUSTAINED_S * 1e3 / (start.elapsed_time(middle) / 10)))
    for _ in range(times):
        work()
    middle.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return middle.elapsed_time(end) / times / 1e3


def measure_peers(figures: dict[str, float | str], save: Callable[[], None]) -> None:
    """Two ways to train with frozen weights in host memory."""
    model = make_model()
    model.enable_gradient_checkpointing()
    model.enable_group_offload(
        onload_device=DEVICE,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        non_blocking=True,
    )
    note(figures, "group_offload", 2, time_step(make_step(model, 2, True), 3))
    save()
    del model
    free_memory()
    model = with_ramtorch(make_model())
    model.enable_gradient_checkpointing()
    wan14b.WARM_UP_STEPS = 1  # its steps take ten times as long as others
    note(figures, "ramtorch", 2, time_step(make_step(model, 2, True), 2))
    for peer in ("group_offload", "ramtorch"):
        if "12_images_s" in figures:
            figures[f"12_to_{peer}"] = float(figures["12_images_s"]) / float(
                figures[f"{peer}_images_s"]
            )


def with_ramtorch(model: nn.Module) -> nn.Module:
    """Every adapted linear layer of the blocks in host memory."""
    from ramtorch.helpers import replace_linear_with_ramtorch

    for module in list(model.blocks.modules()):
        if "base_layer" in dict(module.named_children()):
            holder = torch.nn.ModuleDict({"linear": module.base_layer}).cpu()
            replace_linear_with_ramtorch(holder, "cuda")
            holder["linear"].weight.requires_grad_(False)
            module.base_layer = holder["linear"]
    return model


def note(figures: dict[str, float | str], name: str, batch: int, measured: StepTiming) -> None:
    """Write one way down, and show it."""
    figures[f"{name}_step_s"] = measured.seconds
    figures[f"{name}_images_s"] = batch / measured.seconds
    figures[f"{name}_peak_gib"] = measured.peak_gib
    figures[f"{name}_reserved_gib"] = measured.reserved_gib
    print(f"{name}: batch {batch}, {batch / measured.seconds:.3f} images/s, {measured}", flush=True)


def spread(count: int, among: list[int] | range) -> list[int]:
    """So many of them, at even distances."""
    return [among[(2 * k + 1) * len(among) // (2 * count)] for k in range(count)]


def report(figures: dict[str, float | str]) -> bool:
    """Print each promise, and whether it holds."""
    promised = {f"{budget}_ratio": least for budget, least in LEAST.items()}
    promised |= {f"fp8_{budget}_ratio": least for budget, least in LEAST_FP8.items()}
    promised |= {"12_to_ramtorch": 6.5, "12_to_group_offload": 1.45}
    met = True
    for name, least in promised.items():
        found = figures.get(name)
        holds = isinstance(found, float) and found >= least
        met &= holds
        shown = f"{found:.3f}" if isinstance(found, float) else "not measured"
        print(f"{'met   ' if holds else 'MISSED'} {name}: {shown} (at least {least})")
    return met


def show(notice: Notice) -> None:
    """Print what a placement tells."""
    print("   ", notice.text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
