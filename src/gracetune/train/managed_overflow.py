"""Move roles of a run (EMA, optimizer state, ...) to managed memory: planned, or when memory ends.

A run with `use_uvm` has a `ManagedRun`. The plan, or `gh200_optimizations.managed` in the run file,
names roles that start in managed memory. With a plan they move when it is applied, because only
then is known which weights are streamed. If a step runs out of device memory and no smaller plan is
left, the training loop calls `overflow`, which moves the next role, and repeats the step. So does
whatever needs device memory before the first step: placing the model without a plan, building the
moving average, and loading a checkpoint.

A checkpoint has the roles that overflowed. A resumed run moves them before it loads their contents,
which would not fit on the device.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch

from gracetune.config.schema import ManagedRoleName
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import ManagedOverflow, Notice
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.managed_roles import MANAGED_ROLES, slab_nbytes
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
from gracetune.plan.managed import NOT_ON_RANKS, OVERFLOW_ORDER, role_placements
from gracetune.train.execution_record import OVERFLOWED_KEY
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
MODEL_ROLES: tuple[ManagedRole, ...] = ("weights", "trained")
"""Roles that move if the model itself has too little device memory."""
PLANNED = "plan"
"""Reason why a role is in managed memory: the plan keeps it there."""
NO_SPACE_FOR_EMA = "The moving average of the weights does not fit on the device"
EMA_FIX = "set train.ema_decay: 0, or train fewer weights"
RESUMED = "The run overflowed before it was resumed."
"""Reason why a role is in managed memory: it overflowed before the checkpoint was saved."""
STEP_ROLES: tuple[ManagedRole, ...] = ("caches", *OVERFLOW_ORDER)
"""Roles that move if a step has too little device memory, in this order."""
SAMPLE_ROLES: tuple[ManagedRole, ...] = tuple(role for role in STEP_ROLES if role != "gradients")
"""Roles that move if a validation has too little: between two steps there are no gradients."""
MIN_CACHES_NBYTES = 64 * MIB
"""Fewer text embeddings do not overflow: a step would be repeated for nothing."""


class DeviceFullError(RunFailedError, torch.OutOfMemoryError):
    """Raised if a step has too little device memory, and nothing can be done about it."""


class RoleTooLargeError(ConfigError, torch.OutOfMemoryError):
    """Raised if a role that the run file or the plan keeps in managed memory exceeds the cap."""


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
    resumed: Mapping[str, Any] | None = None,
) -> ManagedRun | NoManagedRun:
    """Return the object that moves roles to managed memory. All ranks must call this.

    A plan moves roles when it is applied; without a plan, `place_model` does. `resumed` is the
    execution record of the checkpoint to resume from; None for a new run. If ranks divide the
    weights, or one of them has no managed memory, nothing can move on any, which is emitted as a
    warning. That there is none at all is said with the other settings of managed memory
    (`managed_memory_notice`).
    """
    settings = run.gh200_optimizations
    roles = forced_roles(run)
    memory, emit, ranks = session.managed, session.emit, layout.ranks
    reason = memory.reason if isinstance(memory, PoolUnavailable) else ""
    reasons = ranks.gather(reason)
    if all(reasons):
        return NoManagedRun(reason)
    if layout.is_sharded:
        reason = "the ranks divide the weights (distributed.strategy), so none overflows"
    elif any(reasons):
        rank = next(rank for rank, text in enumerate(reasons) if text)
        reason = f"{ranks.name(rank)} has none to use, so no rank does: {reasons[rank]}"
    else:
        assert not isinstance(memory, PoolUnavailable), memory
        saved = () if resumed is None else resumed.get(OVERFLOWED_KEY, ())
        return ManagedRun(
            memory=memory,
            emit=emit,
            parameters=parameters,
            model=family.transformer,
            blocks=family.blocks(),
            num_transformers=len(transformers_of(family.transformer)),
            stepper=stepper,
            texts=texts,
            placements=_placements(
                settings.managed_access,
                roles,
                emit,
                follows_pattern=memory.pattern is not None,
                trained_are_cast=run.train.mixed_precision != "no"
                and all(p.dtype is torch.float32 for p in parameters.values()),
            ),
            forced=roles,
            reserve_nbytes=session.policy.stage2_below(session.machine.platform.device_bytes),
            excluded=NOT_ON_RANKS if ranks.world_size > 1 else (),
            resumed=[role for role in STEP_ROLES if role in saved],
        )
    what = f"{SETTING} ({', '.join(roles)})" if roles else "managed overflow"
    text = f"{what} is not in use, and nothing is moved to managed memory: {reason}"
    emit(Notice(text, level="warning", fallback=True))
    return NoManagedRun(reason)


def _placements(
    access: str,
    roles: Collection[ManagedRole],
    emit: Emit,
    *,
    follows_pattern: bool,
    trained_are_cast: bool,
) -> dict[ManagedRole, ManagedPlacement]:
    """Return the placements of `role_placements`; warn of `roles` that have another one."""
    placements = role_placements(
        access, follows_pattern=follows_pattern, trained_are_cast=trained_are_cast
    )
    if access == "auto":
        return placements
    differing = [role for role in roles if placements[role] != access]
    if differing:
        text = f"gh200_optimizations.managed_access: {access} has no effect on "
        text += f"{', '.join(differing)}, which is used in place"
        emit(Notice(text, level="warning"))
    return placements


def device_full(
    reason: str,
    managed: ManagedRun | NoManagedRun,
    cause: str = "No plan that needs less memory is left",
    fix: str = "lower train.batch_size or the resolution, or train fewer weights",
) -> DeviceFullError:
    """Return the error for a run that has too little memory; it says what would help."""
    return DeviceFullError(f"{reason.rstrip('.')}. {cause}, and {managed.state()}. Or {fix}.")


def place_model(model: nn.Module, device: torch.device, managed: ManagedRun | NoManagedRun) -> None:
    """Move the model of a run without a plan to the device, and the run's roles to managed memory.

    If the device has too little space, weights move to managed memory, as many as the cap allows.

    Raises:
        RoleTooLargeError: A role exceeds the cap.
        DeviceFullError: The model does not fit, and nothing more can move.
    """
    managed.place()
    while True:
        try:
            model.to(device)
        except torch.OutOfMemoryError as error:
            reason = _first_line(error)
        else:
            return
        if not managed.overflow(reason, 0, MODEL_ROLES):
            cause = "The model does not fit on the device without a plan"
            raise device_full(reason, managed, cause, "set plan: auto, which streams weights")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


@dataclass(frozen=True, slots=True)
class NoManagedRun:
    """A run without managed memory for what it keeps."""

    reason: str = OVERFLOW_OFF
    """Why there is none."""
    roles: Mapping[ManagedRole, int] = field(default_factory=dict)
    """Roles in managed memory: none."""
    overflowed: Sequence[ManagedRole] = ()
    """Roles that have left the device: none."""
    free_bytes: int = 0
    """Bytes of managed memory that may still be used: none."""
    reserve_nbytes: int = 0
    """Bytes of device memory that plans leave to managed pages: none."""

    def state(self) -> str:
        """Return why nothing overflows, in words."""
        return self.reason

    def place(self) -> None:
        """Move nothing."""

    def place_planned(self, plan: Plan) -> None:
        """Move nothing."""
        assert not plan.managed, f"the run has no managed memory for {plan.managed}"

    def free_unused(self) -> None:
        """Free nothing."""

    def build_ema(self, parameters: Mapping[str, Parameter], decay: float) -> Ema | None:
        """Build the moving average of the weights; None if `decay` is 0.

        Raises:
            DeviceFullError: The device has no space for it.
        """
        if not decay:
            return None
        try:
            return Ema(parameters, decay)
        except torch.OutOfMemoryError as error:
            reason = _first_line(error)
        raise device_full(reason, self, NO_SPACE_FOR_EMA, EMA_FIX)

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return the same engine."""
        return engine

    def overflow(self, reason: str, step: int, roles: Sequence[ManagedRole] = ()) -> bool:  # noqa: ARG002
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
    resumed: list[ManagedRole] = field(default_factory=list)
    """Roles that overflowed before the run was resumed, and have not been moved again yet."""
    overflowed: list[ManagedRole] = field(default_factory=list)
    """Roles that have left the device because it was full, in this order."""
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
        in_use = sum(self.memory.by_role().values())
        return self.memory.free_bytes + self.memory.held_bytes + in_use

    def state(self) -> str:
        """Return what is in managed memory, and its limit, in words."""
        moved = ", ".join(self.roles) or "nothing"
        cap = format_bytes(self.memory.cap_bytes)
        return (
            f"managed memory has {moved}, and gh200_optimizations.managed_memory limits it to {cap}"
        )

    def place(self) -> None:
        """Move the roles that the run file names, in a run without a plan, before the first step.

        Raises:
            RoleTooLargeError: A role exceeds the cap.
        """
        self._place(self.forced, None)
        self._place_resumed()

    def place_planned(self, plan: Plan) -> None:
        """Move the roles of a plan that are not in managed memory yet, before it is applied.

        Of the frozen weights, those move that the plan does not stream.

        Raises:
            RoleTooLargeError: A role exceeds the cap.
        """
        self.streamed = plan.streamed
        self.memory.hold("activations", 0)  # those of an earlier plan
        # The planner leaves out what the ranks cannot have in managed memory.
        self._place(dict.fromkeys([*plan.managed, *self.forced]), plan)
        self._place_resumed()

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
            reason = self._chosen_by(role)
            why = self._reason_unused(role, plan)
            if why:
                if is_first:
                    text = f"{reason}: {ROLE_NAMES[role]} cannot be in managed memory: {why}"
                    self.emit(Notice(text, level="warning", fallback=True))
            elif role == "activations":  # allocated when a step offloads them
                assert plan is not None, "activations are offloaded by a plan"
                room = self.memory.room_for(role)
                self.memory.hold(role, min(plan.host.activations, room))
                if role not in self.roles:
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
        if role == "optimizer" and role not in self.roles and not self.stepper.unmanaged_nbytes:
            return "it has only small tensors, which stay on the device, or none"
        return ""

    def _chosen_by(self, role: ManagedRole) -> str:
        return SETTING if role in self.forced else PLANNED

    def _checked_move(self, role: ManagedRole, reason: str) -> None:
        try:
            nbytes = self.move(role, reason)
        except torch.OutOfMemoryError as error:
            raise self._too_large(role, error) from error
        self._report_placed(role, nbytes, reason)

    def _too_large(self, role: ManagedRole, error: Exception) -> RoleTooLargeError:
        """Return the error for a role that exceeds the cap; it says who wants it there."""
        why = str(error).rstrip(".")
        if role in self.forced:
            return RoleTooLargeError(
                f"{SETTING} has {role}, which does not fit: {why}. Or take {role} out of {SETTING}."
            )
        return RoleTooLargeError(
            f"The plan keeps {ROLE_NAMES[role]} in managed memory, which does not fit: {why}. Or "
            f"set {SETTING}: off, to plan without managed memory."
        )

    def _place_resumed(self) -> None:
        """Move what overflowed before the run was resumed, as far as the cap allows.

        The contents of the checkpoint are loaded later, to where the roles then are. The moving
        average is built later, so room for it is held.
        """
        if "ema" in self.resumed and "ema" not in self.planned:
            with suppress(torch.OutOfMemoryError):
                self.memory.hold("ema", slab_nbytes(self.parameters.values()))
        for role in [role for role in self.resumed if role != "ema"]:
            self.resumed.remove(role)
            if role not in self.roles and self._is_on_device(role):
                self._try_to_move(role, RESUMED, 0)

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

        It is built there as well if the device has no space, or had none before the run was
        resumed.

        Raises:
            RoleTooLargeError: It exceeds the cap.
            DeviceFullError: Neither the device nor managed memory has space for it.
        """
        if not decay:
            if "ema" in self.planned:
                text = f"{SETTING}: nothing of {ROLE_NAMES['ema']} is in managed memory: "
                text += "train.ema_decay is 0"
                self.emit(Notice(text, level="warning", fallback=True))
            return None
        if "ema" not in self.planned:
            return self._build_fitting_ema(parameters, decay)
        try:
            self.ema = Ema(parameters, decay, self.state_of("ema"))
        except torch.OutOfMemoryError as error:
            raise self._too_large("ema", error) from error
        reason = self._chosen_by("ema")
        self._record("ema", self.ema.managed_nbytes, reason, 0)
        self._report_placed("ema", self.ema.managed_nbytes, reason)
        return self.ema

    def _build_fitting_ema(self, parameters: Mapping[str, Parameter], decay: float) -> Ema:
        """Build the moving average where there is space: on the device, or in managed memory."""
        places = [None, self.state_of("ema")]
        reasons = []
        if "ema" in self.resumed:
            self.resumed.remove("ema")
            places.reverse()
            reasons.append(RESUMED)
        for place in places:
            try:
                self.ema = Ema(parameters, decay, place)
            except torch.OutOfMemoryError as error:
                reasons.append(_first_line(error))
                continue
            if place is None:
                self.memory.hold("ema", 0)
            else:
                self._record("ema", self.ema.managed_nbytes, reasons[0], 0)
                self._report_overflow("ema", reasons[0], self._in_managed("ema"))
            return self.ema
        raise device_full(" ".join(reasons), self, NO_SPACE_FOR_EMA, EMA_FIX)

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return a copy engine that offloads activations to managed memory, if that is planned."""
        if "activations" not in self.planned:
            return engine
        return ManagedHostEngine(engine, self.memory, "activations")

    def close(self) -> None:
        """Remove hooks; what is in managed memory can still be read."""
        for one in self.hooked:
            one.close()
        self.hooked.clear()

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

    def overflow(self, reason: str, step: int, roles: Sequence[ManagedRole] = STEP_ROLES) -> bool:
        """Move the next role that is on the device, after an out-of-memory error.

        `reason` is the error's text. Returns False if none of `roles` is left, or the cap allows
        none. Optimizer state that exceeds the cap is streamed from pinned host memory instead.
        """
        waiting = (r for r in roles if r not in self.roles and self._is_on_device(r))
        return any(self._try_to_move(role, reason, step) for role in waiting)

    def _try_to_move(self, role: ManagedRole, reason: str, step: int) -> bool:
        """Move as much of a role as the cap allows; return False if that is nothing."""
        try:
            self.move(role, reason, step, partly=True)
        except torch.OutOfMemoryError as error:
            text = f"{ROLE_NAMES[role]} cannot move to managed memory: {error}"
            self.emit(Notice(text, level="warning", fallback=True))
            return role == "optimizer" and self._stream_state(reason)
        self._report_overflow(role, reason, self._in_managed(role))
        return True

    def _stream_state(self, reason: str) -> bool:
        """Keep the optimizer state in pinned host memory; return False if that has no space."""
        try:
            self.stepper.keep_in_host()
        except (torch.OutOfMemoryError, OffloadError) as error:
            text = f"{ROLE_NAMES['optimizer']} cannot move to host memory either: {error}"
            self.emit(Notice(text, level="warning", fallback=True))
            return False
        what = f"{ROLE_NAMES['optimizer']} streamed from host memory"
        self._report_overflow("optimizer", reason, what)
        return True

    def _in_managed(self, role: ManagedRole) -> str:
        return f"{ROLE_NAMES[role]} in managed memory ({format_bytes(self.roles[role])})"

    def _report_overflow(self, role: ManagedRole, reason: str, what: str) -> None:
        self.overflowed.append(role)
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
