"""What a release promises: one version, a changelog, known licences, and pages that name them."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import gracetune

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return import_module(name)

    return load


def test_the_version_is_written_in_one_place(script):
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "gracetune.__version__"}
    assert script("check_release").package_version() == gracetune.__version__


def test_the_changelog_has_this_version(script):
    assert script("check_release").check_changelog(gracetune.__version__) == []
    assert script("check_release").check_changelog("99.0.0") != []


def test_every_licence_is_permissive_or_reviewed(script):
    """The trackers may be missing here; `make release` checks them, too."""
    licenses = script("licenses")
    found = licenses.collect()
    assert len(found) > 50
    unknown = licenses.to_review(found)
    assert [one.name for one in unknown if one.licence != licenses.NOT_HERE] == []


def test_a_package_that_is_not_installed_must_be_known(script):
    licenses = script("licenses")
    missing = licenses.Package("new", "", licenses.NOT_HERE, frozenset({"wandb"}))
    assert licenses.to_review([missing]) == [missing]
    names = {one.name for one in licenses.collect()}
    assert {*licenses.KNOWN, *licenses.REVIEWED} - names == set(), "no extra needs these"


def test_the_page_of_licences_is_what_the_script_writes(script):
    """For packages of the same version: the trackers, with which it is written, need older ones."""
    licenses = script("licenses")
    page = (ROOT / "docs" / "licenses.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S*) \| (.+) \| (.+) \|$", page, re.M)
    listed = {(name, version): (licence, users) for name, version, licence, users in rows}
    here = [one for one in licenses.collect() if (one.name, one.version) in listed]
    installed = [one for one in here if one.licence != licenses.NOT_HERE]
    assert len(installed) > 80
    for one in installed:
        licence, users = listed[one.name, one.version]
        assert licence == one.licence, one.name
        assert set(one.users.split(", ")) <= set(users.split(", ")), one.name


@pytest.mark.parametrize(
    ("licence", "is_permissive"),
    [
        ("MIT", True),
        ("BSD-3-Clause", True),
        ("Apache-2.0 AND MIT", True),
        ("LGPL-2.1-or-later", False),
        ("MIT AND GPL-3.0", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("unknown", False),
    ],
)
def test_restricted_licences_are_told_from_permissive_ones(script, licence, is_permissive):
    assert script("licenses").Package("a", "1", licence, frozenset()).is_permissive is is_permissive


def test_the_page_of_licences_has_every_direct_dependency(script):
    left_out = script("licenses").LEFT_OUT
    page = (ROOT / "docs" / "licenses.md").read_text()
    named = set(re.findall(r"^\| ([\w.-]+) \|", page, re.M))
    groups = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    direct = {
        re.match(r"[\w-]+", text)[0].lower()
        for extra, requirements in groups.items()
        if extra not in left_out
        for text in requirements
    }
    assert direct - named == set()


def test_every_tracker_has_an_extra():
    from gracetune.events.trackers.tracker import PACKAGES

    assert PACKAGES.keys() <= PROJECT["project"]["optional-dependencies"].keys()


def test_formats_in_the_policy_are_those_of_the_code():
    from gracetune.cache.keys import SCHEMA_VERSION
    from gracetune.train.checkpoint import FORMAT, SHARDED_FORMAT

    policy = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"`format` {FORMAT}, or {SHARDED_FORMAT} for divided weights" in policy
    assert f"keys of schema {SCHEMA_VERSION}" in policy


def test_no_code_from_a_hub_is_ever_run():
    """SECURITY.md says so; the importer of SimpleTuner's configs only knows the name of the key."""
    files = {
        path.name
        for path in (ROOT / "src" / "gracetune").rglob("*.py")
        if "trust_remote_code" in path.read_text()
    }
    assert files == {"simpletuner_keys.py"}
