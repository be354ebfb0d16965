"""From the draws of a batch to encoded tensors in host memory, by the mode of each data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gracetune.cache.arena import ArenaStore
from gracetune.cache.fill import Picture, pixels_of
from gracetune.cache.generations import NO_EPOCH, generation_of, mode_of
from gracetune.cache.keys import latent_key, text_key
from gracetune.data.recipe import recipe_of
from gracetune.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.arena import Tally
    from gracetune.cache.generations import Generations
    from gracetune.cache.store import Entry, Store
    from gracetune.config.schema import DatasetSection
    from gracetune.data.decoders import Decoders
    from gracetune.data.loader import Draw
    from gracetune.data.recipe import Recipe
    from gracetune.data.sample import Sample
    from gracetune.data.source import Source


@dataclass(frozen=True, slots=True)
class Recipes:
    """How each sample becomes pixels in an epoch, as its own data set says."""

    sections: Mapping[str, DatasetSection]
    seed: int
    decoders: Decoders

    def __call__(self, sample: Sample, epoch: int = NO_EPOCH) -> Recipe:
        """Of one epoch; without one, that of generation 0."""
        section = self.sections[sample.dataset]
        generation = generation_of(section, epoch)
        return recipe_of(section, sample, self.seed, generation, self.decoders.lanczos)


@dataclass(frozen=True, slots=True)
class Server:
    """Latents by the way that each data set has them, texts by caption."""

    recipes: Recipes
    latents: Store
    text: Store
    generations: Generations
    sources: Mapping[str, Source]
    """By data set, for those that are encoded when they are used."""
    encode: Callable[[Tensor], Tensor]
    identity: Mapping[str, str]
    tally: Tally

    def latents_of(self, draws: Sequence[Draw]) -> list[Tensor]:
        """One for each draw; those of a batch have one size."""
        made: dict[int, Tensor] = {}
        ways: dict[str, list[int]] = {}
        for place, draw in enumerate(draws):
            mode = mode_of(self.recipes.sections[draw.sample.dataset])
            ways.setdefault("refresh" if self._refreshed(mode, draw) else mode, []).append(place)
        for way, places in ways.items():
            chosen = [draws[place] for place in places]
            if way == "disable_cache":
                found = self._encoded_now(chosen)
            elif way == "refresh":
                found = self._from(self.generations.at(chosen[0].epoch), chosen)
            else:
                found = self._from(self.latents, chosen)
            made |= dict(zip(places, found, strict=True))
        return [made[place] for place in range(len(draws))]

    def texts_of(self, captions: Sequence[str]) -> list[Entry]:
        """The embeddings of each caption, without padding."""
        return self._entries(self.text, [text_key(c, self.identity["text"]) for c in captions])

    @staticmethod
    def _refreshed(mode: str, draw: Draw) -> bool:
        """Generation 0 is in the cache itself; entering epoch 0 begins the next one."""
        return mode == "refresh_each_epoch" and draw.epoch != NO_EPOCH

    def _from(self, store: Store, draws: Sequence[Draw]) -> list[Tensor]:
        keys = [
            latent_key(d.sample, d.size, self.identity["latents"], self.recipes(d.sample, d.epoch))
            for d in draws
        ]
        return [entry["latents"] for entry in self._entries(store, keys)]

    def _encoded_now(self, draws: Sequence[Draw]) -> list[Tensor]:
        pixels = []
        for d in draws:
            recipe, source = self.recipes(d.sample, d.epoch), self.sources[d.sample.dataset]
            picture = Picture(d.sample, d.size, source, recipe)
            decoded = pixels_of(picture, self.recipes.decoders)
            if isinstance(decoded, str):
                raise RunFailedError(
                    f"data set {d.sample.dataset!r}: {d.sample.key} was readable when the run "
                    f"began and is not now: {decoded}. Mend it, and start again to resume."
                )
            pixels.append(decoded)
        with torch.no_grad():
            return list(self.encode(torch.stack(pixels)))

    def _entries(self, store: Store, keys: Sequence[str]) -> list[Entry]:
        """What was encoded before; it cannot be missing unless someone took it away."""
        found = [entry for entry in store.get_many(keys) if entry is not None]
        if len(found) < len(keys):
            raise RunFailedError(
                f"{len(keys) - len(found)} entries of the cache were encoded and are gone or "
                "damaged now. Start again: they are encoded anew, and the run resumes."
            )
        if not isinstance(store, ArenaStore):  # which counts for itself
            self.tally.reads += len(keys)
        return found
