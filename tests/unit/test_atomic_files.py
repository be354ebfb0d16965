import errno
import os
import re
import tempfile

import pytest

from gracetune import atomic_files
from gracetune.errors import DiskFullError


def test_a_folder_appears_complete(tmp_path):
    with atomic_files.atomic_folder(tmp_path / "a" / "b") as staging:
        (staging / "x").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "x").read_text() == "1"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_a_failure_keeps_the_old_folder(tmp_path):
    target = tmp_path / "kept"
    with atomic_files.atomic_folder(target) as staging:
        (staging / "x").write_text("old")
    with pytest.raises(OSError, match="no"), atomic_files.atomic_folder(target) as staging:
        (staging / "x").write_text("new")
        raise OSError("no")
    assert (target / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_folder_replaces_the_old_one_completely(tmp_path):
    target = tmp_path / "kept"
    for name in ("old", "new"):
        with atomic_files.atomic_folder(target) as staging:
            (staging / name).write_text(name)
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_file_is_complete_or_unchanged(tmp_path):
    file = tmp_path / "f.json"
    atomic_files.write_text(file, "old")
    with pytest.raises(RuntimeError), atomic_files.atomic_file(file) as staging:
        staging.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["f.json"]


def test_staging_of_killed_processes_is_removed(tmp_path):
    (tmp_path / ".step-1.77.staging").mkdir()
    (tmp_path / ".step-1.77.staging" / "x").write_text("")
    (tmp_path / ".file.78.staging").write_text("")
    (tmp_path / "step-1").mkdir()
    atomic_files.remove_stale_staging(tmp_path)
    assert os.listdir(tmp_path) == ["step-1"]


def test_only_the_leftovers_of_a_target_are_removed(tmp_path):
    for name in (".new.77.staging", ".new.v2.78.staging", ".new.v2.79-0a1b2c3d.staging"):
        (tmp_path / name).mkdir()
    atomic_files.remove_stale_staging(tmp_path, "new")
    assert sorted(os.listdir(tmp_path)) == [".new.v2.78.staging", ".new.v2.79-0a1b2c3d.staging"]
    atomic_files.remove_stale_staging(tmp_path, "new.v2")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_mid_swap_is_restored(tmp_path):
    old = tmp_path / ".step-000001.77.old.staging"
    old.mkdir()
    (old / "x").write_text("kept")
    (tmp_path / ".step-000001.77.staging").mkdir()
    atomic_files.remove_stale_staging(tmp_path)
    assert os.listdir(tmp_path) == ["step-000001"]
    assert (tmp_path / "step-000001" / "x").read_text() == "kept"


@pytest.fixture(params=[0o022, 0o002, 0o077], ids="{:03o}".format)
def allowed(request):
    """Set a umask for this test; return the permissions that it allows."""
    before = os.umask(request.param)
    yield 0o777 & ~request.param
    os.umask(before)


def mode_of(path):
    return path.stat().st_mode & 0o7777


def write_private(path):
    """Write a file as `safetensors.save_file` does: a private temporary file, then a rename."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    os.close(descriptor)
    os.replace(name, path)


def test_the_umask_decides_who_may_read_a_file(tmp_path, allowed):
    file = tmp_path / "a" / "result"
    with atomic_files.atomic_file(file) as staging:
        write_private(staging)
    atomic_files.write_text(tmp_path / "text", "1")
    assert mode_of(file) == mode_of(tmp_path / "text") == 0o666 & allowed
    assert mode_of(file.parent) == allowed


def test_the_umask_decides_who_may_read_a_folder(tmp_path, allowed):
    source = tmp_path / "source"
    source.touch()
    source.chmod(0o640)
    with atomic_files.atomic_folder(tmp_path / "result") as staging:
        inner = staging / "inner"
        inner.mkdir(mode=0o700)
        write_private(inner / "weights")
        write_private(staging / "script")
        (staging / "script").chmod(0o700)
        os.link(source, staging / "linked")
        (staging / "symlink").symlink_to(source)
    result = tmp_path / "result"
    assert mode_of(result) == mode_of(result / "inner") == mode_of(result / "script") == allowed
    assert mode_of(result / "inner" / "weights") == 0o666 & allowed
    assert mode_of(source) == 0o640, "a linked file keeps its permissions"


def test_a_block_that_writes_nothing_fails(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_files.atomic_file(tmp_path / "f"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [atomic_files.atomic_file, atomic_files.atomic_folder])
def test_a_full_disk_is_an_error_for_the_user_that_names_the_path(tmp_path, write):
    target = tmp_path / "new" / "result"
    with pytest.raises(DiskFullError) as caught, write(target), open("/dev/full", "wb") as full:
        full.write(b"x" * 100_000)
    text = str(caught.value)
    assert text.startswith(f"{target} cannot be written: No space left on device; ")
    assert re.search(r"; [\d,]+ bytes are free on its disk\. Free some space", text)
    assert isinstance(caught.value, OSError), "callers that handle failed writes catch it"
    assert not list((tmp_path / "new").iterdir())


def fail_with(number, path):
    with atomic_files.atomic_file(path):
        raise OSError(number, os.strerror(number))


def test_a_quota_is_reported_like_a_full_disk_and_other_errors_are_not(tmp_path):
    with pytest.raises(DiskFullError, match="quota exceeded"):
        fail_with(errno.EDQUOT, tmp_path / "f")
    with pytest.raises(OSError, match="Input/output") as caught:
        fail_with(errno.EIO, tmp_path / "f")
    assert not isinstance(caught.value, DiskFullError)
