"""Every config that SimpleTuner publishes is imported and trained, run by `make test-import`.

The configs are read from a clone or a source distribution of SimpleTuner. Their models and data are
replaced by miniatures, and sizes by small ones.
"""

import json
import os
import re
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from fakes.datasets import WRITE
from fakes.miniatures import write_miniature

from gracetune.config.importers.detect import check_importable, import_files
from gracetune.config.importers.simpletuner_datasets import KNOWN_KEYS as DATASET_KEYS
from gracetune.config.importers.simpletuner_keys import (
    FAMILIES,
    FEATURES,
    IGNORED_PREFIXES,
    KNOWN_KEYS,
    NOT_TRANSLATED,
)
from gracetune.config.load import load_run_file
from gracetune.config.parse_text import parse_json, walk
from gracetune.errors import ConfigError
from gracetune.train.run import run_training

CLONE = Path(
    os.environ.get("SIMPLETUNER", Path(__file__).parents[2] / ".hosts/simpletuner/clone")
).resolve()
EXAMPLES = CLONE / "simpletuner" / "examples"
PAGES = CLONE / "documentation"
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason=f"no SimpleTuner in {CLONE.name}"),
]
needs_pages = pytest.mark.skipif(not PAGES.is_dir(), reason=f"no pages in {CLONE.name}")
QUICKSTARTS = (
    *("FLUX", "FLUX2", "FLUX_KONTEXT", "QWEN_IMAGE", "QWEN_EDIT", "SDXL", "SD3", "CHROMA", "WAN"),
    *("ZIMAGE", "KREA2"),
)
OTHER_COMMANDS = {"arguments", "encoder", "gt", "help", "kubeflow", "mode", "multi_gpu", "reg"}
"""Words after `--` in OPTIONS.md that are no options of a config."""
GENERATORS = {
    *("sdr", "logc3_sdr", "superresolution", "jpeg_artifacts", "depth", "depth_midas"),
    *("random_masks", "inpainting", "canny", "edges"),
}
"""Headings of DATALOADER.md that are values of `conditioning.type`."""
MINIATURES = {
    "flux": "flux",
    "flux kontext": "flux-kontext",
    "flux2": "flux2-klein",
    "qwen_image": "qwen-image",
    "qwen_image edit-v1": "qwen-image-edit",
    "qwen_image edit-v2": "qwen-image-edit-2511",
    "sdxl": "sdxl",
    "sd1x": "sd15",
    "sd3": "sd35-medium",
    "chroma": "chroma",
    "z_image": "z-image",
    "krea2": "krea2",
    "wan": "wan21-t2v",
    "wan i2v-14b-2.1": "wan21-i2v",
    "wan i2v-14b-2.1-720p": "wan21-i2v",
    "wan i2v-14b-2.2-high": "wan22-i2v",
    "wan i2v-14b-2.2-low": "wan22-i2v",
    "wan ti2v-5b-2.2": "wan22-5b",
}
"""The miniature for a `model_family`, or for one of its flavours."""
REFUSED_KEYS = {"controlnet", "distillation_method", "conditioning"}
"""Keys that ask for something that gracetune does not do; without them, the config is trained."""


class Published(NamedTuple):
    """A config that SimpleTuner publishes."""

    name: str
    config: dict
    datasets: list

    @property
    def family(self):
        return self.config["model_family"].replace("-", "_")

    @property
    def is_ours(self):
        flavour = self.config.get("model_flavour")
        return self.family in FAMILIES and (not flavour or flavour in FAMILIES[self.family].paths)


def read_json(text):
    """Parse JSON as it is on SimpleTuner's pages, where comments and a last comma are common."""
    return parse_json(re.sub(r",(\s*(?://[^\n]*\s*)*[\]}])", r"\1", text), "page")[0]


