"""Measure how far the trained weights of each block have moved, their norms and gradient norms.

For a LoRA, the change of a weight is dW = scale * B A. Its norm follows from two small matrices:

    |B A|^2 = sum((B^T B) * (A A^T))        elementwise product of two rank x rank matrices

Other adapters have similar shortcuts. Full fine-tuning compares a sample of each weight with the
same elements before training, because a second copy of a model would not fit into memory. The norms
of frozen weights are estimated from such a sample too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Literal

    from torch import Tensor, nn

    from gracetune.train.export import AdaptedModules

SAMPLE_CHUNKS, CHUNK_ELEMENTS = 16, 256
"""Number and length of the pieces of a weight that its sample consists of. Pieces, not single
elements: a weight that is mapped from a file is read page by page."""
PEFT_PARTS = {"lora_A": "down", "lora_B": "up"}
"""Part of a peft parameter's name -> its role in the product B A."""


def block_name(parameter: str) -> str:
    """Return the block that a parameter belongs to, such as `transformer_blocks.3`.

    A parameter outside of all blocks belongs to the module at the top that contains it.
    """
    parts = parameter.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:2]) if parts[0] in ("high", "low") and len(parts) > 2 else parts[0]


def sampled_norms(model: nn.Module) -> dict[str, float]:
    """Estimate the norm of every matrix of a model; call this before weights are quantized."""
    samples = {
        name: (weight.numel(), _sample(weight.detach(), _sample_index(weight)).float())
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and weight.is_floating_point() and not weight.is_meta
    }
    if not samples:
        return {}
    squares = torch.stack([sample.square().mean() for _, sample in samples.values()]).tolist()
    return {
        name: math.sqrt(mean * numel)
        for (name, (numel, _)), mean in zip(samples.items(), squares, strict=True)
    }


class WeightMovement:
    """Measures the distance of trained weights from the start of a run, by block."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        adapted: AdaptedModules,
        frozen_norms: Mapping[str, float],
    ) -> None:
        """Remember the start. Call this before a checkpoint is loaded into the parameters.

        `adapted` is empty in full fine-tuning. `frozen_norms` is the result of `sampled_norms`.
        """
        self.measure: Literal["adapter", "full"] = "adapter" if adapted else "full"
        self._parameters = dict(parameters)
        self._blocks = {name: block_name(name) for name in parameters}
        self._order = list(dict.fromkeys(self._blocks.values()))
        self._modules: dict[str, AdapterParts] = {}
        self._starts: dict[str, tuple[Tensor, Tensor]] = {}
        self._norms: dict[str, float] = {}
        if adapted:
            self._find_modules(adapted, frozen_norms)
        else:
            for name, parameter in parameters.items():
                index = _sample_index(parameter)
                self._starts[name] = index, _sample(parameter.detach(), index).clone()

    def _find_modules(self, adapted: AdaptedModules, norms: Mapping[str, float]) -> None:
        by_module: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        modules = [
            (f"{expert}.{name}" if expert else name, settings)
            for expert, found in adapted.items()
            for name, settings in found.items()
        ]
        names = {name for name, _ in modules}
        for name, parameter in self._parameters.items():
            module, role = _split_adapter_name(name, names)
            if module:
                by_module[module][role] = parameter
        for name, settings in modules:
            self._modules[name] = AdapterParts(by_module[name], settings.alpha)
            self._norms[name] = norms.get(f"{name}.weight", 0.0)

    @torch.no_grad()
    def distances(self) -> dict[str, float]:
        """Return the relative distance of each block from its start. Waits for the device."""
        if self.measure == "full":
            return self._full_distances()
        names = list(self._modules)
        squares = squared_norms([self._modules[name] for name in names])
        moved: defaultdict[str, float] = defaultdict(float)
        frozen: defaultdict[str, float] = defaultdict(float)
        for name, square in zip(names, squares, strict=True):
            moved[block_name(name)] += square
            frozen[block_name(name)] += self._norms[name] ** 2
        return {
            block: math.sqrt(moved[block] / frozen[block]) if frozen[block] else 0.0
            for block in self._order
            if block in moved
        }

    def _full_distances(self) -> dict[str, float]:
        changes, sizes = [], []
        for name, (index, start) in self._starts.items():
            now = _sample(self._parameters[name].detach(), index)
            weight = self._parameters[name].numel() / max(1, len(index))
            changes.append((now.float() - start.float()).square().sum() * weight)
            sizes.append(start.float().square().sum() * weight)
        sums = torch.stack([torch.stack(changes), torch.stack(sizes)]).tolist()
        moved: defaultdict[str, float] = defaultdict(float)
        total: defaultdict[str, float] = defaultdict(float)
        for name, change, size in zip(self._starts, *sums, strict=True):
            moved[self._blocks[name]] += change
            total[self._blocks[name]] += size
        return {
            block: math.sqrt(moved[block] / total[block]) if total[block] else 0.0
            for block in self._order
        }

    @torch.no_grad()
    def weight_norms(self) -> dict[str, float]:
        """Return the norm of each block's trained weights. Waits for the device.

        In full fine-tuning it is estimated from a sample, as the distance is.
        """
        weights = [_full(p) for p in self._parameters.values()] if not self._starts else []
        for name, (index, _) in self._starts.items():
            weight = self._parameters[name].detach()
            weights.append(_sample(weight, index) * math.sqrt(weight.numel() / max(1, len(index))))
        dtype = reduce(torch.promote_types, (w.dtype for w in weights), torch.float32)
        norms = torch._foreach_norm(weights, 2, dtype=dtype)
        by_name = zip(self._parameters, torch.stack(list(norms)).tolist(), strict=True)
        return self.by_block(dict(by_name))

    @torch.no_grad()
    def gradient_norms(self, scale: Tensor) -> tuple[list[str], Tensor] | None:
        """Return the names of parameters with a gradient and its norm, times `scale`.

        The norms stay on the device; `by_block` adds them up once they are read.
        """
        names = [name for name, p in self._parameters.items() if p.grad is not None]
        if not names:
            return None
        gradients = [_local(self._parameters[name].grad) for name in names]
        norms = torch._foreach_norm(gradients)
        return names, torch.stack([norm.float() for norm in norms]) * scale

    def by_block(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Return the norm of each block, from those of its parameters."""
        squares: defaultdict[str, float] = defaultdict(float)
        for name, norm in norms.items():
            squares[self._blocks[name]] += norm**2
        return {block: math.sqrt(squares[block]) for block in self._order if block in squares}


