"""Predict the bytes and the time of roles in managed memory, and list the choices to try.

A role in managed memory is at home in host memory, and kernels use it over the link. The bytes that
a step moves over the link, per byte of the role:

    ema           read and written once
    optimizer     read and written once
    gradients     written by each backward; read for the norm, scaled, and read by the update
    trained       read by each forward, backward and recomputation, and by the EMA; updated once.
                  If matmuls use them without a cast: moved as weights are
    weights       moved to the device for each forward and each backward, and back afterwards
    caches        read once for the batch that uses them, which is little
    activations   copied to the host and back, as offloaded activations always are: nothing more

None of this is hidden behind compute, so the prediction is pessimistic for what kernels use early.
Reading and writing at the same time gets `both_ways_share` of the rate.

Weights are moved (`managed_access: prefetch`), because a matmul reads its weights once for
each tile of the activations: in place, a step with 18,432 tokens took 26 times as long as one
reading. Pages go back to the host more slowly than they come, so the way back sets the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from gracetune.config.environment import environment_settings, process_environment
from gracetune.memory.managed_roles import MANAGED_ROLES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gracetune.config.schema import RunFile
    from gracetune.memory.managed_roles import ManagedPlacement, ManagedRole
    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.plan.cost import ModelCosts
    from gracetune.plan.machines import EffectiveRates
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.result import Plan
    from gracetune.plan.simulate import PlanCandidate

OVERFLOW_ORDER: tuple[ManagedRole, ...] = ("ema", "optimizer", "gradients", "weights", "trained")
"""Roles in the order in which they move to managed memory: those that a step uses least first."""
NOT_MANAGED: tuple[ManagedRole, ...] = ()
NOT_ON_RANKS: tuple[ManagedRole, ...] = ("gradients",)
"""Roles that several ranks cannot have in managed memory: they add up gradients in buffers on the
device, which replace the gradients."""


PREFETCHED: tuple[ManagedRole, ...] = ("weights", "trained", "optimizer", "ema")
"""Roles that a step uses in a known order, so that they can be prefetched."""
PATTERN_PLACEMENTS: Mapping[str, ManagedPlacement] = {
    "gpu_first": "device",
    "cpu_first": "in_place",
    "balanced": "balanced",
}
"""Placement by `uvm_access_pattern`; `gpu_first` is `in_place` while the device has no headroom."""
PLACE_WORDS: Mapping[ManagedPlacement, str] = {
    "in_place": "managed, used in place",
    "prefetch": "managed, prefetched",
    "device": "managed, on the device if it fits",
    "balanced": "managed, where it was used last",
}


def role_placements(
    access: str, *, follows_pattern: bool, trained_are_cast: bool
) -> dict[ManagedRole, ManagedPlacement]:
    """Return the placement of the roles for which `managed_access` or its default sets one.

    Offloaded activations are always copied to host memory, and some roles cannot be prefetched. By
    default, weights that matmuls read are prefetched: in place, a matmul reads them over
    the link once for each tile of the activations. Trained weights that are cast are read once.
    """
    placements: dict[ManagedRole, ManagedPlacement] = {"activations": "in_place"}
    if access == "auto":
        if not follows_pattern:
            placements["weights"] = "prefetch"
            if not trained_are_cast:
                placements["trained"] = "prefetch"
        return placements
    for role in MANAGED_ROLES:
        is_impossible = role == "activations" or (access == "prefetch" and role not in PREFETCHED)
        placements[role] = "in_place" if is_impossible else cast("ManagedPlacement", access)
    return placements


def describe_places(run: RunFile, *, trained_are_fp32: bool) -> dict[ManagedRole, str]:
    """Return where each role would be in managed memory, in words of a report.

    `trained_are_fp32` is the data type of the trained weights, if they are not an adapter's.
    """
    pattern = environment_settings(process_environment()).access_pattern
    is_whole = run.adapter is None or run.adapter.kind == "full"
    placements = role_placements(
        run.gh200_optimizations.managed_access,
        follows_pattern=pattern is not None,
        trained_are_cast=run.train.mixed_precision != "no" and (trained_are_fp32 or not is_whole),
    )
    default = PATTERN_PLACEMENTS.get(pattern or "", "in_place")
    return {role: PLACE_WORDS[placements.get(role, default)] for role in MANAGED_ROLES}


def describe_other_access(run: RunFile, roles: Collection[ManagedRole]) -> str:
    """Return that these roles are not used as predicted; empty if they are."""
    access: str = run.gh200_optimizations.managed_access
    setting = f"managed_access: {access}"
    if access == "auto":
        pattern = environment_settings(process_environment()).access_pattern
        if pattern is None:
            return ""
        access = "in_place" if pattern == "cpu_first" else pattern
        setting = f"uvm_access_pattern: {pattern}"
    if access == "prefetch" and not {"trained", "optimizer", "ema"} & {*roles}:
        return ""  # weights are prefetched by default
    if access != "in_place":
        return (
            f"times of managed memory are those of managed_access: auto, not of {setting}: "
            "prefetch takes longer over PCIe, pages on the device less"
        )
    if "weights" not in roles:
        return ""
    return (
        f"with {setting}, a step may take many times as long as predicted: matmuls read "
        "weights over the link again and again; managed_access: auto prefetches them"
    )


class ManagedPlacer(Protocol):
    """Moves the roles of a plan to managed memory; `train/managed_overflow.py` has it."""

    @property
    def free_bytes(self) -> int:
        """Largest number of bytes of managed memory; 0: the run has none."""
        ...

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of device memory that a plan must leave free, for managed pages."""
        ...

    def place_planned(self, plan: Plan) -> None:
        """Move the roles of a plan that is about to be applied."""
        ...

    def free_unused(self) -> None:
        """Free managed memory that the plan, which has been applied, does not use."""
        ...

    def wrap_engine(self, engine: CopyEngine) -> CopyEngine:
        """Return the copy engine to use instead of another, for managed memory."""
        ...


