"""Turn a config of SimpleTuner into a run file.

The config is a flat table of command-line options (`config.json`, `config.toml` or `config.env`),
which names a file with the datasets, and perhaps files with LyCORIS settings and with prompts. The
datasets are translated by `simpletuner_datasets.py`. Options that the config leaves out have
SimpleTuner's defaults, which are written into the run file where they differ from gracetune's.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from gracetune.config.fsdp import STRATEGY, FsdpEntry, check_classes, translate_fsdp
from gracetune.config.importers.report import MISSING, ImportedRun, KeyReader
from gracetune.config.importers.simpletuner_adapter import import_adapter
from gracetune.config.importers.simpletuner_datasets import import_datasets, reader_without_nulls
from gracetune.config.importers.simpletuner_keys import (
    ASSISTED_FLAVOURS,
    EDIT_FLAVOURS,
    FAMILIES,
    FEATURES,
    FLOW_OPTIONS,
    IGNORED_PREFIXES,
    KNOWN_KEYS,
    LOCAL_REPORTS,
    NOT_NEEDED,
    NOT_SUPPORTED,
    NOT_TRANSLATED,
    OPTIMIZERS,
    TRACKER_NAMES,
    TRACKERS,
    SimpleTunerOptimizer,
)
from gracetune.config.importers.values import (
    EMPTY,
    PLANNED_CHECKPOINTING,
    as_bool,
    as_int,
    as_number,
    as_text,
    copy_flag,
    copy_value,
    is_off,
    not_supported_unless_off,
    own_output_dir,
    package_remark,
    put_value,
    take_unless_off,
    texts,
)
from gracetune.config.parse_text import format_value
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.importers.simpletuner_adapter import SimpleTunerFiles
    from gracetune.config.importers.simpletuner_keys import SimpleTunerFamily

TOOL = "SimpleTuner"
PERIODIC = ("cosine", "sine", "cosine_with_restarts")
"""Schedules of SimpleTuner that fall and rise again; `lr_warmup_steps` is half their period."""
NEEDS_IMAGES = "this model needs an input image for each prompt; set validation.images and every"


def import_config(files: SimpleTunerFiles) -> ImportedRun:
    """Return the run file for a SimpleTuner config, with a report of every key.

    Raises an error if gracetune does not have the model family.
    """
    imported = ImportedRun(TOOL)
    config = reader_without_nulls(imported, files.name, files.config)
    family = _find_family(files)
    _import_own_sections(config)
    _import_model(config, family)
    import_adapter(config, family, files)
    _import_loop(config)
    _import_ranks(config, family.family)
    optimizer = _import_optimizer(config)
    _import_timesteps(config, family)
    _import_validation(config, files)
    if config.peek("data_backend_config") is not MISSING:
        config.report("data_backend_config", "translated", f"datasets, from {files.datasets_name}")
    num_samples = import_datasets(
        config, files.datasets_name, files.datasets, takes_control=_edits_images(config)
    )
    _import_length(config, num_samples)
    _import_schedule(config, optimizer)
    _report_unused(config)
    config.finish(KNOWN_KEYS)
    return imported


def _find_family(files: SimpleTunerFiles) -> SimpleTunerFamily:
    name = files.config.get("model_family", MISSING)
    known = ", ".join(FAMILIES)
    if name is MISSING or name is None:
        raise ConfigError(
            f"{files.name} is a config of SimpleTuner, but model_family is missing. Set it to one "
            f"of {known}."
        )
    found = FAMILIES.get(str(name).replace("-", "_"))
    if name in NOT_TRANSLATED:
        raise ConfigError(
            f"{files.name} is a config of SimpleTuner: model_family is {name!r}, whose settings "
            f"are not translated. Start from `gracetune examples {NOT_TRANSLATED[name]} --copy`."
        )
    if found is None:
        raise ConfigError(
            f"{files.name} is a config of SimpleTuner: model_family is {name!r}, which gracetune "
            f"does not train. It trains {known}."
        )
    return found


def _import_own_sections(config: KeyReader) -> None:
    """Take the sections that gracetune adds to SimpleTuner's config as they are."""
    for name in ("cache_config", "gh200_optimizations"):
        section = config.section(name)
        if section is not None:
            for key in section.unreported():
                section.take(key, f"{name}.{key}")
    config.take("use_gh200_trainer", "use_gh200_trainer")


