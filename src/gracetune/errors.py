"""The errors a user can cause, and the exit code that each deserves.

A message has the setting, its value, the rule it breaks and the way out. What is our own fault
is an assert, not one of these.
"""

from __future__ import annotations


class GracetuneError(Exception):
    """Something the user can mend; shown as one clear message, never as a traceback."""

    exit_code = 2


class ConfigError(GracetuneError):
    """A run file, an override or an environment variable is wrong."""


class DataError(GracetuneError):
    """A data set is missing, empty or too broken to train on."""


class CacheError(GracetuneError):
    """A cache cannot be read or written, or is not ours to change."""


class CheckpointError(GracetuneError):
    """A checkpoint cannot be written, read or continued."""


class ModelError(GracetuneError):
    """Model weights are missing or do not fit what was asked for."""


class HostError(GracetuneError):
    """A host is not installed, or no longer has what we hook."""


class PortError(GracetuneError):
    """A repository, its branches or a patch set do not allow what was asked."""


class AdapterError(GracetuneError):
    """An adapter file cannot be read, is damaged, fits no model, or would load nowhere.

    `kind` is one word for machines; `key` is the first tensor that shows it.
    """

    def __init__(self, message: str, kind: str = "adapter", key: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.key = key


class RunFailedError(GracetuneError):
    """The run itself went wrong (a loss that is not a number, a dead worker)."""

    exit_code = 1


class InterruptedRunError(GracetuneError):
    """The user stopped the run; its state is saved."""

    exit_code = 130
