"""What a text is looked up by: its caption, or its caption and the control picture it speaks of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from gracetune.cache.augmentation_epochs import NO_EPOCH, augmentation_mode
from gracetune.data.augment import render_control

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.batch_reader import SampleTransforms
    from gracetune.data.loader import BucketGroup
    from gracetune.data.sample import Companion, Sample, Shape
    from gracetune.data.source import Source
    from gracetune.models.family import Family

EMPTY_PROMPT = ""
"""The caption of dropped captions and of guidance."""


class PromptContext(NamedTuple):
    """A caption with the sample whose control it is encoded with."""

    caption: str
    sample: Sample
    size: Shape
    epoch: int


@dataclass(frozen=True, slots=True)
class PromptNames:
    """What each text is called; another one wherever the text encoder may see something else."""

    family: Family
    recipes: SampleTransforms

    def __call__(self, caption: str, sample: Sample, size: Shape, epoch: int = NO_EPOCH) -> str:
        """The caption alone, or with the control, as an epoch fits it to the sample's bucket."""
        if not self.family.takes_control:
            return caption
        epoch = epoch if self._follows(sample) else NO_EPOCH
        fitted = f"{self.recipes(sample, epoch).name} {'x'.join(map(str, size))}"
        return f"{caption} [control {_control(sample).digest} {fitted}]"

    def epochs(self, sample: Sample) -> range:
        """Those whose texts differ; later ones are like one of them."""
        section = self.recipes.sections[sample.dataset]
        return range(section.variants if self.family.takes_control else 1)

    def _follows(self, sample: Sample) -> bool:
        """Whether texts are encoded for every draw: where draws have no end, they cannot be."""
        return augmentation_mode(self.recipes.sections[sample.dataset]) == "static"


class PromptEncoder:
    """Every text that a run will ask for, and how each is encoded."""

    def __init__(
        self,
        family: Family,
        groups: Iterable[BucketGroup],
        sources: Mapping[str, Source],
        recipes: SampleTransforms,
    ) -> None:
        self._family, self._sources, self._recipes = family, sources, recipes
        self._about: dict[str, PromptContext] = {}
        name_of = PromptNames(family, recipes)
        for group in groups:
            for sample in group.samples:
                for caption, epoch in product((sample.caption, EMPTY_PROMPT), name_of.epochs(sample)):
                    name = name_of(caption, sample, group.size, epoch)
                    self._about.setdefault(name, PromptContext(caption, sample, group.size, epoch))

    @property
    def names(self) -> list[str]:
        """In no order that matters; the empty caption is among them."""
        return list(self._about)

    def encode(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        """As the family does; a control is fitted as its sample is."""
        about = [self._about[name] for name in names]
        captions = [one.caption for one in about]
        if not self._family.takes_control:
            return self._family.encode_text(captions)
        return self._family.encode_text(captions, [self._picture(one) for one in about])

    def _picture(self, one: PromptContext) -> Tensor:
        data = self._sources[one.sample.dataset].read(_control(one.sample).key)
        size = (one.size[0], one.size[1])
        recipe = self._recipes(one.sample, one.epoch)
        return render_control(data, recipe, size, self._recipes.decoders)


def _control(sample: Sample) -> Companion:
    (control,) = (one for one in sample.companions if one.role == "control")
    return control
