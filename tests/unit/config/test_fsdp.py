"""FSDP settings of accelerate, the GH200 guide and SimpleTuner become settings of gracetune."""

import json
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from gracetune.config.fsdp import SUCCESSORS
from gracetune.config.load import load_run_file, load_run_text
from gracetune.errors import ConfigError
from gracetune.models.registry import FAMILIES

ROOT = Path(__file__).parents[3]
RUN = {"output_dir": "runs/x", "model": {"family": "flux"}}
GUIDE = {
    "fsdp_enabled": True,
    "fsdp_offload_params": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": ["FluxTransformerBlock"],
    "fsdp_min_num_params": 100000000,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": True,
    "fsdp_limit_all_gathers": True,
    "fsdp_compute_dtype": "bfloat16",
    "fsdp_sharding_strategy": "FULL_SHARD",
}
"""The FSDP settings of the GH200 guide, with the classes that FLUX.1 has."""
FSDP = {"ACCELERATE_USE_FSDP": "true"}


def load(*overrides, environment=None, **keys):
    text = json.dumps(RUN | keys, indent=1)
    return load_run_text(text, "json", "run.json", overrides, environment or {})


def sharding(loaded):
    """Return the settings of `distributed` that are set."""
    return loaded.run.distributed.model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FULL_SHARD", {"strategy": "fsdp2", "reshard_after_forward": True}),
        ("SHARD_GRAD_OP", {"strategy": "fsdp2", "reshard_after_forward": False}),
        ("HYBRID_SHARD", {"strategy": "hsdp", "reshard_after_forward": True}),
        ("HYBRID_SHARD_ZERO2", {"strategy": "hsdp", "reshard_after_forward": False}),
        ("NO_SHARD", {"strategy": "replicate"}),
        (2, {"strategy": "fsdp2", "reshard_after_forward": False}),
    ],
)
def test_sharding_strategies_have_a_counterpart(name, expected):
    assert sharding(load(fsdp_config={"fsdp_sharding_strategy": name})) == expected
    from_accelerate = FSDP | {
        "FSDP_SHARDING_STRATEGY": str(name),
        "FSDP_RESHARD_AFTER_FORWARD": "true",  # accelerate always sets both
    }
    assert sharding(load(environment=from_accelerate)) == expected


def test_the_guides_settings_take_effect_and_the_others_are_named():
    beside = {
        "activation_checkpointing": True,
        "gradient_checkpointing_policy": "nothing_saveable",
        "cpu_offload_ratio": 0.9,
        "pin_memory": False,
        "use_uvm_tensors": True,
    }
    loaded = load(fsdp_config=GUIDE, **beside)
    assert sharding(loaded) == {
        "strategy": "fsdp2",
        "reshard_after_forward": True,
        "cpu_offload": True,
        "prefetch_blocks": 1,
    }
    assert loaded.run.train.mixed_precision == "bf16"
    assert loaded.run.train.gradient_checkpointing
    (remark,) = [text for text in loaded.notices if "FSDP2" in text]
    named = [key for key in (*GUIDE, *beside) if f"{key} ({SUCCESSORS.get(_plain(key))})" in remark]
    assert {_plain(key) for key in named} == {_plain(key) for key in (*GUIDE, *beside)} & set(
        SUCCESSORS
    )
    assert len(named) == 11


def _plain(key):
    return key.removeprefix("fsdp_")


def test_the_guides_short_spelling_means_the_same():
    short = {
        "enabled": True,
        "cpu_offload": True,
        "sharding_strategy": "FULL_SHARD",
        "transformer_layer_cls": ["FluxTransformerBlock"],
        "min_num_params": 100000000,
    }
    expected = {"strategy": "fsdp2", "reshard_after_forward": True, "cpu_offload": True}
    assert sharding(load(fsdp_config=short)) == expected


def test_simpletuners_keys_take_effect_at_the_top_level():
    loaded = load(
        fsdp_enable=True, fsdp_version=2, fsdp_reshard_after_forward=False, fsdp_cpu_offload=True
    )
    expected = {"strategy": "fsdp2", "reshard_after_forward": False, "cpu_offload": True}
    assert sharding(loaded) == expected
    assert any("fsdp_enable -> distributed.strategy" in text for text in loaded.notices)


@pytest.mark.parametrize(
    "keys", [{"fsdp_config": GUIDE | {"fsdp_enabled": False}}, {"fsdp_cpu_offload": True}]
)
def test_fsdp_that_is_off_changes_nothing(keys):
    loaded = load(**keys)
    assert sharding(loaded) == {}
    assert any("FSDP is turned off" in text for text in loaded.notices)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "flux"])
def test_classes_that_the_model_does_not_have_are_refused_by_name(family):
    wrong = ["FluxTransformerBlock", "SDXLTransformerBlock", "DiTBlock"]
    with pytest.raises(ConfigError) as caught:
        load(model={"family": family}, fsdp_config={"fsdp_transformer_layer_cls_to_wrap": wrong})
    message = str(caught.value)
    assert f"fsdp_config.fsdp_transformer_layer_cls_to_wrap names {' and '.join(wrong)}" in message
    assert all(name in message for name in FAMILIES[family].block_classes)


