"""Downloads from the Hugging Face hub, against a local server that speaks its API."""

from __future__ import annotations

import json
import shutil
import threading
from importlib import import_module

import pytest
from fakes.hub_server import Repository, serve_hub, set_endpoint, use_hub
from huggingface_hub import constants

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError, ModelUnavailableError
from gracetune.events.types import Notice, StageProgress
from gracetune.models import hub as hub_module
from gracetune.models.family import load_family
from gracetune.models.hub import HubModel, choose_weights, is_hub_name, missing_files
from gracetune.models.locate import locate_configs, locate_model
from gracetune.models.registry import FAMILIES

NAME = "some/pipeline"
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
EXTRAS = (
    "README.md",
    "v1-5-pruned.safetensors",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "unet/model.onnx",
    "text_encoder/flax_model.msgpack",
    "text_encoder/model.fp16.safetensors",
    "safety_checker/config.json",
    "safety_checker/model.safetensors",
)
"""Files of a published pipeline that training does not read."""


@pytest.fixture(scope="module")
def folder(miniature, tmp_path_factory):
    """Return a pipeline folder as on the hub, with copies of the weights in other formats."""
    target = tmp_path_factory.mktemp("hub") / "pipeline"
    shutil.copytree(miniature("sd15"), target)
    for path in EXTRAS:
        (target / path).parent.mkdir(exist_ok=True)
        (target / path).write_bytes(b"not needed")
    return target


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    """Return a running hub with one model, which huggingface_hub uses, with an empty cache."""
    with serve_hub({NAME: Repository(folder)}) as server:
        use_hub(monkeypatch, server.endpoint, tmp_path / "cache")
        monkeypatch.setattr(hub_module, "RETRY_S", 0.0)
        yield server


def section(**settings):
    return ModelSection(**{"family": "sd15", "path": NAME} | settings)


def locate(events=None, **settings):
    found = [] if events is None else events
    return locate_model(section(**settings), found.append)


def test_only_the_files_that_training_reads_are_downloaded(server, folder):
    events = []
    located = locate(events)
    needed = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - set(EXTRAS)
    assert set(server.downloads()) == needed
    assert (
        load_family(located).weights_hasher()()
        == load_family(section(path=str(folder))).weights_hasher()()
    )
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert any(text.startswith("model: downloading ") for text in texts)
    assert f"model: {NAME} (commit {server.repositories[NAME].commit[:12]})" in texts
    progress = [event for event in events if isinstance(event, StageProgress)]
    assert (progress[-1].stage, progress[-1].done) == ("downloading", progress[-1].total)
    assert progress[-1].unit == "MB"


def test_a_second_run_downloads_nothing(server):
    locate()
    before = server.sent()
    locate()
    assert server.sent() == before


def test_a_run_file_without_a_path_uses_the_default_model(server, folder):
    events = []
    server.repositories = {FAMILIES["sd15"].default_model: Repository(folder)}
    located = locate(events, path=None)
    assert (located.family, located.revision) == ("sd15", None)
    assert load_family(located).name == "sd15"
    assert any("the default of sd15" in event.text for event in events if isinstance(event, Notice))


def test_a_gated_model_names_its_page_and_the_commands(server):
    server.repositories[NAME].gated = True
    with pytest.raises(ModelUnavailableError) as caught:
        locate()
    assert str(caught.value) == (
        f"{NAME} is a gated model and you are not logged in.\n"
        f"  1. Accept its licence on the model's page: {server.endpoint}/{NAME}\n"
        "  2. Run `hf auth login`, or set HF_TOKEN.\n"
        "  Then start the same command again."
    )


def test_a_gated_model_that_was_not_accepted_says_so(server, monkeypatch):
    server.repositories[NAME].gated = True
    monkeypatch.setenv("HF_TOKEN", "mine")
    with pytest.raises(ModelUnavailableError, match="You are logged in, but your account has no a"):
        locate()
    server.repositories[NAME].members.add("mine")
    assert load_family(locate()).name == "sd15"
    assert {request.token for request in server.log if "resolve" in request.path} == {"mine"}


def test_a_token_that_is_refused_is_named(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "invalid")
    with pytest.raises(ModelUnavailableError, match="refuses your token"):
        locate()


