import json
from pathlib import Path

import pytest
import torch
from adapter_examples import (
    TABLES,
    make_lokr,
    make_lora,
    make_wan,
    map_tensors,
    same,
    shape_of,
    wan_modules,
)
from PIL import Image
from safetensors.torch import load_file, save_file

from gracetune.adapters.files.io import (
    AdapterMetadata,
    default_format,
    read_adapter,
    read_tensors,
    write_adapter,
)
from gracetune.adapters.files.keys import LayerPath, any_name_table
from gracetune.adapters.files.layers import Adapter, delta
from gracetune.cli.main import main

STAGES = ("high", "low")


def run(capsys, *words, code=0):
    assert main(["adapter", *map(str, words)]) == code
    return capsys.readouterr().out


def run_json(capsys, *words, code=0):
    return json.loads(run(capsys, *words, "--json", code=code))


@pytest.fixture
def lora(tmp_path):
    about = AdapterMetadata("base", "high", 0.875, "ohwx")
    return write_adapter(tmp_path / "lora.safetensors", make_wan(alpha=2.0), "comfyui", about)


def wan_model(path, seed=3):
    generator = torch.Generator().manual_seed(seed)
    weights = {f"{n}.weight": torch.randn(shape_of(n), generator=generator) for n in wan_modules()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)
    return path


def test_inspect_reports_all_facts(capsys, lora):
    found = run_json(capsys, "inspect", lora)
    assert found["family"] == "wan"
    assert found["form"] == "comfyui"
    assert (found["stages"], found["stage_by"]) == (["high"], "its header")
    assert found["algorithms"] == {"lora": 20}
    assert found["ranks"] == {"4": 20}
    assert found["alphas"] == {"4": 20}
    assert found["metadata"]["gracetune.alpha"] == "2"  # multiplied into the weights
    assert found["targets"]["attn1.to_q"] == 2
    assert found["metadata"]["gracetune.trigger"] == "ohwx"
    layers = read_adapter(lora, TABLES).layers
    for place, layer in layers.items():
        assert found["norms"][place.module] == pytest.approx(float(delta(layer).norm()), rel=1e-4)
    total = sum(float(delta(x).norm()) ** 2 for p, x in layers.items() if "blocks.1." in p.module)
    assert found["by_block"]["blocks.1"] == pytest.approx(total**0.5, rel=1e-4)
    assert list(found["by_block"]) == ["blocks.0", "blocks.1"]


def test_inspect_draws_bars_and_an_image(capsys, lora, tmp_path):
    layers = dict(read_adapter(lora, TABLES).layers)
    layers = {
        p: map_tensors(x, lambda t: t * 0) if "blocks.1." in p.module else x
        for p, x in layers.items()
    }
    quiet = write_adapter(tmp_path / "quiet.safetensors", Adapter(TABLES["wan"], layers), "kohya")
    text = run(capsys, "inspect", quiet, "--plot", tmp_path / "norms.png")
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("blocks.")}
    assert lines["blocks.0"].count("█") == 40
    assert "█" not in lines["blocks.1"]
    image = Image.open(tmp_path / "norms.png")
    colours = {colour for _, colour in image.convert("RGB").getcolors(100_000)}
    assert (20, 60, 140) in colours  # the strongest
    assert (235, 240, 247) in colours  # those without a change


def test_inspect_handles_two_experts_and_mixed_formats(capsys, tmp_path):
    both = write_adapter(
        tmp_path / "both.safetensors", make_wan("lokr-whole", stages=STAGES), "ai-toolkit-combined"
    )
    found = run_json(capsys, "inspect", both)
    assert found["stages"] == ["high", "low"]
    assert found["ranks"] == {"whole": 40}
    assert "high: blocks.0.attn1.to_q" in found["norms"]
    assert "only ai-toolkit" in run(capsys, "inspect", both)
    mixed = {
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 4),
        "lora_unet_blocks_0_self_attn_q.lora_up.weight": torch.ones(4, 2),
        "proj_out.lora_A.default.weight": torch.ones(2, 4),
        "proj_out.lora_B.weight": torch.ones(4, 2),
    }
    save_file(mixed, tmp_path / "mixed.safetensors")
    assert run_json(capsys, "inspect", tmp_path / "mixed.safetensors")["form"].startswith("mixed: ")


