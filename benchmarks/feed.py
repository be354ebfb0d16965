"""What feeding a training step from the cache costs, against a batch that is on the device already.

    PYTHONPATH=src:benchmarks python benchmarks/feed.py [--out FOLDER] [--commit ID]

Three ways take turns: `resident` (batches in device memory), `fed` (entries in the host arena,
brought by a run's own mover: gathered into pinned slots and copied ahead on a stream of their own)
and `faulting` (entries in managed memory that kernels reach by page faults, nothing prefetched;
before each round the host has every page). Before the clock starts, what was fed is compared with
what was put. Ends with 1 when the target is missed; the file is written either way. `--rehearse`
goes the same way through small shapes without a GPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from torch.nn import functional

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.memory_tier import MemoryTier, HostMemoryBudget, HitCounts, allocate_page_aligned
from gracetune.cache.batch_transfer import INITIAL_DEPTH, PrefetchDepth, PrefetchedBatches
from gracetune.config.schema import Gh200Section
from gracetune.data.sample import Batch
from gracetune.memory.diagnose import DeviceBytes
from gracetune.memory.platform import open_machine
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gracetune.cache.batch_transfer import BatchTransfer

    Way = Callable[[], Iterator[Batch]]

WEIGHTS = 8
LOGGED = 8
"""Steps between two looks at the loss, which wait for the device."""
TARGET = 1.01
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Scale:
    """How large and how long."""

    device: torch.device
    latent: tuple[int, ...] = (16, 128, 128)
    text: tuple[int, int] = (512, 4096)
    batch: int = 8
    entries: int = 256
    steps: int = 16
    rounds: int = 7
    warm_up: int = 2
    step_s: float = 0.15
    """What a step is made to last."""

    @property
    def epoch(self) -> int:
        """Batches in which every entry is once."""
        return self.entries // self.batch

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def keys(self, index: int) -> list[str]:
        """The entries of a batch; another row each epoch."""
        epoch, place = divmod(index, self.epoch)
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(self.entries, generator=generator).tolist()
        return [f"{number}" for number in order[place * self.batch : (place + 1) * self.batch]]


REHEARSAL = Scale(torch.device("cpu"), (4, 8, 8), (16, 64), 2, 16, 8, 2, 1, 0.001)


def main() -> int:
    """Measure, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU; prints only")
    arguments = parser.parse_args()
    if arguments.rehearse:
        print(measure(REHEARSAL))
        return 0
    if not torch.cuda.is_available():
        print("feed: there is no CUDA device here, and nothing to measure without one")
        return 1
    scale = Scale(torch.device("cuda", 0))
    torch.cuda.set_device(scale.device)
    figures = measure(scale)
    path = results.write("feed", figures, arguments.out, arguments.commit)
    print(path.read_text())
    ratio = figures["fed_over_resident"]
    print(
        f"fed over resident: {ratio:.4f}, at most {TARGET}: {'ok' if ratio <= TARGET else 'MISSED'}"
    )
    return 0 if ratio <= TARGET else 1


def measure(scale: Scale) -> dict[str, float]:
    """Every way in its turn, and the turns over and over."""
    assert scale.steps <= scale.epoch, "a faulting round would meet an entry twice"
    torch.manual_seed(0)
    mover = build_batch_transfer(Gh200Section(), scale.device, print)
    kept = Kept(scale, mover)
    step = Step(scale)
    step.last(scale)
    ways = {
        "resident": resident(scale, kept),
        "fed": Fed(scale, kept, mover),
        "faulting": Faulting(scale, kept),
    }
    compare(scale, kept, ways)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(scale.warm_up + scale.rounds):
        for name, way in ways.items():
            took = timed(scale, step, way)
            if turn >= scale.warm_up:
                seconds[name].append(took)
    fed, faulting = ways["fed"], ways["faulting"]
    assert isinstance(fed, Fed)
    assert isinstance(faulting, Faulting)
    figures = {
        **{f"step_{name}_ms": 1000 * median(taken) for name, taken in seconds.items()},
        "fed_over_resident": over(seconds["fed"], seconds["resident"]),
        "faulting_over_resident": over(seconds["faulting"], seconds["resident"]),
        "batch_mib": scale.batch * kept.sample_nbytes / MIB,
        "steps_a_round": scale.steps,
        "rounds": scale.rounds,
        "layers": step.layers,
        "waits_once_warm": fed.waits,
        "hidden_ms_a_step": 1000 * fed.hidden_s / fed.batches,
        "depth": fed.depth.batches,
        "managed_gib": faulting.nbytes / GIB,
    }
    faulting.free()
    return figures