# The model


def _import_model(config: KeyReader, family: SimpleTunerFamily) -> None:
    imported = config.imported
    if config.peek("model_family") == family.family:
        config.take("model_family", "model.family")
    else:
        why = "the family of Wan 2.1 and 2.2; model.path decides which"
        why = why if family.family == "wan22" else ""
        config.translate("model_family", "model.family", family.family, why)
    path = "pretrained_model_name_or_path"
    take_unless_off(config, path, "model.path", "model_flavour decides")
    _import_flavour(config, family, has_path=not is_off(config.peek(path)))
    for key in ("pretrained_transformer_model_name_or_path", "pretrained_unet_model_name_or_path"):
        if str(config.peek(key)).endswith(".safetensors"):
            config.take(key, "model.transformer_file")
        else:
            not_supported_unless_off(
                config, key, "set model.path to a folder that has this transformer"
            )
    take_unless_off(config, "revision", "model.revision", "the newest revision is used")
    dtype = config.peek("base_model_default_dtype")
    if dtype is not MISSING:
        ours = "float32" if dtype == "fp32" else "bfloat16"
        config.translate("base_model_default_dtype", "model.dtype", ours)
    imported.default("model.dtype", "bfloat16", "base_model_default_dtype is bf16")
    _import_precision(config)
    for key, what in (
        ("controlnet", "a ControlNet"),
        ("control", "a control model"),
        ("distillation_method", "a distilled model"),
    ):
        if is_off(config.peek(key)):
            config.not_needed(key, "it is off")
        else:
            fix = f"remove {key} from {config.file} to train a plain adapter or model instead"
            imported.refuse(f"{key} asks for {what}, which gracetune does not train: {fix}.")
            config.not_supported(key, fix)


def _import_flavour(config: KeyReader, family: SimpleTunerFamily, *, has_path: bool) -> None:
    imported, value = config.imported, config.peek("model_flavour")
    name = family.default_flavour if is_off(value) else str(value)
    if is_off(value):
        config.not_needed("model_flavour", f"the default flavour is {name}")
    path = family.paths.get(name)
    experts = {"-high": "high", "-low": "low"}.get(name[name.rfind("-") :]) if "2.2" in name else ""
    if experts:
        imported.set("train.experts", experts)
    if path is None and not has_path:
        imported.refuse(
            f"model_flavour is {name!r}, which gracetune does not train. Set it to one of "
            f"{', '.join(family.paths)}, or set pretrained_model_name_or_path to a model of the "
            "same architecture."
        )
        config.not_supported("model_flavour", f"set one of {', '.join(family.paths)}")
        return
    remark = f"train.experts is {experts}" if experts else ""
    if (str(config.peek("model_family")).replace("-", "_"), name) in ASSISTED_FLAVOURS:
        off = "train few steps, or train the base model"
        remark = f"SimpleTuner adds an assistant LoRA in training, which gracetune lacks: {off}"
    config.not_needed("disable_assistant_lora", "there is no assistant LoRA")
    if is_off(value):
        if not has_path:
            imported.default("model.path", path, f"model_flavour is {name}. {remark}".rstrip(". "))
    elif has_path:
        text = "pretrained_model_name_or_path names the model"
        config.report("model_flavour", "not needed", f"{text}; {remark}" if remark else text)
    else:
        config.translate("model_flavour", "model.path", path, remark)


def _import_precision(config: KeyReader) -> None:
    value = config.peek("base_model_precision")
    if value == "no_change" or is_off(value):
        config.not_needed("base_model_precision", "weights are not quantized")
    elif config.peek("model_type") != "lora":
        config.not_needed("base_model_precision", "a full fine-tune does not quantize weights")
    else:
        name = str(value).lower()
        bits = re.match(r"(nf4|u?int\d|fp\d)", name)
        found = bits[0] if bits is not None else ""
        why = "with `none`, the planner streams bf16 weights instead"
        if found == "fp8" and "int4" not in name:
            config.translate("base_model_precision", "model.quantize", "fp8", why)
        elif found in ("int8", "uint8") and "int4" not in name:
            config.translate("base_model_precision", "model.quantize", "int8", why)
        elif found:
            why = why if found == "nf4" else f"the smallest format here has 4 bits; {why}"
            config.translate("base_model_precision", "model.quantize", "nf4", why)
        else:
            config.not_supported("base_model_precision", "set model.quantize: int8, fp8 or nf4")
    precision = config.peek("mixed_precision")
    if precision in ("bf16", "no"):
        config.take("mixed_precision", "train.mixed_precision")
    elif precision in ("fp16", "fp8"):
        why = "diffusion transformers overflow in fp16" if precision == "fp16" else ""
        config.translate("mixed_precision", "train.mixed_precision", "bf16", why)
    not_supported_unless_off(config, "mixed_precision", "set train.mixed_precision: bf16 or no")
    config.imported.default("train.mixed_precision", "bf16", "mixed_precision is bf16")


