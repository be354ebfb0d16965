"""Requests that are not explicitly allowed are refused, and the server goes on."""

import asyncio
import re
import socket
import threading

import pytest
from fakes.served_dashboard import read_to_end, read_until, serving, status_of

from gracetune.dashboard import guard, server
from gracetune.dashboard.guard import ROUTES, Credentials, Guard

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO")
VALUES = {"run": "r0", "set": "step-000060", "file": "000.png"}


@pytest.fixture(scope="module")
def served(synthetic_run):
    with serving(synthetic_run) as found:
        yield found


@pytest.fixture(autouse=True)
def _goes_on(request):
    """After every attack, the server still answers."""
    yield
    if "served" in request.fixturenames:
        assert request.getfixturevalue("served").status() == 200


def path_of(rule):
    return re.sub(r"\{(\w+)\}", lambda match: VALUES[match[1]], rule.path)


def scope(method="GET", path="/api/runs", headers=(), query=b""):
    pairs = {b"host": b"127.0.0.1:1"} | dict(headers)
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(key, value) for key, value in pairs.items() if value is not None],
    }


@pytest.fixture
def judge():
    credentials = Credentials()
    one = Guard(None, credentials, ["127.0.0.1", "localhost", "dash.example.org"])
    token = (b"x-gracetune-token", credentials.token.encode())

    def check(*args, with_token=True, headers=(), **kwargs):
        extra = [token] if with_token else []
        found = one.check(scope(*args, headers=[*extra, *headers], **kwargs))
        return 200 if found is None else found[0]

    check.credentials = credentials
    return check


JSON = (b"content-type", b"application/json")
OWN = (b"origin", b"http://127.0.0.1:1")


def test_every_route_and_method_is_refused_without_the_token(served):
    """All pairs of the table's paths and of methods, on a real socket."""
    public = {(rule.method, rule.path) for rule in ROUTES if rule.public}
    assert public == {("GET", "/"), ("GET", "/static/{file}")}
    for rule in ROUTES:
        for method in METHODS:
            answer = served.ask(f"{method} {path_of(rule)} HTTP/1.1", token=False)
            if (method, rule.path) in {("GET", "/")}:
                assert status_of(answer) == 200
            elif (method, rule.path) in public:
                assert status_of(answer) in (403, 404), (method, rule)
            else:
                assert status_of(answer) in (401, 403, 405), (method, rule, answer)
            assert b"lora" not in answer, "nothing of a run without the token"


def test_every_route_answers_with_the_token(served):
    for rule in ROUTES:
        if rule.method == "GET" and rule.path not in ("/static/{file}", "/api/events"):
            assert served.status(path_of(rule)) == 200, rule


def test_every_response_has_the_security_headers(served):
    for path, token in (
        ("/", False),
        ("/api/runs", True),
        ("/nothing", True),
        ("/api/runs", False),
    ):
        head = served.ask(f"GET {path} HTTP/1.1", token=token).partition(b"\r\n\r\n")[0].lower()
        assert b"content-security-policy: default-src 'none'" in head
        assert b"unsafe" not in head
        assert b"x-content-type-options: nosniff" in head
        assert b"referrer-policy: no-referrer" in head
        assert b"server:" not in head


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer wrong",
        b"Basic " + b"x" * 20,
        b"Bearer \xff\xfe",
    ],
)
def test_wrong_tokens_are_refused(judge, header):
    assert judge(with_token=False, headers=[(b"authorization", header)]) == 401


@pytest.mark.parametrize("token", [b"", b"wrong", b"\xff\xfe", b"\xed\xa0\x80"])
def test_wrong_tokens_of_pages_are_refused(judge, token):
    assert judge(with_token=False, headers=[(b"x-gracetune-token", token)]) == 401


def test_the_media_key_opens_samples_and_nothing_else(judge):
    """It is in addresses, which browsers keep in their history."""
    query = f"t=1&key={judge.credentials.media_key}".encode()
    for rule in ROUTES:
        if rule.method == "GET" and not rule.public:
            status = judge(path=path_of(rule), with_token=False, query=query)
            assert status == (200 if rule.handler in ("sample_file", "thumbnail") else 401)
            assert judge(path=path_of(rule), with_token=False, query=b"key=") == 401
    headers = [JSON, OWN]
    path = "/api/runs/r0/requests"
    assert judge("POST", path, with_token=False, headers=headers, query=query) == 401


def test_no_cookies_are_set_or_read(served):
    """Browsers send them to all ports of a host, and so to other services of the machine."""
    credentials = served.credentials
    for path in ("/", "/api/runs", "/samples/r0/step-000060/000.png"):
        assert b"set-cookie" not in served.ask(f"GET {path} HTTP/1.1").lower()
    for value in (credentials.token, credentials.media_key):
        head = f"GET /api/runs HTTP/1.1\r\nCookie: token={value}; x-gracetune-token={value}"
        assert status_of(served.ask(head, token=False)) == 401


