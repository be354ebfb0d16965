"""Commands, keys, files and figures in README and docs exist and are up to date."""

import argparse
import ast
import importlib
import itertools
import json
import re
import shlex
import tomllib
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from document_commands import PAGES, ROOT, blocks, commands
from fakes.miniatures import MINIATURES
from pydantic import BaseModel

from gracetune.cli.main import VERBS
from gracetune.config.load import load_run_file
from gracetune.config.schema import RunFile
from gracetune.models.registry import FAMILIES

HOSTS = {
    "ai-toolkit.md",
    "import.md",
    "moving.md",
    "reference-settings.md",
    "seeds.md",
    "simpletuner.md",
}
"""Pages that also name keys of other tools."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def sections():
    """Return the sections of a run file by name."""
    found = {}
    for name, field in RunFile.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


def spans(page):
    """Return the inline code of a page."""
    return re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in HOSTS], ids=lambda page: page.name
)
def test_every_named_key_exists(page):
    known = sections()
    named = [re.match(r"(\w+)(?:\[\d*\])?\.(\w+)", span) for span in spans(page)]
    keys = [(at[1], at[2]) for at in named if at and at[1] in known]
    assert [key for key in keys if key[1] not in known[key[0]].model_fields] == []


class Parser(argparse.ArgumentParser):
    """A parser that raises errors; its subcommands have the same class."""

    def error(self, message):
        raise ValueError(f"{self.prog}: {message}")


def parse(words):
    """Parse a command with the program's own arguments; the first word is the verb."""
    assert words[0] in VERBS, words
    parser = Parser(prog=f"gracetune {words[0]}")
    importlib.import_module(VERBS[words[0]][0]).add_arguments(parser)
    parser.parse_args(words[1:])


def parse_mention(span):
    """Parse a command in a sentence, which may leave arguments out or name alternatives."""
    text = re.sub(r"\\?\|[\w-]+|\.\.\.|[\[\]]", "", span)
    words = ["8" if word == "N" else word for word in shlex.split(text)[1:]]
    if len(words) == 1:
        assert words[0] in {*VERBS, "--version"}, span
        return None
    for _ in range(5):
        try:
            return parse(words)
        except ValueError as error:
            missing = re.search(r"arguments are required: ([^,]+)", str(error))
            if not missing:
                raise
            if re.fullmatch(r"ACTION|HOST|\{.*", missing[1]):
                return None  # a command that only has subcommands
            option = missing[1].split("/")[0]
            words += [option, "X"] if option.startswith("-") else ["X"]
    raise AssertionError(span)


@each_page
def test_every_command_can_be_parsed(page):
    for line in commands(page):
        if line.startswith("gracetune "):
            parse(shlex.split(line.replace("[", "").replace("]", ""), comments=True)[1:])


@each_page
def test_every_command_in_a_sentence_can_be_parsed(page):
    for span in spans(page):
        if span.startswith("gracetune ") and "--help" not in span:
            parse_mention(span)


@pytest.mark.parametrize(
    "span", ["gracetune plan RUN --explain", "gracetune host ai-toolkit start", "gracetune fly"]
)
def test_wrong_commands_in_sentences_are_found(span):
    with pytest.raises((ValueError, AssertionError)):
        parse_mention(span)


@each_page
def test_every_python_block_imports_what_exists(page):
    for block in blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("gracetune"):
                module = importlib.import_module(node.module)
                missing = [one.name for one in node.names if not hasattr(module, one.name)]
                assert missing == [], f"{page.name}:{block.line}"


def test_the_code_of_extending_runs(tmp_path, monkeypatch, capsys):
    optimizer, reader = (
        block.text for block in blocks(ROOT / "docs" / "extending.md") if block.language == "python"
    )
    names = {}
    exec(optimizer, names)
    weight = torch.nn.Parameter(torch.ones(2))
    built = names["build"]([{"params": [weight]}], SimpleNamespace(lr=0.5), 0)
    weight.sum().backward()
    built.step()
    assert weight.tolist() == [0.5, 0.5]
    log = tmp_path / "runs" / "mine" / "events.jsonl"
    log.parent.mkdir(parents=True)
    events = [{"event": "notice"}, {"event": "step_done", "step": 3, "loss": 0.25}]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    monkeypatch.chdir(tmp_path)
    exec(reader, {})
    assert capsys.readouterr().out == "3 0.25\n"


