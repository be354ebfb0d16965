"""Health checks of a run's data and settings, and of the samples that it generates.

`health_checks.py` explains what a check is, and has those of training. Facts about the data are
known before the first step, so that these checks report within seconds.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, deque
from typing import TYPE_CHECKING

import torch

from gracetune.train.health_checks import FINE, UNKNOWN, DatasetFacts, Finding, all_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from gracetune.data.sample import Sample
    from gracetune.train.batch_size_ramp import AccumulationRamp
    from gracetune.train.health_checks import Measurements, NoFinding, RunFacts, SamplesSeen


MIN_TEXTS = 3
"""Different captions without which their embeddings are not compared."""
STOP_WORDS = re.compile(
    "and|are|for|from|has|her|his|into|its|over|that|the|their|this|under|with"
    "|das|der|des|die|les|los|und"
)
"""Words that say nothing about an image."""


def dataset_facts(
    name: str,
    samples: Sequence[Sample],
    share: float = 1.0,
    caption_dropout: float = 0.0,
    is_one_prompt: bool = False,
    unreadable: Iterable[tuple[str, str]] = (),
) -> DatasetFacts:
    """Collect the facts of one dataset; `is_one_prompt` if one caption for all is the setting."""
    first: dict[str, str] = {}
    copies, copied = 0, ("", "")
    for key, digest in {sample.key: sample.digest for sample in samples}.items():
        if digest in first:
            copies += 1
            copied = copied if copied[0] else (first[digest], key)
        first.setdefault(digest, key)
    captions = {sample.caption.strip() for sample in samples}
    is_same = len(captions) == 1 and len(samples) > 1 and not is_one_prompt
    return DatasetFacts(
        id=name,
        samples=len(samples),
        share=share,
        empty_captions=sum(not sample.caption.strip() for sample in samples),
        same_caption=next(iter(captions)) if is_same else "",
        caption_dropout=caption_dropout,
        copies=copies,
        copied=copied,
        unreadable=tuple(unreadable),
    )


# Data


class CaptionsUseless:
    """Captions from which a model cannot learn what is in an image."""

    name = "captions"
    EMPTY, DROPPED, MIN_SAMPLES = 0.5, 0.5, 8

    def __init__(self, facts: RunFacts) -> None:
        self._datasets = facts.datasets

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Look for datasets whose captions are empty, dropped or all the same."""
        if not measured.steps:
            return UNKNOWN
        found = (self._problem(one) for one in self._datasets if one.samples)
        return all_of(one for one in found if one is not None)

    def _problem(self, one: DatasetFacts) -> Finding | None:
        if one.empty_captions > self.EMPTY * one.samples:
            return Finding(
                f"{one.empty_captions} of {one.samples} captions of dataset {one.id!r} are empty, "
                "so the model does not learn which words stand for these samples",
                "Check that the caption files are next to the samples, and datasets[]."
                "caption_strategy and caption_extension; `gracetune data check` shows captions.",
                values={"empty": one.empty_captions},
                kind=one.id,
            )
        if one.caption_dropout > self.DROPPED:
            return Finding(
                f"datasets[].caption_dropout of {one.id!r} is {one.caption_dropout:g}: "
                f"{one.caption_dropout:.0%} of its samples are trained without a caption, so "
                "prompts hardly learn anything",
                "Lower caption_dropout; 0.05 to 0.1 is usual.",
                values={"caption_dropout": one.caption_dropout},
                kind=one.id,
            )
        if one.same_caption and one.samples >= self.MIN_SAMPLES:
            text = one.same_caption if len(one.same_caption) < 60 else f"{one.same_caption[:57]}..."
            return Finding(
                f"all {one.samples} captions of dataset {one.id!r} are the same: {text!r}",
                "Check the caption files. If one caption is meant for all, set datasets[]."
                "caption_strategy: instanceprompt and instance_prompt.",
                values={"samples": one.samples},
                kind=one.id,
            )
        return None


