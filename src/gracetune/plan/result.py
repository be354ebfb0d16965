"""The plan: where each block's weights and activations live, and the predicted memory and time.

Plain data: `search.find_best_plan` makes a plan, `apply.apply_plan` applies it. Field names are
part of the JSON that `gracetune plan --json` prints. Importing this module does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.memory.managed_roles import ManagedRole

WeightPlacement = Literal["resident", "streamed"]
"""Place of a block's frozen weights. `resident`: always on the device. `streamed`: in host memory,
fetched through the weight ring."""
ActivationMode = Literal["keep", "lean", "recompute", "offload"]
"""The tensors that a block keeps from forward to backward.

- `keep`: everything that autograd saves.
- `lean`: the outputs of matmuls and attention; the cheap work between them is recomputed.
- `recompute`: the block's input and attention's outputs; matmuls are recomputed too.
- `offload`: the tensors of `lean` (in an eager block: of `keep`), but in host memory.
"""
FrozenCompute = Literal["bf16", "fp8"]
"""Precision of matmuls with frozen weights."""
Role = Literal[
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "caches",
    "workspace",
]
ROLES: tuple[Role, ...] = get_args(Role)

MAX_BLOCKS_IN_FLIGHT = 2
"""Maximum number of blocks, including the running one, whose activations are being copied to the
host at the same time."""
ACTIVATION_PREFETCH = 1
"""Number of blocks whose offloaded activations are fetched before backward reaches them. A run
starts with this distance and may raise it."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The plan for one block: where its weights are, and what it keeps for backward."""

    weights: WeightPlacement
    activations: ActivationMode
    offload_input: bool = False
    """True: the input from which a `recompute` block is recomputed is kept in host memory."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of device or host memory by use (role), at the moment of the peak."""

    weights: int = 0
    """Frozen weights, in bytes. On the device: resident weights and the ring's slots. On the host:
    streamed weights."""
    adapters: int = 0
    """Bytes of trained weights (an adapter's, or in full training all), their copies and moving
    averages."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    caches: int = 0
    """Bytes of prefetched batches and cached samples."""
    workspace: int = 0
    """Bytes of temporary memory of the running block and of libraries."""
    gathered: int = 0
    """Bytes of the gathered weights of blocks, and of the buffers in which gradients are reduced,
    if ranks store shards of the model."""

    @property
    def total(self) -> int:
        """Bytes of all roles together: weights, adapters, gradients and so on."""
        return sum(self.by_role().values())

    def by_role(self) -> dict[Role, int]:
        """Return the bytes of each role (weights, adapters, ...), in the order of printing."""
        return {
            "weights": self.weights,
            "adapters": self.adapters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathered": self.gathered,
            "activations": self.activations,
            "caches": self.caches,
            "workspace": self.workspace,
        }


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time of one micro-batch and its parts, in seconds.

    Compute (gemm, attention, elementwise, recompute, overhead) and the waits add up to `step`.
    """

    step: float
    gemm: float
    attention: float
    elementwise: float
    recompute: float
    """Time of forward work that backward recomputes; `gemm`, `attention` and `elementwise` do not
    include it."""
    overhead: float
    """Time of gaps between kernels, of the optimizer, and of everything outside of blocks."""
    wait_weights: float
    """Time in which compute waits for streamed weights."""
    wait_activations: float
    """Time in which compute waits for offloaded activations."""
    link_in: float
    """Duration of all copies to the device; they overlap with compute."""
    link_out: float
    """Duration of all copies to the host; they overlap with compute."""
    wait_state: float = 0.0
    """Extra time of the optimizer step, because its state is copied from and to the host, or
    because the CPU runs it."""
    wait_managed: float = 0.0
    """Extra time of kernels that use managed memory over the link between host and device."""
    wait_host: float = 0.0
    """Time in which the device is idle because the CPU launches kernels too slowly."""
    wait_network: float = 0.0
    """Time in which compute waits for other ranks' weights, gradients or tokens."""
    network: float = 0.0
    """Duration of all exchanges with other ranks; most of them overlap with compute."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions on how to run a training step, with the predicted memory and time."""

    blocks: tuple[BlockPlan, ...]
    """The plan of each block, in forward order. If the model has two transformers (Wan 2.2), both
    get it."""
    batch: int
    """Samples per micro-batch."""
    accumulation: int
    """Micro-batches per optimizer step."""
    slots: int
    """Number of slots of the weight ring; 0 if nothing is streamed."""
    compiled: bool
    frozen_compute: FrozenCompute
    device: Bytes
    host: Bytes
    seconds: Seconds
    simulated: bool
    """True if time was predicted for another machine from its published figures, False if from
    rates measured on this machine."""
    host_state: float = 0.0
    """Share of the optimizer's state that is kept in host memory, 0 to 1."""
    managed: tuple[ManagedRole, ...] = ()
    """Roles that are kept in managed memory, at home in host memory."""
    managed_nbytes: Mapping[ManagedRole, int] = field(default_factory=dict)
    """Bytes that each role has or would have in managed memory."""
    managed_seconds: Mapping[ManagedRole, float] = field(default_factory=dict)
    """Seconds that each role adds or would add to a micro-batch in managed memory."""

    @property
    def managed_total(self) -> int:
        """Bytes of all roles that are kept in managed memory."""
        return sum(self.managed_nbytes.get(role, 0) for role in self.managed)

    @property
    def samples_per_second(self) -> float:
        """Predicted training speed, by which plans are compared."""
        return self.batch / self.seconds.step

    @property
    def streamed(self) -> tuple[int, ...]:
        """The indices of the blocks whose weights are streamed."""
        return tuple(i for i, block in enumerate(self.blocks) if block.weights == "streamed")
