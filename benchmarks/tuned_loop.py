"""Compare `gracetune train` with the best training loop that diffusers and peft allow.

For each model and limit of device memory, three ways to train a LoRA of rank 16 are measured one
after the other, on the same GPU and with random weights. Samples are images of 1024x1024, or for
`clip` videos of 33 frames at 832x480:

    tuned loop   diffusers' transformer and peft's LoRA (fp32, under bf16 autocast), fused AdamW,
                 `compile_repeated_blocks()`, the fastest SDPA backend for its shape, with and
                 without gradient checkpointing, at the best batch size that fits: larger ones are
                 tried until one is slower, does not fit, or `--budget` seconds are over. If the
                 weights do not fit, diffusers' group offloading streams them from pinned memory.
    eager loop   the same without compilation, always with gradient checkpointing: what most
                 training scripts do.
    product      `gracetune train` with `plan: auto` on samples in six aspect ratios, including its
                 data pipeline, logging and telemetry. Captions have as many tokens as in the loops.

The loops run on one fixed batch without a data pipeline, which favours them. All their samples have
the size of the product's largest bucket. The product's buckets have 1 to 2 % fewer pixels on
average, which favours it, so the figure to compare is `largest_images_s`: images/s times the mean
number of pixels relative to the largest bucket. The memory of the loops is limited with torch's
memory fraction, that of the product with `plan.device_memory`. Each way runs in a process of its
own, the slowest ways last. Results are written after each measurement.

    PYTHONPATH=src:benchmarks python benchmarks/tuned_loop.py MODEL [--memory 96,24]
        [--ways loops,product] [--only NAME,...] [--steps 40] [--budget 120] [--out FOLDER]
        [--commit NAME] [--rehearse]

MODEL is flux, wan, qwen or clip. Results of other models and ways are kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import model_cases
import product_run
import results
import torch
from peft import LoraConfig
from product_run import ProductRun
from torch.nn.functional import scaled_dot_product_attention
from wan14b import free_memory, make_training_step, time_each_step

from gracetune.models.family import planner_shapes
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from model_cases import Case
    from torch import nn

NAME = "tuned_loop"
RANK = 16
WARM_UP, TIMED = 2, 4
"""Untimed and timed steps of a loop. The first one compiles."""
FULL_SHARE = 1.05
"""A batch size is not tried if it would need more than this share of the memory limit: activations
grow with it, and nothing else does."""
KILLED_AFTER_S = 120
"""Seconds after the budget of a loop until its process is killed: a measurement that has begun
within the budget may take this long."""


@dataclass(frozen=True)
class Loop:
    """A training loop with diffusers and peft."""

    name: str
    compiled: bool
    checkpointing: bool
    batch: int
    """The first batch size to try."""
    offload: bool = False
    """Stream frozen weights with diffusers' group offloading."""

    @property
    def is_slow(self) -> bool:
        """True if the loop takes minutes to compile: its offloading breaks every graph."""
        return self.compiled and self.offload

    @property
    def is_tuned(self) -> bool:
        """False for what most training scripts do: eager and checkpointed."""
        return self.compiled or not self.checkpointing


@dataclass(frozen=True)
class Model:
    """A model to train, its loops by device memory in GB, and the product's batch size."""

    case: str
    """Name in `model_cases.FULL`."""
    folder: str
    """Name in `random_weights.SHAPES`."""
    family: str
    nbytes: float
    """Bytes of the frozen weights in bf16."""
    loops: dict[int, tuple[Loop, ...]]
    product_batches: dict[int, int]
    """The batch sizes that the planner chooses: those that `gracetune plan RUN --machine h200-pcie`
    suggests for a run with `train.batch_size` 1 and 12 accumulation steps."""
    caption_tokens: int = 12
    """Tokens of the product's captions. The loops have 512, to which all but Qwen-Image pad."""
    joint_attention: bool = True
    """True if text tokens and image tokens attend to each other together."""
    eager_cudnn: bool = False
    """False if cuDNN's backward fails in an eager step: in torch 2.11 it faults on gradients that
    are not contiguous, as those of joint attention."""


