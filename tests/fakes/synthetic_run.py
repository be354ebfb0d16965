"""A run folder with events of every kind, as a long run on a GPU would write them."""

import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

BLOCKS = 24
START = 1_790_000_000.0
PROMPTS = (
    "a lighthouse on a cliff at dusk, oil painting",
    "a red fox in fresh snow, telephoto",
    "portrait of an old sailor, soft light",
    "a bowl of ramen, top view",
    "a city street in the rain at night, neon",
    '<b>bold</b> & "quotes" in a prompt',
)
GIB = 1024**3


def write_run(
    folder: Path,
    steps: int = 2000,
    total_steps: int = 3000,
    seed: int = 0,
    every: int = 10,
    samples_every: int = 500,
    ended: bool = True,
    picture_size: int = 192,
) -> Path:
    """Write `events.jsonl`, `run.json` and samples; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    with (folder / "events.jsonl").open("w", encoding="utf-8") as log:
        for event in _events(folder, steps, total_steps, rng, every, samples_every, ended):
            log.write(json.dumps(event) + "\n")
    settings = {
        "output_dir": str(folder),
        "seed": seed,
        "model": {"family": "flux", "path": "black-forest-labs/FLUX.1-dev"},
        "adapter": {"type": "lora", "rank": 16 << seed},
        "datasets": [{"id": "harbour"}, {"id": "portraits"}],
        "train": {"max_train_steps": total_steps, "batch_size": 2},
        "optimizer": {"name": "adamw", "lr": 1e-4 / (1 + seed), "warmup_steps": 100},
        "validation": {"every": samples_every, "holdout": 0.02},
    }
    (folder / "run.json").write_text(json.dumps(settings, indent=2))
    for step in range(0, steps + 1, samples_every):
        _write_samples(folder, step, steps, picture_size)
    return folder


def step_done(step, total, rng, start=START):
    """Return the event of one step."""
    base = 0.32 + 0.5 * math.exp(-step / 400)
    return {
        "event": "step_done",
        "time": start + step * 1.31,
        "step": step,
        "loss": base * math.exp(rng.gauss(0, 0.35)),
        "lr": 1e-4 * min(1, step / 100) * (0.55 + 0.45 * math.cos(math.pi * step / total)),
        "grad_norm": 0.2 + 0.9 * math.exp(-step / 300) + abs(rng.gauss(0, 0.06)),
        "samples": 4 if step < total // 3 else 8,
        "accumulation": 2 if step < total // 3 else 4,
        "epoch": step // 200,
        "seconds": 1.31 + abs(rng.gauss(0, 0.03)) + (0.4 if step % 400 > 350 else 0),
        "expert": "",
    }


def _events(folder, steps, total, rng, every, samples_every, ended):
    yield _described()
    yield {
        "event": "run_started",
        "time": START,
        "output_dir": str(folder),
        "model": "flux",
        "trainable_parameters": 37_355_520,
        "total_steps": total,
        "start_step": 0,
        "num_samples": 1184,
        "device": "cuda",
        "precision": "bf16",
    }
    yield _notice("plan: 24 GB: 10 of 24 blocks streamed, 8 recomputed, 6 kept, compiled", 0)
    yield _notice("sdpa is used for attention: flash attention is not installed", 1, fallback=True)
    for step in range(steps + 1):
        if step:
            yield step_done(step, total, rng)
        if step and step % every == 0:
            yield from _telemetry(step, total, rng, every)
        if step % samples_every == 0:
            yield from _validation(folder, step, samples_every)
    yield from _health(steps)
    if ended:
        yield {
            "event": "run_ended",
            "time": START + steps * 1.31 + 60,
            "step": steps,
            "status": "done",
            "seconds": steps * 1.31 + 60,
            "outputs": {},
            "message": "",
            "loads_in": ["diffusers", "ComfyUI"],
        }


def _notice(text, after, **more):
    return {"event": "notice", "time": START + after, "text": text, "level": "info"} | more


def _described():
    roles = {"weights": 14 * GIB, "adapters": GIB // 4, "optimizer": GIB // 2}
    device = roles | {"activations": 5 * GIB, "caches": GIB, "workspace": GIB}
    return {
        "event": "run_described",
        "time": START - 1,
        "step": 0,
        "machine": {
            "host": "gpu7",
            "cpus": 72,
            "memory": 480 * GIB,
            "link": "coherent",
            "ranks": 1,
            "gpus": [{"name": "NVIDIA GH200 480GB", "memory": 96 * GIB}],
        },
        "versions": {"python": "3.12.4", "torch": "2.13.0", "diffusers": "0.42.1"},
        "settings": "d3b07384",
        "data": {
            "samples": 1184,
            "held_out": 24,
            "datasets": [
                {
                    "id": "harbour",
                    "type": "local",
                    "samples": 900,
                    "held_out": 18,
                    "repeats": 1,
                    "weight": 1.0,
                    "share": 0.7,
                },
                {
                    "id": "portraits",
                    "type": "local",
                    "samples": 284,
                    "held_out": 6,
                    "repeats": 2,
                    "weight": 1.0,
                    "share": 0.3,
                },
            ],
            "buckets": [
                {"size": "1024x1024", "samples": 640, "batches": 320},
                {"size": "1216x832", "samples": 388, "batches": 194},
                {"size": "832x1216", "samples": 156, "batches": 78},
            ],
            "corrupt": [{"file": "harbour/IMG_0042.jpg", "reason": "the file is truncated"}],
            "captions": {
                "samples": 1184,
                "unique": 1102,
                "empty": 3,
                "words_min": 0,
                "words_mean": 21.4,
                "words_max": 74,
            },
        },
        "plan": {
            "batch": 2,
            "compiled": True,
            "blocks": [],
            "seconds": 1.28,
            "device": device,
            "host": {"weights": 9 * GIB},
        },
    }


def _telemetry(step, total, rng, every):
    time, head = START + step * 1.31, {"step": step}
    grown = 1 - math.exp(-step / 700)
    buckets = ("t0.00-0.25", "t0.25-0.50", "t0.50-0.75", "t0.75-1.00")
    yield head | {
        "event": "loss_parts",
        "time": time,
        "by_dataset": {
            name: {"loss": level + 0.4 * math.exp(-step / 400) + rng.gauss(0, 0.01), "samples": 20}
            for name, level in (("harbour", 0.34), ("portraits", 0.29))
        },
        "by_timestep": {
            name: {"loss": 0.2 + 0.12 * n + 0.4 * math.exp(-step / (300 + 200 * n)), "samples": 10}
            for n, name in enumerate(buckets)
        },
        "by_part": {},
        "by_expert": {},
    }
    waiting = 0.35 if step % 400 > 350 else 0.02
    phases = {
        "compute": 1.12,
        "data": waiting,
        "weights": 0.05,
        "host": 0.0,
        "optimizer": 0.07,
        "other": 0.02,
    }
    yield head | {
        "event": "step_times",
        "time": time,
        "steps": every,
        "seconds": phases,
        "total": sum(phases.values()),
    }
    yield head | {
        "event": "memory_used",
        "time": time,
        "host": 31 * GIB,
        "device": 21 * GIB,
        "device_peak": 23 * GIB,
        "managed": 2 * GIB,
        "stage": 2 if 600 < step < 1000 else 1,
    }
    used = {
        "weights": 14 * GIB,
        "adapters": GIB // 4,
        "optimizer": GIB // 2,
        "activations": int(4.7 * GIB),
        "caches": GIB + step * 1000,
        "workspace": GIB,
    }
    yield head | {
        "event": "memory_roles",
        "time": time,
        "roles": {"device": used, "host": {"weights": 9 * GIB, "caches": 3 * GIB}},
        "planned": {"device": {**used, "activations": 5 * GIB}, "host": {"weights": 9 * GIB}},
    }
    yield head | {
        "event": "batches_fed",
        "time": time,
        "batches": step * 2,
        "hits": step * 3,
        "reads": step // 2,
        "hot": step,
        "waits": step // 100,
        "nbytes": step * 4_000_000,
        "waited_s": step * 0.02 + max(0, step % 400 - 350) * 0.3,
        "hidden_s": step * 0.2,
        "depth": 2,
    }
    yield head | {
        "event": "weights_streamed",
        "time": time,
        "slots": 4,
        "fetches": step * 20,
        "nbytes": step * 18 * GIB,
        "late": step // 50,
        "on_demand": 2,
        "waited_s": step * 0.05,
        "hidden_s": step * (0.9 + 0.02 * rng.random()),
    }
    yield head | {
        "event": "device_sensors",
        "time": time,
        "gpus": [
            {
                "index": 0,
                "name": "NVIDIA GH200",
                "temperature_c": 58 + 12 * grown + rng.gauss(0, 1),
                "sm_clock_mhz": 1980 - (240 if 900 < step < 1100 else 0),
                "max_sm_clock_mhz": 1980,
                "power_w": 610 + rng.gauss(0, 12),
                "power_limit_w": 700,
                "utilization": 0.97,
                "memory_used": 24 * GIB,
                "memory_total": 96 * GIB,
                "throttle": [],
            }
        ],
        "host": {
            "memory_available": (420 - 30 * grown) * GIB,
            "memory_total": 480 * GIB,
            "swap_used": 0,
            "refaults_per_s": abs(rng.gauss(40, 20)),
            "pressure_memory": 0.0,
            "pressure_io": abs(rng.gauss(1.5, 0.8)),
            "pressure_cpu": abs(rng.gauss(4, 1)),
            "output_free": 800 * GIB - step * 2_000_000,
            "cache_free": 800 * GIB,
            "cpu_s": step * 2.5,
        },
        "unavailable": {},
    }
    yield head | {
        "event": "unified_memory",
        "time": time,
        "stage": 2 if 600 < step < 1000 else 1,
        "transitions": (step > 600) + (step >= 1000),
        "headroom": int((3 - 4 * (600 < step < 1000)) * GIB),
        "current": 2 * GIB,
        "peak": 3 * GIB,
        "cap": 8 * GIB,
        "denied": step // 900,
        "light_reclamations": step // 150,
        "full_reclamations": step // 800,
        "reclaimed_bytes": {"light": step * 1000, "full": 0},
        "hints": {"applied": step // 4, "unsupported": 3},
        "faults": {"device_faults": step * 3},
        "faults_unavailable": "",
    }
    if step % (5 * every) == 0:
        yield head | {
            "event": "weights_moved",
            "time": time,
            "measure": "adapter",
            "blocks": {
                f"transformer_blocks.{n}": 0.02 * grown * (0.3 + math.sin(n / 4) ** 2)
                for n in range(BLOCKS)
            },
            "weight_norms": {f"transformer_blocks.{n}": 3 + n / 9 + grown for n in range(BLOCKS)},
            "grad_norms": {
                f"transformer_blocks.{n}": 0.05 + 0.04 * math.cos(n / 3) + 0.01 * rng.random()
                for n in range(BLOCKS)
            },
        }
        limits = [10.0**power for power in (-7, -6.5, -6, -5.5, -5, -4.5, -4, -3.5, -3)]
        middle = 2 + 4 * grown
        yield head | {
            "event": "rates_spread",
            "time": time,
            "expert": "",
            "limits": limits,
            "counts": [int(1e6 * math.exp(-((n - middle) ** 2))) for n in range(8)],
        }


def _validation(folder, step, samples_every):
    time = START + step * 1.31
    names = ("t0.00-0.25", "t0.25-0.50", "t0.50-0.75", "t0.75-1.00")
    overfit = max(0, step - 1400) / 9000
    by_timestep = {
        name: {"loss": 0.18 + 0.12 * n + 0.35 * math.exp(-step / 500) + overfit, "samples": 6}
        for n, name in enumerate(names)
    }
    mean = sum(part["loss"] for part in by_timestep.values()) / 4
    yield {
        "event": "held_out_loss",
        "time": time,
        "step": step,
        "losses": {"held_out": mean},
        "by_timestep": by_timestep,
        "samples": 24,
        "best_step": min(step, 1500),
        "best_loss": 0.41,
    }
    yield {
        "event": "validated",
        "time": time + 9,
        "step": step,
        "grid": str(folder / "validation" / f"step-{step:06d}.png"),
        "prompts": list(PROMPTS),
        "losses": {"held_out": mean},
        "seconds": 9.4,
        "request": "",
    }
    if step:
        yield {
            "event": "checkpoint_saved",
            "time": time + 1,
            "step": step,
            "path": str(folder / "checkpoints" / f"step-{step:06d}"),
            "nbytes": 450_000_000,
            "seconds": 1.9,
            "reason": f"every {samples_every} steps",
        }


def _health(step):
    yield {
        "event": "health",
        "time": START + step * 1.31,
        "step": step,
        "check": "loader_stalled",
        "level": "degraded",
        "cause": "Steps waited 27 % of their time for batches: the loader reads 41 files/s, and "
        "training needs 58.",
        "action": "Batches are prefetched 4 deep instead of 2.",
        "advice": "Set cache_config.persistent_cache: true, or put the data on a faster disk.",
        "values": {"wait_share": 0.27},
    }
    yield {
        "event": "health",
        "time": START + step * 1.31,
        "step": step,
        "check": "overfitting",
        "level": "notice",
        "cause": "The held-out loss has risen by 6 % since step 1500, while the training loss "
        "still falls.",
        "advice": "Use the checkpoint of step 1500, or lower optimizer.lr.",
        "values": {},
    }
    yield {
        "event": "health",
        "time": START + 850,
        "step": 650,
        "check": "throttling",
        "level": "notice",
        "cause": "GPU 0 lowers its clock to 1740 of 1980 MHz because of heat.",
        "advice": "Improve its cooling.",
        "values": {},
    }
    yield {
        "event": "health",
        "time": START + 900,
        "step": 690,
        "check": "throttling",
        "level": "ok",
        "cause": "The GPU's clock is back at 1980 MHz.",
        "values": {},
    }


def _write_samples(folder, step, steps, size):
    """Draw pictures that become clearer with the steps."""
    target = folder / "validation" / f"step-{step:06d}"
    target.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    share = step / max(steps, 1)
    settings = []
    for number in range(len(PROMPTS)):
        hue = (number * 47) % 360
        sky = Image.new("HSV", (size, size), (hue * 255 // 360, 90, 220)).convert("RGB")
        draw = ImageDraw.Draw(sky)
        for band in range(size):
            shade = int(60 + 120 * band / size)
            draw.line([(0, band), (size, band)], fill=(shade, (shade + 40 * number) % 256, 200))
        radius = int(size * (0.12 + 0.2 * share))
        centre = (int(size * (0.3 + 0.08 * number)), int(size * 0.45))
        draw.ellipse(
            [centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius],
            fill=(250, 210 - 20 * number, 120),
        )
        draw.rectangle([0, int(size * 0.78), size, size], fill=(30, 50 + 12 * number, 70))
        noise = Image.effect_noise((size, size), 120).convert("RGB")
        image = Image.blend(sky, noise, max(0.0, 0.85 * (1 - share) ** 2))
        image.save(target / f"{number:03d}.png")
        seed = rng.randrange(10**6)
        settings.append({"number": number, "seed": seed, "steps": 28, "guidance": 3.5})
    (target / "prompts.json").write_text(json.dumps(PROMPTS))
    (target / "samples.json").write_text(json.dumps({"step": step, "samples": settings}))
    sky.save(folder / "validation" / f"step-{step:06d}.png")
