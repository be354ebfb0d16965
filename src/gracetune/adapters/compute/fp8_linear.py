"""Store and compute the frozen linear layers of a model in fp8.

`Fp8Linear` replaces a frozen `nn.Linear`; a LoRA around it computes through fused_lora.py.
`convert_to_fp8_calibrated` first runs the model on some samples, one block on the device at a time,
to find the outlier subspace of each layer's input (outlier_subspace.py). Without that, fp8 costs
noticeably more accuracy (docs/precision.md).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.adapters.compute.lora_matmul import FP8_OUTPUT_DTYPE, FrozenMatmulFp8, quantize_rows
from gracetune.adapters.compute.outlier_subspace import InputObserver
from gracetune.errors import GracetuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


MIN_FP8_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with fp8 tensor cores."""
FP8_ALIGNMENT = 16
"""Number that both dimensions of a weight must be multiples of, for fp8 matmul kernels."""
BASE_LAYER = "base_layer"
"""Attribute of an adapter module, peft's or gracetune's, that holds the layer that it wraps."""


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight is stored, streamed and multiplied in fp8."""

    def __init__(
        self,
        linear: nn.Linear,
        outlier_basis: nn.Parameter | None = None,
        outlier_weight: nn.Parameter | None = None,
    ) -> None:
        """Convert a layer. `outlier_weight` is computed from the basis if it is not given."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        """Data type of the original weight."""
        weight, scales = quantize_rows(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        self.outlier_basis = outlier_basis
        """Orthonormal basis V of the few directions in which the layer's input is largest (its
        outlier subspace); None if the layer was converted without calibration."""
        if outlier_basis is not None and outlier_weight is None:
            outlier_weight = _project_weight(linear.weight, outlier_basis)
        self.outlier_weight = outlier_weight
        """W V^T in bf16, for the weight W: it is multiplied with the input's coefficients in the
        basis V, which are not rounded to fp8."""

    @property
    def frozen_tensors(self) -> tuple[Tensor | None, ...]:
        """The weight, its scales, the bias, the outlier basis and the outlier weight.

        The fp8 matmul functions take them as arguments in this order. The last two are None for a
        layer without calibration.
        """
        return (
            self.weight,
            self.weight_scales,
            self.bias,
            self.outlier_basis,
            self.outlier_weight,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the original linear layer, up to rounding."""
        y: Tensor = FrozenMatmulFp8.apply(  # type: ignore[no-untyped-call]
            x.to(FP8_OUTPUT_DTYPE).flatten(0, -2), *self.frozen_tensors
        )
        return self.to_layer_dtype(y).view(*x.shape[:-1], -1)

    def to_layer_dtype(self, y: Tensor) -> Tensor:
        """Cast an output to the data type that the original layer would have returned."""
        if self.dtype == FP8_OUTPUT_DTYPE or torch.is_autocast_enabled(y.device.type):
            return y
        return y.to(self.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Conversion:
    """The result of converting frozen linear layers to fp8: counts of layers."""

    converted: int
    """Number of layers that now compute in fp8."""
    skipped: int
    """Number of layers that were not converted, because no fp8 kernel supports their dimensions."""
    uncalibrated: int = 0
    """Number of converted layers whose whole input is rounded to fp8, because calibration saw no
    finite input from which to find the directions with the largest values."""


def check_fp8_support(device: torch.device) -> None:
    """Raise an error if the device has no fp8 tensor cores."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        check_fp8_capability(torch.cuda.get_device_name(device), capability)
    else:
        check_fp8_capability(str(device), (0, 0))


def check_fp8_capability(name: str, capability: tuple[int, int]) -> None:
    """Raise an error if a device of this name and compute capability has no fp8 tensor cores."""
    if capability >= MIN_FP8_CAPABILITY:
        return
    raise GracetuneError(
        f"model.frozen_compute is fp8, but {name} has no fp8 tensor cores: that needs a GPU with "
        f"compute capability {'.'.join(map(str, MIN_FP8_CAPABILITY))} or higher. Set "
        "model.frozen_compute: bf16."
    )


def convert_to_fp8(blocks: Iterable[nn.Module]) -> Fp8Conversion:
    """Replace the frozen linear layers of the blocks by fp8 layers, without calibration.

    The whole input of each layer is then rounded to fp8, including its outliers.
    """
    return _add_up([_convert_block(block, None) for block in blocks])


def convert_to_fp8_calibrated(
    run: Callable[[], object], blocks: Sequence[nn.Module], device: torch.device
) -> Fp8Conversion:
    """Replace the frozen linear layers of the blocks by fp8 layers, calibrated on samples.

    `run` must run the model on some samples. Hooks move each block to the device for its own
    forward pass, find the few directions in which each layer's input is largest (its outlier
    subspace, which is not rounded to fp8), convert the layers, and move the block back to where its
    weights were. If `run` catches an out-of-memory error and tries again with fewer samples, blocks
    that are already converted stay as they are.
    """
    hooks = {block: _BlockHooks(block, device) for block in blocks}
    try:
        with torch.no_grad():
            run()
    finally:
        for block_hooks in hooks.values():
            block_hooks.close()
    return _add_up(
        [
            block_hooks.conversion or _convert_block(block, None)
            for block, block_hooks in hooks.items()
        ]
    )


@dataclass(frozen=True, slots=True)
class BlockCalibration:
    """The outlier subspaces of a block that is converted to fp8, as tensors on the CPU."""

    bases: tuple[Tensor, ...]
    """The different bases of the block's layers."""
    layers: dict[str, tuple[int, Tensor] | None]
    """Name of each converted layer -> the position of its basis in `bases` and its outlier weight;
    None if the layer is not calibrated."""


