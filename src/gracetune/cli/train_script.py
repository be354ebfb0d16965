"""`python train.py --config FILE --key value ...`: the command line of the older GH200 trainers.

gracetune replaces these trainers, the forks SimpleTuner-GH200 and ai-toolkit-GH200. The command
works alone and under `accelerate launch` or `torchrun`. Every setting of a run file is an option,
under its dotted name or the flat name that the forks use; dashes count as underscores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.cli.main import run_guarded
from gracetune.config.environment import claim_process_alloc_conf
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: python train.py --config FILE [--resume latest|none|PATH]
                       [--KEY VALUE | --KEY=VALUE | --FLAG]...

Train a model from a run file. KEY is any setting of a run file: --max_train_steps 10,
--train.batch_size=4, --datasets.0.repeats 2. A FLAG without a value is set to true.
--resume_from_checkpoint is another name of --resume. Without it, a run resumes from its newest
checkpoint, if there is one. `gracetune schema` lists every setting."""

RESUME_VALUES = {"latest": "auto", "auto": "auto", "none": "none"}
_RESUME_OPTIONS = ("resume", "resume_from_checkpoint")


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """The parsed command line of `train.py`."""

    config: str
    overrides: tuple[str, ...]
    resume: str


def main(argv: Sequence[str]) -> int:
    """Train with the given command-line arguments, and return the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    return run_guarded(lambda: _train(argv))


def _train(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    claim_process_alloc_conf()
    loaded = load_run_file(arguments.config, arguments.overrides)
    # Imported late: it loads torch, which reads its allocator settings when it is imported.
    from gracetune.cli.train import train_and_report

    return train_and_report(loaded, arguments.resume)


def parse(argv: Sequence[str]) -> LaunchArguments:
    """Split the command line into the run file, overrides of its settings, and `resume`."""
    config: str | None = None
    resume = "auto"
    overrides = []
    for key, value in _options(argv):
        if key == "config":
            config = value
        elif key in _RESUME_OPTIONS:
            resume = RESUME_VALUES.get(value or "latest", value or "latest")
        else:
            overrides.append(f"{key}={'true' if value is None else value}")
    if not config:
        raise ConfigError("--config is missing. Name a run file: python train.py --config FILE")
    return LaunchArguments(config, tuple(overrides), resume)


def _options(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Parse `--key value`, `--key=value` and `--flag` to (key, value); a flag has value None."""
    options: list[tuple[str, str | None]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word!r} is not an option. Write --key value (see --help).")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if equals:
            options.append((key, value))
        elif words and not words[0].startswith("--"):
            options.append((key, words.pop(0)))
        else:
            options.append((key, None))
    return options
