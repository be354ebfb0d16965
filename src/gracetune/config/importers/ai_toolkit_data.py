"""Import the sections `datasets` and `sample` of an ai-toolkit job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.dataset_schema import TRIGGER
from gracetune.config.importers import ai_toolkit_keys as tables
from gracetune.config.importers.report import MISSING, DefaultReport
from gracetune.config.importers.values import (
    EMPTY,
    NO_EFFECT,
    as_bool,
    as_float,
    as_int,
    as_text,
    clip_length,
    copy_flag,
    copy_value,
    finish_section,
    is_usable,
    open_section,
    put_value,
    read_value,
    set_default,
)

if TYPE_CHECKING:
    from gracetune.config.importers.ai_toolkit_keys import Job
    from gracetune.config.importers.report import KeyReader

EVERY_LENGTH = [17, 33, 49, 65, 81, 97, 113, 129]
"""Clip lengths for `auto_frame_count`; each video uses the largest that it is long enough for."""
PROMPT_FLAGS = {
    "n": ("negative_prompt", as_text),
    "w": ("width", as_int),
    "h": ("height", as_int),
    "d": ("seed", as_int),
    "seed": ("seed", as_int),
    "l": ("guidance", as_float),
    "cfg": ("guidance", as_float),
    "s": ("steps", as_int),
    "steps": ("steps", as_int),
    "frames": ("frames", as_int),
    "num_frames": ("frames", as_int),
    "ctrl_img": ("images", as_text),
}
"""Flags in ai-toolkit's prompts, such as `--w 512`, with gracetune's key for each."""
SAMPLE_KEYS = {
    "width": ("width", as_int),
    "height": ("height", as_int),
    "neg": ("negative_prompt", as_text),
    "guidance_scale": ("guidance", as_float),
    "sample_steps": ("steps", as_int),
    "num_frames": ("frames", as_int),
    "seed": ("seed", as_int),
}
"""Keys of an entry of `samples`, with gracetune's key for each."""


CONTROL_KEYS = ("control_path_1", "control_path_2", "control_path_3")
NEEDS_IMAGE = "prompts without an input image (ctrl_img) are left out, because the model needs one"
NO_DEFAULT_CAPTION = (
    "every sample needs a caption file; if none has one, set caption_strategy: instanceprompt and "
    "instance_prompt to this text"
)
MAX_FILES = 10_000
"""Number of files of a folder among which caption files are looked for."""


# Datasets


def import_datasets(job: Job, process: KeyReader) -> None:
    """Import the list `datasets`; `flip_x` and `flip_y` add flipped copies of a dataset."""
    readers = process.sections("datasets")
    if not readers:
        process.not_supported("datasets", "it must be a list of sections, so there is no data")
    if is_usable(process, "trigger_word", as_text):
        setting = "instance_prompt" if job.captions_unused else "trigger_word"
        text = (
            f"datasets[].{setting} is {job.trigger_word!r}; it also replaces [trigger] in prompts"
        )
        process.report("trigger_word", "translated", text)
    for index, reader in enumerate(readers):
        _import_dataset(job, reader, index)
    entries = job.imported.run.get("datasets", [])
    assert isinstance(entries, list), entries
    for index, reader in enumerate(readers):
        _import_flips(reader, entries, index)
    names: set[str] = set()
    for index, entry in enumerate(entries if len(entries) > 1 else ()):
        name = Path(str(entry.get("instance_data_dir", "dataset"))).name
        entry["id"] = name if name not in names else f"{name}-{index}"
        names.add(entry["id"])