def test_inspect_explains_an_alpha_that_is_multiplied_into_the_weights(capsys, tmp_path):
    adapter = make_wan("lora", alpha=16.0)
    folded = write_adapter(tmp_path / "folded.safetensors", adapter, "diffusers")
    text = run(capsys, "inspect", folded)
    assert "alpha      4\n" in text
    assert "trained with alpha 16" in text
    stored = write_adapter(tmp_path / "stored.safetensors", adapter, "kohya")
    text = run(capsys, "inspect", stored)
    assert "alpha      16\n" in text
    assert "trained with" not in text


def test_convert_writes_a_format_and_prints_its_caution(capsys, lora, tmp_path):
    out = tmp_path / "out.safetensors"
    text = run(capsys, "convert", lora, "--to", "musubi", "-o", out)
    assert "kohya" in text
    assert same(read_adapter(out, TABLES), read_adapter(lora, TABLES))
    assert read_tensors(out)[1]["gracetune.stage"] == "high"
    assert "loads nothing" in run(capsys, "convert", lora, "--to", "bare")
    assert (tmp_path / "lora-bare.safetensors").is_file()


def test_convert_writes_nothing_if_the_file_has_the_format(capsys, lora, tmp_path):
    text = run(capsys, "convert", lora, "--to", "comfyui")
    assert f"{lora} already is in the format comfyui (20 modules), so nothing is written." in text
    assert run_json(capsys, "convert", lora, "--to", "comfyui")["files"] == []
    assert list(tmp_path.iterdir()) == [lora]
    run(capsys, "convert", lora, "--to", "comfyui", "-o", tmp_path / "copy.safetensors")
    assert same(read_adapter(tmp_path / "copy.safetensors", TABLES), read_adapter(lora, TABLES))
    run(capsys, "convert", lora, "--to", "comfyui", "--dtype", "bfloat16")
    assert (tmp_path / "lora-comfyui.safetensors").is_file()


def test_convert_splits_and_joins_experts(capsys, tmp_path):
    both = make_wan("lokr", stages=STAGES)
    path = write_adapter(tmp_path / "both.safetensors", both, "ai-toolkit-combined")
    found = run_json(capsys, "convert", path, "--to", "comfyui", "-o", tmp_path / "run.safetensors")
    assert [file.rpartition("/")[2] for file in found["files"]] == [
        "run_high_noise.safetensors",
        "run_low_noise.safetensors",
    ]
    words = ("convert", path, "--to", "kohya", "-o", tmp_path / "run.safetensors")
    assert "run_high_noise.safetensors already exists" in _error(capsys, *words)
    back = tmp_path / "again.safetensors"
    high, low = found["files"]
    run(capsys, "convert", low, high, "--to", "ai-toolkit-combined", "-o", back)
    assert same(read_adapter(back, TABLES), both)
    assert "gracetune.stage" not in read_tensors(back)[1]
    one = tmp_path / "one.safetensors"
    run(capsys, "convert", path, "--stage", "low", "--to", "kohya", "-o", one)
    assert same(
        read_adapter(one, TABLES), read_adapter(tmp_path / "run_low_noise.safetensors", TABLES)
    )
    assert "Give one file for high" in _error(
        capsys, "convert", high, high, "--to", "ai-toolkit-combined"
    )
    unnamed = write_adapter(tmp_path / "unnamed.safetensors", make_wan(), "comfyui")
    words = ("convert", high, unnamed, "--to", "ai-toolkit-combined")
    assert f"{unnamed} is for an expert that it does not name. Give" in _error(capsys, *words)
    assert "one file, or two" in _error(capsys, "convert", high, low, low, "--to", "comfyui")


