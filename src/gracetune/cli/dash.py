"""`gracetune dash`: show runs, live or finished, or the plan of a run file, in a browser."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cli.main import add_set_argument
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.dashboard.live_runs import PlannedRun

HELP = (
    "Show runs in a browser: samples, losses, speed, memory and health, while they train or later. "
    "Only this machine can connect, and only with the address that is printed."
)
DEFAULT_FOLDER = Path("runs")
DEFAULT_PORT = 8420
PORTS_TO_TRY = 20
BACKLOG = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: runs, address, and the machine that a plan is for."""
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help="the output_dir of a run, a folder with several, or a run file to see its plan; "
        f"{DEFAULT_FOLDER} if left out",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=None,
        help=f"port to listen on; {DEFAULT_PORT} or the next free one if left out",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which browsers reach this server, for example that of a reverse proxy",
    )
    plan = parser.add_argument_group("for the plan of a run file")
    plan.add_argument("--machine", metavar="NAME", help="plan for a known machine, as gh200-96")
    plan.add_argument("--hbm", metavar="SIZE", help="limit of device memory, such as 96GB")
    plan.add_argument("--host-memory", metavar="SIZE", help="limit of host memory, such as 400GB")
    add_set_argument(plan)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    require_dash_packages()
    from gracetune.dashboard.guard import LOOPBACK_NAMES, Credentials
    from gracetune.dashboard.live_runs import LiveRuns
    from gracetune.dashboard.server import make_server

    paths = args.paths or [DEFAULT_FOLDER]
    # A path that does not exist yet is the output_dir of a run to come.
    files = [path for path in paths if path.is_file() or (path.suffix and not path.exists())]
    folders = [path for path in paths if path not in files]
    plans = [build_planned_run(path, number, args) for number, path in enumerate(files)]
    hosts = [*LOOPBACK_NAMES, *args.allow_host, *_own_name(args.host, args.allow_host)]
    with _bind(args.host, args.port) as listener:
        credentials = Credentials()
        port = listener.getsockname()[1]
        server = make_server(LiveRuns(folders, plans), credentials, hosts)
        print(_greeting(args.host, port, credentials.token, paths), flush=True)
        with suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
            server.run(sockets=[listener])
    return 0


def require_dash_packages() -> None:
    """Raise if the packages of the dashboard are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the dashboard needs {' and '.join(missing)}. Install it with: "
            "pip install 'gracetune[dash]'"
        )


def _own_name(host: str, allowed: Sequence[str]) -> list[str]:
    """Return the name of an address to listen on; require a name if the address has none."""
    if host in ("0.0.0.0", "::"):
        if not allowed:
            raise ConfigError(
                f"--host is {host}, which listens on all addresses. Name the ones that browsers "
                "use with --allow-host, for example --allow-host gpu1.example.org. An ssh tunnel "
                "needs neither: see docs/dashboard.md."
            )
        return []
    return [f"[{host}]" if ":" in host else host]


def _bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port, on the default port or the next free one."""
    candidates = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TO_TRY)
    error: OSError | None = None
    for candidate in candidates:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(BACKLOG)  # now: the address is printed before the server runs
        except (OSError, OverflowError) as problem:
            listener.close()
            error = problem if isinstance(problem, OSError) else OSError(str(problem))
            continue
        return listener
    raise ConfigError(
        f"--host is {host} and --port is {port or DEFAULT_PORT}, where this machine cannot listen: "
        f"{error}. Choose another --port; --port 0 takes any free one."
    )


def _greeting(host: str, port: int, token: str, paths: Sequence[Path]) -> str:
    name = f"[{host}]" if ":" in host else host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else name
    lines = [
        f"dash       {', '.join(map(str, paths))}",
        f"           http://{shown}:{port}/#token={token}",
        "           Open this address in a browser; it is valid until Ctrl-C.",
    ]
    if host not in ("127.0.0.1", "::1", "localhost"):
        lines.append(
            "warning    The connection is not encrypted: anybody on the way can read the address "
            "and the samples. Use an ssh tunnel or a reverse proxy with TLS."
        )
    return "\n".join(lines)


def build_planned_run(path: Path, number: int, args: argparse.Namespace) -> PlannedRun:
    """Plan the run of a run file, as `gracetune plan` does; a failed plan is shown as its error."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is neither a folder nor a run file. Name the output_dir of a run, a folder "
            "with runs, or a run file."
        )
    from gracetune.cli.main import read_run
    from gracetune.cli.plan import add_arguments as add_plan_arguments
    from gracetune.cli.plan import find_config, measured_rates, predict, print_substitution
    from gracetune.config.load import resolved_json
    from gracetune.dashboard.live_runs import PlannedRun
    from gracetune.memory.platform import open_machine
    from gracetune.plan.report import report_json
    from gracetune.train.preflight import check_family_exists

    run_file = read_run(path, args.overrides)
    check_family_exists(run_file.model)
    options = {"--machine": args.machine, "--hbm": args.hbm, "--host-memory": args.host_memory}
    given = [word for name, text in options.items() if text for word in (name, text)]
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    arguments = parser.parse_args([str(path), *given])
    print(f"plan       {path}", file=sys.stderr, flush=True)
    config = find_config(run_file)
    print_substitution(config, sys.stderr)
    result, heading = predict(run_file, arguments, open_machine, measured_rates, config)
    settings = json.loads(resolved_json(run_file))
    return PlannedRun(f"p{number}", path.stem, report_json(result, heading), settings)
