"""The SimpleTuner plug-in and its batch ramp, without SimpleTuner."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from fakes.platforms import simulated_machine

from gracetune.config.schema import Gh200Section
from gracetune.errors import ConfigError
from gracetune.hosts.shared_tensor_cache import SharedTensorCache
from gracetune.hosts.simpletuner.plugin import (
    AccumulationSchedule,
    AccumulationSteps,
    SimpleTunerPlugin,
    SimpleTunerRamp,
    build_schedule,
    check_ramp_supported,
)
from gracetune.hosts.tensor_cache import LocalTensorMemory
from gracetune.memory.platform import Link, open_machine
from gracetune.train.batch_size_ramp import AccumulationRamp as OwnRamp
from gracetune.units import GIB

CONFIG = {
    "model_type": "lora",
    "train_batch_size": 4,
    "cache_config": {"vae_cache_type": "unified_memory", "persistent_cache": True},
    "gh200_optimizations": {
        "enable_uvm_hints": True,
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 32,
        "batch_rampup_steps": 400,
    },
}

RAMP = AccumulationSchedule(4, 32, 400, "quadratic", 1)


@pytest.mark.parametrize("shape", ["quadratic", "linear"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_schedule_equals_that_of_gracetunes_trainer(shape, size):
    ours, own = AccumulationSchedule(4, 32, 100, shape, size), OwnRamp(4, 32, 100, shape, size)
    assert [ours.accumulation(i) for i in range(130)] == [own.accumulation(i) for i in range(130)]


@pytest.fixture
def accelerator():
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    yield accelerator
    accelerator.free_memory()


def drive(accelerator, num_micro_batches, optimizer_steps=0):
    """Run accelerate's accumulation; return the total loss weight of each optimizer step."""
    ramp = SimpleTunerRamp(RAMP, accelerator, lambda: optimizer_steps, lambda accumulation: None)
    weights, now = [], 0.0
    model = torch.nn.Linear(1, 1)
    for _ in range(num_micro_batches):
        with ramp.accumulate(accelerator.accumulate, model):
            now += 1 / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                weights.append(now)
                now = 0.0
    return weights


def test_the_loss_weights_of_every_optimizer_step_add_up_to_one(accelerator):
    weights = drive(accelerator, 700)
    assert len(weights) > 30
    assert weights == pytest.approx([1.0] * len(weights))
    assert accelerator.gradient_accumulation_steps == 32


def test_a_resumed_ramp_continues_where_it_was(accelerator):
    drive(accelerator, RAMP.micro_batches_after(20))
    drive(accelerator, 1, optimizer_steps=20)
    expected = RAMP.accumulation(RAMP.micro_batches_after(20))
    assert accelerator.gradient_accumulation_steps == expected
    assert 4 < expected < 32


def test_simpletuner_validates_and_uploads_at_the_end_of_a_step(accelerator):
    """Its condition is `micro_batches % gradient_accumulation_steps == 0`."""
    config = SimpleNamespace(gradient_accumulation_steps=4)

    def set_accumulation(accumulation):
        ends_step = lambda: accelerator.sync_gradients  # noqa: E731
        config.gradient_accumulation_steps = AccumulationSteps(accumulation, ends_step)

    ramp = SimpleTunerRamp(RAMP, accelerator, lambda: 0, set_accumulation)
    due, ended = [], []
    for step in range(1, 701):
        with ramp.accumulate(accelerator.accumulate, torch.nn.Linear(1, 1)):
            due.append(step % config.gradient_accumulation_steps == 0)
            ended.append(accelerator.sync_gradients)
    assert due == ended
    assert sum(due) > 30


def test_accumulation_steps_behave_like_an_int():
    ends = [False]
    steps = AccumulationSteps(4, lambda: ends[0])
    assert (steps == 4, 8 / steps, steps % 3, f"{steps}", json.dumps([steps])) == (
        *(True, 2.0, 1, "4", "[4]"),
    )
    assert (8 % steps, 7 % steps) == (1, 3), "never 0 within a step, whatever the count is"
    ends[0] = True
    assert (8 % steps, 7 % steps) == (0, 0)
    for plain in (copy.deepcopy(steps), copy.copy(steps), pickle.loads(pickle.dumps(steps))):
        assert (type(plain), plain) == (int, 4)


def test_a_schedule_is_built_from_the_settings():
    assert build_schedule(Gh200Section(), 1, 4, 1) is None
    section = Gh200Section(enable_batch_size_rampup=True, initial_effective_batch_size=4)
    schedule = build_schedule(section, 2, 8, 2)
    assert (schedule.target, schedule.samples_per_micro_batch) == (32, 4)
    with pytest.raises(ConfigError, match="A ramp needs both, must not shrink"):
        build_schedule(section.model_copy(update={"initial_effective_batch_size": 64}), 2, 8, 2)


