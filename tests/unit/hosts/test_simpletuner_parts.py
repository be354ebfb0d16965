"""What the SimpleTuner plug-in is made of, without SimpleTuner."""

import copy
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from gracetune.config.schema import Gh200Section
from gracetune.errors import ConfigError, DataError
from gracetune.hosts.shared_tensor_memory import SharedTensorMemory
from gracetune.hosts.simpletuner.config_blocks import split_config, split_datasets
from gracetune.hosts.simpletuner.plugin import (
    AccumulationSteps,
    AccumulationSchedule,
    SimpleTunerPlugin,
    SimpleTunerRamp,
    build_schedule,
    check_ramp_supported,
)
from gracetune.hosts.staged_files import BackendFiles, stage_dataset
from gracetune.hosts.tensor_memory import LocalTensorMemory
from gracetune.memory.platform import open_machine
from gracetune.train.ramp import AccumulationRamp as OwnRamp
from gracetune.units import GIB

SEED = {
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


# Blocks


def test_our_blocks_are_taken_and_the_rest_is_left():
    rest, blocks = split_config({**SEED, "--use_gh200_trainer": True}, {})
    assert rest == {"model_type": "lora", "train_batch_size": 4}
    assert blocks.gh200.target_effective_batch_size == 32
    assert blocks.cache.vae_cache_type == "unified_memory"
    assert blocks.raw["cache_config"] == SEED["cache_config"]


def test_without_our_blocks_nothing_is_ours():
    config = {"model_type": "lora", "num_train_epochs": 3}
    rest, blocks = split_config(config, {})
    assert rest == config
    assert (blocks.cache, blocks.notices, blocks.gh200) == (None, (), Gh200Section())


def test_switched_off_means_off():
    _, blocks = split_config({**SEED, "use_gh200_trainer": False}, {})
    assert blocks.cache is None
    assert not blocks.gh200.enable_batch_size_rampup
    assert blocks.gh200.enable_uvm_hints is False


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gh200_optimizations": {"enable_uvm_hint": True}}, "did you mean .*enable_uvm_hints"),
        ({"cache_config": {"vae_cache_type": "ram"}}, "^config.json: cache_config.vae_cache_type"),
        ({"datasets": []}, "data_backend_config names"),
        ({"cache_confg": {}}, "'cache_confg', which SimpleTuner drops. Did you mean 'cache_config"),
        ({"--gh200_optimisations": {}}, "Did you mean 'gh200_optimizations'"),
    ],
)
def test_what_stock_simpletuner_drops_is_an_error(config, said):
    with pytest.raises(ConfigError, match=said):
        split_config(config, {})


def test_blocks_of_simpletuners_own_are_no_spelling_mistakes_of_ours():
    own = ("webhook_config", "deepspeed_config", "distillation_config", "publishing_config")
    config = {name: {} for name in own} | {"cache_conf": "text"}
    assert split_config(config, {})[0] == config


def test_what_does_nothing_inside_simpletuner_is_said(caplog):
    block = {"cache_dir": "x", "persistent_cache": False, "vae_cache_type": "disk"}
    _, blocks = split_config({"cache_config": block}, {})
    assert [text.split()[0] for text in blocks.ignored] == [
        "cache_config.cache_dir",
        "cache_config.persistent_cache",
    ]
    assert split_config(SEED, {})[1].ignored == (), "files are kept, as was asked for"
    off = {"cache_config": block, "use_gh200_trainer": False}
    assert split_config(off, {})[1].ignored == ()
    plugin().split_config({"cache_config": block})
    assert "a data set names the folder of its cache" in caplog.text


def entry(**changes):
    return {"id": "pics", "type": "in_memory", "instance_data_dir": "/data", **changes}


