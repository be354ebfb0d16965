"""`gracetune init FOLDER`: look at the data, ask what to train, and write a commented run file.

Every question has a flag, so that the command works in scripts; `--yes` takes all defaults. The
data is read with the code of training (`data/dataset_report.py`), the values come from
`config/presets.py`, and the planner says whether the run fits, without weights or a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import ValidationError

from gracetune.atomic_files import write_text
from gracetune.config.checks import check_run
from gracetune.config.dataset_schema import TRIGGER, DatasetSection
from gracetune.config.load import load_run_text
from gracetune.config.parse_text import FORMATS_BY_SUFFIX
from gracetune.config.presets import (
    FAMILY_PRESETS,
    GOAL_PRESETS,
    GOALS,
    MEMORY_SIZES,
    WAN_FPS,
    RunRequest,
    SizePreset,
    choose_settings,
    resolution_setting,
    run_file_text,
    size_preset,
)
from gracetune.data import buckets, images
from gracetune.data.captions import caption_orders
from gracetune.data.dataset import NOUNS, list_dataset
from gracetune.data.dataset_report import check_dataset, folder_kinds
from gracetune.data.source import walk_folder
from gracetune.errors import ConfigError, DataError
from gracetune.events.console import console_sink
from gracetune.models.registry import FAMILIES
from gracetune.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gracetune.config.presets import Goal, Setting
    from gracetune.config.schema import RunFile
    from gracetune.data.dataset_report import DatasetReport
    from gracetune.memory.platform import Machine, Platform
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.result import Plan

HELP = "Look at a folder of images, videos or audio, and write a run file that trains on it."
GB = 10**9
OTHER_GPU = "24GB"
"""Memory of the GPU that a run file is written for if this machine has none."""
CAPTION_SUFFIXES = ("txt", "caption", "tags", "json")
BEFORE = ("before", "source", "control", "input", "reference", "original", "conditioning")
AFTER = ("after", "target", "output", "edited", "result", "images")
"""Usual names of the folders with the images before and after an edit."""
MAX_PROMPT_WORDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and a flag for every question."""
    parser.add_argument("folder", nargs="?", help="folder of the images, videos or audio files")
    parser.add_argument("--family", choices=sorted(FAMILY_PRESETS), help="model family to train")
    parser.add_argument("--goal", choices=GOALS, help="what the adapter is to learn")
    parser.add_argument("--memory", metavar="SIZE", help="memory of the GPU, such as 24GB")
    parser.add_argument("--trigger", metavar="WORD", help="word that stands for what is trained")
    parser.add_argument(
        "--caption", metavar="TEXT", help="one caption for all files, instead of theirs"
    )
    parser.add_argument("--control", metavar="FOLDER", help="images before an edit, same names")
    parser.add_argument("--out", metavar="FILE", help="run file to write (.yaml)")
    parser.add_argument("--yes", action="store_true", help="ask nothing and take the defaults")
    parser.add_argument("--force", action="store_true", help="overwrite the run file")
    parser.add_argument("--no-plan", action="store_true", help="do not check whether it fits")


def run(args: argparse.Namespace) -> int:
    """Ask what is not given, write the run file and print what to do next."""
    from gracetune.memory.platform import open_machine

    return init(args, open_machine, _read_answer)


def _read_answer(question: str) -> str:
    answer = input(question)
    if not sys.stdin.isatty():
        print(answer)  # a terminal has shown it already
    return answer


