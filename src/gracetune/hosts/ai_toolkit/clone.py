"""A clone of ai-toolkit on disk: which it is, whether it fits, and our one file in it."""

from __future__ import annotations

import ast
import shutil
import subprocess
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.errors import HostError
from gracetune.hosts.ai_toolkit.hooks import KNOWN, NEEDS
from gracetune.hosts.probe import Installed, probe, probe_lines

if TYPE_CHECKING:
    from pathlib import Path

SHIM = "gracetune_shim"
TEXT = '''"""Put here by `gracetune host ai-toolkit install`; `uninstall` takes it away.

gracetune must be installed in ai-toolkit's own environment.
"""

from gracetune.hosts.ai_toolkit.enter import extensions

AI_TOOLKIT_EXTENSIONS = extensions(__file__)
'''
_LANDMARKS = ("run.py", "toolkit/extension.py", "jobs/process/BaseSDTrainProcess.py")


def find_clone(path: Path) -> Installed:
    """The clone at a path, by its commit; without history, by its own number."""
    root = path.resolve()
    for landmark in _LANDMARKS:
        if not (root / landmark).is_file():
            raise HostError(
                f"{path} is no clone of ai-toolkit: it has no {landmark}. Name the folder that "
                "`git clone https://github.com/ostris/ai-toolkit` made."
            )
    return Installed("ai-toolkit", _commit(root) or _version(root), root)


def check(path: Path) -> list[str]:
    """Probe a clone; HostError with the table where it does not fit."""
    clone = find_clone(path)
    found = probe(clone.root, NEEDS)
    lines = probe_lines(clone, found, KNOWN)
    if not all(each.fits for each in found):
        raise HostError("\n".join(lines))
    return lines


def shim_path(root: Path) -> Path:
    """Where our file is, or would be."""
    return root / "extensions" / f"{SHIM}.py"


def install(path: Path) -> Path:
    """Check, then put our file there; again is no harm."""
    check(path)
    shim = shim_path(path.resolve())
    _refuse_others(shim)
    if not shim.parent.is_dir():
        raise HostError(f"{shim.parent} is not there; ai-toolkit looks for extensions in it.")
    write_text(shim, TEXT)
    return shim


def uninstall(path: Path) -> bool:
    """Take our file away with what Python compiled of it; whether there was one."""
    root = find_clone(path).root
    shim = shim_path(root)
    _refuse_others(shim)
    found = shim.exists()
    shim.unlink(missing_ok=True)
    compiled = shim.parent / "__pycache__"
    for file in compiled.glob(f"{SHIM}.*.pyc"):
        file.unlink()
    if compiled.is_dir() and not any(compiled.iterdir()):
        compiled.rmdir()
    return found


def _refuse_others(shim: Path) -> None:
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
