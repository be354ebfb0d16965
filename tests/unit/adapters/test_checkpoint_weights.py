"""The weights in a checkpoint are read as the adapter that they are part of, alpha included."""

import json
import re

import pytest
import torch
from adapter_examples import TABLES, same
from blake3 import blake3
from safetensors.torch import save_file
from torch import nn

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.checkpoint_weights import (
    ALPHAS_KEY,
    CHECKPOINT_FORMAT,
    checkpoint_header,
)
from gracetune.adapters.files.inspect import inspect
from gracetune.adapters.files.io import read_adapter, resolve_path, save_tensors
from gracetune.adapters.files.keys import get_table
from gracetune.adapters.inject import adapter_from_model, add_adapter
from gracetune.config.schema import AdapterSection, RunFile
from gracetune.errors import AdapterError
from gracetune.train.run_identity import identity_settings

KINDS = ("lora", "dora", "locon", "loha", "lokr", "full")
MODULES = {
    "wan": ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2", "patch_embedding"),
    "flux": ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp"),
    "qwen_image": ("transformer_blocks.0.attn.to_k", "transformer_blocks.1.img_mlp.net.2"),
    "unknown": ("layers.0.high", "in_proj"),
}
FAMILIES = {"wan": "wan22"}


def set_submodule(model, name, module):
    for part in name.split(".")[:-1]:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    model.add_module(name.rpartition(".")[2], module)


def make_model(family, kind):
    model = nn.Module()
    for name in MODULES[family]:
        is_conv = name == "patch_embedding"
        if is_conv and kind in ("lora", "dora"):
            continue
        set_submodule(model, name, nn.Conv3d(4, 8, 2) if is_conv else nn.Linear(12, 8))
    return model


class Checkpoint:
    """A checkpoint's folder with the weights of a model that has an adapter."""

    def __init__(self, folder, family="wan", kind="lora", experts=("",), **settings):
        self.folder = folder
        section = AdapterSection(kind=kind, **{"rank": 2, "alpha": 8} | settings)
        models = {expert: make_model(family, kind) for expert in experts}
        modules = add_adapter(models, section, ["*"], seed=0)
        model = models[""] if "" in models else nn.ModuleDict(models)
        generator = torch.Generator().manual_seed(0)
        self.tensors = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator)
                self.tensors[name] = parameter.data
        self.adapter = adapter_from_model(models, modules, get_table(family, TABLES))
        run = RunFile.model_validate(
            {
                "output_dir": "out",
                "model": {"family": FAMILIES.get(family, family), "path": "m"},
                "adapter": section.model_dump(),
                "datasets": [{"id": "d", "instance_data_dir": "d"}],
            }
        )
        self.identity = identity_settings(run, "no")

    def save(self, header=True, manifest=True, name="weights.safetensors"):
        file = self.folder / name
        save_tensors(self.tensors, file, checkpoint_header(self.adapter) if header else None)
        if manifest:
            digest = blake3(file.read_bytes()).hexdigest()
            content = {"format": 1, "identity": self.identity, "files": {name: digest}}
            (self.folder / "manifest.json").write_text(json.dumps(content))
        return file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "experts"),
    [*((family, ("",)) for family in MODULES), ("wan", ("high", "low")), ("wan", ("low",))],
)
def test_alpha_is_kept(family, kind, experts, tmp_path):
    first, second = MODULES[family][:2]
    overrides = {
        "*": {"alpha": 5},
        f"re:(.*)?{re.escape(first)}": {"alpha": 0.1},
        second: {"rank": 3},
    }
    saved = Checkpoint(tmp_path, family, kind, experts, overrides=overrides)
    for header, manifest in ((True, True), (True, False), (False, True)):
        for old in tmp_path.iterdir():
            old.unlink()
        adapter = read_adapter(saved.save(header, manifest), TABLES)
        assert same(adapter, saved.adapter), (header, manifest)
        assert adapter.stages == tuple(expert or None for expert in experts)
        assert adapter.format == CHECKPOINT_FORMAT
        assert not adapter.notices
        assert ALPHAS_KEY not in adapter.metadata


def test_an_alpha_equal_to_the_rank_is_known(tmp_path):
    adapter = read_adapter(Checkpoint(tmp_path, alpha=None).save(), TABLES)
    assert {layer.alpha for layer in adapter.layers.values()} == {None}
    assert not adapter.notices


