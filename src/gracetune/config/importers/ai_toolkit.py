"""Turn a job file of ai-toolkit into a run file, with a report of every key.

`import_job` imports the first training process of a job. Where ai-toolkit has another default than
gracetune for a key that is not in the file, the run file has ai-toolkit's default. This module
imports the model, the adapter and the folders; `ai_toolkit_train.py` and `ai_toolkit_data.py` have
the other sections, and `ai_toolkit_keys.py` has the tables of models and keys.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gracetune.config.environment import process_environment
from gracetune.config.importers import ai_toolkit_keys as tables
from gracetune.config.importers.ai_toolkit_data import (
    import_datasets,
    import_own_section,
    import_sample,
    import_save,
)
from gracetune.config.importers.ai_toolkit_keys import MODELS, NOT_TRANSLATED, OTHER_MODELS, Job
from gracetune.config.importers.ai_toolkit_train import import_train
from gracetune.config.importers.report import MISSING, ImportedRun, KeyReader
from gracetune.config.importers.values import (
    EMPTY,
    NO_EFFECT,
    as_bool,
    as_float,
    as_int,
    as_text,
    copy_value,
    finish_section,
    is_usable,
    open_section,
    own_output_dir,
    put_value,
    read_value,
)
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOOL = "ai-toolkit"
ONLY_ONE = "only the first training process is imported; put this one into a file of its own"


def import_job(path: Path, tree: Mapping[str, object]) -> ImportedRun:
    """Return the run file for a parsed job file of ai-toolkit, and the report of its keys.

    Raises an error with one line if the job does not train a model that gracetune has.
    """
    imported = ImportedRun(TOOL)
    tree = _replace_placeholders(path, tree)
    reader = KeyReader(imported, str(path), tree)
    config = reader.section("config")
    processes = config.sections("process") if config is not None else []
    if config is None or not processes:
        raise ConfigError(
            f"{path}: config.process is missing or not a list of sections, so this is not a "
            "job of ai-toolkit."
        )
    kind = reader.peek("job")
    found = [each for each in processes if str(each.peek("type")) in tables.TRAINERS]
    if kind not in (MISSING, "extension", "train") or not found:
        raise ConfigError(_no_training(str(path), kind, processes[0].peek("type")))
    process = found[0]
    _import_folders(config, process)
    job = _import_model(str(path), imported, process)
    _import_network(job, process)
    import_train(job, process)
    import_datasets(job, process)
    import_save(job, process)
    import_sample(job, process)
    import_own_section(process)
    logging = open_section(process, "logging")
    if logging is not None:
        copy_value(logging, "log_every", "logging.every", as_int)
        finish_section(logging, tables.LOGGING_NOT_NEEDED, tables.LOGGING_UNSUPPORTED)
    finish_section(process, tables.PROCESS_NOT_NEEDED, tables.PROCESS_UNSUPPORTED)
    for other, entry in zip(processes, _entries(tree), strict=True):
        for key in entry if other is not process else ():
            other.not_supported(key, ONLY_ONE)
    finish_section(config, tables.PROCESS_NOT_NEEDED, {})
    finish_section(reader, tables.JOB_NOT_NEEDED, {})
    return imported


def _entries(tree: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the processes of a job, which `import_job` has found to be a list of sections."""
    config = tree["config"]
    assert isinstance(config, dict), config
    return list(config["process"])


def _no_training(file: str, kind: object, process: object) -> str:
    advice = tables.OTHER_PROCESSES.get(str(process), "gracetune imports training jobs only.")
    what = f"job is {kind!r} and " if kind not in (MISSING, "extension", "train") else ""
    return (
        f"{file}: {what}config.process.0.type is {process!r}, which is not one of the training "
        f"processes {', '.join(sorted(tables.TRAINERS - {'gracetune'}))}. {advice}"
    )


