"""Measure how much slower a training step is when its batches come from the cache.

    PYTHONPATH=src:benchmarks python benchmarks/batch_transfer.py [--out FOLDER] [--commit ID]
        [--rehearse]

Three variants take turns:

resident   batches that are in device memory already
fed        entries in host memory, copied as in a run: gathered into pinned staging slots and
           prefetched on a stream of their own
faulting   entries in managed memory that kernels reach by page faults, without prefetching; before
           each round all pages are on the host

Before the timing, the batches of `fed` and `faulting` are compared with the stored entries. The
results go to results/batch_transfer.json. The exit code is 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from torch.nn import functional

from gracetune.cache.batch_transfer import (
    INITIAL_DEPTH,
    PrefetchDepth,
    PrefetchedBatches,
    build_batch_transfer,
)
from gracetune.cache.memory_tier import (
    HitCounts,
    HostMemoryBudget,
    MemoryTier,
    allocate_page_aligned,
)
from gracetune.config.schema import Gh200Section
from gracetune.data.sample import Batch
from gracetune.memory.machine_checks import DeviceBytes
from gracetune.memory.platform import open_machine
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gracetune.cache.batch_transfer import BatchTransfer

    Variant = Callable[[], Iterator[Batch]]

NUM_WEIGHTS = 8
LOG_EVERY = 8
"""Steps between two readings of the loss, which wait for the device."""
TARGET = 1.01
"""Highest allowed ratio of the step times `fed` to `resident`."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Scale:
    """Sizes and durations of the benchmark."""

    device: torch.device
    latent: tuple[int, ...] = (16, 128, 128)
    text: tuple[int, int] = (512, 4096)
    batch: int = 8
    entries: int = 256
    steps: int = 16
    rounds: int = 7
    warm_up: int = 2
    step_s: float = 0.15
    """Seconds that a step should take."""

    @property
    def epoch(self) -> int:
        """Number of batches in which every entry occurs once."""
        return self.entries // self.batch

    def wait(self) -> None:
        """Wait until the device has finished."""
        results.synchronize(self.device)

    def keys(self, index: int) -> list[str]:
        """Return the keys of a batch; every epoch has another order."""
        epoch, place = divmod(index, self.epoch)
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(self.entries, generator=generator).tolist()
        return [f"{number}" for number in order[place * self.batch : (place + 1) * self.batch]]


REHEARSAL = Scale(torch.device("cpu"), (4, 8, 8), (16, 64), 2, 16, 8, 2, 1, 0.001)


