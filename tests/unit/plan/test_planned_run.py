"""Runs in little device memory, rehearsed on the CPU, have the losses of plain runs."""

import itertools
import threading
from contextlib import closing
from dataclasses import asdict, replace

import pytest
import torch
from fakes.family_sessions import FAMILIES, family_run
from fakes.miniatures import MINIATURES
from functorch.compile import make_boxed_func
from peft.tuners.lora import Linear as LoraLinear
from PIL import Image
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException

from gracetune.adapters.compute.fp8_linear import Fp8Linear
from gracetune.adapters.compute.fused_lora import FusedLora
from gracetune.config.checks import check_run
from gracetune.config.schema import PlanSection, RunFile
from gracetune.data.pipeline import DataPipeline
from gracetune.errors import ConfigError, GracetuneError
from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice, RunDescribed, StepDone, WeightsStreamed
from gracetune.models import pipeline_folder
from gracetune.models.family import load_family
from gracetune.offload.checkpointing import BlockCompiler
from gracetune.plan import apply as apply_module
from gracetune.plan import planner
from gracetune.plan.machines import TYPICAL_LAUNCH_COSTS
from gracetune.plan.planner_input import PlanProblem
from gracetune.train import fp8_calibration, objective
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.prepare_model import idle_plan_notice, reason_unplanned, unplanned_notice
from gracetune.train.run import SignalHandler, run_training
from gracetune.units import MIB

LITTLE = {"device_memory": "63MB", "compile": "never"}
"""Less than the tiny model needs without streaming."""
CPU = torch.device("cpu")


def test_a_streamed_run_has_the_losses_of_a_resident_one(tiny_run, tmp_path, recorder):
    def losses(name, plan):
        recorder.events.clear()
        folder = str(tmp_path / name)
        settings = {"max_train_steps": 4, "batch_size": 2, "gradient_checkpointing": True}
        run = tiny_run(output_dir=folder, adapter={"rank": 4}, train=settings, plan=plan)
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    plain = losses("plain", "off")
    planned = losses("planned", LITTLE)
    texts = "\n".join(recorder.texts())
    assert "blocks streamed" in texts
    assert "\nplan: expect " in texts
    assert "gradient_checkpointing has no effect: the plan decides for each block" in texts
    assert planned == pytest.approx(plain, rel=1e-4)


def open_session(run, recorder, tmp_path):
    accelerator = start_accelerator(run)
    return build_session(run, accelerator, recorder, RunControl(tmp_path), SignalHandler())


def test_weights_are_hashed_while_the_data_are_prepared(tiny_run, recorder, tmp_path, monkeypatch):
    has_data, hash_tensors = threading.Event(), pipeline_folder.digest_of_tensors

    def hash_late(tensors):
        assert has_data.wait(60), "the data were not prepared while the weights were hashed"
        return hash_tensors(tensors)

    def prepare(pipeline, *args):
        create(pipeline, *args)
        has_data.set()

    create = DataPipeline.__init__
    run = tiny_run(adapter={"rank": 2}, plan=LITTLE)
    expected = load_family(run.model).weights_hasher()()
    monkeypatch.setattr(pipeline_folder, "digest_of_tensors", hash_late)
    monkeypatch.setattr(DataPipeline, "__init__", prepare)
    with closing(open_session(run, recorder, tmp_path)) as session:
        assert session.base_weights == expected


