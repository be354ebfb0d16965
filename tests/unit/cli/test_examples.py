from pathlib import Path

import pytest

from gracetune.cli.examples import copy_examples, find_examples, first_comment
from gracetune.cli.main import main
from gracetune.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "demo.json").write_text('// Twelve shapes.\n{"seed": 1}\n')
    (tmp_path / "art.yaml").write_text("seed: 1\n# Paintings.\n")
    (tmp_path / "judge.py").write_text("# not a run file\n")
    return tmp_path


def test_run_files_are_found_by_name(folder: Path) -> None:
    found = find_examples(folder)
    assert list(found) == ["art", "demo"]


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        ("// A.\n// B.\n{}", "A."),
        ('{\n  // Inside.\n  "seed": 1\n}', "Inside."),
        ("# Hash.\nseed: 1", "Hash."),
        ("{}", ""),
    ],
)
def test_the_first_comment_is_the_description(text: str, comment: str) -> None:
    assert first_comment(text) == comment


def test_a_copy_never_replaces_a_file(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine" / "deep"
    copy_examples(find_examples(folder).values(), target)
    assert (target / "demo.json").read_bytes() == (folder / "demo.json").read_bytes()
    (target / "demo.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"demo\.json already exists"):
        copy_examples([folder / "demo.json"], target)
    assert (target / "demo.json").read_text() == "mine"


def test_a_target_folder_that_cannot_be_created_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--copy"):
        copy_examples([folder / "demo.json"], folder / "judge.py" / "x")


def test_the_shipped_run_files_are_listed_printed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = sorted(path for path in SHIPPED.iterdir() if path.suffix == ".json")
    assert shipped, "the checkout has no examples"
    assert main(["examples"]) == 0
    listed = capsys.readouterr().out
    for path in shipped:
        assert path.stem in listed
        assert first_comment(path.read_text()) in listed
        assert main(["examples", path.stem]) == 0
        assert capsys.readouterr().out == path.read_text()
    assert main(["examples", "--copy", str(tmp_path)]) == 0
    assert {path.name for path in shipped} <= {path.name for path in tmp_path.iterdir()}


def test_an_unknown_example_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "nonesuch"]) == 2
    assert "there is no example 'nonesuch'. Use one of: " in capsys.readouterr().err


def test_a_part_of_a_name_finds_the_examples_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "flux"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["flux-kontext-lora", "flux-lora", "flux2-lora"]
    assert main(["examples", "z_image"]) == 0  # the only match is printed
    assert capsys.readouterr().out == (SHIPPED / "z-image-lora.json").read_text()
    assert main(["examples", "kontext"]) == 0
    assert capsys.readouterr().out == (SHIPPED / "flux-kontext-lora.json").read_text()


def test_example_images_are_drawn_once_and_never_among_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["examples", "--images", str(tmp_path / "stars")]) == 0
        assert "192 images of stars with captions" in capsys.readouterr().out
    caption = (tmp_path / "stars" / "red-star-white-000.txt").read_text()
    assert caption == "a red star on a white background\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cat.jpg").write_bytes(b"a cat")
    assert main(["examples", "--images", str(tmp_path / "mine")]) == 2
    assert "contains other files. Name a new folder." in capsys.readouterr().err