class FewSamples:
    """Samples that the run repeats so often that it learns them by heart."""

    name = "few_samples"
    REPEATS = 1000

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Estimate how often the whole run trains on each sample."""
        if not measured.steps:
            return UNKNOWN
        per_step = statistics.mean(done.samples for done in measured.steps)
        draws = per_step * self._facts.total_steps
        for one in self._facts.datasets:
            repeats = draws * one.share / max(1, one.samples)
            if one.samples and repeats > self.REPEATS:
                return Finding(
                    f"the run trains {repeats:,.0f} times on each of the {one.samples} samples of "
                    f"dataset {one.id!r}: the model will learn them by heart",
                    "Lower train.max_train_steps or add samples. validation.holdout: 0.1 measures "
                    "when the model begins to overfit.",
                    values={"repeats": repeats, "samples": one.samples},
                )
        return FINE


class CopiesInData:
    """Files that are copies of others in the same dataset."""

    name = "duplicates"
    SHARE = 0.05

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the digests of files."""
        if not measured.steps:
            return UNKNOWN
        for one in self._facts.datasets:
            if one.copies > self.SHARE * one.samples:
                return Finding(
                    f"{one.copies} of {one.samples} files of dataset {one.id!r} are copies of "
                    f"others, such as {one.copied[1]} of {one.copied[0]}: these samples count more",
                    "Remove the copies, or use datasets[].repeats, which is the same for all.",
                    values={"copies": one.copies},
                )
        return FINE


class UnreadableFiles:
    """Files that are left out because they cannot be read."""

    name = "unreadable_files"

    def __init__(self, facts: RunFacts) -> None:
        self._datasets = facts.datasets

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Name the first unreadable file."""
        if not measured.steps:
            return UNKNOWN
        found = []
        for one in self._datasets:
            if one.unreadable:
                file, reason = one.unreadable[0]
                count = len(one.unreadable)
                one_of = "1 file" if count == 1 else f"{count} files"
                are, more = ("is", "") if count == 1 else ("are", ", such as this one")
                found.append(
                    Finding(
                        f"{one_of} of dataset {one.id!r} cannot be read and {are} left out{more}: "
                        f"{file} ({reason})",
                        "Replace or delete them; the run's folder lists all in corruption.json.",
                        values={"files": count},
                        kind=one.id,
                    )
                )
        return all_of(found)


class SmallBatches:
    """Batches that are far from full, because buckets have fewer samples than a batch."""

    name = "small_batches"
    FULL = 0.5

    def __init__(self, facts: RunFacts) -> None:
        self._batch_size, self._fill = facts.batch_size, facts.batch_fill

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the mean size of batches with the setting."""
        if not measured.steps:
            return UNKNOWN
        if self._fill >= self.FULL:
            return FINE
        return Finding(
            f"train.batch_size is {self._batch_size}, but batches have "
            f"{self._fill * self._batch_size:.1f} samples on average, because most buckets have "
            "fewer",
            "Add samples, use fewer buckets (a smaller datasets[].max_aspect, one resolution), or "
            "lower train.batch_size and train with more steps.",
            values={"fill": self._fill},
        )


