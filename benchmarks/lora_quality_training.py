"""Train a small Wan-shaped transformer, and LoRA adapters on top of it, for lora_quality.py.

Rounding errors cannot be judged with random weights, because trained weights and activations are
spread unevenly. So the model is first trained from scratch on drawn shapes (circles, squares and so
on), in fp32 under autocast; adapters are then trained on stars. Images and captions are encoded by
the demo's family (`tiny`).
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
from gracetune.data.demo_dataset import draw, training_combinations
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

Precision = Literal["bf16", "fp8", "plain", "fp32"]
"""bf16 and fp8: gracetune's frozen matmuls. plain: peft under bf16 autocast. fp32: peft in fp32."""
TRAIN = TrainSection()
"""Default settings; sigmas are sampled with them."""


@dataclass(frozen=True)
class Shape:
    """Size of a transformer, as arguments of WanTransformer3DModel."""

    layers: int
    heads: int
    ffn: int
    channels: int
    text: int


@dataclass(frozen=True)
class TrainSettings:
    """Number of steps, batch size and optimizer of one training run."""

    steps: int
    batch: int
    every: int
    """Steps between two evaluations of the held-out loss."""
    optimizer: OptimizerSection


@dataclass(frozen=True)
class Images:
    """Encoded images and captions, on the device."""

    latents: Tensor
    text: Tensor

    def at(self, chosen: Tensor | slice) -> Images:
        """Select some of the images."""
        return Images(self.latents[chosen], self.text[chosen])


@dataclass(frozen=True)
class ModelInputs:
    """Noisy latents with their sigmas and captions, and the target of the prediction."""

    noisy: Tensor
    sigmas: Tensor
    text: Tensor
    target: Tensor


def draw_images(concept: str | None, pixels: int, copies: range, device: torch.device) -> Images:
    """Draw copies of every combination of colour, shape and background.

    The number of a copy determines its position and size.
    """
    figures = [(figure, copy) for copy in copies for figure in training_combinations(concept)]
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda one: np.asarray(draw(one[0], pixels, one[1], 0)), figures)
        images = torch.from_numpy(np.stack(list(made))).permute(0, 3, 1, 2)
    family = tiny.load(ModelSection())
    latents = family.encode(images.float() / 127.5 - 1.0).unsqueeze(2)
    texts = family.encode_text([figure.caption for figure, _ in figures])
    return Images(latents.to(device), family.stack_text(texts)["tokens"].to(device))


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    """Build a model in fp32 with random weights from a fixed seed."""
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


def build_variant(
    shape: Shape,
    weights: Mapping[str, Tensor],
    precision: Precision,
    rank: int,
    calibration: ModelInputs,
) -> nn.Module:
    """Build the model with pretrained weights and a new adapter, in one of the precisions.

    `calibration` is the batch with which an fp8 model is calibrated (its outlier subspaces).
    """
    device = next(iter(weights.values())).device
    model = make_model(shape, device)
    model.load_state_dict(weights)
    if precision != "fp32":
        to_bf16(model)
    add_adapter({"": model}, AdapterSection(rank=rank), TARGETS, seed=0)
    if precision == "fp8":
        convert_to_fp8_calibrated(
            lambda: losses(model, calibration, autocast=False), list(model.blocks), device
        )
    if precision in ("bf16", "fp8"):
        fuse_operations(model)
        wrap_blocks(model.blocks, ["keep"] * shape.layers, compiler=None)
    return model.train()


def to_bf16(model: nn.Module) -> None:
    """Cast weights to bf16, except modules that diffusers keeps in fp32 when it loads a model."""
    kept = set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()


def reset_adapter(model: nn.Module, seed: int) -> None:
    """Reinitialise the adapter's weights from a seed."""
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            layer.reset_lora_parameters(ADAPTER_NAME, init_lora_weights=True)