def _edits_images(config: KeyReader) -> bool:
    return (str(config.peek("model_family")), str(config.peek("model_flavour"))) in EDIT_FLAVOURS


# The training loop and the optimizer


def _import_loop(config: KeyReader) -> None:
    imported = config.imported
    theirs = config.peek("output_dir")
    if not is_off(theirs):
        folder = own_output_dir(str(theirs))
        config.translate("output_dir", "output_dir", folder, "SimpleTuner's folder is not changed")
    config.not_needed("output_dir", "it is empty")
    folder = own_output_dir("simpletuner-results")
    imported.default("output_dir", folder, "output_dir is simpletuner-results")
    config.take("seed", "seed")
    config.take("train_batch_size", "train.batch_size")
    imported.default("train.batch_size", 4, "train_batch_size is 4")
    config.take("gradient_accumulation_steps", "train.gradient_accumulation_steps")
    recomputes = config.peek("gradient_checkpointing")
    if recomputes is not MISSING:
        setting, value = "train.gradient_checkpointing", bool(as_bool(recomputes))
        config.translate("gradient_checkpointing", setting, value, PLANNED_CHECKPOINTING)
    imported.default("train.gradient_checkpointing", True, "gradient_checkpointing is true")
    _import_clipping(config)
    if as_bool(config.peek("use_ema")):
        config.report("use_ema", "translated", "train.ema_decay is set")
        config.take("ema_decay", "train.ema_decay")
        imported.default("train.ema_decay", 0.995, "ema_decay is 0.995")
    else:
        for key in ("use_ema", "ema_decay", "ema_update_interval", "ema_warmup_steps"):
            config.not_needed(key, "use_ema is off")
    for key in ("checkpoint_step_interval", "checkpointing_steps"):
        config.take(key, "train.checkpoint_every")
    for key in ("checkpoints_total_limit", "save_total_limit"):
        take_unless_off(config, key, "train.keep_checkpoints", "the default number is kept")
    imported.default("train.keep_checkpoints", 5, "checkpoints_total_limit is 5")
    imported.default("cache_config.persistent_cache", True, "SimpleTuner keeps its caches")
    copy_flag(config, "vae_enable_tiling", "cache_config.vae_tiling", True)
    _import_trackers(config)


def _import_ranks(config: KeyReader, family: str) -> None:
    """Translate FSDP and context parallel, which divide a model and its samples among ranks."""
    keys = [k for k in config.unreported() if k.startswith("fsdp_") and k in KNOWN_KEYS]
    entries = [FsdpEntry(key, config.peek(key), f"{config.file}: {key}") for key in keys]
    try:
        found = translate_fsdp(entries, is_on=False)
        if found.classes is not None:
            check_classes(found.classes, family)
    except ConfigError as error:
        config.imported.refuse(str(error))
        for key in keys:
            config.not_supported(key, "correct the FSDP setting that is refused")
        found = translate_fsdp([], is_on=False)
    off = "gracetune shards the model's blocks" if found.is_on else "fsdp_enable is off"
    if found.is_on and config.peek("model_type") == "lora":
        off = "distributed.strategy is replicate"
        why = "ranks divide weights only in full training; here each has them, or streams them"
        config.translate("fsdp_enable", STRATEGY, "replicate", why)
        found = translate_fsdp([], is_on=False)
    for translated in found.keys:
        for setting, value in translated.settings.items():
            put_value(config, translated.entry.key, setting, value)
        config.not_needed(translated.entry.key, translated.remark or off)
    for key in keys:
        config.not_needed(key, off)
    count = as_int(config.peek("context_parallel_size"))
    if count is not None and count > 1:
        config.take("context_parallel_size", "distributed.context_parallel")
        why = "ranks exchange heads for tokens (Ulysses), and pass nothing around a ring"
        config.not_needed("context_parallel_comm_strategy", why)
    for name in ("context_parallel_size", "context_parallel_comm_strategy"):
        config.not_needed(name, "a sample is not divided among ranks")


