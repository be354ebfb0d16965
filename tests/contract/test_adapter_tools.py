"""Adapter files give the right output in diffusers, LyCORIS and peft, or are refused by name.

Real, tiny transformers load each file; their outputs are compared with the adapter's formulas.
tests/hosts/test_comfyui.py does the same with ComfyUI's functions. Here `check` is compared with
what that test found.
"""

import copy
import json
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from adapter_examples import make_lokr, make_lora, map_tensors
from adapter_tools import (
    MAX_ERROR,
    TABLES,
    TRANSFORMER_TABLES,
    UNETS,
    VARIANTS,
    WIDTH,
    Effect,
    build_transformer,
    family_of,
    load_in_diffusers,
    load_in_diffusers_transformer,
    load_in_lycoris,
    load_in_peft,
    make_adapter,
    predict,
    table_of,
    train_adapter,
    unusual_adapters,
)
from safetensors.torch import load_file, save_file

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.formats import FORMATS
from gracetune.adapters.files.io import (
    default_format,
    loading_tools,
    read_adapter,
    write_adapter,
)
from gracetune.adapters.files.keys import LayerPath
from gracetune.adapters.files.layers import Adapter, Layer, delta, scale_of
from gracetune.adapters.inject import install_adapters
from gracetune.cli.main import main
from gracetune.errors import AdapterError
from gracetune.train.export import TOOL_NAMES

KINDS = ("lora", "dora", "loha", "lokr", "lokr-whole", "lokr-both", "full")
FAMILIES = TRANSFORMER_TABLES
FORMS = ("comfyui", "lightning", "diffusers", "kohya", "lycoris", "onetrainer", "bare")
ALL_FAMILIES = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in UNETS)]
"""Families for the large tests. U-Nets have many layers; a few cases of theirs are not slow."""


@pytest.fixture(scope="module")
def transformers():
    return {family: build_transformer(family) for family in (*FAMILIES, *UNETS, "stable_audio")}


def loads_in_comfyui(family, model, kind, form, outside):
    """Return whether ComfyUI computes such a file right.

    tests/hosts/test_comfyui.py compares the prefixes in the key table with ComfyUI's functions.
    """
    table = table_of(family)
    (names,) = (one for one in FORMATS if one.name == form)
    prefix = names.prefix.replace("transformer", table.component)
    if (prefix, names.separator, names.naming) not in table.comfyui_prefixes:
        return False
    if names.naming == "diffusers":
        if table.component == "unet" and names.separator == ".":
            return False  # ComfyUI knows these names for the attention of old diffusers alone
        parts = [part.format(0) for fused in table.fused for part, _ in fused.parts]
        if kind == "full" and any(model.get_submodule(part).bias is not None for part in parts):
            return False
        if outside and table.not_in_comfyui:
            return False
    return kind != "dora"