def test_convert_takes_two_files_without_an_expert_in_order(capsys, tmp_path):
    files = [
        write_adapter(tmp_path / f"{name}.safetensors", make_wan(seed=seed), "comfyui")
        for name, seed in (("a", 1), ("b", 2))
    ]
    out = tmp_path / "out.safetensors"
    run(capsys, "convert", *files, "--to", "ai-toolkit-combined", "-o", out)
    assert same(
        read_adapter(out, TABLES),
        Adapter(
            TABLES["wan"],
            {
                LayerPath(stage, p.module): layer
                for stage, seed in (("high", 1), ("low", 2))
                for p, layer in make_wan(seed=seed).layers.items()
            },
        ),
    )


def test_convert_joins_only_adapters_of_models_with_experts(capsys, tmp_path):
    layer = make_lora(16, 16, torch.Generator())
    place = LayerPath(None, "transformer_blocks.0.attn.to_q")
    files = [
        write_adapter(
            tmp_path / f"{name}.safetensors", Adapter(TABLES["flux"], {place: layer}), "comfyui"
        )
        for name in ("a", "b")
    ]
    message = _error(capsys, "convert", *files, "--to", "kohya", "-o", tmp_path / "out.safetensors")
    assert f"{files[0]} is a flux adapter" in message
    assert "Convert each file by itself" in message
    assert list(tmp_path.glob("out*")) == []


def test_convert_to_lora_reports_the_loss(capsys, tmp_path):
    path = write_adapter(tmp_path / "a.safetensors", make_wan("loha"), "comfyui")
    out = tmp_path / "out.safetensors"
    text = run(
        capsys,
        "convert",
        path,
        "--to",
        "diffusers",
        "--lora-rank",
        "24",
        "--dtype",
        "bfloat16",
        "-o",
        out,
    )
    assert "lost by truncation: 0.00%" in text
    tensors, _ = read_tensors(out)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all("lora_" in key for key in tensors)
    found = run_json(capsys, "convert", path, "--to", "diffusers", "--lora-rank", "1")
    assert found["lost"]["worst"] > 0.1
    assert "at least 1" in _error(capsys, "convert", path, "--to", "peft", "--lora-rank", "0")


def _error(capsys, *words, code=2):
    assert main(["adapter", *map(str, words)]) == code
    return capsys.readouterr().err


def test_merge_combines_several_adapters(capsys, lora, tmp_path):
    other = write_adapter(tmp_path / "b.safetensors", make_wan(seed=5), "kohya")
    out = tmp_path / "out.safetensors"
    words = ["merge", lora, other, "--strength", "0.5", "--strength", "2", "-o", out]
    found = run_json(capsys, *words)
    assert found["form"] == "comfyui"
    one, two, made = (read_adapter(path, TABLES).layers for path in (lora, other, out))
    for place, layer in made.items():
        expected = 0.5 * delta(one[place]) + 2 * delta(two[place])
        torch.testing.assert_close(delta(layer), expected, rtol=1e-4, atol=1e-4)
        assert layer.tensors["down"].shape[0] == 8
    thin = tmp_path / "thin.safetensors"
    cut = run_json(capsys, *words[:-1], thin, "--rank", "3", "--to", "kohya")
    assert cut["lost"]["worst"] > 0.0
    assert "given 1 times for 2 files" in _error(capsys, *words[:5], "-o", tmp_path / "x")


def test_merging_both_experts_into_one_is_refused(capsys, tmp_path):
    files = [
        write_adapter(
            tmp_path / f"{s}.safetensors", make_wan(), "comfyui", AdapterMetadata(stage=s)
        )
        for s in STAGES
    ]
    out = tmp_path / "out.safetensors"
    assert "both experts" in _error(capsys, "merge", *files, "-o", out)
    model = wan_model(tmp_path / "m.safetensors")
    assert "both experts" in _error(capsys, "merge", *files, "--into", model, "-o", out)