class LatentsScale:
    """Latents that are far from the scale that the model was trained on, or not finite.

    Without their scale, the latents of most models vary by 2.5 to 8; scaled twice, by 0.15 to 0.4.
    Images with little contrast vary less than others, so that a small value must last.
    """

    name = "latents_scale"
    LARGE, SMALL, FLAT, LOOKS = 2.0, 0.2, 0.02, 8

    def __init__(self) -> None:
        self._small = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the standard deviation of latents with 1, the one that models expect."""
        spreads = measured.latent_spread
        if not spreads:
            return UNKNOWN
        advice = (
            "Check the VAE in model.path: another model's VAE, or a wrong scaling_factor or "
            "latents_std in its config.json. Delete the cache after a change."
        )
        broken = [name for name, spread in spreads.items() if not math.isfinite(spread)]
        if broken:
            cause = f"latents of dataset {broken[0]!r} are not finite: the VAE's output is broken"
            return Finding(cause, advice, kind="not finite")
        name, spread = max(spreads.items(), key=lambda one: one[1])
        self._small = self._small + 1 if self.FLAT < spread < self.SMALL else 0
        if spread < self.LARGE and self._small < self.LOOKS:
            return FINE
        return Finding(
            f"the latents of dataset {name!r} vary by {spread:.2g}, where models expect about 1: "
            "their scale is wrong",
            advice,
            values={"spread": spread},
            kind="large" if self._small == 0 else "small",
        )


# Settings


class WarmupLong:
    """A learning rate that warms up during the whole run."""

    name = "warmup"

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the warm-up with the length of the run."""
        if not measured.steps:
            return UNKNOWN
        warmup, total = self._facts.warmup_steps, self._facts.total_steps
        if warmup < total:
            return FINE
        return Finding(
            f"the learning rate warms up for {warmup} steps, but the run has {total}: it reaches "
            f"{total / warmup:.0%} of optimizer.lr at most",
            "Set optimizer.warmup_steps to a twentieth of train.max_train_steps, or to 0.",
            values={"warmup_steps": warmup, "total_steps": total},
        )


class RampLong:
    """A ramp of the batch size that the run does not get to the end of."""

    name = "batch_ramp"

    def __init__(self, facts: RunFacts) -> None:
        self._ramp = facts.ramp

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the batch at the end of the run with the one at the end of the ramp."""
        if not measured.steps:
            return UNKNOWN
        if self._ramp is None or self._ramp[0] >= self._ramp[1]:
            return FINE
        last, target = self._ramp
        return Finding(
            f"the ramp of the batch size is longer than the run, which ends with {last} samples "
            f"per step instead of {target}",
            "Lower gh200_optimizations.batch_rampup_steps, which counts micro-batches, or raise "
            "train.max_train_steps.",
            values={"last": last, "target": target},
        )


def ramp_end(ramp: AccumulationRamp, total_steps: int) -> tuple[int, int]:
    """Return the samples in the last step of a run, and in a step at the end of its ramp."""
    done = before = 0
    for _ in range(total_steps):
        if before >= ramp.length:
            break
        before, done = done, done + ramp.accumulation(done)
    return ramp.samples(before), ramp.samples(ramp.length)


class SkippedSteps:
    """Many steps that were skipped because their loss is not finite (`train.skip_bad_batches`)."""

    name = "skipped_steps"
    RECENT, MIN_STEPS, SHARE = 200, 20, 0.05

    def __init__(self) -> None:
        self._is_skipped: deque[bool] = deque(maxlen=self.RECENT)

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Count the steps that are not finite: a run that does not skip them has ended."""
        self._is_skipped.extend(
            not (math.isfinite(one.loss) and math.isfinite(one.grad_norm)) for one in measured.steps
        )
        steps, skipped = len(self._is_skipped), sum(self._is_skipped)
        if not measured.steps or steps < self.MIN_STEPS:
            return UNKNOWN
        if skipped <= self.SHARE * max(steps, self.RECENT / 2):
            return FINE
        return Finding(
            f"{skipped} of the last {steps} steps were skipped, because their loss or gradient is "
            "not finite",
            "The events batch_skipped name the files. If they are always the same, remove them; "
            "otherwise lower optimizer.lr, or use another precision.",
            values={"skipped": skipped, "steps": steps},
        )


