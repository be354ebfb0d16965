import inspect
import math
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gracetune
from gracetune import entry_points, errors, units
from gracetune.errors import ConfigError, DataError, GracetuneError, redact_urls


def test_every_error_has_a_valid_exit_code() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) > 4
    assert all(issubclass(kind, GracetuneError) for kind in kinds)
    assert {kind.exit_code for kind in kinds} == {1, 2, 130}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("96GB", 96 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("  2 mib ", 2 * 2**20),
        ("7", 7),
        (7, 7),
        ("1TiB", 2**40),
        ("3k", 3000),
    ],
)
def test_sizes_are_parsed(text: str | float, nbytes: int) -> None:
    assert units.parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 XB", "1.2.3", "nan", math.inf, "1e9"])
def test_an_invalid_size_is_refused_with_its_text(text: str | float) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        units.parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes_are_formatted(nbytes: int, text: str) -> None:
    assert units.format_bytes(nbytes) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_a_formatted_size_parses_back_within_its_precision(nbytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12ms"), (4.21, "4.2s"), (200, "3m20s"), (3720, "1h02m"), (90000, "25h00m")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


KNOWN = {"size": "gracetune.units:parse_bytes", "duration": "gracetune.units:format_seconds"}


def test_a_known_name_is_imported() -> None:
    assert entry_points.load("unit", "size", KNOWN) is units.parse_bytes


def test_an_unknown_name_lists_known_names_and_how_to_add_one() -> None:
    with pytest.raises(ConfigError, match=r"unit 'mass' is not known") as caught:
        entry_points.load("unit", "mass", KNOWN)
    assert "Known: duration, size." in str(caught.value)
    assert "'gracetune.unit'" in str(caught.value)


def test_entry_points_add_names_but_never_replace_built_in_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = EntryPoints(
        EntryPoint(name, "gracetune.units:format_bytes", "gracetune.unit")
        for name in ("mass", "size")
    )
    monkeypatch.setattr(entry_points, "entry_points", lambda group: points.select(group=group))
    assert entry_points.load("unit", "mass", KNOWN) is units.format_bytes
    assert entry_points.load("unit", "size", KNOWN) is units.parse_bytes
    assert entry_points.names("unit", KNOWN) == ["duration", "size", "mass"]
    assert entry_points.names("other", {}) == []


def test_public_names_are_resolved_on_first_use() -> None:
    assert gracetune.GracetuneError is GracetuneError
    assert set(gracetune.__all__) == set(dir(gracetune))
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = gracetune.nonesuch


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://AKIA7:hunter2@bucket/a.tar", "s3://***@bucket/a.tar"),
        ("s3://AKIA7:wJalr/x+y@bucket/a.tar", "s3://***@bucket/a.tar"),
        ("ftp://me:hunter2@@host:21/a", "ftp://***@host:21/a"),
        ("https://s3cr3tvalue@host/a.tar", "https://***@host/a.tar"),
        ("https://user%3Ahunter2@host/a", "https://***@host/a"),
        ("simplecache::s3://AKIA7:hunter2@b/k", "simplecache::s3://***@b/k"),
        ("zip://a.png::ftp://me:hunter2@h/x.zip", "zip://a.png::ftp://***@h/x.zip"),
        ("https://h/a.tar?sig=hunter2&se=2030", "https://h/a.tar?sig=***&se=2030"),
        ("https://h/a?X-Amz-Signature=hunter2", "https://h/a?X-Amz-Signature=***"),
        ("https://h/a?x=s3cr3tvalueofgreatlength", "https://h/a?x=***"),
        ("https://h/a#access_token=hunter2", "https://h/a#access_token=***"),
        ("HTTPS://U:hunter2@h", "HTTPS://***@h"),
        # nothing to hide
        ("https://host:8080/x@y?download=1", "https://host:8080/x@y?download=1"),
        ("hf://datasets/a/b@main/c.tar", "hf://datasets/a/b@main/c.tar"),
        ("abfs://container@account.dfs.core.windows.net/a", None),
        ("a caption about a://b", None),
        ("no address: a@b?key=v", None),
    ],
)
def test_credentials_in_addresses_are_not_shown(url: str, shown: str | None) -> None:
    text = f"datasets[0].instance_data_dir is {url!r}, or {url} (see {url}). Check it."
    expected = text.replace(url, shown or url)
    assert redact_urls(text) == expected
    assert redact_urls(expected) == expected
    assert str(DataError(text)) == expected
