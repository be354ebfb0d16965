"""Import cache entries of ai-toolkit and SimpleTuner that equal gracetune's own encoding.

The file names of those tools identify neither the image's content nor the encoder. So every entry
is checked before it is imported:

1. Exactly one sample of the run has the entry's file name, and its file is older than the entry.
   SimpleTuner names entries by the SHA-256 of a sample's stem, old versions also by the stem.
2. Shape and crop are those of the run; a text entry identifies its caption.
3. The first entry of each kind is compared with the output of the run's own encoder.

The comparison in step 3 also finds out which of the other tool's tensors corresponds to which of
ours, and how the tool pads text.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from gracetune.cache.batch_reader import SampleTransforms
from gracetune.cache.encode import EMPTY_PROMPT, EncodeItem, choose_tiling, decode_item
from gracetune.cache.foreign_caches import TEXT_FOLDER, read_foreign
from gracetune.cache.keys import CacheKey, latent_key, text_key
from gracetune.cache.open_stores import cache_root
from gracetune.cache.shard_store import ShardStore
from gracetune.data import buckets
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import CENTRE_CROP, choose_decoders
from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.encode import Emit, SampleEncoder
    from gracetune.cache.foreign_caches import ForeignEntry
    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Shape


MIN_COSINE = 0.98
"""Minimum cosine similarity at which our and another tool's encoding of a sample are equal.

It is below 1, because tools resize images with different filters.
"""
NORM_RANGE = (0.9, 1.1)
"""Range of the ratio of two encodings' norms in which they count as equal."""

_STEM_DIGEST = re.compile(r"[0-9a-f]{64}")
_CAPTION_DIGEST = re.compile(r"(?P<digest>[0-9a-f]{32})(-.+)?")

TokenTrim = Literal["masked", "stripped", "whole"]
TOKEN_TRIMS: Sequence[TokenTrim] = ("masked", "stripped", "whole")
"""Ways to remove padding tokens from another tool's text embeddings.

`masked` uses the attention mask, `stripped` removes zeros at the end, `whole` keeps all tokens.
"""


@dataclass(slots=True)
class ImportReport:
    """Result of importing another tool's cache: imported entries, and why files were skipped."""

    imported: list[str] = field(default_factory=list)
    """Cache keys of the imported entries."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason why a cache file was not imported, by the path of the file."""


@dataclass(frozen=True, slots=True)
class _ImportSample:
    """A sample of the run and its file, to be compared with another tool's cache file for it."""

    item: EncodeItem
    file: Path


class _RunSamples:
    """The samples of a run, to be found by the names that other tools give to their cache files."""

    def __init__(self, samples: Iterable[tuple[str, _ImportSample]]) -> None:
        self._by_stem: dict[str, list[_ImportSample]] = defaultdict(list)
        for stem, sample in samples:
            self._by_stem[stem].append(sample)
        self._stems = {stem_digest(stem): stem for stem in self._by_stem}

    def captions(self) -> set[str]:
        """Return the captions of all samples."""
        return {one.item.sample.caption for found in self._by_stem.values() for one in found}

    def find(self, name: str) -> list[_ImportSample]:
        """Return a sample by its stem or the digest of its stem, once for each of its datasets.

        Raises an error if no sample has this name, or if different ones have it.
        """
        stem = name if name in self._by_stem else self._stems.get(name)
        if stem is None and _STEM_DIGEST.fullmatch(name):
            raise CacheError("its name is the digest of a file name that no sample of the run has")
        if stem is None:
            raise CacheError(f"no sample of the run is called {name!r}")
        found = self._by_stem[stem]
        if len({(one.item.sample.digest, one.item.sample.caption) for one in found}) > 1:
            raise CacheError(f"{len(found)} samples of the run are called {stem!r}")
        return found

    def file_of(self, name: str) -> str:
        """Return the file and a colon, if `name` is the digest of a sample's stem; else nothing."""
        stem = self._stems.get(name)
        return "" if stem is None else f"{self._by_stem[stem][0].item.sample.key}: "


