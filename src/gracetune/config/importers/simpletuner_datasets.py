"""Translate the datasets of SimpleTuner, the entries of its `multidatabackend.json`.

Some entries are no datasets here: caches of embeddings are not needed, and a conditioning dataset
becomes the control images or the masks of the dataset that names it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.importers.report import MISSING, ImportedRun, KeyReader
from gracetune.config.importers.values import (
    as_bool,
    as_number,
    clip_length,
    is_off,
    parse_scalar,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CACHE_TYPES = (
    "text_embeds",
    "image_embeds",
    "conditioning_image_embeds",
    "distillation_cache",
)
"""Values of `dataset_type` that are caches and no data."""
SUFFIXES = {
    "image": {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".jxl", ".heic"},
    "video": {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"},
}
"""Suffixes by which the samples of a folder are counted."""
GLOBAL_KEYS = (
    "resolution",
    "resolution_type",
    "minimum_image_size",
    "maximum_image_size",
    "target_downsample_size",
    "caption_strategy",
    "instance_prompt",
    "prepend_instance_prompt",
    "only_instance_prompt",
    "aspect_bucket_alignment",
    "max_upscale_threshold",
    "disable_multiline_split",
)
"""Options of the config that apply to every dataset that does not set them itself."""
GLOBAL_DEFAULTS = {
    "resolution": 1024,
    "resolution_type": "pixel_area",
    "caption_strategy": "filename",
}
ALIGNMENT = 64
"""Pixels to which SimpleTuner rounds a resolution in megapixels."""
WAN_FRAMERATE = 15
"""Frame rate that SimpleTuner assumes for Wan."""
DEFAULT_SECONDS = 5
"""Length of a clip in SimpleTuner if `video.num_frames` is not set."""

CLOSER_CROPS = (
    "SimpleTuner shrinks large images to target_downsample_size and then cuts the resolution out "
    "of them; here an image is shrunk until the crop just fits, so the crop shows more of it. "
    "There is nothing to do, unless you want closer crops: then crop the files yourself"
)
_CACHED = "gracetune keeps its own cache; see cache_config"
_SCANNED = "the folder is listed when a run starts"
NOT_NEEDED = {
    "cache_dir_vae": _CACHED,
    "cache_dir": _CACHED,
    "cache_dir_conditioning_image_embeds": _CACHED,
    "conditioning_image_embed_batch_size": _CACHED,
    "conditioning_image_embeds": _CACHED,
    "text_embeds": _CACHED,
    "image_embeds": _CACHED,
    "vae_cache_ondemand": _CACHED,
    "vae_cache_disable": _CACHED,
    "vae_batch_size": _CACHED,
    "vae_cache_scan_behaviour": _CACHED,
    "text_cache_ondemand": _CACHED,
    "text_cache_disable": _CACHED,
    "write_batch_size": _CACHED,
    "read_batch_size": _CACHED,
    "text_encoder_batch_size": _CACHED,
    "image_processing_batch_size": _CACHED,
    "max_workers": _CACHED,
    "hash_filenames": _CACHED,
    "compress_cache": _CACHED,
    "compress_disk_cache": _CACHED,
    "skip_file_discovery": _SCANNED,
    "preserve_data_backend_cache": _SCANNED,
    "metadata_backend": _SCANNED,
    "metadata_update_interval": _SCANNED,
    "scan_for_errors": "unreadable files are always found and reported",
    "default": "it belongs to caches",
    "delete_unwanted_images": "gracetune deletes no files; samples that are left out are reported",
    "delete_problematic_images": "gracetune deletes no files; unreadable ones are reported",
    "delete_nsfw_images": "gracetune deletes no files",
    "max_aspect_bucket": "bucket sizes follow from bucket_step and max_aspect",
    "streaming": "remote files are read when they are needed",
    "revision": "the newest files are read",
    "shuffle": "samples are shuffled in every epoch",
    "auto_load": _SCANNED,
    "auto_generated": "SimpleTuner sets it itself",
    "conditioning_config": "SimpleTuner sets it itself",
    "disable_validation": "prompts for validation are in the validation section",
    "bucket_report": "the buckets are reported when a run starts",
    "metadata": "captions are read from the shards",
    "webshart": "shards are read with gracetune's own cache",
    "webshart_optimize_captions": "captions are read from the shards",
    "webshart_optimise_captions": "captions are read from the shards",
    "num_proc": "files are read by as many threads as there are CPUs",
    "csv_cache_dir": _CACHED,
    "csv_caption_column": "see `type`",
    "csv_url_column": "see `type`",
    "csv_file": "see `type`",
}
"""Keys of a dataset that have no effect on the result here, with the reason."""
NOT_SUPPORTED = {
    "train_batch_size": "all datasets have the batch size of train.batch_size",
    "max_num_samples": "move the samples to use to a folder, or lower datasets[].weight",
    "start_epoch": "train in two runs; all datasets are used from the first step",
    "start_step": "train in two runs; all datasets are used from the first step",
    "end_epoch": "train in two runs; all datasets are used to the last step",
    "end_step": "train in two runs; all datasets are used to the last step",
    "disable_after_epoch_step": "train in two runs; all datasets are used to the last step",
    "is_regularisation_data": "add the images as another dataset with a low weight",
    "is_regularization_data": "add the images as another dataset with a low weight",
    "slider_strength": "sliders are not available; train two adapters",
    "grounding": "grounding is not available; remove it",
    "grounding_data": "grounding is not available; remove it",
    "s2v_datasets": "models that read audio are not available",
    "conditioning": "make the control images with another tool; see conditioning_data_dir",
    "caption_filter_list": "change the caption files; captions are used as they are",
    "max_upscale_threshold": "set datasets[].min_resolution to drop small images",
    "filter_func": "filter the files before training",
    "composite_image_config": "split the images before training",
    "split_composite_images": "split the images before training",
    "fallback_caption_column": "one column has the captions",
    "description_column": "one column has the captions",
    "audio": "models that read audio are not available",
    "distillation_type": "distillation is not available",
    "split": "all files of the repository are read; name a folder with the files to use",
    "subset": "all files of the repository are read; name a folder with the files to use",
    "token": "log in with `hf auth login`, or set HF_TOKEN",
    "subfolder": "set instance_data_dir to the folder",
    "source_dataset_id": "set conditioning_data of the dataset that it belongs to",
}
"""Keys of a dataset that would change the result, with what to do."""
CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key")
KNOWN_KEYS = frozenset(
    (
        *(*NOT_NEEDED, *NOT_SUPPORTED, *GLOBAL_KEYS, *CREDENTIALS),
        *("id", "type", "dataset_type", "disabled", "disable", "instance_data_dir", "dataset_name"),
        *("crop", "crop_style", "crop_aspect", "crop_aspect_buckets", "repeats", "probability"),
        *("minimum_aspect_ratio", "maximum_aspect_ratio", "video", "parquet", "huggingface"),
        *("caption_column", "image_column", "video_column", "caption_shuffle", "conditioning_data"),
        *("conditioning_type", "timestep_sampling_offset", "vae_cache_clear_each_epoch"),
        *("aws_bucket_name", "aws_region_name", "aws_endpoint_url", "aws_data_prefix", "source"),
        *("instance_data_root", "in_memory", "caption_dropout_probability"),
    )
)


def reader_without_nulls(
    imported: ImportedRun, file: str, tree: Mapping[str, object], path: tuple[str | int, ...] = ()
) -> KeyReader:
    """Return a reader for the keys that have a value; those that are null are reported at once."""
    nulls = KeyReader(imported, file, {k: v for k, v in tree.items() if v is None}, path)
    for key in nulls.unreported():
        nulls.not_needed(key, "null leaves it at its default")
    return KeyReader(imported, file, {k: v for k, v in tree.items() if v is not None}, path)


def import_datasets(
    config: KeyReader,
    file: str,
    entries: Sequence[Mapping[str, object]],
    *,
    takes_control: bool,
) -> int | None:
    """Translate all datasets, and the options of the config that apply to datasets.

    Returns the number of samples in an epoch, or None if they cannot be counted.
    `takes_control` is true for models that edit an image.
    """
    imported = config.imported
    common = {key: config.peek(key) for key in GLOBAL_KEYS if config.peek(key) is not MISSING}
    by_id = {str(entry.get("id")): entry for entry in entries}
    paired = {name for entry in entries for name in texts(entry.get("conditioning_data", ""))}
    index, total, used = 0, 0, dict[str, str]()
    for number_, entry in enumerate(entries):
        reader = reader_without_nulls(imported, file, entry, (number_,))
        kind = str(entry.get("dataset_type") or "image")
        if str(entry.get("id")) in paired or "conditioning_type" in entry:
            kind = "conditioning"
        if as_bool(entry.get("disabled")) or as_bool(entry.get("disable")):
            _report_all(reader, "the dataset is disabled")
        elif kind in CACHE_TYPES:
            _report_all(reader, _CACHED)
        elif kind == "conditioning":
            _import_conditioning(reader, str(entry.get("id")) in paired)
        elif kind not in ("image", "video"):
            fix = f"a dataset of type {kind} is not used here"
            imported.refuse(f"{file}: dataset_type is {kind!r}: {fix}. Remove the entry.")
            for key in reader.unreported():
                reader.not_supported(key, fix)
        else:
            dataset = _Dataset(reader, f"datasets.{index}", common, used)
            count = dataset.run(kind, config, by_id, takes_control=takes_control)
            total = -1 if count is None or total < 0 else total + count
            index += 1
        reader.finish(KNOWN_KEYS)
    if not index:
        imported.refuse(f"{file} has no dataset of images or videos. Add one.")
    _report_common(config, used)
    _import_dropout(config, index)
    return total if total >= 0 else None


def _report_all(reader: KeyReader, why: str) -> None:
    for key in reader.unreported():
        reader.not_needed(key, why)


def _import_conditioning(reader: KeyReader, is_paired: bool) -> None:
    """Report an entry of conditioning data; the dataset that names it reads its folder."""
    for key in ("id", "type", "dataset_type", "instance_data_dir", "conditioning_type"):
        if not is_paired:
            reader.not_needed(key, "no dataset names it in conditioning_data")
        elif reader.peek(key) is not MISSING:
            reader.report(key, "translated", "see conditioning_data of the dataset that names it")
    _report_all(reader, "control images and masks are cropped and resized like their samples")


def _report_common(config: KeyReader, used: Mapping[str, str]) -> None:
    for key in GLOBAL_KEYS:
        if config.peek(key) is MISSING:
            continue
        if used.get(key):
            config.report(key, "not supported", used[key])
        elif key in used:
            config.report(key, "translated", f"see the datasets that do not set {key} themselves")
        else:
            config.not_needed(key, "every dataset sets it, or it has no effect")


def _import_dropout(config: KeyReader, count: int) -> None:
    value = config.peek("caption_dropout_probability")
    why = "caption_dropout_probability is 0.1"
    for index in range(count):
        setting = f"datasets.{index}.caption_dropout"
        if value is MISSING:
            config.imported.default(setting, 0.1, why)
        else:
            config.imported.set(setting, value)
    if value is not MISSING and count:
        config.report("caption_dropout_probability", "taken", "datasets.*.caption_dropout")
    config.not_needed("caption_dropout_probability", "there are no datasets")


def _edge(value: object, kind: str, *, is_limit: bool = False) -> object:
    """Return a size in pixels, the edge of a square; SimpleTuner's may be in megapixels.

    SimpleTuner rounds the sizes that it resizes to, but not the limits of sizes (`is_limit`).
    """
    value = parse_scalar(value)
    found = as_number(value)
    if found is None:
        return None if value is MISSING else value
    if kind == "area":
        exact = math.sqrt(max(found, 0) * 1e6)
        return round(exact) if is_limit else round(exact / ALIGNMENT) * ALIGNMENT
    return int(found)


class _Dataset:
    """Translates one dataset of images or videos."""

    def __init__(
        self, reader: KeyReader, prefix: str, common: Mapping[str, object], used: dict[str, str]
    ) -> None:
        self.reader = reader
        self.imported = reader.imported
        self.prefix = prefix
        self.common = common
        self.used = used
        """Options of the config that datasets take, each with what to do if it is not supported."""

    def peek(self, key: str) -> object:
        """Return the dataset's value of a key, or that of the config, or SimpleTuner's default."""
        own = self.reader.peek(key)
        if own is not MISSING:
            return own
        return self.common.get(key, GLOBAL_DEFAULTS.get(key, MISSING))

    def value(self, key: str) -> object:
        """Return the value of a key as `peek` does, and note if it is the config's."""
        if self.reader.peek(key) is MISSING and key in self.common:
            self.used.setdefault(key, "")
        return self.peek(key)

    def put(self, key: str, setting: str, value: object, why: str = "") -> None:
        """Set a setting of the dataset from a key of its own, or from a default."""
        name = f"{self.prefix}.{setting}"
        own = self.reader.peek(key)
        if own is MISSING:
            self.imported.set(name, value)
        elif own == value and not why:
            self.reader.take(key, name)
        else:
            self.reader.translate(key, name, value, why)

    def run(
        self,
        kind: str,
        config: KeyReader,
        by_id: Mapping[str, Mapping[str, object]],
        *,
        takes_control: bool,
    ) -> int | None:
        """Translate all keys; return the number of samples in an epoch, None if it is unknown."""
        reader = self.reader
        reader.take("id", f"{self.prefix}.id")
        for key in ("disabled", "disable"):
            reader.not_needed(key, "it is off")
        self.put("dataset_type", "dataset_type", kind)
        self.location(config)
        self.size()
        self.crop()
        self.captions()
        self.conditioning(by_id, takes_control=takes_control)
        if kind == "video":
            self.video(config)
        else:
            reader.not_needed("video", "the dataset has no videos")
        repeats = as_number(reader.peek("repeats"))
        if repeats is not None:
            why = "SimpleTuner does not count the first use"
            self.put("repeats", "repeats", int(repeats) + 1, why)
        probability = as_number(reader.peek("probability"))
        if probability == 1:
            reader.not_needed("probability", "datasets are mixed by their samples and repeats")
        elif probability:
            self.put("probability", "weight", probability)
        reader.not_supported("probability", "remove the dataset, or set disabled: true")
        if as_number(reader.peek("timestep_sampling_offset")):
            fix = "set train.timestep_mean, which applies to all datasets"
            reader.not_supported("timestep_sampling_offset", fix)
        reader.not_needed("timestep_sampling_offset", "it is off")
        self.rest()
        return self.count(kind)

    def location(self, config: KeyReader) -> None:
        """Translate where the samples are."""
        reader, kind = self.reader, str(self.reader.peek("type"))
        needed = {"huggingface": "dataset_name", "webshart": "source", "aws": "aws_bucket_name"}
        if kind in needed and reader.peek(needed[kind]) is MISSING:
            fix = f"set {needed[kind]}, or another type"
            self.imported.refuse(
                f"{reader.file}: the dataset {reader.peek('id')!r} is of type {kind}, but "
                f"{needed[kind]} is missing: {fix}."
            )
            reader.not_supported("type", fix)
        elif kind == "aws":
            self.s3()
        elif kind in needed:
            self.hub(needed[kind])
        elif kind == "csv":
            fix = "download the files, and list them with their captions in metadata.jsonl"
            self.imported.refuse(
                f"{reader.file}: the dataset {reader.peek('id')!r} is a CSV list of addresses. "
                f"Use another type: {fix}."
            )
            reader.not_supported("type", fix)
        else:
            folder = reader.peek("instance_data_dir")
            reader.take("type", f"{self.prefix}.type")
            if folder is MISSING:
                folder = reader.peek("instance_data_root")
            if folder is not MISSING:
                where = self.resolve(str(folder), config)
                key = "instance_data_dir"
                self.put(
                    key if reader.peek(key) is not MISSING else "instance_data_root", key, where
                )
        staging = reader.section("in_memory")
        if staging is not None:
            for key in staging.unreported():
                staging.take(key, f"{self.prefix}.in_memory.{key}")
        for key in ("instance_data_dir", "instance_data_root", "dataset_name", "source"):
            reader.not_needed(key, "another key says where the samples are")

    def resolve(self, text: str, config: KeyReader) -> str:
        """Fill in SimpleTuner's placeholders in a path, such as `{model_family}`."""
        for name in ("model_family", "output_dir", "model_flavour"):
            text = text.replace(f"{{{name}}}", str(config.peek(name)))
        return text.replace("{id}", str(self.reader.peek("id")))

    def hub(self, key: str) -> None:
        """Translate the name of a dataset on the Hugging Face hub, or the folder of one."""
        reader, name = self.reader, str(self.reader.peek(key))
        inner = reader.peek("subfolder")
        if os.path.isdir(os.path.expanduser(name)) or "://" in name or name.startswith(("/", ".")):
            where, why = name if is_off(inner) else os.path.join(name, str(inner)), ""
        else:
            folder = "" if is_off(inner) else f"/{str(inner).strip('/')}"
            where = f"hf://datasets/{name}{folder}"
            why = "its files are read from the hub, which needs `gracetune[remote]`"
        self.put(key, "instance_data_dir", where, why)
        if not is_off(inner):
            setting = f"{self.prefix}.instance_data_dir"
            reader.report("subfolder", "translated", f"{setting} is {where}", setting)
        self.put("type", "type", "tar" if key == "source" else "local")
        self.columns()

    def columns(self) -> None:
        """Translate the columns of a dataset on the hub, which may have a section of their own."""
        reader = self.reader
        columns = reader.section("huggingface")
        for section in (reader, columns):
            if section is None:
                continue
            for theirs, ours in (
                ("caption_column", "caption"),
                ("image_column", "image"),
                ("video_column", "image"),
            ):
                value = section.peek(theirs)
                setting = f"{self.prefix}.columns.{ours}"
                if isinstance(value, str):
                    section.take(theirs, setting)
                elif isinstance(value, list) and value:
                    section.translate(theirs, setting, value[0], "only one column is used")
            for theirs in ("width_column", "height_column", "num_frames_column", "fps_column"):
                section.not_needed(theirs, "sizes are read from the files")
        if columns is not None:
            for theirs, fix in NOT_SUPPORTED.items():
                columns.not_supported(theirs, fix)
            columns.finish()

    def s3(self) -> None:
        """Translate the address of a dataset in a bucket."""
        reader = self.reader
        bucket, prefix = reader.peek("aws_bucket_name"), reader.peek("aws_data_prefix")
        path = "" if is_off(prefix) else f"/{str(prefix).strip('/')}"
        self.put("aws_bucket_name", "instance_data_dir", f"s3://{bucket}{path}")
        self.put("type", "type", "remote")
        if not is_off(prefix):
            reader.report("aws_data_prefix", "translated", f"{self.prefix}.instance_data_dir")
        reader.not_needed("aws_data_prefix", "it is empty")
        options: dict[str, object] = {}
        if not is_off(reader.peek("aws_endpoint_url")):
            options["endpoint_url"] = reader.peek("aws_endpoint_url")
            text = f"{self.prefix}.remote.options.endpoint_url"
            reader.report("aws_endpoint_url", "taken", text)
        if not is_off(reader.peek("aws_region_name")):
            options["client_kwargs"] = {"region_name": reader.peek("aws_region_name")}
            text = f"{self.prefix}.remote.options.client_kwargs"
            reader.report("aws_region_name", "taken", text)
        for key in ("aws_endpoint_url", "aws_region_name"):
            reader.not_needed(key, "it is empty")
        if options:
            self.imported.set(f"{self.prefix}.remote.options", options)
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        for key in CREDENTIALS:
            reader.not_supported(key, f"credentials are not copied into run files; {fix}")

    def size(self) -> None:
        """Translate the resolution and the limits of size and aspect ratio."""
        kind = str(self.value("resolution_type"))
        pixels = "the resolution is an edge in pixels, also with `area`"
        ours, why = ("edge", "") if kind == "pixel" else ("area", pixels)
        self.put("resolution_type", "resolution_type", ours, why)
        self.put("resolution", "resolution", _edge(self.value("resolution"), kind))
        alignment = as_number(self.value("aspect_bucket_alignment"))
        if alignment and alignment != ALIGNMENT:
            self.put("aspect_bucket_alignment", "bucket_step", int(alignment))
        smallest = _edge(self.value("minimum_image_size"), kind, is_limit=True)
        if smallest:
            setting = "min_edge" if kind == "pixel" else "min_resolution"
            why = "" if kind == "pixel" else "SimpleTuner compares areas"
            self.put("minimum_image_size", setting, smallest, why)
        self.reader.not_needed("minimum_image_size", "no sample is too small")
        low = as_number(self.reader.peek("minimum_aspect_ratio"))
        high = as_number(self.reader.peek("maximum_aspect_ratio"))
        limit = max(high or 1, 1 / low if low else 1)
        why = "one limit for tall and wide samples"
        for key in ("minimum_aspect_ratio", "maximum_aspect_ratio"):
            if limit > 1 and self.reader.peek(key) is not MISSING:
                self.put(key, "max_aspect", round(limit, 4), why)
            self.reader.not_needed(key, "it excludes no sample")
        self.downsampling(kind)

    def not_supported(self, key: str, fix: str) -> None:
        """Report a key that cannot be used, whether the dataset or the config sets it."""
        self.reader.not_supported(key, fix)
        if self.reader.peek(key) is MISSING and key in self.common:
            self.used[key] = fix

    def downsampling(self, kind: str) -> None:
        """Report the sizes that SimpleTuner resizes large images to before it crops them.

        It does so if both sizes are set. Images that are smaller than the crop are enlarged.
        """
        reader, keys = self.reader, ("maximum_image_size", "target_downsample_size")
        target, edge = (
            as_number(_edge(self.peek(key), kind)) or 0 for key in (keys[1], "resolution")
        )
        is_closer = target > edge and not is_off(self.peek(keys[0]))
        for key in keys:
            if not as_bool(reader.peek("crop")):
                reader.not_needed(key, "samples are always resized to their bucket")
            elif is_closer:
                self.not_supported(key, CLOSER_CROPS if key == keys[1] else f"see {keys[1]}")
            else:
                reader.not_needed(key, "samples are resized to their bucket before cropping")

    def crop(self) -> None:
        """Translate the crop; gracetune resizes a sample to cover its bucket and then crops it."""
        reader = self.reader
        style, aspect = reader.peek("crop_style"), reader.peek("crop_aspect")
        if not as_bool(reader.peek("crop")):
            if reader.peek("crop") is not MISSING:
                why = "samples are cropped only where their bucket has another aspect ratio"
                reader.report("crop", "translated", f"{self.prefix}.crop is center: {why}")
            for key in ("crop_style", "crop_aspect", "crop_aspect_buckets"):
                reader.not_needed(key, "crop is off")
            reader.not_needed("vae_cache_clear_each_epoch", "there are no random crops")
            return
        ours = {"random": "random", "corner": "top"}.get(str(style), "center")
        resized = "the sample is first resized to cover its bucket"
        reader.report("crop", "translated", f"{self.prefix}.crop is {ours}: {resized}")
        if style == "face":
            reader.not_supported("crop_style", "faces are not searched; the centre is used")
        elif style == ours:
            reader.take("crop_style", f"{self.prefix}.crop")
        elif style is not MISSING:
            self.put("crop_style", "crop", ours, "")
        self.imported.set(f"{self.prefix}.crop", ours)
        self.crop_aspect(aspect)
        if ours == "random" and as_bool(reader.peek("vae_cache_clear_each_epoch")):
            setting = "augmentations_cache_mode"
            self.put("vae_cache_clear_each_epoch", setting, "refresh_each_epoch")
        reader.not_needed("vae_cache_clear_each_epoch", "crops are drawn once")

    def crop_aspect(self, aspect: object) -> None:
        """Translate the aspect ratios of crops."""
        reader, nearest = self.reader, "each sample goes to the bucket nearest to it"
        if aspect in (MISSING, "square"):
            self.put("crop_aspect", "bucket_aspects", [1.0], "all crops are squares")
            reader.not_needed("crop_aspect_buckets", "all crops are squares")
        elif aspect == "preserve":
            reader.not_needed("crop_aspect", nearest)
            reader.not_needed("crop_aspect_buckets", "crop_aspect is preserve")
        if "crop_aspect_buckets" in reader.unreported() and (buckets := self.aspects()):
            self.put("crop_aspect_buckets", "bucket_aspects", buckets)
        reader.not_needed("crop_aspect_buckets", "all buckets are used")
        if aspect == "closest":
            reader.not_needed("crop_aspect", nearest)
        reader.not_supported("crop_aspect", f"no aspect ratio is drawn; {nearest}")

    def aspects(self) -> list[float]:
        """Return the aspect ratios of `crop_aspect_buckets`, which may have weights."""
        values = self.reader.peek("crop_aspect_buckets")
        entries = values if isinstance(values, list) else []
        found = [
            as_number(each.get("aspect") if isinstance(each, dict) else each) for each in entries
        ]
        kept = [float(each) for each in found if each]
        widest = max((max(each, 1 / each) for each in kept), default=1.0)
        if widest > 3:  # the default of max_aspect, which would drop such samples
            self.imported.set(f"{self.prefix}.max_aspect", round(widest + 0.01, 2))
        return kept

    def captions(self) -> None:
        """Translate where captions come from, and what is added to them."""
        reader = self.reader
        prompt = self.value("instance_prompt")
        text = "" if is_off(prompt) else str(prompt)
        strategy = str(self.value("caption_strategy")).replace("_", "").replace("-", "")
        table = reader.section("parquet")
        if as_bool(self.value("only_instance_prompt")) or strategy == "instanceprompt":
            self.put("caption_strategy", "caption_strategy", "instanceprompt")
            self.put("instance_prompt", "instance_prompt", text)
            if as_bool(reader.peek("only_instance_prompt")):
                name = f"{self.prefix}.caption_strategy is instanceprompt"
                reader.report("only_instance_prompt", "translated", name)
        elif strategy in ("textfile", "filename"):
            why = "a file with several lines is one caption here" if strategy == "textfile" else ""
            self.put("caption_strategy", "caption_strategy", strategy, why)
        elif strategy in ("huggingface", "webshart", "csv"):
            why = "captions come with the samples"
            self.put("caption_strategy", "caption_strategy", "textfile", why)
        elif strategy == "parquet":
            self.parquet(table)
        elif reader.peek("caption_strategy") is not MISSING:
            fix = "set textfile, jsonl, parquet, filename or instanceprompt"
            reader.not_supported("caption_strategy", fix)
        if table is not None:
            _report_all(table, "caption_strategy is not parquet")
        self.added_words(text, strategy)
        self.shuffle()
        if as_bool(self.peek("disable_multiline_split")) or strategy != "textfile":
            reader.not_needed("disable_multiline_split", "a caption file is one caption")
        else:
            self.not_supported("disable_multiline_split", "each caption file is one caption here")

    def added_words(self, text: str, strategy: str) -> None:
        reader = self.reader
        prepends = as_bool(self.value("prepend_instance_prompt")) and strategy != "instanceprompt"
        if prepends and text:
            name = f"{self.prefix}.caption_prefix"
            self.imported.set(name, text)
            for key in ("prepend_instance_prompt", "instance_prompt"):
                if reader.peek(key) is not MISSING and key in reader.unreported():
                    reader.report(key, "translated", f'{name} is "{text}"')
        reader.not_needed("prepend_instance_prompt", "captions have no prefix")
        reader.not_needed("only_instance_prompt", "it is off")
        reader.not_needed("instance_prompt", "caption_strategy does not use it")

    def parquet(self, table: KeyReader | None) -> None:
        """Report a table of captions, which must have gracetune's names to be found."""
        fix = "name the table metadata.parquet and its columns file_name and text"
        path = "" if table is None else str(table.peek("path"))
        names = table is not None and (
            table.peek("filename_column"),
            table.peek("caption_column"),
        ) == ("file_name", "text")
        kind = "jsonl" if path.endswith(".jsonl") else "parquet"
        fits = names and Path(path).name == f"metadata.{kind}"
        self.put("caption_strategy", "caption_strategy", kind, "" if fits else fix)
        if table is None:
            return
        for key in ("path", "filename_column", "caption_column"):
            if fits:
                table.not_needed(key, "the table and its columns have the usual names")
            table.not_supported(key, fix)
        for key in ("width_column", "height_column", "identifier_includes_extension"):
            table.not_needed(key, "files are found by name, and sizes are read from them")
        table.not_supported("fallback_caption_column", "one column has the captions")
        table.not_supported("bbox_column", "grounding is not available")
        table.finish()

    def shuffle(self) -> None:
        settings = self.reader.section("caption_shuffle")
        if settings is None:
            return
        if not as_bool(settings.peek("enable")):
            _report_all(settings, "caption_shuffle.enable is off")
            return
        if settings.peek("split_on") not in (MISSING, "comma"):
            for key in settings.unreported():
                settings.not_supported(key, "only tags with commas between them are shuffled")
            return
        settings.translate("enable", f"{self.prefix}.caption_shuffle", True)
        settings.take("position_start", f"{self.prefix}.caption_keep_tokens")
        settings.not_needed("split_on", "tags have commas between them")
        for key in ("count", "include_original", "seed"):
            settings.not_needed(key, "tags are shuffled again for each use")
        settings.finish()

    def conditioning(
        self, by_id: Mapping[str, Mapping[str, object]], *, takes_control: bool
    ) -> None:
        """Translate the datasets of control images or masks that this dataset names."""
        reader = self.reader
        generated = reader.peek("conditioning")
        if not is_off(generated) and takes_control:
            fix = "make them with another tool, and set conditioning_data to their dataset"
            self.imported.refuse(
                f"{reader.file}: `conditioning` of the dataset {reader.peek('id')!r} generates "
                f"control images, which gracetune does not: {fix}."
            )
        without = "this model is trained without control images; see docs/families.md"
        if not takes_control and not is_off(generated):
            reader.not_supported("conditioning", without)
        controls: list[str] = []
        for name in texts(reader.peek("conditioning_data")):
            entry = by_id.get(name, {})
            folder = str(entry.get("instance_data_dir") or "")
            if not folder:
                reader.not_supported("conditioning_data", f"{name} has no instance_data_dir")
            elif entry.get("conditioning_type") == "mask":
                self.put("conditioning_data", "mask_data_dir", folder)
            elif takes_control:
                controls.append(folder)
            else:
                reader.not_supported("conditioning_data", without)
        if controls:
            value: object = controls if len(controls) > 1 else controls[0]
            self.put("conditioning_data", "conditioning_data_dir", value)
        reader.not_needed("conditioning_data", "it is empty")
        reader.not_needed("conditioning_type", "the conditioning dataset has its own")

    def video(self, config: KeyReader) -> None:
        """Translate the lengths of clips, which must be of the form 4n+1."""
        video = self.reader.section("video")
        rate = as_number(config.peek("framerate")) or WAN_FRAMERATE
        frames = as_number(video.peek("num_frames")) if video is not None else None
        low = as_number(video.peek("min_frames")) if video is not None else None
        high = as_number(video.peek("max_frames")) if video is not None else None
        step = as_number(video.peek("frame_interval")) if video is not None else None
        setting = f"{self.prefix}.frames"
        if video is None:
            ours = clip_length(rate * DEFAULT_SECONDS)
            self.imported.default(setting, ours, f"video.num_frames is {DEFAULT_SECONDS} seconds")
            return
        if frames is None and low and video.peek("bucket_strategy") == "resolution_frames":
            counts = range(int(low), int(high or low) + 1, int(step or 8))
            lengths = sorted({clip_length(count) for count in counts})
            for key in ("min_frames", "max_frames", "frame_interval", "bucket_strategy"):
                if video.peek(key) is not MISSING:
                    video.translate(key, setting, lengths, "each clip has the longest that fits")
        elif frames:
            ours = clip_length(frames)
            why = "" if ours == frames else "lengths are of the form 4n+1"
            video.translate("num_frames", setting, ours, why)
        self.imported.default(setting, clip_length(low or rate * DEFAULT_SECONDS), "min_frames")
        if low and frames and low > frames:
            video.not_supported("min_frames", "videos that are long enough for num_frames are used")
        video.not_needed("min_frames", "shorter videos are dropped and reported")
        if high:
            video.not_supported("max_frames", "longer videos are cut; see datasets[].clip")
        video.not_needed("max_frames", "longer videos are cut; see datasets[].clip")
        video.not_needed("frame_interval", "clips have the length of num_frames")
        video.not_needed("bucket_strategy", "buckets have a size and a length")
        video.not_needed("is_i2v", "the model decides; see model.task")
        video.finish()

    def rest(self) -> None:
        """Report the keys of the tables."""
        for key, why in NOT_NEEDED.items():
            self.reader.not_needed(key, why)
        for key, fix in NOT_SUPPORTED.items():
            if key == "start_epoch" and as_number(self.reader.peek(key)) == 1:
                self.reader.not_needed(key, "the dataset is used from the first step")
            elif is_off(self.reader.peek(key)):
                self.reader.not_needed(key, "it is off")
            self.reader.not_supported(key, fix)
        for key in ("huggingface", "source"):
            self.reader.not_needed(key, "the dataset is of another type")
        for key in GLOBAL_KEYS:
            self.reader.not_needed(key, "it has no effect here")

    def count(self, kind: str) -> int | None:
        """Return the number of samples in an epoch if they are files in a folder, else None."""
        folder = self.imported.get(f"{self.prefix}.instance_data_dir")
        if not isinstance(folder, str) or not os.path.isdir(folder):
            return None
        found = sum(
            os.path.splitext(name)[1].lower() in SUFFIXES[kind]
            for _, _, names in os.walk(folder, followlinks=True)
            for name in names
        )
        repeats = as_number(self.imported.get(f"{self.prefix}.repeats")) or 1
        return int(found * repeats) or None
