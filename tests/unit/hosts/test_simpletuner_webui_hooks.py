"""WebUI hooks on a stand-in with SimpleTuner's names; tests/hosts sets them in the real one."""

import json
import shlex
from enum import Enum
from types import SimpleNamespace

import pytest

from gracetune.errors import HostError
from gracetune.hosts.simpletuner import hooks, webui
from gracetune.hosts.simpletuner.__main__ import CONFIG_FLAG
from gracetune.hosts.simpletuner.webui import WEBUI_OPTIONS, with_entry_point, install_webui


class ConfigStore:
    def __init__(self, files):
        self.files = files

    def load_config(self, name):
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name], "metadata"

    def save_config(self, name, config, metadata=None, overwrite=False):
        self.files[name] = config
        return metadata

    def save_trainer_config(self, name, config, overwrite=False):
        self.files[name] = config

    def validate_config(self, config):
        return SimpleNamespace(errors=[], is_valid=True)


@pytest.fixture
def host():
    fields, jobs = [], []
    kinds = Enum("FieldType", "SELECT TEXT")
    modules = {
        hooks.FIELD_TYPES: SimpleNamespace(
            ConfigField=SimpleNamespace,
            FieldType=kinds,
            ImportanceLevel=SimpleNamespace(IMPORTANT="important"),
        ),
        hooks.FIELD_REGISTRY: SimpleNamespace(
            field_registry=SimpleNamespace(_add_field=fields.append)
        ),
        hooks.CONFIG_STORE: SimpleNamespace(ConfigStore=type("ConfigStore", (ConfigStore,), {})),
        hooks.PROCESS_KEEPER: SimpleNamespace(submit_job=lambda *job: jobs.append(job)),
    }
    install_webui({}, modules.__getitem__)
    keeper, made = modules[hooks.PROCESS_KEEPER], modules[hooks.CONFIG_STORE].ConfigStore
    return SimpleNamespace(fields=fields, kinds=kinds, store=made, keeper=keeper, jobs=jobs)


def test_every_option_is_a_field(host):
    assert [field.name for field in host.fields] == [option.name for option in WEBUI_OPTIONS]
    for field, option in zip(host.fields, WEBUI_OPTIONS, strict=True):
        assert field.field_type is (host.kinds.SELECT if option.choices else host.kinds.TEXT)
        assert (field.choices is None) == (not option.choices)


def test_files_have_blocks_and_forms_have_fields(host):
    held = {"placement": {"latents": "host"}, "enable_uvm_hints": True}
    store = host.store({"a": {"seed": 1, "gh200_optimizations": held}, "sets": [1]})
    shown, _ = store.load_config("a")
    assert shown["gracetune_enable_uvm_hints"] == "true"
    store.save_config("b", shown, overwrite=True)
    assert store.files["b"] == store.files["a"]
    store.save_config("list", [1])
    assert (store.files["list"], store.load_config("sets")) == ([1], ([1], "metadata"))
    store.save_trainer_config("a", {"seed": 2}, overwrite=True)
    assert store.files["a"] == {
        "seed": 2,
        "gh200_optimizations": {"placement": {"latents": "host"}},
    }
    store.save_trainer_config("new", {"gracetune_vae_cache_type": "disk"})
    assert store.files["new"] == {"cache_config": {"vae_cache_type": "disk"}}


def test_a_form_hears_what_the_trainer_would_refuse(host):
    store = host.store({})
    assert store.validate_config({"--seed": 1}).is_valid
    found = store.validate_config(
        {
            "--gracetune_enable_batch_size_rampup": "true",
            "--gracetune_initial_effective_batch_size": "few",
        }
    )
    assert not found.is_valid
    assert 'initial_effective_batch_size is "few"; it must be' in found.errors[0]


def test_training_jobs_enter_through_us_and_others_do_not(host):
    def run_trainer_job(config):
        raise AssertionError

    def run_captionflow_job(config):
        raise AssertionError

    host.keeper.submit_job("1", run_trainer_job, {"--seed": 1})
    host.keeper.submit_job("2", run_captionflow_job, {"--seed": 1})
    assert host.jobs[0][2] == {"--seed": 1, "accelerate_extra_args": f"-m {webui.ENTRY}"}
    assert host.jobs[1][2] == {"--seed": 1}


@pytest.mark.parametrize("key", ["accelerate_extra_args", "--accelerate_extra_args"])
def test_a_job_says_what_the_fields_say(key):
    config = {
        "--train_batch_size": 2,
        "--gracetune_vae_cache_type": "disk",
        key: f"--cpu -m {webui.ENTRY}",
    }
    job = with_entry_point(config)
    assert job["--train_batch_size"] == 2
    assert {*job} == {"--train_batch_size", "accelerate_extra_args"}
    *words, said = shlex.split(job["accelerate_extra_args"])
    assert words == ["--cpu", "-m", webui.ENTRY]
    told = {"cache_config": {"vae_cache_type": "disk"}, "train_batch_size": 2}
    assert json.loads(said.removeprefix(CONFIG_FLAG)) == told


def test_it_needs_a_script():
    with pytest.raises(HostError, match="run -- server"):
        webui.enter([])