def test_a_file_of_one_expert_is_merged_into_that_expert_of_another(capsys, tmp_path):
    both = write_adapter(
        tmp_path / "both.safetensors", make_wan(stages=STAGES), "ai-toolkit-combined"
    )
    low, plain = (
        write_adapter(tmp_path / f"{s}.safetensors", make_wan(seed=5), "comfyui", metadata)
        for s, metadata in (("low", AdapterMetadata(stage="low")), ("plain", None))
    )
    out = tmp_path / "out.safetensors"
    found = run_json(capsys, "merge", both, low, "-o", out)
    assert [Path(file).stem for file in found["files"]] == ["out_high_noise", "out_low_noise"]
    before, added = read_adapter(both, TABLES).layers, read_adapter(low, TABLES).layers
    for stage, file in zip(STAGES, found["files"], strict=True):
        for place, layer in read_adapter(Path(file), TABLES).layers.items():
            expected = delta(before[LayerPath(stage, place.module)])
            expected = expected + delta(added[place]) if stage == "low" else expected
            torch.testing.assert_close(delta(layer), expected, rtol=1e-4, atol=1e-4)
    assert "does not say which expert" in _error(capsys, "merge", both, plain, "-o", out)
    chosen = run_json(capsys, "merge", both, plain, "--stage", "high", "-o", out)
    assert chosen["modules"] == 20


def test_merging_into_a_missing_model_names_the_option(capsys, lora, tmp_path):
    words = ["merge", lora, "--into", tmp_path / "gone", "-o", tmp_path / "out"]
    assert "gone: there is no such file or folder. Name the folder" in _error(capsys, *words)


def test_merge_into_a_file_and_a_pipeline(capsys, lora, tmp_path):
    model = wan_model(tmp_path / "m.safetensors")
    out = tmp_path / "out.safetensors"
    found = run_json(capsys, "merge", lora, "--into", model, "-o", out)
    assert found["parts"]["m.safetensors"]["changed"] == 20
    layer = read_adapter(lora, TABLES).layers[LayerPath(None, "blocks.0.attn1.to_q")]
    key = "blocks.0.attn1.to_q.weight"
    torch.testing.assert_close(load_file(out)[key], load_file(model)[key] + delta(layer))

    pipeline = tmp_path / "pipe"
    for name in ("transformer", "transformer_2"):
        wan_model(pipeline / name / "m.safetensors")
    (pipeline / "model_index.json").write_text("{}")
    text = run(capsys, "merge", lora, "--into", pipeline, "-o", tmp_path / "merged")
    assert "transformer: 20 modules changed" in text
    low = load_file(tmp_path / "merged" / "transformer_2" / "m.safetensors")
    assert torch.equal(low[key], load_file(model)[key])
    plain = write_adapter(tmp_path / "plain.safetensors", make_wan(), "comfyui")
    words = ["merge", plain, "--into", pipeline, "-o", tmp_path / "x"]
    assert "two experts" in _error(capsys, *words)
    assert "transformer_2: 20" in run(capsys, *words, "--stage", "low")


def test_merge_does_not_overwrite_folders(capsys, lora, tmp_path):
    pipeline = tmp_path / "pipeline"
    wan_model(pipeline / "transformer" / "m.safetensors")
    dear = tmp_path / "dear"
    dear.mkdir()
    (dear / "notes.txt").write_text("keep me")
    for out, reason in (
        (dear, "would be overwritten"),
        (dear / "notes.txt", "would be overwritten"),
        (pipeline, "is read while the result is written"),
        (pipeline / "merged", "is read while the result is written"),
    ):
        assert reason in _error(capsys, "merge", lora, "--into", pipeline, "-o", out)
    assert (dear / "notes.txt").read_text() == "keep me"
    (tmp_path / "empty").mkdir()
    run(capsys, "merge", lora, "--into", pipeline, "-o", tmp_path / "empty")
    assert (tmp_path / "empty" / "transformer" / "m.safetensors").is_file()