def blocks(page):
    """Return the JSON blocks of a page that can be parsed."""
    found = []
    for text in re.findall(r"```jsonc?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        try:
            found.append(read_json(text))
        except ConfigError:
            continue
    return found


def published_examples():
    for path in sorted(EXAMPLES.glob("*/config.json")):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # SimpleTuner cannot read it either
        name = Path(config["data_backend_config"])
        file = EXAMPLES.joinpath(*name.parts[name.parts.index("examples") + 1 :])
        datasets = json.loads(file.read_text()) if file.is_file() else None
        yield Published(path.parent.name, config, datasets)


def published_pages():
    for page in QUICKSTARTS if PAGES.is_dir() else ():  # a wheel has no pages
        found = blocks(PAGES / "quickstart" / f"{page}.md")
        configs = [b for b in found if isinstance(b, dict) and "model_family" in b and len(b) > 3]
        datasets = [b for b in found if isinstance(b, list) and all(isinstance(e, dict) for e in b)]
        for number, config in enumerate(configs):
            yield Published(f"{page}-{number}", config, datasets[0] if datasets else None)


ALL = [*published_examples(), *published_pages()] if EXAMPLES.is_dir() else []
OURS = [one for one in ALL if one.is_ours]
OTHERS = [one for one in ALL if not one.is_ours]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of a miniature or of data, which is written once."""
    root = tmp_path_factory.mktemp("shared")

    def get(kind):
        folder = root / kind
        if not folder.exists():
            WRITE[kind](folder) if kind in WRITE else write_miniature(kind, folder)
        return str(folder)

    return get


@pytest.fixture(scope="module")
def outcomes(summary_lines):
    """Return a list of outcomes, which the report ends with the counts of."""
    found = []
    yield found
    counts = ", ".join(f"{number} {outcome}" for outcome, number in Counter(found).items())
    summary_lines.append(f"configs of SimpleTuner: {counts}")


def with_paths_replaced(one, folders, folder):
    """Write a published config with the paths of miniatures and small data; return its path."""
    names = (f"{one.family} {one.config.get('model_flavour')}", one.family)
    model = next(MINIATURES[name] for name in names if name in MINIATURES)
    datasets = one.datasets or [{"id": "data", "type": "local", "caption_strategy": "textfile"}]
    entries = []
    for original in datasets:
        entry, kind = dict(original), original.get("dataset_type", "image")
        if "conditioning_type" in entry:
            kind = "conditioning"
        if kind in ("image", "video", "conditioning"):
            data = folders("image" if kind == "conditioning" else kind)
            if kind == "conditioning":
                data = shutil.copytree(data, folder / "references", dirs_exist_ok=True)
            entry |= {"type": "local", "instance_data_dir": str(data)}
            entry.pop("dataset_name", None)
        entries.append(entry)
    (folder / "datasets.json").write_text(json.dumps(entries))
    config = one.config | {
        "pretrained_model_name_or_path": folders(model),
        "data_backend_config": str(folder / "datasets.json"),
        "output_dir": str(folder / "run"),
    }
    lycoris = one.config.get("lycoris_config")
    if isinstance(lycoris, str):
        config["lycoris_config"] = str(EXAMPLES / one.name / Path(lycoris).name)
    library = one.config.get("user_prompt_library")
    if library:
        (folder / "prompts.json").write_text(json.dumps({"one": "a red ring"}))
        config["user_prompt_library"] = str(folder / "prompts.json")
    path = folder / "config.json"
    path.write_text(json.dumps(config, ensure_ascii=False))
    return path


def small_sizes(run):
    """Return overrides that make a run fit a miniature."""
    overrides = [
        *("train.max_train_steps=3", "train.batch_size=1", "train.gradient_accumulation_steps=1"),
        *("validation.sample_steps=1", "logging.tensorboard=false", "logging.trackers=[]"),
        *("validation.width=32", "validation.height=32", "optimizer.warmup_steps=0"),
    ]
    prompts = run["validation"].get("prompts", [])
    if any(isinstance(prompt, dict) for prompt in prompts):  # with sizes of their own
        small = [p if isinstance(p, str) else p | {"width": 32, "height": 32} for p in prompts]
        overrides.append(f"validation.prompts={json.dumps(small)}")
    if run["validation"]["every"]:
        overrides.append("validation.every=3")
    for index, dataset in enumerate(run["datasets"]):
        small = {"resolution": 32, "min_resolution": 0, "min_edge": 0, "max_aspect": 1.0}
        small |= {"bucket_step": None, "bucket_aspects": None}
        if dataset["dataset_type"] == "video":
            small["frames"] = 5
            overrides.append("validation.frames=5")
        if dataset.get("caption_strategy") in ("parquet", "jsonl"):
            small["caption_strategy"] = "textfile"
        overrides += [f"datasets.{index}.{key}={json.dumps(value)}" for key, value in small.items()]
    if "context_parallel" in run.get("distributed", {}):
        overrides.append("distributed.context_parallel=1")  # there is one rank
    if run["model"].get("quantize") == "nf4" and find_spec("bitsandbytes") is None:
        overrides.append("model.quantize=none")
    return overrides


def keys_of(tree):
    """Return the dotted names of all keys that have a value, as the report names them."""
    return {
        ".".join(str(step) for step in path).lstrip("-")
        for path, value in walk(tree)
        if path and not (isinstance(value, dict) and value) and not is_list_of_sections(value)
        if not isinstance(path[-1], int)
    }


def is_list_of_sections(value):
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def check_report(imported, path):
    config = json.loads(path.read_text())
    lines = [(each.file, each.key) for each in imported.keys]
    assert len(lines) == len(set(lines)), "a key has two lines"
    assert keys_of(config) == {key for file, key in lines if file == str(path)}
    datasets = json.loads(Path(config["data_backend_config"]).read_text())
    found = {key for file, key in lines if file == config["data_backend_config"]}
    assert keys_of(datasets) == found
    assert all(each.text for each in imported.keys)


def remove_refused(path, imported, one, folder):
    """Change a config as the refusals say."""
    config = json.loads(path.read_text())
    datasets = json.loads((folder / "datasets.json").read_text())
    for reason in imported.refusals:
        key = next(key for key in REFUSED_KEYS if key in reason.split(" asks ")[0].split("` of")[0])
        config.pop(key, None)
        config.pop("distillation_config", None)
        for entry in [entry for entry in datasets if entry.pop(key, None)]:
            reference = shutil.copytree(entry["instance_data_dir"], folder / "references")
            entry["conditioning_data"] = "references"
            datasets.append(
                {
                    "id": "references",
                    "type": "local",
                    "dataset_type": "conditioning",
                    "conditioning_type": "reference_strict",
                    "instance_data_dir": str(reference),
                }
            )
            break
    (folder / "datasets.json").write_text(json.dumps(datasets))
    path.write_text(json.dumps(config, ensure_ascii=False))


@pytest.mark.parametrize("one", OURS, ids=lambda one: one.name)
def test_a_published_config_is_explained_and_trains(one, folders, tmp_path, outcomes, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the run is written to runs/ there
    outcome = "trained"
    path = with_paths_replaced(one, folders, tmp_path)
    imported = import_files([path])
    check_report(imported, path)
    if imported.refusals:
        with pytest.raises(ConfigError, match=re.escape(imported.refusals[0])):
            load_run_file(path)
        remove_refused(path, imported, one, tmp_path)
        imported = import_files([path])
        assert not imported.refusals
        outcome = "refused, and trained after the change that the message names"
    loaded = load_run_file(path, small_sizes(imported.run))
    assert "is a config of SimpleTuner" in loaded.notices[0]
    ended = run_training(loaded.run, notices=loaded.notices)
    assert (ended.status, ended.step) == ("done", 3)
    outcomes.append(outcome)


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: one.name)
def test_another_family_is_refused_in_one_line(one, tmp_path, outcomes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(one.config))
    (tmp_path / "datasets.json").write_text("[]")
    with pytest.raises(ConfigError) as error:
        check_importable(import_files([path, tmp_path / "datasets.json"]))
    line = str(error.value).splitlines()[0]
    key = "model_flavour" if one.family in FAMILIES else "model_family"
    translated = one.config[key] not in NOT_TRANSLATED
    why = "which gracetune does not train" if translated else "whose settings are not translated"
    assert f"{key} is {one.config[key]!r}, {why}" in line
    outcomes.append("of other families, refused in one line")


@needs_pages
def test_every_documented_option_is_known():
    text = (PAGES / "OPTIONS.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--([a-z][a-z0-9_]+)", text)) - OTHER_COMMANDS
    prefixes = (*FEATURES, *IGNORED_PREFIXES)
    unknown = {name for name in options - KNOWN_KEYS if not name.startswith(prefixes)}
    assert len(options) > 400
    assert not unknown


@needs_pages
def test_every_documented_key_of_a_dataset_is_known():
    page = PAGES / "DATALOADER.md"
    headings = re.findall(r"^#{2,5} (`.*`)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    keys = {key for line in headings for key in re.findall(r"`([a-z0-9_]+)`", line)}
    entries = [entry for block in blocks(page) if isinstance(block, list) for entry in block]
    keys |= {key for entry in entries if "id" in entry for key in entry}
    assert len(keys) > 60
    assert keys - DATASET_KEYS - GENERATORS == set()


def test_all_families_have_published_configs():
    """A clone without examples must not pass."""
    assert {one.family for one in ALL} >= set(FAMILIES)
    assert len(OURS) > 25
    assert len(OTHERS) > 50
