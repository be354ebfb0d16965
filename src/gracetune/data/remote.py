"""Read samples and shards from remote storage through fsspec: S3, HTTP and others.

Files are read in ranges. A failed request is retried with growing pauses, and the ranges that have
already arrived are kept.
"""

from __future__ import annotations

import io
import re
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote

from blake3 import blake3

from gracetune.config.dataset_schema import redact_options
from gracetune.data.dataset import is_shard, open_address
from gracetune.data.prefetch import ordered_map
from gracetune.data.source import check_key, data_dir, is_hidden
from gracetune.errors import REDACTED, DataError, redact_urls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _typeshed import WriteableBuffer

    from gracetune.config.dataset_schema import DatasetSection, RemoteSection
    from gracetune.data.source import Source
    from gracetune.events.dispatcher import Emit


try:
    import aiohttp
    import fsspec
    from botocore.exceptions import BotoCoreError
    from fsspec.asyn import AsyncFileSystem, sync
except ModuleNotFoundError as missing:
    raise DataError(
        f"remote addresses such as s3://... need a package that is not installed ({missing.name}). "
        "Run `pip install 'gracetune[remote]'`."
    ) from missing

Result = TypeVar("Result")

RANGE_NBYTES = 8 * 1024**2
"""Bytes per request. If a connection breaks, at most this many are requested again."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
_RETRY_STATUS = (408, 425, 429)
_FAILURES = (OSError, aiohttp.ClientError, BotoCoreError)
"""Exceptions that mean a failed request; those of aiohttp and botocore are not OSErrors."""
_CONCURRENT_REQUESTS = 16
"""Number of concurrent requests for the lengths of shards."""
_VERSION_FIELDS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime")
"""Fields of an fsspec listing that change when a file changes; storage systems name them
differently."""


class RemoteFiles:
    """Access to the files at a remote address through fsspec, with retries."""

    def __init__(
        self,
        address: str,
        section: RemoteSection,
        setting: str,
        range_nbytes: int = RANGE_NBYTES,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect to `address`.

        `setting` is the dataset's name in messages, such as `datasets[0]`. `range_nbytes` is the
        size of one request, and `pause` the function that waits before a retry.
        """
        self.address = address
        secrets = {*_secrets_in_url(address), *_secrets_in_options(section.options)}
        # Shorter texts are ordinary words, which would be replaced everywhere.
        self._secrets = sorted((s for s in secrets if len(s) >= 4), key=len, reverse=True)
        self._timeout_s = section.timeout_s
        self._retries = section.retries
        self._range = range_nbytes
        self._pause = pause
        self._setting = setting
        with self._listing_errors():
            self._fs, self.root = fsspec.url_to_fs(address, **section.options)
        self.over_http = "http" in self._fs.protocol

    def find(self) -> Mapping[str, dict[str, Any]]:
        """Return the paths of all files below the address, with fsspec's information on each."""
        # By default, fsspec's HTTP file system skips folders that it cannot list.
        strictly = {"on_error": "raise"} if self.over_http else {}
        with self._listing_errors():
            found: dict[str, dict[str, Any]] = self._fs.find(self.root, detail=True, **strictly)
        return {path: about for path, about in found.items() if about["type"] == "file"}

    def match(self) -> list[str]:
        """Return the paths that match the address, which must be a pattern such as `*.tar`."""
        with self._listing_errors():
            return sorted(self._fs.glob(self.root))

    def display_name(self, path: str) -> str:
        """Return a path for messages and keys, without credentials.

        Paths of HTTP addresses are URL-decoded.
        """
        return unquote(redact_urls(path)) if self.over_http else path

    def info(self, path: str) -> dict[str, Any]:
        """Return fsspec's information on one file, such as its size; retry failed requests.

        Raises OSError if all retries fail.
        """
        return self._retry(partial(self._info, path))

    def read_range(self, path: str, start: int, stop: int, size: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file; failed requests are retried.

        `size` is the length of the file in bytes. A server without range requests sends the whole
        file, which is then the result; the caller must check the length.
        """
        parts: list[bytes] = []
        while start < stop:
            end = min(start + self._range, stop)
            data = self._retry(partial(self._cat, path, start, end, size))
            if len(data) != end - start:
                return data
            parts.append(data)
            start = end
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _cat(self, path: str, start: int, end: int, size: int) -> bytes:
        if isinstance(self._fs, AsyncFileSystem):
            ask = self._fs._cat_file
            data: bytes = sync(
                self._fs.loop, ask, path, start=start, end=end, timeout=self._timeout_s
            )
        else:
            data = self._fs.cat_file(path, start=start, end=end)
        if len(data) not in (end - start, size):
            raise OSError(f"received {len(data)} bytes for the range {start} to {end} of {size}")
        return data

    def _info(self, path: str) -> dict[str, Any]:
        if isinstance(self._fs, AsyncFileSystem):
            found = sync(self._fs.loop, self._fs._info, path, timeout=self._timeout_s)
        else:
            found = self._fs.info(path)
        if found["size"] is None:
            raise OSError("the server does not report its length")
        return cast("dict[str, Any]", found)

    def _retry(self, ask: Callable[[], Result]) -> Result:
        """Call `ask`, and repeat it with growing pauses while it fails.

        Raises OSError if all retries fail, or if the error is permanent.
        """
        attempt = 0
        while True:
            try:
                return ask()
            except _FAILURES as error:
                attempt += 1
                if _is_final(error) or attempt > self._retries:
                    raise OSError(f"{self._reason(error)}, after {attempt} attempts") from error
            self._pause(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))

    def _reason(self, error: Exception) -> str:
        """Return the text of a library's error, without the credentials that it may repeat."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return redact_urls(text)

    @contextmanager
    def _listing_errors(self) -> Iterator[None]:
        try:
            yield
        except (*_FAILURES, ValueError, ImportError) as error:
            raise DataError(
                f"{self._setting}.instance_data_dir is {self.address!r}: it cannot be listed "
                f"({self._reason(error)}). Check the address, your credentials and "
                f"{self._setting}.remote.options."
            ) from error


def version_of(about: Mapping[str, Any]) -> str:
    """Return a file's entity tag or modification time from fsspec's listing; empty if unknown."""
    return next((str(about[name]) for name in _VERSION_FIELDS if about.get(name) is not None), "")


def find_remote_shards(
    address: str, ending: str, section: RemoteSection, setting: str
) -> list[RemoteShard]:
    """Return the shards (tar or parquet files) at a remote address.

    The address is one file, a folder, or a pattern such as `s3://data/*.tar`.
    `ending` is the suffix of shard files, such as `.tar`.
    """
    files = RemoteFiles(address, section, setting)
    if "*" in files.root:
        paths = files.match()
    elif files.root.partition("?")[0].lower().endswith(ending):
        paths = [files.root]
    else:
        paths = sorted(path for path in files.find() if path.lower().endswith(ending))
    try:
        return list(ordered_map(lambda path: RemoteShard(files, path), paths, _CONCURRENT_REQUESTS))
    except OSError as error:
        raise DataError(
            f"{setting}.instance_data_dir is {address!r}: one of its files cannot be read "
            f"({error}). Check the address, your credentials and {setting}.remote.options."
        ) from error


class RemoteShard:
    """A tar or parquet file in remote storage, which is read in ranges."""

    folder = None

    def __init__(self, files: RemoteFiles, path: str) -> None:
        self._files = files
        self._path = path
        about = files.info(path)
        self._size = int(about["size"])
        self._version = version_of(about)
        self.name = files.display_name(path)

    def open(self, ahead_nbytes: int) -> BinaryIO:
        return cast("BinaryIO", io.BufferedReader(_RangeFile(self, self._size), ahead_nbytes))

    def read(self, offset: int, nbytes: int) -> bytes:
        stop = offset + nbytes
        if stop > self._size:
            raise OSError(f"the file that contains it ends {stop - self._size} bytes too early")
        data = self._files.read_range(self._path, offset, stop, self._size)
        if len(data) != nbytes:
            raise OSError(
                "the server does not support range requests; copy the file to this machine"
            )
        return data

    def place(self, offset: int, nbytes: int) -> None:  # noqa: ARG002
        return None

    def stamp(self) -> str:
        return f"{self._size} {self._version}"


class _RangeFile(io.RawIOBase):
    """File object for a remote shard, which fetches the bytes that are read."""

    def __init__(self, shard: RemoteShard, size: int) -> None:
        self._shard = shard
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        count = max(0, min(len(into), self._size - self._at))
        into[:count] = self._shard.read(self._at, count)
        self._at += count
        return count


def _is_final(error: Exception) -> bool:
    """Return whether an error is permanent, so that retrying is useless."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return True
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status < 500 and error.status not in _RETRY_STATUS
    return False


def _secrets_in_url(address: str) -> Iterator[str]:
    """Yield the parts of an address that `redact_urls` replaces, as a library may repeat them."""
    kept = map(re.escape, redact_urls(address).split(REDACTED))
    match = re.fullmatch("(.*)".join(kept), address)
    for found in match.groups() if match is not None else ():
        for part in (found, *found.split(":")[1:]):  # user:password, and the password alone
            yield from (part, unquote(part))


def _secrets_in_options(options: Mapping[str, Any]) -> Iterator[str]:
    for name, shown in redact_options(options).items():
        if isinstance(shown, dict):
            yield from _secrets_in_options(options[name])
        elif shown == REDACTED:
            yield str(options[name])


class RemoteSource:
    """A source with all files below a remote address, except hidden ones.

    The files are listed once, when the source is created.
    """

    def __init__(
        self,
        address: str,
        section: RemoteSection,
        setting: str = "datasets",
        range_nbytes: int = RANGE_NBYTES,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """List the files below `address`; the other parameters are those of `RemoteFiles`."""
        self._address = address
        self._files = RemoteFiles(address, section, setting, range_nbytes, pause)
        self._paths: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        self._versions: dict[str, str] = {}
        for path, about in self._files.find().items():
            key = self._files.display_name(path.removeprefix(self._files.root).lstrip("/"))
            if key and not is_hidden(key):
                check_key(f"{setting}.instance_data_dir", key)
                self._paths[key] = path
                self._sizes[key] = about["size"]
                self._versions[key] = version_of(about)
        if not self._paths:
            raise DataError(
                f"{setting}.instance_data_dir is {address!r}: it contains no files. Set a folder "
                "or prefix; over HTTP the server must list it."
            )
        self._keys = tuple(sorted(self._paths))

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        """Return the bytes of a file; failed requests are retried."""
        nbytes = self.nbytes(key)
        return self._files.read_range(self._paths[key], 0, nbytes, nbytes)

    def nbytes(self, key: str) -> int:
        if key not in self._paths:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        size = self._sizes[key]
        if size is None:
            size = self._sizes[key] = int(self._files.info(self._paths[key])["size"])
        return size

    def stamp(self, keys: Sequence[str]) -> str:
        """Return a text that changes with the entity tags or modification times of these files.

        HTTP listings have neither, so changes of files on an HTTP server are not detected.
        """
        return blake3("\n".join(self._versions[key] for key in keys).encode()).hexdigest(length=16)

    def describe(self) -> str:
        return f"the files below {redact_urls(self._address)}"


def open_remote(section: DatasetSection, setting: str, emit: Emit) -> Source:
    """Open the source of a dataset of type `remote`, or at an address such as `s3://...`."""
    address = data_dir(section, setting)
    if "://" in address and is_shard(address):
        return open_address(section, setting, emit)
    return RemoteSource(address, section.remote, setting)
