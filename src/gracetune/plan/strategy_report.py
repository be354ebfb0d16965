"""Print the comparison of strategies: the report of `gracetune plan --strategies`, and its JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from gracetune.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.plan.report import ReportHeading
    from gracetune.plan.strategies import Strategy, StrategyAdvice, StrategyInputs

COLUMNS = (
    "strategy",
    "s/step",
    "samples/s",
    "device",
    "host",
    "network",
    "link",
    "limit",
)
WIDTH = 100


def strategy_lines(
    advice: StrategyAdvice, heading: ReportHeading, inputs: StrategyInputs
) -> Iterator[str]:
    """Yield the lines that `gracetune plan --strategies` prints."""
    simulated = "simulated from published figures" if inputs.simulated else "measured now"
    yield f"{heading.model}, {heading.sample} a sample, on {heading.machine}, {simulated}"
    budget = heading.budget
    yield (
        f"within {format_bytes(budget.device_nbytes)} of memory per GPU and "
        f"{format_bytes(budget.host_nbytes)} of host memory per machine"
    )
    yield from (f"note: {note}" for note in (*heading.notes, *advice.notes))
    yield ""
    yield from strategy_table(advice.strategies)
    yield ""
    yield "GiB: device per GPU, host per machine; GB per step and GPU: network received, link both"
    yield (
        f"ways. Staging: every machine reads {format_bytes(inputs.staged_nbytes)} of weights and "
        f"encoded data in {format_seconds(advice.staging_s)}."
    )
    yield ""
    chosen = advice.recommended
    name = "none" if chosen is None else chosen.name
    yield from _wrapped(f"recommended: {name}, because {advice.reason}.")
    if chosen is not None and chosen.settings:
        settings = ", ".join(f"{key}: {_value(value)}" for key, value in chosen.settings.items())
        yield f"set: {settings}"
    for warning in advice.warnings:
        yield from _wrapped(f"warning: {warning}")


def strategy_table(strategies: Sequence[Strategy]) -> Iterator[str]:
    """Yield the lines of the table, with a line of details after each strategy that has some."""
    yield (
        f"{'strategy':<17}{'s/step':>8}{'samples/s':>11}{'device':>8}{'host':>8}{'network':>9}"
        f"{'link':>8}  limit"
    )
    for one in strategies:
        if one.plan is None:
            yield f"{shown_name(one):<17}does not fit: {one.why_not}"
            continue
        cells = row(one)
        yield (
            f"{cells['strategy']:<17}{cells['s/step']:>8}{cells['samples/s']:>11}{cells['device']:>8}"
            f"{cells['host']:>8}{cells['network']:>9}{cells['link']:>8}  {one.limit}"
        )
        if one.detail:
            yield f"  {one.detail}"


def shown_name(strategy: Strategy) -> str:
    """Return the name of a strategy, in brackets if the run cannot use it."""
    return f"({strategy.name})" if strategy.refused else strategy.name


def row(strategy: Strategy) -> dict[str, str]:
    """Return a strategy's figures as texts, by the names in `COLUMNS`."""
    if strategy.plan is None:
        cells = dict.fromkeys(COLUMNS, "-")
        return cells | {"strategy": shown_name(strategy), "limit": "does not fit"}
    return {
        "strategy": shown_name(strategy),
        "s/step": f"{strategy.step_s:.3f}",
        "samples/s": f"{strategy.samples_per_second:.2f}",
        "device": f"{strategy.plan.device.total / GIB:.1f}",
        "host": f"{strategy.host_nbytes / GIB:.1f}",
        "network": f"{strategy.network_nbytes / 1e9:.1f}",
        "link": f"{strategy.link_nbytes / 1e9:.1f}",
        "limit": strategy.limit,
    }


def strategy_json(
    advice: StrategyAdvice, heading: ReportHeading, inputs: StrategyInputs
) -> dict[str, object]:
    """Return the report as a dictionary for JSON; sizes are in bytes."""
    return {
        "model": heading.model,
        "sample": heading.sample,
        "machine": heading.machine,
        "gpus": inputs.cluster.num_gpus,
        "machines": inputs.cluster.num_machines,
        "budget": asdict(heading.budget),
        "network": asdict(inputs.cluster.network),
        "notes": [*heading.notes, *advice.notes],
        "strategies": [_strategy_json(one) for one in advice.strategies],
        "recommended": None if advice.recommended is None else advice.recommended.name,
        "reason": advice.reason,
        "warnings": list(advice.warnings),
        "staging_s": advice.staging_s,
        "staged_nbytes": inputs.staged_nbytes,
    }


def _strategy_json(strategy: Strategy) -> dict[str, object]:
    return asdict(strategy) | {
        "fits": strategy.plan is not None,
        "device_total": None if strategy.plan is None else strategy.plan.device.total,
    }


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)
