"""Decide which requests the dashboard answers, before any of its code sees them.

`ROUTES` lists every method and path; all others are refused. `Guard` checks each request against it
and against the rules below, in one place, and adds the security headers to every response.

- The path has no percent signs, dots at the start of a part or other odd characters: no page needs
  them, so that encoded paths need not be decoded to be judged.
- `Host` is a known name, so that a foreign page cannot reach the server under a name of its own
  (DNS rebinding), and `Origin`, if there is one, is this server.
- Apart from the empty page and its scripts, a request has the token in a header. Samples, which
  elements without headers load, have the media key in their address instead. There are no cookies:
  a browser sends them to all ports of a host, that is, to every other service of the machine.
- Bodies are small, are JSON and arrive in time.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence
    from typing import Any

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
MAX_BODY_NBYTES = 64 * 1024
MAX_HEADER_NBYTES = 16 * 1024
MAX_HEADERS = 64
MAX_QUERY_LENGTH = 200
BODY_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 10.0
"""Seconds from opening a connection, or from the last response, to a complete request header."""
WRITE_TIMEOUT_S = 30.0
"""Seconds that a client may leave data unread."""
MAX_CONNECTIONS = 256
TOKEN_HEADER = b"x-gracetune-token"
"""The page's own header: a reverse proxy may need `Authorization` for its own passwords."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "media-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


@dataclass(frozen=True, slots=True)
class RouteRule:
    """A method and a path that the dashboard answers."""

    method: str
    path: str
    """As in Starlette; a name in braces stands for one part of the path."""
    handler: str
    """The name of the method of `DashboardServer` that answers."""
    public: bool = False
    """True if no token is needed: the response has nothing of any run."""
    media: bool = False
    """True if the media key in the address is enough."""