def over(one: list[float], other: list[float]) -> float:
    """The median ratio of neighbouring rounds: a machine that slows down slows both."""
    return median(a / b for a, b in zip(one, other, strict=True))


class Kept:
    """Random entries in a latent cache and a text cache, as a run has them."""

    def __init__(self, scale: Scale, mover: BatchTransfer) -> None:
        budget, hit_counts = HostMemoryBudget(4 * GIB), HitCounts()
        self.latents, self.text = (
            MemoryTier(what, budget, None, print, mover.allocate_host, hit_counts)
            for what in ("latents", "texts")
        )
        generator = torch.Generator().manual_seed(0)
        for number in range(scale.entries):
            latents = torch.randn(scale.latent, generator=generator).to(DTYPE)
            text = torch.randn(scale.text, generator=generator).to(DTYPE)
            self.latents.put(f"{number}", {"latents": latents})
            self.text.put(f"{number}", {"tokens": text})
        self.sample_nbytes = latents.nbytes + text.nbytes

    def entry(self, key: str) -> tuple[Tensor, Tensor]:
        """The latents and the text of a sample, in host memory."""
        latents, text = self.latents.get(key), self.text.get(key)
        assert latents is not None
        assert text is not None
        return latents["latents"], text["tokens"]

    def stacked(self, keys: list[str]) -> tuple[Tensor, Tensor]:
        """Those of a batch."""
        latents, texts = zip(*map(self.entry, keys), strict=True)
        return torch.stack(latents), torch.stack(texts)


def compare(scale: Scale, kept: Kept, ways: dict[str, Way]) -> None:
    """What is fed fast must be what was put."""
    for name in ("fed", "faulting"):
        batches = ways[name]()
        for index in range(4):
            batch = next(batches)
            for made, put in zip(
                (batch.latents, batch.text["tokens"]), kept.stacked(scale.keys(index)), strict=True
            ):
                assert torch.equal(made.cpu(), put), f"{name}: batch {index} differs"
        batches.close()  # type: ignore[attr-defined]


