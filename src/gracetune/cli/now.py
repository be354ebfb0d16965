"""`gracetune now`: ask a running training run to validate, save, stop or change its logging."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError
from gracetune.events.run_control import VERBS, new_request_id, send_request

if TYPE_CHECKING:
    import argparse

HELP = (
    "Ask the run in a folder to validate, to save a checkpoint, to save a checkpoint and stop, or "
    "to log more or less often. It reacts after its current optimizer step."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune now`."""
    parser.add_argument("request", choices=VERBS, help="the request")
    parser.add_argument("run_folder", type=Path, help="the run's output_dir")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="for validate: a prompt to use instead of those of the run file; can be repeated. The "
        "run loads its text encoder again to encode it",
    )
    parser.add_argument(
        "--every", type=int, metavar="N", help="for log: the new value of logging.every"
    )


def run(args: argparse.Namespace) -> int:
    """Write the request to the output folder of a run; print which process will carry it out."""
    number = new_request_id()
    listener = send_request(args.run_folder, args.request, _arguments(args), request_id=number)
    where = "" if listener.is_local() else f" on {listener.host} (not checked from here)"
    print(f"asked process {listener.pid}{where} to {args.request}, after its current step.")
    print(f"The answer is the event request_taken with the id {number} in events.jsonl.")
    return 0


def _arguments(args: argparse.Namespace) -> dict[str, object]:
    """Return the arguments of the request; raise if an option belongs to another request."""
    if args.prompt and args.request != "validate":
        raise ConfigError(f"--prompt is given, but the request is {args.request}. Use validate.")
    if (args.every is not None) != (args.request == "log"):
        raise ConfigError("the request log needs --every N, and no other request takes it.")
    if args.every is not None:
        if args.every < 1:
            raise ConfigError(f"--every is {args.every}, but it must be at least 1.")
        return {"every": args.every}
    return {"prompts": args.prompt} if args.prompt else {}