def test_unknown_names_revisions_and_paths_are_refused(server, tmp_path):
    default = FAMILIES["sd15"].default_model
    with pytest.raises(ModelUnavailableError, match=rf"no such model, or it is priv.*{default}"):
        locate(path="some/other")
    with pytest.raises(ModelUnavailableError, match=r"model\.revision is 'v9', but some/pipeline"):
        locate(revision="v9")
    with pytest.raises(ModelUnavailableError, match="there is no such folder or file"):
        locate(path=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match="no such file"):
        locate(path=str(tmp_path / "gone.safetensors"))


def test_a_revision_is_downloaded_and_a_commit_needs_no_connection(server):
    repository = server.repositories[NAME]
    repository.revisions.add("v1")
    assert locate(revision="v1").path.endswith(repository.commit)
    server.log.clear()
    assert locate(revision=repository.commit).path.endswith(repository.commit)
    assert server.log == []


def test_a_revision_of_a_local_folder_has_no_effect(folder):
    events = []
    locate(events, path=str(folder), revision="v1")
    assert [event.level for event in events] == ["warning"]


def test_a_repository_without_a_pipeline_is_refused(server, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"x")
    server.repositories["some/file"] = Repository(tmp_path / "other")
    with pytest.raises(ModelUnavailableError, match=r"has no model_index\.json on the hub"):
        locate(path="some/file")


def test_a_cut_connection_is_continued_in_the_same_run(server, folder):
    size = (folder / WEIGHTS).stat().st_size
    server.cuts[WEIGHTS] = [30_000, 20_000]
    assert load_family(locate()).name == "sd15"
    starts = [r.start for r in server.log if r.method == "GET" and r.path.endswith(WEIGHTS)]
    assert starts == [0, 30_000, 50_000]
    assert server.sent(WEIGHTS) == size


def test_a_download_that_ends_early_is_continued_by_the_next_run(server, folder, monkeypatch):
    size = (folder / WEIGHTS).stat().st_size
    server.cuts[WEIGHTS] = [30_000] + [0] * 30
    with pytest.raises(ModelUnavailableError, match="continues with the bytes that have arrived"):
        locate()
    server.cuts.clear()
    events = []
    located = locate(events)
    assert server.sent(WEIGHTS) == size
    assert any("are here already" in event.text for event in events if isinstance(event, Notice))
    assert load_family(located).name == "sd15"


