"""Describe a dataset as training would see it: `gracetune data check` and `gracetune init` use it.

`check_dataset` calls the functions that a run calls when it starts, so that the report cannot
differ from training. An error that would stop a run becomes a problem in the report.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from statistics import median
from typing import TYPE_CHECKING

from gracetune.data import buckets
from gracetune.data.captions import require_captions
from gracetune.data.data_quality import (
    MIN_FACTOR,
    Enlarged,
    enlarged,
    exact_duplicates,
    near_duplicates,
)
from gracetune.data.dataset import (
    EXTENSIONS,
    NOUNS,
    CorruptionLog,
    address_kind,
    list_dataset,
    read_samples,
)
from gracetune.data.source import printable, walk_folder
from gracetune.errors import GracetuneError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.buckets import BucketPlan
    from gracetune.data.dataset import Corruption, ListedDataset
    from gracetune.data.sample import Kind, Sample
    from gracetune.events.dispatcher import Emit
    from gracetune.events.types import Event

MAX_LISTED = 20
"""Number of files that the text report lists for each finding; JSON lists all."""
MAX_TAGS = 10
TAG_WORDS = 3
"""Captions whose comma-separated parts have at most this many words on average are tags."""
LABEL_WIDTH = 11


@dataclass(frozen=True, slots=True)
class CaptionFacts:
    """The captions of a dataset, as they are trained."""

    missing: tuple[str, ...] = ()
    """Keys of the samples without a caption."""
    empty: tuple[str, ...] = ()
    longest: tuple[str, int] = ("", 0)
    """Key of the sample with the longest caption, and its number of words."""
    too_long: tuple[str, ...] | None = None
    """Keys of the samples whose caption is cut; None: there is no tokenizer to count with."""
    are_tags: bool = False
    """True if most captions are comma-separated tags rather than sentences."""
    tags: tuple[tuple[str, int], ...] = ()
    """The most frequent tags, with the number of captions that have them."""
    orders: int = 1
    """Largest number of orders of a caption's tags (`caption_shuffle`)."""


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Everything that `gracetune data check` reports of a dataset."""

    section: DatasetSection
    step: int
    """Number of pixels that bucket edges are multiples of."""
    where: str
    """Description of the source, such as its folder."""
    num_files: int = 0
    suffixes: Mapping[str, int] | None = None
    """Number of samples by suffix."""
    samples: tuple[Sample, ...] = ()
    """The readable samples."""
    plan: BucketPlan | None = None
    captions: CaptionFacts = CaptionFacts()
    enlarged: tuple[Enlarged, ...] = ()
    exact: tuple[tuple[str, ...], ...] = ()
    near: tuple[tuple[str, ...], ...] = ()
    broken: tuple[Corruption, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings that training prints about the files."""
    problems: tuple[str, ...] = ()
    """Errors with which training would stop."""
    caption_problems: tuple[str, ...] = ()
    """Those of `problems` that are about samples without a caption."""

    @property
    def kind(self) -> Kind:
        """Medium of the samples."""
        return self.section.dataset_type


def folder_kinds(folder: Path) -> dict[Kind, int]:
    """Return the number of images, videos and audio files in a folder, the most frequent first."""
    suffixes = Counter(PurePosixPath(name).suffix.lower() for name in walk_folder(folder))
    kinds: tuple[Kind, ...] = ("image", "video", "audio")
    counts = {kind: sum(suffixes[suffix] for suffix in EXTENSIONS[kind]) for kind in kinds}
    return dict(sorted(((k, n) for k, n in counts.items() if n), key=lambda pair: -pair[1]))


def is_local_folder(address: str) -> bool:
    """Return whether an address is a folder of files, not an archive, table or remote address."""
    return "://" not in address and address_kind(address) == "folder"


