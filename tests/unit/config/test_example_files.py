"""Every example is a run that could be started, and says what it is for."""

from pathlib import Path

import pytest

from gracetune.cli.examples import first_comment
from gracetune.config.checks import check_trainable
from gracetune.config.load import load_run_file
from gracetune.data.buckets import frame_counts, audio_lengths

FILES = sorted((Path(__file__).parents[3] / "examples").glob("*.json"))


def test_every_family_has_one():
    families = {load_run_file(file, environment={}).run.model.family for file in FILES}
    assert families == {"tiny", "wan22", "flux", "qwen_image", "stable_audio"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_and_says_what_it_is_for(file):
    run = load_run_file(file, environment={}).run
    check_trainable(run)
    assert first_comment(file.read_text())
    assert run.output_dir == f"runs/{file.stem}"
    for data in run.datasets:
        lengths = {"video": frame_counts, "audio": audio_lengths}.get(data.dataset_type)
        assert lengths is None or lengths(data)