def test_existing_files_are_not_overwritten(capsys, lora, tmp_path):
    model, dear = wan_model(tmp_path / "m.safetensors"), tmp_path / "dear.safetensors"
    dear.write_text("keep me")
    before = lora.read_bytes()
    for words in (
        ("convert", lora, "--to", "diffusers", "-o", lora),
        ("convert", lora, "--to", "diffusers", "-o", dear),
        ("merge", lora, lora, "-o", dear),
        ("merge", lora, "--into", model, "-o", dear),
        ("extract", model, model, "--rank", "2", "--family", "wan", "-o", dear),
    ):
        assert "already exists and would be overwritten" in _error(capsys, *words)
    assert dear.read_text() == "keep me"
    assert lora.read_bytes() == before
    run(capsys, "convert", lora, "--to", "kohya")
    assert "would be overwritten" in _error(capsys, "convert", lora, "--to", "kohya")


def test_a_file_that_tools_would_not_read_as_safetensors_is_refused(capsys, lora, tmp_path):
    words = ("convert", lora, "--to", "diffusers", "-o")
    for name in ("mine.pt", "mine"):
        assert "mine.safetensors." in _error(capsys, *words, tmp_path / name)
        assert not (tmp_path / name).exists()
    run(capsys, *words, tmp_path / "mine.sft")


def test_errors_are_printed_as_json(capsys, lora, tmp_path):
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(lora.read_bytes()[:1000])
    for words in (("inspect", torn), ("convert", torn, "--to", "diffusers")):
        found = json.loads(run(capsys, *words, "--json", code=2))
        assert (found["ok"], found["kind"]) == (False, "truncated")


def test_a_format_whose_keys_could_not_be_parsed_again_is_refused(capsys, tmp_path):
    (layer, *_) = make_wan().layers.values()
    layers = {LayerPath(None, "context_embedder"): layer}
    path = tmp_path / "a.safetensors"
    write_adapter(path, Adapter(any_name_table("other"), layers), "diffusers")
    for form in ("bare", "diffusers-both"):
        assert "do not show where the name of a module begins" in _error(
            capsys, "convert", path, "--to", form, "-o", tmp_path / "x.safetensors"
        )
    for form, name in (("peft", "folder"), ("simpletuner-comfyui", "b.safetensors")):
        out = tmp_path / name
        run(capsys, "convert", path, "--to", form, "-o", out)
        assert same(read_adapter(out, TABLES), read_adapter(path, TABLES))


def test_a_folder_as_output_file_is_refused(capsys, lora, tmp_path):
    model = wan_model(tmp_path / "m.safetensors")
    for words in (
        ("convert", lora, "--to", "diffusers"),
        ("merge", lora, lora),
        ("merge", lora, "--into", model),
        ("extract", model, model, "--rank", "2", "--family", "wan"),
    ):
        assert "is a folder. Give a file" in _error(capsys, *words, "-o", tmp_path)


def test_a_path_that_cannot_be_written_is_a_user_error(capsys, lora):
    inside = lora / "x.safetensors"  # below a file
    assert "cannot be read or written" in _error(
        capsys, "convert", lora, "--to", "diffusers", "-o", inside
    )
    assert "cannot be read or written" in _error(
        capsys, "inspect", lora, "--plot", lora / "plot.png"
    )


def test_a_strength_must_be_finite(capsys, lora, tmp_path):
    words = ["merge", lora, lora, "--strength", "nan", "--strength", "1", "-o", tmp_path / "m"]
    assert "must be a finite number" in _error(capsys, *words)