def check_dataset(
    section: DatasetSection,
    index: int,
    step: int,
    emit: Emit,
    output_dir: Path | None = None,
    seed: int = 0,
    is_too_long: Callable[[Sequence[str]], list[bool]] | None = None,
) -> DatasetReport:
    """Read a whole dataset as a run would, and return what it finds.

    `step` is the number of pixels that the model's edges are multiples of. `emit` gets the
    progress of reading. `is_too_long` tells which captions have more tokens than the model reads.
    """
    warnings: list[str] = []
    problems: list[str] = []

    def collect(event: Event) -> None:
        if not isinstance(event, Notice):
            emit(event)
        elif event.level == "warning":
            warnings.append(event.text)

    if section.type == "in_memory":  # the same samples, without reading them into shared memory
        section = section.model_copy(update={"type": "local"})
    report = DatasetReport(section, section.bucket_step or step, str(section.instance_data_dir))
    try:
        listed = list_dataset(section, index, collect, output_dir)
    except GracetuneError as error:
        return replace(report, problems=(str(error),), warnings=tuple(warnings))
    report = replace(
        report,
        where=listed.source.describe(),
        num_files=len(listed.names),
        suffixes=Counter(PurePosixPath(key).suffix.lower() for key in listed.keys),
    )
    with _Collected(problems):
        require_captions(listed.captions, listed.source, section, listed.setting)
    caption_problems = tuple(problems)
    log = CorruptionLog(lambda _: None)  # `broken` has every sample that it skips
    opened = None
    with _Collected(problems):
        opened = read_samples(_with_every_sample(listed), collect, log, None, seed, True)
    samples = opened.samples if opened is not None else ()
    plan = None
    with _Collected(problems):
        log.check(section.id, len(listed.keys), section.max_corruption_rate)
    with _Collected(problems):
        plan = buckets.assign(samples, section, step) if samples else None
    return replace(
        report,
        samples=samples,
        plan=plan,
        captions=_caption_facts(listed, samples, is_too_long),
        enlarged=tuple(enlarged(plan)) if plan is not None else (),
        exact=tuple(exact_duplicates(samples)),
        near=tuple(near_duplicates(samples, opened.thumbnails)) if opened is not None else (),
        broken=log.entries,
        warnings=tuple(warnings),
        problems=tuple(dict.fromkeys(problems)),
        caption_problems=caption_problems,
    )