def _import_dataset(job: Job, reader: KeyReader, index: int) -> None:
    here = f"datasets.{index}"
    folder_key = "dataset_path" if read_value(reader, "dataset_path", as_text) else "folder_path"
    folder = read_value(reader, folder_key, as_text)
    if folder is not None and folder.endswith((".json", ".jsonl")):
        reader.not_supported(folder_key, "set instance_data_dir to the folder of the samples")
    else:
        copy_value(reader, folder_key, f"{here}.instance_data_dir", as_text)
    other = "folder_path" if folder_key == "dataset_path" else "dataset_path"
    reader.not_needed(other, f"{folder_key} says it")
    copies = _import_resolution(reader, here)
    _import_captions(job, reader, here, folder)
    _import_controls(job, reader, here)
    _import_masks(reader, here)
    _import_clips(job, reader, here)
    repeats = max(1, read_value(reader, "num_repeats", as_int) or 1) * copies
    if repeats > 1:
        job.imported.set(f"{here}.repeats", repeats)
    if is_usable(reader, "num_repeats", as_int):
        put_value(reader, "num_repeats", f"{here}.repeats", repeats)
    copy_flag(reader, "random_crop", f"{here}.crop", "random")
    copy_flag(reader, "cache_latents_to_disk", "cache_config.persistent_cache")
    _report_flips(reader, here)
    _import_augmentations(reader, here)
    if (
        read_value(reader, "type", as_text) == "in_memory"
        or reader.peek("in_memory") is not MISSING
    ):
        job.imported.set(f"{here}.type", "in_memory")
    staging = open_section(reader, "in_memory")
    if staging is not None:
        _take_all(staging, reader.peek("in_memory"), f"{here}.in_memory")
    finish_section(reader, tables.DATASET_NOT_NEEDED, tables.DATASET_UNSUPPORTED)


def _import_resolution(reader: KeyReader, here: str) -> int:
    """Import the resolution; return how often the list has each, as in `[1024, 1024]`."""
    given = reader.peek("resolution")
    sizes = [as_int(each) for each in (given if isinstance(given, list) else [given])]
    valid = [size for size in sizes if size is not None and size >= 8]
    setting = f"{here}.resolution"
    if given is MISSING or given in EMPTY:
        reader.not_needed("resolution", "it is empty")
        set_default(reader, "resolution", setting, 512)
    elif len(valid) != len(sizes):
        reader.not_supported("resolution", "it must be a number or a list of numbers")
    else:
        once = list(dict.fromkeys(valid))
        copies = len(valid) // len(once)
        why = f"it is listed {copies} times, so repeats is multiplied by {copies}"
        value = once[0] if len(once) == 1 else once
        put_value(reader, "resolution", setting, value, why if copies > 1 else "")
        return copies
    return 1


def _import_captions(job: Job, reader: KeyReader, here: str, folder: str | None) -> None:
    key = "caption_type" if read_value(reader, "caption_type", as_text) else "caption_ext"
    suffix = (read_value(reader, key, as_text) or "txt").removeprefix(".")
    reader.not_needed("caption_ext" if key == "caption_type" else "caption_type", f"{key} says it")
    is_regular = bool(read_value(reader, "is_reg", as_bool))
    trigger = read_value(reader, "trigger_word", as_text) or job.trigger_word
    if is_usable(reader, "trigger_word", as_text):
        reader.report("trigger_word", "taken", f"{here}.trigger_word")
    default = read_value(reader, "default_caption", as_text)
    if job.captions_unused or _has_files(folder, suffix) is False:
        why = "captions are not used" if job.captions_unused else f"there are no .{suffix} files"
        text = ((not is_regular and trigger) or "") if job.captions_unused else (default or "")
        job.imported.set(f"{here}.instance_prompt", text)
        job.imported.set(f"{here}.caption_strategy", "instanceprompt")
        for each in (key, "default_caption"):
            if reader.peek(each) is not MISSING:
                said = f"{here}.caption_strategy is instanceprompt, instance_prompt is {text!r}"
                reader.report(each, "translated", f"{said}: {why}")
    else:
        job.imported.set(f"{here}.caption_strategy", "textfile")
        if suffix == "txt":
            reader.not_needed(key, "caption files have this suffix by default")
        else:
            put_value(reader, key, f"{here}.caption_extension", suffix)
        if is_usable(reader, "default_caption", as_text):
            reader.not_supported("default_caption", NO_DEFAULT_CAPTION)
    if trigger is not None and not is_regular and not job.captions_unused:
        job.imported.set(f"{here}.trigger_word", trigger)
    if job.captions_unused:
        for each in ("caption_dropout_rate", "shuffle_tokens", "keep_tokens"):
            reader.not_needed(each, "captions are not used")
    else:
        keeps_word = trigger is not None and not is_regular
        _import_caption_changes(reader, here, keeps_word=keeps_word)