def test_in_memory_is_local_to_the_host():
    block = {"compression": "lz4", "memory_limit_gb": 300, "num_workers": 2}
    block["file_extensions"] = [".PNG", "txt"]
    other = {"id": "text", "type": "local", "dataset_type": "text_embeds"}
    rest, [staged] = split_datasets([entry(in_memory=block), other], {})
    assert rest == [entry(type="local"), other]
    assert (staged.id, staged.folder, staged.extensions) == ("pics", "/data", ("png", "txt"))
    assert (staged.section.compression, staged.section.memory_limit_gb) == ("lz4", 300)


def test_a_disabled_data_set_is_not_staged():
    rest, staged = split_datasets([entry(disabled=True)], {})
    assert (rest[0]["type"], staged) == ("local", [])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (entry(in_memory={"compresion": "lz4"}), "did you mean .*compression"),
        (entry(in_memory={"file_extensions": "png"}), "file_extensions is 'png'"),
        (entry(in_memory=3), "in_memory is 3"),
        (entry(id=None), "has no id or no instance_data_dir"),
        (entry(type="local", in_memory={}), "has an in_memory block and is of type 'local'"),
        (entry(inmemory={}), "'pics' has a block 'inmemory'.*Did you mean 'in_memory'"),
    ],
)
def test_data_sets_that_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        split_datasets([wrong], {})


# Shelf


@pytest.fixture
def shelf(tmp_path):
    folder = tmp_path / "pics"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.JPG", "a.txt", "aspect_ratio_bucket_x.txt", "cache.pt"):
        (folder / name).write_bytes(name.encode())
    [chosen] = split_datasets([entry(instance_data_dir=str(folder))], {})[1]
    return folder, stage_dataset(chosen, lambda event: None, None)


def test_media_and_captions_are_held_by_absolute_path(shelf):
    folder, held = shelf
    names = ("a.png", "sub/b.JPG", "a.txt", "aspect_ratio_bucket_x.txt", "cache.pt", "no.png")
    assert [held.holds(str(folder / name)) for name in names] == [True] * 3 + [False] * 3
    assert held.read(str(folder / "sub/b.JPG")) == b"sub/b.JPG"
    assert not held.holds("a.png")
    assert held.holds(folder / "a.png"), "paths are text, or not"
    held.forget(folder / "a.png")
    assert not held.holds(str(folder / "a.png"))


def test_a_path_of_another_spelling_is_the_same_file(shelf, monkeypatch):
    folder, held = shelf
    monkeypatch.chdir(folder.parent)
    assert held.read("pics/a.png") == b"a.png"
    assert held.read(f"{folder}//sub/../a.png") == b"a.png"
    held.forget("./pics/a.png")
    assert not held.holds(folder / "a.png")


def test_what_is_written_is_read_from_disk(shelf):
    folder, held = shelf
    served = BackendFiles(held, None)
    path = str(folder / "a.txt")
    assert served.read(path) == b"a.txt"
    assert served.open_file(path, "r").read() == "a.txt"
    assert served.open_file(path, "rb").read() == b"a.txt"
    assert served.open_file(path, "w") is None
    assert served.read(path) is None
    assert not served.holds(path)


def test_a_folder_with_nothing_to_stage(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"x")
    [chosen] = split_datasets([entry(instance_data_dir=str(tmp_path))], {})[1]
    with pytest.raises(DataError, match="has no file with one of the endings"):
        stage_dataset(chosen, lambda event: None, None)


# Tensors


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"1")
    return str(path)


def loader(calls):
    def load(path):
        calls.append(path)
        return {"latents": torch.ones(4), "list": [torch.zeros(2)], "meta": (1, "two")}

    return load


