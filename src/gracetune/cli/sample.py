"""`gracetune sample`: generate images, clips and sounds from a run, a step or adapter files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cli.main import read_run
from gracetune.config.aliases import replace_trigger
from gracetune.config.dataset_schema import TRIGGER
from gracetune.config.environment import prefer_expandable_segments
from gracetune.config.parse_text import check_value, describe_type
from gracetune.config.schema import PlanSection, ValidationSection
from gracetune.errors import ConfigError
from gracetune.units import parse_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gracetune.config.schema import PromptSection, RunFile
    from gracetune.events.types import Event
    from gracetune.train.sample_targets import Variant

HELP = (
    "Generate images, clips and sounds from a run, a step of a run, or adapter files. Settings "
    "that are not given are those of the run's validation."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune sample`."""
    parser.add_argument(
        "targets",
        metavar="RUN|ADAPTER",
        nargs="*",
        help="the folder of a run, a run file, a step of a run (runs/x/adapters/step-000500), or "
        "adapter files of any tool, each with a strength if it is not 1 (lora.safetensors:0.8)",
    )
    parser.add_argument(
        "--model",
        metavar="FAMILY[=PATH]",
        help="model to sample with, such as flux=black-forest-labs/FLUX.1-dev (default: the run's)",
    )
    parser.add_argument(
        "--at",
        metavar="STEPS",
        help="steps of a run: numbers separated by commas, or `all`; 0 is the model before "
        "training (default: the newest)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="make a sheet of all steps of a run, or of several adapters, by prompts",
    )
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="can be repeated")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="a text file with a prompt in each line, or a JSON list as in validation.prompts",
    )
    parser.add_argument("--negative", metavar="TEXT", help="negative prompt")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the first prompt; the next has N + 1"
    )
    parser.add_argument("--size", metavar="WxH", help="width and height in pixels")
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps")
    parser.add_argument("--guidance", type=float, metavar="X", help="1 turns guidance off")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of a video, as 4n+1")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of a sound")
    parser.add_argument(
        "--image",
        metavar="FILE",
        nargs="+",
        action="append",
        help="input image, or several for one prompt, for models that animate or edit an image; "
        "once for all prompts, or once for each",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="default: samples in the run")
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="limit of the GPU memory, such as 12GB; weights beyond it stream from host memory",
    )


def run(args: argparse.Namespace) -> int:
    """Find the weights, check the settings, and generate."""
    prompts = _read_prompts(args)  # first: it needs no torch
    _section(args, _settings({}), prompts)
    from gracetune.train.sample_targets import find_targets

    prefer_expandable_segments()  # before torch is imported
    targets = find_targets(
        args.targets, args.model, args.at, compare=args.compare, read_run=read_run
    )
    settings = _limit_memory(targets.run, args.device_memory)
    prompts = _fill_trigger(prompts, settings)
    shown = prompts or settings.validation.prompts or _validated_prompts(targets.folder.parent)
    if not shown:
        raise ConfigError(
            "--prompt is missing, and there is no run whose validation has prompts. Give --prompt "
            '"..." (it can be repeated), or --prompts FILE.'
        )
    validation = _section(args, settings.validation, shown)
    shown = tuple(_without_replaced(one, args) for one in shown)
    from gracetune.events.console import LABEL_WIDTH, labelled, notice_lines
    from gracetune.events.types import Notice
    from gracetune.train.accelerator import start_accelerator
    from gracetune.train.prompts import SettingNames
    from gracetune.train.sample import sample_all

    def report(label: str, path: Path) -> None:
        print(labelled(label if len(label) < LABEL_WIDTH else "sample", str(path)), flush=True)

    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            for line in notice_lines(event):
                print(line, file=sys.stderr, flush=True)

    names = SettingNames(
        size="--size" if args.size else "validation.width and height",
        frames="--frames" if args.frames else "validation.frames",
        seconds="--seconds" if args.seconds else "validation.seconds",
        images="--image",
        negative="--negative" if args.negative else "validation.negative_prompt",
        off="",
    )
    print(labelled("sample", _summary(settings, targets.variants, validation, shown)), flush=True)
    sample_all(
        replace(targets, run=settings),
        validation,
        shown,
        start_accelerator(settings),
        args.out or targets.folder,
        emit,
        report,
        names,
    )
    if args.compare and len(targets.variants) == 1:
        print(labelled("comparison", _why_no_sheet(targets.variants[0])), flush=True)
    return 0


def _why_no_sheet(variant: Variant) -> str:
    """Return why `--compare` writes no sheet for a single set of weights, and what to do."""
    reason = f"no sheet is written, because there is nothing to compare {variant.label} with."
    step = variant.label.removeprefix("step ")
    if step.isdecimal():
        return f"{reason} --at 0,{step} compares it with the model before training."
    return f"{reason} Name several adapters, or several steps of a run with --at."


def _summary(
    settings: RunFile,
    variants: Sequence[object],
    validation: ValidationSection,
    prompts: Sequence[object],
) -> str:
    path = settings.model.path
    model = settings.model.family if path is None else f"{settings.model.family} ({path})"
    counts = f"{len(prompts)} {'prompt' if len(prompts) == 1 else 'prompts'}"
    if len(variants) > 1:
        counts += f" with each of {len(variants)} sets of weights"
    return (
        f"{model}, {counts}, {validation.sample_steps} steps, guidance {validation.guidance:g}, "
        f"seed {validation.seed}"
    )


