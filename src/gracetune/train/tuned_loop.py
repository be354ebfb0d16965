"""Time the loop that an experienced user would write for a run, to compare gracetune with it.

`gracetune prove` runs it. The loop has the model of diffusers with peft's LoRA and nothing of
gracetune's plan: weights on the GPU in the run's dtype, bf16 autocast, blocks compiled with
diffusers' `compile_repeated_blocks`, the fastest attention backend, fused AdamW, and gradient
checkpointing on or off. It reads batches of the run's own dataset, once, before the clock starts;
so it never waits for data, and it waits for the GPU only after the last step. The batch size is
that of the run file: a larger or smaller one, which might be faster, is not tried.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.data.pipeline import DataPipeline
from gracetune.errors import ConfigError
from gracetune.events.run_control import reserve_folder
from gracetune.models.attention_backends import (
    AttentionRecorder,
    choose_backend,
    current_backend,
    dispatched_processors,
    drop_incapable_backends,
    find_backend,
    stopwatch_for,
    switch_backend,
    time_attention,
)
from gracetune.models.family import load_family, transformers_of
from gracetune.train import objective
from gracetune.train.experts import build_expert_schedule, expected_token_counts
from gracetune.train.prepare_model import make_trainable
from gracetune.train.step import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Batch
    from gracetune.events.dispatcher import Emit
    from gracetune.models.family import Family

NUM_BATCHES = 4
"""Different batches of the dataset; the loop repeats them."""
WARMUP_ROUNDS = 2
"""Times that every batch is trained before the clock starts, so that all graphs are compiled."""


def why_unsupported(run: RunFile) -> str:
    """Return why the loop cannot train what a run trains; empty if it can."""
    if run.adapter is None or run.adapter.kind != "lora":
        kind = "none" if run.adapter is None else run.adapter.kind
        return f"the tuned loop trains a LoRA with peft, and the run has adapter.kind: {kind}"
    if run.model.quantize != "none":
        return f"the tuned loop has plain weights, and the run has quantize: {run.model.quantize}"
    return ""


def time_tuned_loop(
    run: RunFile,
    folder: Path,
    emit: Emit,
    *,
    steps: int,
    checkpointing: bool,
    device: torch.device,
    compiles: bool = True,
) -> dict[str, Any]:
    """Train some steps as a plain loop does; return its speed and its peak of device memory.

    If the model does not fit on the device, the result has `fits: False` and no speed.
    """
    if reason := why_unsupported(run):
        raise ConfigError(f"{reason}. Set adapter.kind: lora and model.quantize: none.")
    folder.mkdir(parents=True, exist_ok=True)
    with reserve_folder(folder, lambda _: None):
        family = load_family(run.model, emit)
        schedule = build_expert_schedule(
            run.train, family.boundary, expected_token_counts(run, family)
        )
        make_trainable(run, family, schedule, emit)
        batches = _load_batches(run, family, folder, device, emit)
        family.release_text_encoder()
        family.to(torch.device("cpu"))
        # Of two experts, which have the same shape, the loop trains one.
        expert = "" if schedule is None else schedule.expert_at(0).expert or ""
        transformer: Any = transformers_of(family.transformer)[expert]
        result = {"gradient_checkpointing": checkpointing, "batch_size": run.train.batch_size}
        try:
            transformer.to(device).train()
            if run.model.attention_mechanism == "auto" and device.type == "cuda":
                _choose_attention(family, transformer, batches, device)
            if checkpointing:
                transformer.enable_gradient_checkpointing()
            is_compiled = compiles and _compile_blocks(transformer)
            step = _make_step(run, family, transformer, device)
            timed = _time_steps(step, batches, steps, device)
        except torch.OutOfMemoryError:
            return {"fits": False, **result}
        return {
            "fits": True,
            **timed,
            "compiled": is_compiled,
            "attention": current_backend(transformer),
            **result,
        }


def _load_batches(
    run: RunFile, family: Family, folder: Path, device: torch.device, emit: Emit
) -> list[Batch]:
    """Encode the dataset as a run does, and return some batches on the device."""
    family.to(device)
    transfer = build_batch_transfer(run.gh200_optimizations, device, emit)
    pipeline = DataPipeline(run, family, transfer, folder, emit)
    try:
        iterator = pipeline.batches()
        try:
            return [next(iterator)[0] for _ in range(NUM_BATCHES)]
        finally:
            iterator.close()
    finally:
        pipeline.close()


def _choose_attention(
    family: Family, transformer: nn.Module, batches: Sequence[Batch], device: torch.device
) -> None:
    """Switch to the attention backend that is fastest for these batches."""
    if not dispatched_processors(transformer):
        return
    recorder = AttentionRecorder()
    for batch in batches:
        x0, conditioning = family.split_encoded(batch.latents)
        timesteps = torch.full((len(x0),), 0.5, device=device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16), recorder:
            family.predict(transformer, x0, timesteps, {**batch.text, **conditioning})
    calls = recorder.heaviest_calls()
    stopwatch = stopwatch_for(device)
    timings = drop_incapable_backends(
        time_attention(calls, device, stopwatch),
        lambda: recorder.other_calls(calls),
        device,
        stopwatch,
    )
    switch_backend(transformer, find_backend(choose_backend(timings)))


def _compile_blocks(transformer: Any) -> bool:
    """Compile the blocks as diffusers' users do; return False for a model that names none."""
    try:
        transformer.compile_repeated_blocks()
    except (AttributeError, ValueError):  # an older class, or one without the names of its blocks
        return False
    return True


def _make_step(
    run: RunFile,
    family: Family,
    transformer: nn.Module,
    device: torch.device,
) -> Callable[[Batch], Tensor]:
    """Return a function that trains one batch and returns its loss."""
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(derive_seed(run.seed, "tuned loop"))

    def step(batch: Batch) -> Tensor:
        x0, conditioning = family.split_encoded(batch.latents)
        timesteps = torch.rand(len(x0), generator=generator, device=device)
        noise = torch.randn(x0.shape, generator=generator, device=device)
        noisy = objective.add_noise(x0, noise, timesteps, family.prediction)
        with torch.autocast(device.type, torch.bfloat16):
            conditions = {**batch.text, **conditioning}
            predicted = family.predict(transformer, noisy, timesteps, conditions)
        target = objective.target(x0, noise, timesteps, family.prediction)
        loss = objective.sample_losses(predicted, target, batch.weights).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _time_steps(
    step: Callable[[Batch], Tensor], batches: Sequence[Batch], steps: int, device: torch.device
) -> dict[str, Any]:
    is_cuda = device.type == "cuda"

    def wait() -> None:
        if is_cuda:
            torch.cuda.synchronize(device)

    for _ in range(WARMUP_ROUNDS):
        for batch in batches:
            step(batch)
    wait()
    samples = 0
    started_at = time.perf_counter()
    for number in range(steps):
        batch = batches[number % len(batches)]
        loss = step(batch)
        samples += len(batch)
    wait()  # once: waiting after each step would leave the GPU idle while the next is launched
    seconds = time.perf_counter() - started_at
    return {
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "samples_per_s": samples / seconds,
        "device_peak_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else 0,
        "last_loss": float(loss),
    }