def main() -> int:
    """Measure, write the results, and compare with the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments = results.parse_arguments(parser)
    if not arguments.rehearse and not torch.cuda.is_available():
        print("batch_transfer: needs a CUDA device")
        return 1
    scale = REHEARSAL if arguments.rehearse else Scale(torch.device("cuda", 0))
    figures = measure(scale)
    path = results.write("batch_transfer", figures, arguments.out, arguments.commit)
    print(path.read_text())
    ratio = figures["fed_over_resident"]
    print(
        f"fed over resident: {ratio:.4f}, at most {TARGET}: {'ok' if ratio <= TARGET else 'MISSED'}"
    )
    return 0 if arguments.rehearse or ratio <= TARGET else 1


def measure(scale: Scale) -> dict[str, float]:
    """Time all variants in turn, for several rounds; return the figures."""
    assert scale.steps <= scale.epoch, "a faulting round would read an entry twice"
    torch.manual_seed(0)
    if scale.device.type == "cuda":
        torch.cuda.set_device(scale.device)
    transfer = build_batch_transfer(Gh200Section(), scale.device, print)
    stored = StoredEntries(scale, transfer)
    step = Step(scale)
    step.calibrate(scale)
    variants = {
        "resident": resident(scale, stored),
        "fed": Fed(scale, stored, transfer),
        "faulting": Faulting(scale, stored),
    }
    compare(scale, stored, variants)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(scale.warm_up + scale.rounds):
        for name, variant in variants.items():
            took = time_round(scale, step, variant)
            if turn >= scale.warm_up:
                seconds[name].append(took)
    fed, faulting = variants["fed"], variants["faulting"]
    assert isinstance(fed, Fed)
    assert isinstance(faulting, Faulting)
    figures = {
        **{f"step_{name}_ms": 1000 * median(taken) for name, taken in seconds.items()},
        "fed_over_resident": median_ratio(seconds["fed"], seconds["resident"]),
        "faulting_over_resident": median_ratio(seconds["faulting"], seconds["resident"]),
        "batch_mib": scale.batch * stored.sample_nbytes / MIB,
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


def median_ratio(one: list[float], other: list[float]) -> float:
    """Return the median ratio of neighbouring rounds, which a slowing machine does not bias."""
    return median(a / b for a, b in zip(one, other, strict=True))


class StoredEntries:
    """Random entries in a latent cache and a text cache, as a run has them."""

    def __init__(self, scale: Scale, transfer: BatchTransfer) -> None:
        budget, hit_counts = HostMemoryBudget(4 * GIB), HitCounts()
        self.latents, self.text = (
            MemoryTier(what, budget, None, print, transfer.allocate_host, hit_counts)
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
        """Return the latents and the text of a sample, in host memory."""
        latents, text = self.latents.get(key), self.text.get(key)
        assert latents is not None
        assert text is not None
        return latents["latents"], text["tokens"]

    def stacked(self, keys: list[str]) -> tuple[Tensor, Tensor]:
        """Return the stacked latents and texts of a batch."""
        latents, texts = zip(*map(self.entry, keys), strict=True)
        return torch.stack(latents), torch.stack(texts)


def compare(scale: Scale, stored: StoredEntries, variants: dict[str, Variant]) -> None:
    """Check that the batches of the variants equal the stored entries."""
    for name in ("fed", "faulting"):
        batches = variants[name]()
        for index in range(4):
            batch = next(batches)
            for fed, expected in zip(
                (batch.latents, batch.text["tokens"]),
                stored.stacked(scale.keys(index)),
                strict=True,
            ):
                assert torch.equal(fed.cpu(), expected), f"{name}: batch {index} differs"
        batches.close()  # type: ignore[attr-defined]


class Step:
    """Forward, backward and update of a stack of matmuls that use the whole batch."""

    def __init__(self, scale: Scale) -> None:
        self._width = scale.text[1]
        self.weights = [
            torch.randn(self._width, self._width, device=scale.device, dtype=DTYPE)
            .mul_(self._width**-0.5)
            .requires_grad_()
            for _ in range(NUM_WEIGHTS)
        ]
        self.layers = NUM_WEIGHTS

    def __call__(self, batch: Batch) -> Tensor:
        """Return the loss, on the device."""
        hidden = batch.text["tokens"].reshape(-1, self._width)
        pooled = batch.latents.reshape(len(batch.latents), -1, self._width).mean(1)
        hidden = hidden + pooled.repeat_interleave(len(hidden) // len(pooled), 0)
        for layer in range(self.layers):
            hidden = functional.silu(hidden @ self.weights[layer % NUM_WEIGHTS])
        loss = hidden.float().square().mean()
        loss.backward()
        with torch.no_grad():
            gradients = [weight.grad for weight in self.weights]
            torch._foreach_add_(self.weights, gradients, alpha=-1e-4)
        for weight in self.weights:
            weight.grad = None
        return loss.detach()

    def calibrate(self, scale: Scale) -> None:
        """Choose the number of layers so that a step takes `scale.step_s` seconds."""
        batch = make_batch(
            torch.randn(scale.batch, *scale.latent, device=scale.device, dtype=DTYPE),
            torch.randn(scale.batch, *scale.text, device=scale.device, dtype=DTYPE),
        )
        self.layers = 8 * NUM_WEIGHTS
        for _ in range(3):
            self(batch)
        scale.wait()
        began = time.perf_counter()
        for _ in range(3):
            self(batch)
        scale.wait()
        once = (time.perf_counter() - began) / 3
        self.layers = max(NUM_WEIGHTS, round(self.layers * scale.step_s / once))


def time_round(scale: Scale, step: Step, variant: Variant) -> float:
    """Return the seconds per step of one round, measured from when the first batch is ready."""
    batches = variant()
    first = next(batches)
    scale.wait()
    began = time.perf_counter()
    loss = step(first)
    del first
    for number in range(1, scale.steps):
        loss = step(next(batches))
        if number % LOG_EVERY == 0:
            loss.item()
    scale.wait()
    took = (time.perf_counter() - began) / scale.steps
    batches.close()  # type: ignore[attr-defined]
    return took


def resident(scale: Scale, stored: StoredEntries) -> Variant:
    """Return a function whose iterator repeats four batches that are in device memory."""
    ready = [
        make_batch(*(part.to(scale.device) for part in stored.stacked(scale.keys(index))))
        for index in range(4)
    ]

    def batches() -> Iterator[Batch]:
        index = 0
        while True:
            yield ready[index % len(ready)]
            index += 1

    return batches


def make_batch(latents: Tensor, text: Tensor) -> Batch:
    """Build a batch; its samples are placeholders, because the step does not read them."""
    return Batch(latents, {"tokens": text}, ("",) * len(latents))  # type: ignore[arg-type]


class HostStream:
    """A stand-in for the transfer stream on a CPU: batches need no copy."""

    def active(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def record_arrival(self) -> None:
        """Do nothing: there is no copy to wait for."""

    def wait_for(self, batch: Batch, arrival: None) -> None:
        """Do nothing: the batch is ready."""


class Fed:
    """The variant `fed`: a prefetch thread copies batches from the cache, as in a run."""

    def __init__(self, scale: Scale, stored: StoredEntries, transfer: BatchTransfer) -> None:
        self._scale = scale
        self._stored = stored
        self._transfer = transfer
        self._next = 0
        self.depth = PrefetchDepth(INITIAL_DEPTH, 2 * GIB)
        self.waits = 0
        self.batches = 0
        self.hidden_s = 0.0
        self._rounds = -1  # the first round is the comparison

    def __call__(self) -> Iterator[Batch]:
        """Iterate over the batches of a round; closing the iterator ends the prefetch thread."""
        stream = self._transfer.new_stream() if self._transfer.needs_copy else HostStream()
        ahead = PrefetchedBatches(self._load(), stream, self.depth)  # type: ignore[misc, arg-type]
        try:
            for batch, _ in ahead:
                yield batch
        finally:
            ahead.close()
            self._rounds += 1
            if self._rounds > self._scale.warm_up:
                self.waits += ahead.counts.waits - 1  # the first batch of a round is never ready
                self.batches += ahead.counts.batches
                self.hidden_s += ahead.counts.hidden_s

    def _load(self) -> Iterator[tuple[Batch, int]]:
        while True:
            keys = self._scale.keys(self._next)
            texts = [entry["tokens"] for entry in self._stored.text.get_many(keys) if entry]
            gathered = partial(self._stored.latents.gather, keys, "latents")
            latents, text = self._transfer.to_device(gathered, {"tokens": torch.stack(texts)})  # type: ignore[arg-type]
            self._next += 1
            yield make_batch(latents, text["tokens"]), self._next


class Faulting:
    """The variant `faulting`: kernels gather a batch from managed memory, with page faults."""

    def __init__(self, scale: Scale, stored: StoredEntries) -> None:
        self._scale = scale
        self._stored = stored
        self.nbytes = scale.entries * stored.sample_nbytes
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
        """Move all pages to the host by writing every entry, then iterate over the batches."""
        self._scale.wait()
        for number in range(self._scale.entries):
            start = self._pointer + number * self._stored.sample_nbytes
            for tensor in self._stored.entry(f"{number}"):
                ctypes.memmove(start, tensor.data_ptr(), tensor.nbytes)
                start += tensor.nbytes
        while True:
            yield self._gather()

    def _gather(self) -> Batch:
        assert self._managed is not None
        latents, texts = [], []
        nbytes, split = self._stored.sample_nbytes, 2 * torch.Size(self._scale.latent).numel()
        for key in self._scale.keys(self._next):
            start = int(key) * nbytes
            entry = self._managed[start : start + nbytes]
            latents.append(entry[:split].view(DTYPE).view(self._scale.latent))
            texts.append(entry[split:].view(DTYPE).view(self._scale.text))
        self._next = (self._next + 1) % self._scale.epoch  # a round never reads an entry twice
        return make_batch(torch.stack(latents), torch.stack(texts))

    def free(self) -> None:
        """Free the managed memory once nothing reads it."""
        self._scale.wait()
        self._managed = None
        if self._driver is not None:
            assert self._driver.free(self._pointer) == 0


if __name__ == "__main__":
    sys.exit(main())
