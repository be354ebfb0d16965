"""`adapter check` agrees with ComfyUI's own loader of adapters, run by `make test-comfyui`.

The loader is imported from a clone. It patches the weights of tiny transformers, whose outputs tell
whether a file that loads is also computed right.
"""

import os
from pathlib import Path

import pytest
from adapter_tools import (
    MAX_ERROR,
    TABLES,
    TRANSFORMER_TABLES,
    Effect,
    build_transformer,
    comfyui_class,
    comfyui_modules,
    load_in_comfyui,
    make_adapter,
    table_of,
    train_adapter,
    unusual_adapters,
)

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.formats import FORMATS
from gracetune.adapters.files.io import PEFT_FILE, read_adapter, write_adapter
from gracetune.errors import AdapterError

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


@pytest.fixture(scope="module")
def comfy():
    with comfyui_modules(CLONE) as modules:
        yield modules


@pytest.fixture(params=TRANSFORMER_TABLES)
def family(request, comfy):
    """Return the name of a key table whose model this version of ComfyUI knows."""
    if comfyui_class(comfy, request.param) is None:
        pytest.skip(f"this ComfyUI does not know {request.param}")
    return request.param


def compare(comfy, family, model, adapter, folder):
    """Compare `check` with ComfyUI for each form; return those that ComfyUI computes right."""
    effect = Effect(family, model, adapter)
    right = set()
    for form in FORMS:
        path = folder / (PEFT_FILE if form == "peft" else f"{form}.safetensors")
        try:
            write_adapter(path, adapter, form)
        except AdapterError:
            continue
        result = check_file(path, TABLES, table=table_of(family)).results[1]
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
    family, kind, alpha, outside, comfy, tmp_path
):
    model = build_transformer(family)
    adapter = make_adapter(family, kind, model, alpha, outside)
    right = compare(comfy, family, model, adapter, tmp_path)
    # A LoHa or LoKr on parts of a fused projection has no exact form with original names.
    table = table_of(family)
    is_split = bool(table.fused) and kind.startswith("lo") and kind != "lora"
    assert ("comfyui" in right) == (kind != "dora" and not is_split)
    knows_diffusers_names = any(naming == "diffusers" for *_, naming in table.comfyui_prefixes)
    if is_split and knows_diffusers_names and not outside:
        assert {"lycoris", "diffusers"} <= right


def test_unusual_adapters_load_if_and_only_if_comfyui_computes_them_right(family, comfy, tmp_path):
    model = build_transformer(family)
    for name, adapter in unusual_adapters(family, model).items():
        folder = tmp_path / name
        folder.mkdir()
        right = compare(comfy, family, model, adapter, folder)
        if name in ("lora of queries", "full of queries", "a bare parameter"):
            assert "comfyui" in right, name


@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr", "full"])
def test_a_converted_checkpoint_has_the_output_of_training(family, kind, comfy, tmp_path):
    model = build_transformer(family)
    trained, _, file = train_adapter(family, kind, model, tmp_path)
    adapter = read_adapter(file, TABLES)
    assert Effect(family, model, adapter).error(lambda: trained) <= MAX_ERROR
    assert compare(comfy, family, model, adapter, tmp_path)
