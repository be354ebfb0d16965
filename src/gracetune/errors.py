"""Errors that a user can fix, with their exit codes, and the removal of credentials from texts.

Each message gives the setting, its value, the rule it breaks and the fix. Bugs in gracetune raise
other exceptions, such as AssertionError.
"""

from __future__ import annotations

import re

REDACTED = "***"
"""Text that replaces credentials in messages and in files that a run writes."""
SECRET_NAME = re.compile(
    "secret|token|pass|pwd|auth|cred|key|sig|session|access|policy|jwt|sas|cookie|bearer|code",
    re.IGNORECASE,
)
"""Matches the names of options and URL parameters that may be credentials."""
MIN_SECRET_LENGTH = 16
"""URL parameters of this length and more may be credentials, whatever their names are."""
_URL = re.compile(r"""([a-z][a-z0-9+.-]*)://((?:(?!::)[^\s"<>])+)""", re.IGNORECASE)
_PASSWORD_WITH_SLASH = re.compile(r"[^/@:]*:(?!\d+/)[^@]*@")
_PARAMETER = re.compile(r"""([?&#;])([^=&#\s]+)=([^&#\s'"),;]*)""")
_SCHEMES_WITH_CONTAINER = ("abfs", "abfss", "wasb", "wasbs")
"""URL schemes whose user name is the name of a container."""


def redact_urls(text: str) -> str:
    """Replace user names, passwords and signatures in all URLs of a text by `***`."""
    return _URL.sub(_redact_url, text) if "://" in text else text


def _redact_url(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    start = re.search(r"[?#]", rest)
    address, parameters = (
        (rest, "") if start is None else (rest[: start.start()], rest[start.start() :])
    )
    user, at, _ = address.partition("/")[0].rpartition("@")
    if at and (":" in user or scheme.lower() not in _SCHEMES_WITH_CONTAINER):
        address = f"{REDACTED}{address[len(user) :]}"
    elif not at:
        address = _PASSWORD_WITH_SLASH.sub(f"{REDACTED}@", address, count=1)
    return f"{scheme}://{address}{_PARAMETER.sub(_redact_parameter, parameters)}"


def _redact_parameter(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    is_secret = SECRET_NAME.search(name) or len(value) >= MIN_SECRET_LENGTH
    return f"{mark}{name}={REDACTED if is_secret else value}"


def hide_path(url: str) -> str:
    """Return a URL with only its scheme and host; anything else may be a secret."""
    scheme, _, rest = url.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    return f"{scheme}://{host}" if host == rest else f"{scheme}://{host}/{REDACTED}"


class GracetuneError(Exception):
    """An error that the user can fix; shown as a message without a traceback.

    Credentials in URLs are removed from the message.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(redact_urls(message))


class ConfigError(GracetuneError):
    """A run file, an override or an environment variable is invalid."""


class MissingPackageError(ConfigError):
    """A setting needs an optional package that is not installed."""


class DataError(GracetuneError):
    """A dataset is missing, empty or too damaged to train on."""


class CacheError(GracetuneError):
    """A cache cannot be read or written, or the folder is not a gracetune cache."""


class CheckpointError(GracetuneError):
    """A checkpoint cannot be written, read or resumed from."""


class ModelError(GracetuneError):
    """Model weights are missing or do not match the settings."""


class ModelUnavailableError(ModelError):
    """A model is neither on this machine nor can it be downloaded, for example without access."""


class HostError(GracetuneError):
    """A host program (SimpleTuner, ai-toolkit) is missing, or lacks a function that we hook."""


class UnsafeFileError(GracetuneError):
    """Another user could change a file or a folder that must be private to this user."""


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


class CompiledBlockError(RunFailedError):
    """A compiled block failed in a step. The training loop repeats the step with eager blocks."""


class DiskFullError(GracetuneError, OSError):
    """A file cannot be written, because the disk or the user's quota is full.

    It is an OSError as well, so that code that handles failed writes can add what to do.
    """

    exit_code = 1


class InterruptedRunError(GracetuneError):
    """The user stopped a run; a checkpoint is saved."""

    exit_code = 130
