"""Import the jobs that ai-toolkit publishes, and those that its web interface writes.

Set AI_TOOLKIT to a clone of ai-toolkit, which is only read. Each job is imported and validated;
then the result trains three steps on a miniature of its model, with other paths and smaller sizes.
"""

import ast
import json
import math
import os
import re
from collections import Counter
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from fakes.datasets import write_images, write_videos
from PIL import Image

from gracetune.config.aliases import leaves
from gracetune.config.importers import ai_toolkit_keys as tables
from gracetune.config.importers.ai_toolkit import import_job
from gracetune.config.importers.ai_toolkit_train import WEIGHTED
from gracetune.config.load import FORMATS_BY_SUFFIX, load_run_text
from gracetune.config.parse_text import dotted, parse_text
from gracetune.errors import ConfigError
from gracetune.train.run import run_training

CLONE = Path(os.environ.get("AI_TOOLKIT", "no-such-folder"))
EXAMPLES = CLONE / "config" / "examples"
INTERFACE = CLONE / "ui" / "src"
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="AI_TOOLKIT names no clone of ai-toolkit"),
]
NOT_YAML = {"train_lora_omnigen2_24gb.yaml"}
"""Examples that no parser of YAML reads, because a quote is missing."""
MINIATURE_OF = {
    "flux": "flux",
    "flux_kontext": "flux-kontext",
    "flux2": "flux2-dev",
    "flux2_klein_4b": "flux2-klein",
    "flux2_klein_9b": "flux2-klein",
    "chroma": "chroma",
    "wan21": "wan21-t2v",
    "wan21_i2v": "wan21-i2v",
    "wan22_14b": "wan22-t2v",
    "wan22_14b_i2v": "wan22-i2v",
    "wan22_5b": "wan22-5b",
    "qwen_image": "qwen-image",
    "qwen_image_edit": "qwen-image-edit",
    "qwen_image_edit_plus": "qwen-image-edit-2511",
    "zimage": "z-image",
    "krea2": "krea2",
    "sdxl": "sdxl",
    "sd1": "sd15",
    "sd15": "sd15",
    "sd3": "sd35-large",
}
STARTS_FROM_AN_IMAGE = ("wan21_i2v", "wan22_14b_i2v")


# The jobs


def example_files():
    found = sorted(EXAMPLES.rglob("*")) if EXAMPLES.is_dir() else []
    return [file for file in found if file.suffix in FORMATS_BY_SUFFIX]


def read_job(file):
    return parse_text(file.read_text(), FORMATS_BY_SUFFIX[file.suffix], file.name).tree


def literal(source, start):
    """Parse the TypeScript literal that starts at an index: as YAML, without comments."""
    opening = {"{": "}", "[": "]"}
    depth, quote, index = [], "", start
    while True:
        character = source[index]
        if quote:
            quote = "" if character == quote and source[index - 1] != "\\" else quote
        elif character in "'\"`":
            quote = character
        elif character in opening:
            depth.append(opening[character])
        elif depth and character == depth[-1]:
            depth.pop()
            if not depth:
                break
        index += 1
    text = re.sub(r"(?m)^\s*//.*$", "", source[start : index + 1])
    return yaml.safe_load(re.sub(r"\\'", "''", text))


def constant(source, name):
    return literal(source, source.index("= {", source.index(f"export const {name}:")) + 2)


def interface_jobs():
    """Return the job that the web interface writes for each model, by the model's name."""
    if not INTERFACE.is_dir():
        return {}
    new = INTERFACE / "app" / "jobs" / "new"
    jobs = (new / "jobConfig.ts").read_text()
    options = (new / "options.tsx").read_text()
    sample = constant(
        (INTERFACE / "helpers" / "defaultSamples.ts").read_text(), "defaultSampleConfig"
    )
    job = constant(jobs, "defaultJobConfig")
    (process,) = job["config"]["process"]
    process["sample"] = sample
    process["datasets"] = [constant(jobs, "defaultDatasetConfig")]
    end = options.index("export const quantizationOptions")
    starts = [match.start() for match in re.finditer(r"(?m)^    name: '", options[:end])]
    found = {}
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        block = options[start:stop]
        name = re.match(r"\s+name: '([^']+)'", block)[1]
        found[name] = deepcopy(job)
        (changed,) = found[name]["config"]["process"]
        changed["model"]["arch"] = name
        for match in re.finditer(r"'config\.process\[0\]\.([^']+)': (?=\[)", block):
            value, _ = literal(block, match.end())
            set_key(changed, match[1].replace("[x]", ".0"), value)
    return found


