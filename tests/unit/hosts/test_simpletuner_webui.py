"""WebUI options as fields, and the WebUI hooks on a stand-in for SimpleTuner."""

import json
import shlex
from enum import Enum
from types import SimpleNamespace

import pytest

from gracetune.errors import HostError
from gracetune.hosts.simpletuner import hooks, webui
from gracetune.hosts.simpletuner.__main__ import CONFIG_FLAG, ENTRY
from gracetune.hosts.simpletuner.webui import (
    UNSET,
    WEBUI_OPTIONS,
    blocks_to_fields,
    fields_to_blocks,
    install_webui,
    split_our_keys,
    with_entry_point,
)

BLOCKS = {
    "seed": 1,
    "use_gh200_trainer": True,
    "cache_config": {"vae_cache_type": "unified_memory", "host_budget_gb": 2.5},
    "gh200_optimizations": {
        "enable_uvm_hints": False,
        "batch_rampup_steps": 400,
        "placement": {"latents": "host"},
    },
}
FIELDS = {
    "seed": 1,
    "gracetune_use_gh200_trainer": "true",
    "gracetune_vae_cache_type": "unified_memory",
    "gracetune_host_budget_gb": "2.5",
    "gracetune_enable_uvm_hints": "false",
    "gracetune_batch_rampup_steps": "400",
    "gh200_optimizations": {"placement": {"latents": "host"}},
}


def test_blocks_and_fields_round_trip():
    assert blocks_to_fields(BLOCKS) == FIELDS
    assert fields_to_blocks(FIELDS) == BLOCKS


def test_keys_with_dashes_and_top_level_keys_are_the_same_options():
    fields = blocks_to_fields(
        {"--cache_config": {"text_cache_type": "disk"}, "--enable_uvm_hints": True}
    )
    assert fields == {
        "--gracetune_text_cache_type": "disk",
        "--gracetune_enable_uvm_hints": "true",
    }
    assert fields_to_blocks(fields) == {
        "cache_config": {"text_cache_type": "disk"},
        "gh200_optimizations": {"enable_uvm_hints": True},
    }


@pytest.mark.parametrize("empty", [None, "", UNSET])
def test_an_emptied_field_is_removed(empty):
    assert fields_to_blocks({"gracetune_host_budget_gb": empty}) == {}
    stored = blocks_to_fields(BLOCKS)
    assert fields_to_blocks({"gracetune_vae_cache_type": empty}, stored) == {
        "gh200_optimizations": {"placement": {"latents": "host"}}
    }


def test_an_empty_block_is_kept():
    assert fields_to_blocks(blocks_to_fields({"cache_config": {}})) == {"cache_config": {}}


def test_a_null_value_is_not_shown():
    assert blocks_to_fields({"gh200_optimizations": {"enable_uvm_hints": None}}) == {}


def test_an_invalid_number_is_left_for_the_validation():
    assert fields_to_blocks({"gracetune_host_budget_gb": "much"}) == {
        "cache_config": {"host_budget_gb": "much"}
    }
    assert fields_to_blocks({"gracetune_host_budget_gb": 3}) == {
        "cache_config": {"host_budget_gb": 3}
    }


def test_our_keys_are_split_from_the_rest():
    rest, ours = split_our_keys({**FIELDS, "--use_gh200_trainer": None})
    assert rest == {"seed": 1}
    assert ours == {key: value for key, value in BLOCKS.items() if key != "seed"}


def test_field_names_are_unique():
    assert len({option.name for option in WEBUI_OPTIONS}) == len(WEBUI_OPTIONS)


# Hooks


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
    keeper, store = modules[hooks.PROCESS_KEEPER], modules[hooks.CONFIG_STORE].ConfigStore
    return SimpleNamespace(fields=fields, kinds=kinds, store=store, keeper=keeper, jobs=jobs)


def test_every_option_is_a_field(host):
    assert [field.name for field in host.fields] == [option.name for option in WEBUI_OPTIONS]
    for field, option in zip(host.fields, WEBUI_OPTIONS, strict=True):
        assert field.field_type is (host.kinds.SELECT if option.choices else host.kinds.TEXT)
        assert (field.choices is None) == (not option.choices)


def test_files_have_blocks_and_forms_have_fields(host):
    block = {"placement": {"latents": "host"}, "enable_uvm_hints": True}
    store = host.store({"a": {"seed": 1, "gh200_optimizations": block}, "sets": [1]})
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


def test_a_form_shows_errors_that_would_stop_a_job(host):
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


def test_only_training_jobs_start_through_our_entry_point(host):
    def run_trainer_job(config):
        raise AssertionError

    def run_captionflow_job(config):
        raise AssertionError

    host.keeper.submit_job("1", run_trainer_job, {"--seed": 1})
    host.keeper.submit_job("2", run_captionflow_job, {"--seed": 1})
    assert host.jobs[0][2] == {"--seed": 1, "accelerate_extra_args": f"-m {ENTRY}"}
    assert host.jobs[1][2] == {"--seed": 1}


@pytest.mark.parametrize("key", ["accelerate_extra_args", "--accelerate_extra_args"])
def test_a_job_receives_the_values_of_the_fields(key):
    config = {
        "--train_batch_size": 2,
        "--gracetune_vae_cache_type": "disk",
        key: f"--cpu -m {ENTRY}",
    }
    job = with_entry_point(config)
    assert job["--train_batch_size"] == 2
    assert {*job} == {"--train_batch_size", "accelerate_extra_args"}
    *words, flag = shlex.split(job["accelerate_extra_args"])
    assert words == ["--cpu", "-m", ENTRY]
    settings = {"cache_config": {"vae_cache_type": "disk"}, "train_batch_size": 2}
    assert json.loads(flag.removeprefix(CONFIG_FLAG)) == settings


def test_enter_needs_a_script():
    with pytest.raises(HostError, match="run -- server"):
        webui.enter([])
