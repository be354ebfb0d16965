import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.config.load import (
    json_schema,
    known_keys,
    load_run_file,
    load_run_text,
    parse_override,
    parse_value,
    resolved_json,
    suggest_fix,
)
from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError


def refusal(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def text_refusal(text, text_format="json"):
    return refusal(load_run_text, text, text_format, "run", environment={})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '// hi\n{"train": {"batch_size": 2}, "validation": {"prompts": ["a"]}}'),
        ("run.yaml", "train:\n  batch_size: 2\nvalidation: {prompts: [a]}\n"),
        ("run.yml", "train: {batch_size: 2}\nvalidation:\n  prompts:\n    - a\n"),
        ("run.TOML", '[train]\nbatch_size = 2\n[validation]\nprompts = ["a"]\n'),
    ],
)
def test_every_format_gives_the_same_run(tmp_path, name, text):
    file = tmp_path / name
    file.write_text("\ufeff" + text if name == "run.json" else text, "utf-8")
    loaded = load_run_file(file, environment={})
    assert loaded.run == RunFile.model_validate(
        {"train": {"batch_size": 2}, "validation": {"prompts": ["a"]}}
    )
    assert loaded.path == file
    assert loaded.notices == ()


def test_overrides_apply_to_files(tmp_path):
    file = tmp_path / "run.json"
    file.write_text("{}")
    assert load_run_file(str(file), ["seed=3"], {}).run.seed == 3


def test_a_leading_tilde_in_a_path_is_the_home_folder(monkeypatch):
    """It would otherwise create a folder called `~` in the working directory."""
    monkeypatch.setenv("HOME", "/home/me")
    overrides = [
        "output_dir=~/runs",
        "model.path=~/model",
        "cache_config.cache_dir=~",
        "datasets.0.instance_data_dir=~/images",
        'datasets.0.conditioning_data_dir=["~/left","s3://~/right"]',
        'validation.images=[["~/one.png","a~b.png"]]',
    ]
    run = load_run_text("{}", "json", "run", overrides, {}).run
    assert (run.output_dir, run.model.path) == ("/home/me/runs", "/home/me/model")
    assert run.cache_config.cache_dir == "/home/me"
    assert run.datasets[0].instance_data_dir == "/home/me/images"
    assert run.datasets[0].conditioning_data_dir == ("/home/me/left", "s3://~/right")
    assert run.validation.images == (("/home/me/one.png", "a~b.png"),)


def test_an_index_may_be_in_brackets_as_in_error_messages():
    assert parse_override("datasets[0].resolution=32") == (("datasets", 0, "resolution"), 32)
    assert parse_override("datasets.0.resolution=32") == (("datasets", 0, "resolution"), 32)
    prompts = parse_override("validation.prompts[1].seed=3")
    assert prompts == (("validation", "prompts", 1, "seed"), 3)
    text = '{"datasets": [{"type": "shapes"}]}'
    run = load_run_text(text, "json", "run.json", ["datasets[0].repeats=2"], environment={}).run
    assert run.datasets[0].repeats == 2


def test_the_environment_defaults_to_that_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1")
    file = tmp_path / "run.json"
    file.write_text("{}")
    assert load_run_file(file).run.gh200_optimizations.enable_uvm_hints is True
    assert load_run_file(file, environment={}).run.gh200_optimizations.enable_uvm_hints is None


