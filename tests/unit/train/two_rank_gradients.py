"""Check the gradients of all run files in a folder on two ranks."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
from fakes.family_sessions import family_session

from gracetune.cli.check import table_lines
from gracetune.config.load import load_run_file
from gracetune.errors import RunFailedError
from gracetune.train.gradient_check import check_gradients
from gracetune.train.loop import train_loop
from gracetune.train.step import TrainProgress


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        run = load_run_file(path).run
        texts = []
        with family_session(run, lambda event, texts=texts: texts.append(str(event))) as session:
            report = check_gradients(session)
            assert report.passed, "\n".join(table_lines(report))
            assert all(block.reduction_error is not None for block in report.blocks)
            train_loop(session, TrainProgress())
            assert any("gradients: block" in text for text in texts)
            if session.state.ranks.is_main:
                report_line(f"{path.stem} passed")
        if run.model.family == "tiny":
            check_unreduced(run.model_copy(update={"output_dir": f"{run.output_dir}-unreduced"}))


def check_unreduced(run) -> None:
    """Let ranks keep their own gradients, which the loss does not show."""
    with family_session(run, lambda _: None) as session:
        session.state.reducer.begin = lambda parameters: None
        copied = replace(session, references=list(session.references))  # the check empties the list
        with pytest.raises(RunFailedError, match="not summed over the ranks"):
            train_loop(copied, TrainProgress())
        report = check_gradients(session)
        assert report.blocks
        assert not report.passed
        with pytest.raises(RunFailedError, match="different weights after step 0"):
            train_loop(session, TrainProgress())
        if session.state.ranks.is_main:
            report_line("not summed: found")


def report_line(text) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
