"""A report is one file that needs nothing else."""

import base64
import hashlib
import json
import re

import pytest
from fakes.synthetic_run import write_run

from gracetune.cli.main import main
from gracetune.dashboard import report
from gracetune.dashboard.report import MODULES, build_html, choose_sets
from gracetune.dashboard.run_folder import SampleIndex
from gracetune.dashboard.static_files import STATIC, read_static


@pytest.fixture(scope="module")
def html(synthetic_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    other = write_run(folder / "other", steps=50, total_steps=90, seed=1, ended=False)
    target = folder / "report.html"
    assert main(["report", str(synthetic_run), str(other), "-o", str(target)]) == 0
    return target.read_text()


def data_of(html):
    return json.loads(re.search(r'id="report-data">(.*?)</script>', html, re.DOTALL)[1])


def test_a_report_has_runs_samples_and_settings(html):
    data = data_of(html)
    assert [run["name"] for run in data["runs"]] == ["lora", "other"]
    assert [run["status"]["state"] for run in data["runs"]] == ["done", "killed"]
    assert data["runs"][0]["run_file"]["adapter"]["rank"] == 16
    assert len(data["thumbnails"]) == 3 * 6 + 6
    assert all(uri.startswith("data:image/webp;base64,") for uri in data["thumbnails"].values())


def test_a_report_loads_nothing_from_elsewhere(html):
    markup = re.sub(r"<script.*?</script>|<!--.*?-->", "", html, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["'](?!#)""", markup)
    assert "default-src 'none'" in markup
    assert "unsafe" not in markup


def test_a_report_replaces_an_earlier_one_and_nothing_else(tmp_path, synthetic_run, capsys):
    mine, target = tmp_path / "mine.html", tmp_path / "report.html"
    mine.write_text("<html><title>my page</title></html>")
    assert main(["report", str(synthetic_run), "-o", str(mine)]) == 2
    error = capsys.readouterr().err
    assert f"--output is {str(mine)!r}, which exists and is not a report" in error
    assert mine.read_text() == "<html><title>my page</title></html>"
    assert main(["report", str(synthetic_run), "-o", str(tmp_path)]) == 2
    for _ in range(2):
        assert main(["report", str(synthetic_run), "-o", str(target)]) == 0


def test_scripts_and_styles_match_their_digests(html):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert len(scripts) == 3
    for text in [*scripts, style]:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_texts_of_runs_cannot_end_their_element():
    text = json.dumps({"prompt": "</script><script>alert(1)</script><!--"})
    html = build_html(text)
    assert "alert(1)</script>" not in html
    assert data_of(html)["prompt"].startswith("</script>")


def test_modules_can_be_joined():
    """Top-level names differ, each module is after those it imports, and none is forgotten."""
    static = {name: text.decode() for name, text in read_static().items()}
    assert {path.name for path in STATIC.glob("*.js")} == {*MODULES, "theme.js"}
    names = []
    for number, module in enumerate(MODULES):
        text = static[module]
        names += re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.M
        )
        for imported in re.findall(r'from "\./([\w.]+)"', text):
            assert imported in MODULES[:number], (module, imported)
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_texts_never_become_markup():
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        for banned in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "srcdoc",
        ):
            assert banned not in text, (path.name, banned)


def test_the_licence_of_uplot_is_in_the_report(html):
    assert "Leon Sorokin" in html


def test_many_validations_are_thinned_out(tmp_path):
    folder = write_run(tmp_path / "run", steps=40, total_steps=40, samples_every=1, picture_size=8)
    index = SampleIndex(folder)
    for line in (folder / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "validated":
            index.add(record)
    steps = [one.step for one in choose_sets(index.sets)]
    assert len(steps) == report.MAX_SETS
    assert (steps[0], steps[-1]) == (0, 40)


def test_images_stay_within_their_budget(synthetic_run, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "IMAGES_NBYTES", 20_000)
    target = tmp_path / "small.html"
    assert main(["report", str(synthetic_run), "-o", str(target)]) == 0
    thumbnails = data_of(target.read_text())["thumbnails"]
    assert thumbnails
    assert sum(len(uri) for uri in thumbnails.values()) < 30_000
    assert "r0/step-000120/000.png" in thumbnails, "the newest samples come first"


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "has no events.jsonl" in capsys.readouterr().err
