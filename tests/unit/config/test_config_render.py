import json

from gracetune.config.load import json_schema, load_run_text, resolved_json
from gracetune.config.schema import RunFile

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


def test_what_is_written_loads_as_the_same_run():
    loaded = load_run_text(resolved_json(RUN), "json", "run", environment={})
    assert loaded.run == RUN
    assert loaded.notices == ()
    assert load_run_text(resolved_json(RunFile()), "json", "run", environment={}).run == RunFile()


def test_what_is_written_has_every_key_in_the_schemas_order():
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