@pytest.mark.parametrize(
    ("kind", "alpha", "outside"),
    [("lora", None, False), ("dora", None, False), *((kind, 3.0, True) for kind in KINDS)],
)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_file_loads_if_and_only_if_its_output_is_right(
    family, kind, alpha, outside, transformers, tmp_path
):
    model = transformers[family]
    adapter = make_adapter(family, kind, model, alpha, outside)
    effect = Effect(family, model, adapter)
    for form in FORMS:
        try:
            path = write_adapter(tmp_path / f"{form}.safetensors", adapter, form)
        except AdapterError as error:
            reason = str(error)
            assert any(word in reason for word in ("DoRA", "exactly", "cannot hold", "sizes")), form
            continue
        diffusers, comfyui = check_file(path, TABLES, table=table_of(family)).results
        loaders = [load_in_diffusers]
        if kind.startswith("lokr") and form == "diffusers":
            loaders.append(load_in_diffusers_transformer)
        error = min(effect.error(partial(load, family, model, path)) for load in loaders)
        assert diffusers.loads == (error <= MAX_ERROR), (form, error, diffusers)
        in_comfyui = loads_in_comfyui(family, model, kind, form, outside)
        assert comfyui.loads == in_comfyui, (form, comfyui)
        if form == "lycoris":
            for merged in (False, True):
                error = effect.error(
                    lambda path=path, merged=merged: load_in_lycoris(family, model, path, merged)
                )
                assert error <= MAX_ERROR, (form, merged, error)


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("form", ["comfyui", "lightning", "diffusers"])
def test_a_wan_lora_on_modules_outside_of_the_blocks_loads_in_diffusers(
    form, alpha, transformers, tmp_path
):
    """diffusers refuses a file of Wan with an alpha outside of the blocks."""
    model = transformers["wan"]
    adapter = make_adapter("wan", "lora", model, alpha, outside=True)
    path = write_adapter(tmp_path / "a.safetensors", adapter, form)
    effect = Effect("wan", model, adapter)
    assert effect.error(lambda: load_in_diffusers("wan", model, path)) <= MAX_ERROR
    assert check_file(path, TABLES, required_tools=("diffusers",)).ok


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
@pytest.mark.parametrize("family", [*ALL_FAMILIES, "stable_audio"])
def test_a_peft_folder_has_the_right_output_in_peft(family, kind, transformers, tmp_path):
    model = transformers[family]
    adapter = make_adapter(family, kind, model, 3.0, outside=family != "stable_audio")
    effect = Effect(family, model, adapter)
    path = write_adapter(tmp_path / "folder", adapter, "peft")
    assert effect.error(lambda: load_in_peft(family, model, path)) <= MAX_ERROR
    back = read_adapter(tmp_path / "folder", TABLES, table_of(family))
    assert all(scale_of(layer) == 1.0 for layer in back.layers.values())


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_unusual_adapters_load_only_if_their_output_is_right(family, transformers, tmp_path):
    model = transformers[family]
    for name, adapter in unusual_adapters(family, model).items():
        effect = Effect(family, model, adapter)
        for form in ("comfyui", "diffusers", "peft", "lycoris"):
            try:
                folder = tmp_path / name / form
                path = write_adapter(folder / "adapter_model.safetensors", adapter, form)
            except AdapterError:
                continue
            if form == "peft":
                assert effect.error(lambda p=path: load_in_peft(family, model, p)) <= MAX_ERROR
                continue
            if form == "lycoris":
                error = effect.error(lambda p=path: load_in_lycoris(family, model, p, merged=True))
                assert error <= MAX_ERROR or error == math.inf, name  # or its own error
                continue
            result = check_file(path, TABLES, table=table_of(family)).results[0]
            error = effect.error(lambda p=path: load_in_diffusers(family, model, p))
            assert result.loads == (error <= MAX_ERROR), (name, form, error, result)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    "model",
    [pytest.param(n, marks=pytest.mark.slow if family_of(n) in UNETS else ()) for n in VARIANTS],
)
def test_default_files_load_in_the_pipeline_of_every_variant(model, kind, tmp_path):
    transformer = build_transformer(model)
    adapter = make_adapter(model, kind, transformer, 3.0)
    path = write_adapter(tmp_path / "a.safetensors", adapter, default_format(adapter))
    effect = Effect(model, transformer, adapter)
    error = effect.error(lambda: load_in_diffusers(model, transformer, path))
    result = check_file(path, TABLES, config=transformer.config).results[0]
    # diffusers adds modules for the image to the file of Wan 2.1 I2V, without magnitudes.
    loads = (model, kind) != ("wan21-i2v", "dora")
    assert (error <= MAX_ERROR, result.loads) == (loads, loads), (error, result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in ("flux", "ideogram4") else pytest.mark.slow)
        for f in FAMILIES
    ],
)
def test_a_default_file_loads_where_a_run_says_and_is_sampled_right(
    family, kind, transformers, tmp_path
):
    model = transformers[family]
    adapter = make_adapter(family, kind, model, 3.0)
    path = write_adapter(tmp_path / "a.safetensors", adapter, default_format(adapter))
    report = check_file(path, TABLES, config=model.config)
    loading = {TOOL_NAMES[result.name] for result in report.results if result.loads}
    assert loading.issuperset(loading_tools(adapter)), report.lines()

    effect, changed = Effect(family, model, adapter), copy.deepcopy(model)
    with ExitStack() as undo:
        install_adapters({"": changed}, [(read_adapter(path, TABLES, adapter.table), 1.0)], undo)
        assert effect.error(lambda: copy.deepcopy(changed)) <= MAX_ERROR
    assert torch.equal(predict(family, changed), effect.plain), "it was not removed"


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_a_file_without_a_form_for_comfyui_is_not_to_be_converted(kind, transformers, tmp_path):
    adapter = make_adapter("ideogram4", kind, transformers["ideogram4"], 3.0)
    assert loading_tools(adapter) == ()
    path = write_adapter(tmp_path / "a.safetensors", adapter, default_format(adapter))
    result = check_file(path, TABLES, config=transformers["ideogram4"].config).results[1]
    assert result.reason.endswith("no exact form in ComfyUI's names; merge it into the model")
    with pytest.raises(AdapterError, match="exactly"):
        write_adapter(tmp_path / "b.safetensors", adapter, "comfyui")