def test_a_connection_that_stalls_is_continued(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.stalls[WEIGHTS] = 40_000
    assert load_family(locate()).name == "sd15"
    starts = [r.start for r in server.log if r.method == "GET" and r.path.endswith(WEIGHTS)]
    assert starts[0] == 40_000  # the stalled request ends, and is logged, after it


def test_a_model_of_another_family_is_refused_before_its_download(server):
    with pytest.raises(ModelError, match=r"a StableDiffusionPipeline, .* Set model\.family: sd15"):
        locate(family="flux")
    assert server.downloads() == ["model_index.json"]


@pytest.mark.parametrize("family", [name for name, info in FAMILIES.items() if info.pipelines])
def test_the_registry_has_the_pipelines_that_families_read(family, monkeypatch):
    module = import_module(FAMILIES[family].module)
    read = {}

    def read_parts(_section, _shapes, pipelines, *_others, **_options):
        read["pipelines"] = tuple(pipelines)
        raise ModelError("enough")

    monkeypatch.setattr(module, "read_parts", read_parts)
    monkeypatch.setattr(module, "find_model_folder", lambda _: hub_module.Path(), raising=False)
    with pytest.raises(ModelError, match="enough"):
        module.load(ModelSection(family=family, path="x"))
    assert read["pipelines"] == FAMILIES[family].pipelines


def test_a_damaged_file_is_not_kept(server):
    server.corrupted.add(WEIGHTS)
    with pytest.raises(ModelError, match="arrived damaged"):
        locate()
    server.corrupted.clear()
    assert load_family(locate()).name == "sd15"


def test_a_full_disk_is_named_before_the_download(server, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"1000 B free.*HF_HOME"):
        locate()
    assert server.downloads() == ["model_index.json"]


def test_offline_runs_use_a_complete_cache(server, monkeypatch):
    online = locate()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.log.clear()
    assert locate() == online
    assert server.log == []


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_cache_is_complete_without_the_bin_files_that_another_index_names(tmp_path, is_whole):
    (tmp_path / "text_encoder").mkdir()
    shard = "model-00001-of-00001.safetensors"
    for file, weights in (
        ("pytorch_model.bin", "pytorch_model-1.bin"),
        ("model.safetensors", shard),
    ):
        index = tmp_path / "text_encoder" / f"{file}.index.json"
        index.write_text(json.dumps({"weight_map": {"x": weights}}))
    (tmp_path / "text_encoder" / "config.json").write_text("{}")
    weights = tmp_path / "text_encoder" / shard
    if is_whole:
        index.unlink()
        weights = weights.with_name("model.safetensors")
    model = HubModel("some/model", None, "flux", "model.path")
    parts = {"text_encoder": ["transformers", "T5EncoderModel"]}
    weights.touch()
    assert missing_files(tmp_path, parts, model) == []
    weights.unlink()
    assert missing_files(tmp_path, parts, model) != []


def test_a_hub_that_cannot_be_reached_is_like_offline_with_a_warning(server, monkeypatch):
    online = locate()
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    events = []
    assert locate(events) == online
    (warning,) = [e for e in events if isinstance(e, Notice) and e.level == "warning"]
    assert "http://127.0.0.1:9 cannot be reached" in warning.text
    with pytest.raises(ModelUnavailableError, match=r"nor in the cache .*9 cannot be reached"):
        locate(path="some/unknown")


def test_offline_runs_name_the_missing_files(server, monkeypatch):
    folder = locate().path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for path in (WEIGHTS, "tokenizer"):
        (shutil.rmtree if path == "tokenizer" else lambda p: p.unlink())(
            hub_module.Path(folder) / path
        )
    message = rf"lacks 2 files \(tokenizer/, {WEIGHTS}\), and HF_HUB_OFFLINE is set"
    with pytest.raises(ModelUnavailableError, match=message):
        locate()
    with pytest.raises(ModelUnavailableError, match=r"nor in the cache .* HF_HUB_OFFLINE is set"):
        locate(path="some/unknown")


def test_two_runs_at_once_download_once(server, folder):
    server.delay_s = 0.0005
    results, notices = [], []
    runs = [threading.Thread(target=lambda: results.append(locate(notices).path)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(set(results)) == 1
    assert len(results) == 2
    assert server.sent(WEIGHTS) == (folder / WEIGHTS).stat().st_size
    assert any("waiting for another process" in e.text for e in notices if isinstance(e, Notice))


def test_planning_downloads_only_configurations(server):
    folder = locate_configs(section())
    assert server.downloads() == ["model_index.json", "unet/config.json"]
    assert (folder / "unet" / "config.json").is_file()
    server.repositories["some/gated"] = Repository(server.repositories[NAME].folder, gated=True)
    with pytest.raises(ModelUnavailableError, match="gated"):
        locate_configs(section(path="some/gated"))


def test_weights_in_one_format_are_chosen():
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = ["pytorch_model-00001-of-00001.bin", "model.fp16-00001-of-00001.safetensors"]
    assert choose_weights([*others, *shards, "consolidated.safetensors"]) == shards
    assert choose_weights(["openvino_model.bin", "pytorch_model.bin"]) == ["pytorch_model.bin"]
    assert choose_weights(["model.fp16.safetensors"]) == []


def test_a_model_with_variants_only_is_refused(server, tmp_path, folder):
    other = tmp_path / "variant"
    shutil.copytree(folder, other)
    (other / WEIGHTS).unlink()
    (other / "unet" / "diffusion_pytorch_model.bin").unlink()
    server.repositories["some/variant"] = Repository(other)
    with pytest.raises(ModelError, match=r"whose unet has only diffusion_pytorch_model\.fp16"):
        locate(path="some/variant")


@pytest.mark.parametrize("text", ["a/b/c", "/a", "./a", "~/a", "a\\b", "a b", ""])
def test_paths_are_not_names_on_the_hub(text):
    assert not is_hub_name(text)
    assert is_hub_name("owner/name-1.0_x")
