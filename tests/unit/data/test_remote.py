"""Remote files, read from a local HTTP server that fails on request and from moto's S3."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

import fsspec
import pytest
from http_server import FILES

from gracetune.config.dataset_schema import DatasetSection, InMemorySection, RemoteSection
from gracetune.data.remote import RemoteSource, open_remote
from gracetune.data.source_contract import CHECKS, Check
from gracetune.data.staging import StagedSource
from gracetune.errors import DataError

if TYPE_CHECKING:
    from http_server import Server

    from gracetune.data.source import Source


class Pauses(list[float]):
    """Records pauses instead of sleeping."""

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
def test_http_fulfils_the_source_contract(server: Server, check: Check) -> None:
    check(_source(server), FILES)


def test_large_files_are_read_by_ranges(server: Server) -> None:
    assert _source(server).read("z#1.bin") == FILES["z#1.bin"]
    spans = ["bytes=0-4095", "bytes=4096-8191", "bytes=8192-12287", "bytes=12288-16383"]
    assert server.ranges_of("z#1.bin") == [*spans, "bytes=16384-19999"]


@pytest.mark.parametrize("failure", ["broken", "busy", "short"])
def test_only_the_failed_range_is_requested_again(server: Server, failure: str) -> None:
    server.failures["z#1.bin"] = ["fine", "fine", failure, failure, "fine"]
    pauses = Pauses()
    assert _source(server, pauses).read("z#1.bin") == FILES["z#1.bin"]
    spans = server.ranges_of("z#1.bin")
    assert spans.count("bytes=0-4095") == spans.count("bytes=4096-8191") == 1
    assert spans.count("bytes=8192-12287") == 3
    assert pauses == [0.2, 0.4]


def test_a_request_without_a_response_fails_after_the_timeout(server: Server) -> None:
    """The server never answers, so that only the timeout can end an attempt."""
    server.failures["a.png"] = ["hang"] * 2
    source = _source(server, timeout_s=0.3, retries=1)
    with pytest.raises(OSError, match=r"FSTimeoutError, after 2 attempts"):
        source.read("a.png")
    server.failures["a.png"] = ["hang", "fine"]
    assert source.read("a.png") == b"first"


def test_the_number_of_attempts_is_limited(server: Server) -> None:
    server.failures["a.png"] = ["busy"] * 9
    pauses = Pauses()
    with pytest.raises(OSError, match=r"503.*after 9 attempts"):
        _source(server, pauses, retries=8).read("a.png")
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_permanent_errors_are_not_retried(server: Server) -> None:
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


def test_a_server_without_range_support_is_read_in_one_request(server: Server) -> None:
    server.supports_ranges = False
    assert _source(server).read("z#1.bin") == FILES["z#1.bin"]
    assert len(server.ranges_of("z#1.bin")) == 1


def test_staging_succeeds_despite_occasional_server_errors(server: Server) -> None:
    server.failures = {"a.png": ["broken"], "z#1.bin": ["fine", "busy"]}
    source = _source(server)
    staged = StagedSource.stage(source, source.keys(), InMemorySection(), lambda event: None)
    server.files.clear()
    assert {key: staged.read(key) for key in staged.keys()} == FILES  # noqa: SIM118


def test_a_subfolder_that_cannot_be_listed_is_an_error(server: Server) -> None:
    server.failures["deep/"] = ["busy"]
    with pytest.raises(DataError, match=r"cannot be listed.*503"):
        _source(server)


def test_an_address_without_files_is_an_error(server: Server) -> None:
    server.files = {".hidden": b"x"}
    with pytest.raises(DataError, match=r"datasets\[3\]\.instance_data_dir is 'http.*no files"):
        _source(server)


@pytest.mark.parametrize("address", ["nonsense://x", "http://127.0.0.1:9/nobody"])
def test_an_address_that_cannot_be_listed_is_an_error_with_the_reason(address: str) -> None:
    with pytest.raises(DataError, match=r"datasets\[3\].*cannot be listed.*remote\.options"):
        RemoteSource(address, RemoteSection(), "datasets[3]")


def test_errors_do_not_show_credentials() -> None:
    """A library may repeat credentials in its messages, alone or in the address."""

    class Refusing(fsspec.AbstractFileSystem):
        protocol = "refusing"
        cachable = False

        def find(self, path: str, **_: object) -> NoReturn:
            options = self.storage_options
            raise OSError(f"{options['key']} and {options['auth']['code']} are refused for {path}")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    options = {"key": "hunter2", "auth": {"code": 87654321}}
    section = RemoteSection.model_validate({"options": options})
    with pytest.raises(DataError, match=r"\*\*\* and \*\*\* are refused") as caught:
        RemoteSource("refusing://me:hunter3@host/x?sig=hunter4", section, "datasets[3]")
    assert not re.search("hunter|8765", str(caught.value))


def _s3(bucket: dict[str, object], address: str = "s3://photos/set") -> Source:
    section = DatasetSection.model_validate(
        {"type": "remote", "instance_data_dir": address, "remote": {"options": bucket}}
    )
    return open_remote(section, "datasets[0]", lambda event: None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_s3_fulfils_the_source_contract(bucket: dict[str, object], check: Check) -> None:
    check(_s3(bucket), FILES)


def test_files_on_s3_can_be_staged(bucket: dict[str, object]) -> None:
    source = _s3(bucket)
    staged = StagedSource.stage(source, source.keys(), InMemorySection(), lambda event: None)
    assert {key: staged.read(key) for key in staged.keys()} == FILES  # noqa: SIM118


def test_a_missing_s3_bucket_is_an_error(bucket: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"datasets\[0\]"):
        _s3(bucket, "s3://no-such-bucket/set")