def test_extract_recovers_a_merged_adapter(capsys, lora, tmp_path):
    model = wan_model(tmp_path / "m.safetensors")
    tuned, out = tmp_path / "tuned.safetensors", tmp_path / "out.safetensors"
    run(capsys, "merge", lora, "--into", model, "-o", tuned)
    found = run_json(capsys, "extract", model, tuned, "--rank", "4", "--family", "wan", "-o", out)
    assert found["modules"] == 20
    assert found["lost"]["worst"] < 1e-2
    layers = read_adapter(lora, TABLES).layers
    for place, layer in read_adapter(out, TABLES).layers.items():
        torch.testing.assert_close(delta(layer), delta(layers[place]), rtol=1e-2, atol=1e-2)
    words = ["extract", model, tuned, "--rank", "4", "-o", tmp_path / "again.safetensors"]
    assert "needs --family" in _error(capsys, *words)
    changed = load_file(tuned) | {"blocks.0.norm2.weight": torch.ones(24)}
    save_file(changed, tuned)
    save_file(load_file(model) | {"blocks.0.norm2.weight": torch.zeros(24)}, model)
    text = run(capsys, *words, "--family", "wan", "--to", "kohya")
    assert "1 other weights differ and are left out, first blocks.0.norm2.weight" in text


def test_check_counts_modules_and_sets_the_exit_code(capsys, lora, tmp_path):
    (found,) = run_json(capsys, "check", lora)
    assert found["ok"]
    assert [(t["tool"], t["matched"]) for t in found["targets"]] == [
        ("diffusers", 20),
        ("comfyui", 20),
    ]
    text = run(capsys, "check", lora, "--expect", "400", code=1)
    assert "20 modules, but 400 are expected" in text
    assert "20 modules, but 19 are expected" in run(capsys, "check", lora, "--expect", "19", code=1)
    run(capsys, "check", lora, "--expect", "20")
    bare = write_adapter(tmp_path / "bare.safetensors", make_wan(), "bare")
    assert "does NOT load" in run(capsys, "check", bare, code=1)
    plain = write_adapter(tmp_path / "plain.safetensors", make_wan(), "diffusers")
    assert "(wan, diffusers, stage unknown)" in run(capsys, "check", plain)
    assert "stage      unknown" in run(capsys, "inspect", plain)
    run(capsys, "check", plain, "--stage", "low")
    run(capsys, "check", plain, "--for", "comfyui", code=1)