def init(
    args: argparse.Namespace, open_machine: Callable[[], Machine], read: Callable[[str], str]
) -> int:
    """Write a run file; `read` asks the user a question and returns the answer."""
    questions = Questions(read, args.yes)
    if args.out is not None:
        _check_out(Path(args.out), args.force)
    folder = args.folder or questions.ask("Folder with your images, videos or audio", None)
    pair = find_pair(Path(folder).expanduser(), args.control)
    platform = open_machine().platform
    report, caption = _look(pair, args.caption)
    print(*_summary(report, pair), sep="\n")
    goal = _goal(args, questions, report, pair)
    if goal != "edit" and pair.control is not None:
        print(f"  {pair.control} is not used, because the goal is {goal}.")
        pair = Pair(pair.target)
    family = _family(args, questions, report, pair, platform)
    memory_gb = _memory(args, questions, family, platform)
    trigger = _trigger(args, questions, goal)
    if caption is None and report.captions.missing:
        hint = trigger or ("a video" if report.kind == "video" else f"an {report.kind}")
        caption = questions.ask("Your files have no captions. One caption for all", hint)
    default = f"{pair.target.resolve().name}.yaml"
    out = Path(args.out or questions.ask("Run file to write", default))
    _check_out(out, args.force)
    request = RunRequest(
        folder=str(pair.target),
        family=family,
        goal=goal,
        memory_gb=memory_gb,
        output_dir=_free_folder(out),
        num_samples=len(report.samples),
        one_caption=caption,
        trigger_word=trigger,
        has_fp8=platform.device >= 0 and _has_fp8(platform.device),
    )
    request = _with_data(request, report, pair)
    planned = family != "tiny" and FAMILIES[family].has_planner_shapes and not args.no_plan
    found = _fitting(request, report, platform, planned)
    write_text(out, found.text)
    print("", *_after(found, out, request, platform), sep="\n")
    return 0


class Questions:
    """Asks the user for what no flag gives, with a default for each question."""

    def __init__(self, read: Callable[[str], str], takes_defaults: bool) -> None:
        self._read = read
        self._takes_defaults = takes_defaults

    def ask(self, text: str, default: str | None, choices: Mapping[str, str] | None = None) -> str:
        """Return the answer, or the default for an empty one; asks again for an invalid one.

        `choices` has the allowed answers, if there are such, with a description of each.
        """
        if self._takes_defaults and default is not None:
            return default
        if self._takes_defaults:
            raise ConfigError(f"{text}: --yes has no default for it. Pass it as an argument.")
        width = max(map(len, choices), default=0) if choices else 0
        for name, description in (choices or {}).items():
            print(f"  {name:<{width}}  {description}")
        while True:
            try:
                answer = self._read(f"{text}{'' if default is None else f' [{default}]'}: ")
            except EOFError:
                raise ConfigError(
                    f"{text}: the input ended before an answer. Pass it as an argument, or --yes."
                ) from None
            answer = answer.strip() or (default or "")
            if answer and (not choices or answer in choices):
                return answer
            print(
                f"  Please choose one of: {', '.join(choices)}." if choices else "  Please answer."
            )


def _check_out(out: Path, force: bool) -> None:
    if out.suffix.lower() not in (".yaml", ".yml"):
        known = ", ".join(FORMATS_BY_SUFFIX)
        raise ConfigError(
            f"--out is {str(out)!r}; init writes YAML, because JSON has no comments. Use a name "
            f"that ends in .yaml (run files may be {known})."
        )
    if out.exists() and not force:
        raise ConfigError(f"{out} exists. Choose another name with --out, or pass --force.")


# Looking at the data


@dataclass(frozen=True, slots=True)
class Pair:
    """The folder of the samples, and that of the images before the edit, if there is one."""

    target: Path
    control: Path | None = None