@pytest.fixture
def wan(tmp_path):
    return Checkpoint(tmp_path, "wan", "lora", ("high", "low"))


def read_error(file, table=None):
    with pytest.raises(AdapterError) as caught:
        read_adapter(file, TABLES, table)
    return caught.value


@pytest.mark.parametrize("kind", ["lora", "lokr"])
@pytest.mark.parametrize("family", ["wan", "flux", "unknown"])
def test_weights_without_an_alpha_are_refused(family, kind, tmp_path):
    file = Checkpoint(tmp_path, family, kind).save(header=False, manifest=False)
    error = read_error(file)
    assert error.kind == "no-alpha"
    assert str(file) in str(error)
    (tmp_path / "manifest.json").write_text('{"files": {}}')  # of another program
    assert read_error(file).kind == "no-alpha"


def test_a_file_of_another_tool_in_a_checkpoint_is_read_as_before(wan):
    """DiffSynth-Studio uses peft's names for parameters, too, with the original module names."""
    wan.save()
    key = "blocks.0.self_attn.q.lora_{}.default.weight"
    save_file(
        {key.format("A"): torch.ones(2, 4), key.format("B"): torch.ones(4, 2)},
        wan.folder / "other.safetensors",
    )
    adapter = read_adapter(wan.folder / "other.safetensors", TABLES)
    assert adapter.format == "diffsynth"
    assert "alpha is assumed to equal the rank" in adapter.notices[0]


def test_damage_is_found(wan):
    file = wan.save()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert read_error(file).kind == "damaged"


@pytest.mark.parametrize("alphas", ["[", "[]", '{"": {}}', '{"high": {"blocks.0": null}}', "{}"])
def test_a_damaged_header_is_refused(wan, alphas):
    header = checkpoint_header(wan.adapter) | {ALPHAS_KEY: alphas}
    save_tensors(wan.tensors, wan.folder / "w.safetensors", header)
    assert read_error(wan.folder / "w.safetensors").kind in ("damaged", "unknown-key")


@pytest.mark.parametrize("setting", ["model.family", "adapter.rank", "adapter.alpha"])
def test_missing_settings_of_an_older_checkpoint_are_refused(wan, setting):
    del wan.identity[setting]
    assert read_error(wan.save(header=False)).kind == "damaged"


@pytest.mark.parametrize("value", [-1, "x", 1e400])
@pytest.mark.parametrize("setting", ["adapter.rank", "adapter.alpha"])
def test_damaged_settings_of_an_older_checkpoint_are_refused(wan, setting, value):
    wan.identity[setting] = value
    assert read_error(wan.save(header=False)).kind in ("damaged", "not-finite")


def test_a_checkpoint_of_another_family_is_refused(wan):
    file = wan.save()
    assert read_error(file, TABLES["flux"]).kind == "other-model"
    assert same(read_adapter(file, TABLES, TABLES["wan"]), wan.adapter)


def test_inspect_shows_alpha_and_both_experts(wan):
    found = inspect(wan.save(), TABLES)
    assert (found.form, found.family, found.stages) == ("checkpoint", "wan", ("high", "low"))
    assert dict(found.alphas) == {"8": 4}
    assert dict(found.ranks) == {"2": 4}


def test_check_names_the_files_that_tools_load(wan):
    with pytest.raises(AdapterError, match=r"no other tool loads.*adapter") as caught:
        check_file(wan.save(), TABLES)
    assert caught.value.kind == "checkpoint"


def test_weights_beside_averages_are_reported(wan):
    wan.save(name="ema.safetensors")
    (notice,) = read_adapter(wan.save(), TABLES).notices
    assert "averaged" in notice
    assert not read_adapter(wan.folder / "ema.safetensors", TABLES).notices


def test_a_checkpoints_folder_is_resolved_to_what_the_run_exports(wan):
    weights = wan.save()
    assert resolve_path(wan.folder) == weights
    ema = wan.save(name="ema.safetensors")
    assert resolve_path(wan.folder) == ema
    (wan.folder / "adapter").mkdir()
    exported = wan.folder / "adapter" / "high_noise.safetensors"
    exported.touch()
    assert resolve_path(wan.folder) == exported
    exported.with_name("low_noise.safetensors").touch()
    assert resolve_path(wan.folder) == ema, "the file that holds both experts"