def _import_trackers(config: KeyReader) -> None:
    """Translate the experiment trackers, of which TensorBoard is always on."""
    reports = [name.lower() for name in texts(config.peek("report_to"))]
    used = [name for name in dict.fromkeys(reports) if name in TRACKERS]
    others = [name for name in reports if name not in (*TRACKERS, *LOCAL_REPORTS)]
    if used:
        config.imported.set("logging.trackers", used)
        for key, setting in TRACKER_NAMES.items():
            copy_value(config, key, setting, as_text)
        project, why = "logging.tracker_project", "tracker_project_name is simpletuner"
        config.imported.default(project, "simpletuner", why)
    shown = f"logging.trackers is {format_value(used)}" if used else "TensorBoard files are written"
    packages = ",".join(used)
    needed = f"; training needs pip install 'gracetune[{packages}]'" if used else ""
    if others:
        fix = f"there is no tracker {' or '.join(others)}; {shown}{needed}"
        config.report("report_to", "not supported", fix)
    elif used:
        config.report("report_to", "translated", f"{shown}{needed}", "logging.trackers")
    elif reports == ["none"]:
        config.translate("report_to", "logging.tensorboard", False)
    elif "all" in reports:
        config.not_needed("report_to", f"{shown}; list other trackers in logging.trackers")
    config.not_needed("report_to", shown)
    for key in TRACKER_NAMES:
        config.not_needed(key, "report_to has no wandb, trackio or mlflow, which would show it")


def _import_clipping(config: KeyReader) -> None:
    """Take the limit of the gradient norm.

    SimpleTuner's default clips each element, which practically never changes a gradient; the same
    number as a limit of the norm would change all of them.
    """
    method = config.peek("grad_clip_method")
    if method == "norm":
        config.not_needed("grad_clip_method", "the norm is clipped")
        config.take("max_grad_norm", "train.max_grad_norm")
        config.imported.default("train.max_grad_norm", 2.0, "max_grad_norm is 2.0")
        return
    ours = (
        "gracetune clips the norm of all gradients at 1, so that a spike of the loss cannot undo "
        "training. train.max_grad_norm: 0 turns it off, which is closest to SimpleTuner"
    )
    config.not_supported("grad_clip_method", f"SimpleTuner clips each element; {ours}")
    theirs = "SimpleTuner limits each element to it, which hardly ever changes a gradient"
    config.not_supported("max_grad_norm", f"{theirs}; {ours}")


def _import_optimizer(config: KeyReader) -> SimpleTunerOptimizer:
    imported = config.imported
    name = config.peek("optimizer")
    found = OPTIMIZERS.get("adamw_bf16" if name is MISSING else str(name))
    if found is None:
        fix = "adamw is used; set optimizer.name to another one of gracetune's optimizers"
        config.not_supported("optimizer", fix)
        found = SimpleTunerOptimizer("adamw")
    elif found.name == name:
        config.take("optimizer", "optimizer.name")
    elif name is not MISSING:
        remarks = [each for each in (found.remark, package_remark(found.name)) if each]
        config.translate("optimizer", "optimizer.name", found.name, "; ".join(remarks))
    else:
        imported.default("optimizer.name", found.name, "optimizer is adamw_bf16")
    config.take("learning_rate", "optimizer.lr")
    imported.default("optimizer.lr", 4e-7, "learning_rate is 4e-7")
    options = _optimizer_options(config)
    betas = (as_number(config.peek("optimizer_beta1")), as_number(config.peek("optimizer_beta2")))
    for key in ("optimizer_beta1", "optimizer_beta2"):
        if config.peek(key) is not MISSING and None not in betas:
            config.translate(key, "optimizer.betas", list(betas))
        config.not_needed(key, "both betas are needed to change the optimizer's own")
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay"):
        config.not_needed(key, "SimpleTuner uses it only with DeepSpeed; see optimizer_config")
    why = f"the default of {config.peek('optimizer') if name is not MISSING else 'adamw_bf16'}"
    if found.betas is not None:
        imported.default("optimizer.betas", list(found.betas), why)
    if found.eps is not None:
        imported.default("optimizer.eps", options.get("eps", found.eps), why)
    decay = options.get("weight_decay", found.weight_decay)
    imported.default("optimizer.weight_decay", decay, why)
    return found


