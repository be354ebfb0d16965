"""`gracetune plan`, from the run file to the exit code."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gracetune.cli import plan
from gracetune.cli.main import main
from gracetune.config.schema import OptimizerSection, PlanSection, RunFile
from gracetune.errors import ConfigError
from gracetune.memory.platform import Machine
from gracetune.models import tiny
from gracetune.models.family import SampleShape
from gracetune.optim.build import state_nbytes_per_element
from gracetune.optim.registry import optimizer_info
from gracetune.plan.machines import MACHINES, machine_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.search import PlanBudget
from gracetune.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

RUN = {
    "adapter": {"rank": 4, "targets": ["attn.to_q"]},
    "datasets": [{"type": "shapes", "shapes": {"size": 24}}],
    "train": {"batch_size": 4},
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run file of the tiny family with a single layer, so that there is one kind of block."""
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    config = {**tiny.CONFIG, "num_layers": 1, "_class_name": "SD3Transformer2DModel"}
    (folder / "config.json").write_text(json.dumps(config))
    file = tmp_path / "run.json"
    model = {"family": "tiny", "path": str(folder.parent)}
    file.write_text(json.dumps({**RUN, "model": model}))
    return file


def arguments(file: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args([str(file), *words])


def test_a_plan_for_a_known_machine_is_printed_as_simulated(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run_file), "--machine", "gh200-96", "--hbm", "1GB"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("tiny (as in ")
    assert "24x24 a sample, on GH200, 96 GB" in output
    assert "simulated from published figures" in output
    assert "within 953.7 MiB of device memory" in output
    assert "batch 4" in output
    assert "pass --samples" in output


def test_json_output_has_the_plan_its_budget_and_notes(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "h200-pcie", "--json", "--samples", "10", "--host-memory", "8GB"]
    assert main(["plan", str(run_file), *words, "--set", "plan.compile=never"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["compiled"] is False
    assert report["budget"]["host_nbytes"] == 8 * 10**9
    assert report["plan"]["device"]["weights"] > 0
    assert report["notes"] == []


def test_a_budget_that_is_too_small_exits_with_2(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run_file), "--machine", "gh200-96", "--hbm", "1MB"]) == 2
    assert "it needs at least" in capsys.readouterr().err


def test_without_a_gpu_a_machine_must_be_named(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = Machine(None, MACHINES["gh200-96"].platform())
    reasons = {"link": "there is none. Install one, or run without a GPU."}
    gone = Machine(None, _replace(without.platform, device=-1, reasons=reasons))
    with pytest.raises(
        ConfigError, match=r"no GPU to plan for: there is none\. Choose a machine.*gh200-96"
    ):
        plan.plan(arguments(run_file), lambda: gone, lambda *_: machine_rates(MACHINES["gb10"]))


def test_this_machine_is_measured_and_not_simulated(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Machine(None, MACHINES["h200-pcie"].platform())
    measurements: list[tuple[int, str]] = []

    def measured(device: int, family: str) -> Any:
        measurements.append((device, family))
        return machine_rates(MACHINES["h200-pcie"])

    assert plan.plan(arguments(run_file), lambda: here, measured) == 0
    assert measurements == [(0, "tiny")]
    output = capsys.readouterr().out
    assert "on this machine (139.0 GiB GPU), measured now" in output
    assert "simulated" not in output


def test_budgets_are_limited_to_the_memory_of_the_machine(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "gh200-96", "--json", "--set", "plan.compile=never"]
    over = ["--hbm", "960GB", "--set", "plan.host_memory=2TB"]
    assert main(["plan", str(run_file), *words, *over]) == 0
    report = json.loads(capsys.readouterr().out)
    known = MACHINES["gh200-96"]
    assert report["budget"]["device_nbytes"] < known.device_memory.value
    assert report["budget"]["host_nbytes"] == known.host_bytes
    first, second = report["notes"][:2]
    assert first == "--hbm is 960GB, more than the machine has; planning with 94.3 GiB"
    assert second.startswith("plan.host_memory is 2TB, more than")


def test_host_memory_may_exceed_an_assumed_size(run_file: Path) -> None:
    machine = plan._machine(arguments(run_file, "--machine", "h100-pcie"), _never, _never, "tiny")
    more = arguments(run_file, "--host-memory", "2TB", "--hbm", "96GB")
    budget, (note,) = plan._budget(more, PlanSection(), machine)
    assert budget.host_nbytes == 2 * 10**12
    assert budget.device_nbytes < MACHINES["h100-pcie"].device_memory.value
    assert note.startswith("--hbm is 96GB")
    less = PlanSection(device_memory="1GB", host_memory="2GB")
    budget, notes = plan._budget(arguments(run_file), less, machine)
    assert (budget.device_nbytes, budget.host_nbytes, notes) == (10**9, 2 * 10**9, ())


def test_the_gpus_of_a_machine_share_its_host_memory(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "h100-pcie", "--gpus", "4", "--samples", "1000", "--hbm", "1GB"]
    assert main(["plan", str(run_file), *words, "--json", "--set", "plan.compile=never"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["budget"]["ranks"] == 4
    assert report["machine"] == "4 x H100 80 GB on a PCIe 5 host"
    assert report["notes"][0].startswith("only the memory is limited to 953.7 MiB: the speed is")
    assert report["notes"][1:] == [
        "speed and memory are those of one GPU, unless the line says otherwise"
    ]
    host = report["plan"]["host"]
    rest = report["plan"]["host_total"] - host["weights"]
    assert rest == host["caches"] > 0
    assert report["plan"]["machine_host_total"] == host["weights"] + 4 * rest


def test_each_gpu_of_a_superchip_has_its_own_host_memory(run_file: Path) -> None:
    for name, factor in {"gh200-96": 2, "h100-pcie": 1}.items():
        options = arguments(run_file, "--machine", name, "--gpus", "2")
        machine = plan._machine(options, _never, _never, "tiny")
        assert machine.host_nbytes == factor * MACHINES[name].host_bytes


@pytest.mark.parametrize("words", [["--machine", "gb10"], []])
def test_a_machine_with_one_memory_has_one_gpu(run_file: Path, words: list[str]) -> None:
    here = Machine(None, MACHINES["gb10"].platform())
    with pytest.raises(ConfigError, match="--gpus is 2, but a machine whose CPU and GPU share"):
        plan._machine(arguments(run_file, *words, "--gpus", "2"), lambda: here, _never, "tiny")


@pytest.mark.parametrize("simulated", [True, False])
def test_memory_shared_by_host_and_device_is_counted_once(
    run_file: Path, capsys: pytest.CaptureFixture[str], simulated: bool
) -> None:
    here = Machine(None, MACHINES["gb10"].platform())
    words = ["--machine", "gb10"] if simulated else []
    state = ["--json", "--set", "optimizer.state=host", "--set", "plan.compile=never"]
    options = arguments(run_file, *words, "--samples", "1000", *state)
    assert plan.plan(options, lambda: here, lambda *_: machine_rates(MACHINES["gb10"])) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["budget"]["one_memory"] is True
    assert report["reasons"][0].startswith("host and device share one memory")
    assert any("optimizer.state: host has no effect" in note for note in report["notes"])
    for each in (report["plan"], *report["others"]):
        assert {block["weights"] for block in each["blocks"]} == {"resident"}
        assert not any(block["offload_input"] for block in each["blocks"])
        assert each["host_state"] == 0.0
        assert each["host_total"] == each["host"]["caches"] > 0
        both = each["device_total"] + each["host_total"]
        assert both <= report["budget"]["device_nbytes"]


def test_staged_files_are_counted_as_host_caches(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x" * 1000)
    here = {"instance_data_dir": str(tmp_path)}

    def nbytes(**settings: Any) -> int:
        return plan.staged_nbytes(RunFile.model_validate({"datasets": [{**here, **settings}]}))

    assert nbytes(type="in_memory") == 1000
    assert nbytes(type="local") == 0
    assert nbytes(type="in_memory", instance_data_dir=str(tmp_path / "gone")) == 0
    with_staged = plan._with_staged_files(
        FixedMemory(1, host_caches_nbytes=5),
        RunFile.model_validate({"datasets": [{**here, "type": "in_memory"}]}),
    )
    assert with_staged.host_caches_nbytes == 1005


def test_the_plan_is_for_the_batch_of_the_run_file(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "h200-pcie", "--json", "--set", "plan.compile=never"]
    split = ["--set", "train.batch_size=1", "--set", "train.gradient_accumulation_steps=4"]
    assert main(["plan", str(run_file), *words, *split]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["batch"] == 1
    assert report["faster"]["plan"]["batch"] == 4
    faster = report["faster"]["plan"]["samples_per_second"]
    assert faster > report["plan"]["samples_per_second"]
    assert report["faster"]["set"] == {
        "train.batch_size": 4,
        "train.gradient_accumulation_steps": 1,
    }


@pytest.mark.parametrize("samples", ["-3", "0", "many", "1.5"])
def test_samples_must_be_a_positive_integer(
    run_file: Path, capsys: pytest.CaptureFixture[str], samples: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(run_file), f"--samples={samples}"])
    assert caught.value.code == 2
    assert f"'{samples}' is not a number of samples; pass 1 or more" in capsys.readouterr().err


def test_the_smallest_budget_named_by_the_error_gives_a_plan(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(run_file), "--machine", "gh200-96", "--set", "plan.compile=never"]
    assert main([*words, "--hbm", "0"]) == 2
    least = capsys.readouterr().err.partition("at least ")[2].partition(" (")[0]
    assert main([*words, "--hbm", least]) == 0


def test_an_unknown_machine_lists_the_known_ones(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run_file), "--machine", "h300"]) == 2
    assert "gh200-96" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "nbytes"), [("adamw", 8.0), ("lion", 4.0)])
def test_state_bytes_per_element_are_measured_on_the_optimizer(name: str, nbytes: float) -> None:
    each = state_nbytes_per_element(OptimizerSection(name=name))
    assert each == pytest.approx(nbytes, abs=0.01)


@pytest.mark.parametrize("name", ["lion", "prodigy", "schedule_free"])
def test_known_state_bytes_of_optional_packages_are_those_of_the_optimizer(name: str) -> None:
    each = state_nbytes_per_element(OptimizerSection(name=name))
    assert optimizer_info(name).package_state_nbytes == pytest.approx(each, abs=0.01)


def test_a_run_is_planned_without_the_package_of_its_optimizer(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    words = ["--machine", "h200-pcie", "--samples", "10", "--set", "plan.compile=never"]
    assert main(["plan", str(run_file), *words, "--set", "optimizer.name=adamw_8bit"]) == 0
    output = capsys.readouterr().out
    assert "the package of optimizer.name adamw_8bit is not installed; training needs it" in output


def test_a_limit_of_memory_does_not_change_the_speed_and_the_plan_says_so(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "h200-pcie", "--set", "plan.compile=never", "--hbm", "24GB"]
    assert main(["plan", str(run_file), *words]) == 0
    assert "the speed is that of the whole " in capsys.readouterr().out


def test_a_missing_single_file_is_planned_by_the_published_shapes(tmp_path: Path) -> None:
    model = {"family": "sdxl", "path": str(tmp_path / "merge.safetensors")}
    found = plan.find_config(RunFile.model_validate({"model": model}))
    assert found.folder is None
    instead, why = found.substitution
    assert instead.startswith("this plan is for the published SDXL, 2.6 B, because the files of ")
    assert why.endswith("merge.safetensors', but there is no such file; training needs it")


@pytest.mark.parametrize(
    ("dtype", "each"), [("float32", (4, 8)), ("auto", (4, 8)), ("bfloat16", (2, 12))]
)
def test_full_training_has_optimizer_state_for_every_weight(
    dtype: str, each: tuple[int, int]
) -> None:
    """fp32 weights, or bf16 weights with fp32 master weights in the optimizer state."""
    run = RunFile.model_validate({"model": {"family": "wan22", "dtype": dtype}})
    shape = build_meta_model(
        run.model, SampleShape(64, 64), {"num_layers": 1, "num_attention_heads": 2}
    )
    trained, _ = plan._trained_size(run, shape)
    count = sum(p.numel() for p in shape.model.parameters())
    assert all(p.requires_grad for p in shape.model.parameters())
    found = trained.nbytes / count, trained.state_nbytes / count
    assert found == pytest.approx(each, rel=1e-3)


def test_quantized_weights_are_planned_as_they_are_stored(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(kind: str) -> dict[str, Any]:
        words = ["--machine", "gh200-96", "--json", "--set", f"model.quantize={kind}"]
        assert main(["plan", str(run_file), *words, "--set", "plan.compile=never"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found["plan"]

    plans = {kind: planned(kind) for kind in ("none", "int8", "nf4")}
    weights = {kind: found["device"]["weights"] for kind, found in plans.items()}
    assert weights["nf4"] < weights["int8"] < weights["none"]
    seconds = {kind: found["seconds"]["elementwise"] for kind, found in plans.items()}
    assert seconds["int8"] > seconds["none"], "weights are dequantized"
    whole = json.loads(run_file.read_text()) | {"adapter": None}
    run_file.write_text(json.dumps(whole))
    words = ["--machine", "gh200-96", "--set", "model.quantize=int8"]
    assert main(["plan", str(run_file), *words]) == 2
    assert "without an adapter every weight is trained" in capsys.readouterr().err


def test_samples_are_counted_without_their_captions(tmp_path: Path) -> None:
    for name in ("a.png", "a.txt", "b.jpg", "metadata.jsonl"):
        (tmp_path / name).write_text("x")
    here = {"instance_data_dir": str(tmp_path), "variants": 2}
    assert plan.count_samples(RunFile.model_validate({"datasets": [here]})) == 4
    gone = {"instance_data_dir": str(tmp_path / "gone")}
    assert plan.count_samples(RunFile.model_validate({"datasets": [here, gone]})) is None


def test_a_single_file_is_planned_as_the_published_model_that_it_belongs_to(tmp_path: Path) -> None:
    """Also if the configuration of that model is not here."""
    from safetensors.torch import save_file

    names = ("head.modulation", "patch_embedding.weight")
    weights = dict.fromkeys(names, torch.zeros(1)) | {names[1]: torch.zeros(1536, 16, 1, 2, 2)}
    save_file(weights, tmp_path / "small.safetensors")
    model = {"family": "wan22", "path": str(tmp_path / "small.safetensors")}
    found = plan.find_config(RunFile.model_validate({"model": model}))
    assert found.section.path == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    assert not found.substitution


def test_a_folder_without_a_configuration_is_planned_by_the_published_shapes(
    tmp_path: Path,
) -> None:
    model = {"family": "sdxl", "path": str(tmp_path)}
    instead, why = plan.find_config(RunFile.model_validate({"model": model})).substitution
    assert instead.startswith("this plan is for the published SDXL, 2.6 B, because the files of ")
    assert why == f"there is no {tmp_path / 'unet' / 'config.json'}; training needs it"


def plan_wan(tmp_path: Path, path: str, *words: str) -> int:
    """Plan a LoRA of a Wan model at 64x64 pixels, eager, for an H200."""
    run = {"model": {"family": "wan22", "path": path}, "plan": {"compile": "never"}}
    dataset = {"id": "d", "instance_data_dir": str(tmp_path), "resolution": 64}
    file = tmp_path / "wan.json"
    file.write_text(json.dumps({**run, "adapter": {"rank": 4}, "datasets": [dataset]}))
    return main(["plan", str(file), "--machine", "h200-pcie", *words])


def test_a_known_model_that_is_not_here_is_planned_by_its_own_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {}
    for name in ("Wan2.1-T2V-1.3B", "Wan2.2-TI2V-5B", "Wan2.2-T2V-A14B"):
        path = f"Wan-AI/{name}-Diffusers"
        assert plan_wan(tmp_path, path, "--json") == 0
        printed = capsys.readouterr()
        report = json.loads(printed.out)
        weights[name] = report["plan"]["device"]["weights"] / 1e9
        assert any(note.startswith(f"{path} is planned as it") for note in report["notes"])
        assert "this plan is for" not in printed.err
    # Two bytes for each weight; the last model has two transformers.
    assert list(weights.values()) == pytest.approx([2 * 1.42, 2 * 5.0, 2 * 2 * 14.29], rel=0.01)


def test_a_plan_for_another_model_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instead = "this plan is for the published A14B, with two experts of 14 B, because the files of "
    first = f"note: {instead}me/my-wan are not here\n"
    assert plan_wan(tmp_path, "me/my-wan") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{first}note: model.path is 'me/my-wan', which is neither a folder")
    assert text.count(instead) == text.count("which is neither a folder") == 1

    assert plan_wan(tmp_path, "me/my-wan", "--hbm", "24GB", "--host-memory", "16GB") == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(first)
    assert "too little for wan22" in printed.err

    too_small = ("--json", "--hbm", "24GB", "--host-memory", "16GB")
    assert plan_wan(tmp_path, "me/my-wan", *too_small) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(first)
    assert "too little for wan22" in printed.err.removeprefix(first)


def _never(*_: object) -> Any:
    raise AssertionError("a known machine must not be detected or measured")


def _replace(platform: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(platform, **changes)


@pytest.mark.parametrize(
    ("environment", "settings", "share"),
    [
        ("use_uvm:True", {}, 0.9),
        ("use_uvm:True,uvm_stage1_threshold:0.2", {}, 0.8),
        ("use_uvm:True", {"managed": "off"}, 1.0),
        ("", {}, 1.0),
    ],
)
def test_with_managed_memory_plans_leave_the_threshold_of_stage_2_free(
    monkeypatch: pytest.MonkeyPatch, environment: str, settings: dict[str, str], share: float
) -> None:
    """Or a run that is as planned would have its caches reclaimed."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment)
    known = MACHINES["gh200-96"]
    device = int(known.device_memory.value)
    machine = plan.PlanMachine(
        *("", machine_rates(known), device, known.host_bytes, True, False),
        link=known.link,
    )
    run = RunFile.model_validate({"gh200_optimizations": settings})
    found = plan._with_managed(run, machine, PlanBudget(device, known.host_bytes))
    assert found.device_nbytes == pytest.approx(share * device, rel=1e-9)
    assert (found.managed_nbytes > 0) == (share < 1)


def test_the_limit_of_managed_memory_is_that_of_a_ranks_host_memory() -> None:
    known = MACHINES["gh200-96"]
    machine = plan.PlanMachine(
        *("", machine_rates(known), 96 * GIB, 480 * GIB, True, False), link=known.link, ranks=4
    )
    run = RunFile.model_validate(
        {"gh200_optimizations": {"use_uvm": True, "managed_memory": "900GB"}}
    )
    found = plan._with_managed(run, machine, PlanBudget(96 * GIB, 480 * GIB))
    assert found.managed_nbytes == (480 // 4 - 4) * GIB


@pytest.mark.parametrize(
    ("environment", "access", "named"),
    [
        ("use_uvm:True", "prefetch", "managed_access: prefetch"),
        ("use_uvm:True,uvm_access_pattern:gpu_first", "auto", "uvm_access_pattern: gpu_first"),
        ("use_uvm:True,uvm_access_pattern:gpu_first", "in_place", "read weights over the link"),
        ("use_uvm:True", "auto", ""),
    ],
)
def test_a_note_names_an_access_whose_time_is_not_predicted(
    monkeypatch: pytest.MonkeyPatch, environment: str, access: str, named: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment)
    settings = {"managed": ["weights", "ema"], "managed_access": access}
    run = RunFile.model_validate({"gh200_optimizations": settings})
    budget = PlanBudget(96 * GIB, 480 * GIB, managed_nbytes=GIB)
    notes = [text for text in plan._notes(run, 1, "", budget) if "managed_access" in text]
    assert len(notes) == bool(named)
    assert all(named in note for note in notes)
    assert not plan._notes(run, 1, "", PlanBudget(96 * GIB, 480 * GIB))


def test_weights_are_prefetched_by_default_so_that_asking_for_it_needs_no_note() -> None:
    settings = {"managed": ["weights", "gradients"], "managed_access": "prefetch"}
    run = RunFile.model_validate({"gh200_optimizations": settings})
    budget = PlanBudget(96 * GIB, 480 * GIB, managed_nbytes=GIB)
    assert not plan._notes(run, 1, "", budget)
