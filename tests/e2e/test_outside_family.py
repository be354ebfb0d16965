"""A family from another package: the example of docs/adding-a-family.md works."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-family.md"


@pytest.fixture
def installed(tmp_path):
    """Return a folder like site-packages with the example's module and entry point."""
    site = tmp_path / "site"
    about = site / "mosaic-1.0.dist-info"
    about.mkdir(parents=True)
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (site / "mosaic.py").write_text(code)
    (line,) = re.findall(r'^mosaic = "(.+)"$', page, re.M)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mosaic\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[gracetune.family]\nmosaic = {line}\n")
    return site


@pytest.fixture
def environment(installed):
    return os.environ | {"PYTHONPATH": str(installed)}


@pytest.mark.slow
def test_the_example_family_trains_samples_resumes_and_exports(
    installed, environment, run_file, gracetune, tmp_path
):
    file = run_file(
        model={"family": "mosaic"},
        adapter={"rank": 2},
        train={"max_train_steps": 4, "checkpoint_every": 2},
        validation={"every": 2, "prompts": ["a red ring"], "sample_steps": 2, "holdout": 0.1},
    )
    half = gracetune("train", file, "--set", "train.max_train_steps=2", env=environment)
    assert half.returncode == 0, half.stderr
    whole = gracetune("train", file, env=environment)
    assert whole.returncode == 0, whole.stderr
    assert "resume     from step 2 of" in whole.stdout
    assert "LoRA rank 2 on 2 modules" in whole.stdout
    assert (tmp_path / "run" / "validation" / "step-000004.png").is_file()
    assert (tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors").is_file()


def test_the_example_family_passes_the_contract_tests(installed, monkeypatch, request, tmp_path):
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "tests" / "contract"))
    import test_family as contract

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import load_family

    family = load_family(ModelSection(family="mosaic"))
    shape = (2 * family.pixel_step, 3 * family.pixel_step)
    media = contract.torch.rand(2, 3, shape[1], shape[0]) * 2 - 1
    given = {
        "family": family,
        "shape": shape,
        "media": media,
        "encoded": family.encode(media),
        "tmp_path": tmp_path,
    }
    kept = [
        name
        for name, check in vars(contract).items()
        if name.startswith("test_") and _called(check, given)
    ]
    assert len(kept) > 12
    sys.modules.pop("mosaic", None)


def _called(check, given):
    names = check.__code__.co_varnames[: check.__code__.co_argcount]
    if "family" not in names or "request" in names:  # `request` names a miniature
        return False
    check(**{name: given[name] for name in names})
    return True


def test_an_unknown_family_name_explains_how_to_add_one(gracetune, run_file):
    refused = gracetune("train", run_file(model={"family": "mosaik"}))
    assert refused.returncode == 2
    assert "entry points of the group 'gracetune.family'" in refused.stderr
    assert json.dumps("Traceback")[1:-1] not in refused.stderr