def _optimizer_options(config: KeyReader) -> dict[str, float]:
    """Translate `optimizer_config`, a text such as `weight_decay=0.0,eps=1e-8`."""
    value = config.peek("optimizer_config")
    if is_off(value):
        config.not_needed("optimizer_config", "it is empty")
        return {}
    parts = [text.partition("=") for text in texts(value)]
    pairs = {name.strip(): as_number(text) for name, _, text in parts}
    used = {
        name: v for name, v in pairs.items() if name in ("eps", "weight_decay") and v is not None
    }
    for name, v in used.items():
        config.imported.set(f"optimizer.{name}", v)
    rest = [name for name in pairs if name not in used]
    if rest:
        fix = f"{', '.join(rest)}: there is no such setting; eps and weight_decay are used"
        config.report("optimizer_config", "not supported", fix)
    else:
        shown = ", ".join(f"optimizer.{name} is {v:g}" for name, v in used.items())
        config.report("optimizer_config", "translated", shown)
    return used


def _import_schedule(config: KeyReader, optimizer: SimpleTunerOptimizer) -> None:
    """Translate the learning-rate schedule, after the number of steps is known."""
    imported = config.imported
    name = str(config.peek("lr_scheduler")).lower()
    power = 0.8 if is_off(config.peek("lr_power")) else config.peek("lr_power")
    schedules = {
        "constant": ("constant", ""),
        "constant_with_warmup": ("constant", ""),
        "linear": ("linear", ""),
        "cosine": ("cosine", ""),
        "cosine_with_warmup": ("cosine", "it falls once, over the whole run"),
        "cosine_with_restarts": ("cosine", "there are no restarts"),
        "sine": ("cosine", "it falls once, over the whole run"),
        "polynomial": (
            "linear",
            f"the closest schedule; its power is 1, that of SimpleTuner {power}",
        ),
    }
    schedule, why = schedules.get(name, ("constant", ""))
    steps = as_number(imported.get("train.max_train_steps")) or math.inf
    rises = as_number(config.peek("lr_warmup_steps")) or 0
    if optimizer.name == "schedule_free":
        config.not_needed("lr_scheduler", "schedule_free has no schedule")
        schedule = "constant"
    elif schedule != "constant" and rises >= steps and name not in PERIODIC:
        schedule = "constant"
        why = "lr_warmup_steps lasts for the whole run, so the rate only rises"
    if schedule == name:
        config.take("lr_scheduler", "optimizer.schedule")
    elif name in schedules and "lr_scheduler" in config.unreported():
        config.translate("lr_scheduler", "optimizer.schedule", schedule, why)
    not_supported_unless_off(
        config, "lr_scheduler", "set optimizer.schedule: constant, linear or cosine"
    )
    if name in PERIODIC and schedule != "constant" and rises:
        _import_period(config, name, rises, steps)
    config.take("lr_warmup_steps", "optimizer.warmup_steps")
    if schedule == "constant":
        for key in ("lr_end", "lr_num_cycles"):
            config.not_needed(key, "the learning rate does not fall")
    elif name in ("polynomial", *PERIODIC):
        _import_lowest_rate(config, steps / rises if name in PERIODIC and rises > steps else 1)
    config.not_needed("lr_end", "the learning rate falls to 0")
    config.not_needed("lr_power", "schedules are straight lines or cosines")


def _import_lowest_rate(config: KeyReader, progress: float) -> None:
    """Translate `lr_end`; `progress` is the share of the fall that the run reaches."""
    imported = config.imported
    lr, end = as_number(imported.get("optimizer.lr")), as_number(config.peek("lr_end"))
    if not lr or lr < 0:
        return
    share = min(1.0, (4e-7 if end is None else end) / lr)
    share = round(share + (1 - share) * (1 + math.cos(math.pi * progress)) / 2, 6)
    if config.peek("lr_end") is not MISSING:
        config.translate("lr_end", "optimizer.final_lr_share", share)
    else:
        imported.default("optimizer.final_lr_share", share, "lr_end is 4e-7")


