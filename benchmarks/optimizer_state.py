"""A full training step with the optimizer's state in host memory: ours, torchao's, on the device.

A transformer of 2.9 B parameters in fp32, computed in bf16, recomputed block by block, two samples
of 4096 tokens; AdamW. Each way trains the same model in the same process: two steps to warm up,
five that are timed together, from one wait for the device to the next. `update_s` is what a step
takes more than forward and backward alone. The link is measured in the same run, both ways at once:
ours cannot be faster than its bytes are there.

torchao's copies gradients out during backward and steps on the CPU, with all its threads here. It
cannot clip, since the length of all gradients comes too late for it; ways are compared without, and
ours is measured with it as well. What is asked: which of them is faster, whether ours takes longer
than its bytes on the link, whether its device memory is less by the state, and whether its numbers
are those of the device, bit for bit. With `--masters` the same model is also trained in bf16, with
its fp32 masters among the state.

    PYTHONPATH=src:benchmarks python benchmarks/optimizer_state.py [--out FOLDER] [--commit NAME]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from gracetune.config.schema import OptimizerSection
from gracetune.memory.platform import open_machine
from gracetune.offload.copies import CopyStream, open_copy_engine
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import StateOffloadSettings, OptimizerStepper
from gracetune.train.step import scale_and_clip_gradients
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.offload.copies import CopyEngine

WARM_UP, STEPS = 2, 5
NEEDED = 70 * GIB
STATE_NBYTES_EACH = 8.0
SECTION = OptimizerSection(lr=1e-5)
COMPARED_BLOCKS = 4
"""Of the model: what bits are compared on."""
COPIED, COPIES = 1 << 28, 8


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of what it is given."""

    width: int = 3072
    heads: int = 24
    blocks: int = 26
    batch: int = 2
    tokens: int = 4096


REHEARSED = Size(width=64, heads=2, blocks=6, batch=1, tokens=16)


class Block(nn.Module):
    """Attention and two wide products."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Before each half its norm, around each half the sum."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.between(x))))


class Bench:
    """One model, trained in several ways."""

    def __init__(
        self,
        size: Size,
        mover: Callable[[], CopyEngine],
        travel: StateOffloadSettings,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.mover = mover
        self.travel = travel
        self.device = mover().device
        torch.manual_seed(0)
        with self.device:
            self.blocks = nn.ModuleList(Block(size).to(dtype) for _ in range(size.blocks))
            self.x = torch.randn(size.batch, size.tokens, size.width, dtype=dtype)
        self.parameters = dict(self.blocks.named_parameters())
        self.numel = sum(p.numel() for p in self.parameters.values())
        self.nbytes_each = STATE_NBYTES_EACH + (4 if dtype == torch.bfloat16 else 0)

    def backward(self) -> None:
        """Forward and backward of one micro-batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            x = self.x
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            loss = (x.float() - self.x.roll(1, 1)).square().mean()
        loss.backward()

    def forget(self) -> None:
        """Begin without gradients."""
        for p in self.parameters.values():
            p.grad = None

    def seconds(self, update: Callable[[], object], clip: bool = False) -> float:
        """Of one step, from several in a row."""
        began = 0.0
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                self.wait()
                began = time.perf_counter()
            self.backward()
            if clip:
                one = torch.ones((), device=self.device)
                scale_and_clip_gradients(list(self.parameters.values()), one, max_norm=1.0)
            update()
            self.forget()
        self.wait()
        return (time.perf_counter() - began) / STEPS

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Give up what the last way has left, and start counting again."""
        self.forget()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Device memory at most since `clear`."""
        return torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else 0.0

    def ours(self, host_share: float) -> dict[str, float]:
        """AdamW as a run has it, with so much of its state in host memory."""
        self.clear()
        optimizer = build_optimizer(self.parameters, SECTION)
        update = OptimizerStepper(optimizer, self.mover(), self.nbytes_each, self.travel)
        update.set_host_share(host_share)
        began = time.perf_counter()
        self.backward()
        update.step()
        self.forget()
        self.wait()
        found = {
            "first_step_s": time.perf_counter() - began,
            "step_s": self.seconds(update.step),
            "step_with_clipping_s": self.seconds(update.step, clip=True),
            "device_peak_gib": self.peak_gib(),
            "host_gib": update.host_nbytes / GIB,
        }
        update.close()
        return found

    def theirs(self) -> dict[str, float]:
        """torchao's, with gradients left on the device as ours: it may accumulate then."""
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
        self.forget()
        self.wait()
        held = 2 + STATE_NBYTES_EACH / 4  # weights and gradients besides
        return {
            "first_step_s": time.perf_counter() - began,
            "step_s": self.seconds(optimizer.step),
            "device_peak_gib": self.peak_gib(),
            "host_gib": 4 * held * self.numel / GIB,
        }

    def bits(self, host_share: float) -> Iterator[Tensor]:
        """Sums over all bits of weights and state after three updates with given gradients."""
        self.clear()
        named = {
            name: nn.Parameter(p.detach().clone())
            for name, p in self.blocks[:COMPARED_BLOCKS].named_parameters()
        }
        optimizer = build_optimizer(named, SECTION)
        update = OptimizerStepper(optimizer, self.mover(), STATE_NBYTES_EACH, self.travel)
        update.set_host_share(host_share)
        generator = torch.Generator(self.device).manual_seed(0)
        for _ in range(3):
            for p in named.values():
                p.grad = torch.randn(p.shape, generator=generator, device=self.device)
            update.step()
        update.synchronize()
        for p in named.values():
            for tensor in (p.detach(), *optimizer.state[p].values()):
                yield tensor.view(torch.int32).sum(dtype=torch.int64).cpu()
        update.close()