def _import_caption_changes(reader: KeyReader, here: str, *, keeps_word: bool) -> None:
    """Translate dropout and shuffling; `keeps_word` if ai-toolkit keeps a word in every caption."""
    if rate := read_value(reader, "caption_dropout_rate", as_float):
        keeps = "a dropped caption is empty; ai-toolkit keeps the trigger word in it"
        setting, why = f"{here}.caption_dropout", keeps if keeps_word else ""
        put_value(reader, "caption_dropout_rate", setting, min(1.0, rate), why)
    else:
        reader.not_needed("caption_dropout_rate", NO_EFFECT)
    copy_flag(reader, "shuffle_tokens", f"{here}.caption_shuffle")
    if read_value(reader, "shuffle_tokens", as_bool):
        copy_value(reader, "keep_tokens", f"{here}.caption_keep_tokens", as_int)
    else:
        reader.not_needed("keep_tokens", "it is used only with shuffle_tokens")


def _has_files(folder: str | None, suffix: str) -> bool | None:
    """Return whether a folder has files with this suffix; None if it is not on this machine."""
    if folder is None or not Path(folder).is_dir():
        return None
    for count, file in enumerate(Path(folder).rglob("*")):
        if file.name.lower().endswith(f".{suffix.lower()}"):
            return True
        if count > MAX_FILES:
            return None
    return False


def _import_controls(job: Job, reader: KeyReader, here: str) -> None:
    given = reader.peek("control_path")
    several = [path for key in CONTROL_KEYS if (path := read_value(reader, key, as_text))]
    folders = several or ([str(each) for each in given if each] if isinstance(given, list) else [])
    if not folders and (path := read_value(reader, "control_path", as_text)):
        folders = [path]
    for key in ("control_path", *CONTROL_KEYS):
        if reader.peek(key) in EMPTY or reader.peek(key) is MISSING:
            reader.not_needed(key, "it is empty")
        elif key == "control_path" and several:
            reader.not_needed(key, "control_path_1 to control_path_3 replace it")
        elif not job.model.takes_references:
            text = (
                f"{job.model.family} is trained without control images here, so they are left out"
            )
            reader.not_supported(key, text)
        else:
            value = folders[0] if len(folders) == 1 else folders
            put_value(reader, key, f"{here}.conditioning_data_dir", value)


def _import_masks(reader: KeyReader, here: str) -> None:
    has_masks = is_usable(reader, "mask_path", as_text)
    if has_masks:
        copy_value(reader, "mask_path", f"{here}.mask_data_dir", as_text)
        copy_value(reader, "mask_min_value", f"{here}.mask_background", as_float)
        copy_value(reader, "invert_mask", f"{here}.mask_invert", as_bool)
    else:
        reader.not_needed("mask_min_value", "it is used only with mask_path")
        reader.not_needed("invert_mask", "it is used only with mask_path")


def _import_clips(job: Job, reader: KeyReader, here: str) -> None:
    frames = read_value(reader, "num_frames", as_int) or 1
    is_automatic = bool(read_value(reader, "auto_frame_count", as_bool))
    if not job.is_video or not (frames > 1 or is_automatic):
        for key in ("num_frames", "auto_frame_count", "shrink_video_to_frames", "fps", "do_i2v"):
            reader.not_needed(key, "the dataset has images")
        return
    job.imported.set(f"{here}.dataset_type", "video")
    length: object = EVERY_LENGTH if is_automatic else clip_length(frames)
    job.imported.set(f"{here}.frames", length)
    if is_automatic:
        reader.not_needed("num_frames", "auto_frame_count replaces it")
        why = "each video uses the largest number of frames that it is long enough for"
        reader.translate("auto_frame_count", f"{here}.frames", length, why)
    else:
        why = "" if length == frames else "clips have 4n+1 frames"
        put_value(reader, "num_frames", f"{here}.frames", length, why)
        reader.not_needed("auto_frame_count", NO_EFFECT)
    is_shrunk = read_value(reader, "shrink_video_to_frames", as_bool) is not False
    if is_shrunk and not is_automatic:
        text = (
            "a clip is the start of a video at its own frame rate; ai-toolkit spreads the frames "
        )
        text += "over the whole video. Cut the videos to the length of a clip, or set fps"
        if reader.peek("shrink_video_to_frames") is MISSING:
            job.imported.set(f"{here}.clip", "start")
            job.imported.defaults.append(DefaultReport(f"{here}.clip", "start", text))
        reader.not_supported("shrink_video_to_frames", text)
        reader.not_needed("fps", "ai-toolkit uses it only without shrink_video_to_frames")
    else:
        copy_value(reader, "fps", f"{here}.fps", as_float, default=24.0)
        job.imported.set(f"{here}.clip", "start" if is_automatic else "random")
        reader.not_needed("shrink_video_to_frames", f"{here}.fps and clip say it")
    if job.arch == "wan22_5b" and read_value(reader, "do_i2v", as_bool):
        reader.translate("do_i2v", "model.task", "image")
    else:
        reader.not_needed("do_i2v", "the model says whether it starts from an image")