class _Collected:
    """Context manager that turns a user's mistake into a line of `problems`."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, GracetuneError):
            self._problems.append(str(error))
            return True
        return False


def _with_every_sample(listed: ListedDataset) -> ListedDataset:
    """Give samples without a caption an empty one, and allow any number of unreadable ones."""
    captions = listed.captions
    texts = {k: captions.texts.get(k, "") for k in listed.keys if k not in captions.unreadable}
    return replace(
        listed,
        captions=replace(captions, texts=texts),
        section=listed.section.model_copy(update={"max_corruption_rate": 1.0}),
    )


def _caption_facts(
    listed: ListedDataset,
    samples: Sequence[Sample],
    is_too_long: Callable[[Sequence[str]], list[bool]] | None,
) -> CaptionFacts:
    missing = frozenset(listed.captions.missing)
    captioned = [sample for sample in samples if sample.key not in missing]
    parts = [[tag.strip() for tag in s.caption.split(",") if tag.strip()] for s in captioned]
    tags = [tag for each in parts for tag in set(each)]
    words = sum(len(tag.split()) for tag in tags)
    with_tags = sum(len(each) >= TAG_WORDS for each in parts)
    are_tags = bool(tags) and words / len(tags) <= TAG_WORDS and 2 * with_tags > len(captioned)
    lengths = {sample.key: len(sample.caption.split()) for sample in captioned}
    longest = max(lengths, key=lambda key: lengths[key], default="")
    too_long = None
    if is_too_long is not None:
        flags = is_too_long([sample.caption for sample in captioned])
        too_long = tuple(s.key for s, long in zip(captioned, flags, strict=True) if long)
    return CaptionFacts(
        listed.captions.missing,
        tuple(sample.key for sample in captioned if not sample.caption),
        (longest, lengths.get(longest, 0)),
        too_long,
        are_tags,
        tuple((t, n) for t, n in Counter(tags).most_common(MAX_TAGS) if n > 1) if are_tags else (),
        max((len(sample.captions) for sample in captioned), default=1),
    )


# Printing


def report_json(report: DatasetReport) -> dict[str, object]:
    """Return a report as a dictionary for JSON, with all files of each finding."""
    captions = asdict(report.captions)
    captions["longest"] = dict(zip(("key", "words"), report.captions.longest, strict=True))
    return {
        "dataset": report.section.id,
        "where": report.where,
        "kind": report.kind,
        "files": report.num_files,
        "samples": len(report.samples),
        "suffixes": dict(report.suffixes or {}),
        "resolution": report.section.resolution,
        "step": report.step,
        **(buckets.as_json(report.plan) if report.plan is not None else {}),
        "captions": captions,
        "enlarged": [asdict(one) for one in report.enlarged],
        "exact_duplicates": report.exact,
        "near_duplicates": report.near,
        "broken": [{"key": one.key, "reason": one.reason} for one in report.broken],
        "warnings": report.warnings,
        "problems": report.problems,
    }


def report_lines(report: DatasetReport) -> list[str]:
    """Return a report as lines of text."""
    parts = (
        ("dataset", [report.section.id]),
        ("data", [f"{report.where}, {report.num_files} files"]),
        (NOUNS[report.kind].removesuffix(" files"), _sample_lines(report)),
        ("pairs", _pair_lines(report)),
        ("buckets", _bucket_lines(report)),
        ("captions", _caption_lines(report)),
        ("enlarged", _enlarged_lines(report)),
        ("duplicates", _duplicate_lines(report)),
        ("left out", _broken_lines(report)),
        ("warning", list(report.warnings)),
        ("problem", list(report.problems)),
    )
    return [
        f"{label if number == 0 else '':<{LABEL_WIDTH}}{line}"
        for label, lines in parts
        for number, line in enumerate(lines)
    ]


def _sample_lines(report: DatasetReport) -> list[str]:
    samples = report.samples
    if not samples:
        return []
    kinds = ", ".join(f"{n} {suffix[1:]}" for suffix, n in (report.suffixes or {}).items())
    lines = [f"{len(samples)} readable ({kinds})"]
    if report.kind != "audio":
        by_area = sorted(samples, key=lambda sample: sample.width * sample.height)
        chosen = (by_area[0], by_area[len(by_area) // 2], by_area[-1])
        small, middle, large = (f"{sample.width}x{sample.height}" for sample in chosen)
        lines.append(f"smallest {small}, median {middle}, largest {large} (by area)")
    if report.kind != "image":
        seconds = [sample.seconds for sample in samples]
        lines.append(
            f"{min(seconds):.3g} to {max(seconds):.3g} s long, median {median(seconds):.3g} s, "
            f"{sum(seconds):.4g} s in all"
        )
    if report.kind == "video":
        rates = Counter(round(sample.fps, 2) for sample in samples)
        frames = [buckets.available_frames(sample, report.section) for sample in samples]
        shown = ", ".join(f"{rate:g} fps ({n})" for rate, n in rates.most_common(5))
        lines.append(f"{shown}; {min(frames)} to {max(frames)} frames")
    return lines


def _pair_lines(report: DatasetReport) -> list[str]:
    folders = report.section.control_folders
    if not folders or not report.samples:
        return []
    found, total = len(report.samples), sum((report.suffixes or {}).values())
    kind = "a control image" if found == total else "a usable control image"
    return [f"{found} of {total} have {kind} in {' and '.join(map(printable, folders))}"]


def _bucket_lines(report: DatasetReport) -> list[str]:
    if report.plan is None:
        return []
    section = report.section
    given = section.resolution
    sizes = ", ".join(map(str, given)) if isinstance(given, tuple) else given
    title = f"resolution {sizes} ({section.resolution_type}), steps of {report.step}"
    if report.kind == "audio":
        title = f"{section.sample_rate} Hz, {section.channels} channels"
    return [title, *buckets.report(report.plan).splitlines()]


def _caption_lines(report: DatasetReport) -> list[str]:
    facts = report.captions
    if not report.samples:
        return []
    num_captions = len(report.samples) - len(facts.missing)
    style = "tags" if facts.are_tags else "sentences or phrases"
    lines = [f"{num_captions} captions, {style}, up to {facts.longest[1]} words"]
    if facts.missing:
        lines += [f"without a caption: {len(facts.missing)}", *_listed(facts.missing)]
    if facts.empty:
        lines += [f"empty: {len(facts.empty)}", *_listed(facts.empty)]
    if facts.too_long:
        lines += [f"cut, longer than the model reads: {len(facts.too_long)}"]
        lines += _listed(facts.too_long)
    if facts.tags:
        lines.append("most frequent: " + ", ".join(f"{tag} ({n})" for tag, n in facts.tags))
    if facts.orders > 1:
        lines.append(f"tags are shuffled: up to {facts.orders} orders of each caption are encoded")
    return lines


def _enlarged_lines(report: DatasetReport) -> list[str]:
    if not report.enlarged:
        return []
    shown = [
        f"{printable(one.key)}: {one.size[0]}x{one.size[1]}, enlarged {one.factor:.2f} times to "
        f"fill {one.bucket[0]}x{one.bucket[1]}"
        for one in report.enlarged
    ]
    num_files = len({one.key for one in report.enlarged})  # one may be small for several buckets
    total = (
        f"by {MIN_FACTOR:g} times or more, because they are smaller than a bucket: {num_files} of "
        f"{len(report.samples)} {NOUNS[report.kind]}"
    )
    return [total, *_listed(shown)]


def _duplicate_lines(report: DatasetReport) -> list[str]:
    lines = []
    for groups, what, mark in (
        (report.exact, "files with equal bytes", " = "),
        (report.near, "images that look alike", " ~ "),
    ):
        if groups:
            lines += [f"{what}: {sum(map(len, groups))}"]
            lines += _listed([mark.join(group) for group in groups])
    return lines


def _broken_lines(report: DatasetReport) -> list[str]:
    if not report.broken:
        return []
    shown = [f"{one.key}: {one.reason}" for one in report.broken]
    return [f"cannot be used: {len(shown)}", *_listed(shown)]


def _listed(items: Sequence[str]) -> list[str]:
    shown: Iterator[str] = (f"  {printable(item)}" for item in items[:MAX_LISTED])
    rest = len(items) - MAX_LISTED
    return [*shown, *([f"  and {rest} more; --json lists all"] if rest > 0 else [])]
