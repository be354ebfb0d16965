"""The plug-in in a real SimpleTuner, run by `make test-hosts`."""

import json
import os
import shutil
import subprocess
import sys
import wave
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

# Not `simpletuner.helpers`: the folder `simpletuner` of the repository has that, too.
pytest.importorskip(
    "simpletuner.helpers.data_backend", reason="make test-hosts runs it in that environment"
)

import torch
from PIL import Image

from gracetune.hosts.simpletuner.__main__ import check
from gracetune.hosts.simpletuner.hooks import (
    DISCOVERY,
    FACTORY,
    JSON,
    LOCAL,
    TRACKER,
    TRAINER,
    install_hooks,
)
from gracetune.hosts.simpletuner.plugin import AccumulationSteps, SimpleTunerPlugin
from gracetune.memory.platform import open_machine

CONFIG = {
    "model_type": "lora",
    "train_batch_size": 1,
    "use_gh200_trainer": True,
    "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
    "gh200_optimizations": {"enable_uvm_hints": True},
}


@pytest.fixture(scope="module")
def hooked():
    """The plug-in, installed once for this process, and the stock backend class."""
    plugin = SimpleTunerPlugin({}, open_machine, torch.Tensor.contiguous)
    local = import_module(LOCAL).LocalDataBackend
    install_hooks(plugin, import_module)
    return SimpleNamespace(plugin=plugin, stock=local)


@pytest.fixture
def pics(tmp_path):
    folder = tmp_path / "pics"
    (folder / "sub").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.jpg", "sub/c.webp")):
        pixels = np.full((8, 12, 3), 40 * number, np.uint8)
        Image.fromarray(pixels).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(f"image {number}")
    return folder


@pytest.fixture
def backends(hooked, pics, tmp_path):
    """Our backend of a staged dataset, and the stock one."""
    name = f"pics-{tmp_path.name}"
    block = {"compression": "lz4", "num_workers": 2}
    [rest] = hooked.plugin.split_datasets(
        [{"id": name, "type": "in_memory", "instance_data_dir": str(pics), "in_memory": block}]
    )
    assert rest == {"id": name, "type": "local", "instance_data_dir": str(pics)}
    hooked.plugin.split_config(CONFIG)
    builder = import_module("simpletuner.helpers.data_backend.builders").create_backend_builder(
        "local", SimpleNamespace(is_local_main_process=True)
    )
    config = import_module("simpletuner.helpers.data_backend.config.image").ImageBackendConfig
    args = {"resolution": 64, "resolution_type": "pixel"}
    ours = builder._create_backend(config.from_dict(rest, args))
    assert type(ours).__name__ == "GracetuneDataBackend"
    assert isinstance(ours, hooked.stock)
    return ours, hooked.stock(accelerator=None, id=name)


def test_every_symbol_fits():
    assert "symbols fit" in check()[-1]


def test_staged_files_are_read_after_they_are_deleted(backends, pics):
    ours, stock = backends
    listed = stock.list_files(["png", "jpg", "webp", "txt"], str(pics))
    assert ours.list_files(["png", "jpg", "webp", "txt"], str(pics)) == listed
    paths = [path for _, _, files in listed for path in files]
    assert len(paths) == 6
    expected = {path: stock.read(path) for path in paths}
    image_paths = [path for path in paths if not path.endswith(".txt")]
    images = {path: np.asarray(stock.read_image(path)) for path in image_paths}
    shutil.rmtree(pics)
    for path in paths:
        assert ours.exists(path)
        assert ours.exists(Path(path))
        assert ours.read(path) == ours.read(Path(path)) == expected[path]
        assert ours.read(path, as_byteIO=True).read() == expected[path]
        assert ours.open_file(path, "rb").read() == expected[path]
    for path, pixels in images.items():
        assert np.array_equal(np.asarray(ours.read_image(path)), pixels)
    keys, batch = ours.read_image_batch(image_paths)
    assert (keys, len(batch)) == (image_paths, 3)
    assert not stock.exists(paths[0])


@pytest.fixture
def opened_paths():
    """The paths that this process opens while the test runs."""
    paths, recording = [], [True]

    def record(event, args):
        if event == "open" and recording and isinstance(args[0], str):
            paths.append(os.path.abspath(args[0]))

    sys.addaudithook(record)
    yield paths
    recording.clear()


