import argparse
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gracetune import __version__
from gracetune.cli import main as cli
from gracetune.errors import ConfigError, GracetuneError, InterruptedRunError, RunFailedError


def command(
    *words: str, code: str = "", stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    start = ["-c", code, *words] if code else ["-m", "gracetune", *words]
    return subprocess.run(
        [sys.executable, *start], check=False, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb named `play`, whose `run` a test fills in."""
    module = ModuleType("gracetune_test_play")
    module.HELP = "Play."
    module.add_arguments = lambda parser: parser.add_argument("--loud", action="store_true")
    module.run = lambda args: 3 if args.loud else 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "play", (module.__name__, "play"))
    return module


def raising(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_every_verb() -> None:
    done = command("--help")
    assert done.returncode == 0
    for name, (_, text) in cli.VERBS.items():
        assert f"  {name}" in done.stdout
        assert text in done.stdout


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys; from gracetune.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    assert command(code=code).stdout.splitlines()[-1] == "[]"


def test_version_prints_the_package_version() -> None:
    assert command("--version").stdout == f"gracetune {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a verb is missing. Use one of: init, data, train"),
        (["trian"], "'trian' is not a verb. Did you mean 'train'?"),
        (["xyzzy"], "'xyzzy' is not a verb. Use one of: init, data, train"),
        (["--quiet"], "'--quiet' is not a verb."),
    ],
)
def test_a_word_that_is_not_a_verb_is_an_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.VERBS))
def test_every_verb_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"gracetune {name}" in capsys.readouterr().out


def test_a_verb_receives_its_arguments_and_returns_the_exit_code(verb: ModuleType) -> None:
    assert cli.main(["play"]) == 0
    assert cli.main(["play", "--loud"]) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("seed is x"), 2),
        (RunFailedError("the loss is nan"), 1),
        (InterruptedRunError("state saved"), 130),
    ],
)
def test_a_users_mistake_is_reported_in_one_message(
    verb: ModuleType, error: GracetuneError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(error)
    assert cli.main(["play"]) == code
    assert capsys.readouterr().err == f"gracetune: {error}\n"


def test_an_interrupt_exits_with_130(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.run = raising(KeyboardInterrupt())
    assert cli.main(["play"]) == 130
    assert capsys.readouterr().err == "gracetune: interrupted.\n"


def test_an_internal_error_prints_a_traceback(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(ZeroDivisionError("by zero"))
    assert cli.main(["play"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: by zero" in shown
    assert shown.splitlines()[-1].startswith("gracetune: this is a bug in gracetune")


def test_a_full_disk_is_not_reported_as_a_bug(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert cli.main(["play"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device: '/data/x'. Free some disk space, then run" in line


@pytest.mark.parametrize(
    ("number", "path", "shown"),
    [
        (errno.EACCES, "/root/report.html", "/root/report.html"),
        (errno.EROFS, "/cdrom/.report.html.7-ab.staging", "/cdrom"),
        (errno.ENAMETOOLONG, ".x.staging", "."),
    ],
)
def test_a_path_that_cannot_be_used_is_not_reported_as_a_bug(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], number: int, path: str, shown: str
) -> None:
    verb.run = raising(OSError(number, os.strerror(number), path))
    assert cli.main(["play"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gracetune: {shown} cannot be read or written: {os.strerror(number)}.")


def test_allocator_settings_of_the_forks_are_removed_before_a_verb_runs(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRACETUNE_ALLOC_CONF", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "use_uvm:True,expandable_segments:True")
    seen = []

    def run(args: argparse.Namespace) -> int:
        seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        return 0

    verb.run = run
    assert cli.main(["play"]) == 0
    assert seen == ["expandable_segments:True"]


SCRIPT = """
import sys
from types import ModuleType
from gracetune.cli import main as cli
verb = ModuleType("play")
verb.HELP, verb.add_arguments, verb.run = "", lambda parser: None, lambda args: {run}
sys.modules["play"] = verb
cli.VERBS["play"] = ("play", "")
sys.exit(cli.main(["play"]))
"""


def test_a_closed_output_pipe_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command(code=SCRIPT.format(run="print('x' * 100_000) or 0"), stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_to_a_worker_is_an_error() -> None:
    done = command(code=SCRIPT.format(run="(_ for _ in ()).throw(BrokenPipeError('worker'))"))
    assert done.returncode == 1
    assert "BrokenPipeError: worker" in done.stderr


def test_a_working_directory_that_was_deleted_is_named(
    verb: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    verb.run = lambda _: len(os.getcwd())
    assert cli.main(["play"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gracetune: the working directory no longer exists.")