def import_foreign(
    run: RunFile, encoder: SampleEncoder, folder: Path, emit: Emit, *, write: bool
) -> ImportReport:
    """Import cache files of ai-toolkit or SimpleTuner that match the run's samples and captions.

    Searches `folder` and its subfolders. Without `write`, nothing is imported, and the report lists
    what would be.
    """
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in (".safetensors", ".pt")]
    if not files:
        raise CacheError(f"{folder} has no .safetensors or .pt file: nothing to import.")
    sections = {d.id: d for d in run.datasets}
    control_size = encoder.control_size if encoder.takes_control else None
    transforms = SampleTransforms(sections, run.seed, choose_decoders(), control_size)
    samples = _RunSamples(_run_samples(run, encoder, transforms, emit))
    latents = _LatentImporter(encoder, transforms, samples)
    texts = _TextImporter(encoder, samples)
    report, root = ImportReport(), cache_root(run)
    with (
        ShardStore(root / "latents", emit) as latent_store,
        ShardStore(root / "text", emit) as text_store,
    ):
        for path in files:
            is_text = path.parent.name == TEXT_FOLDER or caption_digest(path.stem) is not None
            try:
                key, entry = texts.read(path) if is_text else latents.read(path)
            except CacheError as error:
                report.skipped[str(path)] = samples.file_of(path.stem) + str(error)
                continue
            if write:
                imported = CacheKey(key, {**key.components, "imported from": path.name})
                (text_store if is_text else latent_store).put(imported, entry)
            report.imported.append(key)
    return report


def _run_samples(
    run: RunFile, encoder: SampleEncoder, transforms: SampleTransforms, emit: Emit
) -> Iterator[tuple[str, _ImportSample]]:
    """Yield the samples of a run, each with its file name without extension (the stem)."""
    corruption = CorruptionLog(emit, Path(run.output_dir) / "corruption.json")
    can_tile = encoder.set_tiling(enabled=False)
    tiling = choose_tiling(run.cache_config.vae_tiling, encoder.name, can_tile)
    for index, section in enumerate(run.datasets):
        dataset = open_dataset(section, index, emit, corruption, output_dir=Path(run.output_dir))
        plan = buckets.assign(dataset.samples, section, section.bucket_step or encoder.pixel_step)
        for size, samples in plan.buckets.items():
            for sample in samples:
                tiled = tiling.applies_to(size, sample.kind)
                item = transforms.item(sample, size, dataset.source, 0, tiled)
                file = Path(section.instance_data_dir or "") / sample.key
                yield Path(sample.key).stem, _ImportSample(item, file)


# Latents


class _LatentImporter:
    """Reads cached latents of another tool, and checks that they equal the run's own.

    Each file's name, age, shape and crop are checked; only the first file's values are compared
    with the output of the run's encoder.
    """

    def __init__(
        self, encoder: SampleEncoder, transforms: SampleTransforms, samples: _RunSamples
    ) -> None:
        self._encoder = encoder
        self._decoders = transforms.decoders
        self._samples = samples
        self._identity = encoder.identity()["latents"]
        self._dtype: torch.dtype | None = None
        """Dtype of the run's own latents; None until the first file is compared with them."""

    def read(self, path: Path) -> tuple[CacheKey, dict[str, Tensor]]:
        """Return the cache key and latents of another tool's file, after checking them."""
        entry = read_foreign(path)
        item = self._check_sample(path, entry)
        if self._dtype is None:
            self._dtype = self._compare(entry, item)
        key = latent_key(item.sample, item.size, self._identity, item.transform, item.tiled)
        return key, {"latents": entry.tensors["latents"].to(self._dtype)}

    def _check_sample(self, path: Path, entry: ForeignEntry) -> EncodeItem:
        """Return the sample that another tool's cache file belongs to.

        Raises an error if the sample was changed after the file was written, or if shape or crop
        differ.
        """
        if "latents" not in entry.tensors:
            raise CacheError(f"it has {', '.join(entry.tensors) or 'no tensors'}, but no latents")
        shape = tuple(entry.tensors["latents"].shape)
        found = self._samples.find(entry.stem)
        # Datasets may have the same file at different resolutions.
        expected = [tuple(self._encoder.latent_shape(*one.item.size)) for one in found]
        fits = shape in expected
        sample = found[expected.index(shape) if fits else 0]
        _check_centre_crop(sample.item)
        if not sample.file.is_file() or sample.file.stat().st_mtime > path.stat().st_mtime:
            raise CacheError("the sample's file is newer than the entry, or is not a local file")
        if not fits:
            produced = " and ".join(
                f"{ours} for the dataset {one.item.sample.dataset!r}"
                for one, ours in zip(found, expected, strict=True)
            )
            raise CacheError(
                f"its latents have shape {shape}, but {self._encoder.name} produces {produced}"
            )
        _check_crop_metadata(entry.metadata, sample.item.size)
        return sample.item

    def _compare(self, entry: ForeignEntry, item: EncodeItem) -> torch.dtype:
        """Return the dtype of the run's own latents; raise an error if the entry differs."""
        pixels = decode_item(item, self._decoders)
        if isinstance(pixels, str):
            raise CacheError(f"its sample cannot be read: {pixels}")
        ours = self._encoder.encode(pixels.unsqueeze(0))[0].cpu()
        equal, cosine = _compare_encodings(entry.tensors["latents"], ours)
        if not equal:
            raise CacheError(
                "it is from another encoder or scaled differently: its cosine similarity with our "
                f"latents is {cosine:.3f}"
            )
        return ours.dtype


