"""Start SimpleTuner's training script with gracetune's hooks.

accelerate runs `-m gracetune.hosts.simpletuner .../simpletuner/train.py ...` on every rank if
`ACCELERATE_EXTRA_ARGS="-m gracetune.hosts.simpletuner"` is set, for SimpleTuner's own command and
for its WebUI.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from gracetune.config.environment import claim_process_alloc_conf, process_environment
from gracetune.errors import GracetuneError, HostError
from gracetune.hosts import shared_folder
from gracetune.hosts.probe import find_installed, format_probe, probe
from gracetune.hosts.simpletuner.hooks import REQUIRED_SYMBOLS, TESTED_VERSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.hosts.probe import RequiredSymbol
    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin

INSTALL_HINT = "Install both into one environment: pip install simpletuner gracetune."
CONFIG_FLAG = "--gracetune-config="
"""Option with gracetune's settings as JSON, for jobs of the WebUI, which read no config.json."""


def check(symbols: Sequence[RequiredSymbol] = REQUIRED_SYMBOLS) -> list[str]:
    """Check that the installed SimpleTuner has every function that gracetune hooks.

    Returns the results as lines of a table; raises HostError with them if a function is missing.
    """
    installed = find_installed("simpletuner", INSTALL_HINT)
    results = probe(installed.root, symbols)
    lines = format_probe(installed, results, TESTED_VERSIONS)
    if not all(each.ok for each in results):
        raise HostError("\n".join(lines))
    return lines


def enter(argv: Sequence[str]) -> None:
    """Check SimpleTuner and set gracetune's hooks, then run the script in `argv` as `__main__`."""
    configs = [word.removeprefix(CONFIG_FLAG) for word in argv[:1] if word.startswith(CONFIG_FLAG)]
    argv = argv[len(configs) :]
    if not argv:
        raise HostError(
            "there is no script to run. accelerate starts this module: set "
            'ACCELERATE_EXTRA_ARGS="-m gracetune.hosts.simpletuner" and start SimpleTuner.'
        )
    check()
    claim_process_alloc_conf()
    from gracetune.hosts.simpletuner.hooks import install

    plugin = make_plugin()
    install(plugin, import_module)
    for text in configs:
        plugin.split_config(json.loads(text))
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


def make_plugin() -> SimpleTunerPlugin:
    """Create the object that holds gracetune's state while SimpleTuner runs.

    Ranks on one machine share the data that it holds in memory.
    """
    import torch

    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
    from gracetune.memory.platform import open_machine

    pin = torch.Tensor.pin_memory if torch.cuda.is_available() else torch.Tensor.contiguous
    return SimpleTunerPlugin(process_environment(), lambda: open_machine(0), pin, shared_folder())


if __name__ == "__main__":
    try:
        enter(sys.argv[1:])
    except GracetuneError as error:
        sys.stderr.write(f"gracetune: {error}\n")
        sys.exit(error.exit_code)