def test_a_ramp_is_refused_if_something_else_accumulates():
    with pytest.raises(ConfigError, match="DeepSpeed"):
        check_ramp_supported("DEEPSPEED", {})
    with pytest.raises(ConfigError, match="optimizer_release_gradients"):
        check_ramp_supported("NO", {"optimizer_release_gradients": True})
    check_ramp_supported("FSDP", {})


# The plug-in


def make_plugin(**environment):
    return SimpleTunerPlugin(environment, open_machine, torch.Tensor.contiguous)


def test_the_memory_budget_follows_the_configuration():
    plugin = make_plugin()
    assert plugin.split_config(CONFIG) == {"model_type": "lora", "train_batch_size": 4}
    assert plugin.memory.budget_nbytes > 0
    limited = {**CONFIG, "cache_config": {"text_cache_type": "memory", "host_budget_gb": 2}}
    plugin.split_config(limited)
    assert plugin.memory.budget_nbytes == 2 * 1024**3
    half = make_plugin(LOCAL_WORLD_SIZE="2")
    half.split_config(CONFIG)
    whole = make_plugin()
    whole.split_config(CONFIG)
    assert half.memory.budget_nbytes == pytest.approx(whole.memory.budget_nbytes / 2, rel=0.1)
    on_disk = make_plugin()
    on_disk.split_config({"cache_config": {"vae_cache_type": "disk", "text_cache_type": "disk"}})
    assert on_disk.memory is None


def test_ranks_of_one_machine_share_memory(tmp_path):
    config = {**CONFIG, "cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1}}
    common = (open_machine, torch.Tensor.contiguous, tmp_path)
    alone = SimpleTunerPlugin({}, *common)
    two = SimpleTunerPlugin({"LOCAL_WORLD_SIZE": "2"}, *common)
    for plugin in (alone, two):
        plugin.split_config(config)
    assert isinstance(alone.memory, LocalTensorMemory)
    assert isinstance(two.memory, SharedTensorCache)
    assert two.memory.budget_nbytes == alone.memory.budget_nbytes == GIB


def test_each_kind_of_cache_has_its_own_setting():
    sets = [
        {"id": "pics", "type": "local"},
        {"id": "clips", "dataset_type": "video"},
        {"id": "words", "dataset_type": "text_embeds"},
        {"id": "text-embeds-of-old", "dataset_type": "image_embeds"},
    ]
    in_memory = {}
    for latents, texts in (("memory", "disk"), ("disk", "memory"), ("memory", "unified_memory")):
        plugin = make_plugin()
        plugin.split_datasets(sets)
        plugin.split_config({"cache_config": {"vae_cache_type": latents, "text_cache_type": texts}})
        names = ("pics", "clips", "text-embeds-of-old", "words", "text-embeds")
        kept = [plugin.tensor_cache_for(name) is not None for name in names]
        in_memory[latents, texts] = (kept[:3], kept[3:])
    assert in_memory == {
        ("memory", "disk"): ([True] * 3, [False] * 2),
        ("disk", "memory"): ([False] * 3, [True] * 2),
        ("memory", "unified_memory"): ([True] * 3, [True] * 2),
    }
    assert make_plugin().tensor_cache_for("pics") is None


def test_a_ramp_warns_of_data_sets_with_their_own_batch_size(caplog):
    plugin = make_plugin()
    plugin.split_datasets([{"id": "quiet", "train_batch_size": 2}])
    plugin.split_config(CONFIG)
    plugin.split_datasets([{"id": "pics", "train_batch_size": 2}, {"id": "words"}])
    assert [
        record.args for record in caplog.records if "its own train_batch_size" in record.msg
    ] == [("pics",)]


def test_a_later_mapping_without_our_blocks_changes_nothing():
    plugin = make_plugin()
    plugin.split_config(CONFIG)
    assert plugin.split_config({"model_type": "full"}) == {"model_type": "full"}
    assert plugin.blocks.gh200.target_effective_batch_size == 32
    assert plugin.blocks.raw["model_type"] == "lora"


def test_reading_the_same_configuration_again_changes_nothing():
    plugin = make_plugin()
    plugin.split_config(CONFIG)
    memory = plugin.memory
    assert plugin.split_config(dict(CONFIG)) == {"model_type": "lora", "train_batch_size": 4}
    assert plugin.memory is memory


def test_attaching_a_trainer_starts_the_ramp(accelerator):
    plugin = make_plugin()
    plugin.split_config({**CONFIG, "train_batch_size": 1})
    config = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=4)
    trainer = SimpleNamespace(accelerator=accelerator, config=config, state={"global_step": 40})
    plugin.attach_trainer(trainer)
    with accelerator.accumulate(torch.nn.Linear(1, 1)):
        pass
    expected = RAMP.accumulation(RAMP.micro_batches_after(40))
    assert config.gradient_accumulation_steps == expected
    assert accelerator.gradient_accumulation_steps == expected
    assert plugin.runtime == {
        "uvm_hints_enabled": True,
        "gradient_accumulation_schedule": {"initial_ga": 4, "target_ga": 32, "total_steps": 400},
    }
    assert json.dumps(plugin.runtime)


