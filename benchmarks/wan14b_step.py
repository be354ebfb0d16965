"""Measure images per second of LoRA steps of Wan2.2-A14B's shape, by device memory budget.

The baseline ("plain") is what a user would write: diffusers' transformer, peft's LoRA in fp32 under
bf16 autocast, gradient checkpointing, fused AdamW, SDPA, eager, at its best batch size of 1, 2 and
4. The peers, diffusers' group offload and RamTorch, do the same work. gracetune runs in a memory
budget that torch's memory fraction enforces. If the first variant of a budget does not fit, the
next one is tried; `layout` in the results names the variant that was measured.

    PYTHONPATH=src:benchmarks python benchmarks/wan14b_step.py [--out FOLDER] [--commit NAME]
        [--only plain,ours,fp8,peers] [--rehearse]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import results
import torch
import wan14b
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from wan14b import (
    FULL,
    LAYERS,
    REHEARSAL,
    free_memory,
    make_forward,
    make_model,
    make_step,
    time_each_step,
    time_step,
)

from gracetune.adapters.compute.fp8_linear import convert_to_fp8_calibrated
from gracetune.memory.platform import open_machine
from gracetune.offload.activations import OffloadSettings
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.plan.apply import PlanLayout, apply_plan, fuse_operations
from gracetune.plan.result import BlockPlan
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from wan14b import Scale, StepTiming

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link

STEPS = 5
SUSTAINED_S = 0.3
"""Seconds for which a matmul or attention is repeated before it is timed."""
MIN_RATIOS = {"96": 2.1, "48": 1.55, "24": 1.4, "12": 1.2}
MIN_FP8_RATIOS = {"96": 2.6, "12": 1.4}
REQUIRED_NBYTES = 130 * GIB
COPIES = "copies"
"""Name of the kind of work that copy engines do while kernels run."""


@dataclass(frozen=True)
class Variant:
    """A layout to try: the number of streamed blocks, and of blocks in each activation mode.

    Blocks without a mode are recomputed.
    """

    name: str
    batch: int
    streamed: int = LAYERS
    keep: int = 0
    lean: int = 0
    offload: int = 0
    offload_inputs: bool = False
    """True if the inputs of recomputed blocks are offloaded."""

    def layout(self, layers: int) -> PlanLayout:
        """Return the layout, with each mode spread evenly so that copies overlap with kernels."""
        streamed = spread(min(self.streamed, layers), range(layers))
        remaining = list(range(layers))
        plans: dict[int, BlockPlan] = {}
        for kind, count in (("keep", self.keep), ("lean", self.lean), ("offload", self.offload)):
            for index in spread(count, remaining):
                plans[index] = BlockPlan("resident", kind)
            remaining = [index for index in remaining if index not in plans]
        plans |= {
            index: BlockPlan("resident", "recompute", self.offload_inputs) for index in remaining
        }
        blocks = [
            replace(plans[index], weights="streamed" if index in streamed else "resident")
            for index in range(layers)
        ]
        return PlanLayout(blocks, compiled=True, offload=OffloadSettings(prefetch_blocks=2))


OURS = {
    "96": [
        Variant("24 of 40 streamed, all kept", 2, streamed=24, keep=40),
        Variant("resident, half kept, half lean", 2, streamed=0, keep=20, lean=20),
    ],
    "48": [Variant("streamed, 36 lean", 2, lean=36), Variant("streamed, 30 lean", 2, lean=30)],
    "24": [
        Variant("streamed, 8 lean, 14 offloaded", 3, lean=8, offload=14, offload_inputs=True),
        Variant("streamed, 14 offloaded", 3, offload=14, offload_inputs=True),
        Variant("streamed, all recomputed", 2),
    ],
    "12": [
        Variant("streamed, 14 offloaded", 3, offload=14, offload_inputs=True),
        Variant("streamed, 8 offloaded", 2, offload=8, offload_inputs=True),
        Variant("streamed, all recomputed, inputs in host memory", 2, offload_inputs=True),
    ],
}
IN_FP8 = {
    "96": [Variant("resident, all kept", 2, streamed=0, keep=40)],
    "12": [
        Variant("streamed, 20 offloaded", 3, offload=20, offload_inputs=True),
        Variant("streamed, 12 offloaded", 2, offload=12, offload_inputs=True),
        Variant("streamed, all recomputed, inputs in host memory", 2, offload_inputs=True),
    ],
}


REHEARSED = {
    "96": [Variant("half streamed, one of each mode", 1, streamed=2, keep=1, lean=1, offload=1)],
    "12": [Variant("streamed, 2 offloaded", 2, offload=2, offload_inputs=True)],
}


def main() -> int:
    """Measure, print and write each part, so that results survive a later failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="plain,ours,fp8,peers", help="comma-separated parts to measure"
    )
    arguments = results.parse_arguments(parser)
    scale, ours, in_fp8 = FULL, OURS, IN_FP8
    if arguments.rehearse:
        scale, ours, in_fp8 = REHEARSAL, REHEARSED, {"12": REHEARSED["12"]}
        arguments.only = "plain,ours,fp8"
        print("the part peers is skipped: group offloading and RamTorch need a GPU")
    if not scale.has_memory(REQUIRED_NBYTES):
        print("This needs a GPU with 130 GiB free. gracetune is given only its budget of that.")
        return 2
    link = open_machine().platform.link
    figures: dict[str, float | str] = {}

    def save() -> None:
        results.write("wan14b_step", figures, arguments.out, arguments.commit)

    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: measure_plain(figures, scale),
        "ours": lambda: measure_ours(figures, scale, link, ours, "", save),
        "fp8": lambda: measure_ours(figures, scale, link, in_fp8, "fp8_", save),
        "peers": lambda: measure_peers(figures, scale, save),
    }
    for part in arguments.only.split(","):
        began = time.perf_counter()
        parts[part]()
        figures[f"{part}_took_s"] = time.perf_counter() - began
        save()
    return 0 if report(figures) or arguments.rehearse else 1


