import json
import wave
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice
from gracetune.models.family import GeneratedSample
from gracetune.train import validate as validate_module
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler
from gracetune.train.validate import (
    ValidationWriteError,
    contact_sheet,
    generate_samples,
    held_out_loss,
    image_grid,
    sample_problem,
    spectrogram,
    validate,
    write_sample,
)

SECTION = {"every": 1, "sample_steps": 2, "holdout": 0.2}


@pytest.fixture
def session(tiny_run, recorder, tmp_path):
    def make(**validation):
        run = tiny_run(validation=SECTION | validation)
        (tmp_path / "run").mkdir(exist_ok=True)
        return build_session(
            run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
        )

    return make


def test_samples_are_reproducible_and_leave_the_weights_alone(session):
    s = session(prompts=["a red circle on a black background", "a blue box"])
    before = {n: p.detach().clone() for n, p in s.state.parameters.items()}
    state = torch.get_rng_state()
    first = validate(s.state, s.validation, 0)
    again = validate(s.state, s.validation, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.event.losses == again.event.losses
    files = [s.validation.folder / f"step-00000{n}" / "000.png" for n in (0, 7)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert s.state.transformer.training
    for name, parameter in s.state.parameters.items():
        assert torch.equal(parameter, before[name])


def test_a_holdout_that_is_less_than_a_file_is_reported(session, recorder):
    assert session(prompts=["one"], holdout=0.001).validation.held_out == []
    (text,) = [one.text for one in recorder.of(Notice) if "holdout" in one.text]
    assert text.startswith("validation.holdout is 0.001, which is none of 64 files, so no held-out")
    assert text.endswith("Set it to at least 0.016")
    assert session(prompts=["one"], holdout=0.016).validation.held_out


def test_a_sample_does_not_depend_on_the_other_prompts(session):
    alone = session(prompts=["a red circle"])
    together = session(prompts=["a red circle", "a blue box on a white background"])
    with torch.no_grad():
        first = generate_samples(alone.state, alone.validation)[0]
        second = generate_samples(together.state, together.validation)[0]
    assert first.kind == "image"
    assert first.data.std() > 0
    torch.testing.assert_close(
        first.data, second.data
    )  # sums in another order are rounded differently


def test_a_grid_is_written_completely_or_not_at_all(session, monkeypatch):
    class FailingImage:
        def save(self, file, format):
            file.write_bytes(b"half")
            raise OSError("no space")

    monkeypatch.setattr(validate_module, "image_grid", lambda *_: FailingImage())
    s = session(prompts=["a red circle"])
    with pytest.raises(ValidationWriteError, match=r"step-000003\.png cannot be written: no space"):
        validate(s.state, s.validation, 3)
    assert [path.name for path in s.validation.folder.iterdir()] == ["step-000003"]


def test_captions_are_the_default_prompts_and_are_reported(session, recorder):
    s = session(num_prompts=3)
    assert len(s.validation.prompts) == 3
    (text,) = [t for t in recorder.texts() if t.startswith("validation.prompts")]
    assert all(repr(prompt) in text for prompt in s.validation.prompts)


def test_file_names_contain_the_step(session):
    s = session(prompts=["one", "two"])
    event = validate(s.state, s.validation, 12).event
    assert event.grid == str(s.validation.folder / "step-000012.png")
    folder = s.validation.folder / "step-000012"
    assert json.loads((folder / "prompts.json").read_text()) == ["one", "two"]
    with Image.open(folder / "001.png") as image:
        assert image.size == (24, 24)


def test_validation_uses_the_ema(session):
    s = session(prompts=["one"])
    before = validate(s.state, s.validation, 0).event.losses["held_out"]
    for parameter in s.state.parameters.values():
        parameter.data.mul_(1.5)
    assert validate(s.state, s.validation, 1).event.losses["held_out"] == before


def test_the_held_out_loss_is_a_mean_over_samples_with_fixed_noise(session):
    s = session(prompts=["one"])
    with torch.no_grad():
        first = held_out_loss(s.state, s.validation.held_out)
        second = held_out_loss(s.state, s.validation.held_out)
    assert first == second
    losses, by_timestep, single = first
    assert 0.5 < losses["held_out"] < 3.0
    ranges = ["t0.00-0.25", "t0.25-0.50", "t0.50-0.75", "t0.75-1.00"]
    assert list(by_timestep) == ranges
    total = sum(part["samples"] for part in by_timestep.values())
    assert total == sum(map(len, s.validation.held_out))
    mean = sum(part["samples"] * part["loss"] for part in by_timestep.values()) / total
    assert mean == pytest.approx(losses["held_out"])
    assert sum(single) / len(single) == pytest.approx(mean)
    assert held_out_loss(s.state, []) == ({}, {}, [])


def test_a_few_held_out_samples_are_measured_all_over_the_timesteps(session):
    s = session(prompts=["one"], holdout=0.03)
    assert sum(map(len, s.validation.held_out)) == 2
    with torch.no_grad():
        _, by_timestep, _ = held_out_loss(s.state, s.validation.held_out)
    assert {name: part["samples"] for name, part in by_timestep.items()} == {
        "t0.00-0.25": 2,
        "t0.25-0.50": 2,
        "t0.50-0.75": 2,
        "t0.75-1.00": 2,
    }


@pytest.mark.parametrize(
    ("kind", "data", "problem"),
    [
        ("image", torch.full((3, 8, 8), -1.0), "black"),
        ("image", torch.full((3, 8, 8), 1.0), "white"),
        ("image", torch.full((3, 8, 8), 0.2), "flat"),
        ("image", torch.full((3, 8, 8), torch.nan), "not finite"),
        ("video", torch.full((3, 5, 8, 8), -1.2), "black"),
        ("audio", torch.zeros(2, 100), "silent"),
        ("audio", torch.linspace(-1, 1, 100).expand(2, -1), ""),
        ("image", torch.linspace(-1, 1, 192).view(3, 8, 8), ""),
    ],
)
def test_samples_that_show_nothing_are_recognised(kind, data, problem):
    found = sample_problem(GeneratedSample(kind, data, 100.0))
    assert bool(found) == bool(problem)
    assert problem in found


def test_the_settings_of_each_sample_are_next_to_it(session):
    prompts = ["one", {"prompt": "two", "seed": 7, "width": 32, "steps": 3}]
    s = session(prompts=prompts)
    validate(s.state, s.validation, 4)
    record = json.loads((s.validation.folder / "step-000004/samples.json").read_text())
    assert record["step"] == 4
    assert [(one["prompt"], one["seed"], one["width"]) for one in record["samples"]] == [
        ("one", 0, 24),
        ("two", 7, 32),
    ]
    files = [s.validation.folder / "step-000004" / one["file"] for one in record["samples"]]
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize(("width", "height"), [(26, 24), (24, 200)])
def test_sizes_that_the_model_cannot_generate_are_rejected(session, width, height):
    with pytest.raises(Exception, match=r"validation\.width and height"):
        session(width=width, height=height)


def test_a_grid_shows_every_image_and_caption():
    images = [Image.new("RGB", (24, 24), (index * 40, 0, 0)) for index in range(5)]
    sheet = image_grid(images, ["a rather long caption " * 3] * 5, "step 3")
    assert sheet.width >= 3 * 24 * 6
    colours = {
        sheet.getpixel((x, y)) for x in range(0, sheet.width, 9) for y in range(0, sheet.height, 9)
    }
    assert {(index * 40, 0, 0) for index in range(5)} <= colours


def test_the_held_out_loss_of_bf16_latents_uses_fp32_noise(session):
    s = session()
    rounded = [replace(b, latents=b.latents.bfloat16()) for b in s.validation.held_out]
    widened = [replace(b, latents=b.latents.float()) for b in rounded]
    with torch.no_grad():
        losses = [held_out_loss(s.state, batches) for batches in (rounded, widened)]
    assert losses[0] == losses[1]


def test_an_image_is_written_unchanged(tmp_path):
    data = torch.linspace(-1.2, 1.2, 3 * 4 * 6).view(3, 4, 6)
    image = write_sample(GeneratedSample("image", data), tmp_path, "000")
    assert [path.name for path in tmp_path.iterdir()] == ["000.png"]
    saved = np.asarray(Image.open(tmp_path / "000.png"))
    assert saved.shape == (4, 6, 3)
    expected = data.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(1, 2, 0).numpy()
    assert (saved == expected).all()
    assert image.size == (6, 4)


def test_a_clip_is_written_with_its_frames_and_rate(tmp_path):
    shades = torch.linspace(-0.8, 0.8, 9)
    data = shades.view(1, 9, 1, 1).expand(3, 9, 32, 48)
    write_sample(GeneratedSample("video", data, 16.0), tmp_path, "007")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["007.mp4", "007.png"]
    with av.open(str(tmp_path / "007.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 16
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(frames) == 9
    assert frames[0].shape == (32, 48, 3)
    for frame, shade in zip(frames, shades.tolist(), strict=True):
        assert abs(frame.mean() - (shade + 1) * 127.5) < 4


@pytest.mark.parametrize(("frames", "size"), [(1, (8, 8)), (5, (32, 16)), (81, (32, 16))])
def test_a_contact_sheet_shows_the_first_and_the_last_frame(frames, size):
    shades = torch.linspace(-1, 1, frames) if frames > 1 else torch.tensor([0.5])
    sheet = contact_sheet(shades.view(1, frames, 1, 1).expand(3, frames, 8, 8))
    assert sheet.size == size
    assert sheet.getpixel((0, 0))[0] == round((shades[0].item() + 1) * 127.5)
    count = min(8, frames)
    last = ((count - 1) % 4 * 8, (count - 1) // 4 * 8)
    assert sheet.getpixel(last)[0] == round((shades[-1].item() + 1) * 127.5)


def test_audio_is_written_with_its_rate_and_channels(tmp_path):
    time = torch.arange(8000) / 8000
    tone = torch.sin(2 * torch.pi * 1000 * time)
    data = torch.stack([tone * 0.5, tone * 2])  # the second channel is clipped
    write_sample(GeneratedSample("audio", data, 8000), tmp_path, "000")
    with wave.open(str(tmp_path / "000.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 8000)
        samples = np.frombuffer(file.readframes(8000), "<i2").reshape(-1, 2)
    assert abs(samples[:, 0].max() - 16384) <= 1
    assert samples[:, 1].max() == 32767
    assert (tmp_path / "000.png").is_file()


def test_a_spectrogram_is_bright_at_the_frequency_of_a_tone():
    time = torch.arange(16000) / 16000
    image = np.asarray(spectrogram(torch.sin(2 * torch.pi * 4000 * time)[None])).astype(int)
    brightness = image.sum(2).mean(1)
    assert image.shape == (256, 512, 3)
    assert abs(int(brightness.argmax()) - 128) <= 2  # half of the Nyquist frequency: the middle
    assert brightness.max() > 400
    assert brightness[10] < 60
    silent = np.asarray(spectrogram(torch.zeros(2, 100)))
    assert silent.max() <= 4
