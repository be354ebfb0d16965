"""A Wan-shaped transformer that learns the demo's shapes from nothing, and adapters on top of it.

Random weights tell little of rounding: what a model has learned is anything but evenly spread. So
this one is trained first, in fp32 under autocast, on drawn shapes; adapters are then taught stars.
Pictures are folded into channels and captions made into vectors as the demo's family does it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from peft.tuners.lora import Linear as LoraLinear

from gracetune.adapters.compute.fp8_linear import convert_to_fp8_calibrated
from gracetune.adapters.inject import ADAPTER_NAME, add_adapter
from gracetune.config.schema import AdapterSection, ModelSection, OptimizerSection, TrainSection
from gracetune.data.shapes import draw, drawn
from gracetune.models import tiny
from gracetune.models.wan22 import TARGETS
from gracetune.offload.checkpointing import wrap_blocks
from gracetune.optim.build import build_optimizer
from gracetune.optim.schedule import lr_scale, set_lr
from gracetune.plan.apply import fuse_operations
from gracetune.train import objective
from gracetune.train.step import scale_and_clip_gradients
from gracetune.train.timesteps import sample_timesteps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

Way = Literal["bf16", "fp8", "plain", "fp32"]
"""Ours with products in bf16 or fp8; peft's own under autocast; peft's own in fp32 throughout."""
TRAIN = TrainSection()
"""Levels are drawn as a run file without a word on it draws them."""


@dataclass(frozen=True)
class Shape:
    """How wide and deep a transformer is."""

    layers: int
    heads: int
    ffn: int
    channels: int
    text: int


@dataclass(frozen=True)
class Course:
    """One training: how long, in what batches, at which rate."""

    steps: int
    batch: int
    every: int
    """Steps between two looks at the held-out samples."""
    optimizer: OptimizerSection


@dataclass(frozen=True)
class Pictures:
    """Encoded pictures with the vectors of their captions, all on the device."""

    latents: Tensor
    words: Tensor

    def at(self, chosen: Tensor | slice) -> Pictures:
        """Some of them."""
        return Pictures(self.latents[chosen], self.words[chosen])


@dataclass(frozen=True)
class Asked:
    """Noisy pictures at given levels: what a model is asked, and what it should say."""

    noisy: Tensor
    levels: Tensor
    words: Tensor
    target: Tensor


def draw_pictures(
    concept: str | None, pixels: int, copies: range, device: torch.device
) -> Pictures:
    """These copies of every combination; other numbers are other places and sizes."""
    figures = [(figure, copy) for copy in copies for figure in drawn(concept)]
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda one: np.asarray(draw(one[0], pixels, one[1], 0)), figures)
        images = torch.from_numpy(np.stack(list(made))).permute(0, 3, 1, 2)
    family = tiny.load(ModelSection())
    latents = family.encode(images.float() / 127.5 - 1.0).unsqueeze(2)
    texts = family.encode_text([figure.caption for figure, _ in figures])
    return Pictures(latents.to(device), family.stack_text(texts)["tokens"].to(device))


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    """Random weights in fp32, always the same."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = WanTransformer3DModel(
            num_layers=shape.layers,
            num_attention_heads=shape.heads,
            ffn_dim=shape.ffn,
            in_channels=shape.channels,
            out_channels=shape.channels,
            text_dim=shape.text,
        )
    return model


def make_arm(
    shape: Shape,
    weights: Mapping[str, Tensor],
    way: Way,
    rank: int,
    shown: Asked,
) -> nn.Module:
    """The model with these weights and a new adapter, computing in one of the ways.

    `shown`: what a model in fp8 finds the main directions of its inputs by.
    """
    device = next(iter(weights.values())).device
    model = make_model(shape, device)
    model.load_state_dict(weights)
    if way != "fp32":
        to_bf16(model)
    add_adapter({"": model}, AdapterSection(rank=rank), TARGETS, seed=0)
    if way == "fp8":
        convert_to_fp8_calibrated(
            lambda: losses(model, shown, autocast=False), list(model.blocks), device
        )
    if way in ("bf16", "fp8"):
        fuse_operations(model)
        wrap_blocks(model.blocks, ["keep"] * shape.layers, compiler=None)
    return model.train()


def to_bf16(model: nn.Module) -> None:
    """As the model's files are loaded: some of its parts stay in fp32."""
    kept = set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()


