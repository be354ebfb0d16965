"""Find, check and extend a clone of ai-toolkit on disk."""

from __future__ import annotations

import ast
import shutil
import subprocess
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.errors import HostError
from gracetune.hosts.ai_toolkit.hooks import REQUIRED_SYMBOLS, TESTED_COMMITS
from gracetune.hosts.probe import InstalledHost, format_probe, probe

if TYPE_CHECKING:
    from pathlib import Path

EXTENSION_NAME = "gracetune_shim"
EXTENSION_SOURCE = '''"""Installed by `gracetune host ai-toolkit install`; `uninstall` removes it.

gracetune must be installed in ai-toolkit's own environment. Without it, jobs run as usual.
"""

try:
    from gracetune.hosts.ai_toolkit.enter import extensions

    AI_TOOLKIT_EXTENSIONS = extensions(__file__)
except Exception as error:
    import sys

    AI_TOOLKIT_EXTENSIONS = []
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"gracetune has no effect ({reason}). To remove it: {__file__}", file=sys.stderr)
'''
"""The file that `install` writes. ai-toolkit imports it for every job, so it must not raise."""
_LANDMARKS = ("run.py", "toolkit/extension.py", "jobs/process/BaseSDTrainProcess.py")
"""Files by which a clone of ai-toolkit is recognised."""
_UNKNOWN_VERSION = "of an unknown version"


def find_clone(path: Path) -> InstalledHost:
    """Return the clone at a path; its version is its commit, or else the number in version.py."""
    root = path.resolve()
    for landmark in _LANDMARKS:
        if not (root / landmark).is_file():
            raise HostError(
                f"{path} is not a clone of ai-toolkit: it has no {landmark}. Name the folder that "
                "`git clone https://github.com/ostris/ai-toolkit` created."
            )
    return InstalledHost("ai-toolkit", _commit(root) or _version(root), root)


def check(path: Path) -> list[str]:
    """Check that a clone of ai-toolkit has every function that gracetune hooks.

    Returns the results as lines of a table; raises HostError with them if a function is missing.
    """
    clone = find_clone(path)
    results = probe(clone.root, REQUIRED_SYMBOLS)
    lines = format_probe(clone, results, TESTED_COMMITS)
    if not all(each.ok for each in results):
        raise HostError("\n".join(lines))
    return lines


def extension_path(root: Path) -> Path:
    """Return the path of the extension file that `install` writes into a clone of ai-toolkit."""
    return root / "extensions" / f"{EXTENSION_NAME}.py"


def install(path: Path) -> Path:
    """Check a clone of ai-toolkit, then write the extension file that loads gracetune.

    Returns the path of the file. An older version of it is replaced.
    """
    check(path)
    file = extension_path(path.resolve())
    _check_is_ours(file)
    if not file.parent.is_dir():
        raise HostError(f"{file.parent} does not exist; ai-toolkit looks for extensions there.")
    write_text(file, EXTENSION_SOURCE)
    return file


def uninstall(path: Path) -> bool:
    """Remove gracetune's extension file and its bytecode; return True if the file existed."""
    root = find_clone(path).root
    file = extension_path(root)
    _check_is_ours(file)
    was_installed = file.exists()
    file.unlink(missing_ok=True)
    bytecode_folder = file.parent / "__pycache__"
    for bytecode in bytecode_folder.glob(f"{EXTENSION_NAME}.*.pyc"):
        bytecode.unlink()
    if bytecode_folder.is_dir() and not any(bytecode_folder.iterdir()):
        bytecode_folder.rmdir()
    return was_installed


def _check_is_ours(file: Path) -> None:
    """Raise if the file exists and gracetune did not write it, so that it is not overwritten."""
    if not file.exists():
        return
    if "gracetune.hosts.ai_toolkit" not in file.read_text(encoding="utf-8", errors="replace"):
        raise HostError(f"{file} was not written by gracetune. Move it away and try again.")


def _commit(root: Path) -> str:
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    command = [git, "-C", str(root), "rev-parse", "HEAD"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip()[:12] if process.returncode == 0 else ""


def _version(root: Path) -> str:
    file = root / "version.py"
    if not file.is_file():
        return _UNKNOWN_VERSION
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return _UNKNOWN_VERSION