def test_unreadable_files_are_refused(tmp_path):
    assert "does not exist" in refusal(load_run_file, tmp_path / "no.json")
    (tmp_path / "folder.json").mkdir()
    assert "is a folder" in refusal(load_run_file, tmp_path / "folder.json")
    assert "must end in one of .json, .yaml" in refusal(load_run_file, tmp_path / "run.txt")
    (tmp_path / "latin.json").write_bytes(b'{"output_dir": "\xe9"}')
    assert "is not UTF-8 (byte 16)" in refusal(load_run_file, tmp_path / "latin.json")
    (tmp_path / "file").write_text("")
    assert "cannot be read" in refusal(load_run_file, tmp_path / "file" / "run.json")
    assert "cannot be read" in refusal(load_run_file, "\0.json")
    with (tmp_path / "large.json").open("wb") as large:
        large.truncate(17 * 1024**2)
    assert "so it is not a run file" in refusal(load_run_file, tmp_path / "large.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"train": {\n"batch_sise": 1}}', "run:3: train.batch_sise is not a known key; "),
        ('{"train": {"batch_sise": 1}}', "did you mean train.batch_size?"),
        ('{"max_trian_steps": 1}', "did you mean train.max_train_steps?"),
        ('{"trian": {"batch_size": 1}}', "run:1: trian is not a known key; did you mean train?"),
        ('{"train": {"lr_bump": 1}}', "did you mean optimizer.lr_bump?"),
        ('{"train": {"every": 1}}', "did you mean validation.every or logging.every?"),
        ('{"datasets": [{}, {"repeat": 1}]}', "did you mean datasets.1.repeats?"),
        ('{"train_batch_sizes": 1}', "did you mean train_batch_size"),
        ('{"train.batch_size": 1}', "write it nested: train: {batch_size: ...}."),
        ('{"qqqq": 1}', "known here: adapter, cache_config"),
        ('{"meta": {"name": "x"}}', "meta is not a known key; known here: adapter"),
        ('{"device": "cuda"}', "device is not a known key; known here: adapter"),
        ('{"optimizer": {"meta": 1}}', "optimizer.meta is not a known key; known here: betas"),
        ('{"logging": {"log_every": 1}}', "did you mean logging.every?"),
        ('{"network": {"linear": 8, "lineer": 8}}', "network.lineer is not a known key; did you "),
        ('{"network": {"linear": 8, "foo": 8}}', "network.foo is not a known key; known here: "),
        ('{"": 1}', '"" is not a known key'),
        ('{"resume_from_checkpoint": "latest"}', "--resume latest"),
        ('{"train": {"batch_size": 0}}', "train.batch_size is 0; it must be at least 1."),
        ('{"optimizer": {"lr": 0}}', "optimizer.lr is 0; it must be above 0."),
        ('{"datasets": [{"caption_dropout": 2}]}', "it must be at most 1."),
        ('{"adapter": {"dropout": 1}}', "it must be below 1."),
        ('{"datasets": [{"shapes": {"size": 18}}]}', "it must be a multiple of 4."),
        ('{"seed": "3"}', 'seed is "3"; it must be a whole number.'),
        ('{"seed": true}', "seed is true; it must be a whole number."),
        ('{"seed": 1.5}', "seed is 1.5; it must be a whole number."),
        ('{"optimizer": {"lr": "1e-4"}}', "it must be a number."),
        ('{"use_gh200_trainer": 1}', "it must be true or false."),
        ('{"output_dir": 3}', "output_dir is 3; it must be text, in quotes."),
        ('{"output_dir": ""}', 'output_dir is ""; it must be text that is not empty.'),
        ('{"optimizer": {"betas": [0.1, 0.2, 0.3]}}', "it must be a list of 2."),
        ('{"validation": {"prompts": 3}}', "it must be a list."),
        ('{"train": null}', "train is null; it must be an object with keys."),
        ('{"datasets": [3]}', "datasets.0 is 3; it must be an object with keys."),
        ('{"dataset_type": "text"}', "is \"text\"; it must be one of 'image', 'video' or 'audio'."),
        ('{"adapter": {"kind": "x"}}', "adapter.kind is \"x\"; it must be one of 'lora',"),
        ('{"train": {"mixed_precision": "int8"}}', "it must be one of 'auto', 'no', 'bf16'"),
        ('{"optimizer": {"betas": [0.9]}}', "optimizer.betas.1 is missing."),
        ('{"plan": "maybe"}', "run:1: plan is \"maybe\"; it must be 'auto', 'off' or an object "),
        ('{"plan": {"batch": "x"}}', "plan.batch is \"x\"; it must be one of 'auto' or 'fixed'."),
        ('{"plan": {"bach": "x"}}', "plan.bach is not a known key; did you mean plan.batch?"),
        ('{"plan": {"host_memory": 96}}', "plan.host_memory is 96; it must be text, in quotes."),
        (
            '{"plan": {"device_memory": "lots"}}',
            'plan.device_memory is "lots"; it must be a number and a unit, such as 96GB.',
        ),
        ('{"plan": {"host_memory": "-3GB"}}', 'plan.host_memory is "-3GB"; it must be a number'),
        (
            '{"datasets": [{"frames": "x"}]}',
            'datasets.0.frames is "x"; it must be a whole number or a list.',
        ),
        (
            '{"datasets": [{"frames": [5, 0]}]}',
            "run:1: datasets.0.frames.1 is 0; it must be at least 1.",
        ),
        (
            '{"train": {"timestep_shift": "x"}}',
            "it must be a number, 'flux', 'qwen_image' or 'sd3'.",
        ),
        (
            '{"datasets": [{"remote": {"options": {"a": {"b": [1]}}}}]}',
            "run:1: datasets.0.remote.options.a.b is a list; it must be text, in quotes, a whole",
        ),
        ('{"optimizer": {"lr": 1' + "0" * 400 + "}}", "lr is an integer of 1329 bits; at most"),
        (
            '{"lora_rank": 0}',
            "run:1: lora_rank (adapter.rank) is 0; it must be at least 1.",
        ),
    ],
)
def test_errors_name_the_place_key_value_rule_and_fix(text, message):
    assert message in text_refusal(text)