def restart(model: nn.Module, seed: int) -> None:
    """A new adapter: one half random, the other zero."""
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            layer.reset_lora_parameters(ADAPTER_NAME, init_lora_weights=True)


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what is trained."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def give_adapter(model: nn.Module, adapter: Mapping[str, Tensor]) -> None:
    """Another model's adapter, in place."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapter.keys(), trained.keys() ^ adapter.keys()
    for name, parameter in trained.items():
        parameter.copy_(adapter[name])


def ask(pictures: Pictures, levels: Tensor, noise: Tensor) -> Asked:
    """Along the path of flow matching."""
    return Asked(
        objective.add_noise(pictures.latents, noise, levels),
        levels,
        pictures.words,
        objective.target(pictures.latents, noise, levels, "flow"),
    )


def losses(model: nn.Module, asked: Asked, autocast: bool) -> Tensor:
    """Of each sample. Inputs come in the type of the model's first layer."""
    dtype = model.patch_embedding.weight.dtype
    with torch.autocast(asked.noisy.device.type, torch.bfloat16, enabled=autocast):
        (said,) = model(
            hidden_states=asked.noisy.to(dtype),
            timestep=asked.levels * 1000,
            encoder_hidden_states=asked.words.to(dtype),
            return_dict=False,
        )
    return objective.sample_losses(said, asked.target)


@dataclass(frozen=True)
class Drawn:
    """What chance brings to a step."""

    chosen: Tensor
    noise: Tensor
    levels: Tensor


class Backward:
    """Forward and backward of one step, always the same kernels on the same memory.

    A GPU waits for Python in steps as small as these, so there they are recorded once and
    replayed. Gradients are overwritten, never added to; nobody may set them to none.
    """

    def __init__(self, model: nn.Module, pictures: Pictures, batch: int, autocast: bool) -> None:
        self.model, self.pictures, self.autocast, self.batch = model, pictures, autocast, batch
        self._given = self.draw(torch.Generator(pictures.latents.device).manual_seed(0))
        self._graph: torch.cuda.CUDAGraph | None = None
        if pictures.latents.is_cuda:
            try:
                self._graph = self._recorded()
            except RuntimeError as error:  # slower, and the same numbers
                print(f"steps are not recorded: {error}", flush=True)

    def draw(self, generator: torch.Generator) -> Drawn:
        """Pictures, noise and levels of a step."""
        latents, device = self.pictures.latents, generator.device
        chosen = torch.randint(len(latents), (self.batch,), generator=generator, device=device)
        shape = (self.batch, *latents.shape[1:])
        noise = torch.randn(shape, generator=generator, device=device)
        return Drawn(chosen, noise, sample_timesteps(TRAIN, self.batch, generator))

    def __call__(self, drawn: Drawn) -> None:
        """Leave gradients with the parameters."""
        self._given.chosen.copy_(drawn.chosen)
        self._given.noise.copy_(drawn.noise)
        self._given.levels.copy_(drawn.levels)
        if self._graph is None:
            self.model.zero_grad()
            self._run()
        else:
            self._graph.replay()

    def _run(self) -> None:
        given = self._given
        batch = Pictures(
            self.pictures.latents.index_select(0, given.chosen),
            self.pictures.words.index_select(0, given.chosen),
        )
        asked = ask(batch, given.levels, given.noise)
        losses(self.model, asked, self.autocast).mean().backward()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # kernels are chosen and workspaces made
                self.model.zero_grad()
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad()  # gradients are the recording's own from here on
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph


def train(
    backward: Backward, held_out: Callable[[], float], course: Course, seed: int
) -> dict[int, float]:
    """Everything that may be trained; gives the held-out loss by step. The seed sets batches,
    levels and noise, alike for every way to compute.
    """
    device = backward.pictures.latents.device
    generator = torch.Generator(device).manual_seed(seed)
    trained = {n: p for n, p in backward.model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(trained, course.optimizer)
    whole = torch.ones((), device=device)
    curve = {0: held_out()}
    for step in range(course.steps):
        backward(backward.draw(generator))
        scale_and_clip_gradients(list(trained.values()), whole, TRAIN.max_grad_norm)
        set_lr(optimizer, lr_scale(course.optimizer, step, course.steps))
        optimizer.step()
        if (step + 1) % course.every == 0 or step + 1 == course.steps:
            curve[step + 1] = held_out()
    return curve


def held_out_question(pictures: Pictures, draws: int) -> Asked:
    """Every picture so many times, at evenly spread levels, with noise that never changes."""
    count = draws * len(pictures.latents)
    every = pictures.at(torch.arange(count, device=pictures.latents.device) % (count // draws))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(every.latents.shape, generator=generator).to(every.latents)
    levels = (torch.randperm(count, generator=generator) + 0.5) / count
    return ask(every, levels.to(noise), noise)


@torch.no_grad()
def held_out_loss(model: nn.Module, asked: Asked, autocast: bool) -> float:
    """The mean over all that is asked."""
    return float(losses(model, asked, autocast).mean())
