import json
import os
from pathlib import Path

import pytest

from gracetune.cli.main import main
from gracetune.events.run_control import RunControl


def test_the_run_hears_and_the_user_is_told_who(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = RunControl(tmp_path)
    requests.open(os.getpid())
    assert main(["now", "save", str(tmp_path)]) == 0
    assert requests.take_requests() == {"save"}
    said = capsys.readouterr().out
    assert said == f"asked process {os.getpid()} to save, after its current step.\n"


def test_a_run_elsewhere_is_named_with_its_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunControl(tmp_path).open(os.getpid())
    path = tmp_path / "now" / "listening.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "node7"}))
    assert main(["now", "stop", str(tmp_path)]) == 0
    assert "on node7" in capsys.readouterr().out


def test_nobody_listening_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["now", "validate", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"gracetune: No run is listening in {tmp_path}")


def test_an_unknown_request_is_exit_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["now", "dance", str(tmp_path)])
    assert caught.value.code == 2
