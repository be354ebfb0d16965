"""Where ai-toolkit enters: our file in its `extensions` folder asks here for what it shows."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.environment import process_environment
from gracetune.hosts.ai_toolkit.clone import check
from gracetune.hosts.ai_toolkit.config_blocks import PROCESS_TYPE
from gracetune.hosts.ai_toolkit.hooks import EXTENSION, SD_TRAINER

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin


def extensions(shim: str) -> list[type]:
    """What ai-toolkit finds in our file; the clone is the folder above that of the file."""
    root = Path(shim).resolve().parents[1]
    return [extension_class(root, import_module, make_plugin)]


def extension_class(
    root: Path, find: Callable[[str], ModuleType], make: Callable[[], AIToolkitPlugin]
) -> type:
    """The extension; ai-toolkit asks it for its process right before it makes processes."""
    entered: list[AIToolkitPlugin] = []

    class GracetuneExtension(find(EXTENSION).Extension):  # type: ignore[misc]
        """The one place where ai-toolkit learns of us."""

        uid = PROCESS_TYPE
        name = "gracetune"

        @classmethod
        def get_process(cls) -> type:
            """A trainer that is always ours; jobs learn of ours on the way."""
            from gracetune.hosts.ai_toolkit.hooks import hook_jobs

            trainer: type = find(SD_TRAINER).SDTrainer
            if not entered:
                entered.append(make())
                hook_jobs(entered[0], find, partial(check, root))
            return trainer

    return GracetuneExtension


def print_notice(text: str) -> None:
    """Print, as ai-toolkit does: its captioners switch all logs off when they are imported."""
    sys.stdout.write(f"gracetune: {text}\n")
    sys.stdout.flush()


def make_plugin() -> AIToolkitPlugin:
    """The plug-in of this process; ranks of one user on one machine share what they hold."""
    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin
    from gracetune.memory.platform import open_machine

    meet_in = Path(tempfile.gettempdir()) / f"gracetune-{Path.home().name}"
    return AIToolkitPlugin(process_environment(), lambda: open_machine(0), print_notice, meet_in)