def test_no_tool_loads_the_default_file_of_stable_audio(transformers, tmp_path):
    adapter = make_adapter("stable_audio", "lora", transformers["stable_audio"])
    path = write_adapter(tmp_path / "a.safetensors", adapter, default_format(adapter))
    for required in ((), ("diffusers",), ("comfyui",)):
        report = check_file(path, TABLES, required_tools=required)
        assert not report.ok
        assert "no diffusers pipeline" in report.lines()[0]


# ComfyUI


def comfyui_result(path):
    return check_file(path, TABLES).results[1]


def queries(family, layer):
    table = table_of(family)
    return Adapter(table, {LayerPath(None, "transformer_blocks.0.attn.to_q"): layer})


@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_ignored_magnitudes_are_not_a_loaded_dora(family, transformers, tmp_path):
    """ComfyUI reads diffusers' names of these families, but not the name of the magnitudes."""
    adapter = make_adapter(family, "dora", transformers[family])
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    report = check_file(path, TABLES, table=table_of(family))
    assert report.results[0].loads
    assert report.results[1].is_wrong
    assert "lora_magnitude_vector" in report.results[1].reason
    assert not report.ok
    table = table_of(family)
    assert check_file(path, TABLES, table=table, required_tools=("diffusers",)).ok
    assert not check_file(path, TABLES, table=table, required_tools=("comfyui",)).ok


@pytest.mark.parametrize(
    ("family", "form", "remark"),
    [
        ("krea2", "comfyui", "older versions than 0.26 do not know the model"),
        ("flux2", "diffusers", "older versions than 0.11 load a part of it"),
        ("flux2", "comfyui", ""),
        ("flux", "bare", "older versions than 0.11 load nothing of it"),
        ("chroma", "bare", "older versions than 0.11 load nothing of it"),
        ("z_image", "bare", "older versions than 0.9 load nothing of it"),
        ("z_image", "diffusers", ""),
        ("qwen_image", "bare", ""),
    ],
)
def test_check_names_the_comfyui_that_a_file_needs(family, form, remark, transformers, tmp_path):
    adapter = make_adapter(family, "lora", transformers[family])
    path = write_adapter(tmp_path / "a.safetensors", adapter, form)
    result = comfyui_result(path)
    assert result.loads
    assert result.reason == remark


def test_check_says_that_comfyui_does_not_know_a_model(transformers, tmp_path):
    adapter = make_adapter("krea2", "lora", transformers["krea2"])
    path = write_adapter(tmp_path / "a.safetensors", adapter, "comfyui")
    unknown = replace(table_of("krea2"), comfyui_prefixes=())
    result = check_file(path, TABLES, table=unknown).results[1]
    assert not result.loads
    assert result.reason == "it does not know the model krea2"


def test_magnitudes_of_rows_are_wrong_in_comfyui_and_those_of_columns_are_right(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = make_lora(WIDTH, WIDTH, generator, dora=True)
    columns = Layer("lora", {**rows.tensors, "dora": rows.tensors["dora"].reshape(1, -1)})
    path = write_adapter(tmp_path / "a.safetensors", queries("qwen_image", columns), "kohya")
    assert comfyui_result(path).loads
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(".dora_scale"))
    save_file(tensors | {key: rows.tensors["dora"]}, path, {"gracetune.family": "qwen_image"})
    result = comfyui_result(path)
    assert result.is_wrong
    assert "norms of W" in result.reason


