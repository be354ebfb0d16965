"""A Wan2.2-A14B-shaped transformer with random weights, its LoRA, and a step of it, for timing.

One frame of 1024x1024 is 4096 tokens. Everything is on the device; whoever streams takes it away.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

DEVICE = torch.device("cuda", 0)
LAYERS = 40
RANK = 32
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
WARM_UP = 2


@dataclass(frozen=True)
class Timed:
    """One way to run a step."""

    seconds: float
    peak_gib: float
    """What torch had allocated at most, beside the reserve that its allocator keeps."""
    reserved_gib: float
    loss: float


def make_model(layers: int = LAYERS, lora_dtype: torch.dtype = torch.float32) -> nn.Module:
    """Random frozen weights in bf16 and a LoRA that is not zero."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model: nn.Module = WanTransformer3DModel(num_layers=layers)
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(DEVICE, lora_dtype).mul_(0.1)
            parameter.requires_grad_(True)
    return model.train()


def make_step(model: nn.Module, batch: int, autocast: bool = False) -> Callable[[], torch.Tensor]:
    """A whole step on inputs that stay: forward, backward, AdamW. Gives the loss."""
    predict, latents = ask(model, batch)
    return step_of(model, predict, latents, autocast)


def ask(model: nn.Module, batch: int) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """What passes these inputs through a model, and latents of the shape that it gives."""
    generator = torch.Generator(DEVICE).manual_seed(batch)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    latents, text = noise(batch, 16, 1, 128, 128), noise(batch, 512, 4096)
    timestep = torch.randint(0, 1000, (batch,), device=DEVICE, generator=generator)

    def predict() -> torch.Tensor:
        return model(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]

    return predict, latents


def step_of(
    model: nn.Module, predict: Callable[[], torch.Tensor], target: torch.Tensor, autocast: bool
) -> Callable[[], torch.Tensor]:
    """Forward, loss, backward, fused AdamW; gives the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
            out = predict()
        loss = (out.float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def time_step(step: Callable[[], torch.Tensor], steps: int) -> Timed:
    """The median of some steps after a warm-up, queued one behind the other as in a run."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds, loss = in_a_row(step, steps)
    return Timed(
        seconds=median(seconds),
        peak_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        loss=float(loss),
    )


def in_a_row(
    step: Callable[[], torch.Tensor], count: int, device: torch.device = DEVICE
) -> tuple[list[float], torch.Tensor]:
    """Seconds of each of some steps that nobody waits between, by the device; and the last loss."""
    clock: Callable[[], Any] = time.perf_counter if device.type == "cpu" else _moment
    moments = [clock()]
    for _ in range(count):
        loss = step()
        moments.append(clock())
    if device.type == "cpu":
        return [b - a for a, b in pairwise(moments)], loss
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(moments)], loss


def _moment() -> torch.cuda.Event:
    """When all that was queued so far is done."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def let_go() -> None:
    """Give cached memory and compilations back before the next way is measured."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
