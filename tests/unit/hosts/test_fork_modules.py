"""The forks' modules and classes, and the folder that runs the guides' snippets from a checkout."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_process import run_python
from PIL import Image
from pydantic import ValidationError

from gracetune import gh200
from gracetune.config.environment import environment_settings
from gracetune.errors import DataError
from gracetune.gh200 import GH200GradientRamp
from gracetune.hosts.fork_modules import GH200InMemoryBackend, add_fork_module
from gracetune.memory.platform import open_machine
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import restore_torch_memory_stats

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "tests/data/seeds/003_c0471491bb30f242.txt"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pics/more").mkdir(parents=True)
    Image.fromarray(np.full((4, 6, 3), 7, np.uint8)).save(tmp_path / "pics/a.png")
    (tmp_path / "pics/a.txt").write_text("a caption " * 100)
    (tmp_path / "pics/more/b.txt").write_text("another")
    (tmp_path / "pics/notes.doc").write_text("not staged")
    return tmp_path / "pics"


@pytest.mark.parametrize("compression", [None, "lz4", "zlib", "snappy"])
def test_a_backend_with_the_forks_arguments_reads_from_memory(folder, compression, monkeypatch):
    monkeypatch.chdir(folder.parent)
    backend = GH200InMemoryBackend(
        None, "pics", "pics", compression=compression, memory_limit_gb=1, num_workers=2
    )
    expected = (folder / "a.png").read_bytes()
    for name in ("a.png", "a.txt"):
        os.rename(folder / name, folder / f"{name}.away")
    assert backend.read("a.png") == backend.read(str(folder / "a.png")) == expected
    assert backend.read("a.txt", as_byteIO=True).read() == b"a caption " * 100
    assert backend.open_file("a.txt", "r").read() == "a caption " * 100
    assert backend.exists("a.png")
    assert not backend.exists("never.png")
    paths, images = backend.read_image_batch(["a.png"])
    assert (paths, images[0].size) == (["a.png"], (6, 4))
    assert backend.list_files(["txt"]) == [
        (str(folder), [], [str(folder / "a.txt")]),
        (str(folder / "more"), [], [str(folder / "more/b.txt")]),
    ]


def test_a_backend_writes_and_deletes_on_disk(folder):
    backend = GH200InMemoryBackend(None, "pics", folder, file_extensions=["txt"])
    backend.write("a.txt", "new")
    assert backend.read("a.txt") == (folder / "a.txt").read_bytes() == b"new"
    backend.delete("more/b.txt")
    assert not backend.exists("more/b.txt")
    assert backend.list_files() == []
    backend.create_directory("deep/er")
    assert (folder / "deep/er").is_dir()
    assert backend.read("a.png") == (folder / "a.png").read_bytes(), "not staged: read from disk"
    backend.write("bad.png", b"no image")
    with pytest.raises(OSError, match="cannot identify"):
        backend.read_image("bad.png", delete_problematic_images=True)
    assert not (folder / "bad.png").exists()


def test_a_backend_can_be_made_again_from_its_description(folder):
    backend = GH200InMemoryBackend(None, "pics", folder, compression="lz4", memory_limit_gb=2)
    description = backend.get_instance_representation()
    again = GH200InMemoryBackend.from_instance_representation(description)
    assert again.get_instance_representation() == description
    assert again.read("a.txt") == backend.read("a.txt")
    with pytest.raises(ValueError, match="backend_type is 'local'"):
        GH200InMemoryBackend.from_instance_representation({"backend_type": "local"})


def test_a_backend_refuses_what_it_cannot_do(folder):
    with pytest.raises(ValidationError, match="compression"):
        GH200InMemoryBackend(None, "pics", folder, compression="rar")
    with pytest.raises(DataError, match="memory_limit_gb"):
        GH200InMemoryBackend(None, "pics", folder, memory_limit_gb=1e-7)
    with pytest.raises(DataError, match="never"):
        GH200InMemoryBackend(None, "pics", folder / "never")


def test_the_forks_ramp_changes_between_steps_only():
    ramp = GH200GradientRamp(
        train_batch_size=1, base_ga=1, initial_effective=4, target_effective=32, total_steps=400
    )
    assert (ramp.initial_ga, ramp.target_ga) == (4, 32)
    steps = []
    while sum(steps) < 500:
        size = ramp.advance()
        assert [ramp.advance() for _ in range(size - 1)] == [size] * (size - 1)
        steps.append(size)
    assert (steps[0], steps[-1], steps == sorted(steps)) == (4, 32, True)


def test_a_ramp_without_a_length_or_targets_is_constant():
    assert GH200GradientRamp(train_batch_size=2, base_ga=3).advance() == 3
    ramp = GH200GradientRamp(train_batch_size=32, initial_effective=4, target_effective=64)
    assert (ramp.initial_ga, ramp.advance()) == (2, 2)


def test_a_ramp_that_starts_below_one_micro_batch_names_its_real_first_size(caplog):
    sizes = {"initial_effective": 4, "target_effective": 128, "total_steps": 400}
    assert GH200GradientRamp(train_batch_size=32, **sizes).advance() == 1
    [record] = caplog.records
    assert "initial_effective is 4, but the ramp starts with 32 samples" in record.getMessage()
    caplog.clear()
    assert GH200GradientRamp(train_batch_size=4, **sizes).advance() == 1
    assert GH200GradientRamp(train_batch_size=32, target_effective=50).advance() == 2
    assert not caplog.records


def test_the_guides_audio_line_runs_in_a_checkout():
    text = GUIDE.read_text("utf-8")
    code = re.search(r"python - <<'PY'\n(.*?)\nPY\n", text, re.DOTALL)[1]
    done = run_python("-c", code, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 2000])\n"), done.stderr


def test_the_guides_snippet_gives_hints_for_audio(monkeypatch):
    """The snippet of appendix B, and the file with its name."""
    monkeypatch.syspath_prepend(ROOT)
    for name in [each for each in sys.modules if each.partition(".")[0] == "simpletuner"]:
        monkeypatch.delitem(sys.modules, name)
    hinted = []
    monkeypatch.setattr(gh200, "prefer_cpu_residency", hinted.append)
    code = re.search(
        r"```python\n(# gh200/audio_support.*?)```", GUIDE.read_text("utf-8"), re.DOTALL
    )
    names = {"torch": torch}
    exec(compile(code[1], "snippet", "exec"), names)
    wave, left = torch.ones(3), torch.ones(1)
    batch = {"waveform": wave, "audio_latents": {"left": left}, "latents": torch.ones(2)}
    names["hint_audio"](batch)
    assert [id(tensor) for tensor in hinted] == [id(left), id(wave)]

    from simpletuner.gh200.audio_support_snippet import hint_audio
    from simpletuner.gh200.in_memory_backend import GH200InMemoryBackend as Same
    from simpletuner.gh200.uvm import gh200_uvm_enabled

    assert {placed.role for placed in hint_audio(batch).placed} == {"audio"}
    assert gh200_uvm_enabled is gh200.gh200_uvm_enabled
    assert Same is GH200InMemoryBackend
    for name in [each for each in sys.modules if each.partition(".")[0] == "simpletuner"]:
        del sys.modules[name]


def test_a_hooked_host_has_our_numbers_in_torchs_statistics(monkeypatch):
    restore_torch_memory_stats()
    session = MemorySession(open_machine, lambda: environment_settings({}), lambda event: None)
    name = "toolkit.gh200_helpers_of_a_test"
    module = add_fork_module(name, session)
    monkeypatch.delitem(sys.modules, name)
    assert module.gh200_uvm_enabled() is False
    assert torch.cuda.memory_stats()["uvm.hard_reclamations"] == 0
    restore_torch_memory_stats()
    assert "uvm.stage" not in torch.cuda.memory_stats()
