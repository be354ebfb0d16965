import wave

import av
import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.models.family import Sampled
from gracetune.train.validate import contact_sheet, require_packages, spectrogram, write_sample


def test_a_picture_is_written_as_it_is(tmp_path):
    data = torch.linspace(-1.2, 1.2, 3 * 4 * 6).view(3, 4, 6)
    still = write_sample(Sampled("image", data), tmp_path, "000")
    assert [path.name for path in tmp_path.iterdir()] == ["000.png"]
    saved = np.asarray(Image.open(tmp_path / "000.png"))
    assert saved.shape == (4, 6, 3)
    wanted = data.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(1, 2, 0).numpy()
    assert (saved == wanted).all()
    assert still.size == (6, 4)


def test_a_clip_plays_with_its_frames_and_rate(tmp_path):
    shades = torch.linspace(-0.8, 0.8, 9)
    data = shades.view(1, 9, 1, 1).expand(3, 9, 32, 48)
    write_sample(Sampled("video", data, 16.0), tmp_path, "007")
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


def test_a_sound_is_written_with_its_rate_and_channels(tmp_path):
    time = torch.arange(8000) / 8000
    tone = torch.sin(2 * torch.pi * 1000 * time)
    data = torch.stack([tone * 0.5, tone * 2])  # the second is cut off at full scale
    write_sample(Sampled("audio", data, 8000), tmp_path, "000")
    with wave.open(str(tmp_path / "000.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 8000)
        samples = np.frombuffer(file.readframes(8000), "<i2").reshape(-1, 2)
    assert abs(samples[:, 0].max() - 16384) <= 1
    assert samples[:, 1].max() == 32767
    assert (tmp_path / "000.png").is_file()


def test_a_spectrogram_is_bright_where_the_tone_is_and_dark_elsewhere():
    time = torch.arange(16000) / 16000
    picture = np.asarray(spectrogram(torch.sin(2 * torch.pi * 4000 * time)[None])).astype(int)
    brightness = picture.sum(2).mean(1)
    assert picture.shape == (256, 512, 3)
    assert abs(int(brightness.argmax()) - 128) <= 2  # half of what 16 kHz can hold: the middle
    assert brightness.max() > 400
    assert brightness[10] < 60
    silent = np.asarray(spectrogram(torch.zeros(2, 100)))
    assert silent.max() <= 4


def test_what_a_kind_needs_is_asked_for_early():
    for kind in ("image", "video", "audio"):
        require_packages(kind)
