"""Errors that a user can fix, with their exit codes.

Each message gives the setting, its value, the rule it breaks and the fix. Bugs in gracetune raise
other exceptions, such as AssertionError.
"""

from __future__ import annotations


class GracetuneError(Exception):
    """An error that the user can fix; shown as a message without a traceback."""

    exit_code = 2


class ConfigError(GracetuneError):
    """A run file, an override or an environment variable is invalid."""


class DataError(GracetuneError):
    """A dataset is missing, empty or too damaged to train on."""


class CacheError(GracetuneError):
    """A cache cannot be read or written, or the folder is not a gracetune cache."""


class CheckpointError(GracetuneError):
    """A checkpoint cannot be written, read or resumed from."""


class ModelError(GracetuneError):
    """Model weights are missing or do not match the settings."""


class HostError(GracetuneError):
    """A host program (SimpleTuner, ai-toolkit) is missing, or lacks a function that we hook."""


class PortError(GracetuneError):
    """A repository, its branches or a patch set do not allow the requested operation."""


class AdapterError(GracetuneError):
    """An adapter file is unreadable or damaged, or no model or tool can load it.

    `kind` is a short name of the error, for programs; `key` is the name of the first bad tensor.
    """

    def __init__(self, message: str, kind: str = "adapter", key: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.key = key


class RunFailedError(GracetuneError):
    """A run failed after it had started, for example with a NaN loss or a dead worker."""

    exit_code = 1


class InterruptedRunError(GracetuneError):
    """The user stopped a run; a checkpoint is saved."""

    exit_code = 130
