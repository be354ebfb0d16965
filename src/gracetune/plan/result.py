"""The plan: where each block's weights and activations live, and the predicted memory and time.

Plain data: `search.find_best_plan` makes a plan, `apply.apply_plan` applies it. Field names are
part of the JSON that `gracetune plan --json` prints. Importing this module does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

WeightPlacement = Literal["resident", "streamed"]
"""`resident`: on the device throughout. `streamed`: fetched from host memory through the ring."""
ActivationMode = Literal["keep", "lean", "recompute", "offload"]
"""What is kept of a block's forward pass until backward.

- `keep`: everything that autograd saves.
- `lean`: the outputs of matmuls and attention; the cheap work between them is recomputed.
- `recompute`: the block's input and attention's outputs; matmuls are recomputed too.
- `offload`: the lean set in host memory; in an eager block, everything that autograd saves.
"""
FrozenCompute = Literal["bf16", "fp8"]
"""The precision of matmuls with frozen weights."""
Role = Literal[
    "weights", "adapters", "gradients", "optimizer", "activations", "caches", "workspace"
]
ROLES: tuple[Role, ...] = get_args(Role)

MAX_BLOCKS_IN_FLIGHT = 2
"""Blocks whose activations may be on their way to the host at once, including the running block."""
ACTIVATION_PREFETCH = 1
"""Blocks whose offloaded activations are fetched before backward reaches them. A run starts with
this distance and may raise it."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The treatment of one block."""

    weights: WeightPlacement
    activations: ActivationMode
    offload_input: bool = False
    """True: the input from which a `recompute` block is recomputed is kept in host memory."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of device or host memory by role, at the moment of the peak."""

    weights: int = 0
    """Frozen weights: resident ones and the ring's slots, or the ring's copy in host memory."""
    adapters: int = 0
    """Everything that is trained."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    caches: int = 0
    """Prefetched batches and cached samples."""
    workspace: int = 0
    """Temporary memory of the running block and of libraries."""

    @property
    def total(self) -> int:
        """The sum of all roles."""
        return sum(self.by_role().values())

    def by_role(self) -> dict[Role, int]:
        """Return the bytes of each role, in the order in which they are printed."""
        return {
            "weights": self.weights,
            "adapters": self.adapters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "caches": self.caches,
            "workspace": self.workspace,
        }


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time of one micro-batch and its parts.

    Compute (gemm, attention, elementwise, recompute, overhead) and the waits add up to `step`.
    """

    step: float
    gemm: float
    attention: float
    elementwise: float
    recompute: float
    """Forward work that backward repeats, of any kind; not included in the three above."""
    overhead: float
    """Gaps between kernels, the optimizer, and everything outside of blocks."""
    wait_weights: float
    """Compute waits for streamed weights."""
    wait_activations: float
    """Compute waits for offloaded activations."""
    link_in: float
    """How long copies to the device take; they overlap with compute."""
    link_out: float
    """How long copies to the host take; they overlap with compute."""
    wait_state: float = 0.0
    """How much longer an optimizer step takes because its state comes over the link."""
    wait_host: float = 0.0
    """How long the device is idle because the CPU launches kernels too slowly."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a step, with its predicted memory and time."""

    blocks: tuple[BlockPlan, ...]
    """The blocks of one transformer, in forward order; a second expert gets the same plan."""
    batch: int
    """Samples per micro-batch."""
    accumulation: int
    """Micro-batches per optimizer step."""
    slots: int
    """Slots of the weight ring; 0 if nothing is streamed."""
    compiled: bool
    frozen_compute: FrozenCompute
    device: Bytes
    host: Bytes
    seconds: Seconds
    simulated: bool
    """True if the time was predicted from a machine's published figures, not measured rates."""
    host_state: float = 0.0
    """Share of the optimizer's state that lives in host memory, 0 to 1."""

    @property
    def samples_per_second(self) -> float:
        """The speed by which plans are compared."""
        return self.batch / self.seconds.step

    @property
    def streamed(self) -> tuple[int, ...]:
        """The numbers of the streamed blocks."""
        return tuple(i for i, block in enumerate(self.blocks) if block.weights == "streamed")
