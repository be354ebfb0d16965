from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.captions import Captions, caption_orders, find_captions, require_captions
from gracetune.data.source import FolderSource
from gracetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path


def _read(root: Path, files: dict[str, bytes], **section: object) -> dict[str, str]:
    captions = _read_all(root, files, **section)
    assert not captions.unreadable
    return captions.texts


def _read_all(root: Path, files: dict[str, bytes], **section: object) -> Captions:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    source = FolderSource(root)
    images = [key for key in source.keys() if key.lower().endswith(".png")]  # noqa: SIM118
    settings = DatasetSection.model_validate(section)
    captions = find_captions(source, images, settings, "datasets[0]")
    require_captions(captions, source, settings, "datasets[0]")
    return captions


def _table(*rows: tuple[str, str]) -> bytes:
    return "".join(
        json.dumps({"file_name": name, "text": text}) + "\n" for name, text in rows
    ).encode()


def test_captions_are_read_from_text_files_next_to_the_images(tmp_path: Path) -> None:
    files = {
        "a.png": b"",
        "a.txt": b"  a cat\n",
        "deep/b.c.PNG": b"",
        "deep/b.c.TXT": b"\xef\xbb\xbfein H\xc3\xbcgel",
        "other.txt": b"belongs to none",
    }
    assert _read(tmp_path, files) == {"a.png": "a cat", "deep/b.c.PNG": "ein Hügel"}


def test_an_empty_text_file_is_an_empty_caption(tmp_path: Path) -> None:
    assert _read(tmp_path, {"a.png": b"", "a.txt": b" \n"}) == {"a.png": ""}


def test_a_caption_that_is_not_utf8_makes_its_sample_unreadable(tmp_path: Path) -> None:
    files = {"a.png": b"", "a.txt": b"a cat", "b.png": b"", "b.txt": b"caf\xe9"}
    captions = _read_all(tmp_path, files)
    assert captions.texts == {"a.png": "a cat"}
    (reason,) = [captions.unreadable["b.png"]]
    assert reason.startswith("its caption b.txt is not UTF-8 (byte 3: ")


def test_a_caption_that_cannot_be_read_makes_its_sample_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    captions = _read_all(tmp_path, {"a.png": b""})
    reason = "its caption a.txt cannot be read (No such file or directory)"
    assert captions.unreadable == {"a.png": reason}


def test_missing_captions_are_counted_and_listed_with_fixes(tmp_path: Path) -> None:
    files = {f"{number}.png": b"" for number in range(7)}
    with pytest.raises(DataError) as caught:
        _read(tmp_path, {**files, "3.txt": b"here"})
    text = str(caught.value)
    assert "datasets[0].caption_strategy is 'auto': 6 of 7 samples have no caption" in text
    assert "0.png, 1.png, 2.png, 4.png, 5.png, ..." in text
    assert ".txt file of the same name" in text
    assert "instanceprompt" in text


def test_metadata_jsonl_has_captions_by_file_name(tmp_path: Path) -> None:
    table = _table(("a.png", " first "), ("deep/b.png", "second"), ("gone.png", "x")) + b"\n"
    files = {"a.png": b"", "deep/b.png": b"", "metadata.jsonl": table, "a.txt": b"not this"}
    captions = _read_all(tmp_path, files)
    assert captions.texts == {"a.png": "first", "deep/b.png": "second"}
    assert captions.absent == ("metadata.jsonl: gone.png",)


def test_the_metadata_file_of_the_innermost_folder_wins(tmp_path: Path) -> None:
    files = {
        "a/b.png": b"",
        "a/c.png": b"",
        "a/metadata.jsonl": _table(("b.png", "near\u2028by")),
        "metadata.jsonl": b"\xef\xbb\xbf" + _table(("a/b.png", "far"), ("a/c.png", "other")),
    }
    assert _read(tmp_path, files) == {"a/b.png": "near\u2028by", "a/c.png": "other"}


def test_an_image_without_a_row_has_no_caption(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 2 samples.*b\.png.*line with file_name and text"):
        _read(tmp_path, {"a.png": b"", "b.png": b"", "metadata.jsonl": _table(("a.png", "x"))})


def test_caption_strategy_jsonl_needs_a_metadata_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 of 1 samples"):
        _read(tmp_path, {"a.png": b"", "a.txt": b"x"}, caption_strategy="jsonl")


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[]",
        '"text"',
        '{"file_name": "a.png"}',
        '{"file_name": "a.png", "text": 3}',
        '{"file_name": "a.png", "text": ' + "9" * 5000 + "}",
        '{"file_name": "b.png", "text": "x", "more": ' + "[" * 100_000,
        '{"file_name": "b.png", "text": "x", "more": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"file_name": "/etc/b.png", "text": "x"}',
        '{"file_name": "../b.png", "text": "x"}',
        '{"file_name": "c/../../b.png", "text": "x"}',
        '{"file_name": "..", "text": "x"}',
    ],
)
def test_an_invalid_row_is_an_error_that_names_file_and_line(tmp_path: Path, line: str) -> None:
    table = _table(("a.png", "x")) + line.encode()
    with pytest.raises(DataError, match=r"datasets\[0\]: metadata\.jsonl, line 2") as caught:
        _read(tmp_path, {"a.png": b"", "metadata.jsonl": table})
    assert len(str(caught.value)) < 600


