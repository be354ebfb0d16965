"""Anything that fsspec can address as a source: s3, http and the others.

A file is read by ranges. A range that fails is asked for again, so that a broken connection costs
one range and not the file; what answers nothing for too long counts as broken.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from gracetune.data.folder import data_dir
from gracetune.data.source import check_name, is_hidden
from gracetune.errors import DataError

try:
    import aiohttp
    import fsspec
    from botocore.exceptions import BotoCoreError
    from fsspec.asyn import AsyncFileSystem, sync
except ModuleNotFoundError as missing:
    raise DataError(
        f"addresses such as s3://... are read by a package that is not installed ({missing.name}). "
        "Install it with: pip install 'gracetune[remote]'."
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.config.schema import DatasetSection, RemoteSection
    from gracetune.data.progress import Tell

Result = TypeVar("Result")

RANGE_NBYTES = 8 * 1024**2
"""What one request asks for: what a broken connection costs at most."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
_TOO_BUSY = (408, 425, 429)
_FAILURES = (OSError, aiohttp.ClientError, BotoCoreError)
"""What file systems raise when a request fails; aiohttp's and botocore's are no OSErrors."""


class RemoteSource:
    """Every file below an address, listed once when it is opened; hidden ones are left out."""

    def __init__(
        self,
        address: str,
        section: RemoteSection,
        setting: str = "datasets",
        range_nbytes: int = RANGE_NBYTES,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`setting` is the data set's place in the run file, for messages: `datasets[0]`."""
        self._address = address
        self._timeout_s = section.timeout_s
        self._retries = section.retries
        self._range = range_nbytes
        self._pause = pause
        name = f"{setting}.instance_data_dir"
        try:
            self._fs, root = fsspec.url_to_fs(address, **section.options)
            # Left to itself, http skips the folders that it cannot list.
            over_http = "http" in self._fs.protocol
            strictly = {"on_error": "raise"} if over_http else {}
            listed: dict[str, dict[str, Any]] = self._fs.find(root, detail=True, **strictly)
        except (*_FAILURES, ValueError, ImportError) as error:
            raise DataError(
                f"{name} is {address!r}: it cannot be listed ({_reason(error)}). Check the "
                f"address, your credentials and {setting}.remote.options."
            ) from error
        self._paths: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        for path, found in listed.items():
            relative = path.removeprefix(root).lstrip("/")
            key = unquote(relative) if over_http else relative
            if found["type"] == "file" and key and not is_hidden(key):
                check_name(name, key)
                self._paths[key] = path
                self._sizes[key] = found["size"]
        if not self._paths:
            raise DataError(
                f"{name} is {address!r}: there are no files below it. Name a folder, or what "
                "stands for one; over http the server must list it."
            )
        self._keys = tuple(sorted(self._paths))

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        """By ranges, each asked for again where it fails; what has come is kept."""
        nbytes = self.nbytes(key)
        parts: list[bytes] = []
        done = 0
        while done < nbytes:
            data = self._insist(partial(self._cat, key, done, nbytes))
            if len(data) == nbytes:
                return data  # a server that knows no ranges sends everything
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    def nbytes(self, key: str) -> int:
        if key not in self._paths:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        size = self._sizes[key]
        if size is None:
            size = self._sizes[key] = self._insist(lambda: self._ask_size(key))
        return size

    def describe(self) -> str:
        return f"the files below {self._address}"

    def _cat(self, key: str, start: int, nbytes: int) -> bytes:
        end = min(start + self._range, nbytes)
        path = self._paths[key]
        if isinstance(self._fs, AsyncFileSystem):
            data: bytes = sync(
                self._fs.loop,
                self._fs._cat_file,
                path,
                start=start,
                end=end,
                timeout=self._timeout_s,
            )
        else:
            data = self._fs.cat_file(path, start=start, end=end)
        if len(data) not in (end - start, nbytes):
            raise OSError(f"{len(data)} bytes came for bytes {start} to {end} of {nbytes}")
        return data

    def _ask_size(self, key: str) -> int:
        path = self._paths[key]
        if isinstance(self._fs, AsyncFileSystem):
            found = sync(self._fs.loop, self._fs._info, path, timeout=self._timeout_s)
        else:
            found = self._fs.info(path)
        if found["size"] is None:
            raise OSError("the server does not say how long it is")
        return int(found["size"])

    def _insist(self, ask: Callable[[], Result]) -> Result:
        """Ask until there is an answer, a little later each time; OSError in the end."""
        attempt = 0
        while True:
            try:
                return ask()
            except _FAILURES as error:
                attempt += 1
                if _is_final(error) or attempt > self._retries:
                    raise OSError(f"{_reason(error)}, after {attempt} attempts") from error
            self._pause(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))


def open_remote(section: DatasetSection, setting: str, tell: Tell) -> RemoteSource:  # noqa: ARG001
    """The source of `remote`, and of any address with a scheme."""
    address = data_dir(section, setting)
    for ending in (".tar", ".parquet"):
        if address.endswith(ending):
            raise DataError(
                f"{setting}.instance_data_dir is {address!r}: a {ending} file is read where its "
                "parts can be reached at once. Copy it to this machine, and name it there."
            )
    return RemoteSource(address, section.remote, setting)


def _is_final(error: Exception) -> bool:
    """Whether asking again cannot help."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return True
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status < 500 and error.status not in _TOO_BUSY
    return False


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