class GradientsClipped:
    """Gradients that are clipped in every step, far below their own norm."""

    name = "clipping"
    FACTOR, RECENT, MIN_STEPS, SHARE = 20.0, 100, 40, 0.95

    def __init__(self, facts: RunFacts) -> None:
        self._limit = facts.max_grad_norm
        self._norms: deque[float] = deque(maxlen=self.RECENT)

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare gradient norms with the norm that they are scaled down to."""
        self._norms.extend(done.grad_norm for done in measured.steps)
        if not measured.steps or not self._limit or len(self._norms) < self.MIN_STEPS:
            return UNKNOWN
        clipped = sum(norm > self.FACTOR * self._limit for norm in self._norms)
        if clipped < self.SHARE * len(self._norms):
            return FINE
        median = statistics.median(self._norms)
        return Finding(
            f"every step clips its gradients: their norm is {median:.3g} (median), and "
            f"train.max_grad_norm is {self._limit:g}, so all steps are equally long, whatever the "
            "loss",
            f"Raise train.max_grad_norm to about {median:.1g}, or set it to 0. If the norm has "
            "grown, lower optimizer.lr instead.",
            values={"norm": median, "max_grad_norm": self._limit},
        )


# Generated samples


class SamplesEmpty:
    """Validation samples that show nothing: black, of one colour, noise, silent or not finite."""

    name = "samples_empty"

    def __init__(self, facts: RunFacts) -> None:
        self._is_pretrained = facts.is_pretrained
        self._is_resumed = facts.start_step > 0
        self._shown_step: int | None = None

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Count the samples of the latest validation that show nothing."""
        seen = measured.samples
        if seen is not None and seen.failed:
            return Finding(
                f"no samples of step {seen.step} could be generated: {seen.failed}",
                "Lower validation.width, height or frames, or plan.device_memory. Training goes "
                "on without samples.",
                kind="failed",
            )
        if seen is None or not seen.count:
            return UNKNOWN
        noisy = [one for one in seen.problems if one.problem == "noise"]
        if 2 * len(noisy) >= seen.count:
            return self._noise(seen, len(noisy))
        if 2 * len(seen.problems) < seen.count:
            self._shown_step = seen.step
            return FINE
        kinds = Counter(one.problem for one in seen.problems)
        (kind, _), *_others = kinds.most_common()
        text = f"{len(seen.problems)} of {seen.count} samples of step {seen.step} are {kind}"
        if seen.step == 0:
            return Finding(
                f"{text} before training: the VAE's output is broken, not the training",
                "Check the VAE in model.path: other files, or weights that overflow. Samples from "
                "the base model must look right: gracetune sample --prompt.",
                values={"empty": len(seen.problems)},
                kind="empty",
            )
        return Finding(
            f"{text}: the model or its VAE puts out nothing",
            "If the samples of step 0 are empty too, the VAE in model.path is broken; otherwise "
            "lower optimizer.lr, and validation.guidance if it is above 10.",
            values={"empty": len(seen.problems)},
            kind="empty",
        )

    def _noise(self, seen: SamplesSeen, count: int) -> Finding | NoFinding:
        """Judge samples of noise, which a model that is trained from the start begins with."""
        text = f"{count} of {seen.count} samples of step {seen.step} are noise"
        if self._shown_step is not None:
            return Finding(
                f"{text}, and those of step {self._shown_step} were not: training has destroyed "
                "the model",
                f"Use a checkpoint of step {self._shown_step} or earlier, and lower optimizer.lr.",
                values={"noise": count},
                kind="noise",
            )
        if not self._is_pretrained:
            return UNKNOWN
        if self._is_resumed:  # samples of earlier processes are not known
            return Finding(
                f"{text}: training has destroyed the model, or its VAE or the scale of its latents "
                "is wrong",
                "Look at the samples of earlier steps in the run's folder. If they show something, "
                "use the checkpoint of such a step, and lower optimizer.lr; otherwise check the "
                "files in model.path.",
                values={"noise": count},
                kind="noise",
            )
        return Finding(
            f"{text}: the model, its VAE or the scale of its latents is wrong",
            "Samples from the base model must look right: gracetune sample --prompt. Check the "
            "files in model.path, the VAE's scaling_factor, and validation.sample_steps.",
            values={"noise": count},
            kind="noise",
        )


