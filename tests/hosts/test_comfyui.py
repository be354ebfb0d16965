"""`adapter check` agrees with ComfyUI's own loader of adapters, run by `make test-comfyui`.

The loader is imported from a clone. It patches the weights of tiny transformers, whose outputs tell
whether a file that loads is also computed right.
"""

import os
import re
from copy import deepcopy
from pathlib import Path

import pytest
from adapter_tools import (
    MAX_ERROR,
    TABLES,
    Effect,
    build_transformer,
    comfyui_class,
    comfyui_modules,
    interruptible_run,
    load_in_comfyui,
    make_adapter,
    predict,
    table_of,
    train_adapter,
    train_until_interrupted,
    unusual_adapters,
)
from diffusers import DiffusionPipeline

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.formats import FORMATS
from gracetune.adapters.files.io import PEFT_FILE, read_adapter, write_adapter
from gracetune.errors import AdapterError
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.train.checkpoint import saved_adapters

CLONE = Path(os.environ.get("COMFYUI", Path(__file__).parents[2] / ".hosts" / "comfyui")).resolve()
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (CLONE / "comfy" / "lora.py").is_file(),
        reason=f"there is no clone of ComfyUI in {CLONE.name}",
    ),
]
FORMS = [form.name for form in FORMATS if not form.stages]
KINDS = ("lora", "dora", "loha", "lokr", "lokr-whole", "lokr-both", "full")


def numbers_of(version):
    return tuple(map(int, version.split(".")))


@pytest.fixture(scope="module")
def comfy():
    with comfyui_modules(CLONE) as modules:
        yield modules


@pytest.fixture(params=TABLES)
def family(request, comfy):
    """Return the name of a key table whose model this version of ComfyUI knows."""
    if comfyui_class(comfy, request.param) is None:
        pytest.skip(f"ComfyUI {comfy.version} does not know {request.param}")
    return request.param


@pytest.fixture
def model(family):
    """Return a tiny model with the names of a key table."""
    return build_transformer(family)


def compare(comfy, family, model, adapter, folder):
    """Compare `check` with ComfyUI for each form; return those that ComfyUI computes right.

    This includes forms for which `check` names a newer version than the clone's.
    """
    effect = Effect(family, model, adapter)
    right = set()
    for form in FORMS:
        path = folder / (PEFT_FILE if form == "peft" else f"{form}.safetensors")
        try:
            write_adapter(path, adapter, form)
        except AdapterError:
            continue
        result = check_file(path, TABLES, table=table_of(family)).results[1]
        needed = re.match(r"older versions than ([\d.]+) ", result.reason)
        if needed and numbers_of(needed[1]) > numbers_of(comfy.version):
            right.add(form)
            continue
        error = effect.error(lambda path=path: load_in_comfyui(comfy, family, model, path))
        assert result.loads == (error <= MAX_ERROR), (form, error, result)
        if error <= MAX_ERROR:
            right.add(form)
        elif result.is_wrong:
            assert result.reason, form
    return right


@pytest.mark.parametrize(("alpha", "outside"), [(None, False), (3.0, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_loads_if_and_only_if_comfyui_computes_it_right(
    family, kind, alpha, outside, comfy, model, tmp_path
):
    adapter = make_adapter(family, kind, model, alpha, outside)
    right = compare(comfy, family, model, adapter, tmp_path)
    is_split = is_split_kind(family, kind)
    assert ("comfyui" in right) == (kind != "dora" and not is_split)
    if is_split and knows_diffusers_names(family) and not outside:
        assert {"lycoris", "diffusers"} <= right


def is_split_kind(family, kind):
    """Return True for LoHa and LoKr on parts of a fused projection.

    They have no exact form with the names of the original checkpoint.
    """
    return bool(table_of(family).fused) and kind.startswith("lo") and kind != "lora"


def knows_diffusers_names(family):
    return any(naming == "diffusers" for *_, naming in table_of(family).comfyui_prefixes)


def test_unusual_adapters_load_if_and_only_if_comfyui_computes_them_right(
    family, comfy, model, tmp_path
):
    for name, adapter in unusual_adapters(family, model).items():
        folder = tmp_path / name
        folder.mkdir()
        right = compare(comfy, family, model, adapter, folder)
        if name in ("lora of queries", "full of queries", "a bare parameter"):
            assert "comfyui" in right, name


@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr", "full"])
def test_a_converted_checkpoint_has_the_output_of_training(family, kind, comfy, model, tmp_path):
    trained, _, file = train_adapter(family, kind, model, tmp_path)
    adapter = read_adapter(file, TABLES)
    assert Effect(family, model, adapter).error(lambda: trained) <= MAX_ERROR
    right = compare(comfy, family, model, adapter, tmp_path)
    split = is_split_kind(family, kind) and kind != "locon"  # a LoCon of linear layers is a LoRA
    assert bool(right) == (not split or knows_diffusers_names(family))
    if not right:
        with pytest.raises(AdapterError, match="to_qkv cannot be split or joined exactly"):
            write_adapter(tmp_path / "refused.safetensors", adapter, "comfyui")


@pytest.mark.parametrize(("family", "model"), [("sd3", "sd35-medium"), ("flux", "flux")])
def test_the_adapter_of_an_interrupted_run_has_the_output_of_training(
    family, model, comfy, miniature, tiny_run_in, tmp_path
):
    """tests/e2e/test_interrupted_adapter.py does the same with diffusers."""
    run = tiny_run_in(tmp_path, **interruptible_run(family, miniature(model), tmp_path))
    step, trained = train_until_interrupted(run)
    (file,) = saved_adapters(Path(run.output_dir))[step].glob("*.safetensors")
    with without_progress_bars():
        plain = DiffusionPipeline.from_pretrained(miniature(model), local_files_only=True)
    expected, before = predict(family, trained), predict(family, deepcopy(plain.transformer))
    loaded = load_in_comfyui(comfy, family, plain.transformer, file)
    effect = float((expected - before).norm())
    error = float((predict(family, loaded) - expected).norm())
    assert effect > 1e-3 * float(before.norm())
    assert error <= MAX_ERROR * effect, (step, error, effect)