@pytest.mark.parametrize(
    ("batch_size", "first_accumulation", "warned"), [(32, 1, (4, 32, 32, 1)), (4, 1, None)]
)
def test_a_ramp_that_starts_below_one_micro_batch_names_its_real_first_size(
    accelerator, caplog, batch_size, first_accumulation, warned
):
    """The numbers of the first guide: train_batch_size 32, initial_effective_batch_size 4."""
    plugin = make_plugin()
    section = {**CONFIG["gh200_optimizations"], "target_effective_batch_size": 128}
    plugin.split_config({"train_batch_size": batch_size, "gh200_optimizations": section})
    config = SimpleNamespace(train_batch_size=batch_size, gradient_accumulation_steps=4)
    trainer = SimpleNamespace(accelerator=accelerator, config=config, state={"global_step": 0})
    plugin.attach_trainer(trainer)
    with accelerator.accumulate(torch.nn.Linear(1, 1)):
        pass
    assert config.gradient_accumulation_steps == first_accumulation
    found = [each.args for each in caplog.records if "the ramp starts with" in each.msg]
    assert found == ([] if warned is None else [warned])


def test_a_ramp_that_cannot_grow_says_so(accelerator, caplog):
    plugin = make_plugin()
    plugin.split_config({**CONFIG, "train_batch_size": 32})
    config = SimpleNamespace(train_batch_size=32, gradient_accumulation_steps=1)
    plugin.attach_trainer(SimpleNamespace(accelerator=accelerator, config=config, state={}))
    assert "the ramp has no effect: it starts and ends with 32 samples" in caplog.text


def test_attaching_without_an_accelerator_or_a_ramp_changes_nothing(accelerator):
    plugin = make_plugin()
    plugin.attach_trainer(SimpleNamespace())  # its attributes are not even read
    ramped = make_plugin()
    ramped.split_config(CONFIG)
    ramped.attach_trainer(SimpleNamespace(accelerator=None))
    assert [*ramped.runtime] == ["uvm_hints_enabled"]
    before = accelerator.accumulate
    config = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=4)
    plugin.attach_trainer(SimpleNamespace(accelerator=accelerator, config=config, state={}))
    assert accelerator.accumulate == before


def test_a_missing_batch_is_not_placed():
    plugin = make_plugin()
    plugin.split_config(CONFIG)
    plugin.place_batch(False)
    plugin.place_batch(None)
    plugin.place_batch({"latents": torch.ones(2)})


def test_a_data_set_is_staged_once(tmp_path):
    folder = tmp_path / "pics"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"a.png")
    plugin = make_plugin()
    rest = plugin.split_datasets(
        [{"id": "pics", "type": "in_memory", "instance_data_dir": str(folder)}]
    )
    assert rest[0]["type"] == "local"
    assert plugin.staged_bytes(str(folder / "a.png")) is None, "not before its backend is created"
    assert plugin.staged_files("pics") is plugin.staged_files("pics")
    assert plugin.staged_files("other") is None
    assert plugin.staged_bytes(str(folder / "a.png")) == b"a.png"
    assert plugin.staged_bytes("/elsewhere.png") is None


def test_settings_without_effect_are_logged(caplog):
    make_plugin().split_config({"cache_config": {"cache_dir": "x"}})
    assert "each dataset names the folder of its cache" in caplog.text


def test_nothing_is_managed_although_it_is_asked_for(caplog):
    """On a simulated GH200, nothing is allocated, and the hints of a batch are not applied."""
    machine = simulated_machine(Link.COHERENT)
    environment = {"GRACETUNE_ALLOC_CONF": "use_uvm:True"}
    plugin = SimpleTunerPlugin(environment, lambda: machine, torch.Tensor.contiguous)
    section = {"enable_uvm_hints": True, "use_uvm": True, "managed": ["optimizer"]}
    plugin.split_config({"gh200_optimizations": section})
    plugin.place_batch({"latents": torch.ones(1 << 16)})
    stats = plugin.session.uvm_stats()
    assert (stats["uvm.bytes.managed.peak"], stats["uvm.hints.applied"]) == (0, 0)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    for words in ("gh200_optimizations.use_uvm", "gh200_optimizations.managed", "use_uvm:True"):
        assert sum(text.startswith(f"{words} has no effect") for text in warnings) == 1
    assert any("is unsupported: pageable host memory" in text for text in warnings)
