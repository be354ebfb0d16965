import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.environment import (
    EnvironmentSettings,
    adopt_slurm_ranks,
    claim_alloc_conf,
    claim_process_alloc_conf,
    compiled_graphs_folder,
    environment_settings,
    first_host,
    keep_compiled_graphs,
    prefer_expandable_segments,
    split_alloc_conf,
)
from gracetune.config.load import load_run_text
from gracetune.errors import ConfigError

GUIDE = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_our_allocator_settings_are_separated_from_torchs():
    conf = split_alloc_conf(
        "max_split_size_mb:64, use_uvm : True ,roundup_power2_divisions:[256:1,>:8],"
        "uvm_stage1_threshold:0.1,uvm_stage1_min_bytes:1GiB,"
    )
    assert conf.gracetune_keys == {
        "use_uvm": "True",
        "uvm_stage1_threshold": "0.1",
        "uvm_stage1_min_bytes": "1GiB",
    }
    assert conf.torch_keys == "max_split_size_mb:64,roundup_power2_divisions:[256:1,>:8]"
    assert conf.unknown == ()


def test_settings_unknown_to_torch_are_kept_and_reported():
    conf = split_alloc_conf("brand_new:1,backend:native")
    assert conf.torch_keys == "brand_new:1,backend:native"
    assert conf.unknown == ("brand_new",)
    assert "brand_new" in environment_settings({"PYTORCH_ALLOC_CONF": "brand_new:1"}).notices[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("use_uvm:maybe", "use_uvm in PYTORCH_CUDA_ALLOC_CONF is 'maybe'; it must be 1 or 0"),
        ("uvm_oversubscription_ratio:1", "is 1; it must be a finite number above 1"),
        ("uvm_oversubscription_ratio:inf", "is inf; it must be a finite number above 1"),
        ("uvm_oversubscription_ratio:x", "is 'x'; it must be a finite number above 1"),
        ("uvm_access_pattern:gpu", "it must be one of gpu_first, balanced, cpu_first"),
        ("uvm_stage1_threshold:1.5", "between 0 and 1"),
        ("uvm_stage1_min_bytes:lots", "uvm_stage1_min_bytes in PYTORCH_CUDA_ALLOC_CONF: 'lots'"),
        ("uvm_oversubscripton_ratio:2", "did you mean uvm_oversubscription_ratio?"),
        ("use_uvm", "'use_uvm' does not have the form key:value"),
        ("use_uvm:", "does not have the form key:value"),
        ("a:1,[", "'[' does not have the form key:value"),
    ],
)
def test_bad_allocator_settings_are_refused(text, message):
    assert message in refusal(split_alloc_conf, text)


@given(st.text(alphabet="abuvm_:,[]>1 .", max_size=30))
def test_any_text_gives_settings_or_a_config_error(text):
    try:
        conf = split_alloc_conf(text)
    except ConfigError:
        return
    assert split_alloc_conf(conf.torch_keys).torch_keys == conf.torch_keys


def test_claiming_leaves_only_torchs_settings_in_its_variables():
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": f"{GUIDE},expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "use_uvm:False",
    }
    claim_alloc_conf(environ)
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in environ
    once = dict(environ)
    claim_alloc_conf(environ)
    assert environ == once
    settings = environment_settings(environ)
    assert settings.use_uvm is False, "the newer variable wins, as with torch"
    assert settings.oversubscription_ratio == 5.0
    assert settings.access_pattern == "gpu_first"
    assert settings.alloc_conf == "expandable_segments:True"
    assert "is read by gracetune" in settings.notices[0]


def test_claiming_leaves_other_variables_alone():
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    claim_alloc_conf(environ)
    assert environ == {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}


def test_claiming_changes_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", GUIDE)
    monkeypatch.setenv("GRACETUNE_ALLOC_CONF", "")
    claim_process_alloc_conf()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert os.environ["GRACETUNE_ALLOC_CONF"] == GUIDE


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
        ),
    ],
)
def test_expandable_segments_are_the_default_without_allocator_settings(
    monkeypatch, variables, expected
):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(variable, variables.get(variable, ""))
    prefer_expandable_segments()
    assert {variable: os.environ[variable] for variable in expected} == expected


def test_an_empty_environment_sets_nothing():
    assert environment_settings({}) == EnvironmentSettings()
    assert environment_settings({"ACCELERATE_MIXED_PRECISION": ""}) == EnvironmentSettings()


def test_every_variable_is_read():
    settings = environment_settings(
        {
            "AITK_GH200_ENABLE_UVM_HINTS": "off",
            "GH200_UVM_OVERSUBSCRIPTION_RATIO": "3.5",
            "GH200_UVM_ACCESS_PATTERN": "balanced",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "PYTORCH_CUDA_ALLOC_CONF": "uvm_stage1_threshold:0.2,uvm_stage1_min_bytes:2MiB",
        }
    )
    assert settings.uvm_hints is False
    assert settings.oversubscription_ratio == 3.5
    assert settings.access_pattern == "balanced"
    assert settings.mixed_precision == "bf16"
    assert settings.stage1_threshold == 0.2
    assert settings.stage1_min_bytes == 2 * 1024**2


