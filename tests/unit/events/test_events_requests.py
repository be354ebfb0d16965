import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.run_control import RunControl, send_request


def dead_listener(folder: Path) -> int:
    """Leave behind what a killed run leaves behind."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from gracetune.events.run_control import Requests\n"
        "Requests(Path(sys.argv[1])).open(os.getpid()); print(os.getpid())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "now" / "listening.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_asked_is_taken_once(tmp_path: Path) -> None:
    requests = RunControl(tmp_path)
    requests.open(os.getpid())
    assert requests.take_requests() == set()
    assert send_request(tmp_path, "validate").pid == os.getpid()
    send_request(tmp_path, "save")
    send_request(tmp_path, "save")
    assert requests.take_requests() == {"validate", "save"}
    assert requests.take_requests() == set()


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid())
    send_request(tmp_path, "stop")
    assert sorted(path.name for path in (tmp_path / "now").iterdir()) == ["listening.json", "stop"]


def test_a_stop_meant_for_an_earlier_run_does_not_stop_this_one(tmp_path: Path) -> None:
    dead_listener(tmp_path)
    (tmp_path / "now" / "stop").write_text("")
    requests = RunControl(tmp_path)
    requests.open(os.getpid())
    assert requests.take_requests() == set()


def test_after_the_end_nobody_listens(tmp_path: Path) -> None:
    requests = RunControl(tmp_path)
    requests.open(os.getpid())
    send_request(tmp_path, "save")
    requests.close()
    assert list((tmp_path / "now").iterdir()) == []
    with pytest.raises(RunFailedError, match="No run is listening"):
        send_request(tmp_path, "save")


def test_a_killed_run_is_named_and_not_asked(tmp_path: Path) -> None:
    pid = dead_listener(tmp_path)
    with pytest.raises(RunFailedError, match=f"process {pid} ended") as caught:
        send_request(tmp_path, "stop")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "now" / "stop").exists()


def test_another_process_with_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid())
    rewrite(tmp_path, birth=1)
    with pytest.raises(RunFailedError, match="is gone"):
        send_request(tmp_path, "stop")


def test_a_zombie_is_gone(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from gracetune.events.run_control import Requests\n"
        "Requests(Path(sys.argv[1])).open(os.getpid())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RunFailedError, match="is gone"):
            send_request(tmp_path, "stop")


def test_a_run_on_another_machine_is_believed(tmp_path: Path) -> None:
    requests = RunControl(tmp_path)
    requests.open(os.getpid())
    rewrite(tmp_path, host="elsewhere", birth=1)
    assert not send_request(tmp_path, "save").is_local()
    assert requests.take_requests() == {"save"}
    requests.open(os.getpid())
    assert send_request(tmp_path, "save").is_local()


def test_two_living_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getppid())
    second = RunControl(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getppid()}"):
        second.open(os.getpid())
    second.close()
    assert send_request(tmp_path, "stop").pid == os.getppid()


def test_a_run_says_what_it_answers_to(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid(), verbs=("save", "stop"))
    with pytest.raises(ConfigError, match="enable_manual_validation"):
        send_request(tmp_path, "validate")
    assert not (tmp_path / "now" / "validate").exists()


def test_unknown_verbs_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Known: validate, save, stop"):
        send_request(tmp_path, "dance")
    with pytest.raises(ConfigError, match="not a folder"):
        send_request(tmp_path / "none", "stop")


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json"])
def test_a_listener_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "listening.json").write_text(text)
    with pytest.raises(ConfigError, match=r"listening\.json"):
        send_request(tmp_path, "stop")
