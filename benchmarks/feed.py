"""What feeding a training step from the cache costs, against a batch that is on the device already.

    PYTHONPATH=src:benchmarks python benchmarks/feed.py [--out FOLDER] [--commit ID]

Three ways take turns: `resident` (batches in device memory), `fed` (entries in the host arena,
gathered into pinned slots and copied ahead on a stream of their own: what a run does) and
`faulting` (entries in managed memory that kernels reach by page faults, nothing prefetched; before
each round the host has every page). Ends with 1 when the target is missed; the file is written
either way.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from torch.nn import functional

from gracetune.cache.ahead import FIRST_DEPTH, Ahead, CudaLane, Depth
from gracetune.cache.arena import ArenaStore, Budget, Tally, pinned
from gracetune.cache.staging import Staging
from gracetune.cache.store import stack_in
from gracetune.data.sample import Batch
from gracetune.memory.bench import DeviceBytes
from gracetune.memory.machine import open_machine
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gracetune.memory.driver import Driver

LATENT, TEXT = (16, 128, 128), (512, 4096)
BATCH, ENTRIES = 8, 256
EPOCH = ENTRIES // BATCH
WIDTH, WEIGHTS = 4096, 8
STEP_S = 0.15
"""What a step is made to last."""
STEPS, ROUNDS, WARM_UP = 16, 7, 2
LOGGED = 8
"""Steps between two looks at the loss, which wait for the device."""
TARGET = 1.01
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda", 0)


def main() -> int:
    """Measure, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("feed: there is no CUDA device here, and nothing to measure without one")
        return 1
    torch.cuda.set_device(DEVICE)
    machine = open_machine()
    assert machine.driver is not None
    torch.manual_seed(0)
    store, sample_nbytes = fill_store()
    step = Step()
    step.last(STEP_S)
    ways = {
        "resident": resident(store),
        "fed": Fed(store),
        "faulting": Faulting(store, machine.driver, sample_nbytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP):
        for way in ways.values():
            timed(step, way)
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(timed(step, way))
    fed, faulting = ways["fed"], ways["faulting"]
    assert isinstance(fed, Fed)
    assert isinstance(faulting, Faulting)
    figures: dict[str, object] = {
        "step_resident_ms": 1000 * median(seconds["resident"]),
        "step_fed_ms": 1000 * median(seconds["fed"]),
        "step_faulting_ms": 1000 * median(seconds["faulting"]),
        "fed_over_resident": over(seconds["fed"], seconds["resident"]),
        "faulting_over_resident": over(seconds["faulting"], seconds["resident"]),
        "batch_mib": BATCH * sample_nbytes / MIB,
        "steps_a_round": STEPS,
        "rounds": ROUNDS,
        "layers": step.layers,
        "waits_once_warm": fed.waits,
        "hidden_ms_a_step": 1000 * fed.hidden_s / fed.batches,
        "depth": fed.depth.batches,
        "managed_gib": faulting.nbytes / GIB,
    }
    faulting.free()
    path = results.write("feed", figures, arguments.out, arguments.commit)
    print(path.read_text())
    ratio = over(seconds["fed"], seconds["resident"])
    print(
        f"fed over resident: {ratio:.4f}, at most {TARGET}: {'ok' if ratio <= TARGET else 'MISSED'}"
    )
    return 0 if ratio <= TARGET else 1


def over(one: list[float], other: list[float]) -> float:
    """The median ratio of neighbouring rounds: a machine that slows down slows both."""
    return median(a / b for a, b in zip(one, other, strict=True))


def fill_store() -> tuple[ArenaStore, int]:
    """A pinned arena with random entries, and what one entry takes."""
    store = ArenaStore("entries", Budget(4 * GIB), None, print, pinned, Tally())
    generator = torch.Generator().manual_seed(0)
    for number in range(ENTRIES):
        latents = torch.randn(LATENT, generator=generator).to(DTYPE)
        text = torch.randn(TEXT, generator=generator).to(DTYPE)
        store.put(f"{number}", {"latents": latents, "text": text})
    return store, latents.nbytes + text.nbytes


def keys_of(index: int) -> list[str]:
    """The entries of a batch; another row each epoch, every entry once."""
    epoch, place = divmod(index, EPOCH)
    order = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [f"{number}" for number in order[place * BATCH : (place + 1) * BATCH]]


class Step:
    """Forward, backward and update of a stack of matrix products that use all of the batch."""

    def __init__(self) -> None:
        scale = WIDTH**-0.5
        self.weights = [
            (torch.randn(WIDTH, WIDTH, device=DEVICE, dtype=DTYPE) * scale).requires_grad_()
            for _ in range(WEIGHTS)
        ]
        self.layers = WEIGHTS

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, on the device."""
        hidden = batch.text["tokens"].reshape(-1, WIDTH)
        pooled = batch.latents.reshape(len(batch.latents), -1, WIDTH).mean(1)
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

    def last(self, seconds: float) -> None:
        """Choose so many layers that a step lasts as long."""
        batch = Batch(
            torch.randn(BATCH, *LATENT, device=DEVICE, dtype=DTYPE),
            {"tokens": torch.randn(BATCH, *TEXT, device=DEVICE, dtype=DTYPE)},
            ("",) * BATCH,  # type: ignore[arg-type]
        )
        self.layers = 8 * WEIGHTS
        for _ in range(3):
            self(batch)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            self(batch)
        torch.cuda.synchronize()
        once = (time.perf_counter() - began) / 3
        self.layers = max(WEIGHTS, round(self.layers * seconds / once))


def timed(step: Step, way: Callable[[], Iterator[Batch]]) -> float:
    """Seconds a step of one round; the first batch is there before the clock starts."""
    batches = way()
    first = next(batches)
    torch.cuda.synchronize()
    began = time.perf_counter()
    loss = step(first)
    del first
    for number in range(1, STEPS):
        loss = step(next(batches))
        if number % LOGGED == 0:
            loss.item()
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / STEPS
    batches.close()  # type: ignore[attr-defined]
    return took


def resident(store: ArenaStore) -> Callable[[], Iterator[Batch]]:
    """Batches that lie in device memory already."""
    ready = []
    for index in range(4):
        entries = [store.get(key) for key in keys_of(index)]
        parts = {
            name: torch.stack([entry[name] for entry in entries if entry is not None]).to(DEVICE)
            for name in ("latents", "text")
        }
        ready.append(batch_of(parts))

    def batches() -> Iterator[Batch]:
        index = 0
        while True:
            yield ready[index % len(ready)]
            index += 1

    return batches


def batch_of(parts: dict[str, Tensor]) -> Batch:
    """As a run has it, but for the samples, which no step looks at."""
    return Batch(parts["latents"], {"tokens": parts["text"]}, ("",) * BATCH)  # type: ignore[arg-type]


class Fed:
    """What a run does: arena, pinned slots, a stream and a thread of their own."""

    def __init__(self, store: ArenaStore) -> None:
        self._store = store
        self._staging = Staging(pinned, self._mark)
        self._next = 0
        self.depth = Depth(FIRST_DEPTH, 2 * GIB)
        self.waits = 0
        self.batches = 0
        self.hidden_s = 0.0
        self._rounds = 0

    def __call__(self) -> Iterator[Batch]:
        """One round; who closes it ends the thread."""
        ahead: Ahead[torch.cuda.Event] = Ahead(self._loaded(), CudaLane(DEVICE), self.depth)
        try:
            for batch, _ in ahead:
                yield batch
        finally:
            ahead.close()
            self._rounds += 1
            if self._rounds > WARM_UP:
                self.waits += ahead.counts.waits - 1  # the first of a round cannot be there
                self.batches += ahead.counts.batches
                self.hidden_s += ahead.counts.hidden_s

    def _loaded(self) -> Iterator[tuple[Batch, int]]:
        while True:
            entries = [e for e in self._store.get_many(keys_of(self._next)) if e is not None]
            parts = {n: partial(stack_in, [e[n] for e in entries]) for n in ("latents", "text")}
            moved = self._staging.send(parts, lambda t: torch.empty_like(t, device=DEVICE))
            self._next += 1
            yield batch_of(moved), self._next

    @staticmethod
    def _mark() -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record()
        return mark


class Faulting:
    """Every entry in managed memory; kernels gather a batch and fault for its pages."""

    def __init__(self, store: ArenaStore, driver: Driver, sample_nbytes: int) -> None:
        self.nbytes = ENTRIES * sample_nbytes
        assert self.nbytes < 2 * GIB
        code, self._pointer = driver.allocate_managed(self.nbytes)
        assert code == 0, code
        self._driver = driver
        self._store = store
        self._sample_nbytes = sample_nbytes
        self._managed: Tensor | None = torch.as_tensor(
            DeviceBytes(self._pointer, self.nbytes), device=DEVICE
        )
        self._next = 0

    def __call__(self) -> Iterator[Batch]:
        """One round, before which the host writes every entry and so has its pages."""
        torch.cuda.synchronize()
        for number in range(ENTRIES):
            entry = self._store.get(f"{number}")
            assert entry is not None
            start = self._pointer + number * self._sample_nbytes
            for tensor in (entry["latents"], entry["text"]):
                ctypes.memmove(start, tensor.data_ptr(), tensor.nbytes)
                start += tensor.nbytes
        while True:
            yield self._gathered()

    def _gathered(self) -> Batch:
        assert self._managed is not None
        latents, texts = [], []
        split = 2 * LATENT[0] * LATENT[1] * LATENT[2]
        for key in keys_of(self._next):
            start = int(key) * self._sample_nbytes
            entry = self._managed[start : start + self._sample_nbytes]
            latents.append(entry[:split].view(DTYPE).view(LATENT))
            texts.append(entry[split:].view(DTYPE).view(TEXT))
        self._next = (self._next + 1) % EPOCH  # a round never meets an entry twice
        return batch_of({"latents": torch.stack(latents), "text": torch.stack(texts)})

    def free(self) -> None:
        """Give the range back, once nothing reads it."""
        torch.cuda.synchronize()
        self._managed = None
        assert self._driver.free(self._pointer) == 0


assert STEPS <= EPOCH, "a faulting round would meet an entry twice"


if __name__ == "__main__":
    sys.exit(main())