def _loops(kept: int, checkpointed: int) -> tuple[Loop, ...]:
    return (
        Loop("compiled", True, False, kept),
        Loop("compiled_checkpointing", True, True, checkpointed),
        Loop("eager", False, False, 1),
        Loop("eager_checkpointing", False, True, checkpointed),
    )


def _offloaded(batch: int) -> tuple[Loop, ...]:
    return (
        Loop("eager_checkpointing_offload", False, True, batch, offload=True),
        Loop("compiled_checkpointing_offload", True, True, batch, offload=True),
    )


def larger(batch: int) -> int:
    """Return the batch size to try after this one: 1, 2, 3, 4, 6, 9, 13, ..."""
    return batch + max(1, batch // 2)


MODELS = {
    "flux": Model(
        "flux",
        "flux",
        "flux",
        23.8e9,
        {96: _loops(2, 4), 24: _offloaded(4)},
        {96: 2, 24: 4},
    ),
    "wan": Model(
        "wan",
        "wan21",
        "wan22",
        28.6e9,
        {96: _loops(1, 4), 24: _offloaded(4)},
        {96: 2, 24: 3},
        joint_attention=False,
        eager_cudnn=True,
    ),
    "qwen": Model(
        "qwen",
        "qwen_image",
        "qwen_image",
        40.9e9,
        {96: _loops(1, 4), 24: _offloaded(3)},
        {96: 2, 24: 6},
        caption_tokens=512,
    ),
    "clip": Model(
        "clip",
        "wan21",
        "wan22",
        28.6e9,
        {96: _loops(1, 2), 24: _offloaded(1)},
        {96: 1, 24: 1},
        joint_attention=False,
        eager_cudnn=True,
    ),
}


def main() -> int:
    """Measure the chosen ways of one model, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=MODELS, default="flux")
    parser.add_argument("--memory", default="96,24", help="limits of device memory, in GB")
    parser.add_argument("--ways", default="loops,product")
    parser.add_argument("--only", default="", help="names of the loops to measure; default: all")
    parser.add_argument("--steps", type=int, default=40, help="steps of the product's run")
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds of a loop for larger batch sizes"
    )
    arguments = results.parse_arguments(parser)
    model = MODELS[arguments.model]
    limits = [int(gb) for gb in arguments.memory.split(",")]
    figures = results.previous(NAME, arguments)
    only = [name for name in arguments.only.split(",") if name]

    def save(memory_gb: int, way: str, found: dict[str, Any]) -> None:
        prefix = f"{arguments.model}.{memory_gb}.{way}"
        found["commit"] = arguments.commit or results.this_commit()
        for key in [key for key in figures if key.startswith(f"{prefix}.")]:
            del figures[key]
        figures.update(results.flatten({prefix: found}))
        results.write(NAME, figures, arguments.out, arguments.commit)

    ways = arguments.ways.split(",")
    fast, slow = chosen_loops(model, limits, only if "loops" in ways else None)
    for memory_gb, loop in fast:
        measure_loop(arguments, loop, memory_gb, save)
    if "product" in ways:
        measure_product(arguments, model, limits, save)
    for memory_gb, loop in slow:
        measure_loop(arguments, loop, memory_gb, save)
    for memory_gb in limits:
        show(figures, arguments.model, memory_gb)
    return 0


# The loops


def chosen_loops(
    model: Model, limits: list[int], only: list[str] | None
) -> tuple[list[tuple[int, Loop]], list[tuple[int, Loop]]]:
    """Return the loops to measure, each with its limit of memory: the fast ones and the slow ones.

    `only` has names of loops; if it is empty, all are measured, and none if it is None.
    """
    chosen = [
        (memory_gb, loop)
        for memory_gb in limits
        for loop in model.loops[memory_gb]
        if only is not None and (not only or loop.name in only)
    ]
    return [one for one in chosen if not one[1].is_slow], [one for one in chosen if one[1].is_slow]


def measure_loop(
    arguments: argparse.Namespace,
    loop: Loop,
    memory_gb: int,
    save: Callable[[int, str, dict[str, Any]], None],
) -> None:
    """Measure one loop in a process of its own, and save its figures after each batch size."""
    print(f"{arguments.model}, {memory_gb} GB, {loop.name}", flush=True)
    began, lines = time.monotonic(), []
    model = MODELS[arguments.model]
    if arguments.rehearse:
        found = run_loop(model, loop, memory_gb, 0.0, rehearse=True)
    else:
        models = os.environ.get(product_run.KEEP)
        if loop.offload and models:  # pinning weights one by one takes up to twice their size
            product_run.make_room(Path(models) / model.folder, int(model.nbytes))
        found = run_loop_in_process(model, loop, memory_gb, arguments.budget)
    for line in found:
        lines.append(line)
        print(f"    {line}", flush=True)
        save(memory_gb, loop.name, merge(lines) | {"took_s": time.monotonic() - began})


def run_loop_in_process(
    model: Model, loop: Loop, memory_gb: int, budget_s: float
) -> Iterator[dict[str, Any]]:
    """Call `run_loop` in a process of its own; yield its figures, and why it failed if it did."""
    limit_s = budget_s + KILLED_AFTER_S
    ends_at = time.monotonic() + limit_s
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = results.start_forked(send_figures, sender, model, loop, memory_gb, budget_s)
    sender.close()  # so that the receiver ends with the process
    try:
        while receiver.poll(max(0.0, ends_at - time.monotonic())):
            yield receiver.recv()
        yield {"failed": f"stopped after {limit_s:.0f} s"}
    except EOFError:
        process.join()
        if process.exitcode:
            yield {"failed": f"ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def send_figures(
    sender: Connection, model: Model, loop: Loop, memory_gb: int, budget_s: float
) -> None:
    """Send the figures of a loop to the process that has started this one."""
    for line in run_loop(model, loop, memory_gb, budget_s, rehearse=False):
        sender.send(line)


def run_loop(
    model: Model, loop: Loop, memory_gb: int, budget_s: float, rehearse: bool
) -> Iterator[dict[str, Any]]:
    """Measure a loop at larger and larger batch sizes; yield the figures of each.

    It ends with the first batch size that is slower or does not fit, or after `budget_s`, or if the
    next one cannot fit: it would only be found out after compiling it.
    """
    began, best, batch = time.monotonic(), 0.0, loop.batch
    device = torch.device("cpu" if rehearse else "cuda")
    case = model_cases.FULL[model.case]
    if rehearse:
        case = model_cases.miniature_of(case)
    transformer = make_transformer(case, loop, device)
    with limited_memory(memory_gb, device):
        backend = choose_attention(model, case, transformer, loop, device)
        while True:
            torch._dynamo.reset()  # otherwise the second graph would be one for all batch sizes
            found = time_loop(case, transformer, batch, device) | {"attention": backend}
            yield {f"batch_{batch}": found}
            if found.get("images_s", 0.0) <= best:
                return
            if time.monotonic() - began >= budget_s:
                yield {"not_tried": f"batch {larger(batch)} and above: {budget_s:.0f} s are over"}
                return
            needed = found["weights_gib"] + larger(batch) / batch * (
                found["peak_gib"] - found["weights_gib"]
            )
            if needed * GIB > FULL_SHARE * memory_gb * 1e9:
                yield {"not_tried": f"batch {larger(batch)}: it needs about {needed:.0f} GiB"}
                return
            best, batch = found["images_s"], larger(batch)


def make_transformer(case: Case, loop: Loop, device: torch.device) -> nn.Module:
    """Build the transformer with random bf16 weights and a LoRA, and prepare it for the loop."""
    shapes = planner_shapes(case.family)
    cls = getattr(import_module("diffusers"), shapes.class_name)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = cls.from_config({**shapes.published_config, **case.config})
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    if loop.offload:
        offload_weights(model, device)
    pattern = "|".join(re.escape(target).replace(r"\*", r"\d+") for target in shapes.targets)
    model.add_adapter(
        LoraConfig(
            r=RANK,
            lora_alpha=RANK,
            target_modules=rf"(.*\.)?({pattern})",
            init_lora_weights="gaussian",
        )
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(device, torch.float32)
            parameter.requires_grad_(True)
    model.train()
    if loop.checkpointing:
        model.enable_gradient_checkpointing()
    if loop.compiled:
        model.compile_repeated_blocks()
    return model


def offload_weights(model: nn.Module, device: torch.device) -> None:
    """Stream the weights of linear layers by diffusers' group offloading, layer by layer.

    The adapter is added afterwards, so that its weights stay on the device: offloading would undo
    their updates. Offloading by blocks prefetches in the order of forward, so that in backward the
    weights of the whole model gather on the device; by layers, one layer of each block does. Other
    layers are small and stay on the device: torch's checkpointing fails if a norm's weight is in
    host memory when its block is recomputed.
    """
    is_cuda = device.type == "cuda"
    model.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=is_cuda,
        record_stream=is_cuda,
        non_blocking=is_cuda,
    )
    for module in model.modules():
        registry = module.__dict__.get("_diffusers_hook")
        if registry is None or module is model or isinstance(module, torch.nn.Linear):
            continue
        for name in ("layer_execution_tracker", "group_offloading"):
            if registry.get_hook(name) is not None:
                registry.remove_hook(name, recurse=False)
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for buffer in module.buffers(recurse=False):
            buffer.data = buffer.data.to(device)
    free_memory()


def time_loop(
    case: Case, transformer: nn.Module, batch: int, device: torch.device
) -> dict[str, Any]:
    """Return speed and memory of a batch size, or why it cannot run."""
    began = time.monotonic()
    weights_gib = torch.cuda.memory_allocated() / GIB
    try:
        step = make_training_step(
            transformer, *case.make_forward(transformer, batch, device), autocast=True
        )
        step()
        results.synchronize(device)
        first_s = time.monotonic() - began
        for _ in range(WARM_UP - 1):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, loss = time_each_step(step, TIMED, device)
    except torch.OutOfMemoryError as full:
        return {"failed": str(full).splitlines()[0]}
    finally:
        transformer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    middle = sorted(seconds)[len(seconds) // 2]
    return {
        "seconds": middle,
        "images_s": batch / middle,
        "first_step_s": first_s,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "weights_gib": weights_gib,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "loss_is_finite": bool(torch.isfinite(loss)),
    }


class limited_memory:  # noqa: N801  used like a function
    """Limit torch's device memory while the context is open."""

    def __init__(self, gigabytes: int, device: torch.device) -> None:
        self._share = 1.0
        if device.type == "cuda":
            self._share = gigabytes * 1e9 / torch.cuda.mem_get_info()[1]

    def __enter__(self) -> None:
        if self._share < 1:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(self._share)

    def __exit__(self, *_: object) -> None:
        if self._share < 1:
            torch.cuda.set_per_process_memory_fraction(1.0)


ATTENTION = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}
"""Functions that switch torch's fused attention backends on and off, by name."""


