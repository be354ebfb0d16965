"""The documentation site: navigation, generated pages, run files, commands and messages."""

import ast
import json
import re
import subprocess
import sys

import pytest
import yaml
from document_commands import (
    NEEDS,
    PAGES,
    PLANS_HERE,
    ROOT,
    SHELLS,
    WORDS,
    blocks,
    commands,
    missing_for,
    plans_here,
)

from gracetune.config.checks import check_run
from gracetune.config.load import load_run_text
from gracetune.config.parse_text import parse_text

sys.path.insert(0, str(ROOT / "scripts"))
import build_docs
import reference_pages

OTHER_FORMATS = {("ai-toolkit.md", "process"), ("watching-a-run.md", "request")}
"""Blocks that are no run files, by page and first key: an ai-toolkit job, and a request."""
MESSAGES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert build_docs.problems(settings) == []


def test_a_page_outside_of_the_navigation_is_reported():
    settings = {"nav": [{"Home": "index.md"}, {"Again": ["index.md", "nowhere.md"]}]}
    found = build_docs.problems(settings)
    assert "index.md is twice in the navigation" in found
    assert "nowhere.md is in the navigation and does not exist" in found
    assert "install.md is not in the navigation of mkdocs.yml" in found


def test_staged_pages_link_to_staged_files(tmp_path):
    assert build_docs.stage(tmp_path) == []
    assert (tmp_path / "benchmarks" / "results" / "automagic.png").is_file()
    assert "](slurm.md)" in (tmp_path / "readme.md").read_text(encoding="utf-8")


def test_the_site_builds_without_warnings():
    """zensical reports broken links and anchors."""
    pytest.importorskip("zensical", reason="pip install 'gracetune[docs]'")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "build_docs.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_the_reference_is_up_to_date(name):
    text = "\n".join(reference_pages.PAGES[name]()).rstrip() + "\n"
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == text, "run scripts/reference_pages.py"


def test_every_argument_and_setting_of_the_reference_has_a_meaning():
    for name in reference_pages.PAGES:
        rows = re.findall(r"^\| (.+) \|$", (ROOT / "docs" / name).read_text(), re.M)
        assert [row for row in rows if row.endswith("| ")] == [], name


def test_hidden_options_are_not_in_the_reference():
    page = (ROOT / "docs" / "reference-commands.md").read_text(encoding="utf-8")
    assert "SUPPRESS" not in page
    assert "--checkpointing" not in page, "`prove` uses it for its own processes"