def link_rates(bench: Bench, nbytes: int) -> dict[str, float]:
    """GB/s in, out, and each way while both are busy."""
    mover = bench.mover()
    inward = mover.allocate_device(nbytes), mover.allocate_pinned(nbytes)
    outward = mover.allocate_pinned(nbytes), mover.allocate_device(nbytes)

    def timed(*ways: tuple[CopyStream, tuple[Tensor, Tensor]]) -> float:
        for repetitions in (1, COPIES):
            bench.wait()
            began = time.perf_counter()
            for _ in range(repetitions):
                for lane, (target, source) in ways:
                    mover.copy(target, source, poison=False, stream=lane)
            bench.wait()
        return COPIES * nbytes / (time.perf_counter() - began) / 1e9

    into, out = (CopyStream.STATE_IN, inward), (CopyStream.STATE_OUT, outward)
    found = {"in": timed(into), "out": timed(out), "each_of_both": timed(into, out)}
    mover.close()
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument(
        "--masters", action="store_true", help="also bf16 weights with fp32 masters, 30 s more"
    )
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU; prints only")
    arguments = parser.parse_args()
    if not arguments.rehearse and (
        not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < NEEDED
    ):
        print("a GPU with 70 GiB free is needed; --rehearse runs a small model on the CPU")
        return 2
    if not arguments.rehearse and find_spec("torchao") is None:
        print("torchao is needed beside ours: pip install 'gracetune[quantize]'")
        return 2
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchao's steps are the CPU's
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", 0)
    link = open_machine().platform.link
    how = (
        REHEARSED if arguments.rehearse else Size(),
        lambda: open_copy_engine(device, link),
        StateOffloadSettings(bucket_numel=1 << 14) if arguments.rehearse else StateOffloadSettings(),
    )
    bench = Bench(*how)
    figures: dict[str, Any] = {
        "parameters": bench.numel,
        "cpu_threads": torch.get_num_threads(),
        "link_gb_s": link_rates(bench, 1 << 16 if arguments.rehearse else COPIED),
    }

    def record(name: str, found: object) -> None:
        figures[name] = found
        print(f"{name}: {found}", flush=True)
        if not arguments.rehearse:
            results.write("optimizer_state", figures, arguments.out, arguments.commit)

    print(figures, flush=True)
    here, there = (torch.stack(list(bench.bits(share))) for share in (0.0, 1.0))
    record("equal_bits", bool(torch.equal(here, there)))
    bench.clear()
    record("without_update", {"step_s": bench.seconds(lambda: None)})
    for name, share in (("device", 0.0), ("ours", 1.0), ("ours_half", 0.5)):
        record(name, bench.ours(share))
    if not arguments.rehearse:  # it has no way for a CPU
        record("torchao", bench.theirs())
    record("summary", summary(figures, bench.numel))
    if arguments.masters:
        bench.clear()
        del bench
        record("ours_with_masters", Bench(*how, dtype=torch.bfloat16).ours(1.0))
    return 0


def summary(figures: dict[str, Any], numel: int) -> dict[str, float]:
    """What is claimed, in numbers."""
    found: dict[str, float] = {}
    bare = figures["without_update"]["step_s"]
    for way in ("device", "ours", "ours_half", "torchao"):
        if way in figures:
            found[f"{way}_update_s"] = figures[way]["step_s"] - bare
    moved = STATE_NBYTES_EACH * numel / figures["link_gb_s"]["each_of_both"] / 1e9
    found["link_s"] = moved
    found["ours_update_over_link"] = found["ours_update_s"] / moved
    if "torchao" in figures:
        found["torchao_step_over_ours"] = figures["torchao"]["step_s"] / figures["ours"]["step_s"]
        found["torchao_update_over_ours"] = found["torchao_update_s"] / found["ours_update_s"]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