def _replace_placeholders(path: Path, tree: Mapping[str, object]) -> dict[str, object]:
    """Replace `[name]` by the job's name, and `${VARIABLE}` by that environment variable."""
    config = tree.get("config")
    name = config.get("name") if isinstance(config, dict) else None
    environment = process_environment()

    def variable(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise ConfigError(
                f"{path}: {match[0]} stands for an environment variable that is not set. Set "
                f"{match[1]}, or write its value into the file."
            )
        return environment[match[1]]

    def replace(value: object) -> object:
        if isinstance(value, dict):
            return {str(key): replace(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [replace(child) for child in value]
        if isinstance(value, str):
            value = re.sub(r"\$\{([^}]+)\}", variable, value)
            return value if name is None else value.replace("[name]", str(name))
        return value

    return {str(key): replace(value) for key, value in tree.items()}


# Output folder, model and adapter


def _import_folders(config: KeyReader, process: KeyReader) -> None:
    name = read_value(process, "name", as_text) or read_value(config, "name", as_text) or "run"
    folder_of = process if read_value(process, "training_folder", as_text) else config
    folder = read_value(folder_of, "training_folder", as_text)
    output = own_output_dir(f"{folder or 'output'}/{name}")
    config.imported.set("output_dir", output)
    unchanged = "ai-toolkit's folder is not changed"
    for reader, key in ((config, "name"), (process, "name"), (folder_of, "training_folder")):
        if is_usable(reader, key, as_text):
            reader.translate(key, "output_dir", output, unchanged)
    if folder_of is process:
        config.not_needed("training_folder", "the process has its own")
    seed_of = process if read_value(process, "training_seed", as_int) is not None else config
    copy_value(seed_of, "training_seed", "seed", as_int)
    if seed_of is process:
        config.not_needed("training_seed", "the process has its own")


def _find_arch(file: str, model: KeyReader) -> tuple[str, str]:
    """Return the `arch` of the model and the key that says it, which is empty for the default."""
    path = read_value(model, "name_or_path", as_text) or ""
    given = read_value(model, "arch", as_text)
    flags = [key for key in tables.MODEL_FLAGS if read_value(model, key, as_bool)]
    key = "arch" if given else flags[0] if flags else ""
    hinted = [arch for hint, arch in tables.PATH_HINTS if re.search(hint, path, re.IGNORECASE)]
    default = hinted[0] if hinted else "sd1"
    arch = given.partition(":")[0] if given else tables.MODEL_FLAGS.get(key, default)
    if arch == "flux" and default.startswith("flex"):
        arch = default
    if arch not in MODELS:
        known = f"the model {OTHER_MODELS[arch]}" if arch in OTHER_MODELS else "this model"
        where = f"model.{key} is {model.peek(key)!r}" if key else "model"
        if arch in NOT_TRANSLATED:
            raise ConfigError(
                f"{file}: {where} ({path or 'no path'}): settings of {known} are not translated. "
                f"Start from `gracetune examples {NOT_TRANSLATED[arch]} --copy`."
            )
        families = sorted({each.family for each in MODELS.values()})
        raise ConfigError(
            f"{file}: {where} ({path or 'no path'}): gracetune does not have {known}. It has the "
            f"families {', '.join(families)}."
        )
    return arch, key


def _import_model(file: str, imported: ImportedRun, process: KeyReader) -> Job:
    """Import the section `model`, which decides about keys of the other sections."""
    model = open_section(process, "model")
    if model is None:
        raise ConfigError(f"{file}: the process has no section `model`. Add it with name_or_path.")
    arch, arch_key = _find_arch(file, model)
    network = process.peek("network")
    has_adapter = isinstance(network, dict) and bool(network)
    is_dora = isinstance(network, dict) and str(network.get("type")).lower() == "dora"
    for key in ("adapter", "embedding", "decorator") if not has_adapter else ():
        if process.peek(key) not in (MISSING, *EMPTY):
            raise ConfigError(
                f"{file}: the process trains its section `{key}` and has no section `network`. "
                "gracetune trains LoRA-like adapters and whole models only."
            )
    trigger = read_value(process, "trigger_word", as_text)
    train = process.peek("train")
    train = train if isinstance(train, dict) else {}
    captions_unused = bool(as_bool(train.get("unload_text_encoder") or False)) and not bool(
        as_bool(train.get("cache_text_embeddings") or False)
    )
    resolutions = _resolutions(process)
    job = Job(
        imported, arch, MODELS[arch], has_adapter, is_dora, trigger, captions_unused, resolutions
    )
    for key in ("arch", *tables.MODEL_FLAGS):
        if key == arch_key:
            model.translate(key, "model.family", job.model.family)
        else:
            model.not_needed(key, f"the model is {job.model.family}")
    if not arch_key:
        why = "arch is not set" if arch == "sd1" else "the path of the model suggests it"
        imported.default("model.family", job.model.family, why)
    _import_path(model)
    _import_quantization(job, model)
    _import_model_kwargs(file, job, model)
    for key in tables.MEMORY_KEYS:
        model.not_needed(key, tables.MEMORY)
    finish_section(model, tables.MODEL_NOT_NEEDED, tables.MODEL_UNSUPPORTED)
    return job


def _resolutions(process: KeyReader) -> list[int]:
    """Return all resolutions of the datasets that are numbers."""
    datasets = process.peek("datasets")
    entries = (
        [each for each in datasets if isinstance(each, dict)] if isinstance(datasets, list) else []
    )
    given = [entry.get("resolution", 512) for entry in entries]
    sizes = [each for value in given for each in (value if isinstance(value, list) else [value])]
    return [size for each in sizes if (size := as_int(each)) is not None]


def _import_path(model: KeyReader) -> None:
    if is_usable(model, "name_or_path", as_text):
        path = read_value(model, "name_or_path", as_text) or ""
        put_value(model, "name_or_path", "model.path", *_model_path(path))
    if str(model.peek("unet_path")).endswith(".safetensors"):
        model.take("unet_path", "model.transformer_file")
    elif is_usable(model, "unet_path", as_text):
        model.not_supported("unet_path", "set model.transformer_file to a safetensors file")


def _model_path(path: str) -> tuple[str, str]:
    """Return `model.path` for ai-toolkit's `name_or_path`, and the reason for a change."""
    if path == "lodestones/Chroma" or path.startswith("lodestones/Chroma/"):
        why = "lodestones/Chroma has single files only, and this is a folder for diffusers"
        return "lodestones/Chroma1-HD", why
    complete = re.fullmatch(r"ai-toolkit/(Wan2\.2-(?:T2V|I2V)-A14B-Diffusers)-bf16", path)
    if complete:
        return f"Wan-AI/{complete[1]}", "the same model with all its parts"
    return path, ""


def _import_quantization(job: Job, model: KeyReader) -> None:
    is_wanted = bool(read_value(model, "quantize", as_bool))
    job.is_quantized = is_wanted and job.has_adapter and not job.is_dora
    if is_usable(model, "quantize", as_bool) and not job.is_quantized:
        if is_wanted:
            whole = "without an adapter, all weights are trained"
            norms = "a DoRA needs the norms of weights that are not quantized"
            model.not_supported("quantize", norms if job.is_dora else whole)
        else:
            model.not_needed("quantize", NO_EFFECT)
    qtype, _, recovery = (read_value(model, "qtype", as_text) or "qfloat8").partition("|")
    kind, difference = tables.QUANTIZATION.get(qtype.lower(), ("fp8", "the nearest known format"))
    if job.is_quantized:
        why = (
            "it costs accuracy; remove it if the plan fits without it: bf16 weights then stream "
            "from host memory"
        )
        model.translate("quantize", "model.quantize", kind, why)
        if not is_usable(model, "qtype", as_text):
            pass
        elif recovery:
            lost = "its accuracy recovery adapter is not supported and is left out"
            model.not_supported("qtype", f"model.quantize is {kind}; {lost}")
        else:
            model.translate("qtype", "model.quantize", kind, difference)
    else:
        model.not_needed("qtype", "it is used only with quantize")
    if not read_value(model, "compile", as_bool):
        model.not_needed("compile", "the planner compiles blocks if that is faster")
    else:
        model.translate("compile", "plan.compile", "always")


def _import_model_kwargs(file: str, job: Job, model: KeyReader) -> None:
    options = open_section(model, "model_kwargs")
    if options is None:
        return
    if job.arch == "krea2" and read_value(options, "edit", as_bool):
        raise ConfigError(
            f"{file}: model.model_kwargs.edit is true, but gracetune trains Krea 2 without "
            "references only."
        )
    options.not_needed("edit", NO_EFFECT)
    keys = {"high": "train_high_noise", "low": "train_low_noise"}
    wanted = [e for e, key in keys.items() if read_value(options, key, as_bool) is not False]
    experts = wanted[0] if len(wanted) == 1 else "both"
    if job.has_experts:
        job.imported.set("train.experts", experts)
    for key in keys.values():
        if not job.has_experts:
            options.not_needed(key, "the model has one transformer")
        elif not wanted:
            options.not_supported(key, "one of the two must be trained; train.experts is both")
        elif options.peek(key) is not MISSING:
            options.translate(key, "train.experts", experts)
    finish_section(options, tables.MODEL_KWARGS_NOT_NEEDED, tables.MODEL_KWARGS_UNSUPPORTED)


def _import_network(job: Job, process: KeyReader) -> None:
    network = open_section(process, "network")
    if network is None:
        return
    ours = tables.NETWORKS.get((read_value(network, "type", as_text) or "lora").lower())
    job.imported.set("adapter.kind", ours or "lora")
    if ours is None and network.peek("type") is not MISSING:
        kinds = ", ".join(tables.NETWORKS)
        network.not_supported("type", f"adapter.kind is lora; imported are {kinds}")
    elif is_usable(network, "type", as_text):
        layers = tables.MODULATION.get(job.model.family)
        why = f"attention and feed-forward; ai-toolkit also adapts modulation ({layers})"
        put_value(network, "type", "adapter.kind", ours, why if layers else "")
    _import_rank(network, is_lokr=ours == "lokr")
    for key in ("conv", "conv_alpha"):
        if job.is_flow or not read_value(network, "conv", as_float):
            network.not_needed(key, "the blocks of this model have no convolutions to adapt")
        else:
            network.not_supported(key, "name convolutions in adapter.targets to adapt them")
    copy_value(network, "dropout", "adapter.dropout", as_float)
    options = open_section(network, "network_kwargs")
    if options is not None:
        _import_targets(job, options)
        finish_section(options, {}, tables.NETWORK_KWARGS_UNSUPPORTED)
    finish_section(network, tables.NETWORK_NOT_NEEDED, tables.NETWORK_UNSUPPORTED)


def _import_rank(network: KeyReader, *, is_lokr: bool) -> None:
    """Translate rank and alpha. A LoKr has neither if it has the full rank, as is the default."""
    if is_lokr:
        copy_value(network, "lokr_factor", "adapter.factor", as_int)
        copy_value(network, "lokr_full_rank", "adapter.full_matrix", as_bool, default=True)
    else:
        for key in ("lokr_factor", "lokr_full_rank"):
            network.not_needed(key, "the adapter is not a LoKr")
    if is_lokr and read_value(network, "lokr_full_rank", as_bool) is not False:
        for key in ("rank", "linear", "alpha", "linear_alpha"):
            network.not_needed(key, "a LoKr of full rank has neither rank nor alpha")
        return
    rank = "rank" if read_value(network, "rank", as_int) else "linear"
    alpha = "linear_alpha" if read_value(network, "linear_alpha", as_float) else "alpha"
    copy_value(network, rank, "adapter.rank", as_int, default=4)
    copy_value(network, alpha, "adapter.alpha", as_float, default=1.0)
    network.not_needed("linear" if rank == "rank" else "rank", f"{rank} replaces it")
    other = "alpha" if alpha == "linear_alpha" else "linear_alpha"
    network.not_needed(other, f"{alpha} replaces it")


def _import_targets(job: Job, options: KeyReader) -> None:
    """Translate words in module names to `adapter.targets`, as regular expressions."""
    only, ignored = (
        [str(word) for word in value if word] if isinstance(value, list) else []
        for value in (options.peek("only_if_contains"), options.peek("ignore_if_contains"))
    )
    for key, words in (("only_if_contains", only), ("ignore_if_contains", ignored)):
        if not words:
            options.not_needed(key, "it is empty")
        elif not job.model.blocks:
            options.not_supported(
                key, "ai-toolkit's names are not those of diffusers; set adapter.targets"
            )
    if not (only or ignored) or not job.model.blocks:
        return
    without = "".join(f"(?!{_contains(word)})" for word in ignored)
    within = f"(?={job.model.blocks})"
    targets = [f"re:{within}{without}{_contains(word)}" for word in only]
    targets = targets or [f"re:{without}{job.model.blocks}"]
    for key, words in (("only_if_contains", only), ("ignore_if_contains", ignored)):
        if words:
            options.translate(key, "adapter.targets", targets)


def _contains(word: str) -> str:
    """Return a regular expression for gracetune's module names that contain ai-toolkit's word."""
    name = word.replace("$$", ".").removeprefix("lora_")
    experts = {"transformer_1.": "high.", "transformer_2.": "low.", "transformer.": ""}
    for theirs, ours in experts.items():
        if name.startswith(theirs):
            start = re.escape(ours) if ours else r"(?:(?:high|low)\.)?"
            return f"{start}{re.escape(name.removeprefix(theirs))}.*"
    return f".*{re.escape(name)}.*"