def test_allocator_settings_take_precedence_over_other_variables():
    settings = environment_settings(
        {
            "GH200_UVM_OVERSUBSCRIPTION_RATIO": "3",
            "GH200_UVM_ACCESS_PATTERN": "balanced",
            "PYTORCH_CUDA_ALLOC_CONF": GUIDE,
        }
    )
    assert (settings.oversubscription_ratio, settings.access_pattern) == (5.0, "gpu_first")
    assert sum("takes precedence" in notice for notice in settings.notices) == 2


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "2"}, "SIMPLETUNER_GH200_ENABLE_UVM_HINTS is '2'"),
        ({"GH200_UVM_OVERSUBSCRIPTION_RATIO": "0.5"}, "GH200_UVM_OVERSUBSCRIPTION_RATIO is 0.5"),
        ({"GH200_UVM_ACCESS_PATTERN": "any"}, "GH200_UVM_ACCESS_PATTERN is 'any'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION is 'fp8'"),
        (
            {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1", "AITK_GH200_ENABLE_UVM_HINTS": "0"},
            "AITK_GH200_ENABLE_UVM_HINTS=0 contradict each other",
        ),
    ],
)
def test_a_bad_value_is_refused_with_its_variable(env, message):
    assert message in refusal(environment_settings, env)


def load(text, env):
    return load_run_text(text, "json", "run", environment=env)


def test_the_environment_sets_what_the_run_file_leaves_open():
    env = {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "0", "ACCELERATE_MIXED_PRECISION": "fp16"}
    loaded = load('{"train": {"mixed_precision": "auto"}}', env)
    assert loaded.run.gh200_optimizations.enable_uvm_hints is False
    assert loaded.run.train.mixed_precision == "bf16"
    assert "gh200_optimizations.enable_uvm_hints is false, set by the environment." in (
        loaded.notices
    )
    assert any("set by ACCELERATE_MIXED_PRECISION" in notice for notice in loaded.notices)
    assert any("is fp16, but bf16 is used" in notice for notice in loaded.notices)


def test_the_run_file_overrides_the_environment():
    env = {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "0", "ACCELERATE_MIXED_PRECISION": "bf16"}
    text = '{"mixed_precision": "no", "cache_config": {"vae_cache_type": "unified_memory"}}'
    loaded = load(text, env)
    assert loaded.run.gh200_optimizations.enable_uvm_hints is True
    assert loaded.run.train.mixed_precision == "no"
    assert not any("set by" in notice for notice in loaded.notices)
    assert any("the environment sets another value" in text for text in loaded.notices)


def test_the_default_precision_of_accelerate_launch_is_ignored():
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    assert load("{}", launched).run.train.mixed_precision == "auto"
    assert load("{}", {"ACCELERATE_MIXED_PRECISION": "no"}).run.train.mixed_precision == "no"


SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gh[003-004],gh007",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def slurm(monkeypatch):
    """Return a function that sets the environment, adopts the ranks and returns their variables."""

    def adopt(env):
        variables = {k: v for k, v in os.environ.items() if k not in RANKS} | env
        monkeypatch.setattr(os, "environ", variables)
        adopt_slurm_ranks()
        return [variables.get(name) for name in RANKS]

    return adopt


def test_the_tasks_of_srun_are_ranks(slurm):
    assert slurm(SRUN) == ["3", "6", "1", "2", "gh003", "28638"]


def test_settings_of_the_user_or_a_launcher_are_kept(slurm):
    assert slurm(SRUN | {"MASTER_ADDR": "gh003-ib", "MASTER_PORT": "1"})[4:] == ["gh003-ib", "1"]
    assert slurm(SRUN | {"RANK": "7"})[:2] == ["7", None]


def test_a_batch_script_is_one_process_even_in_a_job_with_several_tasks(slurm):
    batch = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "6", "SLURM_PROCID": "0"}
    assert slurm(batch) == [None] * 6
    assert slurm(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == [None] * 6


def test_a_slurm_variable_that_is_no_number_is_reported(slurm):
    with pytest.raises(ConfigError, match="SLURM_PROCID is 'x'"):
        slurm(SRUN | {"SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gh003", "gh003"),
        ("gh[003-006,009],login", "gh003"),
        ("a,b", "a"),
        ("rack[1-2]n[08,10]-ib", "rack1n08-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/gracetune/compiled"),
        ({"HOME": "/home/me"}, "/home/me/.cache/gracetune/compiled"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/cache"}, "/mine"),
    ],
)
def test_compiled_graphs_are_kept_in_the_users_cache_folder(variables, folder, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    keep_compiled_graphs()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folder
    assert compiled_graphs_folder() == Path(folder)