def choose_attention(
    model: Model, case: Case, transformer: Any, loop: Loop, device: torch.device
) -> str:
    """Time attention with each backend of SDPA, leave only the fastest on, and return its name."""
    if device.type != "cuda":
        return "cpu"
    allowed = [n for n in ATTENTION if n != "cudnn" or loop.compiled or model.eager_cudnn]
    config = transformer.config
    inputs = case.make_forward(transformer, 1, device)[1]
    tokens = num_tokens(inputs, transformer) + (512 if model.joint_attention else 0)
    shape = (1, config.num_attention_heads, tokens, config.attention_head_dim)
    seconds = {name: attention_seconds(name, shape, device) for name in allowed}
    best = min(seconds, key=lambda name: seconds[name])
    use_attention(best)
    return f"{best} ({', '.join(f'{n} {s * 1e3:.2f} ms' for n, s in seconds.items())})"


def num_tokens(latents: torch.Tensor, transformer: Any) -> int:
    """Return the number of image or video tokens of one sample."""
    if latents.dim() == 3:  # tokens already, as Flux and Qwen-Image take them
        return latents.shape[1]
    frames, rows, columns = latents.shape[2:]
    depth, height, width = transformer.config.patch_size
    return (frames // depth) * (rows // height) * (columns // width)


def use_attention(backend: str) -> None:
    """Switch all fused attention backends off except one; the plain one stays on."""
    for name, enable in ATTENTION.items():
        enable(name == backend)


def attention_seconds(backend: str, shape: tuple[int, ...], device: torch.device) -> float:
    """Return the seconds of attention, forward and backward; infinite if it cannot run."""
    use_attention(backend)
    torch.backends.cuda.enable_math_sdp(False)
    query, key, value, grad = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    )

    def work() -> torch.Tensor:
        scaled_dot_product_attention(query, key, value).backward(grad)
        return grad.detach()

    try:
        time_each_step(work, 2, device)
        seconds, _ = time_each_step(work, 5, device)
    except RuntimeError:
        return float("inf")
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    return sorted(seconds)[2]


