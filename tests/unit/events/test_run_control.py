import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.run_control import RunControl, send_request


def dead_listener(folder: Path) -> int:
    """Create the files of a run that was killed; return its process id."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "from gracetune.events.run_control import RunControl\n"
        "RunControl(Path(sys.argv[1])).open(os.getpid()); print(os.getpid())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "now" / "listening.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert control.take_requests() == set()
    assert send_request(tmp_path, "validate").pid == os.getpid()
    send_request(tmp_path, "save")
    send_request(tmp_path, "save")
    assert control.take_requests() == {"validate", "save"}
    assert control.take_requests() == set()


def test_no_temporary_files_are_left(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid())
    send_request(tmp_path, "stop")
    assert sorted(path.name for path in (tmp_path / "now").iterdir()) == ["listening.json", "stop"]


def test_requests_to_an_earlier_run_are_deleted(tmp_path: Path) -> None:
    dead_listener(tmp_path)
    (tmp_path / "now" / "stop").write_text("")
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert control.take_requests() == set()


def test_a_closed_run_accepts_no_requests(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    send_request(tmp_path, "save")
    control.close()
    assert list((tmp_path / "now").iterdir()) == []
    with pytest.raises(RunFailedError, match="no run accepts requests"):
        send_request(tmp_path, "save")


def test_a_request_to_a_killed_run_is_an_error(tmp_path: Path) -> None:
    pid = dead_listener(tmp_path)
    with pytest.raises(RunFailedError, match=f"process {pid} no longer exists") as caught:
        send_request(tmp_path, "stop")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "now" / "stop").exists()


def test_a_process_with_a_reused_pid_is_not_the_run(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid())
    rewrite(tmp_path, birth=1)
    with pytest.raises(RunFailedError, match="was killed"):
        send_request(tmp_path, "stop")


def test_a_zombie_process_counts_as_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from gracetune.events.run_control import RunControl\n"
        "RunControl(Path(sys.argv[1])).open(os.getpid())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RunFailedError, match="was killed"):
            send_request(tmp_path, "stop")


def test_a_run_on_another_machine_is_assumed_to_be_alive(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    rewrite(tmp_path, host="elsewhere", birth=1)
    assert not send_request(tmp_path, "save").is_local()
    assert control.take_requests() == {"save"}
    control.open(os.getpid())
    assert send_request(tmp_path, "save").is_local()


def test_two_running_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getppid())
    second = RunControl(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getppid()}"):
        second.open(os.getpid())
    second.close()
    assert send_request(tmp_path, "stop").pid == os.getppid()


def test_a_request_that_the_run_does_not_accept_is_rejected(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid(), verbs=("save", "stop"))
    with pytest.raises(ConfigError, match="enable_manual_validation"):
        send_request(tmp_path, "validate")
    assert not (tmp_path / "now" / "validate").exists()


def test_unknown_verbs_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use one of: validate, save, stop"):
        send_request(tmp_path, "dance")
    with pytest.raises(ConfigError, match="not a folder"):
        send_request(tmp_path / "none", "stop")


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json"])
def test_a_damaged_listener_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "listening.json").write_text(text)
    with pytest.raises(ConfigError, match=r"listening\.json"):
        send_request(tmp_path, "stop")
