"""Commands and run files in the documentation, and the ones that a test machine cannot run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "GH200_OPTIMIZATION_GUIDE_FINAL_V2.md",
    ROOT / "documentation" / "GH200_WORKFLOW.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PROGRAMS = re.compile(
    r"(accelerate|apptainer|cp|docker|gracetune|hf|git|make|pip|python3?|sbatch|source|srun|torchrun"
    r"|touch|PYTHONPATH=\S+) "
)
"""Beginnings by which a command is recognised in a block without a language."""
SHELLS = ("bash", "sh", "shell", "console")
NEEDS = {
    r"(python3 -m venv|source gracetune-env|pip install|python -c) ?": "a network, and the wheel "
    "(make test-install)",
    r"python - <<": "the README's demo (make test-install)",
    r"(hf|git) ": "a network",
    r"(docker|apptainer) ": "a container engine",
    r"(srun|sbatch) |GRACETUNE=": "Slurm (tests/distributed/test_slurm_nodes.py)",
    r"accelerate launch --config_file accelerate_config_gh200.yaml": "a GH200 "
    "(tests/e2e/test_launch_lines.py)",
    r"(torchrun|accelerate launch) ": "several GPUs (tests/e2e/test_launch_lines.py)",
    r"make ": "this repository",
    r"cp \S+ ComfyUI/": "ComfyUI (make test-comfyui)",
    r"source scripts/setup_gh200_env.sh": "a GH200 (tests/unit/test_setup_env.py)",
    r"python gh200_diagnostic.py": "a GH200 (tests/unit/memory)",
    r"PYTHONPATH=src:benchmarks ": "this repository (tests/test_benchmarks.py)",
    r"gracetune diagnose$": "a GPU",
    r"gracetune dash": "a browser (make test-browser)",
    r"gracetune now ": "a run that trains (tests/e2e/test_requests.py)",
    r"gracetune launch mine.yaml( --gpus 2)?$": "several GPUs",
    r"gracetune launch mine.yaml --nodes": "two machines (make test-distributed)",
    r"gracetune host ": "SimpleTuner or ai-toolkit (make test-hosts, make test-ai-toolkit)",
    r"gracetune port ": "a fork (tests/unit/forkport)",
    r"gracetune adapter .*\b(FILE|A B|BASE)\b": "files that the synopsis names by letters "
    "(tests/unit/adapters)",
    r"gracetune adapter convert runs/mine/checkpoints": "a family with names in ComfyUI "
    "(tests/unit/adapters)",
    r"gracetune cache import": "a cache of SimpleTuner or ai-toolkit (tests/unit/cache)",
    r"gracetune cache inspect run.json 3f2a9c": "an entry with this key (tests/unit/cli)",
}
"""What a command needs that a test of miniatures does not have, and where it is tested instead."""


WORDS = {
    "a network": r"network|connection|download|clone|install",
    "a container engine": r"container engine",
    "Slurm": r"Slurm",
    "several GPUs": r"GPUs",
    "two machines": r"machines",
    "ComfyUI": r"ComfyUI",
    "a GH200": r"GH200",
    "a GPU": r"needs (a|its) GPU|without a GPU",
    "a browser": r"browser",
    "SimpleTuner or ai-toolkit": r"SimpleTuner|ai-toolkit",
    "a fork": r"fork",
}
"""Words by which a page says that its commands need this, by the first words of a need."""

PLANS_HERE = re.compile(r"the GPU (in|of) this machine")
"""Words by which a page says that `gracetune plan` without `--machine` measures a GPU."""


class Block(NamedTuple):
    """A block of code in a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of code of a page, without their indentation."""
    found, start, language, lines = [], 0, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r" *```(\w*)", line)
        if fence and not start:
            start, language, lines = number, fence[1], []
            indent = len(line) - len(line.lstrip())
        elif fence:
            found.append(Block(page, start, language, "\n".join(lines)))
            start = 0
        elif start:
            lines.append(line[indent:] if not line[:indent].strip() else line.strip())
    assert not start, f"{page}: the block in line {start} does not end"
    return found


def commands(page: Path) -> list[str]:
    """Return the shell commands of a page, without comments, prompts and here-documents."""
    found: list[str] = []
    for block in blocks(page):
        end = ""
        text = re.sub(r" *\\\n *", " ", block.text)
        for written in text.splitlines():
            line = re.split(r"  +(?:#.*)?| # ", written.strip().removeprefix("$ "))[0]
            if end:
                end = "" if line == end else end
                continue
            if not line or line.startswith("#"):
                continue
            if block.language not in SHELLS:
                if block.language or not PROGRAMS.match(f"{line} "):
                    continue
            elif "bash -c '" in line:
                end = '\' launch "$@" &'
            heredoc = re.search(r"<<'(\w+)'", line)
            end = heredoc[1] if heredoc else end
            found.append(line)
    return found


def plans_here(command: str) -> bool:
    """Return True if the command plans for the GPU of the machine on which it runs."""
    return command.startswith("gracetune plan ") and "--machine" not in command


def missing_for(command: str) -> str:
    """Return what the command needs that a test machine does not have; empty if it can run."""
    return next((need for rule, need in NEEDS.items() if re.match(rule, command)), "")
