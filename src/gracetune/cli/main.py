"""The command line's frame: find the verb, load its module, turn errors into exit codes.

A verb is a module with `HELP`, `add_arguments(parser)` and `run(args) -> int`. It is imported only
when called, so that `gracetune --help` answers before torch could be loaded.
"""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from gracetune import __version__
from gracetune.errors import GracetuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


VERBS = {
    "train": ("gracetune.cli.train", "train a model as a run file says, or resume it"),
    "plan": ("gracetune.cli.plan", "say what a run will take before it starts, and how to run it"),
    "now": ("gracetune.cli.now", "ask a running run to validate, save or stop"),
    "cache": ("gracetune.cli.cache", "build, verify, clean up, explain and import caches"),
    "adapter": ("gracetune.cli.adapter", "inspect, convert, merge, extract and check adapters"),
    "schema": ("gracetune.cli.schema", "print what a run file may say, as JSON Schema"),
    "diagnose": ("gracetune.cli.diagnose", "check this machine and say what to do"),
    "env": ("gracetune.cli.env", "show what the environment sets, and what that will do"),
    "baseline": ("gracetune.cli.baseline", "measure a run, and tell whether it got slower"),
    "host": ("gracetune.cli.host", "use gracetune inside an unmodified SimpleTuner"),
    "port": ("gracetune.cli.port", "keep a fork alive on top of a newer upstream"),
    "examples": ("gracetune.cli.examples", "list, print or copy the example run files"),
}

INTERRUPTED = 130
PIPE_CLOSED = 141
"""What a shell reports of a program whose reader went away: 128 + SIGPIPE."""


class Verb(Protocol):
    """What a verb's module offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_guarded(lambda: _call(words))


def run_guarded(call: Callable[[], int]) -> int:
    """Turn whatever a command ends with into an exit code. The only place that catches all."""
    try:
        code = call()
        sys.stdout.flush()
    except GracetuneError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted.")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  the edge: a traceback is printed, nothing swallowed
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            _discard_output()
            return PIPE_CLOSED
        traceback.print_exc()
        _say(
            "this is an error of gracetune, not of your input. Please report it with the lines "
            f"above, your run file and `gracetune --version` ({__version__})."
        )
        return 1
    return code


def _call(words: list[str]) -> int:
    if not words or words[0] not in VERBS:
        _explain(words)
    # Before anything can import torch, which refuses to start on allocator settings it does not
    # know and which users of the forks have in their shells.
    from gracetune.config.environment import claim_process_alloc_conf

    claim_process_alloc_conf()
    module, _ = VERBS[words[0]]
    verb = cast("Verb", import_module(module))
    parser = argparse.ArgumentParser(prog=f"gracetune {words[0]}", description=verb.HELP)
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(words[1:]))


def _explain(words: list[str]) -> NoReturn:
    """Answer what is not a verb: --help, --version, nothing at all, a slip of the finger."""
    width = max(map(len, VERBS))
    parser = argparse.ArgumentParser(
        prog="gracetune",
        usage="gracetune [--help] [--version] VERB ...",
        description="Fine-tune diffusion models where the CPU has more memory than the GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs:\n"
        + "".join(f"  {name:<{width}}  {text}\n" for name, (_, text) in VERBS.items())
        + "\n`gracetune VERB --help` says what a verb takes.",
    )
    parser.add_argument("--version", action="version", version=f"gracetune {__version__}")
    _, rest = parser.parse_known_args(words[:1])
    if not rest:
        parser.error(f"say what to do: {', '.join(VERBS)}.")
    close = difflib.get_close_matches(rest[0], VERBS, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(VERBS)}."
    parser.error(f"{rest[0]!r} is not a verb. {hint}")


def _say(text: str) -> None:
    print(f"gracetune: {text}", file=sys.stderr)


def _output_is_closed() -> bool:
    """Whether stdout or stderr lost its reader: a worker's broken pipe is another matter."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))


def _discard_output() -> None:
    """Keep the interpreter's last flush from failing on the same pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


# ------------------------------------------------------------------------------------------
# The words that name a run file and change it, the same for every verb that reads one.


def add_run_file_arguments(parser: argparse.ArgumentParser) -> None:
    """`RUN`, and `--set`."""
    parser.add_argument("run_file", metavar="RUN", help="a run file: JSON, YAML or TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="change one setting; may be given often",
    )
