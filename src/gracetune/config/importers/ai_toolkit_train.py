"""Import the section `train` of an ai-toolkit job: steps, precision, timesteps and optimizer."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.importers import ai_toolkit_keys as tables
from gracetune.config.importers.report import MISSING, KeyReader
from gracetune.config.importers.values import (
    NO_EFFECT,
    PLANNED_CHECKPOINTING,
    as_bool,
    as_float,
    as_int,
    as_text,
    copy_flag,
    copy_value,
    finish_section,
    is_usable,
    open_section,
    package_remark,
    put_value,
    read_value,
    set_default,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.importers.ai_toolkit_keys import Job
    from gracetune.config.importers.report import Verdict

TIMESTEPS = 1000
"""Number of ai-toolkit's timesteps, from the noisiest with the index 0 to the cleanest."""
WEIGHTED = (0.48, 1.58)
"""Mean and standard deviation of the logit-normal distribution that is nearest, by least squares,
to ai-toolkit's table of loss weights for `timestep_type: weighted`."""
STANDARD = (0.0, 1.0)
"""Mean and standard deviation that gracetune uses by default."""
BELL = (0.0, 1.03)
"""The same for the loss weights of `linear_timesteps`."""
HALF_BELL = (-0.4, 1.41)
"""The same for the loss weights of `linear_timesteps2`."""
CUBIC = {"uniform": (2.55, 3.43), "logit_normal": (1.2, 1.44)}
"""Mean and standard deviation of the logits of timesteps whose rank is 1 - u^3, with a uniform u,
in a uniform and in a logit-normal distribution."""
FEW_STEP_TYPES = ("one_step", "two_step", "four_step", "eight_step", "next_sample")
CAPTIONS_UNUSED = (
    "datasets[].caption_strategy is instanceprompt: ai-toolkit then uses no captions, only the "
    "trigger word or an empty text. To train with the captions, remove caption_strategy and "
    "instance_prompt"
)


def import_train(job: Job, process: KeyReader) -> None:
    """Import the section `train`. Without one, all of ai-toolkit's defaults are used."""
    train = open_section(process, "train") or KeyReader(job.imported, process.file, {})
    _import_steps(job, train)
    _import_precision(job, train)
    _import_timesteps(job, train)
    _import_window(job, train)
    _import_optimizer(job, train)
    _import_schedule(job, train)
    _import_average(train)
    copy_value(train, "max_grad_norm", "train.max_grad_norm", as_float)
    key, setting = "gradient_checkpointing", "train.gradient_checkpointing"
    if is_usable(train, key, as_bool):
        put_value(train, key, setting, as_bool(train.peek(key)), PLANNED_CHECKPOINTING)
    else:
        set_default(train, key, setting, value=True)
    copy_flag(train, "disable_sampling", "validation.every", 0)
    copy_flag(train, "skip_first_sample", "validation.at_start", False)
    _import_loss_weights(job, train)
    if job.captions_unused:
        train.report("unload_text_encoder", "translated", CAPTIONS_UNUSED)
    else:
        train.not_needed("unload_text_encoder", tables.TEXT_ENCODERS)
    finish_section(train, tables.TRAIN_NOT_NEEDED, tables.TRAIN_UNSUPPORTED)


def _import_loss_weights(job: Job, train: KeyReader) -> None:
    """Translate the keys whose meaning depends on the kind of model."""
    if not read_value(train, "min_snr_gamma", as_float):
        train.not_needed("min_snr_gamma", NO_EFFECT)
    elif job.is_flow:
        text = "flow-matching models use it only with train.min_snr_in_flow: exact"
        train.not_supported("min_snr_gamma", text)
    else:
        copy_value(train, "min_snr_gamma", "train.min_snr_gamma", as_float)
    if not job.has_experts:
        train.not_needed("switch_boundary_every", "the model has one transformer")
    elif is_usable(train, "switch_boundary_every", as_int):
        every = job.count_steps(read_value(train, "switch_boundary_every", as_int) or 1)
        put_value(train, "switch_boundary_every", "train.switch_every", every)
    key = "bypass_guidance_embedding"
    if read_value(train, key, as_bool) and job.model.family == "flux":
        train.not_supported(key, "models with a guidance input are trained with guidance 1")
    else:
        train.not_needed(key, "there is no guidance input to bypass")


