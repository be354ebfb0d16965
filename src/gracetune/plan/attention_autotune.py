"""Measure which attention backend is fastest for a run (`model.attention_mechanism: auto`).

1. One forward pass over the largest batch records the run's attention calls.
2. Every installed backend is timed on the heaviest of these calls.
3. The fastest backend is tried on the calls of every other bucket. If it fails there, it is dropped
   and the next fastest is tried.

The choice is written to every checkpoint, so that a resumed run computes the same numbers, and to
`attention.json` in the run's folder, for a run that starts again before its first checkpoint. It is
also kept next to the compiled graphs of other runs, which contain calls of the backend: if two
backends are equally fast, a second measurement may choose the other one, and everything would be
compiled again. Without a checkpoint, the backends are measured again on another device, with other
buckets, or with another version of torch or diffusers.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING

import diffusers
import torch
from accelerate.utils import broadcast_object_list
from blake3 import blake3

from gracetune.atomic_files import write_text
from gracetune.events.types import Notice
from gracetune.models.attention_backends import (
    BACKENDS,
    AttentionRecorder,
    choose_backend,
    dispatched_processors,
    drop_incapable_backends,
    find_backend,
    stopwatch_for,
    switch_backend,
    time_attention,
)
from gracetune.models.context_parallel import whole_sequences
from gracetune.models.family import EXPERTS, bind_expert, transformers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from accelerate import Accelerator

    from gracetune.data.sample import Batch
    from gracetune.events.types import Event
    from gracetune.models.attention_backends import AttentionCall, BackendTiming
    from gracetune.models.family import Family

    Emit = Callable[[Event], None]
    Batches = Sequence[Callable[[], Batch]]
    """Loaders of one full batch of each bucket, the largest bucket first."""
    Calls = Sequence[tuple[AttentionCall, int]]
    """Attention calls of one pass, each with how often the pass makes it."""
    Choose = Callable[[Calls, Callable[[], Sequence[AttentionCall]]], tuple[str, str]]
    """Picks a backend: (calls of the largest batch, a function that returns the calls of the other
    buckets) -> (the backend's name, the notice's text)."""

log = logging.getLogger(__name__)
CHOICE_FILE = "attention.json"
RECORDED_TIMESTEP = 0.5
"""Timestep of the forward pass that records attention calls. Any value would do, because it does
not change the shapes."""


def autotune_attention(
    family: Family,
    accelerator: Accelerator,
    batches: Batches,
    shapes: str,
    folder: Path,
    emit: Emit,
    saved: str = "",
    shared_folder: Path | None = None,
) -> None:
    """Time all attention backends on this GPU and switch the transformers to the fastest.

    `shapes` is a text that changes with the model, precision, batch size or buckets, and so with
    the shapes of attention. If it changes, the choice recorded in `folder`, that of the run, or in
    `shared_folder`, that of all runs, is not used again. `saved` is the backend in the checkpoint
    that the run resumes from, which is used if it is installed.
    """
    device = accelerator.device
    environment = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "shapes": shapes,
    }

    def choose(calls: Calls, other_calls: Callable[[], Sequence[AttentionCall]]) -> tuple[str, str]:
        stopwatch = stopwatch_for(device)
        timings = time_attention(calls, device, stopwatch)
        timings = drop_incapable_backends(timings, other_calls, device, stopwatch)
        measured = "; ".join(f"{count} x {call}" for call, count in calls)
        log.info("attention backends were timed on %s", measured)
        return choose_backend(timings), describe_choice(timings)

    files = [folder / CHOICE_FILE]
    if shared_folder is not None:
        key = blake3(json.dumps(environment, sort_keys=True).encode()).hexdigest(16)
        files.append(shared_folder / f"attention-{key}.json")
    pick_attention(family, accelerator, batches, files, environment, choose, emit, saved)


def pick_attention(
    family: Family,
    accelerator: Accelerator,
    batches: Batches,
    files: Sequence[Path],
    environment: dict[str, str],
    choose: Choose,
    emit: Emit,
    saved: str = "",
) -> None:
    """Switch to the attention backend recorded in `files`, or to the one that `choose` picks.

    The first file is that of the run, the others are those of all runs of this user.
    `saved` is the backend in the checkpoint that the run resumes from; it comes first. A recorded
    backend is used only if it was chosen in the same `environment`: device, versions and shapes.
    The main process decides, and the other processes use the same backend. Models whose attention
    does not go through diffusers' dispatcher are left as they are.
    """
    transformers = list(transformers_of(family.transformer).values())
    if not all(map(dispatched_processors, transformers)):
        return
    name = ""
    if accelerator.is_main_process:
        if _is_installed(saved):
            name, notice = saved, Notice(f"attention: {saved} (as in the checkpoint)")
        else:
            name, notice = _recorded_or_chosen(
                family, accelerator, batches, files, environment, choose
            )
        emit(notice)
    (name,) = broadcast_object_list([name])
    for transformer in transformers:
        switch_backend(transformer, find_backend(name))


def _recorded_or_chosen(
    family: Family,
    accelerator: Accelerator,
    batches: Batches,
    files: Sequence[Path],
    environment: dict[str, str],
    choose: Choose,
) -> tuple[str, Notice]:
    for file in files:
        name = read_choice(file, environment)
        if name:
            where = "in this run" if file == files[0] else "on this machine"
            return name, Notice(f"attention: {name} (chosen earlier {where})")
    try:
        name, text = choose(*record_calls(family, accelerator, batches))
    except torch.OutOfMemoryError:  # a step that does not fit either falls back to a smaller plan
        text = "attention: sdpa; there is no free device memory to measure other backends"
        return "sdpa", Notice(text, level="warning", fallback=True)
    record = json.dumps(environment | {"backend": name})
    write_text(files[0], record)
    for file in files[1:]:
        with suppress(OSError):  # the folder may be read-only; then the next run measures again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, record)
    return name, Notice(text)


def read_choice(file: Path, environment: dict[str, str]) -> str:
    """Return the attention backend recorded in `file`, or an empty string if there is none.

    A record made in another `environment` (device, versions, shapes) is ignored.
    """
    with suppress(OSError, ValueError):  # no file yet, or an unreadable one
        found = json.loads(file.read_text(encoding="utf-8"))
        name = str(found.get("backend"))
        if found | environment == found and _is_installed(name):
            return name
    return ""


def _is_installed(name: str) -> bool:
    with suppress(RuntimeError, ImportError):
        return name in BACKENDS and bool(find_backend(name))
    return False


def record_calls(
    family: Family, accelerator: Accelerator, batches: Batches
) -> tuple[Calls, Callable[[], Sequence[AttentionCall]]]:
    """Return the most expensive attention calls in a forward pass over the largest batch.

    Also returns a function that runs the batches of the other buckets (sample sizes) and returns
    their attention calls.
    """
    recorder = AttentionRecorder()
    _forward_once(family, accelerator, batches[0](), recorder)
    calls = recorder.heaviest_calls()

    @cache
    def other_calls() -> Sequence[AttentionCall]:
        for load in batches[1:]:
            _forward_once(family, accelerator, load(), recorder)
        return recorder.other_calls(calls)

    return calls, other_calls


def _forward_once(
    family: Family, accelerator: Accelerator, batch: Batch, recorder: AttentionRecorder
) -> None:
    """Run the trained transformer once under the recorder, without advancing the run's RNGs."""
    device = accelerator.device
    x0, given = family.split_encoded(batch.latents)
    timesteps = torch.full((len(batch),), RECORDED_TIMESTEP, device=device)
    by_name = transformers_of(family.transformer)
    expert = next((e for e in EXPERTS if e in by_name and _is_trained(by_name[e])), None)
    devices = [device] if device.type == "cuda" else []
    with (
        whole_sequences(family),  # only the first rank runs this pass
        torch.random.fork_rng(devices),
        torch.no_grad(),
        accelerator.autocast(),
        recorder,
    ):
        transformer = bind_expert(family.transformer, expert)
        family.predict(transformer, x0, timesteps, {**batch.text, **given})


def describe_choice(timings: Sequence[BackendTiming]) -> str:
    """Return a text for the log: the fastest backend, all times, and why others were left out."""
    timed = [timing for timing in timings if isfinite(timing.seconds)]
    times = ", ".join(f"{timing.name} {timing.seconds * 1e3:.2f} ms" for timing in timed)
    text = f"attention: {choose_backend(timings)} (fastest of {len(timed)}: {times})"
    left_out = [timing for timing in timings if not isfinite(timing.seconds)]
    if not left_out:
        return text
    return f"{text}; left out: {', '.join(f'{one.name} ({one.reason})' for one in left_out)}"


def _is_trained(transformer: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in transformer.parameters())