def calibration_of(block: nn.Module) -> BlockCalibration:
    """Return the outlier subspaces of a converted block, for `convert_to_fp8_like`."""
    positions: dict[nn.Parameter, int] = {}
    layers: dict[str, tuple[int, Tensor] | None] = {}
    for parent, module in block.named_modules():
        for name, child in module.named_children():
            if isinstance(child, Fp8Linear):
                basis, weight = child.outlier_basis, child.outlier_weight
                layers[f"{parent}.{name}"] = (
                    None
                    if basis is None or weight is None
                    else (positions.setdefault(basis, len(positions)), weight.detach().cpu())
                )
    return BlockCalibration(tuple(basis.detach().cpu() for basis in positions), layers)


def convert_to_fp8_like(
    calibrations: Iterable[BlockCalibration], blocks: Sequence[nn.Module], device: torch.device
) -> Fp8Conversion:
    """Replace the frozen linear layers of the blocks, with the calibration of equal blocks.

    Another rank has run `convert_to_fp8_calibrated` on these. The results have the same bits: what
    depends on the order of additions comes from there, and the rest is computed element by element.
    """
    return _add_up(
        [
            _convert_block_like(block, calibration, device)
            for block, calibration in zip(blocks, calibrations, strict=True)
        ]
    )


@torch.no_grad()
def _project_weight(weight: Tensor, outlier_basis: Tensor) -> nn.Parameter:
    projected = weight.float() @ outlier_basis.float().t()
    return nn.Parameter(projected.to(FP8_OUTPUT_DTYPE), requires_grad=False)


class _BlockHooks:
    """Hooks that move a block to the device for its forward pass and then convert it to fp8.

    For each frozen linear layer, they find the directions in which its input is largest.
    """

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.conversion: Fp8Conversion | None = None
        """Result of converting the block to fp8; None until the block has run."""
        self._block = block
        self._home = _home_of(block)
        self._device = device
        self._observer = InputObserver([])
        self._handles = [
            block.register_forward_pre_hook(self._before),
            block.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks and move the block back to the device where its weights were."""
        for handle in self._handles:
            handle.remove()
        self._finish()

    def _before(self, block: nn.Module, _: object) -> None:
        self._observer.close()  # left over if the previous pass failed inside this block
        block.to(self._device)
        if self.conversion is None:
            self._observer = InputObserver(
                (module if name == BASE_LAYER else child, child)
                for module, name, child in _frozen_linears(block)
            )

    def _after(self, block: nn.Module, _: object, __: object) -> None:
        if self.conversion is None:
            replaced = [child for *_, child in _frozen_linears(block)]
            self.conversion = _convert_block(block, self._observer)
            # Adapters may still refer to the original layers, which must not keep device memory.
            for layer in replaced:
                layer.to(self._home)
        self._finish()

    def _finish(self) -> None:
        self._observer.close()
        self._observer = InputObserver([])
        self._block.to(self._home)


def _convert_block(block: nn.Module, observer: InputObserver | None) -> Fp8Conversion:
    converted = skipped = uncalibrated = 0
    for module, name, child in _frozen_linears(block):
        if child.in_features % FP8_ALIGNMENT or child.out_features % FP8_ALIGNMENT:
            skipped += 1
            continue
        outlier_basis = None if observer is None else observer.basis(child)
        module._modules[name] = Fp8Linear(child, outlier_basis)
        converted += 1
        uncalibrated += outlier_basis is None
    return Fp8Conversion(converted, skipped, uncalibrated)


def _convert_block_like(
    block: nn.Module, calibration: BlockCalibration, device: torch.device
) -> Fp8Conversion:
    home = _home_of(block)
    block.to(device)
    names = {module: name for name, module in block.named_modules()}
    bases = [nn.Parameter(basis.to(device), requires_grad=False) for basis in calibration.bases]
    converted = skipped = uncalibrated = 0
    replaced = []
    for module, name, child in _frozen_linears(block):
        key = f"{names[module]}.{name}"
        if key not in calibration.layers:
            skipped += 1
            continue
        found = calibration.layers[key]
        basis = outlier_weight = None
        if found is not None:
            basis = bases[found[0]]
            outlier_weight = nn.Parameter(found[1].to(device), requires_grad=False)
        module._modules[name] = Fp8Linear(child, basis, outlier_weight)
        replaced.append(child)
        converted += 1
        uncalibrated += found is None
    for layer in (block, *replaced):
        layer.to(home)
    return Fp8Conversion(converted, skipped, uncalibrated)


def _home_of(block: nn.Module) -> torch.device:
    """Return the device where a block lives: that of its largest frozen weight.

    Small weights may be on the GPU already.
    """
    frozen = [p for p in block.parameters() if not p.requires_grad]
    return max(frozen, key=torch.numel, default=torch.empty(0)).device


def _frozen_linears(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent module, name in the parent, layer) for each frozen linear layer of a block."""
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                yield module, name, child


def _add_up(parts: Sequence[Fp8Conversion]) -> Fp8Conversion:
    """Add up the layer counts of several blocks; raise an error if no layer could be converted."""
    converted, skipped, uncalibrated = (
        sum(each) for each in zip(*map(astuple, parts), strict=True)
    )
    if not converted:
        raise GracetuneError(
            f"model.frozen_compute is fp8, but none of {skipped} frozen linear layers has "
            f"dimensions that are multiples of {FP8_ALIGNMENT}, which fp8 matmuls need. Set "
            "model.frozen_compute: bf16."
        )
    return Fp8Conversion(converted, skipped, uncalibrated)