def test_discovery_opens_no_staged_image(backends, pics, opened_paths):
    """Discovery reads the size of every image, from the file's header if the backend is local."""
    data_backend, _ = backends
    backend = object.__new__(import_module(DISCOVERY).DiscoveryMetadataBackend)
    backend.id, backend.data_backend, backend.dataset_config = "pics", data_backend, {}
    types = import_module("simpletuner.helpers.data_backend.dataset_types")
    backend.dataset_type = types.DatasetType.IMAGE
    assert backend._should_use_metadata_only(is_video_file=False)
    images = [str(pics / name) for name in ("a.png", "b.jpg", "sub/c.webp")]
    opened_paths.clear()
    sizes = [backend._probe_image_dimensions(path) for path in images]
    assert sizes == [{"original_size": (12, 8)}] * 3
    assert [path for path in opened_paths if path in images] == []


def test_written_files_are_read_from_disk(backends, pics):
    ours, stock = backends
    path = str(pics / "a.txt")
    ours.write(path, "another caption")
    assert stock.read(path) == ours.read(path) == b"another caption"
    metadata = str(pics / "aspect_ratio_bucket_indices_x.json")
    ours.write(metadata, json.dumps({"1.0": [path]}))
    assert json.loads(ours.read(metadata)) == {"1.0": [path]}
    ours.delete(path)
    assert not ours.exists(path)
    with pytest.raises(FileNotFoundError):
        ours.read(path)


def test_cache_files_are_kept_in_memory_unchanged(backends, tmp_path, hooked):
    ours, stock = backends
    path = str(tmp_path / "cache" / "x.pt")
    value = {"latents": torch.arange(6.0), "metadata": {"crop": (0, 0)}}
    ours.write(path, value)
    first = ours.torch_load(path)
    first["latents"] = None
    hits = hooked.plugin.memory.hits
    again = ours.torch_load(path)
    assert hooked.plugin.memory.hits == hits + 1
    assert torch.equal(again["latents"], stock.torch_load(path)["latents"])
    assert again["metadata"] == {"crop": (0, 0)}
    ours.write(path, {"latents": torch.zeros(2)})
    assert torch.equal(ours.torch_load(path)["latents"], torch.zeros(2))
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        ours.torch_load(path)


def test_the_default_text_data_set_is_recognised(tmp_path):
    """SimpleTuner creates it if the file has none; hooks only see its backend."""
    registry = import_module(FACTORY).FactoryRegistry
    bare = registry.__new__(registry)
    bare.args = SimpleNamespace(model_family="sdxl", output_dir=str(tmp_path))
    [entry] = bare._ensure_text_embed_backends_present([])
    plugin = SimpleTunerPlugin({}, open_machine, torch.Tensor.contiguous)
    plugin.split_config({"cache_config": {"vae_cache_type": "memory", "text_cache_type": "disk"}})
    assert plugin.tensor_cache_for(entry["id"]) is None
    assert plugin.tensor_cache_for("pics") is plugin.memory


RANK = """
import json, sys
from importlib import import_module
from pathlib import Path
import torch
from gracetune.hosts.simpletuner.hooks import FACTORY, install_hooks
from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
from gracetune.memory.platform import open_machine
environment = {"LOCAL_WORLD_SIZE": "2"}
plugin = SimpleTunerPlugin(
    environment, open_machine, torch.Tensor.contiguous, Path(sys.argv[1])
)
install_hooks(plugin, import_module)
plugin.split_config({"cache_config": {"vae_cache_type": "memory"}})
backend = import_module(FACTORY).LocalDataBackend(accelerator=None, id="x")
for line in sys.stdin:
    value = backend.torch_load(line.strip())
    memory = plugin.memory
    result = [memory.hits, memory.misses, memory.nbytes, value["latents"].sum().item()]
    sys.__stdout__.write("rank " + json.dumps(result) + "\\n")
    sys.__stdout__.flush()
"""


def test_two_ranks_share_one_copy(tmp_path, hooked):
    path = str(tmp_path / "x.pt")
    stock = hooked.stock(accelerator=None, id="x")
    stock.write(path, {"latents": torch.arange(4096.0), "metadata": {"crop": (0, 0)}})
    words = [sys.executable, "-c", RANK, str(tmp_path / "meet")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(words, **pipes) for _ in range(2)]
    results = []
    for rank in ranks:
        rank.stdin.write(f"{path}\n")
        rank.stdin.flush()
        line = next(line for line in rank.stdout if "rank [" in line)  # colour codes come before it
        results.append(json.loads(line.partition("rank ")[2]))
    for rank in ranks:
        rank.communicate(timeout=60)
        assert rank.returncode == 0
    total = stock.torch_load(path)["latents"].sum().item()
    assert results == [[0, 1, 16384, total], [1, 0, 0, total]]


