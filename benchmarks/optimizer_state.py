"""Compare training steps with optimizer state on the device, in host memory, and by torchao.

The model is a transformer of 2.9 B parameters in fp32, computed in bf16 with activation
checkpointing, two samples of 4096 tokens, AdamW. Every variant trains the same model in the same
process: two warm-up steps, then five steps timed together. `update_s` is the time of a step beyond
forward and backward. The link is measured in the same run, in both directions at once, because it
bounds the time of an update.

torchao copies gradients to the host during backward and updates on the CPU, here with all its
threads. It does not support gradient clipping, which needs the norm of all gradients first, so the
comparison is without clipping; gracetune is measured with clipping as well.

Questions: Which one is faster? Is an update slower than its bytes on the link? Does the device save
the memory of the state? Are the results bit for bit those of state on the device? With `--masters`
the model is also trained in bf16, with fp32 master weights in the state.

    PYTHONPATH=src:benchmarks python benchmarks/optimizer_state.py [--out FOLDER] [--commit NAME]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import results
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from gracetune.config.schema import OptimizerSection
from gracetune.memory.platform import open_machine
from gracetune.offload.copy_engine import CopyStream, open_copy_engine
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import OptimizerStepper, StateOffloadSettings
from gracetune.train.step import scale_and_clip_gradients
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.offload.copy_engine import CopyEngine

WARM_UP, STEPS = 2, 5
REQUIRED_NBYTES = 70 * GIB
STATE_NBYTES_PER_ELEMENT = 8.0
SECTION = OptimizerSection(lr=1e-5)
COMPARED_BLOCKS = 4
"""Number of blocks whose weights and state are compared bit for bit."""
LINK_COPY_NBYTES, LINK_COPIES = 1 << 28, 8


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model and of its input."""

    width: int = 3072
    heads: int = 24
    blocks: int = 26
    batch: int = 2
    tokens: int = 4096


SMALL = Size(width=64, heads=2, blocks=6, batch=1, tokens=16)


class Block(nn.Module):
    """A transformer block: attention and an MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the MLP, each with a norm before it and a residual around it."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Bench:
    """One model, trained with its optimizer state in different places."""

    def __init__(
        self,
        size: Size,
        open_engine: Callable[[], CopyEngine],
        settings: StateOffloadSettings,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.open_engine = open_engine
        self.settings = settings
        self.device = open_engine().device
        torch.manual_seed(0)
        with self.device:
            self.blocks = nn.ModuleList(Block(size).to(dtype) for _ in range(size.blocks))
            self.x = torch.randn(size.batch, size.tokens, size.width, dtype=dtype)
        self.parameters = dict(self.blocks.named_parameters())
        self.numel = sum(p.numel() for p in self.parameters.values())
        self.nbytes_per_element = STATE_NBYTES_PER_ELEMENT + (4 if dtype == torch.bfloat16 else 0)

    def backward(self) -> None:
        """Run forward and backward of one micro-batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            x = self.x
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            loss = (x.float() - self.x.roll(1, 1)).square().mean()
        loss.backward()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.parameters.values():
            p.grad = None

    def step_seconds(self, step: Callable[[], object], clip: bool = False) -> float:
        """Return the seconds of one step, averaged over several in a row."""
        began = 0.0
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                self.synchronize()
                began = time.perf_counter()
            self.backward()
            if clip:
                scale = torch.ones((), device=self.device)
                scale_and_clip_gradients(list(self.parameters.values()), scale, max_norm=1.0)
            step()
            self.zero_grad()
        self.synchronize()
        return (time.perf_counter() - began) / STEPS

    def synchronize(self) -> None:
        """Wait for the device."""
        results.synchronize(self.device)

    def clear(self) -> None:
        """Free memory of the last measurement and reset the peak."""
        self.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Return the peak device memory since `clear`."""
        return torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else 0.0

    def measure_ours(self, host_share: float) -> dict[str, float]:
        """Measure gracetune's AdamW with a share of its state in host memory."""
        self.clear()
        optimizer = build_optimizer(self.parameters, SECTION)
        stepper = OptimizerStepper(
            optimizer, self.open_engine(), self.nbytes_per_element, self.settings
        )
        stepper.set_host_share(host_share)
        began = time.perf_counter()
        self.backward()
        stepper.step()
        self.zero_grad()
        self.synchronize()
        figures = {
            "first_step_s": time.perf_counter() - began,
            "step_s": self.step_seconds(stepper.step),
            "step_with_clipping_s": self.step_seconds(stepper.step, clip=True),
            "device_peak_gib": self.peak_gib(),
            "host_gib": stepper.host_nbytes / GIB,
        }
        stepper.close()
        return figures

    def measure_torchao(self) -> dict[str, float]:
        """Measure torchao's CPU offload, with gradients kept on the device as in ours."""
        from torchao.optim import CPUOffloadOptimizer

        self.clear()
        settings = {"lr": SECTION.lr, "betas": SECTION.betas, "eps": SECTION.eps}
        optimizer = CPUOffloadOptimizer(
            self.parameters.values(),
            torch.optim.AdamW,
            weight_decay=SECTION.weight_decay,
            fused=True,
            **settings,
        )
        began = time.perf_counter()
        self.backward()
        optimizer.step()
        self.zero_grad()
        self.synchronize()
        # Per element: the state, a weight and a gradient, all in fp32 on the host.
        held = 2 + STATE_NBYTES_PER_ELEMENT / 4
        return {
            "first_step_s": time.perf_counter() - began,
            "step_s": self.step_seconds(optimizer.step),
            "device_peak_gib": self.peak_gib(),
            "host_gib": 4 * held * self.numel / GIB,
        }

    def checksums(self, host_share: float) -> Iterator[Tensor]:
        """Yield checksums of weights and state after three steps with fixed gradients."""
        self.clear()
        named = {
            name: nn.Parameter(p.detach().clone())
            for name, p in self.blocks[:COMPARED_BLOCKS].named_parameters()
        }
        optimizer = build_optimizer(named, SECTION)
        stepper = OptimizerStepper(
            optimizer, self.open_engine(), STATE_NBYTES_PER_ELEMENT, self.settings
        )
        stepper.set_host_share(host_share)
        generator = torch.Generator(self.device).manual_seed(0)
        for _ in range(3):
            for p in named.values():
                p.grad = torch.randn(p.shape, generator=generator, device=self.device)
            stepper.step()
        stepper.synchronize()
        for p in named.values():
            for tensor in (p.detach(), *optimizer.state[p].values()):
                yield tensor.view(torch.int32).sum(dtype=torch.int64).cpu()
        stepper.close()