def measure_plain(figures: dict[str, float | str], scale: Scale) -> None:
    """Measure the plain loop. Its best batch size is the baseline."""
    model = make_model(scale)
    model.enable_gradient_checkpointing()
    for batch in (1, 2, 4):
        timing = time_step(make_step(model, batch, scale, True), 4, scale)
        record(figures, f"plain_batch_{batch}", batch, timing)
    figures["plain_images_s"] = max(
        float(figures[f"plain_batch_{batch}_images_s"]) for batch in (1, 2, 4)
    )
    del model
    free_memory()


def measure_ours(
    figures: dict[str, float | str],
    scale: Scale,
    link: Link,
    budgets: dict[str, list[Variant]],
    prefix: str,
    save: Callable[[], None],
) -> None:
    """Measure the first variant of each budget that fits."""
    for budget, variants in budgets.items():
        for variant in variants:
            try:
                measure_variant(figures, scale, link, f"{prefix}{budget}", int(budget), variant)
                save()
                break
            except torch.OutOfMemoryError as error:
                print(
                    f"{prefix}{budget} GB: {variant} does not fit: {str(error)[:300]}", flush=True
                )
            finally:
                scale.limit_memory(None)
                free_memory()


def measure_variant(
    figures: dict[str, float | str],
    scale: Scale,
    link: Link,
    name: str,
    budget_gb: int,
    variant: Variant,
) -> None:
    """Apply a layout, limit the memory to the budget, and time steps."""
    model = make_model(scale)
    if name.startswith("fp8"):
        shown, _ = make_forward(model, 1, scale)
        convert_to_fp8_calibrated(shown, list(model.blocks), scale.device)
    fuse_operations(model)
    applied = apply_plan(
        model,
        {model: list(model.blocks)},
        variant.layout(scale.layers),
        open_copy_engine(scale.device, link),
        print_notice,
    )
    free_memory()
    scale.limit_memory(budget_gb * 1e9)
    try:
        step = make_step(model, variant.batch, scale)
        record(figures, name, variant.batch, time_step(step, STEPS, scale))
        figures[f"{name}_layout"] = f"batch {variant.batch}: {variant.name}"
        if "plain_images_s" in figures:
            figures[f"{name}_ratio"] = float(figures[f"{name}_images_s"]) / float(
                figures["plain_images_s"]
            )
        figures[f"{name}_waiting_s"] = applied.stall_seconds() / (wan14b.WARM_UP_STEPS + STEPS)
        print("   ", figures[f"{name}_layout"], figures.get(f"{name}_ratio"), flush=True)
        print("   ", applied.ring and applied.ring.counters(), flush=True)
        print("   ", applied.offload and applied.offload.counters(), flush=True)
        if budget_gb == 96:
            profile_step(figures, name, step, variant.batch, scale)
    finally:
        applied.close()


