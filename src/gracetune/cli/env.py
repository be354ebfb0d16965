"""`gracetune env`: the variables we read, what each means, and what we will do with it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.environment import (
    ALLOC_CONFS,
    GROWING,
    HINTS,
    KEPT,
    PATTERN,
    PRECISION,
    RATIO,
    environment_settings,
    process_environment,
    split_alloc_conf,
)
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from gracetune.config.environment import EnvironmentSettings

HELP = "show the environment variables that matter, what they mean and what they will do"
DEFAULT_RATIO = "5.0"
DEFAULT_PATTERN = "gpu_first"


class Variable(NamedTuple):
    """A variable and its meaning."""

    name: str
    meaning: str


VARIABLES = (
    *(Variable(name, "placement hints on (1) or off (0)") for name in HINTS),
    Variable(RATIO, "managed memory may be this many times the device's, if the host has it"),
    Variable(PATTERN, "where managed memory lives: gpu_first, balanced or cpu_first"),
    *(
        Variable(name, f"torch's allocator, our uvm keys taken out; a run's default: {GROWING}")
        for name in ALLOC_CONFS
    ),
    Variable(KEPT, "what was taken out of torch's variables, for this process and its children"),
    Variable(PRECISION, "precision of a run whose file says `auto`"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag."""
    parser.add_argument(
        "--export", action="store_true", help='print shell lines: eval "$(gracetune env --export)"'
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, or the lines for a shell."""
    environment = process_environment()
    settings = environment_settings(environment)
    for line in (
        export_lines(environment, settings) if args.export else table(environment, settings)
    ):
        print(line)
    return 0


def variables_in_use(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of our variables that are set."""
    return {each.name: environment[each.name] for each in VARIABLES if environment.get(each.name)}


def describe_effects(settings: EnvironmentSettings) -> tuple[str, ...]:
    """What the environment decides, one sentence each."""
    effects = []
    if settings.uvm_hints is not None:
        effects.append(f"hints are {'on' if settings.uvm_hints else 'off'}")
    if settings.use_uvm is not None:
        effects.append(f"managed pools are {'wanted' if settings.use_uvm else 'not wanted'}")
    if settings.oversubscription_ratio is not None:
        effects.append(
            f"managed memory is capped at {settings.oversubscription_ratio} times the device's"
        )
    if settings.access_pattern is not None:
        effects.append(f"managed segments are placed {settings.access_pattern}")
    if settings.stage1_threshold is not None:
        effects.append(f"stage 2 begins below {settings.stage1_threshold:.0%} free device memory")
    if settings.stage1_min_bytes is not None:
        effects.append(f"or below {format_bytes(settings.stage1_min_bytes)} free")
    if settings.alloc_conf:
        effects.append(f"torch's allocator is told {settings.alloc_conf}")
    if settings.mixed_precision is not None:
        effects.append(f"precision `auto` means {settings.mixed_precision}")
    return (*effects, *settings.notices)


def table(environment: Mapping[str, str], settings: EnvironmentSettings) -> Iterator[str]:
    """Every variable with its value and meaning, then what will be done."""
    width = max(len(each.name) for each in VARIABLES)
    for each in VARIABLES:
        value = environment.get(each.name) or "(not set)"
        yield f"{each.name:<{width}}  {value}"
        yield f"{'':<{width}}    {each.meaning}"
    yield "What we will do:"
    effects = describe_effects(settings)
    for effect in effects or ("nothing of this is set: defaults hold, and a run file decides",):
        yield f"  - {effect}"


def export_lines(environment: Mapping[str, str], settings: EnvironmentSettings) -> Iterator[str]:
    """What `scripts/setup_gh200_env.sh` exports: the forks' defaults where nothing else is set."""
    ratio = _plain(settings.oversubscription_ratio)
    pattern = settings.access_pattern or DEFAULT_PATTERN
    for name in HINTS:
        yield _export(name, "0" if settings.uvm_hints is False else "1")
    yield _export(RATIO, ratio)
    yield _export(PATTERN, pattern)
    yield _export(ALLOC_CONFS[1], ",".join(_alloc_conf(environment, ratio, pattern)))
    yield _export(PRECISION, environment.get(PRECISION) or "bf16")


def _alloc_conf(environment: Mapping[str, str], ratio: str, pattern: str) -> Iterator[str]:
    """Our three keys first, then whatever else stood there, ours or torch's."""
    replaced = {
        "use_uvm": "True",
        "uvm_oversubscription_ratio": ratio,
        "uvm_access_pattern": pattern,
    }
    yield from (f"{key}:{value}" for key, value in replaced.items())
    for variable in (KEPT, ALLOC_CONFS[1]):
        conf = split_alloc_conf(environment.get(variable, ""), variable)
        yield from (f"{key}:{value}" for key, value in conf.ours.items() if key not in replaced)
        if conf.theirs:
            yield conf.theirs


def _plain(ratio: float | None) -> str:
    return DEFAULT_RATIO if ratio is None else str(ratio)


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"