def find_pair(folder: Path, control: str | None) -> Pair:
    """Find the folder with the images before an edit: named, inside the folder, or next to it.

    A folder is found by its name (`BEFORE`) and by the names of its images.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{str(folder)!r} {what}. Name a folder of images, videos or audio files.")
    if control is not None:
        return Pair(folder, Path(control).expanduser())
    if "image" not in folder_kinds(folder):
        return Pair(folder)
    if not any(_image_stems(folder, recursive=False)):
        inner = [each for each in sorted(folder.iterdir()) if each.is_dir()]
        inner = [each for each in inner if not each.name.startswith(".")]
        roles = {_role(each): each for each in inner}
        if len(inner) == 2 and {"before", "after"} == set(roles):
            before, after = roles["before"], roles["after"]
            if set(_image_stems(after)) <= set(_image_stems(before)):
                return Pair(after, before)
        return Pair(folder)
    stems = set(_image_stems(folder))
    for sibling in sorted(folder.resolve().parent.iterdir()):
        is_other = sibling.is_dir() and sibling != folder.resolve() and _role(sibling) == "before"
        if is_other and stems <= set(_image_stems(sibling)):
            return Pair(folder, folder.parent / sibling.name)
    return Pair(folder)


def _role(folder: Path) -> str:
    words = folder.name.lower().replace("-", "_").split("_")
    if any(word in BEFORE for word in words):
        return "before"
    return "after" if any(word in AFTER for word in words) else ""


def _image_stems(folder: Path, recursive: bool = True) -> Iterator[str]:
    for name in walk_folder(folder):
        path = PurePosixPath(name)
        if path.suffix.lower() in images.EXTENSIONS and (recursive or len(path.parts) == 1):
            yield str(path.with_suffix(""))


def _look(pair: Pair, caption: str | None) -> tuple[DatasetReport, str | None]:
    """Read the data; return the report, and the caption for all samples if they need one."""
    kinds = folder_kinds(pair.target)
    if not kinds:
        raise DataError(f"{pair.target} has no images, videos or audio files. Name another folder.")
    section = DatasetSection(
        id="data",
        dataset_type=next(iter(kinds)),
        instance_data_dir=str(pair.target),
        conditioning_data_dir=None if pair.control is None else str(pair.control),
        fps=WAN_FPS if next(iter(kinds)) == "video" else None,
        frames=1,
        seconds=0.1,
    )
    if caption is not None:
        update = {"caption_strategy": "instanceprompt", "instance_prompt": caption}
        section = section.model_copy(update=update)
    else:
        section = _with_captions(section)
    emit = console_sink(sys.stderr, is_terminal=False).handle
    report = check_dataset(section, 0, 1, emit)
    problems = report.problems
    if len(report.captions.missing) == len(report.samples) + len(report.broken):
        problems = tuple(text for text in problems if text not in report.caption_problems)
    if problems:
        raise DataError(
            "\n".join(problems) + f"\nRun `gracetune data check {pair.target}` for details."
        )
    return report, caption


def _with_captions(section: DatasetSection) -> DatasetSection:
    """Set `caption_extension` to that of the caption files, if the samples have some."""
    missing: dict[str, int] = {}
    for suffix in CAPTION_SUFFIXES:
        changed = section.model_copy(update={"caption_extension": suffix})
        missing[suffix] = len(list_dataset(changed, 0, lambda _: None).captions.missing)
        if not missing[suffix]:
            return changed
    fewest = min(missing, key=lambda suffix: missing[suffix])
    return section.model_copy(update={"caption_extension": fewest})


def _summary(report: DatasetReport, pair: Pair) -> list[str]:
    """Describe the data in a few lines."""
    samples, facts = report.samples, report.captions
    size = f"{len(samples)} {NOUNS[report.kind]}"
    if report.kind != "audio":
        edges = [f"{s.width}x{s.height}" for s in sorted(samples, key=lambda s: s.width * s.height)]
        size += f", {edges[0]}" + (f" to {edges[-1]}" if edges[-1] != edges[0] else "")
    if report.kind != "image":
        size += f", {sum(sample.seconds for sample in samples):.4g} s in all"
    captions = f"{'tags' if facts.are_tags else 'text'}, up to {facts.longest[1]} words"
    lines = [f"data       {size} in {pair.target}"]
    lines.append(f"captions   {'none' if facts.missing else captions}")
    if pair.control is not None:
        lines.append(f"pairs      each has an image before the edit in {pair.control}")
    copies = sum(len(group) - 1 for group in (*report.exact, *report.near))
    notes = [f"{copies} copies or near copies"] if copies else []
    notes += [f"{len(report.broken)} unreadable files"] if report.broken else []
    notes += [f"{len(facts.empty)} empty captions"] if facts.empty else []
    if notes:
        lines.append(f"look at    {', '.join(notes)}: gracetune data check {pair.target}")
    about = f"dataset {report.section.id!r}: "  # there is only one
    return lines + [f"note       {text.removeprefix(about)}" for text in report.warnings]


# Questions


def _goal(
    args: argparse.Namespace, questions: Questions, report: DatasetReport, pair: Pair
) -> Goal:
    default: Goal = "edit" if pair.control is not None else "style"
    default = "video" if report.kind == "video" else default
    kinds = [goal for goal in GOALS if (goal == "video") == (report.kind == "video")]
    choices: dict[str, str] = {goal: GOAL_PRESETS[goal].title for goal in kinds}
    answer = args.goal or questions.ask("What should it learn", default, choices)
    goal = next(goal for goal in GOALS if goal == answer)
    if goal == "edit" and pair.control is None:
        raise DataError(
            "The goal edit needs two folders with images of the same names, such as before and "
            "after. Pass the folder of the results, and --control with the other folder."
        )
    if (goal == "video") != (report.kind == "video"):
        raise DataError(
            f"The goal is {goal}, but {report.where} has {NOUNS[report.kind]}. Choose "
            f"--goal {'video' if report.kind == 'video' else 'style'}, or another folder."
        )
    return goal


def _family(
    args: argparse.Namespace,
    questions: Questions,
    report: DatasetReport,
    pair: Pair,
    platform: Platform,
) -> str:
    known = [name for name, preset in FAMILY_PRESETS.items() if report.kind in preset.kinds]
    if pair.control is not None:
        known = [name for name in known if FAMILY_PRESETS[name].edit_model is not None]
    default = "tiny" if platform.device < 0 and "tiny" in known else known[0]
    choices = {name: FAMILY_PRESETS[name].title for name in known}
    family: str = args.family or questions.ask("Model family", default, choices)
    if family not in known:
        what = "edits" if pair.control is not None else NOUNS[report.kind]
        raise ConfigError(
            f"--family is {family}, which is not trained on {what}. Use one of: {', '.join(known)}."
        )
    return family


def _memory(
    args: argparse.Namespace, questions: Questions, family: str, platform: Platform
) -> float:
    """Return the memory of the GPU to train on, in GB."""
    if args.memory is not None:
        nbytes = parse_bytes(f"{args.memory}GB" if args.memory.isdigit() else args.memory)
        if nbytes < GB:
            raise ConfigError(f"--memory is {args.memory}; a GPU has at least 1GB. Write 24GB.")
        return nbytes / GB
    if family == "tiny":
        return float(MEMORY_SIZES[0])
    if platform.device >= 0:
        answer = questions.ask("Memory of your GPU", f"{platform.device_bytes / GB:.3g}GB")
    else:
        print(
            "  There is no GPU here, so this is for another machine. --memory sets the size of its "
            f"GPU ({OTHER_GPU} by default)."
        )
        answer = questions.ask("Memory of its GPU", OTHER_GPU)
    return parse_bytes(f"{answer}GB" if answer.isdigit() else answer) / GB


def _trigger(args: argparse.Namespace, questions: Questions, goal: Goal) -> str | None:
    word: str | None = args.trigger
    if word is None and GOAL_PRESETS[goal].needs_trigger:
        word = questions.ask("Trigger word, a rare word that stands for it", "ohwx")
    if not word:
        return None
    try:
        return DatasetSection(trigger_word=word).trigger_word
    except ValidationError:
        raise ConfigError(
            f"--trigger is {word!r}; it must be a word that is not empty and does not contain "
            f"{TRIGGER}."
        ) from None


# Writing


@dataclass(frozen=True, slots=True)
class _Found:
    """The run file that is written, and its plan."""

    text: str
    run: RunFile
    notes: tuple[str, ...]
    """What was lowered to make it fit, or why it does not."""
    plan: Plan | None = None


def _with_data(request: RunRequest, report: DatasetReport, pair: Pair) -> RunRequest:
    """Add the facts about the data to a request: sizes, lengths and captions."""
    samples, section = report.samples, report.section
    words = DatasetSection(trigger_word=request.trigger_word)
    texts: dict[str, str] = {}
    for sample in samples:
        text = request.one_caption if request.one_caption is not None else sample.caption
        text = caption_orders(text, words, "")[0]
        if text and len(text.split()) <= MAX_PROMPT_WORDS:
            texts.setdefault(text, sample.key)
    chosen = _unlike(list(texts))
    controls: tuple[str, ...] = ()
    if pair.control is not None:
        by_stem = {str(PurePosixPath(n).with_suffix("")): n for n in walk_folder(pair.control)}
        stems = [str(PurePosixPath(texts[text]).with_suffix("")) for text in chosen]
        controls = tuple(str(pair.control / by_stem[stem]) for stem in stems)
    frames = [0]
    if report.kind == "video":
        frames = [buckets.available_frames(sample, section) for sample in samples]
    lengths = [sample.seconds for sample in samples]
    return replace(
        request,
        kind=report.kind,
        typical_edge=int(_most_reach([math.isqrt(s.width * s.height) for s in samples])),
        frames=(min(frames), int(_most_reach(frames))),
        seconds=(min(lengths), _most_reach(lengths)),
        captions=chosen,
        caption_extension=section.caption_extension if request.one_caption is None else "txt",
        are_tags=report.captions.are_tags,
        control_folder=None if pair.control is None else str(pair.control),
        control_images=controls,
    )


def _unlike(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the first text and the one that has the fewest words in common with it."""
    if len(texts) < 2:
        return tuple(texts)
    first, *others = texts
    words = set(first.lower().split())
    return first, min(others, key=lambda text: len(words & set(text.lower().split())))