@pytest.mark.parametrize(
    "host",
    [
        None,
        b"",
        b"evil.example",
        b"127.0.0.1.evil.example:8420",
        b"evil.example:127.0.0.1",
        b"127.0.0.1@evil.example",
        b"127.0.0.1:80:80",
        b"localhost:port",
        b"0.0.0.0:8420",
        b"\xff",
    ],
)
def test_other_hosts_are_refused(judge, host):
    assert judge(headers=[(b"host", host)]) == 421


@pytest.mark.parametrize("host", [b"localhost", b"LOCALHOST:9", b"dash.example.org:443"])
def test_known_hosts_are_accepted_at_any_port(judge, host):
    """An ssh tunnel may have another port at the browser's end."""
    assert judge(headers=[(b"host", host)]) == 200


@pytest.mark.parametrize(
    "origin",
    [
        b"http://evil.example",
        b"null",
        b"",
        b"http://127.0.0.1:2",
        b"file://127.0.0.1:1",
        b"http://127.0.0.1:1.evil.example",
        b"http://user@127.0.0.1:1",
        b"http://[",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_origins_are_refused(judge, method, origin):
    path = "/api/runs" if method == "GET" else "/api/runs/r0/requests"
    assert judge(method, path, headers=[JSON, (b"origin", origin)]) == 403


def test_a_post_needs_the_origin_and_json(judge):
    path = "/api/runs/r0/requests"
    assert judge("POST", path, headers=[JSON, OWN]) == 200
    assert judge("POST", path, headers=[JSON]) == 403
    assert judge("POST", path, headers=[OWN]) == 415
    form = (b"content-type", b"application/x-www-form-urlencoded")
    assert judge("POST", path, headers=[OWN, form]) == 415


@pytest.mark.parametrize("site", [b"cross-site", b"same-site"])
def test_pages_of_other_sites_load_nothing_but_the_empty_page(judge, site):
    header = [(b"sec-fetch-site", site)]
    assert judge(headers=header) == 403
    assert judge(path="/samples/r0/step-000060/000.png", headers=header) == 403
    assert judge(path="/", headers=header) == 200


TRAVERSALS = [
    "/samples/r0/../../etc/passwd",
    "/samples/r0/step-000060/../../run.json",
    "/samples/r0/step-000060/..%2f..%2frun.json",
    "/samples/r0/step-000060/%2e%2e%2frun.json",
    "/samples/r0/step-000060/..%252f..%252frun.json",
    "/samples/r0/%2e%2e/run.json",
    "/samples/r0/step-000060//etc/passwd",
    "/samples/r0/step-000060/%2fetc%2fpasswd",
    "/samples/r0/step-000060/000.png%00",
    "/samples/r0/step-000060/000.png%0d%0aX:y",
    "/samples/r0/step-000060/..\\..\\run.json",
    "/samples/r0/step-000060/%c0%ae%c0%ae/run.json",
    "/samples/r0/step-000060/.hidden.png",
    "/samples/r0/step-000060/000.json",
    "/samples/r0/step-000060/prompts.json",
    "/samples/r1/step-000060/000.png",
    "/samples/r0/step-000061/000.png",
    "/thumbnails/r0/step-000060/..%2f000.png",
    "/static/../server.py",
    "/static/%2e%2e/server.py",
    "/static/..%5cserver.py",
    "/static/server.py",
    "//static/main.js",
    "/static/main.js/",
    "/api/runs/..",
    "/api//runs",
    "/API/runs",
    "/api/runs;x",
    "http://evil.example/api/runs",
    "*",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_paths_that_lead_elsewhere_are_refused(served, path):
    answer = served.ask(f"GET {path} HTTP/1.1")
    assert status_of(answer) in (400, 404), answer
    assert b"root:" not in answer
    assert b"output_dir" not in answer


def test_too_long_addresses_and_headers_are_refused(served):
    assert served.status("/api/runs?" + "x" * 1000) == 414
    answer = served.ask("GET /api/runs HTTP/1.1\r\nX-Long: " + "y" * 100_000)
    assert status_of(answer) == 431
    many = "".join(f"\r\nX-{number}: y" for number in range(1000))
    assert status_of(served.ask(f"GET /api/runs HTTP/1.1{many}")) == 431
    assert status_of(served.ask("GET /" + "z" * 100_000 + " HTTP/1.1")) in (0, 400, 404)


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/9.9",
        "GET  / HTTP/1.1",
        "GET /",
        "\0\0\0\0",
        "GET / HTTP/1.1\r\nHost: localhost",
        "GET / HTTP/1.1\r\nContent-Length: -1",
        "GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6",
        "GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        "GET / HTTP/1.1\r\nContent-Length: 5",
        "GET / HTTP/1.1\r\n Folded: yes",
        "\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
)
def test_malformed_requests_are_refused(served, head):
    assert status_of(served.ask(head, body=b"hello")) in (0, 400)


def test_large_bodies_are_refused_before_they_are_read(served):
    origin = f"Origin: http://{served.host}\r\nContent-Type: application/json"
    path = "/api/runs/r0/requests"
    huge = served.ask(f"POST {path} HTTP/1.1\r\n{origin}\r\nContent-Length: 99999999999")
    assert status_of(huge) == 413
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    many = served.ask(
        f"POST {path} HTTP/1.1\r\n{origin}\r\nTransfer-Encoding: chunked",
        body=chunk * 4 + b"0\r\n\r\n",
    )
    assert status_of(many) == 413


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"[" * 60_000, b"\xff", b'{"request": 7}', b'{"a": 1}']
)
def test_bodies_that_are_no_requests_are_refused(served, body):
    origin = f"Origin: http://{served.host}\r\nContent-Type: application/json"
    head = f"POST /api/runs/r0/requests HTTP/1.1\r\n{origin}\r\nContent-Length: {len(body)}"
    assert status_of(served.ask(head, body)) == 400
    head = f"POST /api/runs/r0/requests HTTP/1.1\r\n{origin}\r\nContent-Length: {len(body)}"
    assert status_of(served.ask(head, body, token=False)) == 401


