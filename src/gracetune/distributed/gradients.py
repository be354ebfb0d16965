"""Sum the gradients of all ranks, once per optimizer step.

Gradients are collected in buckets of about 25 MiB, in the reverse order of the parameters, which is
roughly the order in which backward computes them. In the last backward of a step, a bucket is
reduced as soon as its gradients are complete, while backward continues:

    backward:   block 3 | block 2 | block 1 | block 0
    reduce:               bucket 0 (3, 2)     bucket 1 (1, 0)

All ranks reduce the same buckets in the same order. A rank whose step fails, for example because
its device is out of memory, reduces zeros instead, so that no other rank waits for it; the ranks
then agree to repeat the step.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from gracetune.distributed.layout import Layout
    from gracetune.distributed.ranks import RankGroup

BUCKET_NBYTES = 25 * MIB
"""Size from which a bucket is reduced. Smaller buckets start earlier, larger ones are reduced with
a higher bandwidth; DistributedDataParallel uses the same size."""


class GradientReducer:
    """Sums gradients over ranks. With a single rank, it does nothing."""

    def __init__(
        self, ranks: RankGroup, device: torch.device, bucket_nbytes: int = BUCKET_NBYTES
    ) -> None:
        self.timer = ComputeTimer(device)
        """Measures the time between `begin` and the end of the last backward; not used by a single
        rank."""
        self._ranks = ranks
        self._bucket_nbytes = bucket_nbytes
        self._buckets: list[_Bucket] = []
        self._num_launched = 0

    def begin(self, parameters: Iterable[Parameter]) -> None:
        """Start a step that trains these parameters; the same ones on every rank."""
        if self._ranks.world_size > 1:
            self.timer.start()
            self._buckets = list(_make_buckets(list(parameters), self._bucket_nbytes))
            self._num_launched = 0

    def num_passes(self, micro_batches: int) -> int:  # noqa: ARG002
        """Return the passes that each rank must run in a step: as many as it has micro-batches."""
        return 0

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Reduce gradients while the `with` block runs the last backward of the step."""
        bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

        def on_gradient(parameter: Parameter) -> None:
            bucket_of[parameter].missing.discard(parameter)
            self._launch_complete()

        hooks = [
            p.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            for p in bucket_of
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """Reduce what is left, wait for all reductions, and store the sums as gradients.

        A parameter that has a gradient on no rank keeps none.
        """
        if self._ranks.world_size == 1:
            return
        self.timer.stop()
        self._launch_all()
        absent = self._agree_on_absent()
        for bucket in self._buckets:
            bucket.store(absent)
        self._buckets = []

    def abandon(self, reason: str) -> None:  # noqa: ARG002
        """Take part in the reductions of a step that failed on this rank; drop the results.

        Call `zero_grad` first, which frees memory for the buckets.
        """
        if self._ranks.world_size == 1:
            return
        self.timer.stop()
        self._launch_all()
        self._agree_on_absent()
        for bucket in self._buckets:
            bucket.wait()
        self._buckets = []

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients together."""
        return get_total_norm(gradients)

    def _launch_complete(self) -> None:
        """Reduce the next buckets in order, as far as their gradients are complete."""
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            if bucket.missing:
                return
            bucket.launch()
            self._num_launched += 1

    def _launch_all(self) -> None:
        for bucket in self._buckets[self._num_launched :]:
            bucket.launch()
            self._num_launched += 1

    def _agree_on_absent(self) -> set[int]:
        """Return the positions of the parameters that have a gradient on no rank."""
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        absent = {i for i, p in enumerate(parameters) if p.grad is None}
        (is_any_absent,) = self._ranks.any(bool(absent))
        if not is_any_absent:
            return set()
        return set.intersection(*self._ranks.gather(absent))


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters of one dtype and device whose gradients are reduced together."""

    parameters: list[Parameter]
    first: int
    """Position of the first parameter among those of all buckets."""
    missing: set[Parameter]
    """Parameters whose gradients are not complete yet."""
    sums: Tensor | None = None
    work: dist.Work | None = None

    def launch(self) -> None:
        """Start to reduce the gradients; zeros stand for those that do not exist."""
        self.sums = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        )
        for parameter, view in self._views():
            if parameter.grad is not None:
                parameter.grad = view  # frees the memory of the rank's own gradient
        self.work = dist.all_reduce(self.sums, async_op=True)

    def wait(self) -> None:
        """Wait until the sums are complete."""
        assert self.work is not None, "the bucket was not launched"
        self.work.wait()

    def store(self, absent: set[int]) -> None:
        """Wait, and give the sums to the parameters, except those at the positions `absent`."""
        self.wait()
        for index, (parameter, view) in enumerate(self._views()):
            parameter.grad = None if self.first + index in absent else view

    def _views(self) -> Iterator[tuple[Parameter, Tensor]]:
        assert self.sums is not None, "the bucket was not launched"
        pieces = torch.split(self.sums, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            yield parameter, piece.view(parameter.shape)


def _make_buckets(parameters: Sequence[Parameter], nbytes: int) -> Iterator[_Bucket]:
    """Split parameters into buckets of one dtype, in reverse order."""
    waiting: list[Parameter] = []
    size = first = 0
    for parameter in reversed(parameters):
        same = not waiting or (waiting[0].dtype, waiting[0].device) == (
            parameter.dtype,
            parameter.device,
        )
        if waiting and (not same or size >= nbytes):
            yield _Bucket(waiting, first, set(waiting))
            first += len(waiting)
            waiting, size = [], 0
        waiting.append(parameter)
        size += parameter.nbytes
    if waiting:
        yield _Bucket(waiting, first, set(waiting))


class ComputeTimer:
    """Measures how long a rank computes in its steps, without the time it waits for others."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started_at = self._seconds = 0.0

    def start(self) -> None:
        """Start to measure a step."""
        self._started_at = time.perf_counter()
        if self._is_cuda:
            pair = [
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
            pair[0].record()
            self._events.append((pair[0], pair[1]))

    def stop(self) -> None:
        """End the measurement of a step; call it before waiting for other ranks."""
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started_at

    def total_seconds(self) -> float:
        """Return the seconds of all steps so far. Waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1000
            self._events.clear()
        return self._seconds


def check_same_weights(layout: Layout, parameters: Mapping[str, Parameter]) -> str:
    """Return the name of a trained tensor that differs between ranks; empty if none does.

    Ranks that store the same part of the model are compared. All bits are, by a sum for each
    tensor. Waits for the device.
    """
    if layout.num_replicas == 1:
        return ""
    sums = torch.stack([_bit_sum(p.detach()) for p in parameters.values()]).tolist()
    found = layout.ranks.gather(sums)
    for shard in range(layout.shard_size):
        copies = found[shard :: layout.shard_size]
        for index, name in enumerate(parameters):
            if len({sums[index] for sums in copies}) > 1:
                return name
    return ""


def _bit_sum(tensor: Tensor) -> Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.contiguous().view(words).sum(dtype=torch.int64)