class TextEmbeddings:
    """Text embeddings that do not depend on the text, or are not finite."""

    name = "text_embeddings"

    def __init__(self, facts: RunFacts) -> None:
        self._problem = facts.text_problem

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Report a problem that was found before the first step."""
        if not measured.steps:
            return UNKNOWN
        if not self._problem:
            return FINE
        return Finding(
            f"{self._problem}, so prompts have no effect",
            "Check the text encoders in model.path: missing or wrong weights, or captions that are "
            "cut before they differ. Delete the cache after a change.",
        )


def text_problem(texts: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return what is wrong with the embeddings of different captions; empty if nothing is."""
    distinct = {" ".join(text.lower().split()): entry for text, entry in texts.items()}
    entries = [
        {name: tensor for name, tensor in entry.items() if tensor.is_floating_point()}
        for text, entry in distinct.items()
        if text
    ]
    for entry in entries:
        for name, tensor in entry.items():
            if not bool(tensor.isfinite().all()):
                return f"the text encoder puts out values that are not finite ({name})"
    if len(entries) < MIN_TEXTS:
        return ""
    for name in entries[0]:
        if not any(bool(entry[name].any()) for entry in entries if name in entry):
            return f"the text encoder puts out zeros ({name}) for all captions"
    first, *others = entries
    if all(_is_equal(first, other) for other in others):
        return f"the text encoder puts out the same for {len(entries)} different captions"
    return ""


def _is_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class ValidationPrompts:
    """Validation prompts that have nothing to do with the captions."""

    name = "validation_prompts"

    def __init__(self, facts: RunFacts) -> None:
        self._problem = facts.prompt_problem

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Report a problem that was found before the first step."""
        if not measured.steps:
            return UNKNOWN
        if not self._problem:
            return FINE
        return Finding(
            f"{self._problem}, so the samples do not show what the run learns",
            "Write validation.prompts like the captions of the data; [trigger] in a prompt stands "
            "for the trigger word.",
        )


def prompt_problem(
    prompts: Sequence[str], captions: Iterable[str], trigger_words: Sequence[str]
) -> str:
    """Return why the prompts do not show what is trained; empty if they do.

    Words are the same if their first letters are, so that `circles` is like `circle`.
    """
    if not prompts:
        return ""
    if trigger_words:
        if any(word.lower() in prompt.lower() for word in trigger_words for prompt in prompts):
            return ""
        named = ", ".join(map(repr, dict.fromkeys(trigger_words)))
        return f"no validation prompt has the trigger word {named}"
    wanted = {word for prompt in prompts for word in _content_words(prompt)}
    has_words = False
    for caption in captions:
        words = _content_words(caption)
        has_words = has_words or bool(words)
        if wanted & words:
            return ""
    return "no validation prompt has a word of any caption" if wanted and has_words else ""


def _content_words(text: str) -> set[str]:
    """Return the first letters of words in Latin script; other scripts may not separate words."""
    words = re.findall(r"[a-zà-ɏ]{3,}", text.lower())
    return {word.removesuffix("s")[:4] for word in words if not STOP_WORDS.fullmatch(word)}


class SamplesSame:
    """Samples that do not depend on training, or not on their prompts."""

    name = "samples_same"
    MIN_STEPS = 20

    def __init__(self) -> None:
        self._earlier: dict[tuple[str, ...], SamplesSeen] = {}

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare samples with those of an earlier step, and with each other."""
        seen = measured.samples
        if seen is None or not seen.digests:
            return UNKNOWN
        if any(one.problem != "noise" for one in seen.problems):  # empty samples are all the same
            return UNKNOWN
        by_prompt = dict(zip(seen.prompts, seen.digests, strict=True))
        if len(by_prompt) > 1 and len(set(by_prompt.values())) == 1:
            return Finding(
                f"the samples of all {len(by_prompt)} prompts of step {seen.step} are the same: "
                "prompts have no effect",
                "Check the text encoders in model.path, and validation.guidance, which must be "
                "above 0.",
                values={"prompts": len(by_prompt)},
            )
        first = self._earlier.setdefault(seen.prompts, seen)
        if seen.step - first.step < self.MIN_STEPS:
            return UNKNOWN
        if first.digests != seen.digests:
            self._earlier[seen.prompts] = seen
            return FINE
        return Finding(
            f"the samples of step {seen.step} are exactly those of step {first.step}: training has "
            "no effect on them",
            "Samples use the averaged weights if train.ema_decay is set: check that, optimizer.lr, "
            "and that the adapter is part of the model that is sampled.",
            values={"since": first.step},
        )
