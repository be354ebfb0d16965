"""Build and time training steps of a LoRA on a transformer with the shape of Wan 2.2 A14B.

Weights are random. One image of 1024x1024 pixels is 4096 tokens. Everything is created on the
device; benchmarks that stream weights move them to the host. `REHEARSAL` is a miniature on the CPU.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import results
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

LAYERS = 40
RANK = 32
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Scale:
    """Device and sizes of the model and of its inputs."""

    device: torch.device
    layers: int = LAYERS
    config: dict[str, int] = field(default_factory=dict)
    """Settings of the model that differ from Wan 2.2 A14B."""
    latent_edge: int = 128
    text: tuple[int, int] = (512, 4096)
    """Number of text tokens, and their width."""

    def has_memory(self, nbytes: int) -> bool:
        """Return True if the device has this much memory free; a rehearsal needs none."""
        if self.device.type == "cpu":
            return True
        return torch.cuda.is_available() and torch.cuda.mem_get_info(self.device)[0] >= nbytes

    def limit_memory(self, nbytes: float | None) -> None:
        """Limit the device memory of torch to `nbytes`; None removes the limit."""
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            share = 1.0 if nbytes is None else nbytes / total
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def reset_peak_memory(self) -> None:
        """Wait for the device, and reset its peak memory."""
        results.synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


FULL = Scale(torch.device("cuda", 0))
REHEARSAL = Scale(
    torch.device("cpu"),
    layers=4,
    config={"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64, "text_dim": 32},
    latent_edge=8,
    text=(16, 32),
)


@dataclass(frozen=True)
class StepTiming:
    """Median time and peak memory of training steps, and the last loss."""

    seconds: float
    peak_gib: float
    """Peak of allocated memory, without the allocator's cache."""
    reserved_gib: float
    """Peak of memory that the allocator held, cache included."""
    loss: float


def make_model(scale: Scale) -> nn.Module:
    """Return a model with random frozen bf16 weights and a LoRA whose output is not zero."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with scale.device:
        model: nn.Module = WanTransformer3DModel(num_layers=scale.layers, **scale.config)
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(scale.device, torch.float32).mul_(0.1)
            parameter.requires_grad_(True)
    return model.train()


def make_step(
    model: nn.Module, batch: int, scale: Scale, autocast: bool = False
) -> Callable[[], torch.Tensor]:
    """Return a function that runs one training step on fixed inputs and returns the loss."""
    predict, latents = make_forward(model, batch, scale)
    return make_training_step(model, predict, latents, autocast)


def make_forward(
    model: nn.Module, batch: int, scale: Scale
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Return a function that runs one forward pass on fixed inputs, and a target of its shape."""
    device, edge = scale.device, scale.latent_edge
    generator = torch.Generator(device).manual_seed(batch)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    latents, text = noise(batch, 16, 1, edge, edge), noise(batch, *scale.text)
    timestep = torch.randint(0, 1000, (batch,), device=device, generator=generator)

    def predict() -> torch.Tensor:
        return model(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]

    return predict, latents


def make_training_step(
    model: nn.Module, predict: Callable[[], torch.Tensor], target: torch.Tensor, autocast: bool
) -> Callable[[], torch.Tensor]:
    """Return a function that runs forward, loss, backward and AdamW, and returns the loss."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-6, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
            out = predict()
        loss = (out.float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def time_step(step: Callable[[], torch.Tensor], steps: int, scale: Scale) -> StepTiming:
    """Return the median time and the peak memory of some steps, after a warm-up."""
    for _ in range(WARM_UP_STEPS):
        step()
    scale.reset_peak_memory()
    seconds, loss = time_each_step(step, steps, scale.device)
    return StepTiming(
        seconds=median(seconds),
        peak_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        loss=float(loss),
    )


def time_each_step(
    step: Callable[[], torch.Tensor], count: int, device: torch.device
) -> tuple[list[float], torch.Tensor]:
    """Return the seconds of each step, by CUDA events or a CPU clock, and the last loss."""
    clock: Callable[[], Any] = time.perf_counter if device.type == "cpu" else _record_event
    moments = [clock()]
    for _ in range(count):
        loss = step()
        moments.append(clock())
    if device.type == "cpu":
        return [b - a for a, b in pairwise(moments)], loss
    results.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(moments)], loss


def _record_event() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def free_memory() -> None:
    """Free the allocator's cache and compiled code before the next measurement."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
