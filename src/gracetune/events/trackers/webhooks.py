"""Send a JSON message to web addresses when a run starts, ends or fails, or its health changes.

A thread sends the messages, with a timeout and a few retries, so that a slow or broken address
neither delays nor ends the run. A message has the fields of the event, and `text` and `content`
with one line in words: Slack and Mattermost show the first, Discord the second.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from gracetune.errors import hide_path, redact_urls
from gracetune.events.types import KINDS, HealthChanged, RunEnded, RunStarted
from gracetune.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.events.types import Event

    Send = Callable[[str, bytes, float], None]

TIMEOUT_S = 5.0
RETRY_S = (1.0, 4.0)
"""Seconds before the second and the third attempt to send a message."""
MAX_WAITING = 100
"""Messages that may wait to be sent; further ones are dropped."""
CLOSE_S = 20.0
"""Seconds that the end of a run waits for the last messages."""


class WebhookSink:
    """An event sink that posts some events to web addresses."""

    def __init__(
        self,
        addresses: Sequence[str],
        run: str,
        send: Send | None = None,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`run` names the run in messages; `send` posts a message, for tests."""
        self._addresses = tuple(addresses)
        self._run = run
        self._send = send or post
        self._wait = wait
        self._clock = clock
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self.failures: dict[str, str] = {}
        """Address -> the last error, without what may be a secret."""
        self._thread = threading.Thread(target=self._work, name="gracetune-webhooks", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        """Queue a message for an event that a person wants to know about; ignore others."""
        if not isinstance(event, RunStarted | RunEnded | HealthChanged):
            return
        text = f"{self._run}: {event_line(event)}"
        message = {
            "event": KINDS[type(event)],
            "time": self._clock(),
            "run": self._run,
            "host": socket.gethostname(),
            "text": text,
            "content": text,
            **asdict(event),
        }
        body = redact_urls(json.dumps(message, ensure_ascii=False, default=str))
        with suppress(queue.Full):
            self._waiting.put_nowait(body.encode("utf-8", errors="backslashreplace"))

    def close(self) -> None:
        """Wait a while for the last messages; say on the console which addresses failed."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        for address, error in self.failures.items():
            with suppress(OSError, ValueError):
                sys.stderr.write(f"logging.webhooks: {address} could not be reached: {error}\n")

    def _work(self) -> None:
        while (body := self._waiting.get()) is not None:
            for address in self._addresses:
                self._deliver(address, body)

    def _deliver(self, address: str, body: bytes) -> None:
        for pause in (*RETRY_S, None):
            try:
                self._send(address, body, TIMEOUT_S)
            except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
                self.failures[hide_path(address)] = _reason(error)
            else:
                return
            if pause is not None:
                self._wait(pause)


def event_line(event: RunStarted | RunEnded | HealthChanged) -> str:
    """Return one line about an event, in words."""
    if isinstance(event, RunStarted):
        return f"started to train {event.model} from step {event.start_step} of {event.total_steps}"
    if isinstance(event, RunEnded):
        text = f"{event.status} at step {event.step} after {format_seconds(event.seconds)}"
        return f"{text}: {event.message}" if event.message else text
    parts = (f"{event.check} is {event.level}: {event.cause}", event.action, event.advice)
    return ". ".join(part.rstrip(".") for part in parts if part)


def post(address: str, body: bytes, timeout_s: float) -> None:
    """Post a JSON message; raise if the address does not answer or refuses it."""
    headers = {"Content-Type": "application/json", "User-Agent": "gracetune"}
    request = urllib.request.Request(address, body, headers, method="POST")
    with urllib.request.urlopen(request, timeout=timeout_s):
        pass


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return redact_urls(f"{type(error).__name__}: {reason}")