def test_tables_of_first_runs_have_a_row_for_each_machine():
    """`scripts/first_lora_tables.py` writes them; the slow tests compare the values."""
    import first_lora_tables

    for name in first_lora_tables.PAGES:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        table = text.partition(first_lora_tables.START)[2].partition(first_lora_tables.END)[0]
        rows = re.findall(r"^\| ([^|]+) \|", table, re.M)
        assert rows == ["GPU", *(row.name for row in first_lora_tables.ROWS)], name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tables_of_first_runs_are_up_to_date():
    script = ROOT / "scripts" / "first_lora_tables.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_files():
    """Return the blocks of JSON and YAML that are run files, or parts of them."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            first = re.search(r"\w+", block.text)[0]
            if block.language in ("json", "yaml") and (page.name, first) not in OTHER_FORMATS:
                found.append(pytest.param(block, id=f"{page.name}:{block.line}"))
    return found


@pytest.mark.parametrize("block", run_files())
def test_every_run_file_is_valid(block):
    """A part of a run file gets what it lacks: a dataset, an adapter or a model."""
    text = block.text
    if block.language == "json" and not text.lstrip().startswith("{"):
        text = f"{{{text}}}"
    tree = dict(parse_text(text, block.language, block.page.name).tree)
    if "instance_data_dir" in tree:
        tree = {"datasets": [tree]}
    tree.setdefault("datasets", [{"instance_data_dir": "data"}])
    if "context_parallel" in tree.get("distributed", {}):
        tree.setdefault("model", {"family": "flux"})
    if {"frozen_compute", "quantize"} & set(tree.get("model", {})):
        tree.setdefault("adapter", {"rank": 4})
    loaded = load_run_text(json.dumps(tree), "json", block.page.name)
    check_run(loaded.run)


def test_every_shell_command_is_executed_or_needs_something():
    """Commands that need nothing are executed by tests/e2e/test_document_commands.py."""
    known = {"gracetune"}
    for page in PAGES:
        for command in commands(page):
            assert missing_for(command) or command.split()[0] in known, f"{page.name}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_its_commands_need(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for command in commands(page):
        need = missing_for(command)
        words = next((words for start, words in WORDS.items() if need.startswith(start)), "")
        assert re.search(words, prose), f"{command} needs {need}"


def test_the_start_page_links_to_every_page():
    start = ROOT / "docs" / "index.md"
    links = re.findall(r"\]\(([^)#\s]+)", start.read_text(encoding="utf-8"))
    linked = {(start.parent / link).resolve() for link in links}
    assert set(PAGES) - linked == {start}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_plan_without_a_machine_is_said_to_be_for_the_gpu_of_this_machine(page):
    """`gracetune plan` without `--machine` measures a GPU; a page must not say otherwise."""
    if any(plans_here(command) for command in commands(page)):
        assert PLANS_HERE.search(page.read_text(encoding="utf-8")), page.name


def test_every_need_is_used_and_names_files_that_exist():
    found = [command for page in PAGES for command in commands(page)]
    for rule, need in NEEDS.items():
        assert any(re.match(rule, command) for command in found), rule
        for path in re.findall(r"tests/[\w./]+", need):
            assert (ROOT / path).exists(), path


def test_blocks_and_commands_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\ngracetune train a.json \\\n  --set b=1   # a comment\n```\n"
        "1. x\n   ```\n   gracetune plan a.json\n   its output\n   ```\n"
        "```bash\npython - <<'EOF'\nprint(1)\nEOF\ngracetune env\n```\n"
    )
    assert commands(page) == [
        "gracetune train a.json --set b=1",
        "gracetune plan a.json",
        "python - <<'EOF'",
        "gracetune env",
    ]
    assert [block.language in SHELLS for block in blocks(page)] == [True, False, True]


def entries():
    """Return the entries of the page on troubleshooting by their symptom."""
    parts = re.split(r"^### (.+)$", MESSAGES, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_troubleshooting_has_a_cause_and_a_fix_for_each_of_many_symptoms():
    assert len(entries()) >= 30
    for symptom, text in entries().items():
        assert "\n**Cause.** " in text, symptom
        assert "\n**Fix.** " in text, symptom


@pytest.fixture(scope="module")
def source_texts():
    """Return all texts in the source; values in f-strings are left out."""
    found = []
    for file in (ROOT / "src" / "gracetune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                found.append("\0".join(texts))
    return "\1".join(found)


def test_every_message_of_troubleshooting_is_in_the_source(source_texts):
    messages = [
        message
        for line in re.findall(r"^\*\*Message:\*\* (.+)$", MESSAGES, re.M)
        for message in re.findall(r"`([^`]+)`", line)
        if not message.startswith(("gracetune ", "weights_still"))
    ]
    assert len(messages) > 30
    wrong = []
    for message in messages:
        parts = re.split(r"\.\.\.|[;:.] ", message)
        if any(part.strip(" ,:;?.") not in source_texts for part in parts):
            wrong.append(message)
    assert wrong == [], "no text of the program has these words"


def test_links_to_threads_are_those_of_trainers():
    links = re.findall(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/\d+", MESSAGES)
    assert len(links) > 30
    trainers = ("SimpleTuner", "ai-toolkit", "OneTrainer", "musubi-tuner")
    for name in trainers:
        assert any(name in link for link in links), name
    asked = [symptom for symptom, text in entries().items() if "https://github.com/" in text]
    assert len(asked) >= 33
