"""Golden runs: one small, fixed-seed training run per model family, started through the CLI.

A golden run uses only public formats: the run file that goes in, `events.jsonl` and safetensors
files that come out. `record.py` writes what each run produced to `records/`; `test_golden.py` runs
it again and compares.

Values must depend on the code alone. Every path in a run file is relative to the working directory,
and the data files are written byte by byte here, because the order of batches follows the digest of
each file and an encoder library may change its bytes between versions.
"""

from __future__ import annotations

import json
import os
import platform
import struct
import wave
import zlib
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import torch
from PIL import Image
from safetensors import deserialize

if TYPE_CHECKING:
    from collections.abc import Iterable

Settings = dict[str, Any]

RECORDS = Path(__file__).parent / "records"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Variables that change numerical results, fixed for every golden run."""
CAPTIONS = ("a red ring", "the blue box", "a green star on a box", "an orange ring in the box")
DATA: dict[str, Settings] = {
    "image": {"instance_data_dir": "data/image", "resolution": 32, "max_aspect": 2.0},
    "video": {"instance_data_dir": "data/video", "resolution": 32, "frames": 5},
    "audio": {
        "instance_data_dir": "data/audio",
        "sample_rate": 16000,
        "channels": 2,
        "seconds": 0.25,
    },
}
RAMP = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 2}


@dataclass(frozen=True)
class GoldenRun:
    """A run file, as its differences from `run_file`, and the number of ranks that run it."""

    kind: str
    family: str
    model: str | None = None
    """The name of a miniature; none: the family makes its own weights."""
    ranks: int = 1
    dataset: Settings = field(default_factory=dict)
    validation: Settings = field(default_factory=dict)
    sections: Settings = field(default_factory=dict)

    def run_file(self) -> Settings:
        """Return the complete run file."""
        settings: Settings = {
            "output_dir": "run",
            "seed": 7,
            "model": {"family": self.family},
            "datasets": [
                {"dataset_type": self.kind, "caption_dropout": 0.3, **DATA[self.kind]}
                | self.dataset
            ],
            "cache_config": {"persistent_cache": True},
            "train": {"max_train_steps": 4, "batch_size": 2, "mixed_precision": "no"},
            "optimizer": {"lr": 1e-3},
            "logging": {"tensorboard": False, "every": 1},
            "validation": {"every": 4, "prompts": ["a red ring"], "sample_steps": 2, "holdout": 0.3}
            | self.validation,
        }
        if self.model:
            settings["model"]["path"] = f"models/{self.model}"
        for name, section in self.sections.items():
            settings[name] = settings.get(name, {}) | section
        return settings


RUNS = {
    "tiny_full_ema_ramp_two_ranks": GoldenRun(
        "image",
        "tiny",
        ranks=2,
        dataset={
            "crop": "random",
            "augmentations": [{"name": "flip"}, {"name": "rotate"}, {"name": "brightness"}],
            "variants": 2,
        },
        sections={
            "cache_config": {"persistent_cache": False},
            "train": {"batch_size": 1, "ema_decay": 0.9},
            "gh200_optimizations": RAMP
            | {
                "target_effective_batch_size": 6,
                "batch_rampup_steps": 4,
                "rampup_shape": "linear",
            },
        },
    ),
    "wan22_t2v_lora_two_experts": GoldenRun(
        "video",
        "wan22",
        "wan22-t2v",
        sections={
            "adapter": {"rank": 2, "alpha": 1, "dropout": 0.1},
            "train": {"timestep_shift": 5.0},
            "optimizer": {"schedule": "cosine", "warmup_steps": 2},
        },
    ),
    "wan22_i2v_lokr_ema_ramp": GoldenRun(
        "video",
        "wan22",
        "wan22-i2v",
        validation={"images": ["start.png"]},
        sections={
            "adapter": {"kind": "lokr", "rank": 2, "factor": 4},
            "train": {
                "batch_size": 1,
                "ema_decay": 0.9,
                "expert_turns": "proportional",
                "timestep_shift": 5.0,
            },
            "gh200_optimizations": RAMP
            | {"target_effective_batch_size": 5, "batch_rampup_steps": 8},
        },
    ),
    "wan22_5b_full_checkpointing": GoldenRun(
        "video",
        "wan22",
        "wan22-5b",
        sections={
            "train": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
            "optimizer": {"name": "adafactor"},
        },
    ),
    "flux_lora_masked": GoldenRun(
        "image",
        "flux",
        "flux",
        dataset={"mask_data_dir": "data/mask", "mask_background": 0.1},
        sections={"adapter": {"rank": 2}, "train": {"timestep_shift": "flux"}},
    ),
    "qwen_image_lora_automagic": GoldenRun(
        "image",
        "qwen_image",
        "qwen-image",
        sections={
            "adapter": {"rank": 2},
            "train": {"timestep_shift": "qwen_image"},
            "optimizer": {"name": "automagic", "lr": 1e-4},
        },
    ),
    "qwen_image_edit_dora": GoldenRun(
        "image",
        "qwen_image",
        "qwen-image-edit",
        dataset={"conditioning_data_dir": "data/control", "max_aspect": 1.0},
        validation={"images": ["start.png"], "guidance": 1.0, "sample_steps": 1},
        sections={"adapter": {"kind": "dora", "rank": 2}},
    ),
    "stable_audio_lora": GoldenRun(
        "audio",
        "stable_audio",
        "stable-audio",
        sections={
            "adapter": {"rank": 2},
            "cache_config": {"persistent_cache": False},
            "train": {"timestep_sampling": "uniform", "min_snr_gamma": 5.0},
        },
    ),
}


def train(name: str, folder: Path) -> Settings:
    """Run a golden run in an empty folder and return what is recorded of it."""
    golden = RUNS[name]
    WRITE[golden.kind](folder / "data")
    write_png(folder / "start.png", pixels(99, 32, 32))
    if golden.model:
        _write_model(golden.model, folder / "models")
    (folder / "run.json").write_text(json.dumps(golden.run_file(), indent=2))
    gracetune("train", "run.json", cwd=folder, ranks=golden.ranks)
    return {"machine": machine(), **results(folder / "run")}


def gracetune(*words: str, cwd: Path, ranks: int = 1) -> str:
    """Run `python -m gracetune` to its end and return the standard output of the main rank."""
    from fork_process import run_python, run_ranks

    command, env = ("-m", "gracetune", *words), os.environ | ENVIRONMENT
    done = (
        run_ranks(*command, cwd=cwd, env=env)
        if ranks == 2
        else [run_python(*command, cwd=cwd, env=env)]
    )
    for each in done:
        assert each.returncode == 0, each.stdout + each.stderr
    return done[0].stdout


def machine() -> dict[str, str]:
    """Name what the last bits of a result depend on besides the code: the CPU and torch."""
    cpuinfo = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in facts.items()}
    model = [named[key] for key in ("model name", "cpu family", "model") if key in named]
    capability = torch.backends.cpu.get_cpu_capability()
    cpu = " ".join([platform.machine(), *model, capability])
    return {"cpu": cpu, "torch": torch.__version__}


def results(run: Path) -> Settings:
    """Read the recorded values from a run folder."""
    lines = events(run)
    steps = [line for line in lines if line["event"] == "step_done"]
    validated = [line for line in lines if line["event"] == "validated"]
    weights = [*run.glob("adapter/*.safetensors"), *run.glob("model/transformer*/*.safetensors")]
    samples = [*run.glob("validation/step-*/*.png"), *run.glob("validation/step-*/*.wav")]
    return {
        "steps": [
            {key: line[key] for key in ("step", "loss", "lr", "samples", "expert")}
            for line in steps
        ],
        "validation": [{"step": line["step"], "losses": line["losses"]} for line in validated],
        "digests": {
            **{str(file.relative_to(run)): digest([file]) for file in sorted(weights)},
            **{str(file.relative_to(run)): _media_digest(file) for file in sorted(samples)},
            **{
                f"cache/{store.name}": digest(store.glob("**/*.safetensors"))
                for store in sorted(run.glob("cache/*"))
            },
        },
    }


def events(run: Path) -> list[Settings]:
    """Read `events.jsonl` of a run folder."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def digest(files: Iterable[Path]) -> str:
    """Return a digest of every tensor in safetensors files: names, dtypes, shapes and bytes.

    A cache shard fills the space between two entries with a tensor `gap/OFFSET`, which is left out:
    its place depends on the order in which entries were written.
    """
    hasher = sha256()
    tensors = [tensor for file in files for tensor in deserialize(file.read_bytes())]
    entries = [(name, tensor) for name, tensor in tensors if not name.startswith("gap/")]
    for name, tensor in sorted(entries, key=lambda entry: entry[0]):
        hasher.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
        hasher.update(tensor["data"])
    return hasher.hexdigest()[:32]