def _import_augmentations(reader: KeyReader, here: str) -> None:
    """Translate augmentations; without a mode of caching, ai-toolkit draws them in every epoch."""
    entries = reader.peek("augmentations")
    mode = read_value(reader, "augmentations_cache_mode", as_text)
    if entries is MISSING or entries in EMPTY:
        reader.not_needed("augmentations", "it is empty")
        reader.not_needed("augmentations_cache_mode", "there are no augmentations")
        reader.not_needed("augmentation_cache_epoch", "there are no augmentations")
        return
    copy_value(reader, "augmentation_cache_epoch", f"{here}.augmentation_cache_epoch", as_int)
    known, unknown = [], []
    for entry in entries if isinstance(entries, list) else [entries]:
        method = (
            str(entry.get("method", entry.get("name"))) if isinstance(entry, dict) else str(entry)
        )
        params = entry.get("params") if isinstance(entry, dict) else None
        chance = as_float(params.get("p", 0.5)) if isinstance(params, dict) else 0.5
        name = tables.AUGMENTATIONS.get(method)
        if name is None or chance is None:
            unknown.append(method)
        else:
            known.append({"name": name, "probability": chance})
    text = f"{here}.augmentations is {known}"
    if known:
        reader.imported.set(f"{here}.augmentations", known)
        reader.imported.set(f"{here}.augmentations_cache_mode", mode or "refresh_each_epoch")
    if unknown:
        text += f"; {', '.join(unknown)}: gracetune has others, see datasets[].augmentations"
    reader.report("augmentations", "not supported" if unknown else "translated", text)
    if is_usable(reader, "augmentations_cache_mode", as_text):
        reader.report("augmentations_cache_mode", "taken", f"{here}.augmentations_cache_mode")


def import_own_section(process: KeyReader) -> None:
    """Import the section `gracetune`, which is for gracetune inside ai-toolkit."""
    own = open_section(process, "gracetune")
    if own is None:
        return
    for name in ("cache_config", "gh200_optimizations"):
        section = open_section(own, name)
        if section is not None:
            _take_all(section, own.peek(name), name)
    finish_section(own, tables.OWN_SWITCHES, {})


def _take_all(reader: KeyReader, section: object, setting: str) -> None:
    """Use all keys of a section that has gracetune's own keys."""
    assert isinstance(section, dict), section
    for key in section:
        reader.take(key, f"{setting}.{key}")


def _report_flips(reader: KeyReader, here: str) -> None:
    for key in ("flip_x", "flip_y"):
        if read_value(reader, key, as_bool):
            text = f"a copy of {here} at the end of the list has flipped images"
            reader.report(key, "translated", text)
        else:
            reader.not_needed(key, NO_EFFECT)


def _import_flips(reader: KeyReader, entries: list[dict[str, object]], index: int) -> None:
    """Add copies of a dataset with flipped images, as ai-toolkit does."""
    flips = {"flip_x": "flip", "flip_y": "vertical_flip"}
    versions: list[list[dict[str, object]]] = [[]]
    for key, name in flips.items():
        if read_value(reader, key, as_bool):
            versions += [[*each, {"name": name, "probability": 1.0}] for each in versions]
    for augmentations in versions[1:]:
        entries.append({**entries[index], "augmentations": augmentations})


# Samples


def import_save(job: Job, process: KeyReader) -> None:
    """Import the section `save`."""
    save = open_section(process, "save")
    if save is None:
        return
    if is_usable(save, "save_every", as_int):
        every = read_value(save, "save_every", as_int) or 0
        steps = job.count_steps(every) if every > 0 else 0
        put_value(save, "save_every", "train.checkpoint_every", steps)
    else:
        set_default(save, "save_every", "train.checkpoint_every", job.count_steps(1000))
    kept = read_value(save, "max_step_saves_to_keep", as_int)
    if is_usable(save, "max_step_saves_to_keep", as_int):
        setting = "train.keep_adapters" if job.has_adapter else "train.keep_checkpoints"
        put_value(save, "max_step_saves_to_keep", setting, max(1, kept or 1))
    finish_section(save, tables.SAVE_NOT_NEEDED, tables.SAVE_UNSUPPORTED)