def profile_step(
    figures: dict[str, float | str],
    name: str,
    step: Callable[[], torch.Tensor],
    batch: int,
    scale: Scale,
) -> None:
    """Record a step's seconds by kind of kernel, and how close it is to its lower bound.

    Time that is neither spent in kernels nor waiting for weights counts as idle.
    """
    kind_of_device = "CUDA" if scale.device.type == "cuda" else "CPU"
    with profile(activities=[getattr(ProfilerActivity, kind_of_device)]) as profiler:
        step()
        results.synchronize(scale.device)
    spent: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == getattr(torch.autograd.DeviceType, kind_of_device):
            spent[kind_of(event.name)] += event.device_time_total / 1e6
    for kind, seconds in spent.items():
        figures[f"{name}_{kind}_s"] = seconds
    step_s, waiting_s = (float(figures[f"{name}_{part}_s"]) for part in ("step", "waiting"))
    busy_s = sum(seconds for kind, seconds in spent.items() if kind != COPIES)
    figures[f"{name}_idle_s"] = max(0.0, step_s - busy_s - waiting_s)
    if not name.startswith("fp8"):
        limit = limit_s(batch, scale)
        figures[f"{name}_limit_s"] = limit
        figures[f"{name}_of_limit"] = limit / step_s
    shown = [
        f"{part} {figures[f'{name}_{part}_s']:.3f}" for part in (*spent, "waiting", "idle", "step")
    ]
    print("    seconds:", ", ".join(shown), figures.get(f"{name}_of_limit"), flush=True)


def kind_of(kernel: str) -> str:
    """Classify a kernel by its name."""
    name = kernel.lower()
    for kind, patterns in {
        "attention": ("flash", "fmha", "sdpa", "attention", "cudnn::fusion"),
        "gemm": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
        COPIES: ("memcpy htod", "memcpy dtoh"),
        "elementwise": ("triton", "elementwise", "multi_tensor", "reduce"),
    }.items():
        if any(pattern in name for pattern in patterns):
            return kind
    return "other"


