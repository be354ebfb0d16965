"""Translate the adapter of a SimpleTuner config: LoRA options, or a file of LyCORIS settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.importers.report import MISSING, KeyReader
from gracetune.config.importers.simpletuner_keys import CLASS_PATTERNS, FLUX_TARGETS
from gracetune.config.importers.values import (
    as_bool,
    as_number,
    is_off,
    not_supported_unless_off,
    take_unless_off,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.importers.simpletuner_keys import SimpleTunerFamily

FULL_MATRIX_RANK = 10_000
"""Rank of a LoKr from which SimpleTuner's guides call it a full matrix."""
LYCORIS_KINDS = {
    "lora": "locon",
    "locon": "locon",
    "loha": "loha",
    "lokr": "lokr",
    "full": "full",
}
"""gracetune's adapter for each of LyCORIS' algorithms that it has."""
LYCORIS_LIMITS = (
    ("multiplier", 1, "merge or load the adapter at another strength"),
    ("weight_decompose", False, "set adapter.kind: dora for LoRA with DoRA"),
    ("use_tucker", False, "convolutions are adapted without a Tucker decomposition"),
    ("use_scalar", False, "there is no learned scale"),
    ("decompose_both", False, "set adapter.full_matrix, or leave it out"),
    ("rank_dropout", 0, "set adapter.dropout"),
    ("module_dropout", 0, "set adapter.dropout"),
    ("conv_dim", None, "layers have the rank of linear_dim"),
    ("conv_alpha", None, "layers have the alpha of linear_alpha"),
    ("rs_lora", False, "set adapter.alpha to alpha times the root of the rank"),
    ("unbalanced_factorization", False, "the factors are balanced"),
    ("train_norm", False, "norms are not trained"),
    ("init_lokr_norm", None, "a LoKr starts from zero output"),
)
"""Settings of LyCORIS that gracetune does not have: the name, the usual value, and what to do."""


class SimpleTunerFiles(NamedTuple):
    """The files of a SimpleTuner config, read and parsed."""

    name: str
    """Name of the config file for the report."""
    config: Mapping[str, object]
    """Options by their names without `--`, with numbers and booleans instead of texts."""
    datasets_name: str
    datasets: Sequence[Mapping[str, object]]
    lycoris_name: str = ""
    lycoris: Mapping[str, object] | None = None
    prompts_name: str = ""
    prompts: Mapping[str, object] | None = None
    """Prompts of `user_prompt_library` by their short names."""


def import_adapter(config: KeyReader, family: SimpleTunerFamily, files: SimpleTunerFiles) -> None:
    """Translate the options of the adapter, or report that every weight is trained."""
    imported = config.imported
    lora_keys = ("lora_type", "lora_rank", "lora_alpha", "lora_dropout", "use_dora")
    other_keys = ("lycoris_config", "peft_lora_target_modules", "flux_lora_target")
    if config.peek("model_type") != "lora":
        imported.set("adapter", None)
        if config.peek("model_type") is not MISSING:
            config.translate("model_type", "adapter", None, "every weight is trained")
        for key in (*lora_keys, *other_keys):
            config.not_needed(key, "model_type is not lora")
        return
    imported.set("adapter", {})
    config.report("model_type", "translated", "the adapter section trains an adapter")
    if str(config.peek("lora_type")).lower() == "lycoris":
        for key in (*lora_keys[1:], *other_keys[1:]):
            config.not_needed(key, "the LyCORIS config decides")
        config.report("lora_type", "translated", "adapter.kind is LyCORIS' algo")
        _import_lycoris(config, family, files)
        return
    config.not_needed("lycoris_config", "lora_type is not lycoris")
    if as_bool(config.peek("use_dora")):
        config.not_needed("lora_type", "use_dora decides")
        config.translate("use_dora", "adapter.kind", "dora")
    else:
        config.not_needed("use_dora", "it is off")
        if config.peek("lora_type") is not MISSING:
            config.translate("lora_type", "adapter.kind", "lora")
    config.take("lora_rank", "adapter.rank")
    take_unless_off(config, "lora_alpha", "adapter.alpha", "alpha is equal to the rank")
    config.take("lora_dropout", "adapter.dropout")
    imported.default("adapter.rank", 16, "lora_rank is 16")
    imported.default("adapter.dropout", 0.1, "lora_dropout is 0.1")
    _import_targets(config, family)


def _import_targets(config: KeyReader, family: SimpleTunerFamily) -> None:
    named = texts(config.peek("peft_lora_target_modules"))
    flux_target = config.peek("flux_lora_target")
    if named and named != ["all-linear"]:
        config.translate("peft_lora_target_modules", "adapter.targets", named)
    else:
        not_supported_unless_off(
            config, "peft_lora_target_modules", "name modules in adapter.targets"
        )
    if family.family != "flux" or named:
        config.not_needed("flux_lora_target", "it belongs to FLUX.1 without named modules")
    elif flux_target in FLUX_TARGETS:
        targets = list(FLUX_TARGETS[str(flux_target)])
        config.translate("flux_lora_target", "adapter.targets", targets)
    else:
        not_supported_unless_off(config, "flux_lora_target", "name modules in adapter.targets")
    default = FLUX_TARGETS["all"] if family.family == "flux" else family.targets
    why = "SimpleTuner adapts these modules"
    config.imported.default("adapter.targets", list(default), why)


