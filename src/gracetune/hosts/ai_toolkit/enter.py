"""Provide the extension class through which ai-toolkit loads gracetune.

`gracetune host ai-toolkit install` writes a small file into ai-toolkit's `extensions` folder. It
imports `extensions` from this module, so neither name may change.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.environment import process_environment
from gracetune.hosts.ai_toolkit.clone import check
from gracetune.hosts.ai_toolkit.config_blocks import PROCESS_TYPE
from gracetune.hosts.ai_toolkit.hooks import EXTENSION, SD_TRAINER, hook_jobs
from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin
from gracetune.memory.platform import open_machine
from gracetune.memory.shared_memory import user_shared_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def extensions(shim: str) -> list[type]:
    """Return the extension classes for ai-toolkit.

    `shim` is the path of the file that `gracetune host ai-toolkit install` wrote into the clone.
    """
    root = Path(shim).resolve().parents[1]
    return [extension_class(root, import_module, make_plugin)]


def extension_class(
    root: Path, find: Callable[[str], ModuleType], make: Callable[[], AIToolkitPlugin]
) -> type:
    """Create the extension class; `find` imports a module of ai-toolkit."""
    plugins: list[AIToolkitPlugin] = []

    class GracetuneExtension(find(EXTENSION).Extension):  # type: ignore[misc]
        """The extension through which ai-toolkit loads gracetune."""

        uid = PROCESS_TYPE
        name = "gracetune"

        @classmethod
        def get_process(cls) -> type:
            """Return ai-toolkit's trainer class, which runs processes with `type: gracetune`.

            ai-toolkit calls this right before it creates a job's processes, so the first call also
            sets the hook on that creation.
            """
            trainer: type = find(SD_TRAINER).SDTrainer
            if not plugins:
                plugins.append(make())
                hook_jobs(plugins[0], find, partial(check, root))
            return trainer

    return GracetuneExtension


def print_notice(text: str) -> None:
    """Print a message. Logging would be lost: ai-toolkit's captioners disable it on import."""
    sys.stdout.write(f"gracetune: {text}\n")
    sys.stdout.flush()


def make_plugin() -> AIToolkitPlugin:
    """Create the object that holds gracetune's state while ai-toolkit runs.

    Ranks on one machine share the data that it holds in memory.
    """
    return AIToolkitPlugin(
        process_environment(), lambda: open_machine(0), print_notice, user_shared_folder()
    )