def test_a_union_gives_one_line_per_mistake():
    with pytest.raises(ConfigError) as caught:
        load_run_text("{}", "json", "run", ["plan=maybe"], {})
    rule = "it must be 'auto', 'off' or an object with keys."
    assert str(caught.value) == f'override plan=maybe: plan is "maybe"; {rule}'
    text = '{"plan": {\n"stream": 1,\n"host_memory": "x"}}'
    assert text_refusal(text).splitlines() == [
        'run:3: plan.host_memory is "x"; it must be a number and a unit, such as 96GB.',
        "run:2: plan.stream is 1; it must be true or false.",
    ]


def test_every_mistake_is_reported_with_its_line():
    message = text_refusal("train:\n  batch_size: 0\nlogging:\n  evry: 1\n  every: 0\n", "yaml")
    assert sorted(message.splitlines()) == [
        "run:2: train.batch_size is 0; it must be at least 1.",
        "run:4: logging.evry is not a known key; did you mean logging.every?",
        "run:5: logging.every is 0; it must be at least 1.",
    ]
    assert "run:3: train.batch_size" in text_refusal("\n[train]\nbatch_size = 0", "toml")


def test_violations_across_sections_have_lines_too():
    text = '{"datasets": [\n{"id": "a"},\n{"id": "a"}]}'
    assert [line[:22] for line in text_refusal(text).splitlines()] == [
        "run:2: datasets.0.id i",
        "run:3: datasets.1.id i",
    ]
    ramp = '{"initial_effective_batch_size": 8,\n"target_effective_batch_size": 4}'
    assert text_refusal(ramp).startswith(
        "run:1: initial_effective_batch_size (gh200_optimizations.initial_effective_batch_size)"
    )


def test_a_typo_in_any_key_suggests_that_key():
    for key in known_keys():
        path = tuple(0 if step == "*" else step for step in key.split("."))
        typo = (*path[:-1], f"{path[-1]}x")
        assert key.replace("*", "0") in suggest_fix(typo)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1e-4", 1e-4), ("true", True), ("False", False), ("null", None), ("a b", "a b")],
)
def test_values_of_overrides_are_json_or_text(text, value):
    assert parse_value(text) == value


def test_a_deeply_nested_override_is_text():
    assert parse_value("[" * 100_000) == "[" * 100_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*"ab*.0", "", "id", "in_memory"]), inner, max_size=3)
    ),
    max_leaves=6,
)
top_keys = [
    *RunFile.model_fields,
    "data_backend",
    "dataset",
    "resolution",
    "model_type",
    "in_memory",
    "lora_rank",
    "validation_prompt",
    "*",
]