def _import_lycoris(config: KeyReader, family: SimpleTunerFamily, files: SimpleTunerFiles) -> None:
    imported = config.imported
    if files.lycoris is None:
        imported.refuse(
            f"lycoris_config is {config.peek('lycoris_config')!r}, but there is no such file. Pass "
            "it as another argument of `gracetune import`."
        )
        config.not_supported("lycoris_config", "pass the file to `gracetune import`")
        return
    if config.peek("lycoris_config") is not MISSING:
        config.report("lycoris_config", "translated", f"adapter, from {files.lycoris_name}")
    lycoris = KeyReader(imported, files.lycoris_name, files.lycoris)
    algo = str(lycoris.peek("algo"))
    kind = LYCORIS_KINDS.get(algo)
    if kind is None:
        known = ", ".join(LYCORIS_KINDS)
        imported.refuse(f"algo is {algo!r} in {files.lycoris_name}. Set it to one of {known}.")
        lycoris.not_supported("algo", f"set it to one of {known}")
    elif kind == algo:
        lycoris.take("algo", "adapter.kind")
    else:
        lycoris.translate("algo", "adapter.kind", kind)
    _import_lycoris_size(lycoris, kind)
    for key, off, fix in LYCORIS_LIMITS:
        value = lycoris.peek(key)
        if value == off or is_off(value):
            lycoris.not_needed(key, "it has its usual value")
        else:
            lycoris.not_supported(key, fix)
    lycoris.not_needed("bypass_mode", "it only changes how the same output is computed")
    _import_preset(lycoris, family)
    lycoris.finish()


def _import_lycoris_size(lycoris: KeyReader, kind: str | None) -> None:
    """Translate the rank, alpha, factor and dropout of a LyCORIS adapter."""
    imported = lycoris.imported
    rank = as_number(lycoris.peek("linear_dim"))
    is_full = as_bool(lycoris.peek("full_matrix")) or (rank or 0) >= FULL_MATRIX_RANK
    if kind == "lokr" and is_full:
        imported.set("adapter.full_matrix", True)
        lycoris.not_needed("linear_alpha", "a full matrix has no alpha")
        text = "adapter.full_matrix is true"
        for key in ("linear_dim", "full_matrix"):
            if lycoris.peek(key) is not MISSING:
                lycoris.report(key, "translated", text)
    else:
        lycoris.take("linear_dim", "adapter.rank")
        lycoris.take("linear_alpha", "adapter.alpha")
        lycoris.not_needed("full_matrix", "it is off, or the algorithm has none")
        imported.default("adapter.rank", 4, "linear_dim is 4")
        imported.default("adapter.alpha", 1, "linear_alpha is 1")
    if kind == "lokr":
        lycoris.take("factor", "adapter.factor")
    lycoris.not_needed("factor", "only lokr has it")
    lycoris.take("dropout", "adapter.dropout")


def _import_preset(lycoris: KeyReader, family: SimpleTunerFamily) -> None:
    """Translate the preset, which names the modules to adapt and settings for some of them."""
    imported, preset = lycoris.imported, lycoris.section("apply_preset")
    default = _class_patterns(family.lycoris_targets)
    if preset is None:
        imported.default("adapter.targets", default, "SimpleTuner adapts these modules")
        return
    targets: list[str] = []
    for key in ("target_module", "unet_target_module", "target_name", "unet_target_name"):
        names = texts(preset.peek(key))
        is_class = key.endswith("module")
        unknown = [name for name in names if is_class and not _class_patterns([name])]
        found = _class_patterns(names) if is_class else names
        if unknown:
            preset.not_supported(key, f"name the modules of {unknown[0]} in adapter.targets")
        elif found:
            preset.report(key, "translated", f"adapter.targets has {', '.join(found)}")
        preset.not_needed(key, "it is empty")
        targets += found
    imported.set("adapter.targets", targets or default)
    overrides: dict[str, object] = {}
    for key in ("module_algo_map", "name_algo_map"):
        settings = preset.section(key)
        for name in [] if settings is None else settings.unreported():
            assert settings is not None
            patterns = _class_patterns([name]) if key == "module_algo_map" else [name]
            _import_override(settings, name, patterns, overrides)
    if overrides:
        imported.set("adapter.overrides", overrides)
    preset.not_needed("use_fnmatch", "patterns with wildcards are supported")
    preset.not_needed("enable_conv", "the target modules decide which layers are adapted")
    preset.finish()


def _import_override(
    settings: KeyReader, name: str, patterns: Sequence[str], overrides: dict[str, object]
) -> None:
    """Translate the settings of one class of modules, or of modules with matching names."""
    section = settings.section(name)
    if section is None or not patterns:
        settings.report(name, "not supported", "name the modules in adapter.overrides")
        return
    values: dict[str, object] = {}
    for theirs, ours in (
        ("factor", "factor"),
        ("linear_dim", "rank"),
        ("dim", "rank"),
        ("linear_alpha", "alpha"),
        ("alpha", "alpha"),
        ("dropout", "dropout"),
    ):
        value = section.peek(theirs)
        if value is not MISSING:
            values[ours] = value
            section.report(theirs, "translated", f"adapter.overrides.{patterns[0]}.{ours}")
    if section.peek("algo") == section.imported.get("adapter.kind"):
        section.not_needed("algo", "it is the adapter's kind")
    section.not_supported("algo", "all modules have the same kind of adapter")
    section.finish()
    overrides.update({pattern: values for pattern in patterns if values})


def _class_patterns(classes: Sequence[str]) -> list[str]:
    """Return the patterns of module names for classes such as `Attention` or `FluxAttention`."""
    found = [
        pattern for name in classes for word, pattern in CLASS_PATTERNS.items() if word in name
    ]
    return list(dict.fromkeys(found))
