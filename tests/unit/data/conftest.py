"""Local servers: an HTTP server that fails on request, and moto's S3 server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from http_server import FILES, Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[Server]:
    http = Server()
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    yield http
    http.release_hanging.set()
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, object]]:
    """A bucket on moto's S3 server; yields the options to connect to it."""
    import fsspec
    from moto.server import ThreadedMotoServer

    s3 = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
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
    s3.stop()