@pytest.mark.parametrize("plan", [LITTLE, "off"])
def test_an_error_while_hashing_ends_the_start(tiny_run, recorder, tmp_path, monkeypatch, plan):
    def fail(_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(pipeline_folder, "digest_of_tensors", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        open_session(tiny_run(adapter={"rank": 2}, plan=plan), recorder, tmp_path)


@pytest.fixture
def quantized_losses(tiny_run, tmp_path, recorder, monkeypatch):
    """Return a function that trains in int8, and returns the losses and notices.

    Its plan, if there is one, keeps all weights resident or streams them all. The planner itself
    would not stream a model of this size.
    """
    solve = PlanProblem.solve

    def train(name, adapter, weights):
        def solve_with(problem, budget):
            plan = solve(problem, budget)
            blocks = tuple(replace(block, weights=weights) for block in plan.blocks)
            return replace(plan, blocks=blocks, slots=2)

        monkeypatch.setattr(PlanProblem, "solve", solve_with)
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / name),
            model={"quantize": "int8"},
            adapter=adapter,
            plan="off" if weights is None else {"device_memory": "1GB", "compile": "never"},
            train={"max_train_steps": 3, "batch_size": 2},
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)], "\n".join(recorder.texts())

    return train


def test_quantized_weights_stream_without_changing_the_losses(quantized_losses):
    resident, texts = quantized_losses("resident", {"rank": 4}, "resident")
    assert "all weights resident" in texts
    streamed, texts = quantized_losses("streamed", {"rank": 4}, "streamed")
    assert "53 linear layers of the frozen model are quantized to int8" in texts
    assert "4 of 4 blocks streamed" in texts
    assert "gradients: block " in texts, "the first step compares a block"
    assert streamed == resident, "bit for bit"
    plain, texts = quantized_losses("plain", {"rank": 4}, None)
    assert "plan: batch" not in texts
    assert plain == pytest.approx(resident, rel=1e-4), "a fused LoRA is rounded otherwise"


def test_a_planned_quantized_run_without_a_fused_lora_equals_an_unplanned_one(quantized_losses):
    adapter = {"kind": "loha", "rank": 4}
    streamed, texts = quantized_losses("streamed", adapter, "streamed")
    assert "4 of 4 blocks streamed" in texts
    assert streamed == quantized_losses("plain", adapter, None)[0], "bit for bit"


def test_a_corrected_plan_does_not_change_the_losses(tiny_run, tmp_path, recorder, monkeypatch):
    """The meter reports a lower peak than planned, so the corrected plan uses more memory."""

    class FakeMeter(planner.NullMemoryMeter):
        def peak_nbytes(self):
            return 30 * MIB

    def losses(name, memory):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / name),
            adapter={"rank": 4},
            train={"max_train_steps": 11, "batch_size": 8},
            plan={"device_memory": memory, "compile": "never", "offload": False},
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    plenty = losses("plenty", "1GB")
    assert not any("plan corrected after the first steps" in text for text in recorder.texts())
    monkeypatch.setattr(planner, "NullMemoryMeter", FakeMeter)
    assert losses("corrected", "68MB") == plenty, "bit for bit"
    texts = recorder.texts()
    assert "recomputed" in next(text for text in texts if text.startswith("plan:"))
    (corrected,) = [
        text for text in texts if text.startswith("plan corrected after the first steps")
    ]
    assert "the first plan would give" in corrected
    measured = [text for text in texts if text.startswith("measured:")]
    assert len(measured) == 2, "before and after"
    assert texts.index(measured[0]) < texts.index(corrected) < texts.index(measured[1])


def test_a_run_that_cannot_compile_continues_with_an_eager_plan(
    tiny_run, tmp_path, recorder, monkeypatch
):
    def train(name, plan):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / name),
            adapter={"rank": 4},
            train={"max_train_steps": 4, "batch_size": 2},
            plan=plan,
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    def broken(*_, **__):
        raise TorchDynamoException("no compiler here")

    expected = train("plain", "off")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    losses = train("planned", {"device_memory": "1GB", "compile": "always"})
    assert losses == pytest.approx(expected, rel=1e-3)
    texts = [event.text for event in recorder.of(Notice) if event.fallback]
    assert [text.split(":")[0] for text in texts] == [
        "compilation failed, so blocks run eagerly from now on, which is slower",
        "the run is planned again without compilation",
    ]


