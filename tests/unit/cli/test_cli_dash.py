"""`gracetune dash` starts a server, prints its address, and explains what it cannot do."""

import argparse
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.synthetic_run import write_run

from gracetune.cli import dash
from gracetune.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"


def error_of(capsys, *words):
    assert main(["dash", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_the_address_has_the_token_and_ctrl_c_ends_the_server(tmp_path):
    folder = write_run(tmp_path / "run", steps=3, total_steps=3, picture_size=8)
    command = [sys.executable, "-m", "gracetune", "dash", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed = "".join(process.stdout.readline() for _ in range(3))
            found = re.search(r"http://127.0.0.1:(\d+)/#token=([\w-]{43})\n", printed)
            with socket.create_connection(("127.0.0.1", int(found[1])), timeout=20) as connection:
                connection.sendall(
                    f"GET /api/runs HTTP/1.0\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {found[2]}\r\n\r\n".encode()
                )
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_missing_run_file_is_an_error(tmp_path, capsys):
    assert "neither a folder nor a run file" in error_of(capsys, tmp_path / "run.json")


def test_all_addresses_need_a_name(tmp_path, capsys):
    assert "--allow-host" in error_of(capsys, tmp_path, "--host", "0.0.0.0")


def test_a_taken_port_is_an_error(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port 0 takes any free one" in error_of(capsys, tmp_path, "--port", port)


@pytest.mark.parametrize("port", [-1, 70000])
def test_an_impossible_port_is_an_error(tmp_path, capsys, port):
    assert "Choose another --port" in error_of(capsys, tmp_path, "--port", port)


def test_missing_packages_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dash, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert "pip install 'gracetune[dash]'" in error_of(capsys, tmp_path)


def test_an_address_that_others_reach_is_a_warning(tmp_path):
    text = dash._greeting("192.0.2.7", 8420, "token", [tmp_path])
    assert "not encrypted" in text
    assert "not encrypted" not in dash._greeting("127.0.0.1", 8420, "token", [tmp_path])


@pytest.mark.slow
def test_a_run_file_is_planned_as_the_command_plan_does():
    parser = argparse.ArgumentParser()
    dash.add_arguments(parser)
    args = parser.parse_args([str(EXAMPLES / "demo.json"), "--machine", "gh200-96"])
    planned = dash.build_planned_run(args.paths[0], 0, args)
    assert (planned.id, planned.name) == ("p0", "demo")
    assert planned.plan["machine"]
