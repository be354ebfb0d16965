"""Fixtures that open the dashboard in Debian's Chromium; `make test-browser` runs these tests."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.chromium import CHROMIUM_FLAGS
from fork_process import PythonProcess

ROOT = Path(__file__).parents[2]
PROMPTS = ["a red circle on a black background", "a green cross on a gray background"]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens an address; at the end, no page may have had an error."""
    contexts, problems = [], []

    def call(address, width=1440, height=900, scheme="light", reduced=None):
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion=reduced,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (problems.append("a dialog"), dialog.dismiss()))
        page.on("console", lambda entry: entry.type == "error" and problems.append(entry.text))
        page.goto(address)
        page.locator("html[data-ready=true]").wait_for(state="attached")
        return page

    yield call
    for context in contexts:
        context.close()
    assert problems == []


@contextmanager
def dashboard(*paths):
    """Start `gracetune dash` and yield the address that it prints."""
    command = [sys.executable, "-m", "gracetune", "dash", *map(str, paths), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            yield re.search(r"http://\S+", "".join(lines))[0]
        finally:
            process.terminate()


@contextmanager
def demo_run(folder, *settings):
    """Train the demo in a process of its own; yield the process. It is killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {
        "output_dir": folder / "run",
        "datasets.0.instance_data_dir": folder / "data",
        "validation.prompts": json.dumps(PROMPTS),
        "validation.sample_steps": 4,
        "validation.every": 100,
        "validation.enable_manual_validation": "true",
        "optimizer.schedule": "constant",
        "train.max_train_steps": 1_000_000,
        "train.checkpoint_every": 500_000,
        "logging.every": 5,
    }
    pairs = [f"{name}={value}" for name, value in words.items()] + list(settings)
    overrides = [word for pair in pairs for word in ("--set", pair)]
    process = PythonProcess(
        "-m", "gracetune", "train", ROOT / "examples" / "demo.json", *overrides, cwd=folder
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