def test_a_row_that_is_not_utf8_is_named_by_its_line(tmp_path: Path) -> None:
    table = _table(("a.png", "x")) + b'{"file_name": "b.png", "text": "caf\xe9"}'
    with pytest.raises(DataError, match=r"metadata\.jsonl, line 2 is not UTF-8 \(byte 35"):
        _read(tmp_path, {"a.png": b"", "metadata.jsonl": table})


def test_long_integers_and_nesting_in_other_fields_are_ignored(tmp_path: Path) -> None:
    more = f'"id": {"9" * 5000}, "more": {"[" * 50}{"]" * 50}'
    table = f'{{"file_name": "a.png", "text": "a cat", {more}}}\n'.encode()
    assert _read(tmp_path, {"a.png": b"", "metadata.jsonl": table}) == {"a.png": "a cat"}


def test_a_lone_surrogate_makes_its_sample_unreadable(tmp_path: Path) -> None:
    table = _table(("a.png", "a cat")) + b'{"file_name": "b.png", "text": "a \\ud83d cat"}\n'
    captions = _read_all(tmp_path, {"a.png": b"", "b.png": b"", "metadata.jsonl": table})
    assert captions.texts == {"a.png": "a cat"}
    assert captions.unreadable == {"b.png": "its caption in line 2 has the lone surrogate \\ud83d"}


def test_a_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    table = b'{"file_name": "a.png", "text": "\\ud83d\\udc31"}\n'
    assert _read(tmp_path, {"a.png": b"", "metadata.jsonl": table}) == {"a.png": "\U0001f431"}


def test_paths_in_a_table_may_leave_its_folder_but_not_the_dataset(tmp_path: Path) -> None:
    table = _table(("../images/a.png", "a cat"))
    files = {"images/a.png": b"", "tables/metadata.jsonl": table}
    assert _read(tmp_path, files) == {"images/a.png": "a cat"}


def test_two_rows_for_one_file_are_an_error(tmp_path: Path) -> None:
    table = _table(("a.png", "x"), ("./a.png", "y"))
    with pytest.raises(DataError, match=r"line 2: file_name '\./a\.png' occurs twice"):
        _read(tmp_path, {"a.png": b"", "metadata.jsonl": table})


def test_caption_strategy_filename_turns_file_names_into_words(tmp_path: Path) -> None:
    files = {"deep/a_red--big_cat.png": b"", "two words.v2.PNG": b""}
    assert _read(tmp_path, files, caption_strategy="filename") == {
        "deep/a_red--big_cat.png": "a red big cat",
        "two words.v2.PNG": "two words.v2",
    }


def test_a_file_name_without_words_gives_no_caption(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 1.*Give each file a name"):
        _read(tmp_path, {"__-.png": b""}, caption_strategy="filename")


def test_instance_prompt_is_the_caption_of_every_image(tmp_path: Path) -> None:
    section = {"caption_strategy": "instanceprompt", "instance_prompt": "sks dog"}
    captions = _read(tmp_path, {"a.png": b"", "b.png": b""}, **section)
    assert captions == {"a.png": "sks dog", "b.png": "sks dog"}


def test_caption_strategy_instanceprompt_needs_an_instance_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs datasets\[0\]\.instance_prompt"):
        _read(tmp_path, {"a.png": b""}, caption_strategy="instanceprompt")


def _parquet(**columns: list[str | None]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def test_captions_are_read_from_metadata_parquet(tmp_path: Path) -> None:
    files = {
        "a.png": b"",
        "deep/b.png": b"",
        "deep/c.png": b"",
        "metadata.parquet": _parquet(filename=["a.png", "deep/b.png"], caption=[" a cat", "no"]),
        "deep/metadata.parquet": _parquet(file_name=["b.png", "c.png"], text=["nearer", None]),
    }
    assert _read(tmp_path, files, caption_strategy="parquet") == {
        "a.png": "a cat",
        "deep/b.png": "nearer",
        "deep/c.png": "",
    }


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (b"PAR1", r"datasets\[0\]: metadata\.parquet is not a parquet file"),
        (_parquet(name=["a.png"]), r"must have the text columns file_name and text.*it has name"),
        (_parquet(file_name=["a.png", "a.png"], text=["x", "y"]), r"row 1: file_name.*twice"),
        (_parquet(file_name=["b.png"], text=["x"]), r"1 of 1 samples.*Add a row"),
    ],
)
def test_an_invalid_parquet_file_is_refused_with_the_reason(
    tmp_path: Path, table: bytes, rule: str
) -> None:
    with pytest.raises(DataError, match=rule):
        _read(tmp_path, {"a.png": b"", "metadata.parquet": table}, caption_strategy="parquet")


