"""Measure the dashboard on a log of 100,000 events: opening, memory, delay, and many pages.

    python benchmarks/dashboard.py [--events 100000] [--clients 50] [--rehearse]

Opening is measured in Debian's Chromium, which `make test-browser` also uses, from the start of the
navigation until the first charts are drawn (`drawn`) and until they show the last step (`open`):
once right after the server has started, so that it includes reading the log, and then again.
CPU seconds are those of the server since its start, and of all processes of Chromium since the
start of the navigation. Unlike the other figures, they hardly depend on what else the machine does;
`load` is the number of running processes per core before the benchmark. Without Chromium, or in a
rehearsal, all of this is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import results

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.chromium import CHROMIUM_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHROMIUM = shutil.which("chromium")
MIB = 1024**2
START = 1_790_000_000.0


def events(count: int) -> Iterator[dict[str, object]]:
    """Yield the events of a long run: steps, and every tenth step telemetry of four kinds."""
    rng = random.Random(0)
    yield {
        "event": "run_started", "time": START, "output_dir": "x", "model": "flux",
        "trainable_parameters": 1, "total_steps": 10 * count, "start_step": 0, "num_samples": 9,
        "device": "cuda", "precision": "bf16",
    }  # fmt: skip
    made, step = 1, 0
    while made < count:
        step += 1
        yield step_done(step, rng)
        made += 1
        if step % 10 == 0:
            yield from telemetry(step, rng)
            made += 4


def step_done(step: int, rng: random.Random) -> dict[str, object]:
    """Return the event of one step."""
    return {
        "event": "step_done", "time": time.time() if step < 0 else START + step, "step": step,
        "loss": 0.3 + math.exp(-step / 5000) + rng.gauss(0, 0.1), "lr": 1e-4, "samples": 4,
        "grad_norm": abs(rng.gauss(0.3, 0.1)), "accumulation": 1, "epoch": 0,
        "seconds": 1 + rng.random() / 10, "expert": "",
    }  # fmt: skip


def telemetry(step: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Yield the events of every tenth step."""
    head = {"time": START + step, "step": step}
    phases = {name: rng.random() for name in ("compute", "data", "weights", "optimizer")}
    yield head | {"event": "step_times", "steps": 10, "seconds": phases, "total": 1.0}
    yield head | {"event": "memory_used", "host": 2**34, "device": 2**33, "device_peak": 2**34}
    blocks = {f"blocks.{number}": rng.random() for number in range(40)}
    yield head | {"event": "weights_moved", "measure": "adapter", "blocks": blocks}
    gpu = {"temperature_c": 60 + rng.random(), "sm_clock_mhz": 1980, "power_w": 600.0}
    yield head | {"event": "device_sensors", "gpus": [gpu], "host": {"memory_available": 2**38}}


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start `gracetune dash`; yield its address and its process."""
    command = [sys.executable, "-m", "gracetune", "dash", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            [address] = re.findall(r"http://\S+", "".join(lines))
            yield address, psutil.Process(process.pid)
        finally:
            process.terminate()


def open_stream(address: str) -> socket.socket:
    """Open a stream of events as a page does; return after its first event."""
    host, token = re.fullmatch(r"http://(.*)/#token=(.*)", address).groups()  # type: ignore[union-attr]
    connection = socket.create_connection(tuple(host.split(":")), timeout=60)  # type: ignore[arg-type]
    connection.sendall(
        f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {token}\r\n\r\n".encode()
    )
    read_until(connection, b"hello")
    return connection


def read_until(connection: socket.socket, text: bytes) -> None:
    """Read from a connection until a text arrives."""
    found = b""
    while text not in found:
        part = connection.recv(1 << 16)
        assert part, "the server ended the stream"
        found = found[-100:] + part


def append(log: Path, step: int) -> None:
    """Add one step to a log, as a run does."""
    with log.open("a") as file:
        file.write(json.dumps(step_done(step, random.Random(step))) + "\n")


def browser_processes() -> list[psutil.Process]:
    """Return all processes of the browser that this process has started."""
    below = psutil.Process().children(recursive=True)
    return [one for one in below if "chromium" in one.name()]


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time that processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def open_in_browser(folder: Path, log: Path, next_step: int) -> dict[str, float]:
    """Open the page twice, then measure how fast new steps appear on it."""
    from playwright.sync_api import sync_playwright

    figures: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        with dashboard(folder) as (address, process):
            # The address is printed before the log is read, so the first page waits for that.
            for name in ("first", "again"):
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                before = cpu_seconds(browser_processes())
                started = time.perf_counter()
                page.goto(address)
                page.locator("#panel-loss canvas").wait_for()
                figures[f"drawn_{name}_s"] = time.perf_counter() - started
                page.locator(".steps", has_text=f"{next_step - 1:,} /").wait_for()
                figures[f"open_{name}_s"] = time.perf_counter() - started
                figures[f"server_cpu_{name}_s"] = cpu_seconds([process])
                figures[f"browser_cpu_{name}_s"] = cpu_seconds(browser_processes()) - before
            delays = []
            for step in range(next_step, next_step + 20):
                started = time.perf_counter()
                append(log, step)
                page.locator(".steps", has_text=f"{step:,} /").wait_for()
                delays.append(time.perf_counter() - started)
            figures["event_to_screen_median_s"] = statistics.median(delays)
            figures["event_to_screen_largest_s"] = max(delays)
            figures["server_mib_with_pages"] = process.memory_info().rss / MIB
        browser.close()
    return figures


def follow_with_clients(folder: Path, log: Path, step: int, clients: int) -> dict[str, float]:
    """Follow a run with many pages; measure the delay until all have a new step, and memory."""
    with dashboard(folder) as (address, process):
        streams = [open_stream(address) for _ in range(clients)]
        append(log, step)
        for stream in streams:
            read_until(stream, str(step).encode())
        cpu, delays = sum(process.cpu_times()[:2]), []
        for number in range(step + 1, step + 21):
            started = time.perf_counter()
            append(log, number)
            for stream in streams:
                read_until(stream, f"[{number}]".encode())
            delays.append(time.perf_counter() - started)
        cpu = sum(process.cpu_times()[:2]) - cpu
        rss = process.memory_info().rss / MIB
        for stream in streams:
            stream.close()
    return {
        "delay_median_s": statistics.median(delays),
        "delay_largest_s": max(delays),
        "server_mib": rss,
        "server_cpu_ms_per_event": 1000 * cpu / len(delays),
    }


def main() -> None:
    """Write the log, measure, print and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=50)
    arguments = results.parse_arguments(parser)
    if arguments.rehearse:
        arguments.events, arguments.clients = 500, 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        log = folder / "events.jsonl"
        last = 0
        with log.open("w") as file:
            for event in events(arguments.events):
                file.write(json.dumps(event) + "\n")
                last = int(event.get("step", 0))  # type: ignore[call-overload]
        figures: dict[str, object] = {
            "events": arguments.events,
            "clients": arguments.clients,
            "log_mib": log.stat().st_size / MIB,
            "load": os.getloadavg()[0] / len(os.sched_getaffinity(0)),
        }
        if CHROMIUM and not arguments.rehearse:
            figures["browser"] = open_in_browser(folder, log, last + 1)
        figures["streams"] = follow_with_clients(folder, log, last + 100, arguments.clients)
    print(json.dumps(figures, indent=2))
    print(results.write("dashboard", figures, arguments.out, arguments.commit))


if __name__ == "__main__":
    main()