def _most_reach(values: Sequence[float]) -> float:
    """Return the value that two of three samples reach."""
    return sorted(values)[len(values) // 3]


def _has_fp8(device: int) -> bool:
    import torch

    from gracetune.adapters.compute.fp8_linear import MIN_FP8_CAPABILITY

    return torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY


def _free_folder(out: Path) -> str:
    """Return an output folder that does not exist yet, so that no other run is continued."""
    name, number = f"runs/{out.stem}", 1
    while Path(name).exists():
        number += 1
        name = f"runs/{out.stem}-{number}"
    return name


def _fitting(
    request: RunRequest, report: DatasetReport, platform: Platform, planned: bool
) -> _Found:
    """Return the run file of the preset, or of the first smaller one that fits in memory."""
    from gracetune.plan.search import PlanError

    first = size_preset(request)
    reason = ""
    for size in _ladder(first) if planned else [first]:
        found = _compose(request, report, size)
        if not planned:
            return found
        try:
            plan = _plan(found.run, request, platform)
        except PlanError as error:
            reason = reason or str(error)
            continue
        lowered = "" if size == first else f"lowered to fit: {reason}"
        return replace(found, plan=plan, notes=(lowered,) if lowered else ())
    note = f"warning: it does not fit: {reason}"
    return replace(_compose(request, report, size), notes=(note,))


def _ladder(size: SizePreset) -> Iterator[SizePreset]:
    """Yield a preset and then smaller ones: first smaller batches, then fewer frames and pixels."""
    yield size
    while size.batch_size > 1:
        size = replace(size, batch_size=size.batch_size // 2)
        yield size
    while size.frames > 17:
        size = replace(size, frames=(size.frames - 1) // 8 * 4 + 1)
        yield size
    while size.resolution > 512:
        size = replace(size, resolution=size.resolution - 256)
        yield size


def _compose(request: RunRequest, report: DatasetReport, size: SizePreset) -> _Found:
    preset = FAMILY_PRESETS[request.family]
    if request.kind != "audio":
        resolution = resolution_setting(request, size).value
        section = report.section.model_copy(update={"resolution": resolution})
        plan = buckets.assign(report.samples, section, preset.pixel_step)
        width, height, *_ = max(plan.buckets, key=lambda shape: len(plan.buckets[shape]))
        request = replace(request, sample_size=(width, height))
    settings = choose_settings(request, size)
    text = run_file_text(settings, _heading(request, settings))
    loaded = load_run_text(text, "yaml", "run file", environment={})
    check_run(loaded.run)
    assert not loaded.notices, f"init wrote a file with notices: {loaded.notices}"
    return _Found(text, loaded.run, ())


def _heading(request: RunRequest, settings: Sequence[Setting]) -> list[str]:
    model = next((s.value for s in settings if s.key == "model.path"), request.family)
    what = f"{request.goal}, {request.num_samples} {NOUNS[request.kind]}, {model}"
    gpu = "" if request.family == "tiny" else f", a GPU of {request.memory_gb:.3g} GB"
    return [
        f"A LoRA: {what}{gpu}.",
        "Written by `gracetune init`. Change what you like; `gracetune schema` explains every key.",
    ]


def _plan(run: RunFile, request: RunRequest, platform: Platform) -> Plan:
    """Plan for a machine with this much GPU memory; its speed is not that of the user's GPU."""
    from gracetune.cli.plan import predict
    from gracetune.memory.platform import Link, open_machine

    names = {Link.COHERENT: "gh200-144", Link.INTEGRATED: "gb10"}
    host = f"{platform.host_bytes}b" if platform.device >= 0 else None
    args = argparse.Namespace(
        machine=names.get(platform.link, "h200-pcie"),
        hbm=f"{int(request.memory_gb * GB)}b",
        host_memory=host,
        gpus=1,
        gpus_per_machine=None,
        samples=request.num_samples,
    )
    # Compiled blocks need no more memory than eager ones, and take longer to trace.
    section = {"compile": "never", "batch": "fixed"}
    planned = run.model_copy(update={"plan": type(run).model_validate({"plan": section}).plan})
    print("checking whether it fits ...", file=sys.stderr)
    result, _ = predict(planned, args, open_machine, _no_measurement)
    return result.best


def _no_measurement(device: int, family: str) -> MachineRates:
    raise AssertionError(f"a known machine was named; no rates of device {device} for {family}")


def _after(found: _Found, out: Path, request: RunRequest, platform: Platform) -> list[str]:
    """Return the last lines: what was written, whether it fits, and the next commands."""
    train, data = found.run.train, found.run.datasets[0]
    shape = f"{data.resolution} pixels, " if request.kind != "audio" else ""
    lines = [
        f"wrote      {out}",
        f"           {train.max_train_steps} steps, {shape}batch {train.batch_size}, rank "
        f"{found.run.adapter.rank if found.run.adapter else 0}, rate {found.run.optimizer.lr:g}",
    ]
    if found.plan is not None:
        streamed = len(found.plan.streamed)
        how = f"; {streamed} of {len(found.plan.blocks)} blocks stream" if streamed else ""
        lines.append(
            f"plan       needs {format_bytes(found.plan.device.total)} of GPU memory and "
            f"{format_bytes(found.plan.host.total)} of host memory{how}"
        )
    lines += [f"note       {note}" for note in found.notes]
    lines += ["next"]
    if found.plan is not None:
        here = platform.device >= 0
        named = f" --machine h200-pcie --hbm {request.memory_gb:.3g}GB --host-memory 128GB"
        machine = "" if here else f"{named}  # the RAM of that machine"
        lines.append(f"  gracetune plan {out}{machine}")
    return [*lines, f"  gracetune train {out}"]
