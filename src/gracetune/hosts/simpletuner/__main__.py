"""Where accelerate enters: `-m gracetune.hosts.simpletuner .../simpletuner/train.py ...`.

`ACCELERATE_EXTRA_ARGS="-m gracetune.hosts.simpletuner"` makes SimpleTuner's own command and WebUI
start it so, on every rank.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.environment import claim_process_alloc_conf, process_environment
from gracetune.errors import GracetuneError, HostError
from gracetune.hosts.probe import find_installed, probe, format_probe
from gracetune.hosts.simpletuner.hooks import TESTED_VERSIONS, REQUIRED_SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.hosts.probe import RequiredSymbol
    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin

INSTALL_HINT = "Install both into one environment: pip install simpletuner gracetune."
CONFIG_FLAG = "--gracetune-config="
"""What the WebUI's fields say: its jobs read no config.json."""


def check(needs: Sequence[RequiredSymbol] = REQUIRED_SYMBOLS) -> list[str]:
    """Probe the installed SimpleTuner; HostError with the table where it does not fit."""
    installed = find_installed("simpletuner", INSTALL_HINT)
    found = probe(installed.root, needs)
    lines = format_probe(installed, found, TESTED_VERSIONS)
    if not all(each.ok for each in found):
        raise HostError("\n".join(lines))
    return lines


def enter(argv: Sequence[str]) -> None:
    """Check, hook, and run the script as if it had been started itself."""
    said = [word.removeprefix(CONFIG_FLAG) for word in argv[:1] if word.startswith(CONFIG_FLAG)]
    argv = argv[len(said) :]
    if not argv:
        raise HostError(
            "there is no script to run. This is for accelerate: set "
            'ACCELERATE_EXTRA_ARGS="-m gracetune.hosts.simpletuner" and start SimpleTuner.'
        )
    check()
    claim_process_alloc_conf()
    from gracetune.hosts.simpletuner.hooks import install

    plugin = make_plugin()
    install(plugin, import_module)
    for text in said:
        plugin.split_config(json.loads(text))
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


def make_plugin() -> SimpleTunerPlugin:
    """The plug-in of this process; ranks of one user on one machine share staged data sets."""
    import torch

    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
    from gracetune.memory.platform import open_machine

    pin = torch.Tensor.pin_memory if torch.cuda.is_available() else torch.Tensor.contiguous
    meet_in = Path(tempfile.gettempdir()) / f"gracetune-{Path.home().name}"
    return SimpleTunerPlugin(process_environment(), lambda: open_machine(0), pin, meet_in)


if __name__ == "__main__":
    try:
        enter(sys.argv[1:])
    except GracetuneError as error:
        sys.stderr.write(f"gracetune: {error}\n")
        sys.exit(error.exit_code)
