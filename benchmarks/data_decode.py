"""Compare image and video decoding with Pillow, torch's DataLoader, SimpleTuner and ai-toolkit.

The data are synthetic: 5,000 JPEG files with the statistics of photographs (amplitude falls as
1/f), some PNG and WebP files, and a video. All variants get the same files, the same bucket and the
same number of workers. They run in turns whose order changes, so that a noisy machine disturbs all
alike. A figure is the median over the turns; a ratio is the median of the ratios within a turn. The
end-to-end measurement reads different files in every turn, spread over the whole dataset.

    python benchmarks/data_decode.py [--pictures 5000] [--turns 5] [--reads 300] [--workers 2]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import cv2
import imagecodecs
import numpy as np
import results
import simplejpeg
import torch
from PIL import Image, ImageOps
from synthetic_data import make_images, make_video, photographs

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data import buckets
from gracetune.data.augment import SampleTransform, render
from gracetune.data.batch_order import BatchOrder, BucketGroup, Loader
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import PILLOW, choose_decoders, decode_pixels
from gracetune.data.prefetch import Prefetch, prefetched
from gracetune.data.sample import Batch
from gracetune.data.source import FolderSource
from gracetune.data.video import decode_video

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution of the CPU time: a rehearsal may take less."""
SIZE = (352, 264)
"""Width and height of the bucket, in pixels."""
CLIP = (17, 24.0)
"""Number of frames of a clip, and frames per second."""


def to_tensor(pixels: np.ndarray) -> torch.Tensor:
    """Convert pixels to a tensor like torchvision's ToTensor and Normalize([0.5], [0.5])."""
    chw = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    return chw.to(torch.float32).div(255).sub(0.5).div(0.5)


def resize_and_crop(image: Image.Image, how: Image.Resampling) -> torch.Tensor:
    """Resize an image until it covers the bucket, then crop the centre, as both trainers do."""
    scale = max(SIZE[0] / image.width, SIZE[1] / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), how)
    left, top = (image.width - SIZE[0]) // 2, (image.height - SIZE[1]) // 2
    image = image.crop((left, top, left + SIZE[0], top + SIZE[1]))
    return to_tensor(np.array(image))


def load_with_pillow(path: Path) -> torch.Tensor:
    """Load an image with Pillow alone: open, convert, resize, crop."""
    with Image.open(path) as image:
        return resize_and_crop(image.convert("RGB"), Image.Resampling.LANCZOS)


def load_like_simpletuner(path: Path) -> torch.Tensor:
    """Load an image as SimpleTuner does: OpenCV decodes twice, first to find an alpha channel."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    looked = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
    assert looked.shape[2] == 3
    pixels = cv2.cvtColor(cv2.imdecode(data, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    return resize_and_crop(Image.fromarray(pixels), Image.Resampling.LANCZOS)


def load_like_ai_toolkit(path: Path) -> torch.Tensor:
    """Load an image as ai-toolkit does: Pillow with EXIF orientation and bicubic resizing."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    return resize_and_crop(image, Image.Resampling.BICUBIC)


class FileDataset(torch.utils.data.Dataset):
    """A map-style torch dataset over image files, as in PyTorch's tutorials."""

    def __init__(self, paths: Sequence[Path], read: Callable[[Path], torch.Tensor]) -> None:
        self.paths, self.read = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(self.paths[index])


def load_in_threads(
    read: Callable[[Path], torch.Tensor], workers: int, paths: Sequence[Path]
) -> int:
    """Load files in a thread pool; return their number."""
    with ThreadPoolExecutor(workers) as pool:
        return sum(1 for _ in pool.map(read, paths))


def load_with_data_loader(
    read: Callable[[Path], torch.Tensor], workers: int, paths: Sequence[Path]
) -> int:
    """Load files with torch's DataLoader, in worker processes; return their number."""
    loader = torch.utils.data.DataLoader(
        FileDataset(paths, read), batch_size=8, num_workers=workers
    )
    return sum(len(batch) for batch in loader)


def load_with_gracetune(source: object, workers: int, paths: Sequence[Path]) -> int:
    """Load files as gracetune does to fill a cache, in prefetch threads; return their number."""
    decoders = choose_decoders()
    recipe = SampleTransform(lanczos=decoders.lanczos)
    rendered = prefetched(
        [path.name for path in paths],
        lambda key: render(source.read(key), recipe, SIZE, decoders),
        str,
        Prefetch(workers, 32, 60.0),
    )
    return sum(1 for _ in rendered)