def _import_period(config: KeyReader, name: str, period: float, steps: float) -> None:
    """Translate `lr_warmup_steps` of a schedule whose rate falls and rises in that many steps.

    Few steps are meant as a warm-up by most users, so they become one. As many as the run has
    cannot be one: the rate then falls during the whole run, which is gracetune's cosine.
    """
    setting, theirs = "optimizer.warmup_steps", f"SimpleTuner's {name} has no warm-up"
    if period >= steps:
        why = f"{theirs}; its rate falls for {int(period)} steps; here it falls over the whole run"
        config.translate("lr_warmup_steps", setting, 0, why)
    elif (count := as_int(config.peek("lr_warmup_steps"))) is not None:
        why = f"{theirs}; its rate turns every {count} steps; here it rises for {count}, then falls"
        config.translate("lr_warmup_steps", setting, count, why)


def _import_length(config: KeyReader, num_samples: int | None) -> None:
    """Set the number of steps, which SimpleTuner may also give as a number of epochs."""
    imported = config.imported
    steps, epochs = (
        as_number(config.peek("max_train_steps")),
        as_number(config.peek("num_train_epochs")),
    )
    if steps:
        config.take("max_train_steps", "train.max_train_steps")
        config.not_needed("num_train_epochs", "max_train_steps decides")
        return
    config.not_needed("max_train_steps", "num_train_epochs decides")
    epochs = 1 if epochs is None and config.peek("num_train_epochs") is MISSING else epochs
    batch = as_number(imported.get("train.batch_size")) or 1
    accumulated = as_number(imported.get("train.gradient_accumulation_steps")) or 1
    if num_samples and epochs:
        count = max(1, math.ceil(math.ceil(num_samples / batch) / accumulated) * int(epochs))
        why = f"{epochs:g} epochs of {num_samples} samples, counting repeats"
        if config.peek("num_train_epochs") is not MISSING:
            config.translate("num_train_epochs", "train.max_train_steps", count, why)
        else:
            imported.default("train.max_train_steps", count, why)
        return
    fix = "set max_train_steps: the samples could not be counted"
    imported.refuse(
        f"num_train_epochs is {epochs if epochs is None else format(epochs, 'g')}, but the samples "
        f"could not be counted. Set max_train_steps in {config.file}."
    )
    config.not_supported("num_train_epochs", fix)


def _import_timesteps(config: KeyReader, family: SimpleTunerFamily) -> None:
    imported = config.imported
    usual = "flow_matching" if family.has_flow else "epsilon"
    if is_off(config.peek("prediction_type")) or config.peek("prediction_type") == usual:
        config.not_needed("prediction_type", "it is the model's own")
    config.not_supported("prediction_type", "it is read from the model's scheduler config")
    if family.has_flow:
        config.not_needed("snr_gamma", "flow-matching models have no SNR weights")
        _import_flow(config, family)
        return
    for names in FLOW_OPTIONS.items():
        for key in names:
            config.not_needed(key, f"{family.family} is not a flow-matching model")
    why = "the model's own training has uniform timesteps"
    imported.default("train.timestep_sampling", "uniform", why)
    take_unless_off(config, "snr_gamma", "train.min_snr_gamma", "it is off")