def test_biases_of_fused_projections_are_lost_in_comfyui_by_diffusers_names(tmp_path):
    generator = torch.Generator().manual_seed(0)
    randn = {"diff": torch.randn(WIDTH, WIDTH, generator=generator)}
    biased = queries("flux", Layer("full", randn | {"diff_b": torch.ones(WIDTH)}))
    path = write_adapter(tmp_path / "a.safetensors", biased, "lycoris")
    result = comfyui_result(path)
    assert result.is_wrong
    assert "diff_b" in result.reason
    path = write_adapter(
        tmp_path / "b.safetensors", queries("flux", Layer("full", randn)), "lycoris"
    )
    assert comfyui_result(path).loads
    path = write_adapter(tmp_path / "c.safetensors", biased, "comfyui")
    assert comfyui_result(path).loads
    assert default_format(biased).name == "comfyui"


def test_an_alpha_in_the_header_is_not_read_by_comfyui(tmp_path):
    """diffusers' save_lora_weights writes alpha there, and its loader reads it."""
    layer = make_lora(WIDTH, WIDTH, torch.Generator().manual_seed(0))
    path = write_adapter(tmp_path / "a.safetensors", queries("qwen_image", layer), "diffusers")
    settings = {"transformer.r": 4, "transformer.lora_alpha": 16}
    settings |= {"transformer.target_modules": ["to_q"]}
    header = {"gracetune.family": "qwen_image", "lora_adapter_metadata": json.dumps(settings)}
    save_file(load_file(path), path, header)
    diffusers, comfyui = check_file(path, TABLES).results
    assert diffusers.loads
    assert comfyui.is_wrong
    assert "scale is 4" in comfyui.reason


def test_a_parameter_without_a_module_has_only_a_dotted_name_in_comfyui(tmp_path):
    layers = {LayerPath(None, "scale_shift_table"): Layer("full", {"diff": torch.ones(1, 2, 8)})}
    layers[LayerPath(None, "proj_out")] = make_lora(64, 8, torch.Generator().manual_seed(0))
    adapter = Adapter(TABLES["wan"], layers)
    for form, loads in (("comfyui", True), ("kohya", False)):
        path = write_adapter(tmp_path / f"{form}.safetensors", adapter, form)
        assert comfyui_result(path).loads == loads


def test_a_kronecker_product_of_a_3d_convolution_is_wrong_in_comfyui(transformers, tmp_path):
    adapters = unusual_adapters("wan", transformers["wan"])
    for name, loads in (
        ("lokr-whole", False),
        ("lokr", True),
        ("full-flat", False),
        ("full", True),
    ):
        adapter = adapters[f"convolution, {name}"]
        path = write_adapter(tmp_path / f"{name}.safetensors", adapter, "comfyui")
        assert comfyui_result(path).loads == loads, name


# peft


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"to_q": "lora", "to_k": "lokr"}, "one algorithm for a whole adapter"),
        ({"to_q": "lora", "to_k": "dora"}, "in all modules or in none"),
        ({"to_q": "lokr", "to_k": "lokr-3"}, "decompose_factor"),
    ],
)
def test_what_peft_cannot_hold_is_refused(layers, reason, tmp_path):
    generator = torch.Generator().manual_seed(0)
    makers = {
        "lora": lambda: make_lora(WIDTH, WIDTH, generator),
        "dora": lambda: make_lora(WIDTH, WIDTH, generator, dora=True),
        "lokr": lambda: make_lokr(WIDTH, WIDTH, generator, factor=2),
        "lokr-3": lambda: make_lokr(WIDTH, WIDTH, generator, factor=3),
    }
    adapter = Adapter(
        TABLES["qwen_image"],
        {
            LayerPath(None, f"transformer_blocks.0.attn.{name}"): makers[kind]()
            for name, kind in layers.items()
        },
    )
    with pytest.raises(AdapterError, match=reason) as caught:
        write_adapter(tmp_path / "folder", adapter, "peft")
    assert caught.value.kind == "not-exact"
    assert not (tmp_path / "folder").exists()