def import_sample(job: Job, process: KeyReader) -> None:
    """Import the section `sample` as `validation`."""
    sample = open_section(process, "sample")
    if sample is None:
        job.imported.set("validation.every", 0)
        return
    prompts = _import_seed(sample, _read_prompts(job, sample))
    train = process.peek("train")
    is_off = isinstance(train, dict) and bool(as_bool(train.get("disable_sampling") or False))
    if prompts:
        job.imported.set("validation.prompts", prompts)
    if is_off or not prompts:
        job.imported.set("validation.every", 0)
        why = "disable_sampling is true" if is_off else "there are no prompts"
        sample.not_needed("sample_every", f"validation.every is 0, because {why}")
    elif is_usable(sample, "sample_every", as_int):
        every = read_value(sample, "sample_every", as_int) or 0
        steps = job.count_steps(every) if every > 0 else 0
        put_value(sample, "sample_every", "validation.every", steps)
    else:
        set_default(sample, "sample_every", "validation.every", job.count_steps(100))
    _import_sample_sizes(job, sample)
    copy_value(sample, "guidance_scale", "validation.guidance", as_float, default=7.0)
    copy_value(sample, "sample_steps", "validation.sample_steps", as_int, default=20)
    if sample.peek("neg") in (False, *EMPTY):
        sample.not_needed("neg", "it is empty")
    else:
        copy_value(sample, "neg", "validation.negative_prompt", as_text)
    finish_section(sample, tables.SAMPLE_NOT_NEEDED, tables.SAMPLE_UNSUPPORTED)


def _import_sample_sizes(job: Job, sample: KeyReader) -> None:
    for key in ("width", "height"):
        if is_usable(sample, key, as_int):
            edge = job.fit_edge(read_value(sample, key, as_int) or 512)
            put_value(sample, key, f"validation.{key}", edge)
        else:
            set_default(sample, key, f"validation.{key}", 512)
    frames = read_value(sample, "num_frames", as_int)
    if frames is None or not job.is_video:
        sample.not_needed("num_frames", "the model generates images")
    else:
        length = clip_length(frames)
        why = "" if length == frames else "clips have 4n+1 frames"
        put_value(sample, "num_frames", "validation.frames", length, why)


def _import_seed(sample: KeyReader, prompts: list[object | None]) -> list[object]:
    """Translate the seed, and return the prompts that are not left out.

    Each of gracetune's prompts uses the next seed, as with `walk_seed`.
    """
    seed = read_value(sample, "seed", as_int) or 0
    if seed < 0:
        sample.not_supported("seed", "samples have fixed seeds; validation.seed is 0")
        seed = 0
    else:
        copy_value(sample, "seed", "validation.seed", as_int)
    walks = bool(read_value(sample, "walk_seed", as_bool))
    if walks:
        sample.not_needed("walk_seed", "each prompt uses the next seed")
    elif sample.peek("walk_seed") is not MISSING:
        text = "each of validation.prompts has a seed of its own, the same for all"
        sample.report("walk_seed", "translated", text)
    if walks and None not in prompts:
        return list(prompts)
    entries: list[object] = []
    for index, prompt in enumerate(prompts):
        if prompt is not None:
            entry = prompt if isinstance(prompt, dict) else {"prompt": prompt}
            entries.append({"seed": seed + index if walks else seed} | entry)
    return entries


def _read_prompts(job: Job, sample: KeyReader) -> list[object | None]:
    """Return `validation.prompts`, with None for each that is left out."""
    readers = sample.sections("samples")
    given = sample.peek("prompts")
    if readers:
        sample.not_needed("prompts", "samples replaces it")
        return [_read_sample(job, each, index) for index, each in enumerate(readers)]
    if sample.peek("samples") in EMPTY or sample.peek("samples") is MISSING:
        sample.not_needed("samples", "it is empty")
    else:
        sample.not_supported("samples", "it must be a list of sections with a prompt each")
    texts = [given] if isinstance(given, str) and given else given
    if not isinstance(texts, list) or not texts:
        sample.not_needed("prompts", "it is empty")
        return []
    split = [_split_prompt(job, "" if each is None else str(each)) for each in texts]
    prompts = [_usable_prompt(job, entry) for entry, _ in split]
    lost = sorted({flag for _, flags in split for flag in flags})
    if lost or None in prompts:
        words = [_left_out(lost)] if lost else []
        words += [NEEDS_IMAGE] if None in prompts else []
        sample.report("prompts", "not supported", f"validation.prompts; {'; '.join(words)}")
    elif prompts != texts:
        sample.report("prompts", "translated", "validation.prompts, with the settings of each")
    else:
        sample.report("prompts", "taken", "validation.prompts")
    return prompts


