"""Addresses, against servers that are really there: moto's s3, and http that misbehaves."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from gracetune.config.schema import DatasetSection, InMemorySection, RemoteSection
from gracetune.data.contract import CHECKS, Check
from gracetune.data.remote import RemoteSource, open_remote
from gracetune.data.staged import StagedSource
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = {
    "a.png": b"first",
    "deep/b ü&c.png": bytes(range(256)) * 40,
    "deep/c.txt": b"",
    "z#1.bin": b"last" * 5000,
}


class Server(ThreadingHTTPServer):
    """Lists and serves files by ranges, and fails as it is told: by path, one failure a request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.failures: dict[str, list[str]] = {}
        self.asked: list[tuple[str, str]] = []
        self.knows_ranges = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"

    def ranges_of(self, name: str) -> list[str]:
        return [span for asked, span in self.asked if asked == name]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        name = unquote(self.path).removeprefix("/data/")
        self._head(200 if name in self.server.files else 404, len(self.server.files.get(name, b"")))

    def do_GET(self) -> None:
        name = unquote(self.path).removeprefix("/data").lstrip("/")
        if name in self.server.files:
            self._file(name)
        else:
            self._folder(name)

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.server.asked.append((name, span[0] if span else "all"))
        part, status = data, 200
        if span and self.server.knows_ranges:
            part, status = data[int(span[1]) : int(span[2] or len(data)) + 1], 206
        failures = self.server.failures.get(name, [])
        match failures.pop(0) if failures else "fine":
            case "fine":
                self._head(status, len(part))
                self.wfile.write(part)
            case "broken":
                self._head(status, len(part))
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
            case "busy":
                self._head(503, 0)
            case "forbidden":
                self._head(403, 0)
            case "short":
                self._head(status, len(part) - 1)
                self.wfile.write(part[:-1])
            case "hang":
                time.sleep(2)
                self.close_connection = True

    def _folder(self, name: str) -> None:
        prefix = f"{name.rstrip('/')}/" if name else ""
        if self.server.failures.pop(prefix, None):
            self._head(503, 0)
            return
        below = {key.removeprefix(prefix) for key in self.server.files if key.startswith(prefix)}
        links = {f"{key.split('/')[0]}/" if "/" in key else key for key in below}
        page = "".join(f'<a href="{quote(link)}">{link}</a>\n' for link in sorted(links)).encode()
        self._head(200 if below else 404, len(page), "text/html")
        self.wfile.write(page)

    def _head(self, status: int, nbytes: int, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("Content-Type", kind)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


class Pauses(list[float]):
    """Stands in for waiting."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def _source(
    server: Server, pauses: Pauses | None = None, range_nbytes: int = 4096, **section: object
) -> RemoteSource:
    settings = RemoteSection.model_validate(
        {"timeout_s": 20.0, "options": {"skip_instance_cache": True}, **section}
    )
    pause = Pauses() if pauses is None else pauses
    return RemoteSource(server.address, settings, "datasets[3]", range_nbytes, pause)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_http_keeps_the_contract(server: Server, check: Check) -> None:
    check(_source(server), FILES)


def test_large_files_are_read_by_ranges(server: Server) -> None:
    assert _source(server).read("z#1.bin") == FILES["z#1.bin"]
    spans = ["bytes=0-4095", "bytes=4096-8191", "bytes=8192-12287", "bytes=12288-16383"]
    assert server.ranges_of("z#1.bin") == [*spans, "bytes=16384-19999"]


@pytest.mark.parametrize("failure", ["broken", "busy", "short"])
def test_a_broken_read_goes_on_where_it_broke(server: Server, failure: str) -> None:
    server.failures["z#1.bin"] = ["fine", "fine", failure, failure, "fine"]
    pauses = Pauses()
    assert _source(server, pauses).read("z#1.bin") == FILES["z#1.bin"]
    spans = server.ranges_of("z#1.bin")
    assert spans.count("bytes=0-4095") == spans.count("bytes=4096-8191") == 1
    assert spans.count("bytes=8192-12287") == 3
    assert pauses == [0.2, 0.4]


def test_a_server_that_says_nothing_is_given_up_after_the_timeout(server: Server) -> None:
    server.failures["a.png"] = ["hang"] * 2
    source = _source(server, timeout_s=0.3, retries=1)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"FSTimeoutError, after 2 attempts"):
        source.read("a.png")
    assert time.monotonic() - began < 1.9
    server.failures["a.png"] = ["hang", "fine"]
    assert source.read("a.png") == b"first"


def test_attempts_end(server: Server) -> None:
    server.failures["a.png"] = ["busy"] * 9
    pauses = Pauses()
    with pytest.raises(OSError, match=r"503.*after 9 attempts"):
        _source(server, pauses, retries=8).read("a.png")
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_what_is_refused_is_not_asked_again(server: Server) -> None:
    server.failures["a.png"] = ["forbidden"]
    pauses = Pauses()
    with pytest.raises(OSError, match=r"403.*after 1 attempts"):
        _source(server, pauses).read("a.png")
    assert pauses == []
    source = _source(server, pauses)
    assert source.nbytes("z#1.bin") == 20_000
    del server.files["z#1.bin"]
    with pytest.raises(OSError, match="FileNotFoundError"):
        source.read("z#1.bin")


def test_a_server_without_ranges_sends_everything_once(server: Server) -> None:
    server.knows_ranges = False
    assert _source(server).read("z#1.bin") == FILES["z#1.bin"]
    assert len(server.ranges_of("z#1.bin")) == 1


def test_staging_from_a_server_that_fails_now_and_then(server: Server) -> None:
    server.failures = {"a.png": ["broken"], "z#1.bin": ["fine", "busy"]}
    source = _source(server)
    staged = StagedSource.stage(source, source.keys(), InMemorySection(), lambda event: None)
    server.files.clear()
    assert {key: staged.read(key) for key in staged.keys()} == FILES  # noqa: SIM118


def test_a_folder_that_cannot_be_listed_is_not_passed_over(server: Server) -> None:
    server.failures["deep/"] = ["busy"]
    with pytest.raises(DataError, match=r"cannot be listed.*503"):
        _source(server)


def test_an_address_without_files_says_what_it_needs(server: Server) -> None:
    server.files = {".hidden": b"x"}
    with pytest.raises(DataError, match=r"datasets\[3\]\.instance_data_dir is 'http.*no files"):
        _source(server)


@pytest.mark.parametrize("address", ["nonsense://x", "http://127.0.0.1:9/nobody"])
def test_an_address_that_cannot_be_listed_says_why(address: str) -> None:
    with pytest.raises(DataError, match=r"datasets\[3\].*cannot be listed.*remote\.options"):
        RemoteSource(address, RemoteSection(), "datasets[3]")


@pytest.mark.parametrize("address", ["s3://bucket/x.tar", "https://host/x.parquet"])
def test_archives_are_read_where_they_are_near(address: str) -> None:
    section = DatasetSection(type="remote", instance_data_dir=address)
    with pytest.raises(DataError, match=r"datasets\[0\].*Copy it to this machine"):
        open_remote(section, "datasets[0]", lambda event: None)


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, object]]:
    """A bucket on moto's own server, and the options that lead to it."""
    served = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    options: dict[str, object] = {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"},
    }
    files = fsspec.filesystem("s3", **options)
    files.call_s3("create_bucket", Bucket="photos")
    for key, data in FILES.items():
        files.pipe_file(f"photos/set/{key}", data)
    yield options
    served.stop()


def _s3(bucket: dict[str, object], address: str = "s3://photos/set") -> RemoteSource:
    section = DatasetSection.model_validate(
        {"type": "remote", "instance_data_dir": address, "remote": {"options": bucket}}
    )
    return open_remote(section, "datasets[0]", lambda event: None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_s3_keeps_the_contract(bucket: dict[str, object], check: Check) -> None:
    check(_s3(bucket), FILES)


def test_s3_is_staged(bucket: dict[str, object]) -> None:
    source = _s3(bucket)
    staged = StagedSource.stage(source, source.keys(), InMemorySection(), lambda event: None)
    assert {key: staged.read(key) for key in staged.keys()} == FILES  # noqa: SIM118


def test_s3_without_the_bucket_says_so(bucket: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"datasets\[0\]"):
        _s3(bucket, "s3://no-such-bucket/set")