def test_peft_adapts_no_module_whose_name_only_ends_alike(transformers, tmp_path):
    """`proj_out` of Flux is a module of its own, and the end of the name of another one."""
    model = transformers["flux"]
    rows, columns = model.proj_out.weight.shape
    layer = make_lora(rows, columns, torch.Generator().manual_seed(0))
    adapter = Adapter(TABLES["flux"], {LayerPath(None, "proj_out"): layer})
    path = write_adapter(tmp_path / "folder", adapter, "peft")
    loaded = load_in_peft("flux", model, path)
    adapted = [name for name, _ in loaded.named_modules() if name.endswith("lora_A")]
    assert adapted == ["proj_out.lora_A"]


def test_lycoris_gets_no_lokr_whose_factors_it_would_not_find(tmp_path):
    layer = make_lokr(WIDTH, 8, torch.Generator().manual_seed(0))
    adapter = Adapter(TABLES["qwen_image"], {LayerPath(None, "img_in"): layer})
    with pytest.raises(AdapterError, match="LyCORIS would not find the sizes"):
        write_adapter(tmp_path / "a.safetensors", adapter, "lycoris")


@pytest.mark.parametrize("form", ["kohya", "comfyui", "lycoris", "diffusers"])
@pytest.mark.parametrize("kind", ["loha", "lokr", "lokr-both"])
def test_alpha_is_in_the_weights_of_loha_and_lokr(form, kind, transformers, tmp_path):
    adapter = make_adapter("qwen_image", kind, transformers["qwen_image"], alpha=3.0)
    path = write_adapter(tmp_path / "a.safetensors", adapter, form)
    back = read_adapter(path, TABLES, table_of("qwen_image"))
    assert all(scale_of(layer) == 1.0 for layer in back.layers.values())


def test_a_dora_on_some_modules_is_wrong_in_diffusers(transformers, tmp_path):
    """peft has one setting for all modules, so the others have magnitudes without values."""
    model = transformers["qwen_image"]
    adapter = make_adapter("qwen_image", "dora", model)
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    tensors = load_file(path)
    del tensors[next(key for key in tensors if key.endswith(".lora_magnitude_vector"))]
    save_file(tensors, path, {"gracetune.family": "qwen_image"})
    rest = read_adapter(path, TABLES)
    effect = Effect("qwen_image", model, rest)
    assert effect.error(lambda: load_in_diffusers("qwen_image", model, path)) > MAX_ERROR
    result = check_file(path, TABLES).results[0]
    assert result.is_wrong
    assert "all or none" in result.reason
    with pytest.raises(AdapterError, match="in all modules or in none"):
        write_adapter(tmp_path / "b.safetensors", rest, "diffusers")


def test_a_low_precision_dora_loads_in_diffusers(transformers, tmp_path):
    adapter = make_adapter("qwen_image", "dora", transformers["qwen_image"], alpha=3.0)
    layers = {p: map_tensors(x, lambda t: t.bfloat16()) for p, x in adapter.layers.items()}
    path = tmp_path / "a.safetensors"
    write_adapter(path, Adapter(adapter.table, layers), "diffusers", dtype=torch.bfloat16)
    assert check_file(path, TABLES, table=adapter.table).results[0].loads


READERS = {
    ("lora", "diffusers"): load_in_diffusers,
    ("dora", "diffusers"): load_in_diffusers,
    ("locon", "diffusers"): load_in_diffusers,
    ("lokr", "diffusers"): load_in_diffusers_transformer,
    **{(kind, "peft"): load_in_peft for kind in ("lora", "dora", "locon", "loha", "lokr")},
    **{
        (kind, "lycoris"): lambda *args: load_in_lycoris(*args, merged=True)
        for kind in ("lora", "locon", "loha", "lokr", "full")
    },
}
"""Tool for an adapter kind of a run and the format to which its checkpoint is converted."""


IN_CI = (("sd15", "lora"), ("sdxl", "locon"))
"""Cases of U-Nets that are not slow."""
TRAINED_KINDS = ("lora", "dora", "locon", "loha", "lokr", "full")


