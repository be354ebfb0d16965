"""Take the screenshots of docs/dashboard.md with Debian's Chromium.

    gracetune train examples/demo.json --set output_dir=runs/demo-a ...
    python scripts/dashboard_screenshots.py runs/demo-a runs/demo-b

Writes `docs/images/dashboard-WIDTH-THEME.png`: the top of the page at three widths, and its charts.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parents[1] / "docs" / "images"
SIZES = ((390, 1400), (820, 1300), (1440, 1240))
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def save(data: bytes, name: str) -> None:
    """Write a screenshot as a small PNG file."""
    path = TARGET / name
    Image.open(io.BytesIO(data)).convert("RGB").save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Start the dashboard and take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "gracetune", "dash", *arguments.runs, "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = re.search(r"http://\S+", "".join(server.stdout.readline() for _ in range(3)))
        assert address is not None
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for width, height in SIZES:
            for theme in ("light", "dark"):
                viewport = {"width": width, "height": height}
                page = browser.new_page(viewport=viewport, color_scheme=theme)
                page.goto(address[0])
                page.locator("#panel-samples figure.large img").first.wait_for()
                page.wait_for_timeout(2000)
                save(page.screenshot(), f"dashboard-{width}-{theme}.png")
                if width == SIZES[-1][0]:
                    page.locator("#learning").evaluate("(one) => one.scrollIntoView()")
                    page.wait_for_timeout(2500)
                    save(page.screenshot(), f"dashboard-charts-{theme}.png")
                page.close()
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
