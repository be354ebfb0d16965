"""A local HTTP server that speaks the parts of the Hugging Face hub's API that downloads use.

It serves folders as repositories, with one commit each. A test can make a repository gated, cut
connections after some bytes, or slow them down, and read what was asked of the server in `log`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

LARGE_SUFFIXES = (".safetensors", ".bin", ".onnx", ".ckpt", ".msgpack")
"""Files that the hub stores in LFS, whose ETag is their SHA-256."""
CHUNK = 4096
STALL_S = 1.5
TREE = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+?)(/revision/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


class Request(NamedTuple):
    """A request that the server has answered."""

    method: str
    path: str
    status: int
    start: int
    """First byte of a download; 0 for other requests."""
    nbytes: int
    """Bytes of the file that were sent."""
    token: str


@dataclass
class Repository:
    """A folder that is served as a model."""

    folder: Path
    gated: bool = False
    members: set[str] = field(default_factory=set)
    """Tokens of accounts that have accepted the licence of a gated model."""
    revisions: set[str] = field(default_factory=lambda: {"main"})

    @property
    def commit(self) -> str:
        """A commit id that depends on the names and bytes of the files."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path in self.files():
            digest.update(path.encode() + (self.folder / path).read_bytes())
        return digest.hexdigest()

    def files(self) -> list[str]:
        """Return the paths of all files."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in files)

    def etag(self, path: str) -> str:
        """Return SHA-256 for a large file and git's blob id for others, as the hub does."""
        data = (self.folder / path).read_bytes()
        if path.endswith(LARGE_SUFFIXES):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class HubServer:
    """A running server: its address, its repositories, its faults, and what was asked of it."""

    endpoint: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """End of a path -> after how many bytes each of the next downloads of it is cut."""
    stalls: dict[str, int] = field(default_factory=dict)
    """End of a path -> after how many bytes the next download of it stalls."""
    delay_s: float = 0.0
    """Seconds before each chunk of a file."""
    corrupted: set[str] = field(default_factory=set)
    """Ends of paths whose bytes are sent wrongly."""

    def sent(self, end: str = "") -> int:
        """Return the bytes of files that were sent, of the paths with this end."""
        return sum(r.nbytes for r in self.log if r.method == "GET" and r.path.endswith(end))

    def downloads(self) -> list[str]:
        """Return the paths of the files that were downloaded, without the repository's part."""
        gets = (FILE.fullmatch(r.path) for r in self.log if r.method == "GET")
        return sorted({match["path"] for match in gets if match})


@contextmanager
def serve_hub(repositories: dict[str, Repository] | None = None) -> Iterator[HubServer]:
    """Run a server on a free port of this machine while the `with` block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}", repositories or {})
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def set_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let huggingface_hub, which reads HF_ENDPOINT when it is imported, use another server."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Let huggingface_hub use a server and a cache folder, without a token."""
    set_endpoint(monkeypatch, endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        hub: HubServer = self.server.hub  # type: ignore[attr-defined]
        return hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        with suppress(ConnectionError):  # the client was killed
            self._answer()

    def do_GET(self) -> None:
        self.do_HEAD()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == "invalid":
            self._refuse(401, None, "Invalid credentials in Authorization header")
            return
        for pattern, handle in ((TREE, self._tree), (FILE, self._file), (INFO, self._info)):
            if match := pattern.fullmatch(path):
                repository = self.hub.repositories.get(match["name"])
                if repository is None:
                    # The hub does not say whether a model is private or missing.
                    self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
                    return
                revision = match["revision"] or "main"
                if revision not in (*repository.revisions, repository.commit):
                    self._refuse(404, "RevisionNotFound", "Invalid rev id")
                    return
                handle(repository, match)
                return
        self._refuse(404, "EntryNotFound", "Entry not found")

    def _info(self, repository: Repository, match: re.Match[str]) -> None:
        self._send_json({"id": match["name"], "sha": repository.commit, "siblings": []})

    def _tree(self, repository: Repository, _: re.Match[str]) -> None:
        entries = []
        for path in repository.files():
            size, etag = (repository.folder / path).stat().st_size, repository.etag(path)
            entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": etag}
            if path.endswith(LARGE_SUFFIXES):
                entry["lfs"] = {"oid": etag, "size": size, "pointerSize": 130}
            entries.append(entry)
        self._send_json(entries)

    def _file(self, repository: Repository, match: re.Match[str]) -> None:
        path = match["path"]
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.gated and token not in repository.members:
            self._refuse(403 if token else 401, "GatedRepo", "Access to the model is restricted")
            return
        if path not in repository.files():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        data = (repository.folder / path).read_bytes()
        if any(path.endswith(end) for end in self.hub.corrupted):
            data = bytes(byte ^ 1 for byte in data)
        start = 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{repository.etag(path)}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        sent = self._send_bytes(path, data[start:]) if self.command == "GET" else 0
        self._record(206 if start else 200, start, sent)

    def _send_bytes(self, path: str, data: bytes) -> int:
        cuts = next((c for end, c in self.hub.cuts.items() if path.endswith(end) and c), None)
        stall = next((end for end in self.hub.stalls if path.endswith(end)), None)
        limit = cuts.pop(0) if cuts else len(data)
        if stall is not None:
            limit = self.hub.stalls.pop(stall)
        sent = 0
        while sent < min(limit, len(data)):
            time.sleep(self.hub.delay_s)
            chunk = data[sent : min(sent + CHUNK, limit)]
            self.wfile.write(chunk)
            sent += len(chunk)
        if sent < len(data):
            self.wfile.flush()
            if stall is not None:
                time.sleep(STALL_S)
            self.close_connection = True
            self.connection.shutdown(2)
        return sent

    def _send_json(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
        self._record(200, 0, 0)

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self._record(status, 0, 0)

    def _record(self, status: int, start: int, nbytes: int) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.log.append(Request(self.command, path, status, start, nbytes, token))
