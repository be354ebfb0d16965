"""The entry point of the command line: find the verb, run it, turn errors into exit codes.

A verb is a subcommand, such as `train`. Each is a module with `HELP`, `add_arguments(parser)` and
`run(args) -> int`. It is imported only when it is used, so that `gracetune --help` does not load
torch.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import select
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from gracetune import __version__
from gracetune.errors import ConfigError, GracetuneError, redact_urls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gracetune.config.schema import RunFile


VERBS = {
    "init": ("gracetune.cli.init", "look at your data and write a commented run file"),
    "data": ("gracetune.cli.data", "show what training would see of a dataset"),
    "train": ("gracetune.cli.train", "train a model from a run file, or resume a run"),
    "launch": ("gracetune.cli.launch", "train on several GPUs and machines, with restarts"),
    "sample": ("gracetune.cli.sample", "generate samples from a run, a step or adapter files"),
    "plan": ("gracetune.cli.plan", "predict the memory and speed of a run before it starts"),
    "check": ("gracetune.cli.check", "compare a run's gradients with those of plain blocks"),
    "now": ("gracetune.cli.now", "ask a running training run to validate, save or stop"),
    "dash": ("gracetune.cli.dash", "show runs in a browser, while they train or later"),
    "report": ("gracetune.cli.report", "write runs into one HTML file, to keep or to send"),
    "import": ("gracetune.cli.import_config", "turn another trainer's config into a run file"),
    "cache": ("gracetune.cli.cache", "build, verify, clean up, explain and import caches"),
    "adapter": ("gracetune.cli.adapter", "inspect, convert, merge, extract and check adapters"),
    "schema": ("gracetune.cli.schema", "print the JSON Schema of run files"),
    "diagnose": ("gracetune.cli.diagnose", "check this machine and suggest fixes"),
    "prove": ("gracetune.cli.prove", "check machine and run file; write a report to send back"),
    "env": ("gracetune.cli.env", "show environment variables and their effect"),
    "baseline": ("gracetune.cli.baseline", "measure a run file, and detect regressions"),
    "host": ("gracetune.cli.host", "use gracetune inside SimpleTuner or ai-toolkit"),
    "port": ("gracetune.cli.port", "move a fork's patches to a newer upstream"),
    "examples": ("gracetune.cli.examples", "list, print or copy the example run files"),
}

INTERRUPTED = 130
PIPE_CLOSED = 141
"""Exit code if the reader of our output has closed the pipe: 128 + SIGPIPE."""
UNUSABLE_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR)
"""Errors of the system that are about a path, which the user has chosen."""


class Verb(Protocol):
    """The interface of the module of a verb, that is, of a subcommand such as `train`."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this subcommand to its parser."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the subcommand and return its exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda: _call(words))


def run_guarded(call: Callable[[], int]) -> int:
    """Call a command; return its exit code, or print its error and return the error's code.

    This is the only function that catches every exception.
    """
    try:
        code = call()
        sys.stdout.flush()
    except GracetuneError as error:
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt as error:
        _print_error(f"interrupted {error}".rstrip() + ".")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  the traceback is printed below
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            _discard_output()
            return PIPE_CLOSED
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _print_error(f"{error}. Free some disk space, then run the same command again.")
            return 1
        if isinstance(error, OSError) and error.errno in UNUSABLE_PATH and error.filename:
            _print_error(
                f"{_named_path(error)} cannot be read or written: {error.strerror}. Name another "
                "path, or change its permissions."
            )
            return ConfigError.exit_code
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            _print_error("the working directory no longer exists. Change to another folder.")
            return ConfigError.exit_code
        print(redact_urls(traceback.format_exc()), end="", file=sys.stderr)
        _print_error(
            "this is a bug in gracetune, not a mistake in your input. Please report it with the "
            f"lines above, your run file and the version ({__version__})."
        )
        return 1
    return code


def _call(words: list[str]) -> int:
    if not words or words[0] not in VERBS:
        _explain(words)
    # Before anything imports torch: users of the forks have allocator settings in their shells
    # that stock torch refuses to start with.
    from gracetune.config.environment import claim_process_alloc_conf

    claim_process_alloc_conf()
    module, _ = VERBS[words[0]]
    verb = cast("Verb", import_module(module))
    parser = argparse.ArgumentParser(prog=f"gracetune {words[0]}", description=verb.HELP)
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(words[1:]))


def _explain(words: list[str]) -> NoReturn:
    """Print help, the version, or an error for a missing or unknown subcommand; then exit."""
    width = max(map(len, VERBS))
    parser = argparse.ArgumentParser(
        prog="gracetune",
        usage="gracetune [--help] [--version] VERB ...",
        description="Fine-tune diffusion models on machines with more CPU than GPU memory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs:\n"
        + "".join(f"  {name:<{width}}  {text}\n" for name, (_, text) in VERBS.items())
        + "\nSee `gracetune VERB --help` for the arguments of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"gracetune {__version__}")
    _, rest = parser.parse_known_args(words[:1])
    if not rest:
        parser.error(f"a verb is missing. Use one of: {', '.join(VERBS)}.")
    close = difflib.get_close_matches(rest[0], VERBS, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Use one of: {', '.join(VERBS)}."
    parser.error(f"{rest[0]!r} is not a verb. {hint}")


def _print_error(text: str) -> None:
    try:
        print(f"gracetune: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed; the exit code still tells
        _discard_output()


def _named_path(error: OSError) -> str:
    """Return the path of an error; the folder, if it is a staging file with a name of our own."""
    path, _, name = os.fsdecode(error.filename).rpartition("/")
    return path or "." if name.endswith(".staging") else os.fsdecode(error.filename)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _output_is_closed() -> bool:
    """Return True if the reader of stdout or stderr is gone.

    If not, a BrokenPipeError came from another pipe, for example to a worker process.
    """
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))


def _discard_output() -> None:
    """Redirect output to /dev/null, so that the interpreter's last flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Load a run file; print a summary to stderr if it is the config of another trainer."""
    from gracetune.config.load import load_run_file

    loaded = load_run_file(path, overrides)
    if loaded.import_summary:
        print(loaded.import_summary, file=sys.stderr)
    return loaded.run


def add_run_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `RUN` and `--set`, for subcommands that read a run file."""
    parser.add_argument(
        "run_file",
        metavar="RUN",
        help="a run file: JSON, YAML or TOML; or a config of SimpleTuner or ai-toolkit",
    )
    add_set_argument(parser)


def add_set_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the argument `--set`, which overrides a setting of a run file."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="override one setting; can be repeated",
    )
