"""Train every miniature model, and print a table of what works for each family.

    [COMFYUI=.hosts/comfyui] python scripts/family_table.py [--only flux,krea2] [--write]

Prints a Markdown table with a row for each miniature of `tests/fakes/miniatures.py` that a family
reads, and the reasons for each "no". `--write` puts both into docs/families.md, between markers;
with `--only`, the rows of other miniatures stay as they are there. The columns:

contract
    The tests of `tests/contract/test_family.py` for the miniature, which include the physical ones.
LoRA, LoKr, full
    A run of two steps ends with finite losses, and exports its result. `full` has no adapter.
plan
    `gracetune plan` plans the run of the LoRA without loading the model.
stream
    Gradients of blocks whose weights are streamed are those of plain blocks (`gracetune check`).
sample
    The run of the LoRA generates a sample.
diffusers loads, ComfyUI loads
    With the exported LoRA loaded by diffusers' `load_lora_weights`, or by the functions of the
    ComfyUI that COMFYUI names, the transformer or U-Net has the output that the adapter's formulas
    give, within 1e-5 of the adapter's effect.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

# The miniatures and the tools are test code, which is not installed with the package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import adapter_tools
import diffusers
from conftest import EventRecorder
from fakes.family_sessions import change_mode, family_run, family_session, small_plans
from fakes.miniatures import MINIATURES
from PIL import Image

from gracetune.adapters.files.io import read_adapter
from gracetune.adapters.files.layers import with_stage
from gracetune.cli.main import main as gracetune
from gracetune.events.types import StepDone
from gracetune.models.family import key_tables
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.train.gradient_check import check_gradients
from gracetune.train.run import run_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.config.schema import RunFile

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- family table -->", "<!-- end of the family table -->"
COLUMNS = (
    "contract",
    "LoRA",
    "LoKr",
    "full",
    "plan",
    "stream",
    "sample",
    "diffusers loads",
    "ComfyUI loads",
)
YES = "yes"
NOT_TRIED = "not tried: COMFYUI is not set"


def main() -> None:
    """Print the table, and write it to the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of miniatures, separated by commas")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    names = [name for name, small in MINIATURES.items() if small.family]
    names = arguments.only.split(",") if arguments.only else names
    warnings.simplefilter("ignore")
    contract = contract_results(names)
    rows = {}
    for name in names:
        with TemporaryDirectory() as folder:
            rows[name] = {"contract": contract[name], **results_of(name, Path(folder))}
        print(name, rows[name], file=sys.stderr, flush=True)
    print("\n".join(table_lines(rows)))
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        written, _, after = rest.partition(END)
        rows = read_table(written) | rows
        ordered = {name: rows[name] for name in MINIATURES if name in rows}
        table = "\n".join(table_lines(ordered))
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of a table from `table_lines`, with the reason for each "no"."""
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    rows = {}
    for name, cells in re.findall(r"^\| (\S+) \| `\w+` \| (.+) \|$", text, re.MULTILINE):
        numbers = [re.fullmatch(r"no \((\d+)\)", cell) for cell in cells.split(" | ")]
        values = [YES if number is None else reasons[number[1]] for number in numbers]
        rows[name] = dict(zip(COLUMNS, values, strict=True))
    return rows


def contract_results(names: Sequence[str]) -> dict[str, str]:
    """Run the contract of families, and return "yes" or the first failed test by miniature."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = ROOT / "tests" / "contract" / "test_family.py"
        command = [sys.executable, "-m", "pytest", tests, "-q", f"--junitxml={report}"]
        command += ["-k", " or ".join(names)]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    known = "|".join(sorted(MINIATURES, key=len, reverse=True))
    results = dict.fromkeys(names, "no test ran")
    for case in cases:
        found = re.search(rf"^(\w+)\[({known})(?:[- ].*)?\]$", case.attrib["name"], re.DOTALL)
        if found is None or found[2] not in results:
            continue
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            results[found[2]] = f"{found[1]} fails"
        elif "skipped" in outcomes:
            results[found[2]] = f"{found[1]} is skipped"
        elif results[found[2]] == "no test ran":
            results[found[2]] = YES
    return results