def test_newlines_in_file_names_are_escaped_in_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        _read(tmp_path, {"two\nlines.png": b"", "metadata.jsonl": b"[]"})
    assert "metadata.jsonl, line 1" in str(caught.value)
    with pytest.raises(DataError, match=r"no caption: b\\nb\.png"):
        _read(tmp_path / "deeper", {"b\nb.png": b""})


def test_captions_may_have_another_suffix(tmp_path: Path) -> None:
    files = {"a.png": b"", "a.txt": b"notes", "a.tags": b"cat, hat", "b.png": b"", "b.TAGS": b"x"}
    assert _read(tmp_path, files, caption_extension=".TAGS") == {"a.png": "cat, hat", "b.png": "x"}


def test_json_captions_have_the_key_caption_or_text(tmp_path: Path) -> None:
    files = dict.fromkeys(("a.png", "b.png", "c.png", "d.png"), b"")
    files |= {
        "a.json": b'{"caption": " a cat ", "text": "other"}',
        "b.json": b'{"text": "a hat"}',
        "c.json": b'{"tags": []}',
        "d.json": b"{",
    }
    captions = _read_all(tmp_path, files, caption_extension="json")
    assert captions.texts == {"a.png": "a cat", "b.png": "a hat"}
    no_text = "its caption c.json is no object with a text `caption` or `text`"
    assert captions.unreadable["c.png"] == no_text
    assert captions.unreadable["d.png"].startswith("its caption d.json is not JSON (")


def test_missing_captions_with_another_suffix_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Set caption_extension: caption, if the \.caption files"):
        _read(tmp_path, {"a.png": b"", "a.caption": b"a cat"})


@pytest.mark.parametrize(
    ("written", "settings", "expected"),
    [
        ("a cat", {}, "a cat"),
        ("a cat", {"trigger_word": "ohwx"}, "ohwx, a cat"),
        ("", {"trigger_word": "ohwx"}, "ohwx"),
        ("a photo of [trigger], an [trigger] cat", {"trigger_word": "ohwx"}, None),
        ("Ohwx sits", {"trigger_word": "ohwx"}, "Ohwx sits"),
        ("a category", {"trigger_word": "cat"}, "cat, a category"),
        ("a c++ (x) book", {"trigger_word": "c++ (x)"}, "a c++ (x) book"),
        ("a cat", {"caption_prefix": "photo of ", "caption_suffix": ", 35mm"}, None),
        ("", {"caption_prefix": "photo of", "caption_suffix": "at night"}, "photo of at night"),
        ("", {"caption_suffix": ", 35mm"}, "35mm"),
        ("a cat", {"caption_prefix": "[trigger],", "trigger_word": "ohwx"}, "ohwx, a cat"),
        ("a cat", {"caption_suffix": "by ohwx", "trigger_word": "ohwx"}, "a cat by ohwx"),
    ],
)
def test_prefix_suffix_and_trigger_word_complete_a_caption(written, settings, expected) -> None:
    if expected is None:
        expected = {
            "a cat": "photo of a cat, 35mm",
            "a photo of [trigger], an [trigger] cat": "a photo of ohwx, an ohwx cat",
        }[written]
    assert caption_orders(written, DatasetSection(**settings), "0") == (expected,)


def test_shuffled_tags_keep_the_first_ones_and_what_is_added() -> None:
    section = DatasetSection(
        caption_shuffle=True,
        caption_keep_tokens=2,
        caption_variants=5,
        trigger_word="ohwx",
        caption_suffix=", best",
    )
    written = "1girl,  solo, red hair , blue eyes, hat, park"
    orders = caption_orders(written, section, "seed 0")
    assert orders[0] == f"ohwx, {written}, best"
    assert len(set(orders)) == 5
    for order in orders[1:]:
        tags = order.split(", ")
        assert tags[:3] == ["ohwx", "1girl", "solo"]
        assert tags[-1] == "best"
        assert sorted(tags[3:-1]) == ["blue eyes", "hat", "park", "red hair"]
    assert caption_orders(written, section, "seed 0") == orders
    assert caption_orders(written, section, "seed 1")[1:] != orders[1:]


@pytest.mark.parametrize(("written", "count"), [("a cat", 1), ("a, b", 2), ("a, b, c", 6), ("", 1)])
def test_a_caption_of_few_tags_has_few_orders(written: str, count: int) -> None:
    section = DatasetSection(caption_shuffle=True, caption_variants=8)
    assert len(caption_orders(written, section, "0")) == count