def managed_choices(run: RunFile, num_ranks: int = 1) -> tuple[tuple[ManagedRole, ...], ...]:
    """Return the sets of roles to try in managed memory, if the run may use it.

    With `auto`, the roles are added one after the other, in the order of their cost; the planner
    takes the first set unless another is faster or the only one that fits.
    """
    managed = run.gh200_optimizations.managed
    excluded = NOT_ON_RANKS if num_ranks > 1 else ()
    if managed == "off":
        return (NOT_MANAGED,)
    if managed != "auto":
        return (tuple(role for role in managed if role not in excluded),)
    is_whole = run.adapter is None or run.adapter.kind == "full"
    if not is_whole:  # what an adapter trains is small
        return NOT_MANAGED, ("weights",)
    roles = [role for role in OVERFLOW_ORDER if role not in excluded]
    if run.adapter is None:
        roles.remove("weights")
    if not run.train.ema_decay:
        roles.remove("ema")
    # The optimizer's state can be streamed instead, which is faster over PCIe.
    others: list[ManagedRole] = [role for role in roles if role != "optimizer"]
    choices = [tuple(others[:count]) for count in range(len(others) + 1)]
    if run.optimizer.state == "auto":
        choices += [tuple(roles[:count]) for count in range(len(roles) + 1)]
    return tuple(dict.fromkeys(choices))


def managed_nbytes(
    costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory
) -> dict[ManagedRole, int]:
    """Return the bytes that each role would have in managed memory, all transformers together."""
    resident = sum(
        block.frozen_nbytes
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
        if plan.weights == "resident"
    )
    return {
        "ema": fixed.averages_nbytes,
        "optimizer": fixed.optimizer_nbytes,
        "gradients": fixed.num_transformers * costs.trained_nbytes,
        "weights": fixed.num_transformers * (costs.outside_frozen_nbytes + resident),
        "trained": fixed.num_transformers * costs.trained_nbytes,
        "caches": fixed.device_caches_nbytes,
        "activations": offloaded_nbytes(costs, candidate),
    }


def offloaded_nbytes(costs: ModelCosts, candidate: PlanCandidate) -> int:
    """Return the bytes of activations that are in host or managed memory at the end of forward."""
    return sum(
        block.offloaded_nbytes(plan, candidate.compiled)
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
    )


def managed_seconds(
    costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory, rates: EffectiveRates
) -> dict[ManagedRole, float]:
    """Return the seconds that each role would add to a micro-batch in managed memory."""
    nbytes = managed_nbytes(costs, candidate, fixed)
    # A step trains one of the transformers of Wan 2.2.
    used = {role: size / fixed.num_transformers for role, size in nbytes.items()}
    one_way = 1 / rates.in_place
    both_ways = one_way / rates.both_ways_share
    micro_batches = candidate.accumulation
    passes = 2 + any(block.activations == "recompute" for block in candidate.blocks)
    moves = 2 * micro_batches / rates.prefetch
    are_cast = bool(costs.cast_copies_nbytes)
    per_step: dict[ManagedRole, float] = {
        "ema": used["ema"] * both_ways,
        "optimizer": used["optimizer"] * both_ways,
        "gradients": used["gradients"]
        * (one_way + (micro_batches - 1) * both_ways + 2 * one_way + both_ways),
        "weights": used["weights"] * moves,
        "trained": used["trained"]
        * (
            (passes * micro_batches * one_way if are_cast else moves)
            + both_ways
            + bool(fixed.averages_nbytes) * one_way
        ),
        "caches": 0.0,
        "activations": 0.0,
    }
    return {role: seconds / micro_batches for role, seconds in per_step.items()}
