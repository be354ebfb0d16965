"""Serve the dashboard: the page, the runs as JSON, live changes, samples, and requests to runs.

`guard.py` decides which requests arrive here. Nothing in this module opens a network connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gracetune.dashboard.guard import (
    LOOPBACK_NAMES,
    MAX_CONNECTIONS,
    MAX_HEADER_NBYTES,
    ROUTES,
    Credentials,
    Guard,
    TimedProtocol,
)
from gracetune.dashboard.series import dump_json
from gracetune.dashboard.static_files import TYPES, read_static
from gracetune.dashboard.thumbnails import ThumbnailCache
from gracetune.errors import GracetuneError
from gracetune.events.run_control import new_request_id, send_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.requests import Request

    from gracetune.dashboard.live_runs import LiveRun, LiveRuns

SAMPLE_TYPES = {".png": "image/png", ".mp4": "video/mp4", ".wav": "audio/wav"}
MAX_STREAMS = 64
"""Pages that can follow runs at the same time."""
QUEUE_LENGTH = 500
"""Changes that wait for a slow page; then it must reload."""
HEARTBEAT_S = 15.0
READ_NBYTES = 256 * 1024
DEFAULT_POINTS, MAX_POINTS = 1800, 6000
MAX_PROMPTS, MAX_PROMPT_LENGTH, MAX_EVERY = 32, 4000, 1_000_000
REQUEST_ARGUMENTS = {"validate": ("prompts",), "log": ("every",)}
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
NO_STORE = {"cache-control": "no-store"}


class DashboardServer:
    """The handlers of all routes, and the pages that follow runs."""

    def __init__(self, runs: LiveRuns, credentials: Credentials) -> None:
        self._runs = runs
        self._credentials = credentials
        self._thumbnails = ThumbnailCache()
        self._static = read_static()
        self._streams: set[asyncio.Queue[str | None]] = set()
        self._snapshots: dict[tuple[object, ...], tuple[int, bytes]] = {}

    def build_app(self, hosts: Sequence[str] = LOOPBACK_NAMES) -> Guard:
        """Return the application, behind its guard."""
        routes = [
            Route(rule.path, getattr(self, rule.handler), methods=[rule.method]) for rule in ROUTES
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        return Guard(app, self._credentials, hosts)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def publish(text: str) -> None:
            with suppress(RuntimeError):  # the loop is closed while the server stops
                loop.call_soon_threadsafe(self._fan_out, text)

        self._runs.publish_to(publish)
        try:
            yield
        finally:
            await run_in_threadpool(self._runs.stop)

    def _fan_out(self, text: str | None) -> None:
        for queue in tuple(self._streams):
            if queue.full():
                queue.get_nowait()
                queue.put_nowait(None)
                self._streams.discard(queue)
            else:
                queue.put_nowait(text)

    def end_streams(self) -> None:
        """End all event streams, so that the server can stop."""
        self._fan_out(None)

    # The page

    async def page(self, _request: Request) -> Response:
        """Return the empty page; its script fetches the runs."""
        return self._static_response("index.html")

    async def static_file(self, request: Request) -> Response:
        """Return a script or a style sheet of the page."""
        return self._static_response(request.path_params["file"])

    def _static_response(self, name: str) -> Response:
        data = self._static.get(name)
        if data is None:
            return _not_found()
        headers = {"cache-control": "no-cache"}
        return Response(data, headers=headers, media_type=TYPES.get(Path(name).suffix))

    # Runs

    async def list_runs(self, _request: Request) -> Response:
        """Return name and state of all runs, and the key with which the page loads samples."""
        return _json({"runs": self._runs.heads(), "media_key": self._credentials.media_key})

    async def show_run(self, request: Request) -> Response:
        """Return everything about a run, with a number of points that fits a page."""
        name = request.path_params["run"]
        plan = self._runs.plans.get(name)
        if plan is not None:
            return _json(plan.snapshot())
        run = self._runs.runs.get(name)
        if run is None:
            return _not_found()
        query = request.query_params
        points = min(max(_integer(query.get("points")) or DEFAULT_POINTS, 50), MAX_POINTS)
        window = (_integer(query.get("low")), _integer(query.get("high")))
        data = await run_in_threadpool(self._snapshot, run, points, *window)
        return Response(data, headers=NO_STORE, media_type="application/json")

    def _snapshot(self, run: LiveRun, points: int, low: int | None, high: int | None) -> bytes:
        """Return a snapshot as JSON; pages that open at the same time share one."""
        key = (run.id, points, low, high)
        with run.lock:
            version, status = run.state.version, run.status
            cached = self._snapshots.get(key)
            if cached is not None and cached[0] == hash((version, status, run.reading)):
                return cached[1]
            data = dump_json(run.snapshot(points, low, high)).encode()
        if len(self._snapshots) >= 16:
            self._snapshots.clear()
        self._snapshots[key] = (hash((version, status, run.reading)), data)
        return data

    async def stream_events(self, _request: Request) -> Response:
        """Send what is new in all runs as server-sent events."""
        if len(self._streams) >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages are open already\n"
            return PlainTextResponse(text, 503, {"retry-after": "10", **NO_STORE})
        queue: asyncio.Queue[str | None] = asyncio.Queue(QUEUE_LENGTH)
        self._streams.add(queue)
        return StreamingResponse(
            self._events(queue), headers=NO_STORE, media_type="text/event-stream"
        )

    async def _events(self, queue: asyncio.Queue[str | None]) -> AsyncIterator[str]:
        try:
            yield "event: hello\ndata: {}\n\n"
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        text = await queue.get()
                except TimeoutError:
                    text = ": nothing new\n\n"
                if text is None:
                    return
                yield text
        finally:
            self._streams.discard(queue)

    async def send_request(self, request: Request) -> Response:
        """Ask a run to validate, save, stop or log, as `gracetune now` does."""
        run = self._runs.runs.get(request.path_params["run"])
        if run is None:
            return _not_found()
        body = await _read_json(request)
        problem = _check_request(body)
        if problem:
            return _json({"error": problem}, 400)
        try:
            sent = await run_in_threadpool(_send, run.folder, body)
        except (GracetuneError, OSError) as error:
            return _json({"error": str(error)}, 409)
        return _json(sent)

    # Samples

    async def sample_file(self, request: Request) -> Response:
        """Return a sample file or one range of it."""
        run, names = self._sample(request)
        if run is None:
            return _not_found()
        descriptor = await run_in_threadpool(run.samples.open, *names)
        if descriptor is None:
            return _not_found()
        return file_response(descriptor, names[1], request.headers.get("range"))

    async def thumbnail(self, request: Request) -> Response:
        """Return a small version of a sample image."""
        run, names = self._sample(request)
        if run is None:
            return _not_found()

        def open_file() -> int | None:
            return run.samples.open(*names)

        key = (run.id, *names, run.samples.time_of(names[0]))
        data = await run_in_threadpool(self._thumbnails.get, key, open_file)
        if data is None:
            return _not_found()
        return Response(data, headers={"cache-control": "no-cache"}, media_type="image/webp")

    def _sample(self, request: Request) -> tuple[LiveRun | None, tuple[str, str]]:
        names = request.path_params
        return self._runs.runs.get(names["run"]), (names["set"], names["file"])


def file_response(descriptor: int, name: str, range_header: str | None) -> Response:
    """Return a file, or one range of it, and close it at the end.

    Several ranges are refused: they could ask for the same bytes many times.
    """
    size = os.fstat(descriptor).st_size
    headers = {"accept-ranges": "bytes", "cache-control": "no-cache"}
    start, stop, status = 0, size, 200
    if range_header is not None:
        found = parse_range(range_header, size)
        if found is None:
            os.close(descriptor)
            return PlainTextResponse(
                "only one range, inside the file\n", 416, {"content-range": f"bytes */{size}"}
            )
        start, stop = found
        status = 206
        headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["content-length"] = str(stop - start)
    media_type = SAMPLE_TYPES[Path(name).suffix]
    return StreamingResponse(_read(descriptor, start, stop), status, headers, media_type)


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Return start and stop of a range header; None if it is not one range inside the file."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(size - int(match[2]), 0), size
    else:
        start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
    return (start, stop) if start < stop else None


async def _read(descriptor: int, start: int, stop: int) -> AsyncIterator[bytes]:
    try:
        while start < stop:
            count = min(READ_NBYTES, stop - start)
            data = await run_in_threadpool(os.pread, descriptor, count, start)
            if not data:
                raise RuntimeError("the file became shorter while it was sent")
            start += len(data)
            yield data
    finally:
        os.close(descriptor)


def _send(folder: Path, body: Any) -> dict[str, object]:
    number = new_request_id()
    arguments = {name: value for name, value in body.items() if name != "request"}
    listener = send_request(folder, str(body["request"]), arguments, "dashboard", number)
    return {"pid": listener.pid, "host": listener.host, "id": number}


def _check_request(body: object) -> str:
    """Return what is wrong with a request to a run; empty if nothing is."""
    if not isinstance(body, dict) or not isinstance(body.get("request"), str):
        return "request is missing."
    unknown = body.keys() - {"request", *REQUEST_ARGUMENTS.get(body["request"], ())}
    if unknown:
        return f"{sorted(unknown)[0]!r} is not an argument of {body['request']!r}."
    every = body.get("every", 1)
    if not isinstance(every, int) or isinstance(every, bool) or not 1 <= every <= MAX_EVERY:
        return f"every must be a number from 1 to {MAX_EVERY}."
    prompts = body.get("prompts", [])
    if not isinstance(prompts, list) or len(prompts) > MAX_PROMPTS:
        return f"prompts must be a list of at most {MAX_PROMPTS} texts."
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_PROMPT_LENGTH for one in prompts):
        return f"each prompt must be a text of 1 to {MAX_PROMPT_LENGTH} characters."
    return ""


async def _read_json(request: Request) -> object:
    try:
        found: object = json.loads(await request.body())
    except (ValueError, RecursionError):
        return None
    return found


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,15}", text) else None


def _json(content: object, status: int = 200) -> Response:
    return Response(dump_json(content), status, NO_STORE, media_type="application/json")


def _not_found() -> Response:
    return PlainTextResponse("there is no such page\n", 404, NO_STORE)


class _Server(uvicorn.Server):
    """uvicorn's server, which ends event streams before it waits for them."""

    def __init__(self, config: uvicorn.Config, dashboard: DashboardServer) -> None:
        super().__init__(config)
        self._dashboard = dashboard

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """End all streams, then stop."""
        self._dashboard.end_streams()
        await super().shutdown(sockets)  # type: ignore[arg-type]


def make_server(
    runs: LiveRuns, credentials: Credentials, hosts: Sequence[str] = LOOPBACK_NAMES
) -> uvicorn.Server:
    """Return a server that is not bound yet: call `run(sockets=[...])`.

    Reading the runs starts here, before the server does.
    """
    runs.start()
    dashboard = DashboardServer(runs, credentials)
    config = uvicorn.Config(
        dashboard.build_app(hosts),
        http=TimedProtocol,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_NBYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
    )
    return _Server(config, dashboard)