def _import_steps(job: Job, train: KeyReader) -> None:
    copy_value(train, "batch_size", "train.batch_size", as_int)
    accumulated = read_value(train, "gradient_accumulation", as_int) or 1
    older = read_value(train, "gradient_accumulation_steps", as_int) or 1
    if accumulated == 1 and older > 1:
        job.micro_steps = older
        why = "ai-toolkit counts each micro-batch as a step, so steps are divided by it"
        key, setting = "gradient_accumulation_steps", "train.gradient_accumulation_steps"
        train.translate(key, setting, older, why)
    elif older < 0:
        train.not_supported(
            "gradient_accumulation_steps", "set train.gradient_accumulation_steps to a number"
        )
    else:
        train.not_needed("gradient_accumulation_steps", NO_EFFECT)
    if job.micro_steps == 1:
        setting = "train.gradient_accumulation_steps"
        copy_value(train, "gradient_accumulation", setting, as_int)
    else:
        train.not_needed("gradient_accumulation", NO_EFFECT)
    if is_usable(train, "steps", as_int):
        steps = job.count_steps(read_value(train, "steps", as_int) or 1)
        put_value(train, "steps", "train.max_train_steps", steps)
    else:
        set_default(train, "steps", "train.max_train_steps", job.count_steps(1000))


def _import_precision(job: Job, train: KeyReader) -> None:
    """Translate `dtype`: ai-toolkit loads the model in it, and computes in it."""
    name = (read_value(train, "dtype", as_text) or "fp32").lower()
    is_single = name in ("fp32", "float32", "float")
    precision, dtype = ("no", "float32") if is_single else ("bf16", "bfloat16")
    job.imported.set("model.dtype", dtype)
    if not is_usable(train, "dtype", as_text):
        set_default(train, "dtype", "train.mixed_precision", precision)
    elif name in ("fp16", "float16", "half"):
        why = f"transformers overflow in fp16; model.dtype is {dtype}"
        train.translate("dtype", "train.mixed_precision", precision, why)
    else:
        why = f"model.dtype is {dtype}"
        train.translate("dtype", "train.mixed_precision", precision, why)


def _import_average(train: KeyReader) -> None:
    average = open_section(train, "ema_config")
    if average is None:
        return
    if read_value(average, "use_ema", as_bool):
        average.report("use_ema", "translated", "train.ema_decay turns the average on")
        copy_value(average, "ema_decay", "train.ema_decay", as_float, default=0.999)
    else:
        average.not_needed("use_ema", NO_EFFECT)
        average.not_needed("ema_decay", "it is used only with use_ema")
    finish_section(average, {}, tables.EMA_UNSUPPORTED)


# Timesteps


class TimestepSettings(NamedTuple):
    """A distribution of timesteps in gracetune's words."""

    normal: tuple[float, float] | None = None
    """Mean and standard deviation of a logit-normal distribution; None: a uniform one."""
    shift: float | str = 1.0
    why: str = ""
    is_like: bool = True
    """False if ai-toolkit draws timesteps in another way."""

    @property
    def sampling(self) -> str:
        """The value of `train.timestep_sampling`."""
        return "uniform" if self.normal is None else "logit_normal"

    def apply(self, job: Job) -> None:
        """Set the settings of a run file."""
        job.imported.set("train.timestep_sampling", self.sampling)
        if self.normal not in (None, STANDARD):
            for setting, value in zip(("timestep_mean", "timestep_std"), self.normal, strict=True):
                job.imported.set(f"train.{setting}", value)
        if self.shift != 1.0:
            job.imported.set("train.timestep_shift", self.shift)

    def describe(self) -> str:
        """Return the settings in words, for the report."""
        words = [f"train.timestep_sampling is {self.sampling}"]
        if self.normal is not None and self.normal != STANDARD:
            words.append(f"timestep_mean {self.normal[0]:g}, timestep_std {self.normal[1]:g}")
        if self.shift != 1.0:
            words.append(f"timestep_shift {self.shift}")
        return ", ".join(words) + (f": {self.why}" if self.why else "")