def test_audio_is_read_from_memory(hooked, tmp_path):
    folder = tmp_path / "audio"
    folder.mkdir()
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((np.sin(np.arange(1600) / 9) * 9000).astype("<i2").tobytes())
    name = f"audio-{tmp_path.name}"
    entry = {"id": name, "type": "in_memory", "dataset_type": "audio"}
    hooked.plugin.split_datasets([{**entry, "instance_data_dir": str(folder)}])
    ours = import_module(FACTORY).LocalDataBackend(accelerator=None, id=name)
    stock = hooked.stock(accelerator=None, id=name)
    path = str(folder / "a.wav")
    expected, rate = stock.read_image(path)
    shutil.rmtree(folder)
    waves, found = ours.read_image(path)
    assert found == rate == 16000
    assert torch.equal(waves, expected)


def test_video_is_read_from_memory(hooked, tmp_path):
    av = pytest.importorskip("av")
    folder = tmp_path / "videos"
    folder.mkdir()
    path = str(folder / "a.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for brightness in range(0, 250, 50):
            pixels = np.full((32, 32, 3), brightness, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    name = f"videos-{tmp_path.name}"
    entry = {"id": name, "type": "in_memory", "instance_data_dir": str(folder)}
    hooked.plugin.split_datasets([entry])
    ours = import_module(FACTORY).LocalDataBackend(accelerator=None, id=name)
    expected = hooked.stock(accelerator=None, id=name).read_image(path)
    shutil.rmtree(folder)
    assert np.array_equal(ours.read_image(path), expected)


def test_our_blocks_do_not_reach_the_command_line(hooked, tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    monkeypatch.setenv("CONFIG_PATH", str(file))
    monkeypatch.delenv("ENV", raising=False)
    words = import_module(JSON).load_json_config()
    assert any(word.startswith("--model_type") for word in words)
    assert not any("gh200" in word or "cache_config" in word for word in words)
    tracker = import_module(TRACKER).StateTracker
    assert tracker.get_raw_config()["cache_config"] == CONFIG["cache_config"]


def test_the_end_of_an_epoch_has_no_batch(hooked):
    trainer = import_module(TRAINER).Trainer
    bare = trainer.__new__(trainer)
    assert trainer.prepare_batch(bare, False) is False
    assert trainer.prepare_batch(bare, None) is None


def test_validations_run_at_the_end_of_an_optimizer_step():
    """Uses SimpleTuner's own condition; micro-batch 7 ends a step of 3."""
    validation = import_module("simpletuner.helpers.training.validation").Validation
    bare = validation.__new__(validation)
    ends = []
    growing = AccumulationSteps(3, lambda: ends[-1])
    settings = {"validation_step_interval": 2, "gradient_accumulation_steps": growing}
    vars(bare).update(
        config=SimpleNamespace(**settings),
        accelerator=SimpleNamespace(is_main_process=True, num_processes=1),
        deepspeed=False,
        global_step=4,
        global_resume_step=0,
        current_epoch=1,
    )
    due = []
    for step, last in ((7, True), (8, False), (9, False)):
        ends.append(last)
        due.append(bare.should_perform_intermediary_validation(step, ["a"], "intermediary"))
    assert due == ends


def test_the_entry_point_runs_a_script_with_the_hooks_set(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from simpletuner.helpers.data_backend import factory\n"
        "result = (__name__, sys.argv[1:], factory.LocalDataBackend.__name__)\n"
        "open(__file__ + '.result', 'w').write(repr(result))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gracetune.hosts.simpletuner", str(script), "--flag"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = (tmp_path / "script.py.result").read_text()
    assert result == "('__main__', ['--flag'], 'GracetuneDataBackend')"


def test_the_host_command_checks_and_starts_simpletuner():
    words = [sys.executable, "-m", "gracetune", "host", "simpletuner"]
    done = subprocess.run([*words, "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "symbols fit" in done.stdout.splitlines()[-1]
    done = subprocess.run([*words, "run", "--", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SimpleTuner" in done.stdout
