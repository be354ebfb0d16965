"""Servers that are really there: http that misbehaves, and moto's s3."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from served import FILES, Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, object]]:
    """A bucket on moto's own server, and the options that lead to it."""
    import fsspec
    from moto.server import ThreadedMotoServer

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
