"""Jobs of a miniature clone with our extension: data, timesteps, optimizer and saves."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ai_toolkit_clone import write_files
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from gracetune.errors import AdapterError, ConfigError, HostError
from gracetune.hosts.ai_toolkit.clone import install
from gracetune.hosts.ai_toolkit.plugin import check_workers_fork, worker_start_method
from gracetune.hosts.ai_toolkit.trainer_subclass import stage_boundaries

PACKAGES = ("toolkit", "jobs", "extensions", "extensions_built_in")
FLIP = {"method": "HorizontalFlip", "params": {"p": 0.5}}
STAGES = {"optimizer": "automagic", "lr": 2e-6}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with our file installed, importable during the test."""
    root = write_files(tmp_path / "ai-toolkit")
    install(root)
    monkeypatch.syspath_prepend(root)
    monkeypatch.delenv("AITK_GH200_ENABLE_UVM_HINTS", raising=False)
    yield root
    for name in [each for each in sys.modules if each.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        pixels = np.full((8, 8, 3), 40 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"caption {number}")
    return folder


def make_processes(clone, *processes):
    """Let ai-toolkit create the processes of a job."""
    from jobs.ExtensionJob import ExtensionJob

    assert clone.is_dir()
    return ExtensionJob({"config": {"name": "name", "process": list(processes)}}).process


def build_network(*names):
    """Build a network with ai-toolkit's module names, which have `$$` for dots."""
    network = nn.Module()
    modules = []
    for name in names:
        layer = nn.Linear(2, 2, bias=False)
        layer.lora_name = name
        network.add_module(name, layer)
        modules.append(layer)
    network.get_all_modules = lambda: modules
    return network


def two_expert_model(trained=(0, 1)):
    from toolkit.samplers.custom_flowmatch_sampler import CustomFlowMatchEulerDiscreteScheduler

    return SimpleNamespace(
        is_multistage=True,
        multistage_boundaries=[0.875, 0.0],
        trainable_multistage_boundaries=list(trained),
        noise_scheduler=CustomFlowMatchEulerDiscreteScheduler(),
    )


BOTH = ("transformer$$transformer_1$$a", "transformer$$transformer_2$$a")
FORKS_NAMES = ("transformer$$transformer1$$a", "transformer$$transformer2$$a")
ONE = SimpleNamespace(is_multistage=False)


def run(process, model=ONE, names=("transformer$$a",)):
    process.run(model, build_network(*names))
    return process


def test_a_process_without_our_keys_keeps_its_class(clone):
    (process,) = make_processes(clone, {"type": "sd_trainer"})
    from extensions_built_in.sd_trainer.SDTrainer import SDTrainer

    assert type(process) is SDTrainer


def test_one_of_our_keys_extends_the_process_class(clone):
    plain, ours, always = make_processes(
        clone, {"type": "merge"}, {"type": "sd_trainer", "gracetune": {}}, {"type": "gracetune"}
    )
    assert type(plain).__name__ == "Merger"
    assert type(ours).__name__ == "SDTrainer"
    assert ours.gracetune_blocks.check_saves
    assert always.gracetune_blocks.check_saves


def test_a_second_process_of_the_same_type_without_our_keys_is_unchanged(clone):
    quiet, _ = make_processes(
        clone, {"type": "sd_trainer"}, {"type": "sd_trainer", "gracetune": {}}
    )
    assert not quiet.gracetune_blocks.check_saves
    assert not quiet.gracetune_blocks.stage_timesteps


def test_our_keys_are_refused_in_a_process_that_is_not_a_trainer(clone):
    with pytest.raises(ConfigError, match="type merge has gracetune keys, but is not a trainer"):
        make_processes(clone, {"type": "merge", "gracetune": {}})


def test_a_misspelled_key_stops_the_job(clone):
    with pytest.raises(ConfigError, match="Did you mean 'gracetune'"):
        make_processes(clone, {"type": "sd_trainer", "gracetunes": {}})


def test_a_clone_that_does_not_fit_still_runs_without_our_keys(clone):
    file = clone / "toolkit" / "data_loader.py"
    file.write_text(file.read_text().replace("def setup_epoch", "def begin_epoch"))
    with pytest.raises(HostError, match=r"has no AiToolkitDataset\.setup_epoch"):
        make_processes(clone, {"type": "sd_trainer", "gracetune": {}})
    import toolkit.dataloader_mixins as mixins

    assert mixins.Image is Image
    make_processes(clone, {"type": "sd_trainer"})


def entry(folder, **keys):
    return {
        "type": "sd_trainer",
        "gracetune": {},
        "datasets": [{"folder_path": str(folder), **keys}],
    }


def test_staged_images_and_captions_are_read_from_memory(clone, images):
    (process,) = make_processes(clone, entry(images, in_memory={"compression": "none"}))
    (data,) = run(process).data_loader
    (images / "1.png").unlink()
    (images / "1.txt").unlink()
    item = data[1]
    assert item.image.getpixel((0, 0)) == (40, 40, 40)
    assert item.caption == "caption 1"
    import toolkit.dataloader_mixins as mixins

    with mixins.open(images / "2.txt") as file:
        assert file.read() == "caption 2"
    assert mixins.Image.fromarray is Image.fromarray
    with pytest.raises(FileNotFoundError):
        mixins.Image.open(str(images / "4.png"))


def test_the_next_job_does_not_see_staged_files_of_the_last(clone, images):
    (process,) = make_processes(clone, entry(images, in_memory={"compression": "none"}))
    run(process)
    plugin = plugin_of(process)
    assert plugin.staged_bytes(str(images / "1.txt")) == b"caption 1"
    make_processes(clone, process_with_memory(images))
    assert plugin.memory is not None
    make_processes(clone, {"type": "sd_trainer"})
    assert (plugin.staged_bytes(str(images / "1.txt")), plugin.memory) == (None, None)


def test_staged_videos_are_opened_from_memory(clone, images):
    import cv2

    file = images / "0.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"MJPG"), 4, (16, 16))
    for _ in range(3):
        writer.write(np.zeros((16, 16, 3), dtype=np.uint8))
    writer.release()
    (process,) = make_processes(clone, entry(images, in_memory={}))
    run(process)
    file.unlink()
    import toolkit.dataloader_mixins as mixins

    assert int(mixins.cv2.VideoCapture(str(file)).get(cv2.CAP_PROP_FRAME_COUNT)) == 3
    assert not mixins.cv2.VideoCapture(str(images / "none.avi")).isOpened()


CACHED = {"cache_latents_to_disk": True, "augmentations": [FLIP]}


def files(images):
    return sorted(each.name for each in (images / "_latent_cache").iterdir())


def test_a_cache_mode_keeps_the_cache_that_stock_would_disable(clone, images):
    given = {"type": "sd_trainer", "datasets": [{"folder_path": str(images), **CACHED}]}
    (stock,) = make_processes(clone, given)
    assert not stock.dataset_configs[0].cache_latents_to_disk
    (ours,) = make_processes(clone, entry(images, **CACHED, augmentations_cache_mode="static"))
    assert ours.dataset_configs[0].cache_latents_to_disk
    assert ours.dataset_configs[0].augmentations == [FLIP]


def test_static_caches_are_encoded_once_and_named_by_their_augmentations(clone, images):
    plain = {"cache_latents_to_disk": True}
    run(make_processes(clone, entry(images, **plain))[0])
    unaugmented = files(images)
    mode = {"augmentations_cache_mode": "static"}
    (data,) = run(make_processes(clone, entry(images, **CACHED, **mode))[0]).data_loader
    assert len(files(images)) == 2 * len(unaugmented)
    data.setup_epoch()
    assert data.num_encoded == 3
    (again,) = run(make_processes(clone, entry(images, **CACHED, **mode))[0]).data_loader
    assert again.num_encoded == 0
    other = {**CACHED, "augmentations": [{**FLIP, "params": {"p": 1.0}}]}
    (changed,) = run(make_processes(clone, entry(images, **other, **mode))[0]).data_loader
    assert changed.num_encoded == 3


def test_an_edited_image_is_encoded_again(clone, images):
    mode = {"augmentations_cache_mode": "static"}
    run(make_processes(clone, entry(images, **CACHED, **mode))[0])
    os.utime(images / "0.png", (1, 1))
    (data,) = run(make_processes(clone, entry(images, **CACHED, **mode))[0]).data_loader
    assert data.num_encoded == 1


def test_a_refresh_writes_new_files_and_deletes_the_last_but_one(clone, images):
    given = entry(images, **CACHED, augmentations_cache_mode="refresh_each_epoch")
    (data,) = run(make_processes(clone, given)[0]).data_loader
    first = set(files(images))
    assert data[0]._encoded_latent[0] == 0
    data.setup_epoch()
    second = set(files(images)) - first
    assert len(second) == 3
    assert first < set(files(images)), "workers may still read the previous epoch"
    assert data[0]._encoded_latent[0] == 3
    data.setup_epoch()
    assert data[0]._encoded_latent[0] == 6
    assert not first & set(files(images))
    assert second < set(files(images))


def test_workers_switch_to_a_new_augmentation_epoch_once_it_is_complete(clone, images):
    """A worker is a fork, with its own copy of the settings."""
    given = entry(images, **CACHED, augmentations_cache_mode="refresh_each_epoch")
    (data,) = run(make_processes(clone, given)[0]).data_loader
    ask, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(2):
            os.read(ask[0], 1)
            os.write(answer[1], bytes([int(data[0]._encoded_latent[0])]))
        os._exit(0)
    os.write(ask[1], b".")
    before = os.read(answer[0], 1)
    data.setup_epoch()
    os.write(ask[1], b".")
    after = os.read(answer[0], 1)
    os.waitpid(child, 0)
    assert (before, after) == (b"\x00", b"\x03")


def test_a_failed_refresh_keeps_the_previous_augmentation_epoch(clone, images):
    given = entry(images, **CACHED, augmentations_cache_mode="refresh_each_epoch")
    (data,) = run(make_processes(clone, given)[0]).data_loader
    (images / "2.png").write_bytes(b"not an image")
    with pytest.raises(OSError, match="cannot identify"):
        data.setup_epoch()
    assert data[0]._encoded_latent[0] == 0


def process_with_memory(images, **cache):
    given = entry(images, cache_latents_to_disk=True)
    return given | {"gracetune": {"cache_config": cache}}


def test_cache_files_are_preloaded_and_not_read_again(clone, images, monkeypatch):
    (process,) = make_processes(clone, process_with_memory(images, host_budget_gb=1))
    (data,) = run(process).data_loader
    (images / "_t_e_cache").mkdir()
    save_file({"text_embed": torch.ones(3)}, images / "_t_e_cache" / "text.safetensors")
    import toolkit.dataloader_mixins as mixins

    monkeypatch.setattr(mixins.TextEmbeddingFileItemDTOMixin, "is_text_embedding_cached", True)
    plugin = plugin_of(process)
    before = plugin.memory.misses
    assert before == 3, "preloaded before workers are forked"
    one, two = data[1], data[1]
    assert torch.equal(one._encoded_latent, torch.full((4,), 1.0))
    assert plugin.memory.misses == before + 1, "the text embedding, once"
    assert plugin.memory.hits == 3
    assert one.prompt_embeds.text_embeds is two.prompt_embeds.text_embeds
    with pytest.raises(SafetensorError, match="meta"):
        mixins.load_file(
            one.get_latent_path(), device="meta"
        )  # ai-toolkit loads other devices itself


def plugin_of(process):
    hook = type(process).__init__.__closure__
    return next(cell.cell_contents for cell in hook if hasattr(cell.cell_contents, "memory"))


def test_each_kind_of_cache_may_stay_on_disk(clone, images):
    none = process_with_memory(images, vae_cache_type="disk", text_cache_type="disk")
    (process,) = make_processes(clone, none)
    assert plugin_of(process).memory is None
    (process,) = make_processes(
        clone, process_with_memory(images, host_budget_gb=1, vae_cache_type="disk")
    )
    (data,) = run(process).data_loader
    assert data[0]._encoded_latent[0] == 0
    assert plugin_of(process).memory.misses == 0


def test_cache_files_beyond_the_budget_are_reported(clone, images, capsys):
    given = process_with_memory(images, host_budget_gb=1e-7)
    (data,) = run(make_processes(clone, given)[0]).data_loader
    output = capsys.readouterr().out
    assert "of 3 cache files stay on disk" in output
    assert data[2]._encoded_latent[0] == 2


def test_workers_do_not_store_what_they_load(clone, images):
    (process,) = make_processes(clone, process_with_memory(images, host_budget_gb=1))
    run(process)
    plugin = plugin_of(process)
    path = str(images / "_latent_cache" / "new.safetensors")
    save_file({"latent": torch.ones(2)}, path)
    child = os.fork()
    if child == 0:
        plugin.load(path, lambda _: {"latent": torch.ones(2)})
        os._exit(plugin.memory.misses)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_workers_that_are_not_forks_are_refused():
    assert worker_start_method() == "fork"
    check_workers_fork(2, "fork")
    check_workers_fork(0, "spawn")
    with pytest.raises(ConfigError, match="num_workers: 2, and Python starts workers by spawn"):
        check_workers_fork(2, "spawn")


def automagic(**params):
    return {"type": "sd_trainer", "train": {**STAGES, "optimizer_params": params}}


@pytest.mark.parametrize("names", [BOTH, FORKS_NAMES])
def test_each_expert_has_its_own_bounds(clone, names):
    params = {"high_noise_lr_bump": 1e-6, "low_noise_lr_bump": 5e-7, "low_noise_max_lr": 5e-4}
    (process,) = make_processes(clone, automagic(**params))
    run(process, two_expert_model(), names)
    high, low = process.optimizer.param_groups
    assert (high["stage"], high["lr_bump"], high["max_lr"]) == ("high", 1e-6, 1e-3)
    assert (low["stage"], low["lr_bump"], low["max_lr"]) == ("low", 5e-7, 5e-4)
    assert high["start_lr"] == 2e-6
    for p in process.network.parameters():
        p.grad = torch.ones_like(p)
    process.optimizer.step()
    assert process.optimizer.get_avg_learning_rate() == pytest.approx(2e-6)


@pytest.mark.parametrize(("trained", "stage"), [((0,), "high"), ((1,), "low")])
def test_a_single_expert_is_known_by_the_trained_stage(clone, trained, stage):
    (process,) = make_processes(clone, automagic(**{f"{stage}_noise_max_lr": 1e-5}))
    run(process, two_expert_model(trained))
    (group,) = process.optimizer.param_groups
    assert (group["stage"], group["max_lr"]) == (stage, 1e-5)


def test_bounds_by_stage_are_refused_without_stages(clone):
    (process,) = make_processes(clone, automagic(high_noise_max_lr=1e-4))
    with pytest.raises(ConfigError, match="one transformer for all noise levels"):
        run(process)


def test_other_optimizers_are_unchanged(clone):
    (process,) = make_processes(clone, {"type": "sd_trainer", "gracetune": {}})
    run(process)
    assert type(process.optimizer) is torch.optim.AdamW
    assert "stage" not in process.optimizer.param_groups[0]


def draw_timesteps(process, stage):
    batch = SimpleNamespace(latents=torch.zeros(1), prompt_embeds=None, file_items=[])
    process.current_boundary_index = stage
    return torch.cat([process.process_general_training_batch(batch)[2] for _ in range(20)])


def test_timesteps_stay_in_their_stage(clone):
    torch.manual_seed(0)
    (stock,) = make_processes(
        clone, {"type": "sd_trainer", "gracetune": {"stage_timesteps": False}}
    )
    (ours,) = make_processes(clone, {"type": "sd_trainer", "gracetune": {}})
    for process in (stock, ours):
        run(process, two_expert_model(), BOTH)
    assert draw_timesteps(stock, 1).max() > 875
    assert draw_timesteps(ours, 1).max() <= 875
    assert draw_timesteps(ours, 0).min() > 875
    assert draw_timesteps(ours, 1).max() <= 875
    assert draw_timesteps(ours, 1).max() > 870, "the window is as wide as possible"


def test_timestep_types_without_stages_are_refused(clone):
    given = {"type": "sd_trainer", "gracetune": {}, "train": {"timestep_type": "two_step"}}
    (process,) = make_processes(clone, given)
    with pytest.raises(ConfigError, match="timestep_type is two_step"):
        run(process, two_expert_model(), BOTH)


@pytest.mark.parametrize(("stage", "timesteps"), [(0, [800.0, 100.0]), (1, [990.0, 900.0])])
def test_a_stage_without_timesteps_is_refused(stage, timesteps):
    with pytest.raises(ConfigError, match=f"stage {stage} of the model"):
        stage_boundaries(torch.tensor(timesteps), [0.875, 0.0], stage)


def test_the_forks_helpers_can_be_imported(clone):
    given = {"type": "sd_trainer", "gracetune": {"gh200_optimizations": {"enable_uvm_hints": True}}}
    make_processes(clone, given)
    from toolkit import gh200_helpers

    assert gh200_helpers.gh200_uvm_enabled()
    assert not gh200_helpers.prefer_cpu_residency(torch.ones(1)), "there is no managed memory"
    gh200_helpers.set_uvm_hint_override(False)
    assert not gh200_helpers.gh200_uvm_enabled()


def test_batches_are_placed_if_hints_are_enabled(clone, capsys):
    given = {"type": "sd_trainer", "gracetune": {"gh200_optimizations": {"enable_uvm_hints": True}}}
    (process,) = make_processes(clone, given)
    run(process)
    process.sd = two_expert_model()
    embeds = SimpleNamespace(text_embeds=torch.zeros(2))
    batch = SimpleNamespace(latents=torch.zeros(1), prompt_embeds=embeds, file_items=[object()])
    process.process_general_training_batch(batch)
    output = capsys.readouterr().out
    assert "prefer_cpu_residency is unsupported: no GPU" in output


def lora_tensors(*modules):
    tensors = {}
    for module in modules:
        key = f"diffusion_model.blocks.0.self_attn.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(2, 8)
        tensors[f"{key}.lora_B.weight"] = torch.randn(8, 2)
    return tensors


def saving_process(clone, folder, parts, gracetune=None):
    """Build a process with two experts whose network writes the given files."""
    given = {"type": "sd_trainer", "gracetune": gracetune or {}, "training_folder": str(folder)}
    (process,) = make_processes(clone, given)
    names = [
        f"transformer$$transformer_{stage}$$blocks$$0$$attn1$$to_{part}"
        for stage in (1, 2)
        for part in "qk"
    ]
    run(process, two_expert_model(), names)

    def save_weights(path):
        for part, tensors in parts.items():
            save_file(tensors, path.replace(".safetensors", f"{part}.safetensors"))

    process.network.save_weights = save_weights
    return process


def test_a_save_is_read_back_and_its_modules_counted(clone, tmp_path, capsys):
    whole = lora_tensors("q", "k")
    process = saving_process(clone, tmp_path, {"_high_noise": whole, "_low_noise": whole})
    process.save(7)
    output = capsys.readouterr().out
    assert output.count("holds 2 modules. diffusers: 2 of 2 modules comfyui: 2 of 2") == 2
    assert "name_000000007_low_noise.safetensors" in output


def test_a_save_that_lost_modules_stops_the_run(clone, tmp_path):
    parts = {"_high_noise": lora_tensors("q", "k"), "_low_noise": lora_tensors("q")}
    with pytest.raises(
        AdapterError, match=r"name_low_noise.* lacks 1 of 2 modules, first blocks.0.attn1"
    ):
        saving_process(clone, tmp_path, parts).save()


def test_a_missing_file_of_one_stage_stops_the_run(clone, tmp_path):
    with pytest.raises(AdapterError, match=r"name_low_noise\.safetensors does not exist"):
        saving_process(clone, tmp_path, {"_high_noise": lora_tensors("q", "k")}).save()


def test_checks_can_be_disabled(clone, tmp_path):
    saving_process(clone, tmp_path, {}, {"check_saves": False}).save()


def test_module_names_without_a_stage_are_refused_before_training(clone):
    (process,) = make_processes(clone, {"type": "sd_trainer", "gracetune": {}})
    with pytest.raises(ConfigError, match="old_lokr_format: false"):
        run(process, two_expert_model(), ["lora_transformer_transformer_1_blocks_0_attn1_to_q"])
    (process,) = make_processes(clone, {"type": "sd_trainer", "gracetune": {"check_saves": False}})
    run(process, two_expert_model(), ["lora_transformer_transformer_1_blocks_0_attn1_to_q"])


def test_a_torchao_that_peft_refuses_is_named_before_training(clone, monkeypatch):
    def refuse():
        raise ImportError("Found an incompatible version of torchao")

    monkeypatch.setattr("peft.import_utils.is_torchao_available", refuse)
    process = {"type": "sd_trainer", "network": {"type": "lora"}, "gracetune": {}}
    with pytest.raises(ConfigError, match=r"check_saves is true.*torchao==0\.17\.0"):
        make_processes(clone, process)
    make_processes(clone, process | {"gracetune": {"check_saves": False}})
    make_processes(clone, {"type": "sd_trainer", "gracetune": {}})


def test_a_file_that_cannot_be_interpreted_is_reported_as_unchecked(clone, tmp_path, capsys):
    process = saving_process(clone, tmp_path, {"": {"lora_te.weird": torch.ones(2)}})
    process.sd = ONE
    process.save()
    output = capsys.readouterr().out
    assert "name.safetensors was not checked" in output


def test_a_damaged_file_stops_the_run(clone, tmp_path):
    process = saving_process(
        clone,
        tmp_path,
        {
            "": lora_tensors("q")
            | {"diffusion_model.blocks.0.self_attn.q.alpha": torch.tensor(float("nan"))}
        },
    )
    process.sd = ONE
    with pytest.raises(AdapterError, match="nan"):
        process.save()