@given(tree=st.dictionaries(st.sampled_from(top_keys), json_values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_tree_gives_a_run_or_a_config_error(tree):
    with contextlib.suppress(ConfigError):
        loaded = load_run_text(json.dumps(tree), "json", "run", environment={})
        assert isinstance(loaded.run, RunFile)


def test_loading_imports_no_torch():
    code = "import sys, gracetune.config.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_path_of_a_text_is_its_name():
    assert load_run_text("{}", "json", "inline", environment={}).path == Path("inline")


RUN = RunFile.model_validate(
    {
        "output_dir": "runs/é",
        "adapter": {"targets": ["to_q"], "alpha": 3},
        "datasets": [
            {"id": "a", "type": "in_memory", "in_memory": {"num_workers": 2}},
            {"id": "b", "shapes": {"copies": 2}},
        ],
        "cache_config": {"vae_cache_type": "unified_memory"},
        "gh200_optimizations": {"enable_uvm_hints": True},
        "optimizer": {"lr": 1e-07, "betas": [0.1, 0.3]},
        "validation": {"prompts": ["a", "b"]},
    }
)


def test_resolved_json_loads_as_the_same_run():
    loaded = load_run_text(resolved_json(RUN), "json", "run", environment={})
    assert loaded.run == RUN
    assert loaded.notices == ()
    assert load_run_text(resolved_json(RunFile()), "json", "run", environment={}).run == RunFile()


def test_resolved_json_has_every_key_in_schema_order():
    written = json.loads(resolved_json(RUN))
    assert list(written) == list(RunFile.model_fields)
    assert resolved_json(RUN) == resolved_json(RUN.model_copy())
    assert "é" in resolved_json(RUN)
    assert resolved_json(RUN).endswith("}\n")


def test_the_schema_describes_every_key():
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    train = schema["$defs"]["TrainSection"]
    assert train["additionalProperties"] is False
    assert train["properties"]["batch_size"]["minimum"] == 1
    missing = [
        f"{name}.{key}"
        for name, section in schema["$defs"].items()
        for key, rules in section["properties"].items()
        if "description" not in rules
    ]
    assert missing == []


CREDENTIALS = {
    "key": "AKIA-secret",
    "secret": "secret",
    "token": "t-secret",
    "password": 12345678,
    "connection_string": "AccountKey=secret",
    "headers": {"Authorization": "Bearer secret", "X": "secret"},
    "client_kwargs": {
        "aws_secret_access_key": "secret",
        "endpoint_url": "https://u:secret@host",
        "region_name": "eu-north-1",
    },
    "anon": False,
    "max_concurrency": 4,
}


def test_written_settings_have_no_credentials():
    dataset = {
        "instance_data_dir": "s3://me:secret@bucket/x",
        "remote": {"options": CREDENTIALS},
    }
    images = ("https://h/x.png?sig=secret",)
    run = RunFile.model_validate(
        {
            "datasets": [dataset],
            "model": {"path": "https://secret@h/m"},
            "validation": {"images": images},
        }
    )
    text = resolved_json(run)
    assert "secret" not in re.sub('aws_secret_access_key|"secret":', "", text)
    assert "12345678" not in text
    written = json.loads(text)
    assert written["datasets"][0]["instance_data_dir"] == "s3://***@bucket/x"
    options = written["datasets"][0]["remote"]["options"]
    assert options["client_kwargs"]["region_name"] == "eu-north-1"
    assert options["client_kwargs"]["endpoint_url"] == "https://***@host"
    assert (options["anon"], options["max_concurrency"]) == (False, 4)
    assert resolved_json(RunFile.model_validate(written)) == text
    assert "secret" not in repr(run.datasets[0].remote)
    # in memory nothing is hidden, or requests would fail
    assert run.datasets[0].remote.options == CREDENTIALS
    assert run.model_dump()["datasets"][0]["remote"]["options"] == CREDENTIALS


@pytest.mark.parametrize(
    ("key", "value"),
    [("remote", {"options": {"key": "***"}}), ("instance_data_dir", "s3://***@bucket/x")],
)
def test_settings_whose_credentials_were_removed_are_refused(key, value):
    text = json.dumps({"datasets": [{"instance_data_dir": "s3://b", key: value}]})
    with pytest.raises(ConfigError, match=rf"datasets\.0\.{key}.*\*\*\*.*Set the credentials"):
        load_run_text(text, "json", "run.json", environment={})


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({"remote": {"options": {"key": ["hunter2"]}}}, ()),
        ({"remote": {"options": {"client_kwargs": {"a": {"b": "hunter2"}}}}}, ()),
        ({"remote": {"options": "hunter2"}}, ()),
        ({"remote": {"options": {"key": "a"}}}, ['datasets.0.remote.options.key=["hunter2"]']),
        ({"remote": {"optionz": {"key": "hunter2"}}}, ()),
        ({"remote": "hunter2"}, ()),
        ({"resolution": "s3://a:hunter2@b"}, ()),
    ],
)
def test_an_error_in_a_run_file_does_not_show_credentials(settings, overrides):
    with pytest.raises(ConfigError) as caught:
        load_run_text(
            json.dumps({"datasets": [settings]}), "json", "run.json", overrides, environment={}
        )
    assert "hunter2" not in str(caught.value)