def _read_prompts(args: argparse.Namespace) -> tuple[str | PromptSection, ...]:
    """Return the prompts of the command line, in order; empty if there are none."""
    prompts: list[object] = list(args.prompt or ())
    if args.prompts is not None:
        try:
            text = args.prompts.read_text(encoding="utf-8")
            if args.prompts.suffix == ".json":
                listed = json.loads(text)
                if not isinstance(listed, list):
                    raise TypeError(f"it is {describe_type(listed)}")
                prompts += listed
            else:
                lines = (line.strip() for line in text.splitlines())
                prompts += [line for line in lines if line and not line.startswith("#")]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"--prompts is {args.prompts}, which cannot be read: {error}. Give a text file "
                "with a prompt in each line, or a JSON list."
            ) from error
        if not prompts:
            raise ConfigError(f"--prompts is {args.prompts}, which has no prompts. Add some lines.")
    return _settings({"prompts": prompts}).prompts or () if prompts else ()


def _fill_trigger(
    prompts: tuple[str | PromptSection, ...], run: RunFile
) -> tuple[str | PromptSection, ...]:
    """Replace `[trigger]` in prompts by the trigger word of a run, as in validation prompts."""
    unfilled = [prompt for prompt in prompts if TRIGGER in str(prompt)]
    if not unfilled:
        return prompts
    words = list(dict.fromkeys(d.trigger_word.strip() for d in run.datasets if d.trigger_word))
    if len(words) != 1:
        several = f"the run's datasets have several trigger words ({', '.join(words)})"
        reason = several if words else "there is no run whose datasets have a trigger_word"
        shown = unfilled[0] if isinstance(unfilled[0], str) else unfilled[0].prompt
        raise ConfigError(
            f"--prompt is {shown!r}, which contains {TRIGGER}, but {reason}. Write the word itself "
            "in the prompt."
        )
    values = [each if isinstance(each, str) else each.model_dump() for each in prompts]
    filled = [replace_trigger(value, words[0]) for value in values]
    return _settings({"prompts": filled}).prompts or ()


def _validated_prompts(folder: Path) -> tuple[str, ...]:
    """Return the prompts of a run's last validation, which are captions if it has no prompts."""
    files = sorted(folder.glob("validation/step-*/prompts.json"))
    return tuple(json.loads(files[-1].read_text(encoding="utf-8"))) if files else ()


PROMPT_OPTIONS = {
    "negative": ("negative_prompt",),
    "seed": ("seed",),
    "size": ("width", "height"),
    "steps": ("steps",),
    "guidance": ("guidance",),
    "image": ("images",),
    "frames": ("frames",),
    "seconds": ("seconds",),
}
"""Option -> the settings of a prompt that it replaces."""


def _without_replaced(prompt: str | PromptSection, args: argparse.Namespace) -> str | PromptSection:
    """Return a prompt without the settings of its own that the command line replaces."""
    if isinstance(prompt, str):
        return prompt
    given = [option for option in PROMPT_OPTIONS if getattr(args, option) is not None]
    replaced = {name: None for option in given for name in PROMPT_OPTIONS[option]}
    return prompt.model_copy(update=replaced)


def _section(
    args: argparse.Namespace,
    section: ValidationSection,
    prompts: Sequence[str | PromptSection],
) -> ValidationSection:
    """Return the settings of samples: those of the run, replaced by those of the command line."""
    given: dict[str, object] = {
        "negative_prompt": args.negative,
        "seed": args.seed,
        "sample_steps": args.steps,
        "guidance": args.guidance,
        "frames": args.frames,
        "seconds": args.seconds,
    }
    if args.size is not None:
        width, _, height = args.size.lower().partition("x")
        if not (width.isdecimal() and height.isdecimal()):
            raise ConfigError(f"--size is {args.size!r}; write width and height as in 1024x768.")
        given |= {"width": int(width), "height": int(height)}
    changed = {name: value for name, value in given.items() if value is not None}
    images: tuple[tuple[str, ...], ...] | None = None
    if args.image:
        images = tuple(map(tuple, args.image))
        if len(images) == 1:
            images *= len(prompts)
    elif prompts is section.prompts:
        return _settings(section.model_dump() | changed)
    return _settings(section.model_dump() | changed | {"prompts": None, "images": images})


OPTIONS = {
    "prompts": "--prompts",
    "sample_steps": "--steps",
    "guidance": "--guidance",
    "frames": "--frames",
    "seconds": "--seconds",
    "width": "--size",
    "height": "--size",
    "images": "--image",
}
"""Setting of the section `validation` -> the option that sets it."""


def _settings(values: dict[str, object]) -> ValidationSection:
    """Check values of the section `validation`; an error names the option of the command line."""
    from pydantic import ValidationError

    for name, value in values.items():
        check_value(value, OPTIONS.get(name, f"--{name}"))
    try:
        return ValidationSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name, *rest = map(str, first["loc"])
        where = ".".join([OPTIONS.get(name, f"--{name}"), *rest[:1], *rest[2:]])
        raise ConfigError(f"{where} is {first['input']!r}: {first['msg'].lower()}.") from error


def _limit_memory(run: RunFile, limit: str | None) -> RunFile:
    """Set `plan.device_memory` of a run to the limit of the command line."""
    if limit is None:
        return run
    try:
        parse_bytes(limit)
    except ConfigError as error:
        raise ConfigError(f"--device-memory: {error}") from error
    plan = PlanSection() if isinstance(run.plan, str) else run.plan
    return run.model_copy(update={"plan": plan.model_copy(update={"device_memory": limit})})
