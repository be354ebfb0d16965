import argparse
import os
import subprocess
import sys
import time
from types import ModuleType

import pytest

from gracetune import __version__
from gracetune.cli import main as frame
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
    monkeypatch.setitem(frame.VERBS, "play", (module.__name__, "play"))
    return module


def raising(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_is_quick_and_lists_every_verb() -> None:
    times = []
    for _ in range(3):  # the best of three: this is about imports, not about a busy machine
        begin = time.perf_counter()
        done = command("--help")
        times.append(time.perf_counter() - begin)
    assert done.returncode == 0
    for name, (_, text) in frame.VERBS.items():
        assert f"  {name}" in done.stdout
        assert text in done.stdout
    assert min(times) < 0.5


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from gracetune.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pydantic', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    assert command(code=code).stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    assert command("--version").stdout == f"gracetune {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to do: train, plan, now"),
        (["trian"], "'trian' is not a verb. Did you mean 'train'?"),
        (["xyzzy"], "'xyzzy' is not a verb. Known: train, plan, now"),
        (["--quiet"], "'--quiet' is not a verb."),
    ],
)
def test_what_is_not_a_verb_is_explained(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        frame.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(frame.VERBS))
def test_every_verb_keeps_the_protocol(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        frame.main([name, "--help"])
    assert caught.value.code == 0
    assert f"gracetune {name}" in capsys.readouterr().out


def test_a_verb_gets_its_arguments_and_gives_the_exit_code(verb: ModuleType) -> None:
    assert frame.main(["play"]) == 0
    assert frame.main(["play", "--loud"]) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("seed is x"), 2),
        (RunFailedError("the loss is nan"), 1),
        (InterruptedRunError("state saved"), 130),
    ],
)
def test_what_a_user_can_mend_is_one_message(
    verb: ModuleType, error: GracetuneError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(error)
    assert frame.main(["play"]) == code
    assert capsys.readouterr().err == f"gracetune: {error}\n"


def test_an_interrupt_is_130(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.run = raising(KeyboardInterrupt())
    assert frame.main(["play"]) == 130
    assert capsys.readouterr().err == "gracetune: interrupted.\n"


def test_our_own_faults_keep_their_traceback(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(ZeroDivisionError("by nought"))
    assert frame.main(["play"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: by nought" in said
    assert said.splitlines()[-1].startswith("gracetune: this is an error of gracetune")


def test_the_allocator_settings_of_the_forks_are_claimed_before_a_verb_runs(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRACETUNE_ALLOC_CONF", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "use_uvm:True,expandable_segments:True")
    seen = []

    def run(args: argparse.Namespace) -> int:
        seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        return 0

    verb.run = run
    assert frame.main(["play"]) == 0
    assert seen == ["expandable_segments:True"]


PLAYING = """
import sys
from types import ModuleType
from gracetune.cli import main as frame
verb = ModuleType("play")
verb.HELP, verb.add_arguments, verb.run = "", lambda parser: None, lambda args: {run}
sys.modules["play"] = verb
frame.VERBS["play"] = ("play", "")
sys.exit(frame.main(["play"]))
"""


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command(code=PLAYING.format(run="print('x' * 100_000) or 0"), stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_to_a_worker_is_an_error() -> None:
    done = command(code=PLAYING.format(run="(_ for _ in ()).throw(BrokenPipeError('worker'))"))
    assert done.returncode == 1
    assert "BrokenPipeError: worker" in done.stderr
