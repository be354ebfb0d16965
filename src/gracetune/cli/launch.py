"""`python train.py --config FILE --key value ...`: the forks' command line, alone or launched.

Every key of a run file is an option, in the forks' flat spelling or dotted; dashes are underscores.
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

Train as a run file says. KEY is any setting of a run file: --max_train_steps 10,
--train.batch_size=4, --datasets.0.repeats 2. A FLAG without a value is true.
--resume_from_checkpoint is another name of --resume; without it, a run goes on from its newest
checkpoint where there is one. `gracetune schema` lists every setting."""

RESUME_WORDS = {"latest": "auto", "auto": "auto", "none": "none"}
_RESUME = ("resume", "resume_from_checkpoint")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, taken apart."""

    config: str
    overrides: tuple[str, ...]
    resume: str


def main(argv: Sequence[str]) -> int:
    """Train as the command line says; the exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    return run_guarded(lambda: _train(argv))


def _train(argv: Sequence[str]) -> int:
    launch = parse(argv)
    claim_process_alloc_conf()
    loaded = load_run_file(launch.config, launch.overrides)
    # Only now: torch comes with it, and reads its allocator settings as it is imported.
    from gracetune.cli.train import run_training

    return run_training(loaded, launch.resume)


def parse(argv: Sequence[str]) -> Launch:
    """Take the options apart; what a key means is the run file's business."""
    config: str | None = None
    resume = "auto"
    overrides = []
    for key, value in _options(argv):
        if key == "config":
            config = value
        elif key in _RESUME:
            resume = RESUME_WORDS.get(value or "latest", value or "latest")
        else:
            overrides.append(f"{key}={'true' if value is None else value}")
    if not config:
        raise ConfigError("--config is missing; name a run file: python train.py --config FILE")
    return Launch(config, tuple(overrides), resume)


def _options(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """`--key value`, `--key=value` and `--flag` as pairs; a flag has no value."""
    options: list[tuple[str, str | None]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word!r} is not an option; write --key value (see --help).")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if equals:
            options.append((key, value))
        elif words and not words[0].startswith("--"):
            options.append((key, words.pop(0)))
        else:
            options.append((key, None))
    return options
