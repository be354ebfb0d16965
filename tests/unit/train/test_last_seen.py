import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fork_process import PythonProcess

from gracetune.errors import ConfigError, InterruptedRunError, RunFailedError
from gracetune.memory.sensors import SensorReading
from gracetune.train.last_seen import (
    CRASH_FILE,
    LAST_SEEN_FILE,
    LastSeen,
    explain_previous_end,
    read_last_seen,
    recording_crashes,
)

GIB = 2**30
PLENTY = {"memory_available": 60 * GIB, "memory_total": 64 * GIB, "oom_kills": 1}


def sensors(**host):
    return SimpleNamespace(read=lambda: SensorReading(host=PLENTY | host))


def killed(folder, changes=None, **host):
    """Leave the record of a process that was killed in step 12."""
    seen = LastSeen(folder, sensors(**host))
    seen.read_memory()
    seen.update(step=12, phase="saving", **(changes or {}))
    return folder


def explain(folder, oom_kills=1.0):
    return explain_previous_end(folder, 10, oom_kills, "resumes from the checkpoint of step 10")


def test_a_run_that_ended_in_order_needs_no_explanation(tmp_path):
    with LastSeen(tmp_path, sensors()):
        pass
    assert explain(tmp_path) is None
    assert explain(tmp_path / "new") is None
    with pytest.raises(InterruptedRunError), LastSeen(tmp_path, sensors()):
        raise InterruptedRunError("stop")
    assert explain(tmp_path) is None


def test_a_killed_process_is_explained_with_its_step_and_memory(tmp_path):
    event = explain(killed(tmp_path))
    assert "was killed (SIGKILL): 60.0 GiB of 64.0 GiB of host memory were left" in event.cause
    assert "in step 12 (saving)" in event.cause
    assert event.action == "resumes from the checkpoint of step 10"
    assert (event.check, event.level) == ("previous_run", "notice")


@pytest.mark.parametrize(
    ("host", "kills"),
    [
        ({"memory_available": GIB}, 1),
        ({"cgroup_used": 9.9 * GIB, "cgroup_limit": 10 * GIB}, 1),
        ({}, 2),
    ],
    ids=["host memory", "cgroup", "counter of the kernel"],
)
def test_a_process_killed_for_memory_is_recognised(tmp_path, host, kills):
    event = explain(killed(tmp_path, **host), oom_kills=kills)
    assert "was killed because memory ran out" in event.cause
    assert "cache_config.host_budget_gb" in event.advice


def test_a_restarted_machine_is_recognised(tmp_path):
    event = explain(killed(tmp_path, {"boot": "another"}, memory_available=GIB))
    assert "restarted, or lost power" in event.cause


def test_another_machine_is_named(tmp_path):
    assert "on node7" in explain(killed(tmp_path, {"host": "node7"})).cause


def test_a_failure_is_repeated_without_its_secrets(tmp_path):
    with pytest.raises(RunFailedError), LastSeen(tmp_path, sensors()):
        raise RunFailedError("s3://me:secret@bucket/a is gone")
    event = explain(tmp_path)
    assert "failed: s3://***@bucket/a is gone" in event.cause


def test_a_damaged_record_is_ignored(tmp_path):
    (tmp_path / LAST_SEEN_FILE).write_text("{")
    assert explain(tmp_path) is None


def test_the_record_is_small_and_survives_sigkill(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from gracetune.memory.sensors import MachineSensors\n"
        "from gracetune.train.last_seen import LastSeen\n"
        "with LastSeen(Path(sys.argv[1]), MachineSensors('none', {})) as seen:\n"
        "    seen.update(step=5, phase='training')\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    script = tmp_path / "seen.py"
    script.write_text(code)
    process = PythonProcess(script, tmp_path)
    while not (read_last_seen(tmp_path) or {}).get("step"):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    seen = read_last_seen(tmp_path)
    assert (seen["step"], seen["phase"], seen["ended"]) == (5, "training", "")
    assert (tmp_path / LAST_SEEN_FILE).stat().st_size == 2048
    assert "memory_available" in seen


def test_a_crash_in_native_code_leaves_its_stack(tmp_path):
    code = (
        "import sys, ctypes\nfrom pathlib import Path\n"
        "from gracetune.train.last_seen import recording_crashes\n"
        "with recording_crashes(Path(sys.argv[1])):\n    ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / CRASH_FILE).read_text()
    event = explain(killed(tmp_path))
    assert "crashed in native code: Fatal Python error: Segmentation fault" in event.cause
    assert "in string_at" in event.cause


def test_no_crash_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("faulthandler.is_enabled", lambda: False)
    monkeypatch.setattr("faulthandler.enable", lambda file: None)
    monkeypatch.setattr("faulthandler.disable", lambda: None)
    with recording_crashes(tmp_path):
        pass
    with recording_crashes(tmp_path):
        (tmp_path / "crash.txt").unlink()  # with the folder, for example
    with pytest.raises(InterruptedRunError), recording_crashes(tmp_path):
        raise InterruptedRunError("stopped after step 7")
    assert list(tmp_path.iterdir()) == []


def test_long_messages_fit_into_the_record(tmp_path):
    with pytest.raises(RunFailedError), LastSeen(tmp_path, sensors()):
        raise RunFailedError("x" * 100_000)
    assert json.loads((tmp_path / LAST_SEEN_FILE).read_text())["message"] == "x" * 297 + "..."
    with pytest.raises(RunFailedError), LastSeen(tmp_path, sensors()):
        raise RunFailedError("some words " * 100)
    message = json.loads((tmp_path / LAST_SEEN_FILE).read_text())["message"]
    assert len(message) <= 300
    assert message.endswith(("some...", "words..."))


def test_settings_that_were_refused_before_the_first_step_are_not_repeated(tmp_path):
    with pytest.raises(ConfigError), LastSeen(tmp_path, sensors()):
        raise ConfigError("datasets[0].resolution is too large")
    assert explain(tmp_path) is None
    with pytest.raises(ConfigError), LastSeen(tmp_path, sensors()) as seen:
        seen.update(step=3)
        raise ConfigError("the model refuses it")
    assert "the model refuses it" in explain(tmp_path).cause