def results_of(name: str, folder: Path) -> dict[str, str]:
    """Return "yes" or the reason for "no" in each column, for one miniature."""
    small = MINIATURES[name]
    validation: dict[str, Any] = {"every": 2, "prompts": ["a red ring"], "guidance": 1.0}
    if small.kind in ("edit", "first frame"):
        Image.new("RGB", (32, 32), (90, 90, 90)).save(folder / "start.png")
        validation["images"] = [str(folder / "start.png")]
    run = family_run(
        folder,
        name,
        train={"max_train_steps": 2, "batch_size": 1},
        optimizer={"lr": 0.2},  # two steps must change the output
        validation={**validation, "sample_steps": 1},
    )
    changes: Mapping[str, Mapping[str, Any]] = {
        "LoRA": {},
        "LoKr": {"adapter": {"kind": "lokr", "rank": 2, "factor": 2}},
        "full": {"adapter": None},
    }
    results = {}
    for kind, sections in changes.items():
        settings = run.model_dump(mode="json", exclude_unset=True) | sections
        if kind != "LoRA":
            settings["validation"] = {"every": 0}
        changed = type(run).model_validate(settings | {"output_dir": str(folder / kind)})
        results[kind] = attempt(partial(train, changed))
    lora = folder / "LoRA"
    (folder / "run.json").write_text(run.model_dump_json(exclude_unset=True))
    results["plan"] = attempt(partial(plan, folder / "run.json"))
    results["stream"] = attempt(partial(stream, run))
    samples = list(lora.glob("validation/*/000.*"))
    results["sample"] = YES if samples else "no sample was written"
    files = sorted(lora.glob("adapter/*.safetensors"))
    results["diffusers loads"] = attempt(partial(load_files, name, folder / "model", files, None))
    comfyui = os.environ.get("COMFYUI")
    results["ComfyUI loads"] = NOT_TRIED
    if comfyui:
        clone = Path(comfyui).resolve()
        results["ComfyUI loads"] = attempt(
            partial(load_files, name, folder / "model", files, clone)
        )
    return results


def attempt(function: Callable[[], str]) -> str:
    """Return the function's result, or its error as a line of text."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return function()
    except Exception as error:  # noqa: BLE001  a failure is a result of the table
        return f"{type(error).__name__}: {error}".splitlines()[0]


def train(run: RunFile) -> str:
    """Train as the run file says, and check the losses and the exported files."""
    events = EventRecorder()
    ended = run_training(run, sinks=[events])
    losses = [event.loss for event in events.of(StepDone)]
    if ended.status != "done":
        return f"the run ends with status {ended.status}"
    if len(losses) != run.train.max_train_steps or not all(map(math.isfinite, losses)):
        return f"the losses of the run are {losses}"
    exported = list(Path(ended.outputs["result"]).rglob("*.safetensors"))
    return YES if exported else "the run exported no weights"


def plan(run_file: Path) -> str:
    """Plan a run with the command."""
    errors = StringIO()
    with redirect_stderr(errors):
        code = gracetune(["plan", str(run_file), "--machine", "gh200-96"])
    return YES if code == 0 else errors.getvalue().strip().removeprefix("gracetune: ")


def stream(run: RunFile) -> str:
    """Compare the gradients of streamed blocks with those of plain ones."""
    with small_plans(), family_session(run, lambda _: None) as session:
        report = check_gradients(change_mode(session, "streamed"))
    return YES if report.passed else "gradients differ from those of plain blocks"


def load_files(name: str, model: Path, files: Sequence[Path], clone: Path | None) -> str:
    """Load exported files in diffusers, or in a clone of ComfyUI, and compare the outputs."""
    tables = key_tables()
    if adapter_tools.table_of(name).family not in tables:
        return "Adapter files of this family have diffusers' names, which neither tool loads."
    index = diffusers.DiffusionPipeline.load_config(model)
    component = adapter_tools.component_of(name)
    library, class_name = index[component]
    with without_progress_bars():
        transformer = getattr(diffusers, class_name).from_pretrained(model / component)
    assert library == "diffusers"
    transformer.pipeline_class = getattr(diffusers, index["_class_name"])
    for file in files:
        adapter = with_stage(read_adapter(file, tables), None)
        effect = adapter_tools.Effect(name, transformer, adapter)
        if clone is None:
            load = partial(adapter_tools.load_in_diffusers, name, transformer, file)
            error = effect.error(load)
        else:
            with adapter_tools.comfyui_modules(clone) as comfy:
                if adapter_tools.comfyui_class(comfy, name) is None:
                    known = adapter_tools.table_of(name).comfyui_version
                    return (
                        f"ComfyUI {comfy.version} does not know this model; {known} and newer do."
                    )
                load = partial(adapter_tools.load_in_comfyui, comfy, name, transformer, file)
                error = effect.error(load)
        if not error <= adapter_tools.MAX_ERROR:
            return f"{file.name} has an error of {error:.0e} of the adapter's effect"
    return YES if files else "the run exported no file"


def table_lines(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the lines of the table, and below it the reasons for each "no"."""
    lines = [
        f"| model | family | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    reasons: dict[str, int] = {}
    for name, results in rows.items():
        cells = []
        for column in COLUMNS:
            reason = results[column]
            number = None if reason == YES else reasons.setdefault(reason, len(reasons) + 1)
            cells.append(YES if number is None else f"no ({number})")
        lines.append(f"| {name} | `{MINIATURES[name].family}` | {' | '.join(cells)} |")
    return lines + [""] * bool(reasons) + [f"{n}. {reason}" for reason, n in reasons.items()]


if __name__ == "__main__":
    main()