def link_rates(bench: Bench, nbytes: int) -> dict[str, float]:
    """Return the link's GB/s: to the device, from it, and each way while both ways are busy."""
    engine = bench.open_engine()
    copy_in = engine.allocate_device(nbytes), engine.allocate_pinned(nbytes)
    copy_out = engine.allocate_pinned(nbytes), engine.allocate_device(nbytes)

    def rate(*directions: tuple[CopyStream, tuple[Tensor, Tensor]]) -> float:
        for repetitions in (1, LINK_COPIES):
            bench.synchronize()
            began = time.perf_counter()
            for _ in range(repetitions):
                for stream, (target, source) in directions:
                    engine.copy(target, source, poison=False, stream=stream)
            bench.synchronize()
        return LINK_COPIES * nbytes / (time.perf_counter() - began) / 1e9

    into, out = (CopyStream.STATE_IN, copy_in), (CopyStream.STATE_OUT, copy_out)
    figures = {"in": rate(into), "out": rate(out), "each_of_both": rate(into, out)}
    engine.close()
    return figures


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--masters",
        action="store_true",
        help="also measure bf16 weights with fp32 master weights; takes 30 s more",
    )
    arguments = results.parse_arguments(parser)
    if not arguments.rehearse and (
        not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < REQUIRED_NBYTES
    ):
        print("This needs a GPU with 70 GiB free. Use --rehearse for a small model on the CPU.")
        return 2
    if not arguments.rehearse and find_spec("torchao") is None:
        print("This needs torchao. Run: pip install torchao")
        return 2
    if not arguments.rehearse:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchao updates on the CPU
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", 0)
    link = open_machine().platform.link
    bench_arguments = (
        SMALL if arguments.rehearse else Size(),
        lambda: open_copy_engine(device, link),
        StateOffloadSettings(bucket_numel=1 << 14)
        if arguments.rehearse
        else StateOffloadSettings(),
    )
    bench = Bench(*bench_arguments)
    figures: dict[str, Any] = {
        "parameters": bench.numel,
        "cpu_threads": torch.get_num_threads(),
        "link_gb_s": link_rates(bench, 1 << 16 if arguments.rehearse else LINK_COPY_NBYTES),
    }

    def record(name: str, value: object) -> None:
        figures[name] = value
        print(f"{name}: {value}", flush=True)
        results.write("optimizer_state", figures, arguments.out, arguments.commit)

    print(figures, flush=True)
    on_device, in_host = (torch.stack(list(bench.checksums(share))) for share in (0.0, 1.0))
    record("equal_bits", bool(torch.equal(on_device, in_host)))
    bench.clear()
    record("without_update", {"step_s": bench.step_seconds(lambda: None)})
    for name, share in (("device", 0.0), ("ours", 1.0), ("ours_half", 0.5)):
        record(name, bench.measure_ours(share))
    if arguments.rehearse:
        print("the part torchao is skipped: it needs a GPU")
    else:
        record("torchao", bench.measure_torchao())
    record("summary", summary(figures, bench.numel))
    if arguments.masters:
        bench.clear()
        del bench
        record("ours_with_masters", Bench(*bench_arguments, dtype=torch.bfloat16).measure_ours(1.0))
    return 0


def summary(figures: dict[str, Any], numel: int) -> dict[str, float]:
    """Return the seconds of each optimizer update, and their ratios to the link and to torchao."""
    summarized: dict[str, float] = {}
    bare = figures["without_update"]["step_s"]
    for name in ("device", "ours", "ours_half", "torchao"):
        if name in figures:
            summarized[f"{name}_update_s"] = figures[name]["step_s"] - bare
    link_s = STATE_NBYTES_PER_ELEMENT * numel / figures["link_gb_s"]["each_of_both"] / 1e9
    summarized["link_s"] = link_s
    summarized["ours_update_over_link"] = summarized["ours_update_s"] / link_s
    if "torchao" in figures:
        summarized["torchao_step_over_ours"] = (
            figures["torchao"]["step_s"] / figures["ours"]["step_s"]
        )
        summarized["torchao_update_over_ours"] = (
            summarized["torchao_update_s"] / summarized["ours_update_s"]
        )
    return summarized


if __name__ == "__main__":
    raise SystemExit(main())