def set_key(node, path, value):
    *parents, last = path.split(".")
    for step in parents:
        node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
    if value == "undefined":
        node.pop(last, None)
    else:
        node[last] = value


JOBS = {file.name: file for file in example_files()} | {
    f"interface: {name}": job for name, job in interface_jobs().items()
}


def load_job(name):
    return deepcopy(JOBS[name]) if isinstance(JOBS[name], dict) else read_job(JOBS[name])


def arch_of(tree):
    model = tree["config"]["process"][0].get("model", {})
    flags = [arch for key, arch in tables.MODEL_FLAGS.items() if model.get(key)]
    arch = str(model.get("arch") or (flags or ["sd1"])[0]).partition(":")[0]
    is_flex = arch == "flux" and "ostris/Flex" in str(model.get("name_or_path"))
    return "flex1" if is_flex else arch


def is_ours(name):
    tree = load_job(name)
    process = tree["config"]["process"][0]
    is_edit = arch_of(tree) == "krea2" and (process["model"].get("model_kwargs") or {}).get("edit")
    is_trainer = process["type"] in tables.TRAINERS
    return is_trainer and arch_of(tree) in tables.MODELS and not is_edit


READABLE = [name for name in JOBS if name not in NOT_YAML]
OURS = [name for name in READABLE if is_ours(name)]
OTHERS = [name for name in READABLE if name not in OURS]


def import_named(name):
    """Import a job; fill in what the interface leaves to the user: clip lengths and references."""
    tree = load_job(name)
    dataset = tree["config"]["process"][0]["datasets"][0]
    if arch_of(tree) in STARTS_FROM_AN_IMAGE:
        dataset["num_frames"] = 41
    if tables.MODELS[arch_of(tree)].takes_references:
        dataset.setdefault("control_path", "/path/to/references")
    return tree, import_job(Path(name.replace(": ", "-") + ".yaml"), tree)


# Tests


def test_the_clone_has_jobs():
    assert len(JOBS) > 60
    for name in NOT_YAML & JOBS.keys():
        with pytest.raises(ConfigError):
            load_job(name)


@pytest.mark.parametrize("name", OURS)
def test_every_key_has_a_line_and_the_run_file_is_valid(name):
    tree, imported = import_named(name)
    lines = Counter(each.key for each in imported.keys)
    assert lines == Counter(dotted(path) for path, _ in leaves(tree))
    assert not [each.key for each in imported.keys if "not known" in each.text]
    load_run_text(json.dumps(imported.run), "json", "run.json", environment={})


@pytest.mark.parametrize("name", OTHERS)
def test_jobs_that_gracetune_cannot_train_are_refused_with_one_line(name):
    tree = load_job(name)
    with pytest.raises(ConfigError) as caught:
        import_job(Path("job.yaml"), tree)
    message = str(caught.value)
    assert "\n" not in message
    process = tree["config"]["process"][0]
    if process["type"] in tables.TRAINERS and arch_of(tree) != "krea2":
        assert tables.OTHER_MODELS[arch_of(tree)] in message
    elif process["type"] not in tables.TRAINERS:
        assert process["type"] in message


@pytest.mark.parametrize("name", OURS)
def test_an_imported_job_trains(name, miniature, recorder, tmp_path):
    tree, imported = import_named(name)
    run = reduce_run(imported.run, miniature(MINIATURE_OF[arch_of(tree)]), tmp_path)
    loaded = load_run_text(json.dumps(run), "json", "run.json", environment={})
    ended = run_training(loaded.run, sinks=[recorder])
    assert ended.status == "done"
    losses = [event.loss for event in recorder.events if type(event).__name__ == "StepDone"]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


def reduce_run(run, model, folder):
    """Return a run file with paths of the test, small sizes and few steps."""
    run = deepcopy(run)
    run["output_dir"] = str(folder / "run")
    run["model"]["path"] = str(model)
    if run["model"].get("quantize") == "nf4" and not find_spec("bitsandbytes"):
        del run["model"]["quantize"]
    if run["optimizer"]["name"] == "adamw_8bit" and not find_spec("bitsandbytes"):
        run["optimizer"]["name"] = "adamw"
    run["train"] |= {"max_train_steps": 3, "batch_size": 1}
    run["logging"] = {"every": 1, "tensorboard": False}
    Image.new("RGB", (32, 32), (90, 90, 90)).save(folder / "start.png")
    for index, dataset in enumerate(run["datasets"]):
        reduce_dataset(dataset, folder, index)
    reduce_validation(run, folder)
    return run


