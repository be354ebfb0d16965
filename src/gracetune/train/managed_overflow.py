"""Move roles of a run (EMA, optimizer state, ...) to managed memory: planned, or when memory ends.

A run with `use_uvm` has a `ManagedRun`. The plan, or `gh200_optimizations.managed` in the run file,
names roles that start in managed memory. If a step runs out of device memory and no smaller plan is
left, the training loop calls `overflow`, which moves the next role, and repeats the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import torch

from gracetune.config.schema import ManagedRoleName
from gracetune.errors import RunFailedError
from gracetune.events.types import ManagedOverflow, Notice
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.managed_roles import MANAGED_ROLES
from gracetune.memory.session import OVERFLOW_OFF
from gracetune.offload.managed_tensors import (
    ManagedGradients,
    ManagedHostEngine,
    ManagedWeights,
)
from gracetune.optim.offloaded_state import ManagedState
from gracetune.plan.managed import OVERFLOW_ORDER
from gracetune.train.step import Ema
from gracetune.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from torch.nn import Parameter

    from gracetune.cache.batch_transfer import DeviceTextCache
    from gracetune.config.schema import RunFile
    from gracetune.distributed.layout import Layout
    from gracetune.events.dispatcher import Emit
    from gracetune.memory.managed_roles import ManagedMemory, ManagedPlacement, ManagedRole
    from gracetune.memory.session import MemorySession
    from gracetune.models.family import Family
    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.optim.offloaded_state import OptimizerStepper
    from gracetune.plan.controller import PlanController

ROLE_NAMES: dict[ManagedRole, str] = {
    "weights": "the frozen weights",
    "trained": "the trained weights",
    "gradients": "the gradients",
    "optimizer": "the optimizer state",
    "ema": "the moving average of the weights",
    "caches": "the cached text embeddings",
    "activations": "the offloaded activations",
}
assert set(ROLE_NAMES) == set(MANAGED_ROLES) == set(get_args(ManagedRoleName))


class DeviceFullError(RunFailedError, torch.OutOfMemoryError):
    """Raised if a step has too little device memory, and nothing can be done about it."""


def managed_cap(run: RunFile) -> int | None:
    """Return the run file's limit of managed memory in bytes; None: the default."""
    limit = run.gh200_optimizations.managed_memory
    return None if limit is None else parse_bytes(limit)


def forced_roles(run: RunFile) -> tuple[ManagedRoleName, ...]:
    """Return the roles that the run file keeps in managed memory."""
    managed = run.gh200_optimizations.managed
    return managed if isinstance(managed, tuple) else ()


def build_managed_run(
    run: RunFile,
    session: MemorySession,
    layout: Layout,
    family: Family,
    parameters: Mapping[str, Parameter],
    stepper: OptimizerStepper,
    emit: Emit,
    texts: DeviceTextCache,
) -> ManagedRun | NoManagedRun:
    """Return the object that moves roles to managed memory, and move those that the run file names.

    If ranks divide the weights, nothing can move, which is emitted as a warning if the run file or
    the environment asks for managed memory. That there is none is said with the other settings of
    managed memory (`managed_memory_notice`).
    """
    settings = run.gh200_optimizations
    roles = forced_roles(run)
    memory = session.managed
    if isinstance(memory, PoolUnavailable):
        return NoManagedRun(memory.reason)
    if layout.is_sharded:
        reason = "the ranks divide the weights (distributed.strategy), so none overflows"
    elif settings.managed == "off":
        return NoManagedRun(
            "gh200_optimizations.managed is off; auto lets a run continue in managed memory"
        )
    else:
        placements: dict[ManagedRole, ManagedPlacement] = {}
        if settings.managed_access != "auto":
            placements = dict.fromkeys(MANAGED_ROLES, settings.managed_access)
        found = ManagedRun(
            memory=memory,
            emit=emit,
            parameters=parameters,
            model=family.transformer,
            blocks=family.blocks(),
            stepper=stepper,
            texts=texts,
            placements=placements,
            planned=set(roles),
        )
        found.place(roles, "gh200_optimizations.managed")
        return found
    if roles or session.use_uvm:
        what = f"gh200_optimizations.managed ({', '.join(roles)})" if roles else "managed overflow"
        text = f"{what} is not in use, and nothing is moved to managed memory: {reason}"
        emit(Notice(text, level="warning", fallback=True))
    return NoManagedRun(reason)