def test_a_class_of_the_guide_that_does_not_exist_is_refused_under_accelerate():
    # accelerate writes a list of its YAML file as Python does.
    listed = str(["FluxTransformerBlock", "DiTBlock"])
    with pytest.raises(ConfigError, match=r"TO_WRAP names DiTBlock, but the blocks of flux are Fl"):
        load(environment=FSDP | {"FSDP_TRANSFORMER_CLS_TO_WRAP": listed})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"fsdp_config": {"fsdp_ofload_params": True}},
            "run.json:7: fsdp_config.fsdp_ofload_params is not a known key; did you mean "
            "fsdp_offload_params?",
        ),
        ({"fsdp_enable": True, "fsdp_wersion": 2}, "fsdp_wersion is not a known key"),
        ({"fsdp_config": "fsdp.json"}, 'run.json:6: fsdp_config is "fsdp.json"; it must be an'),
        ({"fsdp_config": {"fsdp_sharding_strategy": "ZERO"}}, "must be one of FULL_SHARD, SHARD"),
        ({"fsdp_config": {"fsdp_version": 3}}, "fsdp_version is 3; it must be 1 or 2"),
        ({"fsdp_config": {"fsdp_offload_params": "half"}}, 'is "half"; it must be true or false'),
        (
            {"fsdp_config": GUIDE, "distributed": {"cpu_offload": False}},
            "both set distributed.cpu_offload",
        ),
        ({"deepspeed_config": {"zero_stage": 3}}, "gracetune has no DeepSpeed. Set distributed.st"),
    ],
)
def test_mistakes_are_named_with_their_line(keys, message):
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.json:")


def test_an_override_replaces_fsdp_settings_of_the_file():
    loaded = load("distributed.cpu_offload=false", fsdp_config=GUIDE)
    assert not loaded.run.distributed.cpu_offload
    assert any("overrides replace fsdp_config.fsdp_offload_params" in t for t in loaded.notices)
    loaded = load("fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD", fsdp_config=GUIDE)
    assert loaded.run.distributed.strategy == "hsdp"


# accelerate launch


def launch_environment(file, *words):
    """Return the environment that `accelerate launch` gives its processes."""
    arguments = ["--config_file", str(file), *words, str(ROOT / "train.py")]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    return prepare_multi_gpu_env(args)


def test_the_shipped_fsdp_config_of_accelerate_means_what_it_says():
    file = ROOT / "config/accelerate_config_gh200_fsdp.yaml"
    loaded = load(environment=launch_environment(file))
    expected = {"strategy": "fsdp2", "reshard_after_forward": True, "cpu_offload": True}
    assert sharding(loaded) == expected
    assert any(text.startswith("Set by the configuration of accelerate") for text in loaded.notices)


def test_the_guides_config_of_accelerate_loads(tmp_path):
    file = tmp_path / "accelerate.yaml"
    settings = {key: value for key, value in GUIDE.items() if key != "fsdp_enabled"}
    file.write_text(
        json.dumps(
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "FSDP",
                "fsdp_config": settings,
                "machine_rank": 0,
                "mixed_precision": "bf16",
                "num_machines": 1,
                "num_processes": 1,
                "use_cpu": False,
            }
        )
    )
    loaded = load(environment=launch_environment(file))
    assert sharding(loaded) == {
        "strategy": "fsdp2",
        "reshard_after_forward": True,
        "cpu_offload": True,
        "prefetch_blocks": 1,
    }
    (remark,) = [text for text in loaded.notices if "FSDP2" in text]
    for key in ("USE_ORIG_PARAMS", "SYNC_MODULE_STATES", "BACKWARD_PREFETCH", "STATE_DICT_TYPE"):
        assert f"FSDP_{key} ({SUCCESSORS[key.lower()]})" in remark


def test_the_run_file_takes_precedence_over_accelerate():
    environment = FSDP | {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_OFFLOAD_PARAMS": "true"}
    loaded = load(environment=environment, distributed={"strategy": "fsdp2", "cpu_offload": False})
    assert not loaded.run.distributed.cpu_offload
    assert any("for distributed.cpu_offload (false)" in text for text in loaded.notices)
    wrong = environment | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "DiTBlock"}
    loaded = load(environment=wrong, distributed={"strategy": "replicate"})
    assert sharding(loaded) == {"strategy": "replicate"}
    assert any("which asks for fsdp2" in text for text in loaded.notices)


def test_variables_without_the_switch_are_ignored():
    assert sharding(load(environment={"FSDP_OFFLOAD_PARAMS": "true"})) == {}


def test_an_unknown_variable_of_fsdp_is_named():
    loaded = load(environment=FSDP | {"FSDP_NEW_FEATURE": "1"})
    assert any("FSDP_NEW_FEATURE: gracetune does not know" in text for text in loaded.notices)


def test_accelerates_groups_of_ranks_take_effect():
    groups = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
    }
    found = sharding(load(environment=FSDP | groups))
    assert found == {"strategy": "hsdp", "shard_size": 8, "context_parallel": 2}
    with pytest.raises(ConfigError, match="TP_SIZE is 2, but gracetune has no tensor parallelism"):
        load(environment=groups | {"PARALLELISM_CONFIG_TP_SIZE": "2"})


def test_the_shipped_run_file_with_the_guides_settings():
    loaded = load_run_file(ROOT / "config/fsdp_gh200.json", environment={})
    expected = {"strategy": "fsdp2", "reshard_after_forward": True, "cpu_offload": True}
    assert expected.items() <= sharding(loaded).items()
    assert loaded.run.adapter is None
    assert loaded.run.train.gradient_checkpointing