@pytest.mark.parametrize(
    "ranges",
    [
        "bytes=0-1,2-3",
        "bytes=" + ",".join("0-" for _ in range(500)),
        "bytes=5-2",
        "bytes=999999999-",
        "bytes=-0",
        "bytes=-",
        "bytes=a-b",
        "bytes=" + "9" * 400 + "-",
        "items=0-1",
    ],
)
def test_bombs_of_ranges_are_refused(served, ranges):
    head = f"GET /samples/r0/step-000060/000.png HTTP/1.1\r\nRange: {ranges}"
    answer = served.ask(head)
    assert status_of(answer) == 416
    assert len(answer) < 2000


def test_one_range_is_served(served, synthetic_run):
    data = (synthetic_run / "validation" / "step-000060" / "000.png").read_bytes()
    for ranges, part in (("0-9", data[:10]), ("10-", data[10:]), ("-7", data[-7:])):
        head = f"GET /samples/r0/step-000060/000.png HTTP/1.1\r\nRange: bytes={ranges}"
        head_of_answer, _, body = served.ask(head).partition(b"\r\n\r\n")
        assert head_of_answer.startswith(b"HTTP/1.1 206")
        assert body == part


def test_websockets_are_refused(served):
    head = (
        "GET /api/events HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    )
    assert status_of(served.ask(head)) == 400

    async def connect():
        sent = []

        async def send(message):
            sent.append(message)

        await Guard(None, Credentials())({"type": "websocket"}, None, send)
        return sent

    assert asyncio.run(connect()) == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: loc",
        b"POST /api/runs/r0/requests HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
        b"X-Gracetune-Token: TOKEN\r\nContent-Type: application/json\r\n"
        b'Content-Length: 50\r\n\r\n{"r',
    ],
)
def test_slow_clients_are_disconnected(served, monkeypatch, sent):
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.2)
    with served.connect() as connection:
        connection.sendall(sent.replace(b"TOKEN", served.credentials.token.encode()))
        assert status_of(read_to_end(connection)) in (0, 413)


@pytest.mark.timeout(60)
def test_a_client_that_sends_single_bytes_is_disconnected(served, monkeypatch):
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.3)
    stop = threading.Event()
    with served.connect() as connection:

        def drip():
            while not stop.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        read_to_end(connection)  # returns when the server ends the connection
        stop.set()
        thread.join()


@pytest.mark.timeout(60)
def test_a_client_that_does_not_read_is_disconnected(served, monkeypatch):
    monkeypatch.setattr(guard, "WRITE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.3)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", served.port))
    with connection:
        request = f"GET /static/uPlot.iife.min.js HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode()
        connection.settimeout(20)
        with pytest.raises(OSError):  # noqa: PT011  a broken pipe or a reset
            while True:
                connection.sendall(request * 50)


@pytest.mark.timeout(60)
def test_a_flood_of_connections_leaves_room_for_others(served, monkeypatch):
    monkeypatch.setattr(guard, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(guard, "REQUEST_TIMEOUT_S", 0.5)
    idle = [served.connect() for _ in range(60)]
    for connection in idle:
        read_to_end(connection)
        connection.close()


@pytest.mark.timeout(60)
def test_event_streams_are_limited(served, monkeypatch):
    monkeypatch.setattr(server, "MAX_STREAMS", 3)
    streams = [served.open_stream() for _ in range(3)]
    assert served.status("/api/events") == 503
    for stream in streams:
        stream.close()
    for _ in range(200):  # a closed stream is noticed when something is sent
        if served.status("/api/runs") == 200 and try_stream(served):
            return
        threading.Event().wait(0.05)
    pytest.fail("closed streams still count")


def try_stream(served):
    with served.connect() as connection:
        connection.sendall(
            f"GET /api/events HTTP/1.1\r\nHost: {served.host}\r\n"
            f"Authorization: Bearer {served.credentials.token}\r\n\r\n".encode()
        )
        return read_until(connection, b"\r\n").startswith(b"HTTP/1.1 200")
