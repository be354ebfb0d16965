"""Write small datasets of images, videos and audio, and the settings to read them with."""

import wave

import numpy as np
from PIL import Image

COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200)]


def write_images(folder, size=(32, 32)):
    folder.mkdir()
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", size, colour).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red ring")


def write_videos(folder):
    import av  # not on every machine with a GPU

    folder.mkdir()
    for number, colour in enumerate(COLOURS):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("libx264", 8)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for shade in range(8):
                pixels = np.full((32, 32, 3), [max(0, c - 4 * shade) for c in colour], np.uint8)
                for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        (folder / f"{number}.txt").write_text("a red ring")


def write_masks(folder):
    folder.mkdir()
    for number in range(len(COLOURS)):
        mask = Image.new("L", (64, 64))
        mask.paste(255, (0, 0, 32, 16 * (number + 1)))
        mask.save(folder / f"{number}.png")


def write_audio(folder):
    folder.mkdir()
    for number in range(3):
        time = np.arange(4000) / 16000
        tone = (np.sin(2 * np.pi * 220 * (number + 1) * time) * 20000).astype("<i2")
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(tone.tobytes())
        (folder / f"{number}.txt").write_text("a sound")


WRITE = {"image": write_images, "video": write_videos, "audio": write_audio}
DATA = {
    "image": {"resolution": 32, "max_aspect": 1.0},
    "video": {"resolution": 32, "max_aspect": 1.0, "frames": 5},
    "audio": {"sample_rate": 16000, "channels": 2, "seconds": 0.25},
}
