"""Start SimpleTuner's training script with gracetune's hooks.

accelerate runs `-m gracetune.hosts.simpletuner .../simpletuner/train.py ...` on every rank if
`ACCELERATE_EXTRA_ARGS="-m gracetune.hosts.simpletuner"` is set, for SimpleTuner's own command and
for its WebUI.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.environment import claim_process_alloc_conf, process_environment
from gracetune.errors import GracetuneError, HostError
from gracetune.hosts.probe import find_installed, format_probe, probe
from gracetune.hosts.simpletuner.hooks import REQUIRED_SYMBOLS, TESTED_VERSIONS

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from gracetune.hosts.probe import RequiredSymbol
    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin

INSTALL_HINT = "Install both into one environment: pip install simpletuner gracetune."
ENTRY = "gracetune.hosts.simpletuner"
"""The module that accelerate must start instead of SimpleTuner's training script."""
EXTRA_ARGS = "accelerate_extra_args"
"""SimpleTuner's setting with further arguments for accelerate; in capitals, a variable."""
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


def add_entry_point(given: str, setting: str = EXTRA_ARGS.upper()) -> list[str]:
    """Return the arguments in `given`, followed by those that start gracetune's module.

    `setting` is the name of the setting that `given` comes from, for errors.
    """
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise HostError(f"{setting} is {given!r}, which is not a command line: {error}.") from None
    rest = [word for word in words if word not in ("-m", "--module", ENTRY)]
    if len(rest) < len(words) and ENTRY not in words:
        raise HostError(
            f"{setting} is {given!r}, which starts another module, but gracetune must be the "
            f"module that accelerate starts. Remove it, or replace its name by {ENTRY}."
        )
    # accelerate passes everything after the module's name on to the module.
    return [*rest, "-m", ENTRY]


def hook_command(words: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Make SimpleTuner's command `words` start training through gracetune's module.

    `environment` is changed in place. If a config.env file or the command itself has arguments for
    accelerate, SimpleTuner ignores the variable; then the command gets the merged arguments.
    """
    variable = EXTRA_ARGS.upper()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env", nargs="?")
    name = parser.parse_known_args(words)[0].env
    name = name or environment.get("ENV", environment.get("SIMPLETUNER_ENV", "default"))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{EXTRA_ARGS}", nargs="?", default="", const="")
    option, rest = parser.parse_known_args(words)
    given = (
        vars(option)[EXTRA_ARGS]
        or _read_env_file(Path("config", name, "config.env"), variable)
        or _read_env_file(Path("config/config.env"), variable)
    )
    arguments = shlex.join(add_entry_point(given or environment.get(variable, "")))
    environment[variable] = arguments
    if not given or words[0] != "train":  # webui.py adds the entry point to jobs of the WebUI
        return list(words)
    return [*rest, f"--{EXTRA_ARGS}={arguments}"]


def _read_env_file(path: Path, variable: str) -> str:
    """Return the value of a variable in a config.env file, as SimpleTuner reads it."""
    value: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        name, _, text = line.strip().removeprefix("export ").partition("=")
        if name.rstrip("+").strip() == variable:
            value = [*(value if name.endswith("+") else ()), *text.strip().strip("\"'").split()]
    return " ".join(value)


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
    if not Path(argv[0]).is_file():
        raise HostError(
            f"{argv[0]} is not a script that can be run. In ACCELERATE_EXTRA_ARGS, arguments for "
            f"accelerate come before -m {ENTRY}."
        )
    claim_process_alloc_conf()
    from gracetune.hosts.simpletuner.hooks import install_hooks

    plugin = make_plugin()
    install_hooks(plugin, import_module)
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
    from gracetune.memory.shared_memory import user_shared_folder

    pin = torch.Tensor.pin_memory if torch.cuda.is_available() else torch.Tensor.contiguous
    return SimpleTunerPlugin(
        process_environment(), lambda: open_machine(0), pin, user_shared_folder()
    )


if __name__ == "__main__":
    try:
        enter(sys.argv[1:])
    except GracetuneError as error:
        sys.stderr.write(f"gracetune: {error}\n")
        sys.exit(error.exit_code)
