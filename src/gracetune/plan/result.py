"""What a plan says: where each block's weights and activations are, and what that costs.

Plain data, made by `choose` and applied by the trainer. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

WeightPlacement = Literal["resident", "streamed"]
ActivationMode = Literal["keep", "lean", "recompute", "offload"]
"""What backward finds of a block's forward pass.

`keep`: all that it saved. `lean`: outputs of matrix products and attention; cheap work between
them is done again. `recompute`: the block's input and attention's outputs; products are done again.
`offload`: the lean set in host memory; of a block that is not compiled, all that it saved.
"""
FrozenCompute = Literal["bf16", "fp8"]
Role = Literal[
    "weights", "adapters", "gradients", "optimizer", "activations", "caches", "workspace"
]
ROLES: tuple[Role, ...] = get_args(Role)

MAX_BLOCKS_IN_FLIGHT = 2
"""Blocks whose activations may be on their way out at once, the running one among them."""
ACTIVATION_PREFETCH = 1
"""Blocks whose activations are brought back before backward reaches them, as a run begins."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block of the model, in the order of forward."""

    weights: WeightPlacement
    activations: ActivationMode
    offload_input: bool = False
    """Whether what `recompute` starts from waits in host memory."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one tier by role, at the moment when it is highest."""

    weights: int = 0
    """Frozen ones: resident, outside of blocks, and the ring's slots or its host slab."""
    adapters: int = 0
    """Everything that is trained."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    caches: int = 0
    """Batches on their way, and encoded samples."""
    workspace: int = 0
    """What a block needs while it runs and nobody keeps."""

    @property
    def total(self) -> int:
        """All roles together."""
        return sum(self.by_role().values())

    def by_role(self) -> dict[Role, int]:
        """Bytes of each role, in the usual order."""
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
    """Where one micro-batch's time goes; the parts of computing add up to the step."""

    step: float
    gemm: float
    attention: float
    elementwise: float
    recompute: float
    """Forward work that is done again, of any kind; not in the three above."""
    overhead: float
    """Gaps between kernels, the optimizer, and the parts outside of blocks."""
    wait_weights: float
    wait_activations: float
    link_in: float
    """How long the link to the device is busy; beside computing, not on top of it."""
    link_out: float
    wait_state: float = 0.0
    """What an update takes longer because its state comes over the link."""
    wait_host: float = 0.0
    """How long the device has nothing to do because the host queues too slowly."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a step, and what it is predicted to take."""

    blocks: tuple[BlockPlan, ...]
    """Of one transformer, in the order of forward; a second expert is treated alike."""
    batch: int
    """Samples of a micro-batch."""
    accumulation: int
    """Micro-batches of an optimizer step; batch times this is what the run file asked for."""
    slots: int
    """Of the ring; 0 where nothing is streamed."""
    compiled: bool
    frozen_compute: FrozenCompute
    device: Bytes
    host: Bytes
    seconds: Seconds
    simulated: bool
    """Whether its seconds come from a machine's published figures."""
    host_state: float = 0.0
    """Share of the optimizer's state that lives in host memory."""

    @property
    def samples_per_second(self) -> float:
        """The speed that plans are compared by."""
        return self.batch / self.seconds.step

    @property
    def streamed(self) -> tuple[int, ...]:
        """The blocks whose weights pass through the ring."""
        return tuple(i for i, block in enumerate(self.blocks) if block.weights == "streamed")
