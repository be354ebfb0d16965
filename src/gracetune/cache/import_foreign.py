"""Taking over what ai-toolkit or SimpleTuner encoded, where it is what we would have encoded.

Their keys say neither what was in the picture nor which encoder it was, so nothing is believed:
the picture must be older than its entry, the geometry must be ours, a text must tell its caption,
and the first entry of each kind is compared with what our own encoder makes of the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gracetune.cache.batch_reader import SampleTransforms
from gracetune.cache.encode import EncodeItem, choose_tiling, decode_item
from gracetune.cache.foreign import (
    TEXT_FOLDER,
    captions_by_digest,
    caption_digest,
    match_text,
    read_foreign,
    convert_text,
)
from gracetune.cache.keys import CacheKey, latent_key, text_key
from gracetune.cache.prompt_keys import EMPTY_PROMPT
from gracetune.cache.required_entries import cache_root
from gracetune.cache.shard_store import ShardStore
from gracetune.data import buckets
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import CENTRE, choose_decoders
from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gracetune.cache.foreign import ForeignEntry, TensorMatch
    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Shape
    from gracetune.events.types import Event
    from gracetune.models.family import Family

    Emit = Callable[[Event], None]
    Places = dict[str, list["_ImportSample"]]
    """Pictures of the run by the stem of their file."""

ALIKE = 0.98
"""Least cosine between their latents and ours; resizing differs between tools by a little."""


@dataclass(slots=True)
class ImportReport:
    """What was taken, and why the rest was not."""

    imported: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ImportSample:
    """A picture of the run, and the file it comes from."""

    picture: EncodeItem
    file: Path


def import_foreign(
    run: RunFile, family: Family, folder: Path, emit: Emit, *, write: bool
) -> ImportReport:
    """Take over what a folder has of the pictures and captions of the run."""
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in (".safetensors", ".pt")]
    if not files:
        raise CacheError(f"{folder} has no .safetensors or .pt file: nothing to import.")
    recipes = SampleTransforms({d.id: d for d in run.datasets}, run.seed, choose_decoders())
    places: Places = defaultdict(list)
    for stem, place in _places(run, family, recipes, emit):
        places[stem].append(place)
    latents, texts = _Latents(family, recipes, places), _Texts(family, places)
    outcome, root = ImportReport(), cache_root(run)
    with ShardStore(root / "latents", emit) as pictures, ShardStore(root / "text", emit) as words:
        for path in files:
            is_text = path.parent.name == TEXT_FOLDER or caption_digest(path.stem) is not None
            try:
                key, entry = (texts if is_text else latents)(path)
            except CacheError as error:
                outcome.skipped[str(path)] = str(error)
                continue
            if write:
                imported = CacheKey(key, {**key.components, "imported from": path.name})
                (words if is_text else pictures).put(imported, entry)
            outcome.imported.append(key)
    return outcome


class _Latents:
    """Their latents; the first that fits is compared with ours."""

    def __init__(self, family: Family, recipes: SampleTransforms, places: Places) -> None:
        self._family = family
        self._recipes = recipes
        self._places = places
        self._encoder = family.identity()["latents"]
        self._compared = False

    def __call__(self, path: Path) -> tuple[CacheKey, dict[str, Tensor]]:
        entry = read_foreign(path)
        picture = _check_ours(path, entry, self._places, self._family).picture
        if not self._compared:
            _check_alike(path, entry, picture, self._family, self._recipes)
            self._compared = True
        key = latent_key(picture.sample, picture.size, self._encoder, picture.transform, picture.tiled)
        return key, {"latents": entry.tensors["latents"]}


class _Texts:
    """Their texts; the first with such tensors shows how they name and pad what we have without."""

    def __init__(self, family: Family, places: Places) -> None:
        self._family = family
        self._places = places
        self._encoder = family.identity()["text"]
        every = [place for several in places.values() for place in several]
        captions = {place.picture.sample.caption for place in every} | {EMPTY_PROMPT}
        self._by_digest = captions_by_digest(captions)
        self._captions = captions
        self._matches: dict[frozenset[str], dict[str, TensorMatch]] = {}

    def __call__(self, path: Path) -> tuple[CacheKey, dict[str, Tensor]]:
        entry = read_foreign(path)
        caption = self._caption(path, entry)
        kind = frozenset(entry.tensors)
        if kind not in self._matches:
            (ours,) = self._family.encode_text([caption])
            self._matches[kind] = match_text(entry.tensors, ours)
        return text_key(caption, self._encoder), convert_text(entry.tensors, self._matches[kind])

    def _caption(self, path: Path, entry: ForeignEntry) -> str:
        """By the digest in its name, by what it says, or by the text file beside its picture."""
        digest = caption_digest(path.stem)
        if digest is not None:
            if digest not in self._by_digest:
                raise CacheError("it is named by a caption that the run does not have")
            return self._by_digest[digest]
        if "caption" in entry.metadata:
            told = str(entry.metadata["caption"])
            if told not in self._captions:
                raise CacheError(f"the run has no caption {told!r}")
            return told
        place = _place_of(entry.stem, self._places)
        written = place.file.with_suffix(".txt")
        if not written.is_file() or written.stat().st_mtime > path.stat().st_mtime:
            raise CacheError("it does not say which caption it is of, and the text file is newer")
        return place.picture.sample.caption


def _places(
    run: RunFile, family: Family, recipes: SampleTransforms, emit: Emit
) -> Iterator[tuple[str, _ImportSample]]:
    """By the stem of the file, as the other tools name their entries."""
    folder = Path(run.output_dir)
    ledger = CorruptionLog(emit, folder / "corruption.json")
    tiling = choose_tiling(run.cache_config.vae_tiling, family.name, family.tile(on=False))
    for index, section in enumerate(run.datasets):
        opened = open_dataset(section, index, emit, ledger)
        plan = buckets.assign(opened.samples, section, section.bucket_step or family.pixel_step)
        for size, samples in plan.buckets.items():
            for sample in samples:
                tiled = tiling.applies_to(size, sample.kind)
                picture = EncodeItem(sample, size, opened.source, recipes(sample, 0), tiled)
                file = Path(section.instance_data_dir or "") / sample.key
                yield Path(sample.key).stem, _ImportSample(picture, file)


def _place_of(stem: str, places: Places) -> _ImportSample:
    """Their names have no folder: pictures of one name in two folders cannot be told apart."""
    found = places.get(stem, [])
    if not found:
        raise CacheError(f"no picture of the run is called {stem!r}")
    if len({(one.picture.sample.digest, one.picture.sample.caption) for one in found}) > 1:
        raise CacheError(f"{len(found)} pictures of the run are called {stem!r}")
    return found[-1]


def _check_ours(path: Path, entry: ForeignEntry, places: Places, family: Family) -> _ImportSample:
    place = _place_of(entry.stem, places)
    _check_plain(place.picture)
    if not place.file.is_file() or place.file.stat().st_mtime > path.stat().st_mtime:
        raise CacheError("the picture is newer than the entry, or is not a file here")
    if "latents" not in entry.tensors:
        raise CacheError(f"it has {', '.join(entry.tensors) or 'no tensors'}, and no latents")
    shape = tuple(entry.tensors["latents"].shape)
    expected = tuple(family.latent_shape(*place.picture.size))
    if shape != expected:
        raise CacheError(f"its latents are {shape}; {family.name} makes {expected} here")
    _check_geometry(entry.metadata, place.picture.size)
    return place


def _check_plain(picture: EncodeItem) -> None:
    """Keys name the crop and the clip of the run; what theirs are is known of centre crops only."""
    recipe, name = picture.transform, picture.sample.dataset
    if recipe.draw.steps:
        raise CacheError("the run augments this picture, and the entry does not say how it was")
    if recipe.crop != CENTRE:
        raise CacheError(
            f"crop of the data set {name!r} is not center, and their entries are centre crops: "
            "set it to center, or have the picture encoded"
        )
    if recipe.rate:
        raise CacheError(
            f"dataset_type of the data set {name!r} is not image, and an entry of a video or a "
            "sound does not say which frames it is of"
        )


def _check_geometry(made_by: dict[str, object], size: Shape) -> None:
    """What ai-toolkit says of the crop; SimpleTuner says nothing."""
    if made_by.get("flip_x") or made_by.get("flip_y"):
        raise CacheError("it was flipped")
    for edge, axis, place in (("width", "x", 0), ("height", "y", 1)):
        cropped = made_by.get(f"crop_{edge}")
        if cropped is None:
            continue
        room = int(str(made_by.get(f"scale_to_{edge}", cropped))) - int(str(cropped))
        if (
            int(str(cropped)) != size[place]
            or abs(int(str(made_by[f"crop_{axis}"])) * 2 - room) > 2
        ):
            raise CacheError(f"its crop is not the centre at {size[0]}x{size[1]}")


def _check_alike(
    path: Path, entry: ForeignEntry, picture: EncodeItem, family: Family, recipes: SampleTransforms
) -> None:
    pixels = decode_item(picture, recipes.decoders)
    if isinstance(pixels, str):
        raise CacheError(f"its picture cannot be read: {pixels}")
    ours = family.encode(pixels.unsqueeze(0))[0].float().cpu().flatten()
    theirs = entry.tensors["latents"].float().flatten()
    likeness = torch.cosine_similarity(ours, theirs, dim=0).item()
    if not likeness >= ALIKE or not 0.9 < (theirs.norm() / ours.norm()).item() < 1.1:
        raise CacheError(
            f"{path.name} was made by another encoder or another scaling: its cosine with ours is "
            f"{likeness:.3f}"
        )
