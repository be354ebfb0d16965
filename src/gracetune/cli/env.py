"""`gracetune env`: show the environment variables that gracetune reads, and their effect."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.environment import (
    ALLOC_CONF_VARIABLES,
    EXPANDABLE_SEGMENTS,
    FSDP_VARIABLE,
    HINTS_VARIABLES,
    OWN_ALLOC_CONF_VARIABLE,
    PATTERN_VARIABLE,
    PRECISION_VARIABLE,
    RATIO_VARIABLE,
    environment_settings,
    process_environment,
    split_alloc_conf,
)
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from gracetune.config.environment import EnvironmentSettings

HELP = "show the environment variables that gracetune reads, their meaning and effect"
DEFAULT_RATIO = "5.0"
DEFAULT_PATTERN = "gpu_first"
MANAGED_USE = (
    "managed memory is allowed, and used if the machine has a GPU that supports it: for the "
    "batches of a run, and for what the device has no space for (frozen and trained weights, "
    "gradients, optimizer state, EMA, caches, offloaded activations)"
)
"""Effect of `use_uvm:True`."""


class Variable(NamedTuple):
    """An environment variable and its meaning."""

    name: str
    meaning: str


VARIABLES = (
    *(Variable(name, "placement hints on (1) or off (0)") for name in HINTS_VARIABLES),
    Variable(
        RATIO_VARIABLE,
        "maximum managed memory as a multiple of device memory, if the host has room",
    ),
    Variable(PATTERN_VARIABLE, "placement of managed memory: gpu_first, balanced or cpu_first"),
    *(
        Variable(name, f"torch's allocator, without our uvm keys; default: {EXPANDABLE_SEGMENTS}")
        for name in ALLOC_CONF_VARIABLES
    ),
    Variable(
        OWN_ALLOC_CONF_VARIABLE,
        "uvm keys removed from torch's variables, for this process and its children",
    ),
    Variable(PRECISION_VARIABLE, "precision of a run whose run file says `auto`"),
    Variable(FSDP_VARIABLE, "with FSDP_*, set by accelerate launch: divide the model among ranks"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the `--export` flag."""
    parser.add_argument(
        "--export", action="store_true", help='print shell lines: eval "$(gracetune env --export)"'
    )


def run(args: argparse.Namespace) -> int:
    """Print a table of the variables; with `--export`, shell lines that set them."""
    environment = process_environment()
    settings = environment_settings(environment)
    for line in (
        export_lines(environment, settings)
        if args.export
        else variable_table(environment, settings)
    ):
        print(line)
    return 0


def variables_in_use(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of gracetune that are set, with their values."""
    return {each.name: environment[each.name] for each in VARIABLES if environment.get(each.name)}


def describe_effects(settings: EnvironmentSettings) -> tuple[str, ...]:
    """Return a sentence for each effect that environment variables have."""
    effects = []
    if settings.uvm_hints is not None:
        effects.append(f"hints are {'on' if settings.uvm_hints else 'off'}")
    if settings.use_uvm is not None:
        effects.append(MANAGED_USE if settings.use_uvm else "managed memory is off")
    if settings.oversubscription_ratio is not None:
        limit = (
            f"to {settings.oversubscription_ratio} times device memory, or less if host memory or, "
            "over PCIe, a quarter of the free device memory is less"
        )
        effects.append(
            _managed_effect("uvm_oversubscription_ratio limits", limit, settings.use_uvm)
        )
    if settings.access_pattern is not None:
        effects.append(
            _managed_effect("uvm_access_pattern places", settings.access_pattern, settings.use_uvm)
        )
    if settings.stage1_threshold is not None:
        effects.append(f"stage 2 begins below {settings.stage1_threshold:.0%} free device memory")
    if settings.stage1_min_bytes is not None:
        effects.append(f"or below {format_bytes(settings.stage1_min_bytes)} free")
    if settings.alloc_conf:
        effects.append(f"torch's allocator gets {settings.alloc_conf}")
    if settings.mixed_precision is not None:
        effects.append(f"precision `auto` means {settings.mixed_precision}")
    effects += [
        f"{key} is {str(value).lower()} by default" for key, value in settings.sharding.items()
    ]
    return (*effects, *settings.notices)


def _managed_effect(verb: str, how: str, use_uvm: bool | None) -> str:
    if use_uvm is False:
        return f"{verb} nothing, because managed memory is off"
    scope = "" if use_uvm else "; without use_uvm, a run has only batches in it, if hints are on"
    return f"{verb} managed memory {how}{scope}"


def variable_table(environment: Mapping[str, str], settings: EnvironmentSettings) -> Iterator[str]:
    """Yield lines with each variable, its value and its meaning, then lines with the effects."""
    width = max(len(each.name) for each in VARIABLES)
    for each in VARIABLES:
        value = environment.get(each.name) or "(not set)"
        yield f"{each.name:<{width}}  {value}"
        yield f"{'':<{width}}    {each.meaning}"
    yield "Effects:"
    effects = describe_effects(settings)
    for effect in effects or ("none: no variable is set, so defaults and run files decide",):
        yield f"  - {effect}"


def export_lines(environment: Mapping[str, str], settings: EnvironmentSettings) -> Iterator[str]:
    """Yield shell lines that export each variable with its current value, or its default.

    They are the lines that `scripts/setup_gh200_env.sh` writes.
    """
    ratio = _format_ratio(settings.oversubscription_ratio)
    pattern = settings.access_pattern or DEFAULT_PATTERN
    for name in HINTS_VARIABLES:
        yield _export(name, "0" if settings.uvm_hints is False else "1")
    yield _export(RATIO_VARIABLE, ratio)
    yield _export(PATTERN_VARIABLE, pattern)
    yield _export(ALLOC_CONF_VARIABLES[1], ",".join(_alloc_conf(environment, ratio, pattern)))
    yield _export(PRECISION_VARIABLE, environment.get(PRECISION_VARIABLE) or "bf16")


def _alloc_conf(environment: Mapping[str, str], ratio: str, pattern: str) -> Iterator[str]:
    """Yield the `key:value` entries for PYTORCH_CUDA_ALLOC_CONF.

    First come the three keys for managed memory (uvm), then the entries that are already set.
    """
    replaced = {
        "use_uvm": "True",
        "uvm_oversubscription_ratio": ratio,
        "uvm_access_pattern": pattern,
    }
    yield from (f"{key}:{value}" for key, value in replaced.items())
    for variable in (OWN_ALLOC_CONF_VARIABLE, ALLOC_CONF_VARIABLES[1]):
        conf = split_alloc_conf(environment.get(variable, ""), variable)
        yield from (
            f"{key}:{value}" for key, value in conf.gracetune_keys.items() if key not in replaced
        )
        if conf.torch_keys:
            yield conf.torch_keys


def _format_ratio(ratio: float | None) -> str:
    return DEFAULT_RATIO if ratio is None else str(ratio)


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"