def _media_digest(file: Path) -> str:
    """Return a digest of a sample's pixels or audio frames, whatever encodes them."""
    if file.suffix == ".png":
        with Image.open(file) as image:
            return sha256(image.tobytes()).hexdigest()[:32]
    with wave.open(str(file)) as audio:
        return sha256(audio.readframes(audio.getnframes())).hexdigest()[:32]


def _write_model(name: str, folder: Path) -> None:
    from fakes.miniatures import write_miniature

    write_miniature(name, folder / name)


def pixels(seed: int, width: int, height: int, channels: int = 3) -> np.ndarray:
    """Return random blocks of 4x4 pixels."""
    blocks = np.random.default_rng(seed).integers(
        0, 256, (height // 4, width // 4, channels), dtype=np.uint8
    )
    return blocks.repeat(4, 0).repeat(4, 1)


def write_png(file: Path, rgb: np.ndarray) -> None:
    """Write an uncompressed PNG file; the bytes do not depend on a version of zlib."""
    height, width, _ = rgb.shape
    raw = b"".join(b"\0" + row.tobytes() for row in rgb)
    stored = struct.pack("<BHH", 1, len(raw), len(raw) ^ 0xFFFF) + raw
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(raw))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
    )


def _write_images(folder: Path) -> None:
    """Write images of two aspect ratios, with a mask and a control image for each."""
    for number in range(8):
        width = (32, 48)[number % 2]
        write_png(folder / f"image/{number}.png", pixels(number, width, 32))
        write_png(folder / f"control/{number}.png", pixels(100 + number, width, 32))
        mask = np.zeros((32, width, 3), np.uint8)
        mask[:, : 8 + 2 * number] = 255
        write_png(folder / f"mask/{number}.png", mask)
        _write_caption(folder / f"image/{number}.txt", number)


def _write_videos(folder: Path) -> None:
    """Write clips of 8 uncompressed frames, without the library's version in the header."""
    (folder / "video").mkdir(parents=True)
    for number in range(6):
        file = folder / f"video/{number}.avi"
        with av.open(str(file), "w", container_options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream("rawvideo", 8)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "bgr24"
            stream.codec_context.flags |= av.codec.context.Flags.bitexact
            for shift in range(8):
                frame = np.roll(pixels(number, 32, 32), 2 * shift, axis=1)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="bgr24")))
            container.mux(stream.encode())
        _write_caption(folder / f"video/{number}.txt", number)


def _write_audio(folder: Path) -> None:
    """Write sawtooth waves: integers alone, so that every machine writes the same bytes."""
    (folder / "audio").mkdir(parents=True)
    for number in range(6):
        samples = (np.arange(4000) * 613 * (number + 1) % 32768 - 16384).astype("<i2")
        with wave.open(str(folder / f"audio/{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.tobytes())
        _write_caption(folder / f"audio/{number}.txt", number)


def _write_caption(file: Path, number: int) -> None:
    file.write_text(CAPTIONS[number % len(CAPTIONS)])


WRITE = {"image": _write_images, "video": _write_videos, "audio": _write_audio}