def device_full(reason: str, managed: ManagedRun | NoManagedRun) -> DeviceFullError:
    """Return the error for a step that has too little memory; it says what would help."""
    if isinstance(managed, NoManagedRun):
        advice = managed.reason
    else:
        moved = ", ".join(managed.roles) or "nothing"
        cap = format_bytes(managed.memory.cap_bytes)
        advice = (
            f"managed memory has {moved}, and gh200_optimizations.managed_memory limits it to {cap}"
        )
    return DeviceFullError(
        f"{reason.rstrip('.')}. No plan that needs less memory is left, and {advice}. Or lower "
        "train.batch_size or the resolution, or train fewer weights."
    )


@dataclass(frozen=True, slots=True)
class NoManagedRun:
    """A run without managed memory for what it keeps."""

    reason: str = OVERFLOW_OFF
    """Why there is none."""
    roles: Mapping[ManagedRole, int] = field(default_factory=dict)
    """Roles in managed memory: none."""
    free_bytes: int = 0
    """Bytes of managed memory that may still be used: none."""

    def place(self, roles: Iterable[ManagedRole], reason: str) -> None:
        """Move nothing."""

    def build_ema(self, parameters: Mapping[str, Parameter], decay: float) -> Ema | None:
        """Build the moving average of the weights; None if `decay` is 0."""
        return Ema(parameters, decay) if decay else None

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return the same engine."""
        return engine

    def follow(self, controller: PlanController | None) -> None:
        """Do nothing."""

    def overflow(self, reason: str, step: int) -> bool:  # noqa: ARG002
        """Return False: nothing can move."""
        return False

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class ManagedRun:
    """Moves what a run keeps to managed memory, role by role."""

    memory: ManagedMemory
    emit: Emit
    parameters: Mapping[str, Parameter]
    """The trained parameters."""
    model: nn.Module
    blocks: Sequence[nn.Module]
    """The blocks of the model, in forward order."""
    stepper: OptimizerStepper
    texts: DeviceTextCache
    """Text embeddings that stay on the device."""
    ema: Ema | None = None
    placements: Mapping[ManagedRole, ManagedPlacement] = field(default_factory=dict)
    """Placement of each role; `in_place` for roles that are not in it."""
    planned: set[ManagedRole] = field(default_factory=set)
    """Roles that the plan or the run file has placed in managed memory."""
    controller: PlanController | None = None
    """Has the plan that is applied to the model; None: there is no plan."""
    hooked: list[ManagedGradients | ManagedWeights] = field(default_factory=list)
    """Objects with hooks on parameters or blocks."""
    roles: dict[ManagedRole, int] = field(default_factory=dict)
    """Roles that are in managed memory, with the bytes that were moved."""

    @property
    def free_bytes(self) -> int:
        """Bytes of managed memory that may be used, with those of roles that are in it."""
        return self.memory.free_bytes + sum(self.memory.by_role().values())

    def move(self, role: ManagedRole, reason: str, step: int = 0) -> int:
        """Move a role to managed memory; return the bytes that were moved.

        Raises:
            torch.OutOfMemoryError: The cap does not allow it.
        """
        placement = self.placements.get(role, "in_place")
        before = self.memory.by_role().get(role, 0)
        if role == "ema" and self.ema is not None:
            self.ema.move_to_managed(self.state_of(role))
        elif role == "optimizer":
            self.stepper.keep_managed(self.state_of(role))
        elif role == "caches":
            self.texts.move_to_managed(self.memory, placement)
        elif role == "gradients":
            self.hooked.append(ManagedGradients(self.parameters.values(), self.memory, placement))
        elif role in ("weights", "trained"):
            trained = list(self.parameters.values())
            parameters = trained if role == "trained" else self._frozen()
            self.hooked.append(
                ManagedWeights(role, parameters, self.blocks, self.memory, placement)
            )
        nbytes = self.memory.by_role().get(role, 0) - before
        self._record(role, nbytes, reason, step)
        return nbytes

    def state_of(self, role: ManagedRole) -> ManagedState:
        """Return the managed memory and the placement for a role."""
        return ManagedState(self.memory, self.placements.get(role, "in_place"))

    def place(self, roles: Iterable[ManagedRole], reason: str) -> None:
        """Move roles that are not in managed memory yet, before the first step.

        `ema` is left to `build_ema` until it exists; memory for `activations` is allocated when a
        step offloads them.
        """
        for role in roles:
            self.planned.add(role)
            is_movable = role != "ema" or self.ema is not None
            if role not in self.roles and is_movable:
                self.move(role, reason)

    def build_ema(self, parameters: Mapping[str, Parameter], decay: float) -> Ema | None:
        """Build the moving average of the weights, in managed memory if that is planned."""
        if not decay:
            return None
        self.ema = Ema(parameters, decay, self.state_of("ema") if "ema" in self.planned else None)
        if self.ema.managed_nbytes:
            self._record("ema", self.ema.managed_nbytes, "planned", 0)
        return self.ema

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return a copy engine that offloads activations to managed memory, if that is planned."""
        if "activations" not in self.planned:
            return engine
        return ManagedHostEngine(engine, self.memory, "activations")

    def follow(self, controller: PlanController | None) -> None:
        """Leave the weights alone that the controller's plan streams."""
        self.controller = controller

    def close(self) -> None:
        """Remove hooks and stop prefetching; what is in managed memory can still be read."""
        for one in self.hooked:
            one.close()
        self.hooked.clear()
        self.memory.close()

    def _record(self, role: ManagedRole, nbytes: int, reason: str, step: int) -> None:
        placement = self.placements.get(role, "in_place")
        self.roles[role] = nbytes
        used = self.memory.cap_bytes - self.memory.free_bytes
        self.emit(
            ManagedOverflow(step, role, nbytes, placement, reason, used, self.memory.cap_bytes)
        )

    def overflow(self, reason: str, step: int) -> bool:
        """Move the next role that is on the device, after an out-of-memory error.

        `reason` is the error's text. Returns False if no role is left, or the cap allows none.
        """
        for role in OVERFLOW_ORDER:
            if role in self.roles or not self._is_on_device(role):
                continue
            try:
                nbytes = self.move(role, reason, step)
            except torch.OutOfMemoryError as error:
                text = f"{ROLE_NAMES[role]} cannot move to managed memory: {error}"
                self.emit(Notice(text, level="warning", fallback=True))
                continue
            later = "" if nbytes else ", as soon as it exists"
            text = (
                f"{reason} Continuing, but slower, with {ROLE_NAMES[role]} in managed memory"
                f"{f' ({format_bytes(nbytes)})' if nbytes else later}."
            )
            self.emit(Notice(text, level="warning", fallback=True))
            return True
        return False

    def _is_on_device(self, role: ManagedRole) -> bool:
        if role == "ema":
            return self.ema is not None
        if role == "weights":
            return bool(self._frozen())
        return True

    def _frozen(self) -> list[Parameter]:
        """Return the frozen weights that are not streamed."""
        numbers = () if self.controller is None else self.controller.plan.streamed
        num_blocks = len(self.blocks)
        # A plan has the blocks of one transformer, and is applied to each of two.
        streamed = {
            p
            for index, block in enumerate(self.blocks)
            if index in numbers or (index - num_blocks // 2) in numbers
            for p in block.parameters()
        }
        return [p for p in self.model.parameters() if not p.requires_grad and p not in streamed]