def _distribution(job: Job, train: KeyReader) -> TimestepSettings:
    """Return the distribution of `timestep_type`.

    ai-toolkit draws the index of a timestep evenly, from a list that depends on the type. Loss
    weights are translated to a distribution that draws timesteps as often as they are weighted.
    """
    if not job.is_flow:
        return TimestepSettings()
    as_weighted = "timesteps are drawn about as often as ai-toolkit weights their loss"
    if read_value(train, "linear_timesteps2", as_bool):
        return TimestepSettings(HALF_BELL, why=as_weighted)
    if read_value(train, "linear_timesteps", as_bool):
        return TimestepSettings(BELL, why=as_weighted)
    shifted = TimestepSettings(shift=_shift(job), why="the shift of ai-toolkit's scheduler")
    few = TimestepSettings(why="training on a few timesteps only is not supported", is_like=False)
    blend = TimestepSettings(STANDARD, why="this blend is not supported", is_like=False)
    known = {
        "sigmoid": TimestepSettings(STANDARD),
        "linear": TimestepSettings(),
        "weighted": TimestepSettings(WEIGHTED, why=as_weighted),
        **dict.fromkeys(("shift", "flux_shift", "lumina2_shift"), shifted),
        **dict.fromkeys(FEW_STEP_TYPES, few),
        "lognorm_blend": blend,
    }
    kind = read_value(train, "timestep_type", as_text) or "sigmoid"
    unknown = TimestepSettings(STANDARD, why="ai-toolkit does not have this type", is_like=False)
    return known.get(kind, unknown)


def _import_timesteps(job: Job, train: KeyReader) -> None:
    own = "the model is trained on its own noise schedule"
    is_replaced = read_value(train, "noise_scheduler", as_text) == "flowmatch"
    if job.is_flow:
        train.not_needed("noise_scheduler", "the model is trained by flow matching")
    elif is_replaced:
        train.not_supported("noise_scheduler", own)
    else:
        train.not_needed("noise_scheduler", own)
    drawn = _distribution(job, train)
    content = read_value(train, "content_or_style", as_text)
    if content in ("content", "style"):
        mean, std = CUBIC[drawn.sampling]
        drawn = drawn._replace(normal=(mean if content == "content" else -mean, std))
        train.report("content_or_style", "translated", drawn.describe())
    elif is_usable(train, "content_or_style", as_text):
        train.not_needed("content_or_style", NO_EFFECT)
    replaced_by = ""
    for key in ("linear_timesteps", "linear_timesteps2"):
        if job.is_flow and read_value(train, key, as_bool):
            train.report(key, "translated", drawn.describe())
            replaced_by = key
        else:
            train.not_needed(key, NO_EFFECT)
    if not job.is_flow or replaced_by:
        train.not_needed("timestep_type", f"{replaced_by} replaces it" if replaced_by else own)
    elif is_usable(train, "timestep_type", as_text):
        verdict: Verdict = "translated" if drawn.is_like else "not supported"
        train.report("timestep_type", verdict, drawn.describe())
    else:
        set_default(train, "timestep_type", "train.timestep_sampling", drawn.sampling)
    drawn.apply(job)


def _shift(job: Job) -> float | str:
    """Return `train.timestep_shift` for `timestep_type: shift`.

    The shift of Krea 2 grows with the image, by a rule that gracetune has no name for; the result
    is the shift for the largest resolution.
    """
    if job.model.shift != "krea2":
        return job.model.shift
    tokens = (max(job.resolutions, default=1024) / 16) ** 2
    return round(math.exp(0.5 + 0.65 * (tokens - 256) / (6400 - 256)), 3)


def _import_window(job: Job, train: KeyReader) -> None:
    """Translate the range of indices of timesteps to the range of timesteps."""
    drawn = _distribution(job, train)
    shift = drawn.shift
    keys = ("min_denoising_steps", "max_denoising_steps")
    first = read_value(train, keys[0], as_int) or 0
    last = read_value(train, keys[1], as_int)
    last = TIMESTEPS - 1 if last is None else last
    is_whole = first <= 0 and last >= TIMESTEPS - 1
    if is_whole or job.has_experts or not 0 <= first < last or isinstance(shift, str):
        for key in keys:
            if is_whole:
                train.not_needed(key, "it is the whole range")
            elif job.has_experts:
                train.not_needed(key, "each expert is trained on its own range")
            else:
                train.not_supported(key, "set train.timestep_window to the range of timesteps")
        return

    def timestep(index: int) -> float:
        rank = min(max(1 - index / TIMESTEPS, 0.0), 1.0)
        if drawn.normal == STANDARD and 0 < rank < 1:
            rank = 1 / (1 + math.exp(-NormalDist().inv_cdf(rank)))
        return round(shift * rank / (1 + (shift - 1) * rank), 4)

    window = [timestep(last if last < TIMESTEPS - 1 else TIMESTEPS), timestep(first)]
    for key in keys:
        if is_usable(train, key, as_int):
            train.translate(key, "train.timestep_window", window)


