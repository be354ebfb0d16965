import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.run_control import (
    MAX_REQUEST_NBYTES,
    Request,
    RunControl,
    reserve_folder,
    send_request,
)


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


def verbs(control: RunControl) -> list[str]:
    return [request.verb for request in control.take_requests()]


def test_a_folder_that_was_moved_is_noticed_and_that_of_another_run_is_left_alone(
    tmp_path: Path,
) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    with reserve_folder(folder, print), RunControl(folder).listening(["stop"]) as control:
        assert not control.has_lost_folder()
        folder.rename(moved)
        assert control.has_lost_folder()
        dead_listener(folder)
        (folder / ".lock").write_text('[1, "elsewhere"]')
        with pytest.raises(RunFailedError, match=r"process 1 has started another run.*was moved"):
            control.has_lost_folder()
    assert (folder / "now/listening.json").exists()


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert control.take_requests() == []
    assert send_request(tmp_path, "validate").pid == os.getpid()
    send_request(tmp_path, "save")
    (tmp_path / "now" / "stop").touch()
    assert verbs(control) == ["stop", "validate", "save"]
    assert control.take_requests() == []


def test_a_request_has_arguments_an_id_and_a_source(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    prompts = ["a “star”", {"prompt": "b", "seed": 3}]
    send_request(tmp_path, "validate", {"prompts": prompts}, "page", request_id="0-abc")
    send_request(tmp_path, "log", {"every": 5})
    first, second = control.take_requests()
    assert first == Request("validate", "0-abc", {"prompts": prompts}, "page")
    assert (second.verb, second.arguments, second.source) == ("log", {"every": 5}, "gracetune now")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", "[1]", 'the entry "request"'),
        ("a.json", '{"request": 3}', 'the entry "request"'),
        ("a.json", '{"request": "save", "arguments": 3}', "must be an object"),
        ("a.json", '{"request": "dance"}', "does not accept 'dance'"),
        ("a.json", '{"request": "\\u001b[2J"}', "does not accept '\\x1b[2J'"),
        ("a.json", '{"request": "log", "arguments": {"a":' + "[" * 99 + "]" * 99 + "}}", "nested"),
        ("a b.json", '{"request": "save"}', "only letters"),
        ("a.json", '{"request": "save"}' + " " * MAX_REQUEST_NBYTES, "larger than"),
    ],
)
def test_a_file_that_is_no_request_is_refused_once(tmp_path: Path, name, text, problem) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    (tmp_path / "now/requests" / name).write_text(text)
    (refused,) = control.take_requests()
    assert problem in refused.problem
    assert control.take_requests() == []


