"""A dashboard on a real socket, and clients that speak HTTP by hand."""

import socket
import threading
from contextlib import contextmanager

from gracetune.dashboard.guard import Credentials
from gracetune.dashboard.live_runs import LiveRuns
from gracetune.dashboard.server import make_server


class Served:
    """A dashboard that listens on a real socket."""

    def __init__(self, port, credentials, runs):
        self.port, self.credentials, self.runs = port, credentials, runs
        self.host = f"127.0.0.1:{port}"

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def ask(self, head, body=b"", token=True):
        """Send the head of a request, with the token if wanted; return the whole answer."""
        lines = [head, f"Host: {self.host}", "Connection: close"]
        if token:
            lines.append(f"Authorization: Bearer {self.credentials.token}")
        with self.connect() as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            return read_to_end(connection)

    def status(self, path="/api/runs", token=True):
        return status_of(self.ask(f"GET {path} HTTP/1.1", token=token))

    def open_stream(self):
        """Open the stream of events; return its socket after the first event."""
        connection = self.connect()
        connection.sendall(
            f"GET /api/events HTTP/1.1\r\nHost: {self.host}\r\n"
            f"Authorization: Bearer {self.credentials.token}\r\n\r\n".encode()
        )
        read_until(connection, b"hello")
        return connection


def read_to_end(connection):
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_until(connection, text):
    found = b""
    while text not in found:
        part = connection.recv(65536)
        assert part, f"the connection ended before {text!r}: {found!r}"
        found += part
    return found


def status_of(answer):
    """Return the status code of an answer; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1") else 0


@contextmanager
def serving(*folders):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    credentials = Credentials()
    runs = LiveRuns(folders)
    server = make_server(runs, credentials)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(port, credentials, runs)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
