"""Take the screenshots of docs/dashboard.md with Debian's Chromium.

    gracetune train examples/demo.json --set output_dir=runs/demo-lr5e-4 ...
    python scripts/dashboard_screenshots.py runs/demo-lr5e-4

Beside the given runs, which have ended, it trains the demo with a `max_grad_norm` that is far too
small: the page shows a live run with its buttons, and a finding of its health checks.

Writes `docs/images/dashboard-WIDTH-THEME.png`, the top of the page, `dashboard-charts-THEME.png`
and `dashboard-memory-WIDTH-THEME.png`.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "images"
SIZES = ((390, 1400), (820, 1300), (1440, 1240))
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
LIVE = {
    "train.max_grad_norm": 0.002,
    "train.max_train_steps": 6000,
    "validation.every": 100,
    "validation.enable_manual_validation": "true",
    "logging.every": 2,
}
MIN_SETS = 7
"""Validations of the live run before the first screenshot."""


@contextmanager
def live_run() -> Iterator[Path]:
    """Train the demo while the `with` block runs; yield the run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "demo-clipped"
        settings = LIVE | {"output_dir": run, "datasets.0.instance_data_dir": f"{folder}/data"}
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "gracetune", "train", ROOT / "examples/demo.json", *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield run
            finally:
                process.kill()


@contextmanager
def dashboard(*runs: object) -> Iterator[str]:
    """Start the dashboard; yield the address that it prints."""
    command = [sys.executable, "-m", "gracetune", "dash", *map(str, runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", "".join(server.stdout.readline() for _ in range(3)))
            assert address is not None
            yield address[0]
        finally:
            server.terminate()


def open_page(browser: Browser, address: str, size: tuple[int, int], theme: str) -> Page:
    """Open the page, and wait until everything that the screenshots show is there."""
    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, color_scheme=theme)
    page.set_default_timeout(600_000)
    page.goto(address)
    page.locator("button[data-verb=validate]").wait_for()
    page.locator(".finding").first.wait_for()
    page.locator("table.sample-grid").first.locator("tbody tr").nth(MIN_SETS - 1).wait_for()
    page.locator("#panel-samples figure.large img").nth(1).wait_for()
    page.wait_for_timeout(2000)
    return page


def scroll_to(page: Page, section: str) -> None:
    """Scroll to a section; twice, because panels are drawn, and grow, when they come into sight."""
    for _ in range(2):
        page.locator(section).evaluate("(one) => one.scrollIntoView()")
        page.wait_for_timeout(1500)


def save(data: bytes, name: str) -> None:
    """Write a screenshot as a small PNG file."""
    path = TARGET / name
    Image.open(io.BytesIO(data)).convert("RGB").save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1024:.0f} KiB")


def take_all(browser: Browser, address: str) -> None:
    """Take every screenshot."""
    for size in SIZES:
        for theme in ("light", "dark"):
            page = open_page(browser, address, size, theme)
            save(page.screenshot(), f"dashboard-{size[0]}-{theme}.png")
            if size == SIZES[-1]:
                scroll_to(page, "#learning")
                save(page.screenshot(), f"dashboard-charts-{theme}.png")
            scroll_to(page, "#memory")
            box = page.locator("#memory").bounding_box()
            assert box is not None
            area = {"x": 0, "y": box["y"] - 8, "width": size[0], "height": box["height"] + 16}
            save(page.screenshot(clip=area), f"dashboard-memory-{size[0]}-{theme}.png")
            page.close()


def main() -> None:
    """Start a run and the dashboard, and take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="runs that have ended")
    arguments = parser.parse_args()
    with (
        live_run() as run,
        dashboard(run, *arguments.runs) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        take_all(browser, address)
        browser.close()


if __name__ == "__main__":
    main()
