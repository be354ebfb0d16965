"""An HTTP server that lists files, serves byte ranges, and fails on request."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

FILES = {
    "a.png": b"first",
    "deep/b ü&c.png": bytes(range(256)) * 40,
    "deep/c.txt": b"",
    "z#1.bin": b"last" * 5000,
}


class Server(ThreadingHTTPServer):
    """Serves `files`; `failures` lists, by path, how the next requests fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.failures: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.supports_ranges = True
        self.release_hanging = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"

    def ranges_of(self, name: str) -> list[str]:
        return [span for path, span in self.requests if path == name]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        name = unquote(self.path).removeprefix("/data/")
        self._head(200 if name in self.server.files else 404, len(self.server.files.get(name, b"")))

    def do_GET(self) -> None:
        name = unquote(self.path).removeprefix("/data").lstrip("/")
        if name in self.server.files:
            self._file(name)
        else:
            self._folder(name)

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.server.requests.append((name, span[0] if span else "all"))
        part, status = data, 200
        if span and self.server.supports_ranges:
            part, status = data[int(span[1]) : int(span[2] or len(data)) + 1], 206
        failures = self.server.failures.get(name, [])
        match failures.pop(0) if failures else "fine":
            case "fine":
                self._head(status, len(part))
                self.wfile.write(part)
            case "broken":
                self._head(status, len(part))
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
            case "busy":
                self._head(503, 0)
            case "forbidden":
                self._head(403, 0)
            case "short":
                self._head(status, len(part) - 1)
                self.wfile.write(part[:-1])
            case "hang":
                self.server.release_hanging.wait()
                self.close_connection = True

    def _folder(self, name: str) -> None:
        prefix = f"{name.rstrip('/')}/" if name else ""
        if self.server.failures.pop(prefix, None):
            self._head(503, 0)
            return
        below = {key.removeprefix(prefix) for key in self.server.files if key.startswith(prefix)}
        links = {f"{key.split('/')[0]}/" if "/" in key else key for key in below}
        page = "".join(f'<a href="{quote(link)}">{link}</a>\n' for link in sorted(links)).encode()
        self._head(200 if below else 404, len(page), "text/html")
        self.wfile.write(page)

    def _head(self, status: int, nbytes: int, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("Content-Type", kind)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