def _import_flow(config: KeyReader, family: SimpleTunerFamily) -> None:
    """Translate the distribution of timesteps of a flow-matching model."""
    shift, automatic, uniform, scale = (
        old if config.peek(name) is MISSING and config.peek(old) is not MISSING else name
        for name, old in FLOW_OPTIONS.items()
    )
    if as_bool(config.peek(automatic)) and not as_number(config.peek(shift)):
        rule = family.family if family.family in ("qwen_image", "sd3") else "flux"
        config.translate(automatic, "train.timestep_shift", rule)
        config.not_needed(shift, f"{automatic} decides")
    config.not_needed(automatic, f"it is off, or {shift} decides")
    take_unless_off(config, shift, "train.timestep_shift", "timesteps are not shifted")
    if config.peek(shift) is MISSING:
        config.imported.default("train.timestep_shift", 3.0, "flow_schedule_shift is 3")
    copy_flag(config, uniform, "train.timestep_sampling", "uniform")
    config.take(scale, "train.timestep_std")
    for name, old in FLOW_OPTIONS.items():
        config.not_needed(old, f"{name} decides")
    if as_number(config.peek("flux_guidance_value")) == 1:
        config.not_needed("flux_guidance_value", "training has a guidance input of 1")
    config.not_supported("flux_guidance_value", "training has a guidance input of 1")
    if config.peek("flux_guidance_mode") == "constant":
        for key in ("flux_guidance_mode", "flux_guidance_min", "flux_guidance_max"):
            config.not_needed(key, "the guidance input is constant")


# Validation


def _import_validation(config: KeyReader, files: SimpleTunerFiles) -> None:
    imported = config.imported
    _import_validation_interval(config)
    _import_validation_prompts(config, files)
    empty = "it is empty"
    setting = "validation.negative_prompt"
    take_unless_off(config, "validation_negative_prompt", setting, empty)
    if as_number(config.peek("num_validation_images")) == 1:
        config.not_needed("num_validation_images", "each prompt has one sample")
    config.take("validation_guidance", "validation.guidance")
    config.take("validation_num_inference_steps", "validation.sample_steps")
    prompts, seed = imported.get("validation.prompts"), as_int(config.peek("validation_seed"))
    if isinstance(prompts, list) and len(prompts) > 1 and seed is not None:
        why = "for the first prompt; each further one has the next number, not the same one"
        config.translate("validation_seed", "validation.seed", seed, why)
    config.take("validation_seed", "validation.seed")
    frames = as_number(config.peek("validation_num_video_frames"))
    if frames:
        ours = int(frames) - (int(frames) - 1) % 4
        config.translate("validation_num_video_frames", "validation.frames", ours)
    for key in ("validation_guidance_rescale", "validation_guidance_real"):
        if as_number(config.peek(key)) in (0, 1):
            config.not_needed(key, "it is off")
    for key in ("validation_lycoris_strength", "validation_adapter_strength"):
        if as_number(config.peek(key)) == 1:
            config.not_needed(key, "samples use the adapter at full strength")
    _import_validation_size(config)
    imported.default("validation.guidance", 7.5, "validation_guidance is 7.5")
    imported.default("validation.sample_steps", 30, "validation_num_inference_steps is 30")


def _import_validation_interval(config: KeyReader) -> None:
    imported = config.imported
    needs_image = _edits_images(config) or str(config.peek("model_flavour")).startswith("i2v")
    copy_flag(config, "validation_disable", "validation.every", 0)
    for key in ("validation_step_interval", "validation_steps"):
        if imported.get("validation.every") == 0:
            config.not_needed(key, "validation_disable is true")
        elif needs_image and config.peek(key) is not MISSING:
            config.translate(key, "validation.every", 0, NEEDS_IMAGES)
        config.take(key, "validation.every")
    if needs_image:
        imported.default("validation.every", 0, NEEDS_IMAGES)
    imported.default("validation.every", 100, "validation_step_interval is 100")
    if imported.get("validation.every") == 0:
        config.not_needed("disable_benchmark", "there are no scheduled validations")
        config.not_needed("validation_on_startup", "there are no scheduled validations")
    elif as_bool(config.peek("validation_on_startup")):
        config.not_needed("disable_benchmark", "validation_on_startup is true")
    elif as_bool(config.peek("disable_benchmark")):
        config.translate("disable_benchmark", "validation.at_start", False)
    for key in ("disable_benchmark", "validation_on_startup"):
        config.not_needed(key, "a run validates before its first step")