@pytest.mark.parametrize("kind", TRAINED_KINDS)
@pytest.mark.parametrize("family", [*ALL_FAMILIES, "stable_audio"])
def test_a_converted_checkpoint_has_the_output_of_training(family, kind, transformers, tmp_path):
    model = transformers[family]
    trained, adapter, file = train_adapter(family, kind, model, tmp_path)
    effect = Effect(family, model, adapter)
    assert effect.error(lambda: trained) <= MAX_ERROR
    for (this_kind, form), load in READERS.items():
        if this_kind != kind or (family == "stable_audio" and form != "peft"):
            continue
        if (kind, form) == ("lokr", "diffusers") and family in UNETS:
            continue  # diffusers has no loader for a LoKr of convolutions
        path = (
            tmp_path / form / ("adapter_model.safetensors" if form == "peft" else "a.safetensors")
        )
        assert main(["adapter", "convert", str(file), "--to", form, "-o", str(path)]) == 0
        error = effect.error(lambda path=path, load=load: load(family, model, path))
        assert error <= MAX_ERROR, (form, error)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if case in IN_CI else pytest.mark.slow)
        for family in UNETS
        for kind in TRAINED_KINDS
        for case in [(family, kind)]
    ],
)
def test_the_default_file_of_a_unet_has_the_output_of_training(
    family, kind, transformers, tmp_path
):
    """A run adapts convolutions, too, and gives one module another alpha than the others."""
    model = transformers[family]
    trained, adapter, _ = train_adapter(family, kind, model, tmp_path)
    path = write_adapter(tmp_path / "a.safetensors", adapter, default_format(adapter))
    effect = Effect(family, model, adapter)
    assert effect.error(lambda: trained) <= MAX_ERROR
    in_diffusers = effect.error(lambda: load_in_diffusers(family, model, path)) <= MAX_ERROR
    diffusers, comfyui = check_file(path, TABLES, table=table_of(family)).results
    assert diffusers.loads == in_diffusers == (kind in ("lora", "dora", "locon"))
    assert comfyui.loads == (kind != "dora")


def test_a_lokr_of_convolutions_is_refused_by_diffusers(transformers, tmp_path):
    model = transformers["sd15"]
    _, adapter, _ = train_adapter("sd15", "lokr", model, tmp_path)
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    result = check_file(path, TABLES, table=table_of("sd15")).results[0]
    assert not result.loads
    assert "no loader for a LoKr of convolutions" in result.reason


@pytest.mark.parametrize("form", ["kohya", "kohya-diffusers"])
def test_a_unet_lora_has_one_alpha_in_kohya_names(form, tmp_path):
    """diffusers ignores alphas of attention that differ from the others."""
    generator = torch.Generator().manual_seed(0)
    block = "mid_block.attentions.0.transformer_blocks.0.attn1"
    layers = {
        LayerPath(None, f"{block}.to_{x}"): make_lora(8, 8, generator, rank=rank, alpha=alpha)
        for x, rank, alpha in (("q", 4, 3.0), ("k", 2, 8.0), ("v", 4, 8.0), ("out.0", 4, None))
    }
    adapter = Adapter(TABLES["sdxl"], layers)
    path = write_adapter(tmp_path / "a.safetensors", adapter, form)
    alphas = {float(t) for key, t in load_file(path).items() if key.endswith(".alpha")}
    assert alphas == {8.0}
    back = read_adapter(path, TABLES)
    for place, layer in layers.items():
        torch.testing.assert_close(delta(back.layers[place]), delta(layer))


def test_a_lokr_with_a_core_tensor_is_wrong_in_comfyui(transformers, tmp_path):
    """ComfyUI logs an error and leaves the weight as it is."""
    adapters = unusual_adapters("sd15", transformers["sd15"])
    for kind, loads in (("lokr-tucker", False), ("lora-tucker", True), ("loha-tucker", True)):
        adapter = adapters[f"convolution, {kind}"]
        path = write_adapter(tmp_path / f"{kind}.safetensors", adapter, "comfyui")
        assert comfyui_result(path).loads == loads, kind