ROUTES = (
    RouteRule("GET", "/", "page", public=True),
    RouteRule("GET", "/static/{file}", "static_file", public=True),
    RouteRule("GET", "/api/runs", "list_runs"),
    RouteRule("GET", "/api/runs/{run}", "show_run"),
    RouteRule("POST", "/api/runs/{run}/requests", "send_request"),
    RouteRule("GET", "/api/events", "stream_events"),
    RouteRule("GET", "/samples/{run}/{set}/{file}", "sample_file", media=True),
    RouteRule("GET", "/thumbnails/{run}/{set}/{file}", "thumbnail", media=True),
)

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_PATHS = tuple((rule, re.compile(re.sub(r"\{\w+\}", _PART, rule.path))) for rule in ROUTES)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token in the address that is printed, and a key that opens samples only."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    media_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def accept(self, headers: Mapping[bytes, bytes], query: bytes, rule: RouteRule) -> bool:
        """Return True if a request has the token, or the key if that is enough."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and _are_equal(bearer, self.token):
            return True
        if _are_equal(headers.get(TOKEN_HEADER, b""), self.token):
            return True
        keys = [part[4:] for part in query.split(b"&") if part.startswith(b"key=")]
        return rule.media and any(_are_equal(key, self.media_key) for key in keys)


def _are_equal(given: bytes, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, expected.encode())


class Guard:
    """Refuses every request that `ROUTES` and the rules of this module do not allow."""

    def __init__(
        self, app: ASGIApp, credentials: Credentials, hosts: Sequence[str] = LOOPBACK_NAMES
    ) -> None:
        self._app = app
        self._credentials = credentials
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request on; answer others with the reason of the refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message["headers"] if pair[0] not in _SECURITY_NAMES]
                message["headers"] = [*own, *SECURITY_HEADERS]
            await send(message)

        refusal = self.check(scope)
        if refusal is not None:
            status, reason = refusal
            # The rest of the request is not read, so the connection cannot be used again.
            headers = {"connection": "close", "cache-control": "no-store"}
            response = PlainTextResponse(reason + "\n", status, headers)
            await response(scope, receive, send_guarded)
            return
        if scope["method"] == "POST":
            body = await _read_body(receive)
            if body is None:
                response = PlainTextResponse(
                    "the body is too large or too slow\n", 413, {"connection": "close"}
                )
                await response(scope, receive, send_guarded)
                return
            receive = _replay(body, receive)
        await self._app(scope, receive, send_guarded)

    def check(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """Return None if a request is allowed, otherwise the status code and the reason."""
        # The parser limits only headers that arrive in parts.
        pairs = scope["headers"]
        if len(pairs) > MAX_HEADERS or sum(map(len, sum(pairs, ()))) > MAX_HEADER_NBYTES:
            return 431, "the header is too long"
        headers = _headers(pairs)
        if headers is None or scope.get("http_version", "1.1") not in ("1.0", "1.1"):
            return 400, "a header is given twice, or the version of HTTP is unknown"
        if not self._knows_host(headers.get(b"host", b"")):
            return 421, "the Host header is not a name of this server; see --allow-host"
        if b"upgrade" in headers:
            return 400, "this server has no websockets"
        rule, refusal = _find_rule(scope)
        if rule is None:
            return refusal
        if not _is_same_origin(headers, rule):
            return 403, "the request comes from another site"
        query = scope["query_string"]
        if not rule.public and not self._credentials.accept(headers, query, rule):
            return 401, "open the address that `gracetune dash` has printed"
        return _check_body(headers, scope["method"])

    def _knows_host(self, host: bytes) -> bool:
        name = re.sub(rb":\d{1,5}$", b"", host).decode("latin-1").lower()
        return name in self._hosts


_SECURITY_NAMES = {name for name, _ in SECURITY_HEADERS}
_SINGLE = {b"host", b"origin", b"authorization", b"content-length", b"content-type", b"range"}
_SINGLE |= {TOKEN_HEADER}


def _headers(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes] | None:
    """Return headers by name; None if one that decides something is given twice."""
    found: dict[bytes, bytes] = {}
    for name, value in pairs:
        if name in found and name in _SINGLE:
            return None
        found[name] = value
    return found


def _find_rule(scope: MutableMapping[str, Any]) -> tuple[RouteRule | None, tuple[int, str]]:
    raw = scope.get("raw_path") or b""
    if len(scope["query_string"]) > MAX_QUERY_LENGTH:
        return None, (414, "the address is too long")
    path = raw.decode("latin-1")
    if path != scope["path"]:
        return None, (400, "the path contains encoded characters")
    matching = [rule for rule, pattern in _PATHS if pattern.fullmatch(path)]
    for rule in matching:
        if rule.method == scope["method"]:
            return rule, (200, "")
    if matching:
        return None, (405, "the method is not allowed here")
    return None, (404, "there is no such page")


def _is_same_origin(headers: Mapping[bytes, bytes], rule: RouteRule) -> bool:
    origin = headers.get(b"origin")
    if origin is None:
        if rule.method == "POST":
            return False
        # A link on another page may open the empty page, and nothing else.
        site = headers.get(b"sec-fetch-site", b"none")
        return site in (b"none", b"same-origin") or rule.path == "/"
    try:
        parts = urlsplit(origin.decode("ascii"))
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.encode() == headers[b"host"]


def _check_body(headers: Mapping[bytes, bytes], method: str) -> tuple[int, str] | None:
    length = headers.get(b"content-length", b"0")
    if method == "GET":
        if b"transfer-encoding" in headers or length != b"0":
            return 400, "a GET request has no body"
        return None
    if not length.isdigit() or int(length) > MAX_BODY_NBYTES:
        return 413, f"the body may have {MAX_BODY_NBYTES} bytes"
    if headers.get(b"content-type", b"").partition(b";")[0].strip() != b"application/json":
        return 415, "the body must be application/json"
    return None


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is too large or takes too long."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > MAX_BODY_NBYTES:
                    return None
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first gives a body that was already read."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits for slow clients, and a limit of connections.

    uvicorn itself waits for ever for the end of a request header, and for a client to read.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for a request, or end the connection if there are too many."""
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self.transport.abort()
        else:
            self._await_request()

    def data_received(self, data: bytes) -> None:
        """Stop waiting when the header of a request is complete."""
        super().data_received(data)
        if self._is_answering():
            self._cancel_request_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self._is_answering():
            self._await_request()

    def pause_writing(self) -> None:
        """End the connection if the client does not go on reading."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting for the client."""
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._cancel_request_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._cancel_request_timer()
        # Not `close`, which would wait until the client has read everything.
        self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _cancel_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