class AdapterParts:
    """The trained tensors of one adapted module, by role, and its alpha."""

    def __init__(self, tensors: Mapping[str, Tensor], alpha: float) -> None:
        self.tensors = tensors
        self.alpha = alpha

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the change of the module's weight, as a tensor."""
        t = {role: _full(tensor).float() for role, tensor in self.tensors.items()}
        if "down" in t and "up" in t:
            down, up = t["down"].flatten(1), t["up"].flatten(1)
            return _low_rank_square(down, up) * (self.alpha / down.shape[0]) ** 2
        if "hada_w1_a" in t and "hada_t1" not in t:
            change = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
            return change.square().sum() * (self.alpha / t["hada_w1_b"].shape[0]) ** 2
        if any(role.startswith("lokr_w") for role in t):
            return self._lokr_square(t)
        # A full matrix is its own change. Of other adapters, all that is known is that the product
        # of their tensors is zero at the start.
        return torch.stack([one.square().sum() for one in t.values()]).sum()

    def _lokr_square(self, t: Mapping[str, Tensor]) -> Tensor:
        """Return |kron(w1, w2)|^2 = |w1|^2 |w2|^2, each of which may be a product of two."""
        result, ranks = None, []
        for factor in ("lokr_w1", "lokr_w2"):
            if factor in t:
                square = t[factor].square().sum()
            else:
                down, up = t[f"{factor}_b"].flatten(1), t[f"{factor}_a"].flatten(1)
                square = _low_rank_square(down, up)
                ranks.append(down.shape[0])
            result = square if result is None else result * square
        assert result is not None
        return result * (self.alpha / ranks[-1]) ** 2 if ranks else result


def squared_norms(modules: Sequence[AdapterParts]) -> list[float]:
    """Return the squared norm of the change of each module's weight. Waits for the device.

    Modules of a LoRA that have the same shape are computed together.
    """
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    results: dict[int, Tensor] = {}
    for number, module in enumerate(modules):
        t = module.tensors
        if t.keys() >= {"down", "up"} and t["down"].ndim == 2:
            groups[t["down"].shape, t["up"].shape, module.alpha].append(number)
        else:
            results[number] = module.squared_norm()
    for numbers in groups.values():
        down = torch.stack([_full(modules[n].tensors["down"]) for n in numbers]).float()
        up = torch.stack([_full(modules[n].tensors["up"]) for n in numbers]).float()
        squares = _low_rank_square(down, up) * (modules[numbers[0]].alpha / down.shape[1]) ** 2
        results.update(zip(numbers, squares, strict=True))
    if not results:
        return []
    ordered = torch.stack([results[number].reshape(()) for number in range(len(modules))])
    return ordered.clamp(min=0).tolist()


def _low_rank_square(down: Tensor, up: Tensor) -> Tensor:
    """Return |up down|^2 of matrices, or of each pair in two stacks of matrices."""
    return ((up.mT @ up) * (down @ down.mT)).sum((-2, -1))


def _split_adapter_name(name: str, modules: Iterable[str]) -> tuple[str, str]:
    """Return the adapted module that a trained parameter belongs to, and its role there."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if module in modules:
            rest = [part for part in parts[length:] if part not in ("adapter", "weight", "default")]
            role = rest[0] if rest else ""
            if role.startswith("lora_"):
                role = PEFT_PARTS.get(role, role.removeprefix("lora_"))
            return module, role
    return "", ""


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _sample_index(weight: Tensor) -> Tensor:
    """Return the positions of evenly spaced pieces of a tensor; all of a small tensor."""
    numel = _local(weight).numel()
    if numel <= SAMPLE_CHUNKS * CHUNK_ELEMENTS:
        return torch.arange(numel, device=_local(weight).device)
    starts = torch.linspace(0, numel - CHUNK_ELEMENTS, SAMPLE_CHUNKS).long()
    return (starts[:, None] + torch.arange(CHUNK_ELEMENTS)).flatten().to(_local(weight).device)


def _sample(weight: Tensor, index: Tensor) -> Tensor:
    flat = _local(weight).reshape(-1)
    return flat[index.to(flat.device)]