def merge(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the figures of all batch sizes, and add those of the fastest."""
    found = {key: value for line in lines for key, value in line.items()}
    fastest = max(
        (one for one in found.values() if isinstance(one, dict) and "images_s" in one),
        key=lambda one: one["images_s"],
        default={},
    )
    return found | {k: fastest[k] for k in ("images_s", "peak_gib") if k in fastest}


# The product


def product_run_of(model: Model, memory_gb: int, steps: int) -> ProductRun:
    """Return the product's run: the same samples and captions as the loops, in six sizes."""
    run = ProductRun(
        model.family,
        memory_gb,
        model.product_batches[memory_gb],
        steps,
        steps // 2,
        caption_tokens=model.caption_tokens,
    )
    frames = model_cases.FULL[model.case].sample.frames
    if frames == 1:
        return run
    return replace(
        run,
        sizes=product_run.VIDEO_SIZES,
        resolution=product_run.VIDEO_RESOLUTION,
        frames=frames,
    )


def measure_product(
    arguments: argparse.Namespace,
    model: Model,
    limits: list[int],
    save: Callable[[int, str, dict[str, Any]], None],
) -> None:
    """Run `gracetune train` within each limit of device memory."""
    small = arguments.rehearse
    with product_run.model_folder(model.folder, int(model.nbytes), small=small) as folder:
        for memory_gb in limits[:1] if small else limits:
            steps = 8 if small else arguments.steps
            run = product_run_of(model, memory_gb, steps)
            print(f"{arguments.model}, {memory_gb} GB, product", flush=True)
            began = time.monotonic()
            found = product_run.train(run, folder, small=small)
            save(memory_gb, "product", found | {"took_s": time.monotonic() - began})


def show(figures: dict[str, Any], model: str, memory_gb: int) -> None:
    """Print the speed of every way, and of the product relative to each loop.

    The product's images are counted in units of its largest bucket, the size of all loops' images.
    """
    prefix = f"{model}.{memory_gb}."
    speeds = {
        key.removeprefix(prefix).partition(".")[0]: value
        for key, value in figures.items()
        if key.startswith(prefix) and key.count(".") == 3 and key.endswith(".images_s")
    }
    if "product" in speeds:
        speeds["product"] = figures.get(f"{prefix}product.largest_images_s", speeds["product"])
    print(f"\n{model} in {memory_gb} GB")
    for way, speed in speeds.items():
        peak = figures.get(f"{prefix}{way}.peak_gib", float("nan"))
        ratio = f"{speeds['product'] / speed:>8.2f}" if "product" in speeds else ""
        print(f"    {way:<34}{speed:>8.3f} images/s{peak:>8.1f} GiB{ratio}")
    failed = [
        f"{key}: {value}"
        for key, value in figures.items()
        if key.startswith(prefix) and key.endswith(".failed")
    ]
    for line in failed:
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