@pytest.mark.parametrize("name", ["README.md", "docs/install.md"])
def test_the_table_of_extras_is_complete(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    table = text.partition("| extra | adds |")[2].partition("\n\n")[0]
    named = [
        extra for row in re.findall(r"^\| (`.+?) \|", table, re.M) for extra in row.split(", ")
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"bench", "dev", "docs"}
    assert sorted(name.strip("`") for name in named) == sorted(extras)


@each_page
def test_every_named_file_exists(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [
        link for link in links if not link.startswith("http") and not (page.parent / link).exists()
    ]
    folders = r"(?:src|tests|benchmarks|docs|examples|scripts)"
    named = [span for span in spans(page) if re.fullmatch(rf"{folders}/[\w./-]+", span)]
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


def test_the_pages_contain_commands():
    assert len(commands(ROOT / "README.md")) > 8
    assert sum(len(commands(page)) for page in PAGES) > 30


def figures(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"]


def settled_rings(ring):
    """Return ratio and slots of each mode, after the ring has grown if it did."""
    ways = itertools.product(("eager", "compiled"), ("keep", "recompute"), (1, 2, 4))
    found = []
    for how, kept, batch in ways:
        has_grown = f"{how}.{kept}.grown.batch_{batch}.ratio" in ring
        name = f"{how}.{kept}.{'grown' if has_grown else 'streamed'}.batch_{batch}"
        found.append({key: ring[f"{name}.{key}"] for key in ("ratio", "slots")})
    return found


def measured():
    """Return the expected figures of the README by the start of their row."""
    wan, memory, ring = figures("wan14b_step"), figures("memory_core"), figures("ring")
    both, best = figures("wan_experts"), wan["plain_images_s"]
    families, transfer = figures("families_step"), figures("batch_transfer")
    checked, large = figures("gradient_check"), figures("large_families")
    loops = figures("tuned_loop")

    def speeds(ours, tuned, eager):
        ratio = f"{ours / eager:.2f} times" if ours else "–"
        return " | ".join([*(f"{one:#.3g}" if one else "–" for one in (ours, tuned, eager)), ratio])

    def of_family(name):
        return speeds(families[f"{name}_96_samples_s"], None, families[f"{name}_plain_samples_s"])

    def of_wan(name):
        return speeds(wan[f"{name}_images_s"], None, best)

    prefetch = [memory[key] for key in memory if re.fullmatch(r"prefetch\.\d+_mib\.ratio", key)]
    ratios, slots = ([one[key] for one in settled_rings(ring)] for key in ("ratio", "slots"))
    of_three_slots = [value for key, value in ring.items() if re.search(r"streamed.*ratio$", key)]
    on_the_18th = (
        loops[f"flux.96.{name}.images_s"] for name in ("compiled", "eager_checkpointing")
    )
    return {
        "FLUX.1 at 1024x1024, 18 November": speeds(None, *on_the_18th),
        "FLUX.1 at 1024x1024, 16 November": of_family("flux"),
        "Qwen-Image at 1024x1024": of_family("qwen"),
        "Wan2.2-14B, a clip of 33 frames at 832x480": of_family("clip"),
        **{f"Wan2.2-14B at 1024x1024, in {gb} GB": of_wan(gb) for gb in (96, 48, 24, 12)},
        **{f"Wan2.2-14B in fp8, in {gb} GB": of_wan(f"fp8_{gb}") for gb in (96, 12)},
        "RamTorch, whose memory was not limited": f"{wan['12_to_ramtorch']:.1f} times",
        f"diffusers' group offloading, which needs {wan['group_offload_peak_gib']:.1f} GiB": (
            f"{wan['12_to_group_offload']:.2f} times"
        ),
        "LoRA on a FLUX.2-shaped model": "; ".join(
            f"{large[f'{name}.predicted_images_s']:.3f} and {large[f'{name}.images_s']:.3f}"
            for name in ("flux2", "z_image")
        ),
        "Both experts of Wan2.2": f"{both['device_gib.planned']:.1f} and "
        f"{both['device_gib.measured']:.1f} GiB",
        "Step time of the trainer": f"{figures('bare_loop')['trainer_over_bare_loop']:.2f}",
        "Largest error of a block's gradients": ", ".join(
            f"{max(checked[f'{name}.{part}.largest_ratio'] for part in ('eager', 'compiled')):.2f}"
            for name in ("flux", "wan", "qwen")
        )
        + " times",
        "Step time inside a managed-memory pool": f"{memory['pool_step.ratio']:.3f}",
        "Bandwidth of `prefetch_to_device`": f"at least {min(prefetch):.3f}",
        "First access to managed memory": f"{memory['first_touch.ratio']:.0f} times faster",
        "Step time when batches come from the cache": f"{transfer['fed_over_resident']:.3f}",
        "Step time of twenty Wan2.2-14B blocks": f"at most {max(ratios):.3f} once the ring has "
        f"grown to {min(slots):.0f} to {max(slots):.0f} slots; up to {max(of_three_slots):.3f} "
        "with 3",
    }


def eager_peak(record, loop, noun):
    """Return the peak memory of an eager loop at its fastest batch size, in GiB."""
    tried = [f"{loop}_batch_{samples}" for samples in (1, 2, 4)]
    return max((record[f"{name}_{noun}_s"], record[f"{name}_peak_gib"]) for name in tried)[1]


def test_the_figures_of_the_readme_match_the_result_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `benchmarks/results/\w+\.json` \|$", text, re.M)
    expected = measured()
    assert len(rows) == len(expected), "the README and this test have different rows"
    for about, figure in rows:
        (known,) = [value for start, value in expected.items() if about.startswith(start)]
        assert figure == known, about
    wan, loops, families = map(figures, ("wan14b_step", "tuned_loop", "families_step"))
    peaks = [
        loops["flux.96.eager_checkpointing.peak_gib"],
        eager_peak(wan, "plain", "images"),
        *(eager_peak(families, f"{name}_plain", "samples") for name in ("flux", "qwen", "clip")),
    ]
    assert f"It needs {min(peaks):.0f} to {max(peaks):.0f} GiB" in text
    tuned = loops["flux.96.compiled.images_s"] / loops["flux.96.eager_checkpointing.images_s"]
    assert f"the tuned loop is {tuned:.2f} and gracetune {families['flux_ratio']:.2f} times" in text


def test_the_rates_in_the_page_of_caches_match_the_result_file():
    text = (ROOT / "docs" / "caches.md").read_text(encoding="utf-8")
    memory = figures("memory_core")
    for kind in ("prefetch", "pinned_copy"):
        rates = [memory[key] for key in memory if key.endswith(f"mib.{kind}_gb_s")]
        assert f"| {min(rates):.0f} to {max(rates):.0f} GB/s |" in text
    assert f"| {memory['first_touch.faulting_gb_s']:.1f} GB/s |" in text


def planned_and_measured():
    """Return the rows of the table of predictions in docs/planning-accuracy.md."""
    steps = figures("plan_proof")["configurations"]
    assert all("plan" in step and step["frozen_compute"] == "bf16" for step in steps)
    rows = []
    for way, compiled in (("compiled", True), ("eager", False)):
        chosen = [step for step in steps if step["compiled"] is compiled]
        off = [step["predicted_seconds"] / step["seconds"] - 1 for step in chosen]
        peak = [step["predicted_peak_gib"] / step["peak_gib"] - 1 for step in chosen]
        times, peaks = (f"{min(one):+.1%} to {max(one):+.1%}" for one in (off, peak))
        rows.append((f"{len(chosen)} single steps, {way}", "", times, peaks, "plan_proof"))
    wan, large = figures("wan_experts"), figures("large_families")
    runs, first = figures("planner_runs"), figures("first_steps")

    def add(about, planned, measured, planned_gib, gib, file):
        peak = f"{planned_gib / gib - 1:+.1%}"
        seconds = f"{planned:.3f} and {measured:.3f}"
        rows.append((about, seconds, f"{planned / measured - 1:+.1%}", peak, file))

    def add_run(about, name):
        found = {key: runs[f"{name}.{key}"] for key in ("predicted_seconds", "seconds")}
        peaks = runs[f"{name}.predicted_peak_gib"], runs[f"{name}.peak_gib"]
        add(about, *found.values(), *peaks, "planner_runs")

    def add_large(about, name):
        speeds = (large[f"{name}.{key}images_s"] for key in ("predicted_", ""))
        planned = large[f"{name}.device_gib.planned"]
        measured = large[f"{name}.device_gib.measured"]
        add(about, *(1 / speed for speed in speeds), planned, measured, "large_families")

    speed = first["flux.first.images_s"]
    (line,) = [line for line in first["flux.first.timeline"] if "plan: expect" in line]
    planned_s = 1 / float(re.search(r"expect ([\d.]+) samples/s", line)[1])
    add(
        "run of both experts of Wan 2.2 at 1024x1024 in 96 GB, eager, batch 2",
        wan["planned_step_s"],
        2 / wan["pictures_s"],
        wan["device_gib.planned"],
        wan["device_gib.measured"],
        "wan_experts",
    )
    add_run("run of FLUX.1 at 768x768 in 16 GB, compiled, batch 4", "flux_768_16")
    add_large("run of a FLUX.2-shaped model at 1024x1024 in 24 GB, eager, batch 1", "flux2")
    add_run("run of FLUX.1 at 768x768 in 12 GB, eager, batch 2", "eager_flux_768_12")
    add_run("run of FLUX.1 at 1024x1024 in 20 GB, eager, batch 2", "eager_flux_20")
    add_large("run of a Z-Image-shaped model at 1024x1024 in 12 GB, eager, batch 1", "z_image")
    add(
        "run of FLUX.1 on 14 sizes around 512x512 in 48 GB, compiled, batch 1",
        planned_s,
        1 / speed,
        first["flux.first.planned_gib"],
        first["flux.first.peak_gib"],
        "first_steps",
    )
    return [f"| {' | '.join(row[:4])} | `{row[4]}.json` |" for row in rows]


def test_the_accuracy_of_plans_is_that_of_the_result_files():
    text = (ROOT / "docs" / "planning-accuracy.md").read_text(encoding="utf-8")
    table = text.partition("file in `benchmarks/results/` |\n|---|---|---|---|---|\n")[2]
    assert table.partition("\n\n")[0].splitlines() == planned_and_measured()


def test_the_table_of_families_lists_every_miniature():
    """`scripts/family_table.py --write` makes the table; its values are not checked here."""
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    table = page.partition("<!-- family table -->")[2].partition("<!-- end of the family table")[0]
    rows = re.findall(r"^\| (\S+) \| `(\w+)` \|", table, re.M)
    assert rows == [(name, small.family) for name, small in MINIATURES.items() if small.family]


def test_the_table_of_models_is_the_registry():
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    table = page.partition("<!-- model table -->")[2].partition("<!-- end of the model table")[0]
    expected = [
        f"| `{model.name}` | `{family}`{' (default)' if not index else ''} | {model.description} |"
        for family, info in FAMILIES.items()
        for index, model in enumerate(info.models)
    ]
    assert table.strip().splitlines()[2:] == expected


def test_the_models_of_examples_are_in_the_registry():
    known = {model.name for info in FAMILIES.values() for model in info.models}
    folder = ROOT / "src" / "gracetune" / "examples"
    runs = [load_run_file(file).run for file in folder.glob("*.json")]
    assert {r.model.path for r in runs if r.model.family != "tiny"} <= known
