"""Move roles of a run (EMA, optimizer state, ...) to managed memory: planned, or when memory ends.

A run with `use_uvm` has a `ManagedRun`. The plan, or `gh200_optimizations.managed` in the run file,
names roles that start in managed memory. With a plan they move when it is applied, because only
then is known which weights are streamed. If a step runs out of device memory and no smaller plan is
left, the training loop calls `overflow`, which moves the next role, and repeats the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, get_args

import torch

from gracetune.config.schema import ManagedRoleName
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import ManagedOverflow, Notice
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.managed_roles import MANAGED_ROLES
from gracetune.memory.session import OVERFLOW_OFF
from gracetune.models.family import transformers_of
from gracetune.offload.copy_engine import OffloadError
from gracetune.offload.managed_tensors import (
    ManagedGradients,
    ManagedHostEngine,
    ManagedWeights,
    fitting_parameters,
)
from gracetune.optim.offloaded_state import ManagedState
from gracetune.plan.managed import NOT_ON_RANKS, OVERFLOW_ORDER
from gracetune.train.step import Ema
from gracetune.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

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
    from gracetune.plan.result import Plan

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
SETTING = "gh200_optimizations.managed"
PREFETCHED: tuple[ManagedRole, ...] = ("weights", "trained", "optimizer", "ema")
"""Roles that a step uses in a known order, so that they can be prefetched."""
MIN_CACHES_NBYTES = 64 * MIB
"""Fewer text embeddings do not overflow: a step would be repeated for nothing."""


class DeviceFullError(RunFailedError, torch.OutOfMemoryError):
    """Raised if a step has too little device memory, and nothing can be done about it."""


class RoleTooLargeError(ConfigError, torch.OutOfMemoryError):
    """Raised if a role that the run file keeps in managed memory exceeds the cap."""


def managed_memory_limit(run: RunFile) -> int | None:
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
    texts: DeviceTextCache,
    *,
    is_planned: bool,
) -> ManagedRun | NoManagedRun:
    """Return the object that moves roles to managed memory.

    In a run without a plan, the roles that the run file names have moved; else a plan moves them.
    If ranks divide the weights, nothing can move, which is emitted as a warning if the run file or
    the environment asks for managed memory. That there is none is said with the other settings of
    managed memory (`managed_memory_notice`).
    """
    settings = run.gh200_optimizations
    roles = forced_roles(run)
    memory, emit = session.managed, session.emit
    if isinstance(memory, PoolUnavailable):
        return NoManagedRun(memory.reason)
    if settings.managed == "off":
        return NoManagedRun(f"{SETTING} is off; auto lets a run continue in managed memory")
    if not layout.is_sharded:
        found = ManagedRun(
            memory=memory,
            emit=emit,
            parameters=parameters,
            model=family.transformer,
            blocks=family.blocks(),
            num_transformers=len(transformers_of(family.transformer)),
            stepper=stepper,
            texts=texts,
            placements=_placements(settings.managed_access, roles, emit),
            forced=roles,
            reserve_nbytes=session.policy.stage2_below(session.machine.platform.device_bytes),
            excluded=NOT_ON_RANKS if layout.ranks.world_size > 1 else (),
        )
        if not is_planned:
            found.place()
        return found
    reason = "the ranks divide the weights (distributed.strategy), so none overflows"
    if roles or session.use_uvm:
        what = f"{SETTING} ({', '.join(roles)})" if roles else "managed overflow"
        text = f"{what} is not in use, and nothing is moved to managed memory: {reason}"
        emit(Notice(text, level="warning", fallback=True))
    return NoManagedRun(reason)


def _placements(
    access: str, roles: Collection[ManagedRole], emit: Emit
) -> dict[ManagedRole, ManagedPlacement]:
    """Return the placement of the roles for which `managed_access` sets one.

    Offloaded activations are always copied to host memory, and some roles cannot be prefetched.
    """
    placements: dict[ManagedRole, ManagedPlacement] = {"activations": "in_place"}
    if access == "auto":
        return placements
    for role in MANAGED_ROLES:
        is_impossible = role == "activations" or (access == "prefetch" and role not in PREFETCHED)
        placements[role] = "in_place" if is_impossible else cast("ManagedPlacement", access)
    differing = [role for role in roles if placements[role] != access]
    if differing:
        text = f"gh200_optimizations.managed_access: {access} has no effect on "
        text += f"{', '.join(differing)}, which is used in place"
        emit(Notice(text, level="warning"))
    return placements


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
    reserve_nbytes: int = 0
    """Bytes of device memory that plans leave to managed pages: none."""

    def place_planned(self, plan: Plan) -> None:
        """Move nothing."""
        assert not plan.managed, f"the run has no managed memory for {plan.managed}"

    def free_unused(self) -> None:
        """Free nothing."""

    def build_ema(self, parameters: Mapping[str, Parameter], decay: float) -> Ema | None:
        """Build the moving average of the weights; None if `decay` is 0."""
        return Ema(parameters, decay) if decay else None

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return the same engine."""
        return engine

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
    num_transformers: int = 1
    """Number of transformers that the blocks belong to, with equally many blocks each."""
    ema: Ema | None = None
    placements: Mapping[ManagedRole, ManagedPlacement] = field(default_factory=dict)
    """Placement of each role; the access pattern chooses that of roles that are not in it."""
    forced: Collection[ManagedRole] = ()
    """Roles that the run file keeps in managed memory."""
    excluded: Collection[ManagedRole] = ()
    """Roles that cannot be in managed memory, because the run has several ranks."""
    reserve_nbytes: int = 0
    """Bytes of device memory that plans leave to managed pages: the threshold of stage 2. With
    less, a run that is as planned would have its caches and prefetched data reclaimed."""
    planned: set[ManagedRole] = field(default_factory=set)
    """Roles that the plan or the run file has placed in managed memory."""
    streamed: Collection[int] = ()
    """Numbers of the blocks of each transformer whose frozen weights the plan streams."""
    hooked: list[ManagedGradients | ManagedWeights] = field(default_factory=list)
    """Objects with hooks on parameters or blocks."""
    roles: dict[ManagedRole, int] = field(default_factory=dict)
    """Roles that are in managed memory, with the bytes that were moved."""

    @property
    def free_bytes(self) -> int:
        """Bytes of managed memory that may be used, with those of roles that are in it."""
        return self.memory.free_bytes + sum(self.memory.by_role().values())

    def place(self) -> None:
        """Move the roles that the run file names, in a run without a plan, before the first step.

        Raises:
            RoleTooLargeError: A role exceeds the cap.
        """
        self._place(self.forced, None)

    def place_planned(self, plan: Plan) -> None:
        """Move the roles of a plan that are not in managed memory yet, before it is applied.

        Of the frozen weights, those move that the plan does not stream.

        Raises:
            RoleTooLargeError: A role exceeds the cap.
        """
        self.streamed = plan.streamed
        # The planner leaves out what the ranks cannot have in managed memory.
        self._place(dict.fromkeys([*plan.managed, *self.forced]), plan)

    def free_unused(self) -> None:
        """Free managed memory of weights that a changed plan streams; call when it is applied."""
        for one in self.hooked:
            if isinstance(one, ManagedWeights):
                one.free_unused()
        if "weights" in self.roles:
            self.roles["weights"] = self.memory.by_role().get("weights", 0)

    def _place(self, roles: Iterable[ManagedRole], plan: Plan | None) -> None:
        for role in roles:
            is_first = role not in self.planned
            self.planned.add(role)
            reason = SETTING if role in self.forced else "plan"
            why = self._reason_unused(role, plan)
            if why:
                if is_first:
                    text = f"{reason}: {ROLE_NAMES[role]} cannot be in managed memory: {why}"
                    self.emit(Notice(text, level="warning", fallback=True))
            elif role == "activations":  # allocated when a step offloads them
                if role not in self.roles and plan is not None:
                    self._record(role, plan.host.activations, reason, 0)
                    self._report_placed(role, plan.host.activations, reason)
            elif role == "ema":  # `build_ema` builds it there
                continue
            elif role not in self.roles or (role == "weights" and self._frozen()):
                self._checked_move(role, reason)

    def _reason_unused(self, role: ManagedRole, plan: Plan | None) -> str:
        """Return why a role has nothing for managed memory in this run; empty if it has."""
        if role in self.excluded:
            return "the ranks add up gradients in buffers on the device"
        if role == "activations" and (plan is None or not plan.host.activations):
            return "there is no plan" if plan is None else "the plan offloads none"
        if role == "caches" and not len(self.texts):
            return "no text embeddings stay on the device"
        if role == "weights" and role not in self.roles and not self._frozen():
            return "all weights are trained or streamed"
        return ""

    def _checked_move(self, role: ManagedRole, reason: str) -> None:
        try:
            nbytes = self.move(role, reason)
        except torch.OutOfMemoryError as error:
            raise RoleTooLargeError(
                f"{SETTING} has {role}, which does not fit: {str(error).rstrip('.')}. Or take "
                f"{role} out of {SETTING}."
            ) from error
        self._report_placed(role, nbytes, reason)

    def move(self, role: ManagedRole, reason: str, step: int = 0, *, partly: bool = False) -> int:
        """Move a role to managed memory; return the bytes that were or will be allocated.

        With `partly`, only as many weights or gradients move as the cap allows.

        Raises:
            torch.OutOfMemoryError: The cap does not allow it. Nothing has moved.
        """
        placement = self.placements.get(role)
        before = self.memory.by_role().get(role, 0)
        later = 0
        if role == "ema" and self.ema is not None:
            self.ema.move_to_managed(self.state_of(role))
        elif role == "optimizer":
            later = self.stepper.unmanaged_nbytes
            self.stepper.keep_managed(self.state_of(role))
        elif role == "caches":
            self.texts.move_to_managed(self.memory, placement)
        else:
            parameters = self._frozen() if role == "weights" else list(self.parameters.values())
            if partly:
                room = self.memory.room_for(role)
                parameters = fitting_parameters(parameters, self.blocks, room) or parameters[:1]
            self.hooked.append(
                ManagedGradients(parameters, self.memory, placement)
                if role == "gradients"
                else ManagedWeights(role, parameters, self.blocks, self.memory, placement)
            )
        nbytes = self.memory.by_role().get(role, 0) - before or later
        self._record(role, nbytes, reason, step)
        return nbytes

    def state_of(self, role: ManagedRole) -> ManagedState:
        """Return the managed memory and the placement for a role."""
        return ManagedState(self.memory, self.placements.get(role))

    def build_ema(self, parameters: Mapping[str, Parameter], decay: float) -> Ema | None:
        """Build the moving average of the weights, in managed memory if that is planned.

        Raises:
            RoleTooLargeError: It exceeds the cap.
        """
        if not decay:
            if "ema" in self.planned:
                text = f"{SETTING}: nothing of {ROLE_NAMES['ema']} is in managed memory: "
                text += "train.ema_decay is 0"
                self.emit(Notice(text, level="warning", fallback=True))
            return None
        if "ema" not in self.planned:
            self.ema = Ema(parameters, decay)
            return self.ema
        try:
            self.ema = Ema(parameters, decay, self.state_of("ema"))
        except torch.OutOfMemoryError as error:
            raise RoleTooLargeError(
                f"{SETTING} has ema, which does not fit: {str(error).rstrip('.')}. Or take ema out "
                f"of {SETTING}."
            ) from error
        reason = SETTING if "ema" in self.forced else "plan"
        self._record("ema", self.ema.managed_nbytes, reason, 0)
        self._report_placed("ema", self.ema.managed_nbytes, reason)
        return self.ema

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return a copy engine that offloads activations to managed memory, if that is planned."""
        if "activations" not in self.planned:
            return engine
        return ManagedHostEngine(engine, self.memory, "activations")

    def close(self) -> None:
        """Remove hooks and stop prefetching; what is in managed memory can still be read."""
        for one in self.hooked:
            one.close()
        self.hooked.clear()
        self.memory.close()

    def _record(self, role: ManagedRole, nbytes: int, reason: str, step: int) -> None:
        asked = self.placements.get(role) or self.memory.default_placement(nbytes)
        placement = self.memory.placements_of(role) or asked
        self.roles[role] = self.roles.get(role, 0) + nbytes
        total = self.memory.used_bytes + self.memory.held_bytes
        cap = self.memory.cap_bytes
        self.emit(ManagedOverflow(step, role, nbytes, placement, reason, total, cap))

    def _report_placed(self, role: ManagedRole, nbytes: int, reason: str) -> None:
        """Report a role that the plan or the run file keeps in managed memory."""
        text = f"memory: managed memory has {ROLE_NAMES[role]}, {format_bytes(nbytes)} ({reason})"
        self.emit(Notice(text))

    def overflow(self, reason: str, step: int) -> bool:
        """Move the next role that is on the device, after an out-of-memory error.

        `reason` is the error's text. Returns False if no role is left, or the cap allows none.
        Optimizer state that exceeds the cap is streamed from pinned host memory instead.
        """
        for role in ("caches", *OVERFLOW_ORDER):
            if role in self.roles or not self._is_on_device(role):
                continue
            try:
                nbytes = self.move(role, reason, step, partly=True)
            except torch.OutOfMemoryError as error:
                text = f"{ROLE_NAMES[role]} cannot move to managed memory: {error}"
                self.emit(Notice(text, level="warning", fallback=True))
                if role == "optimizer" and self._stream_state(reason):
                    return True
                continue
            moved = f"{ROLE_NAMES[role]} in managed memory ({format_bytes(nbytes)})"
            self._report_overflow(reason, moved)
            return True
        return False

    def _stream_state(self, reason: str) -> bool:
        """Keep the optimizer state in pinned host memory; return False if that has no space."""
        try:
            self.stepper.keep_in_host()
        except (torch.OutOfMemoryError, OffloadError) as error:
            text = f"{ROLE_NAMES['optimizer']} cannot move to host memory either: {error}"
            self.emit(Notice(text, level="warning", fallback=True))
            return False
        self._report_overflow(reason, f"{ROLE_NAMES['optimizer']} streamed from host memory")
        return True

    def _report_overflow(self, reason: str, what: str) -> None:
        text = f"{reason} Continuing, but slower, with {what}."
        self.emit(Notice(text, level="warning", fallback=True))

    def _is_on_device(self, role: ManagedRole) -> bool:
        if role in self.excluded:
            return False
        if role == "ema":
            return self.ema is not None
        if role == "weights":
            return bool(self._frozen())
        if role == "optimizer":
            return self.stepper.movable_nbytes > 0
        if role == "caches":
            return self.texts.nbytes >= MIN_CACHES_NBYTES
        return True

    def _frozen(self) -> list[Parameter]:
        """Return the frozen weights that are neither streamed nor in managed memory."""
        num_blocks = len(self.blocks) // self.num_transformers
        # A plan has the blocks of one transformer, and is applied to each.
        elsewhere = {
            p
            for index, block in enumerate(self.blocks)
            if index % num_blocks in self.streamed
            for p in block.parameters()
        }
        for one in self.hooked:
            if isinstance(one, ManagedWeights):
                elsewhere.update(one.parameters)
        return [p for p in self.model.parameters() if not p.requires_grad and p not in elsewhere]