def test_a_hit_gives_fresh_containers_and_the_same_tensors(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    first = memory.get(file, loader(calls))
    first["latents"] = None
    first["list"].append(3)
    second = memory.get(file, loader(calls))
    assert len(calls) == 1
    assert torch.equal(second["latents"], torch.ones(4))
    assert len(second["list"]) == 1
    assert second["meta"] == (1, "two")
    assert (memory.hits, memory.misses, memory.nbytes) == (1, 1, 24)


def test_a_file_that_changed_is_read_again(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    memory.get(file, loader(calls))
    os.utime(file, ns=(1, 1))
    memory.get(file, loader(calls))
    memory.forget(Path(file))
    memory.get(Path(file), loader(calls))
    memory.get(file, loader(calls))
    assert len(calls) == 3


def test_a_tensor_that_someone_wrote_to_is_read_again(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    memory.get(file, loader(calls))["latents"].mul_(2)
    assert torch.equal(memory.get(file, loader(calls))["latents"], torch.ones(4))
    assert len(calls) == 2


def test_tensors_read_in_inference_mode_are_held_and_checked_too(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    with torch.inference_mode():
        memory.get(file, loader(calls))
        memory.get(file, loader(calls))["latents"].mul_(2)
        assert len(calls) == 1
        assert torch.equal(memory.get(file, loader(calls))["latents"], torch.ones(4))
    assert len(calls) == 2


def test_the_budget_holds_and_the_oldest_leaves(tmp_path):
    calls, memory = [], LocalTensorMemory(50, torch.Tensor.contiguous)
    files = [str(tmp_path / name) for name in "abc"]
    for path in files:
        with open(path, "w") as out:
            out.write("x")
        memory.get(path, loader(calls))
    assert memory.nbytes == 48
    memory.get(files[2], loader(calls))
    assert len(calls) == 3
    memory.get(files[0], loader(calls))
    assert len(calls) == 4
    small = LocalTensorMemory(10, torch.Tensor.contiguous)
    small.get(files[0], loader(calls))
    assert small.nbytes == 0


def test_what_is_not_there_fails_as_it_does_without_us(tmp_path):
    memory = LocalTensorMemory(100, torch.Tensor.contiguous)

    def missing(path):
        raise FileNotFoundError(path)

    with pytest.raises(FileNotFoundError):
        memory.get(str(tmp_path / "no.pt"), missing)


# Ramp

SEEDS_RAMP = AccumulationSchedule(4, 32, 400, "quadratic", 1)


@pytest.mark.parametrize("shape", ["quadratic", "linear"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_ramp_is_the_trainers_own(shape, size):
    ours, own = AccumulationSchedule(4, 32, 100, shape, size), OwnRamp(4, 32, 100, shape, size)
    assert [ours.accumulation(i) for i in range(130)] == [own.accumulation(i) for i in range(130)]


@pytest.fixture
def accelerator():
    made = Accelerator(gradient_accumulation_steps=4, cpu=True)
    yield made
    made.free_memory()


def drive(accelerator, num_micro_batches, steps_done=0):
    """Run accelerate's own accumulation; the total loss weight of each optimizer step."""
    ramp = SimpleTunerRamp(SEEDS_RAMP, accelerator, lambda: steps_done, lambda accumulation: None)
    weights, now = [], 0.0
    model = torch.nn.Linear(1, 1)
    for _ in range(num_micro_batches):
        with ramp.accumulate(accelerator.accumulate, model):
            now += 1 / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                weights.append(now)
                now = 0.0
    return weights


def test_every_optimizer_step_weighs_one(accelerator):
    weights = drive(accelerator, 700)
    assert len(weights) > 30
    assert weights == pytest.approx([1.0] * len(weights))
    assert accelerator.gradient_accumulation_steps == 32


def test_a_resumed_ramp_goes_on_where_it_was(accelerator):
    drive(accelerator, SEEDS_RAMP.micro_batches_after(20))
    drive(accelerator, 1, steps_done=20)
    wanted = SEEDS_RAMP.accumulation(SEEDS_RAMP.micro_batches_after(20))
    assert accelerator.gradient_accumulation_steps == wanted
    assert 4 < wanted < 32


def test_the_host_validates_and_uploads_where_a_step_ends(accelerator):
    """By SimpleTuner's own condition, on a count that is no multiple of what a ramp has reached."""
    config = SimpleNamespace(gradient_accumulation_steps=4)

    def follow(accumulation):
        ends_step = lambda: accelerator.sync_gradients  # noqa: E731
        config.gradient_accumulation_steps = AccumulationSteps(accumulation, ends_step)

    ramp = SimpleTunerRamp(SEEDS_RAMP, accelerator, lambda: 0, follow)
    due, ended = [], []
    for step in range(1, 701):
        with ramp.accumulate(accelerator.accumulate, torch.nn.Linear(1, 1)):
            due.append(step % config.gradient_accumulation_steps == 0)
            ended.append(accelerator.sync_gradients)
    assert due == ended
    assert sum(due) > 30


def test_a_number_that_grows_is_a_number():
    ends = [False]
    made = AccumulationSteps(4, lambda: ends[0])
    assert (made == 4, 8 / made, made % 3, f"{made}", json.dumps([made])) == (
        *(True, 2.0, 1, "4", "[4]"),
    )
    assert (8 % made, 7 % made) == (1, 3), "not where a step ends, whatever the count is"
    ends[0] = True
    assert (8 % made, 7 % made) == (0, 0)
    for plain in (copy.deepcopy(made), copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert (type(plain), plain) == (int, 4)


def test_ramps_that_are_asked_for():
    assert build_schedule(Gh200Section(), 1, 4, 1) is None
    section = Gh200Section(enable_batch_size_rampup=True, initial_effective_batch_size=4)
    schedule = build_schedule(section, 2, 8, 2)
    assert (schedule.target, schedule.samples_per_micro_batch) == (32, 4)
    with pytest.raises(ConfigError, match="a ramp needs both, grows"):
        build_schedule(section.model_copy(update={"initial_effective_batch_size": 64}), 2, 8, 2)


def test_engines_that_accumulate_themselves_are_refused_by_name():
    with pytest.raises(ConfigError, match="DeepSpeed"):
        check_ramp_supported("DEEPSPEED", {})
    with pytest.raises(ConfigError, match="optimizer_release_gradients"):
        check_ramp_supported("NO", {"optimizer_release_gradients": True})
    check_ramp_supported("FSDP", {})


# The plug-in itself


def plugin(**environment):
    return SimpleTunerPlugin(environment, open_machine, torch.Tensor.contiguous)


def test_a_configuration_sets_the_plug_in_up():
    made = plugin()
    assert made.split_config(SEED) == {"model_type": "lora", "train_batch_size": 4}
    assert made.memory.budget_nbytes > 0
    limited = {**SEED, "cache_config": {"text_cache_type": "memory", "host_budget_gb": 2}}
    made.split_config(limited)
    assert made.memory.budget_nbytes == 2 * 1024**3
    half = plugin(LOCAL_WORLD_SIZE="2")
    half.split_config(SEED)
    whole = plugin()
    whole.split_config(SEED)
    assert half.memory.budget_nbytes == pytest.approx(whole.memory.budget_nbytes / 2, rel=0.1)
    on_disk = plugin()
    on_disk.split_config({"cache_config": {"vae_cache_type": "disk", "text_cache_type": "disk"}})
    assert on_disk.memory is None


def test_ranks_of_one_machine_hold_each_file_once(tmp_path):
    asked = {**SEED, "cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1}}
    meet = (open_machine, torch.Tensor.contiguous, tmp_path)
    alone, two = SimpleTunerPlugin({}, *meet), SimpleTunerPlugin({"LOCAL_WORLD_SIZE": "2"}, *meet)
    for plugin in (alone, two):
        plugin.split_config(asked)
    assert isinstance(alone.memory, LocalTensorMemory)
    assert isinstance(two.memory, SharedTensorMemory)
    assert two.memory.budget_nbytes == alone.memory.budget_nbytes == GIB


def test_each_cache_is_kept_where_it_is_said():
    sets = [
        {"id": "pics", "type": "local"},
        {"id": "clips", "dataset_type": "video"},
        {"id": "words", "dataset_type": "text_embeds"},
        {"id": "text-embeds-of-old", "dataset_type": "image_embeds"},
    ]
    homes = {}
    for latents, texts in (("memory", "disk"), ("disk", "memory"), ("memory", "unified_memory")):
        made = plugin()
        made.split_datasets(sets)
        made.split_config({"cache_config": {"vae_cache_type": latents, "text_cache_type": texts}})
        names = ("pics", "clips", "text-embeds-of-old", "words", "text-embeds")
        kept = [made.tensor_memory_for(name) is not None for name in names]
        homes[latents, texts] = (kept[:3], kept[3:])
    assert homes == {
        ("memory", "disk"): ([True] * 3, [False] * 2),
        ("disk", "memory"): ([False] * 3, [True] * 2),
        ("memory", "unified_memory"): ([True] * 3, [True] * 2),
    }
    assert plugin().tensor_memory_for("pics") is None


def test_a_ramp_says_of_which_data_sets_it_does_not_know_the_batch(caplog):
    made = plugin()
    made.split_datasets([{"id": "quiet", "train_batch_size": 2}])
    made.split_config(SEED)
    made.split_datasets([{"id": "pics", "train_batch_size": 2}, {"id": "words"}])
    assert [record.args for record in caplog.records if "of its own" in record.msg] == [("pics",)]


def test_a_later_mapping_without_our_blocks_changes_nothing():
    made = plugin()
    made.split_config(SEED)
    assert made.split_config({"model_type": "full"}) == {"model_type": "full"}
    assert made.blocks.gh200.target_effective_batch_size == 32
    assert made.blocks.raw["model_type"] == "lora"


def test_what_is_read_again_changes_nothing():
    made = plugin()
    made.split_config(SEED)
    memory = made.memory
    assert made.split_config(dict(SEED)) == {"model_type": "lora", "train_batch_size": 4}
    assert made.memory is memory


def test_attaching_sets_the_ramp_and_tells_of_it(accelerator):
    made = plugin()
    made.split_config({**SEED, "train_batch_size": 1})
    config = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=4)
    trainer = SimpleNamespace(accelerator=accelerator, config=config, state={"global_step": 40})
    made.attach_trainer(trainer)
    with accelerator.accumulate(torch.nn.Linear(1, 1)):
        pass
    wanted = SEEDS_RAMP.accumulation(SEEDS_RAMP.micro_batches_after(40))
    assert config.gradient_accumulation_steps == wanted
    assert accelerator.gradient_accumulation_steps == wanted
    assert made.runtime == {
        "uvm_hints_enabled": True,
        "gradient_accumulation_schedule": {"initial_ga": 4, "target_ga": 32, "total_steps": 400},
    }
    assert json.dumps(made.runtime)


def test_attaching_without_an_accelerator_or_a_ramp_changes_nothing(accelerator):
    made = plugin()
    made.attach_trainer(SimpleNamespace())  # not even looked at
    ramped = plugin()
    ramped.split_config(SEED)
    ramped.attach_trainer(SimpleNamespace(accelerator=None))
    assert [*ramped.runtime] == ["uvm_hints_enabled"]
    before = accelerator.accumulate
    config = SimpleNamespace(train_batch_size=1, gradient_accumulation_steps=4)
    made.attach_trainer(SimpleNamespace(accelerator=accelerator, config=config, state={}))
    assert accelerator.accumulate == before


def test_batches_are_placed_where_there_is_one():
    made = plugin()
    made.split_config(SEED)
    made.place_batch(False)
    made.place_batch(None)
    made.place_batch({"latents": torch.ones(2)})


def test_staged_sets_are_staged_once(shelf):
    folder, _ = shelf
    made = plugin()
    rest = made.split_datasets([entry(instance_data_dir=str(folder))])
    assert rest[0]["type"] == "local"
    assert made.staged_bytes(str(folder / "a.png")) is None, "not before its backend is made"
    assert made.staged_files("pics") is made.staged_files("pics")
    assert made.staged_files("other") is None
    assert made.staged_bytes(str(folder / "a.png")) == b"a.png"
    assert made.staged_bytes("/elsewhere.png") is None