# Optimizer


def _import_optimizer(job: Job, train: KeyReader) -> None:
    theirs = (read_value(train, "optimizer", as_text) or "adamw").lower()
    name = next(
        (key for key in ("dadaptation", "prodigy8bit", "prodigy") if theirs.startswith(key)), theirs
    )
    info = tables.OPTIMIZERS.get(name)
    unknown = info is None
    info = info or tables.OPTIMIZERS["adamw"]._replace(is_like=False, why=tables.NO_MATCH)
    set_ = job.imported.set
    set_("optimizer.name", info.name)
    set_("optimizer.weight_decay", info.weight_decay)
    if info.eps is not None:
        set_("optimizer.eps", info.eps)
    if info.betas is not None:
        set_("optimizer.betas", list(info.betas))
    if name in ("automagic", "automagic2", "automagicexperiment"):
        set_("optimizer.lr_bump", 1e-6)
    if is_usable(train, "optimizer", as_text):
        details = [f"with eps {info.eps:g}"] if info.eps is not None else []
        details += [each for each in (info.why, package_remark(info.name)) if each]
        if info.name == "prodigy" and job.has_experts:
            details.append("it cannot train two experts in one run; set train.experts")
        text = f"optimizer.name is {info.name}" + (f": {'; '.join(details)}" if details else "")
        train.report(
            "optimizer", "translated" if info.is_like and not unknown else "not supported", text
        )
    _import_rate(train, name)
    options = open_section(train, "optimizer_params")
    if options is not None:
        _import_optimizer_params(options, info.name, name)


def _import_rate(train: KeyReader, name: str) -> None:
    """Translate the learning rate; `unet_lr` replaces `lr` in ai-toolkit."""
    key = "unet_lr" if read_value(train, "unet_lr", as_float) else "lr"
    if key == "unet_lr":
        train.not_needed("lr", "unet_lr replaces it")
    else:
        train.not_needed("unet_lr", "it is empty")
    if not is_usable(train, key, as_float):
        default = 1.0 if name.startswith(("prodigy", "dadaptation")) else 1e-6
        set_default(train, key, "optimizer.lr", default)
        return
    rate = read_value(train, key, as_float) or 0.0
    if rate <= 0:
        train.not_supported(key, "it must be above 0; the optimizer's default is used")
    elif name.startswith(("prodigy", "dadaptation")) and rate < 0.1:
        train.translate(key, "optimizer.lr", 1.0, "ai-toolkit uses 1 for smaller values")
    elif name in ("automagic", "automagic2") and rate > 1e-3:
        train.translate(key, "optimizer.lr", 1e-6, "ai-toolkit uses 1e-6 for larger values")
    else:
        put_value(train, key, "optimizer.lr", rate)


