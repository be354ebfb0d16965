"""`model.attention_mechanism: auto` on a GPU: measured by the largest batch of the run.

What is chosen there is tried on every other bucket before it is taken. It is kept in the run's
folder, so that a run that goes on computes as it did before; another device, other buckets, or
another version of what computes, measures anew.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache, partial
from math import isfinite
from typing import TYPE_CHECKING

import diffusers
import torch
from accelerate.utils import broadcast_object_list

from gracetune.atomic_files import write_text
from gracetune.events.types import Notice
from gracetune.models.attention_backends import (
    BACKENDS,
    AttentionRecorder,
    find_backend,
    fastest,
    stopwatch_for,
    switch_backend,
    dispatched_processors,
    time_attention,
    drop_incapable_backends,
)
from gracetune.models.family import EXPERTS, bind_expert, transformers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.events.types import Event
    from gracetune.models.attention_backends import AttentionCall, BackendTiming
    from gracetune.train.step import TrainState

    Emit = Callable[[Event], None]
    Calls = Sequence[tuple[AttentionCall, int]]
    """Kinds of calls, and how often a pass makes each."""
    Choose = Callable[[Calls, Callable[[], Sequence[AttentionCall]]], tuple[str, str]]
    """From the calls of the largest batch, and those of a batch of every other bucket, to a backend
    and what is told of it."""

CHOICE = "attention.json"
LEVEL = 0.5
"""Of noise, in the pass that is watched: any would do."""


def autotune_attention(
    t: TrainState, feed: DataPipeline, held_out: Iterable[Batch], folder: Path, emit: Emit
) -> None:
    """Pick the backend of this run by measuring, where the run file leaves it open on a GPU."""
    device = t.accelerator.device
    if t.run.model.attention_mechanism != "auto" or device.type != "cuda":
        return
    here = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "shapes": shapes_of(t, feed),
    }

    def choose(calls: Calls, others: Callable[[], Sequence[AttentionCall]]) -> tuple[str, str]:
        stopwatch = stopwatch_for(device)
        timings = time_attention(calls, device, stopwatch)
        timings = drop_incapable_backends(timings, others, device, stopwatch)
        return fastest(timings), told(timings, calls)

    pick_attention(t, batches_of(t, feed, held_out), folder / CHOICE, here, choose, emit)


def shapes_of(t: TrainState, feed: DataPipeline) -> str:
    """What decides the calls of a run: another model, precision or bucket makes others."""
    sizes = [draw.size for draw in feed.order.one_draw_per_size()]
    model, precision = t.family.name, t.accelerator.mixed_precision
    return f"{model} in {precision}, {t.run.train.batch_size} of each of {sizes}"


def batches_of(
    t: TrainState, feed: DataPipeline, held_out: Iterable[Batch] = ()
) -> list[Callable[[], Batch]]:
    """A full batch of each bucket, loaded when it is asked for, the largest first.

    A bucket may be held out as a whole: one batch of each shape that is follows.
    """
    count = t.run.train.batch_size
    trained = [partial(feed.load, (draw,) * count) for draw in feed.order.one_draw_per_size()]
    measured = {batch.latents.shape: batch for batch in held_out}
    return [*trained, *(partial(_itself, batch) for batch in measured.values())]


def pick_attention(
    t: TrainState,
    batches: Sequence[Callable[[], Batch]],
    kept: Path,
    here: dict[str, str],
    choose: Choose,
    emit: Emit,
) -> None:
    """As the run did before, or as is chosen now; every rank does as the first one.

    The first of the batches is the largest.
    """
    transformers = list(transformers_of(t.family.transformer).values())
    if not all(map(dispatched_processors, transformers)):
        return
    name = ""
    if t.accelerator.is_main_process:
        name, notice = _kept_or_chosen(t, batches, kept, here, choose)
        emit(notice)
    (name,) = broadcast_object_list([name])
    for transformer in transformers:
        switch_backend(transformer, find_backend(name))


def _kept_or_chosen(
    t: TrainState,
    batches: Sequence[Callable[[], Batch]],
    kept: Path,
    here: dict[str, str],
    choose: Choose,
) -> tuple[str, Notice]:
    name = read_choice(kept, here)
    if name:
        return name, Notice(f"attention: {name}, as this run has measured before")
    try:
        name, text = choose(*watched(t, batches))
    except torch.OutOfMemoryError:  # the first step gives way to a smaller plan, if it must
        text = "attention: sdpa; the device has no room to measure others now"
        return "sdpa", Notice(text, level="warning", fallback=True)
    write_text(kept, json.dumps(here | {"backend": name}))
    return name, Notice(text)


def read_choice(kept: Path, here: dict[str, str]) -> str:
    """What was chosen here before; empty where nothing was."""
    with suppress(OSError, ValueError, RuntimeError, ImportError):  # none, torn, or uninstalled
        found = json.loads(kept.read_text(encoding="utf-8"))
        name = str(found.get("backend"))
        if found | here == found and name in BACKENDS and find_backend(name):
            return name
    return ""


def watched(
    t: TrainState, batches: Sequence[Callable[[], Batch]]
) -> tuple[Calls, Callable[[], Sequence[AttentionCall]]]:
    """The attention of a pass over the first batch, and a way to all else that is asked for."""
    watching = AttentionRecorder()
    watch(t, batches[0](), watching)
    calls = watching.heaviest_calls()

    @cache
    def others() -> Sequence[AttentionCall]:
        for load in batches[1:]:
            watch(t, load(), watching)
        return watching.other_calls(calls)

    return calls, others


def watch(t: TrainState, batch: Batch, watching: AttentionRecorder) -> None:
    """One pass of the model; nothing is drawn and nothing is kept."""
    device = t.accelerator.device
    x0, given = t.family.split_encoded(batch.latents)
    levels = torch.full((len(batch),), LEVEL, device=device)
    by_name = transformers_of(t.family.transformer)
    expert = next((e for e in EXPERTS if e in by_name and _is_trained(by_name[e])), None)
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        t.accelerator.autocast(),
        watching,
    ):
        transformer = bind_expert(t.family.transformer, expert)  # not its wrapper: ranks differ here
        t.family.predict(transformer, x0, levels, {**batch.text, **given})


def told(timings: Sequence[BackendTiming], calls: Calls) -> str:
    """The choice with the times that it was made by, and who could not be timed."""
    kinds = "; ".join(f"{count} times {asked}" for asked, count in calls)
    timed = ", ".join(f"{t.name} {t.seconds * 1e3:.2f} ms" for t in timings if isfinite(t.seconds))
    left_out = ", ".join(f"{t.name} ({t.reason})" for t in timings if not isfinite(t.seconds))
    text = f"attention: {fastest(timings)}, by measuring {kinds}, forward and backward: {timed}"
    return f"{text}; left out: {left_out}" if left_out else text


def _itself(batch: Batch) -> Batch:
    return batch


def _is_trained(transformer: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in transformer.parameters())