def eager_compiler(backend="aot_eager"):
    """Return a BlockCompiler that needs no C++ compiler."""
    return lambda emit, _, **settings: BlockCompiler(emit, backend, **settings)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_step_in_which_a_compiled_block_fails_is_repeated_eagerly(
    tiny_run, tmp_path, recorder, monkeypatch, fails_in
):
    """It fails in the second micro-batch of the second step, which has dropout."""
    calls = itertools.count()
    num_blocks, failing = 2, 3  # the fourth micro-batch

    def losses(name, plan):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / name),
            adapter={"rank": 4, "dropout": 0.5},
            train={"max_train_steps": 3, "batch_size": 2, "gradient_accumulation_steps": 2},
            plan=plan,
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    def compiled_by(direction):
        def compile_graph(graph, _inputs):
            @make_boxed_func
            def run(*values):
                if direction == fails_in and next(calls) == failing * num_blocks:
                    raise RuntimeError("out of resource: shared memory")
                return graph(*values)

            return run

        return compile_graph

    backend = aot_autograd(fw_compiler=compiled_by("forward"), bw_compiler=compiled_by("backward"))
    monkeypatch.setattr(apply_module, "BlockCompiler", eager_compiler(backend))
    expected = losses("plain", "off")
    found = losses("planned", {"device_memory": "1GB", "compile": "always"})
    assert next(calls) > failing * num_blocks, "it failed"
    assert found == pytest.approx(expected, rel=1e-3)
    failed, planned = [event.text for event in recorder.of(Notice) if event.fallback]
    assert failed.startswith(
        "a compiled block failed, so blocks run eagerly from now on, which is slower: "
        "RuntimeError: out of resource"
    )
    assert planned.startswith("the run is planned again without compilation")


