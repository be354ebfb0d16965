"""A clone of ai-toolkit on disk: which it is, whether it fits, and our one file in it."""

from __future__ import annotations

import ast
import shutil
import subprocess
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.errors import HostError
from gracetune.hosts.ai_toolkit.hooks import TESTED_COMMITS, REQUIRED_SYMBOLS
from gracetune.hosts.probe import InstalledHost, probe, format_probe

if TYPE_CHECKING:
    from pathlib import Path

EXTENSION_NAME = "gracetune_shim"
EXTENSION_SOURCE = '''"""Put here by `gracetune host ai-toolkit install`; `uninstall` takes it away.

gracetune must be installed in ai-toolkit's own environment.
"""

from gracetune.hosts.ai_toolkit.enter import extensions

AI_TOOLKIT_EXTENSIONS = extensions(__file__)
'''
_LANDMARKS = ("run.py", "toolkit/extension.py", "jobs/process/BaseSDTrainProcess.py")


def find_clone(path: Path) -> InstalledHost:
    """The clone at a path, by its commit; without history, by its own number."""
    root = path.resolve()
    for landmark in _LANDMARKS:
        if not (root / landmark).is_file():
            raise HostError(
                f"{path} is no clone of ai-toolkit: it has no {landmark}. Name the folder that "
                "`git clone https://github.com/ostris/ai-toolkit` made."
            )
    return InstalledHost("ai-toolkit", _commit(root) or _version(root), root)


def check(path: Path) -> list[str]:
    """Probe a clone; HostError with the table where it does not fit."""
    clone = find_clone(path)
    found = probe(clone.root, REQUIRED_SYMBOLS)
    lines = format_probe(clone, found, TESTED_COMMITS)
    if not all(each.ok for each in found):
        raise HostError("\n".join(lines))
    return lines


def extension_path(root: Path) -> Path:
    """Where our file is, or would be."""
    return root / "extensions" / f"{EXTENSION_NAME}.py"


def install(path: Path) -> Path:
    """Check, then put our file there; again is no harm."""
    check(path)
    shim = extension_path(path.resolve())
    _check_is_ours(shim)
    if not shim.parent.is_dir():
        raise HostError(f"{shim.parent} is not there; ai-toolkit looks for extensions in it.")
    write_text(shim, EXTENSION_SOURCE)
    return shim


def uninstall(path: Path) -> bool:
    """Take our file away with what Python compiled of it; whether there was one."""
    root = find_clone(path).root
    shim = extension_path(root)
    _check_is_ours(shim)
    found = shim.exists()
    shim.unlink(missing_ok=True)
    compiled = shim.parent / "__pycache__"
    for file in compiled.glob(f"{EXTENSION_NAME}.*.pyc"):
        file.unlink()
    if compiled.is_dir() and not any(compiled.iterdir()):
        compiled.rmdir()
    return found


def _check_is_ours(shim: Path) -> None:
    """A file of that name that is not as we write it may hold someone's work."""
    if not shim.exists():
        return
    if "gracetune.hosts.ai_toolkit" not in shim.read_text(encoding="utf-8", errors="replace"):
        raise HostError(f"{shim} is not ours. Move it away, and start this again.")


def _commit(root: Path) -> str:
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    words = [git, "-C", str(root), "rev-parse", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip()[:12] if done.returncode == 0 else ""


def _version(root: Path) -> str:
    file = root / "version.py"
    if not file.is_file():
        return "of an unknown version"
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return "of an unknown version"