def test_check_reports_a_damaged_file_and_a_good_one(capsys, lora, tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(lora.read_bytes()[:-9])
    first, second = run_json(capsys, "check", broken, lora, code=2)
    assert (first["ok"], first["kind"]) == (False, "truncated")
    assert second["ok"]


def test_check_uses_the_config_of_a_model(capsys, lora, tmp_path):
    config = {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": 1,
        "attention_head_dim": 24,
        "ffn_dim": 48,
        "num_layers": 2,
        "text_dim": 8,
        "freq_dim": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(capsys, "check", lora, "--model", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": 1}))
    run(capsys, "check", lora, "--model", tmp_path / "config.json", "--for", "diffusers", code=1)
    (tmp_path / "config.json").write_text(json.dumps(config | {"surprise": 1}))
    assert "surprise" in run(capsys, "check", lora, "--model", tmp_path, code=2)
    assert "cannot be read" in _error(capsys, "check", lora, "--model", tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text("[1]")
    word = _error(capsys, "inspect", lora, "--plot", lora)
    assert "the heat map is a PNG" in word, "an adapter must not be overwritten"
    assert "is no model's configuration" in _error(capsys, "check", lora, "--model", tmp_path)


@pytest.mark.parametrize("make", [make_lora, make_lokr])
@pytest.mark.parametrize("family", ["flux", "qwen_image"])
def test_check_supports_other_families(capsys, family, make, tmp_path):
    generator = torch.Generator().manual_seed(0)
    kinds = {"proj_mlp": (48, 12), "net.0.proj": (48, 12), "net.2": (12, 48)}
    layers = {}
    for template in TABLES[family].block_linears:
        module = template.format(0)
        shape = next((s for end, s in kinds.items() if module.endswith(end)), (12, 12))
        shape = (12, 60) if module.endswith("blocks.0.proj_out") else shape
        layers[LayerPath(None, module)] = make(*shape, generator)
    adapter = Adapter(TABLES[family], layers)
    path = write_adapter(tmp_path / "a.safetensors", adapter, default_format(adapter))
    (found,) = run_json(capsys, "check", path, "--for", "diffusers", "--for", "comfyui")
    assert found["ok"]
    assert {t["matched"] for t in found["targets"]} == {len(layers)}


def test_check_explains_why_it_counts_more_modules_than_inspect(capsys, tmp_path):
    generator = torch.Generator().manual_seed(0)
    names = [f"transformer_blocks.0.attn.to_{part}" for part in ("q", "k", "v", "out.0")]
    layers = {LayerPath(None, name): make_lora(12, 12, generator) for name in names}
    path = write_adapter(tmp_path / "a.safetensors", Adapter(TABLES["flux"], layers), "kohya")
    assert run_json(capsys, "inspect", path)["num_modules"] == 2
    text = run(capsys, "check", path)
    assert f"{path}: loads (flux, kohya)" in text, "flux has no experts"
    assert "stage" not in run(capsys, "inspect", path)
    assert "diffusers: 4 of 4 modules" in text
    assert "the file has 2 modules; fused projections are counted here" in text


def test_check_reports_a_family_without_a_pipeline(capsys, tmp_path):
    layer = make_lora(4, 4, torch.Generator().manual_seed(0))
    adapter = Adapter(any_name_table("tiny"), {LayerPath(None, "a.b"): layer})
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    assert "no diffusers pipeline loads adapters of this family" in run(
        capsys, "check", path, code=1
    )
    run(capsys, "check", path, "--for", "diffusers", code=1)
    assert run_json(capsys, "inspect", path)["family"] == "tiny"


def test_peft_files_are_written_to_a_folder(capsys, lora, tmp_path):
    from peft import PeftConfig

    written = run_json(capsys, "convert", lora, "--to", "peft")["files"]
    folder = lora.with_name(f"{lora.stem}-peft")
    assert written == [str(folder / "adapter_model.safetensors")]
    assert PeftConfig.from_pretrained(folder).r == 4
    assert run_json(capsys, "inspect", folder)["alphas"] == {"4": 20}
    assert "already exists" in _error(capsys, "convert", lora, "--to", "peft")
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_config.json already exists" in _error(capsys, "convert", lora, "--to", "peft")
    merged = tmp_path / "merged" / "adapter_model.safetensors"
    run(capsys, "merge", lora, lora, "--to", "peft", "-o", merged)
    assert PeftConfig.from_pretrained(merged.parent).r == 8
    assert "PeftModel.from_pretrained loads a folder" in _error(
        capsys, "convert", lora, "--to", "peft", "-o", tmp_path / "x.safetensors"
    )


def test_both_experts_become_two_peft_folders(capsys, tmp_path):
    both = write_adapter(
        tmp_path / "both.safetensors", make_wan(stages=("high", "low")), "ai-toolkit-combined"
    )
    for out in (tmp_path / "peft", tmp_path / "named" / "adapter_model.safetensors"):
        files = run_json(capsys, "convert", both, "--to", "peft", "-o", out)["files"]
        folder = out.parent if out.suffix else out
        assert [Path(file).parent.name for file in files] == [
            f"{folder.name}_high_noise",
            f"{folder.name}_low_noise",
        ]
        assert all(Path(file).with_name("adapter_config.json").is_file() for file in files)


def test_a_dora_is_refused_for_comfyui_and_wrong_there(capsys, tmp_path):
    generator = torch.Generator().manual_seed(0)
    place = LayerPath(None, "transformer_blocks.0.attn.to_q")
    adapter = Adapter(TABLES["qwen_image"], {place: make_lora(8, 8, generator, dora=True)})
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    assert "does NOT load right" in run(capsys, "check", path, "--for", "comfyui", code=1)
    assert "does NOT load right" in run(capsys, "check", path, code=1)
    assert "loads" in run(capsys, "check", path, "--for", "diffusers")
    for form in ("comfyui", "kohya", "onetrainer", "simpletuner-comfyui"):
        message = _error(capsys, "convert", path, "--to", form)
        assert "DoRA" in message
        assert "--into" in message