def copy_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the adapter's weights."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_adapter(model: nn.Module, adapter: Mapping[str, Tensor]) -> None:
    """Copy an adapter's weights into the model."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapter.keys(), trained.keys() ^ adapter.keys()
    for name, parameter in trained.items():
        parameter.copy_(adapter[name])


def make_inputs(images: Images, sigmas: Tensor, noise: Tensor) -> ModelInputs:
    """Add noise and compute the flow-matching target."""
    return ModelInputs(
        objective.add_noise(images.latents, noise, sigmas),
        sigmas,
        images.text,
        objective.target(images.latents, noise, sigmas, "flow"),
    )


def losses(model: nn.Module, inputs: ModelInputs, autocast: bool) -> Tensor:
    """Return the loss of each sample. Inputs are cast to the dtype of the model's first layer."""
    dtype = model.patch_embedding.weight.dtype
    with torch.autocast(inputs.noisy.device.type, torch.bfloat16, enabled=autocast):
        (prediction,) = model(
            hidden_states=inputs.noisy.to(dtype),
            timestep=inputs.sigmas * 1000,
            encoder_hidden_states=inputs.text.to(dtype),
            return_dict=False,
        )
    return objective.sample_losses(prediction, inputs.target)


@dataclass(frozen=True)
class StepDraws:
    """The random draws of a training step: image indices, noise and sigmas."""

    chosen: Tensor
    noise: Tensor
    sigmas: Tensor


class GradientStep:
    """Runs forward and backward of a training step, on a GPU as a CUDA graph.

    Steps this small are limited by Python, so they are captured once and replayed.
    Gradients are overwritten in place and must not be set to None.
    """

    def __init__(self, model: nn.Module, images: Images, batch: int, autocast: bool) -> None:
        self.model, self.images, self.autocast, self.batch = model, images, autocast, batch
        self._draws = self.draw(torch.Generator(images.latents.device).manual_seed(0))
        self._graph: torch.cuda.CUDAGraph | None = None
        if images.latents.is_cuda:
            try:
                self._graph = self._record()
            except RuntimeError as error:  # without a graph it is slower, with the same results
                print(f"CUDA graph capture failed: {error}", flush=True)

    def draw(self, generator: torch.Generator) -> StepDraws:
        """Draw the image indices, noise and sigmas of a step."""
        latents, device = self.images.latents, generator.device
        chosen = torch.randint(len(latents), (self.batch,), generator=generator, device=device)
        shape = (self.batch, *latents.shape[1:])
        noise = torch.randn(shape, generator=generator, device=device)
        return StepDraws(chosen, noise, sample_timesteps(TRAIN, self.batch, generator))

    def __call__(self, drawn: StepDraws) -> None:
        """Compute the gradients of all trained parameters."""
        self._draws.chosen.copy_(drawn.chosen)
        self._draws.noise.copy_(drawn.noise)
        self._draws.sigmas.copy_(drawn.sigmas)
        if self._graph is None:
            self.model.zero_grad()
            self._run()
        else:
            self._graph.replay()

    def _run(self) -> None:
        draws = self._draws
        batch = Images(
            self.images.latents.index_select(0, draws.chosen),
            self.images.text.index_select(0, draws.chosen),
        )
        inputs = make_inputs(batch, draws.sigmas, draws.noise)
        losses(self.model, inputs, self.autocast).mean().backward()

    def _record(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # warm up: kernels are selected and workspaces allocated
                self.model.zero_grad()
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad()  # the graph allocates the gradients that stay
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph


def train(
    backward: GradientStep, held_out: Callable[[], float], settings: TrainSettings, seed: int
) -> dict[int, float]:
    """Train all parameters that require gradients; return the held-out loss by step.

    The seed determines batches, sigmas and noise, equally for every precision.
    """
    device = backward.images.latents.device
    generator = torch.Generator(device).manual_seed(seed)
    trained = {n: p for n, p in backward.model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(trained, settings.optimizer)
    scale = torch.ones((), device=device)
    curve = {0: held_out()}
    for step in range(settings.steps):
        backward(backward.draw(generator))
        scale_and_clip_gradients(list(trained.values()), scale, TRAIN.max_grad_norm)
        set_lr(optimizer, lr_scale(settings.optimizer, step, settings.steps))
        optimizer.step()
        if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
            curve[step + 1] = held_out()
    return curve


def held_out_inputs(images: Images, draws: int) -> ModelInputs:
    """Return every held-out image `draws` times, at evenly spread sigmas and with fixed noise."""
    count = draws * len(images.latents)
    every = images.at(torch.arange(count, device=images.latents.device) % (count // draws))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(every.latents.shape, generator=generator).to(every.latents)
    sigmas = (torch.randperm(count, generator=generator) + 0.5) / count
    return make_inputs(every, sigmas.to(noise), noise)


@torch.no_grad()
def held_out_loss(model: nn.Module, inputs: ModelInputs, autocast: bool) -> float:
    """Return the mean loss of the model on the held-out inputs."""
    return float(losses(model, inputs, autocast).mean())