class Step:
    """Forward, backward and update of a stack of matrix products that use all of the batch."""

    def __init__(self, scale: Scale) -> None:
        self._width = scale.text[1]
        self.weights = [
            torch.randn(self._width, self._width, device=scale.device, dtype=DTYPE)
            .mul_(self._width**-0.5)
            .requires_grad_()
            for _ in range(WEIGHTS)
        ]
        self.layers = WEIGHTS

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, on the device."""
        hidden = batch.text["tokens"].reshape(-1, self._width)
        pooled = batch.latents.reshape(len(batch.latents), -1, self._width).mean(1)
        hidden = hidden + pooled.repeat_interleave(len(hidden) // len(pooled), 0)
        for layer in range(self.layers):
            hidden = functional.silu(hidden @ self.weights[layer % WEIGHTS])
        loss = hidden.float().square().mean()
        loss.backward()
        with torch.no_grad():
            gradients = [weight.grad for weight in self.weights]
            torch._foreach_add_(self.weights, gradients, alpha=-1e-4)
        for weight in self.weights:
            weight.grad = None
        return loss.detach()

    def last(self, scale: Scale) -> None:
        """Choose so many layers that a step lasts as long as it should."""
        batch = batch_of(
            torch.randn(scale.batch, *scale.latent, device=scale.device, dtype=DTYPE),
            torch.randn(scale.batch, *scale.text, device=scale.device, dtype=DTYPE),
        )
        self.layers = 8 * WEIGHTS
        for _ in range(3):
            self(batch)
        scale.wait()
        began = time.perf_counter()
        for _ in range(3):
            self(batch)
        scale.wait()
        once = (time.perf_counter() - began) / 3
        self.layers = max(WEIGHTS, round(self.layers * scale.step_s / once))


def timed(scale: Scale, step: Step, way: Way) -> float:
    """Seconds a step of one round; the first batch is there before the clock starts."""
    batches = way()
    first = next(batches)
    scale.wait()
    began = time.perf_counter()
    loss = step(first)
    del first
    for number in range(1, scale.steps):
        loss = step(next(batches))
        if number % LOGGED == 0:
            loss.item()
    scale.wait()
    took = (time.perf_counter() - began) / scale.steps
    batches.close()  # type: ignore[attr-defined]
    return took


def resident(scale: Scale, kept: Kept) -> Way:
    """Batches that lie in device memory already."""
    ready = [
        batch_of(*(part.to(scale.device) for part in kept.stacked(scale.keys(index))))
        for index in range(4)
    ]

    def batches() -> Iterator[Batch]:
        index = 0
        while True:
            yield ready[index % len(ready)]
            index += 1

    return batches


def batch_of(latents: Tensor, text: Tensor) -> Batch:
    """As a run has it, but for the samples, which no step looks at."""
    return Batch(latents, {"tokens": text}, ("",) * len(latents))  # type: ignore[arg-type]


class HostLane:
    """For rehearsals: what arrives is there."""

    def active(self) -> AbstractContextManager[None]:
        """Nothing to enter."""
        return nullcontext()

    def record_arrival(self) -> None:
        """At once."""

    def wait_for(self, batch: Batch, arrival: None) -> None:
        """Nobody waits."""


class Fed:
    """What a run does: arenas, its mover, a stream and a thread of their own."""

    def __init__(self, scale: Scale, kept: Kept, mover: BatchTransfer) -> None:
        self._scale = scale
        self._kept = kept
        self._mover = mover
        self._next = 0
        self.depth = PrefetchDepth(INITIAL_DEPTH, 2 * GIB)
        self.waits = 0
        self.batches = 0
        self.hidden_s = 0.0
        self._rounds = -1  # the first only compares

    def __call__(self) -> Iterator[Batch]:
        """One round; who closes it ends the thread."""
        lane = self._mover.new_stream() if self._mover.needs_copy else HostLane()
        ahead = PrefetchedBatches(self._loaded(), lane, self.depth)  # type: ignore[misc, arg-type]
        try:
            for batch, _ in ahead:
                yield batch
        finally:
            ahead.close()
            self._rounds += 1
            if self._rounds > self._scale.warm_up:
                self.waits += ahead.counts.waits - 1  # the first of a round cannot be there
                self.batches += ahead.counts.batches
                self.hidden_s += ahead.counts.hidden_s

    def _loaded(self) -> Iterator[tuple[Batch, int]]:
        while True:
            keys = self._scale.keys(self._next)
            texts = [entry["tokens"] for entry in self._kept.text.get_many(keys) if entry]
            gathered = partial(self._kept.latents.gather, keys, "latents")
            latents, text = self._mover.to_device(gathered, {"tokens": torch.stack(texts)})  # type: ignore[arg-type]
            self._next += 1
            yield batch_of(latents, text["tokens"]), self._next


class Faulting:
    """Every entry in managed memory; kernels gather a batch and fault for its pages."""

    def __init__(self, scale: Scale, kept: Kept) -> None:
        self._scale = scale
        self._kept = kept
        self.nbytes = scale.entries * kept.sample_nbytes
        assert self.nbytes < 2 * GIB
        self._driver = open_machine().driver if scale.device.type == "cuda" else None
        if self._driver is None:
            self._managed: Tensor | None = allocate_page_aligned(self.nbytes)
            self._pointer = self._managed.data_ptr()
        else:
            code, self._pointer = self._driver.allocate_managed(self.nbytes)
            assert code == 0, code
            self._managed = torch.as_tensor(
                DeviceBytes(self._pointer, self.nbytes), device=scale.device
            )
        self._next = 0

    def __call__(self) -> Iterator[Batch]:
        """One round, before which the host writes every entry and so has its pages."""
        self._scale.wait()
        for number in range(self._scale.entries):
            start = self._pointer + number * self._kept.sample_nbytes
            for tensor in self._kept.entry(f"{number}"):
                ctypes.memmove(start, tensor.data_ptr(), tensor.nbytes)
                start += tensor.nbytes
        while True:
            yield self._gathered()

    def _gathered(self) -> Batch:
        assert self._managed is not None
        latents, texts = [], []
        nbytes, split = self._kept.sample_nbytes, 2 * torch.Size(self._scale.latent).numel()
        for key in self._scale.keys(self._next):
            start = int(key) * nbytes
            entry = self._managed[start : start + nbytes]
            latents.append(entry[:split].view(DTYPE).view(self._scale.latent))
            texts.append(entry[split:].view(DTYPE).view(self._scale.text))
        self._next = (self._next + 1) % self._scale.epoch  # a round never meets an entry twice
        return batch_of(torch.stack(latents), torch.stack(texts))

    def free(self) -> None:
        """Give the range back, once nothing reads it."""
        self._scale.wait()
        self._managed = None
        if self._driver is not None:
            assert self._driver.free(self._pointer) == 0


if __name__ == "__main__":
    sys.exit(main())