def _check_centre_crop(item: EncodeItem) -> None:
    """Raise an error unless the run only crops an image at its centre, as the other tools do."""
    transform, dataset = item.transform, item.sample.dataset
    if transform.draw.steps:
        raise CacheError("the run augments this sample, and the entry may be augmented otherwise")
    if transform.crop != CENTRE_CROP:
        raise CacheError(
            f"crop of the dataset {dataset!r} is not center, but the entry is a centre crop: set "
            "crop: center, or let the run encode the sample"
        )
    if transform.rate:
        raise CacheError(
            f"dataset_type of the dataset {dataset!r} is not image, and an entry does not say "
            "which frames of a video or which part of an audio file it has"
        )


def _check_crop_metadata(metadata: dict[str, object], size: Shape) -> None:
    """Raise an error if ai-toolkit's metadata record a flip or a crop other than the centre."""
    if metadata.get("flip_x") or metadata.get("flip_y"):
        raise CacheError("the entry is flipped, but the run's sample is not")
    for edge, axis, place in (("width", "x", 0), ("height", "y", 1)):
        cropped = metadata.get(f"crop_{edge}")
        if cropped is None:
            continue
        margin = int(str(metadata.get(f"scale_to_{edge}", cropped))) - int(str(cropped))
        if (
            int(str(cropped)) != size[place]
            or abs(int(str(metadata[f"crop_{axis}"])) * 2 - margin) > 2
        ):
            raise CacheError(f"its crop is not the centre crop at {size[0]}x{size[1]}")


def _compare_encodings(theirs: Tensor, ours: Tensor) -> tuple[bool, float]:
    """Return True if two encodings count as equal (`MIN_COSINE`), and their cosine similarity."""
    theirs, ours = theirs.float().flatten(), ours.float().flatten()
    cosine = torch.cosine_similarity(theirs, ours, dim=0).item()
    ratio = (theirs.norm() / ours.norm()).item()
    return cosine >= MIN_COSINE and NORM_RANGE[0] < ratio < NORM_RANGE[1], cosine


# Text embeddings


class _TextImporter:
    """Reads cached text embeddings of another tool, and checks that they equal the run's own.

    The first file with a given set of tensor names is compared with the output of the run's
    encoder, to find out which of its tensors corresponds to which of gracetune's.
    """

    def __init__(self, encoder: SampleEncoder, samples: _RunSamples) -> None:
        self._encoder = encoder
        self._samples = samples
        self._identity = encoder.identity()["text"]
        self._captions = samples.captions() | {EMPTY_PROMPT}
        self._by_digest = captions_by_digest(self._captions)
        self._matches: dict[frozenset[str], dict[str, TensorMatch]] = {}

    def read(self, path: Path) -> tuple[CacheKey, dict[str, Tensor]]:
        """Return the cache key and text embeddings of another tool's file, as gracetune's tensors.

        Raises an error if a check fails.
        """
        entry = read_foreign(path)
        caption = self._caption(path, entry)
        names = frozenset(entry.tensors)
        if names not in self._matches:
            (ours,) = self._encoder.encode_text([caption])
            self._matches[names] = match_text(entry.tensors, ours)
        return text_key(caption, self._identity), convert_text(entry.tensors, self._matches[names])

    def _caption(self, path: Path, entry: ForeignEntry) -> str:
        """Return the caption of another tool's cache file.

        It is found by the digest in the file's name, in the file's metadata, or in the sample's
        text file.
        """
        digest = caption_digest(path.stem)
        if digest is not None:
            if digest not in self._by_digest:
                raise CacheError("its name is the digest of a caption that the run does not have")
            return self._by_digest[digest]
        if "caption" in entry.metadata:
            caption = str(entry.metadata["caption"])
            if caption not in self._captions:
                raise CacheError(f"the run has no caption {caption!r}")
            return caption
        sample = self._samples.find(entry.stem)[-1]
        file = sample.file.with_suffix(".txt")
        if not file.is_file() or file.stat().st_mtime > path.stat().st_mtime:
            raise CacheError("it does not name its caption, and the text file is newer or missing")
        return sample.item.sample.caption


