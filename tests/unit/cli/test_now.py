import json
import os
from pathlib import Path

import pytest

from gracetune.cli.main import main
from gracetune.events.run_control import RunControl


def test_a_request_reaches_the_run_and_names_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert main(["now", "save", str(tmp_path)]) == 0
    (request,) = control.take_requests()
    assert (request.verb, request.arguments, request.source) == ("save", {}, "gracetune now")
    said = capsys.readouterr().out
    assert said.startswith(f"asked process {os.getpid()} to save, after its current step.\n")
    assert request.id in said


def test_prompts_and_the_interval_of_logging_are_sent_along(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert main(["now", "validate", str(tmp_path), "--prompt", "a cat", "--prompt", "a dog"]) == 0
    assert main(["now", "log", str(tmp_path), "--every", "3"]) == 0
    sent = [(request.verb, request.arguments) for request in control.take_requests()]
    assert sent == [("validate", {"prompts": ["a cat", "a dog"]}), ("log", {"every": 3})]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["save", "--prompt", "a cat"], "--prompt is given, but the request is save"),
        (["log"], "the request log needs --every"),
        (["stop", "--every", "3"], "no other request takes it"),
        (["log", "--every", "0"], "must be at least 1"),
    ],
)
def test_options_of_another_request_are_errors(tmp_path, capsys, words, message) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert main(["now", words[0], str(tmp_path), *words[1:]]) == 2
    assert message in capsys.readouterr().err
    assert control.take_requests() == []


def test_a_run_on_another_machine_is_named_with_its_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunControl(tmp_path).open(os.getpid())
    path = tmp_path / "now" / "listening.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "node7"}))
    assert main(["now", "stop", str(tmp_path)]) == 0
    assert "on node7" in capsys.readouterr().out


def test_a_folder_without_a_run_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["now", "validate", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"gracetune: no run accepts requests in {tmp_path}")


def test_an_unknown_request_exits_with_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["now", "dance", str(tmp_path)])
    assert caught.value.code == 2