def _usable_prompt(job: Job, entry: dict[str, object]) -> object | None:
    """Return an entry of `validation.prompts`; None if it lacks the image that the model needs."""
    if job.needs_images and "images" not in entry:
        return None
    return entry if len(entry) > 1 else entry["prompt"]


def _read_sample(job: Job, reader: KeyReader, index: int) -> object | None:
    """Return one entry of `samples` as an entry of `validation.prompts`; None if it is left out."""
    here = f"validation.prompts.{index}"
    entry: dict[str, object] = {}
    for key, (setting, kind) in SAMPLE_KEYS.items():
        if key == "num_frames" and not job.is_video:
            reader.not_needed(key, "the model generates images")
        elif is_usable(reader, key, kind):
            entry[setting] = kind(reader.peek(key))
            reader.report(key, "translated", f"{here}.{setting}")
    _fit_sizes(job, entry)
    images = _read_images(job, reader, here)
    if images:
        entry["images"] = images[0] if len(images) == 1 else images
    split, lost = _split_prompt(job, read_value(reader, "prompt", as_text) or "")
    prompt = _usable_prompt(job, {"prompt": "", **entry, **split})
    if reader.peek("prompt") is not MISSING:
        is_same = split == {"prompt": reader.peek("prompt")}
        if prompt is None:
            reader.report("prompt", "not supported", NEEDS_IMAGE)
        elif lost:
            reader.report("prompt", "not supported", f"{here}; {_left_out(lost)}")
        else:
            reader.report("prompt", "taken" if is_same else "translated", here)
    others = {k: v for k, v in tables.SAMPLE_UNSUPPORTED.items() if k != "sample_start_step"}
    finish_section(reader, tables.SAMPLE_NOT_NEEDED, others)
    return prompt


def _read_images(job: Job, reader: KeyReader, here: str) -> list[str]:
    """Return the input images of a prompt, for models that edit an image or start from one."""
    keys = ("ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
    for key in ("ctrl_img", *keys):
        if not is_usable(reader, key, as_text):
            continue
        if job.needs_images:
            reader.report(key, "translated", f"{here}.images")
        else:
            reader.not_supported(key, "the model generates from text only")
    first = read_value(reader, keys[0], as_text) or read_value(reader, "ctrl_img", as_text)
    found = [first, *(read_value(reader, key, as_text) for key in keys[1:])]
    return [image for image in found if image] if job.needs_images else []


def _left_out(flags: list[str]) -> str:
    return f"the flags {', '.join(f'--{flag}' for flag in flags)} are left out"


def _split_prompt(job: Job, text: str) -> tuple[dict[str, object], list[str]]:
    """Split the flags from a prompt; return the prompt with its settings, and the unknown flags.

    ai-toolkit splits at every `--`, and a flag ends at the first space.
    """
    trigger = job.trigger_word or ""
    prompt, *parts = text.strip().split("--")
    entry: dict[str, object] = {"prompt": prompt.replace(TRIGGER, trigger).strip()}
    lost = []
    for part in parts:
        flag, _, content = part.partition(" ")
        setting, kind = PROMPT_FLAGS.get(flag.strip(), ("", as_text))
        value = kind(content.strip())
        is_used = {"frames": job.is_video, "images": job.needs_images}.get(setting, True)
        if not setting or value is None or not is_used:
            lost.append(flag.strip())
        else:
            entry[setting] = value
    _fit_sizes(job, entry)
    return entry, lost


def _fit_sizes(job: Job, entry: dict[str, object]) -> None:
    """Round the sizes of a prompt down to those that the model can generate."""
    for key in ("width", "height"):
        if isinstance(edge := entry.get(key), int):
            entry[key] = job.fit_edge(edge)
    if isinstance(frames := entry.get("frames"), int):
        entry["frames"] = clip_length(frames)