@dataclass(frozen=True, slots=True)
class TensorMatch:
    """Rule that converts a tensor of another tool's text embeddings to one of gracetune's."""

    theirs: str
    """Name of the other tool's tensor; empty for an attention mask, which is filled with ones."""
    trim: TokenTrim
    """Way to remove padding tokens from the other tool's tensor (see `TOKEN_TRIMS`)."""
    like: Tensor
    """A tensor with the dtype and shape of gracetune's; if it has a row per token, with no rows."""


def stem_digest(stem: str) -> str:
    """Return the SHA-256 digest of a sample's stem, which SimpleTuner uses as file name."""
    return hashlib.sha256(stem.encode()).hexdigest()


def captions_by_digest(captions: Iterable[str]) -> dict[str, str]:
    """Return captions by their MD5 digest, which SimpleTuner uses as file name."""
    return {hashlib.md5(c.encode(), usedforsecurity=False).hexdigest(): c for c in captions}


def caption_digest(stem: str) -> str | None:
    """Return the caption digest in a SimpleTuner file name (stem); None if it has none."""
    found = _CAPTION_DIGEST.fullmatch(stem)
    return None if found is None else found["digest"]


def match_text(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, TensorMatch]:
    """Find which of another tool's tensors corresponds to each of gracetune's.

    `theirs` and `ours` are the two tools' embeddings of the same caption.
    """
    return {name: _match(name, tensor.cpu(), theirs) for name, tensor in ours.items()}


def convert_text(
    theirs: Mapping[str, Tensor], matches: Mapping[str, TensorMatch]
) -> dict[str, Tensor]:
    """Convert another tool's text embeddings to gracetune's tensor names and dtypes.

    Padding tokens are removed.
    """
    converted, length = {}, 0
    for name, match in matches.items():
        if match.theirs:
            tensor = _trim(theirs, match.theirs, match.trim).to(match.like.dtype)
            if tensor.shape[1:] != match.like.shape[1:] or not len(tensor):
                raise CacheError(
                    f"its {match.theirs!r} has the shape {tuple(theirs[match.theirs].shape)}"
                )
            converted[name] = tensor
            length = max(length, len(tensor) if tensor.ndim > 1 else 0)
    masks = {name: match.like for name, match in matches.items() if not match.theirs}
    converted |= {name: like.new_ones(length) for name, like in masks.items()}
    return {name: converted[name] for name in matches}


def _match(name: str, ours: Tensor, theirs: Mapping[str, Tensor]) -> TensorMatch:
    if ours.dtype == torch.bool and ours.all():
        return TensorMatch("", "whole", ours)
    best = 0.0
    for other, tensor in theirs.items():
        if not tensor.is_floating_point():
            continue
        for trim in TOKEN_TRIMS:
            trimmed = _trim(theirs, other, trim)
            if trimmed.shape != ours.shape or not ours.numel():
                continue
            equal, cosine = _compare_encodings(trimmed, ours)
            if equal:
                return TensorMatch(other, trim, ours[:0] if ours.ndim > 1 else ours)
            best = max(best, cosine)
    raise CacheError(
        f"it is from another encoder: no tensor is like our {name!r} of {tuple(ours.shape)}; the "
        f"best cosine similarity is {best:.3f}"
    )


def _trim(theirs: Mapping[str, Tensor], name: str, trim: TokenTrim) -> Tensor:
    """Return a tensor of another tool's embeddings without batch dimension and padding tokens."""
    tensor = theirs[name]
    while tensor.ndim > 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim < 2 or trim == "whole":
        return tensor
    if trim == "stripped":
        used = tensor.flatten(1).ne(0).any(dim=1).nonzero()
        return tensor[: int(used[-1]) + 1] if len(used) else tensor[:0]
    for other, mask in theirs.items():
        if "mask" in other and mask.numel() == len(tensor):
            return tensor[mask.flatten().bool()]
    return tensor[:0]
