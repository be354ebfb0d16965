"""Video and audio samples of real runs play in the page and in a report."""

import json

import pytest
from browser.conftest import dashboard
from fakes.datasets import DATA, WRITE
from fakes.miniatures import MINIATURES, write_miniature

from gracetune.cli.main import main

STATE = "(player) => [player.readyState, player.duration, player.currentTime, player.error?.code]"


def play(player):
    """Play a sample and return its length in seconds, once some of it has been played."""
    player.scroll_into_view_if_needed()
    player.evaluate("(player) => { player.loop = false; player.play(); }")
    player.page.wait_for_function(
        "(player) => player.ended || player.currentTime > 0", arg=player.element_handle()
    )
    ready, duration, _, error = player.evaluate(STATE)
    assert error is None
    assert ready >= 1
    return duration


def train(model, kind, folder):
    """Train a miniature for two steps, with one sample at the end."""
    WRITE[kind](folder / "data")
    data = {"dataset_type": kind, "instance_data_dir": str(folder / "data")}
    path = write_miniature(model, folder / "model")
    run = {
        "output_dir": str(folder / "run"),
        "model": {"family": MINIATURES[model].family, "path": str(path)},
        "adapter": {"rank": 2},
        "datasets": [data | DATA[kind]],
        "train": {"max_train_steps": 2, "batch_size": 2},
        "validation": {"every": 2, "prompts": ["a red ring"], "sample_steps": 2},
    }
    (folder / "run-file.json").write_text(json.dumps(run))
    assert main(["train", str(folder / "run-file.json")]) == 0


@pytest.mark.parametrize(("model", "tag"), [("wan22-5b", "video"), ("stable-audio", "audio")])
def test_a_sample_plays_in_the_page_and_in_a_report(model, tag, tmp_path, open_page):
    train(model, tag, tmp_path)
    with dashboard(tmp_path / "run") as address:
        page = open_page(address)
        player = page.locator(f"#panel-samples figure.large {tag}").first
        player.wait_for(state="attached")
        assert play(player) > 0.05
        if tag == "video":
            assert player.evaluate("(video) => video.videoWidth") > 0
        assert player.get_attribute("aria-label")
        page.close()
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(report)]) == 0
    copy = open_page(report.as_uri())
    player = copy.locator(f"#panel-samples figure.large {tag}").first
    player.wait_for(state="attached")
    assert play(player) > 0.05