@pytest.mark.filterwarnings("default")
def test_a_resumed_run_does_not_repeat_a_failed_compilation(tiny_run, recorder, monkeypatch):
    """It would fail again, and lose the time again, unless settings or torch have changed."""
    tried = []

    def refuse(*_):
        tried.append(True)
        raise RuntimeError("no compiler here")

    def texts_after(steps, compile="always"):
        recorder.events.clear()
        train = {"max_train_steps": steps, "checkpoint_every": 1}
        plan = {"device_memory": "1GB", "compile": compile}
        run_training(tiny_run(adapter={"rank": 4}, train=train, plan=plan), sinks=[recorder])
        assert [event.step for event in recorder.of(StepDone)][-1] == steps
        return [notice.text for notice in recorder.of(Notice) if notice.fallback]

    monkeypatch.setattr(apply_module, "BlockCompiler", eager_compiler(refuse))
    failed, replanned = texts_after(1)
    assert "no compiler here" in failed
    assert replanned.startswith("the run is planned again without compilation")
    attempts = len(tried)
    assert attempts > 0
    for steps in (2, 3):
        (text,) = texts_after(steps)
        assert text.startswith(
            "plan: blocks run eagerly, because compilation failed before the run was resumed "
            "(BackendCompilerFailed: "
        )
        assert text.endswith(
            "To try again, set plan.compile: auto, or use another version of torch"
        )
        assert "plan: the plan of the checkpoint is used again" in recorder.texts()
        assert len(tried) == attempts
    texts_after(4, "auto")
    assert any("It may be tried again now" in text for text in recorder.texts())
    assert "plan: the plan of the checkpoint is used again" not in recorder.texts()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "sizes", "graphs"),
    [
        ("z_image", 3, 2),
        ("sdxl", 1, 10),
        pytest.param("z_image", 1, 3, marks=pytest.mark.slow),
        pytest.param("sdxl", 3, 5, marks=pytest.mark.slow),
        pytest.param("sd15", 1, 14, marks=pytest.mark.slow),
        pytest.param("sd15", 3, 5, marks=pytest.mark.slow),
        pytest.param("flux", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_compiles_as_many_graphs_as_planned(
    tmp_path, recorder, monkeypatch, family, sizes, graphs
):
    """With one size of images, blocks of other lengths need graphs of their own."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(2 * sizes):
        size = [(128, 128), (192, 128), (128, 192)][number // 2]
        Image.new("RGB", size, (40 * number, 90, 160)).save(data / f"{number}.png")
        (data / f"{number}.txt").write_text("a red ring")
    run = family_run(
        tmp_path,
        FAMILIES[family],
        datasets=[{"instance_data_dir": str(data), "resolution": 128, "max_aspect": 2.0}],
        train={"max_train_steps": sizes, "batch_size": 2},
        plan={"device_memory": "100GB", "compile": "always"},
    )
    monkeypatch.setattr(apply_module, "BlockCompiler", eager_compiler("eager"))
    torch._dynamo.reset()
    run_training(run, sinks=[recorder])
    torch._dynamo.reset()
    (planned,) = [text for text in recorder.texts() if text.startswith("shapes: ")]
    assert f"; {graphs} graphs to compile" in planned
    compiled = [text for text in recorder.texts() if text.startswith("compile: graph ")]
    assert len(compiled) == graphs
    assert not [event.text for event in recorder.of(Notice) if "run eagerly" in event.text]


@pytest.mark.filterwarnings("default")
def test_an_error_outside_of_compiled_blocks_ends_the_run(tiny_run, monkeypatch, recorder):
    def broken(*_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(apply_module, "BlockCompiler", eager_compiler())
    monkeypatch.setattr(objective, "sample_losses", broken)
    plan = {"device_memory": "1GB", "compile": "always"}
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run_training(tiny_run(adapter={"rank": 4}, plan=plan), sinks=[recorder])
    assert not [event for event in recorder.of(Notice) if event.fallback]


def test_planning_starts_no_augmentation_epoch(tiny_run, tmp_path, recorder):
    """Otherwise a run resumed in its fifth epoch would replace the encoded images of that epoch."""
    run = tiny_run(
        adapter={"rank": 4},
        cache_config={"vae_cache_type": "disk"},
        plan={"device_memory": "1GB", "compile": "never"},
    )
    fresh = {"augmentations_cache_mode": "refresh_each_epoch", "crop": "random"}
    data = run.datasets[0].model_copy(update=fresh)
    run = run.model_copy(update={"datasets": (data,)})
    (tmp_path / "run").mkdir()
    built = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    built.pipeline.close()
    built.close()
    assert any(text.startswith("plan:") for text in recorder.texts())
    assert not (tmp_path / "run" / "generations").exists()


def test_a_planned_run_logs_the_launch_costs_of_its_plan(tiny_run, recorder):
    """Predictions of eager plans depend on them, and they differ between machines."""
    plan = {"device_memory": "1GB", "compile": "never"}
    run = tiny_run(adapter={"rank": 4}, train={"max_train_steps": 1}, plan=plan)
    run_training(run, sinks=[recorder])
    (described,) = recorder.of(RunDescribed)
    assert described.plan["launch_costs_s"] == asdict(TYPICAL_LAUNCH_COSTS), "assumed on a CPU"


def test_streaming_events_contain_their_cost(tiny_run, recorder):
    settings = {"max_train_steps": 3, "batch_size": 2, "checkpoint_every": 3}
    run_training(tiny_run(adapter={"rank": 4}, train=settings, plan=LITTLE), sinks=[recorder])
    (event,) = recorder.of(WeightsStreamed)
    assert event.step == 3
    assert event.slots >= 2
    assert event.fetches > 0
    assert event.nbytes > event.fetches
    assert event.waited_s > 0, "a CPU waits for every copy"


def test_too_little_memory_is_an_error_that_names_the_minimum(tiny_run):
    run = tiny_run(adapter={"rank": 4}, plan=LITTLE | {"device_memory": "1MB"})
    with pytest.raises(GracetuneError, match=r"too little for tiny: it needs at least"):
        run_training(run)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"plan": "off"}, "off"), ({}, "no GPU"), ({"plan": PlanSection()}, "no GPU")],
)
def test_an_unplanned_run_has_a_reason(settings, reason):
    assert reason in reason_unplanned(RunFile(**settings), CPU)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"plan": {"compile": "always"}}, ['plan.compile ("always")', "no GPU"]),
        ({"plan": {"stream": False, "batch": "fixed"}}, ["plan.stream (false)", "no GPU"]),
    ],
)
def test_plan_settings_without_effect_are_named_in_a_warning(settings, names):
    run = RunFile.model_validate(settings)
    notice = unplanned_notice(run, reason_unplanned(run, CPU))
    assert notice.fallback
    assert notice.level == "warning"
    assert all(name in notice.text for name in names), notice.text
    assert "plan.batch" not in notice.text, "only `gracetune plan` reads it"
    assert "nothing is streamed, offloaded or compiled" in notice.text


@pytest.mark.parametrize(
    ("settings", "is_sharded", "text"),
    [
        ({"plan": {"stream": True}}, False, "no effect: plan.stream (true), because all weights"),
        (
            *({"plan": {"stream": True, "offload": True}, "adapter": {}}, True),
            "no effect: plan.stream (true), plan.offload (true), because the ranks divide",
        ),
        ({"plan": {"stream": True, "offload": True}, "adapter": {}}, False, None),
        ({"plan": {"stream": False}}, True, None),
        ({"plan": "auto"}, True, None),
    ],
)
def test_what_a_plan_cannot_do_is_named(settings, is_sharded, text):
    notice = idle_plan_notice(RunFile.model_validate(settings), "", is_sharded=is_sharded)
    assert notice is None if text is None else notice.text.startswith(text)
    assert idle_plan_notice(RunFile.model_validate(settings), "off", is_sharded=True) is None


@pytest.mark.parametrize("plan", ["auto", {}, {"batch": "fixed"}])
def test_a_plan_that_nobody_asked_for_is_no_fallback(plan):
    run = RunFile.model_validate({"plan": plan})
    notice = unplanned_notice(run, reason_unplanned(run, CPU))
    assert not notice.fallback
    assert notice.text.startswith("plan: none, because there is no GPU")


@pytest.mark.parametrize(
    ("plan", "fallbacks", "lines"),
    [({"compile": "always"}, 1, 1), ("auto", 0, 1), ("off", 0, 0), (LITTLE, 0, 0)],
)
def test_a_run_says_once_that_it_has_no_plan(tiny_run, recorder, plan, fallbacks, lines):
    run_training(
        tiny_run(adapter={"rank": 2}, train={"max_train_steps": 1}, plan=plan), sinks=[recorder]
    )
    assert sum(notice.fallback for notice in recorder.of(Notice)) == fallbacks
    assert sum("nothing is streamed" in text for text in recorder.texts()) == lines


def test_a_single_gpu_is_planned():
    assert reason_unplanned(RunFile(), torch.device("cuda", 0)) == ""


PLANNED_IN_CI = ("flux", "qwen-image")
"""Image models that are planned in CI, where test_gradient_check.py streams those of all families
and test_meta_models.py plans them."""


@pytest.mark.parametrize(
    ("model", "adapter", "optimizer", "experts"),
    [
        ("wan22-t2v", {"rank": 2, "dropout": 0.1}, {}, "low"),
        (
            "wan22-t2v",
            {"kind": "lokr", "rank": 2, "dropout": 0.1},
            {"name": "automagic", "high_noise_lr_bump": 1e-6, "low_noise_max_lr": 1e-3},
            "both",
        ),
        *(
            pytest.param(
                *(name, {"rank": 2}, {}, None),
                marks=() if name in PLANNED_IN_CI else pytest.mark.slow,
            )
            for name, small in MINIATURES.items()
            if small.kind == "image"
        ),
    ],
)
def test_models_adapters_and_optimizers_can_be_planned(
    tiny_run, miniature, recorder, tmp_path, model, adapter, optimizer, experts
):
    def losses(name, plan):
        recorder.events.clear()
        train = {"max_train_steps": 2, "batch_size": 1}
        if experts is not None:
            train |= {"experts": experts, "timestep_shift": 5.0}
        run = tiny_run(
            output_dir=str(tmp_path / name),
            model={"family": MINIATURES[model].family, "path": str(miniature(model))},
            adapter=adapter,
            optimizer=optimizer,
            train=train,
            plan=plan,
        )
        data = run.datasets[0].model_copy(update={"resolution": 32})
        run_training(run.model_copy(update={"datasets": (data,)}), sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    planned = losses("planned", {"device_memory": "1GB", "compile": "never"})
    texts = [text for text in recorder.texts() if text.startswith("plan: batch")]
    assert len(texts) == 1
    if not adapter.get("dropout"):
        assert planned == pytest.approx(losses("plain", "off"), rel=1e-3)


def test_full_training_of_bf16_weights_runs_in_fp32(tiny_run, miniature, recorder):
    model = {"family": "wan22", "path": str(miniature("wan22-t2v")), "dtype": "bfloat16"}
    run = tiny_run(model=model, train={"max_train_steps": 2, "batch_size": 1, "experts": "high"})
    data = run.datasets[0].model_copy(update={"resolution": 32})
    run_training(run.model_copy(update={"datasets": (data,)}), sinks=[recorder])
    assert any("trained tensors are converted to fp32" in text for text in recorder.texts())


def test_fp8_on_an_unsupported_device_is_an_error():
    with pytest.raises(ConfigError, match="none is frozen"):
        check_run(RunFile(model={"frozen_compute": "fp8"}))
    with pytest.raises(ConfigError, match="dora needs the norm"):
        check_run(RunFile(model={"frozen_compute": "fp8"}, adapter={"kind": "dora", "rank": 2}))


def test_fp8_without_a_plan_is_an_error(tiny_run):
    run = tiny_run(model={"frozen_compute": "fp8"}, adapter={"rank": 2}, plan="off")
    with pytest.raises(ConfigError, match="which needs a memory plan, but plan is off"):
        run_training(run)


def test_fp8_is_traced_with_fused_layers(tiny_run, recorder, monkeypatch):
    """Matmuls are fused for the trace, unfused during calibration, and fused for the run."""
    fused_counts = []

    def fused_layers(model):
        loras = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
        return [layer for layer in loras if isinstance(layer.forward.__self__, FusedLora)], loras

    def trace(subject, *given, **more):
        fused_counts.append(fused_layers(subject.model))
        return build_cost_model(subject, *given, **more)

    def convert_and_record(run, family, *given):
        fused_counts.append(fused_layers(family.transformer))
        convert(run, family, *given)

    build_cost_model, convert = planner.build_cost_model, fp8_calibration.convert_frozen_layers
    monkeypatch.setattr(planner, "check_fp8_support", lambda _device: None)
    monkeypatch.setattr(planner, "build_cost_model", trace)
    monkeypatch.setattr(fp8_calibration, "convert_frozen_layers", convert_and_record)
    plan = {"device_memory": "1GB", "compile": "never"}
    run = tiny_run(model={"frozen_compute": "fp8"}, adapter={"rank": 2}, plan=plan)
    assert run_training(run, sinks=[recorder]).status == "done"
    (while_traced, loras), (while_shown, _) = fused_counts
    assert while_traced == loras != []
    assert while_shown == []
    bases = [layer.forward.__self__.base for layer in loras]
    assert sum(isinstance(base, Fp8Linear) for base in bases) > len(bases) // 2, "those of blocks"