def reduce_dataset(dataset, folder, index):
    data = folder / f"data-{index}"
    is_video = dataset.get("dataset_type") == "video"
    write_videos(data) if is_video else write_images(data)
    dataset["instance_data_dir"] = str(data)
    dataset["max_aspect"] = 1.0
    dataset["resolution"] = [32, 64] if isinstance(dataset["resolution"], list) else 32
    if is_video:
        dataset["frames"] = 5
    if references := dataset.get("conditioning_data_dir"):
        write_images(folder / f"references-{index}")
        name = str(folder / f"references-{index}")
        dataset["conditioning_data_dir"] = name if isinstance(references, str) else [name] * 2


def reduce_validation(run, folder):
    validation = run["validation"]
    validation |= {"width": 32, "height": 32, "sample_steps": 1}
    if validation.get("frames", 1) > 1:
        validation["frames"] = 5
    starts = "first frame" if "i2v" in run["model"]["path"] else ""
    references = run["datasets"][0].get("conditioning_data_dir")
    prompts = validation.get("prompts", [])[:1]
    count = len(references) if isinstance(references, list) else 1
    for index, prompt in enumerate(prompts):
        entry = dict(prompt) if isinstance(prompt, dict) else {"prompt": prompt}
        if references or starts:
            entry["images"] = [str(folder / "start.png")] * count
        prompts[index] = entry if len(entry) > 1 else entry["prompt"]
    if prompts:
        validation["prompts"] = prompts


# Facts about ai-toolkit that the importer relies on


def config_keys():
    """Return the keys that each of ai-toolkit's config classes reads, by the class's name."""
    tree = ast.parse((CLONE / "toolkit" / "config_modules.py").read_text())
    return {
        each.name: {
            call.args[0].value
            for call in ast.walk(each)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func) == "kwargs.get"
            and isinstance(call.args[0], ast.Constant)
        }
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("SaveConfig", "save"),
        ("LoggingConfig", "logging"),
        ("SampleConfig", "sample"),
        ("NetworkConfig", "network"),
        ("TrainConfig", "train"),
        ("EMAConfig", "train.ema_config"),
        ("ModelConfig", "model"),
        ("DatasetConfig", "datasets.0"),
        ("SampleItem", "sample.samples.0"),
    ],
)
def test_every_key_of_ai_toolkits_classes_is_known(name, section):
    process = {
        "type": "sd_trainer",
        "model": {"arch": "flux", "name_or_path": "x"},
        "network": {"type": "lora"},
        "train": {"ema_config": {"use_ema": False}},
        "datasets": [{"folder_path": "x"}],
        "sample": {"samples": [{"prompt": "x"}]},
        "save": {"save_every": 1},
        "logging": {"log_every": 1},
    }
    node = process
    for step in section.split("."):
        node = node[int(step)] if isinstance(node, list) else node[step]
    for key in config_keys()[name]:
        node.setdefault(key, None)
    tree = {"job": "extension", "config": {"name": "x", "process": [process]}}
    imported = import_job(Path("job.yaml"), tree)
    assert not [each.key for each in imported.keys if "not known" in each.text]
    lines = Counter(each.key for each in imported.keys)
    assert lines == Counter(dotted(path) for path, _ in leaves(tree))


def test_every_arch_of_ai_toolkit_is_known():
    sources = [*CLONE.glob("extensions_built_in/**/*.py"), *CLONE.glob("toolkit/models/**/*.py")]
    found = {
        match
        for file in sources
        for match in re.findall(r"(?m)^    arch = ['\"]([^'\"]+)['\"]", file.read_text())
    }
    assert found - {"example"} <= tables.MODELS.keys() | tables.OTHER_MODELS.keys()


def test_weighted_timesteps_are_drawn_as_often_as_their_loss_is_weighted():
    source = (CLONE / "toolkit" / "timestep_weighing" / "default_weighing_scheme.py").read_text()
    weights = ast.literal_eval(source[source.index("[") : source.rindex("]") + 1])
    mean, std = WEIGHTED

    def density(timestep):
        logit = (math.log(timestep / (1 - timestep)) - mean) / std
        scale = std * math.sqrt(2 * math.pi) * timestep * (1 - timestep)
        return math.exp(-(logit**2) / 2) / scale

    inner = range(10, 990)
    errors = [abs(density(1 - index / 1000) - weights[index]) for index in inner]
    assert sum(errors) / len(errors) < 0.1