def limit_s(batch: int, scale: Scale) -> float:
    """Return the seconds that a step's frozen matmuls and attention take, forward and backward.

    This is a lower bound for the time of a step.
    """
    config = make_model(replace(scale, layers=1)).config
    heads, hidden = config.num_attention_heads, config.ffn_dim
    width, tokens = heads * config.attention_head_dim, (scale.latent_edge // 2) ** 2
    rows, text_rows, device = batch * tokens, batch * scale.text[0], scale.device
    square = matmul_s(rows, width, width, device)
    matmuls = 6 * 2 * square + 2 * matmul_s(rows, width, hidden, device)
    matmuls += 2 * matmul_s(rows, hidden, width, device)
    matmuls += 2 * matmul_s(text_rows, width, width, device)  # text needs no gradient
    shape = (batch, heads, tokens, width // heads)
    attentions = sum(attention_s(shape, keys, device) for keys in (tokens, scale.text[0]))
    return scale.layers * (matmuls + attentions)


def matmul_s(rows: int, inner: int, outer: int, device: torch.device) -> float:
    """Return the seconds of one matmul."""
    left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    right = torch.randn(outer, inner, device=device, dtype=torch.bfloat16)
    return timed(lambda: left @ right.t(), device)


def attention_s(shape: tuple[int, int, int, int], keys: int, device: torch.device) -> float:
    """Return the seconds of attention, forward and backward; `shape` is that of the queries."""

    def heads(tokens: int) -> torch.Tensor:
        batch, count, _, width = shape
        size = (batch, count, tokens, width)
        return torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)

    query, key, value = heads(shape[2]), heads(keys), heads(keys)
    grad = torch.randn_like(query)

    def forward_and_backward() -> torch.Tensor:
        functional.scaled_dot_product_attention(query, key, value).backward(grad)
        return grad

    return timed(forward_and_backward, device)


def timed(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the seconds of one of many repetitions, because a cool GPU is faster at first."""
    time_each_step(work, 3, device)
    seconds, _ = time_each_step(work, 10, device)
    sustained_s = SUSTAINED_S if device.type == "cuda" else 0
    times = max(10, int(sustained_s / fmean(seconds)))
    time_each_step(work, times, device)
    seconds, _ = time_each_step(work, times, device)
    return fmean(seconds)


def measure_peers(figures: dict[str, float | str], scale: Scale, save: Callable[[], None]) -> None:
    """Measure two other tools that keep frozen weights in host memory."""
    model = make_model(scale)
    model.enable_gradient_checkpointing()
    model.enable_group_offload(
        onload_device=scale.device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        non_blocking=True,
    )
    timing = time_step(make_step(model, 2, scale, True), 3, scale)
    record(figures, "group_offload", 2, timing)
    save()
    del model
    free_memory()
    model = with_ramtorch(make_model(scale))
    model.enable_gradient_checkpointing()
    wan14b.WARM_UP_STEPS = 1  # its steps take ten times as long
    record(figures, "ramtorch", 2, time_step(make_step(model, 2, scale, True), 2, scale))
    for peer in ("group_offload", "ramtorch"):
        if "12_images_s" in figures:
            figures[f"12_to_{peer}"] = float(figures["12_images_s"]) / float(
                figures[f"{peer}_images_s"]
            )


def with_ramtorch(model: nn.Module) -> nn.Module:
    """Replace every adapted linear layer of the blocks by RamTorch's, with weights on the host."""
    from ramtorch.helpers import replace_linear_with_ramtorch

    for module in list(model.blocks.modules()):
        if "base_layer" in dict(module.named_children()):
            holder = torch.nn.ModuleDict({"linear": module.base_layer}).cpu()
            replace_linear_with_ramtorch(holder, "cuda")
            holder["linear"].weight.requires_grad_(False)
            module.base_layer = holder["linear"]
    return model


def record(figures: dict[str, float | str], name: str, batch: int, measured: StepTiming) -> None:
    """Record and print one measurement."""
    figures[f"{name}_step_s"] = measured.seconds
    figures[f"{name}_images_s"] = batch / measured.seconds
    figures[f"{name}_peak_gib"] = measured.peak_gib
    figures[f"{name}_reserved_gib"] = measured.reserved_gib
    print(f"{name}: batch {batch}, {batch / measured.seconds:.3f} images/s, {measured}", flush=True)


def spread(count: int, items: list[int] | range) -> list[int]:
    """Return `count` of the items, evenly spaced."""
    return [items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)]


def report(figures: dict[str, float | str]) -> bool:
    """Print each goal with its result; return True if all are met."""
    goals = {f"{budget}_ratio": minimum for budget, minimum in MIN_RATIOS.items()}
    goals |= {f"fp8_{budget}_ratio": minimum for budget, minimum in MIN_FP8_RATIOS.items()}
    goals |= {"12_to_ramtorch": 6.5, "12_to_group_offload": 1.45}
    met = True
    for name, minimum in goals.items():
        found = figures.get(name)
        holds = isinstance(found, float) and found >= minimum
        met &= holds
        shown = f"{found:.3f}" if isinstance(found, float) else "not measured"
        print(f"{'met   ' if holds else 'MISSED'} {name}: {shown} (at least {minimum})")
    return met


def print_notice(notice: Notice) -> None:
    """Print a notice of the applied plan."""
    print("   ", notice.text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
