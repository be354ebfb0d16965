"""Train a small run with one planted fault: `python planted_run.py FAULT FOLDER`.

All faults are real, in the settings, the data, the model or the machine, except for throttling,
which is injected at the sensors: no GPU is needed.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from gracetune.cli.main import main

GIB = 1024**3
GROUP = Path("/sys/fs/cgroup/memory/gracetune-planted")
PROMPTS = ["a red circle", "a green cross"]
SHAPES = {"id": "shapes", "type": "shapes", "resolution": 24, "shapes": {"copies": 1}}


def settings(folder, **sections):
    """Return a run file of the demo's model; sections are merged into it."""
    run = {
        "output_dir": str(folder / "run"),
        "model": {"family": "tiny"},
        "datasets": [SHAPES | {"instance_data_dir": str(folder / "data")}],
        "train": {"max_train_steps": 80, "batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "logging": {"every": 5},
        "validation": {"every": 0},
    }
    for name, section in sections.items():
        run[name] = run[name] | section if isinstance(run.get(name), dict) else section
    return run


def write_images(folder, count, size, make):
    folder.mkdir(parents=True)
    for number in range(count):
        make(number, size).save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(PROMPTS[number % 2])
    return folder


def noise_image(_number, size):
    return Image.frombytes("RGB", (size, size), os.urandom(3 * size * size))


def striped_image(number, size):
    image = Image.new("RGB", (size, size), (20 * number, 40, 200))
    image.paste((250, 200, 30), (0, 0, size // 2, size))
    image.paste(noise_image(number, size // 2), (0, 0))
    return image


def black_image(_number, size):
    return Image.new("RGB", (size, size))


def learning_rate_high(folder):
    """Start gently, so that the loss falls at first."""
    optimizer = {"lr": 0.1, "warmup_steps": 40}
    return settings(folder, optimizer=optimizer, train={"max_train_steps": 120, "batch_size": 8})


def dataset_dead(folder):
    black = write_images(folder / "black", 40, 24, black_image)
    run = settings(folder)
    second = {"id": "night", "type": "local", "resolution": 24, "instance_data_dir": str(black)}
    run["datasets"].append(second)
    return run


def part_untrained(folder):
    """Leave the audio blocks of a model with a video and an audio stream out of the adapter."""
    from fakes.two_streams import VIDEO_TARGETS, install_two_streams

    install_two_streams(folder / "site")
    adapter = {"rank": 2, "targets": VIDEO_TARGETS}
    return settings(folder, model={"family": "two_streams"}, adapter=adapter)


def page_cache(folder):
    """Read a file again and again that is larger than the memory of the run's control group."""
    GROUP.mkdir(exist_ok=True)
    group = GROUP
    (group / "memory.limit_in_bytes").write_text(str(1300 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    large = folder / "large"
    with large.open("wb") as file:
        for _ in range(110):
            file.write(os.urandom(10 << 20))
    reader = f"""
import os
while True:
    with open({str(large)!r}, "rb", buffering=0) as file:
        while file.read(1 << 20):
            os.getppid() == {os.getpid()} or os._exit(0)
"""
    subprocess.Popen([sys.executable, "-c", reader])
    return settings(folder, train={"max_train_steps": 4000, "batch_size": 8}, logging={"every": 20})


def throttling(folder):
    """Report a GPU that is too hot."""
    from gracetune.memory import sensors

    read = sensors.MachineSensors.read
    gpu = {"index": 0, "name": "H200", "temperature_c": 91.0, "sm_clock_mhz": 900.0}
    gpu |= {"max_sm_clock_mhz": 1980.0, "throttle": ["hardware thermal slowdown"]}

    def hot(self):
        return replace(read(self), gpus=(gpu,))

    mock.patch.object(sensors.MachineSensors, "read", hot).start()
    return settings(folder, train={"max_train_steps": 60, "batch_size": 8})


def weights_still(folder):
    return settings(folder, adapter={"rank": 2}, optimizer={"lr": 1e-12})


def overfitting(folder):
    noise = write_images(folder / "noise", 16, 24, noise_image)
    data = {"id": "few", "type": "local", "resolution": 24, "instance_data_dir": str(noise)}
    return settings(
        folder,
        datasets=[data],
        train={"max_train_steps": 400, "batch_size": 8},
        optimizer={"lr": 3e-3},
        validation={"every": 40, "holdout": 0.25, "prompts": PROMPTS, "sample_steps": 1},
    )


def timestep_shift(folder):
    return settings(
        folder,
        model={"family": "sd3", "path": str(miniature(folder))},
        adapter={"rank": 2},
        datasets=[miniature_data(folder)],
        train={"max_train_steps": 40, "batch_size": 4, "timestep_shift": 60.0},
    )


def samples_empty(folder):
    """Break the VAE's last layer, so that it puts out black."""
    model = miniature(folder)
    from safetensors.torch import load_file, save_file

    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_out.weight"].zero_()
    weights["decoder.conv_out.bias"].fill_(-1.0)
    save_file(weights, path)
    return settings(
        folder,
        model={"family": "sd3", "path": str(model)},
        adapter={"rank": 2},
        datasets=[miniature_data(folder)],
        train={"max_train_steps": 6, "batch_size": 2},
        logging={"every": 1},
        validation={"every": 3, "prompts": PROMPTS, "sample_steps": 2},
    )


def data_waits(folder):
    """Decode large images in every step, because nothing is cached."""
    large = write_images(folder / "large", 12, 1600, striped_image)
    data = {
        "id": "large",
        "type": "local",
        "resolution": 24,
        "crop": "random",
        "instance_data_dir": str(large),
        "augmentations_cache_mode": "disable_cache",
    }
    return settings(folder, datasets=[data], train={"max_train_steps": 40, "batch_size": 4})


# More faults than the ten above, which users have, too


def loss_explodes(folder):
    """Let the loss explode within the first steps."""
    return settings(folder, optimizer={"lr": 3.0}, logging={"every": 1})


def learning_rate_low(folder):
    """Train an adapter with a hundredth of a usual learning rate."""
    train = {"max_train_steps": 300, "batch_size": 8}
    return settings(folder, adapter={"rank": 2}, optimizer={"lr": 1e-6}, train=train)


def captions_missing(folder):
    data = write_images(folder / "uncaptioned", 24, 24, striped_image)
    for caption in data.glob("*.txt"):
        caption.write_text("\n")
    return with_data(folder, data)


def captions_same(folder):
    data = write_images(folder / "alike", 24, 24, striped_image)
    for caption in data.glob("*.txt"):
        caption.write_text("an image")
    return with_data(folder, data)


def captions_dropped(folder):
    return with_data(folder, write_images(folder / "mute", 24, 24, noise_image), caption_dropout=1)


def file_corrupt(folder):
    """Cut one of 120 files in half, as an interrupted download does."""
    data = write_images(folder / "cut", 120, 24, noise_image)
    file = data / "017.png"
    file.write_bytes(file.read_bytes()[:900])
    return with_data(folder, data)


def files_copied(folder):
    data = write_images(folder / "copied", 24, 24, noise_image)
    for number in range(6):
        (data / f"copy-{number}.png").write_bytes((data / "003.png").read_bytes())
        (data / f"copy-{number}.txt").write_text("a copy")
    return with_data(folder, data)


def few_samples(folder):
    train = {"max_train_steps": 2000, "batch_size": 8}
    return with_data(folder, write_images(folder / "few", 8, 24, noise_image), train=train)


def batches_small(folder):
    return with_data(
        folder,
        write_images(folder / "few", 6, 24, noise_image),
        train={"max_train_steps": 40, "batch_size": 16},
    )


def latents_unscaled(folder):
    """Leave out the scale of the VAE's latents, as with another model's config.json."""
    model = miniature(folder)
    path = model / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scaling_factor": 60.0}))
    return settings(
        folder,
        model={"family": "sd3", "path": str(model)},
        adapter={"rank": 2},
        datasets=[miniature_data(folder)],
        train={"max_train_steps": 6, "batch_size": 2},
        logging={"every": 1},
    )


def warmup_long(folder):
    return settings(folder, optimizer={"lr": 1e-3, "warmup_steps": 1000, "schedule": "constant"})


def gradients_clipped(folder):
    return settings(folder, train={"max_train_steps": 80, "batch_size": 8, "max_grad_norm": 1e-4})


def average_frozen(folder):
    """Forget to update the averaged weights, which samples are generated with."""
    from gracetune.train.step import Ema

    mock.patch.object(Ema, "update").start()
    return settings(
        folder,
        train={"max_train_steps": 60, "batch_size": 8, "ema_decay": 0.99},
        validation={"every": 30, "prompts": PROMPTS, "sample_steps": 2},
    )


def samples_noise(folder):
    """Let the VAE put out noise, as with the weights of another one."""
    from gracetune.models import sd3

    mock.patch.object(sd3.SD3, "sample", noisy_sample(sd3.SD3.sample)).start()
    return settings(
        folder,
        model={"family": "sd3", "path": str(miniature(folder))},
        adapter={"rank": 2},
        datasets=[miniature_data(folder)],
        train={"max_train_steps": 6, "batch_size": 2},
        logging={"every": 1},
        validation={"every": 3, "prompts": PROMPTS, "sample_steps": 2},
    )


def noisy_sample(sample):
    def call(self, *args, **kwargs):
        found = sample(self, *args, **kwargs)
        return [replace(one, data=torch.rand_like(one.data) * 2 - 1) for one in found]

    return call


def device_shared(folder):
    """Report another process on the GPU."""
    from gracetune.memory import sensors

    read = sensors.MachineSensors.read
    gpu = {"index": 0, "name": "H200", "other_processes": 1, "other_memory": 30 * GIB}
    mock.patch.object(
        sensors.MachineSensors, "read", lambda self: replace(read(self), gpus=(gpu,))
    ).start()
    return settings(folder, train={"max_train_steps": 300, "batch_size": 8})


def text_encoder_dead(folder):
    """Clear the weights of the text encoders, so that they put out zeros."""
    model = miniature(folder)
    from safetensors.torch import load_file, save_file

    for path in model.glob("text_encoder*/*.safetensors"):
        weights = {name: torch.zeros_like(one) for name, one in load_file(path).items()}
        save_file(weights, path, {"format": "pt"})
    return settings(
        folder,
        model={"family": "sd3", "path": str(model)},
        adapter={"rank": 2},
        datasets=[miniature_data(folder)],
        train={"max_train_steps": 6, "batch_size": 2},
        logging={"every": 1},
    )


def prompts_unrelated(folder):
    """Forget the trigger word in the prompts."""
    data = SHAPES | {"instance_data_dir": str(folder / "data"), "trigger_word": "ohwx"}
    validation = {"every": 40, "prompts": PROMPTS, "sample_steps": 1}
    return settings(folder, datasets=[data], validation=validation)


def ramp_long(folder):
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 8}
    ramp |= {"target_effective_batch_size": 64, "batch_rampup_steps": 5000}
    return settings(folder, gh200_optimizations=ramp)


def step_skipped(folder):
    """Let the loss of every eighth step be infinite, as with a kernel that overflows at times."""
    from gracetune.train import objective

    sample_losses, calls = objective.sample_losses, [0]

    def overflowing(*args):
        calls[0] += 1
        return sample_losses(*args) * (float("inf") if calls[0] % 8 == 0 else 1.0)

    mock.patch.object(objective, "sample_losses", overflowing).start()
    train = {"max_train_steps": 160, "batch_size": 8, "skip_bad_batches": True}
    return settings(folder, train=train)


def with_data(folder, data, train=None, **dataset):
    """Return a run file that trains on one folder of images."""
    section = {"id": data.name, "type": "local", "resolution": 24, "instance_data_dir": str(data)}
    run = settings(folder, datasets=[section | dataset])
    return run | {"train": train} if train else run


def miniature(folder):
    from fakes.miniatures import write_miniature

    return write_miniature("sd35-medium", folder / "model")


def miniature_data(folder):
    data = SHAPES | {"instance_data_dir": str(folder / "data"), "resolution": 64}
    return data | {"shapes": {"copies": 1, "size": 64}}


FAULTS = {
    "learning_rate_high": learning_rate_high,
    "dataset_dead": dataset_dead,
    "part_untrained": part_untrained,
    "page_cache": page_cache,
    "throttling": throttling,
    "weights_still": weights_still,
    "overfitting": overfitting,
    "timestep_shift": timestep_shift,
    "samples_empty": samples_empty,
    "data_waits": data_waits,
}
"""Name of the health check that must find it -> function that plants a fault."""

MORE_FAULTS = {
    function.__name__: function
    for function in (
        *(loss_explodes, learning_rate_low, captions_missing, captions_same, captions_dropped),
        *(file_corrupt, files_copied, few_samples, batches_small, latents_unscaled, warmup_long),
        *(gradients_clipped, average_frozen, samples_noise, device_shared, text_encoder_dead),
        *(prompts_unrelated, ramp_long, step_skipped),
    )
}


if __name__ == "__main__":
    fault, target = sys.argv[1], Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    file = target / "run-file.json"
    file.write_text(json.dumps((FAULTS | MORE_FAULTS)[fault](target)))
    sys.exit(main(["train", str(file)]))