def test_links_pipes_and_files_being_written_are_not_requests(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    folder = tmp_path / "now/requests"
    (folder / "a.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "b.json")
    (folder / "c.json").mkdir()
    (folder / ".d.json").write_text("{}")
    assert control.take_requests() == []
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("content", [None, "kept"])
def test_a_folder_in_place_of_a_request_is_refused_once(tmp_path: Path, content) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    (tmp_path / "now/save").mkdir()
    if content:
        (tmp_path / "now/save" / content).touch()
    (tmp_path / "now/stop").touch()
    refused, stop = control.take_requests()
    assert (refused.verb, stop) == ("save", Request("stop"))
    assert "cannot be read and deleted" in refused.problem
    assert control.take_requests() == []
    control.close()


def test_a_request_that_cannot_be_deleted_is_not_carried_out(tmp_path: Path, monkeypatch) -> None:
    """It would be carried out after every step."""
    control = RunControl(tmp_path)
    control.open(os.getpid())
    send_request(tmp_path, "save", request_id="a")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("gracetune.events.run_control.os.unlink", fail)
    assert {request.problem != "" for request in control.take_requests()} == {True}
    assert control.take_requests() == []


def test_a_request_that_is_withdrawn_meanwhile_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid())
    monkeypatch.setattr("gracetune.events.run_control.os.listdir", lambda _: ["gone.json"])
    assert control.take_requests() == []


@pytest.mark.parametrize("place", ["now", "now/requests"])
def test_a_link_in_place_of_the_folder_leads_nowhere(tmp_path: Path, place: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        RunControl(folder).open(os.getpid())
    (other / "now/requests/a.json").write_text('{"request": "stop"}')
    (run / place).rename(run / "old")
    (run / place).symlink_to(other / place)
    with pytest.raises(ConfigError, match="is a link"):
        send_request(run, "save")
    if place != "now":
        (refused,) = RunControl(run).take_requests()
        assert "requests" in refused.problem
    assert [path.name for path in (other / "now/requests").iterdir()] == ["a.json"]


def test_a_run_that_cannot_validate_says_so(tmp_path: Path) -> None:
    control = RunControl(tmp_path)
    control.open(os.getpid(), ["save", "stop"])
    (tmp_path / "now" / "validate").touch()
    (refused,) = control.take_requests()
    assert "enable_manual_validation" in refused.problem


def test_no_temporary_files_are_left(tmp_path: Path) -> None:
    RunControl(tmp_path).open(os.getpid())
    send_request(tmp_path, "stop")
    assert sorted(p.name for p in (tmp_path / "now").iterdir()) == ["listening.json", "requests"]
    assert [path.suffix for path in (tmp_path / "now/requests").iterdir()] == [".json"]


def test_requests_to_an_earlier_run_are_deleted(tmp_path: Path) -> None:
    dead_listener(tmp_path)
    (tmp_path / "now" / "stop").write_text("")
    control = RunControl(tmp_path)
    control.open(os.getpid())
    assert control.take_requests() == []


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
    assert verbs(control) == ["save"]
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


LISTENER = {"pid": 1, "host": "x", "birth": 1, "verbs": ["save"]}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "not json", "[" * 100_000),
        *(json.dumps(LISTENER | {name: "\0"}) for name in ("pid", "birth")),
        *(json.dumps(LISTENER | {name: [3]}) for name in ("host", "verbs")),
    ],
)
def test_a_damaged_listener_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "listening.json").write_text(text)
    with pytest.raises(ConfigError, match=r"listening\.json"):
        send_request(tmp_path, "stop")


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_listener_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    os.mkfifo(tmp_path / "now" / "listening.json")
    with pytest.raises(ConfigError, match=r"listening\.json"):
        send_request(tmp_path, "stop")


HOLD = """
import sys, time
from pathlib import Path
from gracetune.errors import ConfigError
from gracetune.events.run_control import reserve_folder
try:
    with reserve_folder(Path(sys.argv[1]), print):
        print("won", flush=True)
        sys.stdin.read()
except ConfigError as error:
    print(error, flush=True)
"""


def start_holder(folder: Path | str, **options: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", HOLD, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_of_many_simultaneous_starts_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    children = [start_holder(tmp_path) for _ in range(6)]
    answers = [child.stdout.readline().strip() for child in children]
    (winner,) = (c for c, answer in zip(children, answers, strict=True) if answer == "won")
    expected = f"output_dir is {str(tmp_path)!r}, which is in use by process {winner.pid} on "
    assert sum(answer.startswith(expected) for answer in answers) == 5, answers
    for child in children:
        child.communicate()


@pytest.mark.parametrize("spelling", ["link", "relative", "dots"])
def test_another_spelling_of_a_folder_is_the_same_folder(tmp_path: Path, spelling: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    names = {"link": tmp_path / "link", "relative": "run", "dots": f"{folder}/../run"}
    with reserve_folder(folder, pytest.fail):
        other = start_holder(names[spelling], cwd=tmp_path)
        assert f"in use by process {os.getpid()} on " in other.communicate()[0]


def test_a_killed_process_releases_its_folder_even_if_its_child_lives(tmp_path: Path) -> None:
    script = HOLD.replace(
        "        sys.stdin.read()",
        "        import os\n"
        "        read, write = os.pipe()\n"
        "        if os.fork() == 0: os.write(write, b'x'); time.sleep(30)\n"
        "        os.read(read, 1)\n"  # the child is past the handlers of fork
        "        os.kill(os.getpid(), 9)",
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert child.wait() == -9
        with reserve_folder(tmp_path, pytest.fail):
            pass
    finally:
        os.killpg(child.pid, 9)


def test_a_folder_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), reserve_folder(tmp_path, pytest.fail):
            _ = 1 / 0


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("gracetune.events.run_control.fcntl.flock", fail)
    warnings: list[str] = []
    with reserve_folder(tmp_path, warnings.append):
        pass
    assert "file system without locks" in warnings[0]