def _import_optimizer_params(options: KeyReader, ours: str, theirs: str) -> None:
    copy_value(options, "weight_decay", "optimizer.weight_decay", as_float)
    betas = options.peek("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(as_float(b) is not None for b in betas):
        put_value(options, "betas", "optimizer.betas", [as_float(beta) for beta in betas])
    else:
        options.not_supported("betas", "it must be a list of two numbers, so it is ignored")
    for key in ("lr_bump", "min_lr", "max_lr"):
        for expert in ("", "high_noise_", "low_noise_"):
            name = f"{expert}{key}"
            if ours == "automagic" and not (theirs == "automagic3" and key == "lr_bump"):
                copy_value(options, name, f"optimizer.{name}", as_float)
            else:
                options.not_supported(name, f"{theirs} does not use it")
    if ours == "automagic" and read_value(options, "beta2", as_float) is not None:
        options.translate("beta2", "optimizer.betas", [0.9, read_value(options, "beta2", as_float)])
    if ours in ("automagic", "lion") or theirs == "adafactor":
        options.not_needed("eps", f"{ours} needs no other value")
    else:
        copy_value(options, "eps", "optimizer.eps", as_float)
    finish_section(options, {}, tables.OPTIMIZER_PARAMS_UNSUPPORTED)


class Schedule(NamedTuple):
    """A learning-rate schedule in gracetune's words."""

    name: str = "constant"
    settings: Mapping[str, float] = {}
    """Other settings of the section `optimizer`."""
    used: frozenset[str] = frozenset(("total_iters", "factor"))
    """Keys of `lr_scheduler_params` that were translated."""
    why: str = ""
    is_like: bool = True


def _import_schedule(job: Job, train: KeyReader) -> None:
    params = open_section(train, "lr_scheduler_params")
    schedule = _schedule(job, train, params)
    job.imported.set("optimizer.schedule", schedule.name)
    for setting, value in schedule.settings.items():
        job.imported.set(f"optimizer.{setting}", value)
    settings = {"schedule": schedule.name, **schedule.settings}
    text = ", ".join(f"optimizer.{key} is {value}" for key, value in settings.items())
    text += f": {schedule.why}" if schedule.why else ""
    verdict: Verdict = "translated" if schedule.is_like else "not supported"
    if is_usable(train, "lr_scheduler", as_text):
        train.report("lr_scheduler", verdict, text)
    if params is None:
        return
    for key in schedule.used:
        if params.peek(key) is not MISSING:
            params.report(key, verdict, text)
    others = {k: v for k, v in tables.SCHEDULE_UNSUPPORTED.items() if k not in schedule.used}
    finish_section(params, {}, others)


def _schedule(job: Job, train: KeyReader, params: KeyReader | None) -> Schedule:
    """Return the schedule of `lr_scheduler`. Lengths count ai-toolkit's steps."""
    name = (read_value(train, "lr_scheduler", as_text) or "constant").lower()
    keys = ("total_iters", "T_max", "T_0", "eta_min", "start_factor", "end_factor")
    values = {key: read_value(params, key, as_float) for key in keys}
    steps = read_value(train, "steps", as_int) or 1000
    length = values["total_iters"] or values["T_max"] or values["T_0"] or steps
    match name:
        case "constant":
            return Schedule()
        case "cosine" | "cosine_with_restarts":
            rate = read_value(train, "unet_lr", as_float) or read_value(train, "lr", as_float)
            share = min(1.0, (values["eta_min"] or 0.0) / (rate or 1e-6))
            settings = {"final_lr_share": share} if share else {}
            used = frozenset(("total_iters", "T_max", "T_0", "eta_min"))
            why = "" if length == steps else f"it spans the whole run and not {length:g} steps"
            return Schedule("cosine", settings, used, why, is_like=not why)
        case "constant_with_warmup":
            warmup = read_value(params, "num_warmup_steps", as_int)
            count = 0 if warmup == 0 else job.count_steps(warmup or 1000)
            used = frozenset(("num_warmup_steps", "total_iters"))
            return Schedule(settings={"warmup_steps": count}, used=used)
        case "linear":
            return _linear_schedule(job, values, int(length), steps)
    why = "the schedules are constant, linear and cosine"
    return Schedule(why=why, used=frozenset(), is_like=False)


def _linear_schedule(
    job: Job, values: Mapping[str, float | None], length: int, steps: int
) -> Schedule:
    """Translate torch's LinearLR, which by default raises the rate from a third of `lr` to `lr`."""
    start = 1 / 3 if values["start_factor"] is None else values["start_factor"]
    end = 1.0 if values["end_factor"] is None else values["end_factor"]
    used = frozenset(("start_factor", "end_factor", "total_iters"))
    if start == 1 and end < 1 and length == steps:
        return Schedule("linear", {"final_lr_share": end}, used)
    if start < 1 and end == 1 and length < steps:
        why = f"the rate rises from near zero; ai-toolkit's rises from {start:.2g} of lr"
        return Schedule(settings={"warmup_steps": job.count_steps(length)}, used=used, why=why)
    why = f"ai-toolkit's rate goes from {start:.2g} to {end:.2g} of lr in {length} steps; set "
    why += "optimizer.schedule: linear if it should fall to 0"
    return Schedule(used=used, why=why, is_like=False)