def _import_validation_prompts(config: KeyReader, files: SimpleTunerFiles) -> None:
    prompts: list[object] = []
    if not is_off(config.peek("validation_prompt")):
        prompts.append(str(config.peek("validation_prompt")))
        config.report("validation_prompt", "taken", "validation.prompts", "validation.prompts")
    config.not_needed("validation_prompt", "there is no prompt")
    if files.prompts is not None:
        prompts += _import_prompts(config.imported, files.prompts_name, files.prompts)
        for key in ("user_prompt_library", "validation_prompt_library"):
            if str(config.peek(key)).endswith(".json"):
                text = "validation.prompts has its prompts, without their short names"
                config.report(key, "translated", text, "validation.prompts")
    fix = "the file was not found; name its prompts in validation.prompts"
    not_supported_unless_off(config, "user_prompt_library", fix)
    if prompts:
        config.imported.set("validation.prompts", prompts)
    if as_bool(config.peek("validation_disable_unconditional")):
        config.not_needed("validation_disable_unconditional", "only the prompts are used")
    config.not_supported("validation_disable_unconditional", 'add "" to validation.prompts')


def _import_validation_size(config: KeyReader) -> None:
    """Translate one or several sizes of validation samples; each prompt is used at each size."""
    imported = config.imported
    sizes = [_parse_size(text) for text in texts(config.peek("validation_resolution"))]
    if not sizes or None in sizes:
        fix = "set validation.width and height"
        not_supported_unless_off(config, "validation_resolution", fix)
        return
    (width, height), *others = [size for size in sizes if size is not None]
    imported.set("validation.width", width)
    imported.set("validation.height", height)
    text = f"validation.width is {width} and validation.height is {height}"
    prompts = imported.get("validation.prompts")
    if others and isinstance(prompts, list):
        more = [
            {"prompt": prompt, "width": wide, "height": high}
            for wide, high in others
            for prompt in prompts
        ]
        imported.set("validation.prompts", [*prompts, *more])
        text += "; validation.prompts has the other sizes"
    config.report("validation_resolution", "translated", text)


def _parse_size(text: str) -> tuple[int, int] | None:
    """Return the width and height of a text such as `832x480` or `1024`; None if it is no size."""
    edges = [as_number(part) for part in re.split("[x*]", text.lower())]
    if len(edges) > 2 or not all(edge and edge > 0 for edge in edges):
        return None
    width, height = (edge or 0 for edge in (edges[0], edges[-1]))
    if width < 16:  # megapixels, as with resolution_type: area
        width = height = max(64, round(math.sqrt(width * 1e6) / 64) * 64)
    return int(width), int(height)


def _import_prompts(
    imported: ImportedRun, name: str, prompts: Mapping[str, object]
) -> list[object]:
    """Return the prompts of a prompt library, which are texts or sections with a `prompt`."""
    reader, found = KeyReader(imported, name, prompts), list[object]()
    for key, value in prompts.items():
        if isinstance(value, str):
            found.append(value)
            reader.report(key, "taken", "validation.prompts")
            continue
        entry = reader.section(key)
        if entry is None or not isinstance(entry.peek("prompt"), str):
            reader.report(key, "not supported", "name the prompt in validation.prompts")
            continue
        found.append(entry.peek("prompt"))
        entry.report("prompt", "taken", "validation.prompts")
        entry.not_supported("adapter_strength", "samples use the adapter at full strength")
        entry.finish()
    return found


# The other keys


VAE_KEY, MODEL_KEY = "pretrained_vae_model_name_or_path", "pretrained_model_name_or_path"


def _report_unused(config: KeyReader) -> None:
    """Report the keys of the tables: features that gracetune lacks, and keys without effect."""
    for key in config.unreported():
        feature = next((prefix for prefix in FEATURES if key.startswith(prefix)), None)
        if key == VAE_KEY and config.peek(key) not in (config.peek(MODEL_KEY), *EMPTY):
            config.not_supported(
                key,
                "the VAE of model.path is used, in fp32, so that a VAE that was changed for fp16 "
                "is not needed. To use another VAE, put it into the folder vae of model.path",
            )
        elif key in NOT_NEEDED:
            config.not_needed(key, NOT_NEEDED[key])
        elif key in NOT_SUPPORTED:
            not_supported_unless_off(config, key, NOT_SUPPORTED[key])
        elif feature is not None:
            switch, fix = FEATURES[feature]
            if is_off(config.peek(switch)):
                config.not_needed(key, f"{switch} is off")
            else:
                config.not_supported(key, fix)
        else:
            prefix = next((each for each in IGNORED_PREFIXES if key.startswith(each)), None)
            if prefix is not None:
                config.not_needed(key, IGNORED_PREFIXES[prefix])