class Rates(NamedTuple):
    """Samples per wall-clock second, and per CPU second, which other programs hardly affect."""

    wall: float
    cpu: float


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children, in steps of `TICK_S`."""
    return sum(os.times()[:4])


def take_turns(
    variants: dict[str, Callable[[Sequence[Path]], int]],
    paths: Sequence[Path],
    turns: int,
    reads: int,
) -> dict[str, list[Rates]]:
    """Return each variant's rates by turn. Every turn reads other files, in another order."""
    names = list(variants)
    rates: dict[str, list[Rates]] = {name: [] for name in variants}
    for turn in range(turns):
        part = paths[turn :: max(turns, len(paths) // reads)]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began, used = time.perf_counter(), cpu_seconds()
            assert variants[name](part) == len(part)
            wall, cpu = time.perf_counter() - began, max(cpu_seconds() - used, TICK_S)
            rates[name].append(Rates(len(part) / wall, len(part) / cpu))
    return rates


def summary(rates: dict[str, list[Rates]], kind: str) -> dict[str, object]:
    """Return the median rates, and how many times faster ours are than the best other variant."""
    values = {name: [rate._asdict()[kind] for rate in turns] for name, turns in rates.items()}
    ours = [name for name in values if name.startswith("gracetune")]
    best = [max(v) for v in zip(*(v for n, v in values.items() if n not in ours), strict=True)]
    return {
        "samples": {name: round(statistics.median(v), 1) for name, v in values.items()},
        "times the best other": {
            name: round(
                statistics.median(a / b for a, b in zip(values[name], best, strict=True)), 3
            )
            for name in ours
        },
    }


def measure_end_to_end(
    folder: Path, count: int, turns: int, reads: int, workers: int
) -> dict[str, object]:
    """Measure samples per second, from encoded bytes to images of the bucket's size."""
    make_images(folder, count)
    section = DatasetSection(
        id="photographs",
        type="in_memory",
        instance_data_dir=str(folder),
        caption_strategy="filename",
        resolution=384,
    )

    def silent(_: object) -> None:
        """Drop an event."""

    staged = open_dataset(section, 0, silent, CorruptionLog(silent))
    variants = {
        "gracetune, staged": partial(load_with_gracetune, staged.source, workers),
        "gracetune, files": partial(load_with_gracetune, FolderSource(folder), workers),
        "Pillow threads": partial(load_in_threads, load_with_pillow, workers),
        "torch DataLoader": partial(load_with_data_loader, load_with_pillow, workers),
        "SimpleTuner's way": partial(load_in_threads, load_like_simpletuner, workers),
        "ai-toolkit's way": partial(load_with_data_loader, load_like_ai_toolkit, workers),
    }
    rates = take_turns(variants, sorted(folder.iterdir()), turns, reads)
    return {
        "files": count,
        "reads of each way in each turn": count // max(turns, count // reads),
        "workers": workers,
        "a second": summary(rates, "wall"),
        "a CPU second": summary(rates, "cpu"),
        **measure_loader(staged.samples),
    }


def measure_loader(samples: Sequence[object]) -> dict[str, object]:
    """Return the loader's own time per batch (ordering and queueing), without loading samples."""
    section = DatasetSection(id="photographs", resolution=384)
    plan = buckets.assign(samples, section, 16)
    groups = [BucketGroup(group, 1, 0.1, size, 0.7) for size, group in plan.buckets.items()]
    nothing = Batch(torch.empty(0), {}, ())
    loader = Loader(BatchOrder(groups, 8, 0), lambda _: nothing)
    started = time.perf_counter()
    for _ in range(2000):
        next(loader)
    each = (time.perf_counter() - started) / 2000
    return {"loader: microseconds a batch of 8": round(1e6 * each, 1)}


def measure_formats(turns: int, count: int, size: tuple[int, int]) -> dict[str, object]:
    """Compare decoding from memory in one thread with every library that reads the format.

    A turn decodes one file, so that compared measurements lie milliseconds apart.
    """
    pixels = list(photographs(count, *size))

    def encoded(file_format: str, **options: object) -> list[bytes]:
        files = []
        for one in pixels:
            buffer = io.BytesIO()
            Image.fromarray(one).save(buffer, file_format, **options)
            files.append(buffer.getvalue())
        return files

    def by_pillow(data: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    def by_cv2(data: bytes) -> np.ndarray:
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)

    decoders = choose_decoders()
    cases = {
        "JPEG": (encoded("JPEG", quality=90), simplejpeg.decode_jpeg, imagecodecs.jpeg8_decode),
        "PNG": (encoded("PNG"), imagecodecs.png_decode, imagecodecs.spng_decode),
        "WebP": (encoded("WEBP", quality=90), imagecodecs.webp_decode),
        "lossless WebP": (encoded("WEBP", lossless=True), imagecodecs.webp_decode),
    }
    figures: dict[str, object] = {}
    for name, (files, *others) in cases.items():
        variants = {
            "gracetune": lambda data: decode_pixels(data, decoders),
            "gracetune with Pillow alone": lambda data: decode_pixels(data, PILLOW),
            "Pillow": by_pillow,
            "OpenCV": by_cv2,
            **{f"{way.__module__.partition('.')[0]}.{way.__name__}": way for way in others},
        }
        seconds: dict[str, list[float]] = {way: [] for way in variants}
        for data in files:
            one = time_in_turns({way: partial(read, data) for way, read in variants.items()}, turns)
            for way, spent in one.items():
                seconds[way] += spent
        middle = {way: statistics.median(values) for way, values in seconds.items()}
        fastest = min(
            (way for way in variants if not way.startswith("gracetune")), key=middle.__getitem__
        )
        figures[name] = {
            "milliseconds": {way: round(1e3 * value, 2) for way, value in middle.items()},
            "fastest wheel": fastest,
            "share of the fastest wheel's speed": round(
                median_ratio(seconds[fastest], seconds["gracetune"]), 3
            ),
            "share of the fastest wheel's speed, quartiles": ratio_quartiles(
                seconds[fastest], seconds["gracetune"]
            ),
            "times Pillow": round(median_ratio(seconds["Pillow"], seconds["gracetune"]), 2),
        }
    return figures


def measure_videos(turns: int) -> dict[str, object]:
    """Compare clips per CPU second with OpenCV, used as in SimpleTuner: frame by frame."""
    data, lanczos = make_video(49), choose_decoders().lanczos

    def by_cv2(path: str) -> torch.Tensor:
        capture, frames = cv2.VideoCapture(path), []
        while len(frames) < CLIP[0]:
            _, frame = capture.read()
            image = Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
            frames.append(resize_and_crop(image, Image.Resampling.LANCZOS))
        capture.release()
        return torch.stack(frames, 1)

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(data)
        file.flush()
        variants = {
            "gracetune": lambda: decode_video(data, SIZE, *CLIP, lanczos=lanczos),
            "OpenCV": lambda: by_cv2(file.name),
        }
        for read in variants.values():
            assert tuple(read().shape) == (3, CLIP[0], SIZE[1], SIZE[0])
        seconds = time_in_turns(variants, turns)
    rates = {way: round(1 / statistics.median(s), 2) for way, s in seconds.items()}
    share = median_ratio(seconds["OpenCV"], seconds["gracetune"])
    return {"clips a processor second": rates, "times OpenCV": round(share, 3)}


def time_in_turns(variants: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Return each variant's CPU seconds by turn, including those of its threads.

    The order is shuffled in each turn, because the speed of a variant depends on what ran before.
    """
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    shuffle = random.Random(0).shuffle
    for _ in range(turns):
        shuffle(names)
        for name in names:
            started = time.process_time()
            variants[name]()
            seconds[name].append(time.process_time() - started)
    return seconds


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return how many times faster ours is: the median over the turns."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def ratio_quartiles(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Return the lower and upper quartile of the ratios over the turns."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.3f} to {high:.3f}"


def main() -> None:
    """Measure everything, print it, and write results/data_decode.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reads", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    arguments = results.parse_arguments(parser)
    formats, videos = (12 * arguments.turns, 6, (1024, 768)), 4 * arguments.turns
    if arguments.rehearse:
        arguments.pictures, arguments.turns, arguments.reads = 16, 2, 8
        formats, videos = (2, 1, (64, 48)), 1
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "end to end": measure_end_to_end(
                Path(folder) / "pictures",
                arguments.pictures,
                arguments.turns,
                arguments.reads,
                arguments.workers,
            ),
            "decoding alone": measure_formats(*formats),
            "video": measure_videos(videos),
            "load average at the end": round(os.getloadavg()[0], 1),
        }
    for name, value in results.flatten(figures):
        print(f"{name}: {value}")
    print(results.write("data_decode", figures, arguments.out, arguments.commit))


if __name__ == "__main__":
    main()
