"""A read-only cache raises an error that says so, and its index is kept."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from fork_process import is_true_in_fork

from gracetune.cache.shard_store import INDEX, ShardStore
from gracetune.errors import CacheError

CLONE_NEWNS = 0x00020000


def fill(store):
    store.put("k1", {"latents": torch.ones(2, 3)})


@pytest.mark.parametrize("state", ["whole", "without an index", "with an empty index", "new"])
def test_a_read_only_cache_is_an_error_and_its_index_is_kept(state):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)  # readable by other users
        if state != "new":
            with ShardStore(root / "cache") as store:
                fill(store)
        if state == "without an index":
            (root / "cache" / INDEX).unlink()
        if state == "with an empty index":
            (root / "cache" / INDEX).write_bytes(b"")
        closed = root if state == "new" else root / "cache"
        closed.chmod(0o555)
        try:
            assert is_true_in_fork(lambda: raises_read_only_error(root / "cache"), as_nobody=True)
        finally:
            closed.chmod(0o755)


def raises_read_only_error(folder):
    try:
        ShardStore(folder)
    except CacheError as error:
        message = str(error)
        return message.startswith(f"The cache in {folder} is read-only") and "Remove" not in message
    return False


def test_a_cache_on_a_read_only_file_system_is_an_error(tmp_path):
    with ShardStore(tmp_path) as store:
        fill(store)
    command = ["sh", "-c", "unshare --mount true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")

    def refused_on_a_read_only_mount():
        # A private mount namespace, which ends with the process.
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        for options in (["--make-rprivate", "/"], ["--bind", tmp_path, tmp_path]):
            subprocess.run(["mount", *options], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        return raises_read_only_error(tmp_path)

    assert is_true_in_fork(refused_on_a_read_only_mount)
    with ShardStore(tmp_path) as store:
        assert store.has(["k1"]) == [True]
